"""`joulelab infer STUDENT --against TEACHER`: two inference runs side by side, and when distilling has paid back."""

from __future__ import annotations

from pathlib import Path

from joulelab.errors import UsageError


def infer_pair(
    student: str | None, against: list[str], distilled_by: str | None, runs_dir: Path | None, as_json: bool
) -> None:
    from joulelab.report.inference_pair import pair_data, pair_grid, pairs
    from joulelab.runs.store import find_folder, load_record, store_root

    if student is None:
        raise UsageError(
            "the student's inference run was not named", "joulelab infer STUDENT_RUN --against TEACHER_RUN"
        )
    if len(against) != 1:
        raise UsageError(f"{len(against)} teachers were named", "a student is set beside one of them")
    store = store_root(runs_dir)
    ours, theirs = (load_record(find_folder(store, name)) for name in (student, against[0]))
    if ours.run_id == theirs.run_id:
        raise UsageError(f"{ours.run_id} was named as student and as teacher", "name two inference runs")
    made_by = load_record(find_folder(store, distilled_by)) if distilled_by is not None else None
    found = pairs(ours, theirs, made_by)
    if as_json:
        import json

        print(json.dumps({"student": ours.run_id, "teacher": theirs.run_id, "rows": pair_data(found)}, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.grid import to_rich

    print_result(to_rich(pair_grid(ours, theirs, found)))
