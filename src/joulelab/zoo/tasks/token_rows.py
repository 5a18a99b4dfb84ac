"""Rows of token ids of one length for the language tasks, from synthetic or real text; tokenizer choice, loss,
attention.

The tokenizer is the one requested; else that of the weights; else the published one of the size, if it is cached or the
hub is reachable; else the bytes of the text. The choice is reported.

Rows have no padding, and attention is configured accordingly, so that it uses torch's fused kernels. By default
transformers creates masks under torch.compile (5.17: for every encoder), and masks exclude the fast kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from joulelab import lookup
from joulelab.data import hub
from joulelab.data.batches import Rows
from joulelab.data.masking import MOST_SENTINELS
from joulelab.data.splits import SYNTHETIC_SIZES, Split, parse_split
from joulelab.data.synthetic import SyntheticText
from joulelab.data.text import HUB_DOCUMENT_LIMIT, Documents, open_documents
from joulelab.data.tokenize import IDS_NEEDED, Encoding, Vocabulary, encode_bytes, own_vocabulary, pack
from joulelab.errors import ConfigError, NotFoundError
from joulelab.zoo.pretrained import import_transformers, load_tokenizer
from joulelab.zoo.registry import PUBLISHED, SYNTHETIC, WorkloadRequest


@dataclass(frozen=True)
class ChosenTokenizer:
    encoding: Encoding
    vocabulary: Vocabulary
    note: str


def choose_tokenizer(request: WorkloadRequest, config: Any, sentinels: int) -> ChosenTokenizer:
    if request.tokenizer:
        return _pretrained_tokenizer(request.tokenizer, load_tokenizer(request.tokenizer), config)
    published = request.size.hub_id
    if request.weights and request.weights != PUBLISHED:
        found = _try_tokenizer(request.weights)
        return (
            _pretrained_tokenizer(request.weights, found, config)
            if found
            else _byte_tokenizer(config, sentinels, request.weights)
        )
    place = hub.cached_folder(published, "tokenizer_config.json") if published else None
    found = (
        _try_tokenizer(str(place)) if place else _try_tokenizer(published) if published and hub.reachable() else None
    )
    return _pretrained_tokenizer(published, found, config) if found else _byte_tokenizer(config, sentinels, published)


def _try_tokenizer(name: str) -> Any | None:
    try:
        return load_tokenizer(name)
    except NotFoundError:
        return None


def _byte_tokenizer(config: Any, sentinels: int, missed: str) -> ChosenTokenizer:
    size = int(config.vocab_size)
    if size - sentinels < IDS_NEEDED:
        raise ConfigError(
            f"a vocabulary of {size} is too small for bytes ({IDS_NEEDED + sentinels} ids)", "pass a tokenizer"
        )
    vocabulary = own_vocabulary(size, end_of_text(config), sentinels)
    reason = f"; the tokenizer of {missed} is not here" if missed else ""
    note = f"the text is read as bytes, one token each{reason}"
    return ChosenTokenizer(Encoding("bytes", encode_bytes, vocabulary.end_id, size), vocabulary, note)


def _pretrained_tokenizer(name: str, tokenizer: Any, config: Any) -> ChosenTokenizer:
    size = int(config.vocab_size)
    if len(tokenizer) > size:
        raise ConfigError(
            f"the tokenizer of {name} has {len(tokenizer):,} ids, the model {size:,}",
            "name the model's own tokenizer, or leave it out to read the text as bytes",
        )
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id, end_of_text(config))
    end_id = next((int(end) for end in ends if end is not None), 0)
    vocabulary = Vocabulary(range(len(tokenizer)), end_id, tokenizer.mask_token_id, _sentinels(tokenizer, size))

    def encode(texts: list[str]) -> list[list[int]]:
        rows: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return rows

    return ChosenTokenizer(Encoding(name, encode, end_id, size), vocabulary, f"tokenizer: {name}")


def _sentinels(tokenizer: Any, size: int) -> tuple[int, ...]:
    """T5's sentinels, or ids of the model that the tokenizer does not use."""
    known = tokenizer.get_vocab()
    own = [known[name] for name in (f"<extra_id_{number}>" for number in range(MOST_SENTINELS)) if name in known]
    return tuple(own or range(size - 1, max(len(tokenizer), size - MOST_SENTINELS) - 1, -1))


def end_of_text(config: Any) -> int | None:
    end = getattr(config, "eos_token_id", None)
    return int(end) if isinstance(end, int) else None


HELD_OUT_SHARE = 0.05
"""Fraction of the rows, at the end, that is held out if the data has no validation split."""
VALIDATION = Split("validation")


@dataclass(frozen=True)
class TokenRows:
    rows: Rows
    """Indices of the rows of the split."""
    sequences: Callable[[Rows], NDArray[np.int64]]
    """Their ids, [rows, tokens]."""


@dataclass(frozen=True)
class LanguageRows:
    train: TokenRows
    held_out: TokenRows | None
    """None if the text is too short to hold out any rows."""
    vocabulary: Vocabulary
    notes: tuple[str, ...] = ()


