"""docs/run-folder.md names every field that a reader of a record, a bill or a group can meet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import document
from pydantic import BaseModel

from joulelab.meter.figures import EnergyFigure
from joulelab.meter.grids import Co2e, GridFactor
from joulelab.runs.artifacts import Ancestor, Bill
from joulelab.runs.groups import GroupRecord, Member
from joulelab.runs.paths import GroupPaths, RunPaths
from joulelab.runs.record import (
    Attempt,
    Check,
    EnergyByComponent,
    ErrorRecord,
    IdleBaseline,
    Note,
    PhaseRecord,
    Result,
    RunRecord,
    Segment,
    StageRecord,
    Totals,
    Validity,
)

PAGE = document("docs/run-folder.md")
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))
MODELS = [
    *(RunRecord, StageRecord, Totals, Attempt, Segment, PhaseRecord, EnergyByComponent, EnergyFigure),
    *(Result, Note, Check, Validity, IdleBaseline, GridFactor, Co2e),
    *(ErrorRecord, Ancestor, Bill, GroupRecord, Member),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_is_named(model: type[BaseModel]) -> None:
    missing = [name for name in model.model_fields if name not in NAMED]
    assert not missing, f"docs/run-folder.md does not name {missing} of {model.__name__}"


def test_every_file_of_a_run_and_a_group_is_in_the_drawing() -> None:
    run, group = RunPaths(Path("x")), GroupPaths(Path("x"))
    names = [
        *(run.record, run.config, run.environment, run.metrics, run.summary, run.report, group.record, group.report),
        *(run.artifacts, run.checkpoints, run.stages, run.trace("h", 1).parent, run.events("h", 0, 1).parent),
    ]
    drawing = PAGE.partition("```text")[2].partition("```")[0]
    assert not [path.name for path in names if path.name not in drawing]
