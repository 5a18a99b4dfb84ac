"""Tokenizers of each family, trained on a few sentences, so that tests need no download."""

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "The old mill by the river grinds no corn; it grinds time, they say.",
    "Isn't it odd? 1,234 geese (or more) flew over in May.",
    "Ada's lamp was 3.5 m high -- and green!",
]


def bert():
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=150, special_tokens=specials))
    return _fast(tokenizer, pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")


def roberta():
    specials = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    return _fast(_byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]), **specials, mask="<mask>")


def gpt2():
    return _fast(_byte_level(["<|endoftext|>"]), bos="<|endoftext|>", eos="<|endoftext|>")


def _byte_level(specials):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _fast(tokenizer, **specials):
    named = {f"{name}_token": token for name, token in specials.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
