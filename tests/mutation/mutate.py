"""`make mutate`: change one operator, comparison or number of a core module, and see whether its tests notice.

For each module, a process collects the tests that may call it, runs them once to record which test calls which
function, and then forks a child per mutant. The child replaces the code of the changed function and runs the tests that
call it, the quickest first, until one fails. A place whose result is fixed at import (defaults of a class, functions
called by constants) is compiled and reimported instead. Finished mutants are in the file of `--state`, with the test
that noticed each, and a second call does the others. A survivor can be repeated alone: `--only MODULE --number N`.

Survivors that cannot change behavior are in equivalent.json, each with the reason.
"""

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "joulelab"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
SAMPLE = 25
LONGEST_S = 1800
# A slower test is left out, and a mutant is tried with tests of at most this duration together.
TEST_S, MUTANT_S = 30, 90

_BY_HAND = "mutation/test_survivors.py"
_METER = (
    "meter/test_integrate.py",
    "meter/test_recorded_h200.py",
    "meter/test_any_waveform.py",
    "meter/sensors/test_counters.py",
    "meter/importers/test_logs_as_traces.py",
)
_LOGS = ("meter/importers", "meter/sensors/test_counters.py", "carry_over/test_old_logs.py")
_RUNS = (
    "runs/test_artifacts.py",
    "runs/test_assemble.py",
    "runs/test_validity.py",
    "runs/test_input_bills.py",
    "runs/test_record.py",
    "runs/test_energy_so_far.py",
    "cluster/test_several_hosts.py",
    "report/tables/test_energy_bills.py",
)
_TRAIN = ("train/test_trainer.py", "train/test_budget.py", "train/test_setup_stages.py", "train/test_trainer_guide.py")
_LOSSES = (
    "distill/test_losses.py",
    "distill/test_relation_losses.py",
    "distill/test_chunked.py",
    "distill/test_ruled_out_words.py",
    "distill/classify/test_fitnets_terms.py",
    "distill/logit_cache/test_kd_loss.py",
)
# Module: files and folders with its tests. Only tests that call it in their own process can notice a mutant.
CORE = {
    "stats/intervals.py": ("stats", "report/compare"),
    "stats/break_even.py": ("stats", "report/compare"),
    "meter/curve.py": ("meter/test_curve.py", *_METER),
    "meter/integrate.py": _METER,
    "meter/series.py": ("meter/test_series.py", *_METER),
    "runs/artifacts.py": _RUNS,
    "runs/assemble.py": _RUNS,
    "runs/validity.py": _RUNS,
    "report/compare/differences.py": ("report/compare", "report/tables"),
    "distill/losses.py": _LOSSES,
    "distill/chunked.py": _LOSSES,
    "train/trainer.py": _TRAIN,
    "train/budget.py": _TRAIN,
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
    """(function, line, text before, text after, maker of the tree) of every change, in the order of the source."""
    tree = ast.parse(source)
    found = []
    for function, path in _places(tree):
        node = _at(tree, path)
        for number, _ in enumerate(_changes(node)):
            changed = copy.deepcopy(node)
            list(_changes(changed))[number]()
            found.append(
                (function, node.lineno, _text(node), _text(changed), functools.partial(_tree, source, path, number))
            )
    return found


def _tree(source, path, number):
    tree = ast.parse(source)
    list(_changes(_at(tree, path)))[number]()
    return tree


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
        return compile(ast.fix_missing_locations(self._tree()), self.path, "exec")


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
        self.seconds, self.tests_of, self.at_import, self.failed = {}, {}, set(), set()
        self.watch()

    def watch(self):
        sys.settrace(self._trace)
        threading.settrace(self._trace)

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename == self._path:
            self._called.add(frame.f_code.co_firstlineno)

    def _take(self):
        """Names of the functions that were called since the last time."""
        lines, self._called = self._called, set()
        return {name for name, begin, end in self._functions if any(begin <= line <= end for line in lines)}

    def pytest_collection_finish(self, session):
        sys.settrace(None)
        threading.settrace(None)
        self.at_import = self._take()  # their results may be in constants

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)
        # A fixture of a module is made for the first of its tests and used by all of them.
        where = report.nodeid.partition("::")[0] if report.when != "call" else report.nodeid
        for name in self._take():
            self.tests_of.setdefault(name, set()).add(where)

    def found(self):
        """{function: {test: seconds}}, the quickest first; "" has all tests."""
        every = {
            test: seconds
            for test, seconds in sorted(self.seconds.items(), key=lambda one: one[1])
            if test not in self.failed and seconds <= TEST_S
        }
        return {"": every} | {
            name: {test: seconds for test, seconds in every.items() if {test, test.partition("::")[0]} & tests}
            for name, tests in self.tests_of.items()
        }


