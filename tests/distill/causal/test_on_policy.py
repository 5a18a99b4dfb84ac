"""On-policy distillation: GKD's loss, rounds of generation and scoring, mixing, resume, and what is refused."""

import json
import math
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tiny_llama import make_model, make_tokenizer

from joulelab.data.chat.packing import PackedAttention
from joulelab.distill.causal import on_policy, server_teacher
from joulelab.distill.causal.config import CausalTraining, OnPolicy
from joulelab.distill.causal.objective import StudentSetup
from joulelab.distill.causal.recipe import model_checks
from joulelab.distill.logit_cache.kd_loss import DenseTargets, KdLoss, TeacherHead
from joulelab.errors import ConfigError, CorruptedFile, EndedBySignal, JoulelabError, refuse_all
from joulelab.infer.generation import engine, static_decoder
from joulelab.infer.generation.completions import read_completions
from joulelab.runs.artifacts import read_bill
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.execute import execute
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import check, load_spec, parse_overrides
from joulelab.train.budget import Budget
from joulelab.train.checkpoint import CheckpointFolder

LOSSES = [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]
SHORT = {"prompt_tokens": 18}


# the loss


def gkd_loss(student_NV, teacher_NV, beta, temperature):
    """Agarwal et al., 2024, eq. 1, mean over positions; beta 0 and 1 are the two KL divergences, as in TRL."""
    q, p = F.log_softmax(student_NV / temperature, -1), F.log_softmax(teacher_NV / temperature, -1)
    if beta in (0, 1):
        first, second = (p, q) if beta == 0 else (q, p)
        return (first.exp() * (first - second)).sum(-1).mean()
    m = torch.logaddexp(q + np.log(1 - beta), p + np.log(beta))
    return (beta * (p.exp() * (p - m)).sum(-1) + (1 - beta) * (q.exp() * (q - m)).sum(-1)).mean()


