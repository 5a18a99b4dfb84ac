"""Checks and numerics of students that are too large for float32 weights and AdamW."""

import json

import pytest
import torch
import transformers

from joulelab.distill.causal.config import Lora
from joulelab.distill.causal.models import _attention_width, _is_gated, add_lora, check_memory, expose_hidden_states
from joulelab.distill.causal.recipe import model_checks
from joulelab.errors import ConfigError, refuse_all
from joulelab.runs import environment
from joulelab.runs.execute import execute
from joulelab.runs.groups import check_group
from joulelab.runs.spec import check, experiment_names, read_experiment, read_layers
from joulelab.train.config import TrainingConfig
from joulelab.train.memory import ModelSize, _saved_per_layer
from joulelab.zoo.pretrained import load_causal_lm

BF16 = {"weights": "bf16", "precision": "bf16"}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The configuration of a model with 13 billion weights, without any of them."""
    folder = tmp_path_factory.mktemp("13b")
    transformers.Olmo2Config(
        hidden_size=5120, intermediate_size=13_824, num_hidden_layers=40, num_attention_heads=40, vocab_size=100_352,
        architectures=["Olmo2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def spec_of(lab, large, pipeline="sft", **training):
    changes = {"training": {"activation_checkpointing": True, "batch_size": 4, **training}}
    if pipeline == "on-policy":
        changes |= {"generation": {"prompt_tokens": 18}, "teacher": {"model": large, "precision": "bf16"}}
    return check(lab.settings(pipeline, student={"model": large, "size": None}, **changes))


def test_13b_with_adamw_is_refused_before_the_run_starts_and_bf16_weights_fit(lab, large, monkeypatch):
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 141 * 10**9)
    with pytest.raises(ConfigError, match=r"student.train: training 13.7 billion weights needs at least 219 GB") as no:
        check_memory(spec_of(lab, large))
    assert "training.weights=bf16" in no.value.hint and "training.optimizer=adafactor" in no.value.hint
    check_memory(spec_of(lab, large, optimizer="adafactor", **BF16))


def test_a_live_teacher_and_the_copy_that_generates_are_counted(lab, large, monkeypatch):
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 100 * 10**9)
    check_memory(spec_of(lab, large, optimizer="adafactor", **BF16))
    with pytest.raises(ConfigError, match=r"other models 8\d.\d GB") as refused:
        check_memory(spec_of(lab, large, "on-policy", optimizer="adafactor", **BF16))
    assert "the teacher on another device, without its 27.4 GB: teacher.server" in refused.value.hint


def test_a_quantized_live_teacher_needs_room_for_its_weights_while_it_is_loaded(lab, large, monkeypatch):
    spec = spec_of(lab, large, "on-policy", optimizer="adafactor", **BF16)
    nf4 = {"teacher": spec.teacher.model_copy(update={"precision": "nf4"})}
    small = {"student": spec.student.model_copy(update={"model": str(lab.teacher)})}
    spec = spec.model_copy(update={**nf4, **small})
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 28 * 10**9)
    check_memory(spec)
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 27 * 10**9)
    with pytest.raises(ConfigError, match=r"a model of 27.4 GB is loaded and then quantized"):
        check_memory(spec)


def test_an_sft_student_without_settings_of_its_own_is_checked_with_those_of_the_training(lab, large, monkeypatch):
    """Only rows of the SFT student are full; the pairs of dpo are counted with one token each."""
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 80 * 10**9)
    changes = {"optimizer": "adafactor", **BF16, "activation_checkpointing": False, "batch_size": 64}
    spec = spec_of(lab, large, "dpo", **changes)
    spec = spec.model_copy(update={"start": None, "data": spec.data.model_copy(update={"row_length": 4096})})
    with pytest.raises(ConfigError, match=r"student\.sft: training 13.7 billion weights .* activations 1.73 TB"):
        check_memory(spec)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("Gemma4Text", {"intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32}),
        ("Mamba", {}),
    ],
    ids=["heads differ by layer", "no heads"],
)
def test_memory_is_checked_for_models_with_other_attention(lab, tmp_path, family, shape, monkeypatch):
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(hidden_size=64, num_hidden_layers=6, vocab_size=300, **shape)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 10**11)
    check_memory(spec_of(lab, str(tmp_path)))
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 10**5)
    with pytest.raises(ConfigError, match="needs at least"):
        check_memory(spec_of(lab, str(tmp_path)))


def test_pairs_are_not_counted_as_full_rows(lab, large, monkeypatch):
    """8 x 1,024 tokens of pairs that have 32 at most: the run was refused on a device where it fits."""
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 80 * 10**9)
    changes = {"optimizer": "adafactor", **BF16, "activation_checkpointing": False, "batch_size": 64}
    spec = {name: spec_of(lab, large, name, **changes) for name in ("sft", "dpo")}
    rows = {"data": spec["sft"].data.model_copy(update={"row_length": 4096})}
    with pytest.raises(ConfigError, match="activations"):
        check_memory(spec["sft"].model_copy(update=rows))
    check_memory(spec["dpo"].model_copy(update={**rows, "sft_first": False}))


def test_the_shipped_sizes_have_one_recipe():
    """A comparison of sizes must not compare adapters with full training, or other settings, at the same time."""
    for method in ("sft", "kd", "synthetic", "dpo", "self", "on-policy"):
        found = []
        for size in ("1b", "7b", "13b"):
            settings = read_experiment(f"{method}-32b-to-{size}")
            student = settings["student"]
            assert set(student) == {"model"}, "all weights are trained"
            # the weights of the loss and the decoding of the teacher are published for each size
            recipe = ("training", "start", "budget", "data")
            found.append({key: settings.get(key) for key in recipe})
        assert found[0] == found[1] == found[2]
        assert found[0]["training"]["weights"] == "bf16"


def test_the_grid_of_large_students_has_every_method_and_size_that_fits_on_one_gpu():
    group, members = check_group(read_layers("compare-32b"), {})
    assert "six methods" in group.about
    found = {one.experiment for one in group.members}
    assert {name for name in experiment_names() if "-32b-to-" in name} - found == {"on-policy-32b-to-13b"}
    assert len(members) == 17


@pytest.mark.parametrize("pipeline", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_student_with_bf16_weights_is_trained_saved_in_bf16_and_near_the_fp32_one(lab, tmp_path, pipeline):
    whole, _ = lab.run(tmp_path / "fp32", pipeline, training={"precision": "bf16"})
    half, paths = lab.run(tmp_path / "bf16", pipeline, training=BF16)
    assert half.results["student.clm_loss"].value == pytest.approx(whole.results["student.clm_loss"].value, rel=0.05)
    name = "final_policy" if pipeline == "dpo" else "final_model"
    saved = load_causal_lm(str(paths.artifacts / name))
    assert {weight.dtype for weight in saved.parameters()} == {torch.bfloat16}
    if pipeline == "dpo":  # policy and reference are rounded alike: the first margin is 0 and the loss ln 2
        lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
        first = next(line for line in lines if line.get("stage") == "student.train" and "loss.margin" in line)
        assert first["loss.margin"] == pytest.approx(0.0, abs=0.2)


def test_a_killed_training_with_bf16_weights_continues_bit_for_bit(lab, tmp_path):
    settings = {**BF16, "rounding": "kahan", "optimizer": "adafactor", "checkpoint_every_steps": 2}
    whole, _ = lab.run(tmp_path / "whole", "sft", training=settings)
    paths = lab.paths(tmp_path / "cut", "sft", training=settings)

    class Killed(BaseException):
        pass

    class Progress(type(lab.listening)):
        def advance(self, step=0, text=""):
            if step == 5:
                raise Killed

    with pytest.raises(Killed):
        execute(paths, Progress())
    rest = execute(paths, lab.listening)
    assert rest.results["student.clm_loss"].value == whole.results["student.clm_loss"].value


def test_a_student_trained_with_8_bit_products_is_saved_as_any_other(lab, tmp_path, monkeypatch):
    for module in ("trainer", "fp8_products"):  # torch computes them on a CPU too, slowly
        monkeypatch.setattr(f"joulelab.train.{module}.require_fp8", lambda device: None)
    whole, _ = lab.run(tmp_path / "bf16", "sft", training={"precision": "bf16"})
    small, paths = lab.run(tmp_path / "fp8", "sft", training={"precision": "bf16", "matmul": "fp8"})
    losses = [record.results["student.clm_loss"].value for record in (small, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05) and losses[0] != losses[1]
    saved = load_causal_lm(str(paths.artifacts / "final_model"))
    assert {weight.dtype for weight in saved.parameters()} == {torch.float32}


def test_8_bit_products_are_refused_with_adapters_and_without_a_gpu(lab, large):
    fp8 = {"precision": "bf16", "matmul": "fp8"}
    with pytest.raises(ConfigError, match=r"matmul=fp8 with student\.lora is not supported"):
        check(lab.settings("sft", student={"model": large, "size": None, "lora": {"rank": 4}}, training=fp8))
    with pytest.raises(ConfigError, match="matmul=fp8 needs an NVIDIA GPU, but the device is cpu"):
        refuse_all(model_checks(check(lab.settings("sft", device="cpu", training=fp8))))


def test_rotary_frequencies_of_a_bf16_teacher_stay_float32(lab):
    """`model.to(bfloat16)` rounds them to 8 bits, which moves the angle of far positions by whole radians."""
    from types import SimpleNamespace

    from joulelab.distill.causal.models import CausalContext

    spec = SimpleNamespace(teacher=SimpleNamespace(model=str(lab.teacher), precision="bf16", quantization=None))
    context = CausalContext(SimpleNamespace(spec=spec, device=torch.device("cpu")))
    teacher = context.load_teacher()
    assert next(teacher.parameters()).dtype == torch.bfloat16
    assert teacher.model.rotary_emb.inv_freq.dtype == torch.float32


SMALL = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    ("family", "shape", "query"),
    [
        ("Llama", {"intermediate_size": 344, "num_key_value_heads": 1}, "q_proj"),
        ("Phi3", {"intermediate_size": 512, "pad_token_id": 0}, "qkv_proj"),
        ("GPTNeoX", {"intermediate_size": 512}, "query_key_value"),
        ("OPT", {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0}, "q_proj"),
        ("Starcoder2", {"intermediate_size": 512, "num_key_value_heads": 1, "residual_dropout": 0.0}, "q_proj"),
    ],
)
def test_no_more_activations_are_counted_than_a_layer_saves(family, shape, query, adapters):
    config = getattr(transformers, f"{family}Config")(**SMALL, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    inner = shape.get("intermediate_size", 512)
    size = ModelSize(2, 1 if adapters else 2, 4, 128, inner, 64, 100, 64, _is_gated(model), _attention_width(model, 4))
    model = expose_hidden_states(model)
    if adapters:
        model = add_lora(model, Lora(rank=2, targets=(query,)), 0).model
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = tensor  # kept, so that its memory is not used again
        return tensor

    ids = torch.randint(0, 100, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.train()(ids, hidden_only=True)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / ids.numel() / 4
    counted = 4 * _saved_per_layer(size, TrainingConfig(precision="fp32"))
    assert 0.45 * measured < counted <= measured
