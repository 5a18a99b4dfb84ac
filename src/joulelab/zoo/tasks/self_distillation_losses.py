"""The three terms of DINOv2, and how a teacher's scores become targets. Sums over images, in fp32.

Two things look at a batch as a whole, so that they depend on how it is split into micro-batches: the targets, which
are balanced over the batch, and KoLeo, which looks for each image's nearest neighbour in it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# shapes: S samples (crops or patches), P prototypes, G global crops and L local crops of B images, D features
SINKHORN_ROUNDS = 3
_TINY = 1e-8


@torch.no_grad()
def balanced_targets(scores_SP: Tensor, temperature: float) -> Tensor:
    """Probabilities [S, P] that use every prototype about equally (Sinkhorn-Knopp): without that, one for all samples
    would be the easiest agreement. Every row sums to 1."""
    with torch.autocast(scores_SP.device.type, enabled=False):
        weights_SP = torch.exp(scores_SP.float() / temperature)
        samples_S = torch.ones_like(weights_SP[:, 0])
        for _ in range(SINKHORN_ROUNDS):
            prototypes_P = 1 / (samples_S @ weights_SP)
            samples_S = 1 / (weights_SP @ prototypes_P)
        return weights_SP * samples_S[:, None] * prototypes_P


def crop_agreement(global_GBP: Tensor, local_LBP: Tensor, targets_GBP: Tensor, temperature: float) -> Tensor:
    """DINO: every crop of an image is to score as the teacher scores each *other* global crop of it.

    The mean over those pairs. Cross entropy is linear in its target, so the pairs of one local crop are one cross
    entropy with the mean target.
    """
    globals_, locals_ = len(global_GBP), len(local_LBP)
    others_GBP = (targets_GBP.sum(0) - targets_GBP) / (globals_ - 1)
    for_locals_LBP = targets_GBP.mean(0).expand(locals_, -1, -1)
    pairs_of_a_global, pairs_of_a_local = globals_ - 1, globals_
    total = pairs_of_a_global * _cross_entropy(global_GBP, others_GBP, temperature)
    total = total + pairs_of_a_local * _cross_entropy(local_LBP, for_locals_LBP, temperature)
    return total / (globals_ * pairs_of_a_global + locals_ * pairs_of_a_local)


def patch_agreement(scores_SP: Tensor, targets_SP: Tensor, temperature: float, patches_per_image: int) -> Tensor:
    """iBOT: a hidden patch is to be scored as the teacher, which sees it, scores it; the mean over an image's."""
    return _cross_entropy(scores_SP, targets_SP, temperature) / patches_per_image


def koleo(features_BD: Tensor) -> Tensor:
    """Minus the log distance of each image to its nearest neighbour in the batch, on the unit sphere."""
    if len(features_BD) < 2:
        return features_BD.sum() * 0.0  # nobody to keep a distance from
    with torch.autocast(features_BD.device.type, enabled=False):
        places_BD = functional.normalize(features_BD.float(), dim=-1)
        with torch.no_grad():
            likeness_BB = places_BD @ places_BD.T
            nearest_B = likeness_BB.fill_diagonal_(-2.0).argmax(dim=1)
        distances_B = functional.pairwise_distance(places_BD, places_BD.index_select(0, nearest_B), eps=_TINY)
        return -torch.log(distances_B + _TINY).sum()


def _cross_entropy(scores: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return functional.cross_entropy(
        scores.flatten(0, -2).float() / temperature, targets.flatten(0, -2), reduction="sum"
    )