def on_the_same_rows(divergence, beta, temperature, reference):
    """(value, gradients) of our chunked loss and of a loss over full logits; ours has Hinton's factor T^2."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 11, 8), 0.3 * torch.randn(37, 8)
    teacher, teacher_head = torch.randn(2, 11, 12), 0.3 * torch.randn(37, 12)
    labels = torch.randint(37, (2, 11))
    labels[:, :4], labels[1, 9:] = -100, -100
    at = labels[:, 1:] != -100
    found = []
    for ours in (True, False):
        own = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        if ours:
            targets = DenseTargets(teacher[:, :-1][at], TeacherHead(teacher_head), 37)
            loss = KdLoss(0.0, temperature, divergence, chunk=5, beta=beta if divergence == "jsd" else 0.5)
            sums = loss(own[0], own[1], targets, labels)
            value = sums.loss / sums.count / temperature**2
        else:
            value = reference((own[0] @ own[1].T)[:, :-1], (teacher @ teacher_head.T)[:, :-1], labels[:, 1:])
        found.append([value.detach(), *torch.autograd.grad(value, own)])
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("divergence", "beta"), LOSSES)
def test_losses_and_gradients_are_those_of_gkd(divergence, beta, temperature):
    def reference(student, teacher, labels):
        return gkd_loss(student[labels != -100], teacher[labels != -100], beta, temperature)

    for one, other in zip(*on_the_same_rows(divergence, beta, temperature, reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("divergence", "beta"), LOSSES)
def test_losses_and_gradients_are_those_of_trl(divergence, beta):
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trl.experimental announces that it may change
        from trl.experimental.gkd.gkd_trainer import GKDTrainer

    def reference(student, teacher, labels):
        return GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta, temperature=1.3)

    for one, other in zip(*on_the_same_rows(divergence, beta, 1.3, reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


# settings


def test_a_preset_on_the_command_line_replaces_that_of_the_experiment():
    found = load_spec("on-policy-tiny", parse_overrides(["on_policy.preset=minillm"]))
    assert (found.on_policy.divergence, found.on_policy.student_share) == ("reverse", 1.0)
    own = load_spec("on-policy-tiny")
    assert (own.on_policy.divergence, own.on_policy.student_share) == ("forward", 0.25)


def test_presets_set_what_is_not_named():
    assert OnPolicy(preset="gkd").student_share == 0.5
    minillm = OnPolicy(preset="minillm")
    assert (minillm.divergence, minillm.student_share) == ("reverse", 1.0)
    assert OnPolicy(preset="minillm", divergence="forward").divergence == "forward"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"generation": {**SHORT, "answer": {"do_sample": False, "temperature": 1.0, "n": 1}}}, "do_sample=true"),
        ({"generation": {"prompt_tokens": 60}}, "up to 72 tokens together, but data.row_length is 64"),
        ({"on_policy": {"student_share": 0.0}}, "student_share"),
        ({"on_policy": {"beta": 1.0}}, "beta"),
        ({"until": "teacher", "shard": "0/2"}, "its work cannot be sharded"),
        (
            {"generation": {"prompt_tokens": 52}, "training": {"batch_size": 1}},
            r"the 2 completions of one prompt \(generation.answer.n\) do not fit into a batch of 1 rows",
        ),
        ({"on_policy": {"listed_tokens": 64}}, "on_policy.listed_tokens=64 has no effect without teacher.server"),
        ({"on_policy": {"divergence": "forward", "beta": 0.3}}, "on_policy.beta=0.3 has no effect with .*=forward"),
    ],
)
def test_settings_that_cannot_work_are_refused(lab, changes, text):
    with pytest.raises(ConfigError, match=text):
        check(lab.settings("on-policy", **{"generation": SHORT, **changes}))


# the copy that generates


def test_the_copy_for_generation_has_the_weights_of_the_last_synchronization():
    model = make_model(make_tokenizer())
    copied = on_policy.StudentCopy(
        StudentSetup(model, PackedAttention(False), CausalTraining(precision="fp32")), torch.device("cpu")
    )
    weights = [weight.data_ptr() for weight in copied.model.parameters()]
    ids = torch.tensor([[9, 10, 11]])
    with torch.no_grad():
        before = model(ids).logits.clone()
        for weight in model.parameters():
            weight.mul_(1.1)
        assert torch.equal(copied.model(ids).logits, before)  # training does not change it
        copied.synchronize()
        assert torch.equal(copied.model(ids).logits, model(ids).logits)
    # a captured graph refers to the tensors: they must be the same ones
    assert [weight.data_ptr() for weight in copied.model.parameters()] == weights
    assert copied.model.lm_head.weight is copied.model.model.embed_tokens.weight
    assert not any(weight.requires_grad for weight in copied.model.parameters())


# runs


def test_generation_and_scoring_have_stages_of_their_own(finished):
    record, paths = finished["on-policy"]
    stages = {stage.name: stage for stage in record.stages}
    assert (stages["student.generate"].role, stages["student.generate"].activity) == ("student", "generate")
    assert (stages["teacher.score"].role, stages["teacher.score"].activity) == ("teacher", "score")
    rounds = -(-record.results["student.train.steps"].value // 2)
    assert len(stages["student.generate"].segments) == len(stages["teacher.score"].segments) == rounds > 1
    results = record.results
    assert stages["student.generate"].tokens == results["student.generate.generated_tokens"].value > 0
    assert stages["student.generate"].samples == results["student.generate.completions"].value
    assert stages["teacher.score"].tokens == trained_tokens(record)
    assert set(read_bill(paths.artifacts / "final_model").artifact.stages) >= {"student.generate", "teacher.score"}
    assert any("synchronized every 2 steps" in note.text for note in record.validity.notes)
    assert not (paths.checkpoints / "student.generate").exists()


def trained_tokens(record):
    return record.stage("student.train").tokens + record.stage("student.train.setup").tokens


def test_nothing_is_written_or_scored_far_beyond_the_end_of_the_budget(lab, finished):
    """The training ends in the middle of its only round, which would have 160 micro-batches."""
    store = finished["on-policy"][1].folder.parent
    record, _ = lab.run(store, "on-policy", on_policy={"sync_every": 160}, generation=SHORT, label="one round")
    assert len(record.stage("teacher.score").segments) == 1
    assert record.stage("teacher.score").tokens == trained_tokens(record)
    steps, batches = record.results["student.train.steps"].value, len(record.stage("student.generate").segments)
    written, per_step = record.results["student.generate.completions"].value, 8
    assert steps * per_step <= written <= (steps + 1) * per_step and 1 < batches <= 5


def test_models_and_copies_of_the_state_are_free_while_the_student_is_saved(lab, tmp_path, monkeypatch):
    released, held, later = [], [], RunContext.when_made
    monkeypatch.setattr(CheckpointFolder, "release", lambda folder: released.append(folder))

    def observed(context, work):
        held.extend(cell.cell_contents for cell in getattr(work, "__closure__", None) or ())
        held.append(getattr(work, "__self__", None))
        assert not any(isinstance(one, CheckpointFolder) and one not in released for one in held)
        later(context, work)

    monkeypatch.setattr(RunContext, "when_made", observed)
    record, paths = lab.run(tmp_path, "on-policy", on_policy={"sync_every": 2}, generation=SHORT)
    assert record.status == "done" and released
    assert not any(isinstance(one, on_policy.Rollouts) for one in held)
    assert not list(paths.folder.glob("checkpoints/*/*")), "completions are removed once the student is saved"


class Observed:
    """Micro-batches and rounds of a run."""

    def __init__(self, monkeypatch):
        self.trained, self.logs = [], {}
        at, generate = on_policy.Rollouts.at, on_policy.Rollouts._generate

        def observed(rollouts, epoch, index):
            batch = at(rollouts, epoch, index)
            self.trained.append((epoch * rollouts.batches_per_epoch + index, batch.ids.tolist()))
            return batch

        def generated(rollouts, number, *work):
            found = generate(rollouts, number, *work)
            self.logs[number] = [answer.ids for _, answers in found for answer in answers]
            return found

        monkeypatch.setattr(on_policy.Rollouts, "at", observed)
        monkeypatch.setattr(on_policy.Rollouts, "_generate", generated)


@pytest.mark.slow
def test_a_killed_run_trains_on_the_same_tokens(lab, finished, tmp_path, monkeypatch):
    observed, count = Observed(monkeypatch), Stage.count
    training = {"checkpoint_every_steps": 2}
    settings = {"on_policy": {"sync_every": 3}, "generation": SHORT, "training": training, "budget": {"tokens": 3600}}
    store = finished["on-policy"][1].folder.parent
    whole, _ = lab.run(store, "on-policy", **settings)
    expected, rounds = dict(observed.trained), dict(observed.logs)
    paths = lab.paths(store, "on-policy", **settings)
    # in the middle of a round, after its checkpoint; while the teacher scores; while the student writes
    for name, last in (("student.train", 5), ("teacher.score", 1), ("student.generate", 1)):
        seen = []

        def failing(stage, name=name, last=last, seen=seen, **counts):
            count(stage, **counts)
            seen.extend([1] if stage.name == name else [])
            if len(seen) == last and stage.name == name:
                raise RuntimeError(f"power failure in {name}")

        monkeypatch.setattr(Stage, "count", failing)
        with pytest.raises(RuntimeError, match=f"power failure in {name}"):
            execute(paths, lab.listening)
    monkeypatch.setattr(Stage, "count", count)
    observed.trained.clear()
    record = execute(paths, lab.listening)
    assert {at: ids for at, ids in observed.trained if ids != expected[at]} == {}
    assert observed.logs == rounds
    for name in ("student.clm_loss", "student.train.final_loss", "student.train.steps", "teacher.score.tokens"):
        assert record.results[name].value == pytest.approx(whole.results[name].value, rel=1e-5), name
    for name in ("student.generate", "teacher.score"):
        assert record.stage(name).tokens == whole.stage(name).tokens, name
    assert len(record.attempts) == 4 and "student.generate.repeated" in {stage.name for stage in record.stages}


def test_one_decoder_serves_all_rounds_and_passes(lab, finished, monkeypatch):
    """Built once, and its tokens are those of a decoder that is built for every round."""
    made, checked = [], []

    class Counted(engine.StaticDecoder):
        def __init__(self, *args, **kwargs):
            made.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(engine, "StaticDecoder", Counted)
    monkeypatch.setattr(engine, "check_model", lambda model: checked.append(1) or static_decoder.check_model(model))
    observed, store = Observed(monkeypatch), finished["on-policy"][1].folder.parent
    # 4 prompts of different lengths are answered several times, each time with other random numbers
    settings = {"generation": {**SHORT, "prompts": 4, "cache": "fixed"}, "budget": {"tokens": 3600}}
    lab.run(store, "on-policy", **settings)
    kept, passes = dict(observed.logs), len(observed.logs)
    assert len(made) == len(checked) == 1 and passes > 1

    fresh = on_policy.Rollouts._generator_for

    def rebuilt(rollouts, settings, identity):
        rollouts._generator = None
        return fresh(rollouts, settings, identity)

    monkeypatch.setattr(on_policy.Rollouts, "_generator_for", rebuilt)
    observed.logs.clear()
    lab.run(store, "on-policy", **settings)
    assert len(made) > 2 and observed.logs == kept
    assert len({str(tokens) for tokens in kept.values()}) == passes


def test_a_share_of_the_batches_comes_from_the_teachers_completions(lab, finished, monkeypatch):
    observed = Observed(monkeypatch)
    store = finished["on-policy"][1].folder.parent
    mixed = {"preset": "minillm", "student_share": 0.5, "other_data": "teacher", "sync_every": 3}
    record, _ = lab.run(store, "on-policy", generation={**SHORT, "keep_truncated": True}, on_policy=mixed)
    written = {ids for some in observed.logs.values() for ids in some}
    is_students = []
    for _, rows in observed.trained:
        text = "".join(f",{token}" for row in rows for token in row) + ","
        is_students.append(any("".join(f",{token}" for token in ids) + "," in text for ids in written if len(ids) > 3))
    assert 0 < sum(is_students) < len(is_students)
    assert record.stage("teacher.score").samples > record.stage("student.generate").samples / 2
    assert "data.synthetic" in {stage.name for stage in record.stages}
    assert any("50 % of the batches from the teacher's completions" in note.text for note in record.validity.notes)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_in", ["student.generate", "teacher.score"])
def test_a_round_that_a_signal_interrupts_is_continued(lab, finished, monkeypatch, stopped_in):
    """The checkpoint after the signal counts the energy of its completions, so they are not written again."""
    settings = {"on_policy": {"sync_every": 3}, "generation": SHORT, "budget": {"tokens": 3600}}
    store = finished["on-policy"][1].folder.parent
    whole, _ = lab.run(store, "on-policy", **settings)
    paths, asked = lab.paths(store, "on-policy", **settings), []
    generate, targets = on_policy.generate_into, on_policy.LiveTeacher.targets

    def generating(path, generator, prompts, tick):
        asked.append(len(prompts))
        found = generate(path, generator, prompts[:3] if len(asked) == 2 else prompts, tick)
        if len(asked) == 2 and stopped_in == "student.generate":
            raise EndedBySignal(15)
        return found if len(asked) != 2 else generate(path, generator, prompts, tick)

    def scoring(teacher, batch):
        if len(asked) == 2 and stopped_in == "teacher.score":
            raise EndedBySignal(15)
        return targets(teacher, batch)

    monkeypatch.setattr(on_policy, "generate_into", generating)
    monkeypatch.setattr(on_policy.LiveTeacher, "targets", scoring)
    with pytest.raises(EndedBySignal):
        execute(paths, lab.listening)
    asked += [0]
    record = execute(paths, lab.listening)
    if stopped_in == "student.generate":
        assert asked[3] == asked[1] - 3, "three answers were there"
    stages = {stage.name: stage for stage in record.stages}
    for name in ("student.generate", "teacher.score"):
        assert f"{name}.repeated" not in stages
        of_whole = whole.stage(name)
        assert (stages[name].samples, stages[name].tokens) == (of_whole.samples, of_whole.tokens), name
    for name in ("student.clm_loss", "student.generate.completions", "student.generate.generated_tokens"):
        assert record.results[name].value == pytest.approx(whole.results[name].value, rel=1e-5), name


@pytest.mark.slow
def test_the_energy_budget_counts_generation_and_not_the_teacher(lab, finished, monkeypatch):
    """By the budget's own readings: paused while the teacher scores, running while the student writes."""
    paused = []
    generate, score = on_policy.Rollouts._generate, on_policy.Rollouts._score
    budgets = []
    start = Budget.start
    monkeypatch.setattr(Budget, "start", lambda budget: (budgets.append(budget), start(budget))[1])

    def watching(name, function):
        def watched(rollouts, *arguments, **named):
            paused.append((name, budgets[-1]._before_pause is not None))
            return function(rollouts, *arguments, **named)

        return watched

    monkeypatch.setattr(on_policy.Rollouts, "_generate", watching("generate", generate))
    monkeypatch.setattr(on_policy.Rollouts, "_score", watching("score", score))
    store, budget = finished["on-policy"][1].folder.parent, {"tokens": 2400, "energy_j": 1e6}
    short = {"generation": SHORT, "training": {"budget_counts_estimates": True}, "start": None}
    lab.run(store, "on-policy", budget=budget, **short)
    assert set(paused) == {("generate", False), ("score", True)}
    paused.clear()
    lab.run(store, "on-policy", budget={**budget, "counts_teacher": True}, **short)
    assert set(paused) == {("generate", False), ("score", False)}


