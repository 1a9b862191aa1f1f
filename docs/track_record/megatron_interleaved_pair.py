"""Interleaved schedule on two pipeline ranks with batched messages: what one rank sends first the other takes for something else.

Both neighbours of a rank are the same rank there, and messages between two ranks are matched in order. Megatron-LM's arguments refuse
this (megatron/training/arguments.py); megatron-core, which other trainers call, does not.
"""

from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel import p2p_communication as p2p
from megatron_stub import MEGATRON

torch.distributed.P2POp = lambda op, tensor, peer, group: (op.__name__, tensor)
torch.distributed.batch_isend_irecv = lambda ops: ops
both = {
    "tensor_send_prev": "gradient",
    "tensor_recv_prev": "activations",
    "tensor_send_next": "activations",
    "tensor_recv_next": "gradient",
}
ops = p2p._batched_p2p_ops(
    **both,
    group=SimpleNamespace(rank=lambda: 0, size=lambda: 2),
    prev_pipeline_rank=1,
    next_pipeline_rank=1,
)
sent = [what for op, what in ops if op == "isend"]
taken = [what for op, what in ops if op == "irecv"]
print(MEGATRON.removeprefix("on "), "each rank sends", sent, "- and takes what arrives for", taken)
