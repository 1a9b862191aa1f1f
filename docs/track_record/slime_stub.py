"""What scripts on slime share: stand-ins for the engine's packages, which slime's manager imports at its head."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import slime


class Absent:
    """Finds a stand-in for every module of SGLang."""

    def find_spec(self, name, path=None, target=None):
        return (
            ModuleSpec(name, self, is_package=True)
            if name.partition(".")[0] in ("sglang", "sglang_router", "wandb")
            else None
        )

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock()
        return module

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.append(Absent())
HEAD = (
    (Path(next(iter(slime.__path__))).parent / ".git" / "HEAD").read_text(encoding="utf-8").strip()
)
VERSION = HEAD[:9]  # of a checked-out commit


def train_data(samples, **options):
    """``_convert_samples_to_train_data`` of these samples."""
    from slime.ray.rollout import RolloutManager

    manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    manager.custom_convert_samples_to_train_data_func = manager.custom_reward_post_process_func = (
        None
    )
    manager.args = SimpleNamespace(
        advantage_estimator="none", rewards_normalization=False, reward_key=None, **options
    )
    return manager._convert_samples_to_train_data(samples)
