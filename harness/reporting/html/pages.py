"""What all pages share: their packages, their template engine, and their style."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

from rollproof.errors import ExtraError

__all__ = ["inline_script", "page_template", "require_packages", "story_values"]


def require_packages(names: Sequence[str], needed_for: str, without: str) -> None:
    """Raise ``ExtraError`` if packages are missing.

    Args:
        names: The packages.
        needed_for: The beginning of the message: what needs them.
        without: Its end: what there is without them.
    """
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if lacking:
        raise ExtraError(
            f"{needed_for} {' and '.join(lacking)}, which"
            f" {'is' if len(lacking) == 1 else 'are'} not installed: pip install"
            f" 'rollproof[report]'. {without}"
        )


def page_template(
    package: str, name: str, filters: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Return the jinja2 template ``name`` of ``package``, which escapes every text.

    Its variable ``style`` is the style sheet of all pages; ``parts.html`` has macros to import.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(partial(read, "rollproof.reporting.html")),
    )
    environment.filters |= dict(filters or {})
    environment.globals["style"] = Markup(read("rollproof.reporting.html", "base.css"))  # noqa: S704 - our own file
    return environment.from_string(read(package, name))


def read(package: str, name: str) -> str:
    """Return the text of a file of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def inline_script(package: str, name: str) -> Mapping[str, Any]:
    """Return what a template needs for a script of ours: its text, and the hash by which the
    page's Content-Security-Policy allows it and no other.
    """
    from markupsafe import Markup

    script = read(package, name)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "script": Markup(script),  # noqa: S704 - our own file
        "script_hash": Markup(f"sha256-{digest}"),  # noqa: S704 - letters and digits
    }


def story_values(story: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the moments of a story as the macro ``story`` shows them: times are counted from the
    first, and the columns are as wide as their numbers.
    """
    start = story[0]["time"] if story else 0.0
    moments = [
        {
            "event": moment["index"] if moment["index"] >= 0 else "",
            "time": f"+{moment['time'] - start:.3f} s" if moment["index"] >= 0 else "",
            "text": moment["text"],
            "broke": bool(moment.get("broke")),
        }
        for moment in story
    ]
    return {
        "moments": moments,
        "event_width": max((len(str(moment["event"])) for moment in moments), default=0) + 1,
        "time_width": max((len(moment["time"]) for moment in moments), default=0),
    }
