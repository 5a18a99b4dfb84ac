"""How fast does a teacher write answers, and at how many joules a token: with a cache that grows, or one of fixed size
whose step is captured as one CUDA graph; beside what transformers' own `generate` does with the same prompts?

The prompts are beginnings of film reviews, two answers each, sampled as the synthetic experiments do; `transformers`
draws other random numbers, so its answers differ, and it pads rows that are done. Greedy answers of the two caches are
compared first: on a GPU their kernels round differently, so a few may part ways.

    python benchmarks/generation_speed.py
    python benchmarks/generation_speed.py --prompts 8 --batch-size 4 --new-tokens 16      # to try it on a CPU
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pacing import TokenSpeed, forget_peak, free, peak_gib, wait

from joulelab.data.labeled_text import load
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.meter.config import EnergyConfig
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer

WAYS = ("transformers", "growing", "fixed")
PROMPT_TOKENS = 24
AGREED = 64
"""Prompts whose greedy answers are compared."""


def prompts_of(tokenizer: Any, count: int) -> list[str]:
    texts = load("sample:reviews").texts[:count]
    return [tokenizer.decode(tokenizer(text)["input_ids"][:PROMPT_TOKENS]) for text in texts]


class Writer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.tokenizer, self.options, self.device = load_tokenizer(options.model), options, device
        self.model: Any = load_causal_lm(options.model).eval().requires_grad_(False).to(device, dtype)
        self.prompts = prompts_of(self.tokenizer, options.prompts)

    def ours(self, cache: Any, prompts: Sequence[str], settings: GenerationSettings) -> list[tuple[int, ...]]:
        generator = TransformersGenerator(
            self.model, self.tokenizer, settings, identity="", batch_size=self.options.batch_size, cache=cache
        )
        return [answer.ids for answers in generator.generate(prompts) for answer in answers]

    def theirs(self, prompts: Sequence[str]) -> int:
        """Tokens up to the end of each answer; what it writes behind that is not counted."""
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        found = 0
        for start in range(0, len(prompts), self.options.batch_size):
            batch = self.tokenizer(prompts[start : start + self.options.batch_size], return_tensors="pt", padding=True)
            written = self.model.generate(
                **batch.to(self.device), do_sample=True, temperature=0.8, top_p=0.95, top_k=0, num_return_sequences=2,
                max_new_tokens=self.options.new_tokens, stop_strings=["\n"], tokenizer=self.tokenizer,
                pad_token_id=self.tokenizer.pad_token_id,  # the model's own may be another, and would be counted
            )[:, batch["input_ids"].shape[1] :]  # fmt: skip
            found += int((written != self.tokenizer.pad_token_id).sum())
        return found

    def measure(self, way: str) -> TokenSpeed:
        forget_peak()
        wait(self.device)
        begin_ns = time.monotonic_ns()
        if way == "transformers":
            tokens = self.theirs(self.prompts)
        else:
            tokens = sum(len(ids) for ids in self.ours(way, self.prompts, sampled(self.options.new_tokens)))
        wait(self.device)
        return TokenSpeed(way, "", tokens, (begin_ns, time.monotonic_ns()), peak_gib())


def sampled(new_tokens: int) -> GenerationSettings:
    return GenerationSettings(
        max_new_tokens=new_tokens, do_sample=True, temperature=0.8, top_p=0.95, n=2, stop=("\n",)
    )  # fmt: skip


def agreement(writer: Writer) -> float:
    """The share of greedy answers that both caches write word for word."""
    some, settings = writer.prompts[:AGREED], GenerationSettings(max_new_tokens=writer.options.new_tokens)
    pairs = list(zip(writer.ours("growing", some, settings), writer.ours("fixed", some, settings), strict=True))
    return sum(one == other for one, other in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sample:smollm2")
    parser.add_argument("--prompts", type=int, default=1536)
    parser.add_argument("--batch-size", type=int, default=768, help="prompts at a time, each with two answers")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--ways", default=",".join(WAYS), help="by commas")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    writer = Writer(options, device)
    agreed = agreement(writer)
    print(f"greedy answers alike: {100 * agreed:.1f} %", flush=True)
    found: list[TokenSpeed] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        meter = Meter(place / "trace.jsonl", place / "events.jsonl", EnergyConfig())
        meter.start()
        for way in (way for way in WAYS if way in options.ways.split(",")):
            found.append(writer.measure(way))
            print(found[-1], flush=True)
            free()
        meter.stop()
        found = [one.with_energy(load_trace(place / "trace.jsonl")) for one in found]
    print("\nwith their joules:", *found, sep="\n")
    slowest = found[0].tokens_per_s
    ratios = {f"{one.way}_over_{found[0].way}": one.tokens_per_s / slowest for one in found[1:]}
    print({name: round(value, 2) for name, value in ratios.items()})
    ways = [one.data() for one in found]
    print(json.dumps({"benchmark": "generation_speed", "alike": agreed, "ratios": ratios, "ways": ways}))


if __name__ == "__main__":
    main()
