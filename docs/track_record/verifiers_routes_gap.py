"""After a turn that was aborted before its first token a conversation has no routes, though the next call returned them all."""

from verifiers.v1.types import UserMessage
from verifiers_stub import VERSION, new_trace, turn

for first in ([5], None):  # the rows of the first call; an abort in the queue has none
    trace, messages = new_trace(), [UserMessage(content="a")]
    answer = turn(trace, messages, [1], [7] if first else [], first)
    ids = [1, 7, 2] if first else [1, 2]
    turn(
        trace,
        [*messages, answer, UserMessage(content="b")],
        ids,
        [8],
        [5, 6, 7] if first else [5, 6],
    )
    rows = trace.branches[-1].routed_experts
    told = (
        "none"
        if rows is None
        else f"{rows[:, 0, 0].tolist()} (the last one repeats the one before)"
    )
    print(
        VERSION,
        f"first call: {'a row' if first else 'no rows'}; tokens {trace.branches[-1].token_ids}, routes {told}",
    )
