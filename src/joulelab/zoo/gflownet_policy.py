"""GFlowNet over trees of fragments: the environment, the policy (a graph transformer) and rollouts.

Fragments attend to those they are bonded to, to themselves, and to a virtual node that sees all of them. The type of
the bond, port by port, enters keys and values. Sums over the few bond types are matrix products, which are
deterministic on a GPU.

Legend: S trees, N places, M = N + 1 with the virtual node, A ports, R kinds of relations, H heads, D width of a head, X
actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.data.synthetic import generator_on
from joulelab.zoo.fragment_molecules import ABSENT

# State space: a molecule under construction is a tree of fragments bonded port to port. Actions:
#
#     empty -> start with a fragment -> (bond a fragment's port to an open port)* -> stop
#
# The first fragment remains the root. A rooted tree with numbered ports has no symmetries, so two different actions
# always lead to two different trees, and removing two different leaves leaves two different trees. The backward policy
# that is uniform over parent states is therefore exactly uniform over the leaves other than the root.
#
# Many trees are built in parallel on the device, without synchronizing with the host.
#
# Legend: S trees, N places for fragments, A ports of a fragment, F kinds of fragments, J joints (a fragment and the
# port that bonds it), X actions.


STOP = 0


class Trees(NamedTuple):
    """Fragments are in the order in which they were added; the root is the first."""

    fragment: Tensor
    """[S, N] Kind of each fragment; ABSENT where there is none yet."""
    parent: Tensor
    """[S, N] The place of the fragment it is bonded to; ABSENT for the root."""
    parent_port: Tensor
    """[S, N] The port of that fragment."""
    own_port: Tensor
    """[S, N] The fragment's own port."""
    used: Tensor
    """[S, N, A] Ports that are bonded."""
    size: Tensor
    """[S] Number of fragments."""


class TreeBuilding:
    def __init__(self, ports: Sequence[int], most: int) -> None:
        """`ports`: number of ports of each kind of fragment; `most`: maximum number of fragments of a tree."""
        self.ports, self.most = tuple(ports), most
        self.kinds, self.most_ports = len(ports), max(ports)
        self.joints = [(kind, port) for kind, count in enumerate(ports) for port in range(count)]
        self.actions = 1 + self.kinds + most * self.most_ports * len(self.joints)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def empty(self, count: int, device: torch.device) -> Trees:
        nothing_SN = torch.full((count, self.most), ABSENT, device=device)
        used_SNA = torch.zeros(count, self.most, self.most_ports, dtype=torch.bool, device=device)
        return Trees(nothing_SN, nothing_SN, nothing_SN, nothing_SN, used_SNA, nothing_SN.new_zeros(count))

    def legal(self, trees: Trees) -> Tensor:
        """[S, X]: stop, start with each kind, bond each joint to each port of each place."""
        has_root_S1 = trees.size[:, None] > 0
        start_SF = ~has_root_S1.expand(-1, self.kinds)
        has_port_FA, _ = self._on(has_root_S1.device)
        open_SNA = has_port_FA[trees.fragment] & ~trees.used & (trees.size < self.most)[:, None, None]
        grow_SNAJ = open_SNA[..., None].expand(*open_SNA.shape, len(self.joints))
        return torch.cat([has_root_S1, start_SF, grow_SNAJ.flatten(1)], dim=1)

    def apply(self, trees: Trees, action_S: Tensor) -> Trees:
        """The trees after one action each; STOP changes nothing."""
        _, joint_J2 = self._on(action_S.device)
        grows_S1 = (action_S > self.kinds)[:, None]
        place_S, port_S, joint_S = self._growth(action_S)
        kind_S, own_port_S = torch.where(grows_S1, joint_J2[joint_S], ABSENT).unbind(1)
        kind_S = torch.where(grows_S1[:, 0], kind_S, action_S - 1)
        new_SN = _one_hot(trees.size, self.most) & (action_S != STOP)[:, None]
        bonded_SN1 = (new_SN & grows_S1)[:, :, None], (_one_hot(place_S, self.most) & grows_S1)[:, :, None]
        ports_S1A = _one_hot(own_port_S, self.most_ports)[:, None], _one_hot(port_S, self.most_ports)[:, None]
        return Trees(
            fragment=torch.where(new_SN, kind_S[:, None], trees.fragment),
            parent=torch.where(new_SN & grows_S1, place_S[:, None], trees.parent),
            parent_port=torch.where(new_SN & grows_S1, port_S[:, None], trees.parent_port),
            own_port=torch.where(new_SN & grows_S1, own_port_S[:, None], trees.own_port),
            used=trees.used | bonded_SN1[0] & ports_S1A[0] | bonded_SN1[1] & ports_S1A[1],
            size=trees.size + (action_S != STOP),
        )

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mask of the ports of each kind (the last row, ABSENT, has none), and the joints; copied once."""
        if device not in self._tables:
            ports_F1 = torch.tensor([*self.ports, 0])[:, None]
            has_port_FA = torch.arange(self.most_ports) < ports_F1
            self._tables[device] = has_port_FA.to(device), torch.tensor(self.joints).to(device)
        return self._tables[device]

    def _growth(self, action_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Place, port and joint of actions that add a fragment; undefined for other actions."""
        number_S = (action_S - 1 - self.kinds).clamp(min=0)
        joints = len(self.joints)
        return number_S // (joints * self.most_ports), number_S // joints % self.most_ports, number_S % joints

    def log_backward(self, trees: Trees) -> Tensor:
        """[S]: log-probability of the backward step, uniform over the fragments that could have been added last."""
        place_N = torch.arange(self.most, device=trees.size.device)
        has_child_SN = (trees.parent[:, :, None] == place_N).any(1)
        leaf_SN = ~has_child_SN & (place_N > 0) & (trees.fragment != ABSENT)
        return -leaf_SN.sum(1).clamp(min=1).log()


