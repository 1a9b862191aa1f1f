"""Which engine flavours a subject runs on: those that can return what its contract declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import pytest

from rollproof.core.contract import Contract, MissingLogprobs
from rollproof.engines.engine_targets import EngineTarget, fake_target
from rollproof.errors import UsageError
from rollproof.fakes.clients.reference_clients import REFERENCES, AsSampled, AsSampledTurns
from rollproof.fakes.engine import flavours
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.fakes.engine.flavours import FLAVOURS, Flavour
from rollproof.fakes.engine.fleet import Fleet
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.verification import contract_probe
from rollproof.verification.contract_probe import probe
from rollproof.verification.engines import run_engine_conformance
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import random_cases
from rollproof.verification.traces import judge

BARE_ABORTS = "aborts-without-logprobs"
NO_ROWS = "aborts-without-routes"
MADE_UP: Mapping[str, Flavour] = MappingProxyType(
    {
        BARE_ABORTS: replace(FLAVOURS["vllm"], name=BARE_ABORTS, abort_logprobs=False),
        NO_ROWS: replace(FLAVOURS["vllm"], name=NO_ROWS, abort_routes=False),
    }
)


@pytest.fixture(params=[False, True], ids=["opt-in", "enrolled"])
def enrolled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The made-up flavours among the shipped ones."""
    chosen: bool = request.param
    added = {name: replace(made, enrolled=chosen) for name, made in MADE_UP.items()}
    every = MappingProxyType({**FLAVOURS, **added})
    for module in (flavours, contract_probe):
        monkeypatch.setattr(module, "FLAVOURS", every)
    return chosen


class MarksMissing(AsSampled):
    """Hands a token without a logprob over as NaN, and says so."""

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), missing_logprobs=MissingLogprobs.NAN)


class Asks(AsSampled):
    """Names the flavour that it is made for."""

    flavours: ClassVar[tuple[str, ...]] = (BARE_ABORTS,)


def test_a_new_flavour_is_run_by_those_alone_who_name_it(enrolled: bool) -> None:
    """An enrolled one is run by all whose contract fits."""
    assert enrolled == (BARE_ABORTS in [name for name, _, _ in probe(MarksMissing)])
    assert [BARE_ABORTS] == [name for name, _, _ in probe(MarksMissing, [BARE_ABORTS])]
    assert [BARE_ABORTS] == [name for name, _, _ in probe(Asks)]


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_flavour_that_cannot_return_what_is_declared_does_not_fit(
    name: str, enrolled: bool
) -> None:
    """A client that declares a logprob with every token does not run where aborts have none; one
    with routes does not run where aborts have none.
    """
    fitting = {flavour for flavour, _, _ in probe(REFERENCES[name])}
    contract = probe(REFERENCES[name])[0][1]
    if contract.missing_logprobs is MissingLogprobs.NEVER:
        assert BARE_ABORTS not in fitting
    assert contract.has_routes
    assert NO_ROWS not in fitting
    assert fitting & {"vllm", "trtllm"}


def test_clients_pass_on_the_made_up_flavours_that_fit_them(enrolled: bool) -> None:
    """Nobody is blamed for what the engine does not return, and does not promise."""
    if not enrolled:
        pytest.skip("nothing fits")
    registry = default_registry()
    ran = set()
    for factory in (*REFERENCES.values(), MarksMissing):
        for flavour, contract, model in probe(factory):
            if flavour not in MADE_UP:
                continue
            ran.add(flavour)
            for case in random_cases(5, 6, flavour=flavour, contract=contract, model=model):
                judgement = judge(run_case(factory, case), registry)
                assert {} == {
                    result.id: result.findings[0].title
                    for result in judgement.results
                    if result.findings
                }, (flavour, factory)
    assert {BARE_ABORTS} == ran


@pytest.mark.parametrize("made_up", MADE_UP.values(), ids=list(MADE_UP))
def test_the_engine_suite_passes_on_an_engine_that_returns_less_by_declaration(
    made_up: Flavour,
) -> None:
    """Every check passes or is ruled out with a reason; none stays unknown, and the missing parts
    of an aborted segment shift nothing.
    """
    target: EngineTarget = fake_target(
        "vllm", make=lambda settings: FakeEngineSubject(settings, made_up)
    )
    report = run_engine_conformance(target)
    assert {} == {
        result.id: result.reason or result.findings[0].title
        for result in report.results
        if result.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    }
    verdicts = {result.id: result.verdict for result in report.results}
    assert Verdict.PASS is verdicts["lifecycle.abort-keeps-tokens"]
    assert Verdict.PASS is verdicts["stitch.logprobs-length"]


def test_an_undeclared_lack_is_the_engines_own_finding() -> None:
    """The join of the segments does not hide it, and does not blame the lengths."""
    undeclared = replace(MADE_UP[BARE_ABORTS])

    class Silent(FakeEngineSubject):
        def __init__(self, settings: object) -> None:
            super().__init__(settings, undeclared)  # type: ignore[arg-type]
            whole = FakeEngineSubject(settings, "vllm").contract  # type: ignore[arg-type]
            self.contract = whole

    report = run_engine_conformance(fake_target("vllm", make=Silent), experiments=["resent"])
    assert ["engine.parts"] == [result.id for result in report.failed]


def test_a_client_of_turns_that_masks_missing_logprobs_fits() -> None:
    """It declares what becomes of them."""
    contract = probe(AsSampledTurns, ["vllm"])[0][1]
    assert MissingLogprobs.MASKED is contract.missing_logprobs


def test_a_contract_that_no_engine_fits_is_explained() -> None:
    """Each flavour with what it returns in place of what is declared: the contract is wrong more
    often than the choice of engines.
    """

    class WrongDtype(AsSampled):
        """Declares ids as torch has them, and delivers those of the engine."""

        def declared(self, fleet: Fleet) -> Contract:
            return replace(super().declared(fleet), dtype="int64")

    with pytest.raises(UsageError) as caught:
        probe(WrongDtype)
    assert str(caught.value).splitlines() == [
        (
            "No engine flavour returns what the contract declares. Correct the contract, or name"
            " the engines that the stack converts from as `flavours` of the subject."
        ),
        "  vllm, vllm-0.26, vllm-gated: dtype='int64', and the engine returns uint8",
        "  sglang, sglang-0.5.17, trtllm: dtype='int64', and the engine returns int32",
        "  rows-T: rows='T-1', and the engine returns 'T'",
    ]
