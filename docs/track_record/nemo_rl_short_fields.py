"""Fields of messages are joined without a look at their lengths: one that is short is filled up, one that is long makes a longer row."""

import torch
from nemo_rl_stub import VERSION, say

from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

ids = torch.tensor([5, 6, 7, 8])
short = {
    "role": "assistant",
    "token_ids": ids,
    "generation_logprobs": torch.tensor([-0.5, -0.25]),
    "routed_experts": torch.ones(2, 1, 2),
}
flat, lengths = batched_message_log_to_flat_message([[short]])
rows = flat["routed_experts"][0, :, 0].int().tolist()
say(
    f"nemo-rl {VERSION}: 2 logprobs and 2 rows for 4 tokens: {flat['generation_logprobs'][0].tolist()}, {rows}"
)
flat, lengths = batched_message_log_to_flat_message(
    [[short | {"routed_experts": torch.ones(9, 1, 2)}]]
)
say(
    f"nemo-rl {VERSION}: 9 rows for 4 tokens: length {lengths.tolist()}, ids {flat['token_ids'][0].tolist()}"
)
