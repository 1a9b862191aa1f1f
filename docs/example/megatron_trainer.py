"""A Megatron trainer with routing replay, and how rollproof drives it: on one CPU process, without Transformer Engine."""

from __future__ import annotations

import atexit
import functools
import tempfile
from contextlib import ExitStack

import numpy as np
import torch

from rollproof.replay.contract import trainer_contract
from rollproof.replay.events import Action, Outcome, Purpose
from rollproof.replay.megatron.cuda_stand_in import cpu_megatron
from rollproof.replay.spy import direction, ids_of_map, sketch
from rollproof.replay.terms import Recompute

LAYERS, MOE, EXPERTS, TOP_K, VOCAB = 3, (1, 2), 8, 2, 256
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@functools.cache
def megatron():
    """Once per process: megatron-core's CUDA calls replaced, a group of one process, Megatron's own groups."""
    life = ExitStack()
    atexit.register(life.close)  # while torch can still be imported
    life.enter_context(cpu_megatron())
    torch.set_num_threads(1)  # of matrices this small more threads get nothing
    store = torch.distributed.FileStore(tempfile.mkstemp()[1], 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    return life


def make_model(recompute: Recompute, replay: bool):
    """The trainer's model. ``moe_enable_routing_replay`` gives every router a RouterReplay, in a list of the process."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.transformer_config import TransformerConfig

    RouterReplay.clear_global_router_replay_instances()  # or the routers of the last model would get this one's targets
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_layer_freq=[int(layer in MOE) for layer in range(LAYERS)], moe_enable_routing_replay=replay, init_method_std=0.3,
        moe_router_load_balancing_type="none", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, normalization="RMSNorm", bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, **(FULL if recompute is Recompute.FULL else {}),
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=64, position_embedding_type="rope"
    )


class MegatronTrainer:
    """One sample to a microbatch; routes of the final token, which no engine returns, are a filler of distinct experts."""

    contract = trainer_contract(
        num_layers=LAYERS, moe_layers=MOE, num_experts=EXPERTS, top_k=TOP_K, vocab=VOCAB, mode="R3", free_rows="dummy",
        recompute=("none", "full"), installs="per-call", microbatches=4, microbatch_size=1, tolerance=1e-4,
    )  # fmt: skip

    def __init__(self):
        megatron()
        self.weights, self.nudges, self.made = 0, [], None

    def run(self, step, spy):
        """One step, as the trainer does it."""
        from megatron.core.transformer.moe.router_replay import RouterReplay

        self.prepare(step)
        self.model.train(step.purpose is Purpose.TRAIN)
        self.model.zero_grad()
        logprobs = {}
        try:
            for number, samples in enumerate(step.microbatches):
                spy.microbatch = number
                for sample in samples:
                    logprobs[sample.request_id] = self.microbatch(step, sample, spy)
        finally:  # also when the step fails: what is left would be executed by the next one
            RouterReplay.clear_global_indices()
            RouterReplay.clear_global_router_replay_action()
        gradients = {
            name: one.grad for name, one in self.model.named_parameters() if one.grad is not None
        }
        return Outcome(
            step=step.name,
            loss=-sum(float(one.sum()) for one in logprobs.values()),
            logprobs=logprobs,
            gradients={name: sketch(one) for name, one in gradients.items()},
            gates={
                layer: sketch(router.weight.grad)
                for layer, router in self.routers.items()
                if step.backward
            },
        )

    def microbatch(self, step, sample, spy):
        """Install, forward, switch to the queue of the backward pass, backward."""
        tokens = torch.tensor([sample.prompt_ids + sample.response_ids])
        first = len(sample.prompt_ids)
        if step.action is Action.REPLAY:
            self.install(sample, spy)
        hooks = [
            router.register_forward_hook(watch(spy, layer, tokens))
            for layer, router in self.routers.items()
        ]
        try:
            positions = torch.arange(tokens.shape[1])[None]
            with torch.set_grad_enabled(step.backward):
                losses = self.model(tokens, positions, None, labels=tokens.roll(-1, 1))[
                    0, first - 1 : -1
                ]
            if step.action is Action.REPLAY and step.recompute is Recompute.FULL:
                self.act("REPLAY_BACKWARD")
            if step.backward:
                with spy.recomputing():  # router calls inside a backward pass are recomputes
                    losses.sum().backward()
        finally:
            for hook in hooks:
                hook.remove()
        return -losses.detach().double().numpy()

    def install(self, sample, spy):
        """Check the routes, since RouterReplay does not, and give each router the column of its layer."""
        routes = sample.routes
        if routes.shape != (sample.total - 1, LAYERS, TOP_K) or routes.dtype.kind not in "iu":
            raise ValueError(
                f"{sample.request_id}: routes are {routes.dtype} {routes.shape}, for {sample.total} tokens"
            )
        routes = np.concatenate(
            [routes.astype(np.int64), np.tile(np.arange(TOP_K), (1, LAYERS, 1))]
        )
        ordered = np.sort(routes[:, list(MOE)])
        if (
            ordered.min() < 0
            or ordered.max() >= EXPERTS
            or (ordered[..., 1:] == ordered[..., :-1]).any()
        ):
            raise ValueError(
                f"{sample.request_id}: a row of the routes does not name {TOP_K} distinct experts"
            )
        for layer, router in self.routers.items():
            router.router_replay.set_target_indices(torch.from_numpy(routes[:, layer].copy()))
            spy.installed(layer)
        self.act("REPLAY_FORWARD")

    def act(self, action):
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        RouterReplay.set_global_router_replay_action(RouterReplayAction[action])

    def prepare(self, step):
        """The model that the step is for, with its weights: recompute and replay are settings of its configuration."""
        wanted = (step.recompute, step.action is not Action.OFF, self.weights, tuple(self.nudges))
        if self.made == wanted:
            return
        from megatron.core.transformer.moe.router import TopKRouter

        self.model, self.made = make_model(*wanted[:2]), wanted
        self.routers = {
            one.layer_number - 1: one for one in self.model.modules() if isinstance(one, TopKRouter)
        }
        noise = torch.Generator().manual_seed(max(self.weights, 0))
        with torch.no_grad():
            for weight in self.model.parameters() if self.weights > 0 else ():
                weight += 0.3 * torch.randn(weight.shape, generator=noise)
            if self.weights == -1:
                self.routers[MOE[0]].weight[0, 0] = float("nan")
            for layer, size in self.nudges:
                gate = self.routers[layer].weight
                gate += torch.from_numpy(size * direction(tuple(gate.shape))).float()

    def set_weights(self, number):
        self.weights, self.nudges = number, []

    def nudge(self, layer, size):
        self.nudges.append((layer, size))

    def residue(self):
        from megatron.core.transformer.moe.router_replay import RouterReplay

        places = RouterReplay.global_router_replay_instances
        return {
            "targets": sum(one.target_topk_idx is not None for one in places),
            "queued": sum(len(one.replay_backward_list) for one in places),
            "actions": sum(one.router_replay_action is not None for one in places),
        }


def watch(spy, layer, tokens):
    """On the router's *output*: what is executed, whatever was installed. Rows are (place, sample); here the sample is one."""

    def report(_module, _inputs, output):
        spy.routed(layer, ids_of_map(output[1].numpy(), TOP_K), tokens=tokens.T.flatten())

    return report
