"""`joulelab` where the environment lacks something: memory, descriptors, streams, a home, a shared mapping, a folder.

Every environment is a function that returns what went wrong, or None: the command works, or it says what is needed,
without a traceback. A measured program that has ended keeps its exit code.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import joulelab

SOURCE = Path(joulelab.__file__).parent.parent
GB = 2**30


class NotHere(Exception):
    """This machine cannot provide the environment."""


def run(store, *words, program=None, unset=(), python=(sys.executable,), **options):
    """(exit code, stdout and stderr) of a command, `measure` of `program` by default."""
    if program is not None:
        words = ("measure", "--estimate-cpu", "--name", "tried", *words, "--", *program)
    env = {**os.environ, "JOULELAB_RUNS": str(store), "JOULELAB_CONFIG": os.devnull, **options.pop("env", {})}
    for name in unset:
        env.pop(name, None)
    options = {"cwd": Path(store).parent, **options}
    done = subprocess.run(
        [*python, "-m", "joulelab", *map(str, words)], env=env, capture_output=True, timeout=120, check=False, **options
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="backslashreplace")


def wrong(result, code=0, texts=()):
    """What differs from the expected exit code and texts."""
    found, output = result
    if "Traceback" in output:
        return f"traceback: {output[-2000:]}"
    if found != code:
        return f"exit code {found} instead of {code}: {output[-1000:]}"
    missing = [text for text in texts if text not in output]
    return f"{missing} not in: {output[-1000:]}" if missing else None


def limited(kind, value):
    return lambda: resource.setrlimit(kind, (value, value))


def first(*faults):
    return next((fault for fault in faults if fault), None)


SHORT = (sys.executable, "-c", "import time; time.sleep(0.3)")


def measured_and_listed(store, **options):
    """A measurement and the commands that read it."""
    return first(
        wrong(run(store, program=SHORT, **options), texts=["run directory:"]),
        wrong(run(store, "runs", **options), texts=["tried-"]),
        wrong(run(store, "show", "last", **options), texts=["program.run"]),
    )


def memory_of_1_gb(folder):
    options = {"preexec_fn": limited(resource.RLIMIT_AS, GB), "env": {"JOULELAB_CACHE": str(folder / "cache")}}
    return first(
        measured_and_listed(folder / "runs", **options),
        wrong(run(folder / "runs", "report", "last", **options), 2, ["of address space", "ulimit -v"]),
    )


def plot_under_4_gb(folder):
    """V8 reserves 64 GB of address space and aborts where that is refused."""
    store = folder / "runs"
    run(store, program=SHORT)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    refused = run(store, "plot", "last", preexec_fn=limited(resource.RLIMIT_AS, 4 * GB))
    raised = run(store, "plot", "last", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * GB, hard)))
    return first(wrong(refused, 2, ["of address space"]), wrong(raised, 0, ["power.svg"]))


def descriptors_64(folder):
    limit = limited(resource.RLIMIT_NOFILE, 64)
    return first(
        measured_and_listed(folder / "runs", preexec_fn=limit),
        wrong(run(folder / "runs", "report", "last", preexec_fn=limit), texts=["report.html"]),
    )


def descriptors_10(folder):
    limit = limited(resource.RLIMIT_NOFILE, 10)
    fault = wrong(run(folder / "runs", program=SHORT, preexec_fn=limit), 2, ["may open 10 files", "ulimit -n"])
    return fault or (f"left {list((folder / 'runs').iterdir())}" if (folder / "runs").exists() else None)


def file_size_limit(folder):
    limit = limited(resource.RLIMIT_FSIZE, 100_000)
    return first(
        wrong(run(folder / "runs", program=SHORT, preexec_fn=limit), 2, ["files of this process", "ulimit -f"]),
        # enough to begin: the limit is reached while the program runs, and the program keeps its exit code
        wrong(
            run(
                folder / "runs",
                program=[sys.executable, "-c", _LOWER_LIMIT_OF_PARENT],
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 2**20, 8 * 2**20)),
            ),
            0,
            ["was not recorded", "ulimit -f"],
        ),
    )


_LOWER_LIMIT_OF_PARENT = "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (100, 100))"


def no_shared_memory(folder):
    """/dev/shm is there and cannot be written."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        raise NotHere("no mount namespaces")
    (folder / "empty").mkdir()
    script = f'mount --bind {folder / "empty"} /dev/shm && mount -o remount,ro,bind /dev/shm && exec "$@"'
    return measured_and_listed(folder / "runs", python=("unshare", "-m", "sh", "-c", script, "sh", sys.executable))


def home_unset(folder):
    return measured_and_listed(folder / "runs", unset=("HOME", "XDG_CACHE_HOME", "JOULELAB_CACHE"))


def home_that_cannot_be_written(folder):
    """Also as root: a home below a file can be neither read nor made."""
    (folder / "file").write_text("")
    env = {"HOME": str(folder / "file" / "home"), "XDG_CACHE_HOME": "", "JOULELAB_CACHE": ""}
    return first(
        measured_and_listed(folder / "runs", env=env),
        wrong(run(folder / "runs", "report", "last", env=env), texts=["report.html"]),
        wrong(run(folder / "file" / "runs", program=SHORT, env=env, cwd=folder), 2, ["cannot create a run in"]),
    )


