"""The matrix of known verdicts: what it accepts, and what it calls a deviation."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.cli.named_targets import Target
from rollproof.cli.verify import PinnedVerdicts
from rollproof.errors import ExpectationError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.report import Report
from rollproof.reporting.results.stored_runs import StoredRun, read_runs
from rollproof.stacks import STACKS, release_of
from rollproof.stacks.matrix import Matrix
from rollproof.verification.expected_failures import Outcome
from tests.stacks.test_released import BATCHES

ROOT = Path(__file__).parents[2]
TEXT = """
pinned = ["1.0", "2.0"]

[[entry]]
name = "rows are doubled"
kind = "fault"
versions = ["1.0"]
where = "x.py:3"
script = "x.py"
upstream = "x#1"
fails."routes.rows" = ["client"]
may_fail."routes.position" = ["client"]
shows."routes.rows" = ["too many route rows"]
shows."routes.position" = ["route rows are at the wrong positions"]
after = ["resumes"]

[[entry]]
name = "nobody looks"
kind = "open"
versions = ["1.0", "2.0"]
unknown."routes.presence" = ["client"]
"""


def test_a_known_check_has_its_reason() -> None:
    """``fails`` and ``may_fail`` of a part of a release; not those of another part or release."""
    matrix = Matrix.parse("x", TEXT)
    reason = "rows are doubled (fault, x#1)"
    assert {"routes.rows": reason, "routes.position": reason} == matrix.reasons("1.0", "client")
    assert {} == matrix.reasons("1.0", "batch") == matrix.reasons("2.0", "client")


REASON = "rows are doubled (fault, x#1)"


def outcome(
    verdicts: dict[str, str], *, known: bool = True, otherwise: dict[str, int] | None = None
) -> Outcome:
    """Of a run in which checks that failed showed what is known of them, or not, and so many
    findings of other kinds of ``routes.rows``.
    """
    failed = [check for check, verdict in verdicts.items() if verdict in ("fail", "expected fail")]
    seen = dict.fromkeys(failed, (REASON,)) if known else {}
    return Outcome(
        subject="x", verdicts=verdicts, known=seen, otherwise={"routes.rows": otherwise or {}}
    )


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"routes.rows": "expected fail"}, []),
        ({"routes.rows": "fail", "routes.position": "expected fail"}, []),
        ({"routes.rows": "fail", "routes.position": "pass"}, []),
        (
            {
                "routes.rows": "fail",
                "routes.presence": "unknown",
                "stitch.tokens": "not applicable",
            },
            [],
        ),
        (
            {"routes.rows": "pass"},
            [f"routes.rows is listed as failing ({REASON}), but its verdict is pass."],
        ),
        ({"routes.rows": "not applicable"}, ["but its verdict is not applicable."]),
        ({}, ["routes.rows is listed as failing, but was not judged."]),
        (
            {"routes.rows": "fail", "stitch.tokens": "fail"},
            ["stitch.tokens fails, and no entry of the matrix says why"],
        ),
        (
            {"routes.rows": "fail", "stitch.tokens": "unknown"},
            ["stitch.tokens is unknown, and no entry of the matrix says why"],
        ),
    ],
)
def test_whatever_the_matrix_does_not_say_is_a_deviation(
    verdicts: dict[str, str], expected: list[str]
) -> None:
    """Unexpected failures, passes and unknowns are deviations; what may fail may pass."""
    found = Matrix.parse("x", TEXT).deviations("1.0", "client", outcome(verdicts))
    assert len(expected) == len(found)
    assert all(text in sentence for text, sentence in zip(expected, found, strict=True))


def test_a_known_failure_that_finds_something_else_is_a_deviation() -> None:
    """A finding of another kind is listed with the number of them, and so is a failure that shows
    nothing of what is listed.
    """
    matrix = Matrix.parse("x", TEXT)
    more = outcome({"routes.rows": "fail"}, otherwise={"too few route rows": 3})
    (deviation,) = matrix.deviations("1.0", "client", more)
    assert deviation == (
        "x 1.0 client: routes.rows fails in a way that the matrix does not list: findings of the"
        " kind 'too few route rows' (3)."
    )
    other = outcome({"routes.rows": "fail"}, known=False, otherwise={"too few route rows": 3})
    assert (
        f"x 1.0 client: routes.rows fails, but shows nothing of what is listed: {REASON}."
        == matrix.deviations("1.0", "client", other)[1]
    )


def test_checks_that_were_not_requested_are_no_deviation() -> None:
    """A run with --only is held to what it judged."""
    assert [] == Matrix.parse("x", TEXT).deviations(
        "1.0", "client", outcome({"stitch.tokens": "pass"}), ["stitch.tokens"]
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('pinned = ["1.0", "2.0"]', "", "pinned must list at least one release"),
        (
            'kind = "fault"',
            'kind = "bug"',
            "rows are doubled: kind must be one of fault, choice, open",
        ),
        ('versions = ["1.0"]', 'versions = ["3.0"]', "rows are doubled: version 3.0 is not pinned"),
        ("routes.rows", "routes.rowz", "rows are doubled: no check is named routes.rowz"),
        (
            'script = "x.py"',
            "",
            "rows are doubled: a fault or a choice is shown by a script of docs/track_record",
        ),
        (
            'shows."routes.rows" = ["too many route rows"]',
            "",
            "shows must list the kinds of findings of routes.rows",
        ),
        (
            'shows."routes.rows"',
            'shows."stitch.tokens"',
            "shows names stitch.tokens, which does not fail",
        ),
        (
            'after = ["resumes"]',
            'after = ["resume"]',
            "rows are doubled: after names 'resume', which no run counts",
        ),
        ('upstream = "x#1"', "upstrem = 1", "rows are doubled: unknown key 'upstrem'"),
        (
            'unknown."routes.presence" = ["client"]',
            "",
            "nobody looks: no check is named under fails, may_fail, unknown",
        ),
        ("[[entry]]", "[[entry", "is not TOML"),
        ("[[entry]]", f"x = {'[' * 5000}\n[[entry]]", "is not TOML: it is nested too deep"),
        (
            'pinned = ["1.0", "2.0"]',
            'pinned = "1.0"',
            "pinned must list at least one release, as texts, each of them once",
        ),
        (
            'versions = ["1.0"]',
            'versions = "1.0"',
            "rows are doubled: versions must be a list of texts, each of them once",
        ),
        (
            'after = ["resumes"]',
            "after = []",
            (
                "rows are doubled: after must be a list of texts, each of them once; omit it"
                " if there is none"
            ),
        ),
        (
            'fails."routes.rows" = ["client"]',
            'fails."routes.rows" = "client"',
            "fails.'routes.rows' must be a list of texts",
        ),
        (
            'fails."routes.rows" = ["client"]',
            'fails."routes.rows" = []',
            "fails.'routes.rows' must be a list of texts",
        ),
        (
            'fails."routes.rows" = ["client"]',
            'fails."routes.rows" = ["client", "client"]',
            "fails.'routes.rows' must be a list of texts",
        ),
        (
            'shows."routes.rows" = ["too many route rows"]',
            'shows."routes.rows" = ["", 3]',
            "shows.'routes.rows' must be a list of texts",
        ),
        (
            'unknown."routes.presence" = ["client"]',
            'unknown = ["routes.presence"]',
            'unknown must be written as unknown."ID OF A CHECK"',
        ),
        (
            'may_fail."routes.position"',
            'may_fail."routes.rows"',
            "routes.rows stands under fails and under may_fail for client",
        ),
    ],
)
def test_a_malformed_matrix_is_refused_with_every_problem(old: str, new: str, problem: str) -> None:
    """Typing errors do not excuse anything in silence."""
    with pytest.raises(ExpectationError, match=re.escape(problem)):
        Matrix.parse("x", TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    "value",
    [
        "3",
        "true",
        "1.5",
        "nan",
        "2026-01-01",
        '"x"',
        "[3]",
        "[[]]",
        "[{}]",
        "{}",
        "{a = 1}",
        '""',
        "[]",
    ],
)
@pytest.mark.parametrize(
    "key",
    [
        "pinned",
        "name",
        "kind",
        "versions",
        "where",
        "fails",
        "may_fail",
        "unknown",
        "shows",
        "after",
    ],
)
def test_a_value_of_any_other_type_is_refused_and_nothing_else(key: str, value: str) -> None:
    """Whatever TOML can say: the problems are listed, and no exception of Python's comes out."""
    text = re.sub(rf"(?m)^{key}( |\.\S+ )= .*\n", "", TEXT).replace(
        "[[entry]]", f"[[entry]]\n{key} = {value}" if key != "pinned" else "[[entry]]"
    )
    text = f"{key} = {value}\n{text}" if key == "pinned" else text

    if (key, value) in (("where", '"x"'), ("where", '""'), ("name", '"x"')):
        return
    with pytest.raises(ExpectationError, match="The matrix of x cannot be used"):
        Matrix.parse("x", text)


