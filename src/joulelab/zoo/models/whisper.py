"""Whisper: speech to text, in all its published sizes but the largest."""

from typing import Any

from joulelab.zoo.registry import Size, ZooEntry

_SHAPE = {"frames": 3000, "tokens": 128}


def _settings(layers: int, width: int, heads: int) -> dict[str, Any]:
    both = ("encoder", "decoder")
    return {
        "d_model": width,
        **{f"{side}_layers": layers for side in both},
        **{f"{side}_attention_heads": heads for side in both},
        **{f"{side}_ffn_dim": 4 * width for side in both},
    }


# Counted are the parameters that are trained. The encoder's positions are fixed waves, 1,500 times the width, and count
# among the published 37.8 M, 72.6 M, 241.7 M and 763.9 M.
MODEL = ZooEntry(
    name="whisper",
    family="speech",
    task="speech to text",
    item="clip",
    about="encoder over 30 s of log-mel features and a decoder that writes what was said",
    architecture="WhisperForConditionalGeneration",
    sizes={
        "whisper-tiny": Size(37_184_640, _settings(4, 384, 6), _SHAPE, batch_size=64, hub_id="openai/whisper-tiny"),
        "base": Size(71_825_920, _settings(6, 512, 8), _SHAPE, batch_size=64, hub_id="openai/whisper-base"),
        "small": Size(240_582_912, _settings(12, 768, 12), _SHAPE, batch_size=32, hub_id="openai/whisper-small"),
        "medium": Size(762_321_920, _settings(24, 1024, 16), _SHAPE, batch_size=16, hub_id="openai/whisper-medium"),
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
    options={"positions": 448},
)
