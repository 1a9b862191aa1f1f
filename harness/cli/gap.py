"""The command ``gap``: measure how far a trainer's logprobs are from those of the rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    from rollproof.core.records import Rollout
    from rollproof.gap.dumps import Dump
    from rollproof.gap.localise.localisation import Localisation
    from rollproof.gap.token_pairs import TokenPairs

__all__ = ["gap"]

_HF = "hf:"
_SAMPLES = 8
_TOKENS = 1024
"""Tokens of a localisation, which needs some hundred."""


def gap(
    records: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECORDS",
            help=(
                "A file with one row per token (or per sequence): Parquet, Arrow, JSONL, CSV, or"
                " columns of numpy.savez or torch.save. Or what NeMo-RL, prime-rl, verifiers,"
                " slime, miles or SkyRL dump of their training."
            ),
        ),
    ] = None,
    rollout: Annotated[
        Path | None,
        typer.Option(
            "--rollout",
            metavar="TRACE",
            help="A recorded trace, instead of RECORDS; needs --trainer.",
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer",
            metavar="SPEC",
            help=(
                "The trainer's logprobs for --rollout, or for a dump that lacks them: hf:PATH, a"
                " checkpoint that scores them (hf:PATH/{version} or hf:VERSION=PATH,... for several"
                " versions); or module:factory. For --rollout also a Parquet file, or score:SCORER"
                " in the trace."
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
            help="Score every rollout under every version: shows whether version tags are right.",
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
                "With hf:PATH: the temperature of the rollouts; default: what the calls of the"
                " trace declare, else 1."
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
                " first module where the two differ by more than rounding."
            ),
        ),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(
            "--limits",
            metavar="NAME",
            help="Class of models whose limits apply; default: moe-bf16.",
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
            help="Read the column NAME from the file's column THEIRS; may be repeated.",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="COLUMN",
            help=(
                "With RECORDS: compare the values of this column of the file, such as image and"
                " text; may be repeated."
            ),
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="Compare token by token with this file: the same rollout, scored without replay.",
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
    """Measure the gap between two columns of logprobs: metrics with intervals, a verdict with the
    sources of its limits, and the likely cause.

    The file has the columns sequence_id, rollout_logprob, trainer_logprob and mask, and if
    available version, position, rollout_routes and others (docs/gap.md).
    """
    # Imported here: pyarrow and scipy take a second, which `rollproof --help` need not wait for.
    from rollproof.gap.gap_report import comparison_lines, gap_lines, overall
    from rollproof.gap.html.page import check_report_target, write_plots, write_report
    from rollproof.gap.limits import GapVerdict, limits_named
    from rollproof.gap.localise.localisation import localisation_lines
    from rollproof.gap.measure import measure_pairs
    from rollproof.gap.pair_files import read_pairs
    from rollproof.gap.trainer_comparison import compare

    profile = limits_named(limits, override=limits_file)
    renamed = dict(
        _pair(text, "--column", "trainer_logprob=old_log_probs") for text in column or ()
    )
    controls = {
        name: Path(file)
        for name, file in (
            _pair(text, "--control", "shifted=shifted.parquet") for text in control or ()
        )
    }
    if controls and against is None:
        raise UsageError(
            "--control compares wrong routes with no replay: name the file of the scores without"
            " replay with --against."
        )
    if replay and against is not None:
        raise UsageError("--replay compares with the trainer's own routing: leave --against out.")
    inputs = GapInputs.of(
        records,
        rollout,
        trainer,
        renamed=renamed,
        replay=replay,
        every_version=every_version,
        dtype=dtype,
        temperature=temperature,
        groups=group or (),
    )
    if localise is not None:
        inputs.require_model("--localise")
    # Before the measurement, because scoring with a model may take an hour.
    check_report_target(page, plots)
    output = Output(json_target)
    with Meter() as meter:
        meter(Progress(done=0, total=4, what=f"reading {records or rollout}"))
        pairs = inputs.pairs()
        others = {name: read_pairs(file, renamed=renamed) for name, file in controls.items()}
        base = (
            inputs.native()
            if replay
            else None
            if against is None
            else read_pairs(against, renamed=renamed)
        )
        meter(Progress(done=1, total=4, what=f"measuring {pairs.n_tokens:,} tokens"))
        report = measure_pairs(
            pairs,
            limits=profile,
            subject=inputs.name,
            resamples=resamples,
            seed=seed,
            notes=inputs.notes,
        )
        name = "no replay" if replay else str(against)
        comparison = (
            None
            if base is None
            else compare(pairs, base, controls=others, name=name, resamples=resamples, seed=seed)
        )
        meter(Progress(done=2, total=4, what="localising" if localise else "drawing"))
        difference = None if localise is None else _localise(inputs, localise)
        meter(Progress(done=3, total=4, what="drawing"))
        if page is not None:
            write_report(report, page, comparison=comparison, localisation=difference)
        if plots is not None:
            write_plots(report, plots, comparison=comparison, localisation=difference)
    output.lines(gap_lines(report))
    if comparison is not None:
        output.lines(comparison_lines(comparison))
    if difference is not None:
        output.lines(localisation_lines(difference))
    more = {} if comparison is None else {"comparison": comparison.to_dict()}
    verdict = overall(report, comparison, difference)
    output.json(
        report.to_dict()
        | more
        | ({} if difference is None else {"localisation": difference.to_dict()})
        | {"overall": str(verdict)}
    )
    codes = {
        GapVerdict.FAIL: ExitCode.FAIL,
        GapVerdict.INCONCLUSIVE: ExitCode.UNKNOWN,
        GapVerdict.PASS: ExitCode.PASS,
    }
    return output.ended(codes[verdict])


def _pair(text: str, flag: str, example: str) -> tuple[str, str]:
    name, sign, theirs = text.partition("=")
    if not sign or not name or not theirs:
        raise UsageError(
            f"{flag} takes NAME={'THEIRS' if flag == '--column' else 'FILE'}, such as {example},"
            f" not {text!r}."
        )
    return name, theirs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GapInputs:
    """What is compared: a file with both columns (``records``), which may be a framework's
    ``dump``, or a trace (``rollout``) and its ``trainer``, which is the name of a file or of
    scores, or an object that scores rollouts (of a dump too).
    """

    records: Path | None
    rollout: Path | None
    trainer: Any
    name: str
    renamed: Mapping[str, str]
    replay: bool
    every_version: bool
    dump: Dump | None = None
    groups: Sequence[str] = ()

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
        groups: Sequence[str] = (),
    ) -> GapInputs:
        """Make inputs of the options. Raises ``UsageError`` for options that exclude each other."""
        if (records is None) == (rollout is None):
            raise UsageError(
                "Give either RECORDS, a file with both columns of logprobs, or --rollout TRACE with"
                " --trainer SPEC."
            )
        dump = None
        if records is not None:
            from rollproof.gap.dumps import read_dump

            dump = read_dump(records)
        if rollout is None and dump is None and trainer is not None:
            raise UsageError(
                "--trainer goes with --rollout TRACE, or with the dump of a framework: RECORDS has"
                " the trainer's logprobs already."
            )
        if dump is not None and (renamed or groups):
            raise UsageError(
                f"{records} is a dump of {dump.framework}, whose columns are known: leave --column"
                " and --group out."
            )
        if dump is not None and dump.lacking and trainer is None:
            raise UsageError(
                f"{records} is a dump of {dump.framework} without the trainer's logprobs:"
                f" {dump.lacking}. --trainer hf:PATH or module:factory scores its samples."
            )
        if rollout is not None and groups:
            raise UsageError(
                "--group names a column of RECORDS; a trace has none. From Python, pass groups to"
                " rollproof.gap.measure."
            )
        if rollout is not None and trainer is None:
            raise UsageError(
                "--rollout needs --trainer SPEC: a Parquet file with the trainer's logprobs,"
                " score:SCORER for those in the trace, or hf:PATH."
            )
        scorer = None if trainer is None else _scorer(trainer, dtype, temperature)
        if dump is not None and trainer is not None and scorer is None:
            raise UsageError(
                f"--trainer {trainer}: the samples of a dump are scored by hf:PATH or by"
                " module:factory."
            )
        scoring = [
            flag
            for flag, is_set in (("--replay", replay), ("--every-version", every_version))
            if is_set
        ]
        if scoring and scorer is None:
            raise UsageError(
                f"{' and '.join(scoring)} needs a trainer that scores: --trainer hf:PATH or"
                " module:factory."
            )
        if scorer is None and (dtype != "auto" or temperature is not None):
            raise UsageError("--dtype and --temperature go with --trainer hf:PATH.")
        return cls(
            records=records,
            rollout=rollout,
            trainer=scorer if scorer is not None else trainer,
            dump=dump,
            name=str(records or rollout) + ("" if trainer is None else f" against {trainer}"),
            renamed=renamed,
            replay=replay,
            every_version=every_version,
            groups=tuple(dict.fromkeys(groups)),
        )

    def pairs(self) -> TokenPairs:
        """Return the pairs of logprobs to judge."""
        from rollproof.gap.pair_files import read_pairs
        from rollproof.gap.scored_rollouts import join_scores, join_trace, score_rollouts

        if self.dump is not None and self.trainer is None:
            return join_scores(self.dump.rollouts, self.dump.trainer_logprobs)
        if self.dump is None and self.records is not None:
            return read_pairs(self.records, renamed=dict(self.renamed), groups=self.groups)
        if isinstance(self.trainer, str):
            assert self.rollout is not None
            return join_trace(self.rollout, self.trainer, renamed=self.renamed)
        return score_rollouts(
            self.sampled, self.trainer, replay=self.replay, every_version=self.every_version
        )

    def native(self) -> TokenPairs:
        """Return the same rollouts, scored with the trainer's own routing."""
        from rollproof.gap.scored_rollouts import score_rollouts

        return score_rollouts(self.sampled, self.trainer)

    @property
    def sampled(self) -> Iterable[Rollout] | Path:
        """The rollouts that a trainer scores: those of the dump, or the trace."""
        if self.dump is not None:
            return self.dump.rollouts
        assert self.rollout is not None
        return self.rollout

    @property
    def notes(self) -> Sequence[str]:
        """The trainer's notes on its scores."""
        return tuple(getattr(self.trainer, "notes", ()))

    def require_model(self, flag: str) -> None:
        """Raise ``UsageError`` unless the trainer is a model with modules."""
        if not hasattr(self.trainer, "model"):
            raise UsageError(
                f"{flag} needs a trainer that is a model with modules: --trainer hf:PATH, with"
                " --rollout TRACE or the dump of a framework."
            )


