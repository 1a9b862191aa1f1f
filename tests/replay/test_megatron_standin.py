from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import pytest

from rollproof.errors import StackError
from rollproof.replay.megatron.cuda_stand_in import (
    RELEASES,
    STAND_INS,
    MegatronVersionError,
    StandIn,
    cpu_megatron,
    megatron_version,
)


def _installed(monkeypatch: pytest.MonkeyPatch, release: str | None) -> None:
    """Let ``release`` be the installed one of megatron-core."""

    def version(name: str) -> str:
        assert name == "megatron-core"
        if release is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_absence_is_reported_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without megatron-core the error names a release that installs on this Python, and is what a
    missing framework always is.
    """
    _installed(monkeypatch, None)
    advised = [release for release, oldest in RELEASES.items() if sys.version_info >= oldest][-1]
    with pytest.raises(
        MegatronVersionError, match=rf"is not installed.*--no-deps megatron-core=={advised}`"
    ):
        megatron_version()
    assert issubclass(MegatronVersionError, StackError)


def test_other_releases_are_refused_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release that is not in the table is reported, with those that are, and no module of
    megatron-core is imported for it.
    """
    _installed(monkeypatch, "0.17.0")
    before = set(sys.modules)
    with (
        pytest.raises(
            MegatronVersionError,
            match=r"megatron-core 0\.17\.0 is installed; .* tested with 0\.16\.1 \(Python 3\.11",
        ),
        cpu_megatron(),
    ):
        pass
    assert not {name for name in set(sys.modules) - before if name.startswith("megatron")}


def test_every_item_says_why() -> None:
    """The table holds each target once, with a reason."""
    assert len(STAND_INS) == len({item.target for item in STAND_INS})
    assert [] == [item.target for item in STAND_INS if len(item.reason) < 20]
    assert [] == [
        release for item in STAND_INS for release in item.releases if release not in RELEASES
    ]


def _module(monkeypatch: pytest.MonkeyPatch, **names: Any) -> ModuleType:
    module = ModuleType("a_module_of_megatron")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def _item(**fields: Any) -> StandIn:
    return StandIn(
        **{
            "owner": "a_module_of_megatron",
            "name": "name",
            "reason": "because",
            "make": lambda original: [original],
            **fields,
        }
    )


def test_a_name_is_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the block the replacement stands, made of the original; behind it, also after an
    error, the original.
    """
    module = _module(monkeypatch, name=1)
    with pytest.raises(ZeroDivisionError), _item().applied("0.16.1"):
        assert [1] == module.name
        raise ZeroDivisionError
    assert 1 == module.name


def test_a_name_that_is_absent_is_put_there_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a release forgot to bind is bound inside the block only."""
    module = _module(monkeypatch)
    with _item(missing=True).applied("0.16.1"):
        assert [None] == module.name
    assert not hasattr(module, "name")


def test_inherited_and_static_methods_come_back_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A class keeps no copy of what it inherits, and a static method stays one."""

    class Base:
        def inherited(self) -> int:
            return 1

    class Owner(Base):
        @staticmethod
        def name() -> int:
            return 2

    _module(monkeypatch, Owner=Owner)
    before = dict(vars(Owner))
    with (
        _item(owner="a_module_of_megatron:Owner").applied("0.16.1"),
        _item(owner="a_module_of_megatron:Owner", name="inherited").applied("0.16.1"),
    ):
        assert {"name", "inherited"} <= set(vars(Owner))
    assert before == dict(vars(Owner))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "other"},
            r"a_module_of_megatron\.other is missing, unlike in the release that was",
        ),
        (
            {"missing": True},
            r"a_module_of_megatron\.name exists, unlike in the release that was",
        ),
        (
            {"owner": "a_module_of_megatron:Missing"},
            r"a_module_of_megatron\.Missing cannot be imported",
        ),
        (
            {"owner": "no_such_module_of_megatron"},
            r"no_such_module_of_megatron cannot be imported \(No module named",
        ),
    ],
)
def test_a_release_that_differs_from_the_table_is_reported(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    """A patched or half-installed megatron-core is not run under other names than the ones that
    were tried.
    """
    _module(monkeypatch, name=1)
    with pytest.raises(MegatronVersionError, match=message), _item(**fields).applied("0.16.1"):
        pass


def test_everything_is_put_back_in_the_real_packages() -> None:
    """Behind the block torch and megatron-core are what they were, name by name; inside it CUDA
    calls give CPU tensors.
    """
    torch = pytest.importorskip("torch", reason="megatron-core needs PyTorch")
    pytest.importorskip(
        "megatron.core", reason="`pip install --no-deps megatron-core==0.16.1` (Python 3.11)"
    )

    def state() -> list[Any]:
        values = []
        for item in STAND_INS:
            module, _, name = item.owner.partition(":")
            owner: Any = importlib.import_module(module)
            values.append(vars(getattr(owner, name) if name else owner).get(item.name, "absent"))
        return values

    before = state()
    with cpu_megatron() as release, cpu_megatron():
        assert importlib.metadata.version("megatron-core") == release
        assert ["cpu"] * 3 == [
            one.device.type
            for one in (
                torch.zeros(2, device="cuda"),
                torch.ones(1).cuda(),
                torch.empty(1, device=torch.cuda.current_device(), pin_memory=True),
            )
        ]
        needed = [release in (item.releases or (release,)) for item in STAND_INS]
        assert needed == [one is not other for one, other in zip(before, state(), strict=True)]
    assert before == state()
