"""A model or trainer of the user's own that names nothing is told before anything is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import rollproof.gpu_suites.conftest  # noqa: F401 - numpy cannot be loaded anew in each inner session
from tests.support.fake_nvml import Card, fake_nvml

DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "hidden_size": 8,
}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "--rollproof-model=nowhere",
            "nowhere is not a folder: name the one that holds the checkpoint's config.json.",
        ),
        ("--rollproof-model=empty", "empty"),
        ("--rollproof-model=dense", "dense has no experts: there is no routing to replay."),
        ("--rollproof-trainer=nobody_at:home", "nobody_at"),
        ("--rollproof-trainer=json:nothing", "json has no 'nothing'."),
        ("--rollproof-trainer=json:decoder", "not a factory"),
        (
            "--rollproof-trainer=megatron-tp3",
            "'megatron-tp3' is neither module:factory nor one of: hf, fsdp2-2,",
        ),
        ("--rollproof-gpu-report=dense/config.json", "Cannot write into"),
    ],
)
def test_it_is_told_at_once(
    option: str, words: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As misuse, in one line, with nothing run."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(Card()))
    pytester.makepyfile("def test_one():\n    raise AssertionError('was run')\n")
    for name in ("empty", "dense"):
        Path(pytester.path, name).mkdir()
    Path(pytester.path, "dense", "config.json").write_text(json.dumps(DENSE))

    output = pytester.runpytest_inprocess("-p", "rollproof.gpu_suites.conftest", option)

    assert pytest.ExitCode.USAGE_ERROR == output.ret
    assert words in str(output.stderr)
    assert "was run" not in str(output.stdout)
