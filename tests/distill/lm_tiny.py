"""Tiny teachers of every family with a tokenizer of their own, made from nothing: no hub, no samples."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{k}" for k in range(60)]
BERT_SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
ROBERTA_SPECIALS = {
    "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>",
    "bos_token": "<s>", "eos_token": "</s>",
}  # fmt: skip
GPT2_SPECIALS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


def write_teacher(folder, family, layers=4, seed=0):
    """Model and tokenizer in Hugging Face format."""
    specials = {"bert": BERT_SPECIALS, "roberta": ROBERTA_SPECIALS, "gpt2": GPT2_SPECIALS}[family]
    vocabulary = {word: k for k, word in enumerate([*dict.fromkeys(specials.values()), *WORDS])}
    if family == "bert":
        backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    else:
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token=specials["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **specials).save_pretrained(folder)
    torch.manual_seed(seed)
    make_model(family, len(vocabulary), layers).save_pretrained(folder)
    return folder


def make_model(family, vocab_size, layers=4, width=32):
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocab_size,
            n_embd=width,
            n_layer=layers,
            n_head=2,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)
    kind = {"bert": transformers.BertForMaskedLM, "roberta": transformers.RobertaForMaskedLM}[family]
    settings = {"type_vocab_size": 1, "pad_token_id": 0} if family == "roberta" else {}
    config = kind.config_class(
        vocab_size=vocab_size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=66, **settings,
    )  # fmt: skip
    return kind(config)


def write_text(file, lines=220, seed=0):
    """Each line counts upwards from a random word: what comes next is easy to learn and frequencies do not tell it."""
    random = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(lines):
        start, length = (int(torch.randint(high, (), generator=random)) for high in (60, 20))
        texts.append(" ".join(WORDS[(start + k) % 60] for k in range(14 + length)))
    file.write_text("\n".join(texts) + "\n")
    return file