@pytest.mark.parametrize("value", ["3", "true", "{}", '"x"', "[3]", "[[]]"])
def test_entries_that_are_no_tables_are_refused(value: str) -> None:
    """``entry = 3`` is TOML, too."""
    with pytest.raises(
        ExpectationError, match=re.escape("entry must be written as [[entry]] tables")
    ):
        Matrix.parse("x", f'pinned = ["1.0"]\nentry = {value}')


def test_two_entries_of_a_release_with_the_same_reason_are_refused() -> None:
    """What a run shows of one of them would be taken for the other."""
    with pytest.raises(
        ExpectationError, match=re.escape(f"two entries of 1.0 have the same reason: {REASON}")
    ):
        Matrix.parse("x", TEXT + TEXT[TEXT.index("[[entry]]") : TEXT.rindex("[[entry]]")])


def test_a_part_that_the_stack_does_not_have_is_a_deviation() -> None:
    """A typing error in the name of a part would excuse nothing and expect nothing. Of another
    release it is no affair of this one.
    """
    matrix = Matrix.parse("x", TEXT)

    assert [] == matrix.unknown_parts("1.0", {"client", "batch"}) == matrix.unknown_parts("3.0", ())
    assert [
        f"x 1.0 has no part client, which the matrix names ({REASON})."
    ] == matrix.unknown_parts("1.0", {"clients"})


