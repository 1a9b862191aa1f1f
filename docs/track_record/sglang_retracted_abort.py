"""An abort of a call that was retracted loses its routes, and unless it is streamed the tokens that it had sampled."""

import asyncio

from sglang_stub import VERSION, abort, call, pause, resume, run


async def main():
    for stream in (False, True):
        cut, beside = call(f"cut-{stream}", 40, stream=stream), call(f"beside-{stream}", 40)
        await asyncio.sleep(0.25)
        await pause("retract")
        abort(f"cut-{stream}")
        reply = await cut
        await resume()
        retracted = (await beside)["meta_info"]["num_retractions"]
        has = f"{'some' if reply['output_ids'] else 'no'} tokens, {'routes' if 'routed_experts' in reply['meta_info'] else 'no routes'}"
        print(
            VERSION,
            "streamed:" if stream else "not streamed:",
            has,
            f"- a call beside it was retracted {retracted} time",
        )


if __name__ == "__main__":
    run(main)
