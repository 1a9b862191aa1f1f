"""Faults of AReaL: `python docs/track_record/areal_faults.py [NAME ...]`.

The HTTP requests have scripted replies; what surrounds the two clients is replaced.
"""

from __future__ import annotations

import base64
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import run

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

from areal.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    RejectionSamplingConfig,
)
from areal.api.io_struct import ModelRequest
from areal.engine.sglang_remote import SGLangBackend
from areal.experimental.inference_service.data_proxy.pause import PauseState
from areal.experimental.inference_service.inf_bridge import InfBridge
from areal.experimental.inference_service.sglang.bridge import SGLangBridgeBackend
from areal.infra import remote_inf_engine, workflow_context
from areal.utils.functional import functional
from areal.version import __version__

VERSION = f"areal {__version__}:"


class Server:
    """Replies with ``(tokens, finish reason)`` in turn, as SGLang does: one layer, top 1, the row
    of position p holds 100 * call + p.

    ``meta`` is added to each ``meta_info``; ``hook(client)`` runs while the reply is in transit.
    """

    def __init__(
        self, *script: tuple[int, str], hook: Any = None, meta: dict[str, Any] | None = None
    ) -> None:
        self.script, self.hook, self.meta = list(script), hook, meta or {}
        self.client: Any = None
        self.calls = 0

    def reply(self, payload: dict[str, Any]) -> dict[str, Any]:
        count, reason = self.script.pop(0)
        self.calls += 1
        sent = len(payload["input_ids"])
        rows = (100 * self.calls + np.arange(sent + count - 1)).astype(np.int32)
        if self.hook:
            self.hook(self.client)
        meta = {
            "finish_reason": {"type": reason},
            "prompt_tokens": sent,
            "completion_tokens": count,
            "output_token_logprobs": [[-1.0, 1000 + sent + i, None] for i in range(count)],
            "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        }
        return {"meta_info": {**meta, **self.meta}}


def request(budget: int = 5) -> ModelRequest:
    settings = GenerationHyperparameters(n_samples=1, max_new_tokens=budget, max_tokens=64)
    routes = {"return_routed_experts": True}
    return ModelRequest(rid="r", input_ids=[0, 1, 2], gconfig=settings, metadata=routes)


def engine(server: Server) -> Any:
    """``RemoteInfEngine`` without its health polls, executor and HTTP session."""

    async def send(*, payload: Any, **_: Any) -> Any:
        return server.reply(payload)

    async def no_session() -> None: ...

    remote_inf_engine.arequest_with_retry, workflow_context.get_aiohttp_session = send, no_session
    settings = InferenceEngineConfig(backend="sglang:d1", return_routed_experts=True)
    client = remote_inf_engine.RemoteInfEngine(settings, SGLangBackend())
    client.addresses, client._initialized = ["127.0.0.1:1"], True
    client._workflow_executor = SimpleNamespace(is_paused=lambda: False)
    server.client = client
    return client


def bridge(server: Server) -> Any:
    """``InfBridge`` without HTTP."""

    async def send(http_request: Any, **_: Any) -> Any:
        return server.reply(http_request.payload)

    client = InfBridge(SGLangBridgeBackend(), "http://127.0.0.1:1", PauseState())
    client._send_request = send
    server.client = client
    return client


async def abort_cap() -> None:
    """After 20 aborts the bridge returns a sample as ``length`` though its budget is not used
    up.
    """
    server = Server(*[(1, "abort")] * 20, (12, "stop"))
    out = await bridge(server).agenerate(request(budget=32))
    result = f"{out.output_len} tokens, stop reason {out.stop_reason!r}"
    print(VERSION, f"budget 32, {result}, {len(server.script)} answer not asked for")


def failed_transfer() -> None:
    """A failed weight transfer is logged as completed: generation goes on, and the trainer gives
    the old weights a new number.
    """
    from areal.experimental.training_service.controller.controller import GatewayTrainController
    from areal.experimental.weight_update.controller.controller import WeightUpdateController

    calls = []
    # what the gateway answers, with status 200
    body = {"status": "error", "version": 8, "duration_ms": 1.0, "error": "connection reset"}
    response = SimpleNamespace(raise_for_status=lambda: None, json=lambda: body)
    http = SimpleNamespace(post=lambda *_, **__: response)
    updates = WeightUpdateController()
    updates._http_client, updates._pair_name = http, "actor-rollout"
    type(updates)._http = property(lambda self: http)
    rollout = SimpleNamespace(
        pause_generation=lambda: calls.append("paused"),
        continue_generation=lambda: calls.append("continued"),
    )
    trainer = SimpleNamespace(_weight_update_ctrl=updates, rollout=rollout)
    result = GatewayTrainController.update_weights(trainer, SimpleNamespace(version=8))
    outcome = f"update_weights did {calls} and returned {result}"
    print(VERSION, f"the gateway says {body['status']} - {outcome}")


async def late_tag() -> None:
    """Tokens are tagged with the version that is set when their reply is read, not when they were
    sampled.
    """
    for make in (engine, bridge):
        # the update ends while the reply is in transit
        client = make(Server((2, "stop"), hook=lambda client: client.set_version(8)))
        client.set_version(7)
        tags = (await client.agenerate(request())).output_versions
        print(VERSION, f"{make.__name__} - asked and sampled under version 7, tagged {tags}")


async def own_counter() -> None:
    """A tag is the client's own counter: the version in a server's reply is not read."""
    for make in (engine, bridge):
        client = make(Server((2, "stop"), meta={"weight_version": "9"}))
        client.set_version(7)
        tags = (await client.agenerate(request())).output_versions
        print(
            VERSION,
            f'{make.__name__} - the reply says weight_version "9", the tokens are tagged {tags}',
        )


async def routes_appended() -> None:
    """On resume the routes of the whole sequence are appended to those of the first call: 11 rows
    for 8 tokens.
    """
    for make in (engine, bridge):
        out = await make(Server((2, "abort"), (3, "stop"))).agenerate(request())
        rows = out.routed_experts[:, 0].tolist()
        tokens = out.input_len + out.output_len
        print(VERSION, f"{make.__name__} - tokens {tokens} rows {len(rows)} {rows}")


def update_failure() -> None:
    """A load from disk that fails leaves every server paused until the trainer ends."""
    from areal.engine import fsdp_engine

    calls = []

    def fail() -> None:
        raise RuntimeError("no space left on device")

    fsdp_engine.dist.get_rank = lambda: 0
    fsdp_engine.name_resolve.add = lambda *_, **__: None
    servers = SimpleNamespace(
        pause_generation=lambda: calls.append("paused"),
        continue_generation=lambda: calls.append("continued"),
        update_weights_from_disk=lambda meta: SimpleNamespace(result=fail),
    )
    trainer = SimpleNamespace(
        rollout_engine=servers,
        tokenizer=None,
        processor=None,
        config=SimpleNamespace(experiment_name="e", trial_name="t"),
        get_version=lambda: 7,
        _save_model_to_hf=lambda *_: None,
    )
    try:
        fsdp_engine.FSDPEngine._update_weights_from_disk(trainer, SimpleNamespace(path="/p"))
    except RuntimeError as error:
        print(VERSION, f"update_weights raised {error!r} - the servers were {calls}")


def k3_direction() -> None:
    """k3 of rejection sampling is that of the inverse ratio, not the documented r - log(r) - 1."""
    config = RejectionSamplingConfig(level="token", action="mask", metric="kl_k3", upper=0.5)
    behaviour = torch.tensor([[-2.0, -2.0]])
    proximal = behaviour + torch.tensor([[1.0, -1.0]])
    kept = functional.apply_rejection_sampling(
        proximal, behaviour, torch.ones(1, 2), None, config
    ).loss_mask.tolist()[0]
    ratios = (proximal - behaviour).exp()
    documented = (ratios - ratios.log() - 1).tolist()[0]
    for ratio, k3, mask in zip(ratios.tolist()[0], documented, kept, strict=True):
        print(VERSION, f"r {ratio:.3f}: r - log(r) - 1 = {k3:.3f}, upper 0.5, mask {mask:.0f}")


if __name__ == "__main__":
    run(
        abort_cap,
        failed_transfer,
        k3_direction,
        late_tag,
        own_counter,
        routes_appended,
        update_failure,
    )
