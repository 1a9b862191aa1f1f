"""Samples of a step, and the payloads of routes that come with them.

Token ids are unique over a step, and experts are drawn without pattern, so that a row that is
executed in the wrong place is told from the right one. One seed, one set of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, Filler, Rows
from rollproof.core.records import FinishReason, IntArray, Rollout
from rollproof.core.replay_contract import Defect
from rollproof.core.trainer_contract import terms_of
from rollproof.errors import SubjectError

__all__ = [
    "as_given",
    "as_payload",
    "dtype_of",
    "make_samples",
    "offered_defects",
    "shortest",
    "spoiled",
    "with_drawn_routes",
    "without_response",
]

_LENGTHS = ((3, 4), (2, 6), (5, 2), (4, 4), (2, 3), (6, 4))
"""Prompt and response tokens of the samples, in turn: no two neighbours are alike."""
_FIRST_TOKEN = 3
"""The smallest ids are what models take for padding and ends."""


def make_samples(contract: Contract, batch: int) -> tuple[Rollout, ...]:
    """The samples of a step, without routes; ``batch`` numbers sets of other lengths and tokens.

    Raises ``SubjectError`` where the model knows too few token ids to give each token its own.
    """
    terms = terms_of(contract)
    count = terms.microbatches * terms.microbatch_size
    room = (terms.vocab - _FIRST_TOKEN) // count
    if room < 3:
        raise SubjectError(
            f"A step has {count} samples of at least 3 tokens, each token with an id of its own,"
            f" and the model knows {terms.vocab} ids: declare fewer microbatches, or a larger"
            " vocabulary."
        )
    samples = []
    ids = (
        np.random.default_rng([batch, terms.vocab])
        .permutation(np.arange(_FIRST_TOKEN, terms.vocab))
        .tolist()
    )
    for i in range(count):
        prompt, response = _LENGTHS[(i + batch) % len(_LENGTHS)]
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


def without_response(sample: Rollout) -> Rollout:
    """The sample with its prompt alone."""
    return replace(
        sample,
        response_ids=(),
        loss_mask=np.zeros(0, dtype=np.int64),
        finish_reason=FinishReason.ABORT,
    )


def shortest(sample: Rollout) -> Rollout:
    """A sample of one prompt token and one response token: shorter than what most layouts divide it
    by.
    """
    return replace(
        sample,
        prompt_ids=sample.prompt_ids[:1],
        response_ids=sample.response_ids[:1],
        loss_mask=np.ones(1, dtype=np.int64),
    )


def dtype_of(contract: Contract) -> str:
    """The first declared integer type that holds every expert id, and the filler. Raises
    ``SubjectError`` where none does.
    """
    least = -1 if Filler.MINUS_ONE in (contract.filler, contract.final_row) else 0
    most = (contract.num_experts or 1) - 1
    for name in contract.dtypes:
        if np.iinfo(name).min <= least and most <= np.iinfo(name).max:
            return name
    raise SubjectError(
        f"The contract's dtype {contract.dtype!r} holds no type for expert ids from {least} to"
        f" {most}."
    )


def as_payload(contract: Contract, chosen: IntArray, cut: int | None = None) -> IntArray:
    """What ``chosen`` ``(tokens, MoE layers, top_k)`` is as a payload ``(rows, layers, top_k)`` of
    the contract's convention.

    ``cut`` leaves the first so many rows alone (a captured prefix). A final row of -1, which no
    router chose, is left out.
    """
    if len(chosen) and (chosen[-1] < 0).any():
        final = np.broadcast_to(np.arange(chosen.shape[2]), chosen[-1:].shape)
        whole = as_payload(contract, np.concatenate([chosen[:-1], final]), cut)
        return (
            whole[:-1]
            if contract.rows is Rows.CAPTURED_PREFIX and len(whole) == len(chosen)
            else whole
        )
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
    """The sample with routes of top_k distinct experts per row and layer, drawn at random.

    ``avoid`` ``(tokens, MoE layers, top_k)`` are experts that no row may hold, ``largest`` draws
    from the upper end of the ids alone.
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
    """The sample with routes that have ``defect``; floating-point ones are left to ``as_given``,
    for a trace holds integers.
    """
    routes = sample.routes
    assert routes is not None
    experts = contract.num_experts or 1
    wide = routes.astype(np.int32)
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
        wide[rows] = 0
    else:
        wide[rows, columns[0], 0] = values[defect]
    fits = np.iinfo(routes.dtype).min <= wide.min() and wide.max() <= np.iinfo(routes.dtype).max
    return replace(sample, routes=wide.astype(routes.dtype) if fits else wide)


def as_given(sample: Rollout, *, floating: bool) -> Rollout:
    """A sample for the trainer, whose arrays may be written to without reaching the trace;
    ``floating`` makes its routes float32.
    """
    routes: Any = None if sample.routes is None else sample.routes.copy()
    mask = None if sample.loss_mask is None else sample.loss_mask.copy()
    return replace(
        sample,
        routes=routes.astype(np.float32) if floating and routes is not None else routes,
        loss_mask=mask,
    )


def offered_defects(contract: Contract) -> Sequence[Defect]:
    """The defects that the contract's convention rules out."""
    legal = set()
    if contract.rows is Rows.CAPTURED_PREFIX:
        legal.add(Defect.SHORT)
    if contract.filler is Filler.MINUS_ONE:
        legal.add(Defect.NEGATIVE)
    if contract.top_k == 1:
        legal |= {
            Defect.NARROW,
            Defect.ZERO_ROWS,
        }  # no column is left; a row of expert 0 is a choice
    if contract.top_k == contract.num_experts:
        legal.add(Defect.WIDE)
    if contract.route_layers == 1:
        legal.add(Defect.FEW_LAYERS)
    return [defect for defect in Defect if defect not in legal]
