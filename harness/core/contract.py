"""The contract of a subject: what it declares about the samples that it returns.

Engines and stacks differ legitimately. A check never guesses a convention from the data (top-k
comes from the model config, never from a buffer's size): it reads it here, and a check that a
contract rules out is *not applicable*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import wraps
from typing import Any, Self

from rollproof.core.batch_columns import Column, as_columns
from rollproof.core.conventions import (
    Adapters,
    Deltas,
    Filler,
    KvPolicy,
    LayerAxis,
    Logprobs,
    MaskedTokens,
    MissingLogprobs,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
    Samples,
    Sampling,
    TagRead,
    Versions,
)
from rollproof.core.correction_terms import CorrectionTerms
from rollproof.core.engine_contract import LARGEST_TOKEN, EngineTerms
from rollproof.core.error_text import show
from rollproof.core.limits import RolloutLimits
from rollproof.core.own_stops import OwnStops
from rollproof.core.replay_contract import ReplayTerms
from rollproof.errors import ContractError

__all__ = [
    "Adapters",
    "Contract",
    "Deltas",
    "Filler",
    "KvPolicy",
    "LayerAxis",
    "Logprobs",
    "MaskedTokens",
    "MissingLogprobs",
    "PartialOff",
    "Provenance",
    "ResumeBy",
    "Rows",
    "Samples",
    "Sampling",
    "TagRead",
    "Versions",
]


_BOOLS = (
    "abort_surfaces",
    "loss_mask",
    "finish_reason",
    "multi_turn",
    "multimodal",
    "reply_gaps",
    "group_aborts",
    "sampling_masks",
    "updates_pause",
    "drops_samples",
    "repeats_tokens",
)
_ROUTE_FIELDS = (
    "final_row",
    "layer_axis",
    "num_layers",
    "moe_layers",
    "num_experts",
    "top_k",
    "filler",
    "dtype",
    "provenance",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """The declared conventions of a subject; frozen, and complete or refused.

    Fields about routes are required unless ``rows`` is ``none``. Raises ``ContractError``, listing
    every problem at once, when a required field is missing, a value is not one of the valid ones,
    or two fields contradict each other.

    Attributes:
        abort_surfaces: Whether a sample that an abort cut off may reach the caller as it is, with
            finish reason ``abort`` (SkyRL). Otherwise it is resumed until it ends, or
            ``partial_off`` says what becomes of it; and a sample that an abort hit on its last
            token is complete: it says ``length`` if the budget is used up, ``stop`` after an
            end-of-sequence token.
        kv_policy: The treatment of KV of older weights when a server loads new ones.
        loss_mask: Whether a sample carries a loss mask.
        finish_reason: Whether a sample says why it ended.
        multi_turn: Whether the subject drives ``Request.turns``: it appends the environment's
            tokens after each natural end of the model's turn.
        answer_template: Whether the calls of a multi-turn subject carry tokens of a chat template
            around the environment's words that it does not record as an ``Observation``. ``None``:
            not declared, so the verdict on such tokens is unknown.
        masked: The sampled tokens that may have loss mask 0, next to those that came without a
            logprob. ``()``: none. ``None``: not declared, so that masks which a declaration might
            explain (all but ``earlier-calls`` and ``any``) are no fault.
        samples: How many samples a request delivers, and what each of them holds. If there may be
            several, ``to_record`` returns a list of them, in the stack's own order.
        drops_samples: Whether something that an engine sampled for a request may be in none of its
            several samples (best of n, samples that a filter drops).
        repeats_tokens: Whether a sampled token may be trained in more than one of the several
            samples of its request; otherwise it is trained once.
        multimodal: Whether the subject passes ``Request.media`` to the engines.
        sampling: Whether the subject passes ``Request.sampling`` to the engines. ``None``: not
            declared, so the verdict on a parameter that reaches no engine is unknown.
        group_aborts: Whether the samples of one prompt (n > 1) live together: one abort may end the
            calls of several of them. Otherwise it ends those of one request.
        updates_pause: Whether a weight update pauses each server that runs calls before it loads
            weights there. ``False``: no promise; the stack may drain servers instead, or let them
            sample on.
        max_staleness: The largest number of labelled updates, at delivery, between the newest
            weights that every live server holds and those that sampled a token that is trained;
            ``None``: no promise. Keep it as you like: let updates wait, drop a sample that is too
            old (return ``None``), or sample its prompt again.
        tag_read: Set this if the engine's per-reply version may name weights that sampled none of
            its tokens. ``None``: it must name weights that sampled one.
        limits: The limits that the stack is configured with: a ``RolloutLimits``, or a mapping of
            its fields. ``None``: none but the request's own.
        own_stops: The token sequences at which the stack itself cuts a reply and ends the turn: an
            ``OwnStops``, or a mapping of its fields. Cases then have them. ``None``: it cuts
            nowhere. Not those that its calls pass on.
        reply_gaps: Whether the stack takes a reply without the logprobs or the routes that its call
            requested. Cases then have such replies; those without routes need a ``filler``.
            ``missing_logprobs`` says how it marks the tokens.
        columns: The further columns that a batch carries: each a ``Column``, or a mapping of its
            fields. The samples of cases then have them. For conversions into batches only.
        sampling_masks: Whether samples carry the sampling mask that an engine returned with each
            token. Calls whose sampling leaves tokens out (top_k, top_p, min_p) then request them.
        pad_id: The token with which the stack pads, most often an end of sequence; ``None``: 0.
            Cases have samples that contain it.
        final_row: The content of the last sampled token's row, which no forward computed; with
            ``rows="T"`` only (NeMo-RL: ``arange``).
        layer_axis: Which layers the second axis of ``routes`` counts.
        num_layers: Hidden layers of the model.
        moe_layers: Global layer indexes, ascending.
        num_experts: Routed experts of a layer.
        top_k: Experts that a router selects for a token.
        filler: The content of a row that no forward captured (an environment's token after which no
            call came, a reply without routes), other than the last token's. ``none``: every row was
            captured.
        dtype: A numpy name such as ``"uint8"``, or several joined by ``|`` if the engine chooses by
            the number of experts.
        provenance: Which call's forward computed a row of a resumed sample.
        engine: The terms of an engine's calls, if the subject is an engine.
        replay: The terms of a trainer with routing replay. ``rollproof.core.trainer_contract``
            makes the contract of one.
        correction: The terms of a correction for off-policy rollouts.
            ``rollproof.corrections.correction_contract`` makes the contract of one.
        adapters: Set this if weight updates bring adapters (LoRA) that calls then name: whether the
            base model may change, too. ``None``: updates bring the model itself.
        deltas: Set this if weight updates may bring deltas: what a delta does to the tensors.
            ``None``: every update brings all tensors.
    """

    rows: Rows
    resume: ResumeBy
    versions: Versions
    logprobs: Logprobs
    abort_surfaces: bool
    kv_policy: KvPolicy
    missing_logprobs: MissingLogprobs = MissingLogprobs.NEVER
    loss_mask: bool = False
    masked: tuple[MaskedTokens, ...] | None = None
    finish_reason: bool = True
    multi_turn: bool = False
    answer_template: bool | None = None
    samples: Samples = Samples.REQUEST
    drops_samples: bool = False
    repeats_tokens: bool = False
    multimodal: bool = False
    sampling: Sampling | None = None
    partial_off: PartialOff | None = None
    group_aborts: bool = False
    updates_pause: bool = False
    max_staleness: int | None = None
    tag_read: TagRead | None = None
    limits: RolloutLimits | None = None
    own_stops: OwnStops | None = None
    reply_gaps: bool = False
    columns: tuple[Column, ...] = ()
    sampling_masks: bool = False
    pad_id: int | None = None
    final_row: Filler | None = None
    layer_axis: LayerAxis | None = None
    num_layers: int | None = None
    moe_layers: tuple[int, ...] | None = None
    num_experts: int | None = None
    top_k: int | None = None
    filler: Filler | None = None
    dtype: str | None = None
    provenance: Provenance | None = None
    engine: EngineTerms | None = None
    replay: ReplayTerms | None = None
    correction: CorrectionTerms | None = None
    adapters: Adapters | None = None
    deltas: Deltas | None = None

    def __post_init__(self) -> None:
        problems = [
            *self._coerce(),
            *self._coerce_limits(),
            *self._coerce_stops(),
            *self._coerce_columns(),
            *self._missing(),
        ]
        # fields that are missing or of a wrong type cannot be compared with each other
        if not problems:
            problems = self._contradictions()
        if problems:
            raise ContractError("The contract cannot be used:\n  - " + "\n  - ".join(problems))

    @property
    def has_routes(self) -> bool:
        """Whether the subject returns routes at all."""
        return self.rows is not Rows.NONE

    @property
    def delivers_several(self) -> bool:
        """Whether a request may deliver more than one sample."""
        return self.samples is not Samples.REQUEST

    @property
    def may_lack_logprobs(self) -> bool:
        """Whether a reply may come without the logprobs that its call requested: the contract says
        how the sample marks its tokens.
        """
        return (
            self.reply_gaps
            and self.logprobs is not Logprobs.NONE
            and self.missing_logprobs is not MissingLogprobs.NEVER
        )

    @property
    def may_lack_routes(self) -> bool:
        """Whether a reply may come without the routes that its call requested: the contract says
        what the sample holds in their place.
        """
        return (
            self.reply_gaps
            and self.has_routes
            and (self.filler is not Filler.NONE or self.rows is Rows.CAPTURED_PREFIX)
        )

    @property
    def route_layers(self) -> int:
        """Length of the layer axis of ``routes``. Raises ``ContractError`` where the subject
        returns none.
        """
        if self.num_layers is None or self.moe_layers is None:
            raise ContractError("This contract declares rows='none', so routes have no layer axis.")
        return self.num_layers if self.layer_axis is LayerAxis.ALL else len(self.moe_layers)

    @property
    def expert_count(self) -> int:
        """``num_experts`` of a contract with routes; 0 without them."""
        return self.num_experts or 0

    @property
    def layer_count(self) -> int:
        """``num_layers`` of a contract with routes; 0 without them."""
        return self.num_layers or 0

    @property
    def choice_count(self) -> int:
        """``top_k`` of a contract with routes; 0 without them."""
        return self.top_k or 0

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """``moe_layers`` of a contract with routes; none without them."""
        return self.moe_layers or ()

    @property
    def moe_columns(self) -> tuple[int, ...]:
        """Columns of the layer axis that hold captured choices (the MoE layers)."""
        moe = self.routed_layers
        return moe if self.layer_axis is LayerAxis.ALL else tuple(range(len(moe)))

    def layer_of_column(self, column: int) -> int:
        """Global layer index of a column of the layer axis."""
        # a column counts layers or routers: mixing them up shifts every layer after a dense one
        # (verl#5037)
        if self.layer_axis is LayerAxis.ALL:
            return column
        return self.routed_layers[column]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The numpy dtype names that ``dtype`` allows."""
        return tuple(self.dtype.split("|")) if self.dtype else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ``from_dict`` is its inverse."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(
                value, CorrectionTerms | EngineTerms | OwnStops | ReplayTerms | RolloutLimits
            ):
                value = value.to_dict()
            elif field.name == "columns":
                value = [column.to_dict() for column in self.columns]
            data[field.name] = list(value) if isinstance(value, tuple) else value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``ContractError`` on unknown or missing keys, and for
        what is no mapping.
        """
        if not isinstance(data, Mapping):
            raise ContractError(f"A contract must be a mapping of its fields, not {show(data)}.")
        valid = {field.name for field in fields(cls)}
        unknown = sorted(str(name) for name in set(data) - valid)
        if unknown:
            raise ContractError(
                f"Unknown contract fields {unknown}; valid fields are {sorted(valid)}."
            )
        values = dict(data)
        # JSON has no tuples
        for name in ("moe_layers", "masked"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        if isinstance(values.get("replay"), Mapping):
            values["replay"] = ReplayTerms.from_dict(values["replay"])
        if isinstance(values.get("correction"), Mapping):
            values["correction"] = CorrectionTerms.from_dict(values["correction"])
        try:
            if isinstance(values.get("engine"), Mapping):
                values["engine"] = EngineTerms(**values["engine"])
            return cls(**values)
        except TypeError as error:
            raise ContractError(
                f"The contract is incomplete: {error}. Required: rows, resume, versions, logprobs,"
                " abort_surfaces, kv_policy."
            ) from error

    def _coerce(self) -> list[str]:
        """Accept plain strings in place of enum members."""
        problems = []
        for name, kind in _ENUMS.items():
            value = getattr(self, name)
            if value is None or isinstance(value, kind):
                continue
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError:
                problems.append(
                    f"{name}={value!r} is not valid; choose one of"
                    f" {[str(member) for member in kind]}."
                )
        masked: object = self.masked
        if masked is None:
            return problems
        valid = tuple(MaskedTokens)
        if not isinstance(masked, tuple | list) or any(name not in valid for name in masked):
            problems.append(
                f"masked={masked!r} must be a tuple of {[str(member) for member in valid]}."
            )
        else:
            object.__setattr__(self, "masked", tuple(MaskedTokens(name) for name in masked))
        return problems

    def _coerce_limits(self) -> list[str]:
        """Accept a mapping in place of ``RolloutLimits``."""
        limits: object = self.limits
        problems = []
        if isinstance(limits, Mapping):
            try:
                object.__setattr__(self, "limits", RolloutLimits.from_dict(limits))
            except ContractError as error:
                problems.append(f"limits: {error}")
        elif limits is not None and not isinstance(limits, RolloutLimits):
            problems.append(
                f"limits={limits!r} must be a RolloutLimits or a mapping of its fields."
            )
        if self.pad_id is not None and not (
            _is_int(self.pad_id, 0) and self.pad_id <= LARGEST_TOKEN
        ):
            problems.append(
                f"pad_id={show(self.pad_id)} must be a token id, or None: a whole number from 0 to"
                f" {LARGEST_TOKEN:,}."
            )
        return problems

    def _coerce_stops(self) -> list[str]:
        """Accept a mapping in place of ``OwnStops``."""
        stops: object = self.own_stops
        if isinstance(stops, Mapping):
            try:
                object.__setattr__(self, "own_stops", OwnStops.from_dict(stops))
            except ContractError as error:
                return [f"own_stops: {error}"]
        elif stops is not None and not isinstance(stops, OwnStops):
            return [f"own_stops={show(stops)} must be an OwnStops or a mapping of its fields."]
        return []

    def _coerce_columns(self) -> list[str]:
        """Accept mappings in place of ``Column``."""
        try:
            object.__setattr__(self, "columns", as_columns(self.columns))
        except ContractError as error:
            return [f"columns: {error}"]
        return []

    def _missing(self) -> list[str]:
        problems = [
            f"{name} must be a bool, not {getattr(self, name)!r}."
            for name in _BOOLS
            if not isinstance(getattr(self, name), bool)
        ]
        # a caller without a type checker may have passed anything
        template: object = self.answer_template
        if not isinstance(template, bool | None):
            problems.append(f"answer_template must be a bool or None, not {template!r}.")
        dtype: object = self.dtype
        layers: object = self.moe_layers
        if dtype is not None and not isinstance(dtype, str):
            problems.append(f"dtype={self.dtype!r} must be a numpy name such as 'uint8'.")
        if layers is not None and not isinstance(layers, tuple | list):
            problems.append(f"moe_layers={self.moe_layers!r} must be a tuple of layer indexes.")
        problems += [
            f"{name} must be declared."
            for name in (
                "rows",
                "resume",
                "versions",
                "logprobs",
                "kv_policy",
                "missing_logprobs",
                "samples",
            )
            if getattr(self, name) is None
        ]
        if self.rows is not Rows.NONE:
            needed = [
                name for name in _ROUTE_FIELDS if name != "final_row" or self.rows is Rows.ALL
            ]
            absent = [name for name in needed if getattr(self, name) is None]
            if absent:
                problems.append(
                    f"{', '.join(absent)} must be declared when the subject returns routes (sizes"
                    " come from the model config, never from the data)."
                )
        return problems

    def _contradictions(self) -> list[str]:
        problems = []
        if self.max_staleness is not None and not _is_int(self.max_staleness, 0):
            problems.append(
                f"max_staleness={self.max_staleness!r} must be a whole number >= 0, or None."
            )
        if self.masked and not self.loss_mask:
            problems.append("masked contradicts loss_mask=False: samples carry no loss mask.")
        if self.answer_template and not self.multi_turn:
            problems.append(
                "answer_template contradicts multi_turn=False: the environment never answers."
            )
        if not self.multi_turn and self.limits is not None:
            problems += [
                f"limits.{name}={value!r} contradicts multi_turn=False: the environment never"
                " answers, and a rollout is one turn."
                for name, value, single in (
                    ("turns", self.limits.turns, 1),
                    ("answer", self.limits.answer, None),
                    ("answers_cut_turns", self.limits.answers_cut_turns, False),
                )
                # a single turn is what such a stack may well call its limit
                if value not in (None, single)
            ]
        if self.reply_gaps and not (self.may_lack_logprobs or self.may_lack_routes):
            problems.append(
                "reply_gaps=True contradicts the rest: nothing says what a sample holds in place of"
                " what a reply lacks. Declare missing_logprobs ('nan' or 'masked') for logprobs, a"
                " filler for rows, or reply_gaps=False."
            )
        if self.samples is Samples.TURN and not self.multi_turn:
            problems.append(
                "samples='turn' contradicts multi_turn=False: a rollout is one turn, one sample."
            )
        problems += [
            f"{name}=True contradicts samples='request': it is about several samples of a request."
            for name in ("drops_samples", "repeats_tokens")
            if getattr(self, name) and not self.delivers_several
        ]
        return problems + self._route_contradictions()

    def _route_contradictions(self) -> list[str]:
        if not self.has_routes:
            declared = [name for name in _ROUTE_FIELDS if getattr(self, name) is not None]
            if not declared:
                return []
            return [
                f"rows='none' contradicts the declared {declared}: drop them, or declare the rows."
            ]
        problems = [
            f"{name}={getattr(self, name)!r} must be a whole number >= 1."
            for name in ("num_layers", "num_experts", "top_k")
            if not _is_int(getattr(self, name), 1)
        ]
        if problems:
            return problems
        assert (
            self.num_layers is not None
            and self.num_experts is not None
            and self.top_k is not None
            and self.moe_layers is not None
        )
        if self.top_k > self.num_experts:
            problems.append(
                f"top_k={self.top_k} exceeds num_experts={self.num_experts}: a token cannot have"
                " that many distinct experts."
            )
        # columns of routes are found by their order
        moe = tuple(self.moe_layers)
        if (
            not moe
            or any(not _is_int(layer, 0) or layer >= self.num_layers for layer in moe)
            or list(moe) != sorted(set(moe))
        ):
            problems.append(
                f"moe_layers={moe!r} must be ascending, distinct layer indexes below"
                f" num_layers={self.num_layers}, at least one."
            )
        if self.rows is Rows.ALL and self.final_row is Filler.NONE:
            problems.append(
                "rows='T' needs a final_row filler: the last sampled token was never forwarded."
            )
        if self.rows is not Rows.ALL and self.final_row not in (None, Filler.NONE):
            problems.append(
                f"final_row={self.final_row!s} contradicts rows={self.rows!s}: only rows='T' has a"
                " final filler row."
            )
        # A type too narrow for num_experts is no contradiction: it holds some ids, and is what a
        # faulty stack returns (verl #5240). `routes.dtype` reports it of the samples; a refused
        # contract would hide the fault behind a misuse.
        unknown = sorted(set(self.dtypes) - set(_INT_DTYPES))
        if unknown:
            problems.append(
                f"dtype {unknown} is not an integer type; choose among {list(_INT_DTYPES)}, joined"
                " by '|' where several occur."
            )
        # engines choose the type by the number of experts, so one signed type among several will do
        elif all(name.startswith("u") for name in self.dtypes):
            problems += [
                f"{name}='minus-one' contradicts dtype={self.dtype!r}: no unsigned type holds -1."
                " Declare the value that is really there."
                for name in ("filler", "final_row")
                if getattr(self, name) is Filler.MINUS_ONE
            ]
        return problems


def _complete(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that names every missing and unknown field; Python's own stops at the
    first.
    """
    valid = [field.name for field in fields(Contract)]
    required = [field.name for field in fields(Contract) if field.default is MISSING]

    # Python's own error names one argument at a time, and a first contract lacks many
    @wraps(init)
    def checked(self: Contract, **values: Any) -> None:
        missing = [name for name in required if name not in values]
        unknown = sorted(values.keys() - set(valid))
        if missing or unknown:
            problems = [f"{name} must be declared." for name in missing]
            problems += [f"{name} is not a field; the fields are {valid}." for name in unknown]
            raise ContractError("The contract cannot be used:\n  - " + "\n  - ".join(problems))
        init(self, **values)

    return checked


Contract.__init__ = _complete(Contract.__init__)  # type: ignore[method-assign]


def _is_int(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


_INT_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
_ENUMS: Mapping[str, type[StrEnum]] = {
    "rows": Rows,
    "resume": ResumeBy,
    "versions": Versions,
    "logprobs": Logprobs,
    "kv_policy": KvPolicy,
    "missing_logprobs": MissingLogprobs,
    "partial_off": PartialOff,
    "tag_read": TagRead,
    "samples": Samples,
    "sampling": Sampling,
    "final_row": Filler,
    "layer_axis": LayerAxis,
    "filler": Filler,
    "provenance": Provenance,
    "adapters": Adapters,
    "deltas": Deltas,
}
