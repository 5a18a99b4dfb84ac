"""Settings that contradict each other are refused with the reason; those of the old scripts have their defaults."""

import pytest

from joulelab.data.token_store import write_store
from joulelab.errors import ConfigError
from joulelab.runs.spec import check

PLAIN = {"pipeline": "distilbert"}


def spec(**sections):
    return check({**PLAIN, **sections})


def test_the_defaults_are_those_of_the_old_scripts():
    made = spec()
    training, distill, data = made.training, made.distill, made.data
    assert (training.batch_size, training.accumulate, training.learning_rate, training.epochs) == (5, 50, 5e-4, 3)
    assert (training.betas, training.eps, training.warmup_share, training.clip_norm) == ((0.9, 0.98), 1e-6, 0.05, 5)
    assert (training.schedule, training.weight_decay, made.seed) == ("linear", 0, 56)
    assert (distill.temperature, distill.mlm_mask_prop, distill.mlm_smoothing) == (2, 0.15, 0.7)
    assert (distill.word_mask, distill.word_keep, distill.word_rand) == (0.8, 0.1, 0.1)
    assert (data.min_tokens, data.max_unknown_share, data.max_model_input_size, data.group_by_size) == (
        11,
        0.5,
        512,
        True,
    )


def test_setting_one_training_value_leaves_the_others_as_they_were():
    assert spec(training={"batch_size": 8}).training.learning_rate == 5e-4


def test_shares_that_add_up_to_1_only_in_decimal_are_taken():
    assert spec(distill={"alpha_mlm": 1.0, "word_mask": 0.7, "word_keep": 0.2, "word_rand": 0.1})


GPT2 = {"teacher": {"teacher_type": "gpt2"}, "student": {"student_type": "gpt2", "layers": [0, 1]}}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({**GPT2, "distill": {"mlm": True, "alpha_mlm": 1.0}}, "mlm with a gpt2 student"),
        ({**GPT2, "distill": {"mlm": False, "alpha_mlm": 1.0}}, "alpha_mlm > 0 without mlm"),
        ({"distill": {"alpha_clm": 1.0}}, "alpha_clm > 0 with mlm"),
        ({"distill": {"mlm": False, "alpha_clm": 1.0}}, "mlm=false with a distilbert student"),
        ({"distill": {"alpha_ce": 0.0}}, "every alpha is 0"),
        ({"distill": {"word_mask": 0.8, "word_keep": 0.2, "word_rand": 0.1}}, "= 1.1; expected a sum of 1"),
        ({"distill": {"alpha_ce": 0.0, "alpha_mlm": 1.0, "restrict_ce_to_mask": True}}, "has no effect"),
        ({"distill": {"freeze_token_type_embds": True}}, "no token type embeddings"),
        ({"teacher": {"teacher_type": "roberta"}}, "reads the tokens of a bert teacher"),
        ({"student": {"layers": [0], "student_size": "tiny"}}, "exactly one of"),
        ({"student": {}}, "exactly one of"),
        ({"training": {"parallel": "fsdp"}}, "parallel=fsdp"),
    ],
)
def test_contradictions_are_refused_with_the_reason(sections, reason):
    with pytest.raises(ConfigError) as refused:
        spec(**sections)
    assert reason in f"{refused.value} {refused.value.hint}"


def test_a_term_that_is_off_asks_for_no_teacher():
    assert not spec(distill={"alpha_ce": 0.0, "alpha_mlm": 1.0}).distill.needs_teacher
    assert spec(distill={"alpha_ce": 0.0, "alpha_cos": 1.0}).distill.needs_teacher


def test_the_settings_need_no_torch():
    import subprocess
    import sys

    frameworks = "'torch' in sys.modules or 'transformers' in sys.modules"
    code = f"import sys, joulelab.distill.distilbert.config; sys.exit({frameworks})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_name_that_old_commands_use_means_the_store_that_was_made_instead(tmp_path):
    write_store(tmp_path / "binarized", [[5, 6, 7]], vocab_size=10, specials={}, tokenizer="none")
    old = str(tmp_path / "binarized.pickle")
    assert spec(data={"source": old}).data.source == str(tmp_path / "binarized")
    (tmp_path / "binarized.pickle").touch()
    real = spec(data={"source": old})
    assert real.data.source == old
    with pytest.raises(ConfigError, match="is a pickle") as refused:
        real.preflight()
    assert "joulelab prepare binarize" in refused.value.hint
