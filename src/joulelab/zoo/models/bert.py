"""BERT: the encoder that distillation is measured against."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="bert",
    family="language",
    task="masked LM",
    item="sequence",
    about="bidirectional encoder; 15 % of the tokens are masked afresh in every batch",
    architecture="BertForMaskedLM",
    sizes={
        "base": Size(109_514_298, {}, {"tokens": 512}, batch_size=32, hub_id="google-bert/bert-base-uncased"),
        "large": Size(
            335_174_458,
            {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
            {"tokens": 512},
            batch_size=32,
            hub_id="google-bert/bert-large-uncased",
        ),
        "tiny": Size(
            141_888,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare",
    dataset="text by path or hub id (allenai/c4)",
    options={"positions": 512, "head": ("cls",)},
)
