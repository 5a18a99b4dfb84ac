"""The GFlowNet: exact where exactness can be checked, legal molecules only, trajectories that can be replayed."""

import math
from functools import cache

import pytest
import torch

from joulelab.zoo.fragment_molecules import ABSENT, FRAGMENTS, port_count
from joulelab.zoo.gflownet_policy import STOP, Decision, Policy, Rollouts, TreeBuilding, roll_out
from joulelab.zoo.tasks.trajectory_balance import TrajectoryBalance

CPU = torch.device("cpu")
DRAWN = 1000
SMALL = TreeBuilding(ports=[1, 2, 3], most=3)


def rolled(model, building, count=64, seed=0):
    return roll_out(model, building, Rollouts(building, count, count, seed).at(0, 0).to(CPU).noise)


def policy(building, seed=0):
    torch.manual_seed(seed)
    return Policy(building, width=16, layers=2, heads=2)


def shape_of(trees, row, place=0):
    """A rooted tree as nested tuples, which do not depend on the order in which it was built."""
    children = [
        (int(trees.parent_port[row, child]), int(trees.own_port[row, child]), shape_of(trees, row, child))
        for child in range(int(trees.size[row]))
        if int(trees.parent[row, child]) == place
    ]
    return (int(trees.fragment[row, place]), *sorted(children)) if trees.size[row] else ()


def legal_steps(trees, row, building):
    """The trees that one tree can become, by action."""
    one = type(trees)(*(column[row : row + 1] for column in trees))
    actions = building.legal(one)[0].nonzero()[:, 0]
    many = type(trees)(*(column.expand(len(actions), *column.shape[1:]) for column in one))
    return dict(zip(actions.tolist(), zip(*building.apply(many, actions), strict=True), strict=True))


class Exact(torch.nn.Module):
    """The policy of the exact flow: F(tree) = reward(tree) + sum over ways on of F(next) * P_backward(next)."""

    def __init__(self, building, reward):
        super().__init__()
        self.building, self.reward, self.flows = building, reward, {}

    def flow(self, trees, row):
        key = shape_of(trees, row)
        if key not in self.flows:
            self.flows[key] = {
                action: self._share(action, trees, row, after)
                for action, after in legal_steps(trees, row, self.building).items()
            }
        return self.flows[key]

    def _share(self, action, trees, row, after):
        if action == STOP:
            return self.reward(shape_of(trees, row))
        after = type(trees)(*(column[None] for column in after))
        return sum(self.flow(after, 0).values()) * math.exp(self.building.log_backward(after)[0])

    def forward(self, trees):
        logits = torch.full((len(trees.size), self.building.actions), -1e9, dtype=torch.float64)
        for row in range(len(trees.size)):
            # shares belong to a shape, actions to the places of this very tree
            for action, after in legal_steps(trees, row, self.building).items():
                logits[row, action] = math.log(self._share(action, trees, row, after))
        nothing = self.building.empty(1, CPU)
        return Decision(logits, torch.tensor(math.log(sum(self.flow(nothing, 0).values())), dtype=torch.float64))


@cache
def made_up_reward(shape):
    return 0.5 + (hash(shape) % 1000) / 100  # hashes of tuples of ints are the same in every run


class ShapeReward:
    def qed(self, trees):
        rewards = [made_up_reward(shape_of(trees, row)) for row in range(len(trees.size))]
        return torch.tensor(rewards, dtype=torch.float64)

    def log_reward(self, qed):
        return qed.log()


def test_the_loss_of_the_exact_flow_is_zero_on_every_trajectory():
    building = TreeBuilding(ports=[1, 2], most=3)
    batch = Rollouts(building, 32, 32, seed=0).at(0, 0).to(CPU)
    model = Exact(building, made_up_reward)
    output = TrajectoryBalance(building, ShapeReward())(model, batch, torch.autograd.profiler.record_function)
    assert output.count == 32 and output.loss_sum.item() == pytest.approx(0.0, abs=1e-12)
    model.flows = {key: {a: share * (1 + a) for a, share in shares.items()} for key, shares in model.flows.items()}
    wrong = TrajectoryBalance(building, ShapeReward())(model, batch, torch.autograd.profiler.record_function)
    assert wrong.loss_sum.item() > 1


def test_the_exact_policy_samples_in_proportion_to_the_reward():
    building = TreeBuilding(ports=[1, 2], most=2)
    path = rolled(Exact(building, made_up_reward), building, count=DRAWN)
    shapes = [shape_of(path.final, row) for row in range(DRAWN)]
    total = sum(Exact(building, made_up_reward).flow(building.empty(1, CPU), 0).values())
    for shape in set(shapes):
        share = made_up_reward(shape) / total
        assert shapes.count(shape) / DRAWN == pytest.approx(share, abs=4 * math.sqrt(share / DRAWN))


