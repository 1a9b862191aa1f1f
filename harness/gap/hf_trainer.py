"""``HfTrainer``, which scores rollouts with a causal model of HF transformers.

It routes natively or with the rollout's routes. Needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.records import Rollout, Version
from rollproof.errors import GapError, UsageError
from rollproof.gap.scored_rollouts import Scored

__all__ = ["HfTrainer"]

_PLACE = "{version}"
_MIXED = (
    "All tokens were scored under the one checkpoint {path}, though versions {versions} sampled"
    " them: the gap holds the policy's own change. Name one checkpoint a version"
    " (hf:VERSION=PATH,...)."
)


class HfTrainer:
    """Scores under checkpoints of HF transformers, a folder for each version of the weights.

    One model is in memory at a time.

    Args:
        paths: folders by version (as text); or one path for all, which may contain ``{version}``.
        dtype: torch's name of the dtype (default: the checkpoint's).
        temperature: the sampling temperature (default: that of the trace's calls, else 1).
        device: where to run (default: cuda if available).
        rows: bound of a microbatch, in tokens with padding.
    """

    def __init__(
        self,
        paths: Mapping[str, str] | str | Path,
        *,
        dtype: str = "auto",
        temperature: float | None = None,
        device: str | None = None,
        rows: int = 4096,
    ) -> None:
        self.paths: Mapping[str, str] | str = paths if isinstance(paths, Mapping) else str(paths)
        self.dtype: str = dtype
        self.temperature: float | None = temperature
        self.device: str | None = device
        self.rows: int = rows
        self._temperature = 1.0 if temperature is None else temperature
        self.notes: list[str] = []
        self._loaded: tuple[str, Any] | None = None
        self._scored: set[str] = set()

    @classmethod
    def of(cls, spec: str, **options: Any) -> HfTrainer:
        """Parse ``PATH``, ``PATH/{version}`` or ``VERSION=PATH,VERSION=PATH``."""
        if "=" not in spec:
            return cls(spec, **options)
        paths = {}
        for part in spec.split(","):
            version, sign, path = part.partition("=")
            if not sign or not version or not path:
                raise UsageError(
                    f"hf:{spec} must be hf:PATH, hf:PATH/{_PLACE} or hf:VERSION=PATH,VERSION=PATH;"
                    f" {part!r} is none of these."
                )
            paths[version] = path
        return cls(paths, **options)

    def sampled_at(self, temperatures: Collection[float]) -> None:
        """Use the temperature of the trace's calls.

        Raises ``GapError`` if they have several, or another than the one to score at.
        """
        # greedy calls have no distribution of their own
        warm = sorted({temperature for temperature in temperatures if temperature > 0})
        listed = " and ".join(f"{temperature:g}" for temperature in warm)
        if len(warm) > 1:
            raise GapError(
                f"The trace's calls were sampled at temperatures {listed}: score the rollouts of"
                " one temperature at a time."
            )
        if warm and self.temperature not in (None, warm[0]):
            raise GapError(
                f"The trace's calls were sampled at temperature {listed}, but would be scored at"
                f" {self.temperature:g}: those are different distributions. Leave the temperature"
                " out to score at the calls' own."
            )
        if self.temperature is None:
            self._temperature = warm[0] if warm else 1.0

    def score(self, rollouts: Sequence[Rollout], *, version: Version, replay: bool) -> list[Scored]:
        """See ``GapTrainer``.

        Raises ``GapError`` if a version has no checkpoint, or its checkpoint cannot be read.
        """
        model = self.model(version)
        out: list[Scored | None] = [None] * len(rollouts)
        for numbers in self._microbatches(rollouts):
            batch = [rollouts[number] for number in numbers]
            for number, scored in zip(numbers, self._batch(model, batch, replay), strict=True):
                out[number] = scored
        return [scored for scored in out if scored is not None]

    def model(self, version: Version) -> Any:
        """Return the model of a version, in evaluation mode."""
        path = self._path(version)
        if self._loaded is None or self._loaded[0] != path:
            self._loaded = None  # the old one goes before the new one comes
            self._loaded = path, self._load(path)
        return self._loaded[1]

    def _path(self, version: Version) -> str:
        if isinstance(self.paths, str):
            if _PLACE in self.paths:
                if version is None:
                    raise GapError(
                        f"{self.paths} needs a version, and the rollouts do not say which weights"
                        " sampled them."
                    )
                return self.paths.replace(_PLACE, str(version))
            self._scored.add(str(version))
            if len(self._scored) > 1:
                versions = ", ".join(sorted(self._scored))
                self.notes[:] = [_MIXED.format(path=self.paths, versions=versions)]
            return self.paths
        if str(version) not in self.paths:
            raise GapError(
                f"No checkpoint is named for version {version}; there are those of"
                f" {', '.join(self.paths)}."
            )
        return self.paths[str(version)]

    def _load(self, path: str) -> Any:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise GapError(
                f"--trainer hf:PATH needs torch and transformers ({error}): pip install torch"
                " transformers."
            ) from error
        if self.dtype != "auto" and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise UsageError(
                f"dtype={self.dtype!r} is not a dtype of torch: auto, float32, bfloat16, float16,"
                " float64."
            )
        if not Path(path).is_dir():
            raise GapError(
                f"{path} is not a folder: name a checkpoint of HF transformers (config.json and"
                " safetensors)."
            )
        kind = "auto" if self.dtype == "auto" else getattr(torch, self.dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise GapError(f"The checkpoint in {path} cannot be read: {error}") from error
        if kind is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products of float64 do not exist
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return model.to(device).eval()

    def _microbatches(self, rollouts: Sequence[Rollout]) -> Iterator[list[int]]:
        """Yield indexes of rollouts of similar length, at most ``rows`` tokens with padding.

        A longer rollout is a batch by itself.
        """
        batch: list[int] = []
        # sorted by length, so that little of a microbatch is padding
        for number in sorted(range(len(rollouts)), key=lambda i: rollouts[i].total):
            if batch and (len(batch) + 1) * rollouts[number].total > self.rows:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _batch(self, model: Any, batch: Sequence[Rollout], replay: bool) -> list[Scored]:
        import torch

        from rollproof.replay.hf import hf_record, hf_replay
        from rollproof.replay.hf.inputs import Layout, lay_out

        bare = [rollout.request_id for rollout in batch if not rollout.prompt_ids]
        if bare:
            raise GapError(f"Rollout {bare[0]} has no prompt: nothing predicts its first token.")
        inputs = lay_out(batch, Layout.RIGHT)
        call = {
            name: value.to(model.device) if hasattr(value, "to") else value
            for name, value in inputs.call.items()
        }
        moe = _has_routers(model)

        def routing() -> Any:
            if replay:
                return hf_replay(model, inputs.routes())
            return hf_record(model) if moe else nullcontext()

        with torch.no_grad():
            with routing() as routed:
                states, head = _hidden(model, call)
            if head is None:
                with routing() as routed:
                    states = model(**call).logits
        recorded = None if replay or not moe else routed
        width = call["input_ids"].shape[1]
        out = []
        for line, rollout in enumerate(batch):
            first, last = len(rollout.prompt_ids) - 1, rollout.total - 1
            ids = torch.tensor(rollout.response_ids, device=model.device)
            logprobs = _logprobs(states[line, first:last], head, ids, self._temperature)
            routes = None
            if replay and rollout.routes is not None:
                routes = rollout.routes[first:last]
            elif recorded is not None:
                routes = _on_axis(recorded, rollout, line * width + np.arange(first, last))
            out.append(Scored(logprobs=logprobs.double().cpu().numpy(), routes=routes))
        return out


def _has_routers(model: Any) -> bool:
    """Whether routes can be recorded. A replay that cannot be done raises an error by itself."""
    from rollproof.errors import RouterError
    from rollproof.replay.hf import find_routers

    try:
        find_routers(model)
    except RouterError:
        return False
    return True


def _hidden(model: Any, call: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the input of the head ``(batch, width, hidden)``, and the head's matrix.

    ``None`` twice if the model's logits are not their product (a bias, a scale, a cap).
    """
    import torch

    head = model.get_output_embeddings()
    caught = []

    def first_only(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        # logits of all tokens are the largest tensor of a forward, and are not needed
        caught.append(args[0])
        return (args[0][:, :1], *args[1:])

    handle = head.register_forward_pre_hook(first_only)
    try:
        made = model(**call).logits
    finally:
        handle.remove()
    if len(caught) == 1 and caught[0].ndim == 3 and caught[0].dtype == head.weight.dtype:
        # one position shows whether the logits are the product, without the logits of all tokens
        product = caught[0][:, :1].float() @ head.weight.float().t()
        if product.shape == made.shape and torch.allclose(
            product, made.float(), rtol=0.0, atol=0.02 * float(made.abs().max()) + 1e-6
        ):
            return caught[0], head.weight
    return None, None


def _logprobs(states: Any, head: Any, ids: Any, temperature: float) -> Any:
    import torch

    from rollproof.gap.scoring import score

    if head is not None and states.dtype is not torch.float64:
        return score(states, head, ids, temperature=temperature).logprob
    logits = states if head is None else states @ head.t()
    return torch.log_softmax(logits.double() / temperature, -1).gather(1, ids[:, None])[:, 0]


def _on_axis(recorded: Any, rollout: Rollout, rows: Any) -> Any:
    """Return the recorded rows on the rollout's layer axis.

    Layers without a router hold -1 if that axis counts them.
    """
    routes = recorded.routes[rows].numpy()
    if rollout.routes is None or rollout.routes.shape[1] == routes.shape[1]:
        return routes
    if rollout.routes.shape[1] != recorded.routers.num_layers:
        return None
    shape = (len(routes), recorded.routers.num_layers, routes.shape[2])
    on_axis = np.full(shape, -1, dtype=np.int64)
    on_axis[:, list(recorded.layers)] = routes
    return on_axis
