"""How many tokens an encoder can read is known from its configuration, before it is loaded."""

import pytest
import torch
import transformers

from joulelab.distill.classify.objective import require_positions
from joulelab.distill.squad.objective import require_windows_fit
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import encoder_positions

SHAPE = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 34,
}  # fmt: skip


@pytest.mark.parametrize("family", ["Bert", "Electra", "Roberta", "XLMRoberta", "Camembert", "MPNet"])
def test_a_model_reads_as_many_tokens_as_its_configuration_allows_and_no_more(family):
    config = getattr(transformers, f"{family}Config")(**SHAPE)
    model = getattr(transformers, f"{family}Model")(config).eval()
    positions = encoder_positions(config)
    assert model(input_ids=torch.full((1, positions), 7)).last_hidden_state.shape[1] == positions
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, positions + 1), 7))


@pytest.mark.parametrize("check", [require_positions, require_windows_fit])
def test_longer_texts_are_refused_with_the_number_that_fits(check, tmp_path):
    transformers.XLMRobertaConfig(**SHAPE).save_pretrained(tmp_path)
    check(str(tmp_path), 32)
    with pytest.raises(ConfigError, match="has 32 positions"):
        check(str(tmp_path), 33)
