"""Stand-ins for the scripts beside this one: scripted SGLang answers, and AReaL's two clients on them. Nothing of rollproof, no server."""

from __future__ import annotations

import base64
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest
from areal.engine.sglang_remote import SGLangBackend
from areal.experimental.inference_service.data_proxy.pause import PauseState
from areal.experimental.inference_service.inf_bridge import InfBridge
from areal.experimental.inference_service.sglang.bridge import SGLangBridgeBackend
from areal.infra import remote_inf_engine, workflow_context
from areal.version import __version__

VERSION = f"areal {__version__}:"


class Server:
    """Answers with ``(tokens, finish reason)`` in turn, as SGLang does: one layer, top 1, the row of position p holds 100 * call + p.

    ``hook(client)`` runs while the answer is on its way.
    """

    def __init__(self, *script: tuple[int, str], hook: Any = None) -> None:
        self.script, self.hook, self.client, self.asked = list(script), hook, None, []

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        count, reason = self.script.pop(0)
        self.asked.append(payload["sampling_params"]["max_new_tokens"])
        sent, call = len(payload["input_ids"]), len(self.asked)
        rows = (100 * call + np.arange(sent + count - 1)).astype(np.int32)
        if self.hook:
            self.hook(self.client)
        meta = {
            "finish_reason": {"type": reason},
            "prompt_tokens": sent,
            "completion_tokens": count,
        }
        meta["output_token_logprobs"] = [[-1.0, 1000 + sent + i, None] for i in range(count)]
        return {"meta_info": {**meta, "routed_experts": base64.b64encode(rows.tobytes()).decode()}}


def request(prompt: int = 3, budget: int = 5) -> ModelRequest:
    settings = GenerationHyperparameters(n_samples=1, max_new_tokens=budget, max_tokens=64)
    return ModelRequest(
        rid="r",
        input_ids=list(range(prompt)),
        gconfig=settings,
        metadata={"return_routed_experts": True},
    )


def engine(server: Server) -> Any:
    """``RemoteInfEngine`` without its health polls, executor and HTTP session."""

    async def send(*, payload: Any, **_: Any) -> Any:
        return server.answer(payload)

    async def no_session() -> None: ...

    remote_inf_engine.arequest_with_retry, workflow_context.get_aiohttp_session = send, no_session
    made = remote_inf_engine.RemoteInfEngine(
        InferenceEngineConfig(backend="sglang:d1", return_routed_experts=True), SGLangBackend()
    )
    made.addresses, made._initialized = ["127.0.0.1:1"], True
    made._workflow_executor = SimpleNamespace(is_paused=lambda: False)
    server.client = made
    return made


def bridge(server: Server) -> Any:
    """``InfBridge`` without HTTP."""

    async def send(http_request: Any, **_: Any) -> Any:
        return server.answer(http_request.payload)

    made = InfBridge(SGLangBridgeBackend(), "http://127.0.0.1:1", PauseState())
    made._send_request = send
    server.client = made
    return made
