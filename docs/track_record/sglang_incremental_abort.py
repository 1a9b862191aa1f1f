"""An abort of a retracted call that is streamed in parts repeats its last token, and every logprob."""

from sglang_stub import PROMPT, VERSION, abort, engine, pause, resume, run


async def main():
    engine().tokenizer_manager.incremental_streaming_output = (
        True  # as `--incremental-streaming-output`
    )
    asked = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        "return_logprob": True,
    }
    parts = []
    async for part in await engine().async_generate(**asked, rid="cut", stream=True):
        parts.append(part)
        if len(parts) == 8:
            await pause("retract")
            abort("cut")
    await resume()
    *before, last = parts
    sampled = [token for part in before for token in part["output_ids"]]
    told, again = last["meta_info"]["completion_tokens"], last["output_ids"] == sampled[-1:]
    print(
        VERSION,
        f"before the abort's part: every sampled token: {told == len(sampled)}; in it the last token once more: {again},",
        end=" ",
    )
    print(
        f"and logprobs of all tokens once more: {len(last['meta_info']['output_token_logprobs']) == told}"
    )


if __name__ == "__main__":
    run(main)
