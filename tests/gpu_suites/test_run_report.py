from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollproof.engines.engine_targets import fake_target
from rollproof.engines.gpus import Gpu, GpuFindings
from rollproof.errors import EngineStartError, UsageError
from rollproof.gpu_suites.checkpoints import fits, make_models, user_models
from rollproof.gpu_suites.gap.gap_matrix import measure_cell
from rollproof.gpu_suites.load import Load, judge_load
from rollproof.gpu_suites.report.hardware import described
from rollproof.gpu_suites.report.merging import main, merged, read_run
from rollproof.gpu_suites.report.run_report import RunReport, page_text
from tests.gpu_suites.test_gap_matrix import sampled, trainer
from tests.support.html_pages import HOSTILE, tags_of

RUNS = sorted((Path(__file__).parents[2] / "docs" / "runs").glob("*.json"))


def machine(name: str = "NVIDIA H100", index: int = 0) -> dict[str, Any]:
    return described(
        GpuFindings(
            gpus=(Gpu(index=index, name=name, memory=80 << 30),),
            source="test",
            reason=None,
            driver="580",
        )
    )


@pytest.fixture(scope="module")
def run() -> RunReport:
    """A session that judged a fake engine under load and measured one cell."""
    made = RunReport(machine())
    made.suite(
        "engine", judge_load(fake_target("sglang-0.5.17"), Load(requests=8, updates=1)), version="0"
    )
    samples = sampled(count=16)
    made.cell(measure_cell("fake", samples, trainer(samples)))
    made.note("a note <b>")
    return made


def test_a_run_as_json_and_as_a_page(run: RunReport, tmp_path: Path) -> None:
    """The file is JSON without NaN; the page shows the machine, the suite, the gap and the note,
    escaped.
    """
    written = run.write(tmp_path)
    data = json.loads(
        (tmp_path / "run.json").read_text(),
        parse_constant=lambda name: pytest.fail(f"JSON has no {name}"),
    )

    assert ["run.json", "run.html"] == [path.name for path in written]
    assert "NVIDIA H100" == data["machine"]["gpus"][0]["name"]
    assert "unknown" == data["suites"][0]["checks"]["engine.identity"]["verdict"]
    page = (tmp_path / "run.html").read_text()
    for text in (
        "NVIDIA H100 (80.0 GiB)",
        "fake-sglang-0.5.17, 8 calls at once",
        "engine.identity",
        "a note &lt;b&gt;",
        ">shifted by a layer<",
        "R3 shifted by a layer",
        "(a control with wrong routes, which must be worse)",
    ):
        assert text in page
    tags = tags_of(page)
    assert 0 == tags.scripts
    assert set(tags.addresses) <= {f"#{name}" for name in tags.ids}
    assert {"#g1", "#s1"} <= set(tags.addresses)


def test_the_page_hides_no_known_failure(run: RunReport) -> None:
    """Experiments that are known to fail or were left out are named with their reasons and counted,
    and a suite whose self-test failed is no pass; hostile texts stay texts.
    """
    data = run.to_dict()
    (suite,) = data["suites"]
    known = {
        "streams": {"failed": ["engine.answers"], "reason": HOSTILE},
        "offset": {"failed": [], "reason": "sometimes"},
    }
    blind = {
        **suite,
        "canary": False,
        "known": known,
        "left_out": {"refusals": "it ends the engine"},
    }
    page = page_text({**data, "suites": [blind], "notes": [HOSTILE]})

    assert "1 known to fail, 1 experiments left out" in page
    assert "in the experiment <code>streams</code>: engine.answers failed." in page
    assert "in the experiment <code>offset</code>: nothing failed this time. sometimes" in page
    assert "the experiment <code>refusals</code> was not run. it ends the engine" in page
    assert "<strong>FAIL</strong>" in page
    assert f'<li><a href="#s1">{suite["subject"]}</a></li>' in page, "what failed is named on top"
    assert 0 == tags_of(page).scripts and "img" not in tags_of(page).tags


def test_the_page_names_gpus_of_one_kind_once(run: RunReport) -> None:
    """With their number; and on top of a run in which nothing failed is no list."""
    data = run.to_dict()
    gpus = [*machine(index=0)["gpus"], *machine(index=1)["gpus"]]
    page = page_text({**data, "machine": {**data["machine"], "gpus": gpus}})

    assert "<p>2 x NVIDIA H100 (80.0 GiB); driver 580" in page
    assert '<li><a href="#s1">' not in page


