"""The contract of a real engine: the conventions of its flavour, the shape of its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollproof.core.case import Model
from rollproof.core.contract import Contract, KvPolicy, ResumeBy, Rows
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.model_config import end_tokens_of, model_of
from rollproof.errors import EngineStartError
from rollproof.fakes.engine.flavours import Flavour, engine_contract, engine_terms, flavour_named

__all__ = ["declared"]


def declared(flavour: str | Flavour, settings: EngineSettings) -> Contract:
    """Return what an engine of that flavour promises for the checkpoint ``settings.model``.

    The contract has no routes if ``settings.routes`` is off. Raises ``EngineStartError`` for a
    folder without a config, or for a config that lacks what a contract needs.
    """
    named = flavour_named(flavour) if isinstance(flavour, str) else flavour
    terms = engine_terms(named, settings.max_length, end_tokens=end_tokens_of(Path(settings.model)))
    model = model_of(settings.model)
    if not settings.routes:
        declared = engine_contract(named, Model(), KvPolicy.RECOMPUTE)
        return Contract(
            rows=Rows.NONE,
            resume=ResumeBy.ENGINE,
            versions=declared.versions,
            tag_read=declared.tag_read,
            logprobs=declared.logprobs,
            abort_surfaces=True,
            kv_policy=KvPolicy.RECOMPUTE,
            engine=terms,
        )
    if model is None:
        raise EngineStartError(
            f"The model in {settings.model} has no experts, but routes are requested: an engine"
            " would refuse, or return values that no router chose. Name a MoE checkpoint, or start"
            " the engine with routes=False."
        )
    return replace(engine_contract(named, model, KvPolicy.RECOMPUTE), engine=terms)
