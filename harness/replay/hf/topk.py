"""Replace a router's own choice of experts, without any formula of its family.

A router scores, selects with ``torch.topk`` and turns the scores of the selected experts into
weights; families differ in all but the selection. So the router's own forward runs, and its
``topk`` of ``(rows, num_experts)`` scores with the model's k returns other ids and the live scores
at those ids. Softmax before or after, sigmoid, bias, groups, normalisation and scaling stay the
model's code, and the gate has gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rollproof.errors import RouterError

__all__ = ["Choose", "intercepted", "native_choice", "probe"]

Choose = Callable[[torch.Tensor], torch.Tensor]
"""From live scores ``(rows, num_experts)`` to the ids to execute ``(rows, top_k)``, int64, on the
same device.
"""

_PROBE_ROWS = 2
_PROBE_SIZE = 1e-2  # so small that no softmax over the scores underflows


class _TopK(TorchFunctionMode):  # type: ignore[misc]  # torch is not installed where types are checked
    """Replaces the top-k of ``(rows, num_experts)`` scores by ``choose``; other calls pass."""

    def __init__(self, num_experts: int, top_k: int, choose: Choose) -> None:
        super().__init__()
        self._shape = (num_experts, top_k)
        self._choose = choose
        self.chosen: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk) and self._is_selection(*args, **named):
            scores = args[0] if args else named["input"]
            ids = self._choose(scores)
            self.chosen.append(ids)
            return torch.return_types.topk((scores.gather(-1, ids), ids))
        return func(*args, **named)

    def _is_selection(
        self,
        input: Any,
        k: int,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = True,
        *,
        out: Any = None,
    ) -> bool:
        return bool(
            input.dim() == 2
            and (input.shape[-1], k) == self._shape
            and dim in (-1, 1)
            and largest
            and out is None
        )


def native_choice(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the ids ``(rows, top_k)`` that a router chooses by itself."""
    return scores.detach().topk(top_k, dim=-1).indices


def intercepted(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_experts: int,
    top_k: int,
    choose: Choose,
    who: str,
) -> tuple[Any, torch.Tensor]:
    """Run ``forward`` with ``choose`` in place of its top-k; return its output and the ids.

    ``who`` names the router in errors. Raises ``RouterError`` unless the call has exactly one such
    top-k: a router that sorts, takes an argmax or runs a fused kernel is refused, and so is one
    with two similar selections.
    """
    with _TopK(num_experts, top_k, choose) as mode:
        output = forward(*args, **kwargs)
    if len(mode.chosen) != 1:
        raise RouterError(
            f"{who} called torch.topk {len(mode.chosen)} times on (rows, {num_experts}) scores with"
            f" k={top_k} in its forward; replay needs exactly one. "
            + (
                "It selects in another way (a sort, an argmax, a fused kernel, or outside of its"
                " forward), and would route natively."
                if not mode.chosen
                else (
                    "It is uncertain which of them selects the experts, for example with as many"
                    " groups as experts."
                )
            )
            + " Use a release of transformers whose router selects by one torch.topk (for the"
            " common families 5.24 does), or do not replay."
        )
    return output, mode.chosen[0]


def probe(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_experts: int,
    top_k: int,
    who: str,
) -> bool:
    """Test whether a router can be replayed, on two small rows with its lowest-scored experts.

    The rows replace the hidden states of the call; its other arguments (a bias, as MiniMax-M2's)
    stay. Returns whether the test was conclusive: with NaN in its weights it is not. It leaves no
    gradient, and draws no random number. Raises ``RouterError`` if the top-k cannot be intercepted,
    if the output does not show what is executed, or if experts that the router would not choose get
    no weight.
    """
    # the last case: it masks scores before its top-k and takes the weights from the masked ones, as
    # DeepSeek-V2 with groups does. A replayed expert in another group is silently switched off, and
    # its gate gradient is 0; ISEEKYAN/Megatron-LM#79 fixed one such router
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        raise RouterError(
            f"{who} is not called with hidden states first; rollproof cannot test it, so it does"
            " not replay it."
        )
    hidden: torch.Tensor = args[0]
    shape = (*(1,) * (hidden.dim() - 2), _PROBE_ROWS, hidden.shape[-1])
    rows = _PROBE_SIZE * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    scored: list[torch.Tensor] = []

    def lowest(scores: torch.Tensor) -> torch.Tensor:
        scored.append(scores)
        return scores.topk(top_k, dim=-1, largest=False).indices

    devices = [hidden.device] if hidden.device.type == "cuda" else []
    shown = (rows.to(hidden.device, hidden.dtype), *args[1:])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            output, ids = intercepted(
                forward, shown, kwargs, num_experts=num_experts, top_k=top_k, choose=lowest, who=who
            )
    except RouterError:
        raise
    except Exception as error:  # from the router's own code, for fewer rows than in the call
        raise RouterError(
            f"{who} cannot be tested on {_PROBE_ROWS} rows, so rollproof does not replay it:"
            f" {type(error).__name__}: {error}."
        ) from error
    weights, executed = (
        _weights(output, tuple(ids.shape), who),
        executed_ids(output, tuple(ids.shape), who),
    )
    if not bool(torch.equal(executed.sort(-1).values, ids.sort(-1).values)):
        raise RouterError(
            f"{who} should execute experts {ids.tolist()} but executes {executed.tolist()}."
        )
    if bool(torch.isnan(scored[0]).any()):
        return False
    if not bool((torch.isfinite(weights) & (weights != 0)).all()):
        raise RouterError(
            f"{who} gives weights {weights.tolist()} to the experts that it scores lowest: it masks"
            " scores before its top-k and takes the weights from the masked ones. A replayed"
            " expert that the live router masks would be switched off, and its gate would get no"
            " gradient. Replay needs weights from unmasked scores (DeepSeek-V3 does so), or a"
            " model without groups."
        )
    return True


def executed_ids(output: Any, shape: tuple[int, ...], who: str) -> torch.Tensor:
    """Return the ids ``(rows, top_k)`` in a router's output, its integer tensor.

    Raises ``RouterError`` if there is none of ``shape``.
    """
    return _output_tensor(
        output, shape, who, "expert ids", lambda tensor: not tensor.is_floating_point()
    )


def _weights(output: Any, shape: tuple[int, ...], who: str) -> torch.Tensor:
    return _output_tensor(output, shape, who, "weights", lambda tensor: tensor.is_floating_point())


def _output_tensor(
    output: Any,
    shape: tuple[int, ...],
    who: str,
    content: str,
    matches: Callable[[torch.Tensor], bool],
) -> torch.Tensor:
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [
        part
        for part in parts
        if isinstance(part, torch.Tensor) and part.shape == shape and matches(part)
    ]
    if not tensors:
        shapes = [
            tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            for part in parts
        ]
        raise RouterError(
            f"{who} returns {shapes}: no {content} of shape {shape}, so what it executes cannot be"
            " seen."
        )
    return tensors[-1]
