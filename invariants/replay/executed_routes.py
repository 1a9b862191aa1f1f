"""Checks on the experts that a trainer's routers execute: those of the samples' routes, row by row,
in every pass.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Action, Phase, Purpose
from rollproof.core.records import IntArray
from rollproof.core.replay_contract import FreeRows, Installs, Recompute, ReplayMode
from rollproof.core.trainer_contract import terms_of
from rollproof.invariants._shared.phrases import count, ranges, share
from rollproof.invariants.replay.executed_rows import (
    Executed,
    drops_padding,
    judge_rows,
    native_choice,
)
from rollproof.invariants.replay.step_pairs import NEAR_TIE, same_loss, unrepeated
from rollproof.invariants.replay.steps import StepView, replay_check
from rollproof.judging.checks import Collector
from rollproof.judging.expected_rows import chosen_routes

__all__ = [
    "replay_assignments",
    "replay_coverage",
    "replay_forward",
    "replay_free_rows",
    "replay_installs",
    "replay_old_logprob",
    "replay_recompute",
    "replay_recorded",
]


@replay_check(
    "replay.forward",
    promise=(
        "In the forward pass of a training step, every row with a target executes that target, in"
        " every MoE layer and on every rank."
    ),
    exercised_by="rows compared",
)
def replay_forward(view: StepView, out: Collector) -> None:
    """Compare the rows of training forward passes with their targets."""
    if (
        view.replays
        and view.regular
        and view.step.purpose is Purpose.TRAIN
        and not _shows_nothing(view, out)
    ):
        judge_rows(view, Phase.FORWARD, "rows compared", out)


def _recomputes(contract: Contract) -> str | None:
    if set(terms_of(contract).recompute) <= {Recompute.NONE}:
        return "the contract declares no recompute"
    return None


@replay_check(
    "replay.recompute",
    promise="In a recompute, every row with a target executes that target once more.",
    exercised_by="rows recomputed",
    applies=_recomputes,
)
def replay_recompute(view: StepView, out: Collector) -> None:
    """Compare the rows of recomputes with their targets."""
    if (
        view.replays
        and view.regular
        and view.step.recompute is not Recompute.NONE
        and not _shows_nothing(view, out)
    ):
        judge_rows(view, Phase.RECOMPUTE, "rows recomputed", out)


@replay_check(
    "replay.old-logprob",
    promise=(
        "A forward-only pass that replays (old logprobs, evaluation) executes the targets of its"
        " rows."
    ),
    exercised_by="rows compared",
)
def replay_old_logprob(view: StepView, out: Collector) -> None:
    """Compare the rows of forward-only passes with their targets."""
    if not view.replays or not view.regular or view.step.backward:
        return
    # R2 replays the training engine's own recording; R3 replays the rollout engine's routes.
    if view.hindrance is not None and view.terms.mode is ReplayMode.R2:
        out.inapplicable(
            "in mode R2 old logprobs are recorded, and no forward-only pass replays:"
            f" {view.hindrance}"
        )
    elif not _shows_nothing(view, out):
        judge_rows(view, Phase.FORWARD, "rows compared", out)


@replay_check(
    "replay.assignments",
    promise=("Every row of a replayed pass, including padding, executes top_k distinct experts."),
    exercised_by="rows counted",
)
def replay_assignments(view: StepView, out: Collector) -> None:
    """Count the distinct experts of every row."""
    drops = drops_padding(view)
    if not view.replays or not view.regular or _shows_nothing(view, out):
        return
    top_k, experts = view.contract.choice_count, view.contract.expert_count
    for call in view.calls_of("policy"):
        ordered = np.sort(call.experts, axis=1)
        # Padding that executes nothing in native steps either is masked by design.
        dropped = (call.samples < 0) & (ordered < 0).all(axis=1)
        complete = ordered.shape[1] == top_k
        right = (
            ((ordered >= 0) & (ordered < experts)).all(axis=1)
            & (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
            & complete
        )
        out.exercised("rows counted", len(right))
        wrong = np.flatnonzero(~right & ~dropped if drops else ~right)
        if not len(wrong):
            continue
        padding = int((call.samples[wrong] < 0).sum())
        out.finding(
            "rows with fewer experts than top_k",
            expected=(
                f"{len(right) * top_k} assignments of {count(len(right), 'row')} to {top_k}"
                " distinct experts each"
            ),
            observed=(
                f"{share(len(wrong), len(right), 'row')} with other choices,"
                f" {count(padding, 'padding row')} among them: row {wrong[0]} executes"
                f" {call.experts[wrong[0]].tolist()}"
            ),
            where=view.place(
                layer=call.layer, rank=call.rank, microbatch=call.microbatch, phase=str(call.phase)
            ),
            hint=(
                "Ids that occur twice collapse in a routing map, and dispatchers size their buffers"
                ' by tokens * top_k ("Split sizes doesn\'t match total dim 0 size": verl#4986,'
                " slime#822, miles#1002). Padding needs distinct experts, or native routing; a"
                " target with fewer rows or columns must be refused."
            ),
        )


@replay_check(
    "replay.coverage",
    promise=(
        "A pass routes every token once in every MoE layer, and a full recompute routes it again."
    ),
    exercised_by="layers counted",
)
def replay_coverage(view: StepView, out: Collector) -> None:
    """Count how often each layer routes each token."""
    if view.step.model != "policy" or not view.ordinary or not view.done:
        return
    phases = [Phase.FORWARD]
    if view.step.backward and view.step.recompute is Recompute.FULL:
        phases.append(Phase.RECOMPUTE)
    for phase in phases:
        rows = Executed.of(view, phase)
        for column, layer in enumerate(view.targets.layers):
            in_layer = (rows.column == column) & (rows.place >= 0)
            routed_tokens = np.zeros(len(view.targets.experts), dtype=bool)
            routed_tokens[rows.place[in_layer]] = True
            out.exercised("layers counted")
            routed = int(routed_tokens.sum())
            # The final token predicts nothing: a trainer need not forward it.
            routed_tokens[view.targets.finals] = True
            missing = np.flatnonzero(~routed_tokens)
            # Nested checkpoints recompute a layer more than once, so only forward passes are
            # counted.
            repeated = [
                place
                for (_, place), times in Counter(
                    zip(rows.rank[in_layer].tolist(), rows.place[in_layer].tolist(), strict=True)
                ).items()
                if times > 1 and phase is Phase.FORWARD
            ]
            if not len(missing) and not repeated:
                continue
            place = int(missing[0]) if len(missing) else repeated[0]
            sample, position = view.sample(place)
            fault = "never routed" if len(missing) else "routed twice on one rank"
            out.finding(
                f"tokens that a layer {fault}",
                expected=(
                    f"{count(len(routed_tokens), 'token')} routed once by layer {layer} in the"
                    f" {phase} pass"
                ),
                observed=f"{share(routed, len(routed_tokens), 'token')} routed"
                + (f", {count(len(set(repeated)), 'token')} more than once" if repeated else ""),
                where=view.place(request=sample.request_id, position=position, layer=layer),
                hint=(
                    "Either the spy watches another router (a model that was built twice:"
                    " verl#7340), or rows are dropped, or sliced for a rank that does not see"
                    " them."
                ),
            )


def _is_native(contract: Contract) -> str | None:
    terms = terms_of(contract)
    if terms.free_rows is not FreeRows.NATIVE:
        return (
            "the contract declares dummy experts for rows without a target: replay.assignments"
            " counts them"
        )
    if terms.tolerance > NEAR_TIE:
        return "the contract declares a tolerance: a near tie may be routed either way in two runs"
    return None


@replay_check(
    "replay.free-rows",
    promise=(
        "A row without a target (the final token, uncaptured rows) is left to the router's"
        " own choice."
    ),
    exercised_by="free rows compared",
    applies=_is_native,
)
def replay_free_rows(view: StepView, out: Collector) -> None:
    """Compare rows without a target with the native choice."""
    if not view.replays or not view.regular or not view.done:
        return
    reason = unrepeated(view)
    if reason is not None:
        out.absent(reason)
        return
    native = native_choice(view)
    if native is None:
        return
    targets = view.targets
    own = np.sort(native, axis=2)
    if (np.sort(targets.experts, axis=2) != own)[targets.known].any():
        # Other experts were replayed upstream, so the router's own choice is not known.
        return
    rows = Executed.of(view, Phase.FORWARD)
    # After the first MoE layer the own choice is known only if the layers before it gave what they
    # give in the native pass.
    inputs_unchanged = view.same_as is not None and same_loss(view, view.same_as)
    free = np.flatnonzero(
        (rows.place >= 0) & ~rows.with_target & (inputs_unchanged | (rows.column == 0))
    )
    free = free[(own[rows.place[free], rows.column[free]] >= 0).all(axis=1)]
    if not len(free):
        if (own[targets.finals] < 0).any():
            out.inapplicable(
                "the trainer does not forward final tokens, and every other row has a target"
            )
        else:
            out.absent("no row was without a target")
        return
    out.exercised("free rows compared", len(free))
    wrong = free[(rows.ordered[free] != own[rows.place[free], rows.column[free]]).any(axis=1)]
    if len(wrong):
        sample, position = view.sample(int(rows.place[wrong[0]]))
        out.finding(
            "rows without a target were replayed",
            expected=(
                "the router's own experts"
                f" {own[rows.place[wrong[0]], rows.column[wrong[0]]].tolist()}, as in a native pass"
            ),
            observed=(
                f"experts {rows.ordered[wrong[0]].tolist()};"
                f" {share(len(wrong), len(free), 'free row')} are like that"
            ),
            where=view.place(
                request=sample.request_id,
                position=position,
                layer=targets.layers[int(rows.column[wrong[0]])],
            ),
            hint=(
                "The engine never forwarded the final token, so it has no route; filler is"
                " not a target. Mask such rows (verl#6473, SkyRL#1908), or declare"
                " free_rows='dummy' if they execute a filler by design."
            ),
        )


def _records(contract: Contract) -> str | None:
    return (
        None
        if terms_of(contract).records
        else "the contract declares records=False: the trainer records no routes of its own"
    )


@replay_check(
    "replay.recorded",
    promise=(
        "What a trainer records in a pass is what its routers chose, merged over ranks,"
        " stages and microbatches."
    ),
    exercised_by="samples compared",
    applies=_records,
)
def replay_recorded(view: StepView, out: Collector) -> None:
    """Compare recordings with the choices that the spy saw."""
    if (
        view.step.action is not Action.RECORD
        or not view.ordinary
        or _shows_nothing(view, out)
        or not view.done
    ):
        return
    assert view.outcome is not None
    chosen = chosen_routes(
        view.contract, view.step, list(view.calls_of("policy", Phase.FORWARD)), dropped=True
    )
    if chosen is None:
        out.absent("the spy did not see every row of the recording pass")
        return
    for number, sample in enumerate(view.step.samples):
        start = int(view.targets.starts[number])
        if not (chosen[start : start + sample.total] >= 0).all(axis=2).any():
            out.absent(
                "routers gave every token to fewer than top_k experts, and such a row cannot"
                " be replayed: record without a capacity limit"
            )
            continue
        out.exercised("samples compared")
        problem = _misrecorded(
            view.contract,
            view.outcome.recorded.get(sample.request_id),
            chosen[start : start + sample.total],
        )
        if problem is not None:
            out.finding(
                "a recording is not what the routers chose",
                expected=(
                    f"the {count(sample.total, 'row')} that the routers chose for"
                    f" {sample.request_id}"
                ),
                observed=problem,
                where=view.place(request=sample.request_id),
                hint=(
                    "Gather over sequence-parallel, then context-parallel ranks, drop padding, put"
                    " stages and chunks in the order of layers, and microbatches in the order of"
                    " the batch (verl#7106, verl#7805)."
                ),
            )


def _misrecorded(contract: Contract, recorded: IntArray | None, chosen: IntArray) -> str | None:
    """Return what is wrong with the recording of a sample.

    Args:
        contract: The contract of the trainer.
        recorded: What the trainer recorded.
        chosen: What its routers chose, ``(tokens, MoE layers, top_k)``.
    """
    if recorded is None:
        return "nothing"
    if (
        recorded.ndim != 3
        or recorded.shape[1:] != (contract.route_layers, contract.top_k)
        or recorded.dtype.kind not in "iu"
    ):
        return (
            f"an array {recorded.dtype} {recorded.shape}, not integers (rows,"
            f" {contract.route_layers}, {contract.top_k})"
        )
    if len(recorded) not in (len(chosen), len(chosen) - 1):
        return f"{count(len(recorded), 'row')}"
    recorded_ids = np.sort(recorded[:, list(contract.moe_columns)].astype(np.int64), axis=2)
    # A final token that was not forwarded may have any filler, and so may the place of a dropped
    # expert.
    routed_tokens = (chosen[: len(recorded_ids)] >= 0).all(axis=2)
    wrong = routed_tokens & (recorded_ids != np.sort(chosen[: len(recorded_ids)], axis=2)).any(
        axis=2
    )
    if not wrong.any():
        return None
    row, column = (int(index) for index in np.argwhere(wrong)[0])
    layers = [contract.routed_layers[int(column)] for column in np.flatnonzero(wrong.any(axis=0))]
    return (
        f"other experts in {share(int(wrong.any(axis=1).sum()), len(recorded_ids), 'row')},"
        f" layers {ranges(layers)}: row {row} holds {recorded_ids[row, column].tolist()} where"
        f" the router chose {np.sort(chosen[row, column]).tolist()}"
    )


def _reports_installs(contract: Contract) -> str | None:
    return (
        None
        if terms_of(contract).installs is not None
        else "the contract declares no installs: the adapter does not report them"
    )


@replay_check(
    "replay.installs",
    promise=("A router gets as many targets as it needs, and none in a step that replays nothing."),
    exercised_by=("routers given targets", "steps without targets"),
    applies=_reports_installs,
)
def replay_installs(view: StepView, out: Collector) -> None:
    """Count the targets of each router and its calls."""
    if not view.ordinary or not view.done or view.step.model != "policy":
        return
    installed = Counter((install.rank, install.layer) for install in view.installs)
    if not view.replays:
        out.exercised("steps without targets")
        if installed:
            out.finding(
                "targets were given in a step that replays nothing",
                expected=f"no target in a step of action {view.step.action}",
                observed=(
                    f"{count(sum(installed.values()), 'target')} for layers"
                    f" {ranges(layer for _, layer in installed)}"
                ),
                where=view.place(),
                hint=(
                    "Decide per step whether it replays, not by whether its samples have routes."
                ),
            )
        return
    calls = Counter((call.rank, call.layer) for call in view.calls_of("policy", Phase.FORWARD))
    # Some trainers take one target per forward call, others one per step: the contract says which.
    per_step = view.terms.installs is Installs.PER_STEP
    for key in sorted({*installed, *calls}):
        expected = min(1, calls[key]) if per_step else calls[key]
        out.exercised("routers given targets")
        if installed[key] != expected:
            out.finding(
                "a router does not get the targets that it needs",
                expected=(
                    f"{count(expected, 'target')} for {count(calls[key], 'forward call')}"
                    f" ({view.terms.installs})"
                ),
                observed=count(installed[key], "target"),
                where=view.place(layer=key[1], rank=key[0]),
                hint=(
                    "Targets of routers that are never called went to an unused model"
                    " (verl#7340); with too few targets, calls route natively."
                ),
            )


def _shows_nothing(view: StepView, out: Collector) -> bool:
    """Return whether the step shows nothing, and report why."""
    reason = view.hindrance
    if reason is not None:
        out.absent(reason)
    return reason is not None
