"""Fast tokenizers of a few words, built on the spot: tests of text need no download."""

from __future__ import annotations

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
