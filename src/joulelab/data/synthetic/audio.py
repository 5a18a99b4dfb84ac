"""Speech to be learned: every token of a text sounds in its own slot of time, as a spectrum of its own, under noise.

The host says which tokens; the features, a megabyte a clip, are made on the device that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from joulelab.data.synthetic.images import generator_on

# shapes: B clips, T tokens, M mel bands, F frames of 10 ms
NOISE = 0.3
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, without their whole parts, keep apart


def speak(tensors: Mapping[str, Tensor], mels: int, frames: int, seed: int) -> Mapping[str, Tensor]:
    """`targets` and whatever else there is, with `features` [B, M, F] in which the targets can be heard."""
    targets_BT = tensors["targets"]
    generator = generator_on(targets_BT.device, seed)
    shape = (len(targets_BT), mels, frames)
    features_BMF = NOISE * torch.randn(shape, generator=generator, device=targets_BT.device)
    slot_frames = frames // targets_BT.shape[1]
    spoken_BMF = spectrum(targets_BT, mels).repeat_interleave(slot_frames, dim=2)
    features_BMF[:, :, : spoken_BMF.shape[2]] += spoken_BMF
    return {**tensors, "features": features_BMF}


def spectrum(ids_BT: Tensor, mels: int) -> Tensor:
    """[B, M, T]: a wave over the mel bands, whose number of waves is the token's own."""
    waves_BT = (ids_BT.double() * _GOLDEN % 1.0 / 2).float()
    band_M1 = torch.arange(mels, device=ids_BT.device)[:, None]
    return torch.cos(2 * math.pi * waves_BT[:, None] * band_M1)
