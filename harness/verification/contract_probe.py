"""Probing: starts a subject on idle fleets to ask for its contract, per engine flavour."""

from __future__ import annotations

from collections.abc import Iterable

from rollproof.core.case import Case, Model
from rollproof.core.contract import Contract, Rows
from rollproof.core.records import Request
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import ContractError, SubjectError, UsageError
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.verification.runner import idle_contracts

__all__ = ["declares", "probe"]

_ODD = Model(num_layers=5, moe_layers=(1, 3, 4), num_experts=12, top_k=3)
"""A size that nobody declares by chance: a contract that shows it follows the fleet."""


def probe(
    factory: SubjectFactory, flavours: Iterable[str] | None = None
) -> list[tuple[str, Contract, Model | None]]:
    """Flavours that the subject can be run on, with its contract there and its model (``None``: it
    follows the fleet).

    ``flavours`` are taken as named; without them the subject's own ``flavours`` attribute, and
    without that every flavour whose conventions fit the contract. Raises ``UsageError`` for a name
    that does not exist, ``SubjectError`` for a subject that does not start on a flavour it was
    named for.
    """
    named = tuple(flavours) if flavours is not None else tuple(getattr(factory, "flavours", ()))
    stray = sorted(set(named) - set(FLAVOURS))
    if stray:
        raise UsageError(f"No engine flavour is named {stray}; choose among {sorted(FLAVOURS)}.")
    found = []
    for flavour in named or tuple(FLAVOURS):
        try:
            subject, engine = idle_contracts(factory, _idle(flavour, _ODD))
            model = None if declares(subject, _ODD) else _model_of(subject)
            if model is not None:
                subject, engine = idle_contracts(factory, _idle(flavour, model))
        except (ContractError, SubjectError):
            if named:
                raise
            continue
        if named or _fits(subject, engine):
            found.append((flavour, subject, model))
    if not found and not named:
        idle_contracts(factory, _idle(next(iter(FLAVOURS)), Model()))
    return found


def _idle(flavour: str, model: Model) -> Case:
    return Case(
        flavour=flavour,
        requests=(Request(request_id="r0", prompt_ids=(1,), max_tokens=1),),
        model=model,
    )


def declares(contract: Contract, model: Model) -> bool:
    """Whether a contract is one for this model: a contract of a fixed size does not follow a fleet
    of another.
    """
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


def _fits(subject: Contract, engine: Contract) -> bool:
    """Whether the subject's declared conventions can come from engines of this flavour."""
    if not subject.has_routes or not engine.has_routes:
        return not subject.has_routes
    if subject.rows is Rows.FORWARDED and engine.rows is Rows.ALL:
        return False
    return subject.layer_axis == engine.layer_axis and bool(
        set(subject.dtypes) & set(engine.dtypes)
    )
