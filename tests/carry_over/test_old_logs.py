"""Logs in the formats of the five original systems become runs; joules are compared with sums made by hand.

The files are written here, with small numbers: the formats are those of the originals, the content is ours.
"""

import json

import pytest

from joulelab.meter.importers import stage_records

CODECARBON = (
    "task_name,timestamp,project_name,run_id,duration,emissions,cpu_power,gpu_power,ram_power,cpu_energy,gpu_energy,"
    "ram_energy,energy_consumed,country_name"
)
EPOCH = 1_769_391_744


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def total(record):
    return record.best_energy


class TestCodeCarbon:
    def test_tasks_are_added_and_not_taken_as_cumulative(self, tmp_path, imported):
        # kWh: 3 forward 1e-5, 3 backward 2e-5, 3 optimizer 5e-6, in all 1.05e-4 kWh = 378 J in 3 x (0.1 + 0.2 + 0.05) s
        rows = [
            f"{task} #{step},2026-04-07T13:18:3{step},energy-efficiency,40f1,{seconds},{kwh * 0.1},360,100,10,"
            f"{kwh / 2},{kwh / 4},{kwh / 4},{kwh},Canada"
            for step in (1, 2, 3)
            for task, seconds, kwh in (
                ("Forward pass", 0.1, 1e-5),
                ("Backward pass", 0.2, 2e-5),
                ("Update step", 0.05, 5e-6),
            )
        ]
        (record,), data = imported(write(tmp_path / "run_0_cc_substep_rank_0-substeps.csv", CODECARBON, *rows))
        assert total(record).energy_j == pytest.approx(378)
        assert record.totals.duration_s == pytest.approx(1.05)
        assert {stage.name: stage.best.energy_j for stage in record.stages} == pytest.approx(
            {"codecarbon.forward-pass": 108, "codecarbon.backward-pass": 216, "codecarbon.update-step": 54}
        )
        emissions = [found["imported"]["emissions_kg"] for found in record.findings.values()]
        assert sum(emissions) == pytest.approx(1.05e-5)
        assert total(record).method == "estimated"
        assert total(record).half_width_j is None
        assert any("9 rows of run 40f1 are tasks" in note and "added" in note for note in data["notes"])

    def test_a_number_is_part_of_a_task_s_name_unless_it_is_set_off(self, tmp_path, imported):
        rows = [
            f"{task},2026-04-07T13:18:30,p,40f1,1,0,10,0,0,0,0,0,{kwh},Canada"
            for task, kwh in (("t0", 1e-6), ("t1", 2e-6), ("step_1", 3e-6), ("step_2", 4e-6), ("t1", "nan"))
        ]
        (record,), data = imported(write(tmp_path / "tasks.csv", CODECARBON, *rows))
        assert {stage.name: stage.best.energy_j for stage in record.stages} == pytest.approx(
            {"codecarbon.t0": 3.6, "codecarbon.t1": 7.2, "codecarbon.step": 25.2}
        )
        assert any("1 row left out: no valid energy_consumed" in note for note in data["notes"])

    def test_cumulative_rows_of_a_run_count_once(self, tmp_path, imported):
        header = CODECARBON.removeprefix("task_name,")
        rows = [f"2026-04-07T13:1{k}:00,p,ab,{60 * k},{k}e-5,100,100,10,0,0,0,{k}e-3,Canada" for k in (1, 2, 3)]
        (record,), data = imported(write(tmp_path / "emissions.csv", header, *rows))
        assert total(record).energy_j == pytest.approx(3e-3 * 3.6e6)
        assert record.totals.duration_s == pytest.approx(180)
        assert any("cumulative" in note for note in data["notes"])

    def test_a_duration_that_cannot_be_that_of_the_energy_makes_no_run(self, tmp_path, imported):
        header = CODECARBON.removeprefix("task_name,")
        row = "2026-04-07T13:18:00,p,ab,1.9,4e-5,360,60,10,0,0,0,0.0111,Canada"  # 40 kJ in 1.9 s at 430 W
        records, data = imported(write(tmp_path / "emissions.csv", header, row))
        assert records == []
        assert data["runs"][0]["total_j"] == pytest.approx(39_960)
        assert data["runs"][0]["duration_s"] is None


