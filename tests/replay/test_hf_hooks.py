"""Replay code that works by forward hooks, or elsewhere, and is for its own model families."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip(
    "transformers",
    minversion="5.24",
    reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
)

from rollproof.core.events.replay import Action, Purpose, Step  # noqa: E402
from rollproof.core.router_spy import Spy, UnsupportedStep  # noqa: E402
from rollproof.errors import UsageError  # noqa: E402
from rollproof.invariants import default_registry  # noqa: E402
from rollproof.judging.checks import CheckResult, Verdict  # noqa: E402
from rollproof.replay.driver import record_replay  # noqa: E402
from rollproof.replay.hf import find_routers, watched  # noqa: E402
from rollproof.replay.hf.hf_replay_trainer import HfTrainer  # noqa: E402
from rollproof.replay.hf.hf_setups import Setup  # noqa: E402
from rollproof.replay.hf.model_families import tiny_model  # noqa: E402
from rollproof.replay.hf.router_formulas import FORMULAS  # noqa: E402
from rollproof.replay.router_hooks import last_forward_hook  # noqa: E402
from rollproof.verification.traces import judge  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
EPISODES = ("self-replay", "drift", "full recompute", "failure in forward", "model reference")


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def _replaced(ids: Any, module: Any, inputs: Any, output: Any) -> Any:
    """Return a router's output with other experts: the hook of SkyRL#1772."""
    hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
    chosen = torch.where((ids < 0).any(-1, keepdim=True), output[2], ids)
    return (*FORMULAS["qwen3_moe"](module, hidden, chosen), chosen)


@contextmanager
def by_hooks(model: Any, routes: Any, shift: int = 0) -> Iterator[None]:
    """Replay by a forward hook on every router."""
    targets = torch.as_tensor(routes).reshape(-1, *routes.shape[-2:]).roll(shift, 0)
    hooks = [
        router.module.register_forward_hook(partial(_replaced, targets[:, router.layer]))
        for router in find_routers(model).all
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def by_class(model: Any, routes: Any) -> Iterator[None]:
    """Replay by another forward of the routers' class: nothing shows on a router."""
    targets = torch.as_tensor(routes).reshape(-1, *routes.shape[-2:])
    routers = {router.module: router.layer for router in find_routers(model).all}
    kind = type(next(iter(routers)))
    plain = kind.forward

    def forward(module: Any, hidden: Any) -> Any:
        output = plain(module, hidden)
        if module not in routers:
            return output
        return _replaced(targets[:, routers[module]], module, (hidden,), output)

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = plain


def _results(replay: Any, episodes: tuple[str, ...], **options: Any) -> dict[str, CheckResult]:
    trace = record_replay(lambda: HfTrainer(Setup(), replay=replay, **options), only=episodes)
    judged = judge(trace, default_registry().select(["replay"]))
    return {result.id: result for result in judged.results}


def _failing(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, result in results.items() if result.verdict is Verdict.FAIL}


def test_replay_by_hooks_is_clean_and_its_installs_are_counted() -> None:
    """The observer sees what the hooks of the code under test return."""
    results = _results(by_hooks, EPISODES, families=["qwen3_moe"])
    assert set() == _failing(results)
    assert Verdict.PASS is results["replay.installs"].verdict
    assert Verdict.PASS is results["replay.forward"].verdict


def test_hooks_one_row_late_are_seen() -> None:
    """The same way to replay with a fault."""
    failing = _failing(_results(partial(by_hooks, shift=1), ("self-replay", "drift")))
    assert "replay.forward" in failing
    assert "replay.installs" not in failing


def test_replay_that_shows_on_no_router_has_no_installs_to_count() -> None:
    """The contract declares none, and nothing is blamed for what cannot be seen."""
    results = _results(by_class, ("self-replay", "drift"))
    assert set() == _failing(results)
    assert Verdict.NOT_APPLICABLE is results["replay.installs"].verdict
    assert HfTrainer(Setup()).contract.replay.installs == "per-call"  # type: ignore[union-attr]


def test_replay_for_its_own_families_need_not_refuse_others() -> None:
    """It says which they are; the routers of other families are not asked of it."""
    own = HfTrainer(Setup(), replay=by_hooks, families=("qwen3_moe",))
    assert () == own.contract.replay.unsupported  # type: ignore[union-attr]
    with pytest.raises(UnsupportedStep, match=r"for \['qwen3_moe'\] alone"):
        own.variant("phimoe")
    assert HfTrainer(Setup(), replay=by_hooks).contract.replay.unsupported  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="'mixtral' is not among those"):
        HfTrainer(Setup(family="mixtral"), replay=by_hooks, families=["qwen3_moe"])


def test_watched_reports_after_hooks_that_come_later() -> None:
    """In the documented order the observer is entered before the replay."""
    model = tiny_model("qwen3_moe")
    ids = torch.tensor([[5, 6, 7, 8]])
    routes = torch.tensor([6, 3]).repeat(1, 4, 3, 1)
    step = Step(
        episode="e", name="one", purpose=Purpose.TRAIN, action=Action.REPLAY, microbatches=((),)
    )
    spy = Spy(step)
    with watched(find_routers(model), spy, ids), by_hooks(model, routes), torch.no_grad():
        model(ids, use_cache=False)
    assert {(3, 6)} == {
        tuple(sorted(row)) for event in spy.events for row in event.experts.tolist()
    }


def test_nothing_is_left_on_a_module() -> None:
    """Both hooks are removed, also by an exception."""
    module = torch.nn.Linear(2, 2)
    with pytest.raises(KeyError), ExitStack() as hooks:
        hooks.enter_context(last_forward_hook(module, lambda *_: None))
        assert (1, 1) == (len(module._forward_hooks), len(module._forward_pre_hooks))
        raise KeyError
    assert (0, 0) == (len(module._forward_hooks), len(module._forward_pre_hooks))
