"""serve: a fake engine behind the HTTP face of a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollproof.case import EngineOptions, Model
from rollproof.errors import UsageError
from rollproof.report import ExitCode

__all__ = ["serve"]


def serve(
    face: Annotated[str, typer.Option("--as", metavar="sglang|vllm", help="Whose HTTP face the server has.")],
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port on 127.0.0.1; 0: a free one, which is told.")] = 0,
    flavour: Annotated[
        str | None, typer.Option("--flavour", metavar="NAME", help="Release whose conventions hold; default: the newest.")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the model; all are mixtures of experts.")] = 3,
    experts: Annotated[int, typer.Option("--experts", min=2, help="Experts a layer.")] = 8,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts a token.")] = 2,
    vocab: Annotated[int, typer.Option("--vocab", min=8, help="Size of the vocabulary.")] = 512,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the coded policy.")] = 0,
    step: Annotated[float, typer.Option("--step", metavar="SECONDS", min=0.0, help="Duration of one engine step.")] = 0.001,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write the trace here, for `rollproof check`.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No access log.")] = False,
) -> int:
    """Serve a fake engine on loopback until Ctrl-C: coded values, and the endpoints that reinforcement-learning stacks use."""
    from rollproof.fakes.http.backing import Backing, ServeOptions
    from rollproof.fakes.http.serving import FACES, bound_socket, serve_forever
    from rollproof.store import TraceWriter

    if face not in FACES:
        raise UsageError(f"No face is named {face!r}; choose one of {list(FACES)}.")
    if top_k > experts:
        raise UsageError(f"--top-k {top_k} exceeds --experts {experts}.")
    options = ServeOptions(
        flavour=flavour or FACES[face][1],
        model=Model(num_layers=layers, moe_layers=tuple(range(layers)), num_experts=experts, top_k=top_k, vocab=vocab),
        engine=EngineOptions(max_batch=256, step=step, prefix_cache=True),
        seed=seed,
    )
    header = Backing.header(options)
    listening = bound_socket(port)
    typer.echo(f"{face} on http://127.0.0.1:{listening.getsockname()[1]}", err=True)
    if trace is None:
        serve_forever(face, options, listening, access_log=not quiet)
        return ExitCode.PASS
    with TraceWriter(trace, header) as writer:
        serve_forever(face, options, listening, sinks=[writer], access_log=not quiet)
    return ExitCode.PASS
