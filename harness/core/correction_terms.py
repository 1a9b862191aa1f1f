"""The part of a contract that declares a correction for off-policy rollouts.

A correction is a function from logprobs (those that the engine reported, those of the trainer
before its update, those of the trainer now) to importance weights, a mask and metrics. Conventions
and names follow verl's ``rollout_corr_helper``, TRL's ``vllm_importance_sampling_*`` and AReaL's
``RejectionSamplingConfig``; each stack covers a part of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from rollproof.errors import ContractError

__all__ = [
    "Aggregate",
    "Aggregation",
    "Arrays",
    "CorrectionTerms",
    "Denominator",
    "FloatType",
    "Gradient",
    "Level",
    "LossKind",
    "MaskedWeights",
    "Metric",
    "Missing",
    "Normalise",
    "Pair",
    "Rejection",
    "RejectionChannel",
    "Sign",
    "StaleTokens",
    "Statistic",
]


class Pair(StrEnum):
    """The two policies of a ratio: the first one's probability over the second one's."""

    OLD_ROLLOUT = "old/rollout"
    """The trainer before its update over the engine (decoupled: TIS, MIS, IcePop)."""
    CURRENT_ROLLOUT = "current/rollout"
    """The trainer now over the engine (bypass: the rollout's logprobs stand for the old ones)."""
    CURRENT_OLD = "current/old"
    """The trainer now over the trainer before its update, as PPO's own ratio."""
    INTERPOLATED_ROLLOUT = "interpolated/rollout"
    """As ``old/rollout``, but the old logprob is interpolated by versions: rollout + a * (current
    - rollout), a = (v - 1 - u) / (v - u) for a token of version u < v, the current one; 0 otherwise
    (AReaL's loglinear approximation)."""


class Level(StrEnum):
    """The unit to which a weight belongs."""

    TOKEN = "token"
    """Each token has its own ratio."""
    SEQUENCE = "sequence"
    """All tokens of a sequence have the product of its ratios."""
    GEOMETRIC = "geometric"
    """All tokens of a sequence have the geometric mean of its ratios (GSPO)."""


class Statistic(StrEnum):
    """The number that a rejection compares with its bounds; r is the ratio of the pair, p its first
    probability and q its second.
    """

    RATIO = "ratio"
    """r."""
    LOG_RATIO = "log-ratio"
    """log r."""
    K1 = "k1"
    """-log r."""
    K2 = "k2"
    """(log r)**2 / 2."""
    K3 = "k3"
    """r - 1 - log r."""
    TV = "tv"
    """abs(p - q)."""
    PROBABILITY_CHANGE = "probability-change"
    """p - q (DPPO)."""
    BINARY_KL = "binary-kl"
    """q log(q/p) + (1-q) log((1-q)/(1-p)), with p and q kept within 1e-6 of 0 and 1."""


class Aggregate(StrEnum):
    """The tokens over which a statistic is taken, and which are rejected together. Of ``ratio`` its
    logarithm is taken, so that ``sum`` is the product and ``mean`` the geometric mean.
    """

    TOKEN = "token"
    """Each token by itself."""
    SUM = "sum"
    """The sum over the trained tokens of a sequence."""
    MEAN = "mean"
    """Their mean."""
    MAX = "max"
    """Their largest value."""
    MIN = "min"
    """Their smallest value; with ``ratio`` and a lower bound a veto."""


class Sign(StrEnum):
    """The advantages for which a rejection holds."""

    POSITIVE = "positive"
    NEGATIVE = "negative"
    NOT_POSITIVE = "not-positive"


class RejectionChannel(StrEnum):
    """How a rejected token is marked."""

    MASK = "mask"
    """By 0 in the returned mask; its weight is as if it were kept."""
    WEIGHTS = "weights"
    """By a weight of 0; no mask is returned, or the mask is as before."""
    BOTH = "both"


class Normalise(StrEnum):
    """The tokens over which the weights have a mean of 1; masked ones never count."""

    NONE = "none"
    TOKENS = "tokens"
    """All trained tokens of the batch."""
    SEQUENCES = "sequences"
    """The sequences with trained tokens, each with the mean of its weights."""
    GROUPS = "groups"
    """The trained tokens of each group."""


class StaleTokens(StrEnum):
    """The treatment of tokens that are staler than ``max_staleness`` allows."""

    KEEP = "keep"
    DROP = "drop"
    """They are rejected."""
    DROP_SEQUENCE = "drop-sequence"
    """Every token of a sequence with one of them is rejected."""


class Missing(StrEnum):
    """The treatment of a trained token without a rollout logprob (NaN)."""

    NEVER = "never"
    """There are none."""
    ONE = "one"
    """Its ratio is 1."""


class Gradient(StrEnum):
    """The gradient that flows through the weights."""

    NONE = "none"
    """None: they are detached."""
    CURRENT = "current"
    """That of the ratio to the current logprobs; if a bound clamps it, none."""


class MaskedWeights(StrEnum):
    """The weights of masked tokens."""

    ZERO = "zero"
    FINITE = "finite"
    """Any finite number."""
    ANY = "any"
    """Anything, NaN included: whoever uses them selects by the mask."""


class LossKind(StrEnum):
    """The loss that is returned, with weights w, advantages A, and current logprobs c."""

    NONE = "none"
    REINFORCE = "reinforce"
    """-w * A * c."""
    PPO = "ppo"
    """-w * min(s * A, clip(s) * A), s the ratio of ``policy_ratio``."""
    SURROGATE = "surrogate"
    """-w * A."""


class Aggregation(StrEnum):
    """How the loss of tokens becomes one number."""

    TOKEN_MEAN = "token-mean"
    """The sum over all tokens by their number."""
    SEQUENCE_MEAN = "sequence-mean"
    """The mean over sequences with trained tokens of the mean over their tokens."""
    TOKEN_SUM = "token-sum"
    """The sum over all tokens."""


class Denominator(StrEnum):
    """The tokens that a mean of the loss counts."""

    RESPONSE = "response"
    """All that the given mask trains."""
    KEPT = "kept"
    """Those that are left after rejection."""


class Arrays(StrEnum):
    """The arrays that the function takes."""

    NUMPY = "numpy"
    TORCH = "torch"
    """CPU tensors; all logprobs require a gradient."""


class FloatType(StrEnum):
    """A type of floating-point numbers."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Metric(StrEnum):
    """The meaning of a reported number."""

    WEIGHTS_MEAN = "weights-mean"
    """Mean weight of a trained token."""
    WEIGHTS_MAX = "weights-max"
    """Largest weight of a trained token."""
    WEIGHTS_MIN = "weights-min"
    """Smallest weight of a trained token."""
    SEQUENCE_WEIGHTS_MEAN = "sequence-weights-mean"
    """Mean over sequences of the mean weight of their tokens."""
    SEQUENCE_WEIGHTS_MAX = "sequence-weights-max"
    """Largest mean weight of a sequence's tokens."""
    SEQUENCE_WEIGHTS_MIN = "sequence-weights-min"
    """Smallest mean weight of a sequence's tokens."""
    EFFECTIVE_SAMPLES = "effective-samples"
    """(sum w)**2 / (n * sum w**2) over the n trained tokens."""
    CLIPPED_FRACTION = "clipped-fraction"
    """Share of trained tokens whose raw weight is outside the bounds."""
    ABOVE_FRACTION = "above-fraction"
    """Share of trained tokens whose raw weight is above the upper bound."""
    REJECTED_FRACTION = "rejected-fraction"
    """Share of trained tokens that are rejected."""
    REJECTED_SEQUENCES = "rejected-sequences"
    """Share of sequences that lose a trained token."""
    RATIO_MEAN = "ratio-mean"
    """Mean raw ratio of a trained token."""
    K1_MEAN = "k1-mean"
    """Mean of -log r over trained tokens."""
    K3_MEAN = "k3-mean"
    """Mean of r - 1 - log r over trained tokens."""
    LOG_RATIO_ABS_MEAN = "log-ratio-abs-mean"
    """Mean of abs(log r) over trained tokens."""
    LOG_RATIO_ABS_MAX = "log-ratio-abs-max"
    """Largest abs(log r) of a trained token."""
    FIRST_PERPLEXITY = "first-perplexity"
    """Mean over sequences of exp(-mean logprob), of the pair's first policy."""
    SECOND_PERPLEXITY = "second-perplexity"
    """The same of the pair's second policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A bound on a statistic; what is outside is rejected. A value at a bound is kept.

    Attributes:
        statistic: The number that is compared.
        aggregate: The tokens over which it is taken, and which are rejected together.
        lower: The smallest value that is kept; ``None``: any.
        upper: The largest value that is kept; ``None``: any.
        advantages: The advantages for which it holds; ``None``: all. Of a sequence, those of its
            first trained token.
    """

    statistic: Statistic = Statistic.RATIO
    aggregate: Aggregate = Aggregate.TOKEN
    lower: float | None = None
    upper: float | None = None
    advantages: Sign | None = None

    def __post_init__(self) -> None:
        problems = _coerced(
            self,
            {"statistic": Statistic, "aggregate": Aggregate, "advantages": Sign},
            optional=("advantages",),
        )
        problems += _bound_problems(self.lower, self.upper)
        if self.lower is None and self.upper is None:
            problems.append("a rejection needs a lower or an upper bound.")
        # ratios are compared in the logarithm, which 0 has none of
        if self.statistic is Statistic.RATIO and any(
            _is_number(bound) and bound <= 0
            for bound in (self.lower, self.upper)
            if bound is not None
        ):
            problems.append("bounds of a ratio must be above 0.")
        if problems:
            raise ContractError("The rejection cannot be used:\n  - " + "\n  - ".join(problems))

    def __str__(self) -> str:
        name = (
            str(self.statistic)
            if self.aggregate is Aggregate.TOKEN
            else f"{self.aggregate} of {self.statistic} over a sequence"
        )
        low = "" if self.lower is None else f"{self.lower:g} <= "
        high = "" if self.upper is None else f" <= {self.upper:g}"
        sign = "" if self.advantages is None else f" for {self.advantages} advantages"
        return f"{low}{name}{high}{sign}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionTerms:
    """What a correction promises.

    Invalid terms raise ``ContractError``, which lists every problem.

    Attributes:
        pair: The two policies of the ratio.
        weights: Whether it returns weights. ``False``: it only rejects.
        level: The unit to which a weight belongs.
        lower: The weights are clamped to at least this; ``None``: not.
        upper: The weights are clamped to at most this (truncated importance sampling); ``None``:
            not.
        rejections: What any of these rejects: IcePop, masked importance sampling, vetoes.
        rejects_by: How a rejected token is marked.
        normalise: The tokens over which the weights have a mean of 1.
        log_bound: Log ratios are kept within this before they are exponentiated (verl: 20);
            ``None``: they are not, and weights without an upper bound may be infinite.
        max_staleness: The most versions by which the weights that sampled a token may be behind the
            current ones; ``None``: any.
        stale: The treatment of tokens beyond it.
        missing: The treatment of a trained token without a rollout logprob.
        masked: The weights of masked tokens.
        gradient: The gradient that flows through the weights.
        empty_rows: Whether it takes sequences of which no token is trained.
        empty_batch: Whether it takes a batch in which no token is trained.
        metrics: A mapping from the name of each reported number that is judged to its meaning,
            stored as pairs. Sequences without trained tokens do not count; weights are those after
            bounds and rejection, before normalisation.
        loss: The loss that it returns.
        policy_ratio: The pair of PPO's own ratio.
        clip_low: PPO clips its ratio below 1 by this.
        clip_high: PPO clips its ratio above 1 by this.
        aggregation: How the loss of tokens becomes one number.
        denominator: The tokens that a mean of the loss counts.
        arrays: The arrays that it takes.
        dtype: The type of the logprobs that it takes.
        precision: The type that it computes in; ``None``: ``dtype``. Tolerances are the largest
            rounding error of that type, derived in ``rollproof.corrections.rounding``.
    """

    pair: Pair = Pair.OLD_ROLLOUT
    weights: bool = True
    level: Level = Level.TOKEN
    lower: float | None = None
    upper: float | None = None
    rejections: tuple[Rejection, ...] = ()
    rejects_by: RejectionChannel = RejectionChannel.MASK
    normalise: Normalise = Normalise.NONE
    log_bound: float | None = None
    max_staleness: int | None = None
    stale: StaleTokens = StaleTokens.KEEP
    missing: Missing = Missing.NEVER
    # a loss multiplies by the mask in the end: only NaN and infinity survive that
    masked: MaskedWeights = MaskedWeights.FINITE
    gradient: Gradient = Gradient.NONE
    # aborted samples, and rows that fill up a batch, have no trained token
    empty_rows: bool = True
    empty_batch: bool = False
    metrics: tuple[tuple[str, Metric], ...] = ()
    loss: LossKind = LossKind.NONE
    policy_ratio: Pair = Pair.CURRENT_OLD
    # as in the paper of PPO
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    denominator: Denominator = Denominator.RESPONSE
    arrays: Arrays = Arrays.NUMPY
    dtype: FloatType = FloatType.FLOAT32
    precision: FloatType | None = None

    def __post_init__(self) -> None:
        problems = [
            *_coerced(self, _ENUMS, optional=("precision",)),
            *self._coerce_rejections(),
            *self._coerce_metrics(),
            *self._problems(),
        ]
        # only of terms that are valid one by one: else one mistake is told twice
        if not problems:
            problems = self._contradictions()
        if problems:
            raise ContractError(
                "The correction terms cannot be used:\n  - " + "\n  - ".join(problems)
            )

    @property
    def computes_in(self) -> FloatType:
        """``precision``, or ``dtype`` if it is not declared."""
        return self.dtype if self.precision is None else self.precision

    @property
    def rejects(self) -> bool:
        """Whether any token may be rejected."""
        return bool(self.rejections) or self.stale is not StaleTokens.KEEP

    @property
    def rejects_weights(self) -> bool:
        """Whether a rejected token has weight 0."""
        return self.weights and self.rejects_by is not RejectionChannel.MASK

    @property
    def rejects_mask(self) -> bool:
        """Whether a rejected token has mask 0."""
        return self.rejects_by is not RejectionChannel.WEIGHTS

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ``from_dict`` is its inverse."""
        data: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        data["rejections"] = [
            {entry.name: _plain(getattr(rejection, entry.name)) for entry in fields(rejection)}
            for rejection in self.rejections
        ]
        data["metrics"] = {name: str(metric) for name, metric in self.metrics}
        return {name: _plain(value) for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``ContractError`` on unknown keys."""
        valid = {entry.name for entry in fields(cls)}
        unknown = sorted(str(name) for name in set(data) - valid)
        if unknown:
            raise ContractError(
                f"Unknown correction terms {unknown}; valid terms are {sorted(valid)}."
            )
        return cls(**data)

    def _coerce_rejections(self) -> list[str]:
        given: Any = self.rejections
        if isinstance(given, Rejection | Mapping):
            given = (given,)
        if not isinstance(given, tuple | list):
            return [f"rejections={given!r} must be a tuple of rollproof.corrections.Rejection."]
        made, problems = [], []
        for item in given:
            try:
                made.append(Rejection(**item) if isinstance(item, Mapping) else item)
            except (ContractError, TypeError) as error:
                problems.append(f"rejections: {error}")
        if any(not isinstance(item, Rejection) for item in made):
            problems.append("rejections must hold rollproof.corrections.Rejection only.")
        object.__setattr__(self, "rejections", tuple(made))
        return problems

    def _coerce_metrics(self) -> list[str]:
        given: object = self.metrics
        pairs = list(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, tuple | list) or not all(
            isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
            for pair in pairs
        ):
            return ["metrics must map the name of each reported number to what it is."]
        problems = [
            f"metrics[{name!r}]={metric!r} is not valid; choose one of"
            f" {[str(member) for member in Metric]}."
            for name, metric in pairs
            if metric not in tuple(Metric)
        ]
        if not problems:
            object.__setattr__(
                self, "metrics", tuple((name, Metric(metric)) for name, metric in pairs)
            )
        return problems

    def _problems(self) -> list[str]:
        problems = _bound_problems(self.lower, self.upper)
        problems += [
            f"{name}={getattr(self, name)!r} must be True or False."
            for name in ("weights", "empty_rows", "empty_batch")
            if not isinstance(getattr(self, name), bool)
        ]
        problems += [
            f"{name}={value!r} must be a number above 0."
            for name, value in (
                ("lower", self.lower),
                ("upper", self.upper),
                ("log_bound", self.log_bound),
                ("clip_low", self.clip_low),
                ("clip_high", self.clip_high),
            )
            if value is not None and not (_is_number(value) and value > 0)
        ]
        # True is an int, and would pass for a staleness of 1
        staleness: object = self.max_staleness
        if staleness is not None and (
            not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0
        ):
            problems.append(f"max_staleness={staleness!r} must be a whole number >= 0, or None.")
        return problems

    def _contradictions(self) -> list[str]:
        problems = []
        if not self.weights:
            problems += [
                f"{name} contradicts weights=False: there are no weights."
                for name, declared in (
                    ("lower", self.lower is not None),
                    ("upper", self.upper is not None),
                    ("normalise", self.normalise is not Normalise.NONE),
                    ("rejects_by", self.rejects and not self.rejects_mask),
                    ("gradient", self.gradient is not Gradient.NONE),
                    ("loss='surrogate'", self.loss is LossKind.SURROGATE),
                )
                if declared
            ]
            if not self.rejects and self.loss is LossKind.NONE:
                problems.append("weights=False needs rejections, or a loss: nothing is promised.")
        if (self.max_staleness is None) != (self.stale is StaleTokens.KEEP):
            problems.append(
                "max_staleness and stale belong together: declare how many versions, and what"
                " becomes of older tokens."
            )
        if (
            self.pair is Pair.INTERPOLATED_ROLLOUT
            and self.max_staleness is not None
            and self.max_staleness < 2
        ):
            problems.append(
                f"max_staleness={self.max_staleness} contradicts pair='interpolated/rollout': only"
                " tokens that are two versions old, or older, are interpolated."
            )
        if self.arrays is Arrays.NUMPY and self.dtype is FloatType.BFLOAT16:
            problems.append("dtype='bfloat16' contradicts arrays='numpy', which has no such type.")
        if self.gradient is Gradient.CURRENT and self.pair is Pair.OLD_ROLLOUT:
            problems.append(
                "gradient='current' contradicts pair='old/rollout', which has no current logprob."
            )
        if self.gradient is Gradient.CURRENT and self.normalise is not Normalise.NONE:
            problems.append(
                "gradient='current' contradicts normalise: a gradient through the mean is not"
                " defined here."
            )
        return problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bound_problems(lower: object, upper: object) -> list[str]:
    problems = [
        f"{name}={bound!r} must be a finite number, or None."
        for name, bound in (("lower", lower), ("upper", upper))
        if bound is not None and not _is_number(bound)
    ]
    if (
        not problems
        and isinstance(lower, int | float)
        and isinstance(upper, int | float)
        and lower > upper
    ):
        problems.append(f"lower={lower:g} is above upper={upper:g}: nothing would be kept.")
    return problems


def _coerced(
    record: Any, enums: Mapping[str, type[StrEnum]], optional: tuple[str, ...] = ()
) -> list[str]:
    """Accept plain strings in place of enum members."""
    problems = []
    # contracts come from JSON and TOML, too, which have no enums
    for name, kind in enums.items():
        value = getattr(record, name)
        if value is None and name in optional:
            continue
        try:
            object.__setattr__(record, name, kind(value))
        except ValueError:
            problems.append(
                f"{name}={value!r} is not valid; choose one of {[str(member) for member in kind]}."
            )
    return problems


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, StrEnum) else value


_ENUMS: Mapping[str, type[StrEnum]] = {
    "pair": Pair,
    "level": Level,
    "rejects_by": RejectionChannel,
    "normalise": Normalise,
    "stale": StaleTokens,
    "missing": Missing,
    "masked": MaskedWeights,
    "gradient": Gradient,
    "loss": LossKind,
    "policy_ratio": Pair,
    "aggregation": Aggregation,
    "denominator": Denominator,
    "arrays": Arrays,
    "dtype": FloatType,
    "precision": FloatType,
}
