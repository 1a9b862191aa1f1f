from __future__ import annotations

import re
from typing import Any

import pytest

from rollproof.reporting.text import (
    Style,
    check_lines,
    finding_lines,
    report_lines,
    summary_text,
    text_of,
)
from tests.support.made_up_reports import checked, finding, moment, reported

FINDING: dict[str, Any] = {
    "title": "Routes hold more rows than the sample has tokens",
    "where": {"layer": 3, "request": "r0", "segment": 1, "extra": "x"},
    "expected": "9 rows: one per forwarded token (5 prompt + 5 response - 1)",
    "observed": "16 rows",
    "hint": (
        "The rows of every call were concatenated. The resumed call returns the rows of its whole"
        " prefix again: keep the rows of the first call up to where the second begins, then append."
    ),
    "witness": ".rollproof/routes.rows.json",
    "kind": "too many route rows",
    "flavour": "vllm",
    "after": ["abort of call 0 on s0 at 3 tokens", "sync to v1 on s0"],
}
FLAVOURS = ["vllm", "sglang"]


def report(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "schema": 1,
        "subject": "MyStack",
        "profile": "pr",
        "seed": 0,
        "cases": 1234,
        "seconds": 3.21,
        "summary": {"pass": 1, "fail": 1, "unknown": 1, "not_applicable": 1, "expected_fail": 0},
        "checks": [
            {
                "id": "routes.rows",
                "verdict": "fail",
                "reason": "2 findings",
                "exercised": {"rows": 3},
                "found": 5,
                "findings": [FINDING],
                "flavours": {"too many route rows": FLAVOURS},
            },
            {
                "id": "stitch.tokens",
                "verdict": "pass",
                "reason": "",
                "exercised": {"tokens": 1200},
                "found": 0,
                "findings": [],
            },
            {
                "id": "weights.pause",
                "verdict": "unknown",
                "reason": "not exercised: no pause occurred",
                "exercised": {},
                "findings": [],
            },
            {
                "id": "stitch.masks",
                "verdict": "not applicable",
                "reason": "the contract declares no mask",
                "exercised": {},
                "findings": [],
            },
        ],
        "exercised": {"aborts mid-decode": 120, "resumes": 1300},
        "canary": {
            "planted": "a row repeated",
            "expected_by": "routes.rows",
            "red": True,
            "reason": "",
        },
        "notes": [],
    }
    return {**base, **changes}


def test_a_report_reads_as_this() -> None:
    """Failing checks with where, engines, what preceded, expected, observed, hint and
    counterexample; then unknown ones, what was exercised, the self-test, and the sum.
    """
    expected = """\
MyStack  [profile pr, seed 0, 1,234 cases, 3.2 s]
  FAIL  routes.rows
    1. Routes hold more rows than the sample has tokens
       where     request r0, segment 1, layer 3, extra x
       engines   vllm, sglang
       after     abort of call 0 on s0 at 3 tokens; sync to v1 on s0
       expected  9 rows: one per forwarded token (5 prompt + 5 response - 1)
       observed  16 rows
       hint      The rows of every call were concatenated. The resumed call returns the rows of its whole prefix
                 again: keep the rows of the first call up to where the second begins, then append.
       more      rollproof checks routes.rows
       rerun     rollproof replay .rollproof/routes.rows.json --trust-subject
       show      rollproof show .rollproof/routes.rows.json
     ... and 4 more findings of this check
  UNKNOWN  weights.pause: not exercised: no pause occurred
  exercised 2 situations: resumes 1,300; aborts mid-decode 120
  self-test: a row repeated: detected by routes.rows, as expected
  4 checks: 1 pass, 1 fail, 1 unknown, 1 not applicable"""

    assert expected == text_of(report_lines(report()))


def test_a_story_has_a_line_an_event() -> None:
    """In place of the events before the finding; the one that broke the promise is marked, and of a
    long story the last events are shown.
    """
    story = [{"index": i, "time": 0.0, "text": f"event {i}"} for i in range(10)]
    story[9] = {**story[9], "text": "r0 delivered", "broke": True}
    shown = text_of(finding_lines({**FINDING, "story": story})).splitlines()

    assert [
        "       engine    vllm",
        "       story     ... 3 more events",
        *(f"                 event {i}" for i in range(3, 9)),
        "              >> r0 delivered",
        "       expected  9 rows: one per forwarded token (5 prompt + 5 response - 1)",
    ] == shown[2:12]
    assert Style.BAD == next(
        style
        for style, text in finding_lines({**FINDING, "story": story})
        if text.lstrip().startswith(">>")
    )


def test_a_story_of_nothing_but_the_finding_is_left_out() -> None:
    """An event that only says again where the finding is adds nothing; the events before it do."""
    story = [{"index": 3, "time": 0.0, "text": "r0 delivered", "broke": True}]
    text = text_of(finding_lines({**FINDING, "story": story}))

    assert "story" not in text
    assert "       after     abort of call 0 on s0 at 3 tokens; sync to v1 on s0" in text


