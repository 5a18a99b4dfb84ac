"""Molecules: made-up ones that are quick and lawful, and PCQM4Mv2's file."""

import gzip

import numpy as np
import pytest

from joulelab.data.molecules import degree_histogram, open_pcqm4m
from joulelab.data.splits import parse_split
from joulelab.data.synthetic import SyntheticMolecules
from joulelab.errors import ConfigError, NotFoundError


def pieces(graph):
    """The molecules of a graph one by one."""
    starts = np.cumsum(graph.atoms) - graph.atoms
    for number, (start, atoms) in enumerate(zip(starts, graph.atoms, strict=True)):
        mine = (graph.bonds[0] >= start) & (graph.bonds[0] < start + atoms)
        yield number, graph.features[start : start + atoms], graph.bonds[:, mine] - start


def test_a_made_up_molecule_depends_on_its_row_alone():
    source = SyntheticMolecules(seed=0)
    whole, one = source.molecules(np.arange(10)), source.molecules(np.array([7]))
    _, features, bonds = list(pieces(whole))[7]
    assert np.array_equal(features, one.features) and set(map(tuple, bonds.T)) == set(map(tuple, one.bonds.T))
    assert whole.targets[7] == one.targets[0]
    assert not np.array_equal(whole.targets, SyntheticMolecules(seed=1).molecules(np.arange(10)).targets)


def test_made_up_molecules_have_the_sizes_of_pcqm4m_and_atoms_that_keep_apart():
    graph = SyntheticMolecules(seed=0).molecules(np.arange(2000))
    assert 13.5 < graph.atoms.mean() < 14.5 and 13.5 < graph.bonds.shape[1] / 2 / 2000 < 15.5
    for start, atoms in zip(np.cumsum(graph.atoms)[:50] - graph.atoms[:50], graph.atoms[:50], strict=True):
        positions = graph.positions[start : start + atoms]
        apart = np.linalg.norm(positions[:, None] - positions, axis=-1)[~np.eye(atoms, dtype=bool)]
        assert apart.min() > 1.1


def test_bonds_go_both_ways_and_never_between_molecules():
    graph = SyntheticMolecules(seed=0).molecules(np.arange(100))
    pairs = set(map(tuple, graph.bonds.T))
    assert len(pairs) == graph.bonds.shape[1] and {pair[::-1] for pair in pairs} == pairs
    assert (graph.molecule[graph.bonds[0]] == graph.molecule[graph.bonds[1]]).all()
    lengths = np.linalg.norm(graph.positions[graph.bonds[0]] - graph.positions[graph.bonds[1]], axis=1)
    assert lengths.min() > 1.1 and lengths.max() < 1.9


def test_the_histogram_counts_neighbors():
    graph = SyntheticMolecules(seed=0).molecules(np.arange(20))
    counted = degree_histogram(graph)
    assert counted.sum() == len(graph.features) and (counted * np.arange(len(counted))).sum() == graph.bonds.shape[1]


ROWS = ["0,C1CC1,5.5", "1,CCO,7.25", "2,c1ccccc1O,4.5", "3,CC(=O)N,6.0", "4,CC,", "5,COC,8.0"]


@pytest.fixture
def data_csv(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "data.csv"
    path.write_text("\n".join(["idx,smiles,homolumogap", *ROWS]) + "\n")
    return path


def test_pcqm4m_is_read_without_the_rows_whose_gap_is_not_public(data_csv):
    pytest.importorskip("rdkit")
    train = open_pcqm4m(data_csv, parse_split("train"), with_positions=False)
    held_out = open_pcqm4m(data_csv, parse_split("validation"), with_positions=False)
    assert len(train.rows) == 4 and len(held_out.rows) == 1
    graph = train.molecules(np.array([2, 1]))
    assert graph.atoms.tolist() == [7, 3] and graph.targets.tolist() == [4.5, 7.25]
    assert graph.numbers.tolist() == [6, 6, 6, 6, 6, 6, 8, 6, 6, 8]
    assert graph.bonds.shape == (2, 2 * (7 + 2)) and graph.bonds.max() == 9
    assert graph.features[0, 7] == 1 and graph.features[7, 7] == 0  # aromatic or not
    assert held_out.molecules(np.array([0])).targets.tolist() == [8.0]


def test_positions_are_embedded_once_and_kept(data_csv, monkeypatch):
    pytest.importorskip("rdkit")
    from joulelab.data import molecules

    first = open_pcqm4m(data_csv, parse_split("train[:2]"), with_positions=True).molecules(np.arange(2))
    bonded = np.linalg.norm(first.positions[first.bonds[0]] - first.positions[first.bonds[1]], axis=1)
    assert bonded.min() > 1.2 and bonded.max() < 1.7
    monkeypatch.setattr(molecules, "read_molecule", None)
    again = open_pcqm4m(data_csv, parse_split("train[:2]"), with_positions=True).molecules(np.arange(2))
    assert np.array_equal(first.positions, again.positions) and np.array_equal(first.bonds, again.bonds)


def test_the_published_file_is_compressed(data_csv):
    pytest.importorskip("rdkit")
    packed = data_csv.with_name("data.csv.gz")
    packed.write_bytes(gzip.compress(data_csv.read_bytes()))
    assert len(open_pcqm4m(packed, parse_split("train"), with_positions=False).rows) == 4


def test_what_is_not_pcqm4m_is_refused(data_csv, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("smiles,energy\nCC,1\n")
    with pytest.raises(ConfigError, match="has no column 'homolumogap'"):
        open_pcqm4m(other, parse_split("train"), with_positions=False)
    with pytest.raises(NotFoundError, match="unknown split of PCQM4Mv2 'trian'; did you mean 'train'"):
        open_pcqm4m(data_csv, parse_split("trian"), with_positions=False)
    pytest.importorskip("rdkit")
    broken = tmp_path / "broken.csv"
    broken.write_text("idx,smiles,homolumogap\n0,C1CC,1\n1,C,2\n2,CC,2\n")
    with pytest.raises(ConfigError, match="'C1CC' is not a molecule"):
        open_pcqm4m(broken, parse_split("train"), with_positions=False)
