"""The private APIs of torch and transformers that we use still do what we rely on; all uses are listed."""

import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from joulelab.data.upstream import PRIVATE_APIS, TRANSFORMERS_FLOOR
from joulelab.errors import DependencyMissing
from joulelab.infer.generation.cache import rewind_cache
from joulelab.zoo.pretrained import import_transformers

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "joulelab"
PRIVATE = re.compile(
    r"torch\._[a-z]\w+(?:\.\w+)*|torch\.utils\._\w+|\baten\._\w+|\._attn_implementation\b|\b_supports_sdpa\b|\bcumulative_length\b"
    r"|transformers\.(?:initialization|masking_utils|integrations|models|modeling_\w+|utils\.chat_template_utils)[\w.]*"
)
TESTS = {}


def checks(name):
    """Registers the test of one entry of the list."""
    return lambda function: TESTS.setdefault(name, function)


def uses():
    """(what is used, file) for every private name in the source."""
    for path in SOURCE.rglob("*.py"):
        if path.name != "upstream.py":
            found = PRIVATE.findall(path.read_text())
            yield from {(name, str(path.relative_to(SOURCE))) for name in found}


def test_every_use_is_listed_and_everything_listed_is_used():
    listed = {(api.name, file) for api in PRIVATE_APIS for file in api.used_in}
    unlisted = [use for use in uses() if not any(use[1] == file and use[0].startswith(name) for name, file in listed)]
    assert unlisted == []
    used = list(uses())
    unused = [one for one in listed if not any(use[1] == one[1] and use[0].startswith(one[0]) for use in used)]
    assert unused == []


def test_every_entry_has_its_test():
    assert set(TESTS) == {api.name for api in PRIVATE_APIS}


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: api.name)
def test_upstream_still_does_what_we_rely_on(api):
    TESTS[api.name]()


@checks("torch._foreach_mul_")
def multiplied():
    tensors = [torch.ones(2), torch.ones(3)]
    torch._foreach_mul_(tensors, torch.tensor(2.0))
    torch._foreach_mul_(tensors, 3.0)
    assert [tensor.tolist() for tensor in tensors] == [[6.0] * 2, [6.0] * 3]


@checks("torch._foreach_lerp_")
def moved():
    tensors = [torch.zeros(2)]
    torch._foreach_lerp_(tensors, [torch.ones(2)], 0.25)
    assert tensors[0].tolist() == [0.25, 0.25]


@checks("torch._scaled_mm")
def multiplied_in_8_bits():
    left, right = torch.eye(16).to(torch.float8_e5m2), torch.full((32, 16), 2.0).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.5)
    found = torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16 and torch.equal(found, torch.full((16, 32), 0.5, dtype=torch.bfloat16))


@checks("torch._addmm_activation")
def gelu_of_a_product():
    generator = torch.Generator().manual_seed(0)
    bias, rows, weight = (torch.randn(*size, generator=generator) for size in ((4,), (8, 3), (3, 4)))
    found = torch._addmm_activation(bias, rows, weight, use_gelu=True)
    torch.testing.assert_close(found, torch.nn.functional.gelu(rows @ weight + bias), atol=5e-4, rtol=0)


@checks("torch._dynamo.config")
def limits():
    assert torch._dynamo.config.recompile_limit > 0 and torch._dynamo.config.accumulated_recompile_limit > 0


@checks("torch._dynamo.callback")
def called_back():
    from torch._dynamo.callback import callback_handler

    seen = []
    start, end = (lambda *_: seen.append("start")), (lambda *_: seen.append("end"))
    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        torch.compile(lambda x: x + 41.5, backend="eager")(torch.ones(2))
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)
    assert seen == ["start", "end"]
    torch.compile(lambda x: x + 42.5, backend="eager")(torch.ones(2))
    assert len(seen) == 2


@checks("torch._dynamo.mark_static_address")
def marked():
    torch._dynamo.mark_static_address(torch.zeros(2))


@checks("torch._dynamo.exc")
def base_of_errors():
    from torch._dynamo import exc

    assert issubclass(exc.BackendCompilerFailed, exc.TorchDynamoException)


@checks("torch._subclasses.fake_tensor")
def shapes_without_data():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        made = nn.Linear(3, 5)(torch.empty(2, 3))
    assert isinstance(made, FakeTensor) and made.shape == (2, 5)


def seen_by_a_mode(work):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    seen = []
    with Watch():
        work()
    return seen


@checks("torch.utils._python_dispatch")
def operations():
    one = torch.ones(2)
    ((func, args),) = seen_by_a_mode(lambda: one.mul(2.0))
    assert func is torch.ops.aten.mul.Tensor and args[0] is one


