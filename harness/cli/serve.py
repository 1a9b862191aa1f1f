"""The command ``serve``: a fake SGLang or vLLM server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollproof.cli.completions import complete_flavours
from rollproof.cli.run_served import run_served, split_command
from rollproof.core.case import EngineOptions, Model
from rollproof.core.files import check_target
from rollproof.errors import UsageError
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
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Listen there instead of on 127.0.0.1; needs --token, unless it is this machine.",
        ),
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TEXT",
            envvar="ROLLPROOF_TOKEN",
            show_envvar=False,
            help="Clients must send it as API key (or set ROLLPROOF_TOKEN).",
        ),
    ] = None,
    flavour: Annotated[
        str | None,
        typer.Option(
            "--flavour",
            metavar="NAME",
            help="Release to emulate; default: the newest.",
            autocompletion=complete_flavours,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=1,
            help="Layers of the model; all are mixtures of experts.",
            show_default="the contract's, or 3",
        ),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(
            "--experts", min=2, help="Experts per layer.", show_default="the contract's, or 8"
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", min=1, help="Experts per token.", show_default="the contract's, or 2"
        ),
    ] = None,
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
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="STACK",
            help="In place of a contract: what this stack promises (`rollproof contract show`).",
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="COMMAND",
            help="Serve until this command ends, and judge what it did. It finds the address in"
            " ROLLPROOF_URL and OPENAI_BASE_URL.",
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
    """Serve a fake engine until Ctrl-C, with the endpoints that reinforcement-learning stacks use.

    It answers programs of this machine, and no web pages. With --run it serves one command: 0
    if everything that arose passed, 1 if something failed, and 2 if no sample was judged, the
    command failed, a planned fault did not happen, or the client left out what a check needs.
    """
    # imported here: no other command needs uvicorn and starlette
    from rollproof.fakes.engine.flavours import FLAVOURS
    from rollproof.fakes.http.access import Access
    from rollproof.fakes.http.engine_backend import EngineBackend
    from rollproof.fakes.http.fault_plan import FaultPlan
    from rollproof.fakes.http.gateway import RouterKind
    from rollproof.fakes.http.serve_options import RoutesForm, ServeOptions
    from rollproof.fakes.http.serving import SERVERS, address_of, bound_socket, serve_forever
    from rollproof.store import TraceWriter

    if server not in SERVERS:
        raise UsageError(f"--as {server}: choose one of {list(SERVERS)}.")
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
    arguments = None if command is None else split_command(command)
    chosen = flavour or SERVERS[server][1]
    promised = _promised(contract, like, chosen)
    model = _model(promised, layers=layers, experts=experts, top_k=top_k, vocab=vocab)
    if promised is not None:
        _check_sizes(str(contract or like), promised, model)
    options = ServeOptions(
        flavour=chosen,
        model=model,
        engine=EngineOptions(max_batch=256, step=step, prefix_cache=True),
        seed=seed,
        incremental=incremental,
        routes=None if routes is None else RoutesForm(routes),
        contract=promised,
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
    if arguments is not None and (host != Access().host or token is not None):
        raise UsageError("--run serves one command of this machine: leave out --host and --token.")
    access = Access(host=host, token=token)
    # before the trace file is created: a port in use leaves nothing behind
    sockets = [bound_socket(port, host)]
    sockets += [bound_socket(0, host) for _ in range(workers)] if workers > 1 else []
    for number, bound in enumerate(sockets):
        worker = f"{server} s{number - 1}" if number else "router"
        name = server if workers == 1 else worker
        # stderr: stdout is for programs, and the first line is read by those that wait for us
        typer.echo(f"{name} on {address_of(bound)}", err=True)
    kind = RouterKind(router or "gateway")
    if arguments is not None:
        return run_served(
            arguments, server, options, sockets, header=header, trace=trace, plan=plan, kind=kind
        )
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if trace is None else TraceWriter(trace, header, trusted=True) as writer:
        summary = serve_forever(
            server,
            options,
            sockets,
            sinks=[] if writer is None else [writer],
            access=access,
            access_log=not quiet,
            plan=plan,
            kind=kind,
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


def _promised(path: Path | None, like: str | None, flavour: str) -> Contract | None:
    """Return the contract in a file, or that of a stack."""
    from rollproof.contracts.contract_file import read_contract
    from rollproof.contracts.presets import contract_of

    if like is not None and path is not None:
        raise UsageError("--contract and --like both say what the samples promise: choose one.")
    if like is not None:
        return contract_of(like, engine=flavour)
    return None if path is None else read_contract(path)


def _model(
    contract: Contract | None,
    *,
    layers: int | None,
    experts: int | None,
    top_k: int | None,
    vocab: int,
) -> Model:
    """Return the model to serve: options before the contract's sizes before a small one."""
    sizes = Model() if contract is None else Model.of_contract(contract)
    count = sizes.num_layers if layers is None else layers
    model = Model(
        num_layers=count,
        moe_layers=sizes.moe_layers if layers is None else tuple(range(count)),
        num_experts=sizes.num_experts if experts is None else experts,
        top_k=sizes.top_k if top_k is None else top_k,
        vocab=vocab,
    )
    if model.top_k > model.num_experts:
        raise UsageError(f"--top-k {model.top_k} exceeds --experts {model.num_experts}.")
    return model


def _check_sizes(name: str, contract: Contract, model: Model) -> None:
    """Refuse a contract with other sizes than the model: all samples would be found wrong."""
    differences = [
        f"{field} is {getattr(contract, field)!r} there, and {size!r} of the served model"
        for field, size in model.sizes.items()
        if getattr(contract, field) not in (None, size)
    ]
    if differences:
        raise UsageError(
            f"The contract {name} is about another model: {'; '.join(differences)}. Leave out"
            " --layers, --experts and --top-k, and the model has the sizes of the contract."
        )
