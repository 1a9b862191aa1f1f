"""Hook of mkdocs.yml: pages of the site that are files of the checkout outside of docs/, and the
table of releases and checks that ``rollproof matrix build`` makes of docs/stack_results.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from measured_releases import measured_releases  # beside a hook: its folder is on mkdocs' path
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rollproof.invariants import default_registry
from rollproof.reporting.html.matrix_site import write_site
from rollproof.reporting.results.stored_runs import read_runs

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
"""Files of the checkout, and what they are called in the site."""

_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
"""Code with a `|` that GitHub's tables want escaped; those of mkdocs show the backslash."""
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_CODE_IN_HTML = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for file, name in PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    for name, text in _matrix().items():
        files.append(File.generated(config, f"matrix/{name}", content=text))
    return files


def _matrix() -> dict[str, str]:
    """Return the files of the table of releases and checks."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [*read_runs([ROOT / "docs" / "stack_results"]), *measured_releases()]
        written = write_site(runs, Path(folder), tuple(default_registry()))
        # these pages stand alone elsewhere: here the name on top leads back
        back = ">rollproof</p>", '><a href="../index.html">rollproof</a></p>'
        return {file.name: file.read_text(encoding="utf-8").replace(*back) for file in written}


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Point links that leave docs/ to the pages above, and links of those pages into docs/.

    Links to other files of the checkout become plain text.
    """
    if page.file.src_uri == "index.md":
        # its transcript is 120 columns wide, and it has no more than four headings
        page.meta["hide"] = ["toc"]
    origin = {name: file for file, name in PAGES.items()}.get(page.file.src_uri)
    folder = (ROOT / origin if origin else ROOT / "docs" / page.file.src_uri).parent

    def target(match: re.Match[str]) -> str:
        path = (folder / match["target"]).resolve()
        anchor = match["anchor"] or ""
        up = "../" * page.file.src_uri.count("/")
        if path.is_relative_to(ROOT / "docs"):
            return match[0] if not origin else f"]({path.relative_to(ROOT / 'docs')}{anchor})"
        if (name := PAGES.get(str(path.relative_to(ROOT)))) is not None:
            return f"]({up}{name}{anchor})"
        return f"]({match['target']})"

    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), _LINK.sub(target, markdown))


def on_page_content(html: str, **_: object) -> str:
    """Let code in cells of tables break after a sign: a phone is narrower than names of checks."""

    def breakable(cell: re.Match[str]) -> str:
        return _CODE_IN_HTML.sub(
            lambda code: re.sub(r"(?<=\w)([._=|/(])(?=\w)", r"\1<wbr>", code[0]), cell[0]
        )

    return _CELL.sub(breakable, html)
