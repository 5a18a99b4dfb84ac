"""Graph networks of the zoo and the GFlowNet, as data."""

from __future__ import annotations

from joulelab.zoo.registry import Size, ZooEntry

PNA = ZooEntry(
    name="pna",
    family="graphs",
    task="molecule regression",
    item="molecule",
    about="graph network over bonds with four aggregators and three scalers, in milabench's size",
    sizes={
        "64-layer": Size(4_096_110, {"width": 64, "layers": 64}, {}, batch_size=4096),
        "tiny": Size(7_214, {"width": 16, "layers": 3}, {}, batch_size=32),
    },
    prepare="joulelab.zoo.tasks.graph_regression:prepare_pna",
    needs=("torch", "torch_geometric"),
    extra="graphs",
    dataset="PCQM4Mv2's data.csv or data.csv.gz by path (idx,smiles,homolumogap), read with RDKit",
    dataset_kind="file",
)


# DimeNet: graph network over distances and angles, in milabench's size.


DIMENET = ZooEntry(
    name="dimenet",
    family="graphs",
    task="molecule regression",
    item="molecule",
    about="graph network over all pairs within 10 Å and the angles between them, in milabench's size",
    sizes={
        "6-block": Size(
            534_950,
            {"width": 64, "blocks": 6, "bilinear": 8, "spherical": 7, "radial": 6, "cutoff": 10.0},
            {},
            batch_size=32,
        ),
        "tiny": Size(
            24_533,
            {"width": 32, "blocks": 1, "bilinear": 2, "spherical": 3, "radial": 3, "cutoff": 4.0},
            {},
            batch_size=64,
        ),
    },
    prepare="joulelab.zoo.tasks.graph_regression:prepare_dimenet",
    needs=("torch", "torch_geometric"),
    extra="graphs",
    dataset="PCQM4Mv2's data.csv or data.csv.gz by path (idx,smiles,homolumogap), read and embedded with RDKit",
    dataset_kind="file",
)


# GFlowNet: a policy that builds molecules from fragments and is trained by their reward alone.


# Some tables state 600 M parameters. Recursion's fragment policy, which milabench trains, has 2.24 M (4 layers of width
# 128, 72 fragments, counted); this one has the same depth and width and 36 fragments.
GFLOWNET = ZooEntry(
    name="gflownet",
    family="molecules",
    task="trajectory balance",
    item="trajectory",
    about="graph transformer that samples molecules of fragments in proportion to QED^beta; RDKit computes the reward",
    sizes={
        "4-layer": Size(
            850_274,
            {"width": 128, "layers": 4, "heads": 4, "kinds": 36, "beta": 16.0},
            {"fragments": 9},
            batch_size=128,
        ),
        "tiny": Size(
            30_547,
            {"width": 32, "layers": 2, "heads": 2, "kinds": 8, "beta": 4.0},
            {"fragments": 4},
            batch_size=16,
        ),
    },
    prepare="joulelab.zoo.tasks.trajectory_balance:prepare",
    needs=("torch", "rdkit"),
    extra="graphs",
)
