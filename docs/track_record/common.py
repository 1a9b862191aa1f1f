"""What the scripts of this folder share."""

import asyncio
import inspect
import json
import sys
import threading
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


def run(*faults: Callable[[], Any]) -> None:
    """Print the name of each fault, or of those that the command line names, and what its function
    prints.
    """
    warnings.simplefilter("ignore")
    by_name = {fault.__name__: fault for fault in faults}
    for name in sys.argv[1:] or by_name:
        if name not in by_name:
            sys.exit(f"There is no fault {name}. Faults: {', '.join(by_name)}.")
        print(f"# {name}", flush=True)
        try:
            result = by_name[name]()
            if inspect.isawaitable(result):
                asyncio.run(result)
        except ModuleNotFoundError as error:  # megatron_faults.py runs without verl and SkyRL, too
            print(f"{name} needs a package that is not installed: {error.name}", file=sys.stderr)


class _StubFinder:
    """Makes every module of some packages import as a mock."""

    def __init__(self, packages: tuple[str, ...], version: str) -> None:
        self.packages, self.version = packages, version

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{package}.") for package in self.packages):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> Any:
        module: Any = ModuleType(spec.name)
        module.__version__, module.__getattr__ = self.version, lambda name: MagicMock()
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def stub_packages(*packages: str, version: str = "1.0", even_if_installed: bool = False) -> None:
    """Stub packages that a framework imports at its head, and that nothing here calls."""
    place = 0 if even_if_installed else len(sys.meta_path)
    sys.meta_path.insert(place, _StubFinder(packages, version))  # type: ignore[arg-type]


def commit_of(package: ModuleType, parents: int = 0) -> str:
    """The commit of a package's checkout; its root is so many folders above the package's."""
    git = Path(next(iter(package.__path__))).parents[parents] / ".git"
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    return (git / head[5:]).read_text(encoding="utf-8") if "ref: " in head else head


def serve(*replies: dict[str, Any], on_call: Callable[[str], Any] = lambda path: None) -> str:
    """Start a server on loopback that answers every POST with the next of ``replies``, the last one
    for ever; ``on_call`` gets the path of each request before the reply.
    """
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            on_call(self.path)
            reply = left.pop(0) if len(left) > 1 else left[0]
            body = json.dumps(reply, separators=(",", ":")).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def choice(tokens: list[int], reason: str, **more: Any) -> dict[str, Any]:
    """vLLM's reply with one choice."""
    logprobs = {
        "content": [{"logprob": -0.5}] * len(tokens),
        "token_logprobs": [-0.5] * len(tokens),
    }
    return {
        "choices": [{"token_ids": tokens, "finish_reason": reason, "logprobs": logprobs, **more}]
    }
