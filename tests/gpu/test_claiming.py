"""A session takes the cards that are free, whatever their numbers, and leaves the environment as it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import pytest

from rollproof.gpu_suites.claiming import Claim
from rollproof.gpu_suites.gate import find_gpus
from tests.support.fake_nvml import Card, fake_nvml

STRANGER = 1
BUSY = Card(pids=[STRANGER])
NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def claimed(monkeypatch: pytest.MonkeyPatch, cards: Sequence[Card], visible: str | None, *, share: bool = False) -> Claim:
    """The claim on a host with these cards, of which the user shows ``visible``."""
    for name in (*NAMES, "ROLLPROOF_SHARE_GPUS"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if share:
        monkeypatch.setenv("ROLLPROOF_SHARE_GPUS", "1")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*cards))
    return Claim.make()


@pytest.mark.parametrize(
    ("cards", "visible", "left", "shown"),
    [
        ([BUSY, Card(), Card(mig=1), Card()], None, ["GPU 0 is busy", "GPU 2 is divided by MIG"], "1,3"),
        ([Card(), BUSY, Card()], "2,1,0", ["GPU 1 is busy"], "2,0"),
        ([Card(), BUSY, Card()], "GPU-2abc,GPU-1abc", ["GPU 1 is busy"], "2"),
    ],
)
def test_cards_that_are_taken_are_hidden(
    monkeypatch: pytest.MonkeyPatch, cards: list[Card], visible: str | None, left: list[str], shown: str
) -> None:
    """The first card that CUDA then shows is a free one, in the order that the user gave; afterwards all is as before."""
    before = {name: os.environ.get(name) for name in NAMES} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    claim = claimed(monkeypatch, cards, visible)
    try:
        assert (shown, "PCI_BUS_ID") == tuple(os.environ[name] for name in NAMES)
        assert shown.split(",") == [str(gpu.index) for gpu in find_gpus().gpus]
        assert len(left) == len(claim.left)
        assert all(why.startswith(start) for why, start in zip(claim.left, left, strict=True))
    finally:
        claim.release()
    assert before["CUDA_VISIBLE_DEVICES"] == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert "CUDA_DEVICE_ORDER" not in os.environ


@pytest.mark.parametrize(
    ("cards", "visible", "share"),
    [([Card(), Card()], None, False), ([BUSY, BUSY], "1,0", False), ([BUSY, Card()], None, True), ([], None, False), ([Card()], "", False)],
)
def test_nothing_is_hidden_where_nothing_is_to_choose(
    monkeypatch: pytest.MonkeyPatch, cards: list[Card], visible: str | None, share: bool
) -> None:
    """All free, all busy, shared on purpose, none there, all hidden by the user."""
    claim = claimed(monkeypatch, cards, visible, share=share)
    assert () == claim.left
    assert visible == os.environ.get("CUDA_VISIBLE_DEVICES")
    claim.release()
    assert visible == os.environ.get("CUDA_VISIBLE_DEVICES")
