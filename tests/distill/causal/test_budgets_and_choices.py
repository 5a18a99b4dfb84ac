"""Budgets with and without the teacher's energy, initial weights, servers, data scripts, and refused settings."""

import json
import math
from types import SimpleNamespace

import pytest
import transformers

from joulelab.cli.console import BarProgress, PlainProgress
from joulelab.cli.options import budget_settings, parse_budget, script_settings
from joulelab.distill.causal import quality, students
from joulelab.distill.causal.config import DATA_SCRIPTS, data_script_settings
from joulelab.distill.causal.recipe import model_checks
from joulelab.errors import ConfigError, JoulelabError, NotFoundError, UsageError, refuse_all
from joulelab.evaluate.harness import TaskFigure
from joulelab.infer.generation.server import server_energy_gap
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.report.export import bill_data
from joulelab.report.tables.bill_tables import run_bill, sentences
from joulelab.runs.artifacts import Ancestor
from joulelab.runs.execute import execute
from joulelab.runs.spec import check, load_spec, merge, parse_overrides
from joulelab.runs.store import load_record
from joulelab.train import budget as joule_budget
from joulelab.train.parallel import Ranks

BEAMS = [f"generation.answer.{one}" for one in ("num_beams=2", "do_sample=false", "temperature=1", "top_p=1")]
ENERGY = {"budget": {"tokens": None, "energy_j": 3.0}, "training": {"budget_counts_estimates": True}}


def test_an_energy_budget_counts_the_teacher_only_if_set_and_reports_it(lab, finished, tmp_path):
    store = finished["kd"][1].folder.parent
    without, paths = lab.run(store, "kd", **ENERGY)
    assert without.results["budget.left_energy_j"].value == 3.0
    assert any("teacher" in line and "not counted" in line for line in lab.listening.messages)
    spent_j = without.stage("student.train").energy.cpu_estimate.energy_j
    assert 2 < spent_j < 20
    assert 0 < without.results["student.train.budget_overshoot_j"].value < spent_j
    assert any("student.train: the budget of 3.00 J was exceeded by about" in line for line in lab.listening.messages)
    assert without.results["student.train.steps"].value > 0  # where it stopped is recorded
    counted, _ = lab.run(store, "kd", **merge(ENERGY, {"budget": {"counts_teacher": True}}))
    teacher_j = sum(
        ancestor.energy["cpu_estimate"].energy_j
        for ancestor in counted.inherited
        if any(stage.startswith("teacher.") and stage != "teacher.evaluate" for stage in ancestor.stages)
    )
    assert counted.results["budget.left_energy_j"].value == pytest.approx(3.0 - teacher_j, abs=0.5 * teacher_j)
    fractions = [json.loads(line) for line in (paths.folder / "metrics.jsonl").read_text().splitlines()]
    assert any("budget_fraction" in line for line in fractions)


def test_a_teacher_that_uses_more_than_the_budget_is_an_error(lab, finished):
    store = finished["kd"][1].folder.parent
    small = merge(ENERGY, {"budget": {"energy_j": 0.001, "counts_teacher": True}})
    with pytest.raises(ConfigError, match=r"nothing is left of the budget of 1\.00 mJ"):
        lab.run(store, "kd", **small)


def test_a_teacher_is_evaluated_again_if_the_files_of_a_task_have_changed(lab, tmp_path, monkeypatch):
    def figures(model, tokenizer, tasks, *, folder, **ignored):
        value = float((folder / "mine.yaml").read_text())
        scores = {str(number): float(number < 4 * value) for number in range(4)}
        return [TaskFigure("mine", "acc", value, 4, False, standard_error=0.2, scores=scores)]

    for name, stand_in in (("harness_figures", figures), ("require_tasks", print), ("import_harness", dict)):
        monkeypatch.setattr(quality, name, stand_in)
    monkeypatch.setattr("joulelab.lookup.absent_packages", lambda *names: [])
    requested = {"until": "teacher", "quality": {"harness_tasks": ["mine"], "harness_folder": str(tmp_path)}}
    found = []
    for value in (0.25, 0.25, 0.75):
        (tmp_path / "mine.yaml").write_text(str(value))
        record, _ = lab.run(tmp_path.parent / "asked-again", "kd", **requested)
        figure = record.results["teacher.harness.mine.acc.value"]
        assert (figure.standard_error, figure.trials, figure.successes) == (0.2, 4, 4 * value)
        found.append((figure.value, record.stage("teacher.evaluate") is None))
    assert found == [(0.25, False), (0.25, True), (0.75, False)]


