"""Calls of a subject's layout functions with their reference, decoded; and the decorators for
checks of layouts.
"""

from __future__ import annotations

import math
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
    """One call of a trace, with its inputs and its reference computed again from its numbers."""

    event: Laid

    @cached_property
    def call(self) -> Call:
        """The numbers of the call. Raises ``LayoutError`` if a trace holds none."""
        return Call.from_dict(self.event.given)

    @property
    def layout(self) -> Layout:
        """The layout that the subject declares, with the sizes of this call."""
        return self.call.layout

    @property
    def settled(self) -> bool:
        """Whether the function returned something of the right kind on sound input."""
        return self.event.refused is None and self.event.misfit is None and not self.call.defect

    @property
    def other_multiples(self) -> dict[str, int]:
        """Multiples of which lengths could be in place of the declared one, by name."""
        mesh = self.layout.mesh
        return {
            "1": 1,
            "tp": mesh.tp,
            "cp": mesh.cp,
            "2 * cp": 2 * mesh.cp,
            "tp * cp": mesh.tp * mesh.cp,
            "dp": mesh.dp,
            "lcm(tp, 2 * cp)": math.lcm(mesh.tp, 2 * mesh.cp),
        }

    def before_tensor_slice(self, cp: int | None = None) -> Source:
        """Return the rows of a context-parallel rank (default: the call's) before any slice over
        tensor-parallel ranks.
        """
        layout = replace(self.layout, mesh=replace(self.layout.mesh, sequence_parallel=False))
        return layout.rows(
            self.call.lengths, replace(self.call.rank, cp=self.call.rank.cp if cp is None else cp)
        )

    def place(self, **more: Scalar) -> dict[str, Scalar]:
        """Return the place of a finding: the function, the sizes, the samples and the rank."""
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
        """Return the coded number of each row of ``source`` and column: ``(*shape, columns)``; -1
        in padding.
        """
        coding = self.call.coding
        chosen = (
            np.arange(coding.columns) if columns is None else np.asarray(columns, dtype=np.int64)
        )
        cells = (source.sample * coding.positions + source.position)[
            ..., None
        ] * coding.columns + chosen
        return np.where(source.filled[..., None], cells, -1)

    def describe(self, row: IntArray, cells: IntArray) -> str:
        """Describe what a row ``(columns, width)`` with decoded numbers ``cells`` holds: its owner,
        or the ids.
        """
        if not len(cells):
            return "no columns"
        if (cells < 0).any():
            ids = row[int(np.flatnonzero(cells < 0)[0])].tolist()
            return f"ids {ids[:8]}, which no position has"
        places = [self.call.coding.place(int(cell)) for cell in cells]
        owner = listing(
            dict.fromkeys(
                f"position {position} of sample {sample}" for sample, position, _ in places
            )
        )
        columns = [column for _, _, column in places]
        return owner if columns == list(range(len(columns))) else f"{owner}, columns {columns}"


def compare_rows(
    record: LayoutCall,
    out: Collector,
    counter: str,
    rows: IntArray,
    expected: Source,
    *,
    title: str,
    hint: str,
    others: Mapping[str, Callable[[], Source]] | None = None,
    columns: list[int] | None = None,
    **place: Scalar,
) -> None:
    """Compare rows ``(*expected.shape, columns, width)`` with the reference, except for padding.

    Shapes must have been compared before.

    Args:
        record: The call.
        out: Takes the finding.
        counter: Counts the compared rows.
        rows: The rows that the function returned.
        expected: Where each row comes from.
        title: The title of the finding.
        hint: The hint of the finding.
        others: Layouts that could have been meant, by name: the finding names the one that fits.
        columns: The payload's columns that the rows should hold (default: all).
        **place: More keys for the place of the finding.
    """
    # Payloads are coded: each row names its sample, position and layer, so a misplaced row says
    # where it came from.
    cells = record.call.coding.decode(rows) if rows.shape[-1] == record.call.coding.width else None
    expected_cells = record.cells(expected, columns)
    out.exercised(counter, int(expected.filled.sum()))
    if cells is None or cells.shape != expected_cells.shape:
        out.finding(
            f"{title}: another shape",
            expected=f"rows {(*expected_cells.shape, record.call.coding.width)}",
            observed=f"{rows.shape}",
            where=record.place(**place),
            hint=(
                "Rows keep their columns and their top_k: what is flattened must be"
                " unflattened again."
            ),
        )
        return
    # Padding may hold anything here; layout.padding-rows judges it.
    wrong = (cells != expected_cells).any(axis=-1) & expected.filled
    if not wrong.any():
        return
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    fitting = next(
        (
            name
            for name, other in (others or {}).items()
            if _fits(record, cells, expected, other, columns)
        ),
        None,
    )
    row = " of sample ".join(str(i) for i in reversed(first))
    out.finding(
        title,
        expected=f"row {row}: {record.describe(rows[first], expected_cells[first])}",
        observed=(
            f"row {row} holds {record.describe(rows[first], cells[first])}; so for"
            f" {share(int(wrong.sum()), int(expected.filled.sum()), 'row')}"
        )
        + (f": this is {fitting}" if fitting else ""),
        where=record.place(**place),
        hint=hint,
    )


