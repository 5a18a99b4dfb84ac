"""What a reader of the tables sees: rows as asked for, one number for one thing, and whatever makes them doubtful."""

from types import SimpleNamespace

import pytest
from inference_records import generated, record, row, stage

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare.break_even_report import serving_costs
from joulelab.report.compare.method_rows import compare
from joulelab.report.figures.serving_figures import joules_against_latency, models_against_latency
from joulelab.report.tables.grid import render_text, to_rich
from joulelab.report.tables.inference_pair import models_data, models_grids, models_sentences, serving_grid
from joulelab.report.tables.inference_rows import inference_rows, row_ratios
from joulelab.report.tables.inference_tables import _agreement, inference_grids, rows_data
from joulelab.report.tables.run_tables import run_result, stages_grid, summary_grids
from joulelab.runs.groups import GroupRecord
from joulelab.runs.record import ErrorRecord

PARTS = ("prefill", "decode", "infer")
TEXT = "generation"


def test_rows_are_in_the_requested_order():
    made = record([row(mode="fastest"), row(mode="eager")], stages=[stage(1), stage(0)])
    assert [found.values["mode"] for found in inference_rows(made)] == ["eager", "fastest"]
    (ratio,) = row_ratios(inference_rows(made))
    assert ratio.base.values["mode"] == "eager"


def test_items_per_second_are_the_mean_that_joules_and_watts_go_with():
    slow_at_times = row(batch=8, ms=1.0, gross_j=0.05, power_w=200.0, calls=1000, seconds=2.0)
    (found,) = inference_rows(record([slow_at_times]))
    assert found.items_per_s == 4000  # 8000 by the median
    assert found.energy.power_w / found.items_per_s == pytest.approx(found.energy.gross_j)
    table = inference_grids(record([slow_at_times]))[0]
    assert {"Latency\nmedian\nms", "images\nper s\nmean", "W\nmean"} <= {column.title for column in table.columns}
    assert "4.00 k" in table.rows[0]


@pytest.mark.parametrize("tracker", ["inference", TEXT])
def test_energy_per_item_is_one_number_in_all_tables(tracker):
    """304 mJ in the timed windows and 315 mJ in the stage around them stood in one output."""
    around = EnergyFigure(energy_j=63.0, method="counter", half_width_j=0.1)
    known = stage(0).model_copy(
        update={"best": around, "samples": 200, "j_per_sample": 0.315, "samples_per_s": 63.5, "role": "inference"}
    )
    values = row(gross_j=0.304, calls=200, seconds=2.0, part="infer", new_tokens=2)
    made = record([values], stages=[known], tracker=tracker)
    (cells,) = stages_grid(made).rows
    assert "304 mJ" in cells and "100" in cells and "315 mJ" not in cells
    assert "of its timed windows" in stages_grid(made).note
    use = serving_costs(SimpleNamespace(record=made))
    assert use.energy.energy_j * (2 if use.item == "token" else 1) == pytest.approx(0.304)


def test_others_on_the_cores_make_latencies_upper_bounds():
    rows = [row(1), row(8)]
    (table, *_) = inference_grids(record(rows, stages=[stage(0, 0.1), stage(1, 1.3)]))
    assert "CPU contention (batch 8, eager, bf16): latencies are upper bounds" in table.note
    (table, *_) = inference_grids(record(rows, stages=[stage(0, 0.7), stage(1, 1.3)]))
    assert "CPU contention (all rows): latencies are upper bounds" in table.note
    assert "contention" not in inference_grids(record(rows))[0].note
    parts = [generated(part) for part in PARTS]
    stages = [stage(number, 1.3) for number in range(3)]
    assert "CPU contention (all rows)" in inference_grids(record(parts, tracker=TEXT, stages=stages))[0].note


def test_no_row_is_called_the_best_where_others_used_the_cores():
    quiet, contended = (record([row(1), row(8)], stages=[stage(0, 0.1), stage(1, others)]) for others in (0.1, 1.3))
    for made, has_front in ((quiet, True), (contended, False)):
        (table, *_) = inference_grids(made)
        assert ("Pareto" in {column.title for column in table.columns}) is has_front
        assert ("No Pareto front is marked" in table.note) is not has_front
        assert ("No Pareto front" in joules_against_latency(made).caption) is not has_front
        assert ([one["on_pareto_front"] for one in rows_data(made)] == [None, None]) is not has_front


