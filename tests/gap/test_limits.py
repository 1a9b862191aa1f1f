"""Limits, verdicts, and the command that tells them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.cli.app import run
from rollproof.errors import GapError, UsageError
from rollproof.gap import GapVerdict, Limit, gap_lines, limits_named, measure
from rollproof.gap.intervals import Interval
from rollproof.gap.limits import Side
from rollproof.reporting.text import text_of


def _limit(side: Side = Side.ABOVE, fail: float = 1.0) -> Limit:
    return Limit(metric="k1", target=0.0, warn=0.5, fail=fail, source="test", side=side)


@pytest.mark.parametrize(
    ("side", "low", "high", "expected"),
    [
        (Side.ABOVE, 0.2, 0.9, GapVerdict.PASS),
        (Side.ABOVE, 0.9, 1.1, GapVerdict.INCONCLUSIVE),
        (Side.ABOVE, 1.1, 1.3, GapVerdict.FAIL),
        (Side.BELOW, 1.1, 1.3, GapVerdict.PASS),
        (Side.BELOW, 0.9, 1.1, GapVerdict.INCONCLUSIVE),
        (Side.BELOW, 0.2, 0.9, GapVerdict.FAIL),
        (Side.BOTH, -0.9, 0.9, GapVerdict.PASS),
        (Side.BOTH, -1.2, 0.1, GapVerdict.INCONCLUSIVE),
        (Side.BOTH, -1.3, -1.1, GapVerdict.FAIL),
        (Side.BOTH, 1.1, 1.3, GapVerdict.FAIL),
        (Side.ABOVE, math.nan, math.nan, GapVerdict.INCONCLUSIVE),
    ],
)
def test_a_verdict_needs_the_whole_interval(
    side: Side, low: float, high: float, expected: GapVerdict
) -> None:
    """Fail if all of the interval is beyond the limit, pass if none is, else inconclusive."""
    assert expected is _limit(side).judge(
        Interval(value=(low + high) / 2 if low == low else 1.0, low=low, high=high)
    )


def test_a_limit_of_zero_is_exact() -> None:
    """Any value but 0 breaks a limit of 0, with whatever interval."""
    assert GapVerdict.PASS is _limit(fail=0.0).judge(Interval(value=0.0, low=0.0, high=0.2))
    assert GapVerdict.FAIL is _limit(fail=0.0).judge(Interval(value=1e-9, low=0.0, high=0.2))


def test_the_tokens_needed_shrink_with_the_distance_from_the_limit() -> None:
    """A reach of 0.4 at a distance of 0.2 needs four times the tokens; what is decided needs no
    more.
    """
    assert 4000 == _limit().tokens_needed(Interval(value=0.8, low=0.5, high=1.2), 1000)
    assert 1000 == _limit().tokens_needed(Interval(value=0.5, low=0.4, high=0.6), 1000)
    assert _limit().tokens_needed(Interval(value=0.8, low=math.nan, high=math.nan), 1000) is None
    assert _limit().tokens_needed(Interval(value=0.8, low=0.1, high=math.inf), 1000) is None


def test_every_shipped_limit_has_a_source() -> None:
    """Each limit of each profile has a source, and its target, warn and fail are in order."""
    for name in (
        "dense-bf16",
        "moe-bf16",
        "moe-bf16-r3",
        "fp8",
        "tiny-fp32",
        "tiny-bf16",
        "tiny-bf16-r3",
        "bitwise",
    ):
        for limit in limits_named(name).limits.values():
            assert limit.source
            ordered = (limit.target, limit.warn, limit.fail)
            assert ordered == tuple(sorted(ordered, reverse=limit.side is Side.BELOW))


def test_own_limits_replace_single_ones(tmp_path: Path) -> None:
    """A file with one limit of a profile replaces that one and keeps the others."""
    file = tmp_path / "limits.toml"
    file.write_text(
        '[profile.moe-bf16.limits]\nF2 = { target = 0, warn = 0.01, fail = 0.02, source = "our runs'
        ' of May" }\n'
    )
    mine, shipped = limits_named(override=file), limits_named("moe-bf16")
    assert (0.02, "our runs of May") == (mine.limits["F2"].fail, mine.limits["F2"].source)
    assert shipped.limits["F5"] == mine.limits["F5"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[profile.x.limits]\nF3 = {}", "no metric is named 'F3'"),
        (
            "[profile.x.limits]\nF2 = { target = 0, warn = 0, fail = 1 }",
            "needs target, warn, fail and a source",
        ),
        (
            '[profile.x.limits]\nF2 = { target = 0, warn = 0, fail = "a", source = "s" }',
            r"F2\.fail must be a finite number, not 'a'",
        ),
        (
            '[profile.x.limits]\nF2 = { target = 0, warn = 0, fail = nan, source = "s" }',
            "must be a finite number",
        ),
        (
            (
                '[profile.x.limits]\nF2 = { target = 0, warn = 0, fail = 1, source = "s", side ='
                ' "left" }'
            ),
            "side must be one of",
        ),
        (
            '[profile.x.limits]\nF2 = { target = 0, warn = 0, fail = 1, source = "s", max = 2 }',
            "has no max",
        ),
        ("[profile", "is not TOML"),
        (f"x = {'[' * 5000}", "is not TOML: it is nested too deep"),
        ("profile = 3", "holds no"),
        ("profile.x = 3", r"write profile x as a \[profile\.x\.limits\] table"),
        ("profile.x.limits = [3]", r"write profile x as a \[profile\.x\.limits\] table"),
        ("", "holds no"),
    ],
)
def test_limits_that_cannot_be_used_are_refused(tmp_path: Path, text: str, words: str) -> None:
    """A file of limits that says something else is refused with the place."""
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(GapError, match=words):
        limits_named("x", override=file)


def test_an_unknown_profile_lists_the_known_ones() -> None:
    """A profile that does not exist is a usage error with the valid names."""
    with pytest.raises(
        UsageError, match=r"No limits are named 'moe'\. Choose one of dense-bf16, moe-bf16"
    ):
        limits_named("moe")


@pytest.mark.parametrize(
    ("sequences", "mask", "words"),
    [
        (1, 1.0, "1 sequence is too few"),
        (8, 1.0, "8 sequences are too few"),
        (40, 0.0, "the mask excludes all 2,000"),
    ],
)
def test_too_little_data_is_inconclusive(sequences: int, mask: float, words: str) -> None:
    """One sequence, a few, or no token give no verdict, and a note says what is missing."""
    rollout = -np.random.default_rng(0).exponential(0.4, sequences * 50)
    report = measure(
        rollout,
        rollout,
        sequence_id=np.repeat(np.arange(sequences), 50),
        mask=np.full(len(rollout), mask),
        resamples=100,
    )
    assert GapVerdict.INCONCLUSIVE is report.verdict
    assert words in " ".join(report.notes)
    json.dumps(report.to_dict(), allow_nan=False)


def _file(path: Path, noise: float, *, name: str = "trainer_logprob") -> Path:
    rng = np.random.default_rng(3)
    rollout = -rng.exponential(0.4, 4000)
    trainer = np.minimum(rollout + noise * rng.standard_normal(4000) * (1 - np.exp(rollout)), 0)
    columns = {
        "sequence_id": np.repeat(np.arange(80), 50),
        "rollout_logprob": rollout,
        name: trainer,
        "mask": np.ones(4000, bool),
    }
    pq.write_table(pa.table(columns), path)  # type: ignore[no-untyped-call]
    return path


@pytest.mark.parametrize(
    ("noise", "code", "verdict"), [(0.01, 0, "pass"), (0.8, 1, "fail"), (0.156, 2, "inconclusive")]
)
def test_the_command_tells_the_verdict_by_its_exit_code(
    tmp_path: Path, noise: float, code: int, verdict: str
) -> None:
    """0, 1 and 2 stand for pass, fail and inconclusive; the JSON has the keys that the design
    fixes.
    """
    target = tmp_path / "out.json"
    assert code == run(
        [
            "gap",
            str(_file(tmp_path / "t.parquet", noise)),
            "--json",
            str(target),
            "--resamples",
            "200",
        ]
    )
    data = json.loads(target.read_text())
    assert verdict == data["verdict"]
    assert {"verdict", "diagnosis", "metrics", "n_tokens", "n_sequences", "required_n"} <= set(data)
    assert {"value", "low", "high", "threshold", "source"} <= set(data["metrics"]["kl_mu_pi_k3"])
    assert (4000, 80) == (data["n_tokens"], data["n_sequences"])


def test_the_command_takes_other_names_of_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with another name for a column is read with --column; without, the error says how."""
    path = _file(tmp_path / "t.parquet", 0.01, name="trainer_log_probs")
    assert 254 == run(["gap", str(path)])
    assert "--column trainer_logprob=trainer_log_probs" in capsys.readouterr().err
    assert 0 == run(
        ["gap", str(path), "--column", "trainer_logprob=trainer_log_probs", "--resamples", "200"]
    )
    assert "PASS" in capsys.readouterr().out
    assert 254 == run(["gap", str(path), "--column", "nonsense"])
    assert "--column takes NAME=THEIRS" in capsys.readouterr().err


