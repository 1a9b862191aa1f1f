"""One call that asks for rows from the end of its prompt on ends vLLM's engine core, and with it every call in flight."""

import asyncio

from gpu_stub import VLLM, model


async def main():
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model(), **VLLM))

    async def ask(name, tokens, **more):
        params = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        async for output in engine.generate({"prompt_token_ids": list(range(5, 15))}, params, name):
            last = output.outputs[0]
        return f"{len(last.token_ids)} tokens, {len(last.routed_experts)} rows"

    print(
        f"vllm {vllm.__version__}: rows from 9 of 10 on:",
        await ask("fine", 3, routed_experts_prompt_start=9),
    )
    both = await asyncio.gather(
        ask("beside", 200), ask("beyond", 3, routed_experts_prompt_start=10), return_exceptions=True
    )
    print(
        f"vllm {vllm.__version__}: rows from 10 of 10 on, and a call beside it:",
        *[type(one).__name__ for one in both],
    )


if __name__ == "__main__":
    asyncio.run(main())
