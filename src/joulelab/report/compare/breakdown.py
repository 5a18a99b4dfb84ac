"""Energy of a method by line: one per stage or inherited artifact, mean over its runs, so that the lines add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from joulelab.meter.figures import EnergyFigure, total
from joulelab.report.compare.comparison import ComparedRun, StageMean, one_of_each_record
from joulelab.report.energy_sums import Part, PartKind, known_sum, method_parts
from joulelab.runs.measure.result import RUN, repeat_mean

Line = tuple[str, bool]
"""Its name, and whether it is a line of inherited work."""


def stage_means(runs: Sequence[ComparedRun]) -> tuple[StageMean, ...]:
    """Inherited work first, then own stages in order.

    Work that one seed did and the others inherit is one line: which of them did it is chance. A run without the work
    counts as 0 J of it; a run without any energy is in no mean. The repeats of a measured program are one line with the
    interval that `measure` prints; their setup was done once for all of them.
    """
    bills = [run.all_parts for run in runs]
    repeats = repeat_mean(*(run.record for run in one_of_each_record(runs)))
    ids = [run.record.run_id for run in runs]
    first = [ids.index(run_id) for run_id in dict.fromkeys(ids)]
    lines: dict[Line, dict[int, list[Part]]] = {}
    joined = _joined(bills)
    for place, parts in enumerate(bills):
        for part in parts if place in first else method_parts(parts):
            line = (part.stage, True) if part.inherited else (joined.get(part.stage, part.stage), part.stage in joined)
            lines.setdefault(line, {}).setdefault(place, []).append(part)
    billed = [place for place, run in enumerate(runs) if run.joules.with_teacher.energy_j is not None]
    counted = billed or range(len(runs))
    once = [place for place in counted if place in first]
    means = []
    for (name, inherited), by_run in lines.items():
        figure = _mean(by_run, counted if _kind(by_run) == "work" else once)
        if repeats is not None and name == RUN and not inherited:
            figure = repeats.energy
        means.append(StageMean(name, _all_inherited(by_run), figure, _kind(by_run)))
    return tuple(sorted(means, key=lambda mean: not mean.inherited))


def _joined(bills: Sequence[Sequence[Part]]) -> dict[str, str]:
    """Own stage -> line of the inherited work that it equals; an inherited artifact may combine several stages.

    Not if one run has both: a student's training differs from that of the student it starts from.
    """
    inherited = {part.stage: part.stages for bill in bills for part in bill if part.inherited}
    for bill in bills:
        names, own = ({part.stage for part in bill if part.inherited is paid} for paid in (True, False))
        inherited = {name: stages for name, stages in inherited.items() if name not in names or own.isdisjoint(stages)}
    return {stage: name for name, stages in inherited.items() for stage in stages} | {name: name for name in inherited}


def _kind(by_run: Mapping[int, Sequence[Part]]) -> PartKind:
    return next(iter(by_run.values()))[0].kind


def _all_inherited(by_run: Mapping[int, Sequence[Part]]) -> bool:
    return all(part.inherited for parts in by_run.values() for part in parts)


def _mean(by_run: Mapping[int, Sequence[Part]], billed: Sequence[int]) -> EnergyFigure:
    """Work that several runs share, by its key, is one measurement: its error does not average out."""
    once: dict[object, list[EnergyFigure]] = {}
    for place, parts in by_run.items():
        if place in billed:
            keys = frozenset(part.key for part in parts)
            figures = [part.figure for part in parts]
            known = figures[0] if len(figures) == 1 else known_sum(figures)
            once.setdefault(place if None in keys else keys, []).append(known)
    if not once:
        return next(iter(by_run.values()))[0].figure
    mean = total([figure for figures in once.values() for figure in figures])
    if mean.energy_j is None:
        return mean
    half_widths_j = [len(figures) * (figures[0].half_width_j or 0.0) for figures in once.values()]
    half_width_j = math.hypot(*half_widths_j) / len(billed)
    return mean.with_interval(mean.energy_j / len(billed), half_width_j)