def test_what_no_interval_can_decide_takes_no_limit(tmp_path: Path) -> None:
    """A limit on a number whose interval is known to be too narrow is refused."""
    file = tmp_path / "own.toml"
    file.write_text(
        '[profile.x.limits]\ness_token = {target = 1, warn = 0.9, fail = 0.5, side = "below",'
        ' source = "me"}\n'
    )
    with pytest.raises(GapError, match="ess_token takes no limit"):
        limits_named("x", override=file)


@pytest.mark.parametrize("sequences", [8, 15])
def test_of_few_sequences_no_metric_passes(sequences: int) -> None:
    """Below 16 sequences each metric that holds its limit is undecided, and says that sequences are
    what it needs.
    """
    rollout = -np.random.default_rng(0).exponential(0.4, sequences * 50)
    report = measure(
        rollout,
        rollout,
        sequence_id=np.repeat(np.arange(sequences), 50),
        mask=np.ones(len(rollout)),
        resamples=100,
    )
    assert {GapVerdict.INCONCLUSIVE} == set(report.verdicts.values())
    text = text_of(gap_lines(report))
    assert "PASS" not in text
    assert "more sequences are needed" in text


def test_k3_of_few_tokens_is_told_to_be_known_badly() -> None:
    """Below 2,000 tokens a note says how often the interval of k3 holds; not above, and not where
    the two sides are equal.
    """
    rng = np.random.default_rng(0)
    for sequences, factor, noted in ((30, 1.0, True), (40, 1.0, False), (30, 0.0, False)):
        rollout = -rng.exponential(0.4, 50 * sequences)
        trainer = np.minimum(rollout + factor * 0.02 * rng.standard_normal(len(rollout)), 0)
        ids = np.arange(len(rollout)) // 50
        report = measure(
            rollout, trainer, sequence_id=ids, mask=np.ones(len(rollout)), resamples=100
        )
        assert noted == any(
            note.startswith("k3 of 1,500 tokens may be larger than its interval says")
            for note in report.notes
        )


