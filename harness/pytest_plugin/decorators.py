"""Decorator and base classes with which users have a subject judged in pytest.

``items`` runs them. ``run_conformance`` runs the same checks without pytest.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from rollproof.core.subjects import SubjectFactory
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult
from rollproof.pytest_plugin.suite_spec import Suite
from rollproof.verification.argument_checks import (
    as_expected,
    as_flavours,
    as_names,
    as_path,
    as_seed,
)
from rollproof.verification.options import ROLLOUTS
from rollproof.verification.schedules import PROFILES
from rollproof.verification.subject_kinds import KINDS, kind_of

__all__ = [
    "BatchConformance",
    "CorrectionConformance",
    "EngineConformance",
    "ReplayConformance",
    "ReplayLayoutConformance",
    "RolloutConformance",
    "conformance",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_PLUGIN = "rollproof.plugin"
"""The module that pytest loads; it is absent from a session with ``-p no:rollproof``."""
_OFF = (
    "The pytest plugin of rollproof is off, so nothing was judged. Run without `-p no:rollproof`;"
    f" if PYTEST_DISABLE_PLUGIN_AUTOLOAD is set, add `-p {_PLUGIN}`."
)


def conformance(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str | None = None,
    seed: int | None = None,
    only: Iterable[str] = (),
    flavours: str | Iterable[str] | None = None,
    expected: Mapping[str, str] | str | Path | None = None,
    about: str | None = None,
) -> Callable[[_F], _F]:
    """Decorate a test function that takes ``check``: it becomes one pytest item per check.

    The subject is run once per session; each item fails, is skipped or goes on by the verdict of
    its check. The body runs after that, with the ``CheckResult`` as ``check``, and may be a
    docstring alone; it may use other fixtures as usual::

        @rollproof.conformance(MyStack)
        def test_rollouts(check):
            "Rollouts keep every promise of the contract."

    Args:
        factory: makes a fresh subject: a class, or a function without arguments (for a
            ``BatchSubject``, its class), or a ``rollproof.stacks.StackPart``.
        name: the subject's name in reports.
        profile: how much is run; wins over the session's option.
        seed: wins over the session's option.
        only: ids or families of checks; wins over the session's option.
        flavours: the engine flavours to run on; default: all that fit the contract.
        expected: ids of checks that are known to fail, with the reason, or the path of a file of
            expected failures (docs/options.md), such as ``Path(__file__).with_name(...)``. It
            counts in addition to the session's file, whose option is the one that rewrites it.
        about: the kind of subject if its class does not show it: ``rollouts``, ``batches``,
            ``replay``, ``layouts``, ``corrections`` or ``engines``.

    Raises ``UsageError`` for a profile, check or kind that does not exist, and for an async
    function.
    """
    if about is not None and about not in KINDS:
        raise UsageError(f"No kind of subject is named {about!r}; choose one of {list(KINDS)}.")
    suite = Suite(
        factory=factory,
        name=name,
        profile=profile,
        seed=seed,
        only=_checked(as_names(only, "only")),
        flavours=None if flavours is None else as_flavours(flavours),
        **expected_of(expected),
        about=kind_of(factory) if about is None else about,
        module=str(getattr(factory, "__module__", "")),
    )
    check_profile(profile)
    as_seed(seed)
    if not callable(factory):
        raise UsageError(
            f"conformance() takes a factory, such as the subject's class, not {factory!r}: each"
            " case starts from a fresh one."
        )

    def mark(function: _F) -> _F:
        # pytest-asyncio would run the body on its own loop, and the subject with it, in real time.
        if inspect.iscoroutinefunction(function):
            raise UsageError(
                f"{function.__name__} must be a plain function: the subject, which may be async,"
                " runs on rollproof's own loop."
            )
        if "check" not in inspect.signature(function).parameters:
            raise UsageError(
                f"{function.__name__} must take a parameter named `check`: it becomes one item per"
                " check."
            )
        declared = replace(suite, declared_by=f"{function.__module__}.{function.__qualname__}")
        if _PLUGIN not in sys.modules:
            return _without_plugin(function)
        function._rollproof_suite = declared  # type: ignore[attr-defined]  # read by the plugin
        return function

    return mark


def expected_of(expected: Mapping[str, str] | str | Path | None) -> dict[str, Any]:
    """Return the fields of a ``Suite`` that say which failures are expected.

    Raises ``UsageError`` for anything but a mapping of ids to reasons, or a path.
    """
    if isinstance(expected, str | Path):
        # read when the subject runs: the option that rewrites it may be about to create it
        return {"expected_file": as_path(expected, "expected")}
    return {"expected": as_expected(expected, default_registry())}


def check_profile(profile: str | None) -> None:
    """Raise ``UsageError`` for a profile that does not exist."""
    if profile is not None and profile not in PROFILES:
        raise UsageError(f"No profile is named {profile!r}; choose one of {list(PROFILES)}.")


def _checked(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names. Raises ``UsageError`` for a check or family that does not exist."""
    if names:
        registry = default_registry()
        for name in names:  # one at a time, so that the error names the wrong one
            _ = registry.select([name])
    return names


