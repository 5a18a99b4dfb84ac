"""V-JEPA 2: learns from video by predicting features, not pixels, of what is hidden."""

from joulelab.zoo.registry import Size, ZooEntry
from joulelab.zoo.tasks.self_supervised_recipes import PredictionRecipe

_SHAPE = {"frames": 16, "side": 224}

MODEL = ZooEntry(
    name="vjepa2",
    family="vision",
    task="masked latent prediction",
    item="clip",
    about="a ViT-L encoder of 303.9 M and a predictor of 22.1 M; the 632 M often quoted are the encoder of the huge "
    "size; clips of 16 frames here, 64 of 256 pixels as published",
    architecture="VJEPA2Model",
    sizes={
        "large": Size(325_971_328, {}, _SHAPE, batch_size=24, hub_id="facebook/vjepa2-vitl-fpc64-256"),
        "huge": Size(
            653_930_880,
            {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16},
            _SHAPE,
            batch_size=24,
            hub_id="facebook/vjepa2-vith-fpc64-256",
        ),
        "giant": Size(
            1_034_555_264,
            {"hidden_size": 1408, "num_hidden_layers": 40, "num_attention_heads": 22, "mlp_ratio": 48 / 11},
            _SHAPE,
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
