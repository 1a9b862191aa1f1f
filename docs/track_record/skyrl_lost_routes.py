"""Routes that are missing become expert 0, surplus ones are cut, and neither is told (SkyRL 0.3.0; 0.4.0 refuses both)."""

import inspect

from skyrl_stub import VERSION, Tokenizer

from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors as convert

old = "tokenizer" in inspect.signature(convert).parameters
row = [[7, 8]]
for name, routes in (
    ("no routes for the second sample", [[row] * 3, None]),
    ("9 rows for 4 tokens", [[row] * 9, [row] * 3]),
):
    try:
        batch = (
            convert(
                Tokenizer(), [[1, 2]] * 2, [[3, 4]] * 2, [[0.0] * 2] * 2, [[1, 1]] * 2, None, routes
            )
            if old
            else None
        )
        print(
            f"skyrl {VERSION}: {name}: {batch[6][:, :, 0].tolist()}"
            if old
            else f"skyrl {VERSION}: {name}: takes arrays only"
        )
    except (TypeError, ValueError) as error:
        print(f"skyrl {VERSION}: {name}: {type(error).__name__}: {error}")
