"""Samples and payloads: every row is its own, and the payload is of the contract's convention."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollproof.core.contract import Contract
from rollproof.core.replay_contract import Defect
from rollproof.core.trainer_contract import terms_of
from rollproof.errors import SubjectError
from rollproof.fakes.trainers.reference_trainers import REFERENCES, ManyExperts
from rollproof.judging.expected_rows import ExpectedRows, captured_rows
from rollproof.replay.replay_samples import (
    as_payload,
    for_trainer,
    has_room_for_long,
    make_samples,
    offered_defects,
    spoiled,
    with_drawn_routes,
)
from tests.core.test_replay_contract import declared


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("batch", [0, 1])
def test_drawn_routes_are_targets_of_every_captured_row(name: str, batch: int) -> None:
    """Routes fit the contract's convention, and every row but the final one of rollouts has top_k
    distinct experts.
    """
    contract = REFERENCES[name].contract
    random = np.random.default_rng(3)
    samples = [
        with_drawn_routes(contract, sample, random) for sample in make_samples(contract, batch)
    ]
    targets = ExpectedRows(contract, samples)

    held = 0
    for sample in samples:
        assert sample.routes is not None and sample.routes.dtype.name in contract.dtypes
        assert (contract.route_layers, contract.top_k) == sample.routes.shape[1:]
        held += captured_rows(contract, sample)
    assert held * len(contract.moe_layers or ()) == int(targets.known.sum())
    tokens = [token for sample in samples for token in sample.prompt_ids + sample.response_ids]
    assert len(tokens) == len(set(tokens)) and max(tokens) < terms_of(contract).vocab


@pytest.mark.parametrize("batch", [0, 1])
def test_long_samples_reach_beyond_16_tokens(batch: int) -> None:
    """Their ids are unique too, and neighbours differ in length."""
    samples = make_samples(declared(vocab=83), batch, long=True)
    lengths = [sample.total for sample in samples]
    tokens = [token for sample in samples for token in sample.prompt_ids + sample.response_ids]
    assert all(17 <= length <= 20 for length in lengths)
    assert all(first != second for first, second in itertools.pairwise(lengths))
    assert len(tokens) == len(set(tokens))


def test_long_samples_need_a_vocabulary_with_unique_ids() -> None:
    """Four samples of 20 tokens, and three ids that models reserve."""
    assert not has_room_for_long(declared(vocab=82))
    assert has_room_for_long(declared(vocab=83))


def test_routes_that_avoid_a_choice_share_no_expert_with_it() -> None:
    """What is drawn to be disjoint is."""
    contract = declared()
    sample = make_samples(contract, 0)[0]
    avoid = np.tile(np.array([[3, 5], [0, 7]]), (sample.total, 1, 1))
    routes = with_drawn_routes(contract, sample, np.random.default_rng(0), avoid).routes

    assert routes is not None
    assert not np.isin(routes[:, 1], [3, 5]).any() and not np.isin(routes[:, 2], [0, 7]).any()


def test_the_largest_ids_do_not_fit_a_byte() -> None:
    """With 300 experts the type is the first declared one that holds them, and the largest ids are
    among those drawn.
    """
    sample = make_samples(ManyExperts.contract, 0)[0]
    routes = with_drawn_routes(
        ManyExperts.contract, sample, np.random.default_rng(0), largest=True
    ).routes

    assert routes is not None and "int16" == routes.dtype.name and 295 < routes.max() <= 299


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({}, 5), ({"rows": "T", "final_row": "arange"}, 6), ({"rows": "captured-prefix"}, 6)],
)
def test_rows_follow_the_contract(changes: dict[str, str], rows: int) -> None:
    """T - 1 rows, T with filler in the final one, or what was captured; the dense layer has a
    column of zeros.
    """
    contract = declared(**changes)
    payload = as_payload(contract, np.tile(np.array([[3, 5], [0, 7]]), (6, 1, 1)))

    assert (rows, 3, 2) == payload.shape
    assert [[0, 0], [3, 5], [0, 7]] == payload[0].tolist()
    assert ([[0, 1]] * 3 if "final_row" in changes else [[0, 0], [3, 5], [0, 7]]) == payload[
        -1
    ].tolist()


def test_a_final_row_that_no_router_chose_is_left_out() -> None:
    """A trainer that does not forward final tokens has no choice to replay there."""
    chosen = np.tile(np.array([[3, 5], [0, 7]]), (6, 1, 1))
    chosen[-1] = -1

    assert 5 == len(as_payload(declared(rows="captured-prefix"), chosen))
    assert 5 == len(as_payload(declared(), chosen))


@pytest.mark.parametrize("defect", Defect)
def test_a_defect_leaves_no_row_without_its_mark(defect: Defect) -> None:
    """Spoiled routes differ from the good ones, in the trace or, for floating point, in what the
    trainer is given.
    """
    contract = declared()
    good = with_drawn_routes(contract, make_samples(contract, 0)[0], np.random.default_rng(1))
    bad = for_trainer(spoiled(contract, good, defect), floating=defect is Defect.FLOAT)

    assert good.routes is not None and bad.routes is not None
    assert (
        good.routes.shape != bad.routes.shape
        or good.routes.dtype != bad.routes.dtype
        or not np.array_equal(good.routes, bad.routes)
    )


@pytest.mark.parametrize(
    ("contract", "missing"),
    [
        (declared(rows="captured-prefix"), {Defect.SHORT}),
        (declared(filler="minus-one", dtype="int16"), {Defect.NEGATIVE}),
        (declared(top_k=1), {Defect.NARROW, Defect.ZERO_ROWS}),
        (declared(top_k=8), {Defect.WIDE}),
        (declared(layer_axis="moe", moe_layers=(2,)), {Defect.FEW_LAYERS}),
    ],
)
def test_a_row_that_a_convention_allows_is_no_defect(
    contract: Contract, missing: set[Defect]
) -> None:
    """Defects are made only where the contract rules them out."""
    assert missing == set(Defect) - set(offered_defects(contract))


def test_too_few_token_ids_are_reported() -> None:
    """A model that cannot give each token its own id cannot be judged, and the text says what to
    declare.
    """
    with pytest.raises(
        SubjectError,
        match=(
            r"4 samples of at least 3 tokens.* vocabulary has 12 ids: declare fewer microbatches"
        ),
    ):
        make_samples(declared(vocab=12), 0)


def test_a_small_vocabulary_makes_short_samples() -> None:
    """Samples shrink until every token has an id of its own."""
    samples = make_samples(declared(vocab=20), 0)

    assert all(
        3 <= sample.total <= 4 and sample.response_ids and sample.prompt_ids for sample in samples
    )


def test_no_declared_type_for_the_ids_is_reported() -> None:
    """A dtype that does not hold every expert id is a fault of the contract."""
    contract = declared(num_experts=300, dtype="uint8")
    with pytest.raises(
        SubjectError, match="dtype 'uint8' has no type for expert ids from 0 to 299"
    ):
        with_drawn_routes(contract, make_samples(contract, 0)[0], np.random.default_rng(0))
