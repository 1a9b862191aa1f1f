"""Explains a wrong number of route rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Rows
from rollproof.invariants._shared.phrases import count

if TYPE_CHECKING:
    from rollproof.invariants.routes.comparison import RouteEvidence
    from rollproof.judging.request_view import RequestView

__all__ = ["CountCause", "expected_count", "explain_count", "uncut_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountCause:
    """What was observed, what it usually means, and the place."""

    observed: str
    hint: str
    where: Mapping[str, int] = field(default_factory=dict)


def expected_count(evidence: RouteEvidence) -> str:
    """Return the number of rows that the contract allows, in words."""
    counts = evidence.row_counts
    if evidence.contract.rows is Rows.CAPTURED_PREFIX:
        return f"at most {count(counts[-1], 'row')}"
    text = count(counts[-1], "row")
    if evidence.contract.rows is Rows.FORWARDED and not evidence.cut:
        text += " (one per token but the last, which was sampled and never forwarded)"
    return f"{text} from position {evidence.start} on" if evidence.start else text


def uncut_rows(view: RequestView, evidence: RouteEvidence) -> int:
    """Return the number of rows of all tokens that the engines sampled, even if the response was
    cut.
    """
    sampled = len(view.request.prompt_ids) + len(view.stitched.response_ids)
    return sampled - evidence.start - (evidence.contract.rows is not Rows.ALL)


def explain_count(view: RequestView, evidence: RouteEvidence) -> CountCause:
    """Return why a sample has its number of rows, as far as the replies show."""
    rows, allowed = evidence.rows, evidence.row_counts[-1]
    where = {"position": evidence.start + min(rows, allowed)}
    # The rows of an answer from a cache are those of another sequence, whatever their number.
    if view.uncalled:
        return CountCause(
            observed=f"{rows} rows in a sample for which no engine was called",
            hint=(
                "The rows are not those of this prompt and response: stitch.sampled-by-engine says"
                " where the sample came from."
            ),
            where=where,
        )
    arrays = _arrays(view)
    # The most frequent fault of the field comes first: arrays concatenated on resume (verl #6029,
    # AReaL InfBridge).
    return (
        _joined(rows, arrays)
        or _other_tokens(view, evidence, where)
        or _last_row(evidence, where)
        or _segment_without_rows(view, rows, arrays, where)
        or _partial_array(view, evidence, arrays, where)
    )


def _other_tokens(
    view: RequestView, evidence: RouteEvidence, where: Mapping[str, int]
) -> CountCause | None:
    """Explain the count as the rows of a longer response, or of another first position."""
    rows, allowed = evidence.rows, evidence.row_counts[-1]
    # verl #6089: 18057 rows for 17804 tokens, since the response was cut and its rows were not.
    if evidence.cut and rows == uncut_rows(view, evidence):
        return CountCause(
            observed=(
                f"{rows} rows: {count(rows - allowed, 'token')} of the response were cut off, and"
                " their rows were not"
            ),
            hint=(
                "Cut routed_experts at the same token as the response. Same cause: verl #6027,"
                " #6089 (18057 rows for 17804 tokens), miles #1069."
            ),
            where=where,
        )
    lacks = _lacking_tokens(view)
    if allowed < rows <= allowed + lacks:
        return CountCause(
            observed=(
                f"{rows} rows; the response lacks {count(lacks, 'token')} that an engine returned"
                " or was sent (the family stitch says which), and the rows of such tokens are there"
            ),
            hint=(
                "Deliver every token that the engine returned, stop tokens included: text is"
                " decoded without them, ids and rows keep them."
            ),
            where=where,
        )
    begins = evidence.start + allowed - rows
    if (
        rows
        and evidence.start
        and evidence.is_from(begins)
        and not evidence.is_from(evidence.start)
    ):
        return CountCause(
            observed=(
                f"{rows} rows, those from position {begins} on; routes_start says that they begin"
                f" at position {evidence.start}"
            ),
            hint=(
                "Every row belongs to another token then. Row i is of the forward pass of the token"
                " at position routes_start + i: cut the array at that position."
            ),
            where={"position": evidence.start},
        )
    return None


def _last_row(evidence: RouteEvidence, where: Mapping[str, int]) -> CountCause | None:
    """Explain the count by the row of the last token, which no forward pass computed."""
    rows, allowed, contract = evidence.rows, evidence.row_counts[-1], evidence.contract
    # Engines differ in whether they return a row for the last token, which no forward pass
    # computed.
    if rows == allowed + 1 and contract.rows is Rows.FORWARDED:
        return CountCause(
            observed=(
                f"{rows} rows, one more than tokens were forwarded: no forward pass computed"
                " the last row"
            ),
            hint=(
                "Drop the row of the last token, or declare rows='T' with its final_row filler, so"
                " that a trainer does not replay it. Same cause: slime #1045, verl #6473."
            ),
            where=where,
        )
    if rows == allowed - 1 and contract.rows is Rows.ALL:
        return CountCause(
            observed=f"{rows} rows: the filler row of the last token is missing",
            hint="Append the declared final_row, or declare rows='T-1'. Same cause: slime #1045.",
            where=where,
        )
    return None


def _segment_without_rows(
    view: RequestView, rows: int, arrays: Mapping[int, int], where: Mapping[str, int]
) -> CountCause | None:
    """Explain the count by a segment for which the engine returned no rows."""
    empty = [
        number
        for number, segment in enumerate(view.segments)
        if number not in arrays
        and segment.consumed is not None
        and segment.consumed.output.token_ids
    ]
    starts_too_late = {number: first for number in empty if (first := _first_row(view, number))}
    if starts_too_late:
        number, first = next(iter(starts_too_late.items()))
        return CountCause(
            observed=(
                f"{rows} rows; segment {number}'s were requested from position {first} on, where"
                " there are none"
            ),
            hint=(
                "On resume request rows from the first missing one, which is the number of"
                " rows that you have: the next call computes the row of a segment's last"
                " token."
            ),
            where={**where, "segment": number},
        )
    if empty:
        return CountCause(
            observed=(
                f"{rows} rows; the engine returned no routes for"
                f" segment{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))}"
            ),
            hint=(
                "A segment without routes leaves a gap: take its rows from the next call,"
                " which returns the entire sequence, fill them as declared, or reject the"
                " sample. Otherwise the array is later padded with zeros, and the trainer"
                " replays expert 0."
            ),
            where=where,
        )
    return None


def _lacking_tokens(view: RequestView) -> int:
    """Return how many tokens the response lacks, if all of it is there otherwise, in order."""
    sampled = view.stitched.response_ids
    response = () if view.rollout is None else view.rollout.response_ids
    rest = iter(sampled)
    return len(sampled) - len(response) if all(token in rest for token in response) else 0


def _first_row(view: RequestView, number: int) -> int:
    """Return the position of the first row of a segment's reply; 0 if it has no array."""
    reply = view.segments[number].consumed
    return 0 if reply is None or reply.output.routes is None else reply.output.routes_start