class TestBenchmark:
    """The distillation energy benchmark: power_log.csv, stage JSON, experiment_summary.json, stage_metrics.csv."""

    STAGE = {
        "stage_id": "kd_olmo2_32b_to_1b",
        "stage_name": "kd_olmo2_32b_to_1b",
        "start_time": float(EPOCH),
        "end_time": EPOCH + 20.0,
        "duration_seconds": 20.0,
        "tokens_processed": 1000,
        "gpu_energy_joules": 6000.0,
        "gpu_avg_power_watts": 300.0,
        "gpu_peak_power_watts": 410.0,
        "gpu_power_samples": [300.0] * 40,
        "total_codecarbon_energy_kwh": 0.002,
        "codecarbon_emissions_kg": 1e-4,
        "codecarbon_cpu_energy_kwh": 0.0001,
        "cpu_energy_joules": 500.0,
        "total_energy_joules": 6500.0,
        "nvml_poll_interval_ms": 500,
    }

    def test_power_log_csv_with_epoch_seconds_as_text(self, tmp_path, imported):
        # two cards: 100 W and 200 W for 10 s
        rows = [f"{EPOCH + 0.5 * k},{100},{200},{300}" for k in range(21)]
        path = write(tmp_path / "power_log.csv", "timestamp,gpu_0_power_w,gpu_1_power_w,total_power_w", *rows)
        (record,), data = imported(path, "--name", "kd")
        assert total(record).energy_j == pytest.approx(3000)
        assert {row.device: row.figure.energy_j for row in record.attempts[0].devices} == pytest.approx(
            {"gpu:0": 1000, "gpu:1": 2000}
        )
        assert (record.name, total(record).method, total(record).coverage) == ("kd", "integrated", 1.0)
        assert record.validity.grade == "B"
        assert record.stages[0].segments[0].started_at.startswith("2026-01-26T01:42:24")
        assert "since 1970" in data["clock"]

    def test_a_stage_json_keeps_its_energy_and_gets_no_interval(self, tmp_path, imported):
        (tmp_path / "kd.json").write_text(json.dumps(self.STAGE))
        (record,), _ = imported(tmp_path / "kd.json")
        assert total(record).energy_j == pytest.approx(6500)
        assert (record.totals.gpu.energy_j, record.totals.cpu.energy_j) == (6000, 500)
        assert record.totals.codecarbon.energy_j == pytest.approx(7200)
        assert total(record).half_width_j is None and record.totals.codecarbon.half_width_j is None
        (stage,) = record.stages
        assert (stage.role, stage.activity, stage.tokens, stage.peak_power_w) == ("student", "train", 1000, 410)
        assert record.validity.grade == "C"
        assert any(check.name == "imported" and "interval is unknown" in check.text for check in record.validity.checks)

    def test_cpu_energy_that_is_codecarbon_s_estimate_is_not_measured(self, tmp_path, imported):
        (tmp_path / "kd.json").write_text(json.dumps(self.STAGE | {"cpu_energy_joules": 360.0}))
        (record,), data = imported(tmp_path / "kd.json")
        assert total(record).energy_j == pytest.approx(6000)
        assert record.totals.cpu.energy_j is None
        assert any("CodeCarbon's estimate" in note for note in data["notes"])

    def test_experiment_summary_is_one_run_with_its_stages(self, tmp_path, imported):
        teacher = self.STAGE | {"stage_id": "logit_caching", "gpu_energy_joules": 4000.0}
        summary = {"experiment_name": "kd", "total_energy_joules": 11000.0, "stages": {"a": teacher, "b": self.STAGE}}
        (tmp_path / "experiment_summary.json").write_text(json.dumps(summary))
        (record,), _ = imported(tmp_path / "experiment_summary.json")
        assert total(record).energy_j == pytest.approx(4500 + 6500)
        assert [(stage.role, stage.activity) for stage in record.stages] == [("teacher", "cache"), ("student", "train")]
        assert record.totals.duration_s == pytest.approx(40)

    @pytest.mark.parametrize("with_header", [True, False])
    def test_stage_metrics_csv_also_without_its_header(self, tmp_path, imported, with_header):
        columns = stage_records.TABLE_COLUMNS
        fields = dict.fromkeys(columns, "") | {
            "stage_id": "sft_32b_to_1b",
            "source": "stage_json",
            "is_snapshot": "False",
            "start_time": str(EPOCH),
            "duration_seconds": "50.0",
            "gpu_energy_joules": "6000.5",
            "cpu_energy_joules": "0.0",
            "tokens_processed": "100.0",
        }
        empty = dict.fromkeys(columns, "") | {"stage_id": "logit_caching", "source": "stage_json"}
        lines = [",".join(row[name] for name in columns) for row in (fields, empty)]
        path = write(tmp_path / "stage_metrics.csv", *([",".join(columns)] if with_header else []), *lines)
        (record,), data = imported(path)
        assert total(record).energy_j == pytest.approx(6000.5)
        assert record.totals.duration_s == pytest.approx(50)
        assert any("1 rows have no duration or no energy" in note for note in data["notes"])
        assert any("no header line" in note for note in data["notes"]) is not with_header

    def test_a_run_folder_counts_each_stage_once(self, tmp_path, imported):
        stages = tmp_path / "logs" / "stages"
        done, killed = stages / "kd_done", stages / "kd_killed"
        for folder in (done, killed):
            folder.mkdir(parents=True)
        (done / "kd.json").write_text(json.dumps(self.STAGE))
        (stages / "kd.json").write_text(json.dumps(self.STAGE))  # a copy
        snapshot = self.STAGE | {"duration_seconds": 5.0, "gpu_energy_joules": 1000.0, "snapshot": True}
        (done / "kd__step_100.json").write_text(json.dumps(snapshot))
        summary = {"experiment_name": "kd", "stages": {"kd": self.STAGE}}
        (done / "experiment_summary.json").write_text(json.dumps(summary))
        (done / "environment_kd.json").write_text('{"gpu": "A100"}')
        write(done / "power_log.csv", "timestamp,gpu_0_power_w", *(f"{EPOCH + k},300" for k in range(21)))
        (killed / "kd2__step_100.json").write_text(json.dumps(snapshot | {"stage_id": "kd2"}))
        write(killed / "power_log.csv", "timestamp,gpu_0_power_w", *(f"{EPOCH + 100 + k},200" for k in range(11)))
        records, data = imported(tmp_path / "logs")
        assert sorted(round(total(record).energy_j) for record in records) == [2000, 6500]
        assert any("not counted again" in note for note in data["notes"])

    def test_several_files_can_be_one_run(self, tmp_path, imported):
        (tmp_path / "t.json").write_text(json.dumps(self.STAGE | {"stage_id": "synthetic_tulu_generation"}))
        (tmp_path / "s.json").write_text(json.dumps(self.STAGE))
        (record,), _ = imported(tmp_path / "t.json", tmp_path / "s.json", "--one-run", "--name", "both")
        assert total(record).energy_j == pytest.approx(13_000)
        assert {stage.role for stage in record.stages} == {"teacher", "student"}


