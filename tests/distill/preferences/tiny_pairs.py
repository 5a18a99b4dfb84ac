"""Pairs of random tokens for a tiny Llama with `hidden_only`."""

import numpy as np
import torch
import transformers

from joulelab.distill.causal.models import expose_hidden_states
from joulelab.distill.preferences.pairs import Pair

WORDS = 53  # no multiple of 64, so that padding of the vocabulary would show


def make_model(seed=0, dropout=0.0, attention="sdpa", scale=5.0, **settings):
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    config = transformers.LlamaConfig(vocab_size=WORDS, attention_dropout=dropout, **(shape | settings))
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return expose_hidden_states(model)


def make_pairs(count=5, seed=0, longest=12):
    """Of all lengths, answers of a single token among them."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, size=(count, 3))
    lengths[0] = (longest, 1, longest)
    return [Pair(*(random.integers(1, WORDS, size=size) for size in row)) for row in lengths]


def plain_logs(model, pairs):
    """[pairs, 2] by whole logits, every answer in a row of its own, without padding: nothing that could be wrong."""
    rows = []
    for pair in pairs:
        own = []
        for answer in (pair.chosen, pair.rejected):
            ids = torch.from_numpy(np.concatenate([pair.prompt, answer]))
            logs = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
            before = torch.arange(len(pair.prompt) - 1, len(ids) - 1)
            own.append(logs[before, ids[before + 1]].sum())
        rows.append(torch.stack(own))
    return torch.stack(rows)
