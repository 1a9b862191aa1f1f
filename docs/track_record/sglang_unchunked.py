"""Without chunked prefill, more tokens of prompt than the engine runs requests end it, where it returns routed experts."""

from gpu_stub import sglang_engine

if __name__ == "__main__":
    engine, version = sglang_engine(chunked_prefill_size=-1, max_running_requests=16)
    for length in (16, 17):  # each prompt of its own: a cached prefix is not computed
        print(version, f"a prompt of {length} tokens, at most 16 requests:", end=" ", flush=True)
        ask = {
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
            "return_routed_experts": True,
        }
        print(
            len(
                engine.generate(input_ids=list(range(10 * length, 11 * length)), **ask)[
                    "output_ids"
                ]
            ),
            "tokens sampled",
            flush=True,
        )
