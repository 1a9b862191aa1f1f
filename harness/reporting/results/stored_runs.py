"""A stored run: what one report says of one release, without what belongs to the run's machine.

A file holds one run in JSON::

    {"schema": 1, "results": "stack", "name": "verl", "version": "0.9.1", "date": "2026-11-30",
     "rollproof": "0.1.0", "profile": "pr", "seed": 0,
     "parts": {"client": {"cases": 130, "seconds": 1.7,
                          "checks": {"routes.rows": {"verdict": "pass"}, ...}}}}

The values of a check are its verdict and, if it did not pass, the reason, what is known of it, how
many findings there were, and the first of each kind in the form of a report.
"""

from __future__ import annotations

import datetime as dt
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from rollproof.core.checksums import fits, with_checksum
from rollproof.core.error_text import show
from rollproof.core.files import folder_name, write_atomically
from rollproof.core.json_codec import parse_json
from rollproof.errors import RollproofError, UsageError
from rollproof.reporting.text import first_of_each_kind

__all__ = [
    "StoredCheck",
    "StoredFinding",
    "StoredMoment",
    "StoredPart",
    "StoredRun",
    "read_runs",
    "runs_of_report",
    "write_run",
]

_SCHEMA = 1
_BYTES = 64 << 20
"""A stored run is smaller: it holds a few findings a check."""
_MOMENTS = 12
"""The last events of a story that are stored, beside those that broke the promise."""
_CHARACTERS = 1_000
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_KINDS = {"stack": "stack", "engine": "engine"}
"""What a run is about, by the key of its recipe; anything else is a subject."""


class StoredMoment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a story: its number, its time in seconds, and what happened in words."""

    index: int
    time: float
    text: str
    broke: bool = False


class StoredFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finding, with the fields of a report; its files lie on the run's machine, so that it names
    none.
    """

    title: str
    kind: str = ""
    where: dict[str, str | bool | int | float | None] = {}
    expected: str = ""
    observed: str = ""
    hint: str = ""
    flavour: str = ""
    after: list[str] = []
    story: list[StoredMoment] = []


class StoredCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict of a check.

    verdict: As in a report.
    reason: Why it is not a pass.
    found: The number of findings.
    known: Names of the known failures that the findings are.
    findings: The first of each kind, in their JSON form.
    """

    verdict: str
    reason: str = ""
    found: int = 0
    known: list[str] = []
    findings: list[StoredFinding] = []


class StoredPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was judged under one name.

    checks: The checks by id.
    cases: How many cases were run; 0 if that was not counted.
    seconds: How long it took, likewise.
    command: The command that judges it again; empty if none does.
    """

    checks: dict[str, StoredCheck]
    cases: int = 0
    seconds: float = 0.0
    command: str = ""


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of one release.

    results: What was judged: ``stack``, ``engine``, ``trainer`` or ``subject``.
    name: Its name.
    version: Its release or commit.
    date: Day of the run, ``YYYY-MM-DD``.
    rollproof: The version that judged it.
    profile: How much was run.
    seed: The seed of its random choices.
    parts: What was judged of it, by name.
    """

    results: str
    name: str
    version: str
    date: str
    rollproof: str
    profile: str
    seed: int
    parts: dict[str, StoredPart]
    schema: int = _SCHEMA

    @property
    def key(self) -> tuple[str, str, str]:
        """What was judged, its name and its version."""
        return self.results, self.name, self.version

    @property
    def title(self) -> str:
        """``verl 0.9.1``."""
        return f"{self.name} {self.version}"


def runs_of_report(
    report: Mapping[str, Any], *, date: str, name: str | None = None, version: str | None = None
) -> list[StoredRun]:
    """Return what a report says of each release that it is about.

    Args:
        report: The JSON of ``rollproof verify`` (schema 1).
        date: Day of the run, ``YYYY-MM-DD``.
        name: What to call a subject or engine; default: as its recipe does.
        version: The version of a subject or engine, which a report does not have.

    Raises:
        UsageError: It is no such report, or lacks a version.
    """
    # fromisoformat also takes 20261130 and 2026-W49-1, and runs are put in order by this text
    if not _DATE.fullmatch(date) or not _is_day(date):
        raise UsageError(f"--date {show(date)} must be a day, such as 2026-11-30.")
    reports = report.get("reports") or [report]
    try:
        parts = [(_identity(one, name, version), one) for one in reports]
        profile, seed = str(report["profile"]), int(report["seed"])
        stored = [(key, _part(one, _command(key, profile, seed))) for key, one in parts]
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"This is no report of `rollproof verify --json` ({show(str(error))})."
        ) from error
    grouped: dict[tuple[str, str, str], dict[str, StoredPart]] = {}
    for (category, title, release, part), found in stored:
        of_release = grouped.setdefault((category, title, release), {})
        # were it overwritten, the order of the report would decide which verdicts are kept
        if part in of_release:
            raise UsageError(f"The report holds {title} {release}, {part}, twice.")
        of_release[part] = found
    return [
        StoredRun(
            results=category,
            name=title,
            version=release,
            date=date,
            rollproof=metadata.version("rollproof"),
            profile=profile,
            seed=seed,
            parts=of_release,
        )
        for (category, title, release), of_release in grouped.items()
    ]


def _is_day(date: str) -> bool:
    try:
        dt.date.fromisoformat(date)
    except ValueError:
        return False
    return True


def _identity(
    report: Mapping[str, Any], name: str | None, version: str | None
) -> tuple[str, str, str, str]:
    """Return what was judged, its name, its version, and the name of the part."""
    recipe = report.get("recipe") or {}
    if "stack" in recipe:
        if name is not None or version is not None:
            raise UsageError(
                "--name and --version are for subjects and engines: the report names the stack"
                f" {recipe['stack']} {recipe['version']}."
            )
        return "stack", str(recipe["stack"]), str(recipe["version"]), str(recipe["part"])
    category = next((kind for key, kind in _KINDS.items() if key in recipe), "subject")
    part = str(recipe.get(category) or report["subject"])
    if version is None:
        raise UsageError(f"The report does not say which version of {part} was judged: --version.")
    return category, name or part, version, part


def _command(identity: tuple[str, str, str, str], profile: str, seed: int) -> str:
    """Return the command that judges a part again."""
    category, name, version, part = identity
    options = {
        "stack": f"--stack {shlex.quote(f'{name}=={version}')} --part {shlex.quote(part)}",
        "engine": f"--engine {shlex.quote(part)}",
        "subject": f"--subject {shlex.quote(part)}",
    }
    return f"rollproof verify {options[category]} --profile {profile} --seed {seed}"


def _part(report: Mapping[str, Any], command: str) -> StoredPart:
    return StoredPart(
        command=command,
        cases=int(report["cases"]),
        seconds=round(float(report["seconds"]), 1),
        checks={str(check["id"]): _check(check) for check in report["checks"]},
    )


def _check(check: Mapping[str, Any]) -> StoredCheck:
    return StoredCheck(
        verdict=str(check["verdict"]),
        reason=_cut(check.get("reason") or ""),
        found=int(check.get("found", len(check["findings"]))),
        known=[str(name) for name in check.get("known", ())],
        findings=[_finding(finding) for finding in first_of_each_kind(check["findings"])],
    )


def _finding(finding: Mapping[str, Any]) -> StoredFinding:
    story = finding.get("story", ())
    # a finding shows at the end of its story; what broke the promise may lie far before that
    first = len(story) - _MOMENTS
    return StoredFinding(
        title=_cut(finding["title"]),
        kind=_cut(finding.get("kind", "")),
        where={str(name): _place(value) for name, value in finding["where"].items()},
        expected=_cut(finding["expected"]),
        observed=_cut(finding["observed"]),
        hint=_cut(finding["hint"]),
        flavour=_cut(finding.get("flavour", "")),
        after=[_cut(event) for event in finding.get("after", ())],
        story=[
            StoredMoment(
                index=int(moment["index"]),
                time=float(moment["time"]),
                text=_cut(moment["text"]),
                broke=bool(moment.get("broke")),
            )
            for place, moment in enumerate(story)
            if place >= first or moment.get("broke")
        ],
    )


def _place(value: Any) -> str | bool | int | float | None:
    return value if value is None or isinstance(value, int | float) else _cut(value)


def _cut(text: Any) -> str:
    text = str(text)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."


def write_run(run: StoredRun, folder: Path) -> Path:
    """Write a run into a folder; that of the same release is replaced.

    Raises:
        UsageError: The file cannot be written.
    """
    file = folder / f"{folder_name('-'.join(run.key))}.json"
    data = msgspec.to_builtins(run)
    # sorted, a value a line: a diff of two runs then shows what changed and nothing else
    text = msgspec.json.format(msgspec.json.encode(with_checksum(data), order="sorted"), indent=1)
    write_atomically(file, text.decode() + "\n")
    return file


def read_runs(paths: Iterable[Path]) -> list[StoredRun]:
    """Return the runs in files, and in the JSON files of folders.

    Raises:
        UsageError: A file cannot be read, or is no stored run; no run was found.
    """
    runs = [_read(file) for path in paths for file in _files(path)]
    if not runs:
        raise UsageError(
            "There are no stored runs there: `rollproof matrix add REPORT.json --to DIR` stores the"
            " report of a run."
        )
    return runs


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return sorted(path.glob("*.json"))
    return [path]


def _read(file: Path) -> StoredRun:
    try:
        with file.open("rb") as opened:
            text = opened.read(_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file} cannot be opened: {error.strerror or error}.") from error
    if len(text) > _BYTES:
        raise UsageError(f"{file} has more than {_BYTES >> 20} MiB: it is no stored run.")
    try:
        data = parse_json(text)
        run = msgspec.convert(data, StoredRun)
    except (msgspec.ValidationError, RollproofError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} is no stored run: {error} `rollproof matrix add` makes one of a report."
        ) from error
    if fits(data) is False:
        raise UsageError(
            f"{file} does not fit its checksum: it is damaged, or was edited."
            " `rollproof matrix add` writes it anew."
        )
    if run.schema != _SCHEMA:
        raise UsageError(
            f"{file} has schema {run.schema}, and this rollproof reads schema {_SCHEMA}."
        )
    return run
