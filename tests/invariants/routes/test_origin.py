"""How much must agree until wrong rows are traced to where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rollproof.judging.judge import Judgement
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
