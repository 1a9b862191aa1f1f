"""The coded policy is a pure function, its increments agree with its arrays, and its values
identify their source.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollproof.core.case import Model
from rollproof.errors import CaseError, UsageError
from rollproof.fakes.coded.policy import CodedPolicy, VersionSpan, mixed_key

GRID = [
    (experts, top_k, dense)
    for experts, top_k, dense in itertools.product(
        (2, 3, 4, 8, 60, 64, 128, 160, 256, 257, 384, 512, 1024), (1, 2, 4, 6, 8, 10, 16), (0, 1, 3)
    )
    if top_k <= experts
]
IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)
VERSIONS = st.one_of(st.integers(-3, 2**70), st.text(max_size=8))


def policy(**changes: Any) -> CodedPolicy:
    base: dict[str, Any] = {
        "seed": 7,
        "vocab": 512,
        "num_layers": 4,
        "moe_layers": (1, 2, 3),
        "num_experts": 64,
        "top_k": 6,
    }
    return CodedPolicy(**{**base, **changes})


@given(IDS, VERSIONS, st.integers(0, 2**63))
def test_equal_policies_give_equal_values(ids: list[int], version: int | str, seed: int) -> None:
    """Two policies with equal fields agree on every value, whatever was computed before."""
    first, second = policy(seed=seed), policy(seed=seed)
    first.routes("something else", ids)
    assert first == second
    assert first.routes(version, ids).tobytes() == second.routes(version, tuple(ids)).tobytes()
    assert (
        first.logprobs(version, ids, 0).tolist() == second.logprobs(version, tuple(ids), 0).tolist()
    )
    assert first.next_token(version, first.start_state(ids)) == second.next_token(
        version, second.start_state(ids)
    )


@given(IDS, IDS, VERSIONS)
def test_the_future_does_not_reach_back(
    ids: list[int], more: list[int], version: int | str
) -> None:
    """Row i and logprob i depend on ids up to i only: more tokens change nothing before them."""
    n = len(ids)
    assert (
        policy().routes(version, ids).tolist() == policy().routes(version, ids + more)[:n].tolist()
    )
    assert (
        policy().logprobs(version, ids, 0).tolist()
        == policy().logprobs(version, ids + more, 0)[:n].tolist()
    )
    assert (
        policy().choices(version, ids).tolist()
        == policy().choices(version, ids + more)[:n].tolist()
    )


@given(IDS, st.integers(0, 60), VERSIONS, st.sampled_from([None, 1, 3, 50]), st.integers(0, 511))
def test_incremental_equals_vectorised(
    prompt: list[int], count: int, version: int | str, every: int | None, eos: int
) -> None:
    """A state extended token by token is the state of the whole sequence, and samples what
    ``choices`` says.
    """
    coded = policy(eos_every=every, eos_id=eos)
    state, ids = coded.start_state(prompt), list(prompt)
    for _ in range(count):
        token = coded.next_token(version, state)
        state = coded.extend(state, token)
        ids.append(token)
    assert coded.start_state(ids) == state
    assert coded.choices(version, ids, len(prompt)).tolist() == ids[len(prompt) :]
    assert all(0 <= token < coded.vocab for token in ids[len(prompt) :])


def test_the_empty_sequence_has_a_state_and_no_values() -> None:
    """A state can start from nothing; arrays over no tokens are empty and keep their axes."""
    coded = policy()
    assert coded.extend(coded.start_state([]), 5) == coded.start_state([5])
    assert coded.routes(0, []).shape == (0, 4, 6)
    assert coded.logprobs(0, [], 0).shape == (0,)


@given(IDS, st.data())
def test_spans_are_pieces_of_pure_versions(ids: list[int], data: st.DataObject) -> None:
    """Values over spans of versions are, position by position, those of each span's version."""
    n = len(ids)
    cut = data.draw(st.integers(0, n))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    spans: list[VersionSpan] = [(0, cut, 5), (cut, n, "six")]
    rows = np.concatenate([policy().routes(5, ids)[:cut], policy().routes("six", ids)[cut:]])[
        start:stop
    ]
    logprobs = np.concatenate(
        [policy().logprobs(5, ids, 0)[:cut], policy().logprobs("six", ids, 0)[cut:]]
    )[start:stop]
    assert rows.tolist() == policy().routes_spans(spans, ids, start, stop).tolist()
    assert logprobs.tolist() == policy().logprobs_spans(spans, ids, start, stop).tolist()


