"""Fast tokenizers of a few words, built on the spot: tests of text need no download."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert_tokenizer(texts: Iterable[str]) -> Any:
    """WordPiece, lower case, over the texts' own words and letters; long words are in it as two pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    normalizer = normalizers.BertNormalizer(lowercase=True)
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", normalizer.normalize_str(text))})
    pieces = [piece for word in words for piece in ([word] if len(word) < 7 else [word[:4], "##" + word[4:]])]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*SPECIAL, *pieces]))}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=inputs, **names)


def roberta_like_tokenizer(tokenizer: Any) -> Any:
    """The same words between RoBERTa's four special tokens, all of type 0."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B:0 [SEP]",
        special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


END = "<|im_end|>"


def byte_level_tokenizer(texts: Iterable[str], vocab_size: int = 300) -> Any:
    """Byte-level BPE as GPT-2 has it: a character may be several tokens. ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials, letters = ["<|endoftext|>", "<|im_start|>", END], sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=letters)
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def sentencepiece_tokenizer(texts: Iterable[str], vocab_size: int = 400) -> Any:
    """BPE as Llama 2 has it: spaces as a mark, a space before the first word, single bytes for unknown characters, a
    begin of text, and turns in [INST]."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [("▁" + word) for text in texts for word in text.split()]  # no token across words
    core.train_from_iterator(words, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials))
    state = json.loads(core.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are tokens of the vocabulary, not special ones
    core = Tokenizer.from_str(json.dumps(state))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer
