"""Pairs of answers, what the starting student thinks of them, and learning to prefer: the second half of dpo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from joulelab.distill.causal import judging
from joulelab.distill.causal.answers import candidates, energy_gap
from joulelab.distill.causal.bench import Bench
from joulelab.distill.causal.distributions import Voice
from joulelab.distill.causal.split_work import worked
from joulelab.distill.causal.students import Desk, Lesson, load_student
from joulelab.distill.preferences.objective import PreferenceObjective
from joulelab.distill.preferences.pair_batches import PairBatches
from joulelab.distill.preferences.pair_making import PairReport, encode_pairs, prefer
from joulelab.distill.preferences.pair_rows import PairRows
from joulelab.distill.preferences.pairs import PairStore, write_pairs
from joulelab.distill.preferences.policy import switch_dropout_off
from joulelab.distill.preferences.reference import ReferenceLogs, write_reference
from joulelab.distill.preferences.target_log_probabilities import Projecting
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec, progress_counter
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.record import Result
from joulelab.runs.sharding import Shard

REFERENCE = StageSpec("student.reference", "student", "score")
LOGS = "reference.jsonl"


def preference_pairs(bench: Bench, answers: Artifact, voice: Voice) -> Artifact:
    spec, judged = bench.spec, judging.judged(bench, answers, voice)

    def make(folder: Path) -> None:
        with bench.run.stage("data.preferences", role="data", activity="filter") as stage:
            asked = candidates(bench, answers)
            found = judging.scores(bench, asked, judged)
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
    parents = [answers.bill, judged.bill]
    made = bench.run.artifact("preferences", kind="preference-pairs", inputs=inputs, parents=parents, make=make)
    _tell(bench, made, answers, judged)
    return made


def reference_logs(bench: Bench, pairs: Artifact, start: Artifact) -> Artifact:
    """What the student says about both answers of every pair before it learns from them; the pass is billed."""
    spec, store = bench.spec, PairStore.open(pairs.folder)

    def begin(place: Path, share: Shard, others: Sequence[Path]) -> RemainingWork:
        model = load_student(start.folder).to(bench.device)

        def ask(stage: Stage) -> None:
            write_reference(
                place / f"{share.name}.jsonl", start.key, model, store,
                batch_size=spec.training.batch_size, how=Projecting(spec.chunk), precision=spec.training.precision,
                rows=PairRows(spec.preferences.shared_prompt), tick=progress_counter(bench.run, stage), share=share,
            )  # fmt: skip

        return RemainingWork(ask, {})

    def join(sources: Sequence[Path], folder: Path) -> None:
        logs = [path for source in sources for path in sorted(source.glob("*.jsonl"))]
        (folder / LOGS).write_text("".join(path.read_text(encoding="utf-8") for path in logs), encoding="utf-8")

    inputs = {"precision": spec.training.precision, "shared_prompt": spec.preferences.shared_prompt}
    parents, size = [pairs.bill, start.bill], spec.training.batch_size
    work = ShardedWork("reference", "reference-logs", REFERENCE, inputs, parents, size, store.__len__, begin, join)
    return worked(bench, work)


def preference_lesson(bench: Bench, pairs: Artifact, reference: Artifact, start: Artifact) -> Callable[[Desk], Lesson]:
    preferences = bench.spec.preferences

    def lesson(desk: Desk) -> Lesson:
        logs = ReferenceLogs.open(reference.folder / LOGS, start.key)
        layout = PairRows(preferences.shared_prompt)
        batches = PairBatches(PairStore.open(pairs.folder), desk.config.batch_size, bench.spec.seed, logs, layout)
        how = Projecting(bench.spec.chunk, compile_mode=desk.config.compile)
        student = switch_dropout_off(desk.model)
        objective = PreferenceObjective(student, preferences.loss, preferences.beta, how)
        return Lesson(batches, objective, preferences.loss_name)

    return lesson


def _tell(bench: Bench, pairs: Artifact, answers: Artifact, judged: Artifact) -> None:
    report = PairReport.model_validate(dict(PairStore.open(pairs.folder).report))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            bench.run.result(f"preferences.{name}", Result(value=float(value)))
    if energy_gap(answers) is None:
        paid = [answers.bill, judged.bill, pairs.bill]
        bench.run.joules_result("preferences.energy_j", paid)
        bench.run.joules_result("preferences.j_per_pair", paid, report.pairs)
    share = report.chosen_longer_share
    longer = "" if share is None else f"; of unequal answers the longer one won {100 * share:.0f} %"
    bench.run.progress.say(f"preferences: {report.pairs} pairs of {report.prompts} prompts, {report.ties} ties{longer}")
