"""Multi-turn stacks on the reference client: unusual and correct ones, and faulty ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from rollproof.core.contract import Contract, MaskedTokens
from rollproof.core.limits import AnswerCut, RolloutLimits
from rollproof.core.records import EngineOutput, FinishReason, IntArray, Rollout
from rollproof.fakes.clients.reference_clients import (
    AsSampledTurns,
    ClientOptions,
    PartialOffClient,
    PartialSample,
)
from rollproof.fakes.engine.fleet import Fleet

__all__ = ["CORRECT", "FAULTY", "EndTokensMasked"]

_MULTI_TURN = ClientOptions(multi_turn=True)


class Turns(AsSampledTurns):
    """The reference; ``terms`` are other fields of its contract."""

    terms: ClassVar[dict[str, Any]] = {}

    async def run(self, sample: PartialSample) -> bool:
        """Begin without hidden tokens."""
        self.hidden[id(sample)] = set()
        return await super().run(sample)

    def __init__(self, options: ClientOptions | None = None) -> None:
        super().__init__(options)
        self.hidden: dict[int, set[int]] = {}

    def hide(self, sample: PartialSample, places: Iterable[int]) -> None:
        """Mask out tokens of the response, whoever sampled them."""
        self.hidden[id(sample)].update(places)

    def loss_mask(self, sample: PartialSample) -> IntArray | None:
        """The mask of the reference, with 0 at hidden tokens."""
        mask = super().loss_mask(sample)
        if mask is not None:
            mask[sorted(self.hidden.pop(id(sample)))] = 0
        return mask

    def declared(self, fleet: Fleet) -> Contract:
        """The contract of the reference with ``terms``."""
        return replace(super().declared(fleet), **self.terms)

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        """What is appended of an answer of the environment."""
        return answer

    def next_turn(self, sample: PartialSample) -> bool:
        """Append the words if there is room for them and one more token."""
        turns = sample.request.turns
        if sample.turn >= len(turns):
            return False
        words, budget = self.words(turns[sample.turn]), self.next_budget(sample)
        if budget is not None and budget <= len(words):
            return False
        sample.turn += 1
        self.observe(sample, words)
        return True

    def append(self, sample: PartialSample, words: tuple[int, ...]) -> None:
        """Append without recording."""
        sample.response.extend(words)
        sample.mask.extend([0] * len(words))
        sample.logprobs.extend([float("nan")] * len(words))
        sample.labels.extend([None] * len(words))


class OwnSeparators(Turns):
    """Puts role marks around each answer, and records them as the environment's."""

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        return (901, *answer, 902, 903)


class SeparatorsApart(OwnSeparators):
    """Records separators and words one after another."""

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        for words in (answer[:1], answer[1:-2], answer[-2:]):
            super().observe(sample, words)


class Unrecorded(Turns):
    """Renders answers itself and records none."""

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        self.append(sample, answer)


class UnrecordedTemplate(Unrecorded):
    """Renders answers in a template, records nothing, and declares the template."""

    terms: ClassVar[dict[str, Any]] = {"answer_template": True}

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        return (901, *answer, 902)


class KeepsTheStart(Turns):
    """Cuts answers after their first token."""

    terms: ClassVar[dict[str, Any]] = {"limits": RolloutLimits(answer=1)}

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        return answer[:1]


class KeepsTheEnd(Turns):
    """Cuts answers before their last two tokens, and puts a mark in place of the rest."""

    terms: ClassVar[dict[str, Any]] = {
        "limits": RolloutLimits(answer=2, answer_keeps=AnswerCut.END)
    }

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        return answer if len(answer) <= 2 else (904, *answer[-2:])


class StaleTokensMasked(Turns):
    """Masks out what older weights sampled, by the labels that it was shown."""

    terms: ClassVar[dict[str, Any]] = {"masked": (MaskedTokens.OLDER_WEIGHTS,)}

    def loss_mask(self, sample: PartialSample) -> IntArray | None:
        mask = super().loss_mask(sample)
        own = [label for label, sampled in zip(sample.labels, sample.mask, strict=True) if sampled]
        if mask is not None and own:
            mask[[label != own[-1] for label in sample.labels]] = 0
        return mask


class EarlierCallsMasked(Turns):
    """Masks out everything before the last resume (slime's mask_offpolicy_in_partial_rollout)."""

    terms: ClassVar[dict[str, Any]] = {"masked": (MaskedTokens.EARLIER_CALLS,)}

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.token_ids and sample.finish is FinishReason.ABORT:
            self.hide(sample, range(len(sample.response)))
        super().absorb(sample, sent, output)


class OverlongMasked(Turns):
    """Masks out every sample that no natural end closed (DAPO)."""

    terms: ClassVar[dict[str, Any]] = {"masked": (MaskedTokens.TRUNCATED,)}

    def loss_mask(self, sample: PartialSample) -> IntArray | None:
        mask = super().loss_mask(sample)
        return mask if mask is None or sample.finish is FinishReason.STOP else np.zeros_like(mask)


class OverlongMaskedUndeclared(OverlongMasked):
    """Does so without a declaration."""

    terms: ClassVar[dict[str, Any]] = {}


class EndsMasked(Turns):
    """Masks out the token with which a turn ended naturally."""

    terms: ClassVar[dict[str, Any]] = {"masked": ("end",)}

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        if output.token_ids and output.finish_reason is FinishReason.STOP:
            self.hide(sample, [len(sample.response) - 1])


class EndTokensMasked(Turns):
    """Masks out the end token of each turn by its id, also where an abort came right after it."""

    terms: ClassVar[dict[str, Any]] = {"masked": ("end",)}

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        if output.token_ids[-1:] == (self.fleet.policy.eos_id,):
            self.hide(sample, [len(sample.response) - 1])


