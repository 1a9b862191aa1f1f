"""Rows that are too few are told of in the log alone: tokens without one have expert 0, as often as there are experts a token."""

import torch
from roll_stub import VERSION, answered, asked, postprocess_output_data

request = asked()
data = answered(request, [7, 8, 9], routed_experts=[torch.full((1, 1, 2), 4)])
batch = postprocess_output_data(request, data, 6).batch
print(
    f"roll {VERSION}: 1 row for 5 tokens: {batch['routed_experts'][0, :, 0].tolist()}, attention {batch['attention_mask'][0].tolist()}"
)
request = asked()
data = answered(request, [7, 8, 9], output_logprobs=[[-0.1] * 5])
print(
    f"roll {VERSION}: 5 logprobs for 3 tokens: {postprocess_output_data(request, data, 6).batch['infer_logprobs'].tolist()}"
)
