"""Every small fault in a sample is found, and by one check: all single changes of scripted
rollouts, exhaustively.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest

from rollproof.core.events.rollout import Call
from rollproof.core.records import FinishReason, Rollout, Span
from rollproof.core.trace import Trace
from tests.support.scripted_rollouts import (
    ScriptedCall,
    blamed,
    sample_of,
    script_rollout,
    with_sample,
)

Change: TypeAlias = "tuple[str, Rollout, str]"
"""What was changed, the changed sample, and the check that must see it."""

STORIES: dict[str, tuple[ScriptedCall, ...]] = {
    "resumed": (
        ScriptedCall(tokens=(11, 12, 13)),
        ScriptedCall(tokens=(21,), version=1),
        ScriptedCall(tokens=(31, 32), version=1, reason="length"),
    ),
    "empty calls": (
        ScriptedCall(),
        ScriptedCall(tokens=(11, 12), version=1),
        ScriptedCall(version=2),
        ScriptedCall(tokens=(21,), version=2, reason="stop"),
    ),
    "two turns": (
        ScriptedCall(tokens=(11,), reason="stop"),
        ScriptedCall(observed=(91, 92), tokens=(21,), version=1),
        ScriptedCall(tokens=(22,), version=1, reason="stop"),
    ),
    "lost and restarted": (
        ScriptedCall(tokens=(11,)),
        ScriptedCall(tokens=(5,), lost=True, version=1),
        ScriptedCall(tokens=(21, 22), restart=True, version=1, reason="stop"),
    ),
    "one call": (ScriptedCall(tokens=(11, 12, 13), version=1, reason="stop"),),
}
KINDS = ("sample", "min-max", "call", "span", "token")


def story(name: str, kind: str) -> Trace:
    """A correct trace; budget 6, so that the first story uses it up."""
    warm = script_rollout(
        ScriptedCall(reason="stop"),
        request_id="warm",
        prompt=(9,),
        versions=kind,
        loss_mask=True,
        masked=(),
    )
    late = script_rollout(
        ScriptedCall(version=3, reason="stop", server="s1"),
        request_id="late",
        prompt=(8,),
        versions=kind,
        script=warm,
    )
    return script_rollout(
        *STORIES[name], budget=6, versions=kind, loss_mask=True, masked=(), script=late
    ).trace()


def token_changes(sample: Rollout) -> Iterator[Change]:
    """Drop, double, replace and swap every token; drop and replace every prompt token."""
    ids, prompt, mask = sample.response_ids, sample.prompt_ids, sample.loss_mask
    assert mask is not None
    for i in range(len(ids)):
        yield (
            f"token {i} dropped",
            replace(sample, response_ids=ids[:i] + ids[i + 1 :]),
            "stitch.tokens" if mask[i] else "stitch.environment-tokens",
        )
        yield (
            f"token {i} doubled",
            replace(sample, response_ids=ids[: i + 1] + ids[i:]),
            "stitch.tokens",
        )
        yield (
            f"token {i} replaced",
            replace(sample, response_ids=(*ids[:i], 77, *ids[i + 1 :])),
            "stitch.tokens" if mask[i] else "stitch.environment-tokens",
        )
        if i:
            yield (
                f"token {i} swapped",
                replace(sample, response_ids=(*ids[: i - 1], ids[i], ids[i - 1], *ids[i + 1 :])),
                "stitch.tokens" if mask[i - 1 : i + 1].any() else "stitch.environment-tokens",
            )
    for i in range(len(prompt)):
        yield (
            f"prompt token {i} dropped",
            replace(sample, prompt_ids=prompt[:i] + prompt[i + 1 :]),
            "stitch.prompt",
        )
        yield (
            f"prompt token {i} replaced",
            replace(sample, prompt_ids=(*prompt[:i], 77, *prompt[i + 1 :])),
            "stitch.prompt",
        )


def logprob_changes(sample: Rollout) -> Iterator[Change]:
    """Every sampled token's logprob: absent, impossible, another; and one too many or too few."""
    assert sample.logprobs is not None
    assert sample.loss_mask is not None
    for value, check in (
        (np.nan, "present"),
        (0.25, "valid"),
        (-np.inf, "valid"),
        (0.0, "paired"),
        (-6.0, "paired"),
    ):
        for i in np.flatnonzero(sample.loss_mask):
            values = sample.logprobs.copy()
            values[i] = value
            yield (
                f"logprob {i} is {value}",
                replace(sample, logprobs=values),
                f"stitch.logprobs-{check}",
            )
    for i in range(len(sample.logprobs)):
        yield (
            f"logprob {i} dropped",
            replace(sample, logprobs=np.delete(sample.logprobs, i)),
            "stitch.logprobs-length",
        )
        yield (
            f"logprob {i} doubled",
            replace(sample, logprobs=np.insert(sample.logprobs, i, -1.0)),
            "stitch.logprobs-length",
        )
    yield "no logprobs", replace(sample, logprobs=None), "stitch.logprobs-present"