@pytest.mark.parametrize("stack", list(STACKS))
def test_entries_with_situations_concern_rollouts(stack: str) -> None:
    """The cases of a conversion are not known to the ways: an entry that asks for a situation there
    would cover nothing.
    """
    batches = set(BATCHES.get(stack, ()))
    conversions = {
        (entry.name, part)
        for entry in Matrix.read(stack).entries
        if entry.after
        for table in (entry.fails, entry.may_fail)
        for parts in table.values()
        for part in parts
        if part in batches
    }

    assert set() == conversions


def test_a_stack_without_a_matrix_is_refused() -> None:
    """``--matrix`` needs one."""
    with pytest.raises(UsageError, match="ships no matrix of known verdicts for nosuch"):
        Matrix.read("nosuch")


@pytest.mark.parametrize("stack", list(STACKS))
def test_every_stack_has_a_matrix_of_releases_that_its_adapters_know(stack: str) -> None:
    """Pinned releases are known ones, and each script that an entry names is there, and listed in
    the track record.
    """
    matrix, record = (
        Matrix.read(stack),
        (ROOT / "docs" / "track-record.md").read_text(encoding="utf-8"),
    )
    assert set(matrix.pinned) <= set(release_of(stack).versions)
    for script in {entry.script for entry in matrix.entries if entry.script}:
        file, _, fault = script.partition(" ")
        text = (ROOT / "docs" / "track_record" / file).read_text(encoding="utf-8")
        assert f"def {fault}(" in text, script
        assert f"[{fault}](track_record/{file})" in record


