"""Report: the panel against its limits, in words and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollproof.errors import ConformanceError, UsageError
from rollproof.gap.buckets import Bucket, Decomposition
from rollproof.gap.column_checks import counted
from rollproof.gap.diagnosis.causes import Cause
from rollproof.gap.intervals import Interval
from rollproof.gap.limits import GapVerdict, Limit, Limits, Side
from rollproof.gap.localise.localisation import Localisation
from rollproof.gap.metrics import METRICS, Scale
from rollproof.gap.panel import Panel
from rollproof.gap.token_pairs import TokenPairs
from rollproof.gap.trainer_comparison import Comparison
from rollproof.reporting.text import Line, Style, text_of

__all__ = ["GAP_SCHEMA", "GapReport", "comparison_lines", "gap_lines", "overall", "rounded"]

GAP_SCHEMA = 1
_WIDTH = 118
FEW_SEQUENCES = 16
"""Below this many sequences intervals over sequences cannot be trusted, whatever they say."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GapReport:
    """A panel, its limits, and what follows. ``verdicts`` has an entry for each metric with a limit
    that could be measured.

    ``decomposition`` tells the engine's mismatch from the policy's change where tokens have a
    ``current_logprob``. ``pairs`` are the tokens themselves, for pictures of them: keep a report
    only as long as you would keep those.
    """

    subject: str
    panel: Panel
    limits: Limits
    verdicts: Mapping[str, GapVerdict]
    causes: tuple[Cause, ...]
    buckets: Mapping[str, tuple[Bucket, ...]]
    notes: tuple[str, ...]
    pairs: TokenPairs
    decomposition: Decomposition | None = None

    @property
    def verdict(self) -> GapVerdict:
        """Fail where a limit is broken, a logprob not finite, or a cause found that is wrong at any
        size; else inconclusive, else pass.
        """
        if (
            self.panel.n_nonfinite
            or GapVerdict.FAIL in self.verdicts.values()
            or any(cause.fault for cause in self.causes)
        ):
            return GapVerdict.FAIL
        if (
            not self.verdicts
            or GapVerdict.INCONCLUSIVE in self.verdicts.values()
            or self.panel.n_sequences < FEW_SEQUENCES
        ):
            return GapVerdict.INCONCLUSIVE
        return GapVerdict.PASS

    @property
    def required_n(self) -> int | None:
        """Tokens, of sequences like these, that would decide every limit; ``None`` where that
        cannot be said.
        """
        needed = [
            self.limits.limits[name].tokens_needed(self.panel.metrics[name], self.panel.n_tokens)
            for name in self.verdicts
        ]
        if (
            not needed
            or any(tokens is None for tokens in needed)
            or any(self._excused(name) for name in self.verdicts)
        ):
            return None
        few = self.panel.n_tokens * FEW_SEQUENCES / max(self.panel.n_sequences, 1)
        return max(
            [tokens for tokens in needed if tokens is not None]
            + [math.ceil(few)] * (self.panel.n_sequences < FEW_SEQUENCES)
        )

    def _excused(self, name: str) -> bool:
        """Whether a limit is broken and decides nothing all the same: no number of tokens would
        change that.
        """
        return (
            self.verdicts[name] is GapVerdict.INCONCLUSIVE
            and self.limits.limits[name].judge(self.panel.metrics[name]) is GapVerdict.FAIL
        )

    def within_limits(self, cause: Cause) -> bool:
        """Whether a cause other than numerics is told of a gap that passes: it may be meant, and
        asks for nothing.
        """
        return self.verdict is GapVerdict.PASS and not cause.harmless

    def aliased(self) -> dict[str, float]:
        """The numbers under the names that verl, NeMo-RL, slime, prime-rl, TRL, SkyRL and others
        log; NaN where nothing was measured.
        """
        from rollproof.gap.panel import aliased

        return aliased(self)

    def require(self, *, inconclusive: str = "fail") -> None:
        """Raise ``ConformanceError`` (an ``AssertionError``) with the report's lines unless the
        verdict is pass.

        ``inconclusive="allow"`` lets a measurement through that decided nothing: an undecided one
        never counts as passed otherwise.
        """
        if inconclusive not in ("fail", "allow"):
            raise UsageError(f"inconclusive={inconclusive!r} is not one of: fail, allow.")
        undecided = self.verdict is GapVerdict.INCONCLUSIVE
        if self.verdict is GapVerdict.FAIL or (undecided and inconclusive == "fail"):
            raise ConformanceError(text_of(gap_lines(self)))

    def to_dict(self) -> dict[str, Any]:
        """JSON report, schema 1: keys may be added."""
        return {
            "schema": GAP_SCHEMA,
            "subject": self.subject,
            "verdict": str(self.verdict),
            "limits": self.limits.profile,
            "n_tokens": self.panel.n_tokens,
            "n_sequences": self.panel.n_sequences,
            "n_nonfinite": self.panel.n_nonfinite,
            "n_masked": self.panel.masked,
            "required_n": self.required_n,
            "metrics": {
                name: self._metric(name, interval) for name, interval in self.panel.metrics.items()
            },
            "diagnosis": [cause.to_dict() for cause in self.causes],
            "buckets": {
                name: [bucket.to_dict() for bucket in row] for name, row in self.buckets.items()
            },
            "aliases": {name: _number(value) for name, value in self.aliased().items()},
            "decomposition": [] if self.decomposition is None else self.decomposition.to_dict(),
            "worst": [dict(token) for token in self.panel.worst],
            "per_layer": (
                []
                if self.panel.agreement is None
                else [
                    [_number(value) for value in layer]
                    for layer in self.panel.agreement.per_layer.tolist()
                ]
            ),
            "notes": list(self.notes),
        }

    def _metric(self, name: str, interval: Interval) -> dict[str, Any]:
        limit = self.limits.limits.get(name)
        return {
            "value": _number(interval.value),
            "low": _number(interval.low),
            "high": _number(interval.high),
            "threshold": limit.fail if limit else None,
            "warn": limit.warn if limit else None,
            "target": limit.target if limit else None,
            "side": str(limit.side) if limit else None,
            "source": limit.source if limit else None,
            "verdict": str(self.verdicts[name]) if name in self.verdicts else None,
            "no_interval": Scale.BARE.value if _bare(name) else None,
        }


