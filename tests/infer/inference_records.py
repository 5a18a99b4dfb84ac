"""Records of inference runs with rows as a test wants them."""

from joulelab.meter.figures import missing
from joulelab.meter.health import CoreUse
from joulelab.runs.record import EnergyByComponent, IdleBaseline, RunRecord, StageRecord, Totals

NS = 10**9


def row(batch=1, mode="eager", gross_j=0.2, half_j=0.002, ms=1.0, power_w=200.0, rounds=(1.0, 1.0), **more):
    """`rounds`: how each round's time differs from the median."""
    energy = {"gross_j": gross_j, "gross_half_width_j": half_j, "power_w": power_w, "method": "counter"}
    turns = [
        {"begin_ns": 0, "end_ns": NS, "calls": round(1000 / (ms * r)), "median_s": ms * r / 1000, "power_w": power_w}
        for r in rounds
    ]
    return {
        "batch_size": batch,
        "tokens": 0,
        "mode": mode,
        "dtype": "bf16",
        "norm": None,
        "item": "image",
        "items_per_call": batch,
        "latency": {"median_s": ms / 1000, "iqr_s": ms / 50_000, "measurements": 12, "calls_per_block": 10},
        "items_per_s": 1000 * batch / ms,
        "calls": round(2000 / ms),
        "seconds": 2.0,
        "rounds": turns,
        "waited_s": ms / 1000,
        "energy": None if gross_j is None else energy,
        "why_no_energy": "" if gross_j is not None else "gpu: no sensor",
        "flops_per_item": 35.1e9,
        "mfu": 0.05,
        "mfu_missing": "",
        "memory_bytes": 3e8,
        "recipe": "eager kernels",
        "threads": 2,
        "device": "cuda",
        "stopped": "",
        "notes": [],
        "state": {
            "sm_utilization_percent": {"median": 97.0, "min": 90.0, "max": 99.0},
            "sm_clock_mhz": {"median": 1980.0, "min": 1980.0, "max": 1980.0},
            "temperature_c": {"median": 40.0, "min": 39.0, "max": 41.0},
            "throttled": {},
            "readings": 4,
        },
        **more,
    }


def generated(part, **more):
    """A part of a generation's row; `infer` is whole responses."""
    return row(part=part, item="response", prompt_tokens=256, new_tokens=128, **more)


def record(rows, idle_w=(60.0, 62.0), name="infer-deit-b", stages=(), lineage=(), tracker="inference", why="not here"):
    findings = {f"infer.{number}": {tracker: values} for number, values in enumerate(rows)}
    none = missing(why)
    idle = tuple(
        IdleBaseline(stage=stage, attempt=1, duration_s=5.0, power_w=watts, spread_rel=0.0, drift_rel=0.0, stable=True)
        for stage, watts in zip(("idle.before", "idle.after"), idle_w, strict=False)
    )
    parts = dict.fromkeys(("gpu", "cpu", "dram", "cpu_estimate"), none)
    totals = Totals(
        policy="measured", energy_j=None, figure=none, best=none, **parts, duration_s=10.0, idle_power_w=None,
        above_idle_j=None, idle=idle,
    )  # fmt: skip
    return RunRecord(
        run_id=f"{name}-1", name=name, label=name, status="done", created_at="2026-01-01T00:00:00+00:00", spec={},
        findings=findings, totals=totals, stages=tuple(stages), lineage=tuple(lineage),
    )  # fmt: skip


def stage(number, others_cores=None):
    """Of the record's row of that number."""
    none = missing("not here")
    energy = EnergyByComponent(**dict.fromkeys(("gpu", "cpu", "dram", "cpu_estimate"), none))
    use = None if others_cores is None else CoreUse(cores=2, others_cores=others_cores, idle_cores=0.1)
    nothing = dict.fromkeys(("energy_j", "above_idle_j", "mean_power_w", "peak_power_w"))
    return StageRecord(
        name=f"infer.{number}", number=number, status="done", segments=(), duration_s=1.0, energy=energy, best=none,
        core_use=use, **nothing,
    )  # fmt: skip