def test_rows_that_cannot_be_distinguished_have_no_front_and_no_line():
    """The first quicker in one round, the second in another; a row without joules leaves nothing to be cheapest of."""
    unsure = record([row(norm="LN", rounds=(1.0, 1.1)), row(norm="DyT", ms=0.99, gross_j=0.199, rounds=(1.1, 1.0))])
    missing = record([row(norm="LN"), row(norm="DyT", ms=0.5, gross_j=None)])
    sure = record([row(norm="LN"), row(norm="DyT", ms=0.5, gross_j=0.1)])
    for made, why in ((unsure, "no difference between the rows is significant"), (missing, "energy is missing")):
        table = inference_grids(made)[0]
        assert "Pareto" not in {column.title for column in table.columns}
        assert f"No Pareto front is marked: {why}." in table.note
        assert [one["on_pareto_front"] for one in rows_data(made)] == [None, None]
    assert "No Pareto front is marked: no difference" in joules_against_latency(unsure).caption
    assert [one["on_pareto_front"] for one in rows_data(sure)] == [False, True]
    larger = [row(8, norm="LN", ms=4, gross_j=0.1, rounds=(1.0, 1.1))]
    larger += [row(8, norm="DyT", ms=4.1, gross_j=0.101, rounds=(1.1, 1.0))]
    # beside another input, rows that are alike are on the front together
    made = record([row(norm="LN"), *larger])
    assert [one["on_pareto_front"] for one in rows_data(made)] == [True, True, True]


def test_why_rows_ended_is_reported_once_with_the_intervals_of_the_table():
    """While it is decided the trace runs late, so an interval told then is not the one that the table has."""
    rows = [row(1, gross_j=0.165, half_j=0.185, stopped="time"), row(8, half_j=0.02, stopped="time"), row(32)]
    (table, *_) = inference_grids(record(rows, idle_w=()))
    assert "165 mJ ±185 mJ" in table.rows[0]
    assert "Ended by: time: batch 1, eager, bf16 (±112 %); batch 8, eager, bf16 (±10 %)." in table.note
    parts = [generated(part, stopped="time") for part in PARTS]
    note = inference_grids(record(parts, tracker=TEXT))[1].note
    assert "Ended by: time: batch 1, eager, bf16, prefill (±1 %); batch 1, eager, bf16, decode (±1 %);" in note
    old = [{key: value for key, value in part.items() if key != "stopped"} for part in parts]
    assert "Ended" not in inference_grids(record(old, tracker=TEXT))[1].note


def test_one_round_states_a_ratio_and_no_interval():
    *_, ratios = inference_grids(record([row(rounds=(1.0,)), row(mode="fastest", ms=0.5, rounds=(1.0,))]))
    assert ratios.rows[0][2] == "0.500" and ratios.rows[0][-1] == "a single round has no spread"


@pytest.mark.parametrize("of", [lambda **more: [row(**more)], lambda **more: [generated(p, **more) for p in PARTS]])
def test_estimates_and_the_memory_of_a_whole_process_are_called_so(of):
    made = of(device="cpu")
    for one in made:
        one["energy"] |= {"method": "estimated", "gain_error_rel": 0.7}
    grids = inference_grids(record(made, tracker=TEXT if "part" in made[0] else "inference"))
    notes = " ".join(grid.note for grid in grids)
    assert "Energy is estimated from CPU time, not measured; ±: total uncertainty" in notes
    cells = " ".join(cell for grid in grids for line in grid.rows for cell in line)
    assert "±70 %" in cells and "±1 %" not in cells, "1 % of them is random"
    assert "Memory: peak of the whole process." in notes
    assert "Net: less" not in notes


def test_a_reason_that_the_run_gives_above_is_not_given_again():
    rows = [row(gross_j=None)]
    assert "see the run's line `energy`" in inference_grids(record(rows, why="gpu: no sensor"))[0].note
    assert "gpu: no sensor" in inference_grids(record(rows, why="something else"))[0].note


