"""A training loop of HF transformers that replays routes, and what rollproof needs to judge it."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.utils.rnn import pad_sequence

from rollproof.replay.contract import trainer_contract
from rollproof.replay.events import Action, Outcome
from rollproof.replay.hf import batch_routes, find_routers, hf_replay, watched
from rollproof.replay.hf.model_families import tiny_model
from rollproof.replay.spy import sketch

torch.set_num_threads(1)  # of matrices this small more threads get nothing


class HfTrainer:
    contract = trainer_contract(
        num_layers=3,
        moe_layers=(0, 1, 2),
        num_experts=8,
        top_k=2,
        vocab=128,
        mode="R3",
        free_rows="native",
        recompute=("none", "full"),
    )

    def __init__(self):
        self.model = tiny_model("qwen3_moe")  # your model, at a size that a CPU runs
        self.routers = find_routers(self.model)
        self.first = {
            name: weight.detach().clone() for name, weight in self.model.named_parameters()
        }

    def run(self, step, spy):
        (
            self.model.gradient_checkpointing_enable
            if step.recompute == "full"
            else self.model.gradient_checkpointing_disable
        )()
        self.model.train(step.backward).zero_grad()
        logprobs = {}
        for spy.microbatch, samples in enumerate(step.microbatches):
            logprobs |= self.microbatch(step, samples, spy) if samples else {}
        gradients = {
            name: sketch(weight.grad)
            for name, weight in self.model.named_parameters()
            if weight.grad is not None
        }
        gates = {
            one.layer: gradients[f"{one.path}.weight"] for one in self.routers.all if step.backward
        }
        loss = -sum(float(values.sum()) for values in logprobs.values())
        return Outcome(
            step=step.name, loss=loss, logprobs=logprobs, gradients=gradients, gates=gates
        )

    def microbatch(self, step, samples, spy):
        tokens = [torch.tensor(one.prompt_ids + one.response_ids) for one in samples]
        ids = pad_sequence(tokens, batch_first=True)
        mask = pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True)
        replays, routes = step.action is Action.REPLAY, [one.routes for one in samples]
        replay = hf_replay(self.routers, batch_routes(routes, mask)) if replays else nullcontext()
        with watched(self.routers, spy, ids), replay, torch.set_grad_enabled(step.backward):
            logits = self.model(ids, attention_mask=mask, use_cache=False).logits.double()
            found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            own = {
                one.request_id: found[i, len(one.prompt_ids) - 1 : one.total - 1]
                for i, one in enumerate(samples)
            }
            if step.backward:
                with spy.recomputing():  # router calls within a backward pass are recomputes
                    (-torch.cat(list(own.values())).sum()).backward()
        return {name: values.detach().numpy() for name, values in own.items()}

    def set_weights(self, number):
        noise = torch.Generator().manual_seed(abs(number))
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(
                    self.first[name]
                    + (0.1 * torch.randn(weight.shape, generator=noise) if number > 0 else 0.0)
                )
            self.routers.all[0].module.weight.mul_(torch.nan if number < 0 else 1.0)