def _scorer(spec: str, dtype: str, temperature: float | None) -> Any:
    """Return what scores rollouts, or ``None`` if the spec names existing scores."""
    if spec.startswith(_HF):
        from rollproof.gap.hf_trainer import HfTrainer

        return HfTrainer.of(spec.removeprefix(_HF), dtype=dtype, temperature=temperature)
    # A file wins over module:factory, because a path may have a colon.
    if spec.startswith("score:") or Path(spec).exists() or ":" not in spec:
        return None
    trainer = _make(spec, "--trainer")
    if not callable(getattr(trainer, "score", None)):
        raise UsageError(
            f"{spec} makes a {type(trainer).__name__}, which has no score(rollouts, *, version,"
            " replay): see docs/gap.md."
        )
    return trainer


def _make(spec: str, option: str, *arguments: Any) -> Any:
    from rollproof.cli.named_targets import named_factory

    factory = named_factory(spec, option)
    try:
        return factory(*arguments)
    except RollproofError:
        raise
    except Exception as error:  # whatever the factory of a user raises
        called = "with input_ids and attention_mask" if arguments else "without arguments"
        raise SubjectError(
            f"{option} {spec} was called {called} and raised {describe_error_with_place(error)}."
        ) from error


def _localise(inputs: GapInputs, spec: str) -> Localisation:
    """Return where the trainer and the forward that ``spec`` names differ, on the first rollouts
    of one version.
    """
    import torch

    from rollproof.gap.hf_trainer import HfTrainer
    from rollproof.gap.localise.forwards import hf_forward
    from rollproof.gap.localise.localise import localise
    from rollproof.gap.rollout_samples import samples_with_tokens
    from rollproof.replay.hf.inputs import Layout, lay_out

    samples = list(samples_with_tokens(inputs.sampled).values())
    version = (samples[0].versions or [None])[0]
    same = [sample.rollout for sample in samples if (sample.versions or [None])[0] == version]
    # Few tokens are enough, and one batch of one version: every module's output is held in memory
    # for both forwards.
    batch = [
        rollout
        for i, rollout in enumerate(same[:_SAMPLES])
        if i == 0 or (i + 1) * rollout.total <= _TOKENS
    ]
    call = lay_out(batch, Layout.RIGHT).call
    ids, mask = call["input_ids"], call["attention_mask"]
    first = hf_forward(inputs.trainer.model(version), ids, mask, name="trainer")
    if spec.startswith(_HF):
        other = HfTrainer.of(spec.removeprefix(_HF), dtype=inputs.trainer.dtype)
        second = hf_forward(other.model(version), ids, mask, name=spec)
    else:
        forward = _make(spec, "--localise", ids, mask)
        second = (
            hf_forward(forward, ids, mask, name=spec)
            if isinstance(forward, torch.nn.Module)
            else forward
        )
    return localise(first, second)