def test_trees_are_what_they_should_be():
    path = rolled(policy(SMALL), SMALL, count=200)
    for row in range(200):
        size = int(path.final.size[row])
        assert 1 <= size <= SMALL.most
        assert path.final.fragment[row, size:].tolist() == [ABSENT] * (SMALL.most - size)
        bonded = []
        for child in range(1, size):
            parent, port = int(path.final.parent[row, child]), int(path.final.parent_port[row, child])
            assert parent < child and port < SMALL.ports[int(path.final.fragment[row, parent])]
            own = int(path.final.own_port[row, child])
            assert own < SMALL.ports[int(path.final.fragment[row, child])]
            bonded += [(parent, port), (child, own)]
        assert len(bonded) == len(set(bonded))  # no port is bonded twice
        assert {tuple(place) for place in path.final.used[row].nonzero().tolist()} == set(bonded)


def test_two_ways_on_never_lead_to_the_same_tree():
    path = rolled(policy(SMALL), SMALL, count=20)
    for row in range(len(path.before.size)):
        after = [x for action, x in legal_steps(path.before, row, SMALL).items() if action != STOP]
        trees = [shape_of(type(path.before)(*(column[None] for column in one)), 0) for one in after]
        assert len(trees) == len(set(trees))


def test_the_backward_policy_counts_the_leaves():
    nothing = SMALL.empty(1, CPU)
    start = SMALL.apply(nothing, torch.tensor([1 + 2]))  # three ports
    action = 1 + SMALL.kinds  # the first joint (kind 0) at the first port of the root
    second = SMALL.apply(start, torch.tensor([action]))
    third = SMALL.apply(second, torch.tensor([action + len(SMALL.joints)]))
    leaves = [1 / math.exp(SMALL.log_backward(trees)[0]) for trees in (start, second, third)]
    assert leaves == pytest.approx([1, 1, 2])


def test_the_policy_does_not_care_in_which_order_a_tree_was_built():
    joints, model = len(SMALL.joints), policy(SMALL).eval()
    one, other = 1 + SMALL.kinds, 1 + SMALL.kinds + joints + 1  # kind 0 at the first port, kind 1 at the second
    trees = SMALL.empty(2, CPU)
    for actions in ([3, 3], [one, other], [other, one]):
        trees = SMALL.apply(trees, torch.tensor(actions))
    assert shape_of(trees, 0) == shape_of(trees, 1)
    logits = model(trees).logits
    torch.testing.assert_close(logits[0, 0], logits[1, 0])
    grow = logits[:, 1 + SMALL.kinds :].view(2, SMALL.most, -1)
    torch.testing.assert_close(grow[0, 1], grow[1, 2])
    torch.testing.assert_close(grow[0, 2], grow[1, 1])


def test_the_same_batch_and_weights_give_the_same_trajectories():
    first, again, others = (
        rolled(policy(SMALL), SMALL),
        rolled(policy(SMALL), SMALL),
        rolled(policy(SMALL), SMALL, seed=1),
    )
    assert torch.equal(first.action, again.action) and not torch.equal(first.action, others.action)


def test_only_legal_molecules_are_built_and_all_of_their_ports_are_closed():
    chem = pytest.importorskip("rdkit.Chem")
    from joulelab.zoo.tasks.trajectory_balance import QedReward, trees_to_host

    building = TreeBuilding([port_count(smiles) for smiles in FRAGMENTS], most=6)
    reward = QedReward(FRAGMENTS, beta=2.0)
    final = rolled(policy(building), building, count=150).final
    seen = set()
    for tree in trees_to_host(final):
        molecule = reward.molecule(tree)
        assert chem.MolFromSmiles(chem.MolToSmiles(molecule)) is not None
        assert len(chem.GetMolFrags(molecule)) == 1
        assert all(atom.GetAtomicNum() > 1 and not atom.GetNumRadicalElectrons() for atom in molecule.GetAtoms())
        seen |= {node.kind for node in tree}
    assert seen == set(range(len(FRAGMENTS)))
    worth = reward.qed(final)
    assert ((worth > 0) & (worth < 1)).all() and torch.equal(worth, reward.qed(final))
    torch.testing.assert_close(reward.log_reward(worth), 2 * worth.log())
    assert torch.equal(QedReward(FRAGMENTS, beta=2.0, workers=2).qed(final), worth)


def test_a_molecule_is_bonded_where_the_tree_states():
    chem = pytest.importorskip("rdkit.Chem")
    from joulelab.zoo.fragment_molecules import TreeNode
    from joulelab.zoo.tasks.trajectory_balance import QedReward

    reward = QedReward(["*c1ccc(*)cc1", "*O", "*n1cccc1"], beta=1.0)
    tree = [TreeNode(0, ABSENT, ABSENT, ABSENT), TreeNode(1, 0, 1, 0), TreeNode(2, 0, 0, 0)]
    assert chem.MolToSmiles(reward.molecule(tree)) == chem.CanonSmiles("Oc1ccc(cc1)n1cccc1")
    assert chem.MolToSmiles(reward.molecule(tree[:1])) == "c1ccccc1"
    assert chem.MolToSmiles(reward.molecule([TreeNode(2, ABSENT, ABSENT, ABSENT)])) == "c1cc[nH]c1"
