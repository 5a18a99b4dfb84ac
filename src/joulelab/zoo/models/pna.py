"""PNA: the graph network over bonds, as deep as milabench makes it."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="pna",
    family="graphs",
    task="molecule regression",
    item="molecule",
    about="graph network over bonds with four aggregators and three scalers; its size is that of milabench",
    sizes={
        "64-layer": Size(4_096_110, {"width": 64, "layers": 64}, {}, batch_size=4096),
        "tiny": Size(7_214, {"width": 16, "layers": 3}, {}, batch_size=32),
    },
    prepare="joulelab.zoo.tasks.graph_regression:prepare_pna",
    needs=("torch", "torch_geometric"),
    extra="graphs",
    dataset="PCQM4Mv2's data.csv or data.csv.gz by path (idx,smiles,homolumogap), read with RDKit",
)