@pytest.mark.parametrize(("experts", "top_k", "dense"), GRID)
def test_cells_are_distinct_in_range_and_of_the_smallest_type(
    experts: int, top_k: int, dense: int
) -> None:
    """No cell contains an expert twice or out of range; dense layers are zeros; the type is the
    smallest that fits.
    """
    coded = policy(
        num_experts=experts, top_k=top_k, num_layers=dense + 2, moe_layers=(dense, dense + 1)
    )
    rows = coded.routes(3, list(range(300)))
    moe = np.sort(rows[:, dense:], axis=2)
    assert (300, dense + 2, top_k) == rows.shape
    assert (moe[..., 1:] != moe[..., :-1]).all() and moe.max() < experts
    assert not rows[:, :dense].any()
    assert (np.uint8 if experts <= 256 else np.uint16) == rows.dtype
    assert rows.flags.c_contiguous


@pytest.mark.parametrize(
    ("experts", "top_k"), [(2, 1), (2, 2), (8, 2), (64, 6), (128, 8), (1024, 16)]
)
def test_every_slot_uses_every_expert_evenly(experts: int, top_k: int) -> None:
    """Each slot of a cell draws experts evenly: chi-square within five deviations of its mean."""
    rows = policy(num_experts=experts, top_k=top_k).routes(0, list(range(40_000)))[:, 1:]
    for slot in range(top_k):
        counts = np.bincount(rows[..., slot].ravel().astype(np.int64), minlength=experts)
        expected = rows[..., slot].size / experts
        chi = float(((counts - expected) ** 2 / expected).sum())
        # the table of 2**14 lines is itself a sample, so its unevenness comes on top: n / 2**14
        # times
        scale = 1 + rows[..., slot].size / 2**14
        assert chi < scale * (experts - 1 + 5 * (2 * (experts - 1)) ** 0.5)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 6), (128, 8)])
@pytest.mark.parametrize("other", ["version", "position", "layer", "token", "seed"])
def test_cells_coincide_as_rarely_as_documented(experts: int, top_k: int, other: str) -> None:
    """Cells of another version, position, layer, last token or seed agree about as often as 1/p +
    2**-14 says.
    """
    coded = policy(num_experts=experts, top_k=top_k, num_layers=3, moe_layers=(0, 1, 2))
    ids = [(i * 7919) % 997 for i in range(100_000)]
    rows = coded.routes(5, ids)
    changed = {
        "version": lambda: coded.routes(6, ids),
        "position": lambda: np.roll(rows, 1, axis=0),
        "layer": lambda: np.roll(rows, 1, axis=1),
        "token": lambda: coded.routes(5, [ids[0] + 1, *ids[1:]]),
        "seed": (
            lambda: policy(
                seed=8, num_experts=experts, top_k=top_k, num_layers=3, moe_layers=(0, 1, 2)
            ).routes(5, ids)
        ),
    }[other]()
    draws = float(np.prod([experts - i for i in range(top_k)]))
    chance = 1 / draws + 2**-14
    same = int((rows == changed).all(axis=2).sum())
    mean = chance * rows.shape[0] * rows.shape[1]
    assert abs(same - mean) < 6 * mean**0.5