def test_a_session_that_is_killed_leaves_what_it_found(tmp_path: Path) -> None:
    """With a folder, the report is written after each result."""
    made = RunReport(machine(), tmp_path)
    made.note("first")
    assert ["first"] == read_run(tmp_path / "run.json")["notes"]


def test_shards_are_merged_and_the_later_result_counts(run: RunReport, tmp_path: Path) -> None:
    """Runs of one kind of machine become one; GPUs add up."""
    other = {**run.to_dict(), "machine": machine(index=1), "notes": ["of the other"]}
    merged_run = merged([run.to_dict(), other])
    assert ([0, 1], 1, 1, ["a note <b>", "of the other"]) == (
        [gpu["index"] for gpu in merged_run["machine"]["gpus"]],
        len(merged_run["suites"]),
        len(merged_run["gap"]),
        merged_run["notes"],
    )
    run.write(tmp_path, "one")
    assert 0 == main(
        [str(tmp_path / "both"), str(tmp_path / "one.json"), str(tmp_path / "one.json")]
    )
    assert (tmp_path / "both.html").is_file()


def test_what_cannot_be_merged(
    run: RunReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Different machines, files that are no reports, nothing at all."""
    other = {**run.to_dict(), "machine": machine("NVIDIA L4")}
    with pytest.raises(UsageError, match="different machines"):
        merged([run.to_dict(), other])
    with pytest.raises(UsageError, match="no run to merge"):
        merged([])
    (tmp_path / "x.json").write_text("[1]")
    assert 254 == main([str(tmp_path / "out"), str(tmp_path / "x.json")])
    assert "is not a report of the GPU suites" in capsys.readouterr().err
    assert 254 == main([])


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_runs_that_are_kept_can_be_read_and_shown(path: Path) -> None:
    """The files of docs/runs are small, of this schema, and can be shown as a page."""
    data = read_run(path)
    assert path.stat().st_size < 300_000
    page = page_text(data)
    assert all(suite["subject"] in page for suite in data["suites"])


def test_the_claim_of_the_stacks_is_in_the_runs_that_are_kept() -> None:
    """Replay on beats replay off, on real GPUs, for these three, with an interval that excludes 1;
    controls are worse than no replay.
    """
    cells = [
        cell
        for path in RUNS
        for cell in read_run(path)["gap"]
        if not cell["about"] and cell["dtype"] == "bfloat16"
    ]
    assert {("vllm", "hf"), ("vllm", "megatron"), ("sglang", "megatron")} <= {
        (cell["engine"], cell["trainer"]) for cell in cells
    }
    for cell in cells:
        assert cell["n_tokens"] >= 35_000
        assert all(effect["high"] < 1 for effect in cell["effect"]["effects"])
        assert all(
            effect["low"] > 1 for row in cell["effect"]["controls"].values() for effect in row
        )
        assert cell["self_replay_max_abs"] in (
            0.0,
            None,
        )  # None: a trainer of one's own records nothing


def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    """A size that does not exist, a dense model, a folder without a checkpoint, and a model that
    does not fit.
    """
    with pytest.raises(UsageError, match="No model size is named 'huge'; choose among"):
        make_models("huge", tmp_path)
    with pytest.raises(EngineStartError, match="is not the folder of a checkpoint"):
        user_models(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(UsageError, match="has no experts"):
        user_models(tmp_path, tmp_path / "out")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 3000)
    assert fits(tmp_path, 4500) is None
    assert "does not fit" in str(fits(tmp_path, 4499))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("VLLM_USE_V1", "1", "1"),
        ("VLLM_HOST", "http://me:pw@proxy:80/x", "http://(hidden)@proxy:80/x"),
        (
            "SGLANG_URL",
            "http://a/?x=1&access_token=abc&y=2",
            "http://a/?x=1&access_token=(hidden)&y=2",
        ),
        ("NCCL_OPTIONS", "a=1,password=b,c=2", "a=1,password=(hidden),c=2"),
        ("VLLM_SOURCE", "hf_abcdefghijklmnopqrst", "(hidden)"),
        ("CUDA_CACHE_PATH", "/home/me", "(a path)"),
        ("TORCH_COMPILE_PASSES", "2", "2"),
        *(
            (f"VLLM_{name}", "x", None)
            for name in ("DB_PASS", "API_KEY", "TOKEN", "PASSWD", "AUTH")
        ),
    ],
)
def test_a_report_holds_no_credentials(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, shown: str | None
) -> None:
    """Neither variables that are credentials by their names, nor those within values; what is no
    credential is there.
    """
    monkeypatch.setenv(name, value)

    assert shown == machine()["environment"].get(name)
