"""A resume loop as many stacks have it, with the most frequent fault of the field in it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from rollproof import FinishReason, Request


class MyClient:
    """Calls a server again after every abort, with what it has as the new prompt."""

    def __init__(self, fleet: Any) -> None:
        self.servers = list(fleet.servers.values())

    async def generate(self, request: Request) -> dict[str, Any]:
        """One sample, whatever interrupts it."""
        ids: list[int] = []
        logprobs: list[float] = []
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
                rows = out.routes if rows is None else np.concatenate([rows, out.routes])
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
        }
