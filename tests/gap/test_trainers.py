"""Rollouts that a trainer scores anew: each token under the weights that sampled it, with replay
and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.cli.app import run
from rollproof.core.records import FinishReason, Rollout, Span, Version
from rollproof.errors import GapError, UsageError
from rollproof.gap import GapTrainer, Scored, measure_rollouts, score_rollouts
from rollproof.gap.hf_trainer import HfTrainer
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace
from tests.support.resumed_trace import ROLLOUT, resumed
from tests.support.tiny_rollouts import checkpoint, sample, trace_of


class Constant:
    """Scores every token of version v as -v, and remembers what it was asked."""

    def __init__(self, routes: Any = None) -> None:
        self.asked: list[tuple[Version, tuple[str, ...], bool]] = []
        self.routes = routes

    def score(self, rollouts: Sequence[Rollout], *, version: Version, replay: bool) -> list[Scored]:
        self.asked.append((version, tuple(one.request_id for one in rollouts), replay))
        return [
            Scored(
                logprobs=np.full(len(one.response_ids), -float(version or 9)), routes=self.routes
            )
            for one in rollouts
        ]


class Wrong:
    """Scores wrongly: as ``made`` says."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def score(self, rollouts: Sequence[Rollout], *, version: Version, replay: bool) -> Any:
        return [self.made for _ in rollouts] if self.made is not None else []


def _rollout(name: str = "r0", **fields: Any) -> Rollout:
    own = {
        "prompt_ids": (1, 2),
        "response_ids": (3, 4, 5),
        "logprobs": np.array([-1.0, -2.0, -3.0]),
    } | fields
    return Rollout(request_id=name, finish_reason=FinishReason.LENGTH, **own)


def test_a_segment_is_scored_under_its_own_version(tmp_path: Path) -> None:
    """Of a rollout resumed under new weights each token gets the score of the version that sampled
    it; each version is asked for once.
    """
    dump_trace(resumed(requests=("r0", "r1")), tmp_path / "trace.json")
    trainer = Constant()
    assert isinstance(trainer, GapTrainer)
    pairs = score_rollouts(tmp_path / "trace.json", trainer)
    assert [-1.0, -1.0, -2.0, -2.0] * 2 == pairs.trainer.tolist()
    assert ROLLOUT.tolist() * 2 == pairs.rollout.tolist()
    assert [(1, ("r0", "r1"), False), (2, ("r0", "r1"), False)] == trainer.asked
    assert {} == pairs.by_version


def test_every_version_is_scored_on_request() -> None:
    """With ``every_version`` all rollouts are scored under all versions, which shows wrong tags."""
    rollouts = [_rollout("r0", version=1), _rollout("r1", version=2)]
    pairs = score_rollouts(rollouts, Constant(), every_version=True)
    assert {1: [-1.0] * 6, 2: [-2.0] * 6} == {
        version: column.tolist() for version, column in pairs.by_version.items()
    }
    assert [-1.0] * 3 + [-2.0] * 3 == pairs.trainer.tolist()


def test_the_fixture_takes_a_trainer(pytester: pytest.Pytester) -> None:
    """With ``trainer=`` the fixture scores rollouts and asserts; a trainer that is far off fails
    the test with the report.
    """
    pytester.makepyfile("""
        import numpy as np
        from rollproof import Rollout, FinishReason
        from rollproof.gap import Scored

        class Trainer:
            def __init__(self, off):
                self.off = off

            def score(self, rollouts, *, version, replay):
                noise = self.off * np.random.default_rng(0).random(20)
                return [Scored(logprobs=rollout.logprobs - noise) for rollout in rollouts]

        def rollouts():
            draw = lambda: -np.random.default_rng(1).exponential(0.4, 20)
            common = {"prompt_ids": (1,), "finish_reason": FinishReason.LENGTH}
            return [
                Rollout(request_id=f"r{i}", response_ids=(2,) * 20, logprobs=draw(), **common)
                for i in range(20)
            ]

        def test_near(rollproof_gap):
            report = rollproof_gap(rollouts(), trainer=Trainer(1e-6), limits="tiny-fp32")
            assert report.panel.n_tokens == 400

        def test_far(rollproof_gap):
            rollproof_gap(rollouts(), trainer=Trainer(3.0), limits="tiny-fp32")
    """)
    pytester.runpytest("-p", "no:hypothesispytest", "-p", "no:cacheprovider").assert_outcomes(
        passed=1, failed=1
    )


def test_rollouts_without_versions_are_scored_once() -> None:
    """Where nothing tells versions the trainer is asked for ``None``."""
    trainer = Constant()
    assert [-9.0] * 3 == score_rollouts([_rollout()], trainer).trainer.tolist()
    assert [(None, ("r0",), False)] == trainer.asked


