"""T5: every task as text in, text out; trained here as it was first, on spans left out of a text."""

from joulelab.zoo.registry import Size, ZooEntry

# Both sides of 1,024 tokens, as milabench runs it; its own first training had 512 in and 114 out.
_SHAPE = {"tokens": 1024, "target_tokens": 1024}
_PUBLISHED = {"decoder_start_token_id": 0}

MODEL = ZooEntry(
    name="t5",
    family="language",
    task="sequence to sequence",
    item="sequence",
    about="encoder and decoder with relative positions; spans of a text become sentinels and are written back",
    architecture="T5ForConditionalGeneration",
    sizes={
        "small": Size(60_506_624, _PUBLISHED, _SHAPE, batch_size=16, hub_id="google-t5/t5-small"),
        "base": Size(
            222_903_552,
            {**_PUBLISHED, "num_layers": 12, "d_model": 768, "d_ff": 3072, "num_heads": 12},
            _SHAPE,
            batch_size=16,
            hub_id="google-t5/t5-base",
        ),
        "large": Size(
            737_668_096,
            {**_PUBLISHED, "num_layers": 24, "d_model": 1024, "d_ff": 4096, "num_heads": 16},
            {"tokens": 512, "target_tokens": 512},
            batch_size=8,
            hub_id="google-t5/t5-large",
        ),
        "tiny": Size(
            263_040,
            {**_PUBLISHED, "num_layers": 2, "d_model": 64, "d_kv": 32, "d_ff": 256, "num_heads": 2, "vocab_size": 512},
            {"tokens": 32, "target_tokens": 16},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare_span_corruption",
    dataset="text by path or hub id (allenai/c4)",
)
