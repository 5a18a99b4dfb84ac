"""Speed and energy of text generation: our engine, its variants, transformers' `generate`, and vLLM where installed.

All engines sample with the same settings from the same prompts and generate `--new-tokens` per answer; only tokens of
answers count. Setup (capturing, compiling, starting an engine) is printed separately: it is outside tokens/s and
mJ/token. Weights are random with `--shape`; speed does not depend on their values, but a trained model
(`--model`) ends some answers early.

A case is PROMPTSxANSWERS:PROMPT_TOKENS/NEW_TOKENS.

    python benchmarks/generation_speed.py --shape 135M --cases 1536x2:24/96
    python benchmarks/generation_speed.py --shape 1.7B --cases 1x1:24/96,128x1:256/256 --engines transformers,compiled
    python benchmarks/generation_speed.py --shape tiny --cases 4x2:24/8      # on a CPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pacing import forget_peak, free, peak_gib, wait

from joulelab.data.labeled_text import load
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.series import Trace, load_trace
from joulelab.meter.session import Meter
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer

ENGINES = ("transformers", "growing", "captured", "compiled", "vllm")
# SmolLM2: layers, width, heads, key-value heads, width of the feed-forward layer
SHAPES = {"tiny": (2, 64, 4, 2, 128), "135M": (30, 576, 9, 3, 1536), "1.7B": (24, 2048, 32, 32, 8192)}
VOCABULARY = 49_152
Window = tuple[int, int]


@dataclass
class Result:
    engine: str
    tokens: int
    window_ns: Window
    setup_ns: list[Window] = field(default_factory=list)
    peak_gib: float | None = None
    energy_j: float | None = None
    setup_j: float | None = None

    @property
    def setup_s(self) -> float:
        return sum(end - begin for begin, end in self.setup_ns) / 1e9

    @property
    def duration_s(self) -> float:
        inside = sum(end - begin for begin, end in self.setup_ns if begin >= self.window_ns[0])
        return (self.window_ns[1] - self.window_ns[0] - inside) / 1e9

    def read_energy(self, trace: Trace) -> None:
        whole = component_energy(trace, "gpu", [self.window_ns]).energy_j
        parts = [component_energy(trace, "gpu", [window]).energy_j for window in self.setup_ns]
        self.setup_j = None if None in parts else sum(part or 0.0 for part in parts)
        if whole is not None and self.setup_j is not None:
            is_inside = [begin >= self.window_ns[0] for begin, _ in self.setup_ns]
            self.energy_j = whole - sum(part or 0.0 for part, inside in zip(parts, is_inside, strict=True) if inside)

    def text(self, rows: int) -> str:
        parts = [f"{self.engine:13} {self.tokens / self.duration_s:>9,.0f} tokens/s"]
        parts.append(f"{1e3 * self.duration_s * rows / self.tokens:.2f} ms/step of {rows} rows")
        if self.energy_j is None or self.setup_j is None:
            parts.append("energy missing")
        else:
            parts.append(f"{1e3 * self.energy_j / self.tokens:.2f} mJ/token")
            parts.append(f"{self.energy_j / self.duration_s:.0f} W")
            parts.append(f"setup {self.setup_s:.1f} s {self.setup_j:.0f} J")
        parts += [f"peak {self.peak_gib:.1f} GiB"] if self.peak_gib is not None else []
        return ", ".join(parts)

    def data(self) -> dict[str, Any]:
        return {**vars(self), "tokens_per_s": self.tokens / self.duration_s, "setup_s": self.setup_s}


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


def word_tokenizer() -> Any:
    """Numbers as words, so that random weights need no downloaded tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"</s>": 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="</s>")


