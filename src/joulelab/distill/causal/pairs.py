"""Pairs of answers, what the starting student thinks of them, and learning to prefer: the second half of dpo."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from joulelab.distill.causal import judging
from joulelab.distill.causal.answers import candidates
from joulelab.distill.causal.bench import Bench
from joulelab.distill.causal.budgets import energy_j_of
from joulelab.distill.causal.distributions import Voice
from joulelab.distill.causal.students import Desk, Lesson, load_student
from joulelab.distill.preferences.objective import PreferenceObjective
from joulelab.distill.preferences.pair_batches import PairBatches
from joulelab.distill.preferences.pair_making import PairReport, encode_pairs, prefer
from joulelab.distill.preferences.pair_rows import PairRows
from joulelab.distill.preferences.pairs import PairStore, write_pairs
from joulelab.distill.preferences.policy import switch_dropout_off
from joulelab.distill.preferences.reference import ReferenceLogs, write_reference
from joulelab.distill.preferences.target_log_probabilities import Projecting
from joulelab.runs.artifacts import Artifact
from joulelab.runs.record import Result

REFERENCE = "student.reference"
LOGS = "reference.jsonl"


def preference_pairs(bench: Bench, answers: Artifact, voice: Voice) -> Artifact:
    spec = bench.spec

    def make(folder: Path) -> None:
        asked = candidates(bench, answers)
        found = judging.scores(bench, asked, answers)
        with bench.run.stage("data.preferences") as stage:
            preferred, report = prefer(asked, found, spec.preferences.tie_margin)
            kept, report = encode_pairs(bench.tokenizer, preferred, report, spec.data.row_length)
            stage.count(samples=len(kept), tokens=sum(pair.tokens for pair in kept))
            write_pairs(
                folder, kept, vocab_size=bench.words, tokenizer=spec.tokenizer, report=report.model_dump(mode="json")
            )

    inputs = {
        **judging.inputs(bench),
        "tie_margin": spec.preferences.tie_margin,
        "row_length": spec.data.row_length,
        "tokenizer": bench.tokenizer_identity,
    }
    made = bench.run.artifact(
        "preferences", kind="preference-pairs", inputs=inputs, parents=[answers.bill, voice.bill], make=make
    )
    _tell(bench, made, answers)
    return made


def reference_logs(bench: Bench, pairs: Artifact, start: Artifact) -> Artifact:
    """What the student says about both answers of every pair before it learns from them; the pass is billed."""
    spec = bench.spec

    def make(folder: Path) -> None:
        bench.require_alone(REFERENCE)
        work = bench.kept_work(REFERENCE)
        store = PairStore.open(pairs.folder)
        model = load_student(start.folder).to(bench.device)
        with bench.run.stage(REFERENCE, total=len(store)) as stage:
            write_reference(
                work / LOGS, start.key, model, store,
                batch_size=spec.training.batch_size, how=Projecting(spec.chunk), precision=spec.training.precision,
                rows=PairRows(spec.preferences.shared_prompt), tick=bench.ticks(stage),
            )  # fmt: skip
        shutil.move(work / LOGS, folder / LOGS)

    inputs = {"precision": spec.training.precision, "shared_prompt": spec.preferences.shared_prompt}
    return bench.run.artifact(
        "reference", kind="reference-logs", inputs=inputs, parents=[pairs.bill, start.bill], make=make
    )


def preference_lesson(bench: Bench, pairs: Artifact, reference: Artifact, start: Artifact) -> Callable[[Desk], Lesson]:
    preferences = bench.spec.preferences

    def lesson(desk: Desk) -> Lesson:
        logs = ReferenceLogs.open(reference.folder / LOGS, start.key)
        layout = PairRows(preferences.shared_prompt)
        batches = PairBatches(PairStore.open(pairs.folder), desk.config.batch_size, bench.spec.seed, logs, layout)
        how = Projecting(bench.spec.chunk, compile_mode=desk.config.compile)
        student = switch_dropout_off(desk.model)
        return Lesson(batches, PreferenceObjective(student, preferences.loss, preferences.beta, how))

    return lesson


def _tell(bench: Bench, pairs: Artifact, answers: Artifact) -> None:
    report = PairReport.model_validate(dict(PairStore.open(pairs.folder).report))
    report = report.with_energy(energy_j_of(bench.spec, answers.bill.artefact, pairs.bill.artefact))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            bench.run.result(f"preferences.{name}", Result(value=float(value)))
    share = report.chosen_longer_share
    longer = "" if share is None else f"; the longer answer won {100 * share:.0f} %"
    bench.run.progress.say(f"preferences: {report.pairs} pairs of {report.prompts} prompts, {report.ties} ties{longer}")
