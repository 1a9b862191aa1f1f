"""What miles does differently from slime: its command line, and its split of samples over ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.stacks.slime.batch import RankData
from rollproof.stacks.slime.rollout import slime_arguments

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["SINGLE_TURN", "MilesRankData", "miles_arguments"]

SINGLE_TURN = "miles.rollout.generate_hub.single_turn.generate"
"""The generate function that the newer of miles' two rollouts uses for one turn."""


def miles_arguments(generate: str | None = None) -> Callable[[Fleet, str], Any]:
    """The command line that miles' rollout reads, with ``generate`` as
    ``--custom-generate-function-path``.
    """

    def arguments(fleet: Fleet, router: str) -> Any:
        return SimpleNamespace(
            **{
                **vars(slime_arguments(fleet, router)),
                "chat_template_path": None,
                "custom_generate_function_path": generate,
                "lora_adapter_path": None,
                "lora_rank": 0,
                "rollout_max_context_len": None,
                "rollout_num_gpus": len(fleet.servers),
                "rollout_num_gpus_per_engine": 1,
                "sglang_router_policy": "",
                "sglang_speculative_algorithm": None,
                "use_miles_router": False,
            }
        )

    return arguments


class MilesRankData(RankData):
    """slime's conversion, whose split takes the number of ranks in miles."""

    def split(self, manager: Any, data: Any, ranks: int) -> Any:
        return manager._split_train_data_by_dp(data, ranks)
