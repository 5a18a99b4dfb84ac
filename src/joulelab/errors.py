"""All errors that joulelab raises on purpose, with their exit codes.

    JoulelabError                 1   the run failed
    ├── NonFiniteLoss             1   training produced NaN or infinity
    ├── OutOfMemory               1   the model and its batch do not fit into the memory
    ├── StorageFailed             1   the disk is full, over its quota, read-only or broken
    ├── CorruptedFile             2   a file of a run cannot be read or has other content than expected
    ├── UsageError                2   invalid command line
    │   ├── ConfigError           2   a setting is unknown or has a wrong value
    │   │   └── SeveralProblems   2   all problems that were found before a start, as a list
    │   ├── NotFoundError         2   no such experiment, run, file or sample
    │   ├── DependencyMissing     2   an optional package is not installed
    │   ├── DeviceMissing         2   the requested device is not on this machine
    │   ├── UnknownFormat         2   unknown log format (meter/importers/power_log.py)
    │   ├── BadGpu                4   the requested GPU does not exist (meter/monitor/operator_log.py)
    │   └── CannotStart    126, 127   the program to measure cannot be started (runs/measure/program.py)
    ├── UnusableLog               2   a log lacks the requested data (meter/importers/power_log.py)
    ├── ProgramFailed        its own  the measured program failed (runs/measure/program.py)
    ├── RecordLost     the program's  the measured program ended, its record was not written (runs/measure/result.py)
    ├── SensorMissing             3   no sensor where one was required
    ├── InvalidMeasurement        4   the measurement does not meet the required validity
    └── EndedBySignal       128 + n   SIGHUP (129), SIGINT (130) or SIGTERM (143)

The CLI catches `JoulelabError` once and prints message and hint; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any


class JoulelabError(Exception):
    """`message`: what happened. `hint`: what to do about it."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NonFiniteLoss(JoulelabError):
    pass


class OutOfMemory(JoulelabError):
    pass


class StorageFailed(JoulelabError):
    pass


class CorruptedFile(JoulelabError):
    exit_code = 2


class UsageError(JoulelabError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class NotFoundError(UsageError):
    def __init__(self, message: str, hint: str = "", name: str | None = None) -> None:
        """`name`: what was not found, as a setting names it."""
        super().__init__(message, hint)
        self.name = name


class DependencyMissing(UsageError):
    def __init__(self, message: str, hint: str = "", packages: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.packages = tuple(packages)


class DeviceMissing(UsageError):
    pass


NOTHING_STARTED = "nothing was started"


class SeveralProblems(ConfigError):
    def __init__(self, problems: Sequence[JoulelabError], hint: str = NOTHING_STARTED) -> None:
        hints = [problem.hint.removesuffix(NOTHING_STARTED).rstrip("; ") for problem in problems]
        lines = [
            f"  - {problem.message}" + (f" ({advice})" if advice else "")
            for problem, advice in zip(problems, hints, strict=True)
        ]
        super().__init__(f"{len(problems)} problems were found:\n" + "\n".join(lines), hint)
        self.problems = tuple(problems)


def find_problems(checks: Iterable[Callable[[], object]]) -> list[JoulelabError]:
    """The problems that these checks raise, each once; unlike a `try`, a problem does not hide those after it. Packages
    that two models need are one problem."""
    found: dict[object, JoulelabError] = {}
    for check in checks:
        try:
            check()
        except JoulelabError as error:
            for problem in error.problems if isinstance(error, SeveralProblems) else (error,):
                packages = problem.packages if isinstance(problem, DependencyMissing) else ()
                found.setdefault(packages or problem.message, problem)
    return _packages_once(list(found.values()))


def _packages_once(problems: list[JoulelabError]) -> list[JoulelabError]:
    """Missing packages as one problem with one command, where two models need some of the same."""
    missing = [problem for problem in problems if isinstance(problem, DependencyMissing) and problem.packages]
    extras = [re.fullmatch(r'pip install "joulelab\[(.+)\]"', problem.hint) for problem in missing]
    if len(missing) < 2 or not all(extras):
        return problems
    names = list(dict.fromkeys(name for problem in missing for name in problem.packages))
    wanted = dict.fromkeys(extra for match in extras if match for extra in match[1].split(","))
    one = DependencyMissing(
        f"this needs {', '.join(names[:-1])} and {names[-1]}, which are not installed",
        f'pip install "joulelab[{",".join(wanted)}]"',
        names,
    )
    place = problems.index(missing[0])
    others = [problem for problem in problems if problem not in missing]
    return [*others[:place], one, *others[place:]]


def refuse_all(checks: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all checks and return their results, or raise everything that is wrong as one error."""
    results: list[Any] = []
    problems = find_problems(partial(_append_result, results, check) for check in checks)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise SeveralProblems(problems)
    return results


def _append_result(results: list[Any], check: Callable[[], Any]) -> None:
    results.append(check())


class SensorMissing(JoulelabError):
    exit_code = 3


class InvalidMeasurement(JoulelabError):
    exit_code = 4


class EndedBySignal(JoulelabError):
    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum
