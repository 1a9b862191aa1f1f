"""Stacks that cut what an engine sampled at stop sequences of their own."""

from __future__ import annotations

from tests.odd_stacks.bases.convo import Convo, Gateway, terms
from tests.odd_stacks.bases.thin import Thin, promise

CLOSED = (61, 62, 63)
STOPS = {"sequences": (CLOSED, (70,))}


def first_stop(ids):
    """The end of the first stop and its length, or None."""
    for end in range(1, len(ids) + 1):
        for stop in STOPS["sequences"]:
            if tuple(ids[max(0, end - len(stop)) : end]) == stop:
                return end, len(stop)
    return None


class CuttingGateway(Gateway):
    """Resumes whatever is aborted, also after a stop; a turn is cut when it is complete."""

    async def complete(self, chat, context, budget):
        turn = await super().complete(chat, context, budget)
        found = first_stop(turn.ids)
        if found:
            end = found[0]
            for values in (turn.ids, turn.lps, turn.vers):
                del values[end:]
            del chat.tape[max(0, len(context) + end - 1) :]
            turn.reason = "stop"
        return turn


class CutsCompleteTurns(Convo):
    """Stops are looked for in the turn, and the environment answers what is left of it."""

    gateway = CuttingGateway
    contract = terms(own_stops=STOPS)


class CutsEachReply(Thin):
    """Stops are looked for after each call, and dropped."""

    contract = promise(own_stops={**STOPS, "kept": False})

    def take(self, run, sent, out):
        super().take(run, sent, out)
        found = first_stop(run.ids)
        if found:
            end, size = found
            for values in (run.ids, run.lps, run.vers):
                del values[end - size :]
            if run.rows is not None:
                run.rows = run.rows[: len(run.request.prompt_ids) + len(run.ids) - 1]
            run.stopped = True

    def verdict(self, run, out):
        return "stop" if hasattr(run, "stopped") else super().verdict(run, out)
