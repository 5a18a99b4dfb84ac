"""Tokenizers with the special tokens of each family, and chat templates in our own words that write what theirs do."""

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

SENTENCES = ["Hello there! How are you? Fine, thanks.", "user assistant system model one two three", "\n\n\n"]

LLAMA = (
    "{{ bos_token }}{% for turn in messages %}<|start_header_id|>{{ turn.role }}<|end_header_id|>\n\n"
    "{{ turn.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Q.<|im_end|>\n{% endif %}"
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for turn in messages %}"
    "{% if turn.role == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}"
    "<start_of_turn>{{ 'model' if turn.role == 'assistant' else turn.role }}\n"
    "{{ turn.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
OLMO = (
    "{{ bos_token }}{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}"
    "{% if turn.role == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last or add_generation_prompt %}"
    "{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SMOLLM = QWEN.replace("You are Q.", "You are a small model.")
THOUGHTLESS = (  # drops the thoughts of earlier answers, and so rewrites what was said
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{{ turn.content if loop.last else turn.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(template, *specials, **names):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(specials), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _fast(tokenizer, template, names)


def leading_space(template, *specials, **names):
    """Puts a space before every text, as SentencePiece does: pieces made apart are not pieces of the whole."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", *specials])
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _fast(tokenizer, template, names)


def _fast(tokenizer, template, names):
    named = {f"{name}_token": token for name, token in names.items()}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    made.chat_template = template
    return made


def llama():
    return byte_level(
        LLAMA, "<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", bos="<|begin|>", eos="<|eot_id|>"
    )


def qwen():
    return byte_level(QWEN, "<|endoftext|>", "<|im_start|>", "<|im_end|>", eos="<|im_end|>", pad="<|endoftext|>")


def gemma():
    return byte_level(
        GEMMA, "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", bos="<bos>", eos="<eos>", pad="<pad>"
    )


def olmo():
    return byte_level(OLMO, "<|endoftext|>", bos="<|endoftext|>", eos="<|endoftext|>", pad="<|endoftext|>")


def smollm():
    return byte_level(SMOLLM, "<|im_start|>", "<|im_end|>", eos="<|im_end|>", pad="<|im_end|>")


def without_template():
    return byte_level(None, "<|endoftext|>", eos="<|endoftext|>")
