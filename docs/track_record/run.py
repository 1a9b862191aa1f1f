"""Runs every script of this folder against the framework that is installed, and prints what each of them prints.

``python docs/track_record/run.py [NAME ...]``: all, or those whose names start so. In one process, because importing a
framework takes longer than anything that the scripts do.
"""

import contextlib
import importlib.util
import io
import runpy
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
FRAMEWORKS = (
    "areal", "areno", "megatron", "miles", "nemo_automodel", "nemo_rl", "openrlhf", "prime_rl", "rlinf", "roll", "sglang", "skyrl", "slime",
    "trl", "verifiers", "verl",
)  # fmt: skip
"""Packages whose name begins that of their scripts."""


def scripts(prefixes):
    """Scripts by name; stand-ins are not scripts. Those of Megatron are left out where it is not installed."""
    kinds = [kind for kind in FRAMEWORKS if importlib.util.find_spec(kind)]
    names = sorted(
        path.stem
        for kind in kinds
        for path in HERE.glob(f"{kind}_*.py")
        if not path.stem.endswith("stub")
    )
    names = [name for name in names if "_skyrl" not in name or importlib.util.find_spec("skyrl")]
    return [name for name in names if not prefixes or name.startswith(tuple(prefixes))]


def output_of(name):
    """What the script prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    return said.getvalue()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HERE))
    for name in scripts(sys.argv[1:]):
        print(f"# {name}.py")
        print(output_of(name))
