"""hf_replay and hf_record on tiny models of every family: what is executed, what the gradients are, what is refused, what is left."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward"
)

from rollproof.errors import ReplayError, RouterError, RoutesError  # noqa: E402
from rollproof.replay.hf import find_routers, hf_record, hf_replay  # noqa: E402
from rollproof.replay.hf.families import FAMILIES, tiny_model  # noqa: E402
from rollproof.replay.hf.formulas import fixed_selection  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

COMMON = [name for name in FAMILIES if not name.startswith(("qwen3_next", "qwen3_5"))]
IDS = torch.arange(3, 25).reshape(2, 11)
ROWS = IDS.numel()


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    gc.collect()


@pytest.fixture
def model() -> Any:
    return tiny_model("qwen3_moe").train()


def loss(model: Any, ids: Any = IDS) -> Any:
    return model(ids, labels=ids, use_cache=False).loss


def drift(model: Any, seed: int = 9) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape, generator=noise))


def recorded(model: Any, ids: Any = IDS) -> Any:
    with hf_record(model) as taken, torch.no_grad():
        model(ids, use_cache=False)
    return taken.routes


def gradients(model: Any) -> dict[str, Any]:
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


def trained(model: Any, routes: Any, ids: Any = IDS, mask: Any = None) -> tuple[float, dict[str, Any]]:
    with hf_replay(model, routes, mask):
        value = loss(model, ids)
        value.backward()
    return float(value.detach()), gradients(model)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def spied(model: Any) -> Iterator[list[tuple[int, Any]]]:
    """Layer and executed ids of every call of a router, from its output."""
    calls: list[tuple[int, Any]] = []
    hooks = [
        router.module.register_forward_hook(lambda _m, _i, out, layer=router.layer: calls.append((layer, out[2].clone())))
        for router in find_routers(model).all
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def assert_untouched(model: Any) -> None:
    assert [] == [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert 0 == len(find_routers(model).owner._forward_hooks)
    assert [] == torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("family", COMMON)
def test_replay_of_the_models_own_choice_changes_no_bit(family: str) -> None:
    """Loss and every gradient equal those of the run that was recorded; the recording run itself equals a native one."""
    model = tiny_model(family).train()
    native = loss(model)
    native.backward()
    expected = gradients(model)
    with hf_record(model) as taken:
        assert float(native.detach()) == float(loss(model).detach())

    value, found = trained(model, taken.routes)

    assert FAMILIES[family].moe_layers == taken.layers
    assert (ROWS, len(taken.layers), 2) == tuple(taken.routes.shape)
    assert float(native.detach()) == value
    assert same(expected, found)
    assert_untouched(model)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(COMMON)))
def test_families_with_linear_attention_replay(family: str) -> None:
    """Forward only, for they are slow on a CPU: every router executes routes that it did not choose."""
    model = tiny_model(family).eval()
    routes = recorded(model).flip(0)

    with spied(model) as calls, hf_replay(model, routes), torch.no_grad():
        model(IDS, use_cache=False)

    assert [(n, routes[:, n].tolist()) for n in range(3)] == [(layer, ids.tolist()) for layer, ids in calls]


@pytest.mark.parametrize("family", COMMON)
def test_under_other_weights_the_recorded_experts_run(family: str) -> None:
    """Every router executes its target where it would have chosen otherwise; results change, and every gate has a gradient."""
    model = tiny_model(family).train()
    routes = recorded(model)
    drift(model)
    native = float(loss(model).detach())
    rerouted = (recorded(model).sort(-1).values != routes.sort(-1).values).any(-1).float().mean()

    with spied(model) as calls:
        value, found = trained(model, routes)

    assert rerouted > 0.3
    assert [(layer, routes[:, n].tolist()) for n, layer in enumerate(find_routers(model).layers)] == [(n, i.tolist()) for n, i in calls]
    assert native != value
    gates = [found[f"{router.path}.weight"] for router in find_routers(model).all]
    assert all(float(gate.norm()) > 0 for gate in gates)


@pytest.mark.parametrize("family", COMMON)
def test_gradients_are_those_of_the_formula_with_the_selection_fixed(family: str) -> None:
    """Under drifted weights, all gradients equal those of the family's formula written out without a top-k, bit for bit."""
    model = tiny_model(family).train()
    routes = recorded(model)
    drift(model)
    with fixed_selection(find_routers(model), family, routes):
        expected_loss = loss(model)
        expected_loss.backward()
    expected = gradients(model)

    value, found = trained(model, routes)

    assert float(expected_loss.detach()) == value
    assert same(expected, found)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_gate_gradients_are_the_slope_of_the_loss(family: str) -> None:
    """Central differences along a random direction of each gate agree with its gradient, to a hundredth."""
    model = tiny_model(family, dtype=torch.float64).train()
    routes = recorded(model)
    drift(model)

    def exact() -> Any:  # a model's own loss is computed in float32
        with hf_replay(model, routes):
            logits = model(IDS, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    exact().backward()
    found, step = gradients(model), 3e-3  # norms and routers round to float32
    for router in find_routers(model).all:
        direction = torch.randn(router.module.weight.shape, generator=torch.Generator().manual_seed(3)).double()
        values = []
        for sign in (1, -1):
            router.module.weight.data += sign * step * direction
            values.append(float(exact().detach()))
            router.module.weight.data -= sign * step * direction
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float((found[f"{router.path}.weight"] * direction).sum()), rel=1e-2)


