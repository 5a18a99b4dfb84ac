"""Load and save pretrained models and tokenizers: a sample, a folder, a GGUF file or a hub id.

All loading and saving through transformers is here, so that its slow import, its log output and its random heads from
the global generator are handled once.

GGUF: transformers indexes the memory-mapped vocabulary element by element, a slow Python call for each of 150,000
tokens, and rebuilds the table of tensor names for every module. `fast_gguf_reader` patches both, which saves seconds
and energy per load.
"""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.data import hub, sources
from joulelab.data.upstream import TRANSFORMERS_FLOOR
from joulelab.errors import ConfigError, DependencyMissing, JoulelabError, NotFoundError
from joulelab.zoo.registry import WorkloadRequest


def cast_for_inference(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast weights and buffers in place, except the frequencies of rotary embeddings: rounded to 8 bits they move the
    angle of position 1,000 by whole radians. `from_pretrained(dtype=...)` of transformers keeps them, too."""
    kept = [
        (part, name, buffer)
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    model.to(dtype)
    for part, name, buffer in kept:
        setattr(part, name, buffer)
    return model


@contextmanager
def fast_gguf_reader() -> Iterator[None]:
    """Patch the package gguf inside the block; does nothing if it is not installed."""
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError:
        yield
        return
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = _plain_array_reader(reader), cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _plain_array_reader(reader: Any) -> Any:
    import numpy as np

    class PlainReader(reader):  # type: ignore[misc]
        """The base class assigns its memory map to `data`; a plain array view keeps it open and indexes faster."""

        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = mapped.view(np.ndarray)

    return PlainReader


_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class _ModelLocation:
    """Where transformers loads from: a folder or hub id, and the GGUF file in it, if any."""

    name: str  # as the user wrote it
    folder_or_id: str
    gguf_file: str | None = None
    revision: str | None = None  # commit on the hub
    hint: str = "a model folder has config.json and model.safetensors; a .gguf file must be complete"

    @property
    def arguments(self) -> dict[str, Any]:
        chosen = {"gguf_file": self.gguf_file, "revision": self.revision}
        # Without the last one, transformers asks the user at the terminal whether to run the model's own code.
        return {name: value for name, value in chosen.items() if value} | {"trust_remote_code": False}


def load_tokenizer(name: str) -> Any:
    tokenizer = _read("AutoTokenizer", _locate_model(name))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and type(backend.model).__name__ == "BPE":
        # Removing spaces before punctuation is for WordPiece; some files and transformers 5.17 ask for it anyway.
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _read(kind: str, place: _ModelLocation) -> Any:
    """Tokenizer or configuration, by the class of transformers that loads it."""
    if place.gguf_file:  # takes seconds, so it is cached for the members of a comparison
        state = (Path(place.folder_or_id) / place.gguf_file).stat()
        return copy.deepcopy(_read_gguf(kind, place, state.st_mtime_ns, state.st_size))
    return _read_files(kind, place)


@lru_cache(maxsize=4)
def _read_gguf(kind: str, place: _ModelLocation, modified_ns: int, size_bytes: int) -> Any:
    return _read_files(kind, place)


def _read_files(kind: str, place: _ModelLocation) -> Any:
    transformers = import_transformers()
    what = "tokenizer" if kind == "AutoTokenizer" else "model"
    with quiet_transformers(transformers), _explain_load_errors(place, what), fast_gguf_reader():
        return getattr(transformers, kind).from_pretrained(place.folder_or_id, **place.arguments)


def load_classifier(name: str, num_labels: int, seed: int) -> torch.nn.Module:
    """An encoder with a classification head. A missing head, or one of another size, is initialized from the seed."""
    if num_labels < 2:
        raise ConfigError(f"a classifier needs 2 or more classes, got {num_labels}", "check the labels")
    place = _locate_model(name)
    if place.gguf_file:  # avoids reading the file, which takes seconds
        _refuse_causal_lm(place, ["ForCausalLM"])
    transformers = import_transformers()
    with quiet_transformers(transformers), _explain_load_errors(place), seeded_init(seed):
        config = transformers.AutoConfig.from_pretrained(place.folder_or_id, num_labels=num_labels, **place.arguments)
        _refuse_causal_lm(place, config.architectures or [])
        model: torch.nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(
            place.folder_or_id, config=config, ignore_mismatched_sizes=True, **place.arguments
        )
    return model


def load_causal_lm(name: str) -> torch.nn.Module:
    place = _locate_model(name)
    transformers = import_transformers()
    with quiet_transformers(transformers), _explain_load_errors(place), fast_gguf_reader():
        if place.gguf_file:
            return _dequantize_gguf(transformers, place)
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            place.folder_or_id, **place.arguments
        )
    return model


def encoder_config(name: str) -> Any:
    """Configuration of an encoder; raises ConfigError for causal language models."""
    place = _locate_model(name)
    if place.gguf_file:
        _refuse_causal_lm(place, ["ForCausalLM"])
    transformers = import_transformers()
    with quiet_transformers(transformers), _explain_load_errors(place):
        config = transformers.AutoConfig.from_pretrained(place.folder_or_id, **place.arguments)
    _refuse_causal_lm(place, config.architectures or [])
    return config


def encoder_positions(config: Any) -> int | None:
    """Tokens that an encoder of this configuration can read; None: no limit is known. RoBERTa and its relatives count
    positions from the id of the padding on, so that the first embeddings belong to no token."""
    with torch.device("meta"):
        model = import_transformers().AutoModel.from_config(config)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    positions = getattr(config, "max_position_embeddings", None)
    return None if positions is None else int(positions)


def causal_lm_config(name: str) -> Any:
    """Configuration of a causal language model; raises ConfigError for other models."""
    place = _locate_model(name)
    config = _read("AutoConfig", place)
    named = config.architectures or []
    if named and not any(architecture.endswith(_CAUSAL_ENDINGS) for architecture in named):
        raise ConfigError(
            f"{place.name} is not a causal language model but a {', '.join(named)}",
            "use one such as sample:smollm2",
        )
    return config


def declared_generation(name: str) -> Any:
    """`config` and `generation_config` (None if there is none) of a model, without its weights."""
    place = _locate_model(name)
    transformers = import_transformers()
    found = None
    with quiet_transformers(transformers), suppress(OSError):
        found = transformers.GenerationConfig.from_pretrained(
            place.folder_or_id, **({"revision": place.revision} if place.revision else {})
        )
    return SimpleNamespace(config=causal_lm_config(name), generation_config=found)


def servable_model(name: str) -> tuple[str, str | None] | None:
    """Folder or hub id and revision, as other programs load it; None for a file that only some of them read."""
    place = _locate_model(name)
    return None if place.gguf_file else (place.folder_or_id, place.revision)


def load_pretrained(kind: Any, name: str) -> torch.nn.Module:
    """`kind.from_pretrained` with errors that name the model and a fix."""
    place = _locate_model(name)
    with quiet_transformers(import_transformers()), _explain_load_errors(place):
        model: torch.nn.Module = kind.from_pretrained(place.folder_or_id, **place.arguments)
    return model


def weights_identity(name: str) -> str:
    """Identity of the weights for an artifact's key: hash of the files, or name and commit on the hub."""
    source = sources.parse(name)
    if source.path is None:
        return f"{source.repo}@{hub.commit_of(source, 'model')}"
    return sources.content_hash(source.path)


def save_hf(model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """Save in Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers(import_transformers()), _save_on_every_rank(model):
        model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)


@contextmanager
def _save_on_every_rank(model: Any) -> Iterator[None]:
    """Newer versions of transformers save on the first rank only; here each rank has its own folder."""
    model.__dict__["should_save_on_this_rank"] = lambda *ignored, **also_ignored: True
    try:
        yield
    finally:
        del model.__dict__["should_save_on_this_rank"]


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise DependencyMissing(
            "the package 'transformers' is not installed", 'pip install "joulelab[train]"'
        ) from error
    if tuple(int(number) for number in transformers.__version__.split(".")[:2]) < TRANSFORMERS_FLOOR:
        floor = ".".join(map(str, TRANSFORMERS_FLOOR))
        raise DependencyMissing(
            f"transformers {transformers.__version__} is installed; {floor} or newer is needed",
            f'pip install "transformers>={floor}"',
        )
    return transformers


def import_model_classes() -> None:
    """Import transformers' model classes before a stage loads the first model. The import takes longer than loading a
    small model and would be billed to the teacher."""
    _ = import_transformers().PreTrainedModel


@contextmanager
def seeded_init(seed: int) -> Iterator[None]:
    """Random initialization inside depends only on the seed; the random state outside is unchanged."""
    # Models are built on the CPU, so the GPU generators are left alone.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _locate_model(name: str) -> _ModelLocation:
    source = sources.parse(name)
    if source.path is None:
        commit = hub.commit_of(source, "model")
        return _ModelLocation(name, source.repo, revision=commit, hint=sources.hub_hint(source.repo))
    if source.kind == "sample" and sources.find_sample(source.name).kind == "labeled-text":
        raise ConfigError(f"{name} is labeled text, not a model", "use sample:minilm or sample:smollm2")
    if source.path.is_dir():
        return _ModelLocation(name, str(source.path))
    if source.path.suffix.lower() == ".gguf":
        return _ModelLocation(name, str(source.path.parent), source.path.name)
    raise ConfigError(
        f"{source.path.absolute()} is not a loadable model",
        "pass a folder in Hugging Face format, a .gguf file, a hub id or a sample",
    )


def _refuse_causal_lm(place: _ModelLocation, architectures: Sequence[str]) -> None:
    if any(architecture.endswith(_CAUSAL_ENDINGS) for architecture in architectures):
        raise ConfigError(
            f"{place.name} is a causal language model; a classifier needs an encoder",
            "use an encoder such as sample:minilm",
        )


def _dequantize_gguf(transformers: Any, place: _ModelLocation) -> torch.nn.Module:
    """A float32 model with the dequantized weights of a GGUF file.

    `from_pretrained(gguf_file=...)` returns a model marked as quantized, which transformers refuses to save. Loading
    the same tensors into a plain model avoids that.
    """
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    config = _read("AutoConfig", place)
    # The file has every weight: initializing them first would take half of the time.
    with importlib.import_module("transformers.initialization").no_init_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    file = Path(place.folder_or_id) / (place.gguf_file or "")
    bar, reader.tqdm = reader.tqdm, lambda items, **settings: items  # ignores the setting that disables progress bars
    try:
        tensors = reader.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    finally:
        reader.tqdm = bar
    loaded = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    # A tied output layer is the embedding and is not in the file.
    absent = set(loaded.missing_keys) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if absent or loaded.unexpected_keys:
        raise JoulelabError(
            f"{file} does not match its architecture: missing {sorted(absent)[:3]}, "
            f"unexpected {loaded.unexpected_keys[:3]}",
            "this GGUF file may need another version of transformers",
        )
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def quiet_transformers(transformers: Any) -> Iterator[None]:
    """Suppress progress bars and load reports; a new head is intended and not worth a warning."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _explain_load_errors(place: _ModelLocation, what: str = "model") -> Iterator[None]:
    """transformers raises the same two classes for "no such model", "no network" and "no config.json"."""
    from safetensors import SafetensorError

    try:
        yield
    except (pickle.UnpicklingError, SafetensorError) as error:
        raise ConfigError(
            f"the weights of '{place.name}' cannot be read: the file is corrupted, or contains more than tensors",
            "fetch the model again, as safetensors",
        ) from error
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):  # of a model, a tokenizer or a configuration
            raise ConfigError(
                f"'{place.name}' needs Python code in its files, and joulelab does not run code of models",
                "use a model whose architecture is part of transformers, or name a .py file that defines MODEL",
            ) from error
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        if what == "tokenizer" and Path(place.folder_or_id).is_dir():
            raise NotFoundError(
                f"cannot load a tokenizer from '{place.name}': its tokenizer.json or tokenizer_config.json is missing "
                f"or corrupted ({first_line.rstrip(': ')})",
                "save it with tokenizer.save_pretrained(FOLDER)",
            ) from error
        raise NotFoundError(f"cannot load a model from '{place.name}': {first_line}", place.hint) from error
    except ImportError as error:
        raise DependencyMissing(f"'{place.name}' cannot be loaded: {error}", 'pip install "joulelab[train]"') from error


WEIGHTS = "model.safetensors"


def save_weights(model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save in Hugging Face format if the model supports it, else as safetensors. `weights`: gathered weights of a
    sharded model."""
    if hasattr(model, "save_pretrained"):
        with quiet_transformers(import_transformers()):
            model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        return
    from safetensors.torch import save_file, save_model

    if weights is not None:
        save_file({name: value.clone() for name, value in weights.items()}, str(folder / WEIGHTS))
    else:
        save_model(model, str(folder / WEIGHTS))  # writes shared tensors once


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load into a model of the same shape."""
    if hasattr(model, "save_pretrained"):
        kind: Any = type(model)
        with quiet_transformers(import_transformers()):
            model.load_state_dict(kind.from_pretrained(folder).state_dict())
        return
    from safetensors.torch import load_model

    load_model(model, str(folder / WEIGHTS))


def build_randomly_initialized(request: WorkloadRequest, make: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without published weights, initialized from the request's seed."""
    if request.weights:
        raise ConfigError(
            f"{request.entry.name} cannot start from '{request.weights}'",
            "it has no published weights; omit `weights` to initialize them from the seed",
        )
    with seeded_init(request.seed):
        return make().train()
