"""A trainer whose attention is compiled makes one graph for all its steps: else the same step may
come to other bits later.
"""

from __future__ import annotations

import contextlib
from functools import partialmethod

import pytest

pytest.importorskip("torch", reason="a real trainer needs PyTorch")
pytest.importorskip("transformers", reason="a real trainer needs transformers")

import torch
from torch._dynamo.utils import counters

import rollproof.replay.hf.hf_replay_trainer
from rollproof.replay.driver import record_replay
from rollproof.replay.hf.hf_replay_trainer import HfTrainer
from rollproof.replay.hf.hf_setups import Setup


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("as_is", "graphs"), [(True, 1), (False, 2)])
def test_a_batch_as_wide_as_a_head_is_no_width_of_its_own(
    as_is: bool, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of two tokens come behind a batch of width 8, the size of a head; left to torch they
    make another graph.
    """
    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager")
    )
    if not as_is:
        monkeypatch.setattr(
            rollproof.replay.hf.hf_replay_trainer, "_one_graph", contextlib.nullcontext
        )
    torch.compiler.reset()
    counters.clear()
    trace = record_replay(lambda: HfTrainer(Setup(compiled=True)), only=["edges"])
    assert any(getattr(event, "step", "") == "native after the edges" for event in trace.events)
    assert graphs == counters["stats"]["unique_graphs"]
    torch.compiler.reset()
