"""AReaL's classes that the adapters drive, as the package index has them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollproof.stacks import Release, attributes, missing_dependency

__all__ = ["RELEASE", "AReaL", "import_areal"]

RELEASE = Release(distribution="areal", versions=("1.0.4",), stack="areal")

_ENGINE = "areal.infra.remote_inf_engine"
_HTTP = "areal.infra.utils.http"
_SERVICE = "areal.experimental.inference_service."
"""Where 1.0.4 has what its repository calls ``areal/v2/inference_service`` since then;
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
    """Import what the adapters drive (10 to 40 s). Raises ``StackError`` where something that it
    imports is missing.
    """
    try:
        (engine,) = attributes(_ENGINE, "RemoteInfEngine")
        (request,) = attributes(_HTTP, "arequest_with_retry")
        (sglang,) = attributes("areal.engine.sglang_remote", "SGLangBackend")
        (vllm,) = attributes("areal.engine.vllm_remote", "VLLMBackend")
        config, hyperparameters = attributes(
            "areal.api.cli_args", "InferenceEngineConfig", "GenerationHyperparameters"
        )
        model_request, update_meta = attributes(
            "areal.api.io_struct", "ModelRequest", "WeightUpdateMeta"
        )
        (bridge,) = attributes(_SERVICE + "inf_bridge", "InfBridge")
        (pause_state,) = attributes(_SERVICE + "data_proxy.pause", "PauseState")
        (sglang_bridge,) = attributes(_SERVICE + "sglang.bridge", "SGLangBridgeBackend")
        (vllm_bridge,) = attributes(_SERVICE + "vllm.bridge", "VLLMBridgeBackend")
    except ImportError as error:
        raise missing_dependency("areal", version, error, RELEASE) from error
    for name in (_ENGINE, _HTTP, _SERVICE + "inf_bridge", "areal.infra.workflow_context"):
        # retries, pauses and loops that change are what a case is about; AReaL's loggers are not
        # those of the logging module
        importlib.import_module(name).logger.setLevel(logging.CRITICAL)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return AReaL(
        engine=engine,
        config=config,
        backends={"sglang": sglang, "vllm": vllm},
        bridge=bridge,
        bridge_backends={"sglang": sglang_bridge, "vllm": vllm_bridge},
        pause_state=pause_state,
        model_request=model_request,
        hyperparameters=hyperparameters,
        update_meta=update_meta,
        request=request,
    )
