"""A tiny real model's logprobs with one known cause of their difference, for ``gap_confusion.py --real``. Needs torch and transformers.

The model is a Qwen3-MoE of four layers whose head and routers have the spread of a trained one's. Contexts are text that it sampled
itself; at every place of them the engine's law is its bf16 forward and the trainer's its float32 forward, so that the noise is real, with
real flips of experts, and so is what wrong routes, other versions, lost context and lost weights do. Tokens are drawn from the law at each
place of a context. Versions of the weights part by noise of a few parts in a hundred of each matrix.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollproof.fakes.tiny_models import make_checkpoint
from rollproof.replay.hf import hf_record, hf_replay

SEQUENCES, LENGTH, BATCH = 60, 500, 12
SWEEPS = 3
STEP = 0.02
"""An update's size, in parts of each matrix's spread."""
AGAIN = 100
"""Tokens of a segment, where rollouts are resumed."""


@lru_cache
def model(version: int, dtype: str, family: str = "qwen3_moe") -> Any:
    """Version 0 is the checkpoint; each further one is an update more. -1 are other weights."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "model", family, seed=1 if version < 0 else 0)
        own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        for step in range(1, version + 1):
            random = torch.Generator().manual_seed(step)
            for name, parameter in own.named_parameters():
                if parameter.ndim > 1 and "lm_head" not in name:
                    parameter.add_(STEP * parameter.std() * torch.randn(parameter.shape, generator=random))
    return own.to(getattr(torch, dtype))


class Contexts:
    """Sequences ``(60, 501)`` of version 0's text; forwards over them: logits ``(30000, vocabulary)``, routes ``(30000, layers, 2)``."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self._logits: dict[Any, Any] = {}

    @cached_property
    def ids(self) -> Any:
        """Random ids, all drawn anew from the model's law at their place, three times over: text of its own, in three forwards."""
        own = model(0, "float32")
        ids = torch.randint(3, own.config.vocab_size, (SEQUENCES, LENGTH + 1), generator=self.random)
        with torch.no_grad():
            for _ in range(SWEEPS):
                for begin in range(0, SEQUENCES, BATCH):
                    law = own(ids[begin : begin + BATCH, :-1], use_cache=False).logits.softmax(-1)
                    drawn = torch.multinomial(law.flatten(0, 1), 1, generator=self.random)
                    ids[begin : begin + BATCH, 1:] = drawn.reshape(-1, LENGTH)
        return ids

    def forward(self, version: int = 0, dtype: str = "float32", routes: Any = None, key: str = "") -> tuple[Any, Any]:
        """Logits float32, and the routes that were executed; ``key`` names the routes."""
        name = (version, dtype, key)
        if name not in self._logits:
            own = model(version, dtype)
            logits, executed = [], []
            with torch.no_grad():
                for begin in range(0, SEQUENCES, BATCH):
                    ids = self.ids[begin : begin + BATCH, :-1]
                    if routes is None:
                        with hf_record(own) as recorded:
                            logits.append(own(ids, use_cache=False).logits.float().flatten(0, 1))
                        executed.append(recorded.routes)
                    else:
                        rows = torch.from_numpy(np.ascontiguousarray(routes[begin * LENGTH : (begin + BATCH) * LENGTH]))
                        with hf_replay(own, rows):
                            logits.append(own(ids, use_cache=False).logits.float().flatten(0, 1))
                        executed.append(rows)
            self._logits[name] = torch.cat(logits).numpy().astype(np.float64), torch.cat(executed).numpy()
        return self._logits[name]

    @cached_property
    def forgetful(self) -> Any:
        """Logits of the engine whose resumed calls saw nothing of what came before the last two tokens."""
        out = self.forward(0, "bfloat16")[0].reshape(SEQUENCES, LENGTH, -1).copy()
        own = model(0, "bfloat16")
        with torch.no_grad():
            for begin in range(AGAIN, LENGTH, AGAIN):
                for back in (0, 1):
                    ids = self.ids[:, begin - 1 : begin + 1 + back]
                    out[:, begin + back] = own(ids, use_cache=False).logits[:, -1].float().numpy()
        return out.reshape(SEQUENCES * LENGTH, -1)


