"""After a resume a sample has the logprobs of its last call only, beside the tokens of all of them."""

from importlib.metadata import version

from rlinf.data.io_struct import RolloutResult, SeqGroupInfo


def said(tokens, reason):
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.1 * t, t] for t in tokens],
        },
    }


group = SeqGroupInfo(id=0, input_ids=[1, 2], answer=[], group_size=1)
group.record_sglang_result(0, said([3, 4], "abort"))
group.idx_aborted.clear()  # as the worker that takes the group over does (sglang_worker.py:355)
group.record_sglang_result(0, said([5, 6, 7], "stop"))
result = RolloutResult.from_sglang_seq_group(group, True)
print(
    f"rlinf {version('rlinf')}: response {result.response_ids[0]}, logprobs {[round(p, 1) for p in result.rollout_logprobs[0]]}"
)
