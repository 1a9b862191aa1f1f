"""Faults of ROLL, from a checkout on PYTHONPATH: `python docs/track_record/roll_faults.py`.

Stubbed are packages that its modules import at their head; engine replies are scripted.
"""

import contextlib
import io
import logging
import os
import tempfile
from typing import Any

import roll
import torch
from common import commit_of, run, stub_packages

stub_packages(
    "codetiming",
    "grpc",
    "mcore_adapter",
    "megatron",
    "modelscope",
    "more_itertools",
    "opentelemetry",
    "sglang",
    "transfer_queue",
    version="0.5.7",  # the newest SGLang that ROLL has a patch for
)
# where it is imported ROLL makes a folder for its log
os.environ["ROLL_LOG_DIR"] = tempfile.mkdtemp()
with contextlib.redirect_stdout(io.StringIO()):
    from roll.distributed.scheduler.protocol import DataProto
    from roll.distributed.scheduler.user_defined_rollout_loop import (
        postprocess_output_data,
        postprocess_paused_data,
    )

    __import__("roll.third_party.megatron.router_replay_utils")
logging.disable(logging.CRITICAL)

VERSION = f"roll {commit_of(roll)[:8]}:"
PAD = 99


def request() -> Any:
    """A request with the prompt 5 6."""
    return DataProto.from_single_dict(
        {
            "input_ids": torch.tensor([[5, 6]]),
            "attention_mask": torch.tensor([[1, 1]]),
            "position_ids": torch.tensor([[0, 1]]),
        }
    )


def reply(request: Any, tokens: list[int], **others: Any) -> Any:
    """What the router's client makes of an engine's reply, in the request's own meta_info."""
    fields = {
        "output_token_ids": [tokens],
        "output_logprobs": [[-0.5] * len(tokens)],
        "eos_token_id": [1, PAD],
        "pad_token_id": PAD,
    }
    request.meta_info.update(fields, **others)
    return DataProto(meta_info=request.meta_info)


def last_token() -> None:
    """A request that was aborted on the last token of its budget ends in a ValueError instead of a
    finished sample.
    """
    for tokens in [7, 8, 9], [7, 8, 9, 7, 8, 9]:  # of a budget of 6
        paused = request()
        data = reply(paused, tokens)
        # as if routes were no trouble (see resume)
        paused.batch["pre_routed_experts"] = paused.batch["input_ids"][..., None]
        try:
            result = postprocess_paused_data(paused, data, 8, 2).batch["input_ids"].tolist()
        except ValueError as error:
            result = f"ValueError: {error}"
        print(VERSION, f"aborted after {len(tokens)} of 6 tokens: {result}")


def resume() -> None:
    """A request that was aborted never continues: the routes that it does not have are put into its
    batch as None, which no batch can hold.
    """
    # as the router's client writes it; as if it did not
    for others in {"routed_experts": None}, {}:
        paused = request()
        try:
            data = postprocess_paused_data(paused, reply(paused, [7, 8], **others), 8, 2)
            result = data.batch["input_ids"].tolist()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
            result = f"{type(error).__name__}: {error}"
        print(VERSION, f"aborted after 2 tokens, meta_info with {sorted(others)}: {result}")


def short_rows() -> None:
    """Missing rows are reported in the log only: tokens without one have expert 0, as often as
    there are experts a token.
    """
    finished = request()
    data = reply(finished, [7, 8, 9], routed_experts=[torch.full((1, 1, 2), 4)])
    batch = postprocess_output_data(finished, data, 6).batch
    routes, attention = batch["routed_experts"][0, :, 0], batch["attention_mask"][0]
    print(VERSION, f"1 row for 5 tokens: {routes.tolist()}, attention {attention.tolist()}")
    finished = request()
    data = reply(finished, [7, 8, 9], output_logprobs=[[-0.1] * 5])
    logprobs = postprocess_output_data(finished, data, 6).batch["infer_logprobs"].tolist()
    print(VERSION, f"5 logprobs for 3 tokens: {logprobs}")


if __name__ == "__main__":
    run(last_token, resume, short_rows)
