"""`scripts/reference_runs.py` sees every difference in what a run computed, and none in how fast it was."""

from __future__ import annotations

import json

from reference_runs import differences, recorded_run


def run_folder(folder, loss, items_per_s, role="student"):
    folder.mkdir()
    stage = {"name": "model.train", "role": role, "activity": "train", "status": "done", "tokens": 8, "energy_j": 3.0}
    results = {"model.train.final_loss": {"value": loss}, "model.train.items_per_s": {"value": items_per_s}}
    record = {"name": "x", "label": "x", "spec": {"seed": 0}, "stages": [stage], "results": results}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "timestamp": str(items_per_s), "loss": loss}) + "\n")
    predictions = folder / "artifacts" / "predictions.npz"
    predictions.parent.mkdir()
    predictions.write_bytes(str(loss).encode())
    return recorded_run(folder)


def test_speed_is_no_difference(tmp_path):
    assert differences("run", run_folder(tmp_path / "a", 0.5, 10), run_folder(tmp_path / "b", 0.5, 20)) == []


def test_losses_predictions_and_roles_are(tmp_path):
    before = run_folder(tmp_path / "a", 0.5, 10)
    found = differences("run", before, run_folder(tmp_path / "b", 0.5000001, 10, role="teacher"))
    assert [line.split(":")[0] for line in found] == [
        "run.metrics[0].loss",
        "run.predictions.artifacts/predictions.npz",
        "run.results.model.train.final_loss",
        "run.stages[0].role",
    ]
