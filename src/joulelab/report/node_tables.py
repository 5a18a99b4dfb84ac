"""A run on several hosts or with several processes: joules by host and by device, and who held the others up.

Ranks wait for each other at every step, so all steps last equally long. What tells a straggler is its own work (input
and forward passes, which wait for nobody) against that of the others, and a card that draws less because it waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from joulelab.meter.figure_text import amount_text, method_text
from joulelab.meter.figures import EnergyFigure, total
from joulelab.report.grid import Grid, make_grid
from joulelab.report.wording import NOTHING
from joulelab.runs.record import Attempt, RankPace, RunRecord
from joulelab.units import duration_text, power_text, with_prefix

# Own work beyond this share above the median of its stage is worth a look at the node.
STRAGGLES_REL = 0.2
# A page lists so many ranks and devices one by one; of more, the slowest.
MOST_ROWS = 64


def node_grids(record: RunRecord) -> tuple[Grid, ...]:
    """Nothing where the run had one process on one host."""
    several = len({attempt.host for attempt in record.attempts}) > 1
    paced = any(attempt.ranks for attempt in record.attempts)
    if not several and not paced:
        return ()
    grids = [hosts_grid(record), devices_grid(record)] if several else [devices_grid(record)]
    return (*grids, *([ranks_grid(record)] if paced else []))


def hosts_grid(record: RunRecord) -> Grid:
    rows = []
    for attempt in record.attempts:
        figure = attempt.energy.best(record.policy)
        offset = f"{1000 * attempt.clock_offset_s:+.0f} ms" if attempt.clock_offset_s else NOTHING
        cells = (duration_text(attempt.billed_s), amount_text(figure), method_text(figure))
        rows.append((attempt.host, str(attempt.number), *cells, _mean_power(figure, attempt), offset))
    whole = total([attempt.energy.best(record.policy) for attempt in record.attempts])
    note = f"Together {amount_text(whole)}: the run's total. A clock is compared with that of rank 0's host."
    return make_grid("By host", "Host!|Attempt>|Time>|Energy>|Method|Mean W>|Clock>", rows[:MOST_ROWS], note)


def devices_grid(record: RunRecord) -> Grid:
    rows = []
    for attempt in record.attempts:
        for device in attempt.devices:
            cells = (device.device, device.name, amount_text(device.figure))
            rows.append((attempt.host, str(attempt.number), *cells, _mean_power(device.figure, attempt)))
    return make_grid("By device", "Host!|Attempt>|Device|Name|Energy>|Mean W>", rows[:MOST_ROWS])


def _mean_power(figure: EnergyFigure, attempt: Attempt) -> str:
    """Idle baselines are in neither the joules nor the time."""
    return power_text(figure.mean_power_w(attempt.billed_s))


def ranks_grid(record: RunRecord) -> Grid:
    found = [(attempt, pace) for attempt in record.attempts for pace in attempt.ranks]
    slow = [(attempt, pace) for attempt, pace in found if straggles(pace, _fellows(found, attempt, pace))]
    shown = found if len(found) <= MOST_ROWS else sorted(found, key=lambda row: row[1].own_s, reverse=True)[:MOST_ROWS]
    rows = [_rank_cells(attempt, pace, (attempt, pace) in slow) for attempt, pace in shown]
    who = ", ".join(dict.fromkeys(f"rank {pace.rank} on {attempt.host}" for attempt, pace in slow))
    note = f"Stragglers: {who}." if who else "Nobody held the others up."
    if len(shown) < len(found):
        note += f" The slowest {len(shown)} of {len(found)} are shown."
    titles = "Rank>|Host!|Attempt>|Stage|Steps>|Step>|Own work\nper step>|Straggles!"
    return make_grid("By process", titles, rows, note)


def _fellows(found: Sequence[tuple[Attempt, RankPace]], attempt: Attempt, pace: RankPace) -> list[float]:
    return [p.own_s for a, p in found if (a.number, p.stage) == (attempt.number, pace.stage)]


def straggles(pace: RankPace, own_s: Sequence[float]) -> bool:
    """Its own work takes clearly longer than that of most: the others then wait for it."""
    middle = statistics.median_low(sorted(own_s))
    return len(own_s) > 1 and middle > 0 and pace.own_s > (1 + STRAGGLES_REL) * middle


def _rank_cells(attempt: Attempt, pace: RankPace, slow: bool) -> tuple[str, ...]:
    times = (with_prefix(pace.step_s, "s"), with_prefix(pace.own_s, "s"))
    return (
        str(pace.rank),
        attempt.host,
        str(attempt.number),
        pace.stage,
        str(pace.steps),
        *times,
        "yes" if slow else "no",
    )
