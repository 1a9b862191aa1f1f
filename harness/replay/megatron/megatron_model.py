"""One rank's chunks of a tiny megatron-core GPT, from the local layer specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollproof.core.replay_contract import Recompute
from rollproof.core.router_spy import direction
from rollproof.layouts.mesh import Rank
from rollproof.replay.megatron.checkpoint import checkpoint_config, rotary_base, undivided_weights
from rollproof.replay.megatron.megatron_setups import UNSUPPORTED, MegatronSetup, RouterKind
from rollproof.replay.megatron.model_weights import Part, fill, named_parts

__all__ = ["Chunks", "build", "configuration", "on_gpu", "parallel"]

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    Recompute.FULL: {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
_ROUTER: dict[RouterKind, dict[str, Any]] = {
    RouterKind.SOFTMAX: {},
    # as DeepSeek-V3
    RouterKind.SIGMOID: {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 32,
    },
}


def on_gpu() -> bool:
    """Whether this process computes on a GPU: it has one, and its group uses NCCL."""
    import torch

    return (
        torch.cuda.is_available()
        and torch.distributed.is_initialized()
        and "nccl" in torch.distributed.get_backend_config()
    )


@contextmanager
def parallel(setup: MegatronSetup) -> Iterator[Rank]:
    """Make Megatron's process groups for a setup; yield this process's rank.

    megatron-core raises for sizes that do not fit.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp,
        virtual_pipeline_model_parallel_size=setup.vpp if setup.vpp > 1 else None,
        context_parallel_size=setup.cp,
        expert_model_parallel_size=setup.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,  # further groups, for optimizers and checkpoints
    )
    if on_gpu():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        # recompute forks these generators; nothing here draws from them
        model_parallel_cuda_manual_seed(1)
    try:
        yield Rank(
            dp=parallel_state.get_data_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
            cp=parallel_state.get_context_parallel_rank(),
            tp=parallel_state.get_tensor_model_parallel_rank(),
        )
    finally:
        parallel_state.destroy_model_parallel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """The model chunks of one rank, in the order of their virtual stages.

    ``routers[v]`` are the routers of chunk v by global layer, in the order in which they were
    built.
    """

    config: Any
    models: tuple[Any, ...]
    routers: tuple[dict[int, Any], ...]
    parts: tuple[Part, ...]

    @property
    def device(self) -> Any:
        """The device of the parameters."""
        return self.parts[0].tensor.device

    def load(self, setup: MegatronSetup, rank: Rank, number: int) -> None:
        """Load the weights ``number``; -1 puts NaN into the gate of the first MoE layer.

        For a setup with checkpoints it is the index of one.
        """
        import torch

        undivided = undivided_weights(setup.checkpoints[number]) if setup.checkpoints else None
        for part in self.parts:
            fill(part, rank.tp, setup.tp, number, undivided)
        if number == -1:
            for routers in self.routers:
                if setup.moe_layers[0] in routers:
                    with torch.no_grad():
                        routers[setup.moe_layers[0]].weight[0, 0] = float("nan")

    def nudge(self, layer: int, size: float) -> None:
        """Add ``size`` times ``spy.direction`` to the gate weight of a layer of this rank."""
        import torch

        for routers in self.routers:
            if layer in routers:
                weight = routers[layer].weight
                with torch.no_grad():
                    weight += torch.from_numpy(size * direction(tuple(weight.shape))).to(weight)


def build(setup: MegatronSetup, config: Any) -> Chunks:
    """Build this rank's chunks of a ``configuration``."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    # routers register themselves in a list of the process: the routers of an earlier model would
    # take the targets (verl#7340)
    RouterReplay.clear_global_router_replay_instances()
    device = f"cuda:{torch.cuda.current_device()}" if on_gpu() else "cpu"
    models = []
    for stage in range(setup.vpp):
        virtual = stage if setup.vpp > 1 else None
        stage_options = {"ignore_virtual": virtual is None, "vp_stage": virtual}
        models.append(
            GPTModel(
                config,
                get_gpt_decoder_block_spec(
                    config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual
                ),
                vocab_size=setup.vocab,
                max_sequence_length=128,
                pre_process=parallel_state.is_pipeline_first_stage(**stage_options),
                post_process=parallel_state.is_pipeline_last_stage(**stage_options),
                position_embedding_type="rope",
                rotary_base=rotary_base(setup.checkpoints[0]) if setup.checkpoints else 10000,
                share_embeddings_and_output_weights=False,
                vp_stage=virtual,
            ).to(device=device, dtype=getattr(torch, setup.dtype))
        )
    offset = parallel_state.get_expert_model_parallel_rank() * (setup.num_experts // setup.ep)
    return Chunks(
        config=config,
        models=tuple(models),
        routers=tuple(
            {
                # Megatron numbers layers from 1
                module.layer_number - 1: module
                for module in model.modules()
                if isinstance(module, TopKRouter)
            }
            for model in models
        ),
        parts=tuple(part for model in models for part in named_parts(model, offset, setup.tp)),
    )


def configuration(setup: MegatronSetup, recompute: Recompute, settings: Mapping[str, Any]) -> Any:
    """Return the ``TransformerConfig`` of a setup; ``settings`` switch a replay code on."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    own: dict[str, Any] = {
        "num_layers": setup.num_layers,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 32,
        "num_attention_heads": 4,
        "num_moe_experts": None if setup.dense else setup.num_experts,
        "moe_router_topk": setup.top_k,
        "moe_layer_freq": [int(layer in setup.moe_layers) for layer in range(setup.num_layers)],
        "moe_token_dispatcher_type": str(setup.dispatcher),
        # an auxiliary loss counts the native choice, also under replay
        "moe_router_load_balancing_type": "none",
        "tensor_model_parallel_size": setup.tp,
        "pipeline_model_parallel_size": setup.pp,
        "virtual_pipeline_model_parallel_size": setup.vpp if setup.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": setup.first,
        # Between two pipeline ranks, batched messages of an interleaved schedule are matched in the
        # wrong order: activations arrive as gradients. Megatron-LM's own arguments refuse that
        # (megatron/training/arguments.py); megatron-core does not.
        "overlap_p2p_comm": setup.vpp > 1,
        "batch_p2p_comm": setup.vpp == 1,
        "variable_seq_lengths": setup.own_widths,
        "context_parallel_size": setup.cp,
        "expert_model_parallel_size": setup.ep,
        "expert_tensor_parallel_size": 1,
        # Megatron requires it for MoE under tensor parallelism
        "sequence_parallel": setup.tp > 1,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        # the loss is a sum over tokens, which adds up over microbatches and ranks
        "calculate_per_token_loss": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        # on a CPU parallel ranks share one random state
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Fused kernels exist for GPUs only.
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": False,
    }
    shapes = checkpoint_config(setup.checkpoints[0], setup.dtype) if setup.checkpoints else {}
    return TransformerConfig(
        **{
            **own,
            **shapes,
            **_ROUTER[setup.router],
            **_RECOMPUTE[recompute],
            **UNSUPPORTED.get(setup.unsupported, {}),
            **settings,
        }
    )
