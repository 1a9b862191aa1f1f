from __future__ import annotations

import datetime as dt
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.errors import ExpectationError
from rollproof.judging.checks import request_check
from rollproof.judging.known_failures import KnownFailure
from rollproof.judging.registry import Registry
from rollproof.verification.expected_failures import Expectation, ExpectedFailures, Outcome

TODAY = dt.date(2026, 11, 28)
IDS = ("routes.rows", "routes.position", "stitch.tokens")

FILE = """\
# Faults of MyStack that we know about.

[[expected]]
check = "routes.rows"  # since the rewrite
reason = "routes are concatenated on resume"
issue = "verl#6029"

# Waits for the next release of the engine.
[[expected]]
check = "stitch.tokens"
reason = "EOS is sampled twice"
expires = 2027-03-01
"""


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(
        request_check(check_id, promise="p", needs="n", exercised_by="e")(lambda view, out: None)
        for check_id in IDS
    )
    monkeypatch.setattr(
        "rollproof.verification.expected_failures.default_registry", lambda: registry
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "expected.toml"
    file.write_text(FILE, encoding="utf-8")
    return file


def read(path: Path) -> ExpectedFailures:
    return ExpectedFailures.read(path, today=TODAY)


def outcome(subject: str = "MyStack", **verdicts: str) -> Outcome:
    by_id = {
        name.replace("_", "."): verdict.replace("_", " ") for name, verdict in verdicts.items()
    }
    titles = {
        check_id: f"title of {check_id}" for check_id, verdict in by_id.items() if "fail" in verdict
    }
    return Outcome(subject=subject, verdicts=by_id, titles=titles)


def refused(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ExpectationError) as error:
        read(path)
    return str(error.value)


def test_reasons_carry_their_issue(path: Path) -> None:
    """What run_conformance is handed is the reason, with the issue behind it."""
    expected = {
        "routes.rows": "routes are concatenated on resume (verl#6029)",
        "stitch.tokens": "EOS is sampled twice",
    }

    assert expected == read(path).reasons("MyStack")


def test_an_entry_with_a_subject_covers_only_that_one(path: Path) -> None:
    """An entry that names a subject excuses no other."""
    path.write_text(
        '[[expected]]\ncheck = "routes.rows"\nreason = "r"\nsubject = "A"\n', encoding="utf-8"
    )

    assert {"routes.rows": "r"} == read(path).reasons("A")
    assert {} == read(path).reasons("B")


def test_every_problem_of_a_file_is_listed_at_once(path: Path) -> None:
    """Unknown ids, unknown keys, a missing reason, a quoted date, an expired entry and a double
    one, each with its number.
    """
    text = refused(
        path,
        """
[[expected]]
check = "routes.row"
reason = "typo"
[[expected]]
check = "routes.rows"
reason = " "
[[expected]]
check = "stitch.tokens"
reason = "r"
since = "2026-11-28"
colour = "red"
[[expected]]
check = "routes.position"
reason = "engine bug"
expires = 2026-11-28
[[expected]]
check = "stitch.tokens"
reason = "a"
[[expected]]
check = "stitch.tokens"
reason = "b"
subject = "A"
""",
    )

    assert "entry 1 (routes.row): no check has this id: did you mean routes.rows" in text
    assert "entry 2 (routes.rows): reason is missing." in text
    assert (
        "entry 3 (stitch.tokens): unknown key 'colour'; valid keys are check, reason, issue, shows,"
        " since, expires, subject, after, strict, verdict." in text
    )
    assert (
        "entry 3 (stitch.tokens): since must be a date without quotes, such as 2026-11-28." in text
    )
    assert (
        "entry 4 (routes.position): expired on 2026-11-28: fix the fault, or set a later date"
        in text
    )
    assert "entry 6 (stitch.tokens): listed twice." in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[expected", "is not TOML"),
        (f"x = {'[' * 5000}", "is not TOML: it is nested too deep"),
        (f"x = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        (
            '[[expected]]\ncheck = "routes.rows"\nreason = "r"\nshows = []',
            "shows must be a list of kinds of findings",
        ),
        ("expected = 3", "must be written as [[expected]] tables"),
        ("[other]\nx = 1\n", "unknown key 'other'"),
    ],
)
def test_a_file_of_another_kind_is_refused(path: Path, text: str, told: str) -> None:
    """What is not a list of expected failures is an error that says what should stand there."""
    assert told in refused(path, text)