class TestTelemetry:
    def test_nested_gpus_and_an_energy_field_under_the_wrong_unit(self, tmp_path, imported):
        """`energy_mJ` that holds microjoules: 60 W are 60e6 a second."""
        lines = [
            {
                "timestamp": f"2026-03-02T12:00:{k:02d}+00:00",
                "gpus": [
                    {"gpu_index": 0, "power_watts": 60.0, "energy_mJ": 24e12 + 60e6 * k},
                    {"gpu_index": 1, "power_watts": 80.0, "energy_mJ": 12e12 + 80e6 * k},
                ],
                "cpu": {"cpu_utilization_percent": 2.0},
            }
            for k in range(11)
        ]
        (record,), data = imported(write(tmp_path / "telemetry.jsonl", *map(json.dumps, lines)))
        assert total(record).energy_j == pytest.approx(600 + 800)
        assert total(record).method == "counter"
        assert total(record).coverage == 1.0
        assert any("cumulative in uJ, inferred from power x time (its name says mJ)" in note for note in data["notes"])

    def test_nested_gpus_with_short_names_keep_their_index(self, tmp_path, imported):
        lines = [
            {
                "timestamp": EPOCH + k,
                "gpus": [{"index": g, "power_w": 10.0 * g, "energy_mj": 1e4 * g * k} for g in (3, 5)],
            }
            for k in range(11)
        ]
        (record,), data = imported(write(tmp_path / "telemetry.jsonl", *map(json.dumps, lines)))
        assert total(record).energy_j == pytest.approx(10 * 30 + 10 * 50)
        assert [device["device"] for device in data["devices"]] == ["gpu:3", "gpu:5"]
        assert any("in mJ, inferred from power x time" in note for note in data["notes"])

    def test_a_per_step_table_with_energy_per_row(self, tmp_path, imported):
        # steps of 0.5 s at 200 W are 100 J = 100,000 mJ each; 10 steps are 1000 J in 5 s
        rows = [f"{k},{0.5 * k},200,100000,2.0" for k in range(1, 11)]
        path = write(tmp_path / "steps.csv", "step,elapsed_sec,gpu_power_w,gpu_energy_mj,loss", *rows)
        (record,), data = imported(path)
        assert total(record).energy_j == pytest.approx(1000)
        assert record.totals.duration_s == pytest.approx(5)
        assert any("energy per row in mJ" in note for note in data["notes"])

    def test_a_per_step_table_with_a_cumulative_counter(self, tmp_path, imported):
        rows = [f"{k},{0.5 * k},200,{7_000_000 + 100000 * k},2.0" for k in range(1, 11)]
        path = write(tmp_path / "steps.csv", "step,elapsed_sec,gpu_power_w,gpu_energy_mj,loss", *rows)
        (record,), data = imported(path)
        assert total(record).energy_j == pytest.approx(900)  # nine steps between ten readings
        assert any("cumulative in mJ" in note for note in data["notes"])

    @pytest.mark.parametrize("factor", [1, 1e3, 1e6, 1e9])
    @pytest.mark.parametrize("as_text", [True, False])
    def test_epoch_stamps_in_s_ms_us_and_ns(self, tmp_path, imported, factor, as_text):
        stamps = [int((EPOCH + 2 * k) * factor) for k in range(3)]
        lines = [{"timestamp": str(stamp) if as_text else stamp, "power_watts": 100.0} for stamp in stamps]
        (record,), _ = imported(write(tmp_path / "x.jsonl", *map(json.dumps, lines)))
        assert total(record).energy_j == pytest.approx(400)
        assert record.totals.duration_s == pytest.approx(4, rel=1e-6)


