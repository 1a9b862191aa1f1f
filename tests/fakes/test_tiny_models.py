"""Next tokens, routing and repeatability of tiny models are those of a useful test model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tiny models are made with torch")
transformers = pytest.importorskip("transformers", reason="tiny models are models of transformers")

from rollproof.core.case import Model  # noqa: E402 - after the skip
from rollproof.core.contract import KvPolicy  # noqa: E402
from rollproof.core.model_config import model_of  # noqa: E402
from rollproof.engines.reference_model import ReferenceModel  # noqa: E402
from rollproof.errors import EngineStartError, UsageError  # noqa: E402
from rollproof.fakes.engine.flavours import FLAVOURS, engine_contract  # noqa: E402
from rollproof.fakes.tiny_models import FAMILIES, make_checkpoint, make_pair  # noqa: E402

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # transformers and torch warn about changes in their next releases
MOE = [name for name, family in FAMILIES.items() if family.moe_layers]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return a pair of every family, made once."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_pair(folder / name, name) for name in FAMILIES}


def _reference(pair: tuple[Path, Path]) -> ReferenceModel:
    model = model_of(pair[0]) or Model()
    return ReferenceModel(
        dict(zip("AB", pair, strict=True)),
        engine_contract(FLAVOURS["vllm"], model, KvPolicy.RECOMPUTE),
    )


def _sampled(path: Path, count: int = 6, length: int = 40) -> list[list[int]]:
    """Return sequences that the model samples itself, after eight random tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(5)
    ids = torch.randint(3, 512, (count, 8))
    with torch.no_grad():
        while ids.shape[1] < length:
            ids = torch.cat(
                [
                    ids,
                    torch.multinomial(
                        torch.softmax(model(ids, use_cache=False).logits[:, -1], -1), 1
                    ),
                ],
                1,
            )
    return [row.tolist() for row in ids]


@pytest.mark.parametrize("family", MOE)
def test_the_next_token_is_as_uncertain_as_that_of_a_real_policy(
    family: str, pairs: dict[str, tuple[Path, Path]]
) -> None:
    """The mean negative log-likelihood of sampled tokens lies between 0.3 and 2 nats, for both
    versions.
    """
    reference = _reference(pairs[family])
    for version, path in zip("AB", pairs[family], strict=True):
        losses = [-reference.forward(version, ids, 1.0)[0][8:] for ids in _sampled(path)]
        assert 0.3 < float(np.concatenate(losses).mean()) < 2.0


@pytest.mark.parametrize("family", MOE)
def test_routing_is_spread_and_depends_on_what_came_before(
    family: str, pairs: dict[str, tuple[Path, Path]]
) -> None:
    """Every expert of every MoE layer is used, none by nearly every token, and a token has other
    routes in other places.
    """
    reference = _reference(pairs[family])
    routes = np.concatenate(
        [reference.forward("A", ids, 1.0)[2] for ids in _sampled(pairs[family][0])]
    )
    for layer in FAMILIES[family].moe_layers:
        share = np.bincount(routes[:, layer].ravel(), minlength=8) / len(routes)
        assert share.min() > 0.01, (layer, share)
        assert share.max() < 0.8, (layer, share)
    first, second = (
        reference.forward("A", [*beginning, 9, 9, 9], 1.0)[2][-1]
        for beginning in ([5, 6, 7, 8], [100, 200, 300, 400])
    )
    assert (first != second).any()


@pytest.mark.parametrize("family", MOE)
def test_the_two_versions_differ_at_nearly_every_token(
    family: str, pairs: dict[str, tuple[Path, Path]]
) -> None:
    """Logprobs of A and B differ by more than a forward's noise at nearly every token, and rows at
    most of them.
    """
    reference = _reference(pairs[family])
    a, b = [], []
    for ids in _sampled(pairs[family][0]):
        a.append(reference.forward("A", ids, 1.0))
        b.append(reference.forward("B", ids, 1.0))
    gaps = np.concatenate([np.abs(x[0][1:] - y[0][1:]) for x, y in zip(a, b, strict=True)])
    rows = np.concatenate(
        [(np.sort(x[2]) != np.sort(y[2])).any(axis=(1, 2)) for x, y in zip(a, b, strict=True)]
    )
    assert (gaps > 1e-3).mean() > 0.97
    assert rows.mean() > 0.7


def test_one_seed_gives_one_checkpoint(tmp_path: Path) -> None:
    """The same seed writes the same bytes, another seed others, and the caller's random numbers are
    left alone.
    """
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    files = [
        make_checkpoint(tmp_path / name, "mixtral", seed=seed) / "model.safetensors"
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    first, second, other = (file.read_bytes() for file in files)
    assert torch.equal(expected, torch.rand(3))
    assert first == second
    assert first != other


def test_near_ties_are_there_where_they_are_planted(tmp_path: Path) -> None:
    """With near-ties many more choices depend on less than half a percent of a score than
    without.
    """
    close = []
    for ties in (0.0, 2e-3):
        path = make_checkpoint(tmp_path / str(ties), "qwen3_moe", near_ties=ties)
        margins = [
            _reference((path, path)).forward("A", ids, 1.0)[3] for ids in _sampled(path, count=3)
        ]
        close.append(float((np.concatenate(margins) < 5e-3).mean()))
    assert close[0] < 0.05 < 0.1 < close[1]


def test_dense_layers_and_models_are_told_from_the_config(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """The declared model of a checkpoint is that of its config: layers, experts, which layers are
    MoE; a dense one has none.
    """
    for name, family in FAMILIES.items():
        model = model_of(pairs[name][0])
        assert family.moe_layers == (model.moe_layers if model else ())
    with pytest.raises(EngineStartError, match="is not the folder of a checkpoint"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    with pytest.raises(EngineStartError, match="lacks the number of layers"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_text('{"num_experts": 8, "num_hidden_layers": 2}')
    with pytest.raises(EngineStartError, match="lacks their number per token"):
        model_of(tmp_path)


def test_misuse_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """An unknown family raises, and a folder with other files is left alone."""
    with pytest.raises(UsageError, match="choose among"):
        make_checkpoint(tmp_path / "x", "gpt5")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        make_checkpoint(tmp_path, "mixtral")
    assert "mine" == (tmp_path / "notes.txt").read_text()
