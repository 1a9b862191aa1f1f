"""The report of a gap: the panel against its limits, as JSON and as text lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollproof.errors import ConformanceError, UsageError
from rollproof.gap.buckets import Bucket, Decomposition
from rollproof.gap.column_checks import counted
from rollproof.gap.diagnosis.arrival import Arrival
from rollproof.gap.diagnosis.causes import Cause
from rollproof.gap.intervals import Interval
from rollproof.gap.limits import GapVerdict, Limit, Limits, Side
from rollproof.gap.localise.localisation import Localisation
from rollproof.gap.metrics import METRICS, Scale
from rollproof.gap.panel import Panel, metric_aliases
from rollproof.gap.token_pairs import TokenPairs
from rollproof.gap.trainer_comparison import Comparison
from rollproof.reporting.text import Line, Style, text_of

__all__ = [
    "FEW_SEQUENCES",
    "GapReport",
    "arrival_text",
    "comparison_lines",
    "gap_lines",
    "overall",
    "rounded",
]

GAP_SCHEMA = 1
FEW_SEQUENCES = 16
"""With fewer sequences, intervals over sequences cannot be trusted."""

_WIDTH = 118
_VERDICTS: Mapping[GapVerdict, tuple[str, Style]] = {
    GapVerdict.PASS: ("PASS", Style.GOOD),
    GapVerdict.FAIL: ("FAIL", Style.BAD),
    GapVerdict.INCONCLUSIVE: ("INCONCLUSIVE", Style.DOUBT),
}
# Metrics that are shown even without a limit; `--json` has all of them
_UNLIMITED = (
    "k1",
    "k3_winsorised",
    "abs_diff_p99",
    "abs_diff_p999",
    "abs_diff_max",
    "variance_rate",
)
_SIGNS: Mapping[Side, str] = {Side.ABOVE: "<=", Side.BELOW: ">=", Side.BOTH: "+-"}
# Verdict, metric, value, interval, healthy value, limit: 100 columns
_ROW = "  {:<12} {:<28} {:>10}  {:<24} {:>9}  {:<10}"
_COMPARISON_ROW = "  {:<12} {:<40} {:>10} {:>10} {:>8}  {:<22}"
_PARTS_ROW = "  {:<20} {:>12} {:>20} {:>14} {:>14}  {:<20}"
_INDENT = " " * 15
# Parts whose share of an update is printed
_PARTS = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GapReport:
    """A measured gap with its verdict.

    The report holds the tokens themselves, for plots of them: drop it as soon as you would drop
    those.

    Attributes:
        subject: the title.
        panel: every metric.
        limits: the profile that it was judged by.
        verdicts: one for each metric with a limit that could be measured.
        causes: likely causes, the decisive one first.
        buckets: the gap of parts of the tokens.
        notes: remarks for the reader.
        pairs: the tokens.
        decomposition: the engine's mismatch and the policy's change, if tokens have a
            ``current_logprob``.
        arrivals: the share of the last weight update that arrived, over all tokens and in parts, if
            tokens have a logprob under the weights before theirs.
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
    arrivals: tuple[Arrival, ...] = ()

    @property
    def verdict(self) -> GapVerdict:
        """The verdict of the report.

        Fail if a limit is broken, a logprob is not finite, or a cause is wrong at any size; else
        inconclusive if a limit is, if nothing was judged or if the sequences are few; else pass.
        """
        verdicts = self.verdicts.values()
        if self.panel.n_nonfinite or GapVerdict.FAIL in verdicts:
            return GapVerdict.FAIL
        if any(cause.fault for cause in self.causes):
            return GapVerdict.FAIL
        if not verdicts or GapVerdict.INCONCLUSIVE in verdicts:
            return GapVerdict.INCONCLUSIVE
        # even exact limits, which judge a value without its interval, need some sequences
        if self.panel.n_sequences < FEW_SEQUENCES:
            return GapVerdict.INCONCLUSIVE
        return GapVerdict.PASS

    @property
    def required_n(self) -> int | None:
        """Tokens, in sequences like these, that would decide every limit; ``None`` if unknown."""
        panel = self.panel
        needed = [
            self.limits.limits[name].tokens_needed(panel.metrics[name], panel.n_tokens)
            for name in self.verdicts
        ]
        known = [tokens for tokens in needed if tokens is not None]
        if not needed or len(known) < len(needed):
            return None
        if any(self._undecidable(name) for name in self.verdicts):
            return None
        if panel.n_sequences < FEW_SEQUENCES:
            known.append(math.ceil(panel.n_tokens * FEW_SEQUENCES / max(panel.n_sequences, 1)))
        return max(known)

    def _undecidable(self, name: str) -> bool:
        """Whether a limit is broken but decides nothing, and more tokens would not change that."""
        return (
            self.verdicts[name] is GapVerdict.INCONCLUSIVE
            and self.limits.limits[name].judge(self.panel.metrics[name]) is GapVerdict.FAIL
        )

    def within_limits(self, cause: Cause) -> bool:
        """Whether a cause other than numerics explains a gap that passes.

        It may be intended, and nothing needs to be done about it.
        """
        return self.verdict is GapVerdict.PASS and not cause.harmless

    def aliased(self) -> dict[str, float]:
        """Return the numbers under the names that other projects log.

        The projects are verl, NeMo-RL, slime, miles, prime-rl, TRL, SkyRL, AReaL and TorchTitan. A
        value is NaN if nothing was measured.
        """
        return metric_aliases(self.panel, self.pairs)

    def require(self, *, inconclusive: str = "fail") -> None:
        """Raise ``ConformanceError`` (an ``AssertionError``) unless the verdict is pass.

        Its message is the report. ``inconclusive="allow"`` accepts a measurement that decided
        nothing; otherwise an undecided one never counts as passed.
        """
        if inconclusive not in ("fail", "allow"):
            raise UsageError(f"inconclusive={inconclusive!r} is not one of: fail, allow.")
        undecided = self.verdict is GapVerdict.INCONCLUSIVE
        if self.verdict is GapVerdict.FAIL or (undecided and inconclusive == "fail"):
            bad = ", ".join(
                name for name, verdict in self.verdicts.items() if verdict is self.verdict
            )
            raise ConformanceError(
                text_of(gap_lines(self)), f"the gap: {self.verdict}{f' ({bad})' if bad else ''}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON report, schema 1: keys may be added."""
        agreement = self.panel.agreement
        layers = [] if agreement is None else agreement.per_layer.tolist()
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
            "arrival": [arrival.to_dict() for arrival in self.arrivals],
            "worst": [dict(token) for token in self.panel.worst],
            "per_layer": [[_number(value) for value in layer] for layer in layers],
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
            "no_interval": Scale.BARE.value if _is_bare(name) else None,
        }


