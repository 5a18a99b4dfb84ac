"""A tiny Llama trained to count, its tokenizer with a ChatML template, and data for it: no hub, no samples."""

import json

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

WORDS = [f"w{k}" for k in range(24)]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "user", "assistant", "system", "\n"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    vocabulary = {word: number for number, word in enumerate([*SPECIALS, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words = Regex(r"\n|[^\s<]+|<\|[a-z_]+\|>")
    core.pre_tokenizer = pre_tokenizers.Split(words, "removed", invert=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def counting(start, length):
    return " ".join(WORDS[(start + k) % len(WORDS)] for k in range(length))


def conversation(row):
    """The answer counts on from where the question stopped."""
    start, requested, output_text = (7 * row) % len(WORDS), 2 + row % 3, 5 + row % 4
    noise = " ".join(WORDS[(row // 24 + row * k) % len(WORDS)] for k in (1, 2))
    return [
        {"role": "user", "content": f"{noise} {counting(start, requested)}"},
        {"role": "assistant", "content": counting(start + requested, output_text)},
    ]


def write_chats(file, rows=140):
    file.write_text("".join(json.dumps({"messages": conversation(row)}) + "\n" for row in range(rows)))
    return file


def make_model(tokenizer, width=32, layers=2, seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=2 * width, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def write_teacher(folder, steps=80):
    """Trained for a second or two, so that it knows more than frequencies."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, width=48)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    texts = [
        tokenizer(tokenizer.apply_chat_template(conversation(row), tokenize=False)).input_ids for row in range(300)
    ]
    for step in range(steps):
        some = [texts[(step * 16 + k) % len(texts)] for k in range(16)]
        width = max(map(len, some))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in some])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in some])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
