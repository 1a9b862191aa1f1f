"""What judging one small case costs: a request of four calls and six tokens, check by check and
family by family.

``python benchmarks/checks_small.py [repeats]`` prints microseconds per case. A small scope of 5,000
cases is to be judged in a few seconds, so a family may cost a few tenths of a millisecond.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.records import Request
from rollproof.core.trace import Trace
from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check, Collector, RequestJudge
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import RequestView
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge_events


def four_calls(reference: str = "as-sampled-tokens") -> Trace:
    """Return six tokens in four calls: aborts after 0, 2 and 4 tokens, the second by an update."""
    when = [(0, ActionKind.ABORT), (2, ActionKind.SYNC), (4, ActionKind.ABORT)]
    case = Case(
        flavour="sglang",
        requests=(Request(request_id="r0", prompt_ids=(11, 12), max_tokens=6),),
        actions=tuple(
            Action(when=Trigger(request="r0", tokens=tokens), do=do) for tokens, do in when
        ),
    )
    return run_case(REFERENCES[reference], case)


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Processor time per call, the fastest of five rounds: other programs on the machine do not
    count.
    """
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeats):
            work()
        best = min(best, time.process_time() - start)
    return best / repeats * 1e6


def view_of(trace: Trace) -> RequestView:
    """The view that request checks get."""
    seen: list[RequestView] = []
    grab = Check(
        id="bench.grab",
        promise="",
        needs="",
        exercised_by=(),
        request=lambda view, _: seen.append(view),
    )
    judge_events(trace.header, trace.events, Tally(Registry([grab])))
    return seen[0]


def main(repeats: int = 2000) -> None:
    """Print the table."""
    trace, registry = four_calls(), default_registry()
    view = view_of(trace)
    contract = trace.header.contract
    rows = []
    for check in registry:
        if check.request is None or check.inapplicable(contract) is not None:
            continue
        judge, collector = check.request, Collector(check)
        cost = microseconds(
            lambda judge=judge, collector=collector: judge(view, collector), repeats
        )  # type: ignore[misc]
        rows.append((cost, check.id))

    def stitch() -> None:
        view.settle()
        assert view.stitched.stretches

    print(f"{'the reference stitch':40s} {microseconds(stitch, repeats):8.1f}")
    for cost, name in sorted(rows, reverse=True):
        print(f"{name:40s} {cost:8.1f}")
    for family in dict.fromkeys(check.family for check in registry):
        judges = [
            (check.request, Collector(check))
            for check in registry
            if check.family == family and check.request is not None
        ]

        def all_of(judges: list[tuple[RequestJudge, Collector]] = judges) -> None:
            view.settle()
            for judge, collector in judges:
                judge(view, collector)

        print(
            f"request checks of {family + ', with all that they share':40s}"
            f" {microseconds(all_of, repeats):8.1f}"
        )
    whole = microseconds(
        lambda: judge_events(trace.header, trace.events, Tally(registry)), max(1, repeats // 10)
    )
    print(f"{'a whole trace under all checks':40s} {whole:8.1f}")


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:2]))
