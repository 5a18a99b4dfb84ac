"""A whole inference run over the simulated driver: 400 W whatever happens, so joules are time."""

import re
from dataclasses import replace

import pytest
import torch
from nvml_sim.driver import SimGpu, constant
from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: F401

from joulelab.cli.infer import FLAGS, infer_spec
from joulelab.errors import ConfigError
from joulelab.report.figures.serving_figures import joules_against_latency
from joulelab.report.tables.inference_rows import inference_rows
from joulelab.report.tables.inference_tables import generation_rows
from joulelab.report.tables.run_tables import run_grids, run_result, stages_grid
from joulelab.report.wording import rate
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import check
from joulelab.zoo.norms.encoder_shapes import SHAPES


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(tmp_path, model, **flags):
    absent = dict.fromkeys([*FLAGS, "generate", "estimate_cpu", "overrides"])
    spec = infer_spec({**absent, "model": model, "threads": 1, "device": "cpu", **flags})
    return execute(create_run(tmp_path / "runs", spec), SilentProgress())


@pytest.mark.slow
def test_joules_per_inference_are_watts_times_the_time_of_one(nvml_sim, tmp_path, monkeypatch):  # noqa: F811
    small = replace(SHAPES["deit-t"], width=48, heads=3, head_width=16, layers=2, side=32, patch=8)
    monkeypatch.setitem(SHAPES, "deit-t", small)
    nvml_sim.gpus = [SimGpu(wave=constant(400))]
    nvml_sim.write()
    # the model runs on the CPU of a machine without a GPU; its joules are those of the simulated card
    idle = ["energy.idle_before_s=1.5", "energy.idle_after_s=1.5", "rounds=2", "energy.total_energy_policy=gpu_only"]
    record = run(
        tmp_path, "deit-t", norm="pre-ln,pre-rms", min_run_time=2.4, target_ci="80%", max_time=10.0, overrides=idle
    )
    rows = inference_rows(record)
    assert [row.stage for row in rows] == ["infer.b1-eager-fp32-pre-ln", "infer.b1-eager-fp32-pre-rms"]
    for row in rows:
        per_call_s = row.values["seconds"] / row.values["calls"]
        assert row.energy.method == "counter"
        assert row.energy.gross_j == pytest.approx(400 * per_call_s, rel=0.05)
        assert 0 < row.latency_s < 1.5 * per_call_s  # a median: what else the machine does lengthens the mean
        assert row.energy.net_j == pytest.approx(0, abs=0.1 * row.energy.gross_j)  # it idles at 400 W as well
        assert row.values["seconds"] >= 2.4
        assert "the energy interval reached 80 %" in row.values["stopped"]
        assert row.values["state"]["sm_clock_mhz"] is not None
        stage = record.stage(row.stage)
        assert stage.samples == row.values["calls"]
        assert len(stage.segments) >= 2
    assert next(stage.name for stage in record.stages) == "idle.before"
    captions = [grid.caption for grid in run_grids(record)]
    assert "Inference: CPU, 1 thread, batch 1, eager, fp32" in captions
    for row in rows:
        (cells,) = [cells for cells in stages_grid(record).rows if cells[0] == row.stage]
        assert {rate(row.items_per_s, ""), rate(row.energy.gross_j, "J")} <= set(cells), "one rate and energy per item"
    assert "Ratio to the first row, measured in turns" in captions
    assert joules_against_latency(record) is not None


@pytest.mark.slow
def test_inference_on_the_cpu_does_not_report_the_idle_gpu_as_energy_per_item(nvml_sim, tmp_path, monkeypatch):  # noqa: F811
    """A card that idles at 80 W, no RAPL. Before: 80 W times the time of an item, as its energy."""
    small = replace(SHAPES["deit-t"], width=48, heads=3, head_width=16, layers=2, side=32, patch=8)
    monkeypatch.setitem(SHAPES, "deit-t", small)
    nvml_sim.gpus = [SimGpu(wave=constant(80), settings={"utilization": "0 0"})]
    nvml_sim.write()
    (tmp_path / "none").mkdir()
    quick = ["energy.idle_before_s=0", "energy.idle_after_s=0", "rounds=1", f"energy.rapl_root={tmp_path / 'none'}"]
    for estimate in (False, True):
        record = run(
            tmp_path, "deit-t", min_run_time=1.2, overrides=[*quick, f"energy.estimate_cpu={str(estimate).lower()}"]
        )  # fmt: skip
        (row,) = inference_rows(record)
        stage = record.stage(row.stage)
        assert stage.unused_gpu_w == pytest.approx(80, rel=0.05)
        text = "\n".join(f"{' '.join(map(' '.join, grid.rows))} {grid.note}" for grid in run_grids(record))
        assert "not used by this model and not included; energy is that of the CPU" in text
        assert "J ±" in text and "of it is the GPU, which the models did not use" in text
        assert re.search(
            r"; whole run: .* energy counter; .*; all of it is the GPU, which the models did not use; grade",
            run_result(record),
        )
        if estimate:
            item_s = row.values["seconds"] / row.values["calls"]
            assert row.energy.method == "estimated" and row.energy.gross_j < 0.5 * 80 * item_s
            assert stage.j_per_sample == pytest.approx(row.energy.gross_j, rel=0.1)
            assert re.search(r" [mµ]?J ±\d\d %, estimated \(CPU\)", text)
        else:
            assert row.energy is None and stage.j_per_sample is None
            assert "cpu: " in row.values["why_no_energy"] and "gpu" not in row.values["why_no_energy"].lower()


