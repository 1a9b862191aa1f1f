"""Cases for stacks whose samples carry sampling masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollproof.core.case import Case
from rollproof.core.contract import Contract
from rollproof.core.records import Scalar

__all__ = ["with_truncated_sampling"]

_TRUNCATED: tuple[Mapping[str, Scalar], ...] = (
    {"top_p": 0.9, "top_k": 20},
    {"top_k": 8},
    # all tokens may be drawn: there is no mask
    {},
    {"min_p": 0.1},
)
"""What requests set in turn. Few ids a mask, so that traces stay small."""


def with_truncated_sampling(case: Case, contract: Contract) -> Case:
    """Return the case with requests whose sampling leaves tokens out, if the samples of a stack
    with that contract carry sampling masks.
    """
    if not contract.sampling_masks:
        return case
    requests = tuple(
        replace(request, sampling={**_TRUNCATED[i % len(_TRUNCATED)], **request.sampling})
        for i, request in enumerate(case.requests)
    )
    return replace(case, requests=requests)