def locale_without_utf8(folder):
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return first(
        wrong(run(folder / "runs", program=SHORT, env=env), texts=["+/-"]),
        wrong(run(folder / "runs", "show", "last", env=env), texts=["+/-"]),
        wrong(run(folder / "runs", "report", "last", env=env), texts=["report.html"]),
    )


def dumb_terminal(folder):
    import pty

    pid, descriptor = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "dumb", "JOULELAB_RUNS": str(folder / "runs"), "JOULELAB_CONFIG": os.devnull}
        words = ["measure", "--estimate-cpu", "--", "sleep", "0.3"]
        os.execv(sys.executable, [sys.executable, "-m", "joulelab", *words])
    output = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(descriptor, 65536):
            output += chunk
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if b"\x1b" in output:
        return f"escape sequences on a dumb terminal: {output!r}"
    return wrong((code, output.decode()), texts=["run directory:"])


def closed_streams(folder):
    faults = []
    for words in ('"$@" >&-', '"$@" 2>&-', '"$@" <&- >&- 2>&-'):
        python = ("sh", "-c", words, "sh", sys.executable)
        faults.append(wrong(run(folder / "runs", program=["sh", "-c", "sleep 0.1; exit 3"], python=python), 3))
        faults.append(wrong(run(folder / "runs", "runs", python=python)))
    recorded = list((folder / "runs").glob("tried-*/run.json"))
    return first(*faults) or (None if len(recorded) == 3 else f"{len(recorded)} of 3 recorded")


def full_output(folder):
    program = ["measure", "--estimate-cpu", "--name", "tried", "--", "true"]
    python = ("sh", "-c", '"$@" >/dev/full 2>/dev/full', "sh", sys.executable)
    return wrong(run(folder / "runs", *program, python=python))


def deleted_working_directory(folder):
    where = folder / "gone"
    where.mkdir()
    python = ("sh", "-c", f'cd {where} && rmdir {where} && exec "$@"', "sh", sys.executable)
    fault = wrong(run(folder / "runs", program=SHORT, python=python), 2, ["the current directory was deleted"])
    where.mkdir()
    program = ["sh", "-c", f"rmdir {where}; sleep 0.3"]
    return first(fault, wrong(run(folder / "runs", program=program, cwd=where), texts=["run directory:"]))


def deleted_run_directory(folder):
    store = folder / "runs"
    for code in (0, 7):
        program = ["sh", "-c", f"sleep 1; rm -rf {store}; sleep 2; exit {code}"]
        fault = wrong(run(store, program=program), code, ["was deleted or moved", "was not recorded"])
        if fault or store.exists():
            return fault or "the deleted store is back"
    block = (
        "import joulelab, shutil, time\nwith joulelab.measure() as m: time.sleep(1); shutil.rmtree(m.folder)\nprint(m)"
    )
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return wrong((done.returncode, done.stdout + done.stderr), 0, ["was not recorded"])


