"""What tests of HTML pages share: hostile texts, the elements of a page, and a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
OWNED = "document.title='owned'"
HOSTILE = f"</script><script>{OWNED}</script><img src=x onerror={OWNED}>\"'&\u2028${{1}}"


class Tags(HTMLParser):
    """The elements of a page, its addresses and its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script"
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("src", "href", "action", "style") and name != "style":
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def tags_of(text: str) -> Tags:
    """Return the elements of a page."""
    tags = Tags()
    tags.feed(text)
    return tags


def rendered(tmp_path: Path, text: str, actions: str) -> str:
    """The document after the page's script and ``actions`` ran in a browser; what they print is in
    the element ``probe``.
    """
    assert BROWSER is not None
    script = (
        "<pre id='probe'></pre><script>try {"
        f" document.getElementById('probe').textContent = JSON.stringify((() => {{{actions}}})());"
        " } catch (error) { document.getElementById('probe').textContent = 'error ' + error; }"
        "</script></body>"
    )
    digest = base64.b64encode(
        hashlib.sha256(
            script[script.index("<script>") + 8 : script.index("</script>")].encode()
        ).digest()
    ).decode()
    policy = f"script-src 'sha256-{digest}' "
    if "script-src " not in text:  # a page without a script allows none
        text = text.replace("default-src 'none'", "default-src 'none'; script-src ", 1)
    page = tmp_path / "page.html"
    page.write_text(text.replace("script-src ", policy, 1).replace("</body>", script))
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,844"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        timeout=300,
        check=True,
    )
    return done.stdout.decode()


def probe(document: str) -> Any:
    """What the actions returned."""
    found = re.search(r'<pre id="probe">(.*?)</pre>', document, flags=re.DOTALL)
    assert found is not None
    text = html.unescape(found.group(1))
    assert not text.startswith("error"), text
    return json.loads(text)
