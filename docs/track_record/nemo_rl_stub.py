"""What scripts on NeMo-RL share: stand-ins for what its modules import at their head, and its vLLM worker on an engine of ours."""

import asyncio
import builtins
import sys
import typing
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import typing_extensions

import nemo_rl

ABSENT = (
    "absl hydra matplotlib mlflow nemo_automodel prometheus_client pynvml soundfile swanlab tensorboard wandb zmq"
).split()
say = print
typing.TypedDict = typing_extensions.TypedDict  # it asks for Python 3.13


def of_others(*said, **how):
    """NeMo-RL says much: what it prints is not heard."""
    if not sys._getframe(1).f_globals["__name__"].startswith("nemo_rl."):
        say(*said, **how)


builtins.print = of_others


class Absent:
    """Finds a stand-in for every module of these packages."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__version__, module.__getattr__ = "2.20.0", lambda name: MagicMock()
        return module

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.append(Absent())
GIT = Path(next(iter(nemo_rl.__path__))).parent / ".git"
HEAD = (GIT / "HEAD").read_text(encoding="utf-8").strip()
VERSION = (HEAD if "ref: " not in HEAD else (GIT / HEAD[5:]).read_text(encoding="utf-8"))[:9]


def worker(llm, routes=False):
    """The asynchronous vLLM worker before ``llm``."""
    from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

    made = object.__new__(VllmAsyncGenerationWorkerImpl)
    vllm = {"async_engine": True, "max_model_len": 64}
    made.cfg = {
        "vllm_cfg": vllm,
        "vllm_kwargs": {"enable_return_routed_experts": routes},
        "_pad_token_id": 0,
        "max_new_tokens": 8,
    }
    made.cfg |= {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "backend": "vllm",
    }
    made.llm, made.SamplingParams, made.routed_experts_dtype = llm, SimpleNamespace, None
    return made


def tokenizer(text="", **_):
    """A text is its ids."""
    import torch

    return SimpleNamespace(
        input_ids=torch.tensor([[int(word) for word in text.split()]], dtype=torch.long)
    )


tokenizer.pad_token_id = 0
tokenizer.decode = lambda ids, **_: " ".join(str(int(i)) for i in ids)
tokenizer.batch_decode = lambda rows, **_: [tokenizer.decode(row) for row in rows]


def engine(*answers):
    """A vLLM of which each call is answered by the next of ``answers``: tokens and finish reason, or an error."""
    left = list(answers)

    async def generate(*, prompt, sampling_params, request_id):
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        tokens, reason = answer
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens]
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=tokens, logprobs=logprobs, finish_reason=reason, routed_experts=None
                )
            ]
        )

    return SimpleNamespace(generate=generate)


def manager(rolled_out, commit):
    """A rollout manager whose rollouts are ``rolled_out``."""
    from nemo_rl.experience.rollout_manager import RolloutManager

    made = RolloutManager(
        None,
        {},
        1,
        64,
        policy_generation=object(),
        tq_buffer=SimpleNamespace(reserve=lambda **_: "g", commit=commit),
    )
    made.run_rollout = rolled_out
    return made


def controller(rollouts, transfer):
    """A controller of trainer version 1, without its actors."""
    from nemo_rl.algorithms.single_controller import SingleControllerActor

    made = object.__new__(SingleControllerActor.__ray_metadata__.modified_class)
    made._rollout_permitted, made._inflight_by_group_id, made._trainer_version = (
        asyncio.Event(),
        {},
        1,
    )
    made._master_config, made._gen, made._rollout_manager = SimpleNamespace(env={}), None, rollouts
    made._async_cfg = SimpleNamespace(recompute_kv_cache_after_weight_updates=False)
    made._sampler, made._weight_synchronizer = None, SimpleNamespace(sync_weights=transfer)
    return made


def collector(add, **fields):
    """A collector before a replay buffer with the coroutine ``add``."""
    from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector

    made = object.__new__(AsyncTrajectoryCollector.__ray_metadata__.modified_class)
    made.__dict__.update(
        tokenizer=tokenizer, running=True, _max_rollout_turns=1, _deduplicate_multimodal_data=False, _has_distillation_teachers=False,
        _debug_payload_metrics=False, master_config=SimpleNamespace(policy={"max_total_sequence_length": 64}),
        replay_buffer=SimpleNamespace(add=SimpleNamespace(remote=add)), current_weight_version=0,
        _generation_limit_cleared=SimpleNamespace(is_set=lambda: True), **fields,
    )  # fmt: skip
    return made


async def first(results):
    """The first of an asynchronous generator's."""
    return await anext(results)


def prompt(turns=()):
    """A sample, and an environment that says each of ``turns``, and then ends."""
    import torch

    from nemo_rl.environments.interfaces import EnvironmentReturn

    left = list(turns)

    def step(logs, infos):
        text = left.pop(0) if left else ""
        said = [{"role": "environment", "content": text}]
        return EnvironmentReturn(
            said,
            [None],
            [None],
            torch.tensor([1.0 if text else 0.0]),
            torch.tensor([not text]),
            None,
        )

    log = [{"role": "user", "content": "5 6", "token_ids": torch.tensor([5, 6])}]
    sample = {"message_log": log, "extra_env_info": {}, "task_name": "t", "idx": 0}
    return sample, {"t": SimpleNamespace(step=SimpleNamespace(remote=lambda *a: lambda: step(*a)))}
