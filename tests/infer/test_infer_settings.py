"""What `joulelab infer` makes of its flags, and what it refuses before anything starts."""

import json
import subprocess
import sys

import pytest

from joulelab.cli.infer import FLAGS, infer_from_log, infer_spec
from joulelab.data import sources
from joulelab.errors import ConfigError, NotFoundError, UsageError
from joulelab.infer.config import InferSpec
from joulelab.meter.sensors.cpu import usable_cores


def spec(model, **flags):
    absent = dict.fromkeys([*FLAGS, "generate", "estimate_cpu", "overrides"])
    return infer_spec({**absent, "model": model, **flags})


def test_every_combination_is_a_row_and_rows_of_one_input_stand_together():
    requested = spec(
        "deit-t", batch_size="1,8", mode="eager,compiled", dtype="fp32,autocast-bf16", norm="pre-ln,pre-rms"
    )
    groups = [[case.stage for case in group] for group in requested.groups()]
    assert [len(group) for group in groups] == [8, 8]
    assert groups[0][0] == "infer.b1-eager-fp32-pre-ln"
    assert len({stage for group in groups for stage in group}) == 16


def test_idle_is_measured_before_and_after_by_default():
    assert (spec("deit-t").energy.idle_before_s, spec("deit-t").energy.idle_after_s) == (5.0, 5.0)
    assert spec("deit-t", overrides=["energy.idle_before_s=0"]).energy.idle_before_s == 0


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), ("1.5 %", 0.015)])
def test_a_target_is_read_as_percent_or_share(text, share):
    assert spec("deit-t", target_ci=text).target_ci == pytest.approx(share)


