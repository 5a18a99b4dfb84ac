"""Size and speed of logit cache codecs: writing, reading and training from a teacher's distributions.

Logits are synthetic: token frequencies follow Zipf's law, and each position has a few likely tokens; `--teacher NAME`
uses a real model on film reviews instead. Every codec is run end to end: selected on the device, packed, written to a
folder, read back by key, decoded on the device, and compared with a student in chunks, forward and backward.

    apart     relative distance of the gradient by the logits from the exact one, as a root mean square over positions
    biased    upper bound of the same for the mean gradient over repeated draws; 0 if it is unbiased

The harness that this replaces kept 1,608 bytes a token (the 100 likeliest).

    python benchmarks/logit_cache.py                                  # quick, on a CPU
    python benchmarks/logit_cache.py --words 128256 --width 2048 --tokens 8192 --chunk 4096 --compile default
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.logit_cache.cache_store import CacheWriter, LogitCache, save_head
from joulelab.distill.logit_cache.codecs import CacheManifest
from joulelab.distill.logit_cache.kd_loss import CachedTargets, DenseTargets, KdLoss, TeacherHead, sparse_targets
from joulelab.distill.logit_cache.target_encoding import (
    DocumentSpan,
    document_key,
    encode_targets,
    sampling_offsets,
    select_targets,
)

CODECS = "rs50,hybrid32,topk50-renorm,topk50-ghost,topk50-gold,topk100-ghost,hidden"
EARLIER_BYTES_PER_TOKEN = 1608
ROW = 256
"""Tokens per document."""


@dataclass(frozen=True)
class Shape:
    hidden_NE: Tensor
    head_VE: Tensor
    name: str

    @property
    def words(self) -> int:
        return len(self.head_VE)


@dataclass(frozen=True)
class Found:
    codec: str
    bytes_per_token: float
    words_per_token: float
    pick_tokens_per_s: float
    write_tokens_per_s: float
    read_tokens_per_s: float
    loss_tokens_per_s: float
    apart: float
    biased: float


def drawn_teacher(options: argparse.Namespace, device: torch.device) -> Shape:
    """Its first feature is always 1, so the head's first column is how common a word is."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.bfloat16 if device.type == "cuda" else torch.float32
    head_VE = torch.randn(options.words, options.width, generator=generator, device=device)
    head_VE *= options.sharpness / options.width**0.5
    head_VE[:, 0] = -torch.arange(10.0, options.words + 10, device=device).log()
    hidden_NE = torch.randn(options.tokens, options.width, generator=generator, device=device)
    hidden_NE[:, 0] = 1.0
    return Shape(hidden_NE.to(numbers), head_VE.to(numbers), f"drawn, {options.words:,} words")


@torch.no_grad()
def real_teacher(options: argparse.Namespace, device: torch.device) -> Shape:
    from joulelab.data.labeled_text import load
    from joulelab.distill.causal.models import expose_hidden_states, lm_head_weight
    from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer

    model = expose_hidden_states(load_causal_lm(options.teacher)).to(device).eval()
    tokenizer = load_tokenizer(options.teacher)
    states: list[Tensor] = []
    for text in load("sample:reviews").texts:
        ids = torch.tensor([tokenizer(text)["input_ids"][:ROW]], device=device)
        states.append(model(ids, hidden_only=True)[0])
        if sum(map(len, states)) >= options.tokens:
            break
    return Shape(torch.cat(states)[: options.tokens], lm_head_weight(model).detach(), options.teacher)


def parts_of(tokens: int) -> list[DocumentSpan]:
    bounds = range(0, tokens, ROW)
    keys = [document_key(np.arange(start, start + ROW)) for start in bounds]
    return [
        DocumentSpan(key, 0, start, start + ROW, min(ROW, tokens - start))
        for key, start in zip(keys, bounds, strict=True)
    ]


def manifest_of(codec: str, shape: Shape) -> CacheManifest:
    exact: dict[str, Any] = {
        "features": shape.hidden_NE.shape[1],
        "numbers": str(shape.hidden_NE.dtype).removeprefix("torch."),
    }
    return CacheManifest(
        codec=codec, vocabulary=shape.words, teacher=shape.name, teacher_sha256="-", tokenizer_sha256="-",
        **(exact if codec == "hidden" else {}),
    )  # fmt: skip


