"""Faults of routing replay on Megatron: `python docs/track_record/megatron_faults.py [NAME ...]`.

Of megatron-core, verl and SkyRL. Replaced are Megatron's process groups: functions that ask for
their rank run on the first one of small groups.
"""

import importlib.util
import sys
from importlib.metadata import version
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from common import run
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

MEGATRON = f"megatron-core {version('megatron-core')}:"


def sizes(**ranks: int) -> None:
    """Set the sizes of groups, ``sizes(tensor=1, context=1, pipeline=2, virtual_pipeline=2)``; the
    rank in each is 0.
    """
    for name in ("tensor", "context", "pipeline", "virtual_pipeline"):
        group = name if name == "context" else f"{name}_model"
        values = {"world_size": ranks.get(name, 1), "rank": 0, "group": None}
        for kind, value in values.items():
            getter = f"get_{group}_parallel_{kind}"
            setattr(parallel_state, getter, lambda *_, value=value: value)
    torch.distributed.get_world_size = lambda group=None: ranks.get("pipeline", 1)


def jagged(*parts: Any) -> Any:
    """A nested tensor, as verl's batches hold them."""
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def of_verl() -> tuple[Any, str]:
    """verl's module of replay functions, without a GPU and on one tensor-parallel rank, and its
    version.
    """
    from verl.utils.megatron import router_replay_utils as utils

    utils.device_name = "cpu"
    utils.scatter_to_sequence_parallel_region = lambda rows: rows
    utils.gather_from_sequence_parallel_region = lambda rows, **_: rows
    utils.RouterReplay.router_instances[:] = []  # routers of other models of this process
    return utils, f"verl {version('verl')} on {MEGATRON}"


def config(num_layers: int, moe_layer_freq: Any = 1, **fields: Any) -> Any:
    """The fields of a ``TransformerConfig`` that verl's functions read."""
    defaults = {
        "fp8": None,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    return SimpleNamespace(
        num_layers=num_layers, moe_layer_freq=moe_layer_freq, **{**defaults, **fields}
    )


def native(scores: Any, top_k: int, **_: Any) -> Any:
    """The router's own choice."""
    return torch.topk(scores, top_k)


def of_skyrl() -> tuple[Any, str]:
    """SkyRL's module of replay functions, without the packages around it, which import the whole
    trainer, and its version.
    """
    base = "skyrl.backends.skyrl_train"
    spec = importlib.util.find_spec("skyrl")
    if spec is None:
        raise ModuleNotFoundError(name="skyrl")
    root = spec.submodule_search_locations[0]
    for name in (base, f"{base}.utils", f"{base}.distributed", f"{base}.distributed.megatron"):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [root + name.removeprefix("skyrl").replace(".", "/")]
    module = importlib.import_module(f"{base}.utils.replay_utils")
    return module, f"skyrl {version('skyrl')} on {MEGATRON}"


def interleaved_pair() -> None:
    """Interleaved schedule on two pipeline ranks with batched messages: what one rank sends first
    the other takes for something else.

    Both neighbours of a rank are the same rank there, and messages between two ranks are matched in
    order. Megatron-LM's arguments refuse this (megatron/training/arguments.py); megatron-core,
    which other trainers call, does not.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    torch.distributed.P2POp = lambda op, tensor, peer, group: (op.__name__, tensor)
    torch.distributed.batch_isend_irecv = lambda ops: ops
    ops = p2p_communication._batched_p2p_ops(
        tensor_send_prev="gradient",
        tensor_recv_prev="activations",
        tensor_send_next="activations",
        tensor_recv_next="gradient",
        group=SimpleNamespace(rank=lambda: 0, size=lambda: 2),
        prev_pipeline_rank=1,
        next_pipeline_rank=1,
    )
    sent = [name for op, name in ops if op == "isend"]
    taken = [name for op, name in ops if op == "irecv"]
    print(MEGATRON, f"each rank sends {sent} - and takes what arrives for {taken}")


def other_choosers() -> None:
    """Routers that choose by sinkhorn take targets and execute others: replay is neither done nor
    refused.

    ``TopKRouter.routing`` calls ``RouterReplay`` on only one of its two paths.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    settings = SimpleNamespace(
        num_moe_experts=8,
        moe_aux_loss_coeff=0,
        moe_z_loss_coeff=None,
        moe_expert_capacity_factor=None,
        moe_router_fusion=False,
    )
    router = SimpleNamespace(
        config=settings,
        routing_type="sinkhorn",
        topk=2,
        training=False,
        enable_expert_bias=False,
        router_replay=RouterReplay(),
        apply_z_loss=lambda logits, **_: logits,
        is_aux_loss_enabled=lambda: False,
        _apply_expert_bias=lambda *_, **__: None,
    )
    router.sinkhorn_load_balancing = MethodType(TopKRouter.sinkhorn_load_balancing, router)
    router.router_replay.set_target_indices(torch.tensor([[0, 1]]))
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    _, chosen = TopKRouter.routing(router, torch.arange(8.0).view(1, 1, 8))
    print(MEGATRON, f"target [0, 1], executed {chosen.nonzero()[:, 1].tolist()}")


def short_targets() -> None:
    """Targets of too few rows or columns, or of zeros, are executed by ``RouterReplay`` as they
    are: rows with fewer than top-k experts, without a warning.

    ``set_replay_data`` counts routers and checks nothing else; ``gather`` and ``scatter`` take an
    index that is smaller than their input.
    """
    # 4 tokens, 8 experts, top-2
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 0]])
    for name, target in {
        "whole": targets,
        "3 of 4 rows": targets[:3],
        "1 of 2 columns": targets[:, :1],
        "rows of zeros": targets * 0,
    }.items():
        replay = RouterReplay()
        replay.set_target_indices(target)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        _, chosen = topk_routing_with_score_function(logits, 2, router_replay=replay)
        print(MEGATRON, f"{name} - experts per token {chosen.sum(1).tolist()}")


