"""What a prerun asserts, over recorded vital signs; and one real prerun on a machine without a GPU."""

import json
import sys
from types import SimpleNamespace

import pytest

from joulelab.clock import NS
from joulelab.errors import InvalidMeasurement
from joulelab.meter.config import EnergyConfig
from joulelab.meter.health import collect_health
from joulelab.runs.context import SilentProgress
from joulelab.runs.prerun import (
    burn_check,
    enforce,
    hardware_checks,
    idle_checks,
    other_processes_check,
    prerun,
    sampling_check,
    throttling_check,
)
from joulelab.runs.record import IdleBaseline, Segment
from joulelab.runs.spec import HardwareAssertions
from joulelab.runs.store import load_record
from joulelab.train import burn

H200 = {"name": "NVIDIA H200", "memory_bytes": 140 * 1024**3}


def results(present, **expected):
    return {check.name: check.ok for check in hardware_checks(present, HardwareAssertions(**expected))}


def test_what_was_asserted_and_is_there_holds():
    assert results([H200, H200], gpu_name="H200", gpu_count=2, min_gpu_memory_gib=130) == {
        "GPU name": True,
        "GPU count": True,
        "GPU memory": True,
    }


@pytest.mark.parametrize(
    ("expected", "name"),
    [({"gpu_name": "H100"}, "GPU name"), ({"gpu_count": 8}, "GPU count"), ({"min_gpu_memory_gib": 150}, "GPU memory")],
)
def test_what_was_asserted_and_is_not_there_fails_and_is_required(expected, name):
    (check,) = hardware_checks([H200], HardwareAssertions(**expected))
    assert (check.name, check.ok, check.required) == (name, False, True)


def test_a_name_is_a_word_not_a_part_of_one():
    assert results([{"name": "NVIDIA A100-SXM4-80GB"}], gpu_name="A10") == {"GPU name": False}
    assert results([{"name": "NVIDIA A100-SXM4-80GB"}], gpu_name="a100") == {"GPU name": True}


def test_no_gpu_meets_no_assertion_but_that_of_none():
    assert results([], gpu_name="H200", min_gpu_memory_gib=1) == {"GPU name": False, "GPU memory": False}
    assert results([], gpu_count=0) == {"GPU count": True}


def test_one_small_card_among_large_ones_is_found():
    assert results([H200, {"name": "NVIDIA H200", "memory_bytes": 1}], min_gpu_memory_gib=130) == {"GPU memory": False}


def ticks(stamps_s):
    return collect_health({"kind": "gpu", "device": "gpu:A", "mono_ns": round(s * NS)} for s in stamps_s)


def test_a_regular_cadence_is_distinguished_from_a_broken_one():
    steady = [n * 0.5 for n in range(40)]
    stuttering = [n * 0.5 + (0.4 if n % 3 == 0 else 0.0) for n in range(40)]
    assert sampling_check(ticks(steady))[0] is True
    ok, text = sampling_check(ticks(stuttering))
    assert ok is False and "longest" in text


def test_too_few_readings_are_no_sampling():
    assert sampling_check(ticks([0.0, 0.5])) == (False, "too few readings were recorded")


def test_a_stranger_on_the_gpu_is_named():
    text = "another process uses this GPU, and its energy is included in the card's: python (pid 7)"
    health = collect_health([{"kind": "warning", "mono_ns": 5, "text": text}])
    assert other_processes_check(health, [H200]) == (False, text)
    assert other_processes_check(collect_health([]), [H200])[0] is True
    assert other_processes_check(health, [])[0] is None


def baseline(**fields):
    plain = {"stage": "idle.before", "attempt": 1, "duration_s": 10, "power_w": 80, "spread_rel": 0.01}
    return IdleBaseline(**{**plain, "drift_rel": 0.0, "stable": True, **fields})


def test_an_idle_that_still_falls_is_a_warning_with_its_numbers():
    ((ok, text),) = idle_checks([baseline(stable=False, drift_rel=-0.229, sm_clock_MHz=345)])
    assert ok is False
    assert text == "idle.before: 80.0 W at 345 MHz, spread 1.0 %, drift -22.9 %"


def test_no_sensor_is_no_verdict_on_idle():
    assert idle_checks([])[0][0] is None
    assert throttling_check(collect_health([]), None)[0] is None


def burned(utilization):
    """A burn-in of 2 s with readings of each card."""
    lines = [
        {"kind": "gpu", "device": device, "mono_ns": stamp * NS, "gpu_utilization_percent": percent}
        for device, percent in utilization.items()
        for stamp in (1, 2)
    ]
    part = Segment(attempt=1, host="h", started_at="", duration_s=2, start_ns=0, end_ns=2 * NS)
    stage = SimpleNamespace(duration_s=2.0, energy_j=1400.0, mean_power_w=700.0, segments=(part,))
    return burn_check(stage, [baseline()], "products", collect_health(lines))


def test_a_card_that_the_load_did_not_reach_is_named_though_the_others_were_hot():
    assert burned({"gpu:A": 100, "gpu:B": 99}) == (True, "products for 2.0 s: 700 W, idle 80.0 W")
    ok, text = burned({"gpu:A": 100, "gpu:B": 0})
    assert ok is False
    assert text.endswith("not under load: gpu:B")


def test_the_burn_in_loads_every_card_that_torch_sees(monkeypatch):
    """With a torch that only writes down where its products are."""
    products = []
    cuda = SimpleNamespace(
        is_available=lambda: True, is_bf16_supported=lambda: True, device_count=lambda: 3,
        get_device_name=lambda card: "NVIDIA H200", synchronize=lambda card: products.append(f"waited for {card}"),
    )  # fmt: skip
    torch = SimpleNamespace(
        cuda=cuda, bfloat16="torch.bfloat16", __version__="2.11", randn=lambda *side, device, dtype: device,
        empty_like=lambda a: a, mm=lambda a, b, out: products.append(out),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    what, step, _ = burn._gpu_load()
    assert what.endswith("on 3 x NVIDIA H200")
    products.clear()
    step()
    queued = [f"cuda:{card}" for card in range(3) for _ in range(burn.PRODUCTS_PER_STEP)]
    assert products == [*queued, *(f"waited for {card}" for card in range(3))]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    store = tmp_path_factory.mktemp("runs")
    return prerun(
        store, EnergyConfig(sample_interval_s=0.1, gpus="none"), HardwareAssertions(gpu_count=3), 1.0, SilentProgress()
    )


def test_a_prerun_is_a_run_with_its_report_next_to_the_record(rehearsed):
    from pathlib import Path

    folder = Path(rehearsed.folder)
    record = load_record(folder)
    assert [stage.name for stage in record.stages if stage.name != "run.overhead"] == [
        "idle.before",
        "prerun.burn",
        "idle.after",
    ]
    assert json.loads((folder / "prerun.json").read_text())["passed"] is rehearsed.passed


def test_a_failed_assertion_ends_with_exit_code_4(rehearsed):
    with pytest.raises(InvalidMeasurement, match="expected 3 GPUs, found") as refused:
        enforce(rehearsed)
    assert refused.value.exit_code == 4
