"""Subject: layout functions of a framework, given for judging, and single functions made into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from rollproof.errors import SubjectError, UsageError
from rollproof.layouts.functions import FUNCTIONS
from rollproof.layouts.layout import Layout

__all__ = ["LayoutSubject", "functions_of", "layout_function"]


@runtime_checkable
class LayoutSubject(Protocol):
    """The layout functions of a framework.

    ``layout`` declares its conventions: padding side, order, division over context-parallel ranks,
    alignment, layer axis, fillers. Cases vary its sizes. Every function of
    ``rollproof.layouts.functions`` that the subject has as a method is judged, called as
    ``method(layout, **arguments)`` with the layout of the case. Optional are ``supports(function,
    layout) -> str | None``, the reason why the framework does not offer that (such cases are left
    out), and ``numbers = False`` where a payload must consist of valid expert ids. A call that
    raises ``NotImplementedError`` is left out, too: what is refused for the lengths of its samples.
    """

    layout: Layout


def functions_of(subject: Any, label: str) -> tuple[str, ...]:
    """The names of the functions that a subject has. Raises ``SubjectError`` where it has none, or
    declares no layout.
    """
    names = tuple(name for name in FUNCTIONS if callable(getattr(subject, name, None)))
    if not isinstance(getattr(subject, "layout", None), Layout):
        raise SubjectError(
            f"{label} made a {type(subject).__name__} without a `layout` (a"
            " rollproof.layouts.Layout): it declares the conventions that the functions are"
            " judged by."
        )
    if not names:
        raise SubjectError(
            f"{label} made a {type(subject).__name__} with none of the layout functions"
            f" {list(FUNCTIONS)}: nothing can be judged."
        )
    return names


def layout_function(
    name: str, function: Callable[..., Any], layout: Layout, **attributes: Any
) -> Callable[[], LayoutSubject]:
    """A factory of a subject with one function, such as ``layout_function("context", my_slice,
    my_layout)``.

    ``attributes`` are those of a subject (``supports``, ``numbers``). Raises ``UsageError`` for a
    name that is no layout function, and for what cannot be called.
    """
    if name not in FUNCTIONS:
        raise UsageError(f"No layout function is named {name!r}; choose one of {list(FUNCTIONS)}.")
    if not callable(function):
        raise UsageError(
            f"layout_function({name!r}, ...) takes the function to be judged, not a"
            f" {type(function).__name__}."
        )
    plain = {
        key: staticmethod(value) if callable(value) else value for key, value in attributes.items()
    }
    made = {"layout": layout, name: staticmethod(function), **plain}
    subject: type[LayoutSubject] = type(getattr(function, "__name__", name), (), made)
    return subject