@pytest.mark.parametrize(("resumed_at", "is_paused"), [(4, False), (5, True)])
def test_scores_that_a_resumed_attempt_computes_again_use_no_budget(resumed_at, is_paused):
    """An interrupted training would otherwise have fewer steps than one that was not."""
    events = []

    @contextmanager
    def paused():
        events.append("paused")
        yield

    spec = SimpleNamespace(budget=SimpleNamespace(counts_teacher=True))
    rollouts = SimpleNamespace(
        _policy=SimpleNamespace(sync_every=4), _round=1, _totals={}, _context=SimpleNamespace(spec=spec), _teacher=None,
        _ranks=SimpleNamespace(is_first=False), _steps_left=lambda position, steps: steps, _report=list,
        _batches_of_round=lambda *round_: {}, _score=lambda batches, log_mu, repeats: events.append("scored"),
    )  # fmt: skip
    on_policy.Rollouts.prepare(rollouts, SimpleNamespace(step=resumed_at), paused)
    assert events == ["paused"] * is_paused + ["scored"]


def test_setup_of_the_generation_uses_no_budget(lab, finished, monkeypatch):
    """Checking the model for fixed slots is setup on a CPU too; compiling and capturing come through the same door."""
    budgets, seen = [], []
    start = Budget.start
    monkeypatch.setattr(Budget, "start", lambda budget: (budgets.append(budget), start(budget))[1])

    def check(model):
        seen.append(budgets[-1]._before_pause is not None)
        return static_decoder.check_model(model)

    monkeypatch.setattr(engine, "check_model", check)
    settings = {"generation": {**SHORT, "cache": "fixed"}, "training": {"max_steps": 2}, "label": "fixed slots"}
    lab.run(finished["on-policy"][1].folder.parent, "on-policy", **settings)
    assert seen == [True]


