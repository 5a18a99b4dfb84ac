"""One host's share of an attempt, for the record: its joules by device, its clock, and how its processes kept up."""

from __future__ import annotations

from joulelab.clock import NS
from joulelab.meter.integrate import device_energy
from joulelab.runs.attempt_data import STEP, AttemptData, seconds
from joulelab.runs.events import AttemptEvents, read_events
from joulelab.runs.record import Attempt, DeviceEnergy, RankPace

# What a rank does on its own. Backward passes and optimiser steps wait for the gradients of the others.
OWN_WORK = ("input", "forward")


def attempt_record(attempt: AttemptData, every_rank: bool = True) -> Attempt:
    """`every_rank=False` looks at one process of the host: of thousands, nobody reads all."""
    return Attempt(
        number=attempt.number,
        host=attempt.host,
        boot_id=attempt.trace.header.get("boot_id", ""),
        started_at=attempt.started_at(attempt.begin_ns),
        duration_s=(attempt.end_ns - attempt.begin_ns) / NS,
        closed=attempt.trace.ended,
        energy=attempt.energy(attempt.billed_windows),
        billed_s=seconds(attempt.billed_windows),
        devices=tuple(_devices(attempt)),
        clock_offset_s=attempt.clock_offset_s,
        ranks=tuple(_ranks(attempt, every_rank)),
    )


def _devices(attempt: AttemptData) -> list[DeviceEnergy]:
    return [
        DeviceEnergy(
            device=series.device,
            name=series.name,
            component=series.component,
            figure=device_energy(series, attempt.billed_windows),
        )
        for series in attempt.trace.devices
        if series.counted
    ]


def _ranks(attempt: AttemptData, every_rank: bool) -> list[RankPace]:
    """Only where there were several processes: one alone keeps up with itself."""
    if attempt.rank == 0 and len(attempt.event_files) < 2:
        return []
    paces: list[RankPace] = []
    for rank, path in attempt.event_files if every_rank else attempt.event_files[:1]:
        events = attempt.events if rank == attempt.rank else read_events(path)
        paces += rank_paces(rank, events)
    return paces


def rank_paces(rank: int, events: AttemptEvents) -> list[RankPace]:
    """Of every stage that had steps."""
    return [
        RankPace(
            rank=rank,
            stage=stage,
            steps=steps.count,
            step_s=steps.sum_s / steps.count,
            own_s=sum(events.phases[stage, p].sum_s for p in OWN_WORK if (stage, p) in events.phases) / steps.count,
        )
        for (stage, phase), steps in sorted(events.phases.items())
        if phase == STEP and steps.count
    ]