def test_routes_are_those_of_the_forward_that_gave_the_logprob() -> None:
    """The row of a token is that of the token before it, on either side; with other shapes there is
    no agreement to measure.
    """
    rows = np.arange(4)[:, None, None] + np.array([[[0, 1]]])
    rollout = _rollout(routes=rows)
    pairs = score_rollouts([rollout], Constant(routes=rows[1:4]))
    assert [1, 2, 3] == pairs.routes["rollout_routes"][:, 0, 0].tolist()
    assert (pairs.routes["rollout_routes"] == pairs.routes["trainer_routes"]).all()
    assert {} == dict(score_rollouts([rollout], Constant(routes=rows)).routes)


def test_rows_of_the_latest_prefill_are_compared_with_the_last_weights() -> None:
    """Where a resumed call's prefill overwrites earlier rows, the trainer's routes are those of the
    last version.
    """

    class Routed(Constant):
        def score(
            self, rollouts: Sequence[Rollout], *, version: Version, replay: bool
        ) -> list[Scored]:
            return [
                Scored(logprobs=np.zeros(3), routes=np.full((3, 1, 2), int(version or 0)))
                for _ in rollouts
            ]

    rollout = _rollout(routes=np.zeros((4, 1, 2), int), token_versions=(1, 1, 2))
    for provenance, expected in (("as-sampled", [1, 1, 2]), ("latest-prefill", [2, 2, 2])):
        pairs = score_rollouts([rollout], Routed(), provenance=provenance)
        assert expected == pairs.routes["trainer_routes"][:, 0, 0].tolist()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "returned 0 scores for 1 rollouts"),
        (Scored(logprobs=np.zeros(2)), r"shape \(2,\), not \(3,\)"),
        (np.zeros((3, 1)), r"shape \(3, 1\)"),
        (["a", "b", "c"], "are not numbers"),
    ],
)
def test_a_trainer_that_answers_wrongly_is_told(made: Any, words: str) -> None:
    """Scores that are too few, of another shape or no numbers raise an error with the rollout."""
    with pytest.raises(GapError, match=words):
        score_rollouts([_rollout()], Wrong(made))


@pytest.mark.parametrize(
    ("rollouts", "words"),
    [
        ([], "no rollout with a response token"),
        ([_rollout(logprobs=None)], "have no logprobs"),
        ([_rollout(), _rollout()], "Two rollouts are called 'r0'"),
        ([{"request_id": "r0"}], "must be a rollproof.Rollout, not dict"),
    ],
)
def test_rollouts_that_cannot_be_scored_are_refused(rollouts: Any, words: str) -> None:
    """What holds nothing to compare is an error before the trainer is asked."""
    with pytest.raises(GapError, match=words):
        score_rollouts(rollouts, Constant())


def test_replay_needs_routes() -> None:
    """Replay without routes is refused, and says what to record."""
    with pytest.raises(GapError, match=r"no routes to replay .*: record them with routes"):
        score_rollouts([_rollout()], Constant(), replay=True)