def test_a_model_of_the_zoo_is_run_with_its_loss_and_states_what_was_not_measured(tmp_path):
    record = run(
        tmp_path, "bert", size="tiny", batch_size="1,2", min_run_time=0.2,
        overrides=["energy.idle_before_s=0", "energy.idle_after_s=0", "energy.gpus=none", "rounds=1"],
    )  # fmt: skip
    rows = inference_rows(record)
    assert [row.values["items_per_call"] for row in rows] == [1, 2]
    assert all(row.values["flops_per_item"] > 0 for row in rows)
    if all(row.energy is None for row in rows):  # a machine without RAPL
        grid = next(grid for grid in run_grids(record) if grid.caption.startswith("Inference"))
        assert "Energy and power were not measured: see the run's line `energy`." in grid.note
        assert record.totals.figure.reason


@pytest.fixture
def language_model(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=96,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.slow
def test_generation_is_taken_apart_and_each_part_is_run_until_its_joules_are_sure(
    nvml_sim, tmp_path, language_model, monkeypatch,  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr("joulelab.infer.timing._MIN_SEGMENTS", 1)  # a test need not be as sure as a user
    nvml_sim.gpus = [SimGpu(wave=constant(400))]
    nvml_sim.write()
    record = run(
        tmp_path, language_model, generate=True, prompt_tokens=8, new_tokens=5, batch_size="2", min_run_time=0.3,
        target_ci="80%", max_time=9.0,
        overrides=[
            "energy.idle_before_s=0", "energy.idle_after_s=0", "rounds=1", "energy.total_energy_policy=gpu_only",
        ],
    )  # fmt: skip
    (found,) = generation_rows(record)
    for row, tokens in ((found.prefill, None), (found.decode, 4), (found.whole, 5)):
        per_call_s = row.values["seconds"] / row.values["calls"]
        assert row.energy.gross_j == pytest.approx(400 * per_call_s / 2, rel=0.15), "of one of two responses"
        assert row.values["seconds"] > 0.9, "0.3 s were asked for, and are too little to tell an interval"
        assert row.values["stopped"] == "the energy interval reached 80 %"
        responses = 2 * row.values["calls"]
        stage = record.stage(row.stage)
        assert (stage.samples, stage.tokens) == (responses, tokens and tokens * responses)
    together_s = found.prefill.latency_s + found.decode.latency_s
    assert together_s / 3 < found.whole.latency_s < 3 * together_s, "per response, whatever else uses the cores"


def test_a_folder_with_a_model_of_images_is_given_images_and_no_tokens(tmp_path):
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = transformers.ViTConfig(image_size=16, patch_size=8, **shape)
    transformers.ViTForImageClassification(images).save_pretrained(tmp_path / "images")
    quick = ["energy.idle_before_s=0", "energy.idle_after_s=0", "energy.gpus=none", "rounds=1"]
    (row,) = inference_rows(run(tmp_path, str(tmp_path / "images"), min_run_time=0.1, overrides=quick))
    assert (row.stage, row.values["tokens"], row.values["item"]) == ("infer.b1-eager-fp32", 0, "image")
    for model, flags, words in (
        (transformers.ViTForImageClassification(images), {"seq_length": "32"}, "takes images"),
        (transformers.CLIPModel(_clip(transformers, shape)), {}, "needs inputs other than tokens alone"),
    ):
        model.save_pretrained(tmp_path / "other")
        with pytest.raises(ConfigError, match=words):
            run(tmp_path, str(tmp_path / "other"), overrides=quick, **flags)


def _clip(transformers, shape):
    text = {**shape, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.CLIPConfig(text_config=text, vision_config={**shape, "image_size": 16, "patch_size": 8})


def test_tokens_beyond_what_roberta_can_read_are_refused(tmp_path):
    """Two of its positions belong to no token."""
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(vocab_size=30, max_position_embeddings=34, pad_token_id=1, **shape)
    transformers.RobertaModel(config).save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match="has 32 positions; 33 tokens were requested"):
        run(tmp_path, str(tmp_path / "encoder"), seq_length="33", overrides=["energy.idle_before_s=0"])


def test_a_model_that_does_not_generate_is_refused(tmp_path):
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertModel(transformers.BertConfig(vocab_size=30, **shape)).save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match="not a causal language model"):
        run(tmp_path, str(tmp_path / "encoder"), generate=True, overrides=["energy.idle_before_s=0"])


def test_weights_that_joulelab_trained_bring_their_bill_into_train_and_infer(tmp_path):
    settings = {
        "pipeline": "train", "model": "gpt2", "size": "tiny", "device": "cpu", "save_model": True,
        "evaluate_batches": 0, "training": {"batch_size": 4, "max_steps": 20},
        "energy": {"gpus": "none", "estimate_cpu": True},
    }  # fmt: skip
    first = execute(create_run(tmp_path / "runs", check(settings)), SilentProgress())
    ours = str(tmp_path / "runs" / first.run_id / "artifacts" / "final_model")
    second = execute(create_run(tmp_path / "runs", check({**settings, "weights": ours, "seed": 1})), SilentProgress())
    used = run(
        tmp_path, "gpt2", size="tiny", weights=ours, min_run_time=0.2,
        overrides=["energy.idle_before_s=0", "energy.idle_after_s=0", "energy.gpus=none", "rounds=1"],
    )  # fmt: skip
    took = first.stage("model.train").energy.cpu_estimate.energy_j
    for record in (second, used):
        (ancestor,) = record.inherited
        assert (ancestor.name, ancestor.made_by) == ("final_model", first.run_id)
        assert ancestor.energy["cpu_estimate"].energy_j >= took > 0
