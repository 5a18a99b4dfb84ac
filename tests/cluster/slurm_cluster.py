"""A real Slurm on one machine, for tests: munge, a controller and several nodes with two make-believe GPUs each.

All of it lives in one folder and in processes of ours: key, sockets, ports and state are its own, nothing of the system
is touched, and several can run side by side. Nodes are daemons on this machine that call themselves node1, node2, ...
"""

import os
import pwd
import socket
import stat
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from slurm_accounts import Accounts, program, why_no_accounts

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "munged")
START_S = 30.0


def why_not_here():
    """The reason why no cluster can be started on this machine; None where it can."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        return f"no Slurm on this machine ({', '.join(missing)} missing); on Debian: apt-get install slurm-wlm munge"
    if os.getuid() != 0:
        return "a Slurm of the test's own needs root, to make device files and to start jobs"
    try:
        with TemporaryDirectory() as folder:
            make_device(Path(folder) / "gpu")
    except PermissionError:
        return "a Slurm of the test's own needs device files, and this container may not make any (CAP_MKNOD)"
    return None


def make_device(path):
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # /dev/null's number


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


CONFIGURATION = """\
ClusterName=joulelab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
TaskProlog={folder}/task_prolog
KillWait=20
MinJobAge=600
UnkillableStepTimeout=60
MailProg=/bin/true
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=16000 Gres=gpu:fake:2 State=UNKNOWN\n"
)


class SlurmCluster:
    def __init__(self, folder, nodes=2):
        self.folder = Path(folder)
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons = []
        self.accounts = Accounts(self, *free_ports(2)) if why_no_accounts() is None else None

    def start(self):
        for part in ("state", "dev", *(f"spool/{name}" for name in self.nodes)):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        for gpu in range(2):
            make_device(self.folder / "dev" / f"gpu{gpu}")
        self._write_configuration()
        self._start_munge()
        if self.accounts is not None:
            self.accounts.start()
        self.daemon("slurmctld", "-D", "-c")
        # a node that knocks before the controller answers tries again only much later
        self.wait_until(lambda: " is UP" in self.call("scontrol", "ping").stdout, "the controller")
        for name in self.nodes:
            self.daemon("slurmd", "-D", "-N", name)
        self.wait_until(self._all_idle, "the nodes")

    def _write_configuration(self):
        ports = free_ports(1 + len(self.nodes))
        user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(folder=self.folder, user=user, host=host, port=ports[0])
        text += (
            "AccountingStorageType=accounting_storage/none\n"
            if self.accounts is None
            else self.accounts.controller_lines
        )
        for name, port in zip(self.nodes, ports[1:], strict=True):
            text += NODE.format(name=name, host=host, port=port)
        text += "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
        (self.folder / "slurm.conf").write_text(text)
        cards = [f"NodeName={name} Name=gpu Type=fake File={self.folder}/dev/gpu[0-1]\n" for name in self.nodes]
        (self.folder / "gres.conf").write_text("AutoDetect=off\n" + "".join(cards))
        prolog = self.folder / "task_prolog"
        # each node has a driver of its own, as each real node has
        prolog.write_text(f"#!/bin/sh\necho export JOULELAB_NVML_SIM={self.folder}/$SLURMD_NODENAME.gpus\n")
        prolog.chmod(0o755)

    def _start_munge(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self.daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        self.wait_until((self.folder / "munge.socket").exists, "munge")

    def daemon(self, name, *words):
        with (self.folder / f"{name}.out").open("ab") as out:
            command = [program(name), *words]
            env = {**os.environ, **self.environment}
            self._daemons.append(subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True))

    def _all_idle(self):
        idle = self.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()
        return sorted(set(idle)) == sorted(self.nodes)

    def wait_until(self, ready, what):
        end = time.monotonic() + START_S
        while not ready():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come up: " + self._reported())
            time.sleep(0.1)

    def _reported(self):
        return "\n".join(path.read_text(errors="replace")[-1000:] for path in self.folder.glob("*.out"))

    def call(self, *words, **more):
        env = {**os.environ, **self.environment, **more.pop("env", {})}
        return subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env, timeout=60, **more)

    def state(self, job_id):
        """RUNNING, COMPLETED, ...; of an array the states of all its tasks."""
        output_text = self.call("scontrol", "-o", "show", "job", job_id).stdout
        states = [word.removeprefix("JobState=") for word in output_text.split() if word.startswith("JobState=")]
        return states[0] if len(set(states)) == 1 else tuple(states)

    def start_now(self, job_id):
        """A requeued job would wait for two minutes; whoever runs the cluster may let it start at once."""
        self.call("scontrol", "update", f"jobid={job_id}", "StartTime=now")

    def stop(self):
        """Jobs first: without their daemons nobody would end them."""
        self.call("scancel", "-u", pwd.getpwuid(os.getuid()).pw_name)
        end = time.monotonic() + START_S
        while self.call("squeue", "-h").stdout.strip() and time.monotonic() < end:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def running_cluster(folder, nodes=2):
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
