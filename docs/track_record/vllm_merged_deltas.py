"""Parts of a delta stream that are merged, because the next came before the last was fetched, lose the routes."""

import gpu_stub  # noqa: F401 - sets the environment
import numpy as np
import vllm
from vllm.outputs import CompletionOutput, RequestOutput


def part(tokens, routes=None, reason=None):
    made = CompletionOutput(0, "", tokens, None, None, routed_experts=routes, finish_reason=reason)
    return RequestOutput("r", None, [1, 2, 3], None, [made], finished=reason is not None)


first, last = part([5]), part([6], np.zeros((4, 4, 2), dtype=np.uint8), "length")
print(
    f"vllm {vllm.__version__}: the last part: tokens {last.outputs[0].token_ids}, rows {len(last.outputs[0].routed_experts)}"
)
first.add(last, aggregate=True)  # RequestOutputCollector.put, for parts that nobody has fetched yet
print(
    f"vllm {vllm.__version__}: merged: tokens {first.outputs[0].token_ids}, rows {first.outputs[0].routed_experts}"
)
