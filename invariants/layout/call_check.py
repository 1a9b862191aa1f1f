"""Layout calls: what a subject's layout function returned beside what the reference gives, decoded;
and how a check is made of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rollproof.core.events.layouts import Laid
from rollproof.core.records import IntArray, Scalar
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import count, listing, share
from rollproof.judging.checks import Check, Collector, trace_check
from rollproof.layouts.layout import Layout
from rollproof.layouts.layout_calls import Call
from rollproof.layouts.sources import Source

__all__ = [
    "LayoutCall",
    "compare_parts",
    "compare_rows",
    "functions_read",
    "layout_check",
    "outcome_check",
]


@dataclass(frozen=True, eq=False)
class LayoutCall:
    """One call of a trace, with its inputs and reference made again from its numbers."""

    event: Laid

    @cached_property
    def call(self) -> Call:
        """The numbers of the call. Raises ``LayoutError`` where a trace holds none."""
        return Call.from_dict(self.event.given)

    @property
    def layout(self) -> Layout:
        """The layout that the subject declares, with the sizes of this call."""
        return self.call.layout

    @property
    def settled(self) -> bool:
        """Whether the function returned something of the right kind on sound input."""
        return self.event.refused is None and self.event.misfit is None and not self.call.defect

    def before_tensor_slice(self, cp: int | None = None) -> Source:
        """The rows of a context-parallel rank (default: that of the call) before any slice over
        tensor-parallel ranks.
        """
        layout = replace(self.layout, mesh=replace(self.layout.mesh, sequence_parallel=False))
        return layout.rows(
            self.call.lengths, replace(self.call.rank, cp=self.call.rank.cp if cp is None else cp)
        )

    def place(self, **more: Scalar) -> dict[str, Scalar]:
        """A finding's place: the function, the sizes, the samples and the rank."""
        call, mesh = self.call, self.layout.mesh
        sizes = {
            name: getattr(mesh, name)
            for name in ("dp", "tp", "cp", "pp", "vpp", "ulysses")
            if getattr(mesh, name) > 1
        }
        place: dict[str, Scalar] = {"function": self.event.function}
        if call.case:
            place["case"] = call.case
        if sizes:
            place["sizes"] = ", ".join(f"{name} {size}" for name, size in sizes.items())
        if call.lengths:
            place["lengths"] = ", ".join(str(length) for length in call.lengths)
        if mesh.shares * mesh.pp * mesh.tp > 1:
            place["rank"] = str(call.rank)
        if mesh.vpp > 1:
            place["chunk"] = call.chunk
        return {**place, **more}

    def cells(self, source: Source, columns: list[int] | None = None) -> npt.NDArray[np.int64]:
        """The coded number of each row of ``source`` and column: ``(*shape, columns)``; -1 in
        padding.
        """
        coding = self.call.coding
        chosen = (
            np.arange(coding.columns) if columns is None else np.asarray(columns, dtype=np.int64)
        )
        cells = (source.sample * coding.positions + source.position)[
            ..., None
        ] * coding.columns + chosen
        return np.where(source.filled[..., None], cells, -1)

    def told(self, row: IntArray, cells: IntArray) -> str:
        """What a row ``(columns, width)`` holds, whose decoded numbers are ``cells``: whose it is,
        or the ids as they are.
        """
        if not len(cells):
            return "no columns"
        if (cells < 0).any():
            ids = row[int(np.flatnonzero(cells < 0)[0])].tolist()
            return f"ids {ids[:8]}, which no position has"
        places = [self.call.coding.place(int(cell)) for cell in cells]
        whose = listing(
            dict.fromkeys(
                f"position {position} of sample {sample}" for sample, position, _ in places
            )
        )
        columns = [column for _, _, column in places]
        return whose if columns == list(range(len(columns))) else f"{whose}, columns {columns}"


def compare_rows(
    one: LayoutCall,
    out: Collector,
    counter: str,
    rows: IntArray,
    wanted: Source,
    *,
    title: str,
    hint: str,
    others: Mapping[str, Callable[[], Source]] | None = None,
    columns: list[int] | None = None,
    **place: Scalar,
) -> None:
    """Compare rows ``(*wanted.shape, columns, width)`` with the reference, padding aside; one
    finding says what stands where.

    ``others`` are layouts that could have been meant, by name: the finding names the one that fits.
    ``columns`` are the payload's columns that the rows should hold (default: all). Shapes must have
    been compared before.
    """
    cells = one.call.coding.decode(rows) if rows.shape[-1] == one.call.coding.width else None
    goal = one.cells(wanted, columns)
    out.exercised(counter, int(wanted.filled.sum()))
    if cells is None or cells.shape != goal.shape:
        out.finding(
            f"{title}: another shape",
            expected=f"rows {(*goal.shape, one.call.coding.width)}",
            observed=f"{rows.shape}",
            where=one.place(**place),
            hint=(
                "Rows keep their columns and their top_k: what is flattened must be unfolded again."
            ),
        )
        return
    wrong = (cells != goal).any(axis=-1) & wanted.filled
    if not wrong.any():
        return
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    meant = next(
        (
            name
            for name, other in (others or {}).items()
            if _fits(one, cells, wanted.filled, other, columns)
        ),
        None,
    )
    row = " of sample ".join(str(i) for i in reversed(first))
    out.finding(
        title,
        expected=f"row {row}: {one.told(rows[first], goal[first])}",
        observed=(
            f"row {row} holds {one.told(rows[first], cells[first])}; so for"
            f" {share(int(wrong.sum()), int(wanted.filled.sum()), 'row')}"
        )
        + (f": this is {meant}" if meant else ""),
        where=one.place(**place),
        hint=hint,
    )


