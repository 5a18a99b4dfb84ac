"""OPT: GPT-3's architecture with published weights."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="opt",
    family="language",
    task="causal LM",
    item="sequence",
    about="decoder-only transformer; only the 350m size normalizes after its layers and embeds in 512 dimensions",
    architecture="OPTForCausalLM",
    sizes={
        "350m": Size(
            331_196_416,
            {
                "num_hidden_layers": 24,
                "hidden_size": 1024,
                "ffn_dim": 4096,
                "num_attention_heads": 16,
                "word_embed_proj_dim": 512,
                "do_layer_norm_before": False,
            },
            {"tokens": 2048},
            batch_size=4,
            hub_id="facebook/opt-350m",
        ),
        "125m": Size(125_239_296, {}, {"tokens": 2048}, batch_size=4, hub_id="facebook/opt-125m"),
        "1.3b": Size(
            1_315_758_080,
            {
                "num_hidden_layers": 24,
                "hidden_size": 2048,
                "ffn_dim": 8192,
                "num_attention_heads": 32,
                "word_embed_proj_dim": 2048,
            },
            {"tokens": 2048},
            batch_size=2,
            hub_id="facebook/opt-1.3b",
        ),
        "tiny": Size(
            137_088,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "ffn_dim": 256,
                "num_attention_heads": 2,
                "word_embed_proj_dim": 64,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare",
    dataset="text by path or hub id (allenai/c4)",
    options={"positions": 2048},
)