def test_rows_coincide_as_rarely_as_documented() -> None:
    """Of 1.6e9 pairs of rows of the default model (E=8, k=2, three layers), about 6e-6 are equal:
    no excess by structure.
    """
    coded = policy(num_experts=8, top_k=2, num_layers=3, moe_layers=(0, 1, 2))
    rows = np.concatenate([coded.routes(version, list(range(20_000))) for version in (0, 1, 2)])
    packed = rows.reshape(len(rows), -1).astype(np.int64) @ (8 ** np.arange(6))
    counts = np.unique(packed, return_counts=True)[1].astype(np.int64)
    same = int((counts * (counts - 1) // 2).sum())
    expected = len(rows) * (len(rows) - 1) / 2 / 56**3
    assert abs(same - expected) < 0.05 * expected


def test_logprobs_are_negative_finite_and_survive_float32() -> None:
    """Logprobs lie in [-8, 0), are exact in float32, and seldom coincide (2**-23 per pair)."""
    values = policy().logprobs(0, list(range(3000)), 0)
    assert np.isfinite(values).all() and values.max() < 0 and values.min() >= -8
    assert values.astype(np.float32).astype(np.float64).tolist() == values.tolist()
    assert len(np.unique(values)) >= 2995


@pytest.mark.parametrize("every", [2, 10, 200])
def test_eos_comes_about_as_often_as_configured(every: int) -> None:
    """One token in ``eos_every`` ends the sequence, within five deviations; without it, none."""
    ids = list(range(50_000))
    count = int((policy(eos_every=every, eos_id=3).choices(0, ids) == 3).sum())
    assert abs(count - 50_000 / every) < 5 * (50_000 / every) ** 0.5
    assert not (policy(eos_id=3).choices(0, ids) == 3).any()


def test_versions_of_other_types_are_other_versions() -> None:
    """The int 3 and the str "3" are different weights; an unknown version has no values."""
    assert policy().routes(3, [1, 2, 3]).tolist() != policy().routes("3", [1, 2, 3]).tolist()
    for bad in (None, True, 2.5):
        with pytest.raises(UsageError, match="an int or a str"):
            policy().routes(bad, [1])  # type: ignore[arg-type]


def test_mixed_kv_is_explained_by_no_pure_version() -> None:
    """A forward over KV of other weights gives its own values; over KV of its own weights, the pure
    ones.
    """
    ids = list(range(50))
    key = mixed_key(6, [5, 5, 6, 6])
    assert mixed_key(6, [6, 6, 6]) == 6
    assert mixed_key(6, [5, 6]) == key
    assert (
        len(
            {
                mixed_key(6, [5, 6]),
                mixed_key(6, [6, 5]),
                mixed_key(5, [5, 6]),
                mixed_key(6, ["5", 6]),
                mixed_key(6, [5]),
            }
        )
        == 5
    )
    pure = [row.tobytes() for version in (5, 6) for row in policy().routes(version, ids)]
    assert not {row.tobytes() for row in policy().routes(key, ids)} & set(pure)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9999), min_size=3, max_size=12), min_size=1, max_size=4),
    st.sets(st.integers(0, 9), min_size=1, max_size=4),
)
def test_a_row_identifies_its_prefix_and_version(
    requests: list[list[int]], versions: set[int]
) -> None:
    """Two rows are equal only if their prefixes and versions are."""
    coded = policy()
    rows = {
        (version, tuple(ids[: position + 1])): row.tobytes()
        for ids in requests
        for version in versions
        for position, row in enumerate(coded.routes(version, ids))
    }
    assert len(rows) == len(set(rows.values()))


def test_a_logprob_identifies_its_position_and_version() -> None:
    """Logprobs of several versions of a short sequence all differ."""
    values = [policy().logprobs(version, range(20), 0) for version in (4, 5, "4")]
    assert 60 == len(np.unique(np.concatenate(values)))


