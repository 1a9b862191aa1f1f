"""The HTML report and the plots: what they hold, what they may not do, and what they say where
something is missing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rollproof.errors import ExtraError, UsageError
from rollproof.gap import GapReport, measure
from rollproof.gap.html.page import check_report_target, page_text, write_plots, write_report
from rollproof.gap.localise.localisation import Localisation, SiteGap
from rollproof.gap.localise.sites import Site
from tests.support.gap_faults import GapWorld, gap_columns

pytest.importorskip("jinja2", reason="the report needs rollproof[report]")
pytest.importorskip("matplotlib", reason="the report needs rollproof[report]")

SMALL = GapWorld(sequences=20, length=60, layers=3)


@lru_cache
def _report(fault: str) -> GapReport:
    return measure(**gap_columns(fault, seed=2, world=SMALL), resamples=100, subject="<step & 1>")


@lru_cache
def _page(fault: str) -> str:
    return page_text(_report(fault))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br", "path", "use", "rect", "line", "circle"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        before = list(self.open)
        self.handle_starttag(tag, attrs)
        self.open = before

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def _parsed(text: str) -> _Tags:
    tags = _Tags()
    tags.feed(text)
    return tags


def test_a_page_needs_nothing_else() -> None:
    """No script, no stylesheet, no image and no address but the page's own ids: it opens from disk
    without a network.
    """
    found = _parsed(_page("numerics only"))
    assert set() == found.tags & {"script", "link", "img", "iframe", "object", "image"}
    assert [] == [address for address in found.addresses if not address.startswith("#")]
    assert "@import" not in _page("numerics only")
    assert {address[1:] for address in found.addresses} <= set(found.ids)


def test_ids_are_unique() -> None:
    """Several SVGs share a page, and no id of one is another's: a marker of one plot never appears
    in the next.
    """
    ids = _parsed(_page("version lag")).ids
    assert len(set(ids)) == len(ids)


def test_a_page_is_small() -> None:
    """Well below the 5 MB that it promises, whatever the number of tokens: plots hold bins."""
    assert len(_page("numerics only").encode()) < 600_000


def test_colours_follow_the_reader() -> None:
    """Every colour in a plot is one of the page's variables, which have a value for light and one
    for dark.
    """
    text = _page("numerics only")
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert [] == re.findall(r"#[0-9a-f]{6}\b", drawings)
    used = set(re.findall(r"var\(--(\w+)\)", text))
    light, dark = (
        re.search(pattern, text, flags=re.DOTALL)
        for pattern in (r":root \{(.*?)\}", r"dark\) \{\s*:root \{(.*?)\}")
    )
    assert light is not None and dark is not None
    assert used <= set(re.findall(r"--(\w+):", light.group(1)))
    assert used - {"font"} <= set(re.findall(r"--(\w+):", dark.group(1)))


def test_text_of_the_user_is_escaped() -> None:
    """A subject or a label that looks like HTML, or like a formula, is shown as it is."""
    assert "&lt;step &amp; 1&gt;" in _page("numerics only")
    columns = gap_columns("stale replica", seed=2, world=SMALL)
    columns["replica"] = np.array([f"<b>$x_{replica}$</b>" for replica in columns["replica"]])
    text = page_text(measure(**columns, resamples=100))
    assert "<b>" not in text
    assert "&lt;b&gt;$x_2$&lt;/b&gt;" in text


def test_bytes_that_are_no_text_are_written_out() -> None:
    """A file's name may hold some, as Python has them: the page is UTF-8 all the same."""
    rollout = np.full(400, -1.0)
    report = measure(
        rollout,
        rollout,
        sequence_id=np.arange(400) // 20,
        mask=np.ones(400),
        subject="caf\udce9.parquet",
        resamples=100,
    )
    assert "caf\\udce9.parquet" in page_text(report).encode().decode()


def test_a_page_tells_verdict_limits_and_sources() -> None:
    """The verdict, each judged metric with its limit and source, every cause with what to do, and
    the foreign names stand in the page.
    """
    report, text = _report("off by one, late"), _page("off by one, late")
    assert f"<strong>{str(report.verdict).upper()}</strong>" in text
    for name in report.verdicts:
        assert f"<code>{name}</code>" in text
        assert report.limits.limits[name].source.replace("'", "&#39;") in text
    assert ["off by one"] == [cause.name for cause in report.causes]
    assert report.causes[0].advice.replace("'", "&#39;") in text
    assert "rollout_corr/k3_kl" in text


@pytest.mark.parametrize(
    ("fault", "there"),
    [
        ("numerics only", {"routers"}),
        ("resume boundary", {"timeline", "by-since-resume"}),
        ("version lag", {"timeline", "by-staleness", "by-version"}),
    ],
)
def test_a_plot_is_there_where_its_columns_are(fault: str, there: set[str]) -> None:
    """Each plot appears if and only if the data hold what it shows, and the page says what the
    others need.
    """
    text = _page(fault)
    always = {"limits", "scatter", "tail", "by-position-decile", "by-rollout-logprob-decile"}
    assert always | there == set(re.findall(r'<h3 id="([\w-]+)-title">', text))
    assert ("token timelines need version or since_resume" in text) == ("timeline" not in there)


def test_nothing_to_draw() -> None:
    """An all-masked batch and one of NaN alone make a page that says so, and no picture."""
    for rollout, mask in ((np.full(4, -1.0), np.zeros(4)), (np.full(4, np.nan), np.ones(4))):
        report = measure(rollout, rollout, sequence_id=np.arange(4), mask=mask)
        text = page_text(report)
        assert "<svg" not in text
        assert "every plot needs finite logprobs" in text
        assert "unknown" in text


