"""Each flavour behaves as measured on its engine or as read from its source, as docstrings say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import Model
from rollproof.core.contract import Filler, KvPolicy, LayerAxis, Provenance, Rows, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Abort, Fault
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.errors import UsageError
from rollproof.fakes.engine.exceptions import BadCall, EnginePaused
from rollproof.fakes.engine.flavours import FLAVOURS, VersionTag, engine_contract, flavour_named
from tests.support.engine_driver import PROMPT, EngineDriver, on_clock, spans

NAMES = tuple(FLAVOURS)
SGLANG = ("sglang", "sglang-0.5.17")
VLLM = ("vllm", "vllm-0.26", "vllm-gated")


def _answer(flavour: str, tokens: int = 3, **more: Any) -> EngineOutput:
    async def main() -> EngineOutput:
        return await EngineDriver(flavour, model=more.pop("model", None)).call(tokens, **more)

    return on_clock(main)


async def _aborted(
    bench: EngineDriver, *, queued: bool = False, steps: float = 0.5
) -> EngineOutput:
    """Return the output of one call, aborted after ``steps`` while it runs, or while it waits in
    the queue.
    """
    other = bench.call(9, (1, 1), request_id="other") if queued else None
    call = bench.call(6, request_id="mine")
    await asyncio.sleep(steps)
    await bench.engine.abort("mine")
    if other is not None:
        await other
    return call.result()


@pytest.mark.parametrize("name", NAMES)
def test_rows_layers_and_dtype_are_those_of_the_contract(name: str) -> None:
    """The declared contract describes the returned array: rows, layer axis, dtype."""
    model = Model(num_layers=5, moe_layers=(1, 3, 4), num_experts=300, top_k=3)
    contract = engine_contract(FLAVOURS[name], model, KvPolicy.RECOMPUTE)
    output = _answer(name, model=model)
    assert output.routes is not None
    rows = len(PROMPT) + len(output.token_ids) - (contract.rows is Rows.FORWARDED)
    assert output.routes.shape == (rows, contract.route_layers, 3)
    assert (output.routes.dtype.name, contract.dtypes) == (
        contract.dtype,
        (output.routes.dtype.name,),
    )


def test_vllm_rows() -> None:
    """On vLLM 0.32, run: prompt + response - 1 rows, all hidden layers with zeros on dense ones,
    writable.
    """
    for name in VLLM:
        output = _answer(name, 1, prompt=(1, 2, 3, 4, 5))
        assert output.routes is not None
        assert output.routes.shape == (5, 4, 4)
        assert not output.routes[:, 0].any()
        assert output.routes.flags.writeable


@pytest.mark.parametrize(
    ("experts", "dtype"), [(8, "uint8"), (256, "uint8"), (257, "uint16"), (1024, "uint16")]
)
def test_vllm_dtype_follows_the_number_of_experts(experts: int, dtype: str) -> None:
    """On vLLM 0.32, run: uint8 up to 256 experts, uint16 above; SGLang: int32 always."""
    model = Model(num_experts=experts)
    assert [_answer(name, model=model).routes.dtype.name for name in ("vllm", "sglang")] == [
        dtype,
        "int32",
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_arrays_are_read_only(name: str) -> None:
    """SGLang decodes base64 into a buffer that it does not own: the array cannot be written, nor
    made writable.
    """
    routes = _answer(name).routes
    assert routes is not None
    with pytest.raises(ValueError, match="read-only"):
        routes[:] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        routes.flags.writeable = True


def test_trtllm_has_moe_layers_only() -> None:
    """TensorRT-LLM #18397: (seq_len - 1, num_moe_layers, top_k), pre-EPLB logical ids."""

    async def main() -> None:
        bench = EngineDriver("trtllm")
        output = await bench.call(3)
        ids = [*PROMPT, *output.token_ids]
        np.testing.assert_array_equal(output.routes, bench.policy.routes(0, ids[:-1])[:, [1, 2, 3]])
        assert FLAVOURS["trtllm"].layer_axis is LayerAxis.MOE

    on_clock(main)


def test_rows_t_ends_in_filler() -> None:
    """The CPU fixtures of verl return N rows: the last one is filler for the token that was never
    forwarded, here -1.
    """

    async def main() -> None:
        bench = EngineDriver("rows-T")
        output = await bench.call(3)
        ids = [*PROMPT, *output.token_ids]
        assert output.routes is not None
        np.testing.assert_array_equal(output.routes[:-1], bench.rows(0, ids))
        assert (output.routes[-1] == -1).all()
        assert engine_contract(bench.flavour, Model(), KvPolicy.KEEP).final_row is Filler.MINUS_ONE

    on_clock(main)


