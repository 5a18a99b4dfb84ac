"""ALBERT: BERT with one layer's weights used by all."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="albert",
    family="language",
    task="masked LM",
    item="sequence",
    about="all layers share one set of weights: few parameters, but the work of BERT",
    architecture="AlbertForMaskedLM",
    sizes={
        "base": Size(
            11_221_680,
            {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
            {"tokens": 512},
            batch_size=32,
            hub_id="albert/albert-base-v2",
        ),
        "large": Size(
            16_795_824,
            {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
            {"tokens": 512},
            batch_size=32,
            hub_id="albert/albert-large-v2",
        ),
        "xlarge": Size(
            54_821_040,
            {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16},
            {"tokens": 512},
            batch_size=16,
            hub_id="albert/albert-xlarge-v2",
        ),
        "xxlarge": Size(206_368_944, {}, {"tokens": 512}, batch_size=8, hub_id="albert/albert-xxlarge-v2"),
        "tiny": Size(
            73_312,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "embedding_size": 32,
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
    options={"positions": 512, "head": ("predictions",)},
)
