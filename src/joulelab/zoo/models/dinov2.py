"""DINOv2: vision transformers that learn without labels."""

from joulelab.zoo.registry import Size, ZooEntry
from joulelab.zoo.tasks.self_supervised_recipes import DistillationRecipe

_SHAPE = {"side": 224, "local_side": 98}
_SMALL_HEADS = DistillationRecipe(prototypes=65_536, bottleneck=256, skipped_share=0.3, momentum=0.992)

MODEL = ZooEntry(
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
            _SHAPE,
            batch_size=32,
            hub_id="facebook/dinov2-large",
        ),
        "small": Size(
            66_202_368,
            {"hidden_size": 384, "num_attention_heads": 6},
            _SHAPE,
            batch_size=64,
            hub_id="facebook/dinov2-small",
        ),
        "base": Size(131_871_744, {}, _SHAPE, batch_size=64, hub_id="facebook/dinov2-base"),
        "giant": Size(
            1_251_696_384,
            {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True},
            _SHAPE,
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
    dataset="a folder of images, one sub-folder a class (the classes are not looked at)",
    options={
        "large": DistillationRecipe(),
        "small": _SMALL_HEADS,
        "base": _SMALL_HEADS,
        "giant": DistillationRecipe(),
        "tiny": DistillationRecipe(prototypes=64, head_width=64, bottleneck=32, local_crops=2, momentum=0.9),
    },
)
