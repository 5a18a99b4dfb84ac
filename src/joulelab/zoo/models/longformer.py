"""Longformer: every token attends to a window around it, so that cost grows with length alone."""

from joulelab.zoo.registry import Size, ZooEntry

_PUBLISHED = {
    "vocab_size": 50_265,
    "max_position_embeddings": 4098,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}

MODEL = ZooEntry(
    name="longformer",
    family="language",
    task="masked LM",
    item="sequence",
    about="encoder with sliding-window attention; no token attends globally here, so those projections rest",
    architecture="LongformerForMaskedLM",
    sizes={
        "base-4096": Size(
            148_711_257, _PUBLISHED, {"tokens": 4096}, batch_size=4, hub_id="allenai/longformer-base-4096"
        ),
        "large-4096": Size(
            434_653_273,
            {
                **_PUBLISHED,
                "num_hidden_layers": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
            },
            {"tokens": 4096},
            batch_size=2,
            hub_id="allenai/longformer-large-4096",
        ),
        "tiny": Size(
            166_912,
            {
                **_PUBLISHED,
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "attention_window": 8,
                "vocab_size": 512,
                "max_position_embeddings": 66,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare_sliding_window",
    dataset="text by path or hub id (allenai/c4)",
    # positions are counted from the padding's id + 1, as in RoBERTa
    options={"head": ("lm_head",), "idle": ("_global.",), "unused_positions": 2},
)
