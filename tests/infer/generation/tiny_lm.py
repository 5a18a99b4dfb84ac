"""A tiny Llama and a word tokenizer with a ChatML template, made on the spot."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{k}" for k in range(40)]
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|unk|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def make_tokenizer():
    names = [*SPECIALS, "user", "assistant", "system", *WORDS]
    core = Tokenizer(models.WordLevel({name: k for k, name in enumerate(names)}, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(SPECIALS)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|endoftext|>", unk_token="<|unk|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(seed=0, vocab_size=48, dropout=0.0, scale=4.0, **settings):
    """`scale` makes its distributions sharp enough to have opinions."""
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, attention_dropout=dropout, eos_token_id=3, bos_token_id=None, pad_token_id=0,
        tie_word_embeddings=False, **(shape | settings),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model
