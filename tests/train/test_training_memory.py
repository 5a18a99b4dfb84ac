"""A training that cannot fit is refused before it starts, with settings that fit."""

import re
from dataclasses import replace

import pytest

from joulelab.errors import ConfigError
from joulelab.runs.spec import parse_overrides
from joulelab.train.config import TrainingConfig
from joulelab.train.memory import ModelSize, require_memory, training_bytes

GB = 10**9
# OLMo-2-13B: 13.7 billion weights, rows of 1,024 tokens
LARGE = ModelSize(13_716_198_400, 13_716_198_400, 40, 5120, 13_824, 1024, 100_352, 4096)
BF16 = {"weights": "bf16", "precision": "bf16"}


def settings(**changes):
    return TrainingConfig(**{"batch_size": 4, "activation_checkpointing": True, "precision": "bf16", **changes})


def test_13b_with_adamw_in_fp32_needs_over_200_gb_and_the_hint_names_what_fits_on_an_h200():
    with pytest.raises(ConfigError) as refused:
        require_memory("student.train", LARGE, settings(optimizer="adamw"), 141 * GB)
    text = refused.value.message
    assert "13.7 billion weights needs at least 219 GB" in text
    assert "adamw state 110 GB" in text and "141 GB is free" in text
    with pytest.raises(ConfigError, match=r"141 GB of RAM is free") as on_cpu:
        require_memory("student.train", LARGE, settings(optimizer="adamw"), 141 * GB, on_gpu=False)
    assert "GPUs" not in on_cpu.value.hint
    hint = refused.value.hint
    assert "training.optimizer=adafactor" in hint
    assert "training.weights=bf16 training.optimizer=adamw-8bit" in hint
    assert "training.parallel=fsdp on 2 GPUs" in hint


def test_what_the_hint_names_fits():
    free = 141 * GB
    for changes in (
        {"optimizer": "adafactor"},
        {"optimizer": "adamw-8bit", **BF16},
        {"optimizer": "adafactor", **BF16},
    ):
        require_memory("student.train", LARGE, settings(**changes), free)
    require_memory("student.train", LARGE, settings(optimizer="adamw"), free, ranks=2)


def test_state_is_counted_by_dtype_optimizer_and_rounding():
    def state(**changes):
        parts = training_bytes(LARGE, settings(**changes))
        return round(sum(parts.get(name, 0) for name in parts if name not in ("activations",)) / LARGE.parameters)

    assert state(optimizer="adamw") == 16
    assert state(optimizer="adamw", **BF16) == 12
    assert state(optimizer="adamw", rounding="kahan", **BF16) == 14
    assert state(optimizer="adamw-8bit", **BF16) == 6
    assert state(optimizer="adafactor", **BF16) == 4


def test_activations_are_freed_while_gradients_are_made_unless_gradients_of_other_micro_batches_exist():
    changes = {"optimizer": "adafactor", "activation_checkpointing": False, **BF16}
    small, large = (training_bytes(LARGE, settings(batch_size=size, **changes)) for size in (1, 32))
    assert "activations" not in small and small["gradients"] == 2 * LARGE.parameters
    assert "gradients" not in large and large["activations"] > small["gradients"]
    both = training_bytes(LARGE, settings(batch_size=32, accumulate=2, **changes))
    assert (both["activations"], both["gradients"]) == (large["activations"], small["gradients"])


def test_a_compiled_layer_a_shared_key_and_a_batch_of_unknown_length_need_less():
    changes = {"batch_size": 32, "activation_checkpointing": False, **BF16}

    def activations(size=LARGE, **more):
        return training_bytes(size, settings(**changes, **more))["activations"]

    tokens, each = 32 * 1024, 2
    per_layer = (activations() - 4 * LARGE.vocabulary * (LARGE.width + 4096)) // (tokens * each * LARGE.layers)
    assert per_layer == 8 * LARGE.width + 3 * LARGE.inner_width
    shared = activations(replace(LARGE, attention_width=2 * 5120 + 2 * 1024))
    assert activations() - shared == tokens * each * LARGE.layers * 2 * (LARGE.width - 1024)
    assert activations(compile="blocks") < 0.75 * activations()
    assert "activations" not in training_bytes(replace(LARGE, sure_tokens=1), settings(**changes))


def test_a_frozen_head_has_no_gradient():
    changes = settings(batch_size=32, activation_checkpointing=False)
    frozen = training_bytes(replace(LARGE, head_is_trained=False), changes)["activations"]
    assert training_bytes(LARGE, changes)["activations"] - frozen == 4 * LARGE.vocabulary * LARGE.width


def test_the_hint_names_settings_that_are_accepted():
    config = settings(optimizer="adamw", moments="bf16", activation_checkpointing=False, batch_size=16, **BF16)
    with pytest.raises(ConfigError) as refused:
        require_memory("student.train", LARGE, config, 100 * GB)
    found = re.findall(r"((?:training\.\w+=[\w-]+ ?)+)\(", refused.value.hint)
    assert any("optimizer=adafactor" in text for text in found)
    for text in found:
        changes = parse_overrides(text.replace("training.", "").split())
        TrainingConfig(**{**config.model_dump(), **changes})


@pytest.mark.parametrize("changes", [{"precision": "fp16"}, {"matmul": "fp8"}])
def test_fsdp_is_not_suggested_with_settings_that_refuse_it(changes):
    for config, is_named in ((settings(optimizer="adamw"), True), (settings(optimizer="adamw", **changes), False)):
        with pytest.raises(ConfigError) as refused:
            require_memory("student.train", LARGE, config, 141 * GB)
        assert ("parallel=fsdp" in refused.value.hint) == is_named


def test_a_batch_that_needs_checkpointing_says_so():
    with pytest.raises(ConfigError) as refused:
        changes = {"optimizer": "adafactor", "activation_checkpointing": False, "batch_size": 32, **BF16}
        require_memory("student.train", LARGE, settings(**changes), 141 * GB)
    assert "training.activation_checkpointing=true (" in refused.value.hint


def test_adapters_train_few_weights():
    adapted = ModelSize(13_716_198_400, 60_000_000, 40, 5120, 13_824, 1024, 100_352, 4096)
    require_memory("student.train", adapted, settings(optimizer="adamw"), 80 * GB)


def test_where_nothing_fits_the_hint_says_it():
    with pytest.raises(ConfigError) as refused:
        require_memory("student.train", LARGE, settings(optimizer="adamw"), 1 * GB)
    assert "use a smaller student" in refused.value.hint


def test_the_hint_names_another_device_only_if_the_rest_fits():
    size = replace(LARGE, other_models_bytes=30 * GB, other_models_hint="the teacher on another device")
    for free, fits in ((20 * GB, False), (245 * GB, True)):
        with pytest.raises(ConfigError) as refused:
            require_memory("student.train", size, settings(optimizer="adamw"), free)
        assert ("another device" in refused.value.hint) is fits


def test_the_hint_names_the_section_of_the_settings():
    with pytest.raises(ConfigError) as refused:
        require_memory("student.sft", LARGE, settings(optimizer="adamw"), 141 * GB, section="start")
    assert "start.optimizer=adafactor" in refused.value.hint and "training." not in refused.value.hint