def test_compared_inference_runs_stand_side_by_side_per_item(tmp_path):
    made = [record([row(1), row(8)], name="one"), record([generated(part) for part in PARTS], name="two", tracker=TEXT)]
    group = GroupRecord(group_id="g", name="g", about="", created_at="", members=(), varying={}, baseline="one")
    grid = serving_grid(compare(group, made, tmp_path, {one.run_id: tmp_path for one in made}))
    assert [(cells[0], cells[3]) for cells in grid.rows] == [
        ("one, seed 0", "batch 1, eager, bf16"),
        ("one, seed 0", "batch 8, eager, bf16"),
        ("two, seed 0", "batch 1, 256 + 128 tokens, eager, bf16"),
    ]
    assert [column.title for column in grid.columns][:3] == ["Run", "Energy per item\ngross", "Latency\nms"]
    assert (grid.rows[0][1], grid.rows[0][4]) == ("200 mJ ±1 % / image", "139 mJ ±1.6 %")
    assert grid.rows[2][1].endswith("/ response")


def test_the_serving_cost_of_generated_text_is_that_of_whole_responses_per_token():
    """Prefill is the first stage; its energy over the response's tokens is no energy per token."""
    parts = [generated("prefill", gross_j=9.0), generated("decode", gross_j=10.0), generated("infer", gross_j=12.8)]
    stages = [stage(number).model_copy(update={"role": "inference"}) for number in range(3)]
    cost = serving_costs(SimpleNamespace(record=record(parts, stages=stages, tracker=TEXT)))
    assert (cost.item, cost.stage.name) == ("token", "infer.2")
    assert cost.j_per_item == pytest.approx(0.1)  # 12.8 J over 128 tokens


def models():
    slow = record([row(1, ms=3.0, gross_j=0.1)], name="slow")
    fast = record([row(1, ms=1.0, gross_j=0.3), row(8, ms=4.0, gross_j=0.2)], name="fast")
    none = record([row(1, ms=2.0, gross_j=None)], name="none")
    broken = record([], name="broken").model_copy(
        update={"status": "failed", "error": ErrorRecord(kind="OutOfMemory", message="b1 does not fit", hint="")}
    )
    return [fast, broken, slow, none]


def test_several_models_are_in_one_table_with_energy_and_latency_first():
    grid, failed = models_grids(models())
    assert [column.title for column in grid.columns][:3] == ["Model", "Energy per item\ngross", "Latency\nms"]
    assert [cells[0] for cells in grid.rows] == ["fast", "fast", "slow", "none"]
    assert grid.rows[0][1:3] == ("300 mJ ±0.7 % / image", "1")
    assert grid.rows[3][1:3] == ("missing", "2") and "gpu: no sensor" in grid.note
    assert failed.rows == (("broken", "failed: b1 does not fit", "broken-1"),)


def test_models_are_sorted_as_requested_and_those_without_energy_are_last():
    assert [cells[0] for cells in models_grids(models(), "energy")[0].rows] == ["slow", "fast", "fast", "none"]
    assert [cells[0] for cells in models_grids(models(), "latency")[0].rows] == ["fast", "none", "slow", "fast"]
    assert [one["model"] for one in models_data(models(), "energy")] == ["slow", "fast", "broken", "none"]
    (broken,) = [one for one in models_data(models()) if one["model"] == "broken"]
    assert (broken["status"], broken["error"], broken["rows"]) == ("failed", "b1 does not fit", [])


def test_generated_text_of_several_models_is_compared_per_token():
    facts = {"file": "q.txt", "count": 5, "shortest": 3, "longest": 40, "batches": 3, "repeated": 1}
    made = [
        record(
            [generated(part, gross_j=joules, prompts={**facts, "batches_measured": 2}) for part in PARTS],
            name=name,
            tracker=TEXT,
        )
        for name, joules in (("large", 25.6), ("small", 12.8))
    ]
    (grid,) = models_grids(made, "energy")
    assert [cells[:2] for cells in grid.rows] == [("small", "100.0 mJ ±<0.1 %"), ("large", "200.0 mJ ±<0.1 %")]
    assert "Prompts: 5 of q.txt, 3 to 40 tokens" in grid.note
    assert "1 of them are used twice" in grid.note and "Only 2 of 3 batches were measured" in grid.note


def test_the_first_table_of_generated_text_begins_with_energy_per_token_and_response():
    parts = [generated(part, gross_j=joules) for part, joules in zip(PARTS, (0.5, 12.7, 13.3), strict=True)]
    first = summary_grids(record(parts, tracker=TEXT))[0]
    assert [column.title for column in first.columns][:3] == [
        "Batch",
        "Energy per\noutput token",
        "Energy per\nresponse",
    ]
    assert first.rows[0][1].startswith("100") and first.rows[0][2].startswith("13.30 J")