def test_the_same_energy_is_subtracted_for_an_sft_student_of_this_run_and_of_another(lab, tmp_path):
    """That of its training: neither setup and evaluations, nor what the run did between stages."""
    settings = {"budget": {"tokens": None, "energy_j": 4.0}, "training": {"budget_counts_estimates": True}}
    settings["start"] = {"budget_counts_estimates": True, "evaluate_every_steps": 2}
    fresh, _ = lab.run(tmp_path, "self", **settings)
    again, _ = lab.run(tmp_path, "self", **settings, seed=1, label="again")
    assert fresh.stage("student.sft") is not None and again.stage("student.sft") is None
    left = [record.results["budget.left_energy_j"].value for record in (fresh, again)]
    assert left[0] == left[1]
    trained_j = fresh.stage("student.sft").energy.cpu_estimate.energy_j
    assert 4.0 - left[0] == pytest.approx(trained_j, rel=0.5)


def test_everything_subtracted_from_a_budget_is_reported_and_the_hint_fits_the_largest_part():
    messages = []
    budget = SimpleNamespace(tokens=None, energy_j=12.0, counts_teacher=True)
    spec = SimpleNamespace(budget=budget, has_teacher=False)  # as in self, whose teacher is the SFT student
    run, runner = SimpleNamespace(progress=SimpleNamespace(write=messages.append)), SimpleNamespace(report=print)
    context = SimpleNamespace(spec=spec, run=run, runner=runner)
    students._report_budget(context, students.RemainingBudget(None, 2.5), 4.75, 4.75, 10)
    assert messages == ["budget of student.train: 2.50 J of 12.0 J (SFT student 4.75 J, teacher 4.75 J counted)"]
    with pytest.raises(ConfigError, match=r": the teacher used 13\.0 J$") as refused:
        students._require_budget_left(spec, students.RemainingBudget(None, -1.0), 13.0, 0.0)
    assert "counts_teacher=false" in refused.value.hint
    budget.counts_teacher = False
    with pytest.raises(ConfigError, match=r": the SFT student used 13\.0 J$") as refused:
        students._require_budget_left(spec, students.RemainingBudget(None, -1.0), 9.0, 13.0)
    assert "budget.start_share" in refused.value.hint and "teacher" not in refused.value.hint


