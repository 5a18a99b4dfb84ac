"""Synthetic datasets with something to learn: text, images, image-text pairs, video, audio and molecules.

Every sample is a pure function of seed and row (or of its batch's draw), so they cost no disk and repeat exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from joulelab import lookup
from joulelab.data.batches import Rows, TensorBatch
from joulelab.data.molecules import FEATURES, MoleculeGraph
from joulelab.data.splits import SYNTHETIC_SIZES, Split

# Text: token sequences in which few ids of the vocabulary occur, and each has a preferred successor.


Ids = NDArray[np.int64]

IN_USE = 64
"""Distinct ids; learning which ones occur already lowers the loss from ln(vocabulary) to ln(64)."""
FAITHFUL = 0.8
"""Probability that an id is followed by its preferred successor."""
_LANGUAGE_SEED = 597  # the language is the same in every run; only the sequences vary


class SyntheticText:
    """Sequence `row` is a pure function of (seed, row)."""

    def __init__(self, vocabulary: int, tokens: int, seed: int, reserved: int = 10) -> None:
        """Ids below `reserved` are for special tokens."""
        random = np.random.default_rng(_LANGUAGE_SEED)
        count = min(IN_USE, vocabulary - reserved)
        self._ids = reserved + random.choice(vocabulary - reserved, size=count, replace=False)
        self._tokens, self._seed = tokens, seed
        self._powers = _powers(random.permutation(count), tokens)

    def sequences(self, rows: NDArray[np.int64]) -> Ids:
        # One generator per row; everything after the random numbers is vectorized over rows.
        surprise_BT = np.empty((len(rows), self._tokens), dtype=bool)
        fresh_BT = np.empty((len(rows), self._tokens), dtype=np.int64)
        for place, row in enumerate(rows):
            random = np.random.default_rng([self._seed, int(row)])
            surprise_BT[place] = random.random(self._tokens) > FAITHFUL
            fresh_BT[place] = random.integers(len(self._ids), size=self._tokens)
        surprise_BT[:, 0] = True
        # positions since the last surprise, so that a sequence is one gather from the successors' powers
        here_T = np.arange(self._tokens)
        starts_BT = np.maximum.accumulate(np.where(surprise_BT, here_T, 0), axis=1)
        first_BT = np.take_along_axis(fresh_BT, starts_BT, axis=1)
        return self._ids[self._powers[here_T - starts_BT, first_BT]].astype(np.int64)


def _powers(successor: Ids, steps: int) -> Ids:
    """Row k: the successor of each id after k steps."""
    powers = np.empty((steps, len(successor)), dtype=np.int64)
    powers[0] = np.arange(len(successor))
    for step in range(1, steps):
        powers[step] = successor[powers[step - 1]]
    return powers


# Images: every class has a coarse pattern; an image is that pattern with coarse variation and fine noise. The host only
# provides classes and a seed, and the device generates the pixels: at thousands of images per second, generating or
# copying pixels on the host would dominate the measurement.


# Shapes: B images, C colors, H x W pixels
COARSE_SIDE = 4
COARSE_NOISE = 0.3
FINE_NOISE = 0.5
_PATTERN_SEED = 597  # the patterns are the same in every run; only the images vary


class SyntheticImages:
    """Labels follow from the rows, the noise from the seed of the batch."""

    def __init__(self, classes: int, side: int, split: Split) -> None:
        if split.name not in SYNTHETIC_SIZES:
            raise lookup.unknown("split of the synthetic images", split.name, SYNTHETIC_SIZES)
        self.classes, self._side = classes, side
        self.rows = split.rows(SYNTHETIC_SIZES[split.name])
        self._split_number = list(SYNTHETIC_SIZES).index(split.name)
        shape = (classes, 3, COARSE_SIDE, COARSE_SIDE)
        self._patterns = np.random.default_rng(_PATTERN_SEED).standard_normal(shape, dtype=np.float32)

    def batch(self, rows: Rows, draw: int) -> TensorBatch:
        labels = rows % self.classes
        tensors = {"labels": torch.from_numpy(labels), "patterns": torch.from_numpy(self._patterns[labels])}
        paint = partial(_paint, side=self._side, seed=draw + self._split_number)
        return TensorBatch(tensors, samples=len(rows), count=len(rows), expand=paint)


def _paint(tensors: Mapping[str, Tensor], side: int, seed: int) -> Mapping[str, Tensor]:
    pixels_BCHW = paint(tensors["patterns"], side, generator_on(tensors["patterns"].device, seed))
    return {"labels": tensors["labels"], "pixels": pixels_BCHW}


def paint(patterns: Tensor, side: int, generator: torch.Generator) -> Tensor:
    device = patterns.device
    varied = patterns + COARSE_NOISE * torch.randn(patterns.shape, generator=generator, device=device)
    coarse_BCHW = functional.interpolate(varied, size=(side, side), mode="bilinear")
    # generated in channels-last order, which tensor cores read, so that no copy is needed
    fine_BHWC = torch.randn((len(patterns), side, side, 3), generator=generator, device=device)
    return fine_BHWC.permute(0, 3, 1, 2).mul_(FINE_NOISE).add_(coarse_BCHW)


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """A generator for one batch, so that the generators used by training keep their state."""
    return torch.Generator(device).manual_seed(seed)


# Image-text pairs: fields of color, and their names in reading order. The question does not give the answer away: a
# model that ignores the image can only guess one of eight colors.


# Shapes: B images, A answer tokens, K fields, C colors of a pixel, H x W pixels
COLORS = 8  # red, green and blue are each on or off
NOISE = 0.3


class SyntheticImageText:
    """The fields of image `row` are a pure function of (seed, row)."""

    def __init__(self, vocabulary: range, prompt_tokens: int, answer_tokens: int, seed: int) -> None:
        random = np.random.default_rng(_LANGUAGE_SEED)
        words = vocabulary.start + random.choice(len(vocabulary), size=COLORS + prompt_tokens, replace=False)
        self.names, self.prompt = words[:COLORS].astype(np.int64), words[COLORS:].astype(np.int64)
        """The word for each color, and the question, which is always the same."""
        self._answer_tokens, self._seed = answer_tokens, seed
        self.fields_a_side = math.ceil(math.sqrt(answer_tokens))

    def colors(self, rows: Rows) -> Ids:
        """[B, K], row by row of the image."""
        draws = [np.random.default_rng([self._seed, int(row)]) for row in rows]
        return np.stack([random.integers(COLORS, size=self.fields_a_side**2) for random in draws])

    def answers(self, colors_BK: Ids) -> Ids:
        """[B, A]: the names of the first fields."""
        return self.names[colors_BK[:, : self._answer_tokens]]


def paint_fields(tensors: Mapping[str, Tensor], side: int, seed: int) -> Mapping[str, Tensor]:
    """Replace `colors` by `pixels` [B, C, H, W]; the other tensors stay."""
    colors_BK = tensors["colors"]
    bits = torch.arange(3, device=colors_BK.device)
    rgb_BCK = (colors_BK[:, None] >> bits[:, None] & 1) * 2.0 - 1.0
    fields = math.isqrt(colors_BK.shape[1])
    coarse_BCHW = rgb_BCK.view(*rgb_BCK.shape[:2], fields, fields)
    plain_BCHW = functional.interpolate(coarse_BCHW, size=(side, side), mode="nearest")
    generator = generator_on(colors_BK.device, seed)
    noise_BCHW = torch.randn(plain_BCHW.shape, generator=generator, device=colors_BK.device)
    others = {name: value for name, value in tensors.items() if name != "colors"}
    return {**others, "pixels": noise_BCHW.mul_(NOISE).add_(plain_BCHW)}


# Video: clips of a drifting scene, generated on the device. Hidden patches follow from the scene and its motion.


# Shapes: B clips, T frames, C colors, H x W pixels
SCENE_SIDE = 6
SCENE_COLOR = (1.0, -0.5, 0.5)
"""The mean color of all clips; the pattern of a clip varies around it."""
WINDOW = 0.5
"""Fraction of the pattern's side that a frame shows; the rest is room to drift."""


