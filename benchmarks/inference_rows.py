"""Latency and energy per inference of our encoders, and the effect of a cheaper norm.

Batch 1, weights in bf16, three modes of the same model: eager; `torch.compile(mode="reduce-overhead")`; and
`fastest`, which folds the norms' scales into the matrices, computes of the last block only the token that the head
reads, tries attention kernels (and, with --tune, matrix kernels) on three layers, and runs the quickest, compiled, from
one CUDA graph. The modes take turns; latency and joules come from the same windows; idle before and after. Then
pre-RMSNorm against pre-LN at several batch sizes, in turns, as a ratio with its interval.

    python benchmarks/inference_rows.py --part goal --out rows.jsonl    # DeiT-B and BERT-B-128, two minutes on an H200
    python benchmarks/inference_rows.py --part rows --out rows.jsonl    # the other rows, three minutes
    python benchmarks/inference_rows.py --part norms --out rows.jsonl   # three minutes
    python benchmarks/inference_rows.py --tiny                          # small models on a CPU, a minute

Every row is appended to --out as soon as it is known, so an interrupted run keeps its rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from joulelab.infer.energy import Reader, energy_per_item, item_energy_j, mean_power_w, split_window
from joulelab.infer.recipes import (
    RECIPES,
    Recipe,
    autotune,
    cast_inputs,
    cast_model,
    inference_context,
    peak_precision,
    prepare_call,
)
from joulelab.infer.timing import Latency, Round, run_round, synchronized_latency
from joulelab.meter.config import EnergyConfig
from joulelab.meter.health import load_health, throttle_shares
from joulelab.meter.session import Meter
from joulelab.runs.attempt_data import IdlePower, idle_power, is_steady, spread_and_drift
from joulelab.runs.record import IdleBaseline
from joulelab.stats import Interval, ratio_paired
from joulelab.train.devices import peak_flops
from joulelab.train.stats.step_energy import energy_reader
from joulelab.zoo.cost import FlopCounter
from joulelab.zoo.norms.encoder_shapes import SHAPES, EncoderShape
from joulelab.zoo.norms.encoders import Encoder, build, make_inputs
from joulelab.zoo.norms.pretrained_encoders import fold_for_inference

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EAGER, REDUCED, FASTEST = "eager", "reduce-overhead", "fastest"


@dataclass(frozen=True)
class Row:
    model: str
    tokens: int = 0
    wanted_ms: float | None = None
    wanted_mj: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.tokens}" if self.tokens else self.model


GOAL = (Row("deit-b", wanted_ms=0.8, wanted_mj=220.0), Row("bert-b", 128, wanted_ms=0.6))
OTHERS = (Row("deit-t"), Row("deit-s"), Row("bert-b", 384), Row("bert-l", 320))


class Lab:
    """One measurement session: the meter, the output file, and rows whose energy is not read yet."""

    def __init__(self, meter: Meter, options: argparse.Namespace) -> None:
        self.meter = meter
        self.options = options
        self.idle_windows: list[tuple[int, int]] = []
        self.recipes: dict[str, Recipe] = {}
        self.pending: list[tuple[int, Callable[[Any], dict[str, Any]]]] = []
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def write(self, line: dict[str, Any]) -> None:
        with self.options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def rest(self, seconds: float) -> None:
        """An idle baseline with the program loaded and the GPU idle."""
        begin_ns = time.monotonic_ns()
        time.sleep(seconds)
        self.idle_windows.append((begin_ns, time.monotonic_ns()))

    def idle(self, read: Reader) -> IdlePower | None:
        found = [(window, mean_power_w(window, read)) for window in self.idle_windows]
        return idle_power([self.baseline(window, power_w, read) for window, power_w in found if power_w is not None])

    def baseline(self, window: tuple[int, int], power_w: float, read: Reader) -> IdleBaseline:
        powers_w = [found for piece in split_window(window) if (found := mean_power_w(piece, read)) is not None]
        spread, drift = spread_and_drift(powers_w)
        return IdleBaseline(
            stage="idle",
            before_load=window == self.idle_windows[0],
            attempt=1,
            duration_s=(window[1] - window[0]) / 1e9,
            power_w=power_w,
            spread_rel=spread,
            drift_rel=drift,
            stable=is_steady(spread, drift),
        )

    def report_later(self, until_ns: int, tell: Callable[[Any], dict[str, Any]]) -> None:
        """Energy is in the trace two seconds later; meanwhile the next row is prepared."""
        self.pending.append((until_ns, tell))

    def settle(self) -> None:
        if not self.pending:
            return
        waiting, self.pending = self.pending, []
        read = energy_reader(self.meter, max(until for until, _ in waiting), DEVICE.type)
        for _, tell in waiting:
            self.write(tell(read))


def small(shape: EncoderShape) -> EncoderShape:
    return replace(shape, width=64, heads=2, head_width=32, layers=4, side=64, vocabulary=500)


def shape_of(row: Row, options: argparse.Namespace) -> EncoderShape:
    return small(SHAPES[row.model]) if options.tiny else SHAPES[row.model]


def on_device(model: Encoder, options: argparse.Namespace) -> Encoder:
    made = cast_model(model.requires_grad_(False).to(DEVICE), options.dtype)
    assert isinstance(made, Encoder)
    return made


def ready_inputs(shape: EncoderShape, batch: int, tokens: int, options: argparse.Namespace) -> tuple[Any, ...]:
    return cast_inputs([make_inputs(shape, batch, tokens).to(DEVICE)], options.dtype)


# 1. the rows


def measure_row(lab: Lab, row: Row, tune: bool) -> None:
    options = lab.options
    shape = shape_of(row, options)
    with DEVICE:  # large models are initialized faster on a GPU
        plain = build(shape)
    flops = forward_flops(shape, row.tokens)
    trimmed, ready = on_device(fold_for_inference(plain), options), on_device(plain, options)
    inputs = ready_inputs(shape, 1, row.tokens, options)
    with inference_context(options.dtype):
        measure_ways(lab, row, ready, trimmed, inputs, flops, tune)


def measure_ways(
    lab: Lab, row: Row, ready: Encoder, trimmed: Encoder, inputs: tuple[Any, ...], flops: float, tune: bool
) -> None:
    options, shape = lab.options, ready.shape
    calls, notes = {}, {}
    for way in (EAGER, REDUCED, FASTEST):
        if way in options.skip:
            continue
        started = time.monotonic()
        try:
            recipe = RECIPES[way] if way != FASTEST else fastest_recipe(lab, shape.kind, trimmed, inputs, tune)
            calls[way] = prepare_call(trimmed if way == FASTEST else ready, inputs, recipe, options.dtype, DEVICE)
        except Exception:  # a failing mode must not affect the others
            lab.say(f"{row.name} {way} failed:\n{traceback.format_exc(limit=4)}")
            lab.write({"row": row.name, "way": way, "failed": traceback.format_exc(limit=4)})
            continue
        notes[way] = recipe.describe()
        lab.say(f"{row.name} {way} ready after {time.monotonic() - started:.1f} s ({notes[way]})")
    lab.settle()
    rounds: dict[str, list[Round]] = {way: [] for way in calls}
    for number in range(options.rounds):
        for way in calls if number % 2 == 0 else reversed(calls):
            before = rounds[way][-1] if rounds[way] else None
            rounds[way].append(run_round(calls[way], options.seconds, torch.get_num_threads(), before))
    for way, found in rounds.items():
        waited_s = synchronized_latency(calls[way], DEVICE)
        lab.say(f"{row.name:<12} {way:<16} {1000 * Latency.of(found).median_s:8.3f} ms")
        lab.report_later(found[-1].end_ns, teller(lab, row, way, found, waited_s, flops, notes[way]))


def fastest_recipe(lab: Lab, family: str, model: Encoder, inputs: tuple[Any, ...], tune: bool) -> Recipe:
    """Tried on the goal's models; other models of a family use the best recipe found there."""
    if tune or family not in lab.recipes:
        chosen, _ = autotune(
            model, inputs, lab.options.dtype, DEVICE, lambda tried: lab.say(f"    3 layers: {tried}"), lab.options.tune
        )
        lab.recipes[family] = chosen
    return lab.recipes[family]