class TestGaps:
    @pytest.fixture
    def log(self, tmp_path):
        # 100 W for 10 s, nothing for 20 s, 100 W for 10 s
        seconds = [*range(11), *range(30, 41)]
        return write(tmp_path / "p.csv", "timestamp,gpu_0_power_w", *(f"{EPOCH + s},100" for s in seconds))

    def test_energy_with_a_gap_is_a_lower_bound_and_all_figures_agree(self, log, imported):
        (record,), data = imported(log)
        figure, (gpu,) = total(record), data["devices"]
        assert figure.energy_j == pytest.approx(2000)
        assert figure.is_lower_bound and figure.coverage == pytest.approx(0.5)
        assert figure.mean_power_w(record.totals.duration_s) == pytest.approx(100)
        assert gpu["energy_j"] == pytest.approx(gpu["mean_power_w"] * gpu["coverage"] * gpu["duration_s"])

    def test_a_gap_is_interpolated_on_request_and_labeled(self, log, imported):
        (record,), data = imported(log, "--interpolate-gaps")
        figure, (gpu,) = total(record), data["devices"]
        assert figure.energy_j == pytest.approx(4000)
        assert not figure.is_lower_bound
        assert "20.0 s without readings are interpolated" in figure.reason
        assert gpu["gaps_interpolated"] and gpu["energy_j"] == pytest.approx(4000)


def dmon(path, watts):
    names = "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk"
    rows = [f"{0:5d}{power:>7}     35      -     50      7      0      0   1215   1410" for power in watts]
    return write(path, names, *rows)


class TestIdleOfALog:
    """Busy and idle watts as in the original's six dmon logs: net 7, 11, 26, 19, 53 and 93 W."""

    @pytest.mark.parametrize("net_w", [7, 11, 26, 19, 53, 93])
    def test_idle_is_the_stable_time_before_the_load_only(self, tmp_path, joulelab, net_w):
        cooling = [61 + net_w * 0.45] * 10 + [61 + net_w * 0.4] * 20
        watts = [61] * 30 + [round(61 + net_w / 2)] + [61 + net_w] * 60 + [round(value) for value in cooling]
        path = dmon(tmp_path / "power_usage.csv", watts)
        code, out, err = joulelab("infer", "--from-log", path, "--latency-ms", 4.37, "--json")
        assert code == 0, err
        found = json.loads(out)["devices"][0]["inference"]
        assert found["power_above_idle_w"] == pytest.approx(net_w, abs=0.8)
        # half a watt of rounding in each level
        assert found["power_above_idle_half_width_w"] >= 0.7
        assert found["energy_above_idle_half_width_j"] == pytest.approx(
            found["power_above_idle_half_width_w"] * 4.37e-3
        )

    def test_a_log_that_begins_with_the_load_is_refused(self, tmp_path, joulelab):
        path = dmon(tmp_path / "p", [87] * 60 + [61] * 30)
        code, out, err = joulelab("infer", "--from-log", path, "--latency-ms", 4.37)
        assert (code, out) == (2, "")
        assert "begins with the load" in err

    def test_an_idle_segment_becomes_the_baseline_of_the_run(self, tmp_path, imported):
        (record,), _ = imported(dmon(tmp_path / "p", [61] * 30 + [87] * 61), "--idle", "0..29")
        assert record.totals.idle_power_w == pytest.approx(61)
        # 60 s at 87 W and one of the step between; 26 W above idle
        assert record.totals.above_idle_j == pytest.approx(60 * 26 + 13, rel=0.02)


