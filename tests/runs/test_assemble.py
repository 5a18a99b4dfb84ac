"""Grade, idle, CO2e and CodeCarbon as a record is assembled from a folder with an exactly known trace."""

import json
from datetime import UTC, datetime

import pytest

from joulelab.clock import NS
from joulelab.runs import assemble as assembling
from joulelab.runs.assemble import assemble
from joulelab.runs.attempt_data import readings_path
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import RunRecord, flat_summary

T0 = 1_000 * NS
DEVICE = {
    "device": "gpu:A", "component": "gpu", "name": "H200", "counted": True, "wrap_j": None,
    "refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {},
}  # fmt: skip


def power_at(second):
    """11 s at rest (80 W), 59 s of work (500 W)."""
    return 80.0 if second < 11 else 500.0


def lines_of(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make(tmp_path, *, energy=None, idle=True, device=None, extra=(), gpu_fields=None, ended=True, gpus=("H200",)):
    paths = RunPaths(tmp_path / "run-20260101T000000Z-0000")
    header = {
        "kind": "header", "timestamp": datetime.now(UTC).isoformat(), "mono_ns": T0, "host": "h", "boot_id": "b",
        "interval_s": 0.5, "wall_minus_mono_s": 0.0, "devices": [{**DEVICE, **(device or {})}],
        "missing": [{"component": "cpu", "reason": "no RAPL", "fix": ""}],
    }  # fmt: skip
    lines, total_j = [header], 0.0
    for tick in range(141):
        second = tick / 2
        lines.append(
            {
                "kind": "gpu", "mono_ns": T0 + tick * NS // 2, "device": "gpu:A", "power_watts": power_at(second),
                "energy_counter_j": total_j, "sm_clock_MHz": 345 if second < 11 else 1980, "throttle_reasons": 0,
                "temperature_C": 40, "gpu_utilization_percent": 0, **(gpu_fields or {}),
            }
        )  # fmt: skip
        total_j += power_at(second) / 2
    lines += extra
    lines_of(paths.trace("h", 1), [*lines, *([{"kind": "end", "mono_ns": T0 + 70 * NS}] if ended else [])])
    events = [{"kind": "run", "edge": "begin", "mono_ns": T0}]
    if idle:
        events += stage("idle.before", 0, 10)
    events += [*stage("student.train", 11, 70), {"kind": "run", "edge": "end", "mono_ns": T0 + 70 * NS}]
    lines_of(paths.events("h", 0, 1), events)
    write_json(paths.environment, {"host": "h", "gpus": list(gpus), "machine_profile": "h-20260101-abcd"})
    opened = RunRecord(
        run_id=paths.run_id, name="run", label="run", status="running", created_at="2026-01-01T00:00:00+00:00",
        spec={"energy": {"total_energy_policy": "gpu_only", **(energy or {})}},
    )  # fmt: skip
    write_json(paths.record, opened)
    return paths


def stage(name, begin, end):
    return [
        {"kind": "stage", "edge": "begin", "stage": name, "mono_ns": T0 + begin * NS},
        {"kind": "stage", "edge": "end", "stage": name, "mono_ns": T0 + end * NS},
        {"kind": "stage_closed", "stage": name, "status": "done"},
    ]


def test_a_sound_run_is_an_a_and_shows_gross_and_above_idle(tmp_path):
    record = assemble(make(tmp_path), "done")
    assert record.validity.grade == record.stage("student.train").validity.grade == "A", record.validity.reasons
    train = record.stage("student.train")
    assert train.energy_j == pytest.approx(59 * 500, rel=0.02)
    assert train.above_idle_j == pytest.approx(59 * 420, rel=0.02)
    assert record.totals.above_idle_j == pytest.approx(59 * 420, rel=0.02)


def test_idle_power_is_subtracted_over_the_covered_time_alone_and_has_an_interval(tmp_path):
    """The counter was set back while nothing was read for 30 of 59 s: 80 W were subtracted for all of them."""
    paths = make(tmp_path)
    trace = paths.trace("h", 1)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    kept = [line for line in lines if line["kind"] != "gpu" or not 30 < (line["mono_ns"] - T0) / NS < 60]
    for line in kept:
        if line["kind"] == "gpu" and line["mono_ns"] >= T0 + 60 * NS:
            line["energy_counter_j"] -= 20_000
    lines_of(trace, kept)
    train = assemble(paths, "done").stage("student.train")
    assert train.best.coverage == pytest.approx(29 / 59, abs=0.01) and train.best.is_lower_bound
    assert train.above_idle_j == pytest.approx(29 * 420, rel=0.02)
    assert train.above_idle.is_lower_bound and train.above_idle.half_width_j > 0
    assert train.mean_power_w == pytest.approx(500, rel=0.02)


def test_an_idle_baseline_states_its_state_and_its_stability(tmp_path):
    (baseline,) = assemble(make(tmp_path), "done").totals.idle
    assert (baseline.stage, baseline.sm_clock_MHz, baseline.temperature_C) == ("idle.before", 345, 40)
    assert baseline.power_w == pytest.approx(80, rel=0.02)
    assert baseline.stable


def test_without_a_baseline_the_grade_is_b_and_above_idle_unknown(tmp_path):
    record = assemble(make(tmp_path, idle=False), "done")
    assert record.validity.grade == "B"
    assert "no idle baseline" in record.validity.reasons[0]
    assert record.totals.above_idle_j is None


def test_the_policy_measured_states_that_the_cpu_is_left_out(tmp_path):
    record = assemble(make(tmp_path, energy={"total_energy_policy": "measured"}), "done")
    assert record.validity.reasons == ("the total excludes unmeasured components: cpu",)


def test_a_gpu_no_one_has_is_not_missed(tmp_path):
    paths = make(tmp_path, energy={"total_energy_policy": "measured"}, device={"component": "cpu"}, gpus=())
    assert "completeness" not in [check.name for check in assemble(paths, "done").validity.checks]


def test_another_process_on_the_card_is_a_reason_and_a_note(tmp_path):
    warning = {
        "kind": "warning", "device": "gpu:A", "mono_ns": T0 + 20 * NS,
        "text": "another process uses this GPU, and its energy is included in the card's: python (pid 7)",
    }  # fmt: skip
    record = assemble(make(tmp_path, extra=[warning]), "done")
    assert record.validity.grade == "B"
    assert any("pid 7" in reason for reason in record.validity.reasons)
    assert any("pid 7" in note.text for note in record.validity.notes)
    assert not any("pid 7" in reason for reason in record.stage("idle.before").validity.reasons)


def test_a_shared_card_is_a_c(tmp_path):
    record = assemble(make(tmp_path, device={"facts": {"shared": True}}), "done")
    assert record.validity.grade == "C"
    assert "H200 is shared" in record.validity.reasons[0]


def test_a_hot_card_is_a_b_and_a_power_limited_one_is_not(tmp_path):
    hot = assemble(make(tmp_path / "hot", gpu_fields={"throttle_reasons": 0x40}), "done")
    capped = assemble(make(tmp_path / "capped", gpu_fields={"throttle_reasons": 0x04}), "done")
    assert (hot.validity.grade, capped.validity.grade) == ("B", "A")


def test_an_interrupted_run_is_a_b(tmp_path):
    record = assemble(make(tmp_path, ended=False), "truncated")
    assert any("interrupted" in reason for reason in record.validity.reasons)


def test_a_counter_that_the_power_contradicts_is_a_c(tmp_path):
    record = assemble(make(tmp_path, gpu_fields={"power_watts": 900.0}), "done")
    assert record.validity.grade == "C"
    assert "they disagree" in record.validity.reasons[0]


def test_grams_are_in_stages_totals_and_summary_only_with_a_grid(tmp_path):
    plain = assemble(make(tmp_path / "plain"), "done")
    assert plain.totals.co2e is None and plain.stage("student.train").co2e is None
    assert not any("co2e" in key for key in flat_summary(plain))
    record = assemble(make(tmp_path / "grid", energy={"grid": "100", "pue": 1.5}), "done")
    kwh = record.stage("student.train").energy_j / 3.6e6
    found = record.stage("student.train").co2e
    assert found.co2e_g_low < 100 * kwh < found.co2e_g_high
    flat = flat_summary(record)
    assert flat["total_co2e_g_high"] == record.totals.co2e.co2e_g_high
    assert flat["student.train.with_pue_co2e_g_low"] == pytest.approx(1.5 * found.co2e_g_low)
    assert flat["grade"] == "A"


def test_the_machine_profile_is_cited(tmp_path):
    assert assemble(make(tmp_path), "done").machine_profile == "h-20260101-abcd"


def with_codecarbon(paths):
    rows = [{"kind": "codecarbon", "mono_ns": T0 + s * NS, "energy_j": 30.0 * s, "codecarbon_version": "3.3.2"}
            for s in range(71)]  # fmt: skip
    lines_of(readings_path(paths.folder, "h", 1), rows)
    return paths


def test_codecarbon_is_reported_under_its_own_name_and_in_no_total(tmp_path):
    record = assemble(with_codecarbon(make(tmp_path)), "done")
    assert record.totals.codecarbon.energy_j == pytest.approx(60 * 30)
    assert record.totals.energy_j == pytest.approx(59 * 500, rel=0.02)
    assert "CodeCarbon's own figure (3.3.2)" in record.totals.codecarbon.reason


def test_the_policy_codecarbon_reports_its_figure_by_stage_and_grades_it_c(tmp_path):
    record = assemble(with_codecarbon(make(tmp_path, energy={"total_energy_policy": "codecarbon"})), "done")
    assert record.totals.energy_j == pytest.approx(60 * 30)
    assert record.stage("student.train").energy_j == pytest.approx(59 * 30)
    assert record.validity.grade == "C"
    assert any("CodeCarbon's own" in note.text for note in record.validity.notes)


def test_the_policy_codecarbon_without_codecarbon_reports_it_and_falls_back_to_nothing(tmp_path):
    record = assemble(make(tmp_path, energy={"total_energy_policy": "codecarbon"}), "done")
    assert record.totals.energy_j is None
    assert any("has no figure" in note.text for note in record.validity.notes)


def cores(others, idle):
    line = {"kind": "cores", "device": "host", "cores": 2, "others_cores": others, "idle_cores": idle}
    return [{**line, "mono_ns": T0 + second * NS} for second in range(12, 70)]


ESTIMATE = {"device": "gpu:A", "component": "cpu_estimate", "facts": {"w_per_thread": 2.5, "source": "a table"}}


def test_an_estimate_made_while_others_used_the_cores_reports_it(tmp_path):
    record = assemble(make(tmp_path, device=ESTIMATE, extra=cores(1.2, 0.0)), "done")
    train = record.stage("student.train")
    assert train.best.method == "estimated"
    assert train.best.cpu_contention and record.totals.best.cpu_contention
    assert train.core_use.others_cores == pytest.approx(1.2)
    reported = "CPU contention: timings and CPU estimates are unreliable"  # how many cores, the note alone states
    assert reported in train.validity.reasons and reported in record.validity.reasons
    assert any("1.2 of 2 CPU cores during student.train" in note.text for note in record.validity.notes)
    idle = record.stage("idle.before")
    assert idle.core_use is None and not idle.best.cpu_contention


def test_a_quiet_machine_and_a_measured_card_keep_their_grade(tmp_path):
    quiet = assemble(make(tmp_path / "quiet", device=ESTIMATE, extra=cores(0.1, 0.2)), "done")
    assert not quiet.totals.best.cpu_contention
    assert "cores" not in [check.name for check in quiet.validity.checks]
    card = assemble(make(tmp_path / "card", extra=cores(1.2, 0.0)), "done")
    assert card.validity.grade == "A"
    assert "CPU contention: timings are unreliable" in [check.text for check in card.validity.checks]


def test_a_stage_without_items_has_no_energy_of_items(tmp_path):
    paths = make(tmp_path)
    (train,) = [one for one in assemble(paths, "done", None).stages if one.name == "student.train"]
    assert (train.samples, train.tokens, train.item_energy) == (None, None, None)


def test_every_rank_is_read_up_to_a_number_of_hosts_and_only_a_running_run_has_an_open_end(tmp_path, monkeypatch):
    asked, loaded = [], []
    attempt_record, load_attempts = assembling.attempt_record, assembling.load_attempts
    monkeypatch.setattr(
        assembling, "attempt_record", lambda attempt, every: asked.append(every) or attempt_record(attempt, every)
    )
    monkeypatch.setattr(
        assembling, "load_attempts", lambda paths, running: loaded.append(running) or load_attempts(paths, running)
    )
    for most_hosts, status in ((1, "done"), (0, "running")):
        monkeypatch.setattr(assembling, "MANY_HOSTS", most_hosts)
        assemble(make(tmp_path / status), status)
    assert (asked, loaded) == ([True, False], [False, True])
