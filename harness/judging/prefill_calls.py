"""Recognise the calls of a proxy that prefills on one server and decodes on another.

vLLM's proxies for disaggregated prefill ask a prefill server for one token, throw it away, and send
the same prompt with the budget to a decode server. The first call is no segment of the sample: it
is set aside, and its rows of the prompt are as right as those of the second call. A call that may
sample one token, followed by one of the same prompt that may sample more, has no other reading:
what a stack samples again after a loss has no larger budget. With one token left both calls are
alike; then only the request's other calls show it. A stack may also declare its prefill calls to
belong to no request (``fleet.internal()``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollproof.judging.races import set_attempts
from rollproof.judging.route_slices import RowPiece

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["add_internal_prefills", "set_aside_prefills"]


def set_aside_prefills(view: RequestView) -> None:
    """Move the prefill calls of a request from its attempts to ``set_aside``."""
    followed = list(zip(view.attempts, view.attempts[1:], strict=False))
    single = [call for call, later in followed if _asks_for_one(call, later)]
    if not single:
        return
    if any(_grants_more(call, later) for call, later in followed if call in single):
        view.context_rows += [rows for call in single if (rows := _prompt_rows(call)) is not None]
        view.set_aside += single
        set_attempts(view, [call for call in view.attempts if call not in single])
    elif any(_tokens(call) for call in single):
        # a prefill call and its decode call of one token, or a token that was lost
        view.undecided_race = True


def add_internal_prefills(view: RequestView, calls: Iterable[Attempt]) -> None:
    """Let a sample hold the rows of internal calls that sent its prompt, or more of it."""
    least, total = len(view.request.prompt_ids), view.total_ids
    for call in calls:
        sent = call.call.prompt_ids
        # a request before this one may have had the same prompt, as in an earlier epoch
        if call.call.index < view.submit.index:
            continue
        if len(sent) >= least and total[: len(sent)] == sent:
            rows = _prompt_rows(call)
            view.context_rows += [] if rows is None else [rows]


def _asks_for_one(call: Attempt, later: Attempt) -> bool:
    """Return whether a call may sample one token, and the next one sends its prompt again."""
    reply = call.consumed
    return (
        call.call.max_tokens == 1
        and call.call.prompt_ids == later.call.prompt_ids
        and not (reply is not None and reply.index > later.call.index)
    )


def _grants_more(call: Attempt, later: Attempt) -> bool:
    """Return whether a call sampled its token, and the next one may sample more."""
    budget = later.call.max_tokens
    return _tokens(call) == 1 and (budget is None or budget > 1)


def _tokens(call: Attempt) -> int:
    return 0 if call.consumed is None else len(call.consumed.output.token_ids)


def _prompt_rows(call: Attempt) -> RowPiece | None:
    """Return the rows of the prompt that a call captured, as those of the first attempt."""
    output = call.consumed.output if call.consumed is not None else None
    if output is None or output.routes is None or not output.token_ids:
        return None
    size = max(0, len(call.call.prompt_ids) - output.routes_start)
    return RowPiece(output.routes_start, 0, output.routes[:size])
