"""Conversations that are unusual and keep their contracts."""

from __future__ import annotations

from tests.odd_stacks.bases.convo import Convo, Gateway, terms


class MasksEarlierCallsGate(Gateway):
    def merge(self, chat, turn, out):
        if out.token_ids and turn.ids:
            chat.off_policy = sum(len(m.ids) for m in chat.messages[1:]) + len(turn.ids)
        super().merge(chat, turn, out)


class MasksEarlierCalls(Convo):
    """slime's mask_offpolicy_in_partial_rollout: what was sampled before the last resuming call has
    loss mask 0, as declared.
    """

    contract = terms(masked=("earlier-calls",))
    gateway = MasksEarlierCallsGate

    def compile(self, chat):
        sample = super().compile(chat)
        sample["loss_mask"][: getattr(chat, "off_policy", 0)] = 0
        return sample


class MasksTheEnd(Convo):
    """The token with which a turn ended naturally is left out of the loss, as declared."""

    contract = terms(masked=("end",))

    def mask(self, chat, m, index):
        mask = super().mask(chat, m, index)
        if m.role == "assistant" and m.reason == "stop":
            mask[-1] = 0
        return mask


class LimitedConversations(Convo):
    """At most two turns of the model, answers cut to three tokens at both ends, as declared."""

    contract = terms(limits={"turns": 2, "answer": 3, "answer_keeps": "both"})

    def environment(self, chat, turn):
        if turn.reason != "stop" or chat.answered >= min(1, len(chat.request.turns)):
            return None
        answer, room = chat.request.turns[chat.answered], self.room(chat)
        if len(answer) > 3:
            answer = (*answer[:1], *answer[-2:])
        return answer if room is None or room > len(answer) else None


class CutBeforeTheAnswer(Convo):
    """A conversation whose next answer has no room left says that its length ended it, though the
    last turn came to its own end.
    """

    def environment(self, chat, turn):
        answer = super().environment(chat, turn)
        if answer is None and turn.reason == "stop" and chat.answered < len(chat.request.turns):
            chat.reason = "length"
        return answer
