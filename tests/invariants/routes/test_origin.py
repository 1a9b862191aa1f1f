"""How much must agree until wrong rows are traced to where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Reply
from rollproof.core.records import Span
from rollproof.invariants.routes.content import routes_provenance
from rollproof.judging.judge import Judgement
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge
from tests.support.routed_requests import RoutedRequest, Segment, failing, only_finding

_EXPERTS = 16
"""With one expert a token, a cell that agrees carries exactly 4 bits."""
_ROWS = 9
"""Those of 5 prompt tokens and 5 sampled ones."""


@dataclass
class _Routed(RoutedRequest):
    """A request of one call whose router chose ``chosen``, ``(rows, layers)``."""

    chosen: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))

    def rows(self, start: int, stop: int, version: int) -> np.ndarray:
        return self.chosen[start:stop, :, None].astype(np.int32)

    def found(self, delivered: np.ndarray) -> Judgement:
        """Return the verdicts on a sample with the choices ``delivered``."""
        return self.judged(delivered[:, :, None].astype(np.int32))


def _choices(layers: int) -> np.ndarray:
    """Return ``(rows, layers)`` of experts from 1 to 8, all different within a row."""
    order = np.random.default_rng(layers).random((_ROWS, 8)).argsort(axis=1)
    return 1 + order[:, :layers]


def _request(chosen: np.ndarray, experts: int = _EXPERTS) -> _Routed:
    layers = chosen.shape[1]
    changes: dict[str, Any] = {
        "num_layers": layers,
        "moe_layers": tuple(range(layers)),
        "num_experts": experts,
        "top_k": 1,
        "dtype": "int32",
    }
    return _Routed(segments=(Segment(5),), changes=changes, chosen=chosen)


def _elsewhere(delivered: np.ndarray, *columns: int) -> None:
    """Put experts into columns that no router of these requests chose."""
    for column in columns:
        delivered[:, column] = 9 + (np.arange(len(delivered)) + column) % 7


@pytest.mark.parametrize(
    ("cells", "check"), [(4, "routes.layer"), (3, "routes.content")], ids=["12 bits", "8 bits"]
)
def test_an_exchange_of_layers_needs_twelve_bits(cells: int, check: str) -> None:
    """Four cells of 4 bits, less 2 bits for each of the two columns, which was looked for among
    four; with one cell less the rows are only wrong.
    """
    chosen = _choices(4)
    delivered = chosen.copy()
    delivered[2:4, 1] = chosen[2:4, 2]
    delivered[2:cells, 2] = chosen[2:cells, 1]
    assert {check} == failing(_request(chosen).found(delivered))


def test_one_column_with_the_choices_of_another_layer_is_no_exchange() -> None:
    """Two columns are: each holds the other's choices."""
    chosen = _choices(4)
    one, two = chosen.copy(), chosen.copy()
    one[:, 1] = chosen[:, 2]
    two[:, [1, 2]] = chosen[:, [2, 1]]
    assert {"routes.content"} == failing(_request(chosen).found(one))
    assert {"routes.layer"} == failing(_request(chosen).found(two))


@pytest.mark.parametrize(
    ("others", "check"), [((2, 3), "routes.layer"), ((2, 3, 4), "routes.content")]
)
def test_half_of_the_wrong_columns_must_hold_other_layers(
    others: tuple[int, ...], check: str
) -> None:
    """Two exchanged columns of four wrong ones explain the sample, and of five they do not."""
    chosen = _choices(6)
    delivered = chosen.copy()
    delivered[:, [0, 1]] = chosen[:, [1, 0]]
    _elsewhere(delivered, *others)
    assert {check} == failing(_request(chosen).found(delivered))


@pytest.mark.parametrize(
    ("layers", "shift", "named"),
    [(4, 2, True), (4, 3, False), (5, 2, True), (5, 3, False)],
)
def test_a_shift_must_leave_half_of_the_layers(layers: int, shift: int, named: bool) -> None:
    """At least half of the columns hold the choice of a layer further on; the others hold nothing
    that is known.
    """
    chosen = _choices(layers)
    delivered = chosen.copy()
    delivered[:, : layers - shift] = chosen[:, shift:]
    _elsewhere(delivered, *range(layers - shift, layers))
    judgement = _request(chosen).found(delivered)
    if named:
        observed = only_finding(judgement, "routes.layer").observed
        assert f"columns shifted by +{shift}" in observed
    else:
        assert {"routes.content"} == failing(judgement)


def test_columns_that_are_right_show_no_shift() -> None:
    """A router that chooses one expert in all layers looks as if its columns were shifted, although
    only the last one is wrong.
    """
    chosen = np.repeat(1 + np.arange(_ROWS)[:, None] % 8, 3, axis=1)
    delivered = chosen.copy()
    delivered[:4, 2] = 9 + np.arange(4)
    assert {"routes.content"} == failing(_request(chosen).found(delivered))


