"""The classes of AReaL that the adapters drive, as the package index has them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollproof.stacks._support.upstream import imported, upstream
from rollproof.stacks.areal.release import RELEASE

__all__ = ["AReaL", "import_areal"]

_ENGINE = "areal.infra.remote_inf_engine"
_HTTP = "areal.infra.utils.http"
_SERVICE = "areal.experimental.inference_service."
"""Package of 1.0.4 that its repository has since moved to ``areal/v2/inference_service``;
``InfBridge`` differs by that import only.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AReaL:
    """The imported classes. ``backends`` and ``bridge_backends`` are by engine flavour; ``request``
    is its ``arequest_with_retry``.
    """

    engine: Any
    config: Any
    backends: Mapping[str, Any]
    bridge: Any
    bridge_backends: Mapping[str, Any]
    pause_state: Any
    model_request: Any
    hyperparameters: Any
    update_meta: Any
    request: Any


def import_areal(version: str) -> AReaL:
    """Import what the adapters drive (10 to 40 s). Raises ``StackError`` for a missing package."""
    names = upstream(
        RELEASE,
        version,
        {
            "engine": _ENGINE + ":RemoteInfEngine",
            "request": _HTTP + ":arequest_with_retry",
            "sglang": "areal.engine.sglang_remote:SGLangBackend",
            "vllm": "areal.engine.vllm_remote:VLLMBackend",
            "config": "areal.api.cli_args:InferenceEngineConfig",
            "hyperparameters": "areal.api.cli_args:GenerationHyperparameters",
            "model_request": "areal.api.io_struct:ModelRequest",
            "update_meta": "areal.api.io_struct:WeightUpdateMeta",
            "bridge": _SERVICE + "inf_bridge:InfBridge",
            "pause_state": _SERVICE + "data_proxy.pause:PauseState",
            "sglang_bridge": _SERVICE + "sglang.bridge:SGLangBridgeBackend",
            "vllm_bridge": _SERVICE + "vllm.bridge:VLLMBridgeBackend",
        },
    )
    # Retries, pauses and changing loops are what a case is about. AReaL's loggers are not those of
    # the logging module.
    for module in (_ENGINE, _HTTP, _SERVICE + "inf_bridge", "areal.infra.workflow_context"):
        imported(module).logger.setLevel(logging.CRITICAL)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    backends = {"sglang": names.pop("sglang"), "vllm": names.pop("vllm")}
    bridge_backends = {"sglang": names.pop("sglang_bridge"), "vllm": names.pop("vllm_bridge")}
    return AReaL(backends=backends, bridge_backends=bridge_backends, **names)