@pytest.mark.parametrize(
    ("name", "stop", "length", "abort"),
    [(name, "stop", "length", "cancelled" if name == "trtllm" else "abort") for name in NAMES],
)
def test_finish_reasons_are_spelled_as_the_engine_does(
    name: str, stop: str, length: str, abort: str
) -> None:
    """Both vLLM and SGLang say stop, length, abort. TensorRT-LLM: an aborted request is
    ``cancelled``.
    """

    async def main() -> None:
        bench = EngineDriver(name, model=Model(eos_every=1))
        assert (await bench.call(3)).native == stop
        bench = EngineDriver(name)
        assert (await bench.call(3)).native == length
        output = await _aborted(bench, steps=2.5)
        assert (output.native, output.message) == (abort, "Aborted" if name in SGLANG else "")

    on_clock(main)


@pytest.mark.parametrize("name", NAMES)
def test_empty_abort_of_a_running_call(name: str) -> None:
    """Before the first token no engine returns routes; SGLang returns empty logprobs and a queued
    call's message (vLLM, SGLang run).
    """

    async def main() -> None:
        bench = EngineDriver(name, prefill_chunk=3)
        output = await _aborted(bench, steps=1.5)
        assert (output.token_ids, output.finish_reason, output.routes) == (
            (),
            FinishReason.ABORT,
            None,
        )
        if name not in (*SGLANG, *VLLM):
            assert (output.logprobs, output.message) == (None, "")
            return
        assert output.logprobs is not None
        assert output.logprobs.shape == (0,)
        assert (output.cached_tokens, output.message) == (
            (None, "Abort in waiting queue") if name in SGLANG else (0, "")
        )

    on_clock(main)


@pytest.mark.parametrize("name", NAMES)
def test_abort_in_the_queue(name: str) -> None:
    """SGLang builds this reply in another place: no routed_experts, no cached_tokens, and a message
    (run). vLLM says that 0 were cached (run).
    """

    async def main() -> None:
        output = await _aborted(EngineDriver(name, max_batch=1), queued=True)
        assert (output.token_ids, output.routes, output.cached_tokens) == (
            (),
            None,
            0 if name in VLLM else None,
        )
        assert output.message == ("Abort in waiting queue" if name in SGLANG else "")

    on_clock(main)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_abort_in_the_queue_after_a_retraction(name: str) -> None:
    """A retracted call waits again: aborted there it keeps its tokens, on SGLang without routes
    (run, streamed; SGLang #11673, #39633).
    """

    async def main() -> None:
        bench = EngineDriver(name)
        call = bench.call(6, request_id="mine")
        await bench.steps(2)
        await bench.engine.pause(PauseMode.RETRACT)
        await bench.engine.abort("mine")
        output = call.result()
        assert output.logprobs is not None
        assert (len(output.token_ids), len(output.logprobs)) == (2, 2)
        if name == "sglang":
            assert (output.routes, output.cached_tokens) == (None, None)
        else:
            np.testing.assert_array_equal(
                output.routes, bench.rows(0, [*PROMPT, *output.token_ids])
            )

    on_clock(main)


async def _overtaken(name: str | Any) -> EngineOutput:
    """Return the output of a call during which the weights change, after two tokens."""
    bench = EngineDriver(name)
    call = bench.call(4)
    await bench.steps(1)
    await bench.engine.load(1, "v1")
    return await call


@pytest.mark.parametrize(
    ("name", "version", "shown"),
    [
        ("vllm", None, spans((0, 2, 0), (2, 4, "v1"))),
        ("vllm-0.26", None, ()),
        ("sglang", "v1", spans((0, 2, 0), (2, 4, "v1"))),
        ("sglang-0.5.17", "v1", ()),
        ("trtllm", None, ()),
    ],
)
def test_version_tags_of_a_call_that_an_update_overtakes(
    name: str, version: Any, shown: Any
) -> None:
    """Since vLLM 0.32 and SGLang 0.5.19: spans over tokens. Older SGLang: the label at emission,
    wrong for the first tokens.
    """

    async def main() -> None:
        output = await _overtaken(name)
        assert (output.version, output.spans) == (version, shown)

    on_clock(main)


def test_version_tag_read_at_admission() -> None:
    """A tag read at admission names the older weights although newer ones sampled the rest (vLLM
    #54443).
    """

    async def main() -> None:
        output = await _overtaken(replace(FLAVOURS["vllm"], version_tag=VersionTag.ADMISSION))
        assert (output.version, output.spans) == (0, ())

    on_clock(main)


@pytest.mark.parametrize(
    ("name", "version", "shown"),
    [("vllm", None, ()), ("sglang", 0, spans((0, 0, 0))), ("sglang-0.5.17", 0, ())],
)
def test_version_tags_of_an_empty_abort(name: str, version: Any, shown: Any) -> None:
    """Without tokens vLLM shows no span, SGLang one empty span (run: ``[{v, 0, 0}]``)."""

    async def main() -> None:
        output = await _aborted(EngineDriver(name))
        assert (output.version, output.spans) == (version, shown)

    on_clock(main)