def test_a_spec_of_several_versions_is_read() -> None:
    """``VERSION=PATH`` pairs and a place for the version name a checkpoint each; anything else says
    how to write it.
    """
    assert {"1": "a", "2": "b"} == HfTrainer.of("1=a,2=b").paths
    assert "runs/{version}" == HfTrainer.of("runs/{version}").paths
    with pytest.raises(UsageError, match="hf:VERSION=PATH"):
        HfTrainer.of("1=a,b")
    with pytest.raises(
        GapError, match="No checkpoint is named for version 3; there are those of 1, 2"
    ):
        HfTrainer.of("1=a,2=b").score([_rollout()], version=3, replay=False)
    with pytest.raises(GapError, match="needs a version"):
        HfTrainer.of("runs/{version}").score([_rollout()], version=None, replay=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of a tiny MoE."""
    pytest.importorskip("torch", reason="a real trainer needs torch and transformers")
    pytest.importorskip("transformers", reason="a real trainer needs torch and transformers")
    folder = tmp_path_factory.mktemp("versions")
    return checkpoint(folder / "0", seed=0), checkpoint(folder / "1", seed=1)


def test_hf_scores_resumed_rollouts_as_they_were_sampled(pair: tuple[Path, Path]) -> None:
    """The same weights in the same precision give the sampler's logprobs in both segments; one
    version alone does not.
    """
    rollouts = sample(pair)
    trainer = HfTrainer({"0": str(pair[0]), "1": str(pair[1])}, rows=60)
    pairs = score_rollouts(rollouts, trainer)
    assert float(np.abs(pairs.trainer - pairs.rollout).max()) < 1e-4
    single = HfTrainer(str(pair[0]))
    report = measure_rollouts(rollouts, single, resamples=100)
    assert report.panel.metrics["abs_diff_mean"].value > 0.1
    assert any("though versions 0, 1 sampled them" in note for note in report.notes)


def test_hf_replays_the_rollouts_routes(pair: tuple[Path, Path]) -> None:
    """A bf16 sampler's experts replayed in a float32 trainer agree in every slot, and bring it
    nearer than its own routing does.
    """
    rollouts = sample(pair[:1], count=12, each=24, dtype="bfloat16")
    trainer = HfTrainer(str(pair[0]), dtype="float32")
    native, replayed = (
        score_rollouts(rollouts, trainer),
        score_rollouts(rollouts, trainer, replay=True),
    )
    assert (native.routes["rollout_routes"] != native.routes["trainer_routes"]).any()
    assert (replayed.routes["rollout_routes"] == replayed.routes["trainer_routes"]).all()
    assert (
        np.abs(replayed.trainer - replayed.rollout).mean()
        < np.abs(native.trainer - native.rollout).mean()
    )


def test_a_temperature_is_that_of_the_law(pair: tuple[Path, Path]) -> None:
    """Logprobs at a temperature are those of the softmax of the logits over it."""
    import torch

    from tests.support.tiny_rollouts import load

    rollout = sample(pair[:1], count=1)[0]
    found = (
        HfTrainer(str(pair[0]), temperature=0.5)
        .score([rollout], version=0, replay=False)[0]
        .logprobs
    )
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    with torch.no_grad():
        law = torch.log_softmax(load(pair[0])(ids).logits.double() / 0.5, -1)[
            0, len(rollout.prompt_ids) - 1 : -1
        ]
    np.testing.assert_allclose(
        found, law.gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0], atol=1e-4
    )


def test_the_command_scores_replays_and_localises(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command scores a trace under a checkpoint a version, replays its routes, and names where
    another checkpoint parts from it.
    """
    trace = tmp_path / "trace.json"
    dump_trace(trace_of(sample(pair, count=20)), trace)
    spec = f"hf:0={pair[0]},1={pair[1]}"
    assert ExitCode.PASS == run(
        [
            "gap",
            "--rollout",
            str(trace),
            "--trainer",
            spec,
            "--limits",
            "tiny-fp32",
            "--resamples",
            "100",
        ]
    )
    assert "numerics only" in capsys.readouterr().out
    command = [
        "gap",
        "--rollout",
        str(trace),
        "--trainer",
        f"hf:{pair[0].parent}/{{version}}",
        "--limits",
        "tiny-fp32",
        "--resamples",
        "100",
    ]
    assert ExitCode.FAIL == run([*command, "--localise", f"hf:{pair[1]}"])
    assert "parts at embed: given the other side's values" in capsys.readouterr().out
    assert ExitCode.PASS == run([*command, "--localise", f"hf:{pair[0]}"])
    assert "nowhere do they part by more than rounding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer", "score:x", "--replay"], "--replay needs a trainer that scores"),
        (
            ["--trainer", "score:x", "--dtype", "float32"],
            "--dtype and --temperature go with --trainer hf:PATH",
        ),
        (
            ["--trainer", "score:x", "--localise", "hf:x"],
            "--localise needs a trainer that is a model with modules",
        ),
        (["--trainer", "hf:x", "--replay", "--against", "y"], "leave --against out"),
        (["--trainer", "nowhere_at_all:Trainer"], "nowhere_at_all"),
        (["--trainer", "collections:OrderedDict"], "which has no score"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that cannot do what is asked is refused before anything is read."""
    dump_trace(resumed(), tmp_path / "trace.json")
    assert ExitCode.USAGE == run(["gap", "--rollout", str(tmp_path / "trace.json"), *arguments])
    assert words in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    """A path without a checkpoint is an error that names it."""
    pytest.importorskip("transformers", reason="a real trainer needs torch and transformers")
    with pytest.raises(GapError, match="is not a folder"):
        score_rollouts([_rollout()], HfTrainer(str(tmp_path / "nothing")))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(GapError, match="cannot be read"):
        score_rollouts([_rollout()], HfTrainer(str(tmp_path)))


def test_spans_that_leave_tokens_out_are_no_versions() -> None:
    """A rollout that does not tell all of its tokens' versions is scored under ``None``, and never
    under a guess.
    """
    rollout = replace(_rollout(), spans=(Span(start=0, end=2, version=1),))
    trainer = Constant()
    score_rollouts([rollout], trainer)
    assert [None] == [version for version, _, _ in trainer.asked]
