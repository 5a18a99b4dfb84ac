"""docs/add-a-tracker.md, followed literally."""

import inspect
import re
from pathlib import Path

from stats_training import make_trainer, trained

from joulelab import lookup
from joulelab.train.stats.hooks import TrackerContext, TrainerStats, load_tracker

GUIDE = (Path(__file__).parents[3] / "docs" / "add-a-tracker.md").read_text(encoding="utf-8")


def test_the_guide_s_tracker_runs_from_its_file(tmp_path, monkeypatch):
    name = re.search(r"Save this as `(\w+\.py)`", GUIDE).group(1)
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    results = {}
    tracker = load_tracker(f"./{name}")
    output_text = trained(make_trainer(tracker, max_steps=7), result=results.__setitem__)
    assert re.fullmatch(r"peak memory over 7 steps: \d+ MiB", output_text)
    assert results["peak-memory"]["steps"] == 7
    assert results["peak-memory"]["highest_bytes"] > 2**20


def test_the_guide_names_every_hook_and_everything_in_the_context():
    hooks = [name for name, _ in inspect.getmembers(TrainerStats, inspect.isfunction)]
    table = GUIDE[GUIDE.index("| hook |") :]
    assert [name for name in hooks if name != "phase" and f"`{name}" not in table] == []
    assert [name for name in TrackerContext.__dataclass_fields__ if f"`{name}" not in table and name != "stage"] == []


def test_the_guide_s_line_is_one_that_the_table_would_take():
    line = re.search(r'^    "peak-memory": "([\w.]+):(\w+)",$', GUIDE, re.MULTILINE)
    assert line.group(1).startswith("joulelab.train.stats.")
    assert "peak-memory" not in lookup.TRAINER_STATS.names()
