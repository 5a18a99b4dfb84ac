"""Who decides how a molecule goes on: a graph transformer over the fragments that are there.

Fragments attend to those they are bonded to, to themselves, and to one node beside the tree that sees all of them. What
kind of bond it is, port by port, takes part in keys and values. Sums over few kinds of bonds are matrix products, which
on a GPU add in the same order every time.

Legend: S trees, N places, M = N + 1 with the node beside the tree, A ports, R kinds of relations, H heads, D width of a
head, X actions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.zoo.gflownet.fragments import ABSENT
from joulelab.zoo.gflownet.trees import TreeBuilding, Trees

NONE, SELF, BESIDE, BONDED = 0, 1, 2, 3
LOG_Z_PARTS = 256
"""log Z is a sum of so many numbers: Adam moves each by the learning rate, so that it learns faster than the rest. It
has far to go, and published settings give it a higher rate for that reason."""


class Decision(NamedTuple):
    logits: Tensor
    """[S, X]"""
    log_z: Tensor
    """The logarithm of all rewards together, as far as it is known."""


class Policy(nn.Module):
    def __init__(self, building: TreeBuilding, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.ports = building.most_ports
        self.kinds = nn.Embedding(building.kinds + 1, width)  # the last: ABSENT
        self.sizes = nn.Embedding(building.most + 1, width)
        relations = BONDED + 2 * self.ports**2
        self.layers = nn.ModuleList(Layer(width, heads, relations) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.stop_or_start = nn.Linear(width, 1 + building.kinds)
        self.grow = nn.Linear(width, self.ports * len(building.joints))
        self.log_z = nn.Parameter(torch.zeros(LOG_Z_PARTS))

    def forward(self, trees: Trees) -> Decision:
        beside_S1 = self.sizes(trees.size)[:, None]
        kinds_SN = torch.where(trees.fragment == ABSENT, self.kinds.num_embeddings - 1, trees.fragment)
        nodes = torch.cat([beside_S1, self.kinds(kinds_SN)], dim=1)
        relations = functional.one_hot(relations_of(trees, self.ports), BONDED + 2 * self.ports**2).to(nodes.dtype)
        for layer in self.layers:
            nodes = layer(nodes, relations)
        nodes = self.norm(nodes)
        logits = torch.cat([self.stop_or_start(nodes[:, 0]), self.grow(nodes[:, 1:]).flatten(1)], dim=1)
        return Decision(logits.float(), self.log_z.sum())


def relations_of(trees: Trees, ports: int) -> Tensor:
    """[S, M, M]: what the second node is to the first; the node beside the tree comes first of all."""
    places = trees.fragment.shape[1]
    bond_SN1 = (trees.parent_port * ports + trees.own_port)[:, :, None]
    place_N = torch.arange(places, device=trees.parent.device)
    is_parent_SNN = trees.parent[:, :, None] == place_N
    up_SNN = torch.where(is_parent_SNN, BONDED + bond_SN1, NONE)
    down_SNN = torch.where(is_parent_SNN, BONDED + ports**2 + bond_SN1, NONE).transpose(1, 2)
    within_SNN = up_SNN + down_SNN + SELF * torch.eye(places, dtype=torch.long, device=place_N.device)
    beside_SN = torch.where(trees.fragment != ABSENT, BESIDE, NONE)
    whole_SNM = torch.cat([beside_SN[:, :, None], within_SNN], dim=2)
    first_S1M = functional.pad(beside_SN, (1, 0), value=SELF)[:, None]
    return torch.cat([first_S1M, whole_SNM], dim=1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, relations: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relation_key, self.relation_value = (
            nn.Parameter(0.02 * torch.randn(relations, heads, width // heads)) for _ in range(2)
        )
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, nodes: Tensor, relations_SMMR: Tensor) -> Tensor:
        nodes = nodes + self.out(self._attend(self.before_attention(nodes), relations_SMMR))
        fed: Tensor = self.feed(self.before_feed(nodes))
        return nodes + fed

    def _attend(self, nodes: Tensor, relations_SMMR: Tensor) -> Tensor:
        query_SMHD, key_SMHD, value_SMHD = self.query_key_value(nodes).unflatten(-1, (3, self.heads, -1)).unbind(2)
        to_nodes_SHMM = torch.einsum("sihd,sjhd->shij", query_SMHD, key_SMHD)
        to_relations_SHMR = torch.einsum("sihd,rhd->shir", query_SMHD, self.relation_key)
        scores_SHMM = to_nodes_SHMM + torch.einsum("shir,sijr->shij", to_relations_SHMR, relations_SMMR)
        scores_SHMM = scores_SHMM / query_SMHD.shape[-1] ** 0.5
        apart_S1MM = relations_SMMR[:, None, :, :, NONE] > 0
        shares_SHMM = scores_SHMM.masked_fill(apart_S1MM, float("-inf")).softmax(-1)
        by_relation_SHMR = torch.einsum("shij,sijr->shir", shares_SHMM, relations_SMMR)
        found_SMHD = torch.einsum("shij,sjhd->sihd", shares_SHMM, value_SMHD)
        return (found_SMHD + torch.einsum("shir,rhd->sihd", by_relation_SHMR, self.relation_value)).flatten(2)
