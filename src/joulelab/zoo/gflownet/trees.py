"""What a molecule under construction is: a tree of fragments, joined port to port; and the ways to go on from one.

    empty -> start with a fragment -> (bond a fragment's port to an open port)* -> stop

The first fragment is the root and stays it. A rooted tree with numbered ports has no symmetries, so that two ways to go
on always lead to two different trees, and what can be taken away again (a leaf that is not the root) always leaves
different trees behind: the backward policy that is uniform over parents is uniform over those leaves, exactly.

Many trees are worked on at once, on the device, without the host looking at any of them.

Legend: S trees, N places for fragments, A ports of a fragment, F kinds of fragments, J joints (a fragment and the port
it is held by), X actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from joulelab.zoo.gflownet.fragments import ABSENT

STOP = 0


class Trees(NamedTuple):
    """Fragments lie in the order in which they came; the root is the first."""

    fragment: Tensor
    """[S, N] Which kind; ABSENT where no fragment is yet."""
    parent: Tensor
    """[S, N] The place of the fragment it is bonded to; ABSENT for the root."""
    parent_port: Tensor
    """[S, N] By which port of that one."""
    own_port: Tensor
    """[S, N] And by which of its own."""
    used: Tensor
    """[S, N, A] Ports that are bonded."""
    size: Tensor
    """[S] How many fragments there are."""


class TreeBuilding:
    def __init__(self, ports: Sequence[int], most: int) -> None:
        """`ports`: of each kind of fragment; `most`: fragments that a tree may have."""
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
        begun_S1 = trees.size[:, None] > 0
        start_SF = ~begun_S1.expand(-1, self.kinds)
        has_port_FA, _ = self._on(begun_S1.device)
        open_SNA = has_port_FA[trees.fragment] & ~trees.used & (trees.size < self.most)[:, None, None]
        grow_SNAJ = open_SNA[..., None].expand(*open_SNA.shape, len(self.joints))
        return torch.cat([begun_S1, start_SF, grow_SNAJ.flatten(1)], dim=1)

    def apply(self, trees: Trees, action_S: Tensor) -> Trees:
        """The trees after one action each; STOP changes nothing."""
        _, joint_J2 = self._on(action_S.device)
        grows_S1 = (action_S > self.kinds)[:, None]
        place_S, port_S, joint_S = self._growth(action_S)
        kind_S, own_port_S = torch.where(grows_S1, joint_J2[joint_S], ABSENT).unbind(1)
        kind_S = torch.where(grows_S1[:, 0], kind_S, action_S - 1)
        new_SN = _at(trees.size, self.most) & (action_S != STOP)[:, None]
        bonded_SN1 = (new_SN & grows_S1)[:, :, None], (_at(place_S, self.most) & grows_S1)[:, :, None]
        ports_S1A = _at(own_port_S, self.most_ports)[:, None], _at(port_S, self.most_ports)[:, None]
        return Trees(
            fragment=torch.where(new_SN, kind_S[:, None], trees.fragment),
            parent=torch.where(new_SN & grows_S1, place_S[:, None], trees.parent),
            parent_port=torch.where(new_SN & grows_S1, port_S[:, None], trees.parent_port),
            own_port=torch.where(new_SN & grows_S1, own_port_S[:, None], trees.own_port),
            used=trees.used | bonded_SN1[0] & ports_S1A[0] | bonded_SN1[1] & ports_S1A[1],
            size=trees.size + (action_S != STOP),
        )

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Which kind has which port (the last row: what is absent has none), and the joints; copied there once."""
        if device not in self._tables:
            ports_F1 = torch.tensor([*self.ports, 0])[:, None]
            has_port_FA = torch.arange(self.most_ports) < ports_F1
            self._tables[device] = has_port_FA.to(device), torch.tensor(self.joints).to(device)
        return self._tables[device]

    def _growth(self, action_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where, at which port, and what: of actions that grow a tree; of the others it means nothing."""
        number_S = (action_S - 1 - self.kinds).clamp(min=0)
        joints = len(self.joints)
        return number_S // (joints * self.most_ports), number_S // joints % self.most_ports, number_S % joints

    def log_backward(self, trees: Trees) -> Tensor:
        """[S]: of undoing the last step, when every fragment that could have been the last is as likely."""
        place_N = torch.arange(self.most, device=trees.size.device)
        has_child_SN = (trees.parent[:, :, None] == place_N).any(1)
        leaf_SN = ~has_child_SN & (place_N > 0) & (trees.fragment != ABSENT)
        return -leaf_SN.sum(1).clamp(min=1).log()


def _at(index_S: Tensor, places: int) -> Tensor:
    """[S, places]: whether it is the place."""
    return torch.arange(places, device=index_S.device) == index_S[:, None]
