"""Joules per inference by hand: power over idle times latency, and intervals that are no tighter than the data."""

import pytest
from inference_records import generated, record, row

from joulelab.infer.energy import energy_per_item, split_window
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.report.figures.serving_figures import joules_against_latency
from joulelab.report.tables.inference_rows import inference_rows, pareto, row_ratios
from joulelab.report.tables.inference_tables import rows_data
from joulelab.runs.attempt_data import IdlePower

NS = 10**9


def steady(power_of, relative=0.0):
    """A reader of a card whose power at second s is `power_of(s)`, in steps of a second."""

    def read(windows):
        joules = sum(power_of(begin // NS) * (end - begin) / NS for begin, end in windows)
        return EnergyFigure(energy_j=joules, method="counter", half_width_j=relative * joules)

    return read


def test_87_watts_over_61_idle_at_4_37_ms_are_113_62_millijoules():
    calls = 1000
    window = (0, round(calls * 4.37e-3 * NS))
    found, _ = energy_per_item([(window, calls)], steady(lambda s: 87.0))
    assert found.above(IdlePower(power_w=61.0, half_width_w=0.0)).net_j == pytest.approx(0.11362)
    assert found.gross_j == pytest.approx(0.38019)


def test_the_interval_is_the_wider_of_the_meter_s_own_and_the_spread_of_the_seconds():
    quiet, _ = energy_per_item([((0, 10 * NS), 100)], steady(lambda s: 100.0, relative=0.03))
    assert quiet.relative == pytest.approx(0.03)
    restless, _ = energy_per_item([((0, 10 * NS), 100)], steady(lambda s: 100.0 + 20 * (s % 2), relative=0.03))
    # ten seconds of +-10 W around 110 W: Student's t of 9 degrees
    assert restless.relative == pytest.approx(2.262 * 10.54 / 10**0.5 / 110, rel=0.01)


def test_rounds_whose_inferences_took_longer_widen_the_interval():
    turns = [((s * NS, (s + 1) * NS), items) for s, items in ((0, 100), (2, 110), (4, 90))]
    found, _ = energy_per_item(turns, steady(lambda s: 100.0))
    assert found.gross_j == pytest.approx(1.0)
    assert found.relative > 0.2  # the power alone never moved


def test_idle_that_differs_before_and_after_is_doubt_about_the_net_joules():
    (found,) = inference_rows(record([row(gross_j=0.6, half_j=0.0, power_w=300.0)], idle_w=(80.0, 120.0)))
    assert found.energy.idle_power_w == 100.0
    assert found.energy.net_j == pytest.approx(0.4)
    assert found.energy.net_half_width_j == pytest.approx(20.0 * 2e-3)


def test_without_a_sensor_there_is_the_reason_and_no_number():
    found, why = energy_per_item([((0, NS), 10)], lambda windows: missing("no RAPL", "modprobe"))
    assert found is None
    assert why == "no RAPL (modprobe)"


def test_pieces_are_at_least_a_second_and_cover_the_window():
    assert split_window((0, round(0.9 * NS))) == []
    assert split_window((0, round(2.5 * NS))) == [(0, round(1.25 * NS)), (round(1.25 * NS), round(2.5 * NS))]


def test_net_joules_of_a_record_come_from_its_baselines():
    (found,) = inference_rows(record([row(gross_j=0.2, half_j=0.002, power_w=200.0)], idle_w=(60.0, 62.0)))
    assert found.energy.net_j == pytest.approx(0.2 - 61.0 * 1e-3)
    assert found.energy.net_half_width_j == pytest.approx((0.002**2 + 0.001**2) ** 0.5)
    (without,) = inference_rows(record([row()], idle_w=()))
    assert without.energy.net_j is None


def test_rows_that_took_turns_are_compared_by_pairs():
    slow = row(ms=1.0, rounds=(1.0, 1.2, 1.1), power_w=200.0)
    quick = row(ms=0.9, rounds=(1.0, 1.2, 1.1), mode="cuda-graph", power_w=200.0)
    (ratio,) = row_ratios(inference_rows(record([slow, quick])))
    assert ratio.time.value == pytest.approx(0.9)
    assert ratio.time.high < 0.91
    assert ratio.energy.value == pytest.approx(0.9, rel=0.01)


def test_the_pareto_front_has_no_row_that_another_beats_in_both():
    rows = [
        row(1, ms=1, gross_j=0.3),
        row(8, ms=2, gross_j=0.1),
        row(4, ms=3, gross_j=0.2),
        row(32, ms=6, gross_j=0.05),
    ]
    front = pareto(inference_rows(record(rows)))
    assert [one.values["batch_size"] for one in front] == [1, 8, 32]


def test_a_shorter_sequence_or_a_part_of_a_response_beats_no_other():
    rows = [row(tokens=128, gross_j=0.1), row(tokens=384, ms=3, gross_j=0.3), row(8, tokens=384, ms=4, gross_j=0.4)]
    assert [one.values["tokens"] for one in pareto(inference_rows(record(rows)))] == [128, 384]
    parts = [generated("prefill", ms=1, gross_j=0.1), generated("infer", ms=9, gross_j=0.9)]
    made = record(parts, tracker="generation")
    assert [one["on_pareto_front"] for one in rows_data(made)] == [True, True]
    figure = joules_against_latency(record(rows))
    assert "batch 1, 128 tokens, eager, bf16; batch 1, 384 tokens, eager, bf16." in figure.caption
    assert all(f"'{label}'" in str(figure.spec) for label in ("1 x 128", "1 x 384", "8 x 384"))
