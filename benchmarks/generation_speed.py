"""Speed and energy of text generation: our engine, transformers' `generate`, and vLLM, at the same work in one call.

All engines sample with the same settings from the same prompts and generate `--new-tokens` per answer; only tokens of
answers count. Every round of requests of every case has new prompts, so that no engine finds them in a cache. The first
round is a warm-up and counts as setup, with loading, compiling and capturing; the next ones are measured for
`--seconds`, at least one. Weights are random with `--shape`: speed does not depend on their values, but a trained model
(`--model`) ends some answers early.

A case is PROMPTSxANSWERS:PROMPT_TOKENS/NEW_TOKENS. Our engine and vLLM choose how many answers they generate at once;
`generate` takes batches of `--batch-size` prompts, or fewer where memory ends. It takes 60 to 100 ms per step on a slow
host, so `--generate` chooses its cases.

    python benchmarks/generation_speed.py --shape 135M --cases 1536x2:24/96
    python benchmarks/generation_speed.py --shape 1.7B --cases 1x1:24/96,128x1:256/256 --generate none
    python benchmarks/generation_speed.py --shape 135M --vllm-python /opt/vllm/bin/python
    python benchmarks/generation_speed.py --shape tiny --cases 4x2:24/8 --seconds 0.1      # on a CPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from pacing import forget_peak, free, interrupt_on_sigterm, peak_gib, wait

from joulelab.data.labeled_text import load
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.generation.static_decoder import ENOUGH_ROWS, rows_that_fit
from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.series import Trace, load_trace
from joulelab.meter.session import Meter
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer, save_hf

ENGINES = ("builtin", "captured", "growing", "generate", "vllm")
"""`builtin` with a compiled step, as in long work; `captured` without compiling, as in short work; `growing`: with the
cache for models without full attention."""
# SmolLM2: layers, width, heads, key-value heads, width of the feed-forward layer
SHAPES = {"tiny": (2, 64, 4, 2, 128), "135M": (30, 576, 9, 3, 1536), "1.7B": (24, 2048, 32, 32, 8192)}
VOCABULARY = 49_152
TRIED = ",".join(f"{rows}x1:{tokens}" for tokens in ("24/96", "256/256", "1024/128") for rows in (1, 8, 128, 1024))
MOST_ROUNDS = 40
LONG_RUN = 1000
"""Rounds of the work that is imitated: what pays in a long run is compiled, as vLLM does in any run."""
_VLLM_GRACE_S = 40.0
Window = tuple[int, int]


@contextmanager
def noted_in(windows: list[Window]) -> Iterator[None]:
    begin_ns = time.monotonic_ns()
    yield
    windows.append((begin_ns, time.monotonic_ns()))


@dataclass(frozen=True)
class Case:
    prompts: int
    answers: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Case:
        rows, _, tokens = text.partition(":")
        return cls(*(int(part) for part in (*rows.split("x"), *tokens.split("/"))))

    def __str__(self) -> str:
        return f"{self.prompts}x{self.answers}:{self.prompt_tokens}/{self.new_tokens}"


@dataclass
class Result:
    engine: str
    case: Case
    rows: int
    tokens: int
    window_ns: Window
    setup_ns: list[Window] = field(default_factory=list)
    """Before the window, or inside it."""
    peak_gib: float | None = None
    energy_j: float | None = None
    setup_j: float | None = None

    @property
    def setup_s(self) -> float:
        return sum(end - begin for begin, end in self.setup_ns) / 1e9

    @property
    def duration_s(self) -> float:
        return (self.window_ns[1] - self.window_ns[0] - sum(end - begin for begin, end in self._inside)) / 1e9

    @property
    def _inside(self) -> list[Window]:
        return [window for window in self.setup_ns if window[0] >= self.window_ns[0]]

    def read_energy(self, trace: Trace) -> None:
        self.setup_j = _energy_j(trace, self.setup_ns)
        whole, inside = _energy_j(trace, [self.window_ns]), _energy_j(trace, self._inside)
        self.energy_j = None if whole is None or inside is None else whole - inside

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def step_ms(self) -> float:
        return 1e3 * self.duration_s * self.rows / self.tokens

    @property
    def token_mj(self) -> float | None:
        return None if self.energy_j is None else 1e3 * self.energy_j / self.tokens

    def text(self, others: list[Result]) -> str:
        energy = "missing" if self.token_mj is None else f"{self.token_mj:.2f}"
        watts = "" if self.energy_j is None else f"{self.energy_j / self.duration_s:.0f}"
        setup = f"{self.setup_s:.1f} s" + ("" if self.setup_j is None else f" {self.setup_j:.0f} J")
        ratios = [_ratio(self, other) for name in ("vllm", "generate") for other in others if other.engine == name]
        parts = [f"{self.engine:9}", f"{self.tokens_per_s:>9,.0f}", f"{self.step_ms:>8.2f}", f"{energy:>9}"]
        return "  ".join([*parts, f"{watts:>5}", f"{setup:>15}", *ratios])

    def data(self) -> dict[str, Any]:
        values = {"tokens_per_s": self.tokens_per_s, "step_ms": self.step_ms, "token_mj": self.token_mj}
        return {**vars(self), "case": str(self.case), **values, "setup_s": self.setup_s}


HEADER = "  ".join(
    [
        f"{'':9}",
        f"{'tokens/s':>9}",
        f"{'ms/step':>8}",
        f"{'mJ/token':>9}",
        f"{'W':>5}",
        f"{'setup':>15}",
        "ratios (speed, mJ)",
    ]
)


def _energy_j(trace: Trace, windows: list[Window]) -> float | None:
    parts = [component_energy(trace, "gpu", [window]).energy_j for window in windows]
    return None if None in parts else sum(part or 0.0 for part in parts)


def _ratio(one: Result, other: Result) -> str:
    if one is other:
        return ""
    energy = "" if not (one.token_mj and other.token_mj) else f" {one.token_mj / other.token_mj:.2f}"
    return f"/{other.engine} {one.tokens_per_s / other.tokens_per_s:.2f}{energy}"


def word_tokenizer() -> Any:
    """Numbers as words, so that random weights need no downloaded tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"</s>": 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="</s>")