@given(
    st.builds(
        Model,
        num_layers=st.just(5),
        moe_layers=st.sets(st.integers(0, 4), min_size=1).map(lambda layers: tuple(sorted(layers))),
        num_experts=st.integers(16, 2000),
        top_k=st.integers(1, 16),
        vocab=st.integers(2, 200_000),
        eos_every=st.one_of(st.none(), st.integers(1, 99)),
    ),
    st.integers(-(2**63), 2**64 - 1),
)
def test_the_dict_form_is_json_and_makes_the_same_policy(model: Model, seed: int) -> None:
    """``from_dict`` of ``to_dict``, through JSON, is an equal policy with equal values."""
    coded = CodedPolicy.from_model(model, seed)
    again = CodedPolicy.from_dict(json.loads(json.dumps(coded.to_dict())))
    assert coded == again
    assert coded.routes(1, [4, 5]).tolist() == again.routes(1, [4, 5]).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 10**9}, "num_layers=1000000000 must be a whole number from 1 to 4096"),
        ({"num_experts": 2**40}, "num_experts=1099511627776 must be"),
        ({"vocab": 2**40}, "vocab=1099511627776 must be"),
        ({"vocab": 1}, "vocab=1 must be"),
        ({"top_k": 10**6}, "top_k=1000000 must be"),
        ({"top_k": 65, "num_experts": 64}, "top_k=65 must be"),
        ({"top_k": 3, "num_experts": 2}, "top_k=3 exceeds num_experts=2"),
        ({"top_k": True}, "top_k=True must be"),
        ({"top_k": 2.0}, "top_k=2.0 must be"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be"),
        ({"seed": "7"}, "seed='7' must be"),
        ({"eos_every": 0}, "eos_every=0 must be"),
        ({"eos_id": 512}, "eos_id=512 must be below vocab=512"),
        ({"moe_layers": [0, 0]}, "ascending, distinct layers"),
        ({"moe_layers": [4]}, "below num_layers=4"),
        ({"moe_layers": [[]]}, "ascending, distinct layers"),
        ({"moe_layers": "all"}, "must be a list of at most 4096 layers"),
        ({"moe_layers": list(range(5000))}, "must be a list of at most 4096 layers"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
    ],
)
def test_hostile_codings_are_refused(change: dict[str, Any], message: str) -> None:
    """A coding with impossible numbers or keys raises our own error, before anything is
    allocated.
    """
    with pytest.raises(CaseError, match=message):
        CodedPolicy.from_dict({**policy().to_dict(), **change})


def test_a_coding_that_lacks_a_key_or_is_no_mapping_is_refused() -> None:
    """A coding without a seed, or a list, raises our own error."""
    coding = policy().to_dict()
    coding.pop("seed")
    with pytest.raises(CaseError, match=r"lacks \['seed'\]"):
        CodedPolicy.from_dict(coding)
    with pytest.raises(CaseError, match="must be a mapping, not list"):
        CodedPolicy.from_dict([])  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 40), min_size=2, max_size=30), st.data())
def test_order_and_place_of_tokens_matter(ids: list[int], data: st.DataObject) -> None:
    """Two different tokens that change places change the state: the prefix hash depends on the
    order.
    """
    i = data.draw(st.integers(0, len(ids) - 1))
    j = data.draw(st.integers(0, len(ids) - 1))
    assume(ids[i] != ids[j])
    swapped = list(ids)
    swapped[i], swapped[j] = ids[j], ids[i]
    assert policy().start_state(ids) != policy().start_state(swapped)


def test_misuse_raises() -> None:
    """Positions outside the sequence, positions without a version and ids beyond 64 bits raise
    ``UsageError``.
    """
    coded = policy()
    with pytest.raises(UsageError, match="Position 4 does not lie in a sequence of 3 tokens"):
        coded.routes(0, [1, 2, 3], 4)
    with pytest.raises(UsageError, match="Positions 0 to 4 do not lie in a sequence of 3 tokens"):
        coded.routes_spans([(0, 4, 0)], [1, 2, 3], 0, 4)
    with pytest.raises(UsageError, match="cover 1 of the positions 0 to 3"):
        coded.routes_spans([(2, 9, 0)], [1, 2, 3], 0, 3)
    with pytest.raises(UsageError, match="integers of 64 bits"):
        coded.routes(0, [2**64])
    with pytest.raises(UsageError, match="integers of 64 bits"):
        coded.routes(0, ["a"])  # type: ignore[list-item]