def test_prompts_of_a_pass_are_answered_once_and_differently_in_the_next(lab, finished, tmp_path, monkeypatch):
    kept = {}
    close = on_policy.Rollouts.close

    def keep(rollouts):
        for path in rollouts._folder.glob("round-*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            kept[path.name] = [(str(line["prompt"]), line["answers"][0]["ids"]) for line in lines]
            assert len(read_completions(path)) == len(lines)
        close(rollouts)

    monkeypatch.setattr(on_policy.Rollouts, "close", keep)
    store = finished["on-policy"][1].folder.parent
    lab.run(store, "on-policy", generation=SHORT, on_policy={"sync_every": 3})
    answers = [pair for lines in kept.values() for pair in lines]
    prompts = [prompt for prompt, _ in answers]
    assert max(prompts.count(prompt) for prompt in prompts) > 1  # 12 prompts, several passes
    repeated = {prompt for prompt in prompts if prompts.count(prompt) > 1}
    assert all(len({tuple(ids) for one, ids in answers if one == prompt}) > 1 for prompt in repeated)


# a teacher behind a server

WHOLE = {**SHORT, "answer": {"temperature": 1.0, "n": 2}}


@pytest.mark.slow
def test_a_server_that_lists_all_tokens_teaches_as_a_live_teacher_and_fewer_tokens_are_near(lab, finished):
    from openai_server import serving

    store, policy = finished["on-policy"][1].folder.parent, {"sync_every": 3}
    live, _ = lab.run(store, "on-policy", generation=WHOLE, on_policy=policy)
    with serving(lab.teacher) as (address, _):
        teacher = {"server": address}
        every, _ = lab.run(
            store, "on-policy", generation=WHOLE, on_policy={**policy, "listed_tokens": 32}, teacher=teacher
        )
        some, paths = lab.run(
            store, "on-policy", generation=WHOLE, on_policy={**policy, "listed_tokens": 3}, teacher=teacher
        )
    for name in ("student.train.final_loss", "student.generate.generated_tokens"):
        assert every.results[name].value == pytest.approx(live.results[name].value, rel=1e-3), name
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["stage"] == "student.train" and "loss" in line]
    assert losses and all(np.isfinite(losses))
    notes = [note.text for note in some.validity.notes]
    assert any("lists 3 tokens per position" in text and "without bias" in text for text in notes)
    # no sensor here includes the server: its energy is missing, not 0
    assert any(text.startswith("warning: teacher.score: no sensor") for text in lab.listening.messages)
    assert any(one.name.startswith(f"teacher.score on {address}") for one in some.lineage)


