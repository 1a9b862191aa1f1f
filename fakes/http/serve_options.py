"""Options of a fake server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rollproof.core.case import EngineOptions, Model
from rollproof.core.contract import Contract
from rollproof.fakes.engine.fake_engine import MAX_LENGTH

__all__ = ["RoutesForm", "ServeOptions"]


class RoutesForm(StrEnum):
    """How routes are written into JSON."""

    INT32 = "int32"
    """Base64 of int32, without a shape: SGLang."""
    COMPACT = "compact"
    """Base64 of the smallest type, named in ``routed_experts_dtype``: SGLang with
    SGLANG_ROUTED_EXPERTS_DTYPE.
    """
    NPY = "npy"
    """Base64 of a ``.npy`` file: vLLM."""
    DESCRIBED = "described"
    """Base64 with shape, dtype and the position of the first row: prime-rl, instead of vLLM's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of a fake server.

    Attributes:
        flavour: the release to emulate.
        model: sizes of the model.
        engine: options of the fake engine; times in real seconds.
        label: the first weight label.
        seed: seed of the coded policy.
        max_length: most tokens of prompt and response together.
        max_body: most bytes of a request's body.
        incremental: SGLang sends only new tokens in each event of a stream.
        tokenizer: replies have text; without it SGLang runs with skip_tokenizer_init.
        routes: the form of routes, if not the server's own.
        nested_routes: SkyRL's endpoint sends routes as nested lists, as its release 0.3 did.
        untagged_aborts: every second reply of SGLang to a call that was aborted before it ran
            lacks ``weight_version``, as older releases left it out (slime#327).
        contract: what the stack promises; needed for samples to be judged.
    """

    flavour: str
    model: Model = field(default_factory=Model)
    engine: EngineOptions = field(
        default_factory=lambda: EngineOptions(max_batch=256, step=0.001, prefix_cache=True)
    )
    label: str = "default"
    seed: int = 0
    max_length: int = MAX_LENGTH
    max_body: int = 64 << 20
    incremental: bool = False
    tokenizer: bool = True
    routes: RoutesForm | None = None
    nested_routes: bool = False
    untagged_aborts: bool = False
    contract: Contract | None = None