def no_shared_mappings(folder):
    """A FUSE file system with direct_io, as some cluster and cloud file systems: no shared mmap, no cache."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise NotHere("bindfs or /dev/fuse is missing")
    mounted = folder / "mounted"
    for path in (folder / "real", mounted):
        path.mkdir()
    if subprocess.run(["bindfs", "-o", "direct_io", folder / "real", mounted], capture_output=True).returncode != 0:
        raise NotHere("bindfs cannot mount")
    try:
        phases = "import joulelab\nwith joulelab.measure('tried', estimate_cpu=True) as m:\n"
        phases += (
            "    for _ in range(50):\n        with m.window('step'): sum(range(10**5))\nprint(m.windows['step'].count)"
        )
        env = {**os.environ, "JOULELAB_RUNS": str(mounted / "runs")}
        done = subprocess.run([sys.executable, "-c", phases], env=env, capture_output=True, text=True, timeout=60)
        left = [path for path in Path(tempfile.gettempdir()).glob("joulelab-*.ring") if path.stat().st_mtime > START_S]
        return first(
            measured_and_listed(mounted / "runs"),
            wrong(run(mounted / "runs", "report", "last"), texts=["report.html"]),
            wrong((done.returncode, done.stdout + done.stderr), texts=["50"]),
            f"left {left}" if left else None,
        )
    finally:
        subprocess.run(["umount", mounted], check=True)


def delayed_visibility(folder):
    """What other processes write is seen 3 s late, as with the attribute cache of NFS (`delayed_visibility.py`)."""
    (folder / "site").mkdir()
    path = (folder / "site", Path(__file__).parent)
    install = f"import delayed_visibility; delayed_visibility.install({str(folder / 'runs')!r}, 3.0)\n"
    (folder / "site" / "sitecustomize.py").write_text(install)
    env = {"PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])}
    store = folder / "runs"
    words = [sys.executable, "-m", "joulelab", "measure", "--estimate-cpu", "--name", "at-once", "--", *SHORT]
    options = {"env": {**os.environ, "JOULELAB_RUNS": str(store), "JOULELAB_CONFIG": os.devnull, **env}, "cwd": folder}
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) for _ in range(2)]
    outputs = [(one.wait(timeout=120), one.stdout.read().decode()) for one in both]
    return first(
        *(wrong(output, texts=["run directory:"]) for output in outputs),
        measured_and_listed(store, env=env),
        wrong(run(store, "runs", env=env), texts=["3 runs"]),
        wrong(run(store, "report", "last", env=env), texts=["report.html"]),
        wrong(run(store, program=["sh", "-c", "sleep 0.2; exit 7"], env=env), 7),
    )


START_S = time.time()


def two_users(folder):
    """One store, a shared group, another user's run private."""
    if os.getuid() != 0:
        raise NotHere("only root can be two users")
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _works_for_others(path)), None)
    if python is None:
        raise NotHere("no interpreter that other users may run")
    with tempfile.TemporaryDirectory(prefix="joulelab-shared-") as shared:
        store = Path(shared, "runs")
        store.mkdir()
        Path(shared).chmod(0o755)
        os.chown(store, 0, GROUP)
        store.chmod(0o2775)

        def as_user(user, umask, *words, **options):
            return run(
                store, *words, python=(python,), cwd="/", user=user, group=user, extra_groups=[GROUP], umask=umask,
                env={"PYTHONPATH": OTHERS_PATH, "HOME": "/nonexistent"}, **options,
            )  # fmt: skip

        program = ["sleep", "0.3"]
        return first(
            wrong(as_user(65101, 0o002, program=program), texts=["run directory:"]),
            wrong(as_user(65102, 0o002, program=program), texts=["run directory:"]),
            wrong(as_user(65101, 0o077, program=program), texts=["run directory:"]),
            wrong(as_user(65102, 0o002, "runs"), texts=["2 runs"]),
            wrong(as_user(65101, 0o002, "runs"), texts=["3 runs"]),
            wrong(as_user(65102, 0o002, "compare", "tried-*"), texts=["tried"]),
            wrong(as_user(65102, 0o002, "report", "last"), texts=["report.html"]),
            wrong(as_user(65102, 0o002, "runs", "--prune", "--yes"), texts=["0 leftovers"]),
        )


GROUP = 65100
OTHERS_PATH = os.pathsep.join([str(SOURCE), *(path for path in sys.path if path.endswith("site-packages"))])


def _works_for_others(python):
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = [python, "-c", "import sys, joulelab, numpy; sys.exit(sys.version_info[:2] != " + repr(
            tuple(sys.version_info[:2])) + ")"]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": OTHERS_PATH}
        return subprocess.run(words, user=65101, group=65101, env=env, cwd="/", capture_output=True).returncode == 0
    return False


def killed_preparation(folder):
    """`prepare binarize`, killed with its workers at four moments, ends in the same bytes as without kills."""
    from tiny_tokenizer import bert_tokenizer

    texts = [f"Sentence {number} of a text with some words to count and to forget." for number in range(30_000)]
    (folder / "dump.txt").write_text("\n".join(texts))
    tokenizer = folder / "tokenizer"
    bert_tokenizer(texts[:100]).save_pretrained(tokenizer)
    words = ["prepare", "binarize", "--file_path", "dump.txt", "--tokenizer_name", str(tokenizer), "--workers", "2"]
    began_s = time.monotonic()
    whole = run(folder / "runs", *words, "--dump_file", "whole")
    took_s = time.monotonic() - began_s
    if whole[0] != 0:
        return wrong(whole)
    for share in (0.5, 0.7, 0.8, 0.9):
        process = subprocess.Popen(
            [sys.executable, "-m", "joulelab", *words, "--dump_file", "killed", "--force"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "JOULELAB_RUNS": str(folder / "runs"), "JOULELAB_CONFIG": os.devnull},
        )  # fmt: skip
        time.sleep(share * took_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    fault = wrong(run(folder / "runs", *words, "--dump_file", "killed", "--force"))
    if fault:
        return fault
    contents = [
        {
            path.relative_to(folder).as_posix().removeprefix(name): path.read_bytes() if path.suffix == ".npy" else b""
            for path in sorted(folder.glob(f"{name}.*/**/*"))
        }
        for name in ("whole", "killed")
    ]
    if contents[0].keys() != contents[1].keys():
        return f"leftovers: {sorted(contents[0])} and {sorted(contents[1])}"
    return None if any(contents[0].values()) and contents[0] == contents[1] else "the token stores differ"


# The first take a second or two each, the others need a special machine or longer.
QUICK = (
    descriptors_10,
    file_size_limit,
    home_unset,
    deleted_working_directory,
    deleted_run_directory,
)
THOROUGH = (
    memory_of_1_gb,
    plot_under_4_gb,
    descriptors_64,
    locale_without_utf8,
    no_shared_memory,
    home_that_cannot_be_written,
    dumb_terminal,
    closed_streams,
    full_output,
    no_shared_mappings,
    delayed_visibility,
    two_users,
    killed_preparation,
)