def test_an_absent_file_is_an_error_unless_it_is_about_to_be_written(tmp_path: Path) -> None:
    """Only the accept mode takes an absent file for an empty one."""
    with pytest.raises(
        ExpectationError,
        match=r"There is no file of expected failures at .*no\.toml; the accept option writes one",
    ):
        read(tmp_path / "no.toml")

    assert () == ExpectedFailures.read(tmp_path / "no.toml", missing_ok=True).entries


def test_a_listed_check_that_does_not_fail_is_stale(path: Path) -> None:
    """Passing and inapplicable checks are stale entries, failing and unknown ones are not."""
    listed = read(path)

    assert [] == listed.stale(outcome(routes_rows="expected_fail", stitch_tokens="unknown"))
    assert [] == listed.stale(outcome(routes_rows="fail"))
    stale = listed.stale(outcome(routes_rows="pass", stitch_tokens="not_applicable"))
    assert [True, True] == ["remove the entry, or accept" in text for text in stale]
    assert "its verdict is pass" in stale[0]
    assert "its verdict is not applicable" in stale[1]


def test_accepting_keeps_comments_and_adds_what_fails(path: Path) -> None:
    """An entry that still fails keeps its text to the letter; a new failure is added with a reason
    to replace; nothing else changes.
    """
    said = read(path).accept(
        [outcome(routes_rows="expected_fail", stitch_tokens="unknown", routes_position="fail")],
        today=TODAY,
    )
    added = """
[[expected]]
check = "routes.position"
reason = "accepted, to be explained: title of routes.position"
since = 2026-11-28
"""

    assert FILE + added == path.read_text(encoding="utf-8")
    assert [f"added routes.position: replace its reason in {path} by the true one"] == said
    assert 3 == len(read(path).entries)


def test_accepting_removes_what_passes_and_says_its_reason(path: Path) -> None:
    """The entry of a fixed check goes, together with the comment directly above it; its reason is
    told once more.
    """
    said = read(path).accept(
        [outcome(routes_rows="expected_fail", stitch_tokens="pass")], today=TODAY
    )

    assert FILE.partition("\n# Waits")[0] == path.read_text(encoding="utf-8")
    assert [
        "removed stitch.tokens: it does not fail any more (its reason was: EOS is sampled twice)"
    ] == said


def test_accepting_twice_changes_nothing(path: Path) -> None:
    """The accept mode is idempotent, byte for byte."""
    found = [outcome(routes_rows="expected_fail", stitch_tokens="pass", routes_position="fail")]
    read(path).accept(found, today=TODAY)
    once = path.read_bytes()

    assert [f"{path} already says what was found"] == read(path).accept(found, today=TODAY)
    assert once == path.read_bytes()


