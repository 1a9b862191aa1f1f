"""During a pause no cache is emptied beside retracted calls, and a call that is aborted while it waits gets an exception."""

import asyncio

from gpu_stub import sglang_engine


async def main(engine, version):
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    def ask(rid, tokens):
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        return asyncio.ensure_future(
            engine.async_generate(input_ids=list(range(5, 15)), rid=rid, sampling_params=params)
        )

    manager, running = engine.tokenizer_manager, ask("running", 2000)
    await asyncio.sleep(3)
    await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
    print(
        version,
        "the cache is emptied beside a retracted call:",
        (await manager.flush_cache()).success,
        flush=True,
    )
    parked = ask("parked", 4)
    await asyncio.sleep(0.5)
    manager.abort_request(rid="parked")
    await manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    await asyncio.wait([parked], timeout=20)
    print(
        version,
        "a waiting call, aborted:",
        repr(parked.exception() or parked.result()["meta_info"]["finish_reason"])[:90],
        flush=True,
    )
    running.cancel()


if __name__ == "__main__":
    made, told = sglang_engine(max_running_requests=8, max_total_tokens=4096)
    made.loop.run_until_complete(main(made, told))
    made.shutdown()
