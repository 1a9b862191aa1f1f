"""One thread for torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread in the block; needs torch.

    Matrices of a tiny model gain nothing from more, and on a busy machine threads wait for each
    other: seconds per forward.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
