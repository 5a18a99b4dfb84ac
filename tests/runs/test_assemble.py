"""A record as it is assembled from a folder with an exactly known trace; then its parts, with numbers by hand."""

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.meter.marks import PhaseAggregate
from joulelab.report.tables.run_tables import run_result
from joulelab.runs import assemble as assembling
from joulelab.runs.assemble import assemble
from joulelab.runs.attempt_data import SOURCE as CODECARBON
from joulelab.runs.attempt_data import readings_path
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import EnergyByComponent, RunRecord, StageKind, StageRecord, Validity, flat_summary

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


def test_a_run_that_used_a_server_without_a_meter_states_a_lower_bound_in_every_figure_of_its_own(tmp_path):
    paths = make(tmp_path)
    assert not flat_summary(assemble(paths, "done"))["lower_bound"]
    asked = {"kind": "unmetered", "stage": "student.train", "server": "http://far:8000/v1", "reason": "no sensor"}
    with paths.events("h", 0, 1).open("a") as events:
        events.write(json.dumps(asked) + "\n")
    record = assemble(paths, "done")
    assert record.best_energy.is_lower_bound and record.totals.figure.is_lower_bound
    assert flat_summary(record)["shown_energy_lower_bound"] and flat_summary(record)["student.train.lower_bound"]
    assert run_result(record).startswith("run: ≥ 29.")


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


def figure(energy_j, *sources, method="counter"):
    return EnergyFigure(energy_j=energy_j, method=method, sources=sources)


def energies(**figures):
    plain = dict.fromkeys(("gpu", "cpu", "dram", "cpu_estimate"), missing("no sensor"))
    return EnergyByComponent(**{**plain, **figures})


def test_peaks_of_hosts_add_up_within_an_attempt_and_not_over_attempts(monkeypatch):
    attempts = [(1, 100.0), (1, 200.0), (2, 50.0), (2, None)]
    parts = [(SimpleNamespace(number=number, trace=peak), []) for number, peak in attempts]
    monkeypatch.setattr(assembling, "_peak_w", lambda trace, best, windows: trace)
    assert assembling.peaks_w(parts, None) == [300.0, 50.0]


def stage_of(name, energy_j, **fields):
    energy = energies(gpu=figure(energy_j, "gpu:A"))
    fields = {"role": "student", "activity": "train"} | fields
    return StageRecord(
        name=name, number=1, status="done", segments=(), duration_s=1.0, energy=energy, best=energy.gpu,
        energy_j=energy_j, above_idle_j=None, mean_power_w=None, peak_power_w=None, **fields,
    )  # fmt: skip


def test_the_bill_of_an_artifact_has_parts_only_where_they_differ():
    train, setup = stage_of("train", 10.0), stage_of("compile", 3.0, role="setup", activity="compile")
    whole = assembling.ancestor_energy([train])
    assert whole["energy"]["gpu"].energy_j == 10.0 and whole["work"] == whole["setup"] == {}
    parts = assembling.ancestor_energy([train, setup])
    assert [parts[name]["gpu"].energy_j for name in ("energy", "work", "setup")] == [13.0, 10.0, 3.0]
    assert parts["repeated"] == {}


def test_a_bill_mentions_machine_and_node_only_where_they_were_measured():
    assert "node" not in assembling.stage_energy([stage_of("train", 10.0)])
    metered = stage_of("train", 10.0)
    metered = metered.model_copy(update={"energy": energies(gpu=figure(10.0, "gpu:A"), node=figure(90.0, "ipmi:0"))})
    found = assembling.stage_energy([metered])
    assert found["node"].energy_j == 90.0 and "machine" not in found
    assert assembling.stage_energy([])["all"].energy_j is None


def test_the_role_of_a_stage_is_that_of_the_stage_with_its_name():
    stages = (stage_of("one", 1.0, role="data", activity="load"), stage_of("two", 1.0))
    assert assembling._kind_of("two", stages)[:2] == ("student", "train")
    assert assembling._kind_of("one", stages)[:2] == ("data", "load")