def test_one_token_is_singular():
    facts = {
        "file": "q.txt",
        "count": 1,
        "shortest": 1,
        "longest": 1,
        "repeated": 0,
        "batches_measured": 1,
        "batches": 1,
    }
    lengths = {"prompt_tokens": 1, "new_tokens": 2, "prompts": facts}
    parts = [{**generated(part), **lengths} for part in PARTS]
    first = inference_grids(record(parts, tracker=TEXT))[0]
    assert "1 prompt token (mean), 2 new tokens" in first.caption
    assert "1 of q.txt, 1 token, padded" in first.note and "1 tokens" not in first.caption + first.note


def test_the_result_of_an_inference_run_is_energy_per_item_and_latency():
    rows = [row(batch=1, gross_j=0.3, ms=2.0), row(batch=8, gross_j=0.2, half_j=0.01, ms=4.0)]
    found = run_result(record(rows))
    assert found.startswith("infer-deit-b: 200 mJ ±5 % per image, ")
    assert "; median latency 4.00 ms (batch 8, eager, bf16; lowest of 2 rows); whole run: " in found
    parts = [generated(part, gross_j=joules) for part, joules in zip(PARTS, (0.5, 12.7, 13.3), strict=True)]
    assert "13.30 J" in run_result(record(parts, tracker=TEXT)).partition(" per response")[0]
    assert "energy per image missing; median latency" in run_result(record([row(gross_j=None)]))


def test_the_chart_of_models_says_what_its_bars_are_and_has_ticks_around_every_point():
    made = []
    for name, ms in (("deit-t", 41.0), ("deit-s", 125.0)):
        values = row(ms=ms, gross_j=0.2, half_j=0.024)
        values["energy"] |= {"method": "estimated", "gain_error_rel": 0.7}
        made.append(record([values], name=name, stages=[stage(0, others_cores=1.5)]))
    figure = models_against_latency(made)
    assert "bars: 95 % interval of the spread between readings, without the scale error" in figure.caption
    assert "±70 %" in figure.caption
    axes = [layer["encoding"]["x"] for layer in figure.spec["layer"]]
    assert all(axis["axis"]["values"] == [20, 50, 100, 200] for axis in axes)
    assert all(axis["scale"]["domain"] == [20, 200] for axis in axes)
    headline, contention = models_sentences(made)
    assert "Lowest latency: deit-t" in headline and "latencies are upper bounds" in contention


def test_the_widest_tables_fit_120_columns():
    modes, dtypes = ("eager", "reduce-overhead"), ("fp32", "autocast-bf16")
    rows = [
        row(batch, mode, dtype=dtype, ms=1234.5 / batch, gross_j=1.2345, half_j=0.0123, item="sequence", tokens=tokens)
        for tokens in (128, 384)
        for batch in (1, 32)
        for mode in modes
        for dtype in dtypes
    ]
    parts = [
        generated(part, batch=batch, dtype="autocast-bf16", mode=mode, gross_j=joules * batch, half_j=joules / 90)
        for batch, mode in ((1, "eager"), (8, "cuda-graph"))
        for part, joules in (("prefill", 1.0), ("decode", 12.3), ("infer", 13.3))
    ]
    for made in (record(rows), record(parts, tracker=TEXT)):
        for grid in inference_grids(made):
            lines = render_text(to_rich(grid), 120).splitlines()
            assert max(map(len, lines)) <= 120
            for line in grid.rows:  # numbers and names stand in one piece
                cells = [cell for cell, column in zip(line, grid.columns, strict=True) if column.whole]
                assert any(all(cell in shown for cell in cells) for shown in lines), cells


@pytest.mark.parametrize(
    ("summed_j", "half_width_j", "text"),
    [(101.0, 2.0, "+1.0 %, agrees"), (104.0, 2.0, "+4.0 %, differs"), (44.0, 70.0, "-56.0 %, inconclusive")],
)
def test_parts_agree_with_whole_responses_only_if_the_interval_could_show_a_difference(summed_j, half_width_j, text):
    whole = SimpleNamespace(energy=SimpleNamespace(gross_j=100.0, gross_half_width_j=half_width_j))
    assert _agreement(SimpleNamespace(summed_j=(summed_j, 0.0), whole=whole)) == text
