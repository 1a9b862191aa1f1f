"""What scripts on ROLL share: stand-ins for what its modules import at their head, and requests and answers."""

import contextlib
import io
import logging
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import roll

ABSENT = (
    "codetiming grpc mcore_adapter megatron modelscope more_itertools opentelemetry sglang transfer_queue"
).split()
PAD = 99


class Absent:
    """Finds a stand-in for every module of these packages."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__version__, module.__getattr__ = "0.5.7", lambda name: MagicMock()
        return module

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.append(Absent())
GIT = Path(next(iter(roll.__path__))).parent / ".git"
HEAD = (GIT / "HEAD").read_text(encoding="utf-8").strip()
VERSION = (HEAD if "ref: " not in HEAD else (GIT / HEAD[5:]).read_text(encoding="utf-8"))[:8]
os.environ["ROLL_LOG_DIR"] = (
    tempfile.mkdtemp()
)  # where it is imported ROLL makes a folder for its log
with contextlib.redirect_stdout(io.StringIO()):
    from roll.distributed.scheduler.protocol import DataProto
    from roll.distributed.scheduler.user_defined_rollout_loop import (
        postprocess_output_data,
        postprocess_paused_data,
    )

    __import__("roll.third_party.megatron.router_replay_utils")
logging.disable(logging.CRITICAL)
__all__ = [
    "PAD",
    "VERSION",
    "answered",
    "asked",
    "postprocess_output_data",
    "postprocess_paused_data",
]


def asked():
    """A request with the prompt 5 6."""
    import torch

    ids, mask, positions = torch.tensor([[5, 6]]), torch.tensor([[1, 1]]), torch.tensor([[0, 1]])
    return DataProto.from_single_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    )


def answered(request, tokens, **others):
    """What the router's client makes of an engine's answer, in the request's own meta_info."""
    said = {
        "output_token_ids": [tokens],
        "output_logprobs": [[-0.5] * len(tokens)],
        "eos_token_id": [1, PAD],
        "pad_token_id": PAD,
    }
    request.meta_info.update(said, **others)
    return DataProto(meta_info=request.meta_info)
