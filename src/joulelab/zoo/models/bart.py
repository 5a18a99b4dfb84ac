"""BART: an encoder like BERT's and a decoder like GPT's, trained together to repair a text."""

from joulelab.zoo.registry import Size, ZooEntry

# transformers' defaults have the large model's shape but not its dropout
_PUBLISHED = {"attention_dropout": 0.1, "activation_dropout": 0.1}

MODEL = ZooEntry(
    name="bart",
    family="language",
    task="sequence to sequence",
    item="sequence",
    about="30 % of a text is left out, each span behind one mask; the decoder writes the whole text of `tokens`",
    architecture="BartForConditionalGeneration",
    sizes={
        "base": Size(
            139_420_416,
            {
                **_PUBLISHED,
                "encoder_layers": 6,
                "decoder_layers": 6,
                "d_model": 768,
                "encoder_ffn_dim": 3072,
                "decoder_ffn_dim": 3072,
                "encoder_attention_heads": 12,
                "decoder_attention_heads": 12,
            },
            {"tokens": 512},
            batch_size=16,
            hub_id="facebook/bart-base",
        ),
        "large": Size(406_291_456, _PUBLISHED, {"tokens": 512}, batch_size=16, hub_id="facebook/bart-large"),
        "tiny": Size(
            274_944,
            {
                "encoder_layers": 2,
                "decoder_layers": 2,
                "d_model": 64,
                "encoder_ffn_dim": 256,
                "decoder_ffn_dim": 256,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare_infilling",
    dataset="text by path or hub id (allenai/c4)",
    options={"positions": 1024},
)
