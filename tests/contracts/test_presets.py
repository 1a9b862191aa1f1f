from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import rollproof
from rollproof.contracts.presets import PRESETS, contract_of
from rollproof.contracts.stand_in import StandIn
from rollproof.core.case import Case, Model
from rollproof.core.contract import Contract
from rollproof.core.records import Request, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import UsageError
from rollproof.fakes.engine.fleet import Fleet
from rollproof.stacks.areal.conversions import contract_of as areal
from rollproof.stacks.nemo_rl.controller import rollout_contract as nemo_rl
from rollproof.stacks.openrlhf.executor import executor_contract as openrlhf
from rollproof.stacks.roll.rollout import loop_contract as roll
from rollproof.stacks.trl.rollout import loop_contract as trl
from rollproof.stacks.verifiers.rollout import branch_contract as verifiers
from rollproof.stacks.verl.configuration import verl_contract as verl
from rollproof.verification.rollouts import cases_for
from rollproof.verification.runner import idle_contracts

COMBINATIONS = [
    (name, engine, routes)
    for name, preset in PRESETS.items()
    for engine in preset.engines
    for routes in ((True, False) if preset.routes else (False,))
]


@pytest.mark.parametrize(("name", "engine", "routes"), COMBINATIONS)
def test_a_stand_in_keeps_the_contract_of_every_preset(
    name: str, engine: str, routes: bool
) -> None:
    """Each preset can be kept, on each of its engines: no check of a run finds anything."""
    promised = contract_of(name, engine=engine, routes=routes)

    class Subject:
        flavours = (engine,)
        contract = promised

        def start(self, fleet: Fleet) -> None:
            self.client = StandIn(fleet, self.contract)

        async def rollout(self, request: Request) -> Rollout | None:
            return await self.client.generate(request)

        async def update_weights(self, version: int | None) -> None:
            await self.client.update_weights(version)

        def to_record(self, native: Rollout) -> Rollout:
            return native

        def stop(self) -> None:
            pass

    cases = cases_for(Subject, profile="pr", seed=0, thin=25)
    report = rollproof.run_conformance(Subject, cases=cases, canary=False)
    assert () == report.failed
    assert report.summary["pass"] > 20


def _multi_turn(contract: Callable[..., Contract]) -> Callable[[Fleet], Contract]:
    return lambda fleet: contract(fleet, multi_turn=False)


ADAPTERS: Mapping[str, Callable[[Fleet], Contract]] = {
    "verl": verl,
    "areal": areal,
    "trl": _multi_turn(trl),
    "openrlhf": _multi_turn(openrlhf),
    "nemo_rl": nemo_rl,
    "verifiers": verifiers,
    "roll": roll,
}
ALLOWED: Mapping[str, frozenset[str]] = {
    # answers after which no call came: the adapter's conversations never end so
    "verifiers": frozenset({"filler"})
}


@pytest.mark.parametrize(
    ("name", "engine"), [(name, engine) for name in ADAPTERS for engine in PRESETS[name].engines]
)
def test_a_preset_declares_what_the_adapter_of_the_released_stack_declares(
    name: str, engine: str
) -> None:
    """The contract under which the released code is judged is the one that users start from."""
    adapter = _contract_on(ADAPTERS[name], engine)
    preset = contract_of(name, engine=engine, routes=adapter.has_routes)
    differing = {
        field
        for field, value in adapter.to_dict().items()
        if value != preset.to_dict()[field] and field not in ALLOWED.get(name, ())
    }
    assert set() == differing


def _contract_on(contract: Callable[[Fleet], Contract], engine: str) -> Contract:
    """The contract on an idle fleet with the presets' model."""
    found: list[Contract] = []

    class Subject:
        def start(self, fleet: Fleet) -> None:
            self.contract = contract(fleet)
            found.append(self.contract)

        async def rollout(self, request: Request) -> Rollout | None:
            raise NotImplementedError

        async def update_weights(self, version: int | None) -> None:
            raise NotImplementedError

        def to_record(self, native: Any) -> Rollout:
            raise NotImplementedError

        def stop(self) -> None:
            pass

    factory: SubjectFactory = Subject
    case = Case(
        flavour=engine,
        requests=(Request(request_id="r0", prompt_ids=(1,), max_tokens=1),),
        model=Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=2),
    )
    idle_contracts(factory, case)
    return found[0]


def test_fields_can_differ_and_wrong_names_are_refused() -> None:
    """A preset is a start: any field may be another. Names and engines that do not exist say which
    do.
    """
    contract = rollproof.contracts.verl(engine="sglang", partial_off="dropped", num_experts=64)
    assert ("dropped", 64, "temperature-scaled") == (
        contract.partial_off,
        contract.num_experts,
        contract.logprobs,
    )
    for wrong, words in (
        ({"name": "verll"}, "choose among verl, skyrl"),
        ({"name": "slime", "engine": "vllm"}, "choose among sglang"),
        ({"name": "trl", "routes": True}, "carry no routes"),
    ):
        with pytest.raises(UsageError, match=words):
            contract_of(**wrong)  # type: ignore[arg-type]
    with pytest.raises(rollproof.ContractError, match="rows"):
        rollproof.contracts.verl(rows="some")
