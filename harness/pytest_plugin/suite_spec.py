"""``Suite``: a subject to be judged in pytest, how it is run, and the keys of its runs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollproof.core.files import folder_name
from rollproof.core.subjects import SubjectFactory
from rollproof.verification.options import ROLLOUTS

__all__ = ["Suite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A subject and how to run it; ``None`` takes the session's option.

    ``module`` is where the subject is defined, because another module may define one of the same
    name. ``expected_file`` lists expected failures in addition to ``expected``. ``about`` is the
    kind of subject (``rollproof.verification.subject_kinds``). ``owner`` is the test class that
    makes the subject, if any, and ``declared_by`` that class or the decorated function.
    """

    factory: SubjectFactory | None = None
    name: str | None = None
    profile: str | None = None
    seed: int | None = None
    only: tuple[str, ...] = ()
    flavours: tuple[str, ...] | None = None
    expected: Mapping[str, str] | None = None
    expected_file: Path | None = None
    about: str = ROLLOUTS
    module: str = ""
    owner: type[Any] | None = None
    declared_by: str = ""

    @property
    def title(self) -> str:
        """The name of the subject in reports."""
        return self.name or str(getattr(self.factory, "__qualname__", type(self.factory).__name__))

    @property
    def plain(self) -> bool:
        """Whether module and title identify the run.

        That is a class or a function under its own name, run as the session's options say.
        """
        own = self.owner is not None or self.title == getattr(self.factory, "__qualname__", None)
        return (
            own
            and "<" not in self.title
            and (self.profile, self.seed, self.only, self.flavours) == (None, None, (), None)
        )

    @property
    def folder(self) -> str:
        """The folder of its counterexamples.

        Two suites of one title, or one subject that is run with different options, have one each.
        """
        # A checksum rather than a counter: the next session must find the same folder again.
        base = folder_name(f"{self.module}.{self.title}")
        options = f"{self.declared_by} {self.profile} {self.seed} {self.only} {self.flavours}"
        return base if self.plain else f"{base}-{zlib.crc32(options.encode()):08x}"

    def run_key(self, profile: str, seed: int) -> str:
        """Return the key of a run within this process."""
        # By identity, because every lambda has the same name.
        subject = id(self.factory) if self.owner is None else id(self.owner)
        return repr(
            (
                subject,
                self.title,
                self.about,
                profile,
                seed,
                self.only,
                self.flavours,
                self.expected_file,
                *sorted((self.expected or {}).items()),
            )
        )

    def report_key(self, profile: str, seed: int) -> str:
        """Return the key of a report over all processes of a session."""
        declared_by = "" if self.plain else self.declared_by
        return (
            f"{self.module}:{self.title}:{declared_by}:{profile}:{seed}:{self.only}:{self.flavours}"
        )
