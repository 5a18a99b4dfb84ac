"""`make mutate`: change one operator, comparison or number of a core module, and see whether its tests notice.

A first run of the module's tests records which test calls which function. Then a child process per mutant: it is forked
after pytest and other packages were imported, compiles the module with the change, and runs the tests that call the
changed function, the quickest first, until one fails. The sample is seeded, so a survivor can be repeated alone:
`--only MODULE --number N`. Finished mutants are in the file of `--state`, and a second call does the others.

Survivors that cannot change behavior are in equivalent.json, each with the reason.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import select
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "joulelab"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
SAMPLE = 25
LONGEST_S = 600

_BY_HAND = "mutation/test_survivors.py"
_METER = ("meter/test_integrate.py", "meter/test_recorded_h200.py")
_LOGS = tuple(
    f"meter/importers/test_{name}.py"
    for name in ("log_formats", "log_times", "log_idle_and_inference", "logs_as_traces")
)
# Module: its tests, those that take seconds. Only tests that call it in their own process can notice a mutant.
CORE = {
    "stats/intervals.py": ("stats/test_intervals.py", "stats/test_closed_forms.py", "stats/test_paired_items.py"),
    "stats/break_even.py": ("stats/test_break_even.py", "stats/test_closed_forms.py"),
    "meter/curve.py": (*_METER, "meter/test_any_waveform.py"),
    "meter/integrate.py": _METER,
    "meter/series.py": _METER,
    "runs/artifacts.py": ("runs/test_artifacts.py", "report/tables/test_energy_bills.py"),
    "runs/assemble.py": ("runs/test_assemble.py", "cluster/test_several_hosts.py"),
    "runs/validity.py": ("runs/test_validity.py",),
    "report/compare/differences.py": (
        "report/compare/test_comparing_runs.py",
        "report/compare/test_break_even_of_runs.py",
    ),
    "distill/losses.py": ("distill/test_losses.py", "distill/test_relation_losses.py"),
    "distill/chunked.py": ("distill/test_chunked.py", "distill/test_ruled_out_words.py"),
    "train/trainer.py": ("train/test_trainer.py",),
    "train/budget.py": ("train/test_budget.py",),
    "meter/importers/log_energy.py": _LOGS,
    "meter/importers/power_log.py": _LOGS,
    "meter/importers/convert.py": _LOGS,
}

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def mutants(source):
    """(function, line, text before, text after, tree) of every single change, in the order of the source."""
    tree = ast.parse(source)
    found = []
    for function, path in _places(tree):
        node = _at(tree, path)
        for number, change in enumerate(_changes(node)):
            mutated = copy.deepcopy(tree)
            changed = _at(mutated, path)
            list(_changes(changed))[number]()
            found.append((function, node.lineno, _text(node), _text(changed), mutated, change))
    return [one[:5] for one in found]


def _text(node):
    text = " ".join(ast.unparse(node).split())
    return text if len(text) < 120 else text[:117] + "..."


def _changes(node):
    """Functions, each of which applies one change to the node."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        yield lambda: setattr(node, "op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield lambda: setattr(node, "ops", [COMPARISONS[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        yield lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.IfExp):
        yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda: setattr(node, "value", node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda: setattr(node, "value", not node.value)


def _places(tree):
    """(function, path in the tree) of the nodes that may change: code in functions, without annotations, texts and
    what only shapes a message."""

    def walk(node, path, function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{node.name}".lstrip(".")
            for number, part in enumerate(node.body):
                yield from walk(part, (*path, ("body", number)), inner)
            return
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if function and not isinstance(node, ast.Module):
            yield function, path
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            if isinstance(value, ast.AST):
                yield from walk(value, (*path, (name, None)), function)
            elif isinstance(value, list):
                for number, part in enumerate(value):
                    if isinstance(part, ast.AST):
                        yield from walk(part, (*path, (name, number)), function)

    return [(function, path) for function, path in walk(tree, (), "") if any(True for _ in _changes(_at(tree, path)))]


def _at(tree, path):
    for name, number in path:
        tree = getattr(tree, name) if number is None else getattr(tree, name)[number]
    return tree


class _Mutated(importlib.machinery.SourceFileLoader):
    """Loads one module from a changed tree, without the bytecode cache."""

    def __init__(self, name, path, tree):
        super().__init__(name, path)
        self._tree = tree

    def get_code(self, fullname):
        return compile(ast.fix_missing_locations(self._tree), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name, path, tree):
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        loader = _Mutated(fullname, str(self._path), self._tree)
        return importlib.machinery.ModuleSpec(fullname, loader, origin=str(self._path))


class _Calls:
    """A pytest plugin: the functions of one module that each test calls, and the seconds that the test takes."""

    def __init__(self, module):
        self._path = str(SOURCE / module)
        self._functions = _functions((SOURCE / module).read_text())
        self._called = set()
        self.seconds, self.tests_of, self._of_all = {}, {}, {name for name, _, _, cached in self._functions if cached}
        sys.settrace(self._trace)
        threading.settrace(self._trace)

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename == self._path:
            self._called.add(frame.f_code.co_firstlineno)

    def _take(self):
        """Names of the functions that were called since the last time."""
        lines, self._called = self._called, set()
        return {name for name, begin, end, _ in self._functions if any(begin <= line <= end for line in lines)}

    def pytest_collection_finish(self, session):
        self._of_all |= self._take()  # called at import: their results are everywhere

    def pytest_runtest_logreport(self, report):
        seconds = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.seconds[report.nodeid] = seconds
        # A fixture of a module is made for the first of its tests and used by all of them.
        where = report.nodeid.partition("::")[0] if report.when != "call" else report.nodeid
        for name in self._take():
            self.tests_of.setdefault(name, set()).add(where)

    def found(self):
        """{function: its tests, the quickest first}; a function that is missing has no test, a class has all."""
        every = sorted(self.seconds, key=self.seconds.get)
        found = {
            name: [test for test in every if {test, test.partition("::")[0]} & tests]
            for name, tests in self.tests_of.items()
        }
        return {"": every} | found | dict.fromkeys(self._of_all, every)


def _functions(source):
    """(name, first line, last line, whether results are cached) of functions and methods, not of functions in them."""

    def walk(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                decorators = [ast.unparse(one) for one in node.decorator_list]
                begin = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                yield prefix + node.name, begin, node.end_lineno, any("cache" in one for one in decorators)

    return list(walk(ast.parse(source).body, ""))


class _Selected:
    """A pytest plugin that runs only these tests, in this order."""

    def __init__(self, tests):
        self._place = {test: number for number, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items):
        chosen = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(chosen, key=lambda item: self._place[item.nodeid])


def in_child(work, limit_s):
    """What `work` returns in a forked process, None if that fails or takes longer than the limit."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(read)
        devnull = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(devnull, number)
        sys.stdout = sys.stderr = io.StringIO()
        with contextlib.suppress(BaseException), os.fdopen(write, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(write)
    end_s, text = time.monotonic() + limit_s, b""
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([read], [], [], left_s)[0]:
            if not (chunk := os.read(read, 65536)):
                break
            text += chunk
    os.close(read)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(text) if text and left_s > 0 else None


def _pytest(files, *plugins):
    import pytest

    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *files]
    return int(pytest.main(words, plugins=list(plugins)))


def watched_tests(module):
    """{function: its tests} of the unchanged module, and the packages that its tests import; None if a test fails."""

    def work():
        calls = _Calls(module)
        if _pytest([str(ROOT / "tests" / name) for name in (_BY_HAND, *CORE[module])], calls) != 0:
            return None
        files = {name: getattr(one, "__file__", None) or "" for name, one in sys.modules.items()}
        return calls.found(), [name for name, path in files.items() if "site-packages" in path]

    return in_child(work, LONGEST_S)


def tests_pass(module, tree, tests, limit_s):
    """True if these tests pass with the changed tree of the module; a hang counts as noticed."""

    def work():
        name = "joulelab." + module.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, _Finder(name, SOURCE / module, tree))
        return _pytest(sorted({test.partition("::")[0] for test in tests}), _Selected(tests))

    return not tests or in_child(work, limit_s) == 0


def tests_of(function, found):
    """The tests that call the function around a changed place; for a place in a class, all."""
    parts = function.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    defined = next((name for name in names if name in found["defined"]), "")
    return found["tests"].get(defined, [])


def sample(module, number):
    """The mutants of a module that are tried: (number, function, line, before, after, tree), in a seeded order."""
    every = mutants((SOURCE / module).read_text())
    chosen = sorted(random.Random(f"mutate-{module}").sample(range(len(every)), min(number, len(every))))
    return [(place, *every[place]) for place in chosen]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="MODULE", help="Part of a module's path.")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="Mutants per module; 0 tries all.")
    parser.add_argument("--number", type=int, help="Only this mutant of the module.")
    parser.add_argument("--state", type=Path, default=Path(".mutate.json"), help="File with finished mutants.")
    options = parser.parse_args()
    os.chdir(ROOT)
    state = json.loads(options.state.read_text()) if options.state.exists() else {}
    equivalent = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    import pytest  # noqa: F401 (before the forks)

    for module in [module for module in CORE if not options.only or any(part in module for part in options.only)]:
        began_s = time.monotonic()
        tried = sample(module, options.sample or 10**6)
        if options.number is not None:
            every = mutants((SOURCE / module).read_text())
            tried = [(options.number, *every[options.number])]
        watched = watched_tests(module)
        if watched is None:
            print(f"{module}: its tests fail without a mutant: {' '.join(CORE[module])}", file=sys.stderr)
            return 2
        found = {"tests": watched[0], "defined": {name for name, *_ in _functions((SOURCE / module).read_text())}}
        for package in watched[1]:
            if package.partition(".")[0] != "joulelab":
                with contextlib.suppress(Exception):
                    importlib.import_module(package)
        limit_s = 20 + 5 * (time.monotonic() - began_s)
        for number, function, line, before, after, tree in tried:
            key = f"{module} {function}: {before} -> {after}"
            known = state.setdefault(module, {})
            if key not in known or options.number is not None:
                known[key] = {
                    "number": number,
                    "line": line,
                    "killed": not tests_pass(module, tree, tests_of(function, found), limit_s),
                }
                options.state.write_text(json.dumps(state, indent=1))
                if not known[key]["killed"] and key not in equivalent:
                    print(
                        f"survived: --only {module} --number {number}, line {line}, {key}", file=sys.stderr, flush=True
                    )
    print(table(state, equivalent))
    return 0


def table(state, equivalent):
    rows = ["| module | mutants | without effect | killed | survived |", "| --- | --- | --- | --- | --- |"]
    totals = [0, 0, 0]
    for module, tried in state.items():
        without = [key for key, one in tried.items() if not one["killed"] and key in equivalent]
        killed = sum(one["killed"] for one in tried.values())
        rows.append(_row(f"`{module}`", len(tried), len(without), killed))
        totals = [total + more for total, more in zip(totals, (len(tried), len(without), killed), strict=True)]
    return "\n".join([*rows, _row("all", *totals)])


def _row(name, tried, without, killed):
    left = tried - without - killed
    share = f" ({100 * killed / (tried - without):.0f} %)" if tried > without else ""
    return f"| {name} | {tried} | {without} | {killed}{share} | {left} |"


if __name__ == "__main__":
    sys.exit(main())