def stale_queue() -> None:
    """A forward-only pass that replays leaves its targets queued: the next step's recompute
    executes them, unless its caller cleared them.

    ``set_target_indices`` queues every target for a backward pass, even if there will be none.
    """
    logits, replay = torch.zeros(1, 8), RouterReplay()

    def executed(action: RouterReplayAction) -> list[int]:
        replay.set_router_replay_action(action)
        chosen = topk_routing_with_score_function(logits, 2, router_replay=replay)[1]
        return chosen.nonzero()[:, 1].tolist()

    replay.set_target_indices(torch.tensor([[0, 1]]))  # old logprobs, forward only
    executed(RouterReplayAction.REPLAY_FORWARD)
    replay.set_target_indices(torch.tensor([[6, 7]]))  # training, with recompute
    forward = executed(RouterReplayAction.REPLAY_FORWARD)
    recompute = executed(RouterReplayAction.REPLAY_BACKWARD)
    print(MEGATRON, f"forward pass {forward} its recompute {recompute}")


def skyrl_batch_order() -> None:
    """Replay with ``remove_microbatch_padding=False`` and more than one sample in a microbatch:
    targets are in another order than router rows.

    Megatron flattens a batch position by position (row ``s * B + b``), ``_split_replay_indices``
    sample by sample. Only the order differs.
    """
    sizes()
    replay, name = of_skyrl()
    tokens = torch.tensor([[0, 10, 11, 12], [0, 20, 21, 22]])
    # (B, S, layers, k); the "expert" is the token itself
    if hasattr(replay, "PackedTensor"):  # since SkyRL 0.4.0
        packed = tokens[tokens > 0][:, None, None], torch.tensor([0, 3, 6], dtype=torch.int32)
        layout = replay.TokenMetadataLayout(tokens > 0, [3, 3], aligned_sequence_length=3)
        routes = replay.align_packed_token_metadata(replay.PackedTensor(*packed), layout, 0)
    else:
        mask = (tokens > 0).int()
        routes = replay._remove_left_padding_from_indices(tokens[..., None, None], mask)
    # Megatron's embedding makes it (S, B, hidden), its router flattens that
    rows = routes.transpose(0, 1).flatten().tolist()
    (targets,) = (layer.flatten().tolist() for layer in replay._split_replay_indices(routes))
    print(name, f"router rows are tokens {rows} - their targets are of tokens {targets}")


def skyrl_zero_fill() -> None:
    """Rows without a route are zeros: expert 0, top-k times. Each final token and each row of
    padding is executed so, by fewer than top-k experts.

    ``_patch_alltoall_dispatcher_for_replay`` makes the dispatcher accept it. SkyRL 0.4.0 fills with
    distinct ids (SkyRL#1908), and nothing is printed for it.
    """
    sizes(tensor=4)
    replay, name = of_skyrl()
    if not hasattr(replay, "_pack_replay_indices"):
        return
    # 4 tokens; the final one was never forwarded
    routes = torch.tensor([[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]).view(1, 5, 1, 2)
    rows = replay._pack_replay_indices(routes[:, :4], torch.ones(1, 4))[0, :, 0].tolist()
    padded = replay._pack_replay_indices(routes, torch.ones(1, 5))[0, :, 0].tolist()
    print(name, f"4 tokens: {rows} 5 tokens, padded to 8: {padded}")


def verl_custom_stages() -> None:
    """R2 under a custom pipeline layout with virtual stages: routes come back under other layers,
    and nothing reports it.

    ``pp_gather`` calls ``get_moe_num_layers_to_build`` for how many layers each pipeline rank's
    chunks hold; with a ``pipeline_model_parallel_layout`` the answer is always that of the asking
    rank (neither verl nor Megatron's offset passes the rank on).
    """
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    sizes(pipeline=2, virtual_pipeline=2)
    utils, name = of_verl()
    # rank 0 builds layers 0 and 4-6, rank 1 builds layers 1-3 and 7
    layout = PipelineParallelLayerLayout("Et|ttt|ttt|tL", 2)
    settings = config(
        8,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=layout,
    )
    # one token, top-1: the expert is the layer's own number
    recorded = torch.tensor([0, 4, 5, 6]), torch.tensor([1, 2, 3, 7])
    ranks = [jagged(layers.view(1, -1, 1).short()) for layers in recorded]

    def gather(into: list[Any], mine: Any, group: Any = None) -> None:
        into[:] = ranks

    torch.distributed.all_gather_object = gather
    counts = [
        [utils.get_moe_num_layers_to_build(settings, chunk, rank) for chunk in (0, 1)]
        for rank in (0, 1)
    ]
    print(name, f"rank 0 holds [1, 3] layers, rank 1 [3, 1]; rank 0 is told {counts}")
    layers = utils.pp_gather(ranks[0], settings).unbind()[0].flatten().tolist()
    print(name, f"layers 0 to 7 come back as {layers}")


def verl_layer_count() -> None:
    """R3 routes of one layer too few are read as if dense layers had been left out: MoE layers get
    the columns of others.

    ``set_router_replay_data`` distinguishes the two conventions by length alone: num_layers columns
    are all layers, any other number is MoE layers. Here the engine's layer 0 is dense (zeros), the
    last column is missing.
    """
    sizes()
    utils, name = of_verl()
    settings = config(4, [0, 1, 1, 1])
    routers = {number: utils.RouterReplay() for number in (2, 3, 4)}
    iter_model_routers = utils.iter_model_routers
    utils.iter_model_routers = lambda model: list(routers.items())
    # the "expert" is the layer's own number, twice; layer 0 has none
    columns = torch.tensor([0, 11, 22, 33])
    for given in (columns, columns[:3]):
        routes = jagged(given.view(1, -1, 1))
        utils.set_router_replay_data(routes, None, settings, model=object())
        targets = [router.target_topk_idx.item() for router in routers.values()]
        print(name, f"columns {given.tolist()}: layers 1, 2, 3 get {targets}")
    utils.iter_model_routers = iter_model_routers


def verl_no_target() -> None:
    """REPLAY_FORWARD without a target, and REPLAY_BACKWARD with an empty queue: verl's
    ``RouterReplay`` lets the router choose, without a warning.

    megatron-core's own class raises in both cases. A target that reached another router (verl#7340)
    is then a replay that never happens.
    """
    from megatron.core.transformer.moe import router_replay as core
    from verl.utils.megatron import router_replay_patch as patch

    _, name = of_verl()
    logits = torch.arange(8.0).view(1, 8)
    for action in ("REPLAY_FORWARD", "REPLAY_BACKWARD"):
        results = []
        for module in (patch, core):
            replay = module.RouterReplay()
            replay.set_router_replay_action(module.RouterReplayAction[action])
            try:
                choice = replay.get_replay_topk(logits, 2, default_compute_topk=native)
                results.append(choice[1].tolist())
            except (AttributeError, IndexError) as error:
                results.append(type(error).__name__)
        outcome = f"verl's chooses {results[0]}, megatron-core's raises {results[1]}"
        print(name, f"{action} without a target: {outcome}")


def verl_padded_replay() -> None:
    """Replay with ``use_remove_padding=False``: the model is fed a padded batch, its routers are
    given targets in packed order.

    Megatron flattens a batch position by position (row ``s * B + b``); ``set_router_replay_data``
    packs whatever it is given. If two sequences are of one length only the order differs. Nothing
    refuses the combination on Megatron; for VeOmni verl's configuration does.
    """
    from verl.models.mcore.util import preprocess_bshd_engine

    sizes()
    utils, name = of_verl()
    tokens = jagged(torch.tensor([10, 11, 12]), torch.tensor([20, 21, 22]))
    batch = preprocess_bshd_engine(tokens)[0]  # (B, S), what the engine feeds
    # Megatron's embedding makes it (S, B, hidden), its router flattens that
    rows = batch.transpose(0, 1).flatten().tolist()
    # the "expert" is the token itself
    routes = jagged(*(part.view(-1, 1, 1) for part in tokens.unbind()))
    router = utils.RouterReplay()
    utils.set_router_replay_data(routes, None, config(1))
    targets = router.target_topk_idx.flatten().tolist()
    print(name, f"router rows are tokens {rows} - their targets are of tokens {targets}")


def verl_r2_padding() -> None:
    """R2 under tensor parallelism: rows that pad a sequence to a multiple of the ranks are replayed
    as zeros, expert 0 for every k.

    ``preprocess_thd_engine`` pads routes with zeros; a mask that leaves such rows to the router is
    made for R3 alone (transformer_impl.py, 1315).
    """
    from verl.utils.megatron import router_replay_patch as patch

    sizes(tensor=2)
    utils, name = of_verl()
    recorded = jagged(torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]]))  # 3 tokens: 4 rows
    router = utils.RouterReplay()
    utils.set_router_replay_data(recorded, None, config(1))  # as in R2: no mask
    router.set_router_replay_action(patch.RouterReplayAction.REPLAY_FORWARD)
    choice = router.get_replay_topk(torch.rand(4, 8), 2, default_compute_topk=native)
    print(name, f"3 tokens, padded to 4 rows, execute {choice[1].tolist()}")


