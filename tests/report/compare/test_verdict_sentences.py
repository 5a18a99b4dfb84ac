"""The verdict says what the statistics say: resolved, inconclusive, or nothing to say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.verdict import Verdict, chance_sentences, provenance, verdict
from joulelab.report.tables.overview_table import brief_grid
from joulelab.runs.record import Note, RunRecord, Validity


@pytest.fixture
def verdict_on(made: ModuleType, tmp_path: Path):
    def build(records: list[RunRecord]) -> Verdict:
        made.write_group(tmp_path, records)
        return verdict(compare(made.group_of(records), records, tmp_path))

    return build


def about(found: Verdict, opening: str) -> str:
    return next(text for text in found.sentences if text.startswith(opening))


def test_a_resolved_gain_is_reported_with_its_evidence(made, verdict_on) -> None:
    found = verdict_on(made.demo_records())
    assert about(found, "response KD is") == (
        "response KD is 3.7 points more accurate than labels only "
        "(95 % interval [+2.0, +5.4], p = 0.018; seeds +3.6, +3.8 points)."
    )
    assert found.headline == (
        "Compared with labels only, response KD is more accurate (+3.7 points); "
        "including the teacher, the methods use 6.48x to 6.61x the energy."
    )


def test_an_unresolved_difference_reports_it(made, verdict_on) -> None:
    text = about(verdict_on(made.demo_records()), "response + feature KD against")
    assert "accuracy inconclusive: difference +0.5 points, 95 % interval [-7.1, +8.1], p = 0.56" in text
    assert "would need at least 25 seeds" in text
    assert "disagree in sign" in text


def test_an_energy_ratio_whose_interval_holds_1_is_not_resolved(made, verdict_on) -> None:
    text = about(verdict_on(made.demo_records()), "response + feature KD uses")
    assert "1.20x [0.94, 1.54], inconclusive (n=2; would need about 3)," in text
    assert "6.61x [5.66, 7.71] with it; the teacher is 82 % of that" in text


def test_one_seed_gives_a_ratio_but_resolves_nothing(made, verdict_on) -> None:
    found = verdict_on([made.labels_only(0, 790), made.distilled("response KD", 0, 826, 131.0)])
    assert "1.08x, inconclusive (n=1: one repeat has no variance)," in about(found, "response KD uses")
    assert "inconclusive" in found.headline


def test_without_a_ratio_the_headline_states_why(made, verdict_on) -> None:
    measured = made.labels_only(0, 790, measured=True)
    found = verdict_on([measured, made.distilled("response KD", 0, 826, 131.0)])
    assert found.headline.endswith("; there is no energy ratio: one side is measured and the other estimated.")


def test_one_run_per_side_compares_two_models_and_no_methods(made, verdict_on) -> None:
    """790 against 826 of 1,000 right: p < 0.001 for these two models, and nothing about the methods."""
    found = verdict_on([made.labels_only(0, 790), made.distilled("response KD", 0, 826, 131.0)])
    assert "no method is significantly more or less accurate" in found.headline
    assert about(found, "response KD against") == (
        "response KD against labels only: accuracy inconclusive for the methods, because a single training run on one "
        "side compares models, not methods; these models differ: +3.6 points, 95 % interval [+1.6, +5.6], "
        "exact McNemar p < 0.001."
    )


def without_teacher(made, label: str, seed: int, correct: int, joules: float) -> RunRecord:
    return made.make_record(label, seed, made.student_parts(joules), correct=correct)


def at_equal_energy(found: Verdict) -> list[str]:
    return [text for text in found.sentences if text.startswith("At equal energy")]


def test_one_run_per_side_at_equal_energy_is_called_one_run(made, verdict_on) -> None:
    found = verdict_on([made.labels_only(0, 790), without_teacher(made, "longer", 0, 826, 131.0)])
    assert at_equal_energy(found) == [
        "At equal energy (within 5 % of labels only's 141 J ±70 %), longer has 82.6 %: one run on one side, so the "
        "methods cannot be compared."
    ]


@pytest.mark.parametrize("joules", [100.0, 200.0])
def test_less_energy_is_not_equal_energy_nor_is_more(made, verdict_on, joules) -> None:
    """120 + 13 J against 100 + 13 J is 0.85x the energy."""
    records = [without_teacher(made, "labels only", seed, 790 + seed, 120.0 + seed) for seed in (0, 1)]
    records += [without_teacher(made, "other", seed, 791 + seed, joules + seed) for seed in (0, 1)]
    assert at_equal_energy(verdict_on(records)) == []


def test_a_single_run_is_not_called_equally_good(made, verdict_on) -> None:
    records = [made.labels_only(seed, 790 + seed, 120.0 + seed) for seed in range(3)]
    records += [without_teacher(made, "short", seed, 790 + seed, 60.0 + seed) for seed in range(3)]
    records.append(without_teacher(made, "single", 0, 791, 60.0))
    text = about(verdict_on(records), "At equal quality")
    assert text == "At equal quality (no significant difference from labels only: short), short is cheaper."


def test_a_ratio_interval_that_states_nothing_is_not_printed(made, verdict_on) -> None:
    """Two seeds, 0.3x and 1.6x the joules: [0.000, 26982] was printed."""
    records = [made.labels_only(seed, 790, 120.0) for seed in (0, 1)]
    records += [made.distilled("response KD", seed, 790, value) for seed, value in enumerate((30.0, 210.0))]
    found = verdict_on(records)
    text = about(found, "response KD uses")
    assert "x, inconclusive (n=2" in text.split(" the joules")[0] and "[" not in text.split("without")[0]


def test_a_worse_method_is_called_less_accurate(made, verdict_on) -> None:
    records = [made.labels_only(seed, 820 + seed) for seed in (0, 1)]
    records += [made.distilled("response KD", seed, 770 + seed, 131.0 + seed) for seed in (0, 1)]
    found = verdict_on(records)
    assert "is 5.0 points less accurate" in about(found, "response KD is")
    assert "response KD is less accurate (-5.0 points)" in found.headline


def test_a_missing_baseline_leaves_no_comparison(made, verdict_on) -> None:
    found = verdict_on([made.distilled("response KD", 0, 826, 131.0)])
    assert found.headline == "No comparison: the baseline labels only has no finished run."
    assert "the baseline has no finished run" in about(found, "response KD against")


def test_what_is_incomplete_or_unknown_is_reported(made, verdict_on) -> None:
    records = made.demo_records()
    records[4] = made.distilled("response KD", 1, None, 55.0, status="truncated")
    found = verdict_on(records)
    assert "Not in the comparison because incomplete: response KD seed 1 (truncated)." in found.sentences
    assert any("sample:minilm" in text for text in found.sentences)


def test_estimates_are_declared_with_model_and_uncertainty(made) -> None:
    (text,) = provenance(made.demo_records())
    assert text.startswith("Joules are ESTIMATED, not measured: CPU time x 2.5 W")
    assert "±70 %" in text


def test_measured_joules_need_no_declaration(made) -> None:
    assert provenance(made.demo_records(measured=True)) == ()


def test_an_estimate_without_a_note_is_declared_all_the_same(made) -> None:
    bare = made.labels_only(0, 790).model_copy(update={"validity": Validity()})
    measured = made.labels_only(1, 790, measured=True)
    assert provenance([bare, measured]) == (
        "Energy is ESTIMATED, not measured, ±70 %.",
        "This holds for 1 of 2 runs.",
    )


def test_joules_estimated_while_others_used_the_cores_resolve_nothing(made, verdict_on) -> None:
    def runs(change):
        seeds = (0, 1, 2)
        base = [made.labels_only(seed, 790, 150.0 + seed) for seed in seeds]
        worse = [made.distilled("feature KD", seed, 700, 600.0 + seed) for seed in seeds]
        return [*base, *worse, *(change(made.distilled("response KD", seed, 826, 440.0 + seed)) for seed in seeds)]

    def by_joules(found: Verdict) -> list[str]:
        return [text for text in found.sentences if "Pareto" in text or "teacher of response KD" in text]

    quiet = verdict_on(runs(lambda record: record))
    assert "2.69x [2.66, 2.71] the energy" in about(quiet, "response KD uses")
    assert len(by_joules(quiet)) == 2
    found = verdict_on(
        [record.model_copy(update={"run_id": f"again-{record.run_id}"}) for record in runs(made.with_contention)]
    )
    assert "2.69x [2.66, 2.71], inconclusive (CPU contention)," in about(found, "response KD uses")
    assert "inconclusive" in found.headline
    assert "response KD (student.train: up to 1.2 of 2 cores)" in about(found, "CPU contention")
    assert by_joules(found) == []


def test_a_ratio_that_is_inconclusive_for_every_method_is_reported_as_that(made, verdict_on) -> None:
    kds = [made.distilled(label, 0, 826, 131.0) for label in ("response KD", "response + feature KD")]
    assert "is inconclusive for all methods" in verdict_on([made.labels_only(0, 790), *kds]).headline


def test_without_a_finished_baseline_no_difference_is_significant(made, tmp_path: Path) -> None:
    planned = made.group_of(made.demo_records())
    (row,) = brief_grid(compare(planned, [made.teacher_run()], tmp_path)).rows
    assert row[2:4] == ("-", "-")


def test_one_run_per_side_is_the_reason_in_the_headline(made, verdict_on) -> None:
    found = verdict_on([made.labels_only(0, 500), made.distilled("response KD", 0, 900, 131.0)])
    assert (
        "no method is significantly more or less accurate (at least one side has a single run, which cannot"
        in found.headline
    )


@pytest.mark.parametrize(
    ("lacking", "headline"),
    [
        (
            "response + feature KD",
            "response KD is more accurate (+3.7 points), and response + feature KD has no comparable accuracy;",
        ),
        ("labels only", "which has no comparable accuracy, quality cannot be compared; "),
    ],
)
def test_a_method_without_the_figure_is_named(made, verdict_on, lacking, headline) -> None:
    records = [one.model_copy(update={"results": {}}) if one.label == lacking else one for one in made.demo_records()]
    assert verdict_on(records).headline.startswith(f"Compared with labels only, {headline}")


def test_the_brief_table_states_the_setup_that_it_leaves_out(made, tmp_path: Path) -> None:
    setup = made.Part("student.train.setup", 2.0, 4.2)
    records = [
        made.make_record("labels only", seed, (setup, *made.student_parts(120.0)), correct=790) for seed in range(2)
    ]
    made.write_group(tmp_path, records)
    note = brief_grid(compare(made.group_of(records), records, tmp_path)).note
    assert note.startswith("Not included: setup (start-up, imports, compilation, warm-ups; ")
    assert note.endswith("`runs` and `show RUN` include it.")
    programs = [one.model_copy(update={"spec": {**one.spec, "pipeline": "measure"}}) for one in records]
    note = brief_grid(compare(made.group_of(programs), programs, tmp_path)).note
    assert note.endswith("per run)."), "lists of runs show a measured program alone, too"


def test_students_at_chance_level_are_named_with_the_comparison(made, tmp_path: Path) -> None:
    student = made.labels_only(1, 500).with_notes([Note(level="warning", text="the student is at chance level: 500")])
    records = [made.labels_only(0, 790), student, made.distilled("response KD", 0, 826, 131.0)]
    made.write_group(tmp_path, records)
    (text,) = chance_sentences(compare(made.group_of(records), records, tmp_path))
    assert text.startswith("At chance level (not") and text.endswith(": labels only (student, seed 1).")


@pytest.mark.parametrize(("everywhere", "named"), [(False, "labels only"), (True, "all methods")])
def test_a_method_whose_runs_are_all_at_chance_level_is_named_once(made, tmp_path: Path, everywhere, named) -> None:
    note = Note(level="warning", text="the student is at chance level in exact answers: 200 of 400 correct")
    records = [made.labels_only(seed, 500).with_notes([note]) for seed in range(2)]
    kd = [made.distilled("response KD", seed, 826, 131.0) for seed in range(2)]
    records += [record.with_notes([note]) for record in kd] if everywhere else kd
    made.write_group(tmp_path, records)
    (text,) = chance_sentences(compare(made.group_of(records), records, tmp_path))
    assert text.startswith("At chance level in exact answers (") and text.endswith(f": {named}.")
