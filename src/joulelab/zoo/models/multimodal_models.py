"""Speech and image-text models of the zoo, as data."""

from __future__ import annotations

from typing import Any

from joulelab.zoo.registry import Size, ZooEntry

_WHISPER_SHAPE = {"frames": 3000, "tokens": 128}


def _settings(layers: int, width: int, heads: int) -> dict[str, Any]:
    both = ("encoder", "decoder")
    return {
        "d_model": width,
        **{f"{side}_layers": layers for side in both},
        **{f"{side}_attention_heads": heads for side in both},
        **{f"{side}_ffn_dim": 4 * width for side in both},
    }


# Trainable parameters. The published 37.8 M, 72.6 M, 241.7 M and 763.9 M include the encoder's sinusoidal positions
# (1,500 times the width), which are fixed.
WHISPER = ZooEntry(
    name="whisper",
    family="speech",
    task="speech to text",
    item="clip",
    about="encoder over 30 s of log-mel features and a decoder that transcribes them",
    architecture="WhisperForConditionalGeneration",
    sizes={
        "whisper-tiny": Size(
            37_184_640, _settings(4, 384, 6), _WHISPER_SHAPE, batch_size=64, hub_id="openai/whisper-tiny"
        ),
        "base": Size(71_825_920, _settings(6, 512, 8), _WHISPER_SHAPE, batch_size=64, hub_id="openai/whisper-base"),
        "small": Size(
            240_582_912, _settings(12, 768, 12), _WHISPER_SHAPE, batch_size=32, hub_id="openai/whisper-small"
        ),
        "medium": Size(
            762_321_920, _settings(24, 1024, 16), _WHISPER_SHAPE, batch_size=16, hub_id="openai/whisper-medium"
        ),
        "tiny": Size(
            181_440,
            {
                **_settings(1, 64, 2),
                "vocab_size": 512,
                "max_target_positions": 64,
                "decoder_start_token_id": 1,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 2,
            },
            {"frames": 64, "tokens": 8},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.speech_to_text:prepare",
    dataset="a table (CSV, JSON lines) of `audio` and `text` by path, the audio in 16 kHz mono WAV files",
    dataset_kind="file",
    options={"positions": 448},
)


# LLaVA (Liu et al., 2023): a language model with CLIP's image features in its prompt.


_CLIP_LARGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "projection_dim": 768,
}
_VICUNA_7B = {
    "model_type": "llama",
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_TINYLLAMA = {
    **_VICUNA_7B,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
_7B: dict[str, Any] = {"vision_config": _CLIP_LARGE, "text_config": _VICUNA_7B, "image_token_index": 32000}
_LLAVA_SHAPE = {"side": 336, "prompt": 32, "answer": 32}

# Trainable parameters. LLaVA reads the features before CLIP's last layer, which is therefore not counted; with it,
# LLaVA-1.5-7B has the published 7,063,427,072.
#
# On one GPU of 139 GiB: `7b` with AdamW peaks at 105 GiB for a batch of 1 under bf16 autocast (measured): weights,
# gradients and moments in fp32; the bf16 copies are freed before all gradients exist. Adafactor frees 52 GiB of
# it, SGD 26. `7b-bf16` keeps weights, gradients and moments in bf16, without autocast (precision=fp32), as milabench
# does: 52 GiB on paper and half the optimizer's memory traffic, but updates below 1/256 of a weight are rounded away.
LLAVA = ZooEntry(
    name="llava",
    family="image-text",
    task="image question answering",
    item="image",
    about="CLIP's features of an image as 576 tokens in the prompt of a language model; only the answer is trained",
    architecture="LlavaForConditionalGeneration",
    sizes={
        "7b": Size(7_050_828_800, _7B, _LLAVA_SHAPE, batch_size=1, hub_id="llava-hf/llava-1.5-7b-hf"),
        "7b-bf16": Size(
            7_050_828_800, {**_7B, "dtype": "bfloat16"}, _LLAVA_SHAPE, batch_size=1, hub_id="llava-hf/llava-1.5-7b-hf"
        ),
        "1.4b": Size(
            1_397_515_264,
            {**_7B, "text_config": _TINYLLAMA},
            _LLAVA_SHAPE,
            batch_size=8,
            hub_id="bczhou/tiny-llava-v1-hf",
        ),
        "tiny": Size(
            157_472,
            {
                "vision_config": {
                    **_CLIP_LARGE,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                },
                "text_config": {
                    **_VICUNA_7B,
                    "vocab_size": 320,
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                },
                "image_token_index": 319,
            },
            {"side": 56, "prompt": 8, "answer": 8},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.image_text:prepare",
    dataset="a table (CSV, JSON lines) of `image`, `question` and `answer` by path, image paths relative to the table",
    dataset_kind="file",
)