def test_every_matrix_is_that_of_a_stack() -> None:
    """No file is left over, and none is no TOML."""
    files = sorted((ROOT / "harness" / "stacks").glob("*/verdicts.toml"))
    packages = sorted(package.rpartition(".")[2] for package in STACKS.values())
    assert packages == [path.parent.name for path in files]
    assert all(tomllib.loads(path.read_text(encoding="utf-8")) for path in files)


def test_a_run_without_the_matrix_counts_the_known_failures() -> None:
    """How many of the failing checks of a pinned release are known to fail; nothing where none is,
    or the release is not pinned. A version that the adapters do not know has the failures of the
    one as which it is driven.
    """
    target = Target(
        name="areno 0.10.0 merged-rollouts",
        factory=object,
        recipe={"stack": "areno", "version": "0.10.0", "part": "merged-rollouts"},
    )

    def note_of(version: str, *failing: str, **recipe: str) -> str | None:
        results = tuple(
            CheckResult(check=default_registry()[check], verdict=Verdict.FAIL, reason="1 finding")
            for check in failing
        )
        report = Report(subject=target.name, profile="batches", seed=0, results=results)
        return PinnedVerdicts.note(
            [replace(target, recipe={**target.recipe, "version": version, **recipe})], [report]
        )

    note = (
        "note: 1 of these checks is known to fail in this release (docs/stacks.md); --matrix shows"
        " what differs from that"
    )
    assert note == note_of("0.10.0", "batch.refuses", "batch.tokens")
    assert None is note_of("0.10.0", "batch.tokens")
    assert None is note_of("0.9.0", "batch.refuses")
    assert note == note_of("0.11.0", "batch.refuses", driven_as="0.10.0")


def test_other_code_is_compared_with_the_nearest_release() -> None:
    """A fork may have repaired what the release is known for, and lack a part: that is a note. What
    it fails in another way is a deviation, as in the release.
    """
    results = (
        CheckResult(
            check=default_registry()["stitch.tokens"], verdict=Verdict.FAIL, reason="1 finding"
        ),
        CheckResult(check=default_registry()["routes.rows"], verdict=Verdict.PASS, reason=""),
    )
    report = Report(subject="x 1.0+changed client", profile="pr", seed=0, results=results)
    matrix = Matrix.parse("x", TEXT.replace('["client"]', '["client", "other"]'))
    fork = PinnedVerdicts(
        matrix=matrix, version="1.0", parts={report.subject: "client"}, complete=True, exact=False
    )
    assert 1 == len(fork.deviations([report], ("routes.rows", "stitch.tokens")))
    (note,) = fork.repaired([report], ("routes.rows", "stitch.tokens"))
    assert (
        f"note: not as in x 1.0: x 1.0+changed client: routes.rows is listed as failing ({REASON}),"
        " but its verdict is pass."
    ) == note

    release = replace(fork, exact=True)
    assert 3 == len(release.deviations([report], ("routes.rows", "stitch.tokens")))
    assert [] == release.repaired([report], ("routes.rows", "stitch.tokens"))


RUNS = read_runs([ROOT / "docs" / "stack_results"])


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name}-{run.version}")
def test_what_is_listed_is_what_the_release_showed(run: StoredRun) -> None:
    """In the stored results of a pinned release a check that must fail fails, and one that cannot
    be decided is unknown: an entry that is no longer true would hide what comes next.
    """
    matrix = Matrix.read(run.name)
    for part, result in run.parts.items():
        for table, verdicts in (("fails", ("fail", "expected fail")), ("unknown", ("unknown",))):
            for entry in matrix.entries:
                for check in entry.checks(table, run.version, part):
                    assert result.checks[check].verdict in verdicts, (part, check, entry.reason)
