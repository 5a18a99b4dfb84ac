"""GFlowNet: a policy that builds molecules of fragments, learning from nothing but what they are worth."""

from joulelab.zoo.registry import Size, ZooEntry

# The course's table says 600 M. Recursion's policy for fragments, which milabench trains, has 2.24 M parameters (4
# layers of 128, 72 fragments, counted); ours is of its depth and width, over 36 fragments of our own.
MODEL = ZooEntry(
    name="gflownet",
    family="molecules",
    task="trajectory balance",
    item="trajectory",
    about="graph transformer that builds molecules of fragments in proportion to QED^beta; rewards come from RDKit",
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
