"""Gap faults: pairs of logprobs with one known cause of their difference, for testing that a
diagnosis names it.

Every data set has the numerical noise of a healthy pair of engines
(``tests.support.gap_profiles``), and at most one fault on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.gap_profiles import PROFILES, GapProfile, bank, noise_scale

__all__ = ["GAP_FAULTS", "GapWorld", "gap_columns"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GapWorld:
    """Size and noise of a data set: ``sequences`` of ``length`` tokens, ``layers`` of ``experts``
    of which ``top_k`` are chosen.
    """

    sequences: int = 60
    length: int = 500
    layers: int = 6
    experts: int = 32
    top_k: int = 4
    flip: float = 0.012
    profile: GapProfile = field(default_factory=lambda: PROFILES["moe-bf16"])


def gap_columns(fault: str, *, seed: int, world: GapWorld | None = None) -> dict[str, Any]:
    """Columns (``rollproof.gap.token_pairs.COLUMNS``) of a data set with ``fault``, a key of
    ``GAP_FAULTS``; ``numerics only`` is none.
    """
    draw = _Draw(world or GapWorld(), np.random.default_rng(seed))
    GAP_FAULTS[fault](draw)
    return draw.table()


class _Draw:
    """One data set in the making: what was sampled, by which law, and what either side says about
    it.
    """

    def __init__(self, world: GapWorld, rng: np.random.Generator) -> None:
        self.world, self.rng = world, rng
        self.shape = (world.sequences, world.length)
        self.logits = bank(world.sequences * world.length, rng)
        scale = noise_scale(world.profile, *self.shape, rng).reshape(-1, 1)
        self.trainer_logits = self.logits + scale * rng.standard_normal(self.logits.shape)
        self.law: Floats = self.logits
        self.shown: Floats | None = None
        self.columns: dict[str, Any] = {}
        self._sampled: npt.NDArray[np.int64] | None = None

    @property
    def sampled(self) -> npt.NDArray[np.int64]:
        """``(tokens,)``: the sampled candidates, by Gumbel noise on the law."""
        found = self._sampled
        if found is None:
            found = self._sampled = np.asarray(
                np.argmax(self.law + self.rng.gumbel(size=self.law.shape), axis=1)
            )
        return found

    def logprobs(self, logits: Floats) -> Floats:
        top = logits.max(axis=1, keepdims=True)
        total = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
        return np.asarray(logits[np.arange(len(logits)), self.sampled] - total)

    def drifted(self, amount: float) -> Floats:
        """Logits of other weights: a drift of the whole distribution, the same in direction for all
        tokens of a sequence.
        """
        direction = self.rng.standard_normal((self.world.sequences, 1, self.logits.shape[1])) * 0.7
        own = self.rng.standard_normal((*self.shape, self.logits.shape[1])) * 0.7
        return np.asarray((amount * (direction + own)).reshape(self.logits.shape))

    def routes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Native routes of both sides ``(tokens, layers, top_k)``, which differ by near-ties."""
        w = self.world
        scores = self.rng.standard_normal((w.sequences * w.length, w.layers, w.experts))
        other = scores + w.flip * self.rng.standard_normal(scores.shape)
        left, right = (
            np.argpartition(-s, w.top_k - 1, axis=2)[:, :, : w.top_k] for s in (scores, other)
        )
        return left, right

    def table(self) -> dict[str, Any]:
        sequences = np.repeat(np.arange(self.world.sequences), self.world.length)
        out = {
            "sequence_id": sequences,
            "rollout_logprob": self.logprobs(self.law if self.shown is None else self.shown),
            "trainer_logprob": self.logprobs(self.trainer_logits),
            "mask": np.ones(len(sequences), bool),
            "position": np.tile(np.arange(self.world.length), self.world.sequences),
        }
        return {
            **out,
            **{
                name: value(out) if callable(value) else value
                for name, value in self.columns.items()
            },
        }


def _numerics(draw: _Draw) -> None:
    left, right = draw.routes()
    draw.columns |= {"rollout_routes": left, "trainer_routes": right}


def _raw_logprobs(temperature: float) -> Callable[[_Draw], None]:
    """Sampled at a temperature that the trainer applies, while the engine reports logprobs from
    before it.
    """

    def plant(draw: _Draw) -> None:
        draw.law = draw.logits / temperature
        draw.shown = draw.logits
        draw.trainer_logits = draw.trainer_logits / temperature

    return plant


def _trainer_temperature(temperature: float) -> Callable[[_Draw], None]:
    """Sampled and reported at a temperature that the trainer does not apply."""

    def plant(draw: _Draw) -> None:
        draw.law = draw.logits / temperature

    return plant


def _top_p(bound: float) -> Callable[[_Draw], None]:
    """Sampled from a truncated support and reported by it; the trainer scores over the whole
    vocabulary.
    """

    def plant(draw: _Draw) -> None:
        order = np.argsort(-draw.logits, axis=1)
        ranked = np.take_along_axis(draw.logits, order, axis=1)
        chances = np.exp(ranked - ranked[:, :1])
        chances /= chances.sum(axis=1, keepdims=True)
        included = np.cumsum(chances, axis=1) - chances < bound
        mask = np.zeros_like(included)
        np.put_along_axis(mask, order, included, axis=1)
        draw.law = np.where(mask, draw.logits, -np.inf)

    return plant


