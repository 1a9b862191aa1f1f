"""The coded policy is a pure function, its increments agree with its arrays, and its values tell
where they come from.
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
from rollproof.fakes.coded.decode import Decoder, Source
from rollproof.fakes.coded.hashing import hashes_of_many, prefix_hashes
from rollproof.fakes.coded.policy import CodedPolicy, Stretch, VersionSpan, mixed_key

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
    """Two policies of equal fields agree on every value, whatever either was asked before."""
    one, other = policy(seed=seed), policy(seed=seed)
    one.routes("something else", ids)
    assert one == other
    assert one.routes(version, ids).tobytes() == other.routes(version, tuple(ids)).tobytes()
    assert one.logprobs(version, ids, 0).tolist() == other.logprobs(version, tuple(ids), 0).tolist()
    assert one.next_token(version, one.start_state(ids)) == other.next_token(
        version, other.start_state(ids)
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
    assert coded.draw(version, coded.start_state(prompt), count) == (ids[len(prompt) :], state)
    assert coded.choices(version, ids, len(prompt)).tolist() == ids[len(prompt) :]
    assert all(0 <= token < coded.vocab for token in ids[len(prompt) :])


@given(
    st.lists(IDS, min_size=1, max_size=5),
    st.integers(0, 40),
    VERSIONS,
    st.one_of(st.none(), st.sampled_from([1, 3, 50]), st.integers(1, 2**31)),
    st.integers(0, 2**31),
    st.one_of(st.sampled_from([2, 3, 512, 150_000, 2**31]), st.integers(2, 2**31)),
)
def test_many_sequences_draw_as_each_does_alone(
    prompts: list[list[int]],
    count: int,
    version: int | str,
    every: int | None,
    eos: int,
    vocab: int,
) -> None:
    """Drawing for several sequences at once gives each the tokens and the state that it gets by
    itself.
    """
    coded = policy(eos_every=every, eos_id=eos % vocab, vocab=vocab)
    states = [coded.start_state(prompt) for prompt in prompts]
    assert coded.draw_many(version, states, count) == [
        coded.draw(version, state, count) for state in states
    ]


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=80), max_size=12))
def test_hashes_of_many_sequences_are_those_of_each(sequences: list[list[int]]) -> None:
    """Empty ones, long ones and ids of 64 bits included."""
    assert [prefix_hashes(ids).tolist() for ids in sequences] == [
        hashes.tolist() for hashes in hashes_of_many(sequences)
    ]


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
    stretches = [(spans, ids, start, stop), ([(0, 2, 7)], [9, 9], 1, 2), (spans, ids, start, start)]
    alike: list[Stretch] = [
        ([(0, n, 5)], ids, start, stop),
        ([(0, n, 5)], ids, 0, n),
        ([(0, 3, 5)], [9, 9], 1, 2),
    ]
    for some in (stretches, alike, alike[:1], alike * 3, []):
        hashes = hashes_of_many([stretch[1] for stretch in some])
        for one, many in (("logprobs_spans", "logprobs_many"), ("routes_spans", "routes_many")):
            alone = [getattr(policy(), one)(*stretch) for stretch in some]
            together = getattr(policy(), many)(some, hashes)
            assert [values.tolist() for values in alone] == [values.tolist() for values in together]
            assert all(values.base is None for values in together)


@pytest.mark.parametrize(("experts", "top_k", "dense"), GRID)
def test_cells_are_distinct_in_range_and_of_the_smallest_type(
    experts: int, top_k: int, dense: int
) -> None:
    """No cell holds an expert twice or out of range; dense layers are zeros; the type is the
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
    """Each slot of a cell draws the experts evenly: chi-square within five deviations of its mean."""
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
    """Logprobs lie in [-8, 0), hold in float32 exactly, and seldom coincide (2**-23 per pair)."""
    values = policy().logprobs(0, list(range(3000)), 0)
    assert np.isfinite(values).all() and values.max() < 0 and values.min() >= -8
    assert values.astype(np.float32).astype(np.float64).tolist() == values.tolist()
    assert len(np.unique(values)) >= 2995