def _one_hot(index_S: Tensor, places: int) -> Tensor:
    """[S, places]: 1.0 at the index, 0.0 elsewhere."""
    return torch.arange(places, device=index_S.device) == index_S[:, None]


NONE, SELF, VIRTUAL, BONDED = 0, 1, 2, 3
LOG_Z_PARTS = 256
"""log Z is the sum of this many parameters. Adam moves each by about the learning rate per step, so log Z moves faster
by this factor; published settings give it a higher learning rate for the same reason."""


class Decision(NamedTuple):
    logits: Tensor
    """[S, X]"""
    log_z: Tensor
    """Estimate of log Z, the logarithm of the sum of all rewards."""


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
        virtual_S1 = self.sizes(trees.size)[:, None]
        kinds_SN = torch.where(trees.fragment == ABSENT, self.kinds.num_embeddings - 1, trees.fragment)
        nodes = torch.cat([virtual_S1, self.kinds(kinds_SN)], dim=1)
        relations = functional.one_hot(relations_of(trees, self.ports), BONDED + 2 * self.ports**2).to(nodes.dtype)
        for layer in self.layers:
            nodes = layer(nodes, relations)
        nodes = self.norm(nodes)
        logits = torch.cat([self.stop_or_start(nodes[:, 0]), self.grow(nodes[:, 1:]).flatten(1)], dim=1)
        return Decision(logits.float(), self.log_z.sum())


def relations_of(trees: Trees, ports: int) -> Tensor:
    """[S, M, M]: relation of the second node to the first; node 0 is the virtual node."""
    places = trees.fragment.shape[1]
    bond_SN1 = (trees.parent_port * ports + trees.own_port)[:, :, None]
    place_N = torch.arange(places, device=trees.parent.device)
    is_parent_SNN = trees.parent[:, :, None] == place_N
    up_SNN = torch.where(is_parent_SNN, BONDED + bond_SN1, NONE)
    down_SNN = torch.where(is_parent_SNN, BONDED + ports**2 + bond_SN1, NONE).transpose(1, 2)
    within_SNN = up_SNN + down_SNN + SELF * torch.eye(places, dtype=torch.long, device=place_N.device)
    virtual_SN = torch.where(trees.fragment != ABSENT, VIRTUAL, NONE)
    whole_SNM = torch.cat([virtual_SN[:, :, None], within_SNN], dim=2)
    first_S1M = functional.pad(virtual_SN, (1, 0), value=SELF)[:, None]
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
        # Relative position representations (Shaw et al., 2018) for a tree: query times relation
        # key, computed once per relation instead of once per pair of nodes.
        to_relations_SHMR = torch.einsum("sihd,rhd->shir", query_SMHD, self.relation_key)
        scores_SHMM = to_nodes_SHMM + torch.einsum("shir,sijr->shij", to_relations_SHMR, relations_SMMR)
        scores_SHMM = scores_SHMM / query_SMHD.shape[-1] ** 0.5
        apart_S1MM = relations_SMMR[:, None, :, :, NONE] > 0
        # Every node attends to itself, so no row is -inf only.
        shares_SHMM = scores_SHMM.masked_fill(apart_S1MM, float("-inf")).softmax(-1)
        by_relation_SHMR = torch.einsum("shij,sijr->shir", shares_SHMM, relations_SMMR)
        found_SMHD = torch.einsum("shij,sjhd->sihd", shares_SHMM, value_SMHD)
        return (found_SMHD + torch.einsum("shir,rhd->sihd", by_relation_SHMR, self.relation_value)).flatten(2)