def _is_bare(name: str) -> bool:
    """Whether a metric has no interval whatever the data."""
    return name in METRICS and METRICS[name].scale is Scale.BARE


def overall(
    report: GapReport,
    comparison: Comparison | None = None,
    localisation: Localisation | None = None,
) -> GapVerdict:
    """Return the worst verdict of the results.

    A localisation fails if it found a place where two forwards part.
    """
    verdicts = {report.verdict}
    if comparison is not None:
        verdicts.add(comparison.verdict)
    if localisation is not None and localisation.found is not None:
        verdicts.add(GapVerdict.FAIL)
    worst_first = (GapVerdict.FAIL, GapVerdict.INCONCLUSIVE, GapVerdict.PASS)
    return next(verdict for verdict in worst_first if verdict in verdicts)


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def gap_lines(report: GapReport) -> Iterator[Line]:
    """Yield the report as text, within 120 columns.

    Title, metrics with limits and their sources, other metrics, causes, worst token, notes and the
    verdict.
    """
    panel = report.panel
    size = _size(panel.n_tokens, panel.n_sequences)
    title = f"{report.subject}  [{size}, limits {report.limits.profile}]"
    yield Style.TITLE, _wrap(title, "    ")
    if panel.n_nonfinite:
        nonfinite = counted(panel.n_nonfinite, "token", "have")
        yield (
            Style.BAD,
            f"  FAIL  {nonfinite} a logprob that is not finite; no metric includes such",
        )
    header = _ROW.format("", "metric", "value", "95 % interval", "healthy", "limit")
    yield Style.FAINT, header.rstrip()
    for name, verdict in report.verdicts.items():
        limit = report.limits.limits[name]
        yield from _limit_lines(panel.metrics[name], limit, verdict, panel.n_tokens)
    for name in _UNLIMITED:
        if name not in report.verdicts:
            value, ends = _value_and_interval(panel.metrics[name])
            ends = "none: few tokens decide" if _is_bare(name) else ends
            yield Style.FAINT, _ROW.format("", name, value, ends, "", "").rstrip()
    for cause in report.causes:
        yield from _cause_lines(report, cause)
    if report.decomposition is not None:
        yield from _decomposition_lines(report.decomposition)
    yield from _arrival_lines(report.arrivals)
    if panel.worst:
        token = ", ".join(f"{key} {_short(value)}" for key, value in panel.worst[0].items())
        yield Style.PLAIN, _wrap(f"  worst token: {token}", _INDENT)
    for note in report.notes:
        yield Style.DOUBT, _wrap(f"  note: {note}", " " * 8)
    word, style = _VERDICTS[report.verdict]
    needed = report.required_n if report.verdict is GapVerdict.INCONCLUSIVE else None
    hint = f", about {rounded(needed)} tokens of such sequences would decide" if needed else ""
    yield style, f"  {word}{hint}"


def _cause_lines(report: GapReport, cause: Cause) -> Iterator[Line]:
    if cause.harmless:
        style = Style.GOOD
    else:
        style = Style.BAD if report.verdict is GapVerdict.FAIL else Style.DOUBT
    confidence = f"confidence {cause.confidence:.2f}"
    if report.within_limits(cause):
        confidence += "; every limit holds"
    yield style, _wrap(f"  diagnosis: {cause.name} ({confidence}): {cause.because}", " " * 13)
    if cause.advice:
        yield Style.PLAIN, _wrap(f"{' ' * 13}{cause.advice}", " " * 13)