def test_bfloat16_replays_as_exactly() -> None:
    """A bfloat16 model repeats its own recording bit for bit, although float32 of the same weights would choose otherwise."""
    half = tiny_model("qwen3_moe").bfloat16().train()
    native = loss(half)
    native.backward()
    expected = gradients(half)

    value, found = trained(half, recorded(half))

    assert float(native.detach()) == value
    assert same(expected, found)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_every_integer_type_and_both_layer_axes_are_taken(dtype: Any) -> None:
    """Arrays or tensors, all layers or those with a router, flat or batched: one result."""
    model = tiny_model("deepseek_v3").train()
    routes = recorded(model)
    drift(model)
    expected = trained(model, routes)
    whole = np.zeros((ROWS, 3, 2), dtype=dtype)
    whole[:, 1:] = routes.numpy()

    assert expected[0] == trained(model, whole)[0]
    assert expected[0] == trained(model, whole.reshape(2, 11, 3, 2))[0]
    assert expected[0] == trained(model, torch.from_numpy(whole[:, 1:].copy()))[0]


def test_rows_without_a_target_route_natively(model: Any) -> None:
    """Rows masked out, and rows of -1, execute the live choice; all others their target."""
    routes = recorded(model)
    drift(model)
    mask = torch.zeros(2, 11, dtype=torch.long)
    mask[0, :4] = mask[1, 6:] = 1
    sentinel = torch.where(mask.reshape(-1, 1, 1) == 1, routes, -1)
    with spied(model) as native:
        loss(model)

    with spied(model) as masked:
        first = trained(model, routes, mask=mask)
    with spied(model) as sentinels:
        second = trained(model, sentinel)

    assert first[0] == second[0]
    replayed = mask.flatten() == 1
    layer, ids = masked[0]
    assert ids.tolist() == sentinels[0][1].tolist()
    assert routes[replayed, layer].tolist() == ids[replayed].tolist()
    assert native[0][1][~replayed].tolist() == ids[~replayed].tolist()