MALFORMED = (
    None, [[9, -0.1]], {"9": -0.1}, {"9": {}}, {"9": {"logprob": None}}, {"tok9": {"logprob": -0.1}},
)  # fmt: skip


def position(scores):
    return {"choices": [{"prompt_logprobs": [None, scores]}]}


def test_a_server_that_lists_fewer_tokens_than_asked_for_is_refused():
    """The sampled token would count as one of the list, which must not depend on it."""
    with pytest.raises(JoulelabError, match=r"list 2 tokens instead of on_policy\.listed_tokens=3"):
        server_teacher._read_scores(position({"7": {"logprob": -0.1}, "9": {"logprob": -3.0}}), [8, 9], 3, 32)
    with pytest.raises(ConfigError, match="listed_tokens=40 is more than the 32 tokens"):
        server_teacher.require_scores("http://127.0.0.1:9/v1", "tiny", 40, 32, None)


def test_a_server_without_scores_and_settings_that_would_be_biased_are_refused(lab):
    server = {"server": "http://127.0.0.1:9/v1"}
    for changes, text in (
        ({"generation": {**SHORT, "answer": {"temperature": 0.8}}}, "whole distribution"),
        ({"generation": WHOLE, "on_policy": {"student_share": 0.5}}, "on_policy.student_share=1"),
        ({"generation": WHOLE, "on_policy": {"temperature": 2.0}}, "on_policy.temperature=1"),
        ({"generation": WHOLE, "training": {"precision": "fp16"}}, "training.precision=bf16"),
    ):
        with pytest.raises(ConfigError, match=text):
            check(lab.settings("on-policy", teacher={**server, "model": str(lab.teacher)}, **changes))
    with pytest.raises(ConfigError, match="cannot score the student's tokens: no server answers at"):
        server_teacher.require_scores(server["server"], "tiny", 3, 32, None)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as refused:
        unknown = JoulelabError("HTTP 400: unknown parameter 'prompt_logprobs'", "check the model name")
        patch.setattr(server_teacher.Endpoint, "require_reachable", lambda endpoint: None)
        patch.setattr(server_teacher.Endpoint, "post", lambda *request: (_ for _ in ()).throw(unknown))
        server_teacher.require_scores(server["server"], "tiny", 3, 32, None)
    assert "for example vLLM" in refused.value.hint, "joulelab serve has no such extension"
    for reply, text in (
        ({"choices": [{"text": ""}]}, "no prompt_logprobs for a text of 2 tokens"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "of 1 tokens for a text of 2"),
        ({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -0.1}}]}]}, "lack token 9"),
        ({"choices": ["text"]}, "no prompt_logprobs for a text of 2 tokens"),
        *((position(one), 'at token 9 are .*; expected {"id": {"logprob": number}}') for one in MALFORMED),
        (position({"9": {"logprob": 0.7}}), "the sum of the probabilities is 2.01"),
        (position({"9": {"logprob": math.nan}}), "the sum of the probabilities is nan"),
        (position({"9": {"logprob": -5.0}, "99": {"logprob": -0.1}}), "give 90% to tokens outside of .* of 32"),
    ):
        with pytest.raises(JoulelabError, match=text):
            server_teacher._read_scores(reply, [8, 9], 1, 32)


