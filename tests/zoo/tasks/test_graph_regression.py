"""Graph networks over molecules: the right neighbors and angles, the right invariances, a loss of the right shape."""

import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

from joulelab.data.batches import TensorBatch
from joulelab.data.molecules import MoleculeGraph, degree_histogram
from joulelab.data.synthetic import SyntheticMolecules
from joulelab.zoo.graph_networks import (
    DimeNet,
    Pna,
    SphericalBasis,
    bessel_zeros,
    edges_within,
    harmonics,
    spherical_bessel,
    triplets_of,
)
from joulelab.zoo.objective import prepare
from joulelab.zoo.registry import WorkloadRequest, find_model
from joulelab.zoo.tasks.graph_regression import absolute_error, positions_and_angles

CUTOFF = 2.5


def some(count=4):
    return SyntheticMolecules(seed=0).molecules(np.arange(count))


def geometry(positions, molecule, cutoff=CUTOFF):
    edges = edges_within(cutoff, positions, molecule)
    return edges, triplets_of(edges, len(positions))


def test_edges_and_triplets_are_those_of_the_definition():
    graph = some()
    positions, molecule = torch.from_numpy(graph.positions), torch.from_numpy(graph.molecule)
    edges, triplets = geometry(positions, molecule)

    atoms = range(len(positions))
    expected = {
        (j, i)
        for j, i in itertools.product(atoms, atoms)
        if j != i and molecule[j] == molecule[i] and math.dist(positions[j], positions[i]) < CUTOFF
    }
    found = list(zip(edges.source.tolist(), edges.target.tolist(), strict=True))
    assert len(found) == len(set(found)) and set(found) == expected

    expected_triplets = {
        (kj, ji) for kj, ji in itertools.product(expected, expected) if kj[1] == ji[0] != ji[1] != kj[0]
    }
    found_triplets = [(found[kj], found[ji]) for kj, ji in zip(triplets.kj.tolist(), triplets.ji.tolist(), strict=True)]
    assert len(found_triplets) == len(set(found_triplets)) and set(found_triplets) == expected_triplets


def test_an_atom_on_its_own_has_no_neighbors():
    edges, triplets = geometry(torch.tensor([[0.0, 0, 0], [50, 0, 0], [51, 0, 0]]), torch.tensor([0, 0, 0]))
    assert edges.source.tolist() == [2, 1] and edges.target.tolist() == [1, 2] and len(triplets.kj) == 0


def dimenet():
    torch.manual_seed(0)
    model = DimeNet(width=8, blocks=1, bilinear=2, spherical=3, radial=3, cutoff=CUTOFF)
    for output in model.outputs:  # it starts at 0, where any invariance holds
        torch.nn.init.normal_(output.lin.weight)
    return model


def test_dimenet_does_not_care_where_a_molecule_is_and_how_it_is_turned():
    graph, model = some(), dimenet()
    numbers, molecule = torch.from_numpy(graph.numbers), torch.from_numpy(graph.molecule)
    positions = torch.from_numpy(graph.positions)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))
    answers = [
        model(numbers, moved, molecule, *geometry(moved, molecule), 4)
        for moved in (positions, positions @ turn.T + torch.tensor([3.0, -2.0, 7.0]), positions * 1.05)
    ]
    assert answers[0].shape == (4,)
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(answers[0], answers[2], rtol=1e-2)  # larger is another molecule


def test_dimenet_distinguishes_angles_but_not_the_order_of_atoms():
    model, molecule, numbers = dimenet(), torch.zeros(3, dtype=torch.long), torch.tensor([6, 8, 6])
    bent = torch.tensor([[1.4, 0, 0], [0, 0, 0], [0, 1.4, 0]])
    straight = torch.tensor([[1.4, 0, 0], [0, 0, 0], [-1.4, 0, 0]])
    order = [2, 1, 0]
    answers = [
        model(numbers, where, molecule, *geometry(where, molecule, 1.5), 1) for where in (bent, straight, bent[order])
    ]
    assert not torch.allclose(answers[0], answers[1], rtol=1e-3)
    torch.testing.assert_close(answers[0], answers[2])


