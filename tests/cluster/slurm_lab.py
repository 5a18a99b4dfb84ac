"""What a user has on a cluster: a login node with a command line, a store, and nodes whose GPUs draw known watts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml
from nvml_sim.driver import NvmlSim, SimGpu, constant

from joulelab.runs.record import RunRecord

SLOW_MODEL = Path(__file__).parent / "slow_model.py"
PATIENCE_S = 600.0


class Lab:
    """A store, a cluster, and the command line of a login node."""

    def __init__(self, folder, cluster, library):
        self.folder, self.cluster, self.store = folder, cluster, folder / "runs"
        mine = {"LD_LIBRARY_PATH": str(library.parent), "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder)}
        mine["JOULELAB_RUNS"] = str(self.store)
        self.env = {**os.environ, **cluster.environment, **mine}
        self.sims = {node: NvmlSim(library, cluster.folder / f"{node}.gpus") for node in cluster.nodes}
        for number, (node, sim) in enumerate(self.sims.items(), 1):
            cards = [SimGpu(uuid=f"GPU-{node}-{card}", wave=constant(100 * number + 10 * card)) for card in (0, 1)]
            sim.gpus = cards
            sim.write()

    def joulelab(self, *words, env=None):
        return self.joulelab_as_is(*words, "--runs-dir", self.store, env=env)

    def joulelab_as_is(self, *words, env=None):
        """The words as they are; the store is in the environment, because `-- PROGRAM` ends the options."""
        command = [sys.executable, "-m", "joulelab", *map(str, words)]
        more = {"env": {**self.env, **(env or {})}, "cwd": self.folder, "timeout": PATIENCE_S, "check": False}
        return subprocess.run(command, capture_output=True, text=True, **more)

    def submit(self, *words, env=None):
        done = self.joulelab("submit", *words, "--cpus", "1", "--json", env=env)
        assert done.returncode == 0, done.stderr
        return {job["key"].partition("-")[2]: job for job in json.loads(done.stdout)["jobs"]}

    def experiment(self, name, chosen):
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in chosen.items() if key != "name"}))
        return path

    def slow(self, name, steps):
        training = {"max_steps": steps, "epochs": None, "batch_size": 4, "log_every_steps": 5, "prefetch": 0}
        energy = {"sample_interval_s": 0.5, "counter_interval_s": 0.2}
        chosen = {"pipeline": "train", "model": str(SLOW_MODEL), "size": "tiny", "evaluate_batches": 0}
        return self.experiment(name, {**chosen, "training": training, "energy": energy})

    def sbatch(self, *words, env=None):
        """A job of plain Slurm, as `lab.wait` knows jobs."""
        done = self.cluster.call("sbatch", "--parsable", *words, env={**self.env, **(env or {})}, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return {"key": str(words[-1]), "job_id": done.stdout.strip(), "script": str(self.folder / "job")}

    def record(self, run_id):
        return RunRecord.model_validate_json((self.store / run_id / "run.json").read_text())

    def wait(self, job, *states):
        """Until the job, or all tasks of it, are in one of these states; a requeued one is let start at once."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            state = self.cluster.state(job["job_id"])
            job["seen_running"] = job.get("seen_running") or state == "RUNNING"
            if state in states:
                return state
            if state == "PENDING" and job.get("seen_running"):
                self.cluster.call("scontrol", "update", f"jobid={job['job_id']}", "StartTime=now", "TimeLimit=60")
            time.sleep(0.3)
        raise AssertionError(f"{job['key']} is {state} after {PATIENCE_S:.0f} s; {self.log(job)}")

    def log(self, job):
        logs = Path(job["script"]).parent.glob(f"*{job['key']}.*.log")
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs)
