"""A tiny real model's logprobs with one known cause of their difference, for ``gap_confusion.py
--real``. Needs torch and transformers.

The model has four layers; its head and routers have the spread of a trained one's, and what a block
adds is damped until bf16 parts from float32 by about what it does there (in a random network of
full gain rounding grows into chaos: k3 0.08). Contexts are text that it sampled itself; at every
place of them the engine's distribution is its bf16 forward and the trainer's its float32 forward,
so that the noise is real, with real flips of experts, and so is what wrong routes, other versions,
lost context and lost weights do. Tokens are drawn from the distribution at each place of a context:
of one context's forwards any number of data sets are drawn. Versions of the weights part by noise
of a part in a hundred of each matrix.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollproof.fakes.tiny_models import make_checkpoint
from rollproof.replay.hf import hf_record, hf_replay

SEQUENCES, LENGTH, BATCH = 60, 500, 12
SWEEPS = 3
DAMPED = 0.2
"""What the blocks' last matrices are multiplied by."""
STEP = 0.01
"""An update's size, in parts of each matrix's spread."""
AGAIN = 100
"""Tokens of a segment, where rollouts are resumed."""
OTHER = -1
"""The version of unrelated weights."""


class Distribution:
    """The distributions of a forward at every place: logits ``(places, vocabulary)``."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits

    @cached_property
    def _chances(self) -> Any:
        return np.exp(self.logits - self.logits.max(axis=1, keepdims=True), dtype=np.float64)

    def draw(self, rng: np.random.Generator) -> Any:
        """A token at every place, ``(places,)``."""
        cumulative = self._chances.cumsum(axis=1)
        return (rng.random((len(cumulative), 1)) * cumulative[:, -1:] >= cumulative).sum(axis=1)

    def logprobs(self, tokens: Any) -> Any:
        rows = np.arange(len(tokens))
        return np.log(self._chances[rows, tokens]) - np.log(self._chances.sum(axis=1))

    def at(self, temperature: float) -> Distribution:
        return Distribution(self.logits / np.float32(temperature))

    def within(self, allowed: Any) -> Distribution:
        return Distribution(np.where(allowed, self.logits, np.float32(-np.inf)))

    @staticmethod
    def mixed(distributions: Sequence[Distribution], which: Any) -> Distribution:
        """At place ``i`` the distribution ``distributions[which[i]]``."""
        out = distributions[0].logits.copy()
        for number in np.unique(which):
            out[which == number] = distributions[number].logits[which == number]
        return Distribution(out)


class Contexts:
    """Sequences ``(60, 501)`` of version 0's text, and forwards over them: ``Distribution``, routes
    ``(30000, layers, top_k)``.
    """

    def __init__(self, seed: int, family: str = "qwen3_moe") -> None:
        self.seed, self.family = seed, family
        self.random = torch.Generator().manual_seed(seed)
        self._forwards: dict[Any, Any] = {}
        self._models: dict[Any, Any] = {}

    def model(self, version: int, dtype: str = "float32") -> Any:
        """Version 0 is the checkpoint; each further one is an update more."""
        if version not in self._models:
            from transformers import AutoModelForCausalLM

            with tempfile.TemporaryDirectory() as folder:
                path = make_checkpoint(
                    Path(folder) / "model", self.family, seed=self.seed + 1000 * (version == OTHER)
                )
                own = AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, local_files_only=True
                ).eval()
            with torch.no_grad():
                for name, parameter in own.named_parameters():
                    if "o_proj" in name or "down_proj" in name:
                        parameter.mul_(DAMPED)
                for step in range(1, version + 1):
                    random = torch.Generator().manual_seed(step)
                    for name, parameter in own.named_parameters():
                        if parameter.ndim > 1 and "lm_head" not in name:
                            parameter.add_(
                                STEP
                                * parameter.std()
                                * torch.randn(parameter.shape, generator=random)
                            )
            self._models[version] = own
        if dtype == "float32":
            return self._models[version]
        if (version, dtype) not in self._models:
            import copy

            self._models[version, dtype] = copy.deepcopy(self._models[version]).to(
                getattr(torch, dtype)
            )
        return self._models[version, dtype]

    @cached_property
    def ids(self) -> Any:
        """Random ids, all drawn again from the model's distribution at their place, three times
        over: text of its own, in three forwards.
        """
        own = self.model(0)
        ids = torch.randint(
            3, own.config.vocab_size, (SEQUENCES, LENGTH + 1), generator=self.random
        )
        with torch.no_grad():
            for _ in range(SWEEPS):
                for begin in range(0, SEQUENCES, BATCH):
                    distribution = own(
                        ids[begin : begin + BATCH, :-1], use_cache=False
                    ).logits.softmax(-1)
                    drawn = torch.multinomial(distribution.flatten(0, 1), 1, generator=self.random)
                    ids[begin : begin + BATCH, 1:] = drawn.reshape(-1, LENGTH)
        return ids

    def forward(
        self,
        version: int = 0,
        dtype: str = "float32",
        routes: Any = None,
        key: str = "",
        batch: int = BATCH,
    ) -> tuple[Distribution, Any]:
        """The distribution, and the routes that were executed; ``key`` names the routes, ``batch``
        sequences run at once.
        """
        name = (version, dtype, key, batch)
        if name not in self._forwards:
            own = self.model(version, dtype)
            logits, executed = [], []
            with torch.no_grad():
                for begin in range(0, SEQUENCES, batch):
                    ids = self.ids[begin : begin + batch, :-1]
                    if routes is None:
                        with hf_record(own) as recorded:
                            logits.append(own(ids, use_cache=False).logits.float().flatten(0, 1))
                        executed.append(recorded.routes)
                    else:
                        rows = torch.from_numpy(
                            np.ascontiguousarray(routes[begin * LENGTH : (begin + batch) * LENGTH])
                        )
                        with hf_replay(own, rows):
                            logits.append(own(ids, use_cache=False).logits.float().flatten(0, 1))
                        executed.append(rows)
            self._forwards[name] = torch.cat(logits).numpy(), torch.cat(executed).numpy()
        logits, executed = self._forwards[name]
        return Distribution(logits), executed

    @cached_property
    def forgetful(self) -> Any:
        """Logits of the engine whose resumed calls saw nothing of what came before the last two
        tokens.
        """
        out = self.forward(0, "bfloat16")[0].logits.reshape(SEQUENCES, LENGTH, -1).copy()
        own = self.model(0, "bfloat16")
        with torch.no_grad():
            for begin in range(AGAIN, LENGTH, AGAIN):
                for back in (0, 1):
                    ids = self.ids[:, begin - 1 : begin + 1 + back]
                    out[:, begin + back] = own(ids, use_cache=False).logits[:, -1].float().numpy()
        return out.reshape(SEQUENCES * LENGTH, -1)


@dataclass
class Case:
    """What data sets are drawn from: the engine's ``distribution``, what it has ``shown`` of it
    (default: the same), the trainer's distribution.

    ``sides`` are further columns, or functions of the random numbers and of the columns so far;
    ``by_version`` the trainer's distributions under several versions.
    """

    distribution: Distribution
    trainer: Distribution
    shown: Distribution | None = None
    sides: dict[str, Any] = field(default_factory=dict)
    by_version: Mapping[int, Distribution] | None = None

    def draw(self, seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        tokens = self.distribution.draw(rng)
        out = {
            "sequence_id": OWNER,
            "position": PLACE,
            "mask": np.ones(len(OWNER), bool),
            "rollout_logprob": (self.shown or self.distribution).logprobs(tokens),
            "trainer_logprob": self.trainer.logprobs(tokens),
        }
        if self.by_version:
            out["by_version"] = {
                version: distribution.logprobs(tokens)
                for version, distribution in self.by_version.items()
            }
        return out | {
            name: value(rng, out) if callable(value) else value
            for name, value in self.sides.items()
        }


OWNER = np.repeat(np.arange(SEQUENCES), LENGTH)
PLACE = np.tile(np.arange(LENGTH), SEQUENCES)
SINCE = np.where(PLACE < AGAIN, -1, PLACE % AGAIN)
Plant = Callable[[Contexts], Case]


def numerics(dtype: str = "bfloat16", replay: bool = False, batch: int = BATCH) -> Plant:
    def plant(contexts: Contexts) -> Case:
        distribution, routes = contexts.forward(0, dtype, batch=batch)
        trainer, own = (
            contexts.forward(0, "float32", routes, f"of {dtype}")
            if replay
            else contexts.forward(0, "float32")
        )
        return Case(distribution, trainer, sides={"rollout_routes": routes, "trainer_routes": own})

    return plant


def labelled(contexts: Contexts) -> Case:
    """Numerics alone, with every column that a fault could be diagnosed from."""
    case = numerics()(contexts)
    case.sides |= {
        "since_resume": SINCE,
        "replica": OWNER % 4,
        "version": 10 - OWNER % 5,
        "current_version": np.full(len(OWNER), 10),
    }
    return case


def scored_rightly(contexts: Contexts) -> Case:
    """Numerics alone, with the scores under other versions next to those of the right one."""
    return versions(lambda tags: tags)(contexts)


def _plain(contexts: Contexts) -> tuple[Distribution, Distribution]:
    return contexts.forward(0, "bfloat16")[0], contexts.forward(0, "float32")[0]


def raw(temperature: float) -> Plant:
    def plant(contexts: Contexts) -> Case:
        distribution, trainer = _plain(contexts)
        return Case(distribution.at(temperature), trainer.at(temperature), shown=distribution)

    return plant


def at_temperature(temperature: float) -> Plant:
    def plant(contexts: Contexts) -> Case:
        distribution, trainer = _plain(contexts)
        return Case(distribution.at(temperature), trainer)

    return plant


def top_p(bound: float) -> Plant:
    def plant(contexts: Contexts) -> Case:
        distribution, trainer = _plain(contexts)
        order = np.argsort(-distribution.logits, axis=1)
        chances = (
            torch.from_numpy(np.take_along_axis(distribution.logits, order, axis=1))
            .double()
            .softmax(1)
            .numpy()
        )
        allowed = np.zeros(distribution.logits.shape, bool)
        np.put_along_axis(allowed, order, np.cumsum(chances, axis=1) - chances < bound, axis=1)
        return Case(distribution.within(allowed), trainer)

    return plant


def top_k(bound: int) -> Plant:
    def plant(contexts: Contexts) -> Case:
        distribution, trainer = _plain(contexts)
        least = -np.partition(-distribution.logits, bound - 1, axis=1)[:, bound - 1 : bound]
        return Case(distribution.within(distribution.logits >= least), trainer)

    return plant


def shifted(step: int) -> Plant:
    def plant(contexts: Contexts) -> Case:
        def moved(_: Any, out: Any) -> Any:
            return np.roll(out["trainer_logprob"].reshape(SEQUENCES, LENGTH), step, axis=1).ravel()

        return Case(*_plain(contexts), sides={"trainer_logprob": moved})

    return plant


def stale_replica(contexts: Contexts) -> Case:
    distribution, trainer = _plain(contexts)
    old = contexts.forward(3, "bfloat16")[0]
    return Case(
        Distribution.mixed([distribution, old], (OWNER % 4 == 2).astype(int)),
        trainer,
        sides={"replica": OWNER % 4},
    )


def version_lag(contexts: Contexts) -> Case:
    version = 4 - OWNER % 5
    distributions = [contexts.forward(v, "bfloat16")[0] for v in range(5)]
    sides = {"version": version, "current_version": np.full(len(version), 4)}
    return Case(
        Distribution.mixed(distributions, version), contexts.forward(4, "float32")[0], sides=sides
    )


def versions(true: Callable[[Any], Any]) -> Plant:
    def plant(contexts: Contexts) -> Case:
        tags = 2 + OWNER % 3
        scores = [contexts.forward(v, "float32")[0] for v in range(5)]
        distribution = Distribution.mixed(
            [contexts.forward(v, "bfloat16")[0] for v in range(5)], true(tags)
        )
        return Case(
            distribution,
            Distribution.mixed(scores, tags),
            sides={"version": tags},
            by_version={v: scores[v] for v in range(1, 5)},
        )

    return plant


def forgotten(contexts: Contexts) -> Case:
    return Case(
        Distribution(contexts.forgetful), _plain(contexts)[1], sides={"since_resume": SINCE}
    )


def lost_weights(contexts: Contexts) -> Case:
    return Case(_plain(contexts)[0], contexts.forward(OTHER, "float32")[0])


def rerouted(
    change: Callable[[Any], Any], key: str, shown: Callable[[Any], Any] | None = None
) -> Plant:
    """The trainer replays routes that are wrong; ``shown`` is what a column says of them, where
    that is something else.
    """

    def plant(contexts: Contexts) -> Case:
        distribution, routes = contexts.forward(0, "bfloat16")
        wrong = change(routes)
        trainer, _ = contexts.forward(0, "float32", wrong, key)
        return Case(
            distribution,
            trainer,
            sides={
                "rollout_routes": routes,
                "trainer_routes": wrong if shown is None else shown(wrong),
            },
        )

    return plant


def by_token(routes: Any) -> Any:
    return np.roll(routes.reshape(SEQUENCES, LENGTH, *routes.shape[1:]), 1, axis=1).reshape(
        routes.shape
    )


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
    out[hit] = np.argsort(rng.random((int(hit.sum()), routes.shape[1], 8)), axis=2)[
        :, :, : routes.shape[2]
    ]
    return out


def not_finite(contexts: Contexts) -> Case:
    def torn(rng: Any, out: Any) -> Any:
        return np.where(rng.random(len(OWNER)) < 1e-3, np.nan, out["trainer_logprob"])

    return Case(*_plain(contexts), sides={"trainer_logprob": torn})


NUMERICS = "numerics only"
FAULTS: Mapping[str, tuple[str, Plant]] = {
    "numerics, bf16": (NUMERICS, numerics()),
    "numerics, bf16, replayed": (NUMERICS, numerics(replay=True)),
    "numerics, fp16": (NUMERICS, numerics("float16")),
    "numerics, float32, other batch": (NUMERICS, numerics("float32", batch=20)),
    "numerics, every column": (NUMERICS, labelled),
    "numerics, every version": (NUMERICS, scored_rightly),
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
    "dense layer not skipped": (
        "routes shifted by dense layers",
        rerouted(by_layer, "layer", dense_shown),
    ),
    "capture polluted": ("polluted capture", rerouted(polluted, "polluted")),
    "not finite": ("not finite", not_finite),
}
"""Cases by name: the class that they are of, and what plants it."""
