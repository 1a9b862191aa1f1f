"""vLLM's HTTP server: a call that is given up by the id that its caller gave it runs to its end, and the answer says that it was aborted."""

import time
from concurrent.futures import ThreadPoolExecutor

from vllm_stub import VERSION, post, server

BODY = {
    "token_ids": [5, 6, 7],
    "sampling_params": {"max_tokens": 300, "ignore_eos": True},
    "request_id": "mine",
}
with server(), ThreadPoolExecutor() as pool:
    for name in ("mine", "generate-tokens-mine"):
        call = pool.submit(post, "/inference/v1/generate", BODY)
        time.sleep(1)
        said = post("/abort_requests", {"request_ids": [name]})
        print(
            VERSION,
            f"call 'mine' given up as {name!r}: {said}; it ended by {call.result()['choices'][0]['finish_reason']}",
        )
    print(
        VERSION,
        f"a call that nobody made, given up: {post('/abort_requests', {'request_ids': ['nobody']})}",
    )