def checkpointing(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("when", ["within", "later", "after another microbatch", "together with another microbatch"])
def test_recompute_repeats_its_own_forward(model: Any, reentrant: bool, when: str) -> None:
    """Wherever the backward pass runs, recomputed routers execute the routes of the forward that they belong to."""
    routes, others = recorded(model), recorded(model, IDS.flip(1))
    drift(model)
    expected = trained(model, routes)[1]
    checkpointing(model, reentrant)

    with spied(model) as calls:
        with hf_replay(model, routes):
            value = loss(model)
            if when == "within":
                value.backward()
        if when.endswith("another microbatch"):
            with hf_replay(model, others):
                other = loss(model)
            if when.startswith("together"):
                (value + 0 * other).backward()
        if value.grad_fn is not None and when in ("later", "after another microbatch"):
            value.backward()

    assert same(expected, gradients(model))
    last = [ids.tolist() for _, ids in calls[-3:]]
    assert [routes[:, layer].tolist() for layer in (2, 1, 0)] == last
    assert_untouched(model)


def test_a_recording_is_repeated_in_recompute(model: Any) -> None:
    """A recompute under hf_record executes what the forward chose, although the weights changed in between (NeMo Automodel#3156)."""
    checkpointing(model, reentrant=True)
    with spied(model) as calls, hf_record(model) as taken:
        value = loss(model)
        find_routers(model).all[0].module.weight.data.neg_()
        value.backward()

    assert [(n, taken.routes[:, n].tolist()) for n in (0, 1, 2, 2, 1, 0)] == [(layer, ids.tolist()) for layer, ids in calls]


def test_free_rows_repeat_their_forward_in_recompute(model: Any) -> None:
    """A row without a target executes in recompute what it chose in the forward, although the weights changed in between."""
    routes = recorded(model)
    routes[4:9] = -1
    checkpointing(model, reentrant=True)
    with spied(model) as calls, hf_replay(model, routes):
        value = loss(model)
        find_routers(model).all[0].module.weight.data.neg_()
        value.backward()

    forward = {layer: ids.tolist() for layer, ids in calls[:3]}
    assert forward == {layer: ids.tolist() for layer, ids in calls[3:]}


def test_packed_samples_replay_as_each_alone(model: Any) -> None:
    """A packed row, told apart by position ids, replays what its samples replay one by one."""
    samples = [torch.arange(3, 10), torch.arange(20, 31), torch.arange(50, 55)]
    alone = [recorded(model, sample[None]) for sample in samples]
    drift(model)
    expected = []
    for sample, routes in zip(samples, alone, strict=True):
        with hf_replay(model, routes), torch.no_grad():
            expected.append(model(sample[None], use_cache=False).logits[0])
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])[None]

    with spied(model) as calls, hf_replay(model, torch.cat(alone)), torch.no_grad():
        logits = model(torch.cat(samples)[None], position_ids=positions, use_cache=False).logits[0]

    assert torch.cat(alone)[:, 0].tolist() == calls[0][1].tolist()
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-5)


def test_router_logits_stay_raw_and_other_hooks_work(model: Any) -> None:
    """`output_router_logits` under replay gives the live logits, and the auxiliary loss has a gradient in recompute, too."""
    routes = recorded(model)
    drift(model)
    checkpointing(model, reentrant=False)
    with hf_replay(model, routes):
        output = model(IDS, labels=IDS, use_cache=False, output_router_logits=True)
    hidden = model.model.layers[0].mlp.gate.weight

    assert (ROWS, 8) == tuple(output.router_logits[0].shape)
    assert not torch.allclose(output.router_logits[0].sum(-1), torch.ones(ROWS))
    (output.loss + output.aux_loss).backward()
    assert float(hidden.grad.norm()) > 0
    assert_untouched(model)