def _functions(source):
    """(name, first line, last line) of functions and methods, not of functions in them."""

    def walk(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                begin = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                yield prefix + node.name, begin, node.end_lineno

    return list(walk(ast.parse(source).body, ""))


def defined(module, function):
    """The function or method around a changed place, "" for a place in the body of a class."""
    parts = function.split(".")
    names = {name for name, *_ in _functions((SOURCE / module).read_text())}
    return next((".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in names), "")


def replace_code(module, name, tree):
    """Give a function or method of an imported module the code of the changed tree."""
    codes = [compile(ast.fix_missing_locations(tree()), str(SOURCE / module), "exec")]
    target = sys.modules[_dotted(module)]
    for part in name.split("."):
        codes = [const for code in codes for const in code.co_consts
                 if isinstance(const, types.CodeType) and const.co_name == part]  # fmt: skip
        target = vars(target)[part]
    while not isinstance(target, types.FunctionType):
        if isinstance(target, property):  # with its setter, if there is one, of the same name
            target = target.fget
        elif isinstance(target, functools.cached_property):
            target = target.func
        else:
            target = target.__wrapped__
    while hasattr(target, "__wrapped__"):
        target = target.__wrapped__
    (target.__code__,) = codes


def _dotted(module):
    return "joulelab." + module.removesuffix(".py").replace("/", ".")


class _InPlace:
    """A pytest plugin that runs the tests of each mutant in a fork of the process that collected them."""

    def __init__(self, module, tried, result):
        self._module, self._tried, self._result = module, tried, result
        self._calls = _Calls(module)

    def pytest_collection_finish(self, session):
        self._calls.pytest_collection_finish(session)

    def pytest_runtestloop(self, session):
        loaded = sys.modules.get(_dotted(self._module))
        if loaded is None or Path(loaded.__file__) != SOURCE / self._module:
            print(f"{self._module}: its tests import {loaded}, not the file of this checkout", file=sys.stderr)
            return True
        watched = in_child(lambda: self._watch(session), LONGEST_S)
        if not isinstance(watched, list):
            return True
        tests, failed = watched
        if failed:
            print(f"{self._module}: fail without a mutant, left out: {' '.join(failed)}", file=sys.stderr)
        self._result({"tests": tests})
        for number, function, _, _, _, tree in self._tried:
            name = defined(self._module, function)
            if name:
                chosen = within(tests.get(name, {}))
                found = noticed(chosen, functools.partial(self._noticed, session, name, tree, list(chosen)))
                if found or name not in self._calls.at_import:
                    self._result({"number": number, "noticed": found})
        return True

    def _watch(self, session):
        session.config.pluginmanager.register(self._calls)
        self._calls.watch()
        for test, following in zip(session.items, [*session.items[1:], None], strict=True):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        return [self._calls.found(), sorted(self._calls.failed)]

    def _noticed(self, session, name, tree, tests):
        try:
            replace_code(self._module, name, tree)
        except (AttributeError, KeyError, ValueError) as reason:
            return f"not replaced: {reason!r}"
        items = {item.nodeid: item for item in session.items}
        chosen = [items[test] for test in tests]
        for test, following in zip(chosen, [*chosen[1:], None], strict=True):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.testsfailed:
                return test.nodeid
        return ""


def within(tests):
    """The first of the tests that take at most MUTANT_S together."""
    chosen, total_s = {}, 0.0
    for test, seconds in tests.items():
        total_s += seconds
        if total_s > MUTANT_S:
            break
        chosen[test] = seconds
    return chosen


def noticed(tests, work):
    """The test that fails with a mutant, or how else it is noticed; "" if it is not."""
    found = in_child(work, 30 + 5 * sum(tests.values())) if tests else ""
    return found if isinstance(found, str) else found["ended"]


class _Selected:
    """A pytest plugin that runs only these tests, in this order, and keeps the first that fails."""

    def __init__(self, tests):
        self._place = {test: number for number, test in enumerate(tests)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items):
        chosen = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(chosen, key=lambda item: self._place[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid


def in_child(work, limit_s):
    """What `work` returns in a forked process, {"ended": how} if that ends otherwise or takes longer than the limit."""
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
    if left_s <= 0:
        return {"ended": "time limit"}
    return json.loads(text) if text else {"ended": "the tests' process ended"}


def _pytest(files, *plugins):
    import pytest

    folder = tempfile.mkdtemp(prefix="joulelab-mutate-")
    try:
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", f"--basetemp={folder}/tests", *files]
        return int(pytest.main(words, plugins=list(plugins)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_place(module, tried, result):
    """Try the mutants whose code can be replaced; `result` gets the tests of the functions, then the mutants."""
    files = [str(ROOT / "tests" / name) for name in (_BY_HAND, *CORE[module])]
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        _pytest(files, _InPlace(module, tried, result))


def reimported(module, tree, tests):
    """The test that fails with the changed tree of the module, "" if none does."""

    def work():
        sys.meta_path.insert(0, _Finder(_dotted(module), SOURCE / module, tree))
        selected = _Selected(tests)
        _pytest(["-x", *sorted({test.partition("::")[0] for test in tests})], selected)
        return selected.failed

    return noticed(tests, work)


def sample(module, number, seed):
    """The mutants of a module that are tried: (number, function, line, before, after, tree), in a seeded order."""
    every = mutants((SOURCE / module).read_text())
    chosen = sorted(random.Random(f"mutate-{module}{seed}").sample(range(len(every)), min(number, len(every))))
    return [(place, *every[place]) for place in chosen]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="MODULE", help="Part of a module's path.")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="Mutants per module; 0 tries all.")
    parser.add_argument("--seed", default="", help="Another sample.")
    parser.add_argument("--number", type=int, action="append", help="Only this mutant of the module.")
    parser.add_argument(
        "--tests", action="append", help="Only these files below tests/ instead of all of the module's."
    )
    parser.add_argument("--survivors", action="store_true", help="Only the survivors in the file, again.")
    parser.add_argument("--state", type=Path, default=Path(".mutate.json"), help="File with finished mutants.")
    options = parser.parse_args()
    options.state = options.state.resolve()
    os.chdir(ROOT)
    state = json.loads(options.state.read_text()) if options.state.exists() else {}
    equivalent = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    import pytest  # noqa: F401 (before the forks)

    for module in [module for module in CORE if not options.only or any(part in module for part in options.only)]:
        CORE[module] = options.tests or CORE[module]
        known = state.setdefault(module, {})
        keys = keys_of(module)
        tried = sample(module, options.sample or 10**6, options.seed)
        if options.number or options.survivors:
            alive = [one["number"] for key, one in known.items() if not one["killed"] and key not in equivalent]
            tried = [one for one in sample(module, 10**6, "") if one[0] in (options.number or alive)]
        else:
            tried = [one for one in tried if keys[one[0]] not in known]
        for number, line, noticed_by in try_all(module, tried):
            known[keys[number]] = {"number": number, "line": line, "killed": bool(noticed_by), "by": noticed_by}
            options.state.write_text(json.dumps(state, indent=1))
            if not noticed_by and keys[number] not in equivalent:
                print(f"survived: --number {number}, line {line}, {keys[number]}", file=sys.stderr, flush=True)
    print(table(state, equivalent))
    return 0


def keys_of(module):
    """A text for each mutant of a module that stays the same when lines move; equal texts of a function are counted."""
    keys, seen = [], {}
    for function, _, before, after, _ in mutants((SOURCE / module).read_text()):
        key = f"{module} {function}: {before} -> {after}"
        seen[key] = seen.get(key, 0) + 1
        keys.append(key if seen[key] == 1 else f"{key} (place {seen[key]})")
    return keys


def try_all(module, tried):
    """(number, line, what noticed it) of each mutant."""
    if not tried:
        return
    lines = {one[0]: one[2] for one in tried}
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with contextlib.suppress(BaseException), os.fdopen(write, "w") as pipe:
            in_place(module, tried, lambda one: print(json.dumps(one), file=pipe, flush=True))
        os._exit(0)
    os.close(write)
    tests, left = None, {one[0]: one for one in tried}
    with os.fdopen(read) as pipe:
        for text in pipe:
            one = json.loads(text)
            if "tests" in one:
                tests = one["tests"]
            elif not one["noticed"].startswith("not replaced"):
                del left[one["number"]]
                yield one["number"], lines[one["number"]], one["noticed"]
    os.waitpid(pid, 0)
    if tests is None:
        print(f"{module}: its tests could not be collected", file=sys.stderr)
        return
    for number, function, line, _, _, tree in left.values():
        name = defined(module, function)
        yield number, line, reimported(module, tree, within(tests.get(name, {}) if name else tests[""]))


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