# Rollouts of the current policy, from the empty tree to the stop action.
#
# All randomness comes with the batch as Gumbel noise: argmax(logits + noise) is a sample of the softmax. The same batch
# and weights give the same trajectories bit for bit, so training can be replayed.
#
# Legend: B trajectories, T steps, X actions.


_MIN_UNIFORM = 1e-20
"""A uniform sample of exactly 0 would give noise of minus infinity, which marks illegal actions."""


@dataclass(eq=False)
class RolloutBatch:
    """Trajectories to be sampled: their number, and the noise that determines them."""

    samples: int
    steps: int
    actions: int
    seed: int
    noise: Tensor | None = field(default=None)
    """[B, T, X], generated on the device."""
    tokens: int = 0
    """Number of fragments of all trees on the trajectories; set by the objective after the rollout."""

    def to(self, device: torch.device) -> RolloutBatch:
        shape = (self.samples, self.steps, self.actions)
        uniform_BTX = torch.rand(shape, generator=generator_on(device, self.seed), device=device)
        gumbel_BTX = uniform_BTX.clamp_(min=_MIN_UNIFORM).log_().neg_().log_().neg_()
        return RolloutBatch(*shape, self.seed, gumbel_BTX)


class Rollouts:
    """Batches of trajectories, a pure function of (seed, epoch, index)."""

    def __init__(self, building: TreeBuilding, samples: int, batch_size: int, seed: int) -> None:
        self._building, self._seed = building, seed
        self._batch_size = min(samples, batch_size)
        self.batches_per_epoch = samples // self._batch_size

    def at(self, epoch: int, index: int) -> RolloutBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        draw = np.random.SeedSequence([self._seed, epoch, index]).generate_state(1, np.uint64)[0]
        # a full tree can only stop, so a trajectory has at most as many decisions as places
        return RolloutBatch(self._batch_size, self._building.most, self._building.actions, int(draw >> np.uint64(1)))


class Trajectory(NamedTuple):
    """Step-major; a trajectory that has stopped repeats its last tree and is masked out."""

    before: Trees
    """Tree before each decision; [T * B, ...]."""
    action: Tensor
    """[T, B]"""
    decided: Tensor
    """[T, B] Whether the trajectory was still running."""
    after: Trees
    """Tree after each decision; [T * B, ...]."""
    final: Trees


@torch.no_grad()
def roll_out(model: nn.Module, building: TreeBuilding, noise_BTX: Tensor) -> Trajectory:
    trees = building.empty(len(noise_BTX), noise_BTX.device)
    going_B = torch.ones(len(noise_BTX), dtype=torch.bool, device=noise_BTX.device)
    states, actions, decided = [trees], [], []
    for noise_BX in noise_BTX.unbind(1):
        scores_BX = mask_illegal(model(trees).logits, building.legal(trees)) + noise_BX
        action_B = torch.where(going_B, scores_BX.argmax(1), STOP)
        trees = building.apply(trees, action_B)
        decided.append(going_B)
        going_B = going_B & (action_B != STOP)
        states.append(trees)
        actions.append(action_B)
    return Trajectory(_concat(states[:-1]), torch.stack(actions), torch.stack(decided), _concat(states[1:]), trees)


def mask_illegal(logits: Tensor, legal: Tensor) -> Tensor:
    return logits.masked_fill(~legal, float("-inf"))


def _concat(states: list[Trees]) -> Trees:
    columns: Any = zip(*states, strict=True)
    return Trees(*(torch.cat(column) for column in columns))
