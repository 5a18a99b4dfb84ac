"""ResNet-50: the image classifier that every accelerator is measured with."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="resnet50",
    family="vision",
    task="image classification",
    item="image",
    about="convolutions with residual connections and BatchNorm, whose statistics depend on the batch",
    architecture="ResNetForImageClassification",
    sizes={
        "base": Size(25_557_032, {"num_labels": 1000}, {"side": 224}, batch_size=256, hub_id="microsoft/resnet-50"),
        "tiny": Size(
            56_474,
            {"num_labels": 10, "depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 96, 128], "embedding_size": 16},
            {"side": 64},
            batch_size=16,
        ),
    },
    prepare="joulelab.zoo.tasks.image_classification:prepare",
    dataset="a folder of images, one sub-folder a class",
    options={"channels_last": True},
)