def test_the_list_does_not_depend_on_the_sampled_token():
    def listed(token):
        scores = {"7": -0.5, "5": -1.5, **({} if token in (5, 7) else {str(token): -3.0})}
        position = {one: {"logprob": value} for one, value in scores.items()}
        return server_teacher._read_scores({"choices": [{"prompt_logprobs": [None, position]}]}, [1, token], 2, 32)

    assert {tuple(listed(token).ids_TK[0].tolist()) for token in (5, 7, 9, 11)} == {(7, 5)}
    assert listed(9).own_log_p_T[0] == pytest.approx(-3.0)


@pytest.mark.slow
def test_two_ranks_write_and_score_their_own_batches(lab, tmp_path):
    """Two ranks with half the batch each train on the micro-batches that one process with two of them trains on."""
    changes = {"generation": SHORT, "on_policy": {"sync_every": 2}}
    alone, _ = lab.run(tmp_path / "one", "on-policy", training={"accumulate": 2}, **changes)
    settings = {key: value for key, value in lab.settings("on-policy", **changes).items() if key != "name"}
    (tmp_path / "ranks.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "joulelab", "run"]
    command += [str(tmp_path / "ranks.yaml"), "--runs-dir", str(tmp_path / "two"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    record = RunRecord.model_validate_json(done.stdout)
    for name in ("student.generate", "teacher.score"):
        assert record.stage(name).tokens == alone.stage(name).tokens > 0, name
        assert record.stage(name).samples == alone.stage(name).samples, name
    for name in ("student.train.steps", "student.clm_loss"):
        assert record.results[name].value == pytest.approx(alone.results[name].value, rel=1e-4), name


class Probabilities:
    """The part of `Rollouts` that keeps the probabilities of a round, for one rank."""

    def __init__(self, folder, rank=0, value=-1.0):
        self._folder, self._ranks = folder, SimpleNamespace(rank=rank, sum=lambda values: values)
        self._synchronized, self.computed, self.warnings = 1, [], []
        self._generated = set(range(9))
        self._copy = SimpleNamespace(log_probabilities=lambda batch, *rest: torch.tensor([value]), synchronize=int)
        run = SimpleNamespace(warn=self.warnings.append)
        self._context = SimpleNamespace(compared_words=9, device="cpu", spec=SimpleNamespace(chunk=4), run=run)

    def _open(self, *kind):
        return nullcontext()

    def _synchronize(self, number):
        on_policy.Rollouts._synchronize(self, number)

    def sampled_with(self, *places):
        batches = {at: SimpleNamespace(to=lambda device, at=at: self.computed.append(at)) for at in places}
        return on_policy.Rollouts._sampled_with(self, 1, batches)


def test_the_probabilities_of_a_round_are_kept_with_a_checksum(tmp_path):
    first = Probabilities(tmp_path)
    first.sampled_with(3)
    assert set(first.sampled_with(3, 4)) == {3, 4} and first.computed == [3, 4], "only what is missing is computed"
    again = Probabilities(tmp_path)
    assert again.sampled_with(3)[3].tolist() == [-1.0] and again.computed == []
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptedFile, match="is corrupted"):
        again.sampled_with(3)


def test_probabilities_are_those_of_the_sampling_on_another_number_of_ranks(tmp_path):
    for rank, places in ((0, (4, 6)), (1, (5, 7))):
        Probabilities(tmp_path, rank, value=-2.0).sampled_with(*places)
    alone = Probabilities(tmp_path, value=-1.0)
    found = alone.sampled_with(4, 5)
    assert [float(found[at]) for at in (4, 5)] == [-2.0, -2.0] and alone.computed == []


def test_lost_probabilities_are_those_of_the_resumed_weights_and_the_run_warns(tmp_path):
    """The copy still has the weights that the training started from."""
    resumed, synchronized = Probabilities(tmp_path), []
    resumed._synchronized, resumed._generated = -1, set()
    resumed._copy.synchronize = lambda: synchronized.append(1)
    resumed.sampled_with(3)
    assert synchronized == [1] and resumed._synchronized == 1
    (warning,) = resumed.warnings
    assert "are missing; those of the resumed weights replace them" in warning


def test_no_round_goes_beyond_the_last_step(lab, finished):
    store = finished["on-policy"][1].folder.parent
    record, _ = lab.run(
        store, "on-policy", on_policy={"sync_every": 10}, generation=SHORT, training={"max_steps": 2}, label="2 steps"
    )
    assert record.results["student.train.steps"].value == 2
    assert record.stage("teacher.score").tokens == trained_tokens(record)


def test_batches_with_other_data_use_no_prompts(lab, finished, monkeypatch):
    """12 prompts, half of the batches: each is answered as often as any other, up to one time."""
    asked, requests = [], on_policy.Rollouts._requests

    def watched(rollouts, micro_batch):
        found = requests(rollouts, micro_batch)
        asked.extend(str(request.prompt) for request in found)
        return found

    monkeypatch.setattr(on_policy.Rollouts, "_requests", watched)
    store = finished["on-policy"][1].folder.parent
    mixed = {"student_share": 0.5, "sync_every": 3}
    lab.run(store, "on-policy", generation=SHORT, on_policy=mixed, budget={"tokens": 4800}, label="half")
    counts = [asked.count(prompt) for prompt in set(asked)]
    assert len(counts) == 12 and max(counts) - min(counts) <= 1


def test_a_budget_that_counts_an_unmetered_teacher_is_refused_before_the_first_stage(lab, tmp_path, monkeypatch):
    from openai_server import serving

    budget = {"tokens": 2400, "energy_j": 1e6, "counts_teacher": True}
    changes = {"generation": WHOLE, "on_policy": {"listed_tokens": 3}, "budget": budget}
    with serving(lab.teacher) as (address, _):
        settings = {"training": {"budget_counts_estimates": True}, "teacher": {"server": address}, **changes}
        with pytest.raises(ConfigError, match="the teacher's energy would be unknown: no sensor works"):
            execute(lab.paths(tmp_path, "on-policy", **settings), lab.listening)
        (run,) = tmp_path.glob("*/run.json")
        assert [stage["name"] for stage in json.loads(run.read_text())["stages"]] == ["run.overhead"]
        monkeypatch.setattr(server_teacher.ServerGenerator, "energy_gap", "it runs elsewhere")
        with pytest.raises(ConfigError, match="would be unknown: it runs elsewhere"):
            refuse_all(model_checks(check(lab.settings("on-policy", **settings))))