def teller(
    lab: Lab, row: Row, way: str, rounds: list[Round], waited_s: float, flops: float, note: str
) -> Callable[[Any], dict[str, Any]]:
    latency = Latency.of(rounds)
    turns = [(found.window, found.calls) for found in rounds]

    def tell(read: Reader) -> dict[str, Any]:
        energy, why_not = energy_per_item(turns, read)
        idle = lab.idle(read)
        if energy is not None and idle is not None and not energy.estimated:  # an estimate has no idle power
            energy = energy.above(idle)
        peak = peak_flops(torch.cuda.get_device_name(), peak_precision(lab.options.dtype)) if GPU else None
        line = {
            "row": row.name,
            "way": way,
            "how": note,
            "dtype": lab.options.dtype,
            "batch": 1,
            "median_ms": 1000 * latency.median_s,
            "iqr_ms": 1000 * latency.iqr_s,
            "measurements": latency.measurements,
            "waited_ms": 1000 * waited_s,
            "energy": None if energy is None else energy.model_dump(),
            "why_no_energy": why_not,
            "mfu": None if peak is None else flops / latency.median_s / peak,
            **state_during(lab, [window for window, _ in turns]),
        }
        print(row_text(row, line), flush=True)
        return line

    return tell


def state_during(lab: Lab, windows: list[tuple[int, int]]) -> dict[str, Any]:
    states = load_health(lab.meter.trace_path).during(windows)

    def median(name: str) -> float | None:
        values = [getattr(state, name) for state in states if getattr(state, name) is not None]
        return statistics.median(values) if values else None

    return {
        "sm_clock_mhz": median("sm_clock_mhz"),
        "temperature_c": median("temperature_c"),
        "sm_utilization_percent": median("utilization_percent"),
        "throttled": throttle_shares(states) if states else {},
    }


