"""PackedTrainer: a torch MoE model on one packed line a microbatch; targets are looked up per (microbatch, layer) by the gate. Sigmoid gates."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from rollproof.replay.contract import trainer_contract
from rollproof.replay.events import Action, Outcome
from rollproof.replay.spy import direction, sketch
from rollproof.replay.terms import Recompute

torch.set_num_threads(1)
LAYERS, EXPERTS, K, VOCAB, DIM = 2, 6, 2, 96, 6


class Gate(torch.nn.Module):
    def __init__(self, layer, book):
        super().__init__()
        self.layer, self.book = layer, book
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, DIM, dtype=torch.float64))

    def forward(self, x, microbatch):
        score = torch.sigmoid(x @ self.weight.T)
        native = score.topk(K, -1).indices
        chosen = self.choose(native, self.book.lookup(microbatch, self.layer))
        self.book.tell(microbatch, self.layer, chosen)
        return self.weigh(score, chosen, native), chosen

    def choose(self, native, target):
        if target is None:
            return native
        return torch.where((target[:, 0] >= 0)[:, None], target, native)

    def weigh(self, score, chosen, native):
        w = torch.gather(score, 1, chosen)
        return w / w.sum(1, keepdim=True)


class Book:
    """What is to be replayed, and whom to tell."""

    def __init__(self):
        self.pages, self.lines, self.spy = {}, {}, None

    def write(self, microbatch, layer, target):
        self.pages[microbatch, layer] = target

    def lookup(self, microbatch, layer):
        return self.pages.get((microbatch, layer))

    def tell(self, microbatch, layer, chosen):
        if self.spy is not None:
            self.spy.routed(
                layer, chosen.detach().numpy(), tokens=self.lines[microbatch], microbatch=microbatch
            )

    def close(self):
        self.pages, self.lines, self.spy = {}, {}, None


class Block(torch.nn.Module):
    def __init__(self, layer, book, gate):
        super().__init__()
        self.gate = gate(layer, book)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, DIM, DIM, dtype=torch.float64) * 0.6)

    def forward(self, x, before, microbatch):
        h = x + 0.4 * torch.where(before[:, None] >= 0, x[before.clamp(min=0)], torch.zeros_like(x))
        w, chosen = self.gate(h, microbatch)
        return x + (w[..., None] * torch.sin(torch.einsum("nd,nkde->nke", h, self.up[chosen]))).sum(
            1
        )


class PackedTrainer:
    gate_class, book_class = Gate, Book
    contract = trainer_contract(
        num_layers=LAYERS,
        moe_layers=(0, 1),
        num_experts=EXPERTS,
        top_k=K,
        vocab=VOCAB,
        mode="R3",
        free_rows="native",
        recompute=("none", "full"),
        microbatches=3,
        microbatch_size=2,
        tolerance=1e-9,
        float_digits=12,
    )

    def __init__(self):
        torch.manual_seed(5)
        self.book = self.book_class()
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, DIM, dtype=torch.float64))
        self.blocks = [Block(i, self.book, self.gate_class) for i in range(LAYERS)]
        self.head = torch.nn.Parameter(torch.randn(DIM, VOCAB, dtype=torch.float64) * 0.5)
        self.start = {n: p.detach().clone() for n, p in self.parameters().items()}

    def parameters(self):
        found = {"embed": self.embed, "head": self.head}
        for i, b in enumerate(self.blocks):
            found |= {f"{i}.{n}": p for n, p in b.named_parameters()}
        return found

    def valid(self, s):
        r = np.asarray(s.routes) if s.routes is not None else None
        ok = (
            r is not None
            and r.dtype.kind in "iu"
            and r.shape == (s.total - 1, LAYERS, K)
            and r.min(initial=0) >= 0
            and r.max(initial=0) < EXPERTS
        )
        if not ok or any(len(set(c)) < K for c in r.reshape(-1, K).tolist()):
            raise ValueError("bad routes of " + s.request_id)

    def run(self, step, spy):
        for p in self.parameters().values():
            p.grad = None
        try:
            if step.action is Action.REPLAY:
                for s in (s for m in step.microbatches for s in m):
                    self.valid(s)
                self.prepare(step)
            self.book.spy = spy
            logprobs, _total = {}, 0.0
            for number, samples in enumerate(step.microbatches):
                if samples:
                    logprobs |= self.microbatch(step, spy, number, samples)
        finally:
            self.done(step)
        return Outcome(
            step=step.name,
            loss=-sum(float(v.sum()) for v in logprobs.values()),
            logprobs=logprobs,
            gradients={
                n: sketch(p.grad) for n, p in self.parameters().items() if p.grad is not None
            },
            gates={
                b.gate.layer: sketch(b.gate.weight.grad)
                for b in self.blocks
                if b.gate.weight.grad is not None
            },
        )

    def prepare(self, step):
        for number, samples in enumerate(step.microbatches):
            for layer in range(LAYERS):
                self.book.write(number, layer, self.target(samples, layer))

    def target(self, samples, layer):
        rows = [
            np.concatenate([self.payload(s)[:, layer].astype(np.int64), np.full((1, K), -1)])
            for s in samples
        ]
        return torch.from_numpy(np.concatenate(rows)) if rows else None

    def payload(self, s):
        return s.routes

    def done(self, step):
        self.book.close()

    def microbatch(self, step, spy, number, samples):
        line = np.concatenate([[*s.prompt_ids, *s.response_ids] for s in samples])
        before = np.concatenate(
            [
                np.r_[-1, start : start + s.total - 1]
                for s, start in zip(
                    samples, np.cumsum([0, *(s.total for s in samples)]), strict=False
                )
            ]
        )
        self.book.lines[number] = line
        ids, before = torch.from_numpy(line), torch.from_numpy(before)
        with torch.set_grad_enabled(step.backward):
            x = self.embed[ids]
            for block in self.blocks:
                again = step.recompute is Recompute.FULL and step.backward
                x = (
                    checkpoint(block, x, before, number, use_reentrant=False)
                    if again
                    else block(x, before, number)
                )
            law = (x @ self.head).log_softmax(-1)
            found, at = {}, 0
            for s in samples:
                rows = torch.arange(at + len(s.prompt_ids) - 1, at + s.total - 1)
                found[s.request_id] = law[rows, ids[rows + 1]]
                at += s.total
            loss = -sum(v.sum() for v in found.values())
        if step.backward and loss.requires_grad:
            with spy.recomputing():
                loss.backward()
        return {k: v.detach().numpy() for k, v in found.items()}

    def set_weights(self, number):
        g = torch.Generator().manual_seed(1000 + abs(number))
        with torch.no_grad():
            for n, p in self.parameters().items():
                p.copy_(self.start[n])
                if number > 0:
                    p += 0.7 * torch.randn(p.shape, generator=g, dtype=torch.float64)
            if number == -1:
                self.blocks[0].gate.weight[0, 0] = torch.nan

    def nudge(self, layer, size):
        w = self.blocks[layer].gate.weight
        with torch.no_grad():
            w += torch.from_numpy(size * direction(tuple(w.shape)))

    def residue(self):
        return {"pages": len(self.book.pages), "spies": int(self.book.spy is not None)}

    def reference(self, step):
        """The same step in plain functions, without gates and book."""
        P = {
            n: p.detach().clone().requires_grad_(step.backward)
            for n, p in self.parameters().items()
        }
        logprobs, loss = {}, 0
        for samples in step.microbatches:
            for s in samples:
                ids = torch.tensor([*s.prompt_ids, *s.response_ids])
                x = P["embed"][ids]
                for i in range(LAYERS):
                    h = x + 0.4 * torch.cat([torch.zeros_like(x[:1]), x[:-1]])
                    score = torch.sigmoid(h @ P[f"{i}.gate.weight"].T)
                    ids_k = score.topk(K, -1).indices
                    if step.action is Action.REPLAY:
                        ids_k = torch.cat(
                            [
                                torch.from_numpy(np.asarray(s.routes)[:, i].astype(np.int64)),
                                ids_k[-1:],
                            ]
                        )
                    w = score.gather(1, ids_k)
                    w = w / w.sum(1, keepdim=True)
                    x = x + (
                        w[..., None]
                        * torch.sin(torch.einsum("nd,nkde->nke", h, P[f"{i}.up"][ids_k]))
                    ).sum(1)
                law = (x @ P["head"]).log_softmax(-1)
                rows = torch.arange(len(s.prompt_ids) - 1, s.total - 1)
                v = law[rows, ids[rows + 1]]
                loss = loss - v.sum()
                logprobs[s.request_id] = v.detach().numpy()
        if step.backward:
            loss.backward()
        return Outcome(
            step=step.name,
            loss=-sum(float(v.sum()) for v in logprobs.values()),
            logprobs=logprobs,
            gradients={n: sketch(p.grad) for n, p in P.items() if p.grad is not None},
            gates={
                i: sketch(P[f"{i}.gate.weight"].grad)
                for i in range(LAYERS)
                if P[f"{i}.gate.weight"].grad is not None
            },
        )