def test_a_result_in_joules_needs_the_energy_of_all_its_artifacts(monkeypatch):
    monkeypatch.setattr(assembling, "components_of", lambda one: SimpleNamespace(best=lambda policy: one.figure))
    lineage = [SimpleNamespace(key="a", figure=figure(6.0)), SimpleNamespace(key="b", figure=figure(4.0))]

    def results(*keys):
        events = SimpleNamespace(results={}, joules={"cost": (keys, 2)})
        return assembling._results([SimpleNamespace(events=events)], lineage, "measured")

    assert results("a", "b")["cost"].value == 5.0
    assert results("a")["cost"].value == 3.0
    assert results("a", "gone") == results("gone") == {}
    assert results("a")["cost"].lower_is_better
    lineage[1].figure = figure(0.0)
    assert results("a", "b")["cost"].value == 3.0 and results("b")["cost"].value == 0.0


def test_the_paces_of_other_ranks_are_read_only_on_request(monkeypatch):
    monkeypatch.setattr(assembling, "rank_paces", lambda rank, events: [rank])
    monkeypatch.setattr(assembling, "read_events", lambda path: None)
    attempt = SimpleNamespace(rank=0, event_files=[(0, "a"), (1, "b"), (2, "c")], events=None)
    assert (assembling._ranks(attempt, False), assembling._ranks(attempt, True)) == ([0], [0, 1, 2])
    two = SimpleNamespace(rank=0, event_files=[(0, "a"), (1, "b")], events=None)
    assert assembling._ranks(two, True) == [0, 1]
    single = SimpleNamespace(rank=0, event_files=[(0, "a")], events=None)
    assert assembling._ranks(single, True) == []


def test_the_slowest_twentieth_of_a_phase_begins_at_p95():
    phases = PhaseAggregate()
    for duration_s in [0.001] * 50 + [0.01] * 46 + [1.0] * 4:
        phases.add(duration_s)
    attempt = SimpleNamespace(rank=0, number=1, events=SimpleNamespace(phases={("train", "step"): phases}))
    record = assembling._phases([(attempt, [])], "train")["step"]
    assert (record.count, record.max_s) == (100, 1.0)
    assert (record.p50_s, record.p95_s) == (pytest.approx(0.001), pytest.approx(0.01))


def steps_of(*durations_s):
    found = PhaseAggregate()
    for duration_s in durations_s:
        found.add(duration_s)
    return found


def test_the_pace_of_a_rank_is_its_mean_step_and_its_own_work_in_it():
    phases = {("train", "step"): steps_of(1.0, 3.0), ("train", "input"): steps_of(0.2, 0.2)}
    phases |= {("train", "forward"): steps_of(0.6, 0.6), ("train", "backward"): steps_of(9.0)}
    phases[("load", "input")] = steps_of(7.0)
    (pace,) = assembling.rank_paces(3, SimpleNamespace(phases=phases))
    assert (pace.rank, pace.stage, pace.steps, pace.step_s) == (3, "train", 2, 2.0)
    assert pace.own_s == pytest.approx(0.8)


def test_a_rank_reads_its_own_events_and_those_of_others_from_their_files(monkeypatch):
    monkeypatch.setattr(assembling, "rank_paces", lambda rank, events: [(rank, events)])
    monkeypatch.setattr(assembling, "read_events", lambda path: f"read {path}")
    attempt = SimpleNamespace(rank=1, event_files=[(0, "a"), (1, "b")], events="own")
    assert assembling._ranks(attempt, True) == [(0, "read a"), (1, "own")]


def test_the_mean_of_a_phase_is_its_time_over_its_number():
    events = SimpleNamespace(phases={("train", "step"): steps_of(1.0, 3.0), ("other", "step"): steps_of(50.0)})
    record = assembling._phases([(SimpleNamespace(rank=0, number=1, events=events), [])], "train")["step"]
    assert (record.count, record.sum_s, record.mean_s) == (2, 4.0, 2.0)


