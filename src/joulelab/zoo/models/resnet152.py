"""ResNet-152: the same blocks as ResNet-50, three times as many."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="resnet152",
    family="vision",
    task="image classification",
    item="image",
    about="ResNet-50's blocks, three times as many of them",
    architecture="ResNetForImageClassification",
    sizes={
        "base": Size(
            60_192_808,
            {"num_labels": 1000, "depths": [3, 8, 36, 3]},
            {"side": 224},
            batch_size=256,
            hub_id="microsoft/resnet-152",
        ),
        "tiny": Size(
            81_178,
            {"num_labels": 10, "depths": [1, 2, 3, 1], "hidden_sizes": [32, 64, 96, 128], "embedding_size": 16},
            {"side": 64},
            batch_size=16,
        ),
    },
    prepare="joulelab.zoo.tasks.image_classification:prepare",
    dataset="a folder of images, one sub-folder a class",
    options={"channels_last": True},
)
