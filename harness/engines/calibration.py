"""Calibrate a fake engine: compare the facts of its traces with those of the real engine.

Tokens, values and the progress of a call at its abort differ from run to run. How a call ended, how
many rows it has for its tokens, which parts its reply has, which weights its values show and how it
was streamed do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from rollproof.core.contract import Contract, KvPolicy, Rows
from rollproof.core.events.rollout import Call, Chunk, Reply, Result, Weights
from rollproof.core.records import EngineOutput, FinishReason, Span
from rollproof.core.trace import Trace

__all__ = ["differences", "facts"]


def facts(trace: Trace) -> frozenset[str]:
    """Return the facts of an experiment that do not depend on chance, one sentence each."""
    contract = trace.header.engine or trace.header.contract
    calls = {event.call_id: event for event in trace.events if isinstance(event, Call)}
    chunks: dict[int, list[Chunk]] = {}
    names: dict[object, str] = {}
    sentences: set[str] = set()
    for event in trace.events:
        if isinstance(event, Weights):
            names.setdefault(event.version, "old" if not names else "new")
            names[event.label] = (
                names[event.version] if event.label not in names else names[event.label]
            )
        elif isinstance(event, Chunk):
            chunks.setdefault(event.call_id, []).append(event)
        elif isinstance(event, Reply):
            call = calls[event.call_id]
            if call.end_tokens and event.output.finish_reason is FinishReason.LENGTH:
                continue  # whether a call reaches an end token within its budget is chance
            kind = _kind(call, event.output)
            sentences.update(
                f"{kind}: {fact}" for fact in _reply_facts(contract, call, event.output)
            )
            sentences.update(f"{kind}: {fact}" for fact in _version_facts(contract, event, names))
            sentences.update(
                f"{kind}, {call.stream} stream: {fact}"
                for fact in _stream_facts(chunks.get(event.call_id, []))
            )
        elif isinstance(event, Result) and event.error is not None:
            sentences.add("a call is refused with an error")
    return frozenset(sentences)


def differences(
    left: Iterable[Trace], right: Iterable[Trace], names: tuple[str, str] = ("fake", "real")
) -> Mapping[str, list[str]]:
    """Return the facts that only one of two runs shows, with the name of the run, by experiment.

    Experiments that only one of them ran are skipped.
    """
    first, second = (
        {trace.header.profile: facts(trace) for trace in traces} for traces in (left, right)
    )
    out = {}
    for experiment in sorted(set(first) & set(second)):
        a, b = first[experiment], second[experiment]
        differing = [f"{names[0]} only: {fact}" for fact in sorted(a - b)]
        differing += [f"{names[1]} only: {fact}" for fact in sorted(b - a)]
        if differing:
            out[experiment] = differing
    return out


def _kind(call: Call, output: EngineOutput) -> str:
    if output.finish_reason is FinishReason.ABORT:
        ended = "aborted with tokens" if output.token_ids else "aborted without tokens"
    else:
        ended = f"ended by {output.finish_reason}"
    options = {"routes": call.want_routes, "an offset": call.routes_start > 0}
    requested = " and ".join(name for name, chosen in options.items() if chosen)
    return f"a call with {requested or 'no routes'} that {ended}"


def _reply_facts(contract: Contract, call: Call, output: EngineOutput) -> Iterable[str]:
    tokens = len(output.token_ids)
    yield f"the finish reason is spelled {output.native!r}, with the message {output.message!r}"
    yield f"cached tokens are {'not reported' if output.cached_tokens is None else 'reported'}"
    if output.logprobs is None:
        yield "no logprobs"
    else:
        yield f"{len(output.logprobs) - tokens:+d} logprobs in addition to one per token"
        yield f"logprobs {'have' if np.isnan(output.logprobs).any() else 'have no'} missing values"
    if output.routes is None:
        yield "no rows"
        return
    due = len(call.prompt_ids) + tokens - output.routes_start - (contract.rows is not Rows.ALL)
    yield f"{len(output.routes) - due:+d} rows in addition to those that are due"
    layers, experts = (
        output.routes.shape[1] - contract.route_layers,
        output.routes.shape[2] - (contract.top_k or 0),
    )
    yield f"{layers:+d} layers and {experts:+d} experts in addition to the declared"
    yield f"rows are of {output.routes.dtype.name}"


def _version_facts(contract: Contract, reply: Reply, names: Mapping[object, str]) -> Iterable[str]:
    """Yield which weights the engine reports, and which the values show.

    Over retained KV the values show none, by declaration.
    """
    output = reply.output
    if output.spans:
        yield f"spans: {_order(output.spans, names)}"
        starts = [0, *(span.end for span in output.spans)]
        yield (
            f"spans {'cover' if starts[-1] == len(output.token_ids) else 'do not cover'} the tokens"
        )
        if output.version is not None:
            yield (
                "the reply's version is"
                f" {'that' if output.version == output.spans[-1].version else 'not that'} of the"
                " last span"
            )
    elif output.version is not None:
        yield "a version is reported"
    else:
        yield "no version is reported"
    if contract.kv_policy is KvPolicy.KEEP:
        return
    if reply.true_tokens:
        yield f"logprobs show {_order(reply.true_tokens, names)}"
    if reply.true_rows:
        yield f"rows show {_order(reply.true_rows, names)}"


def _order(spans: Iterable[Span], names: Mapping[object, str]) -> str:
    shown: list[str] = []
    for span in spans:
        name = names.get(span.version, str(span.version))
        if not shown or shown[-1] != name:
            shown.append(name)
    return " then ".join(shown)


def _stream_facts(chunks: list[Chunk]) -> Iterable[str]:
    if not chunks:
        return
    yield f"routes come {'with the last chunk' if chunks[-1].rows is not None else 'not at all'}"
    if any(chunk.rows is not None for chunk in chunks[:-1]):
        yield "routes come with chunks before the last"
    yield f"{sum(chunk.finished for chunk in chunks)} chunk says that it is the last"