def test_equal_logprobs_are_drawn() -> None:
    """Two sides that agree to the bit have a page: no picture divides by their difference."""
    columns = gap_columns("numerics only", seed=2, world=SMALL) | {
        "version": np.repeat(np.arange(20) % 3, 60)
    }
    columns["trainer_logprob"], columns["trainer_routes"] = (
        columns["rollout_logprob"],
        columns["rollout_routes"],
    )
    text = page_text(measure(**columns, limits="bitwise", resamples=100))
    assert "<strong>PASS</strong>" in text
    assert "scatter-title" in text and "tail-title" not in text


def test_a_page_is_the_same_twice(tmp_path: Path) -> None:
    """The same report gives the same bytes: a page can be compared and version-controlled."""
    write_report(_report("numerics only"), tmp_path / "page.html")
    assert _page("numerics only") == (tmp_path / "page.html").read_text(encoding="utf-8")


def test_plots_are_written_as_png_and_svg(tmp_path: Path) -> None:
    """Each plot lies in the folder in both forms, on a white ground."""
    written = write_plots(_report("not finite"), tmp_path / "plots")
    assert {"scatter.png", "scatter.svg", "tail.png", "tail.svg"} <= {path.name for path in written}
    assert all(
        path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        for path in written
    )


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the extra the error names what is missing and the command that installs it, before
    anything is measured.
    """
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ExtraError,
        match=r"jinja2 and matplotlib, which are not installed: pip install 'rollproof\[report\]'",
    ):
        check_report_target(tmp_path / "page.html", None)
    check_report_target(None, None)


def test_a_place_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    """A report whose place is a folder is refused before the measurement."""
    with pytest.raises(UsageError, match="it is a folder"):
        check_report_target(tmp_path, None)


def _localisation(*, broken: bool) -> Localisation:
    """Two layers of four places, of which one parts; the second model has other module names."""
    sites = []
    for layer in range(2):
        for role in ("residual", "q", "experts", "mlp"):
            off = broken and (layer, role) == (1, "experts")
            sites.append(
                SiteGap(
                    site=Site(layer=layer, role=role),
                    module=f"model.layers.{layer}.{role}",
                    other_module=f"decoder.layers.{layer}.<{role}>",
                    alone=0.03 if off else 2e-7,
                    rounding=5e-7,
                    tokens=17 if off else 0,
                    beyond=6e4 if off else 0.4,
                    carried=1e-6 * (layer + 1),
                    carried_rounding=2e-6,
                    replayed=5e-7,
                    experts=(3,) if off else (),
                )
            )
    return Localisation(
        first="trainer",
        second="<engine>",
        n_tokens=96,
        sites=tuple(sites),
        unmatched=("layer 0 router",),
        replayed=True,
    )


def test_the_page_shows_where_forwards_part(tmp_path: Path) -> None:
    """The place, its expert and both modules are named, every place is listed, and two pictures
    show places and growth.
    """
    page = page_text(_report("numerics only"), localisation=_localisation(broken=True))
    assert "model.layers.1.experts" in page
    assert "decoder.layers.1.&lt;experts&gt;" in page
    assert "layer 1 experts, expert 3: given the other side" in page
    assert "Not compared: layer 0 router." in page
    assert {"places", "growth"} <= {name.removesuffix("-title") for name in _parsed(page).ids}
    files = write_plots(_report("numerics only"), tmp_path, localisation=_localisation(broken=True))
    assert {"places.png", "growth.svg"} <= {file.name for file in files}


def test_a_page_without_partings_says_so() -> None:
    """Where rounding explains everything the section passes; without a localisation it is not
    there, and what it needs is said.
    """
    assert "Nowhere do they part by more than rounding" in page_text(
        _report("numerics only"), localisation=_localisation(broken=False)
    )
    page = _page("numerics only")
    assert "Where the forwards part" not in page
    assert "needs a model that can be run (--localise)" in page


def test_the_share_of_an_update_is_a_table() -> None:
    """Of all tokens and of each part; a page of tokens without older scores has no such table."""
    columns = gap_columns("update did not arrive, one column", seed=2, world=SMALL)
    labels = np.repeat(np.arange(20) % 2, SMALL.length)
    text = page_text(measure(**columns, groups={"<shard>": labels}, resamples=100))
    section = text[text.index("<h2>Share of the weight update that arrived</h2>") :]
    rows = re.findall(r'data-label="part">(.*?)</td>', section[: section.index("</section>")])

    assert ["all tokens", "&lt;shard&gt; 0", "&lt;shard&gt; 1"] == rows
    assert "Share of the weight update" not in _page("numerics only")


def test_a_group_has_a_plot_whatever_its_name(tmp_path: Path) -> None:
    """The name of a group is the user's: it is no name of a file, and no id of a page."""
    columns = gap_columns("numerics only", seed=2, world=SMALL)
    labels = np.repeat(np.arange(20) % 2, SMALL.length)
    report = measure(**columns, groups={"a/b <i>": labels, "a b": labels}, resamples=100)
    ids = _parsed(page_text(report)).ids
    names = {path.stem for path in write_plots(report, tmp_path)}

    assert len(set(ids)) == len(ids)
    assert {"by-group-1", "by-group-2"} <= names
    assert "By a/b &lt;i&gt;" in page_text(report)
