"""Steps of a trainer with three MoE layers and two samples, event by event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Outcome, Phase, Purpose, Routing, Step
from rollproof.core.records import FinishReason, IntArray, Rollout
from rollproof.core.replay_contract import ReplayTerms
from rollproof.core.trace import Header, Trace
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.judging.checks import CheckResult
from rollproof.verification.traces import judge
from tests.support.replay_verdicts import CHECKS

PADDING = 7
"""The row behind those of the samples: r0 has rows 0 to 3, r1 rows 4 to 6."""
_TOTALS = (4, 3)


def choice(sample: int, position: int, layer: int, shift: int = 0) -> list[int]:
    """The experts of a token: its routers' own ones, or with a shift other ones."""
    first = (position + 2 * layer + 3 * sample + shift) % 8
    return [first, (first + 1) % 8]


def samples(shift: int | None = 0, lengths: Sequence[int] = _TOTALS) -> tuple[Rollout, ...]:
    """Two samples, r0 with two tokens of prompt and r1 with one; without a shift they have no
    routes.
    """
    out = []
    for number, total in enumerate(lengths):
        tokens = tuple(range(10 * number + 10, 10 * number + 10 + total))
        prompt = 2 - number
        rows = [
            [choice(number, position, layer, shift or 0) for layer in range(3)]
            for position in range(total - 1)
        ]
        out.append(
            Rollout(
                request_id=f"r{number}",
                prompt_ids=tokens[:prompt],
                response_ids=tokens[prompt:],
                finish_reason=FinishReason.LENGTH,
                routes=None if shift is None else np.array(rows, dtype=np.uint8),
            )
        )
    return tuple(out)


def step(
    name: str,
    action: Action = Action.REPLAY,
    *,
    shift: int = 0,
    rows: Mapping[tuple[int, int], Sequence[int]] | None = None,
    outcome: Mapping[str, Any] | None = None,
    calls: Mapping[str, Any] | None = None,
    more: Sequence[Event] = (),
    **fields: Any,
) -> list[Event]:
    """A step that ran right: each layer was called once for both samples and a row of padding.

    ``rows`` has other experts by layer and row, ``shift`` chooses other targets than the routers'
    own experts, and ``outcome`` and ``calls`` override fields of those events.
    """
    replays = action is Action.REPLAY
    made = Step(
        **{
            "episode": "e",
            "name": name,
            "action": action,
            "purpose": Purpose.TRAIN,
            "microbatches": (samples(shift if replays else None),),
            **fields,
        }
    )
    places = [(i, p) for i, total in enumerate(_TOTALS) for p in range(total)] + [(-1, 0)]
    routings = []
    for layer in range(3):
        experts = [
            choice(i, p, layer, shift if replays and p < _TOTALS[i] - 1 else 0) for i, p in places
        ]
        for (changed, row), ids in (rows or {}).items():
            if changed == layer:
                experts[row] = list(ids)
        routings.append(
            Routing(
                **{
                    "layer": layer,
                    "phase": Phase.FORWARD,
                    "experts": np.array(experts, dtype=np.int32),
                    "samples": np.array([i for i, _ in places]),
                    "positions": np.array([p for _, p in places]),
                    **(calls or {}),
                }
            )
        )
    results: dict[str, Any] = {
        "loss": 1.0,
        "logprobs": {"r0": np.array([-1.0, -2.0]), "r1": np.array([-3.0, -4.0])},
        "gradients": {"w": np.array([2.0, 1.0, 1.0])},
        "gates": {layer: np.array([1.0, 0.5, 0.5]) for layer in range(3)},
    }
    return [made, *routings, *more, Outcome(step=name, **{**results, **(outcome or {})})]


def trainer_contract(terms: Mapping[str, Any] | None = None, **changes: Any) -> Contract:
    """The contract of the trainer."""
    declared = ReplayTrainer.contract.replay
    assert isinstance(declared, ReplayTerms)
    plain: dict[str, Any] = {"installs": None, "models": (), "unsupported": ()}
    return replace(
        ReplayTrainer.contract, replay=replace(declared, **{**plain, **(terms or {})}), **changes
    )


def judged(
    check_id: str, *steps: Sequence[Event], terms: Mapping[str, Any] | None = None, **changes: Any
) -> CheckResult:
    """The result of a check on these steps."""
    header = Header(subject="scripted", contract=trainer_contract(terms, **changes), about="replay")
    events = [event for events in steps for event in events]
    return judge(Trace(header=header, events=()).with_events(events), CHECKS)[f"replay.{check_id}"]


def padded(rows: IntArray, width: int) -> IntArray:
    """The rows with ``width`` columns, the further ones of no expert."""
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1)
