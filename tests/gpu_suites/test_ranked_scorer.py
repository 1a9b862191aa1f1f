"""A trainer on several processes as a scorer of the gap: it scores as one does, and replays what it
is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="a real trainer needs PyTorch")
pytest.importorskip("transformers", minversion="5", reason="a real trainer needs transformers")

from rollproof.fakes.tiny_models import make_checkpoint, second_version  # noqa: E402
from rollproof.gpu_suites.gap.engine_rollouts import Unit  # noqa: E402
from rollproof.gpu_suites.gap.ranked_scorer import (  # noqa: E402
    Division,
    RankedScorer,
    scorer_ranks,
)
from rollproof.gpu_suites.gap.scorers import HfScorer  # noqa: E402
from rollproof.replay.process_group import RankError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 2


@pytest.fixture(params=list(Division))
def division(request: pytest.FixtureRequest) -> Division:
    if request.param is Division.ULYSSES:
        pytest.importorskip("deepspeed", reason="Ulysses is that of DeepSpeed")
    return Division(request.param)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    first = make_checkpoint(folder / "A", "qwen3_moe", dtype="float32")
    return {"A": first, "B": second_version(first, folder / "B")}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with scorer_ranks() as started:
        yield started


def units(layers: int, top_k: int) -> list[Unit]:
    """Seven of version A and two of B, of unlike lengths: three of A for one process and four for
    the other, were none scored twice.
    """
    draw = np.random.default_rng(0)
    out = []
    for number in range(9):
        length = int(draw.integers(12, 30))
        ids = tuple(int(single) for single in draw.integers(3, 200, length))
        routes = np.zeros((length - 1, layers, top_k), dtype=np.int64)
        out.append(
            Unit(
                sample=number,
                version="B" if number in (2, 5) else "A",
                ids=ids,
                start=8,
                end=length,
                routes=routes,
            )
        )
    return out


def test_it_scores_as_one_process_does(
    checkpoints: dict[str, Path], ranks: Any, division: Division
) -> None:
    """Parameters sharded, or sequences sliced: the same routes, and the same logprobs up to
    rounding; its own, replayed, to the bit.
    """
    torch.set_num_threads(1)
    alone = HfScorer(checkpoints, "float32", device="cpu", batch=4)
    sharded = RankedScorer(division, checkpoints, "float32", ranks, SIZE, device="cpu", batch=2)
    mine = units(2, 2)

    single, several = alone.score(mine, None), sharded.score(mine, None)
    assert [len(unit.ids) - 1 for unit in mine] == [len(rows) for rows in several.routes]
    for left, right in zip(single.routes, several.routes, strict=True):
        assert np.array_equal(left, right)
    for left, right in zip(single.logprobs, several.logprobs, strict=True):
        assert pytest.approx(left, abs=1e-4) == right  # of up to 30

    again = sharded.repeated(mine, several)
    assert all(np.array_equal(a, b) for a, b in zip(several.logprobs, again.logprobs, strict=True))


def test_given_routes_are_executed(
    checkpoints: dict[str, Path], ranks: Any, division: Division
) -> None:
    """Another choice of experts gives other logprobs: those that one process has of it, in
    microbatches of another size too.
    """
    alone = HfScorer(checkpoints, "float32", device="cpu", batch=4)
    sharded = RankedScorer(division, checkpoints, "float32", ranks, SIZE, device="cpu", batch=4)
    mine = units(2, 2)
    native = sharded.score(mine, None)
    shifted = [np.roll(rows, 1, axis=0) for rows in native.routes]

    single, several = alone.score(mine, shifted), sharded.score(mine, shifted, other=True)
    for left, right, other in zip(single.logprobs, several.logprobs, native.logprobs, strict=True):
        assert pytest.approx(left, abs=1e-4) == right  # of up to 30
        assert np.abs(right - other).max() > 1e-3


def test_a_rank_that_fails_is_told(
    checkpoints: dict[str, Path], ranks: Any, division: Division
) -> None:
    """A checkpoint that is not there: an error that names it, not a wait for the other ranks."""
    missing = {name: path.with_name("nowhere") for name, path in checkpoints.items()}
    sharded = RankedScorer(division, missing, "float32", ranks, SIZE, device="cpu")
    with pytest.raises(RankError, match="transformers cannot load"):
        sharded.score([replace(single) for single in units(2, 2)], None)
