"""The jobs of a run: lookup by id, failure of dependent runs, verbs without torch."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_hosts import made_run

from joulelab import clock
from joulelab.cluster.jobs import (
    JobsFile,
    SubmittedJob,
    fail_dependent_runs,
    folder_of_job,
    write_jobs,
)
from joulelab.errors import NotFoundError
from joulelab.runs.attempt import create_run
from joulelab.runs.lock import holding
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import RunSpec

ROOT = Path(__file__).parent.parent.parent


def test_a_job_id_finds_its_run_and_a_failed_job_fails_dependent_runs(tmp_path, monkeypatch):
    runs = [create_run(tmp_path, RunSpec(name=n, pipeline="measure")).folder for n in ("a", "b")]
    jobs = [
        SubmittedJob(key=k, about="", job_id=i, script="", runs=r, after=a, submitted_at=clock.iso(time.time()))
        for k, i, r, a in [("01-data", "31", (), None), ("02-students", "32", (runs[1].name,), "01-data")]
    ]
    write_jobs(runs[0], JobsFile(jobs=tuple(jobs)))
    assert folder_of_job(tmp_path, "32_1") == runs[0]
    with pytest.raises(NotFoundError, match="job 33"):
        folder_of_job(tmp_path, "33")
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    fail_dependent_runs(runs[0], "no such file")
    record = RunRecord.model_validate_json((runs[1] / "run.json").read_text())
    assert record.status == "failed"
    assert record.error.message == "not started: job 01-data failed (no such file)"


WITHOUT_TORCH = """\
import sys
for name in ("torch", "transformers", "datasets", "tokenizers", "safetensors", "pynvml"):
    sys.modules[name] = None
sys.argv = ["joulelab", *sys.argv[1:]]
from joulelab.cli.main import main
main()
"""


def test_submit_watch_and_report_need_neither_torch_nor_a_gpu(tmp_path):
    paths = made_run(tmp_path / "run", (100.0, 300.0))
    words = {
        "submit": ["distilbert-tiny-quick", "--dry-run", "--preset", "h100"],
        "watch": ["run", "--once", "--json"],
        "report": ["run"],
    }
    reported = {}
    for verb, rest in words.items():
        command = [sys.executable, "-c", WITHOUT_TORCH, verb, *rest, "--runs-dir", str(tmp_path)]
        with holding(paths.folder):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        reported[verb] = done.stdout
        assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=h100:1" in reported["submit"]
    assert json.loads(reported["watch"])["runs"][0]["energy_j"] > 0
    assert paths.report.exists()
