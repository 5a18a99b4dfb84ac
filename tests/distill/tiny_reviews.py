"""A world small enough for tests: a BERT of a few thousand numbers, its tokenizer, and reviews it can learn."""

import random

from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import check

GOOD = ["good", "fine", "great", "lovely", "warm", "bright"]
BAD = ["bad", "poor", "weak", "dull", "cold", "grim"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tiny_model(layers=2, width=16, seed=0):
    """A BERT without dropout, so that two ways of training it can be compared number by number."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(GOOD) + len(BAD), hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=2, intermediate_size=2 * width, max_position_embeddings=32, initializer_range=0.3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def write_encoder(folder, layers=2, width=16):
    from transformers import BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *GOOD, *BAD]), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    tiny_model(layers, width).save_pretrained(folder)
    return folder


def write_reviews(file, rows=400):
    """Every word tells the polarity: easy for anything that is trained, impossible for a random head."""
    chance = random.Random(0)
    lines = ["text,label"]
    for number in range(rows):
        words = GOOD if number % 2 else BAD
        lines.append(" ".join(chance.choice(words) for _ in range(chance.randint(4, 10))) + f",{number % 2}")
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def settings(encoder, reviews, **over):
    training = {"epochs": 3, "batch_size": 16, "learning_rate": 3e-3, "prefetch": 0, "clip_norm": None}
    base = {
        "name": "tiny", "label": "tiny", "pipeline": "classify", "device": "cpu", "eval_batch_size": 64,
        "data": {"source": str(reviews), "subset": "all", "train_size": 128, "validation_size": 20, "test_size": 40,
                 "max_tokens": 16},
        "teacher": {"model": str(encoder), "training": training},
        "student": {"init": str(encoder), "layers": [0]},
        "training": training,
        "distill": {"kd_alpha": 0.5, "feat_beta": 1.0, "t_layer": -1, "s_layer": -1},
        "energy": {"gpus": "none", "sample_interval_s": 1.0},
        "telemetry_every": 4,
    }  # fmt: skip
    return {**base, **over}


def run(store, chosen):
    """The run's folder and its record."""
    paths = create_run(store, check(chosen))
    return paths.folder, execute(paths, SilentProgress())
