"""An exclusive lock on the folder of a run or group: one process works on it, others are refused, readers never wait.

Two mechanisms, because neither is enough alone:

- A kernel lock on `.lock`. The kernel releases it when the process ends, even by SIGKILL, and most network file systems
  propagate it to other nodes. It is an open file description lock (Linux): unlike a POSIX lock it survives another open
  and close of the file in this process, and forked children close their copy, so they never keep it.
- A lease, `.lease-<n>`: host, boot id, pid and a heartbeat count. Its exclusive creation decides between nodes whose
  file system does not propagate locks (NFS with `nolock`, Lustre without `flock`). A node that finds a foreign lease
  watches the count on its own monotonic clock; only after `STALE_S` without an advance may it create lease n+1. If the
  old holder wakes up again, it finds that lease at its next heartbeat and stops.

Wall clocks are never compared: a lease's `since` is for people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import psutil
from pydantic import ValidationError

from joulelab import clock
from joulelab.errors import JoulelabError, UsageError
from joulelab.meter.figures import Frozen
from joulelab.runs.paths import cache_folder, read_json, storage_failure, write_json

LOCK = ".lock"
LEASE = ".lease-"
BEAT_S = 2.0
# 30 missed heartbeats: a library that holds the GIL for long must not look like a dead node.
STALE_S = 60.0
_POLL_S = 0.25
_LEASE_BYTES = 512
_LOCAL_FILE_SYSTEMS = frozenset(
    "apfs bcachefs btrfs exfat ext2 ext3 ext4 f2fs hfs jfs ntfs3 overlay ramfs tmpfs vfat xfs zfs".split()  # noqa: SIM905
)
_REFUSED = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class FolderLocked(UsageError):
    """Another process works on the run or group."""

    def __init__(self, folder: Path, lease: Lease | None) -> None:
        if not folder.exists():
            super().__init__(f"{folder} was deleted or moved while it was in use", "its measurement is lost")
        elif lease is None:
            super().__init__(f"{folder.name} is in use by another process", "wait for it to end")
        else:
            super().__init__(
                f"{folder.name} is in use by process {lease.pid} on {lease.host} since {lease.since}",
                f"wait for it to end, or stop it on {lease.host}: kill {lease.pid}",
            )


class Lease(Frozen):
    """Identifies the process that works on a folder."""

    token: str
    host: str
    boot_id: str
    pid: int
    since: str
    beat: int = 0

    @property
    def on_this_node(self) -> bool:
        return (self.host, self.boot_id) == this_node()


def this_node() -> tuple[str, str]:
    return os.uname().nodename, clock.boot_id()


class FolderLock:
    """A held lock; `release()` must be called as often as `hold()`."""

    def __init__(self, folder: Path, descriptor: int, number: int, lease: Lease) -> None:
        self.folder = folder
        self.on_taken_over: Callable[[FolderLocked], None] | None = None
        self.thread = threading.get_ident()
        self.depth = 1
        self._pid = os.getpid()
        self._descriptor = descriptor
        self._number = number
        self._lease = lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True, name="joulelab-lease")
        self._thread.start()

    @property
    def taken_over(self) -> FolderLocked | None:
        """Set if another process has taken the folder over because this one had no heartbeat for `STALE_S`."""
        successor = _lease_path(self.folder, self._number + 1)
        if _lease_path(self.folder, self._number).exists() and not successor.exists():
            return None
        return FolderLocked(self.folder, newest_lease(self.folder)[1])

    def release(self) -> None:
        """Release the folder; does nothing in a forked copy of this object."""
        if self._pid != os.getpid() or self.depth == 0:
            return
        self.depth -= 1
        if self.depth:
            return
        self._ended.set()
        self._thread.join(timeout=BEAT_S)  # a hanging file system must not block the exit
        _held.pop(self.folder, None)
        # The order matters: lease first, then `.lock`, then the descriptor. Until the descriptor is
        # closed no other process has the kernel lock, so none can see a folder without a lease but
        # with a holder.
        if self.taken_over is None:
            with suppress(OSError):
                _lease_path(self.folder, self._number).unlink(missing_ok=True)
            with suppress(OSError):  # while still held: a waiting process then finds that its file is gone
                (self.folder / LOCK).unlink(missing_ok=True)
        os.close(self._descriptor)

    def forget(self) -> None:
        """In a forked child: close the descriptor; the lock belongs to the parent."""
        with suppress(OSError):
            os.close(self._descriptor)

    def _keep_beating(self) -> None:
        path = _lease_path(self.folder, self._number)
        while not self._ended.wait(BEAT_S):
            if (taken_over := self.taken_over) is not None:
                if self.on_taken_over is not None:
                    self.on_taken_over(taken_over)
                return
            self._lease = self._lease.model_copy(update={"beat": self._lease.beat + 1})
            with suppress(OSError):  # a temporary disk failure; the next heartbeat follows
                _write_lease(path, self._lease, os.O_WRONLY)


_held: dict[Path, FolderLock] = {}


def _forget_all() -> None:
    for lock in _held.values():
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def holding(folder: Path, wait_s: float = 0.0) -> Iterator[FolderLock]:
    lock = hold(folder, wait_s)
    try:
        yield lock
    finally:
        lock.release()


def hold(folder: Path, wait_s: float = 0.0) -> FolderLock:
    """Lock a folder; raises FolderLocked if another process holds it. The holding thread may lock it again.

    `wait_s` is how long to wait for a living holder. A lease of another node without a heartbeat is watched for up to
    `STALE_S` in any case. Also removes leftovers of crashed processes from the folder.
    """
    resolved = folder.resolve()
    held = _held.get(resolved)
    if held is not None:
        if held.thread != threading.get_ident():
            raise FolderLocked(resolved, newest_lease(resolved)[1])
        held.depth += 1
        return held
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            lock = _acquire(resolved)
        except FolderLocked:
            if time.monotonic() >= deadline_s:
                raise
        else:
            if lock is not None:
                break
        time.sleep(_POLL_S)
    _held[resolved] = lock
    _remove_leftovers(resolved)
    return lock


def is_held(folder: Path) -> bool:
    """Whether a process works on the folder, as far as is known without waiting.

    A lease of another node without a kernel lock counts as held until its heartbeat count has not changed for `STALE_S`
    on this machine's monotonic clock; observations are kept between commands.
    """
    number, lease = newest_lease(folder)
    locked = _is_locked(folder / LOCK)
    if locked:
        return True
    if number == 0:
        return False
    return not (_is_dead(folder, lease, kernel_lock_free=locked is False) or _seen_s(lease) >= STALE_S)


def newest_lease(folder: Path) -> tuple[int, Lease | None]:
    """Number of the newest lease, 0 if there is none, and its content, None while it is being written."""
    numbers = _lease_numbers(folder)
    if not numbers:
        return 0, None
    try:
        return numbers[-1], Lease.model_validate(json.loads(_lease_path(folder, numbers[-1]).read_bytes()))
    except (OSError, ValueError, ValidationError):
        return numbers[-1], None


def _lease_numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 (only names are needed, and no pattern)
    except OSError:
        return []
    suffixes = (name.removeprefix(LEASE) for name in names if name.startswith(LEASE))
    return sorted(int(suffix) for suffix in suffixes if suffix.isdigit())


def _lease_path(folder: Path, number: int) -> Path:
    return folder / f"{LEASE}{number}"


def _acquire(folder: Path) -> FolderLock | None:
    """The lock, or None if the holder has ended meanwhile and the caller should retry."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"cannot lock {folder}: {error.strerror}", "the run directory must be writable") from None
    try:
        locked = _try_lock(descriptor)
        if locked is False:
            raise FolderLocked(folder, newest_lease(folder)[1])
        # Between our open and our lock the holder may have deleted the file, and a third process
        # may have created and locked a new one: a lock on a deleted inode excludes no other
        # process. Compared by device and inode.
        if not _is_file(descriptor, folder / LOCK):  # its holder has deleted it meanwhile
            os.close(descriptor)
            return None
        # Read before the newest lease is judged: a lease that appears after this was created by a
        # competitor.
        seen = _lease_numbers(folder)
        number, lease = newest_lease(folder)
        gone = not number or _is_dead(folder, lease, kernel_lock_free=bool(locked))
        if not gone and not _is_stale(folder, number, lease):
            os.close(descriptor)
            return None
        own = _create_lease(folder, number + 1, seen)
    except OSError as error:
        os.close(descriptor)
        raise (storage_failure(error, folder) or error) from None
    except BaseException:
        os.close(descriptor)
        raise
    return FolderLock(folder, descriptor, number + 1, own)


