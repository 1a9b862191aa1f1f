"""The site of stored runs: what each page shows, links that lead somewhere, hostile texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollproof.errors import UsageError
from rollproof.judging.checks import request_check
from rollproof.reporting.html.matrix_site import write_site
from rollproof.reporting.results.stored_runs import StoredRun, runs_of_report
from tests.support.html_pages import HOSTILE, needs_browser, probe, rendered, tags_of
from tests.support.made_up_reports import checked, finding, reported

pytest.importorskip("jinja2", reason="the site needs rollproof[report]")


def runs(*releases: tuple[str, str, Any]) -> list[StoredRun]:
    """Runs of ``(name, version, checks)``."""
    return [
        run
        for name, version, checks in releases
        for run in runs_of_report(
            {
                **reported(name, *checks),
                "recipe": {"stack": name, "version": version, "part": "client"},
            },
            date="2026-11-30",
        )
    ]


RELEASES = runs(
    (
        "verl",
        "0.9.1",
        [checked("routes.rows", "fail", [finding("lost rows")]), checked("a.b", "pass")],
    ),
    ("verl", "0.9.0", [checked("routes.rows", "pass"), checked("a.b", "pass")]),
    ("trl", "1.0", [checked("routes.rows", "unknown", (), "no aborts"), checked("a.b", "pass")]),
)


def written(tmp_path: Path, found: list[StoredRun] = RELEASES) -> dict[str, str]:
    check = request_check("routes.rows", promise="rows fit", needs="routes", exercised_by="aborts")
    files = write_site(found, tmp_path / "site", [check(lambda view, out: None)])
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def test_a_cell_leads_to_the_finding_and_the_command(tmp_path: Path) -> None:
    pages = written(tmp_path)
    assert '<a class="fail" href="stack-verl-0.9.1.html#client-routes.rows">' in pages["index.html"]
    page = pages["stack-verl-0.9.1.html"]
    block = page[page.index('id="client-routes.rows"') :]
    again = "rollproof verify --stack verl==0.9.1 --part client --profile pr --seed 0"
    for text in ("lost rows", "rows fit", f"{again} --only routes.rows"):
        assert text in block
    assert "no aborts" in pages["stack-trl-1.0.html"]


def test_every_link_leads_somewhere(tmp_path: Path) -> None:
    """From each page to each other, to its blocks, and to nothing outside of the site."""
    pages = written(tmp_path)
    ids = {name: set(tags_of(text).ids) for name, text in pages.items()}
    for name, text in pages.items():
        for address in tags_of(text).addresses:
            page, _, anchor = address.partition("#")
            assert (page or name) in pages
            assert not anchor or anchor in ids[page or name]


def test_changes_and_faults_are_there_as_text_and_as_json(tmp_path: Path) -> None:
    pages = written(tmp_path)
    assert "verl 0.9.1, client: routes.rows was pass in 0.9.0, and is fail" in pages["index.html"]
    data = json.loads(pages["changes.json"])
    assert [("0.9.0", "0.9.1", "pass", "fail")] == [
        tuple(change[key] for key in ("older", "newer", "before", "after"))
        for change in data["changes"]
    ]
    assert [("verl", "0.9.1", "lost rows")] == [
        tuple(fault[key] for key in ("name", "since", "title")) for fault in data["faults"]
    ]


def test_a_release_that_passed_somewhere_and_failed_nowhere_passes(tmp_path: Path) -> None:
    """The worst of a release's parts is shown, as in a report over several subjects."""
    parts = [
        {
            **reported("verl", checked("routes.rows", verdict)),
            "recipe": {"stack": "verl", "version": "1", "part": part},
        }
        for part, verdict in (("a", "unknown"), ("b", "pass"), ("c", "not applicable"))
    ]
    whole = {**parts[0], "reports": parts}
    index = written(tmp_path, runs_of_report(whole, date="2026-11-30"))["index.html"]
    assert 'title="verl 1: pass (b)">✓</td>' in index


def test_releases_whose_pages_would_be_one_are_refused(tmp_path: Path) -> None:
    found = runs(("a/b", "1", [checked("x", "pass")]), ("a_b", "1", [checked("x", "pass")]))
    with pytest.raises(UsageError, match="differ in characters alone that no file name has"):
        written(tmp_path, found)


def test_hostile_texts_add_no_element(tmp_path: Path) -> None:
    verdicts = ("fail", "unknown", "expected fail", "pass", "not applicable")
    checks = [
        checked(f"{HOSTILE}{number}", verdict, [finding(HOSTILE)], HOSTILE)
        for number, verdict in enumerate(verdicts)
    ]
    pages = written(tmp_path, runs((HOSTILE, "1", checks), (HOSTILE, "2", checks[:1])))
    for name, text in pages.items():
        if name.endswith(".html"):
            tags = tags_of(text)
            assert (name == "index.html") == tags.scripts
            assert "img" not in tags.tags


@needs_browser
def test_the_table_is_filtered_in_a_browser(tmp_path: Path) -> None:
    """At first the newest releases and the checks that do not pass everywhere; by name, by check
    and with what passes on demand. The table alone scrolls on a phone.
    """
    actions = """
      const seen = () => [
        [...document.querySelectorAll("th")].filter((one) => one.dataset.name && !one.hidden)
          .map((one) => one.textContent),
        [...document.querySelectorAll("tbody tr[data-check]")].filter((one) => !one.hidden)
          .map((one) => one.dataset.check)];
      const set = (id, key, value) => {
        const control = document.getElementById(id);
        control[key] = value;
        control.dispatchEvent(new Event("input"));
        return seen();
      };
      return { first: seen(), older: set("older", "checked", true),
        named: set("name", "value", "trl"), quiet: set("quiet", "checked", true),
        text: set("text", "value", "a.b"), wide: document.documentElement.scrollWidth,
        screen: innerWidth };
    """
    found = probe(rendered(tmp_path, written(tmp_path)["index.html"], actions))

    assert [["trl1.0", "verl0.9.1"], ["routes.rows"]] == found["first"]
    assert ["trl1.0", "verl0.9.0", "verl0.9.1"] == found["older"][0]
    assert ["trl1.0"] == found["named"][0]
    assert ["routes.rows", "a.b"] == found["quiet"][1]
    assert ["a.b"] == found["text"][1]
    assert found["wide"] <= found["screen"]
