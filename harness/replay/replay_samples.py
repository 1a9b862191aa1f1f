"""Samples of a step, and the payloads of their routes.

Token ids are unique over a step, and experts are drawn without a pattern, so that a row in the
wrong place differs from the right one. One seed gives one set of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, Filler, Rows
from rollproof.core.records import FinishReason, IntArray, Rollout
from rollproof.core.replay_contract import Defect, ReplayTerms
from rollproof.core.trainer_contract import terms_of
from rollproof.errors import SubjectError

__all__ = [
    "as_payload",
    "dtype_of",
    "for_trainer",
    "has_room_for_long",
    "make_samples",
    "offered_defects",
    "shortest",
    "spoiled",
    "with_drawn_routes",
    "without_response",
]

_LENGTHS = ((3, 4), (2, 6), (5, 2), (4, 4), (2, 3), (6, 4))
"""Prompt and response tokens of the samples, in turn: no two neighbours have the same."""
_LONG_LENGTHS = ((7, 13), (11, 6), (4, 15), (13, 5), (5, 14), (9, 8))
"""The same of long samples. 16 rows are a usual size of a buffer or a tile: some have more."""
_LONGEST = max(map(sum, _LONG_LENGTHS))
_FIRST_TOKEN = 3
"""Models use the smallest ids for padding and ends."""


def has_room_for_long(contract: Contract) -> bool:
    """Return whether the vocabulary has unique ids for a step of long samples."""
    return _room(contract) >= _LONGEST


def make_samples(contract: Contract, batch: int, *, long: bool = False) -> tuple[Rollout, ...]:
    """Return the samples of a step without routes; each ``batch`` has other lengths and tokens.

    ``long`` samples have 17 to 20 tokens, others at most 10.

    Raises ``SubjectError`` if the vocabulary is too small for unique tokens.
    """
    terms = terms_of(contract)
    count, room = _samples_of_a_step(terms), _room(contract)
    if room < 3:
        raise SubjectError(
            f"A step has {count} samples of at least 3 tokens with unique ids, but the vocabulary"
            f" has {terms.vocab} ids: declare fewer microbatches, or a larger vocabulary."
        )
    samples = []
    lengths = _LONG_LENGTHS if long else _LENGTHS
    ids = (
        np.random.default_rng([batch, terms.vocab])
        .permutation(np.arange(_FIRST_TOKEN, terms.vocab))
        .tolist()
    )
    for i in range(count):
        prompt, response = lengths[(i + batch) % len(lengths)]
        response = min(response, max(1, room - prompt))
        prompt = min(prompt, room - response)
        tokens, ids = tuple(ids[: prompt + response]), ids[prompt + response :]
        samples.append(
            Rollout(
                request_id=f"r{i}",
                prompt_ids=tokens[:prompt],
                response_ids=tokens[prompt:],
                finish_reason=FinishReason.LENGTH,
                loss_mask=np.ones(response, dtype=np.int64),
            )
        )
    return tuple(samples)


def _samples_of_a_step(terms: ReplayTerms) -> int:
    return terms.microbatches * terms.microbatch_size


def _room(contract: Contract) -> int:
    """Return how many tokens each sample of a step may have with unique ids."""
    terms = terms_of(contract)
    return (terms.vocab - _FIRST_TOKEN) // _samples_of_a_step(terms)


def without_response(sample: Rollout) -> Rollout:
    """Return the sample with its prompt only."""
    return replace(
        sample,
        response_ids=(),
        loss_mask=np.zeros(0, dtype=np.int64),
        # engines end a call like this if it is aborted before its first token
        finish_reason=FinishReason.ABORT,
    )


def shortest(sample: Rollout) -> Rollout:
    """Cut a sample to one prompt token and one response token, fewer than most layouts divide."""
    return replace(
        sample,
        prompt_ids=sample.prompt_ids[:1],
        response_ids=sample.response_ids[:1],
        loss_mask=np.ones(1, dtype=np.int64),
    )


def dtype_of(contract: Contract) -> str:
    """Return the first declared integer type that fits every expert id and the filler.

    Raises ``SubjectError`` if none does.
    """
    low = -1 if Filler.MINUS_ONE in (contract.filler, contract.final_row) else 0
    high = (contract.num_experts or 1) - 1
    for name in contract.dtypes:
        if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
            return name
    raise SubjectError(
        f"The contract's dtype {contract.dtype!r} has no type for expert ids from {low} to {high}."
    )


def as_payload(contract: Contract, chosen: IntArray, cut: int | None = None) -> IntArray:
    """Convert ``chosen`` ``(tokens, MoE layers, top_k)`` into a payload ``(rows, layers, top_k)``.

    ``cut`` is the number of rows of a captured prefix. A final row of -1, which no router chose, is
    dropped.
    """
    if len(chosen) and (chosen[-1] < 0).any():
        final = np.broadcast_to(np.arange(chosen.shape[2]), chosen[-1:].shape)
        filled = as_payload(contract, np.concatenate([chosen[:-1], final]), cut)
        captured_final = contract.rows is Rows.CAPTURED_PREFIX and len(filled) == len(chosen)
        return filled[:-1] if captured_final else filled
    tokens, _, top_k = chosen.shape
    shape = (tokens, contract.route_layers, top_k)
    payload = np.zeros(shape, dtype=dtype_of(contract))
    payload[:, list(contract.moe_columns)] = chosen
    if contract.rows is Rows.FORWARDED:
        return payload[:-1]
    if contract.rows is Rows.ALL and tokens:
        payload[-1] = (
            np.arange(top_k)
            if contract.final_row is Filler.ARANGE
            else -1
            if contract.final_row is Filler.MINUS_ONE
            else 0
        )
    return payload if cut is None else payload[:cut]


def with_drawn_routes(
    contract: Contract,
    sample: Rollout,
    random: np.random.Generator,
    avoid: IntArray | None = None,
    *,
    largest: bool = False,
) -> Rollout:
    """Return the sample with random routes of top_k distinct experts per row and layer.

    ``avoid`` ``(tokens, MoE layers, top_k)`` are experts that a row must not have; ``largest``
    draws from the largest ids only.
    """
    experts, top_k = contract.num_experts or 1, contract.top_k or 1
    weights = random.random((sample.total, len(contract.moe_layers or ()), experts))
    if avoid is not None:
        np.put_along_axis(weights, np.maximum(avoid, 0).astype(np.int64), 2.0, axis=2)
    if largest:
        weights[:, :, : max(0, experts - max(2 * top_k, 4))] += 2.0
    drawn = weights.argsort(axis=2)[:, :, :top_k]
    return replace(sample, routes=as_payload(contract, drawn))


def spoiled(contract: Contract, sample: Rollout, defect: Defect) -> Rollout:
    """Return the sample with routes that have ``defect``."""
    # floating-point routes are made by for_trainer: a trace has integers
    routes = sample.routes
    assert routes is not None
    experts = contract.num_experts or 1
    changed = routes.astype(np.int32)
    # half of them: one row less is a convention, since engines return n - 1 rows for n tokens
    if defect is Defect.SHORT:
        return replace(sample, routes=routes[: len(routes) // 2])
    if defect is Defect.LONG:
        return replace(sample, routes=np.concatenate([routes, routes[:3]]))
    if defect is Defect.NARROW:
        return replace(sample, routes=routes[:, :, :-1])
    if defect is Defect.WIDE:
        extra = np.setdiff1d(np.arange(experts), routes[0, -1])[:1]
        return replace(
            sample,
            routes=np.concatenate(
                [routes, np.broadcast_to(extra, (*routes.shape[:2], 1)).astype(routes.dtype)],
                axis=2,
            ),
        )
    if defect is Defect.FEW_LAYERS:
        return replace(sample, routes=routes[:, :-1])
    if defect is Defect.FLOAT:
        return sample
    columns = list(contract.moe_columns)
    rows = slice(1, 3)
    values = {Defect.NEGATIVE: -1, Defect.TOO_LARGE: experts, Defect.ZERO_ROWS: 0}
    if defect is Defect.ZERO_ROWS:
        changed[rows] = 0
    else:
        changed[rows, columns[0], 0] = values[defect]
    limits = np.iinfo(routes.dtype)
    fits = limits.min <= changed.min() and changed.max() <= limits.max
    return replace(sample, routes=changed.astype(routes.dtype) if fits else changed)


def for_trainer(sample: Rollout, *, floating: bool) -> Rollout:
    """Return the sample with copied arrays; ``floating`` makes its routes float32."""
    routes: Any = None if sample.routes is None else sample.routes.copy()
    mask = None if sample.loss_mask is None else sample.loss_mask.copy()
    return replace(
        sample,
        routes=routes.astype(np.float32) if floating and routes is not None else routes,
        loss_mask=mask,
    )


def offered_defects(contract: Contract) -> Sequence[Defect]:
    """Return the defects that the contract's conventions rule out."""
    legal = set()
    if contract.rows is Rows.CAPTURED_PREFIX:
        legal.add(Defect.SHORT)
    if contract.filler is Filler.MINUS_ONE:
        legal.add(Defect.NEGATIVE)
    if contract.top_k == 1:
        # without its column a row is empty, and a row of expert 0 is a valid choice
        legal |= {Defect.NARROW, Defect.ZERO_ROWS}
    if contract.top_k == contract.num_experts:
        legal.add(Defect.WIDE)
    if contract.route_layers == 1:
        legal.add(Defect.FEW_LAYERS)
    return [defect for defect in Defect if defect not in legal]
