"""Batches that test a correction: corner cases, and random ones of each situation.

All logprobs are numbers that the contract's ``dtype`` represents, so that the exact result is known
for what the subject really gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollproof.core.correction_terms import (
    CorrectionTerms,
    Level,
    LossKind,
    Missing,
    Normalise,
    Pair,
)
from rollproof.core.events.corrections import Purpose
from rollproof.core.records import FloatArray, IntArray
from rollproof.corrections.expected_correction import ExpectedCorrection, Inputs
from rollproof.corrections.rounding import as_type, limits_of

__all__ = ["CorrectionCase", "correction_cases"]

# ages go up to 3 + max_staleness: with at most 4, no version is below 0, as padding's is
_VERSION = 7
# 0.5, halved so often, is about 1e-4: nearer to 1 than a bound in use would be
_ATTEMPTS = 12
_LARGEST_LOG = 40.0
"""Size of the log ratio of a token that a stack should survive: a token of certainty that the
trainer holds to be impossible."""
# from what two kernels differ by to what a veto rejects: the logarithm of 1e-4 is -9.2
_STEPS = (0.02, 0.1, 0.3, 0.7, 1.5, 3.0, 6.0, 12.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectionCase:
    """A batch, and the situation that it was made for."""

    name: str
    purpose: Purpose
    inputs: Inputs


def correction_cases(
    terms: CorrectionTerms, seed: int = 0, draws: int = 4
) -> Iterator[CorrectionCase]:
    """Yield the cases that fit ``terms``: the same for the same arguments.

    Args:
        terms: What the subject promises.
        seed: The seed of the random batches.
        draws: How many batches are drawn of each situation.
    """
    for purpose, make in _MAKERS.items():
        for number in range(draws):
            # each batch has a generator of its own: more draws leave the first ones as they are
            maker = _Maker(
                terms, np.random.default_rng([seed, list(Purpose).index(purpose), number])
            )
            for name, inputs in make(maker, number):
                yield CorrectionCase(name=f"{name} ({number})", purpose=purpose, inputs=inputs)


class _Maker:
    """Makes batches from log ratios."""

    def __init__(self, terms: CorrectionTerms, random: np.random.Generator) -> None:
        self.terms = terms
        self.random = random
        # garbage must not overflow by itself: that a masked ratio is infinite is no promise
        largest = np.log(limits_of(terms.computes_in).largest)
        self.garbage = float(min(_LARGEST_LOG, largest / 2.5))
        # a current policy and an interpolated one differ from two versions on
        self.age = 2 if terms.pair is Pair.INTERPOLATED_ROLLOUT else 0

    def ratios(self, shape: tuple[int, int], scale: float) -> FloatArray:
        """Draw log ratios of about ``scale``."""
        return self.random.uniform(-scale, scale, shape)

    def batch(
        self,
        log_ratios: FloatArray,
        mask: IntArray | None = None,
        *,
        certain: bool = False,
        advantages: FloatArray | None = None,
    ) -> Inputs:
        """Return a batch whose trained tokens have about these log ratios.

        Args:
            log_ratios: Of the contract's pair, ``(sequences, tokens)``.
            mask: The trained tokens (default: all).
            certain: Whether the larger probability of a token is 1.
            advantages: One for each sequence (default: drawn).
        """
        shape = log_ratios.shape
        top = np.zeros(shape) if certain else -self.random.uniform(0.05, 2.5, shape)
        # the larger probability is at `top`: neither is above 1, however large the ratio is
        first = top + np.minimum(log_ratios, 0.0)
        second = top - np.maximum(log_ratios, 0.0)
        if self.terms.pair is Pair.INTERPOLATED_ROLLOUT:
            # of a token two versions old, the interpolated policy is half way
            second = top - 2 * np.maximum(log_ratios, 0.0)
            first = second + 2 * log_ratios
        # near the first policy: mistaken for it, it gives weights of a plausible size
        other = np.minimum(first - self.random.uniform(-0.15, 0.3, shape), 0.0)
        rollout, old, current = self._placed(first, second, other)
        # of both signs, and never 0: an advantage of 0 would hide a weight from the loss
        drawn = self.random.choice([-1.5, -0.5, 0.75, 1.25], shape[0])
        own = drawn if advantages is None else advantages
        return self.typed(
            Inputs(
                rollout=rollout,
                old=old,
                current=current,
                mask=np.ones(shape, np.int64) if mask is None else mask,
                advantages=np.repeat(own[:, None], shape[1], axis=1),
                groups=np.arange(shape[0], dtype=np.int64) // 2,
                versions=np.full(shape, _VERSION - self.age, np.int64),
                current_version=_VERSION,
            )
        )

    def _placed(
        self, first: FloatArray, second: FloatArray, other: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return rollout, old and current logprobs; ``other`` is that of the third policy."""
        pair = self.terms.pair
        if pair is Pair.OLD_ROLLOUT:
            return second, first, other
        if pair is Pair.CURRENT_OLD:
            return other, second, first
        return second, other, first

    def typed(self, inputs: Inputs) -> Inputs:
        """Round the logprobs to the contract's type."""
        kind = self.terms.dtype
        return replace(
            inputs,
            rollout=as_type(inputs.rollout, kind),
            old=as_type(inputs.old, kind),
            current=as_type(inputs.current, kind),
        )

    def inside(self, make: Callable[[float], Inputs]) -> Inputs:
        """Return a batch that no bound touches: ratios are drawn nearer and nearer to 1."""
        scale = 0.5
        inputs = make(scale)
        for _ in range(_ATTEMPTS):
            expected = ExpectedCorrection(self.terms, inputs)
            below, above = expected.outside
            touched = below | above | expected.rejected | expected.undecided | expected.at_bound
            if not touched.any():
                return inputs
            scale /= 2
            inputs = make(scale)
        return inputs

    def drawn(self, shape: tuple[int, int], mask: IntArray | None = None) -> Inputs:
        """Return a batch of random ratios that no bound touches."""
        return self.inside(lambda scale: self.batch(self.ratios(shape, scale), mask))

    def mask(self, lengths: list[int], width: int, *, holes: bool = False) -> IntArray:
        """Return a mask of sequences of these lengths; ``holes``: with untrained tokens inside."""
        mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
        if holes:
            for row, length in zip(mask, lengths, strict=True):
                if length > 3:
                    # inside, as a tool's output is: the number of trained tokens is no length then
                    row[1 : 1 + length // 3] = 0
        return mask

    def with_garbage(self, inputs: Inputs) -> Inputs:
        """Put other logprobs and versions into masked places."""
        shape = inputs.mask.shape
        hidden = inputs.mask == 0

        def garbage(values: FloatArray) -> FloatArray:
            drawn = self.random.choice([0.0, -0.01, -3.0, -self.garbage / 2, -self.garbage], shape)
            return np.where(hidden, drawn, values)

        return self.typed(
            replace(
                inputs,
                rollout=garbage(inputs.rollout),
                old=garbage(inputs.old),
                current=garbage(inputs.current),
                versions=np.where(hidden, -1, inputs.versions),
            )
        )

    def with_zeros(self, inputs: Inputs) -> Inputs:
        """Put zeros into masked places, as stacks pad logprobs."""
        hidden = inputs.mask == 0
        return replace(
            inputs,
            rollout=np.where(hidden, 0.0, inputs.rollout),
            old=np.where(hidden, 0.0, inputs.old),
            current=np.where(hidden, 0.0, inputs.current),
            versions=np.where(hidden, -1, inputs.versions),
        )

    def lengths(self, count: int, most: int) -> list[int]:
        """Draw unequal lengths, the greatest of them ``most``."""
        drawn = [int(length) for length in self.random.integers(1, most, count - 1)]
        return [most, *drawn]


_Made = Iterator[tuple[str, Inputs]]


def _formula(maker: _Maker, _number: int) -> _Made:
    # one sequence and no padding: what is wrong here is the formula
    # the longest is wider than a length that a stack may round or cap at
    for shape in ((1, 1), (1, 2), (1, 5), (1, 16), (1, 33)):
        yield f"a sequence of {shape[1]} trained tokens", maker.drawn(shape)


def _direction(maker: _Maker, number: int) -> _Made:
    sign = -1.0 if number % 2 else 1.0

    def make(scale: float) -> Inputs:
        # of two sequences: a normalised weight says nothing if there is no other
        own = np.array([[sign * scale], [-sign * scale / 4]])
        inputs = maker.batch(own)
        # apart from both others, so that every other pair has another ratio
        third = np.array([[-scale / 2], [-scale / 8]])
        if maker.terms.pair is Pair.OLD_ROLLOUT:
            return maker.typed(replace(inputs, current=inputs.old + third))
        if maker.terms.pair is Pair.CURRENT_OLD:
            return maker.typed(replace(inputs, rollout=inputs.old + 3 * third))
        return maker.typed(replace(inputs, old=inputs.current + third))

    # on a single token all levels agree: only the pair can be wrong
    yield "single tokens, three logprobs", maker.inside(make)


def _bounds(maker: _Maker, number: int) -> _Made:
    terms = maker.terms
    edges = [float(np.log(bound)) for bound in (terms.lower, terms.upper) if bound is not None]
    log_bound = _observable_log_bound(terms)
    edges += [] if log_bound is None else [log_bound]
    if not edges or not terms.weights:
        return
    # 0.03 finds a bound that is a little off, and is more than float16 rounds away
    steps = (0.03, 0.4, 2.0, 5.0)
    logs = np.array([edge + sign * step for edge in edges for step in steps for sign in (-1, 1)])
    if log_bound is not None:
        # weights below it are as good as 0, and some stacks bound from above only
        logs = logs[logs > -log_bound]
    if terms.level is Level.TOKEN:
        yield "ratios on both sides of the bounds", maker.batch(logs[None, :])
        return
    length = 1 + number % 4
    for log in logs:
        share = log / length if terms.level is Level.SEQUENCE else log
        yield (
            f"a sequence with a log ratio of {log:.3g}",
            maker.batch(np.full((1, length), share)),
        )


def _observable_log_bound(terms: CorrectionTerms) -> float | None:
    """Return the log bound if it limits weights that no upper bound clamps before."""
    bound = terms.log_bound
    return None if bound is None or (terms.upper or np.inf) <= np.exp(bound) else bound


def _rejection(maker: _Maker, number: int) -> _Made:
    if not maker.terms.rejections:
        return
    rows, tokens = 2 * len(_STEPS), 5
    steps = np.repeat(np.array(_STEPS), 2)[:, None] * np.array([1.0, -1.0] * len(_STEPS))[:, None]
    noise = maker.ratios((rows, tokens), 0.01)
    signs = np.array([1.0, -1.0] * len(_STEPS)) * (-1.0 if number % 2 else 1.0)
    yield "sequences shifted as a whole", maker.batch(steps + noise, advantages=signs)
    single = noise.copy()
    single[:, 1 + number % (tokens - 1)] += steps[:, 0]
    yield "sequences with one odd token", maker.batch(single, advantages=signs)
    scales = maker.random.uniform(0.5, 1.5, (rows, tokens)) * steps
    yield "sequences of random ratios", maker.batch(scales)


def _rows(maker: _Maker, _number: int) -> _Made:
    def make(scale: float) -> Inputs:
        own = np.linspace(-scale, scale, 6)[:, None]
        return maker.batch(own + maker.ratios((6, 4), scale / 16))

    yield "sequences of equal length", maker.inside(make)


def _padding(maker: _Maker, _number: int) -> _Made:
    lengths = maker.lengths(5, 9)
    mask = maker.mask(lengths, 11, holes=True)
    if maker.terms.empty_rows:
        # an aborted sample: it is not trained, and has logprobs like any other
        mask[2] = 0
    inputs = maker.drawn(mask.shape, mask)
    yield "masked places hold other logprobs", maker.with_garbage(inputs)
    wide = maker.mask([5, 37, 2], 70, holes=True)
    yield (
        "masked places hold other logprobs, in a wide batch",
        maker.with_garbage(maker.drawn(wide.shape, wide)),
    )


def _normalisation(maker: _Maker, number: int) -> _Made:
    if maker.terms.normalise is Normalise.NONE:
        return
    mask = maker.mask(maker.lengths(6, 8), 10, holes=bool(number % 2))

    def make(scale: float) -> Inputs:
        own = np.array([1.0, 0.2, 0.7, -0.3, 0.5, 0.9])[:, None] * scale
        inputs = maker.batch(own + maker.ratios(mask.shape, scale / 16), mask)
        return replace(inputs, groups=np.array([5, 5, 5, 2, 9, 2], np.int64))

    yield "sequences and groups of unequal size", maker.with_zeros(maker.inside(make))


def _metrics(maker: _Maker, _number: int) -> _Made:
    if not maker.terms.metrics:
        return
    mask = maker.mask(maker.lengths(6, 8), 10, holes=True)
    scale = maker.random.choice([0.1, 0.5, 2.0], (6, 1))
    inputs = maker.with_garbage(maker.batch(maker.ratios(mask.shape, 1.0) * scale, mask))
    yield "sequences of unequal length", inputs
    if maker.terms.empty_rows:
        emptied = inputs.mask.copy()
        emptied[3] = 0
        yield (
            "sequences of unequal length, one without trained tokens",
            maker.with_zeros(replace(inputs, mask=emptied)),
        )


def _empty_rows(maker: _Maker, number: int) -> _Made:
    if not maker.terms.empty_rows:
        return
    mask = maker.mask([4, 0, 2, 4], 5)
    mask[3] = 0
    inputs = maker.drawn(mask.shape, mask)
    fill = maker.with_garbage if number % 2 else maker.with_zeros
    yield "an empty response and an untrained one", fill(inputs)


def _empty_batch(maker: _Maker, number: int) -> _Made:
    if not maker.terms.empty_batch or number:
        return
    mask = np.zeros((2, 3), np.int64)
    yield "no trained token at all", maker.with_zeros(maker.batch(maker.ratios((2, 3), 0.1), mask))


def _identity(maker: _Maker, number: int) -> _Made:
    mask = maker.mask(maker.lengths(4, 7), 8, holes=bool(number % 2))
    inputs = maker.batch(np.zeros(mask.shape), mask)
    equal = inputs.rollout
    yield "all logprobs are equal", replace(inputs, old=equal, current=equal)


def _extreme(maker: _Maker, _number: int) -> _Made:
    sizes = np.array([0.0, 5.0, 12.0, _LARGEST_LOG])
    logs = np.concatenate([sizes, -sizes])
    yield "log ratios up to 40", maker.batch(logs[None, :], certain=True)
    # each ratio fits float32, and the product of a sequence, exp(640), does not
    for sign in (1.0, -1.0):
        yield (
            f"16 tokens with a log ratio of {sign * _LARGEST_LOG:g} each",
            maker.batch(np.full((1, 16), sign * _LARGEST_LOG), certain=True),
        )
    # float32 overflows at 88.7: what is clamped or rejected must survive it
    overflows = np.array([[100.0, 0.1, -100.0, 0.0]])
    yield "a log ratio of 100", maker.batch(overflows, certain=True)
    impossible = maker.batch(np.zeros((1, 4)), certain=True)
    low = np.full((1, 4), -_LARGEST_LOG)
    yield "logprobs of -40", replace(impossible, rollout=low, old=low, current=low)


def _stale(maker: _Maker, _number: int) -> _Made:
    terms = maker.terms
    if terms.max_staleness is None and terms.pair is not Pair.INTERPOLATED_ROLLOUT:
        return
    oldest = 3 + (terms.max_staleness or 0)
    shape = (5, 6)
    inputs = maker.drawn(shape)
    ages = maker.random.integers(0, oldest + 1, shape)
    # a sequence that was sampled by the current weights, and one that changed them once
    ages[0], ages[1] = 0, np.repeat([oldest, 0], 3)
    # versions count from 0, however old the oldest may be
    now = max(_VERSION, oldest)
    versions = now - ages
    yield (
        "tokens of several versions",
        replace(inputs, versions=versions, current_version=now),
    )


def _missing(maker: _Maker, _number: int) -> _Made:
    if maker.terms.missing is Missing.NEVER or maker.terms.pair is Pair.CURRENT_OLD:
        return
    inputs = maker.drawn((3, 5))
    rollout = inputs.rollout.copy()
    rollout[0, 1] = rollout[1, 0] = rollout[1, 4] = np.nan
    yield "trained tokens without a rollout logprob", replace(inputs, rollout=rollout)


def _loss(maker: _Maker, number: int) -> _Made:
    if maker.terms.loss is LossKind.NONE:
        return
    mask = maker.mask(maker.lengths(5, 7), 9, holes=bool(number % 2))
    scale = maker.random.choice([0.05, 0.4, 1.2], (5, 1))
    # most bounds keep this one: a loss of rejected tokens alone is 0, whatever divides it
    scale[0] = 0.05
    inputs = _varied(maker, mask, scale)
    for _ in range(_ATTEMPTS):
        expected = ExpectedCorrection(maker.terms, inputs)
        if not (expected.undecided.any() or expected.at_bound.any()):
            break
        inputs = _varied(maker, mask, scale)
    yield "sequences of unequal length, some of them rejected", inputs


def _varied(maker: _Maker, mask: IntArray, scale: FloatArray) -> Inputs:
    return maker.with_zeros(maker.batch(maker.ratios(mask.shape, 1.0) * scale, mask))


_MAKERS: dict[Purpose, Callable[[_Maker, int], _Made]] = {
    Purpose.FORMULA: _formula,
    Purpose.DIRECTION: _direction,
    Purpose.BOUNDS: _bounds,
    Purpose.REJECTION: _rejection,
    Purpose.ROWS: _rows,
    Purpose.PADDING: _padding,
    Purpose.NORMALISATION: _normalisation,
    Purpose.METRICS: _metrics,
    Purpose.EMPTY_ROWS: _empty_rows,
    Purpose.EMPTY_BATCH: _empty_batch,
    Purpose.IDENTITY: _identity,
    Purpose.EXTREME: _extreme,
    Purpose.STALE: _stale,
    Purpose.MISSING: _missing,
    Purpose.LOSS: _loss,
}
