"""Image and video models of the zoo: classifiers and self-supervised encoders, as data."""

from __future__ import annotations

from joulelab.zoo.registry import Size, ZooEntry
from joulelab.zoo.tasks.self_supervised_recipes import DistillationRecipe, PredictionRecipe

# ResNet-50 (He et al., 2015): the image classifier of most accelerator benchmarks.
RESNET50 = ZooEntry(
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
    dataset="a folder of images, one subfolder per class",
    dataset_kind="folder",
    options={"channels_last": True},
)


# ResNet-152: the same blocks as ResNet-50, three times as many.


RESNET152 = ZooEntry(
    name="resnet152",
    family="vision",
    task="image classification",
    item="image",
    about="like ResNet-50, with about three times as many blocks",
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
    dataset="a folder of images, one subfolder per class",
    dataset_kind="folder",
    options={"channels_last": True},
)


# ConvNeXt-L (Liu et al., 2022): a convolutional network with the layout of a transformer.


CONVNEXT_LARGE = ZooEntry(
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
    dataset="a folder of images, one subfolder per class",
    dataset_kind="folder",
    options={"channels_last": True},
)


# RegNet-Y-128GF (Radosavovic et al., 2020): the largest convolutional network of the zoo.


REGNET_Y_128GF = ZooEntry(
    name="regnet-y-128gf",
    family="vision",
    task="image classification",
    item="image",
    about="grouped convolutions (264 channels per group) with squeeze-and-excitation, 128 GFLOP forward per image",
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
    dataset="a folder of images, one subfolder per class",
    dataset_kind="folder",
    options={"channels_last": True},
)


# ViT-g/14: DINOv2's largest backbone, trained with DINOv2's objective.


VIT_G14 = ZooEntry(
    name="vit-g14",
    family="vision",
    task="self-distillation",
    item="image",
    about="40 layers with SwiGLU, DINOv2's losses; 1,134.8 M are the published backbone, the rest its two heads",
    architecture="Dinov2Model",
    sizes={
        "giant": Size(
            1_251_696_384,
            {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True},
            {"side": 224, "local_side": 98},
            batch_size=32,
            hub_id="facebook/dinov2-giant",
        ),
        "tiny": Size(
            118_416,
            {
                "hidden_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "use_swiglu_ffn": True,
                "patch_size": 8,
            },
            {"side": 32, "local_side": 16},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.self_distillation:prepare",
    dataset="a folder of images, one subfolder per class (labels are not used)",
    dataset_kind="folder",
    options={
        "giant": DistillationRecipe(),
        "tiny": DistillationRecipe(prototypes=64, head_width=64, bottleneck=32, local_crops=2, momentum=0.9),
    },
)


# DINOv2 (Oquab et al., 2023): self-supervised vision transformers.


_DINOV2_SHAPE = {"side": 224, "local_side": 98}
_SMALL_HEADS = DistillationRecipe(prototypes=65_536, bottleneck=256, skipped_share=0.3, momentum=0.992)

DINOV2 = ZooEntry(
    name="dinov2",
    family="vision",
    task="self-distillation",
    item="image",
    about="DINO, iBOT and KoLeo with a moving-average teacher; of the large size 303.2 M are the published backbone, "
    "the rest its two heads",
    architecture="Dinov2Model",
    sizes={
        "large": Size(
            418_056_960,
            {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
            _DINOV2_SHAPE,
            batch_size=32,
            hub_id="facebook/dinov2-large",
        ),
        "small": Size(
            66_202_368,
            {"hidden_size": 384, "num_attention_heads": 6},
            _DINOV2_SHAPE,
            batch_size=64,
            hub_id="facebook/dinov2-small",
        ),
        "base": Size(131_871_744, {}, _DINOV2_SHAPE, batch_size=64, hub_id="facebook/dinov2-base"),
        "giant": Size(
            1_251_696_384,
            {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True},
            _DINOV2_SHAPE,
            batch_size=32,
            hub_id="facebook/dinov2-giant",
        ),
        "tiny": Size(
            138_816,
            {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8},
            {"side": 32, "local_side": 16},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.self_distillation:prepare",
    dataset="a folder of images, one subfolder per class (labels are not used)",
    dataset_kind="folder",
    options={
        "large": DistillationRecipe(),
        "small": _SMALL_HEADS,
        "base": _SMALL_HEADS,
        "giant": DistillationRecipe(),
        "tiny": DistillationRecipe(prototypes=64, head_width=64, bottleneck=32, local_crops=2, momentum=0.9),
    },
)


# V-JEPA 2 (Assran et al., 2025): self-supervised video encoder that predicts the features of masked patches.


_VJEPA2_SHAPE = {"frames": 16, "side": 224}

VJEPA2 = ZooEntry(
    name="vjepa2",
    family="vision",
    task="masked latent prediction",
    item="clip",
    about="a ViT-L encoder of 303.9 M and a predictor of 22.1 M; the 632 M often quoted are the encoder of the huge "
    "size; clips of 16 frames here, 64 of 256 pixels as published",
    architecture="VJEPA2Model",
    sizes={
        "large": Size(325_971_328, {}, _VJEPA2_SHAPE, batch_size=24, hub_id="facebook/vjepa2-vitl-fpc64-256"),
        "huge": Size(
            653_930_880,
            {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16},
            _VJEPA2_SHAPE,
            batch_size=24,
            hub_id="facebook/vjepa2-vith-fpc64-256",
        ),
        "giant": Size(
            1_034_555_264,
            {"hidden_size": 1408, "num_hidden_layers": 40, "num_attention_heads": 22, "mlp_ratio": 48 / 11},
            _VJEPA2_SHAPE,
            batch_size=16,
            hub_id="facebook/vjepa2-vitg-fpc64-256",
        ),
        "tiny": Size(
            92_232,
            {
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "pred_hidden_size": 24,
                "pred_num_hidden_layers": 2,
                "pred_num_attention_heads": 2,
                "patch_size": 8,
            },
            {"frames": 4, "side": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.latent_prediction:prepare",
    options={
        "large": PredictionRecipe(),
        "huge": PredictionRecipe(),
        "giant": PredictionRecipe(),
        "tiny": PredictionRecipe(momentum=0.996),
    },
)
