"""Dumps of training frameworks are read as their writers wrote them: tokens, masks and both sides'
logprobs at their places; nothing that a file names is run.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.records import Rollout, Version
from rollproof.errors import GapError
from rollproof.gap.dumps import Dump, read_dump
from rollproof.gap.scored_rollouts import Scored, join_scores
from tests.gap.training_batch import Cursed, write_batch
from tests.support.command_line import output_of


def read(path: Path) -> Dump:
    dump = read_dump(path)
    assert dump is not None
    return dump


def line(**changes: Any) -> str:
    """A line of NeMo-RL: two tokens of prompt, three of response, one of padding."""
    columns = {
        "content": ["text"],
        "input_lengths": [5],
        "token_ids": [[11, 12, 21, 22, 23, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 1, 0]],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, -0.3, 0.0]],
        "prev_logprobs": [[-9.0, -9.0, -0.11, -0.22, -0.33, 0.0]],
        "idx": 0,
    }
    return json.dumps(columns | changes) + "\n"


def nemo_rl(folder: Path, *lines: str, step: int = 1) -> Path:
    path = folder / f"train_data_step{step}.jsonl"
    path.write_text("".join(lines))
    return path


def test_padding_and_prompt_of_nemo_rl_are_left_out(tmp_path: Path) -> None:
    """The response begins at the first token that the loss counts, and ends at input_lengths."""
    (sample,) = read(nemo_rl(tmp_path, line())).samples
    assert ((11, 12), (21, 22, 23)) == (sample.rollout.prompt_ids, sample.rollout.response_ids)
    assert sample.rollout.logprobs is not None
    assert [-0.1, -0.2, -0.3] == sample.rollout.logprobs.tolist()
    assert sample.trainer_logprobs is not None
    assert [-0.11, -0.22, -0.33] == sample.trainer_logprobs.tolist()


def test_a_sample_that_nemo_rl_masks_out_counts_nowhere(tmp_path: Path) -> None:
    """sample_loss_mask 0: none of its tokens is compared."""
    dump = read(nemo_rl(tmp_path, line(), line(idx=1, sample_loss_mask=[0.0])))
    pairs = join_scores(dump.rollouts, dump.trainer_logprobs)
    assert (3, ["step1/0"]) == (pairs.n_tokens, list(pairs.sequences))


def test_steps_of_a_folder_are_in_order(tmp_path: Path) -> None:
    """Step 10 follows step 9; names say which step a sample is of."""
    for step in (10, 9):
        nemo_rl(tmp_path, line(), step=step)
    names = [sample.rollout.request_id for sample in read(tmp_path).samples]
    assert ["step9/0", "step10/0"] == names


def test_logprobs_that_nemo_rl_did_not_compute_are_no_side(tmp_path: Path) -> None:
    """Zeros of a forward that was skipped would be a gap of their own."""
    dump = read(nemo_rl(tmp_path, line(prev_logprobs=[[0.0] * 6])))
    assert "force_on_policy_ratio" in dump.lacking
    assert dump.trainer_logprobs == {}


def test_nan_is_a_number(tmp_path: Path) -> None:
    """Python's json writes NaN, and such a token is what a user looks for."""
    path = nemo_rl(tmp_path, line(prev_logprobs=[[0.0, 0.0, float("nan"), -0.2, -0.3, 0.0]]))
    dump = read(path)
    assert np.isnan(dump.trainer_logprobs["step1/0"][0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input_lengths": [9]}, "line 1: input_lengths is 9, and token_ids has 6"),
        ({"token_ids": [[1], [2]]}, "line 1: token_ids holds 2 samples"),
        ({"generation_logprobs": [["x"]]}, r"line 1: Expected `float`, got `str`"),
        ({"prev_logprobs": [[-0.1]]}, "Sample step1/0 of the dump has 5 tokens"),
    ],
)
def test_a_line_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """File and line, and what is wrong there."""
    with pytest.raises(GapError, match=said):
        read(nemo_rl(tmp_path, line(**changes)))


def test_a_line_that_was_cut_is_named(tmp_path: Path) -> None:
    """A run that is stopped leaves half a line; nothing is judged without it in silence."""
    with pytest.raises(GapError, match="line 2 is not JSON, and the file ends within it"):
        read(nemo_rl(tmp_path, line(), line()[:100]))


def episode(*traces: dict[str, Any], start: int = 4, end: int = 4) -> str:
    work = {"type": "train", "step": 5, "policy": {"start": start, "end": end}}
    record = {"id": "e", "run": {"type": "train", "id": "r", "work": work}, "traces": traces}
    return json.dumps(record) + "\n"