@pytest.mark.parametrize("every", [2, 10, 200])
def test_eos_comes_about_as_often_as_asked(every: int) -> None:
    """One token in ``eos_every`` ends the sequence, within five deviations; without it, none does."""
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
    """A forward over KV of other weights gives values of its own; over KV of its own weights, the
    pure ones.
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
    decoder = Decoder(policy(), {"r0": ids}, [5, 6])
    for row in policy().routes(key, ids):
        assert decoder.explain_row(row) == ()


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["r0", "r1", "r2", "r3"]),
        st.lists(st.integers(0, 9999), min_size=3, max_size=12),
        min_size=1,
    ),
    st.sets(st.integers(0, 9), min_size=1, max_size=4),
    st.data(),
)
def test_a_row_names_its_source(
    requests: dict[str, list[int]], versions: set[int], data: st.DataObject
) -> None:
    """Decoding a row gives its request, position and version, and nothing but sources with that
    prefix and version.
    """
    coded, decoder = policy(), Decoder(policy(), requests, sorted(versions))
    request = data.draw(st.sampled_from(sorted(requests)))
    position = data.draw(st.integers(0, len(requests[request]) - 1))
    version = data.draw(st.sampled_from(sorted(versions)))
    row = coded.routes(version, requests[request])[position]
    sources = decoder.explain_row(row)
    prefix = requests[request][: position + 1]
    twins = [name for name, ids in requests.items() if ids[: position + 1] == prefix]
    assert [(name, position, version) for name in twins] == [
        (s.request, s.position, s.version) for s in sources
    ]
    assert sources == decoder.explain_row(row[1:]), "the same row without its dense layer"


def test_a_cell_names_its_source_and_a_displaced_one_its_layer() -> None:
    """A cell is found in its layer; a cell of another layer is found there, with that layer named."""
    ids, coded = list(range(30)), policy(num_experts=128, top_k=8)
    decoder = Decoder(coded, {"r2": ids}, [5, 6])
    row = coded.routes(6, ids)[4]
    assert [str(s) for s in decoder.explain_cell(2, row[2])] == [
        "layer 2 of row 4 of request r2 under version 6"
    ]
    assert [str(s) for s in decoder.explain_cell(1, row[2])] == [
        "layer 2 of row 4 of request r2 under version 6"
    ]
    assert decoder.explain_cell(1, row[2], other_layers=False) == ()
    assert decoder.explain_cell(0, row[2]) == decoder.explain_cell(2, row[2])
    assert decoder.explain_cell(2, [0, 1]) == ()


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_a_row_displaced_by_layers_is_named(shift: int) -> None:
    """A row whose layers slid by one or two is traced back to its row, with the displacement."""
    ids, coded = list(range(30)), policy(num_layers=6, moe_layers=tuple(range(6)))
    row = np.roll(coded.routes(6, ids)[4], -shift, axis=0)
    found = Decoder(coded, {"r2": ids}, [5, 6]).explain_row(row)
    assert [Source(what="row", request="r2", position=4, version=6, shift=shift)] == list(found)
    assert str(found[0]) == f"row 4 of request r2 under version 6, displaced by {shift:+d} layers"


def test_a_displacement_is_not_guessed_from_few_layers() -> None:
    """Where the layers left over after a shift say too little, no displaced source is made up."""
    ids, coded = list(range(500)), policy(num_experts=8, top_k=2, num_layers=2, moe_layers=(0, 1))
    row = coded.routes(6, ids)[4][::-1]
    assert not any(source.shift for source in Decoder(coded, {"r2": ids}, [5, 6]).explain_row(row))


def test_nothing_explains_a_stranger() -> None:
    """A row or a logprob of a version or request outside the universe is explained by nothing."""
    ids = list(range(200))
    decoder = Decoder(policy(), {"r0": ids}, [0, 1])
    assert not any(decoder.explain_row(row) for row in policy().routes(2, ids))
    assert not any(decoder.explain_row(row) for row in policy().routes(0, ids[::-1]))
    assert sum(bool(decoder.explain_logprob(value)) for value in policy().logprobs(2, ids, 0)) <= 1


def test_a_logprob_names_its_source() -> None:
    """A logprob is found exactly, and within a tolerance after rounding."""
    ids = list(range(20))
    decoder = Decoder(policy(), {"r1": ids}, [4, 5])
    value = float(policy().logprobs(5, ids, 0)[7])
    assert [str(s) for s in decoder.explain_logprob(value)] == [
        "logprob of token 7 of request r1 under version 5"
    ]
    assert decoder.explain_logprob(value + 1e-7) == ()
    assert [s.position for s in decoder.explain_logprob(value + 1e-7, tolerance=2e-7)] == [7]


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
    """A coding with numbers or keys that cannot be is refused with our own error, before anything
    is allocated.
    """
    with pytest.raises(CaseError, match=message):
        CodedPolicy.from_dict({**policy().to_dict(), **change})


def test_a_coding_that_lacks_a_key_or_is_no_mapping_is_refused() -> None:
    """A coding without a seed, or that is a list, is refused with our own error."""
    coding = policy().to_dict()
    coding.pop("seed")
    with pytest.raises(CaseError, match=r"lacks \['seed'\]"):
        CodedPolicy.from_dict(coding)
    with pytest.raises(CaseError, match="must be a mapping, not list"):
        CodedPolicy.from_dict([])  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 40), min_size=2, max_size=30), st.data())
def test_order_and_place_of_tokens_matter(ids: list[int], data: st.DataObject) -> None:
    """Two different tokens that change places change the state: the prefix hash is no bag of
    tokens.
    """
    i = data.draw(st.integers(0, len(ids) - 1))
    j = data.draw(st.integers(0, len(ids) - 1))
    assume(ids[i] != ids[j])
    swapped = list(ids)
    swapped[i], swapped[j] = ids[j], ids[i]
    assert policy().start_state(ids) != policy().start_state(swapped)


def test_misuse_is_told() -> None:
    """Positions outside the sequence, positions without a version, ids beyond 64 bits and rows of
    another shape are told.
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
    with pytest.raises(
        UsageError,
        match=r"must be \(layers, top_k\) with \[3, 4\] layers and top_k=6, not \(2, 6\)",
    ):
        Decoder(coded, {}, []).explain_row(np.zeros((2, 6), dtype=np.uint8))
