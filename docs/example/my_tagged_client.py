"""A resume loop that keeps every promise, and tags its samples with the oldest and the newest weights that sampled a token."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from rollproof import EngineOutput, FinishReason, Request


class MyTaggedClient:
    """Calls a server again after every abort, with what it has as the new prompt."""

    def __init__(self, fleet: Any) -> None:
        self.servers = list(fleet.servers.values())

    async def generate(self, request: Request) -> dict[str, Any]:
        """One sample, whatever interrupts it."""
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[Any] = []
        rows, reason, tries, left = None, "abort", 0, request.budget
        while reason == "abort" and left != 0:
            server, tries = self.servers[tries % len(self.servers)], tries + 1
            try:
                out = await server.generate(
                    prompt_ids=[*request.prompt_ids, *ids],
                    max_tokens=left,
                    sampling=request.sampling,
                    media=request.media,
                )
            except ConnectionError:
                await asyncio.sleep(1)
                continue
            if out.token_ids:
                ids += out.token_ids
                logprobs += out.logprobs.tolist()
                versions += versions_of(out)
                # a call returns the rows of the whole sequence that it sends: those that are there stay;
                # SGLang returns none with a call that it preempted before the abort: the next call has them
                if out.routes is not None:
                    new = out.routes if rows is None else out.routes[len(rows) :]
                    rows = new if rows is None else np.concatenate([rows, new])
            else:
                await asyncio.sleep(1)
            left = None if request.budget is None else request.budget - len(ids)
            reason = str(out.finish_reason)
        return {
            "request_id": request.request_id,
            "prompt_ids": request.prompt_ids,
            "response_ids": tuple(ids),
            "logprobs": np.array(logprobs),
            "routes": rows,
            "finish_reason": FinishReason(reason if reason != "abort" else "length"),
            **bounds(versions),
        }


def versions_of(out: EngineOutput) -> list[Any]:
    """The version of each token: from the engine's spans, else its one label for the call; ``None`` where it showed none."""
    if not out.spans:
        return [out.version] * len(out.token_ids)
    versions: list[Any] = [None] * len(out.token_ids)
    for span in out.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def bounds(versions: list[Any]) -> dict[str, Any]:
    """The tags of a sample. A token of weights that were loaded without a label could be older or newer than any other."""
    if not versions or None in versions:
        return {"min_version": None, "max_version": None}
    return {"min_version": min(versions), "max_version": max(versions)}
