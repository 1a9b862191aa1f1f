"""A gap's report as one self-contained HTML file, and its plots as files.

Both need the packages of the extra ``report`` (jinja2, matplotlib), which are imported on use.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollproof.core.files import check_folder, check_target, write_atomically
from rollproof.gap.column_checks import counted
from rollproof.gap.gap_report import overall, rounded
from rollproof.gap.limits import GapVerdict, Side
from rollproof.gap.metrics import METRICS, Scale
from rollproof.reporting.html.pages import page_template, require_packages

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport
    from rollproof.gap.html.plots import Plot
    from rollproof.gap.localise.localisation import Localisation
    from rollproof.gap.trainer_comparison import Comparison

__all__ = ["check_report_target", "page_text", "write_plots", "write_report"]

_PACKAGES = ("jinja2", "matplotlib")
_MOST_BYTES = 5_000_000
_DPI = 160
_ABOUT: Mapping[str, str] = {
    "abs_diff_p50": "median of |d|",
    "abs_diff_p99": "|d| that 1 % of the tokens exceed",
    "abs_diff_p999": "|d| that 0.1 % of the tokens exceed",
    "abs_diff_max": "largest |d|; it grows with the number of tokens",
    "token_mult_prob_error_median": "median over batches (else sequences) of their mean exp(|d|)",
    "slot_mismatch": "share of expert slots that the other side did not choose",
    "layer_mismatch": "share of (token, layer) whose experts differ",
    "any_layer_mismatch": "share of tokens that differ in some layer",
    "jaccard": "experts in common over experts in all, mean of (token, layer)",
}
_SIGNS: Mapping[Side, str] = {
    Side.ABOVE: "\N{LESS-THAN OR EQUAL TO}",
    Side.BELOW: "\N{GREATER-THAN OR EQUAL TO}",
    Side.BOTH: "\N{PLUS-MINUS SIGN}",
}


def check_report_target(report: Path | None, plots: Path | None) -> None:
    """Check, before a long measurement, that a page and plots can be made and written.

    Raises ``ExtraError`` if packages are missing, ``UsageError`` if a path cannot be written to.
    """
    if report is None and plots is None:
        return
    require_packages(
        _PACKAGES,
        "The HTML report and the plots need",
        "Without them the terminal output and --json hold every number.",
    )
    if report is not None:
        check_target(report)
    if plots is not None:
        check_folder(plots)


def write_report(
    report: GapReport,
    path: Path | str,
    *,
    comparison: Comparison | None = None,
    localisation: Localisation | None = None,
) -> None:
    """Write the report to ``path`` as one HTML file below 5 MB.

    It opens from disk, in light and dark mode, on a phone too. Raises ``ExtraError`` without the
    extra ``report``, ``UsageError`` if ``path`` cannot be written to.
    """
    check_report_target(Path(path), None)
    write_atomically(
        Path(path), page_text(report, comparison=comparison, localisation=localisation)
    )


def write_plots(
    report: GapReport,
    folder: Path | str,
    *,
    comparison: Comparison | None = None,
    localisation: Localisation | None = None,
) -> list[Path]:
    """Write each plot into ``folder`` as PNG and as SVG, on white; return the files.

    Raises as ``write_report`` does.
    """
    from rollproof.gap.html.plots import draw_plots, style

    folder = Path(folder)
    check_report_target(None, folder)
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for plot in draw_plots(report, comparison, localisation):
        for kind in ("png", "svg"):
            path = folder / f"{plot.name}.{kind}"
            with style(salt=plot.name):
                plot.figure.savefig(
                    path,
                    format=kind,
                    dpi=_DPI,
                    facecolor="white",
                    metadata={"Date": None} if kind == "svg" else None,
                )
            out.append(path)
    return out


def page_text(
    report: GapReport,
    *,
    comparison: Comparison | None = None,
    localisation: Localisation | None = None,
) -> str:
    """Return the HTML of ``write_report``."""
    from rollproof.gap.html.plots import COLOURS, draw_plots

    plots = [
        {"name": plot.name, "title": plot.title, "about": plot.about, "svg": _svg(plot, COLOURS)}
        for plot in draw_plots(report, comparison, localisation)
    ]
    template = page_template(
        "rollproof.gap.html",
        "page.html",
        {"number": _number, "interval": _interval, "counted": counted},
    )
    text: str = template.render(
        report=report,
        verdict=str(overall(report, comparison, localisation)),
        summaries=_summaries(report, comparison, localisation),
        gated=[_row(report, name) for name in report.verdicts],
        others=[_row(report, name) for name in report.panel.metrics if name not in report.verdicts],
        unmeasured=[name for name in report.limits.limits if name not in report.verdicts],
        plots=plots,
        missing=_missing({plot["name"] for plot in plots}),
        buckets=report.buckets,
        aliases=report.aliased(),
        comparison=comparison,
        localisation=localisation,
    )
    # the name of a file may contain bytes that are not text
    text = text.encode("utf-8", "backslashreplace").decode()
    # plots hold bins, not tokens, so the size does not depend on the data
    if len(text.encode()) > _MOST_BYTES:
        raise AssertionError(
            f"the page has {len(text.encode()):,} bytes, beyond the {_MOST_BYTES:,} that it"
            " promises"
        )
    return text


def _summaries(
    report: GapReport, comparison: Comparison | None, localisation: Localisation | None
) -> list[tuple[str, str]]:
    """Return verdict and summary of the gap, of the comparison and of the localisation."""
    out = [(str(report.verdict), _summary(report))]
    if comparison is not None:
        effect = comparison.effects[0]
        ratio = f"{_number(effect.ratio.value)} times that of {comparison.against}"
        text = f"{effect.metric} is {ratio} ({_interval(effect.ratio)})."
        out.append((str(comparison.verdict), text))
    if localisation is not None:
        parting, places = localisation.found, len(localisation.partings)
        if parting is None:
            out.append(("pass", "Nowhere do the forwards part by more than rounding."))
        else:
            others = f" and {places - 1} more places" if places > 1 else ""
            out.append(("fail", f"The forwards part at {parting.module}{others}."))
    return out


def _summary(report: GapReport) -> str:
    """Return the gap's verdict in a sentence."""
    failing = [name for name, verdict in report.verdicts.items() if verdict is GapVerdict.FAIL]
    undecided = [
        name for name, verdict in report.verdicts.items() if verdict is GapVerdict.INCONCLUSIVE
    ]
    if report.verdict is GapVerdict.PASS:
        return f"All {len(report.verdicts)} limits hold, with complete 95 % intervals."
    if report.verdict is GapVerdict.FAIL:
        reasons = [f"beyond the limit: {', '.join(failing)}"] if failing else []
        reasons += (
            [f"{counted(report.panel.n_nonfinite, 'token')} with a logprob that is not finite"]
            if report.panel.n_nonfinite
            else []
        )
        reasons += [
            f"a cause that is wrong at any size: {cause.name}"
            for cause in report.causes
            if cause.fault
        ]
        return f"Failed: {'; '.join(reasons)}."
    needed = (
        f" About {rounded(report.required_n)} tokens of such sequences would decide."
        if report.required_n
        else ""
    )
    names = ", ".join(undecided) or "too few sequences, or nothing with a limit was measured"
    return f"Not decided: {names}.{needed}"


