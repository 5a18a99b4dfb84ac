"""`make mutate`: change one operator, comparison or number of a core module, and see whether its tests notice.

A child process per mutant: it is forked after pytest and the frameworks were imported, compiles the module with the
change, and runs the tests of that module until the first failure. The sample is seeded, so a survivor can be repeated
alone: `--only MODULE --number N`. Finished mutants are in the file of `--state`, and a second call does the others.

Survivors that cannot change behavior are in equivalent.json, each with the reason.
"""

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "joulelab"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
SAMPLE = 25
LONGEST_S = 600

_BY_HAND = "mutation/test_survivors.py"
_METER = ("meter/test_integrate.py", "meter/test_any_waveform.py", "meter/test_recorded_h200.py")
_LOGS = tuple(
    f"meter/importers/test_{name}.py"
    for name in ("log_formats", "log_times", "log_idle_and_inference", "logs_as_traces")
)
# Module: its tests, the quickest first. Only tests that call it in their own process can notice a mutant.
CORE = {
    "stats/intervals.py": ("stats/test_intervals.py", "stats/test_closed_forms.py", "stats/test_paired_items.py"),
    "stats/break_even.py": ("stats/test_break_even.py", "stats/test_closed_forms.py"),
    "meter/curve.py": _METER,
    "meter/integrate.py": _METER,
    "meter/series.py": _METER,
    "runs/artifacts.py": ("runs/test_artifacts.py", "runs/test_input_bills.py", "report/tables/test_energy_bills.py"),
    "runs/assemble.py": ("runs/test_assemble.py", "cluster/test_several_hosts.py"),
    "runs/validity.py": ("runs/test_validity.py",),
    "report/compare/differences.py": (
        "report/compare/test_comparing_runs.py",
        "report/compare/test_break_even_of_runs.py",
    ),
    "distill/losses.py": ("distill/test_losses.py", "distill/test_relation_losses.py"),
    "distill/chunked.py": ("distill/test_chunked.py", "distill/test_ruled_out_words.py"),
    "train/trainer.py": ("train/test_trainer.py", "train/test_precision.py"),
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


def tests_pass(module, tree, limit_s):
    """True if the tests of the module pass with this tree (None: as it is); a hang counts as noticed."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException):
            os._exit(_run_tests(module, tree))
        os._exit(99)
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _run_tests(module, tree):
    import pytest

    if tree is not None:
        name = "joulelab." + module.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, _Finder(name, SOURCE / module, tree))
    devnull = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(devnull, number)
    sys.stdout = sys.stderr = io.StringIO()
    files = [str(ROOT / "tests" / name) for name in (_BY_HAND, *CORE[module])]
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *files]))


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
        if module.startswith(("distill", "train")):
            import torch  # noqa: F401
        began_s = time.monotonic()
        tried = sample(module, options.sample or 10**6)
        if options.number is not None:
            every = mutants((SOURCE / module).read_text())
            tried = [(options.number, *every[options.number])]
        if not tests_pass(module, None, LONGEST_S):
            print(f"{module}: its tests fail without a mutant: {' '.join(CORE[module])}", file=sys.stderr)
            return 2
        limit_s = 20 + 5 * (time.monotonic() - began_s)
        for number, function, line, before, after, tree in tried:
            key = f"{module} {function}: {before} -> {after}"
            known = state.setdefault(module, {})
            if key not in known or options.number is not None:
                known[key] = {"number": number, "line": line, "killed": not tests_pass(module, tree, limit_s)}
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
