"""Targets of a run: the subjects that a command line names, as factories."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollproof.core.case import Case
from rollproof.core.error_text import describe_error
from rollproof.core.files import module_of
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import UsageError
from rollproof.verification.argument_checks import as_flavours
from rollproof.verification.options import ROLLOUTS
from rollproof.verification.subject_kinds import KINDS, kind_of

__all__ = [
    "Target",
    "engine_target",
    "foreign_code",
    "named_factory",
    "options_of_recipe",
    "references",
    "stack_targets",
    "subject_target",
    "target_of_recipe",
]


_THINNED = 25
"""On the flavours that a reference does not exhaust, one case in so many is run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A subject to be judged.

    ``recipe`` says how ``rollproof replay`` makes it again, ``cases`` replaces a profile's
    schedules, ``about`` is the kind of subject (``rollproof.verification.subject_kinds``).
    """

    name: str
    factory: SubjectFactory
    recipe: Mapping[str, Any]
    flavours: tuple[str, ...] | None = None
    cases: Callable[[str, int | None], Iterable[Case]] | None = None
    about: str = ROLLOUTS

    @property
    def folder(self) -> str:
        """The folder of its counterexamples, with the module: names are unique only within one."""
        subject = str(self.recipe.get("subject", self.name))
        return subject.replace(".py:", ".").replace(":", ".").replace("/", ".")


def references() -> list[Target]:
    """Return the references that rollproof ships: clients, a conversion into batches, layout
    functions, trainers with replay, corrections.
    """
    from rollproof.fakes.clients.reference_clients import REFERENCES
    from rollproof.fakes.trainers.reference_batches import (
        Collator,
        ColumnCollator,
        MaskCollator,
    )
    from rollproof.fakes.trainers.reference_corrections import REFERENCES as CORRECTIONS
    from rollproof.fakes.trainers.reference_layouts import MegatronLike
    from rollproof.fakes.trainers.reference_trainers import REFERENCES as TRAINERS

    managers = [
        Target(
            name=name,
            factory=factory,
            recipe={"reference": name},
            cases=partial(_reference_cases, factory, turn),
        )
        for turn, (name, factory) in enumerate(REFERENCES.items())
    ]
    return [
        *managers,
        Target(
            name="padded-batch",
            factory=Collator,
            recipe={"reference": "padded-batch"},
            about="batches",
        ),
        Target(
            name="column-batch",
            factory=ColumnCollator,
            recipe={"reference": "column-batch"},
            about="batches",
        ),
        Target(
            name="mask-batch",
            factory=MaskCollator,
            recipe={"reference": "mask-batch"},
            about="batches",
        ),
        Target(
            name="megatron-layout",
            factory=MegatronLike,
            recipe={"reference": "megatron-layout"},
            about="layouts",
        ),
        *(
            Target(name=name, factory=factory, recipe={"reference": name}, about="replay")
            for name, factory in TRAINERS.items()
        ),
        *(
            Target(name=name, factory=factory, recipe={"reference": name}, about="corrections")
            for name, factory in CORRECTIONS.items()
        ),
    ]


def _reference_cases(
    factory: SubjectFactory, turn: int, profile: str, seed: int | None
) -> Iterator[Case]:
    """Yield the schedules of one reference; under ``pr`` all on one flavour, a sample on others."""
    # All references together must fit into a minute, and they differ little between flavours. Each
    # reference exhausts another flavour. The other profiles run everything.
    from rollproof.verification.contract_probe import probe
    from rollproof.verification.rollouts import cases_for
    from rollproof.verification.schedules import profile_named

    used = profile_named(profile).seed_for(seed)
    flavours = [flavour for flavour, _, _ in probe(factory)]
    for number, flavour in enumerate(flavours):
        exhaust = profile != "pr" or number == turn % len(flavours)
        yield from cases_for(
            factory, profile=profile, seed=used, flavours=[flavour], thin=1 if exhaust else _THINNED
        )


def stack_targets(
    spec: str, parts: Iterable[str] = (), *, checkout: str | Path | None = None
) -> tuple[str, list[Target]]:
    """Return title and parts of a released stack, ``NAME`` or ``NAME==VERSION``.

    Raises ``UsageError`` and ``StackError``.
    """
    from rollproof.stacks import load_stack

    stack = load_stack(spec, checkout=checkout)
    selected = tuple(parts)
    kinds = {ROLLOUTS: stack.parts, "batches": stack.batches, "corrections": stack.corrections}
    names = [part for parts in kinds.values() for part in parts]
    unknown = sorted(set(selected) - set(names))
    if unknown:
        raise UsageError(f"{stack.name} has no parts {unknown}; choose among {names}.")
    targets = [
        _target_of(
            name=f"{stack.title} {part}",
            factory=factory,
            recipe=stack.recipe(part),
            about=kind,
        )
        for kind, parts in kinds.items()
        for part, factory in parts.items()
        if not selected or part in selected
    ]
    return stack.title, targets


def subject_target(spec: str, about: str | None = None, option: str = "--subject") -> Target:
    """Return the target of ``module:factory``, where the current folder is searched too, or of
    ``FILE:factory``.

    ``about`` is the kind of subject (``None``: that of the class). Raises ``UsageError`` saying
    which half does not exist.
    """
    factory = named_factory(spec, option)
    path = spec.rpartition(":")[2]
    recipe = {"subject": spec, **({} if about is None else {"about": about})}
    kind = about or kind_of(factory)
    return _target_of(name=path, factory=factory, recipe=recipe, about=kind)


def named_factory(spec: str, option: str) -> Any:
    """Return the object that ``module:factory`` names.

    Raises ``UsageError`` saying which half does not exist, or that it is not callable.
    """
    module_name, colon, path = spec.rpartition(":")
    if not colon or not module_name or not path:
        raise UsageError(
            f"{option} {spec!r} must be written module:factory, such as"
            " my_stack.subjects:MySubject or tests/test_my_stack.py:MySubject."
        )
    # As `python -m` does: the console script has its own folder there instead.
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds text
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as above
    file = _real_path(module_name) if module_name.endswith(".py") else None
    if file is not None:
        module_name = _module_of_file(module_name, option)
    module = _module(module_name, option)
    if file is not None:
        _check_file(module, file)
    factory: Any = module
    for name in path.split("."):
        if not hasattr(factory, name):
            near = difflib.get_close_matches(name, dir(factory), n=3)
            guess = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"{module_name} has no {path!r}.{guess}")
        factory = getattr(factory, name)
    if not callable(factory):
        raise UsageError(
            f"{spec} is a {type(factory).__name__}, not a factory: name the subject's class, or a"
            " function that makes a fresh one."
        )
    return factory


def engine_target(name: str, model: str | None) -> Target:
    """Return the target of a rollout engine. Raises ``UsageError`` for an unknown name."""
    from rollproof.verification.engines import EngineChoice

    recipe = {"engine": name, **({} if model is None else {"model": model})}
    return Target(
        name=name, factory=EngineChoice(engine=name, model=model), recipe=recipe, about="engines"
    )


def foreign_code(recipe: Mapping[str, Any]) -> str | None:
    """Return what a recipe runs that is not part of rollproof, in words; ``None`` for a reference.

    Whoever writes a trace chooses its recipe, so nothing of it may run unless the user agrees.
    """
    if isinstance(subject := recipe.get("subject"), str):
        return f"the subject {subject}"
    if isinstance(engine := recipe.get("engine"), str):
        model = recipe.get("model")
        return f"the engine {engine}" + (f" with the model {model}" if model else "")
    if isinstance(stack := recipe.get("stack"), str):
        checkout = recipe.get("checkout")
        return f"the stack {stack}" + (f" of the checkout {checkout}" if checkout else "")
    return None


def options_of_recipe(recipe: Mapping[str, Any]) -> list[str]:
    """Return the options of ``rollproof replay`` that name what a recipe names.

    There are none for a checkout and for an engine: there ``replay`` asks for --trust-subject.
    """
    if isinstance(subject := recipe.get("subject"), str):
        return ["--subject", subject]
    stack, part = recipe.get("stack"), recipe.get("part")
    if isinstance(stack, str) and "checkout" not in recipe:
        version = None if "changed" in recipe else recipe.get("version")
        spec = f"{stack}=={version}" if version else stack
        return ["--stack", spec, *(["--part", part] if isinstance(part, str) else [])]
    return []


def target_of_recipe(recipe: Mapping[str, Any]) -> Target:
    """Return the target that the recipe in a trace's header describes.

    Raises ``UsageError`` for a recipe of no known kind.
    """
    if isinstance(recipe.get("subject"), str):
        about = recipe.get("about")
        return subject_target(recipe["subject"], about if about in KINDS else None)
    if isinstance(recipe.get("engine"), str):
        return engine_target(recipe["engine"], recipe.get("model"))
    if isinstance(recipe.get("stack"), str):
        version, part, checkout = recipe.get("version"), recipe.get("part"), recipe.get("checkout")
        # A checkout is run as it is now, whatever version the trace names, and so is a package that
        # was changed in place: the fault is being fixed there.
        released = version and not checkout and "changed" not in recipe
        spec = recipe["stack"] + (f"=={version}" if released else "")
        parts = [part] if isinstance(part, str) else ()
        return stack_targets(spec, parts, checkout=checkout)[1][0]
    for target in references():
        if target.name == recipe.get("reference"):
            return target
    raise UsageError(
        f"The trace's recipe {dict(recipe)!r} names no subject: name one with --subject"
        " module:factory."
    )


def _target_of(
    *, name: str, factory: SubjectFactory, recipe: Mapping[str, Any], about: str
) -> Target:
    """Return a target with the flavours and the schedules that its factory declares, if any."""
    flavours = getattr(factory, "flavours", None)
    return Target(
        name=name,
        factory=factory,
        recipe=recipe,
        flavours=None if flavours is None else as_flavours(flavours),
        cases=None if about != ROLLOUTS else getattr(factory, "cases", None),
        about=about,
    )


def _module_of_file(name: str, option: str) -> str:
    """Return the module of a file, whose folder is searched from now on, as pytest does it."""
    file = _real_path(name)
    if not file.is_file():
        raise UsageError(f"There is no file {name}: {option} takes module:factory or FILE:factory.")
    folder, module = module_of(file)
    if module in sys.modules:
        # before its folder is searched: processes that this one starts would import it
        _check_file(sys.modules[module], file)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return module


def _real_path(name: str) -> Path:
    # of a link that leads to itself, Path.resolve makes a RuntimeError
    return Path(os.path.realpath(name))


def _check_file(module: Any, file: Path) -> None:
    """Raise ``UsageError`` for a module of the file's name that comes from elsewhere."""
    loaded = getattr(module, "__file__", None)
    if loaded is None or _real_path(loaded) != file:
        # in its place it would break whoever imports the other one: a queue.py, all of asyncio
        raise UsageError(
            f"{file.name} cannot be imported: Python has a module {module.__name__!r} already"
            f" ({loaded or 'built in'}). Give the file another name."
        )


def _module(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        # The module itself is missing, or one that it imports: two different next steps.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"There is no module {error.name!r}: {option} searches the current folder and the"
                " installed packages."
            ) from error
        raise UsageError(
            f"{name} cannot be imported: it needs {error.name!r}, which is not installed here."
        ) from error
    except BaseException as error:
        # Also SystemExit: a script that exits when imported would end the run as if all were well.
        raise UsageError(f"{name} cannot be imported: {describe_error(error)}.") from error