def _top_k(bound: int) -> Callable[[_Draw], None]:
    def plant(draw: _Draw) -> None:
        threshold = -np.partition(-draw.logits, bound - 1, axis=1)[:, bound - 1 : bound]
        draw.law = np.where(draw.logits >= threshold, draw.logits, -np.inf)

    return plant


def _shifted(step: int) -> Callable[[_Draw], None]:
    """The trainer's logprobs stand ``step`` places off."""

    def plant(draw: _Draw) -> None:
        draw.columns["trainer_logprob"] = lambda out: np.roll(
            out["trainer_logprob"].reshape(draw.shape), step, axis=1
        ).ravel()

    return plant


def _stale_replica(draw: _Draw) -> None:
    """One of four replicas samples from older weights under the current label."""
    replica = np.arange(draw.world.sequences) % 4
    old = np.repeat(replica == 2, draw.world.length)[:, None]
    draw.law = draw.logits + np.where(old, draw.drifted(0.25), 0.0)
    draw.columns["replica"] = np.repeat(replica, draw.world.length)


def _version_lag(draw: _Draw) -> None:
    """Scored under the current weights only: the difference grows with the age of the weights that
    sampled.
    """
    version = 10 - np.arange(draw.world.sequences) % 5
    step = draw.drifted(0.12)
    draw.law = draw.logits + step * np.repeat(10 - version, draw.world.length)[:, None]
    draw.columns |= {
        "version": np.repeat(version, draw.world.length),
        "current_version": np.full(draw.law.shape[0], 10),
    }


def _versions(draw: _Draw, true: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]) -> None:
    """Logprobs under four versions at hand; the engine sampled from version ``true(tag)``."""
    tag = 2 + np.arange(draw.world.sequences) % 3
    steps = [draw.drifted(0.15) for _ in range(5)]
    weights = [draw.logits + sum(steps[1 : v + 1], np.zeros_like(draw.logits)) for v in range(5)]
    noise = draw.trainer_logits - draw.logits
    tags = np.repeat(tag, draw.world.length)
    sampler = np.repeat(true(tag), draw.world.length)
    draw.law = np.stack(weights)[sampler, np.arange(len(tags))]
    draw.trainer_logits = np.stack(weights)[tags, np.arange(len(tags))] + noise
    draw.columns |= {
        "version": tags,
        "by_version": {v: draw.logprobs(weights[v] + noise) for v in range(1, 5)},
    }


def _every_version(draw: _Draw) -> None:
    """Scores under several versions, and every tag names the version that sampled: no fault."""
    _versions(draw, lambda tag: tag)


def _wrong_version(draw: _Draw) -> None:
    """The tag names a version one later than the one that sampled."""
    _versions(draw, lambda tag: tag - 1)


def _stuck_weights(draw: _Draw) -> None:
    """The engine answers from version 1 whatever the tag says: updates were lost, or smaller than
    its precision.
    """
    _versions(draw, lambda tag: np.ones_like(tag))


def _arrived(share: float, *, by_column: bool = False) -> Callable[[_Draw], None]:
    """A share of each update arrived at the engine: its weights lie between the previous and the
    tagged ones. The scores of the previous ones are in one column, or are those of each version.
    """

    def plant(draw: _Draw) -> None:
        tag = np.repeat(2 + np.arange(draw.world.sequences) % 3, draw.world.length)
        steps = [draw.drifted(0.15) for _ in range(5)]
        weights = np.stack(
            [draw.logits + sum(steps[1 : v + 1], np.zeros_like(draw.logits)) for v in range(5)]
        )
        noise = draw.trainer_logits - draw.logits
        rows = np.arange(len(tag))
        new, old = weights[tag, rows], weights[tag - 1, rows]
        draw.law = old + share * (new - old)
        draw.trainer_logits = new + noise
        if by_column:
            draw.columns["previous_logprob"] = draw.logprobs(old + noise)
        else:
            draw.columns |= {
                "version": tag,
                "by_version": {v: draw.logprobs(weights[v] + noise) for v in range(1, 5)},
            }

    return plant


def _end_forced(draw: _Draw) -> None:
    """The last token of each sequence was forced by the stack, which reports 0 for it."""
    draw.columns["rollout_logprob"] = lambda out: np.where(
        np.tile(np.arange(draw.world.length) == draw.world.length - 1, draw.world.sequences),
        0.0,
        out["rollout_logprob"],
    )


def _packed(draw: _Draw) -> None:
    """Three sequences share a row of the trainer, and see the end of the one before them."""
    index = np.arange(draw.world.sequences) % 3
    place = np.arange(draw.world.length)
    seen = np.where(index[:, None] > 0, np.exp(-place / 40)[None], 0.0).reshape(-1, 1)
    draw.trainer_logits = draw.trainer_logits + seen * draw.rng.standard_normal(draw.logits.shape)
    draw.columns["pack_index"] = np.repeat(index, draw.world.length)


