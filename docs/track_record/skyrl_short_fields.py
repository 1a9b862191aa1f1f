"""Logprobs and loss masks that are shorter than their response are accepted, and aligned with its end: each stands by another token."""

import inspect

from skyrl_stub import VERSION, Tokenizer

from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors as convert

pad = Tokenizer() if "tokenizer" in inspect.signature(convert).parameters else 0
batch = convert(pad, [[1, 2]], [[3, 4, 5, 6, 7]], [[0.0] * 5], [[1, 1, 1]], [[-0.1, -0.2]])
print(
    f"skyrl {VERSION}: 2 logprobs for 5 tokens: {[round(value, 1) for value in batch[5][0].tolist()]}"
)
print(f"skyrl {VERSION}: a mask of 3 for 5 tokens: {batch[4][0].tolist()}")
