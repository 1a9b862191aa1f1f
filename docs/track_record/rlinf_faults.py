"""Faults of RLinf: `python docs/track_record/rlinf_faults.py [NAME ...]`."""

from importlib.metadata import version
from typing import Any

from common import run
from rlinf.data.io_struct import RolloutResult, SeqGroupInfo

VERSION = f"rlinf {version('rlinf')}:"


def reply(tokens: list[int], reason: str) -> dict[str, Any]:
    """SGLang's reply to a call."""
    logprobs = [[-0.1 * token, token] for token in tokens]
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": logprobs}
    return {"output_ids": tokens, "meta_info": meta}


def logprobs() -> None:
    """After a resume a sample has the logprobs of its last call only, with the tokens of all."""
    group = SeqGroupInfo(id=0, input_ids=[1, 2], answer=[], group_size=1)
    group.record_sglang_result(0, reply([3, 4], "abort"))
    # as the worker does that takes the group over (sglang_worker.py:355)
    group.idx_aborted.clear()
    group.record_sglang_result(0, reply([5, 6, 7], "stop"))
    result = RolloutResult.from_sglang_seq_group(group, True)
    values = [round(value, 1) for value in result.rollout_logprobs[0]]
    print(VERSION, f"response {result.response_ids[0]}, logprobs {values}")


if __name__ == "__main__":
    run(logprobs)