def test_students_start_from_layers_or_with_adapters_or_with_a_live_teacher(lab, finished):
    store = finished["kd"][1].folder.parent
    layers, paths = lab.run(store, "sft", student={"size": None, "layers": [0]})
    assert transformers.AutoConfig.from_pretrained(paths.artifacts / "final_model").num_hidden_layers == 1
    assert layers.results["student.clm_loss"].value < finished["sft"][0].results["student.clm_loss"].value
    adapted, paths = lab.run(
        store, "kd",
        student={"size": None, "model": str(lab.teacher), "lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}},
        distill={"teacher": "live", "divergence": "reverse", "alpha": 0.2},
        budget={"tokens": 600},
    )  # fmt: skip
    assert adapted.stage("teacher.logits") is None
    assert "forward.teacher" in adapted.stage("student.train").phases
    merged = transformers.AutoModelForCausalLM.from_pretrained(paths.artifacts / "final_model")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert str(lab.teacher) in {ancestor.name for ancestor in adapted.lineage if ancestor.made_by == "elsewhere"}
    assert (paths.artifacts / "final_model" / "adapter" / "adapter_config.json").exists()
    # it starts as its own teacher, so it stays near it
    assert adapted.results["student.agreement"].value > 0.9


def test_the_sft_student_can_be_trained_further_and_answers_can_be_judged_by_a_rule(lab, finished):
    store = finished["dpo"][1].folder.parent
    further, _ = lab.run(store, "self", distill={"alpha": 1.0}, training={"evaluate_every_steps": 4})
    assert further.stage("teacher.logits") is None
    assert further.results["budget.start_tokens"].value > 0
    judged, _ = lab.run(
        store, "synthetic", generation={"min_score": 0.5}, preferences={"judge": "rule", "rule": "exact-answer"}
    )
    results = judged.results
    assert judged.stage("teacher.judge").samples == 12
    assert results["synthetic.low_score"].value > 0  # the answers that are not the data's own
    assert results["synthetic.kept"].value > 0


def test_the_energy_of_a_remote_server_is_reported_missing(lab, tmp_path, monkeypatch):
    from openai_server import serving

    from joulelab.infer.generation.server import ServerGenerator

    monkeypatch.setattr(ServerGenerator, "energy_gap", property(lambda self: "it runs on another node"))
    settings = {
        "generation": {"prompts": 6, "answer": {"n": 1, "do_sample": False, "temperature": 1.0}},
        "budget": {"tokens": 300},
    }
    keys, made = [], ServerGenerator.__init__
    monkeypatch.setattr(ServerGenerator, "__init__", lambda *given, **also: keys.append(also) or made(*given, **also))
    monkeypatch.setenv("JOULELAB_SERVER_KEY", "mine")
    with serving(lab.teacher) as (address, _):
        settings["teacher"] = {"server": address}
        record, paths = lab.run(tmp_path, "synthetic", **settings)
    assert [key["api_key"] for key in keys] == ["mine"]
    assert '"mine"' not in (paths.folder / "environment.json").read_text()
    assert record.results["synthetic.kept"].value > 0
    assert "synthetic.energy_j" not in record.results
    assert "warning: teacher.generate: it runs on another node" in lab.listening.messages
    # the local weights need not be what the server serves: their quality is not told as the teacher's
    assert record.stage("teacher.evaluate") is None and "teacher.clm_loss" not in record.results
    assert any("the teacher is not evaluated" in line for line in lab.listening.messages)
    bill = run_bill(record, students=2)
    unseen = next(line for line in bill.inherited if line.name.startswith(f"teacher.generate on {address}"))
    assert (unseen.figure.energy_j, unseen.shared) == (None, True)
    assert unseen.key in next(one for one in record.lineage if one.name == "answers").parents
    output_text = " ".join(sentences(bill))
    assert "share the teacher: ≥ " in output_text
    assert "Lower bound, because this was not metered: teacher.generate" in output_text
    assert bill_data(bill, None)["lower_bound"]
    # another run finds the answers, and with them that nobody knows what they took
    with pytest.raises(ConfigError, match="the teacher's energy would be unknown"):
        lab.run(
            tmp_path, "synthetic",
            **merge(settings, merge(ENERGY, {"budget": {"counts_teacher": True}})),
        )  # fmt: skip


def refuse_before_run(spec):
    spec.preflight()
    refuse_all(model_checks(spec))


@pytest.mark.parametrize(
    ("pipeline", "changes"), [("synthetic", {}), ("dpo", {"preferences": {"judge": {"kind": "rule"}}})]
)
def test_a_teacher_that_only_a_server_has_needs_no_file_here(lab, tmp_path, pipeline, changes):
    from openai_server import serving

    with serving(lab.teacher) as (address, _):
        settings = {
            "teacher": {"server": address, "model": "big-teacher:70b"},  # neither a path nor a name on the hub
            "data": {"tokenizer": str(lab.teacher)},
            "budget": {"tokens": 600},
            "generation": {"prompts": 6},
            **changes,
        }
        refuse_before_run(check(lab.settings(pipeline, **settings)))
        record, _ = lab.run(tmp_path, pipeline, **settings)
    assert record.status == "done", record.error
    teacher = next(one for one in record.lineage if one.name == "big-teacher:70b")
    assert teacher.energy["all"].energy_j is None
    assert record.stage("teacher.evaluate") is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "its files are needed here for the student's tokenizer (name another one with data.tokenizer)"),
        (
            {"data": {"tokenizer": "HERE"}, "student": {"teacher_embeddings": True}},
            "its files are needed here for student.teacher_embeddings=true",
        ),
        ({"data": {"tokenizer": "HERE"}, "quality": {"against_teacher": True}}, "quality.against_teacher=true"),
        ({"data": {"tokenizer": "HERE"}, "generation": {"min_score": 0.1}}, "preferences.judge.kind=likelihood"),
    ],
)
def test_what_needs_the_files_of_a_served_teacher_is_refused_before_it_runs(lab, changes, text):
    changes = json.loads(json.dumps(changes).replace("HERE", str(lab.teacher)))
    served = {"teacher": {"server": "http://127.0.0.1:9/v1", "model": "big/teacher"}}
    with pytest.raises(JoulelabError) as refused:
        refuse_before_run(check(lab.settings("synthetic", **served, **changes)))
    assert text in f"{refused.value.message}; {refused.value.hint}"


