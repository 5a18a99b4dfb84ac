"""DimeNet: the graph network over distances and angles, in the size of milabench."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="dimenet",
    family="graphs",
    task="molecule regression",
    item="molecule",
    about="graph network over all pairs within 10 Å and the angles between them; its size is that of milabench",
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
)
