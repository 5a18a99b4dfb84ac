"""Programs and other verbs on a real Slurm: `submit -- PROGRAM`, `submit VERB ...`, the recipes of docs/slurm.md, and
one run that two nodes try to resume at the same time.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import why_not_here
from slurm_lab import PATIENCE_S, SLOW_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or "")]

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
PAGE = Path(__file__).parent.parent.parent / "docs" / "slurm.md"
PERCEPTRON = Path(__file__).parent.parent / "cli" / "perceptron.py"
QUIET = ("energy.idle_before_s=0", "energy.idle_after_s=0")


def submit_program(lab, *words, options=(), env=None):
    done = lab.joulelab_as_is("submit", *options, "--cpus", "1", "--json", "--", *words, env=env)
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    return job


def runs_of(lab):
    return {path.name for path in lab.store.glob("*") if (path / "run.json").exists()}


def test_a_program_is_measured_on_a_node_and_its_run_is_known_from_the_start(lab):
    code = "import sys, time; time.sleep(3); print('trained', sys.argv[1:])"
    job = submit_program(lab, "python", "-c", code, "--epochs", "3", options=("--time", "10"))
    (run_id,) = job["runs"]
    assert lab.record(run_id).status in ("queued", "running")
    assert lab.wait(job, *ENDED) == "COMPLETED", lab.log(job)
    record = lab.record(run_id)
    assert record.status == "done"
    (attempt,) = record.attempts
    power_w = {"node1": 100, "node2": 200}[attempt.host]
    card = int(attempt.devices[0].device[-1])
    run = record.stage("program.run")
    assert run.energy_j == pytest.approx((power_w + 10 * card) * run.duration_s, rel=0.05)
    assert "trained ['--epochs', '3']" in lab.log(job)
    assert "joulelab:" in lab.log(job)
    watched = lab.joulelab("watch", run_id, "--once", "--json")
    assert json.loads(watched.stdout)["runs"][0]["status"] == "done"
    again = lab.joulelab("submit", "--resume", run_id)
    assert again.returncode == 2


def test_a_program_that_fails_or_is_cancelled_keeps_its_exit_code_and_energy(lab):
    failing = submit_program(lab, "python", "-c", "import sys, time; time.sleep(1); sys.exit(7)")
    long = submit_program(lab, "sleep", "300")
    assert lab.wait(failing, *ENDED) == "FAILED"
    assert "ExitCode=7:0" in lab.cluster.call("scontrol", "show", "job", failing["job_id"]).stdout
    record = lab.record(failing["runs"][0])
    assert record.status == "failed" and record.totals.energy_j > 0
    end = time.monotonic() + PATIENCE_S
    while lab.record(long["runs"][0]).status != "running" and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(2)
    assert lab.joulelab("cancel", long["job_id"]).returncode == 0
    assert lab.wait(long, *ENDED) == "CANCELLED"
    end = time.monotonic() + 30
    while lab.record(long["runs"][0]).status == "running" and time.monotonic() < end:
        time.sleep(0.2)
    record = lab.record(long["runs"][0])
    assert record.status == "truncated" and record.totals.energy_j > 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--preset", "h100", "--", "sleep", "1"), "GPU type 'h100' was requested, but partition debug has fake"),
        (("demo-kd", "--gpu-type", "a100"), "GPU type 'a100' was requested, but partition debug has fake"),
        (("demo-kd", "--partition", "debgu"), "unknown partition 'debgu'; did you mean 'debug'?"),
        (("--nodes", "2", "--", "sleep", "1"), "a measured program is started once, on one node"),
        (("--", "nosuchprogram", "1"), "nosuchprogram: command not found"),
        (("--", "srun", "sleep", "1"), "tasks of srun are not children of the measured program"),
        (("--", "train", "--api-key", "hf_abcdefghijklmnop"), "looks like a secret"),
        (("--array", "0-3", "train", "gpt2"), "--array does not apply to `train`"),
        (("prepare", "nosuch"), "prepare: expected one of dump, binarize"),
        (("train", "nosuchmodel"), "nosuchmodel"),
        (("infer", "deit-t", "deit-t"), "deit-t was named twice"),
        (("run", "demo-kd", "--until", "teacher"), "--until of `run` has no effect in a job"),
        ((), "nothing to submit was named"),
    ],
)
def test_what_cannot_run_is_refused_at_submission_and_leaves_no_run(lab, words, error):
    before = runs_of(lab)
    done = lab.joulelab_as_is("submit", *words)
    assert done.returncode in (2, 127), done.stderr
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert runs_of(lab) == before


def test_verbs_are_submitted_as_they_would_be_run(lab):
    """train with two batch sizes (an array and its report), prepare (a CPU job), infer with two models."""
    model = lab.folder / "perceptron.py"
    model.write_text(PERCEPTRON.read_text())
    other = lab.folder / "other.py"
    other.write_text(PERCEPTRON.read_text())
    env = {"LD_LIBRARY_PATH": ""}
    train = lab.submit(
        "train", SLOW_MODEL, "--size", "tiny", "--batch_size", "2,4", "--max_steps", "3", "--gpus", "0", env=env
    )
    prepare = lab.submit("prepare", "dump", "sample:reviews", "--dump_file", "dump.txt", "--split", "train[:20]")
    infer = lab.submit(
        *("infer", "./perceptron.py", "./other.py", "--min-run-time", "0.1", "--gpus", "0", "--no-check", *QUIET),
        env=env,
    )
    assert list(train) == ["run", "report"] and train["run"]["array"]
    script = Path(prepare["run"]["script"]).read_text()
    assert "--cpus-per-task=1\n" in script and "--mem=8G" in script and "gpus" not in script
    report = Path(train["report"]["script"]).read_text()
    assert "--cpus-per-task=4\n" in report and "--time=02:00:00" in report
    for jobs in (train, prepare, infer):
        last = list(jobs.values())[-1]
        assert lab.wait(last, *ENDED) == "COMPLETED", "".join(map(lab.log, jobs.values()))
        for run_id in jobs["run"]["runs"]:
            assert lab.record(run_id).status == "done"
    assert {lab.record(run_id).spec["training"]["batch_size"] for run_id in train["run"]["runs"]} == {2, 4}
    assert (lab.folder / "dump.txt").read_text().count("\n") == 20
    group = Path(infer["run"]["script"]).parent.parent
    assert "Inference of models" in lab.joulelab("show", group.name).stdout


# One run, two nodes.

HIDDEN_LOCKS = """
# Stands in for a file system that does not propagate kernel locks (NFS with nolock): each node sees only its own lock
# file, its own host name and boot id, and does not take the folder for a local one.
import os
node = os.environ.get("SLURMD_NODENAME")
if node:
    from joulelab.runs import lock
    lock.this_node = lambda: (node, "boot of " + node)
    lock.LOCK, lock._is_local = ".lock-" + node, lambda folder: False