def test_a_stage_has_the_kind_that_its_latest_attempt_declared():
    def part(**kinds):
        return SimpleNamespace(events=SimpleNamespace(kinds=kinds)), []

    first, second = StageKind("student", "train"), StageKind("teacher", "train")
    assert assembling._kind("x", [part(x=first), part(x=second), part()]) == second
    assert assembling._kind("teacher.train", [part(x=first)]).role == "teacher"
    assert assembling._kind(assembling.OVERHEAD, [part(**{assembling.OVERHEAD: first})]).role == "setup"


def test_the_status_of_a_stage():
    def status(kind=None, run="done", name="x", **statuses):
        kind = kind or StageKind("student", "train")
        attempt = SimpleNamespace(rank=0, number=1, host="h", events=SimpleNamespace(statuses=statuses))
        return assembling._stage_status(name, kind, [(attempt, [])], run)

    assert (status(x="failed"), status(x="done"), status(x="open"), status()) == ("failed", "done", *["truncated"] * 2)
    assert (status(run="running"), status(name=assembling.OVERHEAD, run="failed")) == ("running", "failed")
    part = StageKind("setup", "compile", part_of="train")
    assert status(part, x="failed") == "done"
    assert status(part._replace(repeated=True), x="done") == "truncated"


def test_the_peak_is_of_the_components_of_the_figure(monkeypatch):
    peaks = {"gpu": 300.0, "cpu": None, "dram": 20.0, "cpu_estimate": 7.0}
    monkeypatch.setattr(assembling, "peak_power_w", lambda trace, component, windows: peaks[component])
    assert assembling._peak_w(None, figure(1.0, "gpu:A"), []) == 320.0
    assert assembling._peak_w(None, figure(1.0, "cpu", method="estimated"), []) == 7.0
    assert assembling._peak_w(None, figure(1.0, CODECARBON, method="estimated"), []) is None
    peaks |= {"gpu": None, "dram": None}
    assert assembling._peak_w(None, figure(1.0, "gpu:A"), []) is None


def test_idle_energy_is_subtracted_for_covered_time_with_an_error_that_stages_share():
    half = figure(100.0, "gpu:A").model_copy(update={"coverage": 0.5})
    found = assembling._above_idle(half, SimpleNamespace(power_w=2.0, half_width_w=0.1), 20.0)
    assert found.energy_j == 80.0
    assert [(one.name, one.joules, one.shared) for one in found.errors] == [("idle", (1.0,), True)]
    assert assembling._above_idle(half, None, 20.0) is None


def test_artifacts_of_this_run_have_the_energy_of_its_stages_and_others_their_own(monkeypatch):
    def ancestor(key):
        own = SimpleNamespace(key=key, stages=("train",))
        own.model_copy = lambda update: SimpleNamespace(key=key, joules=update["energy"]["gpu"].energy_j)
        return own

    bills = {
        key: SimpleNamespace(key=key, artifact=SimpleNamespace(made_by=run))
        for key, run in (("a", "me"), ("b", "other"))
    }
    monkeypatch.setattr(assembling, "ancestry_of", lambda bills: [ancestor("a"), ancestor("b")])
    attempts = [SimpleNamespace(events=SimpleNamespace(bills=bills))]
    stages = (stage_of("train", 10.0), stage_of("other", 5.0))
    made, lineage = assembling._lineage("me", attempts, stages, lambda one: SimpleNamespace(key=one.key, joules=-1))
    assert made == ("a",) and [(one.key, one.joules) for one in lineage] == [("a", 10.0), ("b", -1)]