def test_verbose_lists_every_check() -> None:
    """Passing checks say how often they were exercised, inapplicable ones why they are."""
    text = text_of(report_lines(report(), verbose=True))

    assert "  PASS  stitch.tokens (exercised 1,200 times)" in text
    assert "  NOT APPLICABLE  stitch.masks: the contract declares no mask" in text


def test_situations_are_one_line_unless_verbose() -> None:
    """Those that matter most come first and the others are counted; situations that never arose are
    named; -v lists all.
    """
    counts = {"route rows": 9000, **{f"s{i}": i for i in range(1, 9)}, "resumes": 3, "deaths": 0}
    short = text_of(report_lines(report(exercised=counts)))
    long = text_of(report_lines(report(exercised=counts), verbose=True))

    assert (
        "  exercised 10 situations: resumes 3; route rows 9,000; s8 8; s7 7; s6 6; s5 5; ... (-v"
        " lists all)\n  not exercised: deaths\n" in short
    )
    assert "    s8 .......................................................... 8\n" in long


def test_unknown_checks_that_share_a_reason_are_counted() -> None:
    """More than six of them are one line; -v lists them."""
    alike = [
        {
            "id": f"stitch.c{i}",
            "verdict": "unknown",
            "reason": "no sample was delivered",
            "exercised": {},
            "findings": [],
        }
        for i in range(7)
    ]
    few = text_of(report_lines(report(checks=alike[:6])))
    many = text_of(report_lines(report(checks=alike)))

    assert 6 == few.count("  UNKNOWN  stitch.c")
    assert "  UNKNOWN  7 checks: no sample was delivered (-v lists them)" in many
    assert "stitch.c1" not in many
    assert "stitch.c1" in text_of(report_lines(report(checks=alike), verbose=True))


def test_checks_of_a_family_that_share_a_reason_are_one_line() -> None:
    """A family that the contract rules out is one line, which names its checks if they are few."""
    ruled_out = [
        {
            "id": check_id,
            "verdict": "not applicable",
            "reason": reason,
            "exercised": {},
            "findings": [],
        }
        for check_id, reason in (
            *((f"routes.{n}", "no routes") for n in "abcdefgh"),
            ("stitch.x", "no masks"),
            ("stitch.y", "no masks"),
        )
    ]
    lines = [text for _, text in report_lines(report(checks=ruled_out), verbose=True)]

    assert [
        "  NOT APPLICABLE  8 checks of routes: no routes",
        "  NOT APPLICABLE  2 checks of stitch (x, y): no masks",
    ] == lines[1:3]


def test_a_green_canary_is_bad_news() -> None:
    """A planted fault that no check detected is reported in the style of a failure."""
    canary = {"planted": "a row repeated", "expected_by": "routes.rows", "red": False, "reason": ""}
    style, text = next(
        (style, text) for style, text in report_lines(report(canary=canary)) if "self-test" in text
    )

    assert Style.BAD == style
    assert "NOT detected by routes.rows" in text
    assert "cannot be trusted" in " ".join(text.split())


def test_an_unplanted_canary_says_why() -> None:
    """If no trace was suitable for a planted fault, the report says so."""
    canary = {
        "planted": None,
        "expected_by": None,
        "red": False,
        "reason": "every trace had findings",
    }

    assert "  self-test: no fault was planted (every trace had findings)" in text_of(
        report_lines(report(canary=canary))
    )


def test_what_was_not_exercised_is_gathered_in_one_line() -> None:
    """A recorded run counts the unknown checks that it did not exercise; other unknown ones, and
    all under -v, are listed one by one.
    """
    idle = {
        "id": "weights.pause",
        "verdict": "unknown",
        "reason": "not exercised: no pause occurred",
        "exercised": {},
        "findings": [],
    }
    blind = {**idle, "id": "weights.labels", "reason": "no true versions were recorded"}
    gathered = report(checks=[idle, blind, {**idle, "id": "weights.abort"}])

    text = text_of(report_lines(gathered, gather=True))
    assert (
        "  UNKNOWN  weights.labels: no true versions were recorded\n  UNKNOWN  2 checks not"
        " exercised: their situations" in text
    )
    assert "weights.pause" not in text
    assert "  UNKNOWN  weights.pause: not exercised: no pause occurred" in text_of(
        report_lines(gathered, gather=True, verbose=True)
    )


def test_an_expected_failure_takes_one_line() -> None:
    """Its findings are known, so only the reason is shown; -v shows the findings too."""
    check = {**report()["checks"][0], "verdict": "expected fail", "reason": "verl #6029"}

    assert "  EXPECTED FAIL  routes.rows: verl #6029\n  exercised" in text_of(
        report_lines(report(checks=[check]))
    )
    assert "Routes hold more rows" in text_of(report_lines(report(checks=[check]), verbose=True))


def test_one_check_is_no_checks() -> None:
    """One check is counted in the singular."""
    summary = {"pass": 1, "fail": 0, "unknown": 0, "not_applicable": 0, "expected_fail": 0}

    assert "1 check: 1 pass, 0 fail, 0 unknown, 0 not applicable" == summary_text(
        report(summary=summary)
    )


