"""Print how large and how scattered our code is: the table that docs/decisions.md shows before and after a redesign.

    python scripts/code_metrics.py            # sizes, seconds
    python scripts/code_metrics.py --trace    # also the files entered by five commands, minutes on two cores

A file counts as entered when at least one of its function bodies ran. Module and class bodies are left out, because
importing a module runs them anyway; child processes such as the recorder are not traced.

Decisions are the branches of cyclomatic complexity: if, elif, for, while, except, case, conditional expressions, loops
and conditions of comprehensions, and each further operand of `and` and `or`. A line of code is a line that is neither
blank, nor only a comment, nor part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED, unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "joulelab"

ESTIMATE_ONLY = ["energy.gpus=none", "energy.estimate_cpu=true"]
# The smallest settings that still pass through every stage. `report` reads the run before it.
TRACED_COMMANDS = {
    "measure -- true": ["measure", "--gpus", "none", "--estimate-cpu", "--", "true"],
    "infer deit-t": [
        *["infer", "deit-t", "--device", "cpu", "--batch-size", "1", "--min-run-time", "0.1"],
        *ESTIMATE_ONLY,
    ],
    "run demo-kd": [
        *["run", "demo-kd", "data.train_size=32", "data.validation_size=16", "data.test_size=16", "data.max_tokens=16"],
        *["training.epochs=1", "teacher.training.epochs=1", *ESTIMATE_ONLY],
    ],
    "run kd-tiny": [
        *["run", "kd-tiny", "data.documents=40", "data.held_out=10", "data.max_tokens=32", "data.row_length=32"],
        *["student.size=nano", "budget.tokens=512", "quality.answer_items=2", *ESTIMATE_ONLY],
    ],
    "report": ["report", "last"],
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Body = ast.Module | ast.ClassDef | Function
Branch = ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.IfExp | ast.match_case


@dataclass(frozen=True)
class Signature:
    path: Path
    name: str
    line: int
    parameters: int


@dataclass(frozen=True)
class FileMetrics:
    path: Path
    lines: int
    import_lines: int
    comment_lines: int
    code_lines: int
    decisions: int
    signatures: list[Signature]


def measure_file(path: Path) -> FileMetrics:
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    lines = text.splitlines()
    blank = {number for number, line in enumerate(lines, 1) if not line.strip()}
    comments = _comment_lines(text)
    docstrings = {number for node in nodes if isinstance(node, Body) for number in _docstring_lines(node)}
    imports = {number for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for number in _lines_of(node)}
    return FileMetrics(
        path=path,
        lines=len(lines),
        import_lines=len(imports),
        comment_lines=len(comments),
        code_lines=len(lines) - len(blank | comments | docstrings),
        decisions=sum(_decisions(node) for node in nodes),
        signatures=[
            Signature(path, node.name, node.lineno, _parameter_count(node))
            for node in nodes
            if isinstance(node, Function) and not _is_kernel(node)
        ],
    )


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a Triton kernel, which gets pointers, strides and sizes one by one."""
    return any(ast.unparse(decorator).split("(")[0] == "triton.jit" for decorator in node.decorator_list)


def _comment_lines(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }


def _docstring_lines(body: Body) -> Iterator[int]:
    # A text below a settings field documents the field, so every bare text counts, not only the first of a body.
    for node in body.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from _lines_of(node)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _decisions(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, Branch))


def _parameter_count(function: Function) -> int:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(argument.arg not in {"self", "cls"} for argument in named)


def repeated_names(paths: list[Path]) -> dict[str, int]:
    """File names that appear more than once -> how often, outside recipe folders (those that contain a recipe.py)."""
    names = Counter(
        path.name
        for path in paths
        if path.name not in {"__init__.py", "__main__.py", "config.py"} and not (path.parent / "recipe.py").exists()
    )
    return {name: count for name, count in sorted(names.items()) if count > 1}