GOOD = np.tile(np.array([[0, 1]]), (ROWS, 3, 1))


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (GOOD[:, :, :1], "Routes have 1 columns, and the model runs top_k=2"),
        (GOOD.repeat(2, axis=2), "Routes have 4 columns"),
        (GOOD[:, :2], r"Routes hold 2 layers; the model has 3, 3 of them with a router, \[0, 1, 2\]"),
        (GOOD.astype(float), "Routes are of torch.float64, and expert ids are integers"),
        (GOOD > 0, "Routes are of torch.bool"),
        (GOOD - 1, r"66 of 66 rows name experts outside of 0 to 7 \(row 0 of layer 0: \[-1, 0\]"),
        (GOOD + 7, "66 of 66 rows name experts outside of 0 to 7"),
        (GOOD * 0, r"66 of 66 rows are all zero \(expert 0, top_k times\).*They are padding"),
        (GOOD * 0 + 3, "66 of 66 rows name one expert twice"),
        (GOOD[:0], "Routes have no rows"),
        (GOOD * 0 - 1, "Every row is free"),
        (np.where(np.arange(3)[:, None] == 1, -1, GOOD), r"All rows of layers \[1\] are -1"),
        (GOOD[0], r"Routes are \(rows, layers, top_k\) or \(batch, width, layers, top_k\), not \(3, 2\)"),
        (None, "Routes must be an array or a tensor of integers, not NoneType"),
        ([[["a"]]], "Routes must be an array or a tensor of integers, not list"),
    ],
)
def test_bad_routes_are_refused_before_anything_runs(model: Any, routes: Any, message: str) -> None:
    """Each defect is told with the place and the likely cause; the model is not touched."""
    with pytest.raises(RoutesError, match=message):
        hf_replay(model, routes)
    assert_untouched(model)


def test_a_bad_row_that_is_masked_out_is_nobodys_business(model: Any) -> None:
    """Zeros in padding are fine where the mask leaves them out, and told where it does not."""
    routes = GOOD.copy()
    routes[5:] = 0

    assert trained(model, routes, mask=np.arange(ROWS) < 5)[0] > 0
    with pytest.raises(RoutesError, match=r"3 of 66 rows are all zero .*row 5 of layer 0: \[0, 0\]"):
        hf_replay(model, routes, np.arange(ROWS) < 6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [(np.ones(3, dtype=bool), r"The mask is \(3,\), the routes have the places \(22,\)"), (np.ones(ROWS), "The mask is of torch.float64")],
)
def test_a_mask_that_does_not_fit_is_refused(model: Any, mask: Any, message: str) -> None:
    """A mask of other places, or one that is additive, is not taken for a mask of rows."""
    with pytest.raises(RoutesError, match=message):
        hf_replay(model, GOOD, mask)


def test_a_mask_of_another_batch_is_refused(model: Any) -> None:
    """As many places in another shape, such as sequence-major ones, are other rows; a flat mask is one of the flattened batch."""
    batch = GOOD.reshape(*IDS.shape, *GOOD.shape[1:])

    hf_replay(model, batch, torch.ones(IDS.numel(), dtype=torch.bool))
    with pytest.raises(RoutesError, match=r"The mask is \(11, 2\), the routes have the places \(2, 11\)"):
        hf_replay(model, batch, torch.ones(IDS.T.shape, dtype=torch.bool))


@pytest.mark.parametrize("array", [False, True], ids=["tensor", "array"])
def test_a_buffer_that_is_filled_anew_changes_no_pass(model: Any, array: bool) -> None:
    """A loop may keep one buffer for the routes of all microbatches: a recompute that comes later executes what its forward did."""
    routes, others = recorded(model), recorded(model, IDS.flip(1))
    drift(model)
    expected = trained(model, routes)[1]
    checkpointing(model, False)
    buffer = routes.clone()

    with hf_replay(model, buffer.numpy() if array else buffer):
        value = loss(model)
    buffer.copy_(others)
    value.backward()

    assert same(expected, gradients(model))


@pytest.mark.parametrize("rows", [5, ROWS + 1])
def test_rows_that_are_not_the_models_are_told(model: Any, rows: int) -> None:
    """Too few and too many rows stop in the first router, with both numbers; nothing is left."""
    with pytest.raises(ReplayError, match=rf"is given 22 rows, and the routes have {rows}"), hf_replay(model, GOOD[np.arange(rows) % ROWS]):
        loss(model)
    assert_untouched(model)


def test_routes_that_no_router_used_are_told(model: Any) -> None:
    """A context without a forward, and one in which a layer did not run, end with an error: nothing falls back in silence."""
    with pytest.raises(ReplayError, match="no router was called"), hf_replay(model, GOOD):
        pass

    def skipped() -> None:
        with hf_replay(model, GOOD):
            model.model.layers[1].forward = lambda hidden_states, **_: hidden_states
            loss(model)

    with pytest.raises(ReplayError, match=r"not called equally often \(layer: calls \{0: 1, 1: 0, 2: 1\}\)"):
        skipped()
    del model.model.layers[1].forward
    assert_untouched(model)