def test_an_update_without_a_label_leaves_the_version_unknown() -> None:
    """Nothing was published for these weights: what is shown is ``None``, which equals no
    version.
    """

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(4)
        await bench.steps(1)
        await bench.engine.load(1, None)
        assert (await call).spans == spans((0, 2, 0), (2, 4, None))

    on_clock(main)


@pytest.mark.parametrize("name", NAMES)
def test_routes_start(name: str) -> None:
    """Both vLLM (0.22 on) and SGLang (0.5.8 on) return rows from a start on; others ignore the
    option and say so.
    """
    output = _answer(name, 3, routes_start=2)
    complete = _answer(name, 3)
    assert output.routes is not None
    assert complete.routes is not None
    knows = name in VLLM + SGLANG
    assert output.routes_start == (2 if knows else 0)
    np.testing.assert_array_equal(output.routes, complete.routes[2:] if knows else complete.routes)


@pytest.mark.parametrize("name", ["vllm", *SGLANG])
def test_routes_start_outside_the_prompt(name: str) -> None:
    """Both refuse such a call: vLLM and SGLang raise a ValueError (run)."""
    with pytest.raises(BadCall, match="routes_start must be 0 to 4"):
        _answer(name, routes_start=5)


@pytest.mark.parametrize("name", NAMES)
def test_calls_while_paused(name: str) -> None:
    """Both vLLM and SGLang let them wait; a gate rejects them with an empty abort; TensorRT-LLM
    raises (#12272).
    """

    async def main() -> None:
        bench = EngineDriver(name)
        await bench.engine.pause()
        call = bench.call(2)
        if name == "trtllm":
            with pytest.raises(EnginePaused, match="Server s0 is paused") as raised:
                await call
            assert isinstance(raised.value, RuntimeError)
        elif name == "vllm-gated":
            assert ((await call).token_ids, (await call).finish_reason) == ((), FinishReason.ABORT)
        else:
            await bench.steps(3)
            assert not call.done()
        await bench.engine.resume()
        assert len((await bench.call(2)).token_ids) == 2
        assert bench.events(Fault) == []

    on_clock(main)


@pytest.mark.parametrize(("name", "hit"), [("sglang", (1, 2)), ("vllm", (1,))])
def test_abort_by_prefix(name: str, hit: tuple[int, ...]) -> None:
    """SGLang matches handles with ``startswith``: aborting "1" also ends "10". An empty handle hits
    none.
    """

    async def main() -> None:
        bench = EngineDriver(name)
        calls = [
            bench.call(4, (9, number), request_id=handle)
            for number, handle in enumerate(("1", "10", "2"))
        ]
        await bench.steps(1)
        assert await bench.engine.abort("") == ()
        assert await bench.engine.abort("1") == hit
        await asyncio.gather(*calls)
        assert [event.call_ids for event in bench.events(Abort)] == [(), hit]

    on_clock(main)


@pytest.mark.parametrize("name", NAMES)
def test_pause_modes_are_those_of_the_engine(name: str) -> None:
    """vLLM: abort, wait, keep. SGLang: abort, retract, in place. TensorRT-LLM: abort. The fake
    accepts all of them.
    """
    modes = {
        "vllm": "abort wait keep",
        "rows": "abort wait keep",
        "sglang": "abort retract in-place",
        "trtllm": "abort",
    }
    assert " ".join(FLAVOURS[name].pause_modes) == modes[name.partition("-")[0]]


@pytest.mark.parametrize(
    ("name", "provenance", "versions"),
    [
        ("vllm", Provenance.AS_SAMPLED, Versions.SPAN),
        ("vllm-0.26", Provenance.AS_SAMPLED, Versions.NONE),
        ("sglang", Provenance.LATEST_PREFILL, Versions.SPAN),
        ("sglang-0.5.17", Provenance.LATEST_PREFILL, Versions.SAMPLE),
        ("trtllm", Provenance.AS_SAMPLED, Versions.NONE),
    ],
)
def test_engine_contract(name: str, provenance: Provenance, versions: Versions) -> None:
    """The contract of a call declares the provenance of recomputed rows, and the tags."""
    contract = engine_contract(FLAVOURS[name], Model(), KvPolicy.KEEP)
    assert (contract.provenance, contract.versions, contract.kv_policy) == (
        provenance,
        versions,
        KvPolicy.KEEP,
    )


def test_an_unknown_flavour_is_refused() -> None:
    """The error lists the flavours."""
    with pytest.raises(
        UsageError, match=r"No engine flavour is named 'vlm'; choose among .*'vllm'"
    ):
        flavour_named("vlm")


def test_every_flavour_says_how_it_is_known() -> None:
    """Its name is its key, and its source is stated."""
    for name, flavour in FLAVOURS.items():
        assert flavour.name == name
        assert flavour.source