class Bench:
    def __init__(self, options: argparse.Namespace, cases: list[Case], device: torch.device) -> None:
        self.options, self.device, self.begin_s = options, device, time.monotonic()
        rounds = [case.prompts * self._rounds(case) for case in cases]
        self.first_prompts = dict(zip(cases, accumulate(rounds, initial=0), strict=False))
        self.tokenizer: Any = load_tokenizer(options.model) if options.shape is None else word_tokenizer()
        self.model: Any = self._load().eval().requires_grad_(False)
        if device.type == "cuda":
            self.model = self.model.to(torch.bfloat16)
        if options.shape is None:
            self.ids = [token for text in load("sample:reviews").texts for token in self.tokenizer(text)["input_ids"]]
        else:
            self.ids = torch.randint(1, VOCABULARY, (200_000,), generator=torch.Generator().manual_seed(0)).tolist()

    def _load(self) -> Any:
        if self.options.shape is None:
            return load_causal_lm(self.options.model).to(self.device)
        from transformers import LlamaConfig, LlamaForCausalLM

        layers, width, heads, heads_kv, inner = SHAPES[self.options.shape]
        torch.manual_seed(0)
        with self.device:
            return LlamaForCausalLM(
                LlamaConfig(
                    num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
                    num_key_value_heads=heads_kv, intermediate_size=inner, vocab_size=VOCABULARY,
                    tie_word_embeddings=True, max_position_embeddings=4096,
                    bos_token_id=0, eos_token_id=0, pad_token_id=0,
                )
            )  # fmt: skip

    def prompts(self, case: Case, number: int) -> list[list[int]]:
        """Token ids of round `number`; no prompt occurs in two rounds or two cases, nor does its beginning."""
        longest = max(case.prompt_tokens for case in self.first_prompts)
        first = self.first_prompts[case] + number * case.prompts
        starts = [(first + place) * 7919 % (len(self.ids) - longest) for place in range(case.prompts)]
        return [self.ids[start : start + case.prompt_tokens] for start in starts]

    @staticmethod
    def _rounds(case: Case) -> int:
        return min(MOST_ROUNDS, 1 + max(1, 4096 // case.prompts))

    def rows(self, engine: str, case: Case) -> int:
        if engine == "generate":
            return min(int(self.options.batch_size), case.prompts) * case.answers
        return min(ENOUGH_ROWS, case.prompts * case.answers)

    def measure(self, engine: str, case: Case) -> Result:
        forget_peak()
        setup: list[Window] = []
        generate = self._transformers(case) if engine == "generate" else self._ours(engine, case, setup)
        rounds = [self.prompts(case, number) for number in range(self._rounds(case))]
        if engine != "generate":  # texts, as users have them; vLLM gets token ids
            rounds = [[self.tokenizer.decode(ids) for ids in prompts] for prompts in rounds]
        begin_ns = time.monotonic_ns()
        if engine != "generate":  # it compiles and captures nothing
            generate(rounds[0])
        wait(self.device)
        ready_ns, tokens = time.monotonic_ns(), 0
        setup[:] = [(begin_ns, ready_ns)]
        for prompts in rounds[1:]:
            tokens += generate(prompts)
            if time.monotonic_ns() - ready_ns > 1e9 * self.options.seconds:
                break
        wait(self.device)
        return Result(engine, case, self.rows(engine, case), tokens, (ready_ns, time.monotonic_ns()), setup, peak_gib())

    def _settings(self, case: Case) -> GenerationSettings:
        return GenerationSettings(
            max_new_tokens=case.new_tokens, do_sample=True, temperature=0.8, top_p=0.95, n=case.answers
        )

    def _ours(self, engine: str, case: Case, setup: list[Window]) -> Any:
        generator = TransformersGenerator(
            self.model, self.tokenizer, self._settings(case), identity="",
            cache="growing" if engine == "growing" else "fixed", compile_step=engine == "builtin", passes=LONG_RUN,
            setup=lambda activity: noted_in(setup),
        )  # fmt: skip

        def generate(texts: list[str]) -> int:
            return sum(answer.tokens for answers in generator.generate(texts) for answer in answers)

        return generate

    def _transformers(self, case: Case) -> Any:
        """Counts tokens up to the end of each answer; padding after it is not counted."""
        end, batch_size = self.tokenizer.eos_token_id, int(self.options.batch_size)
        if self.device.type == "cuda":
            fit = rows_that_fit(self.model, case.prompt_tokens + case.new_tokens) // case.answers
            batch_size = max(1, min(batch_size, fit))

        def generate(prompts: list[list[int]]) -> int:
            tokens = 0
            for start in range(0, len(prompts), batch_size):
                ids = torch.tensor(prompts[start : start + batch_size], device=self.device)
                found = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=0.8, top_p=0.95, top_k=0,
                    num_return_sequences=case.answers, max_new_tokens=case.new_tokens,
                    eos_token_id=end, pad_token_id=end,
                )[:, ids.shape[1] :]  # fmt: skip
                is_end = (found == end).int()
                tokens += int((is_end.cumsum(-1) - is_end == 0).sum())
            return tokens

        return generate

    def vllm(self, cases: list[Case], folder: Path, results: list[Result]) -> None:
        """All cases in one process of vLLM; its loading is the setup of the first."""
        save_hf(self.model, self.tokenizer, folder / "model")
        work = {
            "model": str(folder / "model"), "dtype": "bfloat16", "memory": 0.6,
            "room": max(case.prompt_tokens + case.new_tokens for case in cases) + 16,
            "cases": [
                {
                    "name": str(case), "answers": case.answers, "new_tokens": case.new_tokens,
                    "seconds": self.options.seconds,
                    "rounds": [self.prompts(case, number) for number in range(self._rounds(case))],
                }
                for case in cases
            ],
        }  # fmt: skip
        (folder / "work.json").write_text(json.dumps(work))
        self.model.to("cpu")  # leaves the GPU's memory to vLLM
        free()
        command = [self.options.vllm_python, str(Path(__file__).with_name("vllm_worker.py")), str(folder / "work.json")]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        if self.options.vllm_path:
            environment["PYTHONPATH"] = self.options.vllm_path
        known = {str(case): case for case in cases}
        setup: list[Window] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment) as worker:
            # An engine that hangs would keep the machine: it ends with the time of this call.
            left_s = self.options.limit_s - (time.monotonic() - self.begin_s)
            limit = threading.Timer(max(1.0, left_s + _VLLM_GRACE_S), worker.kill)
            limit.daemon = True
            limit.start()
            for line in ended_with_us(worker):
                if not line.startswith("RESULT "):
                    continue
                found = json.loads(line.removeprefix("RESULT "))
                if found["event"] == "loaded":
                    setup.append((found["begin_ns"], found["end_ns"]))
                    print(f"vLLM {found['version']} loaded", flush=True)
                    continue
                case = known[found["case"]]
                windows = [*setup, tuple(found["warm_up_ns"])]
                rows = case.prompts * case.answers
                results.append(Result("vllm", case, rows, found["tokens"], tuple(found["window_ns"]), windows))
                print(f"{case}  {results[-1].text([])}", flush=True)
                setup = []
                if time.monotonic() - self.begin_s > self.options.limit_s:
                    print(f"vLLM stopped, {self.options.limit_s:.0f} s have passed", flush=True)
                    worker.kill()
                    break
        limit.cancel()
        if worker.returncode:
            print(f"vLLM ended with exit code {worker.returncode}", flush=True)


