"""ViT-g/14: DINOv2's largest backbone, trained as its authors trained it."""

from joulelab.zoo.registry import Size, ZooEntry
from joulelab.zoo.tasks.self_supervised_recipes import DistillationRecipe

MODEL = ZooEntry(
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
    dataset="a folder of images, one sub-folder a class (the classes are not looked at)",
    options={
        "giant": DistillationRecipe(),
        "tiny": DistillationRecipe(prototypes=64, head_width=64, bottleneck=32, local_crops=2, momentum=0.9),
    },
)
