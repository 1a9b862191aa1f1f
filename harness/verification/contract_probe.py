"""Contract probe: start a subject on idle fleets and read its contract, per engine flavour."""

from __future__ import annotations

from collections.abc import Iterable

from rollproof.core.case import Case, Model
from rollproof.core.contract import Contract, Logprobs, MissingLogprobs, Rows
from rollproof.core.records import Request
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import ContractError, SubjectError, UsageError
from rollproof.fakes.engine.flavours import FLAVOURS, Flavour
from rollproof.verification.argument_checks import as_flavours
from rollproof.verification.runner import idle_contracts

__all__ = ["declares", "probe"]

_ODD = Model(num_layers=5, moe_layers=(1, 3, 4), num_experts=12, top_k=3)
"""A size that no stack has by chance: a contract that declares it follows the fleet."""


def probe(
    factory: SubjectFactory, flavours: Iterable[str] | None = None
) -> list[tuple[str, Contract, Model | None]]:
    """Return the flavours that the subject runs on, each with its contract and its model.

    The model is ``None`` if the contract follows the fleet. Without ``flavours`` those of the
    subject's attribute ``flavours`` are used, and without that the enrolled ones
    (``Flavour.enrolled``) whose conventions fit the contract. Raises ``UsageError`` for a name that
    does not exist, ``SubjectError`` for a subject that does not start on a flavour that was named.
    """
    named = as_flavours(getattr(factory, "flavours", None) or () if flavours is None else flavours)
    unknown = sorted(set(named) - set(FLAVOURS))
    if unknown:
        raise UsageError(f"No engine flavour is named {unknown}; choose among {sorted(FLAVOURS)}.")
    fitting = []
    enrolled = tuple(name for name, flavour in FLAVOURS.items() if flavour.enrolled)
    for flavour in named or enrolled:
        try:
            # Started once on a model of an odd size: a contract of that size follows the fleet, any
            # other is the stack's own, and the fleet is made to fit it.
            subject, engine = idle_contracts(factory, _idle(flavour, _ODD))
            model = None if declares(subject, _ODD) else _model_of(subject)
            if model is not None:
                subject, engine = idle_contracts(factory, _idle(flavour, model))
        except (ContractError, SubjectError):
            if named:
                raise
            continue
        if named or _fits(subject, engine, FLAVOURS[flavour]):
            fitting.append((flavour, subject, model))
    if not fitting and not named:
        # nothing fits: start it once more so that its own error is raised
        idle_contracts(factory, _idle(next(iter(FLAVOURS)), Model()))
    return fitting


def _idle(flavour: str, model: Model) -> Case:
    return Case(
        flavour=flavour,
        requests=(Request(request_id="r0", prompt_ids=(1,), max_tokens=1),),
        model=model,
    )


def declares(contract: Contract, model: Model) -> bool:
    """Whether the contract's sizes are those of the model."""
    if not contract.has_routes:
        return True
    shown = (contract.num_layers, contract.moe_layers, contract.num_experts, contract.top_k)
    return shown == (model.num_layers, model.moe_layers, model.num_experts, model.top_k)


def _model_of(contract: Contract) -> Model:
    assert (
        contract.num_layers is not None
        and contract.moe_layers is not None
        and contract.num_experts is not None
    )
    assert contract.top_k is not None
    return Model(
        num_layers=contract.num_layers,
        moe_layers=contract.moe_layers,
        num_experts=contract.num_experts,
        top_k=contract.top_k,
    )


def _fits(subject: Contract, engine: Contract, flavour: Flavour) -> bool:
    """Whether engines of this flavour can return what the subject declares."""
    if subject.logprobs is not Logprobs.NONE:
        always = subject.missing_logprobs is MissingLogprobs.NEVER
        if engine.logprobs is Logprobs.NONE or (always and not flavour.abort_logprobs):
            return False
    # a call that is aborted on its last token is never resumed: its rows come from nowhere else
    if subject.has_routes and not flavour.abort_routes:
        return False
    if not subject.has_routes or not engine.has_routes:
        return not subject.has_routes
    if subject.rows is Rows.FORWARDED and engine.rows is Rows.ALL:
        return False
    return subject.layer_axis == engine.layer_axis and bool(
        set(subject.dtypes) & set(engine.dtypes)
    )