@pytest.mark.parametrize(("method", "seen"), [("counter", True), ("integrated", True), ("estimated", False)])
def test_a_local_server_is_included_in_sensor_readings_but_not_in_cpu_time_estimates(method, seen):
    found = {"gpu": missing("none"), "cpu": EnergyFigure(energy_j=1.0, method=method)}
    assert (server_energy_gap(SimpleNamespace(so_far=lambda: found)) is None) is seen


def test_a_randomly_initialized_student_can_start_from_the_teachers_embeddings(lab):
    import torch

    from joulelab.distill.causal.config import CausalStudent
    from joulelab.distill.causal.models import lm_head_weight, make_student
    from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer

    teacher, tokenizer = load_causal_lm(str(lab.teacher)), load_tokenizer(str(lab.teacher))
    student = make_student(CausalStudent(size="nano", teacher_embeddings=True), teacher, tokenizer, seed=0)
    own, source = lm_head_weight(student).detach(), lm_head_weight(teacher).detach()
    alike = torch.corrcoef(torch.stack([torch.pdist(own), torch.pdist(source - source.mean(0))]))[0, 1]
    assert alike > 0.9  # words that were far apart still are


@pytest.mark.parametrize(
    ("until", "made"),
    [("data", "data"), ("logits", "logits"), ("generation", "answers"), ("preferences", "preferences")],
)
def test_the_artifact_of_a_single_phase_is_reused(lab, finished, until, made):
    record, _ = lab.run(finished["sft"][1].folder.parent, "sft", until=until)
    assert not [stage for stage in record.stages if stage.name.startswith(("student.", "teacher."))]
    assert made in {ancestor.name for ancestor in record.inherited}


def test_a_local_copy_of_a_published_dataset_has_no_subset(tmp_path):
    hub = data_script_settings("codeforces_preprocess_dataset", "kd-tiny", ["data.source=someone/copy"])
    assert "data.subset=solutions_py_decontaminated" in hub
    local = data_script_settings("codeforces_preprocess_dataset", "kd-tiny", [f"data.source={tmp_path}"])
    assert [setting for setting in local if "subset" in setting] == ["data.subset=all"]


def test_data_scripts_are_settings_of_an_experiment():
    assert data_script_settings("logit_caching", "kd-tiny") == ["name=kd-tiny-logit_caching", "until=logits"]
    with pytest.raises(NotFoundError, match="did you mean 'logit_caching'"):
        data_script_settings("logit_cache", "kd-tiny")
    with pytest.raises(UsageError, match="demo-kd has the pipeline classify"):
        script_settings("logit_caching", "demo-kd", [])
    for script in DATA_SCRIPTS:
        changes = parse_overrides(data_script_settings(script, "kd-tiny"))
        check(merge(load_spec("kd-tiny").model_dump(mode="json"), changes))