def mask_changes(sample: Rollout) -> Iterator[Change]:
    """Every entry dropped or made 2; those of the environment made 1, and sampled ones 0."""
    assert sample.loss_mask is not None
    for i in range(len(sample.loss_mask)):
        yield (
            f"mask {i} dropped",
            replace(sample, loss_mask=np.delete(sample.loss_mask, i)),
            "stitch.mask-shape",
        )
        for value, check in ((2, "stitch.mask-shape"), (1, "stitch.mask-environment")):
            mask = sample.loss_mask.copy()
            mask[i] = value
            if mask[i] != sample.loss_mask[i] and (value == 1 or sample.loss_mask[i]):
                yield f"mask {i} is {value}", replace(sample, loss_mask=mask), check
        if sample.loss_mask[i]:
            mask = sample.loss_mask.copy()
            mask[i] = 0
            yield f"mask {i} is 0", replace(sample, loss_mask=mask), "stitch.mask"


def reason_changes(sample: Rollout) -> Iterator[Change]:
    """Every other finish reason but ``completed``, which says the same as stop and length."""
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, None):
        if reason is not sample.finish_reason:
            yield (
                f"reason {reason}",
                replace(sample, finish_reason=reason),
                "stitch.finish-length" if reason == "length" else "stitch.finish-reason",
            )


def tag_changes(sample: Rollout, kind: str) -> Iterator[Change]:
    """Each tag made one that is published and wrong (3), one that never was (9), or none at all."""
    assert sample.loss_mask is not None
    own = [i for i, trained in enumerate(sample.loss_mask) if trained]
    for tag, check in ((3, ""), (9, "versions.published"), (None, "versions.present")):
        if kind == "sample":
            yield f"version {tag}", replace(sample, version=tag), check or "versions.sample-tag"
        elif kind == "min-max":
            yield f"min {tag}", replace(sample, min_version=tag), check or "versions.min-max"
            yield f"max {tag}", replace(sample, max_version=tag), check or "versions.min-max"
        elif kind == "call" and tag is not None:
            for i in range(len(sample.call_versions)):
                tags = (*sample.call_versions[:i], tag, *sample.call_versions[i + 1 :])
                yield (
                    f"call {i} is {tag}",
                    replace(sample, call_versions=tags),
                    check or "versions.call-tags",
                )
        elif kind == "token" and tag is not None:
            assert sample.token_versions is not None
            for i in own:
                versions = (*sample.token_versions[:i], tag, *sample.token_versions[i + 1 :])
                yield (
                    f"token {i} is {tag}",
                    replace(sample, token_versions=versions),
                    check or "versions.token-tags",
                )
        elif kind == "span" and tag is not None:
            for i in own:
                spans = (
                    *sample.spans[:i],
                    Span(start=i, end=i + 1, version=tag),
                    *sample.spans[i + 1 :],
                )
                yield (
                    f"span {i} is {tag}",
                    replace(sample, spans=spans),
                    check or "versions.span-tags",
                )
    if kind == "token":
        assert sample.token_versions is not None
        yield (
            "one tag too few",
            replace(sample, token_versions=sample.token_versions[:-1]),
            "versions.one-tag-per-token",
        )
    if kind == "span":
        yield "one span too few", replace(sample, spans=sample.spans[:-1]), "versions.spans-cover"
    if kind == "call" and len(sample.call_versions) > 1:
        yield (
            "one call too few",
            replace(sample, call_versions=sample.call_versions[:-1]),
            "versions.call-tags",
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STORIES)
def test_every_single_change_of_a_sample_is_blamed_on_one_check(name: str, kind: str) -> None:
    """No change is missed, and no other check is blamed."""
    trace = story(name, kind)
    assert set() == blamed(trace)
    sample = sample_of(trace)
    changes = [*tag_changes(sample, kind)]
    if kind == "sample":
        changes += [
            *token_changes(sample),
            *logprob_changes(sample),
            *mask_changes(sample),
            *reason_changes(sample),
        ]
    assert [] == [
        (what, seen, check)
        for what, changed, check in changes
        if (seen := blamed(with_sample(trace, changed))) != {check}
    ]


@pytest.mark.parametrize("name", STORIES)
def test_every_single_change_of_a_call_is_blamed_on_one_check(name: str) -> None:
    """A token of the prompt dropped, doubled or replaced; a token more granted; a parameter or the
    media changed.
    """
    trace = story(name, "token")
    bad = []
    for at, event in enumerate(trace.events):
        if not isinstance(event, Call) or event.request_id != "r0":
            continue
        ids = event.prompt_ids
        assert event.max_tokens is not None
        fields: list[tuple[dict[str, Any], set[str]]] = [
            *(
                ({"prompt_ids": ids[:i] + ids[i + 1 :]}, {"stitch.resume-prompt"})
                for i in range(len(ids))
            ),
            *(
                ({"prompt_ids": (*ids[:i], 77, *ids[i + 1 :])}, {"stitch.resume-prompt"})
                for i in range(len(ids))
            ),
            ({"prompt_ids": (*ids, 77)}, {"stitch.resume-prompt"}),
            ({"max_tokens": event.max_tokens + 1}, {"stitch.budget-granted"}),
            ({"max_tokens": None}, {"stitch.budget-granted"}),
            ({"media": "other"}, {"stitch.media"}),
            ({"want_logprobs": False}, {"stitch.logprobs-present"}),
        ]
        for changes, expected in fields:
            seen = blamed(
                trace.with_events(
                    [*trace.events[:at], replace(event, **changes), *trace.events[at + 1 :]]
                )
            )
            # a call without the last known token goes on from a shorter sequence, which the sample
            # does not follow
            also = {"stitch.tokens"} if changes.get("prompt_ids") == ids[:-1] else set()
            if not expected <= seen or not seen <= expected | also:
                bad.append((event.call_id, changes, seen))
    assert [] == bad
