"""Checks on the loss mask: one 0 or 1 per token, no training on what the policy did not sample, and
no sampled token left out without a declaration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, MaskedTokens
from rollproof.invariants._shared.answered_turns import expect_answers
from rollproof.invariants._shared.delivery import (
    existing_delivery,
    reliable_delivery,
)
from rollproof.invariants._shared.phrases import count, listing, ranges, share, window
from rollproof.invariants.stitch.masked_tokens import masked_hint, scan_masked
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "stitch_mask",
    "stitch_mask_environment",
    "stitch_mask_shape",
]


def _no_mask(contract: Contract) -> str | None:
    return None if contract.loss_mask else "the contract declares no loss mask"


@request_check(
    "stitch.mask-shape",
    promise="A declared loss mask is present and holds one 0 or 1 per response token.",
    needs="a delivered sample",
    exercised_by="samples with a loss mask",
    applies=_no_mask,
)
def stitch_mask_shape(view: RequestView, out: Collector) -> None:
    """Check presence, length and values of the mask."""
    delivered = existing_delivery(view, out)
    if delivered is None:
        return
    mask, tokens = delivered.rollout.loss_mask, len(delivered.rollout.response_ids)
    if mask is None:
        # A sample without response tokens trains nothing, with or without a mask.
        if not tokens:
            return
        out.finding(
            "The sample carries no loss mask, although its contract declares one",
            expected=f"one 0 or 1 per response token: {tokens}",
            observed="loss_mask is None",
            where=view.place(),
            hint=(
                "Without a mask every token is trained on; declare loss_mask=False if that is"
                " intended."
            ),
        )
        return
    out.exercised("samples with a loss mask")
    if not delivered.fits(len(mask)):
        out.finding(
            f"The loss mask has {count(len(mask), 'entry|entries')} for {count(tokens, 'token')}",
            kind="a loss mask of another length than the tokens",
            expected=f"one entry per response token: {tokens}",
            observed=f"{len(mask)}: {window(mask.tolist())}" if len(mask) else "none",
            where=view.place(),
            hint=(
                "A resume must extend the mask with each segment, as it does the tokens (slime"
                " #1440)."
            ),
        )
        return
    invalid = [i for i, value in enumerate(mask.tolist()) if value not in (0, 1)]
    if invalid:
        out.finding(
            f"{share(len(invalid), tokens, 'entry|entries')} of the loss mask"
            f" {'is' if len(invalid) == 1 else 'are'} neither 0 nor 1",
            kind="entries of the loss mask are neither 0 nor 1",
            expected="0 (not trained on) or 1 (trained on)",
            observed=f"{window(mask.tolist(), invalid[0])}, at response index {ranges(invalid)}",
            where=view.place(index=invalid[0]),
            hint=("The mask is multiplied into the loss; put weights of tokens in another field."),
        )
        return


@request_check(
    "stitch.mask-environment",
    promise=(
        "Tokens of the environment (tool output, user turns) have loss mask 0 in the response."
    ),
    needs="a multi-turn sample with a loss mask",
    exercised_by="tokens of the environment",
    applies=_no_mask,
)
def stitch_mask_environment(view: RequestView, out: Collector) -> None:
    """Check the mask of every token that no policy sampled."""
    expect_answers(view, out)
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    # verl #2543: the attention mask was used as loss mask, so tool output was trained on.
    runs = [(run, start) for run, start in delivered.placed() if run.attempt < 0]
    mask = delivered.rollout.loss_mask
    if not runs or mask is None or len(mask) != len(delivered.rollout.response_ids):
        return
    trained = [i for run, start in runs for i in range(start, start + len(run.ids)) if mask[i]]
    total = sum(len(run.ids) for run, _ in runs)
    out.exercised("tokens of the environment", total)
    if trained:
        out.finding(
            f"{share(len(trained), total, 'token')} of the environment would be trained on",
            kind="tokens of the environment would be trained on",
            expected="loss mask 0 on every token that a tool or a user wrote",
            observed=f"1 at response index {ranges(trained)}",
            where=view.place(index=trained[0]),
            hint=(
                "The policy is pushed towards text that it did not sample; an attention mask"
                " is not a loss mask (verl #2543), and a mask built from lengths must count"
                " the environment's tokens."
            ),
        )


def _mask_not_judged(contract: Contract) -> str | None:
    if MaskedTokens.ANY in (contract.masked or ()):
        return "the contract lets any token be masked out (masked='any')"
    return _no_mask(contract)


@request_check(
    "stitch.mask",
    promise=(
        "Sampled tokens have loss mask 1, except those that the contract lets a stack mask out"
        " (masked, missing_logprobs='masked')."
    ),
    needs="a delivered sample with a loss mask, its engine calls and replies",
    exercised_by=("sampled tokens with loss mask 1", "sampled tokens masked out as declared"),
    applies=_mask_not_judged,
)
def stitch_mask(view: RequestView, out: Collector) -> None:
    """Check the mask of every token that the policy sampled."""
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    mask = delivered.rollout.loss_mask
    runs = [(run, start) for run, start in delivered.placed() if run.attempt >= 0]
    if not runs or mask is None or len(mask) != len(delivered.rollout.response_ids):
        return
    scan = scan_masked(view, delivered, runs)
    out.exercised("sampled tokens with loss mask 1", scan.trained)
    out.exercised("sampled tokens masked out as declared", scan.declared)
    if not scan.unexplained:
        # a common habit that explains the whole mask is likely meant: ask, and raise no alarm
        if scan.undeclared:
            reasons = listing(repr(str(reason)) for reason in scan.undeclared)
            out.absent(
                "sampled tokens are masked out, and the contract does not say which may be: declare"
                f" masked=({reasons},) if that is on purpose, or masked=() if no token may be"
            )
        return
    wrong = scan.unexplained
    declared = view.contract.masked
    allowed = "" if not declared else f", except for masked={listing(map(str, declared))}"
    out.finding(
        f"{share(len(wrong), scan.total, 'sampled token')}"
        f" {'is' if len(wrong) == 1 else 'are'} masked out of the loss",
        kind="sampled tokens are masked out of the loss",
        expected=f"loss mask 1 on every token that the policy sampled{allowed}",
        observed=f"0 at response index {ranges(wrong)}",
        where=view.place(
            index=wrong[0], segment=view.segment_of(len(view.request.prompt_ids) + wrong[0])
        ),
        hint=masked_hint(view, delivered, runs, wrong),
    )
