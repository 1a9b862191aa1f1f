"""A call that is aborted before its first token ends the whole batch with an error, where routes are asked for (SkyRL 0.4.0)."""

import asyncio

from http_stub import choice, serve
from skyrl_stub import VERSION, Tokenizer

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)


async def main():
    url = serve(choice([], "abort", routed_experts=None))
    client = RemoteInferenceClient(
        url, [url], 1, enable_return_routed_experts=True, tokenizer=Tokenizer()
    )
    try:
        output = await client.generate(
            {"prompt_token_ids": [[5, 6]], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
        )
        print(
            f"skyrl {VERSION}: aborted before its first token: {output['response_ids']} {output['stop_reasons']}"
        )
    except ValueError as error:
        print(f"skyrl {VERSION}: aborted before its first token: {type(error).__name__}: {error}")
    await client.teardown()


asyncio.run(main())
