"""What a served engine keeps of the requests that it has answered: nothing."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from rollproof.core.case import EngineOptions
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.core.trace import Recorder
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.call_samples import Samples
from rollproof.fakes.http.connections import Delivery
from rollproof.fakes.http.serve_options import ServeOptions
from tests.fakes.http.served import Served, served

SLOW = EngineOptions(max_batch=8, step=0.02)
CALL = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
    "return_logprob": True,
}


@pytest.fixture
def server() -> Iterator[Served]:
    with served("sglang", ServeOptions(flavour="sglang", engine=SLOW)) as server:
        yield server


KINDS = (Request, Delivery, InflightCall)


@pytest.mark.parametrize(
    "more",
    [{}, {"stream": True}, {"return_routed_experts": True}],
    ids=["complete", "stream", "routes"],
)
def test_a_request_leaves_no_circle_behind(server: Served, more: dict[str, Any]) -> None:
    """What answering needed is gone with the answer, without a garbage collection: also where the
    client was watched meanwhile.
    """
    gc.collect()
    # what other tests of this process still refer to
    before = {id(item): item for item in gc.get_objects() if type(item) in KINDS}
    gc.disable()
    try:
        for _ in range(4):
            server.client.post("/generate", json=CALL | more).raise_for_status()
        server.client.get("/health")
        # the server's thread may still be at the end of an answer that has arrived here
        for _ in range(100):
            left = Counter(
                type(item)
                for item in gc.get_objects()
                if type(item) in KINDS and id(item) not in before
            )
            if not left[InflightCall] and not left[Request]:
                break
            time.sleep(0.05)
        # the last delivery of a connection is looked at when that is lost
        assert left[Delivery] <= 1
        assert (left[InflightCall], left[Request]) == (0, 0)
    finally:
        gc.enable()


def test_aborted_sequences_are_recognised_and_take_little_memory() -> None:
    """Whoever resumes is known by the tokens, of which there may be thousands in each of thousands
    of sequences: none is retained.
    """
    samples = Samples(Recorder(lambda: 0.0))
    cut = EngineOutput(
        token_ids=(7,) * 2000, logprobs=None, routes=None, finish_reason=FinishReason.ABORT
    )
    samples.answered("first", (0,), cut)
    tracemalloc.start()
    try:
        for number in range(1, 300):
            samples.answered(f"r{number}", (number,), cut)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert used < 200_000
    assert ["r200", "other", "other"] == [
        samples.owner((token, *cut.token_ids), "other").request_id for token in (200, 200, 300)
    ]