@pytest.mark.parametrize(
    ("layers", "experts", "check"),
    [(3, 16, "routes.position"), (3, 13, "routes.content"), (2, 16, "routes.content")],
    ids=["12 bits", "11.1 bits", "8 bits"],
)
def test_a_row_of_another_position_needs_twelve_bits(layers: int, experts: int, check: str) -> None:
    """Three cells of 4 bits name the position; fewer cells, or fewer experts, may agree by
    chance.
    """
    chosen = _choices(layers)
    delivered = chosen.copy()
    delivered[2] = chosen[6]
    assert {check} == failing(_request(chosen, experts).found(delivered))


def _layers(count: int) -> dict[str, Any]:
    return {"num_layers": count, "moe_layers": tuple(range(count)), "dtype": "int32"}


@pytest.mark.parametrize(
    ("layers", "columns", "check"),
    [
        (1, [0], "routes.captured"),
        (2, [0, 1], "routes.captured"),
        (2, [1], "routes.distinct"),
    ],
    ids=["the only layer", "two layers", "one of two layers"],
)
def test_ids_that_no_router_chooses_need_no_twelve_bits(
    layers: int, columns: list[int], check: str
) -> None:
    """A row of zeros is filler even if its cells carry 6 bits each, unless it is one cell of
    several layers.
    """
    story = RoutedRequest(changes=_layers(layers))
    rows = story.good().copy()
    rows[2, columns] = 0
    assert {check} == failing(story.judged(rows))


@pytest.mark.parametrize("filled", [1, 2, 3, 4, 5])
def test_three_rows_with_a_cause_of_their_own_are_a_second_fault(filled: int) -> None:
    """Fewer at the edge of a fault are counted with it, whatever they hold; more than the first
    cause explains are never its edge.
    """
    story = RoutedRequest(segments=(Segment(8),))
    rows = story.good().copy()
    rows[:4] = story.good()[1:5]
    rows[6 : 6 + filled] = 0
    judged = story.judged(rows)
    if filled < 3:
        observed = only_finding(judged, "routes.position").observed
        places = "position 6" if filled == 1 else "positions 6-7"
        assert f"so in 4 of 12 rows (positions 0-3); {filled} more row" in observed
        assert f"({places}) of the same sample {'is' if filled == 1 else 'are'} also" in observed
    else:
        assert {"routes.position", "routes.captured"} == failing(judged)


@pytest.mark.parametrize(
    ("ids", "check"),
    [((-1, 3), "routes.in-range"), ((8, 3), "routes.in-range"), ((3, 3), "routes.distinct")],
)
def test_ids_out_of_range_or_repeated_are_another_checks(ids: tuple[int, int], check: str) -> None:
    """What is no choice of a router is reported for what it is."""
    story = RoutedRequest(changes=_layers(3))
    rows = story.good().copy()
    rows[4, 1] = ids
    assert {check} == failing(story.judged(rows))


@pytest.mark.parametrize("expert", [0, 7])
def test_the_first_and_the_last_expert_are_choices(expert: int) -> None:
    """A wrong row with them is one of unknown origin."""
    story = RoutedRequest(changes=_layers(3))
    rows = story.good().copy()
    row = next(i for i, cell in enumerate(rows[:, 1]) if expert not in cell)
    rows[row, 1, 0] = expert
    assert {"routes.content"} == failing(story.judged(rows))


def test_rows_of_a_sample_with_an_offset_are_traced_back() -> None:
    """Its first row is that of position 4."""
    story = RoutedRequest()
    rows = story.good()[4:].copy()
    rows[1:] = story.good()[4:8]
    finding = only_finding(story.judged(rows, routes_start=4), "routes.position")
    assert finding.observed == (
        "the row at position 5 is that of position 4; so in 4 of 5 rows (positions 5-8)"
    )


@pytest.mark.parametrize("with_truth", [False, True])
def test_a_row_has_the_version_that_computed_it(with_truth: bool) -> None:
    """One row of the later call came out of a cache of version 7; without the truth the version
    that the engine showed counts.
    """
    story = RoutedRequest(with_truth=with_truth)
    later, rows = story.returned(1), story.good().copy()
    assert later is not None
    rows[2:6] = later[2:6]
    trace = story.trace(rows)
    if with_truth:
        versions = (5, 5, 7, 2, 2, 2, 2, 2, 2)
        spans = tuple(Span(start=i, end=i + 1, version=v) for i, v in enumerate(versions))
        last = [event for event in trace.events if isinstance(event, Reply)][-1]
        trace = trace.with_events(
            [replace(e, true_rows=spans) if e is last else e for e in trace.events]
        )
    judged = judge(trace, Registry([routes_provenance]))
    (finding,) = judged["routes.provenance"].findings
    version = 7 if with_truth else 2
    assert finding.observed.startswith(f"it is that of segment 1 (version {version})")
    assert version == finding.where["version"]
