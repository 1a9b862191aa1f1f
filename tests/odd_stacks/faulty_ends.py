"""Callers whose samples end too early, under another name, or never, with one fault each."""

from __future__ import annotations

from tests.odd_stacks.bases.convo import Convo
from tests.odd_stacks.bases.thin import Thin


class FourthPortionIsTheLast(Thin):
    """Calls of two tokens each; the loop stops at the fourth and takes its length for the sample's,
    whatever is left of the budget.
    """

    def left(self, run):
        rest = super().left(run)
        return 2 if rest is None else min(2, rest)

    def verdict(self, run, out):
        reason = super().verdict(run, out)
        spent = super().left(run) == 0
        return "" if reason == "length" and not spent and run.attempt < 4 else reason


class LaterMembersAreShort(Thin):
    """The third and later samples of a prompt get one token less (the index of a slot is off by
    one), and say length.
    """

    def prepare(self):
        self.members = {}

    def left(self, run):
        r, rest = run.request, super().left(run)
        names = self.members.setdefault(r.group or r.request_id, [])
        if r.request_id not in names:
            names.append(r.request_id)
        late = names.index(r.request_id) >= 2 and rest is not None and r.budget > 1
        return rest - 1 if late else rest

    def verdict(self, run, out):
        return super().verdict(run, out) or ("length" if self.left(run) == 0 else "")


class ShortUnderLoad(Thin):
    """With more than sixteen calls in flight a call samples at most four tokens, and its length is
    the sample's.
    """

    in_flight = 0

    async def ask(self, run, sent, left):
        self.in_flight += 1
        try:
            if self.in_flight > 16:
                left = 4 if left is None else min(left, 4)
            return await super().ask(run, sent, left)
        finally:
            self.in_flight -= 1


class DefaultOfTheServer(Thin):
    """A request without a budget gets the default of the completion endpoint, 16 tokens."""

    def left(self, run):
        rest = super().left(run)
        return 16 - len(run.ids) if rest is None else rest


class LastAbortIsPassedOn(Thin):
    """The loop ends once the budget is used up, and passes on what the engine said: abort."""

    def verdict(self, run, out):
        reason = super().verdict(run, out)
        return "abort" if reason == "length" and str(out.finish_reason) == "abort" else reason


class StaysWithItsServer(Thin):
    """A request belongs to one server, and is sent there again after each failure: if the server is
    gone for good, for ever.
    """

    def server(self, run):
        return self.servers[len(run.request.prompt_ids) % len(self.servers)]


class FullIsCut(Convo):
    """A conversation that fills its budget counts as cut, although its last turn ended by itself
    there and nothing was left to answer.
    """

    def compile(self, chat):
        full = chat.answered and self.room(chat) == 0
        return {**super().compile(chat), **({"finish_reason": "length"} if full else {})}