def typer_callbacks() -> set[tuple[Path, str]]:
    """File and name of every function that typer turns into a command; options are parameters there."""
    from joulelab.cli.main import app

    def callbacks(typer_app: Any) -> Iterator[Any]:
        infos = [*typer_app.registered_commands, typer_app.registered_callback]
        yield from (info.callback for info in infos if info is not None and info.callback is not None)
        for group in typer_app.registered_groups:
            yield from callbacks(group.typer_instance)

    originals = [unwrap(found) for found in callbacks(app)]
    return {(Path(found.__code__.co_filename).resolve(), found.__name__) for found in originals}


def size_rows(folder: Path, callbacks: set[tuple[Path, str]]) -> dict[str, str]:
    files = [measure_file(path) for path in sorted(folder.rglob("*.py"))]
    lines = sum(file.lines for file in files)
    code_lines = sum(file.code_lines for file in files)
    repeated = repeated_names([file.path for file in files])
    signatures = [
        signature
        for file in files
        for signature in file.signatures
        if (signature.path.resolve(), signature.name) not in callbacks
    ]
    largest = sorted(signatures, key=lambda signature: -signature.parameters)[:5]
    return {
        "files": f"{len(files):,}",
        "lines": f"{lines:,}",
        "median file, lines": f"{statistics.median(file.lines for file in files):g}",
        "import lines, share": f"{100 * sum(file.import_lines for file in files) / lines:.1f} %",
        "comment lines, share": f"{100 * sum(file.comment_lines for file in files) / lines:.1f} %",
        "decisions per 100 lines of code": f"{100 * sum(file.decisions for file in files) / code_lines:.1f}",
        "modules with a repeated file name": f"{sum(repeated.values())}"
        + (f" ({', '.join(f'{name} x{count}' for name, count in repeated.items())})" if repeated else ""),
        "functions with more than 12 parameters": str(sum(signature.parameters > 12 for signature in signatures)),
        "most parameters": ", ".join(
            f"{found.parameters} {found.path.relative_to(folder)}:{found.line} {found.name}" for found in largest
        ),
    }


def record_entered_files(arguments: list[str], target: Path) -> None:
    """Run one joulelab command in this process and write the files of our package that it entered as JSON."""
    from joulelab.cli.main import main

    entered: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)

    sys.argv = ["joulelab", *arguments]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        target.write_text(json.dumps(sorted({code.co_filename for code in entered if _is_our_function(code)})))


def _is_our_function(code: CodeType) -> bool:
    # Module and class bodies lack CO_OPTIMIZED; comprehensions have it but belong to the body around them.
    is_function = code.co_flags & CO_OPTIMIZED and (code.co_name == "<lambda>" or not code.co_name.startswith("<"))
    # Jinja compiles templates to functions that name the template, also a style sheet, as their file.
    path = Path(code.co_filename)
    return bool(is_function) and path.suffix == ".py" and path.is_relative_to(PACKAGE)


def entered_files(arguments: list[str], folder: Path) -> list[str]:
    """Our files that a command enters; it runs in `folder` in a separate process."""
    target = folder / "entered.json"
    target.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, __file__, "--record", target, "--", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "JOULELAB_RUNS": str(folder / "runs")},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"joulelab {' '.join(arguments)} exited with {done.returncode}:\n{done.stderr}")
    return [str(path) for path in json.loads(target.read_text())]


def print_rows(rows: dict[str, str]) -> None:
    for name, value in rows.items():
        print(f"| {name} | {value} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="Also run five commands and count the files they enter.")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record_entered_files(options.arguments, options.record)
        return
    print("| metric | value |\n| --- | --- |")
    print_rows(size_rows(PACKAGE, typer_callbacks()))
    if options.trace:
        with tempfile.TemporaryDirectory() as folder:
            for name, arguments in TRACED_COMMANDS.items():
                files = entered_files(arguments, Path(folder))
                print_rows({f"files entered by `{name}`": str(len(files))})


if __name__ == "__main__":
    main()
