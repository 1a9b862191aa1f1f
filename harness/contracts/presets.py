"""What the rollout code of public stacks promises its trainer, field by field, and why.

A preset is a start for a contract of one's own: a fork, a client written in the same manner, or a
new loop over the same server classes. The sizes of the model are not a stack's: presets take a
small one, which the fake engines then have too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rollproof.core.contract import Contract
from rollproof.errors import UsageError
from rollproof.fakes.engine.flavours import FLAVOURS, Flavour

__all__ = ["PRESETS", "SMALL_MODEL", "Preset", "Promise", "contract_of", "preset_named"]

SMALL_MODEL: Mapping[str, Any] = MappingProxyType(
    {"num_layers": 4, "moe_layers": (1, 2, 3), "num_experts": 16, "top_k": 2}
)
"""Four layers, the first one dense: enough for a shift by a dense layer to show."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The value of a contract field, and why it is that.

    why: What the stack does or says; a line, or empty where the field before it says it.
    """

    value: Any
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The conventions of one public stack.

    about: The class or function whose samples these are.
    engines: The engine flavours that the stack supports, the usual one first.
    routes: Whether its samples carry routed experts.
    fields: The fields that do not follow from the engine.
    route_fields: Fields that hold only where samples carry routes.
    """

    name: str
    about: str
    engines: tuple[str, ...]
    routes: bool
    fields: Mapping[str, Promise]
    route_fields: Mapping[str, Promise]

    def promises(self, engine: str, *, routes: bool) -> dict[str, Promise]:
        """Return a promise for each field that the preset decides, on an engine flavour.

        Raises:
            UsageError: The stack does not run on that engine, or its samples carry no routes.
        """
        if engine not in self.engines:
            raise UsageError(
                f"{self.name} has no preset for engine {engine!r}; choose among"
                f" {', '.join(self.engines)}."
            )
        if routes and not self.routes:
            raise UsageError(f"The samples of {self.name} carry no routes: leave routes out.")
        flavour = FLAVOURS[engine]
        promises = {
            "logprobs": Promise(str(flavour.logprobs), f"what {engine} returns by default"),
            **self.fields,
        }
        if not routes:
            return {"rows": Promise("none", "no routed experts are recorded"), **promises}
        return {**promises, **_of_engine(flavour), **self.route_fields}


def _of_engine(flavour: Flavour) -> dict[str, Promise]:
    dtype = flavour.dtype(SMALL_MODEL["num_experts"]).name
    return {
        "rows": Promise(
            str(flavour.rows),
            f"what {flavour.name} returns: no row for the last token, which was never forwarded",
        ),
        "layer_axis": Promise(str(flavour.layer_axis), f"{flavour.name} counts dense layers too"),
        **{name: Promise(value, "") for name, value in SMALL_MODEL.items()},
        "num_layers": Promise(SMALL_MODEL["num_layers"], "a small model; sizes need not be yours"),
        "filler": Promise("none", "every row was captured"),
        "dtype": Promise(dtype, f"{flavour.name}'s, for that many experts"),
        "provenance": Promise("as-sampled", "each segment keeps its own rows"),
    }


def contract_of(
    name: str, *, engine: str | None = None, routes: bool | None = None, **differs: Any
) -> Contract:
    """Return the contract of a preset, on one of its engines.

    Args:
        name: The name of a preset.
        engine: The engine flavour; the first of the preset's if left out.
        routes: Whether samples carry routed experts; as the stack has it if left out.
        differs: Fields of ``Contract`` in which one's own code differs.

    Raises:
        UsageError: No such preset, or an engine that the stack does not run on.
        ContractError: The fields do not go together.
    """
    preset = preset_named(name)
    chosen = preset.engines[0] if engine is None else engine
    with_routes = preset.routes if routes is None else routes
    fields = {
        field: promise.value
        for field, promise in preset.promises(chosen, routes=with_routes).items()
    }
    return Contract(**{**fields, **differs})


def preset_named(name: str) -> Preset:
    """Return the preset of that name. Raises ``UsageError`` if there is none."""
    try:
        return PRESETS[name.replace("-", "_")]
    except KeyError:
        raise UsageError(
            f"No preset is named {name!r}; choose among {', '.join(PRESETS)}."
        ) from None


def _preset(
    name: str,
    about: str,
    engines: tuple[str, ...],
    fields: Mapping[str, tuple[Any, str]],
    routes: Mapping[str, tuple[Any, str]] | None,
) -> Preset:
    return Preset(
        name=name,
        about=about,
        engines=engines,
        routes=routes is not None,
        fields={field: Promise(*promise) for field, promise in fields.items()},
        route_fields={field: Promise(*promise) for field, promise in (routes or {}).items()},
    )


