"""RegNet-Y-128GF: the largest convolutional network of the zoo."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="regnet-y-128gf",
    family="vision",
    task="image classification",
    item="image",
    about="grouped convolutions (264 channels a group) with squeeze-and-excitation, 128 GFLOP forward per image",
    architecture="RegNetForImageClassification",
    sizes={
        "128gf": Size(
            644_812_894,
            {
                "num_labels": 1000,
                "depths": [2, 7, 17, 1],
                "hidden_sizes": [528, 1056, 2904, 7392],
                "groups_width": 264,
            },
            {"side": 224},
            batch_size=64,
            hub_id="facebook/regnet-y-1280-seer-in1k",
        ),
        "tiny": Size(
            90_202,
            {
                "num_labels": 10,
                "depths": [1, 1, 2, 1],
                "hidden_sizes": [16, 32, 64, 96],
                "groups_width": 16,
                "embedding_size": 16,
            },
            {"side": 64},
            batch_size=16,
        ),
    },
    prepare="joulelab.zoo.tasks.image_classification:prepare",
    dataset="a folder of images, one sub-folder a class",
    options={"channels_last": True},
)