def _fits(
    record: LayoutCall,
    cells: IntArray,
    expected: Source,
    other: Callable[[], Source],
    columns: list[int] | None,
) -> bool:
    """Return whether another layout, if it exists, holds exactly these rows, wherever one of the
    two layouts has a row.
    """
    try:
        source = other()
    except ValueError:
        return False
    other_cells = record.cells(source, columns)
    # A row that another layout has in the padding of the declared one must be there, too.
    return other_cells.shape == cells.shape and bool(
        (other_cells == cells)[expected.filled | source.filled].all()
    )


def compare_parts(
    record: LayoutCall,
    out: Collector,
    counter: str,
    expected: list[Source],
    *,
    title: str,
    hint: str,
    columns: list[int] | None = None,
) -> None:
    """Compare the arrays that a function returned, one per sample, with the samples."""
    parts = record.event.out
    if [len(part) for part in parts] != [len(source) for source in expected]:
        out.finding(
            f"{title}: other lengths",
            expected=(
                f"{count(len(expected), 'sample')} of {[len(source) for source in expected]} rows"
            ),
            observed=f"{count(len(parts), 'array')} of {[len(part) for part in parts]} rows",
            where=record.place(),
            hint=hint,
        )
        return
    for i, (part, source) in enumerate(zip(parts, expected, strict=True)):
        compare_rows(
            record, out, counter, part, source, title=title, hint=hint, columns=columns, sample=i
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
        record = LayoutCall(event)
        # layout.accepts and layout.returns report such calls: the others would only repeat it.
        if self.settled and not record.settled:
            out.absent(
                "every call raised, or returned something else (layout.accepts, layout.returns)"
            )
            return
        type(self).judge(record, out)

    def finish(self, out: Collector) -> None:
        """Report which functions the subject does not have."""
        if not self._called:
            out.inapplicable(
                f"the subject has no function {listing(self.functions, 'or')} that takes such a"
                " case"
            )


def functions_read(checks: Iterable[Check]) -> frozenset[str] | None:
    """Return the functions that some layout checks read; ``None`` if one of them reads all."""
    read = [getattr(check.trace, "functions", ()) for check in checks if check.about == "layouts"]
    return None if not all(read) else frozenset(name for names in read for name in names)


def layout_check(
    id: str, *, functions: tuple[str, ...], promise: str, exercised_by: str | tuple[str, ...]
) -> Callable[[Callable[[LayoutCall, Collector], None]], Check]:
    """Make a ``Check`` of a function ``(call, out)`` that gets what the named functions returned on
    sound input.
    """
    return _make_check(id, functions, promise, exercised_by, settled=True)


def outcome_check(
    id: str, *, promise: str, exercised_by: str | tuple[str, ...]
) -> Callable[[Callable[[LayoutCall, Collector], None]], Check]:
    """As ``layout_check``, for all functions and every outcome of a call."""
    return _make_check(id, (), promise, exercised_by, settled=False)


def _make_check(
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
        make_trace_check = trace_check(
            id,
            promise=promise,
            needs=f"{needs} (rollproof.layouts)",
            exercised_by=exercised_by,
            about="layouts",
        )
        return make_trace_check(fold)

    return make