def _size(tokens: int, sequences: int) -> str:
    return f"{counted(tokens, 'token')} in {counted(sequences, 'sequence')}"


def _decomposition_lines(decomposition: Decomposition) -> Iterator[Line]:
    """Yield mean |d| to the current weights and its two parts, of all tokens and of each age."""
    header = (
        "age of the weights",
        "tokens",
        "mean |d| to current",
        "engine's part",
        "policy's part",
        "engine's share",
    )
    yield Style.FAINT, _PARTS_ROW.format(*header).rstrip()
    for row in decomposition.rows:
        sizes = [
            f"{part['abs_diff_mean'].value:.3g}" for part in (row.total, row.engine, row.policy)
        ]
        share = "-" if math.isnan(row.share.value) else f"{row.share.value:.0%}"
        if not math.isnan(row.share.low):
            share += f" [{row.share.low:.0%}, {row.share.high:.0%}]"
        yield Style.PLAIN, _PARTS_ROW.format(row.label, f"{row.tokens:,}", *sizes, share).rstrip()


def _arrival_lines(arrivals: Sequence[Arrival]) -> Iterator[Line]:
    """Yield the share over all tokens, and those of the parts with the smallest ones."""
    known = sorted((item for item in arrivals[1:] if item.known), key=lambda item: item.share.value)
    for arrival in (*arrivals[:1], *known[:_PARTS]):
        yield Style.PLAIN, _wrap(f"  {arrival_text(arrival)}", " " * 13)
    more = len(arrivals) - 1 - min(len(known), _PARTS)
    if more > 0:
        parts = counted(more, "further part")
        yield Style.FAINT, f"  {parts} with larger or unknown shares: --json has them"


def arrival_text(arrival: Arrival) -> str:
    """Return the share of an update that arrived as a line of text."""
    share = arrival.share
    sequences = counted(arrival.sequences, "sequence")
    place = f" at {arrival.label}" if arrival.label else ""
    if not arrival.known:
        return (
            f"share of the weight update that arrived{place}: cannot be told from {sequences}, for"
            " numerics hide what the update does to them"
        )
    return (
        f"share of the weight update that arrived{place}: {share.value:.2f} [{share.low:.2f},"
        f" {share.high:.2f}] ({sequences})"
    )


def comparison_lines(comparison: Comparison) -> Iterator[Line]:
    """Yield a comparison as text: each metric on both sides, and their ratio with its interval."""
    size = _size(comparison.tokens, comparison.sequences)
    expected = "expected: below 1, and above 1 for controls"
    yield Style.TITLE, _wrap(f"against {comparison.against}  [{size}, paired; {expected}]", "    ")
    header = _COMPARISON_ROW.format("", "metric", "value", "against", "ratio", "95 % interval")
    yield Style.FAINT, header.rstrip()
    for name, effects in {"": comparison.effects, **comparison.controls}.items():
        for effect in effects:
            word, style = _VERDICTS[effect.verdict]
            metric = f"{effect.metric} ({name})" if name else effect.metric
            values = f"{effect.value:.3g}", f"{effect.against:.3g}"
            ratio = _value_and_interval(effect.ratio)
            yield style, _COMPARISON_ROW.format(word, metric, *values, *ratio).rstrip()
    for note in comparison.notes:
        yield Style.DOUBT, _wrap(f"  note: {note}", " " * 8)
    word, style = _VERDICTS[comparison.verdict]
    yield style, f"  {word}"


def _limit_lines(
    interval: Interval, limit: Limit, verdict: GapVerdict, tokens: int
) -> Iterator[Line]:
    word, style = _VERDICTS[verdict]
    value, ends = _value_and_interval(interval)
    bound = f"{_SIGNS[limit.side]} {limit.fail:.3g}"
    row = _ROW.format(word, limit.metric, value, ends, f"{limit.target:.3g}", bound)
    yield style, row.rstrip()
    if verdict is GapVerdict.INCONCLUSIVE:
        yield style, f"{_INDENT}{_undecided_reason(interval, limit, tokens)}"
    elif limit.looks_odd(interval):
        yield Style.DOUBT, f"{_INDENT}deserves a look: healthy runs stay within {limit.warn:.3g}"
    source = textwrap.shorten(limit.source, _WIDTH - len(_INDENT), placeholder=" ...")
    yield Style.FAINT, f"{_INDENT}{source}"


def _undecided_reason(interval: Interval, limit: Limit, tokens: int) -> str:
    own = limit.judge(interval)
    if own is GapVerdict.FAIL:
        return "beyond the limit, which decides nothing at this temperature"
    needed = limit.tokens_needed(interval, tokens) if own is GapVerdict.INCONCLUSIVE else None
    return f"about {rounded(needed)} tokens would decide" if needed else "more sequences are needed"


def rounded(tokens: int) -> str:
    """Return a number of tokens that is an estimate, to two digits."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def _value_and_interval(interval: Interval) -> tuple[str, str]:
    if math.isnan(interval.value):
        return "-", "not measured"
    ends = "" if math.isnan(interval.low) else f"[{interval.low:.3g}, {interval.high:.3g}]"
    return f"{interval.value:.3g}", ends


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
