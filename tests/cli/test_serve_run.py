"""`rollproof serve --run`: one command against fake servers, and the verdict on what it did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollproof.cli.app import run

CLIENT = """
import os, sys, httpx
from rollproof.http_clients import httpx_hooks, rollout

client = httpx.Client(base_url=os.environ["ROLLPROOF_URL"], event_hooks=httpx_hooks())

@rollout
def generate(prompt):
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 6}, "return_logprob": True}
    reply = client.post("/generate", json=body).json()
    tokens = reply["output_ids"]
    return {
        "prompt_ids": prompt,
        "response_ids": tokens[:-1] if "wrong" in sys.argv else tokens,
        "logprobs": [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]],
        "finish_reason": reply["meta_info"]["finish_reason"]["type"],
    }

for first in range(3):
    generate([first, 6, 7])
"""
CONTRACT = """
rows = "none"
resume = "client"
versions = "none"
logprobs = "temperature-scaled"
abort_surfaces = false
kv_policy = "recompute"
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a client and a contract."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.py").write_text(CLIENT, encoding="utf-8")
    (tmp_path / "contract.toml").write_text(CONTRACT, encoding="utf-8")


def served(command: str, *options: str) -> int:
    options = options or ("--contract", "contract.toml")
    return run(["serve", "--as", "sglang", *options, "--run", f"{sys.executable} {command}"])


def test_a_correct_client_passes(capfd: pytest.CaptureFixture[str]) -> None:
    """Much does not happen to three rollouts: that is no fault of theirs, and it is listed. `check`
    of the same trace counts it as unknown.
    """
    options = ("--contract", "contract.toml", "--trace", "served.arrow")
    assert 0 == served("client.py", *options)
    printed = capfd.readouterr()
    assert "everything that arose passed: " in printed.out
    assert "none of their situations occurred (" in printed.out
    assert 2 == run(["check", "served.arrow"])
    capfd.readouterr()
    assert " 0 fail, " in printed.out
    assert "requests 3" in printed.out
    assert printed.err.startswith("sglang on http://127.0.0.1:")


def test_a_faulty_client_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """With the finding and its story; the trace is kept where `--trace` says, and nowhere else."""
    assert 1 == served("client.py wrong", "--like", "rlinf", "--trace", "out/served.arrow")
    printed = capfd.readouterr().out
    assert "FAIL  stitch.tokens" in printed
    assert ">> r1 delivered: 5 tokens" in printed
    assert ["client.py", "contract.toml", "out"] == sorted(path.name for path in Path().iterdir())
    assert 1 == run(["check", "out/served.arrow"])


def test_several_servers_have_a_router(capfd: pytest.CaptureFixture[str]) -> None:
    """The command calls the router, and its trace is one."""
    options = ("--contract", "contract.toml", "--workers", "2", "--router", "slime")
    assert 0 == served("client.py", *options)
    assert "requests 3" in capfd.readouterr().out


def test_the_model_has_the_sizes_of_the_contract(capfd: pytest.CaptureFixture[str]) -> None:
    """Those of a preset, which has a dense layer."""
    show = (
        "-c \"import os, httpx; body = {'input_ids': [5], 'return_routed_experts': True,"
        " 'sampling_params': {'max_new_tokens': 1}}; reply = httpx.post(os.environ['ROLLPROOF_URL']"
        " + '/generate', json=body).json(); print('routes', len(reply['meta_info']"
        "['routed_experts']))\""
    )
    assert 2 == served(show, "--like", "areal")
    # one row of 4 layers, 2 experts each, in int32: 32 bytes, which are 44 of base64
    assert "routes 44\n" in capfd.readouterr().out


def test_a_command_that_calls_nothing_is_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    """And is told where to call."""
    assert 2 == served("-c 1")
    printed = capfd.readouterr()
    assert "No call reached the servers. The command must call http://127.0.0.1:" in printed.err
    assert "put `@rollout` of rollproof.http_clients on the" in " ".join(printed.out.split())


@pytest.mark.parametrize(
    "plan",
    [
        '[[actions]]\ndo = "abort"\nwhen = { request = "r9", tokens = 3 }',
        '[[faults]]\ndo = "reset"\npath = "/no-such-path"',
    ],
)
def test_a_plan_that_did_not_happen_is_unknown(
    plan: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it was written for was not judged."""
    Path("plan.toml").write_text(plan, encoding="utf-8")
    assert 2 == served("client.py", "--contract", "contract.toml", "--fault-plan", "plan.toml")
    assert "everything that arose passed" not in capfd.readouterr().out


def test_samples_that_nobody_reports_are_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    """Calls alone say nothing about samples."""
    client = CLIENT.replace("@rollout\n", "")
    Path("client.py").write_text(client, encoding="utf-8")
    assert 2 == served("client.py")
    assert "put `@rollout` of rollproof.http_clients" in " ".join(capfd.readouterr().out.split())


def test_a_command_that_fails_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Its own exit code, or the signal that ended it; never a pass."""
    assert 2 == served("-c 'raise SystemExit(7)'")
    assert "The command ended with exit code 7" in capfd.readouterr().err
    assert 2 == served("-c 'import os; os.kill(os.getpid(), 9)'")
    assert "The command was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--run", "no-such-program x"], "there is no program 'no-such-program'"),
        (["--run", "'"], "cannot be split into words"),
        (["--run", " "], "--run needs a command"),
        (["--run", "true", "--like", "nobody"], "No preset is named 'nobody'"),
        (["--run", "true", "--like", "trl"], "trl has no preset for engine 'sglang'"),
        (["--like", "areal", "--layers", "2"], "The contract areal is about another model"),
        (["--like", "areal", "--contract", "contract.toml"], "choose one"),
        (["--top-k", "9"], "--top-k 9 exceeds --experts 8"),
    ],
)
def test_what_cannot_be_served_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a port is taken."""
    assert 254 == run(["serve", "--as", "sglang", *options])
    assert words in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_command_too(number: signal.Signals, tmp_path: Path) -> None:
    """Neither the servers nor the command outlive it."""
    program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-m", "rollproof", "serve", "--as", "sglang", "--run"]
    process = subprocess.Popen(
        [*command, f'{sys.executable} -c "{program}"'],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text(encoding="utf-8")):
        assert process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGINT:
        # as a terminal does, to both
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert 130 == process.returncode, said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text(encoding="utf-8")), 0)