def message(ids: Sequence[int], parent: int | None, logprobs: Sequence[float] = ()) -> Any:
    """A message whose last tokens were sampled, as many as it has logprobs."""
    sampled = [False] * (len(ids) - len(logprobs)) + [True] * len(logprobs)
    return {"parent": parent, "token_ids": ids, "mask": sampled, "logprobs": logprobs}


TREE = {
    "id": "t",
    "nodes": [
        message([1, 2], None),
        message([3, 10, 11], 0, [-0.1, -0.2]),
        message([4], 1),
        message([5, 12], 2, [-0.3]),
        message([6], 1),
        message([7, 13], 4, [-0.4]),
    ],
}


def test_each_path_of_a_conversation_is_a_sample(tmp_path: Path) -> None:
    """Two branches share the first turn: its tokens are context in both, and counted in one."""
    (tmp_path / "traces.jsonl").write_text(episode(TREE))
    dump = read(tmp_path)
    first, second = dump.rollouts
    assert ((1, 2, 3), (10, 11, 4, 5, 12)) == (first.prompt_ids, first.response_ids)
    assert ((1, 2, 3), (10, 11, 6, 7, 13)) == (second.prompt_ids, second.response_ids)
    assert first.loss_mask is not None
    assert second.loss_mask is not None
    assert [1, 1, 0, 0, 1] == first.loss_mask.tolist()
    assert [0, 0, 0, 0, 1] == second.loss_mask.tolist()
    assert first.logprobs is not None
    assert [-0.1, -0.2, 0, 0, -0.3] == first.logprobs.tolist()


@pytest.mark.parametrize(("end", "version"), [(4, 4), (5, None)])
def test_versions_of_an_episode_are_known_if_there_was_one(
    tmp_path: Path, end: int, version: Version
) -> None:
    """A policy that changed within an episode is that of no token in particular."""
    path = tmp_path / "traces.jsonl"
    path.write_text(episode(TREE, end=end))
    assert {version} == {rollout.version for rollout in read(path).rollouts}


def test_agents_that_are_not_trained_are_no_samples(tmp_path: Path) -> None:
    """A judge's trace is in the file too."""
    judge = TREE | {"id": "judge", "agent": {"config": {}, "trainable": False}}
    (tmp_path / "traces.jsonl").write_text(episode(TREE, judge))
    assert ["t/0", "t/1"] == [rollout.request_id for rollout in read(tmp_path).rollouts]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([message([1], 0)], "message 0 follows message 0, which is not there"),
        ([message([1], 5)], "message 0 follows message 5"),
        ([message([1], None) | {"logprobs": [-1.0]}], "1 tokens, 1 places in its mask, 0 of them"),
        ([], "without a sampled token"),
    ],
)
def test_a_trace_that_does_not_fit_is_named(tmp_path: Path, nodes: Any, said: str) -> None:
    """Also where following its messages would never end."""
    (tmp_path / "traces.jsonl").write_text(episode(TREE | {"nodes": nodes}))
    with pytest.raises(GapError, match=said):
        read(tmp_path)


def test_a_trace_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    """Its tokens would be counted twice."""
    (tmp_path / "traces.jsonl").write_text(episode(TREE) * 2)
    with pytest.raises(GapError, match="Trace t is in the file twice"):
        read(tmp_path)


def skyrl(**changes: Any) -> dict[str, Any]:
    """Two rows, the second with a short response: its prompt reaches into the response's places."""
    return {
        "sequences": np.array([[1, 2, 11, 12, 13], [0, 3, 4, 5, 14]]),
        "attention_mask": np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
        "response_mask": np.array([[1, 1, 1], [0, 0, 1]]),
        "loss_mask": np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], np.float32),
        "rollout_logprobs": np.array([[-0.5, -1.0, -1.5], [0.0, 0.0, -2.0]], np.float32),
        "action_log_probs": np.array([[-0.25, -1.0, -1.5], [-7.0, -7.0, -2.5]], np.float32),
        "values": None,
    } | changes


