"""ConvNeXt-L: a convolutional network built the way transformers are."""

from joulelab.zoo.registry import Size, ZooEntry

MODEL = ZooEntry(
    name="convnext-large",
    family="vision",
    task="image classification",
    item="image",
    about="depthwise 7x7 convolutions between wide linear layers, LayerNorm in place of BatchNorm",
    architecture="ConvNextForImageClassification",
    sizes={
        "large": Size(
            197_767_336,
            {"num_labels": 1000, "depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536]},
            {"side": 224},
            batch_size=128,
            hub_id="facebook/convnext-large-224",
        ),
        "tiny": Size(
            114_346,
            {"num_labels": 10, "depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 48, 64], "layer_scale_init_value": 1.0},
            {"side": 64},
            batch_size=16,
        ),
    },
    prepare="joulelab.zoo.tasks.image_classification:prepare",
    dataset="a folder of images, one sub-folder a class",
    options={"channels_last": True},
)