def test_runs_that_accept_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each adds its failures to what the others wrote since it read the file."""
    path = tmp_path / "new" / "expected.toml"
    files = [ExpectedFailures.read(path, missing_ok=True) for _ in range(8)]
    outcomes = [replace(outcome(routes_rows="fail"), subject=f"S{n}") for n in range(8)]
    # with a second subject, so that entries name theirs
    other = replace(outcome(routes_rows="pass"), subject="Other")
    with ThreadPoolExecutor(8) as pool:
        changes = [
            *pool.map(lambda n: files[n].accept([outcomes[n], other], today=TODAY), range(8))
        ]

    assert [1] * 8 == [len(lines) for lines in changes]
    assert {f"S{n}" for n in range(8)} == {entry.subject for entry in read(path).entries}
    assert ["expected.toml"] == [file.name for file in path.parent.iterdir()]


def test_accepting_keeps_what_was_written_during_the_run(path: Path) -> None:
    """A run that did not know an entry cannot show that it is no longer needed."""
    before = read(path)
    added = '\n[[expected]]\ncheck = "routes.position"\nreason = "r"\nshows = ["k"]\n'
    path.write_text(FILE + added, encoding="utf-8")
    found = [outcome(routes_rows="expected_fail", stitch_tokens="pass", routes_position="fail")]
    before.accept(found, today=TODAY)

    assert FILE.partition("\n# Waits")[0] + added == path.read_text(encoding="utf-8")


def test_accepting_keeps_what_no_run_decided(path: Path) -> None:
    """A run of other checks, or of another subject, takes nothing out."""
    path.write_text(
        FILE + '\n[[expected]]\ncheck = "routes.position"\nreason = "r"\nsubject = "Other"\n',
        encoding="utf-8",
    )
    before = path.read_bytes()
    read(path).accept([outcome(routes_position="pass")], today=TODAY)

    assert before == path.read_bytes()


def test_accepting_narrows_an_entry_to_the_subject_that_fails(path: Path) -> None:
    """An entry for all subjects that fails in one of two becomes an entry for that one, and the
    file holds.
    """
    runs = [outcome("A", routes_rows="expected_fail"), outcome("B", routes_rows="pass")]
    said = read(path).accept(runs, today=TODAY)

    assert ["narrowed routes.rows to A: it does not fail elsewhere"] == said
    assert [] == read(path).stale(runs[1])
    assert "routes.rows" in read(path).reasons("A")


def test_accepted_reasons_survive_every_character(path: Path) -> None:
    """Quotes, backslashes, control characters and DEL of a finding's title make valid TOML that
    reads back the same.
    """
    title = 'a "quoted" \\ path\n\x00\x1f\x7f é 🙂'
    path.unlink()
    found = Outcome(subject="S", verdicts={"routes.rows": "fail"}, titles={"routes.rows": title})
    ExpectedFailures.read(path, missing_ok=True, today=TODAY).accept([found], today=TODAY)

    assert (
        f"accepted, to be explained: {title}"
        == tomllib.loads(path.read_text(encoding="utf-8"))["expected"][0]["reason"]
    )


def test_a_file_in_another_spelling_is_not_rewritten(path: Path) -> None:
    """Inline tables cannot be edited without losing text, so accepting refuses them."""
    path.write_text('expected = [{check = "routes.rows", reason = "r"}]\n', encoding="utf-8")

    with pytest.raises(ExpectationError, match="cannot be rewritten: write its entries as"):
        read(path).accept([outcome(routes_rows="pass")], today=TODAY)


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("expected = []\n", ""),
        ("# known\nexpected = [ ] # none yet\n", "# known\n# none yet"),
        ("expected = [\n]\n", ""),
        ("# nothing\n", "# nothing"),
    ],
)
def test_accepting_into_a_file_without_entries(path: Path, text: str, stays: str) -> None:
    """Also where an empty list is written out, the result is TOML, with the comments of before."""
    path.write_text(text, encoding="utf-8")
    read(path).accept([outcome(routes_rows="fail")], today=TODAY)

    assert ["routes.rows"] == [entry.check for entry in read(path).entries]
    assert path.read_text(encoding="utf-8").startswith(f"{stays}\n\n[[" if stays else "[[")


@pytest.mark.parametrize(
    "text",
    [
        "expected = [ # none\n]\n",
        '[[expected]]\ncheck = "routes.rows"\nreason = """\n[[expected]]\n"""\n',
        '[["expected"]]\ncheck = "routes.rows"\nreason = "r"\n',
        '[[expected]] # a header with a comment\ncheck = "routes.rows"\nreason = "r"\n',
        '[[expected]]\r\ncheck = "routes.rows"\r\nreason = "r"\r\n',
    ],
)
@pytest.mark.parametrize("verdict", ["fail", "pass"])
def test_an_accepted_file_is_toml_or_stays_as_it_is(path: Path, text: str, verdict: str) -> None:
    """Whatever spelling a file has, it is edited to say what was found, or refused and not
    changed.
    """
    path.write_bytes(text.encode())
    found = outcome(routes_rows=verdict, stitch_tokens="fail", routes_position="pass")
    try:
        read(path).accept([found, replace(found, subject="Other")], today=TODAY)
    except ExpectationError:
        assert text.encode() == path.read_bytes()
    else:
        checks = {"stitch.tokens", "routes.rows"} if verdict == "fail" else {"stitch.tokens"}
        assert checks == {entry.check for entry in read(path).entries}


def test_a_title_that_is_no_text_of_utf8_is_accepted(path: Path) -> None:
    """A finding may quote a name with undecodable bytes."""
    found = Outcome(
        subject="S", verdicts={"routes.rows": "fail"}, titles={"routes.rows": "a\udc80b"}
    )
    path.unlink()
    ExpectedFailures.read(path, missing_ok=True, today=TODAY).accept([found], today=TODAY)

    assert "a\\udc80b" in read(path).entries[0].reason


SEVERAL = """
[[expected]]
check = "routes.rows"
reason = "rows are appended"
shows = ["too many route rows"]

[[expected]]
check = "routes.rows"
reason = "rows are lost"
shows = ["too few route rows"]
after = ["aborts mid-decode"]

[[expected]]
check = "routes.position"
reason = "only on some schedules"
strict = false