class Draw:
    """One data set: tokens drawn from the engine's ``law``, what it ``shows`` of them, and the trainer's logits."""

    def __init__(self, contexts: Contexts, seed: int) -> None:
        self.contexts, self.rng = contexts, np.random.default_rng(seed)
        self.law, self.engine_routes = contexts.forward(0, "bfloat16")
        self.trainer, self.trainer_routes = contexts.forward(0, "float32")
        self.shown: Any = None
        self.sides: dict[str, Any] = {"position": np.tile(np.arange(LENGTH), SEQUENCES)}
        self.sequence = np.repeat(np.arange(SEQUENCES), LENGTH)
        self._tokens: Any = None

    @property
    def tokens(self) -> Any:
        if self._tokens is None:
            self._tokens = np.argmax(self.law + self.rng.gumbel(size=self.law.shape), axis=1)
        return self._tokens

    def logprobs(self, logits: Any) -> Any:
        top = logits.max(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            return logits[np.arange(len(logits)), self.tokens] - top[:, 0] - np.log(np.exp(logits - top).sum(axis=1))

    def columns(self) -> dict[str, Any]:
        out = {
            "sequence_id": self.sequence,
            "rollout_logprob": self.logprobs(self.law if self.shown is None else self.shown),
            "trainer_logprob": self.logprobs(self.trainer),
            "mask": np.ones(len(self.sequence), bool),
        }
        return out | {name: value(out) if callable(value) else value for name, value in self.sides.items()}


def numerics(dtype: str = "bfloat16", replay: bool = False) -> Callable[[Draw], None]:
    def plant(draw: Draw) -> None:
        draw.law, routes = draw.contexts.forward(0, dtype)
        if replay:
            draw.trainer, draw.trainer_routes = draw.contexts.forward(0, "float32", routes, f"of {dtype}")
        draw.sides |= {"rollout_routes": routes, "trainer_routes": draw.trainer_routes}

    return plant


def labelled(draw: Draw) -> None:
    """Numerics alone, with every column that a fault could be told from."""
    numerics()(draw)
    since = np.tile(np.arange(LENGTH) % AGAIN, SEQUENCES)
    draw.sides |= {
        "since_resume": np.where(np.tile(np.arange(LENGTH), SEQUENCES) < AGAIN, -1, since),
        "replica": draw.sequence % 4,
        "version": 10 - draw.sequence % 5,
        "current_version": np.full(len(draw.sequence), 10),
    }


def raw(temperature: float) -> Callable[[Draw], None]:
    def plant(draw: Draw) -> None:
        draw.shown = draw.law
        draw.law, draw.trainer = draw.law / temperature, draw.trainer / temperature

    return plant


def at_temperature(temperature: float) -> Callable[[Draw], None]:
    def plant(draw: Draw) -> None:
        draw.law = draw.law / temperature

    return plant


def top_p(bound: float) -> Callable[[Draw], None]:
    def plant(draw: Draw) -> None:
        order = np.argsort(-draw.law, axis=1)
        ranked = np.take_along_axis(draw.law, order, axis=1)
        chances = np.exp(ranked - ranked[:, :1])
        chances /= chances.sum(axis=1, keepdims=True)
        kept = np.zeros(draw.law.shape, bool)
        np.put_along_axis(kept, order, np.cumsum(chances, axis=1) - chances < bound, axis=1)
        draw.law = np.where(kept, draw.law, -np.inf)

    return plant


def top_k(bound: int) -> Callable[[Draw], None]:
    def plant(draw: Draw) -> None:
        least = -np.partition(-draw.law, bound - 1, axis=1)[:, bound - 1 : bound]
        draw.law = np.where(draw.law >= least, draw.law, -np.inf)

    return plant


def shifted(step: int) -> Callable[[Draw], None]:
    def plant(draw: Draw) -> None:
        draw.sides["trainer_logprob"] = lambda out: np.roll(out["trainer_logprob"].reshape(SEQUENCES, LENGTH), step, axis=1).ravel()

    return plant


def stale_replica(draw: Draw) -> None:
    replica = draw.sequence % 4
    old = draw.contexts.forward(3, "bfloat16")[0]
    draw.law = np.where((replica == 2)[:, None], old, draw.law)
    draw.sides["replica"] = replica


def version_lag(draw: Draw) -> None:
    version = 4 - draw.sequence % 5
    laws = np.stack([draw.contexts.forward(v, "bfloat16")[0] for v in range(5)])
    draw.law = laws[version, np.arange(len(version))]
    draw.trainer = draw.contexts.forward(4, "float32")[0]
    draw.sides |= {"version": version, "current_version": np.full(len(version), 4)}


def versions(true: Callable[[Any], Any]) -> Callable[[Draw], None]:
    def plant(draw: Draw) -> None:
        tags = 2 + draw.sequence % 3
        rows = np.arange(len(tags))
        draw.law = np.stack([draw.contexts.forward(v, "bfloat16")[0] for v in range(5)])[true(tags), rows]
        scores = [draw.contexts.forward(v, "float32")[0] for v in range(5)]
        draw.trainer = np.stack(scores)[tags, rows]
        draw.sides |= {"version": tags, "by_version": {v: draw.logprobs(scores[v]) for v in range(1, 5)}}

    return plant


def forgotten(draw: Draw) -> None:
    draw.law = draw.contexts.forgetful
    since = np.tile(np.arange(LENGTH) % AGAIN, SEQUENCES)
    draw.sides["since_resume"] = np.where(np.tile(np.arange(LENGTH), SEQUENCES) < AGAIN, -1, since)


def lost_weights(draw: Draw) -> None:
    draw.trainer = draw.contexts.forward(-1, "float32")[0]


def rerouted(change: Callable[[Any], Any], key: str, shown: Callable[[Any], Any] | None = None) -> Callable[[Draw], None]:
    """The trainer replays routes that are wrong; ``shown`` is what a column says of them, where that is something else."""

    def plant(draw: Draw) -> None:
        wrong = change(draw.engine_routes)
        draw.trainer, _ = draw.contexts.forward(0, "float32", wrong, key)
        draw.sides |= {"rollout_routes": draw.engine_routes, "trainer_routes": wrong if shown is None else shown(wrong)}

    return plant


def by_token(routes: Any) -> Any:
    return np.roll(routes.reshape(SEQUENCES, LENGTH, *routes.shape[1:]), 1, axis=1).reshape(routes.shape)


def by_layer(routes: Any) -> Any:
    return np.roll(routes, 1, axis=1)


def dense_shown(routes: Any) -> Any:
    out = routes.copy()
    out[:, 0] = 0
    return out


def polluted(routes: Any) -> Any:
    rng = np.random.default_rng(0)
    out = routes.copy()
    hit = rng.random(len(routes)) < 0.2
    out[hit] = np.argsort(rng.random((int(hit.sum()), routes.shape[1], 8)), axis=2)[:, :, : routes.shape[2]]
    return out


def not_finite(draw: Draw) -> None:
    draw.sides["trainer_logprob"] = lambda out: np.where(draw.rng.random(len(draw.sequence)) < 1e-3, np.nan, out["trainer_logprob"])


NUMERICS = "numerics only"
FAULTS: Mapping[str, tuple[str, Callable[[Draw], None]]] = {
    "numerics, bf16": (NUMERICS, numerics()),
    "numerics, bf16, replayed": (NUMERICS, numerics(replay=True)),
    "numerics, fp16": (NUMERICS, numerics("float16")),
    "numerics, float32": (NUMERICS, numerics("float32")),
    "numerics, every column": (NUMERICS, labelled),
    "raw logprobs, T=0.6": ("temperature or logprob mode", raw(0.6)),
    "raw logprobs, T=0.8": ("temperature or logprob mode", raw(0.8)),
    "raw logprobs, T=1.2": ("temperature or logprob mode", raw(1.2)),
    "trainer temperature, T=0.7": ("temperature or logprob mode", at_temperature(0.7)),
    "top-p 0.95": ("truncated support (top-p or top-k)", top_p(0.95)),
    "top-p 0.90": ("truncated support (top-p or top-k)", top_p(0.90)),
    "top-k 8": ("truncated support (top-p or top-k)", top_k(8)),
    "off by one, late": ("off by one", shifted(1)),
    "off by one, early": ("off by one", shifted(-1)),
    "stale replica": ("stale replica", stale_replica),
    "version lag": ("staleness", version_lag),
    "wrong version": ("wrong version scored", versions(lambda tags: tags - 1)),
    "stuck weights": ("stale engine weights", versions(np.ones_like)),
    "resume without context": ("resume boundary", forgotten),
    "lost weights": ("unrelated weights", lost_weights),
    "routes shifted by a token": ("routes shifted by a token", rerouted(by_token, "token")),
    "routes shifted by a layer": ("routes shifted by a layer", rerouted(by_layer, "layer")),
    "dense layer not skipped": ("routes shifted by dense layers", rerouted(by_layer, "layer", dense_shown)),
    "capture polluted": ("polluted capture", rerouted(polluted, "polluted")),
    "not finite": ("not finite", not_finite),
}
"""Cases by name: the class that they are of, and what plants it."""
