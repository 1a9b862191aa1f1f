"""What scripts on TRL share: a rollout loop over one prompt, with a tokenizer that spells ids in decimal."""

import importlib.metadata
import logging
import queue
from types import SimpleNamespace

from accelerate import PartialState

from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

VERSION = importlib.metadata.version("trl")
PartialState()
logging.disable(logging.CRITICAL)


class Tokenizer:
    """A message is its ids."""

    pad_token_id, eos_token, response_template = 0, "<eos>", {}

    def apply_chat_template(self, messages, **_):
        return [int(word) for message in messages for word in message["content"].split()]

    def parse_response(self, ids, **_):
        return {"role": "assistant", "content": " ".join(map(str, ids))}


def loop(url, version, prompts=1, **options):
    """TRL's loop before the server at ``url``; ``version`` is where it reads the trainer's count of updates."""
    queues = {
        name: queue.Queue() for name in ("rollout_buffer", "exception_info_queue", "metrics_queue")
    }
    made = _AsyncRolloutLoop(
        model_name="m", dataset=[{"prompt": [{"role": "user", "content": "5 6"}]}] * prompts, reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        processing_class=Tokenizer(), eos_token_ids=[9], model_version_value=version, heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=None, vllm_server_url=url, max_tokens=8, **queues, **options,
    )  # fmt: skip
    made._loop.close()
    return made
