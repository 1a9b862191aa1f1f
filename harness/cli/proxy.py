"""The command ``proxy``: record the traffic of a real engine server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollproof.errors import UsageError
from rollproof.judging.report import ExitCode

if TYPE_CHECKING:
    from rollproof.core.contract import Contract
    from rollproof.recording.proxy.detection import ServerFacts

__all__ = ["proxy"]

_MIB = 1 << 20


def proxy(
    to: Annotated[
        str, typer.Option("--to", metavar="URL", help="The vLLM or SGLang server, or a router.")
    ],
    trace: Annotated[
        Path,
        typer.Option("--trace", metavar="DIR", help="Folder for the trace, for `rollproof check`."),
    ],
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
            help="In place of a contract: what this stack promises, without routes.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port to listen on; 0: a free one.")
    ] = 0,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="What the files of the trace are called, and the server in it; another one for"
            " each proxy of a folder.",
            show_default="that of the server's address",
        ),
    ] = None,
    sample: Annotated[
        float,
        typer.Option(
            "--sample", metavar="SHARE", help="Share of the requests to record, whole requests."
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Which requests --sample chooses.")
    ] = 0,
    redact: Annotated[
        str,
        typer.Option(
            "--redact",
            metavar="HOW",
            help="Token ids in the trace: none (as they are), hash:KEY, or drop.",
        ),
    ] = "none",
    part_size: Annotated[
        int, typer.Option("--part-size", metavar="MIB", min=1, help="Size of a file of the trace.")
    ] = 1024,
    part_time: Annotated[
        float,
        typer.Option(
            "--part-time", metavar="SECONDS", min=1, help="Time after which a new file begins."
        ),
    ] = 3600.0,
    max_size: Annotated[
        int | None,
        typer.Option(
            "--max-size",
            metavar="MIB",
            min=1,
            help="Size of the trace at which recording ends.",
            show_default="none",
        ),
    ] = None,
    max_body: Annotated[
        int,
        typer.Option(
            "--max-body",
            metavar="MIB",
            min=1,
            help="Size up to which a body is recorded; longer ones only pass.",
        ),
    ] = 64,
    queue: Annotated[
        int,
        typer.Option(
            "--queue",
            metavar="MIB",
            min=1,
            help="What may wait to be written; beyond it events are dropped, and counted.",
        ),
    ] = 256,
) -> int:
    """Record what passes between a stack and a real engine server, until Ctrl-C.

    Point the stack at the address that is printed. Samples are in the trace if the client reports
    them (rollproof.http_clients, with ROLLPROOF_URL set to the address).
    """
    # imported here: no other command needs uvicorn, starlette and httpx
    from rollproof.fakes.http.serving import bound_socket
    from rollproof.recording.proxy.detection import detect
    from rollproof.recording.proxy.proxy_server import ProxyOptions, run_proxy
    from rollproof.recording.redaction import Redaction, RequestSample
    from rollproof.store.parts import PartLimits

    if trace.exists() and not trace.is_dir():
        raise UsageError(f"--trace {trace} is a file: name a folder.")
    limits = PartLimits(
        part_bytes=part_size * _MIB,
        part_seconds=part_time,
        total_bytes=None if max_size is None else max_size * _MIB,
    )
    requests, redaction = RequestSample(sample, seed), Redaction(redact)
    facts = detect(to.rstrip("/"))
    promised = _promised(contract, like, facts)
    # a name of files: no system takes a slash in one, and Windows no colon
    address = to.rstrip("/").partition("://")[2].replace(":", "-").replace("/", "-")
    options = ProxyOptions(
        url=to.rstrip("/"),
        folder=trace,
        name=f"proxy-{address}" if name is None else name,
        server_id=address if name is None else name,
        contract=promised or _by_default(),
        engine=None if promised is None else _engine(promised, facts),
        takes_samples=promised is not None,
        facts=facts,
        limits=limits,
        sample=requests,
        redaction=redaction,
        max_body=max_body * _MIB,
        queue_bytes=queue * _MIB,
    )
    # stderr: stdout is for programs, and the first line is read by those that wait for us
    ended = run_proxy(
        options,
        bound_socket(port, host),
        ready=lambda url: typer.echo(_first_line(url, options.url, facts, promised), err=True),
        on_failure=lambda why: typer.echo(f"{why} The traffic goes on.", err=True),
    )
    traffic = ended.traffic
    typer.echo(f"trace {ended.paths[0]}: {ended.counts}", err=True)
    typer.echo(
        f"{traffic.requests:,} requests passed; {traffic.unreached:,} not answered,"
        f" {traffic.broken:,} broken off by the server, {traffic.left:,} left by their client",
        err=True,
    )
    if traffic.other_paths:
        others = ", ".join(f"{path} ({n:,})" for path, n in traffic.other_paths.most_common(5))
        typer.echo(f"not recorded, because no event is known for them: {others}", err=True)
    return ExitCode.USAGE if ended.counts.failure else ExitCode.PASS


def _first_line(url: str, to: str, facts: ServerFacts, promised: Contract | None) -> str:
    what = f"{facts.engine or 'unknown server'} {facts.release}".strip()
    line = f"proxy on {url} to {what} at {to}"
    if promised is None:
        line += (
            "; no contract was given: that of any engine is declared by default, and no samples are"
            " taken (--contract FILE or --like STACK)"
        )
    return line


def _promised(path: Path | None, like: str | None, facts: ServerFacts) -> Contract | None:
    from rollproof.contracts.contract_file import read_contract
    from rollproof.contracts.presets import contract_of

    if path is not None and like is not None:
        raise UsageError("--contract and --like both say what the samples promise: choose one.")
    if like is not None:
        # a preset has the sizes of a small model, and those of routes must be the served one's
        return contract_of(like, engine=facts.engine or None, routes=False)
    if path is None:
        return None
    contract = read_contract(path)
    if contract.replay is not None or contract.engine is not None:
        whose = "a trainer with routing replay" if contract.replay is not None else "an engine"
        raise UsageError(
            f"--contract {path} is that of {whose}: a proxy records rollouts, whose contract says"
            " what samples promise (docs/contract.md)."
        )
    return contract


def _by_default() -> Contract:
    """Return a contract that promises nothing of samples: those are not taken."""
    from rollproof.core.contract import Contract, KvPolicy, Logprobs, ResumeBy, Rows, Versions

    return Contract(
        rows=Rows.NONE,
        resume=ResumeBy.CLIENT,
        versions=Versions.NONE,
        logprobs=Logprobs.NONE,
        abort_surfaces=True,
        finish_reason=False,
        kv_policy=KvPolicy.KEEP,
    )


def _engine(contract: Contract, facts: ServerFacts) -> Contract | None:
    """Return what the engine's replies are like, where samples have routes."""
    from rollproof.core.case import Model
    from rollproof.fakes.engine.flavours import engine_contract, flavour_named

    if not facts.engine or not contract.has_routes:
        return None
    model = Model.of_contract(contract)
    return engine_contract(flavour_named(facts.engine), model, contract.kv_policy)