def _without_plugin(function: _F) -> _F:
    """Return a test that fails with the reason: pytest would look for a fixture ``check``, which
    may even exist (pytest-check has one).
    """

    def plugin_is_off() -> None:
        pytest.fail(_OFF, pytrace=False)

    functools.update_wrapper(plugin_is_off, function)
    vars(plugin_is_off).pop("__wrapped__")  # or pytest reads the parameters of the function
    return plugin_is_off  # type: ignore[return-value]  # nobody calls it but pytest


class Conformance:
    """Base of the base classes below. The attributes mean what the arguments of ``conformance``
    mean.
    """

    subject: ClassVar[Any] = None
    profile: ClassVar[str | None] = None
    seed: ClassVar[int | None] = None
    only: ClassVar[tuple[str, ...]] = ()
    flavours: ClassVar[str | tuple[str, ...] | None] = None
    expected: ClassVar[Mapping[str, str] | str | Path | None] = None
    _about: ClassVar[str] = ROLLOUTS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_profile(cls.profile)
        as_seed(cls.seed)
        _checked(as_names(cls.only, "only"))
        if cls.flavours is not None:
            as_flavours(cls.flavours)
        expected_of(cls.expected)
        # Only classes that set a subject: a base class of a user may have any name.
        if "subject" in cls.__dict__ and not cls.__name__.startswith("Test"):
            warnings.warn(
                f"pytest does not collect {cls.__name__} unless `python_classes` matches it: name"
                f" it Test{cls.__name__}, or nothing is tested.",
                stacklevel=2,
            )

    @pytest.fixture
    def check(self) -> None:
        """Fail: the plugin, which puts a check in its place, is off."""
        pytest.fail(_OFF, pytrace=False)

    def test_check(self, check: CheckResult) -> None:
        """The subject keeps the promise of ``check``."""

    test_check._rollproof_suite = Suite()  # type: ignore[attr-defined]  # read by the plugin; filled in from the class


class RolloutConformance(Conformance):
    """Base of a test class for a stack's rollout code.

    Set ``subject`` to a factory, or make it a method that returns a fresh subject::

        class TestMyStack(rollproof.RolloutConformance):
            subject = MyStack

    ``profile``, ``seed``, ``only``, ``flavours`` and ``expected`` may be set too; they mean what
    they mean in ``conformance``. The subclass must have a name that pytest collects (``Test...``
    unless ``python_classes`` says otherwise).
    """


class BatchConformance(Conformance):
    """As ``RolloutConformance``, for a ``BatchSubject``: a stack's conversion of finished samples
    into training batches.
    """

    _about: ClassVar[str] = "batches"


class ReplayConformance(Conformance):
    """As ``RolloutConformance``, for a ``ReplaySubject``: a trainer with routing replay."""

    _about: ClassVar[str] = "replay"


class ReplayLayoutConformance(Conformance):
    """As ``RolloutConformance``, for a ``LayoutSubject``: the functions that lay recorded routes
    out over a trainer's ranks.
    """

    _about: ClassVar[str] = "layouts"


class CorrectionConformance(Conformance):
    """As ``RolloutConformance``, for a ``CorrectionSubject``: the function that turns logprobs into
    importance weights, a mask and metrics.
    """

    _about: ClassVar[str] = "corrections"


class EngineConformance(Conformance):
    """As ``RolloutConformance``, for a rollout engine, real or fake, which is started once per
    session.

    ::

        class TestVllm(rollproof.EngineConformance):
            engine = "vllm"

    ``engine`` is a name that ``rollproof verify --engine`` knows, ``model`` the folder of a MoE
    checkpoint (default: a tiny random one). An engine of your own is a ``subject``: a function that
    returns a ``rollproof.engines.EngineTarget``.
    """

    _about: ClassVar[str] = "engines"
    engine: ClassVar[str | None] = None
    model: ClassVar[str | Path | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.engine is not None and "subject" not in cls.__dict__:
            from rollproof.verification.engines import EngineChoice

            # not `cls.subject = ...`, because the type checkers hold it to be a ClassVar of Any
            type.__setattr__(cls, "subject", EngineChoice(engine=cls.engine, model=cls.model))
        super().__init_subclass__(**kwargs)