def measure(codec: str, shape: Shape, folder: Path, options: argparse.Namespace) -> Found:
    manifest, device = manifest_of(codec, shape), shape.hidden_NE.device
    pieces, tokens = parts_of(len(shape.hidden_NE)), len(shape.hidden_NE)
    starts_N = torch.from_numpy(sampling_offsets(pieces, 0)).to(device)

    def picked() -> dict[str, Tensor]:
        if manifest.codec_spec.is_exact:
            return {"hidden": shape.hidden_NE}
        parts = []
        for at in range(0, tokens, options.chunk):
            rows = slice(at, at + options.chunk)
            logits_CV = F.linear(shape.hidden_NE[rows], shape.head_VE)
            parts.append(select_targets(manifest.codec_spec, logits_CV, shape.words, 1.0, starts_N[rows]))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    pick_s, kept = timed(picked, device, options.repeats)
    arrays = {
        name: (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).cpu().numpy()
        for name, value in kept.items()
    }

    def write() -> float:
        targets = [piece.targets for piece in pieces]
        encoded = encode_targets(manifest.codec_spec, arrays, manifest.layout.record_bytes, targets)
        if manifest.codec_spec.is_exact:
            save_head(folder, shape.head_VE)
        with CacheWriter(folder, manifest) as writer:
            writer.add([piece.key for piece in pieces], encoded)
        return float(encoded.counts_N.mean()) + manifest.codec_spec.top

    begin = time.perf_counter()
    words = write()
    write_s = time.perf_counter() - begin
    cache = LogitCache.open(folder)
    keys = [piece.key for piece in pieces]
    read_s, _ = timed(lambda: cache.targets(keys, device).decoded(), device, options.repeats)
    loss_s, apart = learn(cache.targets(keys, device), shape, options)
    return Found(
        codec=codec,
        bytes_per_token=cache.bytes_per_token,
        words_per_token=words,
        pick_tokens_per_s=tokens / pick_s,
        write_tokens_per_s=tokens / write_s,
        read_tokens_per_s=tokens / read_s,
        loss_tokens_per_s=tokens / loss_s,
        apart=apart,
        biased=bias(manifest, shape, options),
    )


def student_of(shape: Shape) -> tuple[Tensor, Tensor]:
    """A student that has learned something: the teacher's states and head with noise of their own size."""
    torch.manual_seed(1)
    hidden_NE, head_VE = shape.hidden_NE.float(), shape.head_VE.float()
    noisy = [part + 0.5 * part.std() * torch.randn_like(part) for part in (hidden_NE, head_VE)]
    return noisy[0], noisy[1]