@checks("aten._local_scalar_dense")
def items():
    seen = [func for func, _ in seen_by_a_mode(lambda: torch.ones(1).item())]
    assert torch.ops.aten._local_scalar_dense.default in seen


@checks("torch.utils._pytree")
def leaves():
    from torch.utils._pytree import tree_leaves

    one, two = torch.ones(1), torch.ones(2)
    found = tree_leaves({"a": [one, (two,)]})
    assert found[0] is one and found[1] is two


@checks("aten._flash_attention_forward")
def signature():
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    positional = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert names[:10] == [*positional, "return_debug_mask"]
    assert {"scale", "window_size_left", "window_size_right"} <= set(names[10:])
    assert schema.returns[0].name == "output"


@checks("aten._scaled_dot_product_cudnn_attention")
def signature_of_cudnn():
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    names = [argument.name for argument in schema.arguments]
    positional = ["query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"]
    assert names == [*positional, "return_debug_mask", "scale"] and schema.returns[0].name == "output"


@checks("transformers.masking_utils")
def masks():
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionMaskInterface.register("joulelab_test", sdpa_mask)
    assert AttentionMaskInterface()["joulelab_test"] is sdpa_mask


@checks("transformers.integrations.sdpa_attention")
def attention():
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    attended, weights = sdpa_attention_forward(module, query, key, value, None, scaling=0.5, is_causal=True)
    expected = nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, 2), repeat_kv(value, 2), is_causal=True, scale=0.5
    )
    assert weights is None
    torch.testing.assert_close(attended, expected.transpose(1, 2))
    torch.testing.assert_close(repeat_kv(key, 2), key.repeat_interleave(2, dim=1))


@checks("transformers.models.big_bird.modeling_big_bird")
def block_sparse():
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    module = BigBirdBlockSparseAttention(transformers.BigBirdConfig(hidden_size=8, num_attention_heads=2, block_size=4))
    assert (module.num_attention_heads, module.block_size) == (2, 4)
    assert all(isinstance(part, nn.Linear) for part in (module.query, module.key, module.value))


@checks("transformers.models.longformer.modeling_longformer")
def sliding_window():
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = transformers.LongformerConfig(hidden_size=8, num_attention_heads=2, attention_window=[6])
    module = LongformerSelfAttention(config, layer_id=0)
    assert (module.num_heads, module.one_sided_attn_window_size) == (2, 3)
    assert all(isinstance(part, nn.Linear) for part in (module.query, module.key, module.value))


@checks("transformers.initialization")
def weights_without_initialization():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    before = torch.get_rng_state()
    with importlib.import_module("transformers.initialization").no_init_weights():
        model = LlamaForCausalLM(config)
    assert torch.equal(torch.get_rng_state(), before)  # no random number was drawn
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@checks("transformers.modeling_gguf_pytorch_utils")
def gguf_reader():
    reader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    parameters = inspect.signature(reader.load_gguf_checkpoint).parameters
    assert {"return_tensors", "model_to_load"} <= set(parameters) and callable(reader.tqdm)


@checks("transformers.utils.chat_template_utils")
def templates():
    render = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
    template = "{% for m in messages %}> {% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    texts, spans = render(
        conversations=[[{"role": "assistant", "content": "yes"}]],
        chat_template=template,
        return_assistant_tokens_mask=True,
    )
    assert (texts, spans) == (["> yes"], [[(2, 5)]])


def tiny_llama():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes))


@checks("._attn_implementation")
def name_of_attention():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


@checks("cumulative_length")
def set_back():
    sliding = transformers.MistralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    for model in (tiny_llama(), transformers.MistralForCausalLM(sliding).eval()):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        ids_BT = torch.arange(6)[None]
        first = model(ids_BT, past_key_values=cache, use_cache=True).logits
        assert cache.get_seq_length() == 6
        rewind_cache(cache, 0)
        torch.testing.assert_close(model(ids_BT, past_key_values=cache, use_cache=True).logits, first)


@checks("_supports_sdpa")
def chosen_by_name():
    assert tiny_llama()._supports_sdpa is True


def test_an_older_transformers_is_refused_with_the_version_that_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.48.0"))
    with pytest.raises(DependencyMissing, match=r"transformers 4\.48\.0 is installed; 5\.10 or newer is needed"):
        import_transformers()


def test_the_floor_is_the_one_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"transformers>={'.'.join(map(str, TRANSFORMERS_FLOOR))}" in extras["train"]
