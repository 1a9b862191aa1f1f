"""A call that may sample nothing (max_new_tokens=0), computed beside another, returns the logprob of a token that was thrown away."""

import asyncio

from sglang_stub import VERSION, call, run


async def main():
    await call("warm", 3)
    for name, others in (("alone", 0), ("beside others", 2)):
        reply, *_ = await asyncio.gather(
            call(f"nothing {name}", 0), *[call(f"{name} {number}", 3) for number in range(others)]
        )
        tokens, logprobs = (
            len(reply["output_ids"]),
            len(reply["meta_info"]["output_token_logprobs"]),
        )
        print(VERSION, f"{name}: {tokens} tokens, {logprobs} logprobs")


if __name__ == "__main__":
    run(main)