def learn(targets: CachedTargets, shape: Shape, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a loss forward and backward; and how far its gradient by the hidden states is from the exact one."""
    hidden_NE, head_VE = student_of(shape)
    device = hidden_NE.device
    loss = KdLoss(0.0, chunk=options.chunk, compile_mode=options.compile)
    labels = F.pad(torch.zeros(1, len(hidden_NE), dtype=torch.long, device=device), (1, 0), value=-100)
    leaves = (F.pad(hidden_NE, (0, 0, 0, 1))[None].requires_grad_(), head_VE.requires_grad_())
    half = device.type == "cuda"

    def gradient(reported: CachedTargets | DenseTargets) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            sums = loss(*leaves, reported, labels)
        return torch.autograd.grad(sums.loss, leaves)

    seconds, (found, _) = timed(lambda: gradient(targets), device, options.repeats)
    exact, _ = gradient(DenseTargets(shape.hidden_NE, TeacherHead(shape.head_VE), shape.words))
    return seconds, float((found - exact).norm() / exact.norm())


def bias(manifest: CacheManifest, shape: Shape, options: argparse.Namespace) -> float:
    """Of a position's gradient by the logits, in the mean over many draws, relative to the exact gradient's size.

    The label is the student's own favorite: an arbitrary word would make `gold` look worse than it is.
    """
    if manifest.codec_spec.is_exact:
        return 0.0
    hidden_NE, head_VE = student_of(shape)
    many, worst = 64, 0.0
    spread = (torch.arange(many, device=hidden_NE.device) + 0.5) / many
    for position in range(0, len(hidden_NE), max(1, len(hidden_NE) // 4)):
        teacher_V = F.linear(shape.hidden_NE[position], shape.head_VE).float()
        own_V = torch.softmax(hidden_NE[position] @ head_VE.T, -1)
        exact_V = own_V - torch.softmax(teacher_V, -1)
        found = mean_gradient(manifest, teacher_V.expand(many, -1), own_V, spread)
        worst = max(worst, float((found - exact_V).norm() / exact_V.norm()))
    return worst


def mean_gradient(manifest: CacheManifest, teacher_MV: Tensor, own_V: Tensor, spread_M: Tensor) -> Tensor:
    picked = {
        name: value.cpu().numpy()
        for name, value in select_targets(manifest.codec_spec, teacher_MV, len(own_V), 1.0, spread_M).items()
    }
    encoded = encode_targets(manifest.codec_spec, picked, manifest.layout.record_bytes, [len(spread_M)])
    reported = sparse_targets(
        manifest.codec_spec, torch.from_numpy(encoded.fixed_NF.copy()), torch.from_numpy(encoded.records_RS.copy())
    )
    target_V = torch.zeros(len(own_V)).index_add(0, reported.ids_NK.flatten(), reported.weights_NK.flatten()) / len(
        spread_M
    )
    target_V = target_V.to(own_V.device)
    if reported.gold_N is not None:
        target_V[own_V.argmax()] += reported.gold_N.mean().to(own_V.device)
    if reported.ghost_N is not None:  # the rest is dealt out as the student would
        rest_V = torch.where(target_V > 0, 0.0, own_V)
        target_V = target_V + reported.ghost_N.mean().to(own_V.device) * rest_V / rest_V.sum()
    return own_V - target_V


def timed(function: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, Any]:
    """The fastest of several, after a warm-up."""
    found = function()
    best = float("inf")
    for _ in range(repeats):
        wait(device)
        begin = time.perf_counter()
        found = function()
        wait(device)
        best = min(best, time.perf_counter() - begin)
    return best, found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(found: list[Found]) -> str:
    head = f"{'codec':14} {'bytes':>7} {'words':>6} {'pick':>10} {'write':>10} {'read':>11} {'loss':>10}  apart biased"
    lines = [
        f"{one.codec:14} {one.bytes_per_token:7.1f} {one.words_per_token:6.1f} {one.pick_tokens_per_s:10,.0f} "
        f"{one.write_tokens_per_s:10,.0f} {one.read_tokens_per_s:11,.0f} {one.loss_tokens_per_s:10,.0f} "
        f"{one.apart:6.3f} {one.biased:6.3f}"
        for one in found
    ]
    return "\n".join([head, *lines, "bytes and words a token; pick, write, read and loss in tokens/s"])


def ratios(found: list[Found]) -> dict[str, float]:
    first = found[0]
    made = {f"earlier_bytes_over_{first.codec}": EARLIER_BYTES_PER_TOKEN / first.bytes_per_token}
    for one in found[1:]:
        made[f"bytes_of_{one.codec}_over_{first.codec}"] = one.bytes_per_token / first.bytes_per_token
        made[f"loss_speed_of_{first.codec}_over_{one.codec}"] = first.loss_tokens_per_s / one.loss_tokens_per_s
    return {name: round(value, 2) for name, value in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default=CODECS, help="by commas; the first is compared with the others")
    parser.add_argument("--teacher", help="a causal model: a sample, a folder or a hub id; nothing: logits are drawn")
    parser.add_argument("--words", type=int, default=8192, help="of a vocabulary that is drawn")
    parser.add_argument("--width", type=int, default=64, help="of a drawn teacher's hidden states")
    parser.add_argument("--sharpness", type=float, default=2.5, help="spread of the drawn logits")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=512, help="positions whose logits exist at a time")
    parser.add_argument("--compile", default="off", help="of the loss: off, default or max-autotune")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = real_teacher(options, device) if options.teacher else drawn_teacher(options, device)
    print(f"teacher {shape.name}; {len(shape.hidden_NE):,} tokens, {shape.hidden_NE.shape[1]} features, on {device}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for codec in options.codecs.split(","):
            found.append(measure(codec, shape, Path(folder) / codec, options))
            print(f"{codec}: done", flush=True)
    print(table(found))
    print(ratios(found))
    rows = [asdict(one) for one in found]
    print(json.dumps({"benchmark": "logit_cache", "teacher": shape.name, "ratios": ratios(found), "codecs": rows}))


if __name__ == "__main__":
    main()
