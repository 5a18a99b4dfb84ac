"""A stand-in for a file system with cached attributes, as NFS: `PYTHONPATH` has a sitecustomize.py that calls this.

In each Python process on its own, what is known about `root` and paths below it (that a path is not there, its size and
times, the entries of a folder) is kept for `seconds`, unless this process changes it. What other processes do meanwhile
is seen late. Opening a file asks the server, unless the file is known not to be there; creating one always does.
"""

import builtins
import io
import os
import time


def install(root, seconds):
    root, known, real = os.fspath(root), {}, {}

    def inside(path):
        if isinstance(path, int) or path is None:
            return None
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (resolve() would ask for attributes)
        return whole if whole == root or whole.startswith(root + os.sep) else None

    def forget(path):
        if whole := inside(path):
            for kind in ("stat", "lstat", "entries"):
                known.pop((kind, whole), None)
                known.pop((kind, os.path.dirname(whole)), None)  # noqa: PTH120 (pathlib may be loaded later)

    def cached(kind, path, ask):
        whole = inside(path)
        if whole is None:
            return ask()
        at_s, found = known.get((kind, whole), (None, None))
        if at_s is None or time.monotonic() - at_s > seconds:
            try:
                found = ask()
            except FileNotFoundError as error:
                found = error
            known[kind, whole] = time.monotonic(), found
        if isinstance(found, FileNotFoundError):
            raise FileNotFoundError(found.errno, found.strerror, os.fspath(path))
        return found

    def stat(path, *, dir_fd=None, follow_symlinks=True):
        kind = "stat" if follow_symlinks else "lstat"
        return cached(kind, path, lambda: real["stat"](path, dir_fd=dir_fd, follow_symlinks=follow_symlinks))

    class Entries(list):
        def __enter__(self):
            return iter(self)

        def __exit__(self, *_):
            return None

        def close(self):
            return None

    def scandir(path="."):
        if inside(path) is None:
            return real["scandir"](path)
        return Entries(cached("entries", path, lambda: list(real["scandir"](path))))

    def listdir(path="."):
        return [entry.name for entry in scandir(path)] if inside(path) else real["listdir"](path)

    def opened(path, writes):
        if writes:
            forget(path)
        elif whole := inside(path):
            at_s, found = known.get(("stat", whole), (None, None))
            if isinstance(found, FileNotFoundError) and time.monotonic() - at_s <= seconds:
                raise FileNotFoundError(found.errno, found.strerror, os.fspath(path))
            known.pop(("stat", whole), None)  # close-to-open consistency: an open asks for the attributes

    def open_file(file, mode="r", *arguments, **options):
        opened(file, any(letter in mode for letter in "wax+"))
        return real["open_file"](file, mode, *arguments, **options)

    def open_descriptor(path, flags, *arguments, **options):
        opened(path, bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        return real["open"](path, flags, *arguments, **options)

    def changing(name):
        def change(*arguments, **options):
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    forget(path)
            return real[name](*arguments, **options)

        return change

    real |= {"stat": os.stat, "scandir": os.scandir, "listdir": os.listdir, "open": os.open, "open_file": io.open}
    os.stat, os.scandir, os.listdir, os.open = stat, scandir, listdir, open_descriptor
    os.lstat = lambda path, *, dir_fd=None: stat(path, dir_fd=dir_fd, follow_symlinks=False)
    builtins.open = io.open = open_file
    for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "utime", "chmod"):
        real[name] = getattr(os, name)
        setattr(os, name, changing(name))
