"""Equal terms: how many tokens or joules are left for a stage, and in words what was taken off before.

All tokens that go through the student count, also those of the SFT student that dpo and self begin with. Joules count
with or without the teacher's, as the settings say; either way it is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from joulelab.distill.causal.bench import Bench
from joulelab.distill.causal.config import CausalSpec, CausalTraining
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import Ancestor, Artifact, Bill, ancestry_of
from joulelab.runs.record import Result, StageRole, components_of, kinds_of
from joulelab.runs.storage import read_json, write_json
from joulelab.units import energy_text

NOTED = "budget.json"
TRAINED = "training.json"
"""Beside a student: what went through it."""


@dataclass(frozen=True)
class Allowance:
    tokens: int | None
    energy_j: float | None

    def limits(self, config: CausalTraining) -> CausalTraining:
        return config.model_copy(update={"max_tokens": self.tokens, "max_energy_j": self.energy_j})


def for_start(spec: CausalSpec) -> Allowance:
    """Of the SFT student that others begin with: its share, whatever the teacher takes, so that all can share it."""
    budget = spec.budget
    return Allowance(
        tokens=None if budget.tokens is None else max(1, round(budget.tokens * budget.start_share)),
        energy_j=None if budget.energy_j is None else budget.energy_j * budget.start_share,
    )


def for_training(bench: Bench, parents: Iterable[Bill], start: Artifact | None) -> Allowance:
    """What is left for student.train. Noted in the run, so that an attempt that goes on has the same end."""
    note = bench.run.paths.folder / NOTED
    if note.exists():
        kept = read_json(note)
        return Allowance(kept["left"]["tokens"], kept["left"]["energy_j"])
    budget = bench.spec.budget
    lineage = ancestry_of([*parents, *([start.bill] if start else [])])
    teacher_j = _joules(bench, lineage, "teacher")
    start_j = _joules(bench, lineage, "student")
    start_tokens = trained_tokens(start) if start else 0
    left = Allowance(
        tokens=None if budget.tokens is None else budget.tokens - start_tokens,
        energy_j=None if budget.energy_j is None else _left_j(bench.spec, teacher_j, start_j),
    )
    _require_some(bench.spec, left, teacher_j, start_j)
    _tell(bench, left, teacher_j, start_j, start_tokens)
    write_json(note, {"left": asdict(left), "teacher_energy_j": teacher_j, "start_energy_j": start_j})
    return left


def trained_tokens(student: Artifact) -> int:
    return int(read_json(student.folder / TRAINED)["tokens"])


def _left_j(spec: CausalSpec, teacher_j: float | None, start_j: float | None) -> float:
    """Joules that nobody measured cannot be taken off, and taking off nothing would be a gift."""
    taken = {"SFT student": start_j, **({"teacher": teacher_j} if spec.budget.counts_teacher else {})}
    for who, taken_j in taken.items():
        if taken_j is None:
            raise ConfigError(
                f"the joules of the {who} are to be taken off the budget, and nobody measured them",
                "run that step again where a sensor measures, let estimates count "
                "(training.budget_counts_estimates=true), or give the budget in tokens",
            )
    return (spec.budget.energy_j or 0.0) - sum(taken_j or 0.0 for taken_j in taken.values())


def _joules(bench: Bench, lineage: Iterable[Ancestor], role: StageRole) -> float | None:
    """None where they are not known of all that was done; 0 where nothing was done."""
    policy, estimates = bench.spec.energy.total_energy_policy, bench.spec.training.budget_counts_estimates
    metered = [one for one in lineage if one.stages]
    figures = [components_of(one) for one in metered if any(kind.role == role for kind in kinds_of(one))]
    found = [figure.best(policy) if estimates else figure.under_policy(policy) for figure in figures]
    known = [figure.energy_j for figure in found if figure.energy_j is not None]
    return sum(known) if len(known) == len(found) else None


def _require_some(spec: CausalSpec, left: Allowance, teacher_j: float | None, start_j: float | None) -> None:
    if left.energy_j is not None and left.energy_j <= 0:
        teacher_counts = bool(teacher_j) and spec.budget.counts_teacher
        taken = [f"the SFT student took {energy_text(start_j)}"] if start_j else []
        taken += [f"the teacher {'' if taken else 'took '}{energy_text(teacher_j)}"] if teacher_counts else []
        way_out = ", or set budget.counts_teacher=false" if teacher_counts else ", or lower budget.start_share"
        raise ConfigError(
            f"nothing is left of {energy_text(spec.budget.energy_j)}: {', '.join(taken)}", f"raise the budget{way_out}"
        )
    if left.tokens is not None and left.tokens <= 0:
        raise ConfigError("the SFT student has used up all tokens of the budget", "lower budget.start_share")


def _tell(bench: Bench, left: Allowance, teacher_j: float | None, start_j: float | None, start_tokens: int) -> None:
    budget, run = bench.spec.budget, bench.run
    said = []
    if left.tokens is not None:
        before = f" ({start_tokens:,} of {budget.tokens:,} went through the SFT student)" if start_tokens else ""
        said.append(f"{left.tokens:,} tokens{before}")
        run.result("budget.tokens", Result(value=float(budget.tokens or 0)))
        run.result("budget.start_tokens", Result(value=float(start_tokens)))
    if left.energy_j is not None:
        counted = "counted" if budget.counts_teacher else "not counted"
        taken = [f"SFT student {energy_text(start_j)}"] if start_tokens else []
        # in self the SFT student is the teacher, and what it took to be asked is told too
        taken += [f"teacher {energy_text(teacher_j)} {counted}"] if bench.spec.has_teacher or teacher_j != 0 else []
        before = f" ({', '.join(taken)})" if taken else ""
        said.append(f"{energy_text(left.energy_j)} of {energy_text(budget.energy_j)}{before}")
        run.result("budget.energy_j", Result(value=budget.energy_j or 0.0))
        run.result("budget.teacher_counted", Result(value=float(budget.counts_teacher)))
        run.result("budget.left_energy_j", Result(value=left.energy_j))
    run.progress.say(f"budget of student.train: {' and '.join(said)}")