def test_the_basis_is_the_one_of_the_paper():
    zeros = bessel_zeros(7, 6)
    assert zeros[1, :2].tolist() == pytest.approx([4.493409458, 7.725251837])  # of j_1, from tables
    for order, row in enumerate(zeros):
        assert spherical_bessel(order, row)[order].abs().max() < 1e-9
    assert spherical_bessel(2, torch.tensor(2.0, dtype=torch.float64))[2].item() == pytest.approx(0.198447949)
    assert harmonics(3, torch.tensor(0.5))[2].item() == pytest.approx(math.sqrt(5 / (4 * math.pi)) * -0.125)


def test_the_basis_agrees_with_torch_geometric():
    pytest.importorskip("scipy")
    from torch_geometric.nn.models.dimenet import Envelope, SphericalBasisLayer

    generator = torch.Generator().manual_seed(0)
    distance = 1.2 + 3.5 * torch.rand(20, generator=generator)
    angle, kj = 3 * torch.rand(50, generator=generator), torch.randint(20, (50,), generator=generator)
    theirs = SphericalBasisLayer(3, 3, cutoff=5.0)(distance.double(), angle.double(), kj)
    ours = SphericalBasis(3, 3, 5.0, Envelope(5))(distance, angle.cos(), kj)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def permuted(graph, order):
    place = np.argsort(order)
    bonds = place[graph.bonds]
    return MoleculeGraph(graph.features[order], graph.positions[order], bonds, graph.atoms, graph.targets)


def test_pna_does_not_care_about_the_order_of_atoms():
    graph = some(1)
    torch.manual_seed(0)
    model = Pna(width=8, layers=3, degrees=torch.from_numpy(degree_histogram(graph)))
    order = np.random.default_rng(0).permutation(len(graph.features))
    answers = [
        model(torch.from_numpy(g.features), torch.from_numpy(g.bonds), torch.from_numpy(g.molecule), 1)
        for g in (graph, permuted(graph, order))
    ]
    assert answers[0].shape == (1,)
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


def test_a_molecule_gets_the_same_answer_in_any_company():
    whole, alone = some(4), SyntheticMolecules(seed=0).molecules(np.arange(2, 3))
    torch.manual_seed(0)
    model = Pna(width=8, layers=3, degrees=torch.from_numpy(degree_histogram(whole)))
    answers = [
        model(*(torch.from_numpy(x) for x in (g.features, g.bonds, g.molecule)), len(g.atoms)) for g in (whole, alone)
    ]
    torch.testing.assert_close(answers[0][2], answers[1][0], rtol=1e-5, atol=1e-5)


def test_the_loss_is_a_sum_over_molecules_and_not_over_pairs_of_them():
    targets = torch.tensor([0.0, 1.0, 5.0])
    batch = TensorBatch({"targets": targets}, samples=3, count=3)
    output = absolute_error(torch.nn.Identity(), batch, lambda model, batch: targets + 1, spread_ev=2.0)
    assert output.loss_sum.item() == 3.0 and output.count == 3 and output.parts["error_ev"].item() == 6.0
    with pytest.raises(AssertionError):
        absolute_error(torch.nn.Identity(), batch, lambda model, batch: targets[:, None], spread_ev=1.0)


@pytest.mark.parametrize("name", ["pna", "dimenet"])
def test_molecules_of_the_users_train_too(name, tmp_path, monkeypatch):
    pytest.importorskip("rdkit")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    smiles = ["C1CC1", "CCO", "c1ccccc1O", "CC(=O)N", "COC", "C"]  # the last: an atom on its own
    rows = [f"{number},{text},{number + 0.5}" for number, text in enumerate(smiles * 2)]
    (tmp_path / "data.csv").write_text("\n".join(["idx,smiles,homolumogap", *rows]))
    request = WorkloadRequest(find_model(name), size_name="tiny", dataset=str(tmp_path / "data.csv"))
    workload = prepare(request)
    batch = workload.batches.at(0, 0)
    assert batch.samples == 11 and abs(batch["targets"].mean()) < 1e-5 and batch["targets"].std() > 0.9
    output = workload.objective(workload.model, batch, torch.autograd.profiler.record_function)
    output.loss_sum.backward()
    assert output.loss_sum.isfinite() and output.count == 11
    assert output.parts["error_ev"].item() == pytest.approx(output.loss_sum.item() * 3.1, rel=0.1)


def test_a_batch_brings_its_geometry_along():
    found = positions_and_angles(some(2), cutoff=CUTOFF)
    assert set(found) == {"numbers", "positions", "source", "target", "kj", "ji"}
    assert found["kj"].max() < len(found["source"])