class SyntheticClips:
    """Pattern, path and noise of a clip follow from the seed of its batch."""

    def __init__(self, frames: int, side: int, split: Split) -> None:
        if split.name not in SYNTHETIC_SIZES:
            raise lookup.unknown("split of the synthetic clips", split.name, SYNTHETIC_SIZES)
        self.rows = split.rows(SYNTHETIC_SIZES[split.name])
        self._frames, self._side = frames, side
        self._split_number = list(SYNTHETIC_SIZES).index(split.name)

    def batch(self, rows: Rows, draw: int) -> TensorBatch:
        film = partial(_film, frames=self._frames, side=self._side, seed=draw + self._split_number)
        return TensorBatch({"rows": torch.from_numpy(rows)}, samples=len(rows), count=len(rows), expand=film)


def _film(tensors: Mapping[str, Tensor], frames: int, side: int, seed: int) -> Mapping[str, Tensor]:
    rows = tensors["rows"]
    return {"clips": film(len(rows), frames, side, generator_on(rows.device, seed))}


def film(clips: int, frames: int, side: int, generator: torch.Generator) -> Tensor:
    """[B, T, C, H, W]: a window that moves in a straight line over a larger pattern, with fine noise."""
    device = generator.device
    color = torch.tensor(SCENE_COLOR, device=device).view(3, 1, 1)
    patterns_BCHW = color + torch.randn((clips, 3, SCENE_SIDE, SCENE_SIDE), generator=generator, device=device)
    ends_2B2 = (torch.rand((2, clips, 2), generator=generator, device=device) * 2 - 1) * (1 - WINDOW)
    times_T = torch.linspace(0, 1, frames, device=device)
    middles_BT2 = torch.lerp(ends_2B2[0, :, None], ends_2B2[1, :, None], times_T[None, :, None])
    windows = torch.zeros((clips, frames, 2, 3), device=device)
    windows[..., 0, 0] = windows[..., 1, 1] = WINDOW
    windows[..., 2] = middles_BT2
    grid = functional.affine_grid(windows.flatten(0, 1), [clips * frames, 3, side, side], align_corners=False)
    shown = functional.grid_sample(
        patterns_BCHW.repeat_interleave(frames, dim=0), grid, padding_mode="border", align_corners=False
    )
    noise = torch.randn(shown.shape, generator=generator, device=device)
    noisy: Tensor = shown + FINE_NOISE * noise
    return noisy.view(clips, frames, 3, side, side)


# Audio: every token of a text has a time slot and a spectrum, with noise. The host provides the tokens; the device
# generates the features, a megabyte per clip.


# Shapes: B clips, T tokens, M mel bands, F frames of 10 ms
_GOLDEN = (math.sqrt(5) - 1) / 2  # fractional parts of its multiples are evenly spread


def speak(tensors: Mapping[str, Tensor], mels: int, frames: int, seed: int) -> Mapping[str, Tensor]:
    """Add `features` [B, M, F], from which the targets can be recognized."""
    targets_BT = tensors["targets"]
    generator = generator_on(targets_BT.device, seed)
    shape = (len(targets_BT), mels, frames)
    features_BMF = NOISE * torch.randn(shape, generator=generator, device=targets_BT.device)
    slot_frames = frames // targets_BT.shape[1]
    spoken_BMF = spectrum(targets_BT, mels).repeat_interleave(slot_frames, dim=2)
    features_BMF[:, :, : spoken_BMF.shape[2]] += spoken_BMF
    return {**tensors, "features": features_BMF}


def spectrum(ids_BT: Tensor, mels: int) -> Tensor:
    """[B, M, T]: a cosine over the mel bands whose frequency identifies the token."""
    # Multiples of the golden ratio modulo 1 are evenly spread, so that the spectra of any two ids
    # differ. In double precision: ids times the ratio lose their fraction in float32.
    waves_BT = (ids_BT.double() * _GOLDEN % 1.0 / 2).float()
    band_M1 = torch.arange(mels, device=ids_BT.device)[:, None]
    return torch.cos(2 * math.pi * waves_BT[:, None] * band_M1)


# Molecules of the size of PCQM4Mv2's, with a target that is a sum over atoms and over bonds of unlike atoms. A molecule
# is a chain along a strip two atoms wide, so that bonded atoms are 1.5 Å apart and no two atoms overlap; some neighbors
# on the strip are also bonded and close rings. A batch is generated at once, because a GPU trains on tens of thousands
# of molecules per second.
#
# Legend: B molecules, S sites of the strip, P pairs of neighboring sites, N atoms, E bonds in both directions.


WIDE, LONG = 2, 14
SITES = WIDE * LONG
FEWEST_ATOMS, MOST_ATOMS = 8, 20  # mean 14, like the heavy atoms of PCQM4Mv2
SPACING_ANGSTROM = 1.5
JITTER_ANGSTROM = 0.15
RING_CHANCE = 0.25  # probability that another pair of neighbors is bonded; mean 14.5 bonds

NUMBERS = np.array([6, 7, 8, 9, 16, 17])
SHARES = np.array([0.72, 0.11, 0.11, 0.02, 0.02, 0.02])
ATOM_EV = np.array([-0.25, 0.35, -0.6, 0.8, -1.0, 0.5])
UNLIKE_BOND_EV = -0.2
BASE_EV = 9.0

_SLOTS = 256  # random numbers per molecule