def _bare(name: str) -> bool:
    """Whether a metric has no interval whatever the data."""
    return name in METRICS and METRICS[name].scale is Scale.BARE


def overall(
    report: GapReport,
    comparison: Comparison | None = None,
    localisation: Localisation | None = None,
) -> GapVerdict:
    """The worst of what was asked for: a comparison's verdict counts, and a place where two
    forwards part fails.
    """
    verdicts = {report.verdict} | ({comparison.verdict} if comparison is not None else set())
    if localisation is not None and localisation.found is not None:
        verdicts.add(GapVerdict.FAIL)
    return next(
        verdict
        for verdict in (GapVerdict.FAIL, GapVerdict.INCONCLUSIVE, GapVerdict.PASS)
        if verdict in verdicts
    )


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


_WORDS = {
    GapVerdict.PASS: ("PASS", Style.GOOD),
    GapVerdict.FAIL: ("FAIL", Style.BAD),
    GapVerdict.INCONCLUSIVE: ("INCONCLUSIVE", Style.DOUBT),
}
_SHOWN = ("k1", "k3_winsorised", "abs_diff_p99", "abs_diff_p999", "abs_diff_max", "variance_rate")
"""Metrics without a limit that are told all the same; ``--json`` has all of them."""


def gap_lines(report: GapReport) -> Iterator[Line]:
    """The report for a person, within 120 columns: verdict, metrics with limits and their sources,
    the others, causes, worst token.
    """
    panel = report.panel
    yield (
        Style.TITLE,
        _wrapped(
            f"{report.subject}  [{_size(panel.n_tokens, panel.n_sequences)}, limits"
            f" {report.limits.profile}]",
            "    ",
        ),
    )
    if panel.n_nonfinite:
        yield (
            Style.BAD,
            (
                f"  FAIL  {counted(panel.n_nonfinite, 'token', 'have')} a logprob that is not"
                " finite; no metric includes such"
            ),
        )
    yield (
        Style.FAINT,
        _ROW.format("", "metric", "value", "95 % interval", "healthy", "limit").rstrip(),
    )
    for name, verdict in report.verdicts.items():
        yield from _limited(
            panel.metrics[name], report.limits.limits[name], verdict, panel.n_tokens
        )
    for name in _SHOWN:
        if name not in report.verdicts:
            value, ends = _told(panel.metrics[name])
            yield (
                Style.FAINT,
                _ROW.format(
                    "", name, value, "none: few tokens decide" if _bare(name) else ends, "", ""
                ).rstrip(),
            )
    for cause in report.causes:
        style = (
            Style.GOOD
            if cause.harmless
            else Style.BAD
            if report.verdict is GapVerdict.FAIL
            else Style.DOUBT
        )
        sure = f"confidence {cause.confidence:.2f}" + (
            "; every limit holds" if report.within_limits(cause) else ""
        )
        yield style, _wrapped(f"  diagnosis: {cause.name} ({sure}): {cause.because}", " " * 13)
        if cause.advice:
            yield Style.PLAIN, _wrapped(f"{' ' * 13}{cause.advice}", " " * 13)
    if report.decomposition is not None:
        yield from _parts_told(report.decomposition)
    if panel.worst:
        token = panel.worst[0]
        yield (
            Style.PLAIN,
            _wrapped(
                "  worst token: "
                + ", ".join(f"{key} {_short(value)}" for key, value in token.items()),
                " " * 15,
            ),
        )
    for note in report.notes:
        yield Style.DOUBT, _wrapped(f"  note: {note}", " " * 8)
    word, style = _WORDS[report.verdict]
    more = (
        f", about {rounded(report.required_n)} tokens of such sequences would decide"
        if report.verdict is GapVerdict.INCONCLUSIVE and report.required_n
        else ""
    )
    yield style, f"  {word}{more}"