def test_rows_of_skyrl_end_where_their_sequence_ends(tmp_path: Path) -> None:
    """Padded on the left: the prompt of a short response lies in the response's columns."""
    path = tmp_path / "global_step_3_training_input.pkl"
    write_batch(path, skyrl(), metadata={"pad_size": 0, "uids": np.array(["a"])})
    dump = read(path)
    first, second = dump.rollouts
    assert ((1, 2), (11, 12, 13)) == (first.prompt_ids, first.response_ids)
    assert ((3, 4, 5), (14,)) == (second.prompt_ids, second.response_ids)
    assert first.loss_mask is not None
    assert [1, 0, 1] == first.loss_mask.tolist()
    name = "global_step_3_training_input"
    assert [-2.5] == dump.trainer_logprobs[f"{name}/1"].tolist()


def test_rows_that_skyrl_adds_to_fill_a_batch_are_no_samples(tmp_path: Path) -> None:
    """They are copies of the first row."""
    write_batch(tmp_path / "b.pkl", skyrl(), metadata={"pad_size": 1})
    assert ["b/0"] == [rollout.request_id for rollout in read(tmp_path / "b.pkl").rollouts]


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    """Neither in the metadata of a batch, nor as the whole of a file."""
    made = tmp_path / "made"
    write_batch(tmp_path / "b.pkl", skyrl(), metadata={"x": Cursed(made)})
    assert 2 == len(read(tmp_path / "b.pkl").samples)
    (tmp_path / "whole.pkl").write_bytes(pickle.dumps(Cursed(made)))
    with pytest.raises(GapError, match="is a pickle, and not of SkyRL's TrainingInputBatch"):
        read(tmp_path / "whole.pkl")
    assert not made.exists()


def test_half_precision_of_skyrl_is_read(tmp_path: Path) -> None:
    """It is pickled as the bytes of torch.save, which make the whole end like a torch file."""
    torch = pytest.importorskip("torch")
    stored = io.BytesIO()
    torch.save(torch.from_numpy(skyrl()["action_log_probs"]).bfloat16(), stored)
    column = {"format": "torch", "data": stored.getvalue()}
    write_batch(tmp_path / "b.pkl", skyrl(action_log_probs=column))
    assert [-0.25, -1.0, -1.5] == read(tmp_path / "b.pkl").trainer_logprobs["b/0"].tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_logprobs": None}, "has no rollout_logprobs"),
        ({"loss_mask": np.ones((2, 9))}, "loss_mask has shape"),
        ({"sequences": np.ones((2, 2))}, "sequences has|attention_mask has shape"),
        (
            {"loss_mask": {"format": "numpy", "data": b"123", "shape": (9,), "dtype": "O"}},
            "no tensor",
        ),
        ({"loss_mask": {"format": "numpy"}}, "loss_mask is no tensor"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """Column and shapes."""
    write_batch(tmp_path / "b.pkl", skyrl(**changes))
    with pytest.raises(GapError, match=said):
        read(tmp_path / "b.pkl")


def test_a_pickle_that_numbers_more_objects_than_it_has_is_refused(tmp_path: Path) -> None:
    """Python would make a table of that size: nine bytes took 2 GB."""
    path = tmp_path / "b.pkl"
    path.write_bytes(b"\x80\x04]r\xff\xff\xff\x07.")
    with pytest.raises(GapError, match="numbers an object 134,217,727 and has 9 bytes"):
        read(path)


def test_a_pickle_that_was_cut_is_said_to_be(tmp_path: Path) -> None:
    """At any byte."""
    write_batch(tmp_path / "whole.pkl", skyrl())
    whole = (tmp_path / "whole.pkl").read_bytes()
    cut = tmp_path / "cut.pkl"
    for end in range(2, len(whole) - 1, 7):
        cut.write_bytes(whole[:end])
        with pytest.raises(GapError, match="was cut short"):
            read(cut)


def slime_sample(**changes: Any) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {
        "tokens": torch.tensor([1, 2, 11, 12]),
        "response_lengths": 2,
        "loss_masks": torch.tensor([1, 0], dtype=torch.int),
        "rollout_log_probs": torch.tensor([-0.5, -1.0]),
        "log_probs": torch.tensor([-0.25, -1.0], dtype=torch.bfloat16),
        "rollout_position": 0,
        "reward": np.float64(1.5),
    } | changes


def dump_details(
    folder: Path, *, trained: Any = None, sampled: Any = None, number: int = 0
) -> Path:
    torch = pytest.importorskip("torch")
    for name, samples in (("train_data", trained), ("rollout_data", sampled)):
        if samples is not None:
            (folder / name).mkdir(parents=True, exist_ok=True)
            payload = {"rollout_id": number, "samples": samples}
            torch.save(payload, folder / name / f"{number}.pt")
    return folder


def test_both_halves_of_slimes_details_are_joined(tmp_path: Path) -> None:
    """Logprobs are those of the training, versions those of the rollout, by the sample's place."""
    sampled = [
        {"tokens": [9], "weight_versions": ["7", "8"]},
        {"tokens": [9], "weight_versions": ["7", "7"]},
    ]
    trained = [slime_sample(rollout_position=1), slime_sample(rollout_position=0)]
    dump = read(dump_details(tmp_path, trained=trained, sampled=sampled, number=3))
    first, second = dump.rollouts
    assert ((1, 2), (11, 12)) == (first.prompt_ids, first.response_ids)
    assert ("7", None) == (first.version, second.version)
    assert [-0.25, -1.0] == dump.trainer_logprobs["3/0"].tolist()
    assert first.loss_mask is not None
    assert [1, 0] == first.loss_mask.tolist()


def test_a_rollout_of_slime_alone_lacks_the_trainer(tmp_path: Path) -> None:
    """What --save-debug-rollout-data writes is scored by --trainer; evaluations are left out."""
    torch = pytest.importorskip("torch")
    sample = {
        "tokens": [1, 2, 11],
        "response_length": 1,
        "rollout_log_probs": [-0.5],
        "loss_mask": None,
        "weight_versions": ["default"],
        "remove_sample": False,
    }
    folder = dump_details(tmp_path, sampled=[sample])
    torch.save({"samples": [sample]}, folder / "rollout_data" / "eval_0.pt")
    dump = read(folder)
    assert "1 of 1 samples have no log_probs" in dump.lacking
    assert ["default"] == [rollout.version for rollout in dump.rollouts]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"response_lengths": 9}, "its response length is 9, of 4 tokens"),
        ({"rollout_log_probs": None}, "has no rollout_log_probs"),
        ({"log_probs": [-0.1]}, "log_probs has 1 values for 2 response tokens"),
        ({"loss_masks": ["a", "b"]}, "loss_masks holds no numbers"),
    ],
)
def test_a_sample_of_slime_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """File, sample and column."""
    with pytest.raises(GapError, match=said):
        read(dump_details(tmp_path, trained=[slime_sample(**changes)]))


