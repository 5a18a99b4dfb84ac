"""GPT-2: the decoder that the course starts with."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="gpt2",
    family="language",
    task="causal LM",
    item="sequence",
    about="decoder-only transformer with learned positions",
    architecture="GPT2LMHeadModel",
    sizes={
        "base": Size(124_439_808, {}, {"tokens": 1024}, batch_size=8, hub_id="openai-community/gpt2"),
        "medium": Size(
            354_823_168,
            {"n_layer": 24, "n_embd": 1024, "n_head": 16},
            {"tokens": 1024},
            batch_size=8,
            hub_id="openai-community/gpt2-medium",
        ),
        "large": Size(
            774_030_080,
            {"n_layer": 36, "n_embd": 1280, "n_head": 20},
            {"tokens": 1024},
            batch_size=4,
            hub_id="openai-community/gpt2-large",
        ),
        "xl": Size(
            1_557_611_200,
            {"n_layer": 48, "n_embd": 1600, "n_head": 25},
            {"tokens": 1024},
            batch_size=4,
            hub_id="openai-community/gpt2-xl",
        ),
        "tiny": Size(
            136_960,
            {
                "n_layer": 2,
                "n_embd": 64,
                "n_head": 2,
                "vocab_size": 512,
                "n_positions": 64,
                "bos_token_id": None,
                "eos_token_id": None,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare",
    dataset="text by path or hub id (allenai/c4)",
    options={"positions": 1024},
)