def test_budgets_are_parsed_with_their_unit_and_set_where_the_pipeline_has_them():
    assert parse_budget("500kJ") == (500_000.0, None)
    assert parse_budget("0.5 kWh") == (1_800_000.0, None)
    assert parse_budget("20Mtokens") == (None, 20_000_000)
    assert budget_settings("1MJ", "compare-tiny") == ["budget.energy_j=1000000.0", "budget.tokens=null"]
    assert "training.max_energy_j=1000000.0" in budget_settings("1MJ", "demo-kd")
    assert parse_budget("4.1ktokens") == (None, 4100)
    with pytest.raises(UsageError, match="whole number of tokens"):
        parse_budget("1.5tokens")
    for wrong in ("500", "kJ", "500kJoule", "0J", "-3J"):
        with pytest.raises(UsageError, match="not a budget"):
            parse_budget(wrong)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["student.size=11m"], "unknown size '11m'; expected one of nano"),
        (["student.model=x/y", "student.size=3m"], "exactly one of model, layers, size"),
        (["distill.divergence=jsd"], "needs the teacher's full distribution"),
        (["distill.codec=rs-50"], "rs-50"),
        (["data.row_length=64"], "a document must fit into a row"),
        (["training.max_tokens=5"], "budget.tokens"),
        (["budget.tokens=null"], "the budget is empty"),
        (["budget.counts_teacher=true"], "energy_j is not set"),
        (
            ["generation.answer.do_sample=false", "generation.answer.temperature=0.7"],
            "have no effect without do_sample",
        ),
        (["generation.max_tokens=3"], "less than generation.min_tokens 4"),
        (["student.model=mine", "student.teacher_embeddings=true"], "set student.teacher_embeddings=false"),
        (["distill.alpha=1"], "ignores the teacher"),
        (["pipeline=dpo", "generation.answer.n=1"], "a pair needs two answers"),
        (["until=preferences", "generation.answer.n=1"], "a pair needs two answers"),
        (["preferences.rubric=' '"], "what makes an answer good"),
        (["teacher.server=localhost:8000"], "not the address of a server"),
        (["teacher.server=http://x/v1"], "kd needs no server"),
        (["pipeline=dpo", "teacher.server=http://x/v1", "preferences.candidates_from=start"], "needs no server"),
        (["student.layers=[0, 1]", "student.size=3m"], "name layers and size; unset .* student.size=null"),
        (["student.layers=[]"], "layers is empty"),
        (["pipeline=synthetic", "teacher.server=http://x/v1", *BEAMS], "no beam search"),
        (["pipeline=synthetic", "teacher.server=http://x/v1", "generation.cache=fixed"], "not to teacher.server"),
        (["pipeline=synthetic", "generation.cache=growing", *BEAMS], "has no effect with num_beams"),
    ],
)
def test_contradictory_settings_are_refused_with_the_reason(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        load_spec("kd-tiny", parse_overrides(changes))


@pytest.mark.parametrize("changes", [["student.model=mine"], ["student.size=null", "student.model=mine"]])
def test_a_student_replaces_that_of_the_experiment_with_its_details(changes):
    student = load_spec("kd-tiny", parse_overrides(changes)).student
    assert (student.model, student.size, student.teacher_embeddings) == ("mine", None, False)


@pytest.mark.parametrize(
    ("experiment", "changes"),
    [
        ("on-policy-tiny", ["until=logits", "teacher.batch_size=4"]),
        ("kd-tiny", ["distill.teacher=live", "until=teacher", "distill.codec=hidden", "teacher.batch_size=4"]),
        ("on-policy-tiny", ["start=null", "training.prefetch=0"]),  # the SFT student is trained with it
    ],
)
def test_settings_with_an_effect_are_accepted(experiment, changes):
    load_spec(experiment, parse_overrides(changes))


@pytest.mark.parametrize(
    ("experiment", "changes"),
    [
        ("kd-tiny", ["distill.teacher=live", "distill.codec=hidden"]),
        ("kd-tiny", ["distill.teacher=live", "teacher.batch_size=4"]),
        ("on-policy-tiny", ["training.prefetch=0"]),
        ("on-policy-tiny", ["teacher.batch_size=4"]),
    ],
)
def test_settings_without_an_effect_are_refused(experiment, changes):
    with pytest.raises(ConfigError, match="has no effect in this run"):
        load_spec(experiment, parse_overrides(changes))


def test_evaluation_tasks_are_checked_before_the_first_stage(lab, tmp_path, monkeypatch):
    def unknown(tasks, folder):
        raise NotFoundError(f"there is no task {tasks[0]}")

    monkeypatch.setattr(quality, "require_tasks", unknown)  # the package takes many seconds to import
    monkeypatch.setattr("joulelab.lookup.absent_packages", lambda *names: [])  # or is not installed
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    refused = {
        "not a question": {"answers": str(tmp_path / "questions.jsonl")},
        "no task nonesuch": {"harness_tasks": ["nonesuch"]},
    }
    for words, requested in refused.items():
        paths = lab.paths(tmp_path / "runs", "sft", quality=requested)
        with pytest.raises((ConfigError, NotFoundError), match=words):
            execute(paths, lab.listening)
        assert not [stage for stage in load_record(paths.folder).stages if stage.name != "run.overhead"]


def test_impossible_budgets_layers_and_models_are_refused_before_the_first_stage(lab, tmp_path, monkeypatch):
    """No sensor here, and estimates do not count; layers and models that are none."""
    monkeypatch.setattr(joule_budget, "_READING_TIMEOUT_S", 0.3)
    encoder = tmp_path / "encoder"
    transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)).save_pretrained(
        encoder
    )
    refused = {
        "no energy sensor works": {"budget": {"tokens": None, "energy_j": 5000.0}},
        r"the teacher .* has layers 0\.\.1": {"student": {"size": None, "layers": [0, 99]}},
        "is not a causal language model": {"teacher": {"model": str(encoder)}},
        "matches no layer of the student": {"student": {"lora": {"targets": ["query"]}}},
    }
    for words, changes in refused.items():
        paths = lab.paths(tmp_path / "runs", "kd", **changes)
        with pytest.raises(ConfigError, match=words):
            execute(paths, lab.listening)
        assert not [stage for stage in load_record(paths.folder).stages if stage.name != "run.overhead"]


