"""Throughput of the coded policy, one JSON line a figure; CPU time of one core, best of five.

Run it with ``python benchmarks/coded_policy.py``. The model has 48 MoE layers, 128 experts, top-8:
a row is 384 bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from rollproof.fakes.coded.policy import CodedPolicy

_TOKENS = 100_000
_LAYERS, _EXPERTS, _TOP_K = 48, 128, 8


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds of the fastest of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def generate(policy: CodedPolicy, count: int) -> list[int]:
    """``count`` coded tokens, one at a time, as the fake engine samples them."""
    state, ids = policy.start_state([1, 2, 3]), [1, 2, 3]
    for _ in range(count):
        token = policy.next_token(4, state)
        state = policy.extend(state, token)
        ids.append(token)
    return ids


def main() -> None:
    """Print the figures."""
    layers = tuple(range(_LAYERS))
    policy = CodedPolicy(
        seed=1,
        vocab=151_936,
        num_layers=_LAYERS,
        moe_layers=layers,
        num_experts=_EXPERTS,
        top_k=_TOP_K,
    )
    ids = generate(policy, _TOKENS)
    size = _TOKENS * _LAYERS * _TOP_K
    sampled = best(lambda: generate(policy, _TOKENS))
    routed = best(lambda: policy.routes(4, ids))
    scored = best(lambda: policy.logprobs(4, ids, 0))
    figures: dict[str, float] = {
        "sampled_tokens_per_s": _TOKENS / sampled,
        "sample_us_per_token": sampled / _TOKENS * 1e6,
        "routes_mb_per_s": size / routed / 1e6,
        "logprobs_per_s": _TOKENS / scored,
        "tokens_per_s_with_routes_and_logprobs": _TOKENS / (sampled + routed + scored),
        "routes_of_8_tokens_us": (
            best(lambda: [policy.routes(4, ids[:8]) for _ in range(1000)]) * 1e3
        ),
    }
    for name, value in figures.items():
        print(json.dumps({"figure": name, "value": round(value, 3)}))


if __name__ == "__main__":
    main()