def row_text(row: Row, line: dict[str, Any]) -> str:
    energy = line["energy"]
    joules = f"no joules: {line['why_no_energy'][:80]}"
    if energy is not None:
        net = (
            ""
            if energy["net_j"] is None
            else (
                f", {1000 * energy['net_j']:.1f} ± {1000 * energy['net_half_width_j']:.1f} mJ net "
                f"(idle {energy['idle_power_w']:.1f} W)"
            )
        )
        joules = (
            f"{1000 * energy['gross_j']:.1f} ± {1000 * energy['gross_half_width_j']:.1f} mJ gross at "
            f"{energy['power_w']:.0f} W{net}"
        )
    mfu = "" if line["mfu"] is None else f", MFU {100 * line['mfu']:.1f} %"
    goal = ""
    if line["way"] == FASTEST and row.wanted_ms is not None:
        reached = line["median_ms"] <= row.wanted_ms
        if row.wanted_mj is not None:
            reached = reached and energy is not None and 1000 * energy["gross_j"] <= row.wanted_mj
        wanted = f"{row.wanted_ms:g} ms" + (f" and {row.wanted_mj:g} mJ" if row.wanted_mj else "")
        goal = f"  <- wanted {wanted}: {'reached' if reached else 'NOT reached'}"
    return (
        f"= {row.name:<12} {line['way']:<16} {line['median_ms']:8.3f} ms (IQR {line['iqr_ms']:.3f}, "
        f"{line['measurements']} blocks; waited for {line['waited_ms']:.3f}), {joules}{mfu}, "
        f"SM {line['sm_utilization_percent']} %, {line['sm_clock_mhz']} MHz, {line['temperature_c']} C{goal}"
    )


def forward_flops(shape: EncoderShape, tokens: int) -> float:
    """Of the plain model, on paper: the last block computes every token there."""
    with torch.device("meta"):
        model, inputs = build(shape), make_inputs(shape, 1, tokens)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
        model(inputs)
    return float(counter.flops)


# 2. norms


def compare_norms(lab: Lab, batch: int, recipe: Recipe, title: str) -> None:
    """Pre-RMSNorm over pre-LN, interleaved: a ratio below 1 is a saving."""
    options = lab.options
    shape = small(SHAPES["deit-b"]) if options.tiny else SHAPES["deit-b"]
    inputs = ready_inputs(shape, batch, 0, options)
    calls = {}
    for norm in ("pre-ln", "pre-rms"):
        with DEVICE:
            model = on_device(build(shape, norm), options)
        with inference_context(options.dtype):
            calls[norm] = prepare_call(model, inputs, recipe, options.dtype, DEVICE)
    lab.settle()
    rounds: dict[str, list[Round]] = {norm: [] for norm in calls}
    with inference_context(options.dtype):
        warm = {norm: run_round(call, 0.3, torch.get_num_threads()) for norm, call in calls.items()}
        for number in range(options.norm_rounds):
            for norm in calls if number % 2 == 0 else reversed(calls):
                found = run_round(calls[norm], options.norm_seconds, torch.get_num_threads(), warm[norm])
                rounds[norm].append(found)
    time_ratio = ratio_paired(
        [found.median_s for found in rounds["pre-rms"]], [found.median_s for found in rounds["pre-ln"]]
    )
    medians = {norm: 1000 * Latency.of(found).median_s for norm, found in rounds.items()}
    change = f"{medians['pre-ln']:.3f} -> {medians['pre-rms']:.3f} ms, {interval_text(time_ratio)}"
    lab.say(f"norms, batch {batch:>2}, {title}: {change}")

    def tell(read: Reader) -> dict[str, Any]:
        each = {
            norm: [item_energy_j((found.window, found.calls * batch), read) for found in turns]
            for norm, turns in rounds.items()
        }
        pairs = [(rms, ln) for rms, ln in zip(each["pre-rms"], each["pre-ln"], strict=True) if rms and ln]
        joules = ratio_paired(*zip(*pairs, strict=True)) if len(pairs) == options.norm_rounds else None
        print(
            f"= norms, batch {batch:>2}, {title:<10} pre-RMS over pre-LN: time {interval_text(time_ratio)}, "
            f"energy {interval_text(joules) if joules else 'not measured'}",
            flush=True,
        )
        return {
            "norms": "pre-rms over pre-ln",
            "batch": batch,
            "way": title,
            "median_ms": medians,
            "time_ratio": vars(time_ratio),
            "energy_ratio": None if joules is None else vars(joules),
        }

    lab.report_later(max(found[-1].end_ns for found in rounds.values()), tell)