def _arrays(view: RequestView) -> dict[int, int]:
    """Return the number of rows that each received segment returned, if it returned any."""
    return {
        number: len(segment.consumed.output.routes)
        for number, segment in enumerate(view.segments)
        if segment.consumed is not None
        and segment.consumed.output.routes is not None
        and len(segment.consumed.output.routes)
    }


def _joined(rows: int, arrays: Mapping[int, int]) -> CountCause | None:
    """Explain the count as complete arrays of several segments, one after the other."""
    numbers = list(arrays)
    for low in range(len(numbers)):
        for last in range(low + 2, len(numbers) + 1):
            used = numbers[low:last]
            if sum(arrays[number] for number in used) != rows:
                continue
            total = " + ".join(f"{arrays[number]} of segment {number}" for number in used)
            repeated = arrays[used[0]]
            repeats = "position 0 is" if repeated == 1 else (f"positions 0-{repeated - 1} are")
            return CountCause(
                observed=(
                    f"{rows} = {total}: segment {used[1]}'s entire array was appended to"
                    f" segment {used[0]}'s. A call returns rows for the entire sequence that it"
                    f" sends, so {repeats} in the sample twice, and every row from {repeated}"
                    " on belongs to another token"
                ),
                hint=(
                    "On resume keep the existing rows and append only what the new call adds,"
                    " `new[len(rows):]` (or ask the engine for those alone:"
                    " routed_experts_start_len in SGLang, routed_experts_prompt_start in"
                    " vLLM). Same cause: verl #6029 (ppo_kl spikes), AReaL's InfBridge."
                ),
                where={"segment": used[1], "position": repeated},
            )
    return None


def _partial_array(
    view: RequestView, evidence: RouteEvidence, arrays: Mapping[int, int], where: Mapping[str, int]
) -> CountCause:
    """Explain the count as the rows of one segment, of the response alone, or some other number."""
    rows, allowed = evidence.rows, evidence.row_counts[-1]
    for number, length in arrays.items():
        if length == rows and view.resumed:
            return CountCause(
                observed=f"{rows} rows: the array of segment {number} alone",
                hint="On resume append the rows that the new call adds, `new[len(rows):]`.",
                where={**where, "segment": number},
            )
    if 0 < rows < allowed:
        missing = _missing_stretch(evidence, allowed - rows)
        begins = evidence.start + allowed - rows
        # without rows to compare with, their number alone says that
        if missing in (None, evidence.start) and len(view.request.prompt_ids) == allowed - rows:
            return CountCause(
                observed=(
                    f"{rows} rows: those of the response alone; row 0 belongs to position {begins}"
                ),
                hint=(
                    "Keep the rows of the prompt too, or declare the position of row 0"
                    " (Rollout.routes_start)."
                ),
                where={"position": begins},
            )
        if missing is not None and evidence.start < missing < evidence.end:
            return CountCause(
                observed=(
                    f"{rows} rows: those of {_positions(missing, allowed - rows)} are missing,"
                    " and the rows after them are there"
                ),
                hint=(
                    "A call returns rows for everything that it sends, tokens of the environment"
                    " and the last token of the call before included: append those that are not"
                    " there yet, `new[len(rows):]`, not as many as tokens were sampled."
                ),
                where={"position": missing},
            )
    change = (
        f"{count(allowed - rows, 'row')} missing"
        if rows < allowed
        else f"{count(rows - allowed, 'row')} too many"
    )
    return CountCause(
        observed=f"{rows} rows: {change}",
        hint="Every change of the tokens must be made to the rows at the same position.",
        where=where,
    )


def _positions(first: int, number: int) -> str:
    """Return ``number`` positions from ``first`` on, in words."""
    return f"position {first}" if number == 1 else f"positions {first}-{first + number - 1}"


def _missing_stretch(evidence: RouteEvidence, number: int) -> int | None:
    """Return the first of ``number`` neighbouring positions without whose rows the delivered ones
    are those that the engines returned; ``None`` if there are none, or nothing to compare with.
    """
    before = evidence.same_from(evidence.start)
    after = evidence.same_from(evidence.start + number)
    if before is None or after is None:
        return None
    right = len(before) if before.all() else int(np.argmin(before))
    return evidence.start + right if after[right:].all() else None
