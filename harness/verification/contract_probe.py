"""Contract probe: start a subject on idle fleets and read its contract, per engine flavour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    does not exist and for a contract that fits no flavour, ``SubjectError`` for a subject that does
    not start on a flavour that was named.
    """
    declared = getattr(factory, "flavours", None) if flavours is None else flavours
    named = () if declared is None else as_flavours(declared)
    unknown = sorted(set(named) - set(FLAVOURS))
    if unknown:
        raise UsageError(f"No engine flavour is named {unknown}; choose among {sorted(FLAVOURS)}.")
    fitting = []
    misfits: dict[str, str] = {}
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
        misfit = None if named else _misfit(subject, engine, FLAVOURS[flavour])
        if misfit is None:
            fitting.append((flavour, subject, model))
        else:
            misfits[flavour] = misfit
    if not fitting:
        if not misfits:
            # it starts on none: start it once more so that its own error is raised
            idle_contracts(factory, _idle(next(iter(FLAVOURS)), Model()))
        raise UsageError(_no_fit(misfits))
    return fitting


def _no_fit(misfits: Mapping[str, str]) -> str:
    """Return why no flavour fits, one line for the flavours with the same reason."""
    reasons: dict[str, list[str]] = {}
    for flavour, reason in misfits.items():
        reasons.setdefault(reason, []).append(flavour)
    lines = "".join(f"\n  {', '.join(names)}: {reason}" for reason, names in reasons.items())
    return (
        "No engine flavour returns what the contract declares. Correct the contract, or name the"
        " engines that the stack converts from as `flavours` of the subject."
        f"{lines}"
    )


def _idle(flavour: str, model: Model) -> Case:
    return Case(
        flavour=flavour,
        requests=(Request(request_id="r0", prompt_ids=(1,), max_tokens=1),),
        model=model,
    )


def declares(contract: Contract, model: Model) -> bool:
    """Return whether the contract's sizes are those of the model."""
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


def _misfit(subject: Contract, engine: Contract, flavour: Flavour) -> str | None:
    """Return why engines of this flavour cannot return what the subject declares, or ``None``."""
    if subject.logprobs is not Logprobs.NONE:
        if engine.logprobs is Logprobs.NONE:
            return f"logprobs={str(subject.logprobs)!r}, and the engine returns none"
        if subject.missing_logprobs is MissingLogprobs.NEVER and not flavour.abort_logprobs:
            return "missing_logprobs='never', and an aborted call returns no logprobs"
    if not subject.has_routes:
        return None
    # a call that is aborted on its last token is never resumed: its rows come from nowhere else
    if not flavour.abort_routes or not engine.has_routes:
        when = "an aborted call" if engine.has_routes else "the engine"
        return f"rows={str(subject.rows)!r}, and {when} returns no routes"
    if subject.rows is Rows.FORWARDED and engine.rows is Rows.ALL:
        return f"rows={str(subject.rows)!r}, and the engine returns {str(engine.rows)!r}"
    if subject.layer_axis != engine.layer_axis:
        axes = str(subject.layer_axis), str(engine.layer_axis)
        return f"layer_axis={axes[0]!r}, and the engine's is {axes[1]!r}"
    if not set(subject.dtypes) & set(engine.dtypes):
        return f"dtype={subject.dtype!r}, and the engine returns {engine.dtype}"
    return None