class LengthAtTheLastTurn(Turns):
    """Ends by length where its limit of turns leaves no other one, and masks such samples out."""

    terms: ClassVar[dict[str, Any]] = {"limits": {"turns": 2}, "masked": ("truncated",)}

    def next_turn(self, sample: PartialSample) -> bool:
        if sample.turn < 1 or sample.turn >= len(sample.request.turns):
            return super().next_turn(sample)
        sample.finish = FinishReason.LENGTH
        return False

    def loss_mask(self, sample: PartialSample) -> IntArray | None:
        mask = super().loss_mask(sample)
        return mask if mask is None or sample.finish is FinishReason.STOP else np.zeros_like(mask)


class LengthWithoutALimit(LengthAtTheLastTurn):
    """Does so after the first answer, and declares no limit of turns."""

    terms: ClassVar[dict[str, Any]] = {"limits": {"turns": 9}, "masked": ("truncated",)}


class DropsCutTurns(PartialOffClient):
    """Resumes nothing: a sample with a cut turn is dropped."""

    options: ClassVar[ClientOptions] = _MULTI_TURN


class CutTurnsMasked(Turns):
    """Lets the environment answer a turn that an abort cut, and masks the turn out."""

    terms: ClassVar[dict[str, Any]] = {"masked": ("aborted",)}

    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        reason = super().finish_reason(sample, output)
        answers = sample.request.turns[sample.turn :]
        left = self.next_budget(sample)
        room = answers and (left is None or left > len(self.words(answers[0])))
        if reason is not FinishReason.ABORT or not (room and output.token_ids):
            return reason
        # the turn is what follows the last answer
        for i in range(len(sample.response) - 1, -1, -1):
            if not sample.mask[i]:
                break
            self.hide(sample, [i])
        return FinishReason.STOP


class OwnEnd(Turns):
    """Ends a sample that no natural end closed with an end of sequence of its own, masked out."""

    def finished(self, sample: PartialSample) -> Rollout:
        if sample.finish is FinishReason.LENGTH:
            self.append(sample, (self.fleet.policy.eos_id,))
        return super().finished(sample)


class OneAnswer(Turns):
    """Ends after one answer, as declared."""

    terms: ClassVar[dict[str, Any]] = {"limits": {"turns": 2}}

    def next_turn(self, sample: PartialSample) -> bool:
        return sample.turn < 1 and super().next_turn(sample)


class FragmentsTrained(CutTurnsMasked):
    """Lets the environment answer a turn that an abort cut, and trains on it."""

    terms: ClassVar[dict[str, Any]] = {}

    def hide(self, sample: PartialSample, places: Iterable[int]) -> None:
        """Forget it."""


class LaterTurnsMasked(Turns):
    """Masks out every turn but the first."""

    def merge_tokens(self, sample: PartialSample, output: EngineOutput) -> None:
        super().merge_tokens(sample, output)
        if sample.turn:
            end = len(sample.response)
            self.hide(sample, range(end - len(output.token_ids), end))


class FirstCallMasked(EarlierCallsMasked):
    """Loses the mask of earlier calls at a resume, and declares no such thing."""

    terms: ClassVar[dict[str, Any]] = {}


class NoSecondAnswer(Turns):
    """Loses every answer but the first."""

    def next_turn(self, sample: PartialSample) -> bool:
        return sample.turn < 1 and super().next_turn(sample)


class AnswerTwice(Unrecorded):
    """Sends the conversation again in front of each answer."""

    def next_turn(self, sample: PartialSample) -> bool:
        turns = sample.request.turns
        self._history = tuple(sample.ids)
        budget = self.next_budget(sample)
        if sample.turn >= len(turns) or (
            budget is not None and budget <= len(self._history) + len(turns[sample.turn])
        ):
            return False
        return super().next_turn(sample)

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        return (*self._history, *answer)


class KeepsTheWrongEnd(KeepsTheStart):
    """Cuts answers before their last token, although it declares the first."""

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        return answer[-1:]


class LastWordLost(Turns):
    """Leaves the last token of each answer out."""

    def words(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        return answer[:-1]


class SeparatorOnlySent(OwnSeparators):
    """Sends separators to the engine, and leaves them out of the sample."""

    def finished(self, sample: PartialSample) -> Rollout:
        for i in reversed(range(len(sample.response))):
            if sample.response[i] == 901 and not sample.mask[i]:
                for values in (sample.response, sample.mask, sample.logprobs, sample.labels):
                    del values[i]  # type: ignore[attr-defined]
        return super().finished(sample)


CORRECT = (
    OwnSeparators,
    SeparatorsApart,
    Unrecorded,
    UnrecordedTemplate,
    KeepsTheStart,
    KeepsTheEnd,
    StaleTokensMasked,
    EarlierCallsMasked,
    OverlongMasked,
    OverlongMaskedUndeclared,
    EndsMasked,
    EndTokensMasked,
    LengthAtTheLastTurn,
    DropsCutTurns,
    CutTurnsMasked,
    OwnEnd,
    OneAnswer,
)
FAULTY = {
    LengthWithoutALimit: "stitch.finish-length",
    FragmentsTrained: "lifecycle.cut-turns-not-answered",
    LaterTurnsMasked: "stitch.mask",
    FirstCallMasked: "stitch.mask",
    NoSecondAnswer: "lifecycle.ended-turns-answered",
    AnswerTwice: "stitch.environment-tokens",
    KeepsTheWrongEnd: "stitch.environment-tokens",
    LastWordLost: "stitch.environment-tokens",
    SeparatorOnlySent: "stitch.environment-tokens",
}