def _row(report: GapReport, name: str) -> dict[str, Any]:
    limit = report.limits.limits.get(name)
    metric = METRICS.get(name)
    about = metric.formula if metric else _ABOUT.get(name, "")
    return {
        "name": name,
        "about": (
            f"{about} ({Scale.BARE.value})" if metric and metric.scale is Scale.BARE else about
        ),
        "interval": report.panel.metrics[name],
        "limit": limit,
        "sign": _SIGNS[limit.side] if limit else "",
        "verdict": str(report.verdicts[name]) if name in report.verdicts else "",
    }


def _missing(drawn: set[str]) -> list[str]:
    """Return the plots that the data do not allow, and what they need."""
    needs = {
        "routers": "the map of the routers needs rollout_routes and trainer_routes",
        "timeline": "token timelines need version or since_resume",
        "by-since-resume": "drift around resume boundaries needs since_resume",
        "by-staleness": "drift with staleness needs version (several, or current_version)",
        "by-replica": "the comparison of replicas needs replica (several)",
        "by-part": "parts of a sequence need part (several)",
        "comparison": "replay on and off needs a second file of the same rollout (--against)",
        "growth": "the place where two forwards part needs a model that can be run (--localise)",
        "scatter": "every plot needs finite logprobs",
    }
    return [text for name, text in needs.items() if name not in drawn]


def _svg(plot: Plot, colours: Mapping[str, str]) -> str:
    """Return the figure as SVG for a page: with the page's colours, and ids that are unique."""
    from rollproof.gap.html.plots import style

    stream = io.StringIO()
    with style(salt=plot.name):
        plot.figure.savefig(
            stream,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    # its style element would apply to the entire page
    text = re.sub(r"<style type=\"text/css\">.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # several figures share one page, and ids must be unique in it
    text = re.sub(r'\bid="([^"]+)"', rf'id="{plot.name}-\1"', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{plot.name}-", text)
    for name, value in colours.items():
        text = text.replace(value, f"var(--{name})")
    text = re.sub(r"'DejaVu Sans',[^;\"]*|sans-serif", "var(--font)", text, count=0)
    head = re.match(r"<svg[^>]*>", text)
    if head is None:
        # every known matplotlib writes the element first
        raise AssertionError(f"matplotlib's SVG begins with {text[:60]!r}")
    box = re.search(r'viewBox="[^"]*"', head.group())
    label = (
        f'<svg role="img" aria-labelledby="{plot.name}-title"'
        f' xmlns:xlink="http://www.w3.org/1999/xlink" {box.group() if box else ""}>'
    )
    return label + text[head.end() :]


def _number(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _interval(interval: Any) -> str:
    ends: Sequence[float] = (interval.low, interval.high)
    return (
        f"{_number(interval.low)} to {_number(interval.high)}"
        if all(math.isfinite(end) for end in ends)
        else "no interval"
    )
