"""A session takes the cards that are free, whatever their numbers, which no other then takes, and
leaves the environment as it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollproof.engines.gpus import find_gpus
from rollproof.gpu_suites.gpu_lock import Claim
from tests.support.fake_nvml import Card, fake_nvml

STRANGER = 1
BUSY = Card(pids=[STRANGER])
NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def claimed(
    monkeypatch: pytest.MonkeyPatch,
    cards: Sequence[Card],
    visible: str | None,
    *,
    share: bool = False,
) -> Claim:
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
        (
            [BUSY, Card(), Card(mig=1), Card()],
            None,
            ["GPU 0 is busy", "GPU 2 is divided by MIG"],
            "1,3",
        ),
        ([Card(), BUSY, Card()], "2,1,0", ["GPU 1 is busy"], "2,0"),
        ([Card(), BUSY, Card()], "GPU-2abc,GPU-1abc", ["GPU 1 is busy"], "2"),
    ],
)
def test_cards_that_are_taken_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
    cards: list[Card],
    visible: str | None,
    left: list[str],
    shown: str,
) -> None:
    """The first card that CUDA then shows is a free one, in the order that the user gave;
    afterwards all is as before.
    """
    before = {name: os.environ.get(name) for name in NAMES} | (
        {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    )
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
    [
        ([Card(), Card()], None, False),
        ([BUSY, BUSY], "1,0", False),
        ([BUSY, Card()], None, True),
        ([], None, False),
        ([Card()], "", False),
    ],
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


TWO = [Card(), Card()]


def test_what_one_session_claimed_another_leaves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the first is on a card; once it has ended, or died, the cards are free
    again.
    """
    first = claimed(monkeypatch, TWO, "0")
    second = claimed(monkeypatch, TWO, None)
    assert (
        f"GPU 0 is claimed by another session of these suites (process {os.getpid()})",
    ) == second.left
    assert ("1", 1, None) == (os.environ["CUDA_VISIBLE_DEVICES"], second.hidden, second.refused)
    third = claimed(monkeypatch, TWO, None)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert third.refused is not None
    assert 2 == third.refused.count("is claimed by another session")
    assert () == claimed(monkeypatch, TWO, None, share=True).left
    for claim in (third, second, first):
        claim.release()
    again = claimed(monkeypatch, TWO, None)
    assert ((), 0) == (again.left, again.hidden)
    again.release()


def test_a_session_that_died_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lets go of what it held; the file that it leaves is no claim."""
    claimed(monkeypatch, [Card()], None).release()
    (path,) = Path(tempfile.gettempdir()).glob("rollproof-GPU-0abc.lock")
    lock_program = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX);"
        " print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", lock_program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert b"held\n" == other.stdout.readline()
        assert claimed(monkeypatch, [Card()], None).refused is not None
        other.kill()
    assert claimed(monkeypatch, [Card()], None).refused is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_another_users_claim_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file cannot be written, and is locked all the same."""
    first = claimed(monkeypatch, [Card()], None)
    (path,) = Path(tempfile.gettempdir()).glob("rollproof-*.lock")
    path.chmod(0o444)
    assert claimed(monkeypatch, [Card()], None).refused is not None
    first.release()
    assert claimed(monkeypatch, [Card()], None).refused is None


def test_where_no_file_can_be_made_cards_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A claim is a courtesy: a host without a folder for it can still be used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    for _ in range(2):
        claim = claimed(monkeypatch, [Card()], None)
        assert ((), ()) == (claim.left, claim.locks)


@pytest.mark.parametrize("hard", [False, True], ids=["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hard: bool
) -> None:
    """The name of a lock is known, and its folder is everybody's: a file of ours that a link of
    that name leads to stays as it is, and the card is left with the reason.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / "mine"
    mine.write_text("kept")
    claimed(monkeypatch, [Card()], None).release()
    (lock,) = tmp_path.glob("rollproof-*.lock")
    lock.unlink()
    if hard:
        lock.hardlink_to(mine)
    else:
        lock.symlink_to(mine)
    claim = claimed(monkeypatch, [Card()], None)
    claim.release()

    assert "kept" == mine.read_text()
    assert (f"the lock of GPU 0 is a link, not a file of these suites: remove {lock}",) == tuple(
        claim.left
    )
