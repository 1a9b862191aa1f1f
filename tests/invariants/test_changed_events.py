"""What the checks make of every small change of correct traces is what was recorded.

``python -m tests.invariants.test_changed_events`` records it again. A recorded outcome is not
judged right by that: other tests say what is right. These show what a change of a check alters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import ActionKind, Case, Model
from rollproof.core.correction_terms import CorrectionTerms
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request
from rollproof.core.trace import Trace
from rollproof.corrections.correction_cases import CorrectionCase, correction_cases
from rollproof.corrections.correction_subject import correction_contract, correction_terms_of
from rollproof.engines.engine_targets import fake_target
from rollproof.fakes.clients.reference_clients import (
    AsSampled,
    AsSampledBounds,
    AsSampledCalls,
    AsSampledSpans,
    AsSampledTokens,
    AsSampledTurns,
    EngineKeep,
    PartialOffSurfaced,
)
from rollproof.fakes.trainers.reference_corrections import REFERENCES as CORRECTIONS
from rollproof.fakes.trainers.reference_corrections import RowwiseCorrection
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.fakes.trainers.reference_trainers import (
    CapturedPrefix,
    DenseFirst,
    OneExpert,
    RecordingTrainer,
)
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.invariants import default_registry
from rollproof.layouts import Fill, Layout, Order, Side
from rollproof.layouts.functions import FUNCTIONS
from rollproof.layouts.layout_cases import layout_calls
from rollproof.replay.driver import record_replay
from rollproof.verification.batches import record_batches
from rollproof.verification.corrections import record_corrections
from rollproof.verification.engines import run_experiments
from rollproof.verification.layouts import record_layouts
from rollproof.verification.runner import run_case
from tests.support.changed_events import outcomes
from tests.support.client_cases import ABORT, MODEL, R0, SYNC, act
from tests.support.padded_batches import Padder, padded_contract
from tests.support.random_corrections import random_terms
from tests.support.routed_requests import RoutedRequest, Segment
from tests.support.scripted_rollouts import ScriptedCall, script_rollout

RECORDED = Path(__file__).parent / "recorded"
_CHANGES = {
    "layout": 14,
    "batch": 200,
    "replay": 90,
    "routes": 70,
    "rollouts": 110,
    "scripted": 70,
    "engine": 90,
    "correction": 90,
}
"""About how many changes of one trace are judged."""
_EVERY_CONTRACT = {"layout": 0, "engine": 4, "replay": 4, "batch": 2}
"""One of so many changes of the contract is judged, if not of 7; 0: none."""
_OF_ROLLOUTS = ["stitch", "versions", "weights", "lifecycle"]
_FAMILIES = {"rollouts": _OF_ROLLOUTS, "scripted": _OF_ROLLOUTS}
"""The families of checks that judge the traces of a name, if they are not those of that name."""


_LONG: dict[str, Any] = {"budget": 81, "versions": "token"}


class FourChoices(ReplayTrainer):
    """Four experts per token, so that equal ones need not be neighbours of the first."""

    layout = Layout(num_layers=2, num_experts=8, top_k=4)


_LAYOUTS: dict[str, Layout] = {
    "packed": MegatronLike.layout,
    "padded": replace(
        MegatronLike.layout,
        packed=False,
        side=Side.LEFT,
        order=Order.BATCH_MAJOR,
        fill=Fill.SPREAD,
        final=Fill.SENTINEL,
    ),
}


def _layout_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    for name in FUNCTIONS:
        for words, layout in _LAYOUTS.items():
            calls = list(layout_calls(name, layout, draws=1))
            for call in {0: calls[0], 1: calls[len(calls) // 2], 2: calls[-1]}.values():
                made = lambda name=name, call=call: record_layouts(  # noqa: E731
                    MegatronLike, calls=[(name, call)]
                )
                yield f"{name}, {words}, {calls.index(call)}", made


def _batch_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    for mark, changes in (
        (False, {}),
        (True, {"filler": "zeros", "rows": "T", "final_row": "arange"}),
        (True, {"rows": "captured-prefix", "missing_logprobs": "masked", "abort_surfaces": True}),
    ):
        made = lambda mark=mark, changes=changes: record_batches(  # noqa: E731
            lambda: Padder(padded_contract(**changes), mark)
        )
        yield f"{changes}, marked {mark}", made


def _replay_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    for trainer, episodes in (
        (ReplayTrainer, ("self-replay", "drift", "old logprobs", "switching", "bad routes")),
        (ReplayTrainer, ("failure in forward", "evaluation", "model critic", "edges")),
        (RecordingTrainer, ("self-replay", "full recompute")),
        (DenseFirst, ("self-replay",)),
        (CapturedPrefix, ("self-replay", "bad routes")),
        (OneExpert, ("self-replay",)),
        (FourChoices, ("self-replay",)),
    ):
        for episode in episodes:
            made = lambda trainer=trainer, episode=episode: record_replay(  # noqa: E731
                trainer, only=(episode,)
            )
            yield f"{trainer.__name__}, {episode}", made


def _route_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    contracts: tuple[dict[str, Any], ...] = (
        {},
        {"provenance": "latest-prefill"},
        {"rows": "T", "final_row": "arange"},
        {"rows": "captured-prefix"},
        {"num_layers": 4, "moe_layers": (1, 3), "layer_axis": "all"},
        {"num_layers": 4, "moe_layers": (1, 3), "layer_axis": "moe"},
        {"num_experts": 256, "top_k": 1},
        {"num_experts": 300, "top_k": 4, "dtype": "int16", "filler": "minus-one"},
    )
    for changes in contracts:
        for segments in ((Segment(3, 1), Segment(2, 2)), (Segment(2, 1), Segment(1, 1, False))):
            request = RoutedRequest(segments=segments, changes=changes)
            other = RoutedRequest(request_id="r1", prompt=4, changes=changes)
            made = lambda request=request, other=other: request.trace(  # noqa: E731
                request.good(), other
            )
            yield f"{changes}, {[segment.tokens for segment in segments]}", made


def _rollout_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    do, kept = ActionKind, {"pause_mode": PauseMode.KEEP}
    other = Request(request_id="r1", prompt_ids=(21, 22), max_tokens=5)
    conversation = replace(R0, max_tokens=16, turns=((21, 22), (23, 24)))
    ending = Model(eos_every=3)
    for client, actions, more in (
        (AsSampled, (ABORT(2), SYNC(4)), {}),
        (AsSampledTokens, (SYNC(2),), kept),
        (AsSampledSpans, (act(do.SYNC_UNLABELLED, 3), ABORT(4)), {}),
        (AsSampledBounds, (ABORT(1), SYNC(2), act(do.RELABEL, 4)), {}),
        (AsSampledCalls, (SYNC(2), act(do.KILL, 4, server="s0", steps=3)), {"servers": 2}),
        (AsSampledTurns, (ABORT(3),), {"requests": (conversation,), "model": ending, "seed": 1}),
        (AsSampledTurns, (SYNC(5),), {"requests": (conversation,), "model": ending, "seed": 2}),
        (AsSampled, (act(do.SYNC_TWICE, 1), act(do.LAG, 3, server="s1")), {"servers": 2}),
        (AsSampled, (act(do.LOSE_REPLY, 2, steps=2), act(do.SYNC_FAILS, 4)), {}),
        (PartialOffSurfaced, (ABORT(2),), {}),
        (EngineKeep, (SYNC(2),), kept),
        (AsSampled, (ABORT(2), act(do.SYNC_IDENTITY, 3)), {"requests": (R0, other)}),
    ):
        case = Case(
            **{"flavour": "vllm", "requests": (R0,), "actions": actions, "model": MODEL, **more}
        )
        made = lambda client=client, case=case: run_case(client, case)  # noqa: E731
        yield f"{client.__name__}, {', '.join(action.do for action in actions)}, {case.seed}", made


def _scripted_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    """Rollouts that no reference client makes: masks with a reason, limits, templates, hedges."""
    words = ((91, 92, 93), (94, 95))
    turns = (
        ScriptedCall(tokens=(11, 12, 13), reason="stop"),
        ScriptedCall(observed=words[0], tokens=(21, 22), version=1),
        ScriptedCall(tokens=(23,), version=2, reason="stop"),
        ScriptedCall(observed=words[1], tokens=(31, 32), version=2, reason="length"),
    )
    resumed = (
        ScriptedCall(tokens=(11, 12, 13)),
        ScriptedCall(version=1),
        ScriptedCall(tokens=(14, 15), version=1, logprobs=False),
        ScriptedCall(tokens=(16,), version=2, lost=True),
        ScriptedCall(tokens=(17, 18), version=2, reason="stop"),
    )
    asked = {"budget": 40, "request": {"turns": words, "group": "g"}, "multi_turn": True}
    both = (1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1)
    for reason, hidden in (
        ("older-weights", range(8)),
        ("earlier-calls", range(8)),
        ("truncated", range(13)),
        ("end", (2, 8)),
    ):
        mask = np.array([0 if i in hidden else one for i, one in enumerate(both)])
        fields = {"loss_mask": True, "masked": (reason,), "sample": {"loss_mask": mask}, **asked}
        made = lambda fields=fields: script_rollout(*turns, **fields).trace()  # noqa: E731
        yield f"turns, masked {reason}", made
    cut = {"loss_mask": True, "masked": ("aborted",), **asked}
    mask = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1])
    cut_turns = (*turns[:2], replace(turns[3], version=1))
    yield (
        "turns, masked aborted",
        lambda: script_rollout(*cut_turns, sample={"loss_mask": mask}, **cut).trace(),
    )
    for kind in ("token", "span", "bounds", "call", "sample", "none"):
        fields = {"versions": kind, "missing_logprobs": "nan", "abort_surfaces": True}
        made = lambda fields=fields: script_rollout(*resumed, **fields).trace()  # noqa: E731
        yield f"resumed, versions {kind}", made
    limits = {"response": 14, "turn_tokens": 3, "answer": 3, "turns": 3, "answers_cut_turns": False}
    for name, parts, fields in (
        ("turns within limits", turns, {"limits": limits, "answer_template": True, **asked}),
        ("turns on two servers", (*turns[:2], replace(turns[2], server="s1"), turns[3]), asked),
        ("a long reply", (ScriptedCall(tokens=tuple(range(99, 180)), reason="length"),), _LONG),
        ("a budget in one token", (ScriptedCall(tokens=(11,), reason="length"),), {"budget": 1}),
        ("labels of text", resumed, {"labels": {0: "a", 1: "b", 2: "c"}}),
    ):
        made = lambda parts=parts, fields=fields: (  # noqa: E731
            script_rollout(*parts, **{"missing_logprobs": "nan", **fields}).trace()
        )
        yield name, made


def _correction_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    """One batch of each purpose, corrected as the references do and under drawn terms."""
    drawn = {f"terms {seed}": random_terms(seed) for seed in range(5)}
    subjects: dict[str, Any] = {
        **CORRECTIONS,
        **{
            name: type("Drawn", (RowwiseCorrection,), {"contract": correction_contract(terms)})
            for name, terms in drawn.items()
        },
    }
    for name, subject in subjects.items():
        made = lambda subject=subject: record_corrections(  # noqa: E731
            subject, cases=_one_case_a_purpose(correction_terms_of(subject().contract))
        )
        yield name, made


def _one_case_a_purpose(terms: CorrectionTerms) -> list[CorrectionCase]:
    return list({case.purpose: case for case in correction_cases(terms, 0, 1)}.values())


def _engine_traces() -> Iterator[tuple[str, Callable[[], Trace]]]:
    for experiment in (
        *("plain", "offset", "opt-in", "resumed", "resent", "cached", "early"),
        *("ends", "limit", "stops", "samples", "sampling", "temperature"),
        *("streams", "refusals", "identity", "update-idle"),
    ):
        made = lambda experiment=experiment: (  # noqa: E731
            run_experiments(fake_target("vllm"), only=[experiment]).traces[0]
        )
        yield experiment, made


TRACES: dict[str, dict[str, Callable[[], Trace]]] = {
    "layout": dict(_layout_traces()),
    "batch": dict(_batch_traces()),
    "replay": dict(_replay_traces()),
    "routes": dict(_route_traces()),
    "rollouts": dict(_rollout_traces()),
    "scripted": dict(_scripted_traces()),
    "engine": dict(_engine_traces()),
    "correction": dict(_correction_traces()),
}


def outcomes_of(family: str, name: str) -> dict[str, list[str]]:
    """The outcomes of the changes of one trace."""
    registry = default_registry().select(_FAMILIES.get(family, [family]))
    trace = TRACES[family][name]()
    return outcomes(trace, registry, _CHANGES[family], _EVERY_CONTRACT.get(family, 7))


def recorded(family: str) -> dict[str, dict[str, list[str]]]:
    """What is recorded of a family."""
    text = (RECORDED / f"{family}.json").read_text("utf-8")
    contents: dict[str, dict[str, list[str]]] = json.loads(text)
    return contents


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, traces in TRACES.items() for name in traces]
)
def test_every_small_change_of_a_correct_trace_is_judged_as_recorded(
    family: str, name: str
) -> None:
    """Verdicts, kinds, places and counters, by change and check, and the words of each kind."""
    assert recorded(family)[name] == outcomes_of(family, name)


def main() -> None:
    """Record the outcomes of all traces."""
    RECORDED.mkdir(exist_ok=True)
    for family, traces in TRACES.items():
        contents = {name: outcomes_of(family, name) for name in traces}
        (RECORDED / f"{family}.json").write_text(
            json.dumps(contents, indent=0, ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
