"""What is added to a vLLM worker so that weights can be changed in place:
``AsyncEngineArgs.worker_extension_cls``.

On a CPU, vLLM 0.32 packs matrices when they are loaded, and cannot load them a second time.
Parameters that it keeps as they are (embeddings, norms) can be written to: a policy update of
those, and a correct one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["WeightEditor"]


class WeightEditor:
    """Mixed into vLLM's worker; ``collective_rpc("edit_weights", ...)`` calls it."""

    model_runner: Any

    def edit_weights(self, before: str, after: str) -> list[str]:
        """Write the tensors by which checkpoint ``after`` differs from ``before`` into the model;
        returns their names.

        Raises ``ValueError``, and changes nothing, where one of them is not kept as it was loaded.
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
                f"these weights differ between {before} and {after}, and vLLM does not keep them as"
                f" they are loaded: {packed[:4]} ({len(packed)} in all). Change embeddings and"
                " norms only (rollproof.fakes.tiny_models.second_version), or reload."
            )
        with torch.no_grad():
            for name, tensor in changed.items():
                parameters[name].copy_(tensor)
        return sorted(changed)
