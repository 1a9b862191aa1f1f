"""Optional packages: which extra of the distribution brings what a part of rollproof imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from rollproof.errors import ExtraError

__all__ = ["MODULES", "require_extra"]

MODULES: Mapping[str, tuple[str, ...]] = {
    # httptools is left out: without it uvicorn parses with h11, slower and with the same result.
    "serve": ("starlette", "uvicorn", "httpx"),
    "cli": ("typer", "rich"),
    "gap": ("scipy",),
}
"""The modules that the parts of rollproof behind an extra cannot be imported without."""


def require_extra(extra: str, feature: str) -> None:
    """Check that the modules of an extra are installed, without importing them.

    Called by the packages that import these modules, before they do: the ModuleNotFoundError of
    a package that users have never heard of would not tell them what to install.

    Args:
        extra: a key of ``MODULES``.
        feature: what needs it, as the subject of a sentence in the plural.

    Raises:
        ExtraError: A module is missing; the text has the command that installs it.
    """
    missing = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ExtraError(
            f"{feature} need {', '.join(missing)}, which {verb} not installed:"
            f" pip install 'rollproof[{extra}]'."
        )
