from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = """
import sys

HEAVY = ("numpy", "pyarrow", "torch", "hypothesis", "typer", "rich")

def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        mine = sorted(name for name in sys.modules if name.split(".")[0] == "rollproof")
        heavy = [name for name in HEAVY if name in sys.modules]
        print(f"\\nMODULES {mine} HEAVY {heavy}", file=sys.stderr)
    else:
        mine = [name for name in sys.modules if name.startswith("rollproof.")]
        heavy = [name for name in HEAVY if name in sys.modules]
        assert len(mine) <= 5 and not heavy, (mine, heavy)
"""


@pytest.mark.parametrize(
    "arguments",
    [[], ["--collect-only"], ["-q", "-rA"], ["-n2"]],
    ids=["run", "collect", "summary", "xdist"],
)
def test_a_session_that_does_not_use_rollproof_hardly_loads_it(
    pytester: pytest.Pytester, arguments: list[str]
) -> None:
    """A whole session, its closing summary included, loads two modules of ours and none of our
    dependencies.
    """
    pytester.makeconftest(REPORT)
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_subprocess(*arguments)

    assert pytest.ExitCode.OK == result.ret
    assert "MODULES ['rollproof', 'rollproof.plugin'] HEAVY []" in str(result.stderr)


def test_the_plugin_costs_at_most_ten_milliseconds(tmp_path: Path) -> None:
    """Importing the plugin, compiled and with pytest already there, takes at most 10 ms of
    processor time (best of five).
    """
    program = (
        "import time, json, pytest; start = time.process_time(); import rollproof.plugin;"
        " print(time.process_time() - start)"
    )
    compiled = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    } | {"PYTHONPYCACHEPREFIX": str(tmp_path)}

    def cost() -> float:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=compiled,
            capture_output=True,
            check=True,
            text=True,
        )
        return float(done.stdout)

    assert min(cost() for _ in range(5)) <= 0.010


def test_naming_one_thing_does_not_load_the_others() -> None:
    """The contract, which a user's stack imports to declare itself, brings neither numpy nor
    pytest.
    """
    program = (
        "import sys, rollproof; rollproof.Contract; print([name for name in ('numpy', 'pytest',"
        " 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )

    assert "[]\n" == done.stdout
