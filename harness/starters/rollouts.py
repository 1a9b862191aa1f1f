"""The test file for rollout code: a contract with the reason of every field, a subject with four
places for one's own code, and a stand-in that makes it pass until then.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rollproof.contracts.presets import Promise, contract_of, preset_named
from rollproof.core.contract import Contract, Versions

__all__ = ["contract_source", "rollouts_file"]

_WIDTH = 88
"""Columns of the file: what the formatters of most repositories allow."""

_ORDER = tuple(field.name for field in fields(Contract))
_TAGS: Mapping[Versions, tuple[str, ...]] = {
    Versions.NONE: (),
    Versions.SAMPLE: ("version",),
    Versions.MIN_MAX: ("min_version", "max_version"),
    Versions.BOUNDS: ("min_version", "max_version"),
    Versions.CALL: ("call_versions",),
    Versions.SPAN: ("spans",),
    Versions.TOKEN: ("token_versions",),
}
"""The fields of ``Rollout`` that hold a tag."""

_FILE = '''\
"""Do our rollouts keep what they promise the trainer? rollproof runs them on fake engines.

Run it with `pytest {file}`. It passes as it is, because a stand-in makes the samples:
put your own rollout code in its place, at the marks (1) to (4).
"""

import rollproof
from rollproof.contracts.stand_in import StandIn

{promises}
CONTRACT = {contract}


class OurRollouts:
    """Joins our rollout code and rollproof."""

    flavours = ("{engine}",)  # the engines that our code speaks to
    contract = CONTRACT

    def start(self, fleet):
        # (1) Build your client; this is called for each case. `fleet.servers` has the
        # engines by name: `await server.generate(prompt_ids=..., max_tokens=...)`.
        self.client = StandIn(fleet, CONTRACT)

    async def rollout(self, request):
        # (2) Make one sample of `request.prompt_ids` with your client, of at most
        # `request.budget` tokens (`None`: no limit), through whatever happens to the engines.
        return await self.client.generate(request)

    async def update_weights(self, version):
        # (3) Bring new weights to the engines as your trainer does; most often that is
        # `await fleet.sync(version)`: pause, load, resume.
        await self.client.update_weights(version)

    def to_record(self, sample):
        # (4) Name the fields of your sample. `help(rollproof.Rollout)` says what they hold.
        return rollproof.Rollout(
{record}
        )

    def stop(self):
        """Close what `start` opened."""


@rollproof.conformance(OurRollouts)
def test_rollouts(check): ...
'''


def rollouts_file(
    like: str, *, path: str, engine: str | None = None, routes: bool | None = None
) -> str:
    """Return the source of the test file.

    Args:
        like: The preset whose contract it has.
        path: The path of the file, for the commands in its comments.
        engine: The engine flavour; the preset's first if left out.
        routes: Whether samples carry routed experts; as in the preset if left out.

    Raises:
        UsageError: No such preset, or an engine or routes that it does not have.
    """
    preset = preset_named(like)
    chosen = preset.engines[0] if engine is None else engine
    with_routes = preset.routes if routes is None else routes
    contract = contract_of(like, engine=chosen, routes=with_routes)
    return _FILE.format(
        file=path,
        promises=_comment(
            f"What a sample promises its trainer, here as {preset.about}. Change what your code"
            " does otherwise: `rollproof contract fields` lists all values, and `rollproof"
            f" contract explain {path}:OurRollouts` compares them with what a run shows."
        ),
        engine=chosen,
        contract=contract_source(preset.promises(chosen, routes=with_routes)),
        record=textwrap.indent("\n".join(_record_lines(contract)), " " * 12),
    )


def contract_source(promises: Mapping[str, Promise]) -> str:
    """Return the source of a ``Contract`` whose every field has its reason beside it or above."""
    lines = ["rollproof.Contract("]
    for field in (name for name in _ORDER if name in promises):
        promise = promises[field]
        code = f"    {field}={_code(promise.value)},"
        if not promise.why:
            lines.append(code)
        elif len(code) + len(promise.why) + 4 <= _WIDTH:
            lines.append(f"{code}  # {promise.why}")
        else:
            lines += [_comment(promise.why, "    "), code]
    return "\n".join([*lines, ")"])


def _comment(text: str, indent: str = "") -> str:
    start = f"{indent}# "
    return textwrap.fill(
        text, _WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
    )


def _record_lines(contract: Contract) -> list[str]:
    names = ["request_id", "prompt_ids", "response_ids", "finish_reason", "logprobs"]
    names += ["loss_mask"] if contract.loss_mask else []
    names += ["routes"] if contract.has_routes else []
    names += _TAGS[contract.versions]
    return [f"{name}=sample.{name}," for name in names]


def _code(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