def verl_wide_ids() -> None:
    """R2 recordings of expert ids above 255: verl 0.8.0 keeps them in eight bits, so that expert
    256 is replayed as expert 0.
    """
    sizes()
    utils, name = of_verl()
    utils.RouterReplay().record_indices(torch.tensor([[255, 256], [383, 1]]))
    recorded: list[Any] = []
    ids = jagged(torch.arange(2))
    utils.merge_router_topk_indices(None, ids, recorded, config(1), 0)
    rows = recorded[0].unbind()[0][:, 0].tolist()
    print(name, f"chosen [[255, 256], [383, 1]], recorded {rows}")


def verl_zero_rows() -> None:
    """R3 with fewer routes than tokens: ``as_dict`` fills up with zeros, and the replay mask
    replays them: expert 0 for every such token.

    ``align_r3_router_replay_data`` refuses more than one missing row, but never sees one:
    ``as_dict`` made the rows equal to the tokens. The mask leaves the last row native, not the
    filled ones.
    """
    from verl.utils.megatron import router_replay_patch as patch

    utils, name = of_verl()
    captured = torch.tensor([[1, 2], [3, 4], [5, 6]])
    # AgentLoopOutput.as_dict: see verl_faults.py zero_rows
    filled = torch.cat([captured, torch.zeros(3, 2, dtype=torch.long)])
    ids = jagged(torch.arange(6))
    routes = utils.align_r3_router_replay_data(jagged(filled[:, None]), ids)
    mask = utils.build_r3_replay_mask(ids, torch.ones(1, 4))
    replay = patch.RouterReplay()
    replay.set_target_indices(routes.values()[:, 0], replay_mask=mask.values())
    replay.set_router_replay_action(patch.RouterReplayAction.REPLAY_FORWARD)
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    choice = replay.get_replay_topk(scores, 2, default_compute_topk=native)
    print(name, f"3 rows captured for 6 tokens; executed {choice[1].tolist()}")


if __name__ == "__main__":
    run(
        interleaved_pair,
        other_choosers,
        short_targets,
        stale_queue,
        skyrl_batch_order,
        skyrl_zero_fill,
        verl_custom_stages,
        verl_layer_count,
        verl_no_target,
        verl_padded_replay,
        verl_r2_padding,
        verl_wide_ids,
        verl_zero_rows,
    )