def test_items_of_setup_belong_to_the_stage_of_setup():
    """12 samples, 4 of them while compiling; work that was lost is counted again by the later attempt."""

    def attempt(number, samples, windows=()):
        opening = SimpleNamespace(setup_counts={"samples": 4})
        events = SimpleNamespace(
            counts={"train": {"samples": samples}}, openings={"train": [opening]} if number == 1 else {}
        )
        return SimpleNamespace(rank=0, number=number, host="h", events=events, windows=dict.fromkeys(windows)), []

    train, setup = StageKind("student", "train"), StageKind("setup", "compile", part_of="train")
    assert assembling._count([attempt(1, 12)], "train", train, "samples") == 8
    assert assembling._count([attempt(1, 12)], "compile", setup, "samples") == 4
    assert assembling._count([attempt(1, 12)], "compile", setup, "tokens") is None
    assert assembling._count([attempt(1, 12)], "train", train._replace(part_of="x"), "samples") == 8
    assert assembling._count([attempt(1, 12)], "train", StageKind("setup", "start"), "samples") == 8
    assert assembling._count([attempt(1, 12), attempt(2, 10)], "train", train, "samples") == 8
    lost = [attempt(1, 12), attempt(2, 10, [assembling.repeated_name("train")])]
    assert assembling._count(lost, "train", train, "samples") == 6


def part_of_run(*windows, number=1, host="h", stages=None, gpu_j=100.0, cpu_j=None, used_percent=(), **events):
    """A host's part of an attempt; `windows` are in seconds. All windows have the same energy."""
    plain = {name: {} for name in ("kinds", "counts", "openings", "statuses", "phases", "unmetered")}
    states = [SimpleNamespace(utilization_percent=one) for one in used_percent]
    figures = {"gpu": figure(gpu_j, "gpu:A")} | ({"cpu": figure(cpu_j, "rapl:0")} if cpu_j else {})
    return SimpleNamespace(
        number=number, host=host, rank=0, windows=stages or {}, overhead_windows=windows_ns(*windows),
        events=SimpleNamespace(**{**plain, "device": None, **events}), trace=SimpleNamespace(devices=()),
        energy=lambda windows: energies(**figures), core_use=lambda windows: None, started_at=str,
        health=SimpleNamespace(during=lambda windows: states),
    )  # fmt: skip


def windows_ns(*windows):
    return [(int(begin * 1e9), int(end * 1e9)) for begin, end in windows]


RUNNING = assembling._Frame("measured", "running", (), None, None, None, None, {})


def record_of(kind, seconds=(4.0, 14.0), **fields):
    attempt = part_of_run(kinds={"x": kind}, **fields)
    return assembling._stage_record("x", 1, [(attempt, windows_ns(seconds))], RUNNING)


def test_rates_of_a_stage_are_per_item_and_per_second():
    """100 J in 10 s for 20 samples of 400 tokens together."""
    train = StageKind("student", "train")
    both = record_of(train, counts={"x": {"samples": 20, "tokens": 400}})
    assert (both.j_per_sample, both.j_per_token, both.samples_per_s, both.tokens_per_s) == (5.0, 0.25, 2.0, 40.0)
    assert (both.duration_s, both.mean_power_w, both.peak_power_w, both.outside_totals) == (10.0, 10.0, 10.0, False)
    asked = record_of(train, counts={"x": {"samples": 20, "tokens": 400}}, unmetered={"x"})
    assert (asked.j_per_sample, asked.j_per_token, asked.tokens_per_s) == (None, None, 40.0), "the client's energy"
    assert asked.best.is_lower_bound and asked.energy.gpu.is_lower_bound, "without the server's"
    assert asked.energy.cpu == both.energy.cpu and not both.best.is_lower_bound
    (segment,) = both.segments
    assert (segment.duration_s, segment.start_ns, segment.end_ns) == (10.0, 4 * 10**9, 14 * 10**9)
    assert record_of(StageKind("idle", "idle")).outside_totals


def test_setup_has_items_and_no_rates():
    setup = record_of(
        StageKind("setup", "start"), counts={"x": {"samples": 20, "tokens": 400}}, device="cpu", cpu_j=30.0
    )
    rates = (setup.j_per_sample, setup.j_per_token, setup.samples_per_s, setup.tokens_per_s, setup.item_energy)
    assert (setup.samples, setup.tokens) == (20, 400) and rates == (None,) * 5


