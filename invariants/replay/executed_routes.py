"""Replay: what a trainer's routers execute is what the samples' routes say, row by row, in every
pass.

What steps come to is in ``replay_results``, what a trainer must refuse in ``replay_refusals``.
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
from rollproof.invariants.replay.step_pairs import same_loss, unrepeated
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
    if (
        view.replays
        and view.regular
        and view.step.purpose is Purpose.TRAIN
        and not _skipped(view, out)
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
    if (
        view.replays
        and view.regular
        and view.step.recompute is not Recompute.NONE
        and not _skipped(view, out)
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
    if not view.replays or not view.regular or view.step.backward:
        return
    if view.hindrance is not None and view.terms.mode is ReplayMode.R2:
        out.inapplicable(
            "in mode R2 old logprobs are recorded, and no forward-only pass replays:"
            f" {view.hindrance}"
        )
    elif not _skipped(view, out):
        judge_rows(view, Phase.FORWARD, "rows compared", out)


@replay_check(
    "replay.assignments",
    promise="Every row of a replayed pass, padding too, executes top_k distinct experts.",
    exercised_by="rows counted",
)
def replay_assignments(view: StepView, out: Collector) -> None:
    drops = drops_padding(view)
    if not view.replays or not view.regular or _skipped(view, out):
        return
    top_k, experts = view.contract.top_k or 1, view.contract.num_experts or 1
    for call in view.calls_of("policy"):
        ordered = np.sort(call.experts, axis=1)
        nowhere = (call.samples < 0) & (ordered < 0).all(axis=1)
        whole = ordered.shape[1] == top_k
        good = (
            ((ordered >= 0) & (ordered < experts)).all(axis=1)
            & (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
            & whole
        )
        out.exercised("rows counted", len(good))
        bad = np.flatnonzero(~good & ~nowhere if drops else ~good)
        if not len(bad):
            continue
        padding = int((call.samples[bad] < 0).sum())
        out.finding(
            "rows with fewer experts than top_k",
            expected=(
                f"{len(good) * top_k} assignments of {count(len(good), 'row')} to {top_k} distinct"
                " experts each"
            ),
            observed=(
                f"{share(len(bad), len(good), 'row')} with other choices,"
                f" {count(padding, 'padding row')} among them: row {bad[0]} executes"
                f" {call.experts[bad[0]].tolist()}"
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
    if view.step.model != "policy" or not view.ordinary or not view.done:
        return
    phases = [Phase.FORWARD]
    if view.step.backward and view.step.recompute is Recompute.FULL:
        phases.append(Phase.RECOMPUTE)
    for phase in phases:
        rows = Executed.of(view, phase)
        for column, layer in enumerate(view.targets.layers):
            here = (rows.column == column) & (rows.place >= 0)
            seen = np.zeros(len(view.targets.experts), dtype=bool)
            seen[rows.place[here]] = True
            out.exercised("layers counted")
            routed = int(seen.sum())
            seen[view.targets.finals] = True  # it predicts nothing: a trainer need not forward it
            missing = np.flatnonzero(~seen)
            twice = [
                place
                for (_, place), times in Counter(
                    zip(rows.rank[here].tolist(), rows.place[here].tolist(), strict=True)
                ).items()
                if times > 1
                and phase is Phase.FORWARD  # nested checkpoints recompute a layer more than once
            ]
            if not len(missing) and not twice:
                continue
            place = int(missing[0]) if len(missing) else twice[0]
            sample, position = view.sample(place)
            how = "never routed" if len(missing) else "routed twice on one rank"
            out.finding(
                f"tokens that a layer {how}",
                expected=(
                    f"{count(len(seen), 'token')} routed once by layer {layer} in the {phase} pass"
                ),
                observed=f"{share(routed, len(seen), 'token')} routed"
                + (f", {count(len(set(twice)), 'token')} more than once" if twice else ""),
                where=view.place(request=sample.request_id, position=position, layer=layer),
                hint=(
                    "Either a router is not the one that the spy sits on (a model that was built"
                    " twice: verl#7340), or rows are dropped, or sliced for a rank that does not"
                    " see them."
                ),
            )


def _is_native(contract: Contract) -> str | None:
    terms = terms_of(contract)
    if terms.free_rows is not FreeRows.NATIVE:
        return (
            "the contract declares dummy experts for rows without a target: replay.assignments"
            " counts them"
        )
    if terms.tolerance > 0:
        return "the contract declares a tolerance: a near tie may be routed either way in two runs"
    return None


@replay_check(
    "replay.free-rows",
    promise=(
        "A row without a target (the final token, what was not captured) is left to the router's"
        " own choice."
    ),
    exercised_by="free rows compared",
    applies=_is_native,
)
def replay_free_rows(view: StepView, out: Collector) -> None:
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
        return  # other experts were replayed upstream, so the router's own choice is not known
    rows = Executed.of(view, Phase.FORWARD)
    # behind the first MoE layer the own choice is only known where the layers before gave what they
    # give in the native pass
    deep = view.same_as is not None and same_loss(view, view.same_as)
    free = np.flatnonzero((rows.place >= 0) & ~rows.held & (deep | (rows.column == 0)))
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
                f" {share(len(wrong), len(free), 'free row')} like that"
            ),
            where=view.place(
                request=sample.request_id,
                position=position,
                layer=targets.layers[int(rows.column[wrong[0]])],
            ),
            hint=(
                "The final token was never forwarded by the engine, and has no route; filler is no"
                " target. Mask such rows (verl#6473, SkyRL#1908), or declare free_rows='dummy'"
                " where they execute a filler by design."
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
        "What a trainer records in a pass is what its routers chose there, put together over ranks,"
        " stages and microbatches."
    ),
    exercised_by="samples compared",
    applies=_records,
)
def replay_recorded(view: StepView, out: Collector) -> None:
    if (
        view.step.action is not Action.RECORD
        or not view.ordinary
        or _skipped(view, out)
        or view.outcome is None
        or not view.done
    ):
        return
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
                "routers gave every token to fewer than top_k experts, and such a row cannot be"
                " replayed: record without a capacity"
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
    """What is wrong with the recording of a sample whose routers chose ``chosen`` ``(tokens, MoE
    layers, top_k)``.
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
    got = np.sort(recorded[:, list(contract.moe_columns)].astype(np.int64), axis=2)
    # A final token that was not forwarded may have any filler, and so may the place of an expert
    # that was dropped.
    seen = (chosen[: len(got)] >= 0).all(axis=2)
    wrong = seen & (got != np.sort(chosen[: len(got)], axis=2)).any(axis=2)
    if not wrong.any():
        return None
    row, column = (int(index) for index in np.argwhere(wrong)[0])
    layers = [(contract.moe_layers or ())[int(one)] for one in np.flatnonzero(wrong.any(axis=0))]
    return (
        f"other experts in {share(int(wrong.any(axis=1).sum()), len(got), 'row')}, layers"
        f" {ranges(layers)}: row {row} holds {got[row, column].tolist()} where the router chose"
        f" {np.sort(chosen[row, column]).tolist()}"
    )


