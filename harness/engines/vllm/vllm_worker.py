"""An extension of vLLM's worker that changes weights in place.

It is ``AsyncEngineArgs.worker_extension_cls``. On a CPU, vLLM 0.32 packs matrices when they are
loaded, and cannot load them a second time. Parameters that it does not pack (embeddings, norms) can
be overwritten, which is a correct policy update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["WeightEditor"]


class WeightEditor:
    """Mixed into vLLM's worker; ``collective_rpc("edit_weights", ...)`` calls it."""

    model_runner: Any

    def edit_weights(self, before: str, after: str) -> list[str]:
        """Write the tensors that differ between two checkpoints into the model; return their names.

        Raises ``ValueError``, and changes nothing, if vLLM packed one of them.
        """
        import torch
        from safetensors.torch import load_file

        def tensors(folder: str) -> dict[str, Any]:
            return {
                name: tensor
                for file in sorted(Path(folder).glob("*.safetensors"))
                for name, tensor in load_file(file).items()
            }

        old, new = tensors(before), tensors(after)
        changed = {
            name: tensor for name, tensor in new.items() if not torch.equal(old[name], tensor)
        }
        parameters = dict(self.model_runner.model.named_parameters())
        packed = [
            name
            for name, tensor in changed.items()
            if name not in parameters or parameters[name].shape != tensor.shape
        ]
        if packed:
            raise ValueError(
                f"these weights differ between {before} and {after}, but vLLM packed them when it"
                f" loaded them: {packed[:4]} ({len(packed)} in all). Change embeddings and"
                " norms only (rollproof.fakes.tiny_models.second_version), or reload."
            )
        with torch.no_grad():
            for name, tensor in changed.items():
                parameters[name].copy_(tensor)
        return sorted(changed)