[[expected]]
check = "stitch.tokens"
reason = "never happens here"
verdict = "unknown"
"""


def test_a_check_may_have_an_entry_for_each_of_its_faults(path: Path) -> None:
    """Each entry is a known failure of its own, and one whose fault does not show is stale although
    its check fails. If nothing known shows, the check fails in a new way: no entry is stale.
    """
    path.write_text(SEVERAL, encoding="utf-8")
    listed = read(path)

    appended = KnownFailure(reason="rows are appended", kinds=("too many route rows",))
    lost = KnownFailure(
        reason="rows are lost", kinds=("too few route rows",), after=("aborts mid-decode",)
    )
    assert {"routes.rows": (appended, lost)} == listed.ways("MyStack")
    assert "rows are appended; rows are lost" == listed.reasons("MyStack")["routes.rows"]
    both = replace(
        outcome(routes_rows="expected_fail"), known={"routes.rows": (appended.reason, lost.reason)}
    )
    assert [] == listed.stale(both)
    (stale,) = listed.stale(replace(both, known={"routes.rows": (lost.reason,)}))
    assert "(rows are appended), but the check fails without showing it: remove" in stale
    assert [] == listed.stale(replace(both, known={"routes.rows": ()}))


def test_an_entry_that_is_not_strict_is_never_stale(path: Path) -> None:
    """Its check may fail, and may pass."""
    path.write_text(SEVERAL, encoding="utf-8")

    assert "routes.position" in read(path).reasons("MyStack")
    for verdict in ("pass", "expected_fail", "unknown"):
        assert [] == read(path).stale(outcome(routes_position=verdict))


def test_a_check_may_be_listed_as_unknown(path: Path) -> None:
    """It is no expected failure, and stale as soon as the check is decided."""
    path.write_text(SEVERAL, encoding="utf-8")
    listed = read(path)

    assert "stitch.tokens" not in listed.reasons("MyStack")
    assert {"stitch.tokens": "never happens here"} == listed.undecided("MyStack")
    assert [] == listed.stale(outcome(stitch_tokens="unknown"))
    (stale,) = listed.stale(outcome(stitch_tokens="pass"))
    assert "listed in" in stale
    assert "as undecided (never happens here), but its verdict is pass" in stale


def test_accepting_removes_what_does_not_show_and_what_is_decided(path: Path) -> None:
    """Of several entries of a check those stay whose fault shows. A check that was undecided and
    fails now is added, and entries that are not strict stay.
    """
    path.write_text(SEVERAL, encoding="utf-8")
    found = replace(
        outcome(routes_rows="expected_fail", routes_position="pass", stitch_tokens="fail"),
        known={"routes.rows": ("rows are lost",)},
    )
    changes = read(path).accept([found], today=TODAY)

    assert [
        "removed routes.rows: it does not show this any more (its reason was: rows are appended)",
        "removed stitch.tokens: it is decided now (its reason was: never happens here)",
        f"added stitch.tokens: replace its reason in {path} by the true one",
    ] == changes
    assert [
        "rows are lost",
        "only on some schedules",
        "accepted, to be explained: title of stitch.tokens",
    ] == [entry.reason for entry in read(path).entries]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('after = ["aborts mid-decode"]', "after needs shows"),
        ('shows = ["a"]\nafter = ["on Mondays"]', "after must be a list of situations"),
        ('shows = ["a"]\nafter = []', "after must be a list of situations"),
        ('strict = "no"', "strict must be true or false."),
        ('verdict = "pass"', 'verdict can only be "unknown"'),
        ("verdict = 3", 'verdict can only be "unknown"'),
        ('verdict = "unknown"\nshows = ["a"]', "a check that is unknown finds nothing"),
    ],
)
def test_conditions_of_an_entry_are_checked(path: Path, keys: str, problem: str) -> None:
    """A situation that no run counts, and other conditions that cannot be, are errors."""
    entry = f'[[expected]]\ncheck = "routes.rows"\nreason = "r"\n{keys}\n'
    assert problem in refused(path, entry)


def test_several_entries_need_reasons_of_their_own(path: Path) -> None:
    """Otherwise it could not be said which of them a check shows."""
    entry = '[[expected]]\ncheck = "routes.rows"\nreason = "r"\nshows = ["a"]\n'
    assert "entry 2 (routes.rows): listed twice." in refused(path, entry + entry)


@pytest.mark.parametrize(
    "entry",
    [
        Expectation(check="routes.rows", reason='a "quoted" \n reason'),
        Expectation(
            check="routes.rows",
            reason="r",
            issue="verl#1",
            shows=("a", "b"),
            since=TODAY,
            expires=dt.date(2999, 1, 1),
            subject="MyStack",
            after=("aborts mid-decode",),
            strict=False,
        ),
        Expectation(check="routes.rows", reason="r", undecided=True),
    ],
    ids=("least", "most", "undecided"),
)
def test_the_text_of_an_entry_reads_as_that_entry(path: Path, entry: Expectation) -> None:
    """What is written means what it was made from."""
    path.write_text(entry.toml(), encoding="utf-8")

    assert (entry,) == read(path).entries