class TestImportedRuns:
    @pytest.fixture
    def two(self, tmp_path, imported):
        for name, watts in (("a", 100), ("b", 200)):
            rows = [f"{EPOCH + k},{watts}" for k in range(21)]
            imported(write(tmp_path / f"{name}.csv", "timestamp,gpu_0_power_w", *rows), "--name", name)

    @pytest.mark.parametrize("verb", ["compare", "bill", "report", "show", "pack"])
    def test_every_command_takes_them(self, two, joulelab, verb, tmp_path):
        words = {"compare": ("a", "b"), "pack": ("b", "--out", str(tmp_path / "b.tar.gz"))}.get(verb, ("b",))
        code, out, err = joulelab(verb, *words)
        assert code == 0, err
        if verb in ("compare", "bill", "show"):
            assert "4.00" in out and "kJ" in out
        if verb == "compare":
            assert "2.00x" in out

    def test_query_and_verification(self, two, joulelab, tmp_path):
        _, out, _ = joulelab("query", "select name, provenance from runs", "--json")
        assert [row["provenance"] for row in json.loads(out)] == ["imported", "imported"]
        joulelab("pack", "b", "--out", tmp_path / "b.tar.gz")
        code, out, err = joulelab("unpack", "--verify", tmp_path / "b.tar.gz")
        assert code == 0, out + err

    def test_no_run_only_prints(self, tmp_path, joulelab):
        path = write(tmp_path / "a.csv", "timestamp,gpu_0_power_w", f"{EPOCH},100", f"{EPOCH + 10},100")
        code, out, _ = joulelab("import", path, "--no-run")
        assert code == 0 and "1.00 kJ" in out
        assert not (tmp_path / "store").exists()

    def test_the_same_content_is_imported_once(self, tmp_path, imported, joulelab):
        lines = ["timestamp,gpu_0_power_w", f"{EPOCH},100", f"{EPOCH + 10},100"]
        first, copied = write(tmp_path / "a.csv", *lines), write(tmp_path / "b.csv", *lines)
        [run], _ = imported(first)
        runs, data = imported(copied)
        assert not runs and [one["run_id"] for one in data["imported_before"]] == [run.run_id]
        code, _, err = joulelab("import", first)
        assert code == 0 and run.run_id in err and "--again" in err
        assert len(imported(first, "--again")[0]) == 1
        write(tmp_path / "a.csv", *lines, f"{EPOCH + 20},100")
        assert len(imported(first)[0]) == 1, "it has grown"

    def test_runs_of_joulelab_in_a_folder_are_left_out(self, tmp_path, imported, joulelab):
        folder = tmp_path / "mixed"
        folder.mkdir()
        loose = write(folder / "a.csv", "timestamp,gpu_0_power_w", f"{EPOCH},100", f"{EPOCH + 10},100")
        imported(loose)
        (tmp_path / "store").rename(folder / "runs")
        runs, _ = imported(folder)
        assert len(runs) == 1
        code, out, _ = joulelab("import", folder, "--no-run")
        assert code == 0 and "skipped 1 joulelab run, recorded already" in " ".join(out.split())
        loose.unlink()
        code, _, err = joulelab("import", folder)
        assert code == 2 and "contains runs of joulelab and no other log" in err and "they need no import" in err

    @pytest.mark.parametrize("bad", ["nothing.csv", "empty", "text"])
    def test_a_bad_path_leaves_no_run_behind(self, tmp_path, joulelab, bad):
        good = write(tmp_path / "a.csv", "timestamp,gpu_0_power_w", f"{EPOCH},100", f"{EPOCH + 10},100")
        (tmp_path / "empty").mkdir()
        (tmp_path / "text").write_text("hello\n")
        code, _, err = joulelab("import", good, tmp_path / bad)
        assert code == 2 and "Traceback" not in err
        assert not (tmp_path / "store").exists()