class SyntheticMolecules:
    """Molecule `row` is a pure function of (seed, row)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sites_S3 = _winding_path()
        self._pairs_P2 = _neighbors(self._sites_S3)

    def molecules(self, rows: Rows) -> MoleculeGraph:
        size_B2, kind_uniform_BS, ring_BP, jitter_BS3 = self._draws(rows)
        atoms_B = FEWEST_ATOMS + (size_B2[:, 0] * (MOST_ATOMS - FEWEST_ATOMS + 1)).astype(np.int64)
        start_B = (size_B2[:, 1] * (SITES - atoms_B + 1)).astype(np.int64)
        site_S = np.arange(SITES)
        taken_BS = (site_S >= start_B[:, None]) & (site_S < (start_B + atoms_B)[:, None])
        kind_BS = np.searchsorted(np.cumsum(SHARES)[:-1], kind_uniform_BS, side="right").astype(np.int64)
        ends_P2 = self._pairs_P2
        bonded_BP = taken_BS[:, ends_P2[:, 0]] & taken_BS[:, ends_P2[:, 1]]
        bonded_BP &= (np.diff(ends_P2)[:, 0] == 1) | (ring_BP < RING_CHANCE)
        bonds_2E = self._bonds(bonded_BP, taken_BS)
        positions_BS3 = SPACING_ANGSTROM * self._sites_S3 + JITTER_ANGSTROM * (2 * jitter_BS3 - 1)
        return MoleculeGraph(
            features=_features(NUMBERS[kind_BS[taken_BS]], bonds_2E),
            positions=positions_BS3[taken_BS].astype(np.float32),
            bonds=bonds_2E,
            atoms=atoms_B,
            targets=_targets(kind_BS, taken_BS, bonded_BP, ends_P2),
        )

    def _draws(self, rows: Rows) -> list[NDArray[np.float64]]:
        uniform = _uniform(self._seed, rows)
        parts = np.split(uniform, np.cumsum([2, SITES, len(self._pairs_P2), 3 * SITES]), axis=1)[:4]
        return [*parts[:3], parts[3].reshape(-1, SITES, 3)]

    def _bonds(self, bonded_BP: NDArray[np.bool_], taken_BS: NDArray[np.bool_]) -> NDArray[np.int64]:
        atom_BS = (np.cumsum(taken_BS) - 1).reshape(taken_BS.shape)
        molecule_E, pair_E = np.nonzero(bonded_BP)
        one_E, other_E = (atom_BS[molecule_E, self._pairs_P2[pair_E, end]] for end in (0, 1))
        return np.stack([np.concatenate([one_E, other_E]), np.concatenate([other_E, one_E])])


def _uniform(seed: int, rows: Rows) -> NDArray[np.float64]:
    """Numbers in [0, 1) that depend only on (seed, row, slot): splitmix64, vectorized."""
    slot = np.arange(_SLOTS, dtype=np.uint64)
    mixed = (rows.astype(np.uint64)[:, None] * np.uint64(_SLOTS) + slot) + np.uint64(seed << 40)
    # Constants of splitmix64 (Steele, Lea and Flood, 2014): the golden-ratio increment, then two
    # multiply-xorshift rounds. Unsigned overflow is intended.
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # The upper 53 bits fill the mantissa of a double exactly, so all values in [0, 1) are equally
    # likely.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _winding_path() -> NDArray[np.int64]:
    """Every site of the strip once; consecutive sites are neighbors."""
    across = [range(WIDE), range(WIDE)[::-1]]
    return np.array([(x, y, 0) for x in range(LONG) for y in across[x % 2]])


def _neighbors(sites_S3: NDArray[np.int64]) -> NDArray[np.int64]:
    steps_SS = np.abs(sites_S3[:, None] - sites_S3).sum(-1)
    return np.argwhere(np.triu(steps_SS == 1))


def _features(numbers_N: NDArray[np.int64], bonds_2E: NDArray[np.int64]) -> NDArray[np.float32]:
    """Atomic number and degree; the other features stay 0."""
    features_NF = np.zeros((len(numbers_N), len(FEATURES)), dtype=np.float32)
    features_NF[:, 0] = numbers_N
    features_NF[:, 2] = np.bincount(bonds_2E[0], minlength=len(numbers_N))
    return features_NF


def _targets(
    kind_BS: NDArray[np.int64],
    taken_BS: NDArray[np.bool_],
    bonded_BP: NDArray[np.bool_],
    ends_P2: NDArray[np.int64],
) -> NDArray[np.float32]:
    atoms_ev_B = (ATOM_EV[kind_BS] * taken_BS).sum(1)
    unlike_BP = kind_BS[:, ends_P2[:, 0]] != kind_BS[:, ends_P2[:, 1]]
    return np.asarray(BASE_EV + atoms_ev_B + UNLIKE_BOND_EV * (bonded_BP & unlike_BP).sum(1), dtype=np.float32)