def open_rows(request: WorkloadRequest, config: Any, tokens: int, sentinels: int = 0) -> LanguageRows:
    """Rows of `tokens` ids for a model of this configuration; `sentinels` ids are kept free of text for the task."""
    if request.dataset != SYNTHETIC:
        return _text_rows(request, config, tokens, sentinels)
    vocabulary = own_vocabulary(int(config.vocab_size), end_of_text(config), sentinels)
    train, held_out = (_synthetic_rows(vocabulary, tokens, split) for split in (request.wanted_split, VALIDATION))
    return LanguageRows(train, held_out, vocabulary)


def _synthetic_rows(vocabulary: Vocabulary, tokens: int, split: Split) -> TokenRows:
    if split.name not in SYNTHETIC_SIZES:
        raise lookup.unknown("split of the synthetic set", split.name, SYNTHETIC_SIZES)
    # splits differ in their seed, so that no sequence is in two of them
    seed = list(SYNTHETIC_SIZES).index(split.name)
    text = SyntheticText(vocabulary.plain.stop, tokens, seed, reserved=vocabulary.plain.start)
    return TokenRows(split.rows(SYNTHETIC_SIZES[split.name]), text.sequences)


def _text_rows(request: WorkloadRequest, config: Any, tokens: int, sentinels: int) -> LanguageRows:
    documents, split = open_documents(request.dataset, request.text_column), request.wanted_split
    chosen = choose_tokenizer(request, config, sentinels)
    train = _packed_rows(documents, split, chosen.encoding, tokens)
    held_out: TokenRows | None
    notes = [chosen.note]
    if request.validation:
        given = open_documents(request.validation, request.text_column)
        held_out = _packed_rows(given, Split(given.source.splits()[0]), chosen.encoding, tokens)
    elif VALIDATION.name in documents.source.splits() and split.name != VALIDATION.name:
        few = f"validation[:{SYNTHETIC_SIZES['validation']}]"
        held_out = _packed_rows(documents, parse_split(few), chosen.encoding, tokens)
    else:
        train, held_out = _hold_out(train)
        notes.append(
            f"{documents.name} has no validation split: the last {100 * HELD_OUT_SHARE:g} % of rows are held out"
        )
    if documents.is_truncated(split):
        notes.append(
            f"of {documents.name} the first {HUB_DOCUMENT_LIMIT:,} documents are used; name a slice for others"
        )
    return LanguageRows(train, held_out, chosen.vocabulary, tuple(notes))


def _packed_rows(documents: Documents, split: Split, encoding: Encoding, tokens: int) -> TokenRows:
    line = pack(documents, split, encoding)
    count = len(line) // tokens
    if not count:
        raise ConfigError(
            f"{documents.name} ({split}) has {len(line):,} tokens; one row takes {tokens:,}",
            "provide more text, or request fewer tokens per row",
        )
    table = line[: count * tokens].reshape(count, tokens)
    return TokenRows(np.arange(count), lambda rows: table[rows].astype(np.int64))


def _hold_out(whole: TokenRows) -> tuple[TokenRows, TokenRows | None]:
    if len(whole.rows) < 2:
        return whole, None
    kept = len(whole.rows) - max(1, round(HELD_OUT_SHARE * len(whole.rows)))
    return TokenRows(whole.rows[:kept], whole.sequences), TokenRows(whole.rows[kept:], whole.sequences)


# Shapes: B rows, T positions with a target, V vocabulary.


def summed_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """In float32 for any dtype of the logits: a sum of thousands of bf16 terms would have three significant digits."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")


def require_positions(request: WorkloadRequest, config: Any, tokens: int) -> None:
    """Without this check, a position beyond the embeddings would be an index error inside the model, or on a GPU an
    assertion that ends the CUDA context."""
    request.require_positions(getattr(config, "max_position_embeddings", None), tokens)


NAME = "joulelab_unpadded"


def use_unpadded_attention(model: nn.Module) -> None:
    """For models that select their attention by name; models with a custom attention keep it."""
    if getattr(model, "_supports_sdpa", False):
        # No mask function is registered under this name, so transformers creates no masks.
        import_transformers().AttentionInterface.register(NAME, _attend)
        model.set_attn_implementation(NAME)  # type: ignore[operator]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if getattr(module, "is_decoder", False) and not module.is_causal:
        kwargs["position_bias"] = None  # T5's cross-attention has a bias of zeros
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, None, **kwargs)
    return attended


def disable_layerdrop(model: nn.Module) -> None:
    """OPT and BART sample a number for every layer to decide whether to skip it, with probability 0. Reading that
    number causes a graph break under torch.compile, so their layer stacks are marked as not training."""
    stacks: list[Any] = [module for module in model.modules() if getattr(module, "layerdrop", None) == 0.0]
    for module in stacks:
        kind = type(module)
        module.__class__ = type(kind.__name__, (_NeverTraining, kind), {})
        module.train(module.training)
        if hasattr(module, "layernorm_embedding"):
            module.layernorm_embedding.register_forward_hook(_Dropout(module.dropout))


class _NeverTraining(nn.Module):
    """The layers inside switch between training and eval mode as usual."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.training = False
        return self


class _Dropout:
    """The dropout that BART's stacks apply after their embeddings in training mode."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, self._share, module.training)
