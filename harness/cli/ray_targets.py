"""Judge the targets of ``verify`` on a Ray cluster, one task a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollproof.cli.named_targets import Target
from rollproof.cli.parallel import Settings, judge_recipe, unpacked
from rollproof.cli.ray_cluster import ray_cluster
from rollproof.core.progress import Progress
from rollproof.errors import SubjectError
from rollproof.judging.report import Report

__all__ = ["judge_all_on_ray"]


def judge_all_on_ray(
    targets: Sequence[Target],
    settings: Settings,
    progress: Callable[[Progress], None],
    *,
    address: str,
) -> list[Report]:
    """Return the reports of ``targets``, in their order.

    A worker makes its subject from the target's recipe, so the cluster must have the code of the
    subject. Raises what judging a target raises, ``SubjectError`` if a target ends each worker
    that judges it, and as ``ray_cluster``.
    """
    reports: list[Report] = []
    with ray_cluster(address) as cluster:
        calls = ((dict(target.recipe), settings) for target in targets)
        for target, outcome in zip(targets, cluster.ordered(judge_recipe, calls), strict=True):
            if outcome.result is None:
                raise SubjectError(
                    f"Each process that judged {target.name} died: it ran out of memory, or the"
                    " subject ended it. Run it without --ray and with `--jobs 1` to see why."
                )
            reports.append(unpacked(outcome.result))
            progress(Progress(done=len(reports), total=len(targets), what=target.name))
    return reports
