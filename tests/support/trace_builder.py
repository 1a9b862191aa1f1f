"""Hand-written traces for tests of checks: says what happened, one line an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Call, Pause, Reply, Result, Resume, Submit, Weights
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout, Span
from rollproof.core.trace import Header, Recorder, Trace

MODEL: dict[str, Any] = {
    "layer_axis": "all",
    "num_layers": 3,
    "moe_layers": (0, 1, 2),
    "num_experts": 8,
    "top_k": 2,
    "filler": "none",
    "dtype": "uint8",
    "provenance": "as-sampled",
}


def contract(**changes: Any) -> Contract:
    """A client-resumed contract with T-1 rows and min/max tags; ``changes`` override fields,
    ``rows="none"`` drops the model.
    """
    base: dict[str, Any] = {
        "rows": "T-1",
        "resume": "client",
        "versions": "min-max",
        "logprobs": "raw",
        "abort_surfaces": False,
        "kv_policy": "recompute",
        "multimodal": True,
    }
    model = {} if changes.get("rows") == "none" else MODEL
    return Contract(**{**base, **model, **changes})


def coded_rows(
    start: int, stop: int, version: int, layers: int = 3, top_k: int = 2, experts: int = 8
) -> np.ndarray:
    """Rows whose cells differ by version, position, layer and slot, distinct within a row; a
    stand-in for the coded policy.
    """
    position = np.arange(start, stop)[:, None, None]
    layer = np.arange(layers)[None, :, None]
    slot = np.arange(top_k)[None, None, :]
    return ((position * 3 + layer * 5 + version * 2 + slot) % experts).astype(np.uint8)


class TraceBuilder:
    """Records events in order; ``trace()`` gives what was recorded. One step of virtual time an
    event.
    """

    def __init__(self, contract: Contract, **header: Any) -> None:
        self._recorder = Recorder(self._tick)
        self._time = 0.0
        self._header = Header(subject="by hand", contract=contract, **header)
        self._calls = 0

    def _tick(self) -> float:
        self._time += 1.0
        return self._time

    def add(self, *events: Event) -> TraceBuilder:
        """Record any events as they are."""
        for event in events:
            self._recorder.record(event)
        return self

    def weights(self, version: int, server: str = "s0", **fields: Any) -> TraceBuilder:
        """A weight update, labelled with its version unless ``label`` says otherwise."""
        return self.add(Weights(server_id=server, version=version, **{"label": version, **fields}))

    def pause(
        self, mode: PauseMode = PauseMode.ABORT, server: str = "s0", **fields: Any
    ) -> TraceBuilder:
        """A pause acknowledged by a server."""
        return self.add(Pause(server_id=server, mode=mode, **fields))

    def resume(self, server: str = "s0", **fields: Any) -> TraceBuilder:
        """A resume of a server."""
        return self.add(Resume(server_id=server, **fields))

    def submit(
        self,
        request_id: str = "r0",
        prompt: Sequence[int] = (1, 2),
        max_tokens: int | None = 4,
        **fields: Any,
    ) -> TraceBuilder:
        """A request handed to the stack."""
        return self.add(
            Submit(
                request=Request(
                    request_id=request_id, prompt_ids=tuple(prompt), max_tokens=max_tokens, **fields
                )
            )
        )

    def call(
        self,
        prompt: Sequence[int],
        request_id: str = "r0",
        max_tokens: int | None = 4,
        server: str = "s0",
        **fields: Any,
    ) -> int:
        """A call and its admission; returns the call id."""
        self._calls += 1
        self.add(
            Call(
                call_id=self._calls,
                request_id=request_id,
                server_id=server,
                prompt_ids=tuple(prompt),
                max_tokens=max_tokens,
                **fields,
            ),
            Admit(call_id=self._calls, server_id=server),
        )
        return self._calls

    def reply(
        self,
        call_id: int,
        tokens: Sequence[int],
        reason: str = "length",
        version: int = 0,
        prompt_len: int = 0,
        output: dict[str, Any] | None = None,
        **fields: Any,
    ) -> TraceBuilder:
        """A reply with logprobs -(version + 0.01 i) and coded T-1 rows; ``output`` overrides
        ``EngineOutput`` fields.
        """
        count = len(tokens)
        rows = coded_rows(0, prompt_len + count - 1, version) if prompt_len and count else None
        values: dict[str, Any] = {
            "token_ids": tuple(tokens),
            "logprobs": (
                np.array([-(version + 0.5 + 0.01 * i) for i in range(count)]) if count else None
            ),
            "routes": rows,
            "finish_reason": FinishReason(reason),
            "version": version,
        }
        spans = (Span(start=0, end=count, version=version),) if count else ()
        return self.add(
            Reply(
                call_id=call_id,
                output=EngineOutput(**{**values, **(output or {})}),
                **{"true_tokens": spans, **fields},
            )
        )

    def result(
        self,
        response: Sequence[int] | None = None,
        request_id: str = "r0",
        prompt: Sequence[int] = (1, 2),
        **fields: Any,
    ) -> TraceBuilder:
        """The end of a request: with a rollout where ``response`` is given. ``event`` fields go in
        ``fields["event"]``.
        """
        event: dict[str, Any] = fields.pop("event", {})
        rollout = None
        if response is not None:
            values: dict[str, Any] = {"finish_reason": FinishReason.LENGTH, **fields}
            rollout = Rollout(
                request_id=request_id,
                prompt_ids=tuple(prompt),
                response_ids=tuple(response),
                **values,
            )
        return self.add(Result(request_id=request_id, rollout=rollout, **event))

    @property
    def header(self) -> Header:
        """What the trace will say about itself."""
        return self._header

    def trace(self) -> Trace:
        """What was recorded."""
        return self._recorder.trace(self._header)