def _one_group(draw: _Draw) -> None:
    """Prompts with an image are preprocessed in two ways."""
    image = np.arange(draw.world.sequences) % 3 == 0
    noise = 0.25 * draw.rng.standard_normal(draw.logits.shape)
    draw.trainer_logits = draw.trainer_logits + np.where(
        np.repeat(image, draw.world.length)[:, None], noise, 0.0
    )
    draw.columns["groups"] = {
        "modality": np.repeat(np.where(image, "image", "text"), draw.world.length),
        "source": np.repeat(np.arange(draw.world.sequences) % 2, draw.world.length),
    }


def _swapped(draw: _Draw) -> None:
    """The trainer scored two thirds of the samples as each other's."""
    own = draw.trainer_logits.reshape(*draw.shape, -1)
    moved = np.arange(draw.world.sequences) % 3 > 0
    own[moved] = own[np.roll(np.flatnonzero(moved), 1)]
    draw.trainer_logits = own.reshape(draw.logits.shape)


def _boundary(draw: _Draw) -> None:
    """The first tokens after a resume are scored against a context that the engine did not have."""
    since = np.tile(np.arange(draw.world.length) % 100, draw.world.sequences)
    since = np.where(np.tile(np.arange(draw.world.length), draw.world.sequences) < 100, -1, since)
    hit = ((since >= 0) & (since < 2))[:, None]
    draw.trainer_logits = draw.trainer_logits + np.where(
        hit, 2.5 * draw.rng.standard_normal(draw.logits.shape), 0.0
    )
    draw.columns["since_resume"] = since


def _lost_weights(draw: _Draw) -> None:
    """The engine or the trainer lost its weights: the two distributions have little in common."""
    draw.trainer_logits = draw.trainer_logits[draw.rng.permutation(len(draw.logits))]


def _rerouted(
    draw: _Draw, change: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]], harm: float = 0.3
) -> None:
    left, right = draw.routes()
    draw.trainer_logits = draw.trainer_logits + harm * draw.rng.standard_normal(draw.logits.shape)
    draw.columns |= {"rollout_routes": left, "trainer_routes": change(left)}
    del right


def _route_token_shift(draw: _Draw) -> None:
    w = draw.world
    _rerouted(
        draw,
        lambda left: np.roll(
            left.reshape(w.sequences, w.length, w.layers, w.top_k), 1, axis=1
        ).reshape(left.shape),
    )


def _route_layer_shift(draw: _Draw) -> None:
    _rerouted(draw, lambda left: np.roll(left, 1, axis=1))


def _route_dense_shift(draw: _Draw) -> None:
    """Columns of a dense first layer are taken for those of the first MoE layer: zeros, then every
    layer one late.
    """

    def change(left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        out = np.roll(left, 1, axis=1)
        out[:, 0] = 0
        return out

    _rerouted(draw, change)


def _route_pollution(draw: _Draw) -> None:
    """A draft model's rows overwrite a fifth of the captured rows."""

    def change(left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        hit = draw.rng.random(len(left)) < 0.2
        noise = np.argsort(
            draw.rng.random((int(hit.sum()), left.shape[1], draw.world.experts)), axis=2
        )[:, :, : left.shape[2]]
        out = left.copy()
        out[hit] = noise
        return out

    _rerouted(draw, change, harm=0.15)


def _not_finite(draw: _Draw) -> None:
    draw.columns["trainer_logprob"] = lambda out: np.where(
        draw.rng.random(len(out["trainer_logprob"])) < 1e-3, np.nan, out["trainer_logprob"]
    )


GAP_FAULTS: Mapping[str, Callable[[_Draw], None]] = {
    "numerics only": _numerics,
    "numerics only, every version": _every_version,
    "raw logprobs, T=0.6": _raw_logprobs(0.6),
    "raw logprobs, T=0.8": _raw_logprobs(0.8),
    "raw logprobs, T=1.2": _raw_logprobs(1.2),
    "trainer temperature, T=0.7": _trainer_temperature(0.7),
    "top-p 0.95": _top_p(0.95),
    "top-p 0.90": _top_p(0.90),
    "top-k 8": _top_k(8),
    "off by one, late": _shifted(1),
    "off by one, early": _shifted(-1),
    "stale replica": _stale_replica,
    "version lag": _version_lag,
    "wrong version": _wrong_version,
    "stuck weights": _stuck_weights,
    "update arrived by 60 %": _arrived(0.6),
    "update arrived by 20 %": _arrived(0.2),
    "update arrived by 60 %, one column": _arrived(0.6, by_column=True),
    "update did not arrive, one column": _arrived(0.0, by_column=True),
    "end token forced": _end_forced,
    "packed without a block mask": _packed,
    "one group differs": _one_group,
    "samples swapped": _swapped,
    "resume boundary": _boundary,
    "lost weights": _lost_weights,
    "routes shifted by a token": _route_token_shift,
    "routes shifted by a layer": _route_layer_shift,
    "dense layer not skipped": _route_dense_shift,
    "capture polluted": _route_pollution,
    "not finite": _not_finite,
}
"""Faults by name, each a function that plants it."""
