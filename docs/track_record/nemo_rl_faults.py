"""Faults of NeMo-RL, from a checkout on PYTHONPATH: `python docs/track_record/nemo_rl_faults.py`.

Stubbed are packages that its modules import at their head. The vLLM worker is NeMo-RL's, the engine
below it is scripted.
"""

import asyncio
import builtins
import sys
import typing
from types import SimpleNamespace
from typing import Any

import nemo_rl
import torch
import typing_extensions
from common import commit_of, run, stub_packages

# NeMo-RL asks for Python 3.13: pydantic refuses the TypedDict of 3.11
typing.TypedDict = typing_extensions.TypedDict
_print = print


def _print_of_others(*objects: Any, **options: Any) -> None:
    """``print``, but not from NeMo-RL's modules, which print much."""
    if not sys._getframe(1).f_globals["__name__"].startswith("nemo_rl."):
        _print(*objects, **options)


builtins.print = _print_of_others
stub_packages(
    "absl",
    "hydra",
    "matplotlib",
    "mlflow",
    "nemo_automodel",
    "prometheus_client",
    "pynvml",
    "soundfile",
    "swanlab",
    "tensorboard",
    "wandb",
    "zmq",
    version="2.20.0",
)

from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector
from nemo_rl.algorithms.single_controller import SingleControllerActor
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.experience import rollouts
from nemo_rl.experience.failures import RolloutDataFailure
from nemo_rl.experience.rollout_manager import AsyncRolloutImpl, RolloutManager
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

VERSION = f"nemo-rl {commit_of(nemo_rl)[:9]}:"


def worker(llm: Any, routes: bool = False) -> Any:
    """The asynchronous vLLM worker on ``llm``."""
    worker = object.__new__(VllmAsyncGenerationWorkerImpl)
    worker.cfg = {
        "backend": "vllm",
        "vllm_cfg": {"async_engine": True, "max_model_len": 64},
        "vllm_kwargs": {"enable_return_routed_experts": routes},
        "_pad_token_id": 0,
        "max_new_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
    }
    worker.llm, worker.SamplingParams, worker.routed_experts_dtype = llm, SimpleNamespace, None
    return worker


def engine(*replies: Any) -> Any:
    """A vLLM that answers each call with the next of ``replies``: tokens and finish reason, or an
    error.
    """
    left = list(replies)

    async def generate(*, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        reply = left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        tokens, reason = reply
        completion = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in tokens],
            finish_reason=reason,
            routed_experts=None,
        )
        yield SimpleNamespace(outputs=[completion])

    return SimpleNamespace(generate=generate)


def tokenizer(text: str = "", **_: Any) -> Any:
    """Text is token ids in decimal."""
    ids = [int(word) for word in text.split()]
    return SimpleNamespace(input_ids=torch.tensor([ids], dtype=torch.long))


tokenizer.pad_token_id = 0
tokenizer.decode = lambda ids, **_: " ".join(str(int(i)) for i in ids)
tokenizer.batch_decode = lambda rows, **_: [tokenizer.decode(row) for row in rows]


