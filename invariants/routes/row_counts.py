"""Route counts: the story behind a wrong number of route rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollproof.core.contract import Rows
from rollproof.invariants._shared.phrases import count

if TYPE_CHECKING:
    from rollproof.invariants.routes.comparison import RouteEvidence
    from rollproof.judging.request_view import RequestView

__all__ = ["CountStory", "count_story", "uncut_rows", "wanted_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountStory:
    """What was observed, in words, what it usually means, and the place."""

    observed: str
    hint: str
    where: Mapping[str, int] = field(default_factory=dict)


def wanted_rows(evidence: RouteEvidence) -> str:
    """The number of rows that the contract allows, in words."""
    counts = evidence.row_counts
    if evidence.contract.rows is Rows.CAPTURED_PREFIX:
        return f"at most {count(counts[-1], 'row')}"
    text = count(counts[-1], "row")
    if evidence.contract.rows is Rows.FORWARDED and not evidence.cut:
        text += " (one per token but the last, which was sampled and never forwarded)"
    return f"{text} from position {evidence.start} on" if evidence.start else text


def uncut_rows(view: RequestView, evidence: RouteEvidence) -> int:
    """The rows of all tokens that the engines sampled, whatever became of the response."""
    sampled = len(view.request.prompt_ids) + len(view.stitched.response_ids)
    return sampled - evidence.start - (evidence.contract.rows is not Rows.ALL)


def count_story(view: RequestView, evidence: RouteEvidence) -> CountStory:
    """Why a sample has the number of rows that it has, as far as the replies tell."""
    rows, want, contract = evidence.rows, evidence.row_counts[-1], view.contract
    arrays = _arrays(view)
    joined = _joined(rows, arrays)
    if joined is not None:
        return joined
    where = {"position": evidence.start + min(rows, want)}
    if evidence.cut and rows == uncut_rows(view, evidence):
        return CountStory(
            observed=(
                f"{rows} rows: {count(rows - want, 'token')} of the response were cut off, and"
                " their rows were not"
            ),
            hint=(
                "Cut routed_experts where the response is cut. Same cause: verl #6027, #6089 (18057"
                " rows for 17804 tokens), miles #1069."
            ),
            where=where,
        )
    if rows == want + 1 and contract.rows is Rows.FORWARDED:
        return CountStory(
            observed=(
                f"{rows} rows, one more than tokens were forwarded: the last row is no capture"
            ),
            hint=(
                "Drop the row of the last token, or declare rows='T' with its final_row filler, so"
                " that a trainer does not replay it. Same cause: slime #1045, verl #6473."
            ),
            where=where,
        )
    if rows == want - 1 and contract.rows is Rows.ALL:
        return CountStory(
            observed=f"{rows} rows: the filler row of the last token is missing",
            hint="Append the declared final_row, or declare rows='T-1'. Same cause: slime #1045.",
            where=where,
        )
    empty = [
        number
        for number, segment in enumerate(view.segments)
        if number not in arrays
        and segment.consumed is not None
        and segment.consumed.output.token_ids
    ]
    late = {number: begin for number in empty if (begin := _begin(view, number))}
    if late:
        number, begin = next(iter(late.items()))
        return CountStory(
            observed=(
                f"{rows} rows; segment {number}'s were asked for from position {begin} on, where"
                " there are none"
            ),
            hint=(
                "On resume ask from the first row that is lacking, whose number is that of the rows"
                " that are there: the row of a segment's last token is computed by the next call."
            ),
            where=where | {"segment": number},
        )
    if empty:
        return CountStory(
            observed=(
                f"{rows} rows; the engine returned no routes for"
                f" segment{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))}"
            ),
            hint=(
                "A segment without routes leaves a hole: take its rows from the next call, which"
                " returns the whole sequence, fill it as declared, or refuse the sample. A short"
                " array is padded with zeros further on: expert 0, replayed."
            ),
            where=where,
        )
    return _partly(view, evidence, arrays, where)


def _begin(view: RequestView, number: int) -> int:
    """The position from which on a segment's reply has rows, were there any; 0 where it has no
    array at all.
    """
    reply = view.segments[number].consumed
    return 0 if reply is None or reply.output.routes is None else reply.output.routes_start


def _arrays(view: RequestView) -> dict[int, int]:
    """Number of rows that each received segment returned, where it returned any."""
    return {
        number: len(segment.consumed.output.routes)
        for number, segment in enumerate(view.segments)
        if segment.consumed is not None
        and segment.consumed.output.routes is not None
        and len(segment.consumed.output.routes)
    }


def _joined(rows: int, arrays: Mapping[int, int]) -> CountStory | None:
    """The whole arrays of several segments, one behind the other."""
    numbers = list(arrays)
    for first in range(len(numbers)):
        for last in range(first + 2, len(numbers) + 1):
            used = numbers[first:last]
            if sum(arrays[number] for number in used) != rows:
                continue
            total = " + ".join(f"{arrays[number]} of segment {number}" for number in used)
            repeated = arrays[used[0]]
            stand = "position 0 stands" if repeated == 1 else f"positions 0-{repeated - 1} stand"
            return CountStory(
                observed=(
                    f"{rows} = {total}: segment {used[1]}'s whole array was appended behind segment"
                    f" {used[0]}'s. A call returns rows for the whole sequence that it sends, so"
                    f" {stand} in the sample twice, and every row from {repeated} on belongs to"
                    " another token"
                ),
                hint=(
                    "On resume keep the rows that are there and append only what the new call adds,"
                    " `new[len(rows):]` (or ask the engine for those alone:"
                    " routed_experts_start_len in SGLang, routed_experts_prompt_start in vLLM)."
                    " Same cause: verl #6029 (ppo_kl spikes), AReaL's InfBridge."
                ),
                where={"segment": used[1], "position": repeated},
            )
    return None


def _partly(
    view: RequestView, evidence: RouteEvidence, arrays: Mapping[int, int], where: Mapping[str, int]
) -> CountStory:
    """The rows of one segment, of the response alone, or some other number."""
    rows, want = evidence.rows, evidence.row_counts[-1]
    for number, length in arrays.items():
        if length == rows and view.resumed:
            return CountStory(
                observed=f"{rows} rows: the array of segment {number} alone",
                hint="On resume append the rows that the new call adds, `new[len(rows):]`.",
                where={**where, "segment": number},
            )
    if rows < want and len(view.request.prompt_ids) == want - rows:
        return CountStory(
            observed=(
                f"{rows} rows: those of the response alone; row 0 belongs to position {want - rows}"
            ),
            hint=(
                "Keep the rows of the prompt too, or declare where row 0 stands"
                " (Rollout.routes_start)."
            ),
            where={"position": want - rows},
        )
    change = (
        f"{count(want - rows, 'row')} missing"
        if rows < want
        else f"{count(rows - want, 'row')} too many"
    )
    return CountStory(
        observed=f"{rows} rows: {change}",
        hint="Whatever is done to the tokens must be done to the rows in the same place.",
        where=where,
    )
