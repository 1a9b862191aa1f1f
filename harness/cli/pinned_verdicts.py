"""Known: what rollproof's own matrix expects of a released stack, compared with what a run found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from rollproof.cli.named_targets import Target
from rollproof.errors import UsageError
from rollproof.judging.known_failures import KnownFailures
from rollproof.judging.report import Report
from rollproof.stacks.matrix import Matrix
from rollproof.verification.expected_failures import Outcome

__all__ = ["Known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The matrix of one release; ``parts`` maps names of targets to the parts of the stack."""

    matrix: Matrix
    version: str
    parts: Mapping[str, str]
    whole: bool = False

    @classmethod
    def of(cls, targets: Iterable[Target], *, whole: bool = False) -> Self:
        """Of the parts of one stack. Raises ``UsageError`` where its version is not pinned.

        ``whole``: these are all its parts, so that the matrix may name no other.
        """
        recipes = {target.name: target.recipe for target in targets}
        first = next(iter(recipes.values()))
        matrix, version = Matrix.read(first["stack"]), str(first["version"])
        if version not in matrix.pinned:
            raise UsageError(
                f"--matrix has no verdicts of {matrix.stack} {version}: pinned are"
                f" {', '.join(matrix.pinned)}. Judge it without --matrix."
            )
        parts = {name: str(recipe["part"]) for name, recipe in recipes.items()}
        return cls(matrix=matrix, version=version, parts=parts, whole=whole)

    @classmethod
    def told(cls, targets: Iterable[Target], reports: Iterable[Report]) -> str | None:
        """How many of the checks that fail in a run without --matrix are known to, and where that
        is written; ``None`` where none is.
        """
        try:
            known = cls.of(targets).reasons()
        except UsageError:
            return None
        count = sum(
            result.id in known[report.subject] for report in reports for result in report.failed
        )
        if not count:
            return None
        which = "1 of these checks is" if count == 1 else f"{count} of these checks are"
        return (
            f"note: {which} known to fail in this release (docs/stacks.md); --matrix says which"
            " fail otherwise than that"
        )

    def reasons(self) -> dict[str, dict[str, str]]:
        """By target: the checks that are known to fail, with the reason."""
        return {name: self.matrix.known(self.version, part) for name, part in self.parts.items()}

    def ways(self) -> dict[str, KnownFailures]:
        """By target: how those checks are known to fail."""
        return {name: self.matrix.ways(self.version, part) for name, part in self.parts.items()}

    def deviations(self, reports: Iterable[Report], judged: Collection[str]) -> list[str]:
        """What the reports say otherwise, of the checks that were ``judged``."""
        said = self.matrix.stray_parts(self.version, set(self.parts.values())) if self.whole else []
        for report in reports:
            outcome, part = Outcome.of_report(report.to_dict()), self.parts[report.subject]
            said += self.matrix.deviations(self.version, part, outcome, judged)
            canary = report.canary
            if canary is not None and canary.planted is not None and not canary.red:
                said.append(
                    f"{report.subject}: the canary stayed green ({canary.planted}): its other"
                    " verdicts cannot be trusted."
                )
        return said