def test_expected_failures_are_counted_apart() -> None:
    """The sum names expected failures only if there are some."""
    summary = {"pass": 3, "fail": 0, "unknown": 0, "not_applicable": 0, "expected_fail": 2}

    assert (
        "5 checks: 3 pass, 0 fail, 0 unknown, 0 not applicable, 2 expected to fail and did"
        == summary_text(report(summary=summary))
    )


def test_without_findings_their_number_is_shown() -> None:
    """A summary after items that have shown their findings names each failing check in one line."""
    text = text_of(report_lines(report(), findings=0))

    assert "  FAIL  routes.rows: 2 findings\n" in text
    assert "Routes hold more rows" not in text


def failing(*kinds: str, found: int, **changes: Any) -> dict[str, Any]:
    """A failing check with a finding of each of ``kinds``, in that order."""
    findings = [{**FINDING, "title": f"A {kind}.", "kind": kind} for kind in kinds]
    return {
        **report()["checks"][0],
        "findings": findings,
        "found": found,
        "kinds": dict.fromkeys(kinds, 1),
        "flavours": {},
        **changes,
    }


def test_one_finding_of_each_kind_is_shown() -> None:
    """Many findings of one kind do not hide another kind, which may have another cause."""
    text = text_of(check_lines(failing("late row", "late row", "late row", "lost row", found=40)))

    assert ["    1. A late row.", "    2. A lost row."] == re.findall(r" +\d\. .*", text)
    assert "     ... and 38 more findings of this check" == text.splitlines()[-1]


def test_a_few_kinds_are_shown_unless_all_are_asked_for() -> None:
    """Three kinds are shown, and the others are counted; -v shows one finding of each."""
    check = failing("a", "b", "c", "d", "e", found=9)
    short = text_of(report_lines(report(checks=[check])))
    long = text_of(report_lines(report(checks=[check]), verbose=True))

    assert (
        "    ... and 6 more findings of this check, of 2 other kinds too (-v shows one of each kind)"
        in short
    )
    assert [3, 5] == [len(re.findall(r" +\d\. A .\.", text)) for text in (short, long)]
    assert "    ... and 4 more findings of this check\n" in long


def test_only_an_option_that_there_is_is_advised() -> None:
    """An error of a recording has no -v: the other kinds are counted alone."""
    text = text_of(check_lines(failing("a", "b", "c", "d", "e", found=9)))

    assert text.endswith("... and 6 more findings of this check, of 2 other kinds too")


def test_a_kind_that_no_finding_shows_is_counted() -> None:
    """Of a kind that was only counted -v shows nothing more, and is not advised."""
    text = text_of(check_lines(failing("a", found=3, kinds={"a": 1, "b": 2})))

    assert "... and 2 more findings of this check, of 1 other kind too" in text
    assert "-v" not in text


def test_the_engine_of_a_finding_is_named() -> None:
    """The flavour of the counterexample comes first, then the others of its kind; many are counted;
    a trace without a flavour names none.
    """
    many = {"a": ["vllm", "sglang", "c", "d", "e", "f", "g", "h"]}
    one = text_of(check_lines(failing("a", found=1)))
    several = text_of(check_lines(failing("a", found=1, flavours={"a": ["sglang", "vllm"]})))
    lots = text_of(check_lines(failing("a", found=1, flavours=many)))
    none = text_of(finding_lines({**FINDING, "flavour": ""}))

    assert "       engine    vllm\n" in one
    assert "       engines   vllm, sglang\n" in several
    assert "       engines   vllm, sglang, c, d, e, f and 2 more\n" in lots
    assert "engine" not in none


def test_a_report_of_an_earlier_release_is_shown() -> None:
    """A finding without kind, engine and events is shown without them."""
    old = {key: FINDING[key] for key in ("title", "where", "expected", "observed", "hint")}
    check = {**report()["checks"][0], "findings": [{**old, "witness": None}]}
    del check["flavours"]
    text = text_of(check_lines(check))

    assert "    1. Routes hold more rows than the sample has tokens" in text
    assert "engine" not in text and "after " not in text


@pytest.mark.parametrize("verbose", [False, True])
def test_a_narrow_terminal_is_kept_to(*, verbose: bool) -> None:
    """At 60 columns no line is longer but for commands, which stay whole to be copied."""
    story = [moment(number, "an event that happened " * 4) for number in range(10)]
    found = [finding("what is wrong " * 9, kind=f"kind {n}", story=story) for n in range(5)]
    verdicts = ("fail", "unknown", "expected fail", "pass", "not applicable")
    checks = [
        checked(f"family.check-{verdict.replace(' ', '-')}", verdict, found, "a reason " * 20)
        for verdict in verdicts
    ]
    report = reported("subject " * 12, *checks, text="a long text " * 3)
    lines = text_of(report_lines(report, verbose=verbose, width=60)).splitlines()

    assert [] == [line for line in lines if len(line) > 60 and "rollproof " not in line]
    wide = text_of(report_lines(report, verbose=verbose, width=400))
    assert wide == text_of(report_lines(report, verbose=verbose))
