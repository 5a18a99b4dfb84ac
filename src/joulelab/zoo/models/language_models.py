"""Language models of the zoo: decoders, encoders and encoder-decoders, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from joulelab.errors import ConfigError
from joulelab.zoo.registry import Size, ZooEntry

# GPT-2 (Radford et al., 2019): decoder with learned positions.
GPT2 = ZooEntry(
    name="gpt2",
    family="language",
    task="causal LM",
    item="sequence",
    about="decoder-only transformer with learned positions",
    architecture="GPT2LMHeadModel",
    sizes={
        "base": Size(124_439_808, {}, {"tokens": 1024}, batch_size=8, hub_id="openai-community/gpt2"),
        "medium": Size(
            354_823_168,
            {"n_layer": 24, "n_embd": 1024, "n_head": 16},
            {"tokens": 1024},
            batch_size=8,
            hub_id="openai-community/gpt2-medium",
        ),
        "large": Size(
            774_030_080,
            {"n_layer": 36, "n_embd": 1280, "n_head": 20},
            {"tokens": 1024},
            batch_size=4,
            hub_id="openai-community/gpt2-large",
        ),
        "xl": Size(
            1_557_611_200,
            {"n_layer": 48, "n_embd": 1600, "n_head": 25},
            {"tokens": 1024},
            batch_size=4,
            hub_id="openai-community/gpt2-xl",
        ),
        "tiny": Size(
            136_960,
            {
                "n_layer": 2,
                "n_embd": 64,
                "n_head": 2,
                "vocab_size": 512,
                "n_positions": 64,
                "bos_token_id": None,
                "eos_token_id": None,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    options={"positions": 1024},
)


# OPT (Zhang et al., 2022): GPT-3's architecture with published weights.


OPT = ZooEntry(
    name="opt",
    family="language",
    task="causal LM",
    item="sequence",
    about="decoder-only transformer; only the 350m size normalizes after its layers and embeds in 512 dimensions",
    architecture="OPTForCausalLM",
    sizes={
        "350m": Size(
            331_196_416,
            {
                "num_hidden_layers": 24,
                "hidden_size": 1024,
                "ffn_dim": 4096,
                "num_attention_heads": 16,
                "word_embed_proj_dim": 512,
                "do_layer_norm_before": False,
            },
            {"tokens": 2048},
            batch_size=4,
            hub_id="facebook/opt-350m",
        ),
        "125m": Size(125_239_296, {}, {"tokens": 2048}, batch_size=4, hub_id="facebook/opt-125m"),
        "1.3b": Size(
            1_315_758_080,
            {
                "num_hidden_layers": 24,
                "hidden_size": 2048,
                "ffn_dim": 8192,
                "num_attention_heads": 32,
                "word_embed_proj_dim": 2048,
            },
            {"tokens": 2048},
            batch_size=2,
            hub_id="facebook/opt-1.3b",
        ),
        "tiny": Size(
            137_088,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "ffn_dim": 256,
                "num_attention_heads": 2,
                "word_embed_proj_dim": 64,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    options={"positions": 2048},
)


# BERT (Devlin et al., 2018): the bidirectional encoder that DistilBERT is distilled from.


BERT = ZooEntry(
    name="bert",
    family="language",
    task="masked LM",
    item="sequence",
    about="bidirectional encoder; 15 % of the tokens are masked, with new masks in every batch",
    architecture="BertForMaskedLM",
    sizes={
        "base": Size(109_514_298, {}, {"tokens": 512}, batch_size=32, hub_id="google-bert/bert-base-uncased"),
        "large": Size(
            335_174_458,
            {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
            {"tokens": 512},
            batch_size=32,
            hub_id="google-bert/bert-large-uncased",
        ),
        "tiny": Size(
            141_888,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    options={"positions": 512, "head": ("cls",)},
)


# DistilBERT (Sanh et al., 2019): BERT with half the layers.


DISTILBERT = ZooEntry(
    name="distilbert",
    family="language",
    task="masked LM",
    item="sequence",
    about="BERT with half its layers; `train` uses no teacher",
    architecture="DistilBertForMaskedLM",
    sizes={
        "base": Size(66_985_530, {}, {"tokens": 512}, batch_size=32, hub_id="distilbert/distilbert-base-uncased"),
        "tiny": Size(
            141_760,
            {
                "n_layers": 2,
                "dim": 64,
                "hidden_dim": 256,
                "n_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    options={"positions": 512, "head": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector")},
)


# ALBERT (Lan et al., 2019): BERT with weights shared by all layers.


ALBERT = ZooEntry(
    name="albert",
    family="language",
    task="masked LM",
    item="sequence",
    about="all layers share one set of weights: few parameters, the FLOPs of BERT",
    architecture="AlbertForMaskedLM",
    sizes={
        "base": Size(
            11_221_680,
            {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
            {"tokens": 512},
            batch_size=32,
            hub_id="albert/albert-base-v2",
        ),
        "large": Size(
            16_795_824,
            {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
            {"tokens": 512},
            batch_size=32,
            hub_id="albert/albert-large-v2",
        ),
        "xlarge": Size(
            54_821_040,
            {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16},
            {"tokens": 512},
            batch_size=16,
            hub_id="albert/albert-xlarge-v2",
        ),
        "xxlarge": Size(206_368_944, {}, {"tokens": 512}, batch_size=8, hub_id="albert/albert-xxlarge-v2"),
        "tiny": Size(
            73_312,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "embedding_size": 32,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    options={"positions": 512, "head": ("predictions",)},
)


# Longformer (Beltagy et al., 2020): sliding-window attention, whose cost is linear in the length.


_LONGFORMER_PUBLISHED = {
    "vocab_size": 50_265,
    "max_position_embeddings": 4098,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}

LONGFORMER = ZooEntry(
    name="longformer",
    family="language",
    task="masked LM",
    item="sequence",
    about="encoder with sliding-window attention; no global tokens, so the projections of global attention are unused",
    architecture="LongformerForMaskedLM",
    sizes={
        "base-4096": Size(
            148_711_257, _LONGFORMER_PUBLISHED, {"tokens": 4096}, batch_size=4, hub_id="allenai/longformer-base-4096"
        ),
        "large-4096": Size(
            434_653_273,
            {
                **_LONGFORMER_PUBLISHED,
                "num_hidden_layers": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
            },
            {"tokens": 4096},
            batch_size=2,
            hub_id="allenai/longformer-large-4096",
        ),
        "tiny": Size(
            166_912,
            {
                **_LONGFORMER_PUBLISHED,
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "attention_window": 8,
                "vocab_size": 512,
                "max_position_embeddings": 66,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare_sliding_window",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    # positions are counted from the padding's id + 1, as in RoBERTa
    options={"head": ("lm_head",), "idle": ("_global.",), "unused_positions": 2},
)


# BigBird (Zaheer et al., 2020): block-sparse attention (window, global and random blocks), linear in the length.


_BLOCK, _RANDOM_BLOCKS = 64, 3  # as published


def require_blocks(settings: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """At a length that its blocks would cover completely, transformers switches to full attention without a warning."""
    block, at_random = settings.get("block_size", _BLOCK), settings.get("num_random_blocks", _RANDOM_BLOCKS)
    needed = (5 + 2 * at_random) * block
    if tokens <= needed or tokens % block:
        raise ConfigError(
            f"bigbird's sparse attention needs more than {needed} tokens in blocks of {block}; {tokens} were requested",
            f"request a multiple of {block}, at least {needed + block}",
        )
    return {}


BIGBIRD = ZooEntry(
    name="bigbird",
    family="language",
    task="masked LM",
    item="sequence",
    about="encoder with block-sparse attention for long texts",
    architecture="BigBirdForMaskedLM",
    sizes={
        "base": Size(128_111_286, {}, {"tokens": 4096}, batch_size=4, hub_id="google/bigbird-roberta-base"),
        "large": Size(
            360_225_974,
            {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
            {"tokens": 4096},
            batch_size=2,
            hub_id="google/bigbird-roberta-large",
        ),
        "tiny": Size(
            146_048,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
                "block_size": 4,
                "num_random_blocks": 1,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare_block_sparse",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    options={"positions": 4096, "head": ("cls",), "idle": (".pooler.",), "settings": require_blocks},
)


# Reformer (Kitaev et al., 2020): attention within hash buckets, and reversible layers that recompute activations.


_CHUNK = 64  # as published, for both kinds of attention


def fit_positions(settings: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Its positions are the cells of a grid, and in training the input has to fill the grid; nor may a chunk be cut."""
    chunk = settings.get("lsh_attn_chunk_length", _CHUNK)
    columns = settings.get("axial_pos_shape", (64, 64))[1]
    if tokens % math.lcm(columns, chunk):
        raise ConfigError(
            f"reformer's positions come in rows of {columns} and chunks of {chunk}; {tokens} tokens were requested",
            f"request a multiple of {math.lcm(columns, chunk)}",
        )
    # what transformers would choose at the first batch: about two buckets per chunk, a power of 2
    buckets = 2 ** ((2 * tokens // chunk).bit_length() - 1)
    shape = (tokens // columns, columns)
    return {"axial_pos_shape": shape, "max_position_embeddings": tokens, "num_buckets": buckets}


REFORMER = ZooEntry(
    name="reformer",
    family="language",
    task="masked LM",
    item="sequence",
    about="encoder with hashed attention and reversible layers; base is transformers' default of 6 M parameters over "
    "320 ids, as milabench runs it; the published checkpoints (enwik8) are causal, so only their size is used",
    architecture="ReformerForMaskedLM",
    sizes={
        # no padding id, because rows are not padded: with one, every forward pass would synchronize with the GPU to
        # search for it
        "base": Size(5_975_872, {"pad_token_id": None}, {"tokens": 4096}, batch_size=32),
        "enwik8": Size(
            149_182_722,
            {
                "attn_layers": ("local", "local", "lsh", "local") * 3,
                "hidden_size": 1024,
                "feed_forward_size": 4096,
                "num_attention_heads": 8,
                "attention_head_size": 128,
                "axial_pos_shape": (128, 512),
                "axial_pos_embds_dim": (256, 768),
                "vocab_size": 258,
                "pad_token_id": None,
            },
            {"tokens": 65_536},
            batch_size=1,
        ),
        "tiny": Size(
            161_856,
            {
                "attn_layers": ("local", "lsh"),
                "hidden_size": 64,
                "feed_forward_size": 128,
                "num_attention_heads": 2,
                "attention_head_size": 32,
                "local_attn_chunk_length": 8,
                "lsh_attn_chunk_length": 8,
                "axial_pos_shape": (4, 8),
                "axial_pos_embds_dim": (16, 48),
                "vocab_size": 512,
                "pad_token_id": None,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    # transformers creates a bias for the head but does not apply it
    options={"head": ("lm_head",), "idle": ("lm_head.bias",), "settings": fit_positions},
)


# T5 (Raffel et al., 2020): encoder-decoder, trained on span corruption as in its pretraining.


# Input and target of 1,024 tokens, as in milabench; the published pretraining has 512 and 114.
_SHAPE = {"tokens": 1024, "target_tokens": 1024}
_T5_DECODER = {"decoder_start_token_id": 0}

T5 = ZooEntry(
    name="t5",
    family="language",
    task="sequence to sequence",
    item="sequence",
    about="encoder-decoder with relative positions; spans are replaced by sentinels, and the decoder predicts them",
    architecture="T5ForConditionalGeneration",
    sizes={
        "small": Size(60_506_624, _T5_DECODER, _SHAPE, batch_size=16, hub_id="google-t5/t5-small"),
        "base": Size(
            222_903_552,
            {**_T5_DECODER, "num_layers": 12, "d_model": 768, "d_ff": 3072, "num_heads": 12},
            _SHAPE,
            batch_size=16,
            hub_id="google-t5/t5-base",
        ),
        "large": Size(
            737_668_096,
            {**_T5_DECODER, "num_layers": 24, "d_model": 1024, "d_ff": 4096, "num_heads": 16},
            {"tokens": 512, "target_tokens": 512},
            batch_size=8,
            hub_id="google-t5/t5-large",
        ),
        "tiny": Size(
            263_040,
            {**_T5_DECODER, "num_layers": 2, "d_model": 64, "d_kv": 32, "d_ff": 256, "num_heads": 2, "vocab_size": 512},
            {"tokens": 32, "target_tokens": 16},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare_span_corruption",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
)


# BART (Lewis et al., 2020): denoising encoder-decoder.


# transformers' defaults have the large model's shape but not its dropout
_BART_DROPOUT = {"attention_dropout": 0.1, "activation_dropout": 0.1}

BART = ZooEntry(
    name="bart",
    family="language",
    task="sequence to sequence",
    item="sequence",
    about="30 % of the text is masked, each span by one mask token; the decoder predicts the whole text of `tokens`",
    architecture="BartForConditionalGeneration",
    sizes={
        "base": Size(
            139_420_416,
            {
                **_BART_DROPOUT,
                "encoder_layers": 6,
                "decoder_layers": 6,
                "d_model": 768,
                "encoder_ffn_dim": 3072,
                "decoder_ffn_dim": 3072,
                "encoder_attention_heads": 12,
                "decoder_attention_heads": 12,
            },
            {"tokens": 512},
            batch_size=16,
            hub_id="facebook/bart-base",
        ),
        "large": Size(406_291_456, _BART_DROPOUT, {"tokens": 512}, batch_size=16, hub_id="facebook/bart-large"),
        "tiny": Size(
            274_944,
            {
                "encoder_layers": 2,
                "decoder_layers": 2,
                "d_model": 64,
                "encoder_ffn_dim": 256,
                "decoder_ffn_dim": 256,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.language_modeling:prepare_infilling",
    dataset="text by path or hub id (allenai/c4)",
    dataset_kind="documents",
    options={"positions": 1024},
)