def ended_with_us(worker: subprocess.Popen[str]) -> Iterator[str]:
    """Its output; an interrupt of this call ends it too."""
    assert worker.stdout is not None
    try:
        yield from worker.stdout
    except BaseException:
        worker.kill()
        raise


def measure_all(
    bench: Bench, cases: list[Case], engines: list[str], has_vllm: bool, folder: Path, results: list[Result]
) -> None:
    options = bench.options
    for case in cases:
        for engine in engines:
            is_chosen = options.generate == "all" or str(case) in options.generate.split(",")
            if engine == "vllm" or (engine == "generate" and not is_chosen):
                continue
            # The other half of the time is vLLM's.
            if time.monotonic() - bench.begin_s > options.limit_s / (2 if "vllm" in engines and has_vllm else 1):
                print(f"skipped, {options.limit_s:.0f} s have passed: {engine} {case}", flush=True)
                continue
            results.append(bench.measure(engine, case))
            print(f"{case}  {results[-1].text([])}", flush=True)
            free()
    if "vllm" in engines and has_vllm:
        chosen = [case for case in cases if options.vllm == "all" or str(case) in options.vllm.split(",")]
        bench.vllm(chosen, folder, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sample:smollm2", help="trained model, without --shape")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape of SmolLM2")
    parser.add_argument("--cases", default=TRIED, help=f"comma-separated; default {TRIED}")
    parser.add_argument("--batch-size", type=int, default=1024, help="prompts at a time of generate")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time per engine and case, at least")
    parser.add_argument("--limit-s", type=float, default=540.0, help="skip what would begin later than this")
    parser.add_argument("--engines", default="builtin,generate,vllm", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--generate", default="all", help="cases of generate: all, none, or comma-separated")
    parser.add_argument("--vllm", default="all", help="cases of vLLM: all, or comma-separated")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python of an environment with vLLM")
    parser.add_argument("--vllm-path", help="PYTHONPATH of that Python")
    options = parser.parse_args()
    interrupt_on_sigterm()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [Case.parse(text) for text in options.cases.split(",")]
    bench = Bench(options, cases, device)
    engines = [engine for engine in ENGINES if engine in options.engines.split(",")]
    has_vllm = options.vllm_path or options.vllm_python != sys.executable or importlib.util.find_spec("vllm")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        meter = Meter(folder / "trace.jsonl", folder / "events.jsonl", EnergyConfig())
        meter.start()
        time.sleep(0.5)
        # loads libraries
        bench.model.generate(torch.ones(1, 2, dtype=torch.long, device=device), max_new_tokens=2)
        try:
            measure_all(bench, cases, engines, bool(has_vllm), folder, results)
        except KeyboardInterrupt:  # report the energy of what was measured so far
            print("interrupted", flush=True)
        meter.stop()
        trace = load_trace(folder / "trace.jsonl")
        for result in results:
            result.read_energy(trace)
    for case in cases:
        print(f"\n{options.shape or options.model}, {case}\n{HEADER}")
        own = [result for result in results if result.case == case]
        for result in own:
            print(result.text(own), flush=True)
    print(
        json.dumps(
            {"benchmark": "generation_speed", "shape": options.shape, "results": [one.data() for one in results]}
        )
    )


if __name__ == "__main__":
    main()