def test_a_sample_needs_no_prefix_and_text_has_128_tokens():
    requested = spec("smollm2")
    assert (requested.model, requested.kind) == ("sample:smollm2", "pretrained")
    assert [case.tokens for group in spec("bert-b").groups() for case in group] == [128]


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("deit-t", {"batch_size": "1,x"}, "not a list of whole numbers"),
        ("deit-t", {"target_ci": "soon"}, "expected a percentage, found 'soon'"),
        ("deit-t", {"target_ci": "2"}, "--target-ci 2 is 200 %"),
        ("deit-t", {"batch_size": "4,0"}, "--batch-size: expected a number greater than or equal to 1, found 0"),
        ("deit-t", {"overrides": ["batch_sizes=[0]"]}, "batch_sizes.0: expected"),
        ("deit-t", {"mode": "eagre"}, "eager"),
        ("deit-t", {"seq_length": "128"}, "takes images"),
        ("bert", {"norm": "pre-rms"}, "norms apply to"),
        ("deit-t", {"generate": True}, "causal language model"),
        ("deit-t", {"new_tokens": 5}, "requires --generate"),
        ("deit-t", {"size": "tiny"}, "size applies to models of `joulelab zoo`"),
        ("smollm2", {"weights": "published"}, "has its own weights"),
        ("deit-t", {"max_time": 9.0}, "add --target-ci"),
        (
            "deit-t",
            {"target_ci": "2%", "max_time": 3.0, "min_run_time": 5.0},
            "--max-time (3 s) is shorter than --min-run-time",
        ),
        ("deit-t", {"batch_size": "1,8,1"}, "--batch-size: 1 is listed twice"),
        ("deit-t", {"mode": "eager,eager"}, "--mode: eager is listed twice"),
        ("smollm2", {"generate": True, "seq_length": "32"}, "prompt_tokens and new_tokens"),
        ("deit-t", {"batch_size": ","}, "',' contains no value"),
        ("deit-t", {"overrides": ["dtypes=[]"]}, "at least one value is required"),
        ("deit-t", {"overrides": ["prompt_tokens=9"]}, "requires --generate"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(model, flags, words):
    with pytest.raises(UsageError) as refused:
        spec(model, **flags)
    assert words in f"{refused.value.message} {refused.value.hint}"


def test_what_this_machine_cannot_do_is_refused_before_a_folder_is_made():
    requested = {
        "CUDA graphs": {"mode": "cuda-graph"},
        "no NVIDIA GPU": {"device": "cuda"},
        "may use": {"threads": 9999},
    }
    requested["tf32 exists on GPUs only"] = {"dtype": "fp32,tf32", "device": "cpu"}
    for words, flags in requested.items():
        with pytest.raises(UsageError, match=words):
            spec("deit-t", **flags).preflight()
    with pytest.raises(NotFoundError, match="did you mean 'deit-t'"):
        spec("deit-tt").preflight()
    if sources.installed_version("reviews"):
        with pytest.raises(UsageError, match="labeled text"):
            spec("reviews").preflight()
    with pytest.raises(NotFoundError, match="unknown size of bert 'huge'"):
        spec("bert", size="huge").preflight()
    with pytest.raises(ConfigError, match="512 positions"):
        spec("bert-b", seq_length="513").preflight()


def test_a_long_minimum_moves_the_limit_that_no_one_named():
    assert spec("deit-t", target_ci="2%", min_run_time=100.0).limit_s == 100
    assert spec("deit-t", target_ci="2%").limit_s == 60


@pytest.mark.parametrize(
    ("reported", "threads"), [("1", 1), ("1,4", 1), ("999", usable_cores()), ("all", usable_cores())]
)
def test_threads_that_no_one_requested_are_those_of_the_environment(monkeypatch, reported, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", reported)
    assert spec("deit-t").usable_threads == threads
    assert spec("deit-t", threads=2).usable_threads == 2


@pytest.mark.parametrize("flags", [{"model": "org/name"}, {"model": "deit-t", "weights": "published"}])
def test_a_hub_that_cannot_be_reached_is_reported_before_anything_starts(monkeypatch, tmp_path, flags):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("joulelab.data.hub.cached_folder", lambda name, file: None)
    with pytest.raises(NotFoundError, match="cannot be reached"):
        spec(**flags).preflight()


DMON = "# gpu    pwr     sm\n# Idx      W      %\n" + "".join(
    f"    0     {watts}     0\n" for watts in [61] * 12 + [87] * 20 + [61] * 12
)


def from_log(capsys, file, idle_from=None):
    infer_from_log(file, 4.37, idle_from, None, None, as_json=True)
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    return device


def test_a_dmon_file_and_a_latency_give_113_62_millijoules(tmp_path, capsys):
    file = tmp_path / "power.csv"
    file.write_text(DMON)
    found = from_log(capsys, file)
    assert found["inference"]["power_above_idle_w"] == pytest.approx(26.0)
    assert found["inference"]["energy_above_idle_j"] == pytest.approx(0.11362)
    assert [len(found[level]["segments"]) for level in ("busy", "idle")] == [1, 1]


@pytest.mark.parametrize(("idle_from", "idle_w"), [("60W", 60.0), ("0..10", 61.0), ("FILE", 55.0)])
def test_idle_may_come_from_watts_a_segment_or_another_log(tmp_path, capsys, idle_from, idle_w):
    file, other = tmp_path / "power.csv", tmp_path / "idle.csv"
    file.write_text(DMON)
    other.write_text("timestamp, power.draw [W]\n" + "".join(f"2026/01/01 10:00:0{s}.000, 55.00 W\n" for s in range(9)))
    if idle_from == "FILE":
        idle_from = str(other)
    found = from_log(capsys, file, idle_from)
    assert found["idle"]["power_w"] == pytest.approx(idle_w)
    assert found["inference"]["energy_above_idle_j"] == pytest.approx((87 - idle_w) * 4.37e-3)


def test_an_idle_power_above_the_busy_one_is_refused(tmp_path, capsys):
    file = tmp_path / "power.csv"
    file.write_text(DMON)
    with pytest.raises(UsageError, match=r"idle \(100 W, given with --idle-from\) is not below busy \(87 W"):
        from_log(capsys, file, "100W")


def test_times_that_a_log_has_no_use_for_are_refused(tmp_path):
    file, stamped = tmp_path / "power.txt", tmp_path / "power.csv"
    file.write_text(DMON)
    stamped.write_text(
        "timestamp, power.draw [W]\n" + "".join(f"2026/01/01 10:00:0{s}.000, 55.00 W\n" for s in range(3))
    )
    with pytest.raises(UsageError, match="--time-zone has no effect"):
        infer_from_log(file, 4.37, None, "UTC", None, as_json=False)
    with pytest.raises(UsageError, match="--period has no effect"):
        infer_from_log(stamped, 4.37, None, None, 0.5, as_json=False)


def test_flags_that_would_do_nothing_are_refused(tmp_path):
    file = tmp_path / "power.csv"
    file.write_text(DMON)
    command = [
        sys.executable,
        "-m",
        "joulelab",
        "infer",
        "--from-log",
        str(file),
        "--latency-ms",
        "4",
        "--threads",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--threads has no effect with --from-log" in done.stderr


def test_text_is_generated_by_captured_steps_on_a_gpu_by_default():
    spec = InferSpec(model="sample:smollm2", generate=True)
    assert spec.decoding_modes(on_gpu=True) == ("cuda-graph",)
    assert spec.decoding_modes(on_gpu=False) == ("eager",)
    requested = InferSpec(model="sample:smollm2", generate=True, modes=("eager", "compiled"))
    assert requested.decoding_modes(on_gpu=True) == ("eager", "compiled")
    assert [case.mode for group in InferSpec(model="deit-t").groups() for case in group] == ["eager"]
