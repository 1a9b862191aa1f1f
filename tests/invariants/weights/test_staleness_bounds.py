"""``weights.staleness-bound``: which servers count for the newest weights."""

from __future__ import annotations

from rollproof.core.records import Span
from tests.support.trace_script import TraceScript, finds, unknown

ID = "weights.staleness-bound"


def _stuck(what: str | None, server: str | None) -> TraceScript:
    """A sample of weights 0 that ends under weights 2, which s1 never got; ``what`` befell
    ``server``.
    """
    script = TraceScript(max_staleness=1)
    for name in ("s0", "s1"):
        script.weights(0, name)
    script.submit()
    script.reply(script.call((1, 2)), (3,), reason="abort")
    for version in (1, 2):
        script.weights(version, "s0")
    if what is not None:
        script.fault(what, server)
    script.reply(script.call((1, 2, 3)), (4, 5, 6), version=2)
    return script.result((3, 4, 5, 6))


def test_a_dead_server_holds_nothing_back() -> None:
    """The newest weights are those of the servers that are left."""
    finding = finds(ID, _stuck("death", "s1"))
    assert "0, 2 updates behind" in finding.observed


def test_a_server_that_lives_does() -> None:
    """No fault, another fault, or the death of nobody in particular."""
    for what, server in ((None, None), ("late", "s1"), ("death", None)):
        unknown(ID, _stuck(what, server), "not exercised")


def test_weights_that_sampled_nothing_do_not_age_a_sample() -> None:
    """A stretch without tokens says which weights were there, not which sampled."""
    script = TraceScript(max_staleness=1)
    script.weights(0).submit()
    call = script.call((1, 2))
    script.weights(1)
    empty, all_tokens = Span(start=0, end=0, version=0), Span(start=0, end=2, version=1)
    script.reply(call, (3, 4), version=1, true_tokens=(empty, all_tokens))
    unknown(ID, script.result((3, 4)), "not exercised")