def prompt(turns: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sample, and an environment that gives each of ``turns``, and then ends."""
    left = list(turns)

    def step(logs: Any, infos: Any) -> Any:
        text = left.pop(0) if left else ""
        return EnvironmentReturn(
            [{"role": "environment", "content": text}],
            [None],
            [None],
            torch.tensor([1.0 if text else 0.0]),
            torch.tensor([not text]),
            None,
        )

    log = [{"role": "user", "content": "5 6", "token_ids": torch.tensor([5, 6])}]
    sample = {"message_log": log, "extra_env_info": {}, "task_name": "t", "idx": 0}
    # a remote call, which ray.get below runs
    remote = SimpleNamespace(remote=lambda *arguments: lambda: step(*arguments))
    return sample, {"t": SimpleNamespace(step=remote)}


def batch_of(sample: dict[str, Any]) -> Any:
    return BatchedDataDict({name: [value] for name, value in sample.items()})


async def rolled_out(llm: Any, sample: Any, environment: Any, length: int) -> Any:
    """The final batch of asynchronous GRPO's rollout of one sample."""
    groups = rollouts.run_async_multi_turn_rollout_groups(
        worker(llm), batch_of(sample), tokenizer, environment, length, 1
    )
    return (await anext(groups)).final_batch


def manager(run_rollout: Any, commit: Any) -> Any:
    """A rollout manager with scripted rollouts."""
    buffer = SimpleNamespace(reserve=lambda **_: "g", commit=commit)
    manager = RolloutManager(None, {}, 1, 64, policy_generation=object(), tq_buffer=buffer)
    manager.run_rollout = run_rollout
    return manager


def controller(rollout_manager: Any, transfer: Any) -> Any:
    """A controller of trainer version 1, without its actors."""
    controller = object.__new__(SingleControllerActor.__ray_metadata__.modified_class)
    controller.__dict__.update(
        _rollout_permitted=asyncio.Event(),
        _inflight_by_group_id={},
        _trainer_version=1,
        _master_config=SimpleNamespace(env={}),
        _gen=None,
        _rollout_manager=rollout_manager,
        _async_cfg=SimpleNamespace(recompute_kv_cache_after_weight_updates=False),
        _sampler=None,
        _weight_synchronizer=SimpleNamespace(sync_weights=transfer),
    )
    return controller


def _call_remote() -> None:
    """Have ``ray.get`` of rollouts run the calls that ``prompt``'s environment returns."""
    rollouts.ray.get = lambda calls: [call() for call in calls]


async def abort() -> None:
    """A call that was aborted is a turn that ended by itself; one without tokens is an error if
    routes were requested.
    """
    _call_remote()
    for reply, routes in (([7, 8], "abort"), False), (([], "abort"), True):
        sample, environment = prompt()
        impl = AsyncRolloutImpl(tokenizer, environment, 1, 64, 4, worker(engine(reply), routes))
        try:
            completion = (await impl.run_rollout(sample)).completions[0]
            tokens = completion.message_log[1]["token_ids"].tolist()
            result = f"truncated {completion.truncated}, {tokens}"
        except RolloutDataFailure as error:
            result = f"{type(error).__name__}: {error.__cause__}"
        print(VERSION, f"aborted after {len(reply[0])} of 8 tokens: {result}")


async def end_version() -> None:
    """A group that ends after the engines have loaded weights 1, and before the controller says so,
    has 0 for its newest version.
    """
    committed, loaded, loop = [], asyncio.Event(), asyncio.get_running_loop()

    async def run_rollout(sample: Any) -> str:
        await loaded.wait()
        return "sampled under 0 and 1"

    async def commit(group: Any, record: Any, **versions: Any) -> None:
        committed.append((record, versions))

    def transfer(**_: Any) -> None:  # in a thread, as the controller calls it
        loop.call_soon_threadsafe(loaded.set)
        asyncio.run_coroutine_threadsafe(asyncio.wait([running]), loop).result()

    rollout_manager = manager(run_rollout, commit)
    running = asyncio.create_task(rollout_manager.generate_and_push({}))
    await asyncio.sleep(0)
    await controller(rollout_manager, transfer)._sync_weights()
    record, versions = committed[0]
    print(VERSION, f"{record}: {versions}")


async def group_tag() -> None:
    """A group is added with the version that the collector had when it took the batch, whatever
    weights sampled it.
    """
    _call_remote()
    added = []

    async def add(group: Any, version: int, target: int) -> str:
        added.append(version)
        return "success"

    sample, environment = prompt()
    collector = object.__new__(AsyncTrajectoryCollector.__ray_metadata__.modified_class)
    collector.__dict__.update(
        tokenizer=tokenizer,
        running=True,
        _max_rollout_turns=1,
        _deduplicate_multimodal_data=False,
        _has_distillation_teachers=False,
        _debug_payload_metrics=False,
        master_config=SimpleNamespace(policy={"max_total_sequence_length": 64}),
        replay_buffer=SimpleNamespace(add=SimpleNamespace(remote=add)),
        current_weight_version=0,
        _generation_limit_cleared=SimpleNamespace(is_set=lambda: True),
        policy_generation=worker(engine(([7, 8], "stop"))),
        task_to_env=environment,
    )
    # as _process_batch reads it, before it starts a thread
    version = collector.current_weight_version
    collector.set_weight_version(5)
    await collector._collect_rollout_batch(batch_of(sample), version, 6, 1, False)
    print(VERSION, f"sampled after weights 5 were told of, added with {added}")


async def last_token() -> None:
    """A response that ends by itself on the last token of its sequence counts as truncated."""
    _call_remote()
    for length in 5, 4:
        sample, environment = prompt()
        llm = worker(engine(([7, 8], "stop")))
        impl = AsyncRolloutImpl(tokenizer, environment, 1, length, 4, llm)
        truncated = (await impl.run_rollout(sample)).completions[0].truncated
        final = await rolled_out(engine(([7, 8], "stop")), prompt()[0], environment, length)
        result = f"truncated {truncated}, {final['truncated'].tolist()}"
        print(VERSION, f"2 + 2 of {length} tokens, ended by stop: {result}")


async def multi_turn_routes() -> None:
    """The rows of each turn's call are written over those of all messages before it."""
    _call_remote()

    class Generation:
        """Each turn is sampled by new weights; the value of a row is their number."""

        weights = 0

        async def generate_async(self, data: Any, **_: Any) -> Any:
            self.weights += 1
            ids = torch.cat([data["input_ids"][0], torch.tensor([7, 8])])
            output = {
                "output_ids": ids[None],
                "unpadded_sequence_lengths": torch.tensor([len(ids)]),
                "routed_experts": torch.full((1, len(ids), 1, 1), self.weights),
            }
            yield 0, output

    sample, environment = prompt(("9",))
    impl = AsyncRolloutImpl(tokenizer, environment, 1, 64, 2, Generation())
    log = (await impl.run_rollout(sample)).completions[0].message_log
    rows = [message["routed_experts"][:, 0, 0].tolist() for message in log[:4]]
    print(VERSION, f"turns sampled by weights 1 and 2: rows of the messages {rows}")


def short_fields() -> None:
    """Fields of messages are joined without a check of their lengths: one that is short is filled,
    one that is long makes a longer row.
    """
    message = {
        "role": "assistant",
        "token_ids": torch.tensor([5, 6, 7, 8]),
        "generation_logprobs": torch.tensor([-0.5, -0.25]),
        "routed_experts": torch.ones(2, 1, 2),
    }
    flat, lengths = batched_message_log_to_flat_message([[message]])
    logprobs = flat["generation_logprobs"][0].tolist()
    rows = flat["routed_experts"][0, :, 0].int().tolist()
    print(VERSION, f"2 logprobs and 2 rows for 4 tokens: {logprobs}, {rows}")
    surplus = message | {"routed_experts": torch.ones(9, 1, 2)}
    flat, lengths = batched_message_log_to_flat_message([[surplus]])
    result = f"length {lengths.tolist()}, ids {flat['token_ids'][0].tolist()}"
    print(VERSION, f"9 rows for 4 tokens: {result}")


def stale_cache() -> None:
    """vLLM clears no cache while a call holds blocks, and says so; NeMo-RL does not look, and
    reports the cache as invalidated.
    """

    async def reset_prefix_cache() -> bool:
        """``AsyncLLM.reset_prefix_cache`` during a running call (vllm/v1/core/block_pool.py)."""
        return False

    busy = worker(SimpleNamespace(reset_prefix_cache=reset_prefix_cache))
    generation = object.__new__(vllm_generation.VllmGeneration)
    generation.shutdown = lambda: True
    generation.cfg = busy.cfg
    generation.worker_group = SimpleNamespace(
        run_all_workers_single_data=lambda name, **_: [getattr(busy, name)()]
    )
    vllm_generation.ray.get = lambda calls: [asyncio.run(call) for call in calls]
    cleared = asyncio.run(reset_prefix_cache())
    reported = generation.invalidate_kv_cache()
    print(VERSION, f"vLLM reset its cache: {cleared}; invalidate_kv_cache: {reported}")


async def swallowed_error() -> None:
    """Asynchronous GRPO returns a rollout with a failed generation: without a response and with
    reward 0, or with the turns before it.
    """
    _call_remote()
    died = RuntimeError("EngineDeadError")
    for replies, turns in ([died], ()), ([([7, 8], "stop"), died], ("9",)):
        final = await rolled_out(engine(*replies), *prompt(turns), 64)
        messages = final["message_log"][0]
        log = [(message["role"], message["token_ids"].tolist()) for message in messages]
        truncated, reward = final["truncated"].tolist(), final["total_reward"].tolist()
        print(VERSION, f"{log}, truncated {truncated}, reward {reward}")


async def update_failure() -> None:
    """A weight transfer that fails leaves the gate closed, for which every rollout waits."""

    def transfer(**_: Any) -> None:
        raise RuntimeError("NCCL")

    closed = controller(manager(None, None), transfer)
    closed._rollout_permitted.set()
    try:
        await closed._sync_weights()
    except RuntimeError as error:
        permitted = closed._rollout_permitted.is_set()
        print(VERSION, f"_sync_weights raised {error!r}; rollouts permitted: {permitted}")


if __name__ == "__main__":
    run(
        abort,
        end_version,
        group_tag,
        last_token,
        multi_turn_routes,
        short_fields,
        stale_cache,
        swallowed_error,
        update_failure,
    )
