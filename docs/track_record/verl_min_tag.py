"""An attempt that sampled nothing still sets ``min_global_steps``, and in 0.8.0 ``max_global_steps``: tags of steps that no token has."""

import asyncio

from verl_stub import LENGTH, VERSION, Server, client

before = Server(
    (0, "aborted", 3), (2, "completed", 4)
)  # aborted before its first token under step 3, sampled under step 4
behind = Server(
    (LENGTH, "aborted", 3), (0, "completed", 4)
)  # aborted on its last token; without a stated limit 0.8.0 asks once more
for server, step, limit in (before, 4, {"max_tokens": 2}), (behind, 3, {}):
    out = asyncio.run(client(server).generate("r", prompt_ids=[1, 2], sampling_params=limit))
    least, most = out.extra_fields["min_global_steps"], out.extra_fields["max_global_steps"]
    print(
        VERSION,
        f"{len(out.token_ids)} tokens, all of step {step}; min_global_steps {least}, max_global_steps {most}",
    )
