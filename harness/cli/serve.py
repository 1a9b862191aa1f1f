"""The command ``serve``: a fake SGLang or vLLM server."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollproof.core.case import EngineOptions, Model
from rollproof.core.files import check_target
from rollproof.errors import ContractError, UsageError
from rollproof.judging.report import ExitCode

if TYPE_CHECKING:
    from rollproof.core.contract import Contract

__all__ = ["serve"]

_ROUTES: Mapping[str, Sequence[str]] = {
    "sglang": ("int32", "compact"),
    "vllm": ("npy", "described"),
}
"""The forms in which each server can write routes."""


def serve(
    server: Annotated[
        str, typer.Option("--as", metavar="sglang|vllm", help="The server to emulate.")
    ],
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", help="Port on 127.0.0.1; 0: a free one, which is printed."
        ),
    ] = 0,
    flavour: Annotated[
        str | None,
        typer.Option("--flavour", metavar="NAME", help="Release to emulate; default: the newest."),
    ] = None,
    layers: Annotated[
        int,
        typer.Option("--layers", min=1, help="Layers of the model; all are mixtures of experts."),
    ] = 3,
    experts: Annotated[int, typer.Option("--experts", min=2, help="Experts per layer.")] = 8,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts per token.")] = 2,
    vocab: Annotated[int, typer.Option("--vocab", min=8, help="Size of the vocabulary.")] = 512,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the coded policy.")] = 0,
    step: Annotated[
        float,
        typer.Option(
            "--step", metavar="SECONDS", min=0.0, max=3600.0, help="Duration of one engine step."
        ),
    ] = 0.001,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=64,
            help="Number of servers; with more than one, a router in front of them.",
        ),
    ] = 1,
    router: Annotated[
        str | None,
        typer.Option(
            "--router",
            metavar="gateway|slime",
            help="The router to emulate before several servers; default: gateway.",
        ),
    ] = None,
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental", help="SGLang: each chunk of a stream has only the new tokens."
        ),
    ] = False,
    routes: Annotated[
        str | None,
        typer.Option(
            "--routes",
            metavar="FORM",
            help="Encoding of routes: int32 or compact (SGLang), npy or described (vLLM).",
        ),
    ] = None,
    fault_plan: Annotated[
        Path | None,
        typer.Option("--fault-plan", metavar="FILE", help="Plan of faults: TOML or JSON."),
    ] = None,
    contract: Annotated[
        Path | None,
        typer.Option(
            "--contract",
            metavar="FILE",
            help="What the stack promises (TOML or JSON); needed to judge its samples.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the trace here, for `rollproof check`."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No access log.")] = False,
) -> int:
    """Serve a fake engine on 127.0.0.1 until Ctrl-C, with the endpoints that reinforcement-learning
    stacks use.
    """
    # imported here: no other command needs uvicorn and starlette
    from rollproof.fakes.engine.flavours import FLAVOURS
    from rollproof.fakes.http.engine_backend import EngineBackend
    from rollproof.fakes.http.fault_plan import FaultPlan
    from rollproof.fakes.http.gateway import RouterKind
    from rollproof.fakes.http.serve_options import RoutesForm, ServeOptions
    from rollproof.fakes.http.serving import SERVERS, bound_socket, serve_forever
    from rollproof.store import TraceWriter

    if server not in SERVERS:
        raise UsageError(f"--as {server}: choose one of {list(SERVERS)}.")
    if top_k > experts:
        raise UsageError(f"--top-k {top_k} exceeds --experts {experts}.")
    flavours = [name for name in FLAVOURS if name.partition("-")[0] == server]
    _require_choice("--flavour", flavour, flavours, server)
    _require_choice("--routes", routes, _ROUTES[server], server)
    _require_choice("--router", router, list(RouterKind), server)
    if router is not None and workers == 1:
        raise UsageError(
            "--router needs --workers N with more than one: a router is for several servers."
        )
    if incremental and server != "sglang":
        raise UsageError(
            "--incremental is an option of SGLang (incremental_streaming_output): vLLM always"
            " streams only what is new."
        )
    if trace is not None and trace.exists():
        raise UsageError(f"--trace {trace} exists: name a new file, or remove it first.")
    if trace is not None:
        check_target(trace)
    model = Model(
        num_layers=layers,
        moe_layers=tuple(range(layers)),
        num_experts=experts,
        top_k=top_k,
        vocab=vocab,
    )
    options = ServeOptions(
        flavour=flavour or SERVERS[server][1],
        model=model,
        engine=EngineOptions(max_batch=256, step=step, prefix_cache=True),
        seed=seed,
        incremental=incremental,
        routes=None if routes is None else RoutesForm(routes),
        contract=None if contract is None else _contract(contract, model),
    )
    plan = None if fault_plan is None else FaultPlan.from_file(fault_plan)
    for action in () if plan is None else plan.actions:
        if action.server is not None:
            _require_choice(
                f"{fault_plan}: server",
                action.server,
                [f"s{number}" for number in range(workers)],
                f"{server} --workers {workers}",
            )
    header = EngineBackend.header(options)
    # before the trace file is created: a port in use leaves nothing behind
    sockets = [bound_socket(port)]
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if trace is None else TraceWriter(trace, header, trusted=True) as writer:
        if workers > 1:
            sockets += [bound_socket() for _ in range(workers)]
        for number, bound in enumerate(sockets):
            worker = f"{server} s{number - 1}" if number else "router"
            name = server if workers == 1 else worker
            # stderr: stdout is for programs, and the first line is read by those that wait for us
            typer.echo(f"{name} on http://127.0.0.1:{bound.getsockname()[1]}", err=True)
        summary = serve_forever(
            server,
            options,
            sockets,
            sinks=[] if writer is None else [writer],
            access_log=not quiet,
            plan=plan,
            kind=RouterKind(router or "gateway"),
        )
    for line in summary:
        typer.echo(line, err=True)
    return ExitCode.PASS


def _require_choice(option: str, value: str | None, choices: Sequence[str], server: str) -> None:
    if value is not None and value not in choices:
        raise UsageError(
            f"{option} {value} does not go with --as {server}: choose one of"
            f" {[str(choice) for choice in choices]}."
        )


def _contract(path: Path, model: Model) -> Contract:
    """Return the contract in a file. It must have the sizes of the served ``model``, or all samples
    would be found wrong.
    """
    from rollproof.core.contract import Contract

    try:
        text = path.read_text(encoding="utf-8")
        data: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The contract {path} cannot be read: {error}.") from error
    if not isinstance(data, dict):
        raise UsageError(
            f"The contract {path} must be an object with the fields of docs/contract.md, not a"
            f" {type(data).__name__}."
        )
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    try:
        promised = Contract(**fields)
    except ContractError as error:
        raise ContractError(f"{path}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"The contract {path} cannot be read: {error}.") from error
    differences = [
        f"{name} is {getattr(promised, name)!r} there, and {size!r} of the served model"
        for name, size in model.sizes.items()
        if getattr(promised, name) not in (None, size)
    ]
    if differences:
        raise UsageError(
            f"The contract {path} is about another model: {'; '.join(differences)}. Start the"
            " server with the --layers, --experts and --top-k of the contract, or change it: all"
            " layers of a served model are mixtures of experts."
        )
    return promised