@pytest.mark.parametrize("place", ["forward", "recompute within", "recompute later"])
def test_an_exception_leaves_nothing(model: Any, place: str) -> None:
    """Whatever raises in the middle, in the context or in a later backward pass: the model is as before, and the next run is right."""
    routes = recorded(model)
    expected = trained(model, routes)
    if place != "forward":
        checkpointing(model, reentrant=True)
    calls = []

    def failing(*_: Any) -> None:
        calls.append(1)
        if len(calls) == (2 if place == "forward" else 5):
            raise KeyError("in the middle")

    hooks = [router.module.register_forward_hook(failing) for router in find_routers(model).all]

    def run() -> None:
        with hf_replay(model, routes):
            value = loss(model)
            if place == "recompute within":
                value.backward()
        value.backward()

    with pytest.raises(KeyError, match="in the middle"):
        run()
    for hook in hooks:
        hook.remove()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    assert_untouched(model)
    assert expected[0] == trained(model, routes)[0]


def test_an_evaluation_in_between_is_native(model: Any) -> None:
    """Without the context a model in eval mode routes by itself, and a context in eval mode replays."""
    routes = recorded(model).flip(0)
    before = recorded(model.eval())
    with spied(model) as calls, hf_replay(model, routes), torch.no_grad():
        model(IDS, use_cache=False)

    assert routes[:, 0].tolist() == calls[0][1].tolist()
    assert before.tolist() == recorded(model).tolist()


def test_contexts_nest(model: Any) -> None:
    """The inner one counts while it is open, then the outer one again."""
    outer, inner = recorded(model), recorded(model).flip(0)
    with spied(model) as calls, torch.no_grad(), hf_replay(model, outer):
        with hf_replay(model, inner):
            model(IDS, use_cache=False)
        model(IDS, use_cache=False)

    assert [inner[:, 0].tolist(), outer[:, 0].tolist()] == [ids.tolist() for layer, ids in calls if layer == 0]
    assert_untouched(model)


def test_other_models_are_untouched(model: Any) -> None:
    """A critic or a reference of the same class, in the same process, routes by itself while the policy replays."""
    other = tiny_model("qwen3_moe", seed=7)
    expected = recorded(other)
    routes = recorded(model).flip(0)

    with hf_replay(model, routes), torch.no_grad(), spied(other) as calls:
        model(IDS, use_cache=False)
        other(IDS, use_cache=False)

    assert [expected[:, n].tolist() for n in range(3)] == [ids.tolist() for _, ids in calls]