def interval_text(interval: Interval) -> str:
    return f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


# 3. command line


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="all", choices=["all", "goal", "rows", "norms"])
    parser.add_argument("--skip", nargs="*", default=[], choices=[EAGER, REDUCED, FASTEST], help="ways to leave out")
    parser.add_argument("--dtype", default="bf16" if GPU else "fp32")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round; a row has --rounds of them per way")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle-s", type=float, default=6.0, help="of each idle baseline")
    parser.add_argument("--tune-all", action="store_true", help="try recipes for every row, not for the goal's alone")
    parser.add_argument("--tune", action="store_true", help="try matrix kernels too: minutes more for each model")
    parser.add_argument("--norm-batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--norm-compiled", default="1,64", help="batch sizes to compare compiled as well; empty: none")
    parser.add_argument("--norm-rounds", type=int, default=4)
    parser.add_argument("--norm-seconds", type=float, default=1.0)
    parser.add_argument("--tiny", action="store_true", help="small models and short rounds, for a quick test")
    parser.add_argument("--out", type=Path, default=Path("inference_rows.jsonl"))
    options = parser.parse_args()
    if options.tiny:
        options.seconds, options.rounds, options.idle_s = 0.5, 2, 1.0
        options.norm_batches, options.norm_compiled, options.norm_rounds, options.norm_seconds = "1,4", "1", 3, 0.3
    return options


def numbers(text: str) -> list[int]:
    return [int(piece) for piece in text.split(",") if piece.strip()]


def run_parts(lab: Lab) -> None:
    options = lab.options
    rows = {"all": (*GOAL, *OTHERS), "goal": GOAL, "rows": OTHERS, "norms": ()}[options.part]
    for row in rows:
        try:
            measure_row(lab, row, options.tune_all or row in GOAL)
        except Exception:
            lab.say(f"{row.name} failed:\n{traceback.format_exc(limit=6)}")
        torch.cuda.empty_cache() if GPU else None
    if options.part in ("all", "norms"):
        plain = RECIPES["cuda-graph"] if GPU else RECIPES[EAGER]
        compiled = replace(RECIPES["compiled"], graph=GPU)
        jobs = [(batch, plain, "torch's kernels") for batch in numbers(options.norm_batches)]
        jobs += [(batch, compiled, "compiled") for batch in numbers(options.norm_compiled)]
        for job in jobs:
            try:
                compare_norms(lab, *job)
            except Exception:
                lab.say(f"norms at batch {job[0]} failed:\n{traceback.format_exc(limit=6)}")


def main() -> None:
    options = read_options()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # caches of an earlier run would hide what compiling takes, and a fresh folder is never half written
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inference-rows-"))
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        lab = Lab(meter, options)
        where = torch.cuda.get_device_name() if GPU else "CPU"
        lab.write(
            {"benchmark": "inference_rows", "where": where, "torch": torch.__version__, **vars(options) | {"out": ""}}
        )
        if GPU:
            torch.zeros(1, device=DEVICE)  # the context is there before the first baseline
            torch.cuda.synchronize()
        lab.rest(options.idle_s)
        run_parts(lab)
        lab.rest(options.idle_s)
        lab.settle()
        read = energy_reader(meter, time.monotonic_ns(), DEVICE.type)
        idle = [read([window]) for window in lab.idle_windows]
        watts = [
            None if figure.energy_j is None else figure.energy_j / ((end - begin) / 1e9)
            for figure, (begin, end) in zip(idle, lab.idle_windows, strict=True)
        ]
        lab.write({"idle_w": watts, "seconds": time.monotonic() - lab.began})
        lab.say(f"idle before and after: {watts}; done")
        meter.stop()


if __name__ == "__main__":
    main()