@pytest.mark.parametrize(
    "setting", [{"preferences": {"beta": math.inf}}, {"generation": {"min_score": math.nan}},
                {"budget": {"energy_j": math.inf}}]
)  # fmt: skip
def test_infinite_and_nan_settings_are_refused(lab, setting):
    with pytest.raises(ConfigError, match=next(iter(next(iter(setting.values()))))):
        check(lab.settings("dpo", **setting))


@pytest.mark.parametrize("progress", [PlainProgress, BarProgress])
def test_progress_after_a_stage_line_was_printed_is_not_an_error(progress, capsys):
    with progress() as watching:
        watching.advance(1)
        watching.stage("student.train", 3)
        watching.advance(2, "loss 1 by step 2")
        watching.write("something else")
        watching.advance(3, "loss 1 by step 3")
    assert "by step 2" in capsys.readouterr().err


@pytest.mark.parametrize("progress", [PlainProgress, BarProgress])
def test_progress_shows_the_loss_after_evaluations_and_ends_with_the_final_one(lab, tmp_path, capsys, progress):
    paths = lab.paths(tmp_path, "sft", training={"evaluate_every_steps": 3}, budget={"tokens": 1600})
    with progress() as watching:
        record = execute(paths, watching)
    output_text = [line.strip() for line in capsys.readouterr().err.splitlines() if " by step " in line]
    lines = [line for line in output_text if line.startswith("student.train ")]
    steps, loss = (record.results[f"student.train.{name}"].value for name in ("steps", "final_loss"))
    assert len(lines) > 1 and "by step 2" in lines[0]
    assert lines[-1].endswith(f"loss (CE) {loss:.4f} by step {steps:.0f}")


def test_many_passes_over_few_rows_are_a_warning(lab, finished, tmp_path):
    few = {"source": str(tmp_path / "few.jsonl"), "held_out": 4, "max_tokens": 32, "row_length": 64}
    (tmp_path / "few.jsonl").write_text("".join(lab.chats.read_text().splitlines(keepends=True)[:12]))
    record, _ = lab.run(tmp_path / "runs", "sft", data=few, training={"batch_size": 1}, budget={"tokens": 4000})
    passes = record.results["student.train.passes"].value
    assert passes > 20
    assert f"student.train made {passes:.0f} passes over its rows" in " ".join(
        note.text for note in record.validity.notes
    )
    assert finished["sft"][0].results["student.train.passes"].value < 20


def test_unmeasured_energy_is_missing_and_not_0():
    spec = SimpleNamespace(
        energy=SimpleNamespace(total_energy_policy="measured"),
        training=SimpleNamespace(budget_counts_estimates=False),
        budget=SimpleNamespace(energy_j=5.0, counts_teacher=False),
    )
    figures = {"gpu": missing("none"), "cpu_estimate": EnergyFigure(energy_j=1.0, method="estimated")}
    done = Ancestor(key="a", name="logits", kind="x", made_by="r", stages=("teacher.logits",), energy=figures)
    tracker_context = SimpleNamespace(spec=spec)
    assert students._lineage_energy_j(tracker_context, [done], "teacher") is None
    assert students._lineage_energy_j(tracker_context, [done], "student") == 0.0
    assert students._energy_left_j(spec, None, 1.0) == 4.0
    spec.budget.counts_teacher = True
    with pytest.raises(ConfigError, match=r"energy of the teacher .* was not measured"):
        students._energy_left_j(spec, None, 1.0)


def test_all_ranks_have_the_first_ranks_budget(tmp_path, monkeypatch):
    """Another number of joules would be another key, and a later attempt would train the finished student again."""

    class Second(Ranks):
        def sum(self, values):
            assert values == [0.0, 0.0]
            return [-1.0, 40.5]

    left = students.RemainingBudget(tokens=None, energy_j=40.5)
    monkeypatch.setattr(students, "_remaining_budget", lambda *arguments: left)
    for ranks in (Ranks(), Second(1, 2)):
        context = SimpleNamespace(runner=SimpleNamespace(ranks=ranks))
        assert students.training_budget(context, [], None) == left
        monkeypatch.setattr(students, "_remaining_budget", None)


