"""The independent forward: a Hugging Face model of the checkpoint that an engine serves.

It runs in the harness's own process, in float32, one sequence at a time, without a cache: without
anything that an engine optimises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import SamplingOption
from rollproof.core.records import IntArray, LogprobArray, Scalar
from rollproof.errors import EngineError
from rollproof.replay.one_thread import one_thread

__all__ = ["ReferenceModel"]


class ReferenceModel:
    """Models of several checkpoints, loaded at their first forward.

    Args:
        checkpoints: folders by version.
        contract: names the MoE layers and the top-k of the routing to capture.
        dtype: of weights and forward.

    Raises ``EngineError`` if torch and transformers are not installed, or do not know the model.
    """

    def __init__(
        self, checkpoints: Mapping[str, Path], contract: Contract, dtype: str = "float32"
    ) -> None:
        self._checkpoints = dict(checkpoints)
        self._contract = contract
        self._dtype = dtype
        self._models: dict[str, Any] = {}

    def forward(
        self, version: str, ids: Sequence[int], temperature: float
    ) -> tuple[LogprobArray, LogprobArray, IntArray, LogprobArray, LogprobArray]:
        """Return ``logprobs``, ``scaled``, ``routes``, ``margins`` and ``orders`` as in
        ``rollproof.core.events.rollout.Reference``.
        """
        import torch

        model = self._model(version)
        vocab = model.get_input_embeddings().num_embeddings
        if ids and max(ids) >= vocab:
            raise EngineError(
                f"The engine returned token {max(ids)}; the vocabulary of"
                f" {self._checkpoints[version]} ends at {vocab - 1}."
            )
        with torch.no_grad(), one_thread(), self._captured(model) as scores:
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        raw = _logprobs_of(logits, ids)
        scaled = raw if temperature in (0.0, 1.0) else _logprobs_of(logits / temperature, ids)
        return raw, scaled, *self._routing(scores, len(ids))

    def sampled(
        self, version: str, ids: Sequence[int], sampling: Mapping[str, Scalar], start: int
    ) -> tuple[LogprobArray, LogprobArray, LogprobArray]:
        """Return ``penalised``, ``penalised_scaled`` and ``processed`` as in
        ``rollproof.core.events.rollout.Reference``, NaN for the prompt ``ids[:start]``.
        """
        import torch

        model = self._model(version)
        with torch.no_grad(), one_thread():
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        terms = self._contract.engine
        over_prompt = terms is None or terms.repetition_over_prompt
        out = np.full((3, len(ids)), np.nan)
        for place in range(max(start, 1), len(ids)):
            penalised = _penalised(
                logits[place - 1], ids[:start] if over_prompt else (), ids[start:place], sampling
            )
            token = ids[place]
            scaled = penalised / (float(sampling.get("temperature") or 0.0) or 1.0)
            out[:2, place] = [
                float(torch.log_softmax(scores, -1)[token]) for scores in (penalised, scaled)
            ]
            out[2, place] = _processed(scaled, token, sampling)
        return out[0], out[1], out[2]

    def replayed(self, version: str, ids: Sequence[int], routes: IntArray) -> LogprobArray:
        """Return the log-probability of each token at temperature 1 while routers execute
        ``routes``: ``(T,)``, NaN for the first token.

        ``routes`` is ``(T, layers, top_k)`` over all layers or the MoE ones; the model routes a row
        of -1 itself.
        """
        import torch

        from rollproof.replay.hf.passes import hf_replay

        model = self._model(version)
        with torch.no_grad(), one_thread(), hf_replay(model, torch.as_tensor(routes)):
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return _logprobs_of(logits, ids)

    def _model(self, version: str) -> Any:
        if version not in self._models:
            try:
                import torch
                from transformers import AutoModelForCausalLM
            except ImportError as error:
                raise EngineError(
                    "The independent forward needs torch and transformers in addition to"
                    f" rollproof ({error}): run where the engine is installed."
                ) from error
            path = self._checkpoints[version]
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, self._dtype), local_files_only=True
                )
            except (OSError, ValueError, KeyError) as error:
                raise EngineError(
                    f"transformers cannot load {path}, so there is no independent forward of it:"
                    f" {error}."
                ) from error
            self._models[version] = model.eval()
        return self._models[version]

    @contextmanager
    def _captured(self, model: Any) -> Iterator[dict[int, Any]]:
        """Capture the scores among which each layer's router chooses, and its choice: ``{layer:
        (scores, ids)}``.
        """
        import torch
        from torch.overrides import TorchFunctionMode

        experts, top_k = self._contract.num_experts, self._contract.top_k
        choices: dict[int, Any] = {}
        current = [-1]

        class Watch(TorchFunctionMode):  # type: ignore[misc]  # torch is not installed where types are checked
            # every family's router ends in a top-k of ``top_k`` among ``num_experts``, whatever
            # comes before it

            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                out = function(*args, **(kwargs or {}))
                if function in (torch.topk, torch.Tensor.topk):
                    k = args[1] if len(args) > 1 else (kwargs or {}).get("k")
                    if k == top_k and args[0].shape[-1] == experts:
                        choices[current[0]] = (
                            args[0].detach().float().reshape(-1, experts),
                            out.indices.reshape(-1, top_k),
                        )
                return out

        handles = []
        for name, module in model.named_modules():
            layer = re.fullmatch(r".*layers\.(\d+)", name)
            if layer is not None:
                handles.append(
                    module.register_forward_pre_hook(
                        lambda *_, at=int(layer[1]): current.__setitem__(0, at)
                    )
                )
        try:
            with Watch():
                yield choices
        finally:
            for handle in handles:
                handle.remove()

    def _routing(
        self, scores: Mapping[int, Any], length: int
    ) -> tuple[IntArray, LogprobArray, LogprobArray]:
        """Return choices, margins and orders over all layers; zeros and infinity for dense ones."""
        contract = self._contract
        layers = contract.num_layers or 0
        routes: IntArray = np.zeros((length, layers, contract.top_k or 0), dtype=np.int64)
        margins, orders = np.full((length, layers), np.inf), np.full((length, layers), np.inf)
        missing = set(contract.moe_layers or ()) - set(scores)
        if missing:
            raise EngineError(
                f"No top-{contract.top_k} among {contract.num_experts} experts was seen in"
                f" layers {sorted(missing)} of the reference model: its config and its code"
                " disagree about which layers are MoE."
            )
        for layer in contract.moe_layers or ():
            among, chosen = scores[layer]
            routes[:, layer] = chosen.numpy()
            picked = among.gather(1, chosen)
            left = among.scatter(1, chosen, float("-inf")).amax(1)
            size = picked.abs().amax(1).clamp(min=1e-12)
            margins[:, layer] = ((picked.amin(1) - left) / size).numpy()
            gaps = picked.sort(1).values.diff(dim=1)
            if gaps.shape[1]:
                orders[:, layer] = (gaps.amin(1) / size).numpy()
        return routes, margins, orders


def _logprobs_of(logits: Any, ids: Sequence[int]) -> LogprobArray:
    """Return the log-probability of each token given the earlier ones, ``(T,)``: first NaN."""
    import torch

    out = np.full(len(ids), np.nan)
    if len(ids) > 1:
        logprobs = torch.log_softmax(logits[:-1], -1)
        out[1:] = logprobs.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].double().numpy()
    return out


def _penalised(
    logits: Any, prompt: Sequence[int], output: Sequence[int], sampling: Mapping[str, Scalar]
) -> Any:
    """Return one row of logits after the penalties of a call, in the order of vLLM and SGLang: the
    repetition penalty first.
    """
    import torch

    scores, vocab = logits.clone(), len(logits)
    counts = torch.bincount(torch.tensor(list(output), dtype=torch.long), minlength=vocab)
    seen = counts > 0
    repetition = float(sampling.get(SamplingOption.REPETITION_PENALTY) or 1.0)
    repeated = seen.clone()
    repeated[torch.tensor(list(prompt), dtype=torch.long)] = True
    scores[repeated] = torch.where(
        scores[repeated] > 0, scores[repeated] / repetition, scores[repeated] * repetition
    )
    scores -= float(sampling.get(SamplingOption.FREQUENCY_PENALTY) or 0.0) * counts
    scores -= float(sampling.get(SamplingOption.PRESENCE_PENALTY) or 0.0) * seen
    return scores


_EDGE = 1e-3
"""The part of a cut in which rounding decides on which side of it a token lies."""


def _processed(scores: Any, token: int, sampling: Mapping[str, Scalar]) -> float:
    """Return the log-probability of a token after min-p, top-k and top-p: -inf if it is left out,
    NaN if rounding decides what is.
    """
    import torch

    wide, narrow = (_kept(scores, sampling, slack) for slack in (_EDGE, -_EDGE))
    if not bool(wide[token]):
        return float("-inf")
    if not torch.equal(wide, narrow):
        return float("nan")
    return float(torch.log_softmax(scores.masked_fill(~wide, float("-inf")), -1)[token])


def _kept(scores: Any, sampling: Mapping[str, Scalar], slack: float) -> Any:
    """Return ``(vocab,)``: which tokens the parameters leave; more of them with more ``slack``."""
    import torch

    kept = torch.ones(len(scores), dtype=torch.bool)
    min_p = float(sampling.get(SamplingOption.MIN_P) or 0.0)
    if min_p:
        kept &= scores >= scores.max() + np.log(min_p) - slack
    top_k = int(sampling.get(SamplingOption.TOP_K) or 0)
    if top_k:
        last = scores.masked_fill(~kept, float("-inf")).topk(top_k).values[-1]
        # the k-th itself is left, however close the next one is
        kept &= scores >= last - max(slack, 0.0)
    top_p = float(sampling.get(SamplingOption.TOP_P) or 0.0)
    if top_p:
        probabilities = torch.softmax(scores.masked_fill(~kept, float("-inf")), -1)
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        kept[order[before >= top_p + slack]] = False
    return kept