def test_a_torch_file_with_other_objects_is_refused(tmp_path: Path) -> None:
    """weights_only: a class of somebody's is not looked up, let alone run."""
    made = tmp_path / "made"
    with pytest.raises(GapError, match=r"holds an object of posix\.mkdir"):
        read(dump_details(tmp_path, trained=[slime_sample(metadata=Cursed(made))]))
    assert not made.exists()


class ScorerOfDumps:
    """Scores every token as the engine did, but 0.01 less."""

    def score(
        self, rollouts: Sequence[Rollout], *, version: Version, replay: bool
    ) -> Sequence[Scored]:
        """Return scores of whatever it is given."""
        del version, replay
        return [Scored(logprobs=np.asarray(rollout.logprobs) - 0.01) for rollout in rollouts]


def test_gap_reads_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures both sides of a dump, without any option."""
    printed = output_of(capsys, "gap", str(nemo_rl(tmp_path, line())), code=2)
    assert "3 tokens in 1 sequence" in printed


def test_gap_scores_what_lacks_a_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--trainer scores the samples of a dump; without it the command says why and what to do."""
    path = tmp_path / "traces.jsonl"
    path.write_text(episode(TREE))
    refused = output_of(capsys, "gap", str(path), code=254)
    assert "verifiers writes none. --trainer hf:PATH or module:factory scores" in refused
    trainer = ("--trainer", "tests.gap.test_dumps:ScorerOfDumps")
    scored = output_of(capsys, "gap", str(path), *trainer, code=1)
    assert "4 tokens in 2 sequences" in scored


def test_options_of_tables_do_not_go_with_a_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dump's columns are known."""
    path = str(nemo_rl(tmp_path, line()))
    printed = output_of(capsys, "gap", path, "--column", "mask=token_loss_mask", code=254)
    assert "leave --column and --group out" in printed


def test_other_files_are_no_dumps(tmp_path: Path) -> None:
    """A table of JSON lines, an empty file, a folder of something else."""
    table = tmp_path / "t.jsonl"
    table.write_text('{"sequence_id": 0, "rollout_logprob": -1.0}\n')
    (tmp_path / "empty").touch()
    for path in (table, tmp_path / "empty", tmp_path, tmp_path / "missing"):
        assert read_dump(path) is None