def test_two_threads_replay_two_models_and_not_one(model: Any) -> None:
    """Models are independent of each other; a second thread on the same model is refused."""
    other = tiny_model("qwen3_moe", seed=7).train()
    pairs = [(one, recorded(one).flip(0)) for one in (model, other)]
    expected = [trained(*pair)[0] for pair in pairs]
    found: dict[int, float] = {}
    errors: list[Exception] = []

    def work(number: int) -> None:
        for _ in range(3):
            found[number] = trained(*pairs[number])[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected == [found[0], found[1]]

    def intrude() -> None:
        try:
            trained(*pairs[0])
        except ReplayError as error:
            errors.append(error)

    with hf_replay(*pairs[0]):
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        loss(model)
    assert "replays in another thread" in str(errors[0])


def test_a_model_is_not_copied_while_it_replays(model: Any) -> None:
    """A copy (a new reference model) would replay, too: it is refused, and afterwards goes through."""
    with hf_replay(model, GOOD):
        with pytest.raises(ReplayError, match="copied while it replays"):
            copy.deepcopy(model)
        loss(model)
    assert_untouched(copy.deepcopy(model))


def test_a_pass_is_entered_once(model: Any) -> None:
    """A second microbatch needs routes of its own."""
    once = hf_replay(model, GOOD)
    with once:
        loss(model)
    with pytest.raises(ReplayError, match="entered once"), once:
        pass
    with pytest.raises(ReplayError, match="left that was not entered"):
        hf_replay(model, GOOD).__exit__(None, None, None)


def test_routes_live_as_long_as_the_graph(model: Any) -> None:
    """What a later backward pass needs is held by the graph, and let go with it."""
    one = hf_replay(model, GOOD)
    with one:
        value = loss(model)
    alive = weakref.ref(one)
    del one
    gc.collect()
    assert alive() is not None
    del value
    gc.collect()
    assert alive() is None


def test_a_recording_wants_one_forward(model: Any) -> None:
    """Before a forward there are no routes, and a second forward in one recording is refused."""
    with hf_record(model) as taken:
        with pytest.raises(ReplayError, match=r"Nothing was recorded in layers \[0, 1, 2\]"):
            _ = taken.routes
        loss(model)
        with pytest.raises(ReplayError, match="called a second time while it records"):
            loss(model)


def test_backward_passes_that_interleave_are_refused(model: Any) -> None:
    """Where one backward pass enters two microbatches by turns, nobody can tell whose routes a recompute needs."""
    checkpointing(model, reentrant=False)
    outputs = []
    for routes in (recorded(model), recorded(model).flip(0)):
        with hf_replay(model, routes):
            outputs.append(model(IDS, use_cache=False, output_router_logits=True).router_logits)

    # Autograd runs what was created last first, and counts by thread: this head comes after all of the first microbatch.
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(outputs[1][0].sum()))
    thread.start()
    thread.join()
    with pytest.raises(ReplayError, match="interleave"):
        torch.autograd.backward([outputs[0][2].sum(), outputs[1][2].sum(), late[0]])
    model.zero_grad()
    assert_untouched(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_model("qwen3"), "has no MoE layers"),
        (lambda: tiny_model("qwen3_moe", mlp_only_layers=[0, 1, 2]), "looks like an MoE block with 8 experts"),
        (lambda: torch.nn.Linear(2, 2), "Linear has no configuration of HF transformers"),
        (lambda: None, "and this is a NoneType"),
        (lambda: torch.nn.ModuleList([tiny_model("qwen3_moe"), tiny_model("qwen3_moe")]), "several stacks of layers with routers"),
        (lambda: torch.compile(tiny_model("qwen3_moe"), backend="eager"), "is compiled"),
    ],
    ids=["dense", "all layers dense", "no model", "nothing", "two decoders", "compiled"],
)
def test_models_without_routers_to_replay_are_refused(make: Any, message: str) -> None:
    """A model in which nothing could be replayed, or more than one thing, is told as what it is."""
    with pytest.raises(RouterError, match=message):
        find_routers(make())


def test_parts_without_routers_may_be_compiled(model: Any) -> None:
    """Compiled attention is none of replay's business; a compiled MoE block is refused."""
    model.model.layers[0].self_attn.compile(backend="eager")
    assert 3 == len(find_routers(model).all)
    model.model.layers[0].mlp.compile(backend="eager")
    with pytest.raises(RouterError, match=r"model.layers.0.mlp is compiled \(torch.compile\) with the routers in it"):
        find_routers(model)


def test_a_wrapped_router_is_refused(model: Any) -> None:
    """A gate whose weight is hidden in a wrapper (LoRA) is not found beyond doubt, and said to be."""
    model.model.layers[1].mlp.gate = torch.nn.Sequential(model.model.layers[1].mlp.gate)
    with pytest.raises(RouterError, match=r"The MoE block model.layers.1.mlp .* has 0 children with a weight \(8, hidden\)"):
        find_routers(model)


def test_a_block_that_does_not_call_its_router_is_told(model: Any) -> None:
    """A fused block that never asks its router ends in an error, not in native routing."""
    block = model.model.layers[2].mlp
    block.forward = lambda hidden: hidden
    with pytest.raises(ReplayError, match=r"layer: calls \{0: 1, 1: 1, 2: 0\}"), hf_replay(model, GOOD):
        loss(model)
    del block.forward