"""


@pytest.mark.parametrize("kernel_locks", [True, False])
def test_of_two_nodes_that_resume_one_run_the_second_is_refused(lab, kernel_locks):
    """Both node daemons run on this machine and share its disk. With `kernel_locks` the kernel lock decides, as on a
    file system that propagates locks; without, each node has its own lock file, and the lease decides."""
    env = {"LD_LIBRARY_PATH": ""}
    if not kernel_locks:
        site = lab.folder / "no-kernel-locks"
        site.mkdir()
        (site / "sitecustomize.py").write_text(HIDDEN_LOCKS)
        env["PYTHONPATH"] = f"{site}:{os.environ.get('PYTHONPATH', '')}"
    name = f"contested-{kernel_locks}"
    done = lab.joulelab("run", lab.slow(name, steps=60), "--until", "data", env={"LD_LIBRARY_PATH": ""})
    assert done.returncode == 0, done.stderr
    (folder,) = lab.store.glob(f"{name}-2*")
    command = f"{sys.executable} -m joulelab run --resume {folder}"
    jobs = {
        node: lab.sbatch("-w", node, "-c", "1", f"--output={lab.folder}/{name}.{node}.log", "--wrap", command, env=env)
        for node in lab.cluster.nodes
    }
    states = {node: lab.wait(job, *ENDED) for node, job in jobs.items()}
    logs = {node: (lab.folder / f"{name}.{node}.log").read_text() for node in jobs}
    assert sorted(states.values()) == ["COMPLETED", "FAILED"], logs
    refused = next(node for node, state in states.items() if state == "FAILED")
    holder = next(node for node in states if node != refused)
    assert "ExitCode=2:0" in lab.cluster.call("scontrol", "show", "job", jobs[refused]["job_id"]).stdout
    expected = rf"is in use by process \d+ on {holder if not kernel_locks else os.uname().nodename}"
    assert re.search(expected, logs[refused]), logs[refused]
    record = lab.record(folder.name)
    assert record.status == "done"
    assert len({attempt.number for attempt in record.attempts}) == len(record.attempts)
    assert record.attempts[-1].host == holder


# Recipes.

TRAIN = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(60):
    value = torch.ones(1)
    dist.all_reduce(value)
    time.sleep(0.05)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {value.item():.0f}", flush=True)
dist.destroy_process_group()
"""


def recipe(name):
    """The job script under this heading of the page."""
    section = PAGE.read_text().partition(f"\n### {name}\n")[2]
    return section.partition("```sh\n")[2].partition("```")[0]


@pytest.mark.parametrize(
    ("name", "ranks", "nodes"),
    [("srun", 1, 1), ("srun with one task per GPU", 2, 1), ("torchrun", 2, 1), ("torchrun on two nodes", 4, 2),
     ("accelerate", 2, 1)],
)  # fmt: skip
def test_the_recipes_of_the_page_run_as_they_are_written(lab, name, ranks, nodes):
    text = recipe(name)
    assert "joulelab measure" in text
    folder = lab.folder / name.replace(" ", "-")
    folder.mkdir()
    alone = "import time; time.sleep(3); print('rank 0 of 1: 1', flush=True)"
    (folder / "train.py").write_text(TRAIN if ranks > 1 else alone)
    (folder / "job.sh").write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    named = {**lab.env, "PATH": path, "JOULELAB_RUNS": str(folder / "runs")}
    done = lab.cluster.call("sbatch", "--parsable", "--mem=0", "--output=log", "job.sh", env=named, cwd=folder)
    assert done.returncode == 0, done.stderr
    job = {"key": name, "job_id": done.stdout.strip(), "script": str(folder / "job")}
    assert lab.wait(job, *ENDED) == "COMPLETED", (folder / "log").read_text()
    log = (folder / "log").read_text()
    assert sorted(re.findall(r"rank \d of \d+: \d+", log)) == [f"rank {r} of {ranks}: {ranks}" for r in range(ranks)]
    records = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*/run.json"))]
    assert len(records) == nodes, log
    for record in records:
        assert record["status"] == "done"
        gpus = [device["device"] for attempt in record["attempts"] for device in attempt["devices"]]
        host = record["attempts"][0]["host"]
        power_w = sum({"node1": 100, "node2": 200}[host] + 10 * int(gpu[-1]) for gpu in gpus)
        stage = next(stage for stage in record["stages"] if stage["name"] == "program.run")
        assert stage["energy_j"] == pytest.approx(power_w * stage["duration_s"], rel=0.05)
        assert len(gpus) == max(1, ranks // nodes), gpus