def _fits(
    one: LayoutCall,
    cells: IntArray,
    where: npt.NDArray[np.bool_],
    other: Callable[[], Source],
    columns: list[int] | None,
) -> bool:
    """Whether another layout, if it can be made at all, holds just these rows at the places that
    count.
    """
    try:
        source = other()
    except ValueError:
        return False
    goal = one.cells(source, columns)
    return goal.shape == cells.shape and bool((goal == cells)[where].all())


def compare_parts(
    one: LayoutCall,
    out: Collector,
    counter: str,
    wanted: list[Source],
    *,
    title: str,
    hint: str,
    columns: list[int] | None = None,
) -> None:
    """Compare the arrays that a function returned, sample by sample, with the whole samples."""
    parts = one.event.out
    if [len(part) for part in parts] != [len(source) for source in wanted]:
        out.finding(
            f"{title}: other lengths",
            expected=f"{count(len(wanted), 'sample')} of {[len(source) for source in wanted]} rows",
            observed=f"{count(len(parts), 'array')} of {[len(part) for part in parts]} rows",
            where=one.place(),
            hint=hint,
        )
        return
    for i, (part, source) in enumerate(zip(parts, wanted, strict=True)):
        compare_rows(
            one, out, counter, part, source, title=title, hint=hint, columns=columns, sample=i
        )


class _PerCall(EventCheck):
    """Calls ``judge`` with the calls of the functions that it names."""

    judge: ClassVar[Callable[[LayoutCall, Collector], None]]
    functions: ClassVar[tuple[str, ...]]
    settled: ClassVar[bool]

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._called = False

    def on_laid(self, event: Laid, out: Collector) -> None:
        """Judge one call."""
        if self.functions and event.function not in self.functions:
            return
        self._called = True
        one = LayoutCall(event)
        if self.settled and not one.settled:
            out.absent(
                "every call raised, or returned something else (layout.accepts, layout.returns)"
            )
            return
        type(self).judge(one, out)

    def finish(self, out: Collector) -> None:
        """Say which functions the subject does not have."""
        if not self._called:
            out.inapplicable(
                f"the subject has no function {listing(self.functions, 'or')} that takes such a"
                " case"
            )


def functions_read(checks: Iterable[Check]) -> frozenset[str] | None:
    """The functions whose calls some checks of layouts read; ``None`` where one of them reads all."""
    read = [getattr(check.trace, "functions", ()) for check in checks if check.about == "layouts"]
    return None if not all(read) else frozenset(name for names in read for name in names)


def layout_check(
    id: str, *, functions: tuple[str, ...], promise: str, exercised_by: str | tuple[str, ...]
) -> Callable[[Callable[[LayoutCall, Collector], None]], Check]:
    """Make a ``Check`` of a function ``(call, out)`` that gets what the named functions returned on
    sound input.
    """
    return _made(id, functions, promise, exercised_by, settled=True)


def outcome_check(
    id: str, *, promise: str, exercised_by: str | tuple[str, ...]
) -> Callable[[Callable[[LayoutCall, Collector], None]], Check]:
    """As ``layout_check``, for all functions and whatever became of the call."""
    return _made(id, (), promise, exercised_by, settled=False)


def _made(
    id: str,
    functions: tuple[str, ...],
    promise: str,
    exercised_by: str | tuple[str, ...],
    *,
    settled: bool,
) -> Callable[[Callable[[LayoutCall, Collector], None]], Check]:
    needs = f"calls of {listing(functions, 'or')}" if functions else "calls of layout functions"

    def make(judge: Callable[[LayoutCall, Collector], None]) -> Check:
        fold = type(
            judge.__name__,
            (_PerCall,),
            {"judge": staticmethod(judge), "functions": functions, "settled": settled},
        )
        made = trace_check(
            id,
            promise=promise,
            needs=f"{needs} (rollproof.layouts)",
            exercised_by=exercised_by,
            about="layouts",
        )
        return made(fold)

    return make