def _tells_installs(contract: Contract) -> str | None:
    return (
        None
        if terms_of(contract).installs is not None
        else "the contract declares no installs: the adapter does not tell of them"
    )


@replay_check(
    "replay.installs",
    promise=(
        "A router is given as many targets as it takes, and none in a step that replays nothing."
    ),
    exercised_by=("routers given targets", "steps without targets"),
    applies=_tells_installs,
)
def replay_installs(view: StepView, out: Collector) -> None:
    if not view.ordinary or not view.done or view.step.model != "policy":
        return
    given = Counter((install.rank, install.layer) for install in view.installs)
    if not view.replays:
        out.exercised("steps without targets")
        if given:
            out.finding(
                "targets were given in a step that replays nothing",
                expected=f"no target in a step of action {view.step.action}",
                observed=(
                    f"{count(sum(given.values()), 'target')} for layers"
                    f" {ranges(layer for _, layer in given)}"
                ),
                where=view.place(),
                hint=(
                    "Whether a step replays is decided per step, and not by whether its samples"
                    " have routes."
                ),
            )
        return
    calls = Counter((call.rank, call.layer) for call in view.calls_of("policy", Phase.FORWARD))
    per_step = view.terms.installs is Installs.PER_STEP
    for key in sorted({*given, *calls}):
        wanted = min(1, calls[key]) if per_step else calls[key]
        out.exercised("routers given targets")
        if given[key] != wanted:
            out.finding(
                "a router is given other than the targets that it takes",
                expected=(
                    f"{count(wanted, 'target')} for {count(calls[key], 'forward call')}"
                    f" ({view.terms.installs})"
                ),
                observed=count(given[key], "target"),
                where=view.place(layer=key[1], rank=key[0]),
                hint=(
                    "Targets for routers that are never called went to a model that is not in use"
                    " (verl#7340); too few leave calls native."
                ),
            )


def _skipped(view: StepView, out: Collector) -> bool:
    """Whether the step says nothing, which is told."""
    reason = view.hindrance
    if reason is not None:
        out.absent(reason)
    return reason is not None