class Bench:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.tokenizer: Any = load_tokenizer(options.model) if options.shape is None else word_tokenizer()
        self.model: Any = self._load().eval().requires_grad_(False)
        if device.type == "cuda":
            self.model = self.model.to(torch.bfloat16)

    def begin(self, case: Case) -> None:
        self.case = case
        self.settings = GenerationSettings(
            max_new_tokens=case.new_tokens, do_sample=True, temperature=0.8, top_p=0.95, n=case.answers
        )
        self.prompts = self._prompts()
        self.at_once = min(self.options.batch_size, case.prompts)
        self.rows = self.at_once * case.answers

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

    def _prompts(self) -> list[str]:
        """Texts of `prompt_tokens` tokens, all different."""
        if self.options.shape is None:
            ids = [token for text in load("sample:reviews").texts for token in self.tokenizer(text)["input_ids"]]
        else:
            ids = torch.randint(1, VOCABULARY, (100_000,), generator=torch.Generator().manual_seed(0)).tolist()
        length, count = self.case.prompt_tokens, self.case.prompts
        starts = [(number * 7919) % (len(ids) - length) for number in range(count)]
        return [self.tokenizer.decode(ids[start : start + length]) for start in starts]

    def measure(self, engine: str) -> Result:
        forget_peak()
        setup: list[Window] = []
        if engine == "vllm":
            return self._vllm()
        begin_ns = time.monotonic_ns()
        tokens = 0
        for _ in range(self.options.repeats):
            tokens += self._transformers() if engine == "transformers" else self._ours(engine, setup)
        wait(self.device)
        return Result(engine, tokens, (begin_ns, time.monotonic_ns()), setup, peak_gib())

    def _ours(self, engine: str, setup: list[Window]) -> int:
        generator = TransformersGenerator(
            self.model, self.tokenizer, self.settings, identity="", batch_size=self.at_once,
            cache="growing" if engine == "growing" else "fixed", compile_step=engine == "compiled",
            note_setup=lambda activity, begin_ns, end_ns: setup.append((begin_ns, end_ns)),
        )  # fmt: skip
        return sum(answer.tokens for answers in generator.generate(self.prompts) for answer in answers)

    def _transformers(self) -> int:
        """Tokens up to the end of each answer; padding after it is not counted."""
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.eos_token
        tokens, at_once = 0, self.at_once
        for start in range(0, len(self.prompts), at_once):
            batch = self.tokenizer(self.prompts[start : start + at_once], return_tensors="pt", padding=True)
            found = self.model.generate(
                **batch.to(self.device), do_sample=True, temperature=0.8, top_p=0.95, top_k=0,
                num_return_sequences=self.case.answers, max_new_tokens=self.case.new_tokens,
                eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id,
            )[:, batch["input_ids"].shape[1] :]  # fmt: skip
            ended = (found == self.tokenizer.eos_token_id).int().cumsum(-1)
            tokens += int((ended - (found == self.tokenizer.eos_token_id).int() == 0).sum())
        return tokens

    def _vllm(self) -> Result:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

        begin_ns = time.monotonic_ns()
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            room = self.case.prompt_tokens + self.case.new_tokens + 64
            engine = LLM(folder, dtype="bfloat16", max_model_len=room, gpu_memory_utilization=0.6)
            settings = SamplingParams(
                temperature=0.8, top_p=0.95, max_tokens=self.case.new_tokens, n=self.case.answers, seed=0
            )
            engine.generate(self.prompts[:8], settings, use_tqdm=False)
        ready_ns = time.monotonic_ns()
        tokens = 0
        for _ in range(self.options.repeats):
            found = engine.generate(self.prompts, settings, use_tqdm=False)
            tokens += sum(len(answer.token_ids) for one in found for answer in one.outputs)
        return Result("vllm", tokens, (ready_ns, time.monotonic_ns()), [(begin_ns, ready_ns)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sample:smollm2", help="trained model, without --shape")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape of SmolLM2")
    parser.add_argument("--cases", default="1536x2:24/96", help="comma-separated")
    parser.add_argument("--batch-size", type=int, default=768, help="prompts at a time")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(options, device)
    engines = [engine for engine in ENGINES if engine in options.engines.split(",")]
    if importlib.util.find_spec("vllm") is None and "vllm" in engines:
        engines.remove("vllm")
    for text in options.cases.split(","):
        bench.begin(Case.parse(text))
        measure_case(bench, engines)


def measure_case(bench: Bench, engines: list[str]) -> None:
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        meter = Meter(place / "trace.jsonl", place / "events.jsonl", EnergyConfig())
        meter.start()
        time.sleep(0.5)
        # loads libraries
        bench.model.generate(torch.ones(1, 2, dtype=torch.long, device=bench.device), max_new_tokens=2)
        for engine in engines:
            results.append(bench.measure(engine))
            free()
        meter.stop()
        trace = load_trace(place / "trace.jsonl")
        for result in results:
            result.read_energy(trace)
    print(f"\n{bench.options.shape or bench.options.model}, {bench.case}")
    for result in results:
        print(result.text(bench.rows), flush=True)
    first, others = results[0], results[1:]
    ratios = {
        f"{one.engine}_over_{first.engine}": round(one.tokens / one.duration_s / (first.tokens / first.duration_s), 2)
        for one in others
    }
    data = [one.data() for one in results]
    print(json.dumps({"benchmark": "generation_speed", "case": str(bench.case), "ratios": ratios, "engines": data}))


if __name__ == "__main__":
    main()
