"""What scripts on miles share: stand-ins for the engine's and the trainer's packages, which miles' manager imports at its head."""

import logging
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

ABSENT = ("sglang", "sglang_router", "megatron", "wandb")


class Absent:
    """Finds a stand-in for every module of them, in place of the copies that the wheel brings."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__version__ = "0.3.2"
        module.__getattr__ = lambda name: MagicMock()
        return module

    def exec_module(self, module):
        module.__path__ = []


logging.disable(logging.WARNING)
sys.meta_path.insert(0, Absent())
VERSION = version("miles-rl")


def train_data(samples, **options):
    """``_convert_samples_to_train_data`` of these samples."""
    from miles.ray.rollout import RolloutManager

    manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    manager.custom_convert_samples_to_train_data_func = manager.custom_reward_post_process_func = (
        None
    )
    defaults = {
        "advantage_estimator": "none",
        "rewards_normalization": False,
        "reward_key": None,
        "use_dynamic_global_batch_size": False,
    }
    manager.args = SimpleNamespace(**{**defaults, **options})
    return manager._convert_samples_to_train_data(samples)
