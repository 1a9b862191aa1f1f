"""Scoring with a head that is cut over ranks gives every rank what the whole head gives: two
processes, gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="scoring needs torch")

RANK = """
import json, sys
import torch
import torch.distributed as dist
from rollproof.gap.scoring import score

torch.set_num_threads(1)
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
random = torch.Generator().manual_seed(4)
hidden, head = torch.randn(37, 24, generator=random), torch.randn(101, 24, generator=random)
tokens = torch.randint(101, (37,), generator=random)
cut = 60  # shards need not be of one size
first, shard = (0, head[:cut]) if rank == 0 else (cut, head[cut:])
found = score(hidden, shard, tokens, temperature=0.7, group=dist.group.WORLD, first=first)
law = torch.log_softmax(hidden.double() @ head.double().t() / 0.7, -1)
wrong = (found.logprob.double() - law.gather(1, tokens[:, None])[:, 0]).abs().max()
entropy = (found.entropy.double() + (law.exp() * law).sum(-1)).abs().max()
alone = score(hidden, head, tokens, temperature=0.7)
in_shard = (tokens >= first) & (tokens < first + len(shard))
result = {
    "logprob": wrong.item(),
    "entropy": entropy.item(),
    "alone": (found.logprob - alone.logprob).abs().max().item(),
    "values": found.logprob.tolist(),
    "of_shard": int(in_shard.sum()),
}
json.dump(result, open(out, "w"))
dist.destroy_process_group()
"""


def test_shards_of_the_vocabulary_give_what_the_whole_gives(tmp_path: Path) -> None:
    """Two ranks with shards of unequal size agree to the bit with each other, and to 1e-5 with a
    float64 softmax of the whole head.
    """
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), str(out)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [0, 0] == [rank.returncode for rank in ranks], errors
    left, right = (json.loads(out.read_text()) for out in outs)
    assert left["values"] == right["values"]
    assert 0 < left["of_shard"] < 37
    assert 37 == left["of_shard"] + right["of_shard"]
    for found in (left, right):
        assert max(found["logprob"], found["entropy"], found["alone"]) < 1e-5