@pytest.mark.parametrize("what", ["samples", "tokens"])
def test_items_of_work_on_the_cpu_have_the_energy_of_the_cpu(what):
    """30 J of the CPU and 100 J of GPUs that did nothing; if they were used, all 130 J belong to the work."""
    train, infer, counts = StageKind("student", "train"), StageKind("inference", "generate"), {"x": {what: 20}}

    def per_item(kind=train, **fields):
        found = record_of(kind, counts=counts, cpu_j=30.0, **fields)
        return found.j_per_sample if what == "samples" else found.j_per_token

    assert per_item(device="cpu") == per_item(device="cpu", used_percent=(0, 0)) == 1.5
    assert per_item(device="cuda") == per_item() == per_item(device="cpu", used_percent=(0, 50)) == 6.5
    assert per_item(infer, device="cpu", used_percent=(0, 50)) == 1.5
    without_gpu = record_of(train, counts=counts, cpu_j=30.0, gpu_j=None, device="cpu")
    assert without_gpu.item_energy is None
    assert record_of(train, cpu_j=30.0, device="cpu").item_energy is None


def test_stages_are_in_the_order_of_attempts_and_then_of_time():
    first = part_of_run((50.0, 51.0), stages={"b": windows_ns((9, 10)), "a": windows_ns((3, 4), (20, 21)), "lost": []})
    second = part_of_run(number=2, stages={"c": windows_ns((1, 2)), "lost": windows_ns((5, 7)), "never": []})
    records = assembling._stage_records([first, second], RUNNING)
    assert [(one.number, one.name) for one in records] == [
        (1, "a"), (2, "b"), (3, "never"), (4, "c"), (5, "lost"), (6, assembling.OVERHEAD),
    ]  # fmt: skip
    by_name = {one.name: one for one in records}
    assert [segment.attempt for segment in by_name["lost"].segments] == [2] and by_name["never"].segments == ()
    assert assembling.OVERHEAD not in {one.name for one in assembling._stage_records([second], RUNNING)}


def test_an_attempt_lasts_from_its_begin_to_its_end():
    attempt = part_of_run()
    vars(attempt).update(
        trace=SimpleNamespace(header={}, ended=True, devices=()), begin_ns=5 * 10**9, end_ns=8 * 10**9,
        billed_windows=windows_ns((5, 7)), event_files=[], clock_offset_s=0.0,
    )  # fmt: skip
    record = assembling.attempt_record(attempt)
    assert (record.duration_s, record.billed_s, record.boot_id, record.ranks) == (3.0, 2.0, "", ())


def test_the_grade_of_a_run_sees_the_energies_of_finished_repeats(monkeypatch):
    @dataclass(frozen=True)
    class Evidence:
        repeats_j: tuple = ()

    monkeypatch.setattr(assembling, "gather", lambda *given: Evidence())
    monkeypatch.setattr(assembling, "notes_on", lambda *given: [])
    monkeypatch.setattr(assembling, "grade", lambda evidence, notes: (evidence.repeats_j, notes))
    stages = (
        stage_of("a", 5.0, repeat=1),
        stage_of("b", 7.0),
        stage_of("c", 6.0, repeat=2),
        stage_of("d", None, repeat=3),
    )
    failed = stage_of("e", 9.0, repeat=4).model_copy(update={"status": "failed"})
    finished = replace(RUNNING, status="done")
    totals = SimpleNamespace(node=missing("no meter"), best=figure(5.0, "gpu:A"))
    assert assembling._run_validity([], (*stages, failed), totals, finished) == ((5.0, 6.0), [])
    totals.node = figure(900.0, "ipmi:0")
    (note,) = assembling._run_validity([], (), totals, finished)[1]
    assert note.text.startswith("node meter (ipmi:0): 900 J")
    assert assembling._run_validity([], (), None, finished) == Validity()
