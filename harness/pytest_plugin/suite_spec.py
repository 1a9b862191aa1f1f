"""Suite: a subject that pytest items are about, how it is run, and what tells its runs from others."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollproof.core.files import folder_name
from rollproof.core.subjects import SubjectFactory
from rollproof.verification.options import ROLLOUTS

__all__ = ["Suite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A subject and how to run it; ``None`` means: as the session's options say.

    ``module`` is where the subject, or the class that makes it, is defined: others may define one
    of the same name. ``about`` is the kind of subject (``rollproof.verification.subject_kinds``).
    ``owner`` is the class that makes it, if any, and ``asked_by`` the decorated function.
    """

    factory: SubjectFactory | None = None
    name: str | None = None
    profile: str | None = None
    seed: int | None = None
    only: tuple[str, ...] = ()
    flavours: tuple[str, ...] | None = None
    expected: Mapping[str, str] | None = None
    about: str = ROLLOUTS
    module: str = ""
    owner: type[Any] | None = None
    asked_by: str = ""

    @property
    def title(self) -> str:
        """What reports call the subject."""
        return self.name or str(getattr(self.factory, "__qualname__", type(self.factory).__name__))

    @property
    def plain(self) -> bool:
        """Whether module and title say all: a class or a function by its own name, run as the
        session's options say.
        """
        own = self.owner is not None or self.title == getattr(self.factory, "__qualname__", None)
        return (
            own
            and "<" not in self.title
            and (self.profile, self.seed, self.only, self.flavours) == (None, None, (), None)
        )

    @property
    def folder(self) -> str:
        """The folder of its counterexamples: two suites of one title, or one subject run in several
        ways, have one each.
        """
        base = folder_name(f"{self.module}.{self.title}")
        ways = f"{self.asked_by} {self.profile} {self.seed} {self.only} {self.flavours}"
        return base if self.plain else f"{base}-{zlib.crc32(ways.encode()):08x}"

    def run_key(self, profile: str, seed: int) -> str:
        """What makes two runs the same in this process. Factories are told apart by identity: every
        lambda has the same name.
        """
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
                *sorted((self.expected or {}).items()),
            )
        )

    def report_key(self, profile: str, seed: int) -> str:
        """What makes two reports the same in all processes of a session."""
        named = "" if self.plain else self.asked_by
        return f"{self.module}:{self.title}:{named}:{profile}:{seed}:{self.only}:{self.flavours}"