_HIDDEN_ABORTS = (False, "an aborted call is continued out of the trainer's sight")
_OWN_SAMPLING = ("own", "calls carry the stack's own sampling parameters")
_RECOMPUTED = ("recompute", "what is resumed after an update is prefilled again")
_KEPT_KV = ("keep", "updates happen in flight, and running calls keep their KV")
_ENVIRONMENT_MASKED = (True, "0 on the environment's tokens")
_NO_LOGPROB_OF_ENVIRONMENT = ("masked", "the environment's tokens have none, and mask 0")

_OF_SLIME: Mapping[str, tuple[Any, str]] = {
    "resume": ("client", "an aborted sample is sent again by a later rollout"),
    "versions": ("call", "weight_versions has one entry an HTTP call, no lengths"),
    "abort_surfaces": _HIDDEN_ABORTS,
    "loss_mask": (True, "loss_mask of the response"),
    "partial_off": ("dropped", "without --partial-rollout aborted samples go"),
    "sampling": _OWN_SAMPLING,
    "kv_policy": _RECOMPUTED,
}
"""miles is a fork of slime, and keeps these."""
_ROUTES_OF_SLIME: Mapping[str, tuple[Any, str]] = {
    "provenance": ("latest-prefill", "the routes of the last call replace all")
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            _preset(
                "verl",
                "the TokenOutput of verl's LLMServerClient (verl.workers.rollout.llm_server)",
                ("vllm", "sglang"),
                {
                    "resume": ("client", "its loop sends an aborted prompt again with what it has"),
                    "versions": ("min-max", "min_global_steps and max_global_steps of a sample"),
                    "abort_surfaces": _HIDDEN_ABORTS,
                    "partial_off": (
                        "surfaced",
                        "without partial rollout the sample comes out with its stop_reason",
                    ),
                    "sampling": ("forwarded", "sampling_params go to the engine as they are"),
                    "multimodal": (True, "image_data goes to the engine"),
                    "kv_policy": _RECOMPUTED,
                },
                {"provenance": ("as-sampled", "a resumed sample keeps its rows (verl #6046)")},
            ),
            _preset(
                "skyrl",
                "a sample of GeneratorOutput (skyrl.train.generators)",
                ("vllm",),
                {
                    "resume": ("engine", "updates freeze requests in the engine (PauseMode.KEEP)"),
                    "versions": ("none", "a sample has no version"),
                    "abort_surfaces": (True, "stop_reasons holds abort as the engine said it"),
                    "loss_mask": _ENVIRONMENT_MASKED,
                    "multi_turn": (True, "the environment's observations are appended"),
                    "missing_logprobs": _NO_LOGPROB_OF_ENVIRONMENT,
                    "sampling": ("forwarded", "sampling_params go to the engine as they are"),
                    "kv_policy": _KEPT_KV,
                    "updates_pause": (
                        True,
                        "no request in flight reads weights that arrived in part",
                    ),
                },
                {
                    "rows": (
                        "captured-prefix",
                        '"for a prefix of its prompt and response tokens" (generators/base.py)',
                    ),
                    "dtype": ("uint8|int16|int32", "the smallest that holds the ids"),
                },
            ),
            _preset(
                "slime",
                "a Sample (slime.rollout.sglang_rollout)",
                ("sglang",),
                _OF_SLIME,
                _ROUTES_OF_SLIME,
            ),
            _preset(
                "miles",
                "a Sample (miles.rollout.sglang_rollout)",
                ("sglang",),
                _OF_SLIME,
                _ROUTES_OF_SLIME,
            ),
            _preset(
                "areal",
                "a ModelResponse (areal.api.io_struct)",
                ("sglang", "vllm"),
                {
                    "resume": ("client", "agenerate appends and submits again until it ends"),
                    "versions": ("token", "output_versions, one a token"),
                    "abort_surfaces": _HIDDEN_ABORTS,
                    "sampling": _OWN_SAMPLING,
                    "kv_policy": _RECOMPUTED,
                },
                {"provenance": ("as-sampled", "a row is that of its own segment")},
            ),
            _preset(
                "trl",
                "a RolloutSample (trl.experimental.async_grpo)",
                ("vllm",),
                {
                    "resume": (
                        "engine",
                        "updates freeze requests in the engine (/pause?mode=keep)",
                    ),
                    "versions": ("sample", "model_version, read when the group began"),
                    "tag_read": ("admission", "model_version may name weights of before"),
                    "abort_surfaces": _HIDDEN_ABORTS,
                    "finish_reason": (False, "the loop does not read why a call ended"),
                    "loss_mask": (True, "completion_mask"),
                    "missing_logprobs": ("masked", "a token without one has mask 0"),
                    "sampling": _OWN_SAMPLING,
                    "kv_policy": _RECOMPUTED,
                },
                None,
            ),
            _preset(
                "openrlhf",
                "what AgentExecutor.execute returns (openrlhf.utils.agent)",
                ("vllm",),
                {
                    "resume": ("engine", "updates freeze requests in the engine (mode keep)"),
                    "versions": ("none", "a sample has no version"),
                    "abort_surfaces": (False, "it has no word for an abort"),
                    "loss_mask": (True, "from action_ranges"),
                    "sampling": ("forwarded", "sampling_params go to the engine as they are"),
                    "kv_policy": _RECOMPUTED,
                },
                None,
            ),
            _preset(
                "nemo_rl",
                "a row that the rollout manager commits (nemo_rl.experience.rollout_manager)",
                ("vllm",),
                {
                    "resume": ("engine", "weights are exchanged in flight"),
                    "versions": ("bounds", "start_weight_version and end_weight_version enclose"),
                    "abort_surfaces": _HIDDEN_ABORTS,
                    "loss_mask": (True, "token_loss_mask"),
                    "multi_turn": (True, "the environment's messages are appended"),
                    "missing_logprobs": _NO_LOGPROB_OF_ENVIRONMENT,
                    "sampling": _OWN_SAMPLING,
                    "kv_policy": _KEPT_KV,
                },
                {
                    "rows": ("T", "routed_experts of every message, as long as its tokens"),
                    "final_row": ("arange", "the last token's row is arange(top_k)"),
                    "filler": ("arange", "so are tokens of the environment that nobody forwarded"),
                    "dtype": ("int8|int16|int32", "resolve_routed_experts_dtype"),
                    "provenance": (
                        "as-sampled",
                        "a token's experts are the same in rollout and training (router-replay.md)",
                    ),
                },
            ),
            _preset(
                "prime_rl",
                "a TrainingSample (prime_rl.orchestrator)",
                ("vllm",),
                {
                    "resume": ("engine", "updates freeze requests (/pause?mode=keep)"),
                    "versions": ("bounds", "PolicySpan: read when the episode began and ended"),
                    "abort_surfaces": (True, "the stop condition of the episode says it"),
                    "partial_off": ("dropped", "a branch without tokens becomes no sample"),
                    "loss_mask": _ENVIRONMENT_MASKED,
                    "multi_turn": (True, "verifiers' environments answer"),
                    "missing_logprobs": _NO_LOGPROB_OF_ENVIRONMENT,
                    "sampling": _OWN_SAMPLING,
                    "kv_policy": _KEPT_KV,
                },
                {
                    "rows": ("T", "as many rows as token_ids"),
                    "final_row": ("previous", "the last row repeats the one before it"),
                    "filler": ("previous", "so do answers after which no call came"),
                    "dtype": ("uint8|uint16", "uint16 above 256 experts"),
                },
            ),
            _preset(
                "verifiers",
                "a branch of a rollout's trace (verifiers)",
                ("vllm",),
                {
                    "resume": ("engine", "it sends a call once"),
                    "versions": ("none", "a trace has no tag"),
                    "abort_surfaces": (True, "the stop condition of the rollout says it"),
                    "partial_off": ("surfaced", "an aborted branch is kept"),
                    "loss_mask": _ENVIRONMENT_MASKED,
                    "multi_turn": (True, "its environments answer"),
                    "missing_logprobs": _NO_LOGPROB_OF_ENVIRONMENT,
                    "sampling": _OWN_SAMPLING,
                    "kv_policy": _KEPT_KV,
                },
                {
                    "rows": ("T", "as many rows as tokens"),
                    "final_row": ("previous", "the last row repeats the one before it"),
                    "filler": ("previous", "so do answers after which no call came"),
                    "dtype": ("uint8|uint16", "uint16 above 256 experts"),
                },
            ),
            _preset(
                "roll",
                "a DataProto of the rollout loop (roll.distributed.scheduler)",
                ("sglang", "vllm"),
                {
                    "resume": ("client", "pre_output_token_ids are sent again after an abort"),
                    "versions": ("none", "versions are counted a prompt, and are in no sample"),
                    "abort_surfaces": _HIDDEN_ABORTS,
                    "finish_reason": (False, "a sample does not say why it ended"),
                    "loss_mask": (True, "response_mask"),
                    "partial_off": ("dropped", "without partial rollout an aborted prompt goes"),
                    "sampling": _OWN_SAMPLING,
                    "kv_policy": _RECOMPUTED,
                },
                {
                    "rows": ("T", "as long as the padded sequence"),
                    "final_row": ("zeros", "the last row is zero"),
                    "filler": ("zeros", "so is every row that was not captured"),
                    "dtype": ("uint8|int16", "from the largest id that the data holds"),
                    "provenance": (
                        "as-sampled",
                        "the experts are those of the sampled trajectory (router_replay.md, 2.3)",
                    ),
                },
            ),
            _preset(
                "rlinf",
                "a RolloutResult (rlinf.data.schema)",
                ("sglang", "vllm"),
                {
                    "resume": ("client", "an aborted group migrates with its generated ids"),
                    "versions": ("none", "a sample has no version"),
                    "abort_surfaces": _HIDDEN_ABORTS,
                    "sampling": _OWN_SAMPLING,
                    "kv_policy": _RECOMPUTED,
                },
                None,
            ),
        )
    }
)
"""The presets by name."""
