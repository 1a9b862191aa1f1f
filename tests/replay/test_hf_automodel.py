"""NeMo Automodel's gate and its RouterReplay in a tiny model, judged as a trainer: what the track
record says of them.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NeMo Automodel needs PyTorch")
pytest.importorskip(
    "transformers",
    minversion="5.24",
    reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
)
pytest.importorskip("nemo_automodel", reason="`pip install --no-deps nemo-automodel==0.7.0`")

with warnings.catch_warnings():  # importing it compiles, and torch's own compiler warns
    warnings.simplefilter("ignore")
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.layers import Gate
    from nemo_automodel.components.moe.router_replay import RouterReplay

from rollproof.core.replay_contract import FreeRows  # noqa: E402
from rollproof.invariants import default_registry  # noqa: E402
from rollproof.judging.checks import Verdict  # noqa: E402
from rollproof.replay.driver import record_replay  # noqa: E402
from rollproof.replay.hf.hf_replay_trainer import HfTrainer  # noqa: E402
from rollproof.replay.hf.hf_setups import Setup  # noqa: E402
from rollproof.verification.traces import judge  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {
    "n_routed_experts": 8,
    "n_activated_experts": 2,
    "n_expert_groups": 1,
    "n_limited_groups": 1,
    "n_shared_experts": 0,
    "dim": 32,
}
REST = {
    "inter_dim": 8,
    "moe_inter_dim": 8,
    "train_gate": True,
    "gate_bias_update_factor": 0.0,
    "aux_loss_coeff": 0.0,
    "route_scale": 1.0,
}


class Gated(torch.nn.Module):  # type: ignore[misc]
    """Automodel's gate behind the interface of Qwen3-MoE's."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        config = MoEConfig(
            **SIZES,
            **REST,
            score_func="softmax",
            softmax_before_topk=True,
            norm_topk_prob=True,
            enable_routing_replay=True,
        )
        self.inner = Gate(config)
        self.inner.weight = weight

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, hidden: Any) -> Any:
        rows = hidden.reshape(-1, hidden.shape[-1])
        weights, ids, _ = self.inner(rows, torch.ones(len(rows), dtype=torch.bool), None)
        return rows @ self.inner.weight.T, weights, ids


class AutomodelTrainer(HfTrainer):
    """Qwen3-MoE with Automodel's gates; rows without a target get two experts, for RouterReplay
    knows no free rows.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, replay=self.replayed)
        terms = self.contract.replay
        assert terms is not None
        self.contract = replace(
            self.contract,
            replay=replace(
                terms, free_rows=FreeRows.DUMMY, tolerance=1e-4, models=(), unsupported=()
            ),
        )

    def _model(self, seed: int = 5) -> Any:
        model = super()._model(seed)
        RouterReplay.clear_registry()
        for layer in model.model.layers:
            layer.mlp.gate = Gated(layer.mlp.gate.weight)
        return model

    @staticmethod
    def replayed(model: Any, routes: Any) -> AbstractContextManager[None]:
        rows = torch.as_tensor(routes).reshape(-1, *routes.shape[-2:])
        rows = torch.where(rows < 0, torch.arange(2), rows)
        return RouterReplay.replay([rows[:, layer] for layer in range(rows.shape[1])])


def red(**setup: Any) -> set[str]:
    torch.set_num_threads(1)
    trace = record_replay(lambda: AutomodelTrainer(Setup(**setup)), only=["full recompute"])
    results = judge(
        trace,
        default_registry().select(
            ["replay.forward", "replay.recompute", "replay.recompute-results"]
        ),
    ).results
    return {result.id for result in results if result.verdict is not Verdict.PASS}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_after_the_context_recomputes_natively(reentrant: bool) -> None:
    """As its docstring shows it, the recompute routes by itself, in silence; with the backward pass
    in the context all is right.
    """
    assert {"replay.recompute", "replay.recompute-results"} == red(late=True, reentrant=reentrant)
    assert set() == red(late=False, reentrant=reentrant)


def test_the_track_record_holds_what_the_script_prints() -> None:
    """On the installed release."""
    command = [sys.executable, str(DOCS / "track_record" / "nemo_automodel_faults.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert 0 == done.returncode, done.stderr[-2000:]
    _, printed = done.stdout.strip().splitlines()
    record = (DOCS / "track_record" / "nemo_automodel_faults.txt").read_text(encoding="utf-8")
    if f"nemo-automodel {metadata.version('nemo-automodel')}:" not in record:
        pytest.skip("the track record has no lines of this release")
    assert printed in record.splitlines()
