"""Private APIs of torch and transformers that joulelab touches: what each must do, and where it is used.

Private means undocumented: a name with an underscore, or a module that upstream does not promise to keep. Each entry
has a test in `tests/data/test_upstream.py` that fails when upstream renames it or changes what we rely on, and a test
searches the source for uses that are not listed. Public APIs are not listed; their floors are in pyproject.toml.
"""

from __future__ import annotations

from dataclasses import dataclass

TRANSFORMERS_FLOOR = (5, 10)
"""The oldest transformers whose private APIs are as listed; the same as in pyproject.toml."""


@dataclass(frozen=True)
class PrivateApi:
    name: str
    """As it is written in the source."""
    relied_on: str
    used_in: tuple[str, ...]
    """Files under src/joulelab."""


PRIVATE_APIS = (
    PrivateApi(
        "torch._foreach_mul_",
        "multiplies a list of tensors in place, by a number or by a tensor on their device",
        ("train/trainer.py",),
    ),
    PrivateApi(
        "torch._foreach_lerp_", "moves a list of tensors toward another in place", ("zoo/tasks/masked_patches.py",)
    ),
    PrivateApi(
        "torch._scaled_mm",
        "multiplies 8-bit matrices, the second one stored by columns, and applies a float32 scale of each",
        ("train/fp8_products.py",),
    ),
    PrivateApi(
        "torch._addmm_activation",
        "GELU of a matrix product plus a bias, at most 0.0005 off the exact one",
        ("distill/distilbert/objective.py",),
    ),
    PrivateApi(
        "torch._dynamo.config",
        "has recompile_limit and accumulated_recompile_limit",
        ("train/optim.py", "infer/recipes.py"),
    ),
    PrivateApi(
        "torch._dynamo.callback",
        "callback_handler calls functions at the start and end of each compilation and can forget them",
        ("train/optim.py",),
    ),
    PrivateApi(
        "torch._dynamo.mark_static_address",
        "marks a tensor whose address stays, for CUDA graphs",
        ("infer/decoding.py",),
    ),
    PrivateApi(
        "torch._dynamo.exc", "TorchDynamoException is the base of errors of compilation", ("distill/chunked.py",)
    ),
    PrivateApi(
        "torch._subclasses.fake_tensor",
        "FakeTensorMode computes shapes without data; its tensors are FakeTensor",
        ("zoo/cost.py",),
    ),
    PrivateApi(
        "torch.utils._python_dispatch",
        "TorchDispatchMode sees every operation with its arguments",
        ("zoo/cost.py", "infer/workload.py"),
    ),
    PrivateApi("torch.utils._pytree", "tree_leaves lists the tensors of nested outputs", ("infer/workload.py",)),
    PrivateApi("aten._local_scalar_dense", "is the operation behind Tensor.item()", ("zoo/cost.py",)),
    PrivateApi(
        "aten._flash_attention_forward",
        "attends within documents given by their starts, without padding (GPU only: its signature is tested)",
        ("data/chat/packing.py",),
    ),
    PrivateApi(
        "aten._scaled_dot_product_cudnn_attention",
        "is the attention of rows without a mask by cuDNN (GPU only: its signature is tested, each device is tried)",
        ("data/chat/packing.py",),
    ),
    PrivateApi(
        "transformers.masking_utils",
        "AttentionMaskInterface registers a mask function by name; sdpa_mask is that of SDPA",
        ("data/chat/packing.py", "infer/generation/static_decoder.py"),
    ),
    PrivateApi(
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward and repeat_kv",
        ("data/chat/packing.py", "infer/generation/static_decoder.py", "zoo/tasks/token_rows.py"),
    ),
    PrivateApi(
        "cumulative_length",
        "of a layer of StaticCache is the position of the next token, a tensor that can be set back; with a sliding "
        "window, cumulative_length_int is the same on the host",
        ("infer/generation/cache.py",),
    ),
    PrivateApi(
        "transformers.models.big_bird.modeling_big_bird",
        "BigBirdBlockSparseAttention has query, key, value, num_attention_heads and block_size",
        ("zoo/tasks/masked_lm.py",),
    ),
    PrivateApi(
        "transformers.models.longformer.modeling_longformer",
        "LongformerSelfAttention has query, key, value, num_heads and one_sided_attn_window_size",
        ("zoo/tasks/masked_lm.py",),
    ),
    PrivateApi(
        "transformers.initialization",
        "no_init_weights leaves the weights of a model that is built inside uninitialized",
        ("zoo/pretrained.py",),
    ),
    PrivateApi(
        "transformers.modeling_gguf_pytorch_utils",
        "load_gguf_checkpoint returns the tensors of a file for a given model, with a bar named tqdm",
        ("zoo/pretrained.py",),
    ),
    PrivateApi(
        "transformers.utils.chat_template_utils",
        "render_jinja_template returns texts and the spans of {% generation %} blocks",
        ("data/chat/templates.py",),
    ),
    PrivateApi(
        "._attn_implementation",
        "of a model's config: the name that set_attn_implementation set",
        ("infer/generation/static_decoder.py", "distill/preferences/preference_loss.py"),
    ),
    PrivateApi(
        "_supports_sdpa",
        "of a model's class: whether its attention can be chosen by name",
        ("data/chat/packing.py", "infer/generation/static_decoder.py", "zoo/tasks/token_rows.py"),
    ),
)