@pytest.mark.parametrize(
    ("value", "words"),
    [("0", "must be a finite number above 0, not 0"), ("true", "not True"), ('"hot"', "not 'hot'")],
)
def test_a_profile_s_temperature_is_a_number(tmp_path: Path, value: str, words: str) -> None:
    """What is no temperature is refused; a profile without one keeps that of the shipped profile of
    its name, or holds at any.
    """
    file = tmp_path / "own.toml"
    limit = 'k1 = {target = 0, warn = 1, fail = 2, source = "me"}\n'
    file.write_text(f"[profile.x]\ntemperature = {value}\n[profile.x.limits]\n{limit}")
    with pytest.raises(GapError, match=f"profile x: temperature .*{words}"):
        limits_named("x", override=file)
    file.write_text(f"[profile.x.limits]\n{limit}[profile.moe-bf16.limits]\n{limit}")
    assert (None, 1.0) == tuple(
        limits_named(name, override=file).temperature for name in ("x", "moe-bf16")
    )


@pytest.mark.parametrize(
    ("side", "warn", "fail", "value", "odd"),
    [
        (Side.ABOVE, 0.02, 0.05, 0.03, True),
        (Side.ABOVE, 0.02, 0.05, 0.02, False),
        (Side.ABOVE, 0.02, 0.05, 0.06, False),
        (Side.BELOW, 0.99, 0.98, 0.985, True),
        (Side.BELOW, 0.99, 0.98, 0.99, False),
        (Side.BOTH, 0.001, 0.003, -0.002, True),
        (Side.BOTH, 0.001, 0.003, -0.001, False),
    ],
)
def test_a_value_that_passes_beyond_healthy_runs_deserves_a_look(
    side: Side, warn: float, fail: float, value: float, odd: bool
) -> None:
    """Between what healthy runs show and the limit; what fails is no mere look."""
    limit = Limit(metric="m", target=0.0, warn=warn, fail=fail, source="test", side=side)
    assert odd is limit.looks_odd(Interval(value=value, low=value, high=value))