@pytest.mark.parametrize(
    ("changes", "is_judged"),
    [
        ({"pipeline": "synthetic", "generation": {"min_score": 1.0}}, True),
        ({"pipeline": "synthetic"}, False),
        ({"pipeline": "on-policy", "generation": {"min_score": 1.0, "prompt_tokens": 18}, "mixed": True}, True),
        ({"pipeline": "on-policy", "generation": {"prompt_tokens": 18}, "mixed": True}, False),
    ],
)
def test_the_judge_of_filtered_answers_can_be_chosen(lab, changes, is_judged):
    pipeline, mixed = changes["pipeline"], {"student_share": 0.5, "other_data": "teacher"}
    policy = {"on_policy": mixed} if changes.get("mixed") else {}
    spec = check(lab.settings(pipeline, generation=changes.get("generation", {}), **policy))
    assert spec.teacher_judges == is_judged
    assert ("preferences" in spec.unused_settings) != is_judged


def test_a_student_model_used_as_teacher_counts_as_the_teacher_in_the_budget():
    """It was taken off as the SFT student that this one begins with, also where the budget leaves the teacher out."""
    spec = SimpleNamespace(
        energy=SimpleNamespace(total_energy_policy="measured"), training=SimpleNamespace(budget_counts_estimates=True)
    )
    figures = {"gpu": EnergyFigure(energy_j=3.0, method="counter")}
    made = Ancestor(key="a", name="final_model", kind="x", made_by="r", stages=("student.train",), energy=figures)
    tracker_context = SimpleNamespace(spec=spec)
    for used_as, teacher_j, start_j in ((None, 0.0, 3.0), ("student", 0.0, 3.0), ("teacher", 3.0, 0.0)):
        lineage = [made.model_copy(update={"used_as": used_as})]
        assert students._lineage_energy_j(tracker_context, lineage, "teacher") == teacher_j
        assert students._lineage_energy_j(tracker_context, lineage, "student") == start_j


def test_a_teacher_no_better_than_token_frequencies_is_refused(lab, tmp_path):
    from tiny_llama import make_model, make_tokenizer

    make_model(make_tokenizer(), seed=3).save_pretrained(tmp_path / "random")
    make_tokenizer().save_pretrained(tmp_path / "random")
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    asked = {"answers": str(tmp_path / "questions.jsonl"), "answer_items": 1}
    paths = lab.paths(tmp_path / "runs", "kd", teacher={"model": str(tmp_path / "random")}, quality=asked)
    with pytest.raises(ConfigError, match="guessing by token frequency"):
        execute(paths, lab.listening)
    evaluations = [stage.name for stage in load_record(paths.folder).stages if stage.role == "teacher"]
    assert evaluations == ["teacher.evaluate"]  # nothing is asked of it, cached or generated afterwards


def test_the_batch_size_of_on_policy_in_earlier_runs_is_that_of_generation(lab):
    earlier = lab.settings("on-policy", on_policy={"batch_size": 7}, generation={"prompt_tokens": 18})
    assert check(earlier).generation.batch_size == 4  # what is set under its current name has precedence
    del earlier["generation"]["batch_size"]
    assert check(earlier).generation.batch_size == 7
    assert check({**earlier, "pipeline": "kd"}).generation.batch_size is None


@pytest.mark.parametrize(
    ("changes", "on_tensor_cores", "expected"),
    [
        ([], True, ("bf16", "bf16")),
        ([], False, ("fp32", "fp32")),
        (["training.precision=fp32"], True, ("fp32", "fp32")),
        (["training.precision=fp32", "start.precision=bf16"], True, ("fp32", "bf16")),
        (["start.weights=bf16"], False, ("fp32", "bf16")),
        (["start.weights=bf16", "training.precision=fp32"], True, ("fp32", "bf16")),
    ],
)
def test_both_trainings_have_the_precision_that_the_settings_or_the_machine_choose(
    monkeypatch, changes, on_tensor_cores, expected
):
    monkeypatch.setattr("joulelab.runs.environment.has_bf16_cores", lambda device: on_tensor_cores)
    found = load_spec("dpo-tiny", parse_overrides(changes)).for_this_machine()
    assert (found.training.precision, found.start.precision) == expected
