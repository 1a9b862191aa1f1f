"""Replies over HTTP with token ids and no text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollproof.core.case import ActionKind, EngineOptions
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.http_clients import (
    SglangClient,
    SglangStreamClient,
    VllmClient,
    VllmStreamClient,
)
from rollproof.fakes.known_bugs._planting import act, case
from rollproof.invariants import default_registry
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge

_ABORT = act(ActionKind.ABORT, 3)
_REGISTRY = default_registry()
_EMPTY = EngineOptions(empty_text=True)


class _GoesByTheText(SglangClient):
    """Takes a reply without text for one without tokens."""

    def tokens(self, decoded: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(decoded["output_ids"]) if decoded["text"] else ()


@pytest.mark.parametrize(
    ("client", "flavour"),
    [
        (SglangClient, "sglang"),
        (SglangStreamClient, "sglang"),
        (VllmClient, "vllm"),
        (VllmStreamClient, "vllm"),
    ],
)
def test_clients_that_read_ids_do_without_text(client: SubjectFactory, flavour: str) -> None:
    """A client that speaks in token ids does not notice that the text is empty."""
    trace = run_case(client, case(_ABORT, flavour=flavour, engine=_EMPTY))
    assert () == judge(trace, _REGISTRY).failed


def test_a_client_that_goes_by_the_text_is_found() -> None:
    """A client that drops the tokens of a reply without text is blamed where the text is empty, and
    only there.
    """
    plain = run_case(_GoesByTheText, case(flavour="sglang"))
    empty = run_case(_GoesByTheText, case(flavour="sglang", engine=_EMPTY))

    assert () == judge(plain, _REGISTRY).failed
    assert judge(empty, _REGISTRY).failed
