"""gap: measure how far a trainer's logprobs are from those of the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollproof.cli.output import JsonTarget, Meter, Output
from rollproof.core.error_text import describe_error_with_place
from rollproof.core.progress import Progress
from rollproof.errors import RollproofError, SubjectError, UsageError
from rollproof.judging.report import ExitCode

if TYPE_CHECKING:
    from rollproof.gap.localise.localisation import Localisation
    from rollproof.gap.token_pairs import TokenPairs

__all__ = ["gap"]

_HF = "hf:"
_SAMPLES = 8
_TOKENS = 1024
"""A localisation needs some hundred tokens."""


def gap(
    records: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECORDS",
            help="Parquet or Arrow file with a row a token (or a row a sequence).",
        ),
    ] = None,
    rollout: Annotated[
        Path | None,
        typer.Option(
            "--rollout",
            metavar="TRACE",
            help="In RECORDS' place: a recorded trace; needs --trainer.",
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer",
            metavar="SPEC",
            help=(
                "The trainer's logprobs for --rollout: a Parquet file; score:SCORER in the trace;"
                " hf:PATH, a checkpoint that scores them"
                " (hf:PATH/{version} or hf:VERSION=PATH,... for several versions); or"
                " module:factory."
            ),
        ),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Score with the rollout's routes replayed, and compare with the trainer's own.",
        ),
    ] = False,
    every_version: Annotated[
        bool,
        typer.Option(
            "--every-version",
            help="Score every rollout under every version: tells whether tags name the sampler.",
        ),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="With hf:PATH: float32, bfloat16 ...; default: the checkpoint's.",
        ),
    ] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=1e-6,
            help=(
                "With hf:PATH: the temperature that the rollouts were sampled with; default: what"
                " the trace's calls declare, else 1."
            ),
        ),
    ] = None,
    localise: Annotated[
        str | None,
        typer.Option(
            "--localise",
            metavar="SPEC",
            help=(
                "With hf:PATH: a second forward of the same tokens, hf:PATH or module:factory;"
                " names the"
                " first module where the two part by more than rounding."
            ),
        ),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(
            "--limits",
            metavar="NAME",
            help="Class of model that the limits are for; default: moe-bf16.",
        ),
    ] = None,
    limits_file: Annotated[
        Path | None,
        typer.Option(
            "--limits-file",
            metavar="FILE",
            help="Limits of your own (TOML); they replace those of the same name.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME=THEIRS",
            help="The file's own name of a column; may be repeated.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="The same rollout scored without replay: compared token by token.",
        ),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            "--control",
            metavar="NAME=FILE",
            help="With --against: the rollout scored with wrong routes; may be repeated.",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the report as one HTML file."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            "--plots", metavar="DIR", help="Write each plot into this folder, as PNG and SVG."
        ),
    ] = None,
    resamples: Annotated[
        int,
        typer.Option("--resamples", metavar="N", min=100, help="Bootstrap resamples of sequences."),
    ] = 1000,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Seed of the resampling.")
    ] = 0,
    json_target: JsonTarget = None,
) -> int:
    """Measure the gap of two columns of logprobs: the panel with intervals, a verdict with its
    sources, and the likely cause.

    The file has the columns sequence_id, rollout_logprob, trainer_logprob and mask; version,
    position, rollout_routes and others where they are at hand (docs/gap.md).
    """
    from rollproof.gap.gap_report import comparison_lines, gap_lines, overall
    from rollproof.gap.html.page import check_report_target, write_plots, write_report
    from rollproof.gap.limits import GapVerdict, limits_named
    from rollproof.gap.localise.localisation import localisation_lines
    from rollproof.gap.measure import measure_pairs
    from rollproof.gap.pair_files import read_pairs
    from rollproof.gap.trainer_comparison import compare

    chosen = limits_named(limits, override=limits_file)
    renamed = dict(
        _named(text, "--column", "trainer_logprob=old_log_probs") for text in column or ()
    )
    controls = {
        name: Path(file)
        for name, file in (
            _named(text, "--control", "shifted=shifted.parquet") for text in control or ()
        )
    }
    if controls and against is None:
        raise UsageError(
            "--control compares wrong routes with no replay: say with --against which file holds"
            " the scores without replay."
        )
    if replay and against is not None:
        raise UsageError("--replay compares with the trainer's own routing: leave --against out.")
    sides = Sides.of(
        records,
        rollout,
        trainer,
        renamed=renamed,
        replay=replay,
        every_version=every_version,
        dtype=dtype,
        temperature=temperature,
    )
    if localise is not None:
        sides.require_model("--localise")
    check_report_target(page, plots)
    output = Output(json_target)
    with Meter() as meter:
        meter(Progress(done=0, total=4, what=f"reading {records or rollout}"))
        pairs = sides.pairs()
        others = {name: read_pairs(file, renamed=renamed) for name, file in controls.items()}
        base = (
            sides.native()
            if replay
            else None
            if against is None
            else read_pairs(against, renamed=renamed)
        )
        meter(Progress(done=1, total=4, what=f"measuring {pairs.n_tokens:,} tokens"))
        report = measure_pairs(
            pairs,
            limits=chosen,
            subject=sides.name,
            resamples=resamples,
            seed=seed,
            notes=sides.notes,
        )
        name = "no replay" if replay else str(against)
        comparison = (
            None
            if base is None
            else compare(pairs, base, controls=others, name=name, resamples=resamples, seed=seed)
        )
        meter(Progress(done=2, total=4, what="localising" if localise else "drawing"))
        found = None if localise is None else localised(sides, localise)
        meter(Progress(done=3, total=4, what="drawing"))
        if page is not None:
            write_report(report, page, comparison=comparison, localisation=found)
        if plots is not None:
            write_plots(report, plots, comparison=comparison, localisation=found)
    output.lines(gap_lines(report))
    if comparison is not None:
        output.lines(comparison_lines(comparison))
    if found is not None:
        output.lines(localisation_lines(found))
    more = {} if comparison is None else {"comparison": comparison.to_dict()}
    verdict = overall(report, comparison, found)
    output.json(
        report.to_dict()
        | more
        | ({} if found is None else {"localisation": found.to_dict()})
        | {"overall": str(verdict)}
    )
    codes = {
        GapVerdict.FAIL: ExitCode.FAIL,
        GapVerdict.INCONCLUSIVE: ExitCode.UNKNOWN,
        GapVerdict.PASS: ExitCode.PASS,
    }
    return output.ended(codes[verdict])


def _named(text: str, flag: str, example: str) -> tuple[str, str]:
    name, sign, theirs = text.partition("=")
    if not sign or not name or not theirs:
        raise UsageError(
            f"{flag} takes NAME={'THEIRS' if flag == '--column' else 'FILE'}, such as {example},"
            f" not {text!r}."
        )
    return name, theirs


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

    @property
    def notes(self) -> Sequence[str]:
        """The trainer's notes on its scores."""
        return tuple(getattr(self.trainer, "notes", ()))

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
            f"{option} {spec} was called {called} and raised {describe_error_with_place(error)}."
        ) from error


def localised(sides: Sides, spec: str) -> Localisation:
    """Where the trainer and the forward that ``spec`` names part, over the first rollouts of one
    version.
    """
    import torch

    from rollproof.gap.hf_trainer import HfTrainer
    from rollproof.gap.localise.forwards import hf_forward
    from rollproof.gap.localise.localise import localise
    from rollproof.gap.scored_rollouts import read_samples
    from rollproof.replay.hf.inputs import Layout, lay_out

    assert sides.rollout is not None
    samples = list(read_samples(sides.rollout).values())
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
