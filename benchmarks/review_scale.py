"""Memory and speed of `joulelab prepare reviews` on a look-alike of Amazon Polarity, and of reading its tokens.

The look-alike has the published form: `train.csv` and `test.csv` (a tenth as many rows) without column names, with a
label of 1 or 2, a title and a text of about 80 words. Words have frequencies as in English (Zipf's law); every row has
two words that no other row has.

    prepare   the command in a child process: rows per second, and the highest resident memory of the process
    read      the tokens that it wrote, as `joulelab run` turns them into a token store, also in a child process
    texts     the same from the CSV files, where texts are tokenized: what reading the tokens saves

Files and runs are written to a temporary folder, about 2.5 kB per row in all, and removed.

    python benchmarks/review_scale.py
    python benchmarks/review_scale.py --rows 4000000 --folder /scratch
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT_MIB = 2_000
PARTS = ("prepare", "read", "texts")
READ = """
import sys
from pathlib import Path
from joulelab.data.labeled_rows import WantedTokens
from joulelab.data.labeled_text import load_splits
from joulelab.data.tokenize import TruncatingEncoder
from joulelab.data.tokenized_text import write
from joulelab.distill.classify.config import TextData
from joulelab.zoo.pretrained import load_tokenizer
source, out, name, length = sys.argv[1:]
tokenizer = load_tokenizer(name)
encode = TruncatingEncoder(tokenizer, int(length))
splits = load_splits(TextData(source=source, max_tokens=int(length)), wanted=WantedTokens(encode.sha256, int(length)))
for split in ("train", "validation", "test"):
    write(Path(out) / split, getattr(splits, split), encode, len(tokenizer), tokenizer.pad_token_id)
"""


@dataclass(frozen=True)
class Measured:
    what: str
    rows: int
    wall_s: float
    peak_mib: float

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.wall_s


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="reviews-") as place:
        folder = Path(place)
        rows = write_look_alike(folder / "amazon", options.rows)
        prepared = folder / "tokens"
        commands = {
            "prepare": [
                sys.executable, "-m", "joulelab", "prepare", "reviews", str(folder / "amazon"),
                "--tokenizer", options.tokenizer, "--max-length", str(options.max_length),
                "--save-format", options.save_format, "--out-dir", str(prepared), "--runs-dir", str(folder / "runs"),
            ]
        }  # fmt: skip
        for what, source in (("read", prepared), ("texts", folder / "amazon")):
            program = [sys.executable, "-c", READ, str(source), str(folder / what)]
            commands[what] = [*program, options.tokenizer, str(options.max_length)]
        found = [measured(what, rows, command) for what, command in commands.items() if what in options.parts]
        report(found, options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="training rows; Amazon Polarity has 3,600,000")
    parser.add_argument("--tokenizer", default="sample:minilm")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--save-format", default="hf", choices=("hf", "parquet", "jsonl", "pt"))
    parser.add_argument(
        "--parts", nargs="+", default=PARTS, choices=PARTS, help="which to run; `read` needs what `prepare` writes"
    )
    parser.add_argument("--folder", help="where the temporary files are written")
    options = parser.parse_args()
    if "read" in options.parts and "prepare" not in options.parts:
        parser.error("the part read needs prepare")
    if options.save_format == "pt":  # which `joulelab run` does not read
        options.parts = [part for part in options.parts if part != "read"]
    return options


def write_look_alike(folder: Path, rows: int) -> int:
    """The files as published; returns the number of rows of both."""
    folder.mkdir()
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choices(letters, weights=range(26, 0, -1), k=draw.randint(1, 9))) for _ in range(50_000)]
    weights = [1 / (place + 3) for place in range(len(words))]
    pool = draw.choices(words, weights, k=1_000_000)  # drawn once: a draw per word would take longer than the benchmark
    counts = {"train": rows, "test": max(1, rows // 10)}
    for name, count in counts.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8") as file:
            for number in range(count):
                start, length = draw.randrange(len(pool) - 300), min(250, int(draw.lognormvariate(4.2, 0.6)) + 5)
                text = " ".join(pool[start : start + length])
                title = " ".join(pool[start + 260 : start + 264])
                file.write(f'"{1 + number % 2}","{title} {name}{number}","{text}, new{number} ""said"" so."\n')
    return sum(counts.values())


def measured(what: str, rows: int, command: list[str]) -> Measured:
    started_s = time.perf_counter()
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(program.pid, 0)  # the peak of this child alone
    if status:
        raise SystemExit(f"{what} failed with status {status}")
    return Measured(what, rows, time.perf_counter() - started_s, used.ru_maxrss / 1024)


def report(found: list[Measured], options: argparse.Namespace) -> None:
    print(f"{'':<10}{'rows':>12}{'seconds':>10}{'rows/s':>10}{'peak MiB':>10}")
    for one in found:
        print(f"{one.what:<10}{one.rows:>12,}{one.wall_s:>10.1f}{one.rows_per_s:>10,.0f}{one.peak_mib:>10,.0f}")
    within = all(one.peak_mib < LIMIT_MIB for one in found)
    print(f"peak memory {'below' if within else 'above'} {LIMIT_MIB:,} MiB")
    rows = [{**asdict(one), "rows_per_s": one.rows_per_s} for one in found]
    print(json.dumps({"benchmark": "review_scale", "format": options.save_format, "results": rows, "within": within}))


if __name__ == "__main__":
    main()