def _size(tokens: int, sequences: int) -> str:
    return f"{counted(tokens, 'token')} in {counted(sequences, 'sequence')}"


def _parts_told(found: Decomposition) -> Iterator[Line]:
    """Mean |d| to the current weights, of all tokens and of each age, in its two parts."""
    yield (
        Style.FAINT,
        _PARTS.format(
            "age of the weights",
            "tokens",
            "mean |d| to current",
            "engine's part",
            "policy's part",
            "engine's share",
        ).rstrip(),
    )
    for row in found.rows:
        sizes = [
            f"{part['abs_diff_mean'].value:.3g}" for part in (row.total, row.engine, row.policy)
        ]
        share = row.share
        told = "-" if math.isnan(share.value) else f"{share.value:.0%}"
        told += "" if math.isnan(share.low) else f" [{share.low:.0%}, {share.high:.0%}]"
        yield Style.PLAIN, _PARTS.format(row.label, f"{row.tokens:,}", *sizes, told).rstrip()


def comparison_lines(comparison: Comparison) -> Iterator[Line]:
    """The comparison for a person: each metric on both sides, their ratio with its interval, and
    what it is to be.
    """
    yield (
        Style.TITLE,
        _wrapped(
            f"against {comparison.against}  [{_size(comparison.tokens, comparison.sequences)},"
            " paired; wanted: below 1, and above 1 for controls]",
            "    ",
        ),
    )
    yield (
        Style.FAINT,
        _COMPARED.format("", "metric", "value", "against", "ratio", "95 % interval").rstrip(),
    )
    for name, row in {"": comparison.effects, **comparison.controls}.items():
        for effect in row:
            word, style = _WORDS[effect.verdict]
            told = f"{effect.metric} ({name})" if name else effect.metric
            yield (
                style,
                _COMPARED.format(
                    word, told, f"{effect.value:.3g}", f"{effect.against:.3g}", *_told(effect.ratio)
                ).rstrip(),
            )
    for note in comparison.notes:
        yield Style.DOUBT, _wrapped(f"  note: {note}", " " * 8)
    word, style = _WORDS[comparison.verdict]
    yield style, f"  {word}"


_COMPARED = "  {:<12} {:<40} {:>10} {:>10} {:>8}  {:<22}"
_PARTS = "  {:<20} {:>12} {:>20} {:>14} {:>14}  {:<20}"
_ROW = "  {:<12} {:<28} {:>10}  {:<24} {:>9}  {:<10}"
"""Verdict, metric, value, interval, what is healthy, limit: 100 columns."""
_SIGNS: Mapping[Side, str] = {Side.ABOVE: "<=", Side.BELOW: ">=", Side.BOTH: "+-"}
_INDENT = " " * 15


def _limited(interval: Interval, limit: Limit, verdict: GapVerdict, tokens: int) -> Iterator[Line]:
    word, style = _WORDS[verdict]
    yield (
        style,
        _ROW.format(
            word,
            limit.metric,
            *_told(interval),
            f"{limit.target:.3g}",
            f"{_SIGNS[limit.side]} {limit.fail:.3g}",
        ).rstrip(),
    )
    if verdict is GapVerdict.INCONCLUSIVE:
        own = limit.judge(interval)
        needed = limit.tokens_needed(interval, tokens) if own is GapVerdict.INCONCLUSIVE else None
        if own is GapVerdict.FAIL:
            yield style, f"{_INDENT}beyond the limit, which decides nothing at this temperature"
        else:
            yield (
                style,
                (
                    f"{_INDENT}about {rounded(needed)} tokens would decide"
                    if needed
                    else f"{_INDENT}more sequences are needed"
                ),
            )
    yield (
        Style.FAINT,
        _INDENT + textwrap.shorten(limit.source, _WIDTH - len(_INDENT), placeholder=" ..."),
    )


def rounded(tokens: int) -> str:
    """A number of tokens that is an estimate, to two digits."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def _told(interval: Interval) -> tuple[str, str]:
    """Value and interval in words."""
    if math.isnan(interval.value):
        return "-", "not measured"
    return f"{interval.value:.3g}", (
        "" if math.isnan(interval.low) else f"[{interval.low:.3g}, {interval.high:.3g}]"
    )


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