def _create_lease(folder: Path, number: int, seen: list[int]) -> Lease:
    """Create lease `number` in place of those seen before; refused if another node created one meanwhile."""
    host, boot_id = this_node()
    since = clock.iso(clock.now().wall_s)
    lease = Lease(token=secrets.token_hex(8), host=host, boot_id=boot_id, pid=os.getpid(), since=since)
    path = _lease_path(folder, number)
    try:
        # O_EXCL is atomic on local file systems and on NFS since version 3: of two nodes that both
        # found the old holder dead, one creates the file and the other fails.
        _write_lease(path, lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise FolderLocked(folder, newest_lease(folder)[1]) from None
    # A competitor may have judged an older listing and created a higher number. Both see the
    # other's file here, and both step back; the retry decides.
    if set(_lease_numbers(folder)) - {*seen, number}:
        path.unlink(missing_ok=True)
        raise FolderLocked(folder, newest_lease(folder)[1])
    for old in seen:
        _lease_path(folder, old).unlink(missing_ok=True)
    return lease


def _is_dead(folder: Path, lease: Lease | None, *, kernel_lock_free: bool) -> bool:
    """Whether the lease's holder has certainly ended, without watching it.

    A free kernel lock proves it if this kernel would know of the lock: the holder ran under it, or under an earlier
    boot of this machine on a local disk.
    """
    if lease is None:
        return kernel_lock_free and _is_local(folder)
    host, boot_id = this_node()
    if lease.on_this_node:
        return kernel_lock_free or not psutil.pid_exists(lease.pid)
    return kernel_lock_free and (lease.boot_id == boot_id or lease.host == host) and _is_local(folder)


def _is_stale(folder: Path, number: int, lease: Lease | None) -> bool:
    """Watch a foreign lease: True after `STALE_S` without a heartbeat, False if it is gone; raises on a heartbeat."""
    host = lease.host if lease else "another node"
    print(f"{folder.name} was in use on {host}: watching its heartbeat for up to {STALE_S:g} s", file=sys.stderr)
    began_s = time.monotonic()
    # Only durations on this machine's monotonic clock: the clocks of two nodes may differ by
    # minutes, and NTP may set either back.
    while max(_seen_s(lease), time.monotonic() - began_s) < STALE_S:
        time.sleep(_POLL_S)
        newest, current = newest_lease(folder)
        if newest != number:
            return False
        if lease is not None and current is not None and current != lease:
            raise FolderLocked(folder, current)
        lease = lease or current
    return True


def _write_lease(path: Path, lease: Lease, flags: int) -> None:
    """In a single write of constant size, so that readers never see a partial count."""
    descriptor = os.open(path, flags, 0o666)
    try:
        # A write below a page to the same offsets replaces the old content in one step for readers
        # on the same node, and the constant size leaves no tail of a longer earlier lease.
        os.write(descriptor, lease.model_dump_json().encode().ljust(_LEASE_BYTES - 1) + b"\n")
        if not _is_local(path.parent):
            os.fsync(descriptor)  # makes it visible to other nodes
    finally:
        os.close(descriptor)


def _whole_file(kind: int) -> bytes:
    """`struct flock` of 64-bit Linux."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0)


def _try_lock(descriptor: int) -> bool | None:
    """True: locked; False: another process has it; None: the file system has no locks."""
    try:
        if sys.platform == "linux":
            # Open file description locks belong to the open file and not to the process (fcntl(2)):
            # a POSIX lock would be lost as soon as any library opens and closes the same file.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _is_locked(path: Path) -> bool | None:
    """Whether a process holds the kernel lock; None if that cannot be determined. Locks nothing on Linux."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        if sys.platform == "linux":
            # F_OFD_GETLK only asks. Trying to lock instead would for a moment be a lock that
            # another process sees.
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
            return int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK
        locked = _try_lock(descriptor)
        return None if locked is None else not locked
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@lru_cache(maxsize=64)
def _is_local(folder: Path) -> bool:
    """Whether the folder is on a file system that only this machine mounts."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    kind = next((mounts[parent] for parent in (resolved, *resolved.parents) if parent in mounts), "")
    return kind in _LOCAL_FILE_SYSTEMS


def _seen_s(lease: Lease | None) -> float:
    """Seconds since this machine first saw the lease at its current count. Kept in the user's cache per boot: all
    processes of a boot share the monotonic clock, so short commands can determine it together."""
    if lease is None:
        return 0.0
    file = cache_folder() / f"leases-{clock.boot_id()}.json"
    known = {}
    with suppress(OSError, JoulelabError):
        known = {token: seen for token, seen in read_json(file).items() if _is_seen(seen)}
    now_s = time.monotonic()
    seen = known.get(lease.token)
    if seen is not None and seen[0] == lease.beat:
        return float(now_s - seen[1])
    known[lease.token] = [lease.beat, now_s]
    with suppress(OSError):
        write_json(file, {token: seen for token, seen in known.items() if now_s - seen[1] < 30 * 24 * 3600})
    return 0.0


def _is_seen(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, int | float) for part in value)


def unfinished_files(folder: Path) -> list[Path]:
    """Files and folders that crashed processes were writing, by joulelab's own names: the user may have chosen the
    folder."""
    folders = [folder, *(folder / name for name in ("trace", "stages", "events"))]
    found = [path for parent in folders for path in parent.glob(".*.tmp")]
    for name in ("artifacts", "checkpoints"):
        found += [*(folder / name).rglob(".*.tmp"), *(folder / name).rglob("step-*.tmp")]
    return found


def _remove_leftovers(folder: Path) -> None:
    for path in unfinished_files(folder):
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
