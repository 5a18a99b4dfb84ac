"""DistilBERT: the student that made distillation known."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="distilbert",
    family="language",
    task="masked LM",
    item="sequence",
    about="BERT with half its layers; trained here on its own, without a teacher",
    architecture="DistilBertForMaskedLM",
    sizes={
        "base": Size(66_985_530, {}, {"tokens": 512}, batch_size=32, hub_id="distilbert/distilbert-base-uncased"),
        "tiny": Size(
            141_760,
            {
                "n_layers": 2,
                "dim": 64,
                "hidden_dim": 256,
                "n_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare",
    dataset="text by path or hub id (allenai/c4)",
    options={"positions": 512, "head": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector")},
)
