"""Sides: what the gap's command line is asked to compare, read or scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollproof.core.error_text import told_with_place
from rollproof.errors import RollproofError, SubjectError, UsageError

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport
    from rollproof.gap.localise.localisation import Localisation
    from rollproof.gap.token_pairs import TokenPairs

__all__ = ["Sides", "localised"]

_HF = "hf:"
_SAMPLES = 8
_TOKENS = 1024
"""A localisation needs some hundred tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sides:
    """A file of both sides (``records``), or a trace (``rollout``) and its ``trainer``: a file or
    scores (text), or what scores it.
    """

    records: Path | None
    rollout: Path | None
    trainer: Any
    name: str
    renamed: Mapping[str, str]
    replay: bool
    every_version: bool

    @classmethod
    def of(
        cls,
        records: Path | None,
        rollout: Path | None,
        trainer: str | None,
        *,
        renamed: Mapping[str, str],
        replay: bool,
        every_version: bool,
        dtype: str,
        temperature: float | None,
    ) -> Sides:
        """What the options name. Raises ``UsageError`` for those that do not go together."""
        if (records is None) == (rollout is None):
            raise UsageError(
                "Give either RECORDS, a file with both columns of logprobs, or --rollout TRACE with"
                " --trainer SPEC."
            )
        if rollout is None and trainer is not None:
            raise UsageError(
                "--trainer goes with --rollout TRACE: RECORDS holds the trainer's logprobs itself."
            )
        if rollout is not None and trainer is None:
            raise UsageError(
                "--rollout needs --trainer SPEC: a Parquet file with the trainer's logprobs,"
                " score:SCORER for those in the trace, or hf:PATH."
            )
        scorer = None if trainer is None else _scorer(trainer, dtype, temperature)
        wanted = [
            flag
            for flag, given in (("--replay", replay), ("--every-version", every_version))
            if given
        ]
        if wanted and scorer is None:
            raise UsageError(
                f"{' and '.join(wanted)} needs a trainer that scores: --trainer hf:PATH or"
                " module:factory."
            )
        if scorer is None and (dtype != "auto" or temperature is not None):
            raise UsageError("--dtype and --temperature go with --trainer hf:PATH.")
        return cls(
            records=records,
            rollout=rollout,
            trainer=scorer if scorer is not None else trainer,
            name=str(records) if rollout is None else f"{rollout} against {trainer}",
            renamed=renamed,
            replay=replay,
            every_version=every_version,
        )

    def pairs(self) -> TokenPairs:
        """The pairs that are judged."""
        from rollproof.gap.pair_files import read_pairs
        from rollproof.gap.scored_rollouts import join_trace, score_rollouts

        if self.records is not None:
            return read_pairs(self.records, renamed=dict(self.renamed))
        assert self.rollout is not None
        if isinstance(self.trainer, str):
            return join_trace(self.rollout, self.trainer, renamed=self.renamed)
        return score_rollouts(
            self.rollout, self.trainer, replay=self.replay, every_version=self.every_version
        )

    def native(self) -> TokenPairs:
        """The same rollouts scored with the trainer's own routing."""
        from rollproof.gap.scored_rollouts import score_rollouts

        assert self.rollout is not None
        return score_rollouts(self.rollout, self.trainer)

    def noted(self, report: GapReport) -> GapReport:
        """The report with the trainer's notes."""
        from rollproof.gap.measure import noted

        return noted(report, self.trainer)

    def require_model(self, flag: str) -> None:
        """Raise ``UsageError`` unless the trainer is a model that can be listened to."""
        if not hasattr(self.trainer, "model"):
            raise UsageError(
                f"{flag} needs a trainer whose modules can be heard: --rollout TRACE --trainer"
                " hf:PATH."
            )


def _scorer(spec: str, dtype: str, temperature: float | None) -> Any:
    """What scores rollouts; ``None`` where the spec names scores that exist."""
    if spec.startswith(_HF):
        from rollproof.gap.hf_trainer import HfTrainer

        return HfTrainer.of(spec.removeprefix(_HF), dtype=dtype, temperature=temperature)
    if spec.startswith("score:") or Path(spec).exists() or ":" not in spec:
        return None
    trainer = _made(spec, "--trainer")
    if not callable(getattr(trainer, "score", None)):
        raise UsageError(
            f"{spec} makes a {type(trainer).__name__}, which has no score(rollouts, *, version,"
            " replay): see docs/gap.md."
        )
    return trainer


def _made(spec: str, option: str, *arguments: Any) -> Any:
    from rollproof.cli.named_targets import named_factory

    factory = named_factory(spec, option)
    try:
        return factory(*arguments)
    except RollproofError:
        raise
    except Exception as error:  # whatever a user's factory raises, told in our words
        called = "with input_ids and attention_mask" if arguments else "without arguments"
        raise SubjectError(
            f"{option} {spec} was called {called} and raised {told_with_place(error)}."
        ) from error


def localised(sides: Sides, spec: str) -> Localisation:
    """Where the trainer and the forward that ``spec`` names part, over the first rollouts of one
    version.
    """
    import torch

    from rollproof.gap.hf_trainer import HfTrainer
    from rollproof.gap.localise.forwards import hf_forward
    from rollproof.gap.localise.localise import localise
    from rollproof.gap.scored_rollouts import samples_of
    from rollproof.replay.hf.inputs import Layout, lay_out

    assert sides.rollout is not None
    samples = list(samples_of(sides.rollout, None).values())
    version = (samples[0].versions or [None])[0]
    same = [sample.rollout for sample in samples if (sample.versions or [None])[0] == version]
    batch = [
        rollout
        for i, rollout in enumerate(same[:_SAMPLES])
        if i == 0 or (i + 1) * rollout.total <= _TOKENS
    ]
    call = lay_out(batch, Layout.RIGHT).call
    ids, mask = call["input_ids"], call["attention_mask"]
    first = hf_forward(sides.trainer.model(version), ids, mask, name="trainer")
    if spec.startswith(_HF):
        other = HfTrainer.of(spec.removeprefix(_HF), dtype=sides.trainer.dtype)
        second = hf_forward(other.model(version), ids, mask, name=spec)
    else:
        made = _made(spec, "--localise", ids, mask)
        second = (
            hf_forward(made, ids, mask, name=spec) if isinstance(made, torch.nn.Module) else made
        )
    return localise(first, second)
