"""Speech datasets: a table (CSV, JSON lines, Parquet) with columns `audio` and `text`, and WAV files next to it."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab.data.text import pick, read_table
from joulelab.errors import ConfigError, NotFoundError

SAMPLING_HZ = 16_000
_CONVERT = "ffmpeg -i IN -ar 16000 -ac 1 -c:a pcm_s16le OUT.wav"


@dataclass(frozen=True)
class Clips:
    files: tuple[Path, ...]
    texts: tuple[str, ...]


def read_manifest(path: Path) -> Clips:
    """File names are relative to the table."""
    columns = read_table(str(path), subset="all")
    files = columns.values[pick(columns, ("audio", "path", "file"), "audio", str(path))]
    texts = columns.values[pick(columns, ("text", "sentence", "transcript"), "text", str(path))]
    return Clips(tuple(path.parent / str(file) for file in files), tuple(str(text) for text in texts))


def read_wav(path: Path) -> NDArray[np.float32]:
    """Samples in [-1, 1)."""
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", "names in the manifest are relative to it")
    try:
        with wave.open(str(path)) as file:
            found = (file.getframerate(), file.getnchannels(), 8 * file.getsampwidth())
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ConfigError(f"{path} cannot be read as WAV: {error}", f"convert it: {_CONVERT}") from error
    if found != (SAMPLING_HZ, 1, 16):
        rate_hz, channels, bits = found
        raise ConfigError(
            f"{path} has {rate_hz} Hz, {channels} channels, {bits} bits; expected 16000 Hz, 1 channel, 16 bits",
            f"convert it: {_CONVERT}",
        )
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(2**15)
