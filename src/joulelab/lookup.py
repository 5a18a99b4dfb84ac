"""Registries: the names that users write, mapped to the code that implements them.

A table maps a name to "module:object" and imports the module when the name is resolved. This keeps start-up fast, lets
a package start one that imports it, and makes a new pipeline, sensor or verb one file and one line here.

An installed package adds names by entry points, one group per table (`joulelab.sensors`, ...). A built-in name is not
replaced: a figure must not depend on what else is installed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from joulelab.errors import ConfigError, DependencyMissing, NotFoundError


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest known name, or None if nothing is close."""
    by_lower = {known.lower(): known for known in names}
    abbreviated = next((known for known in by_lower.values() if is_abbreviation(name, known)), None)
    if abbreviated is not None and name.lower() not in by_lower:
        return abbreviated
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def is_abbreviation(name: str, known: str) -> bool:
    """Whether a name consists of the initials of a known one: `lr` of learning_rate, also after the same section."""
    section, _, short = name.rpartition(".")
    known_section, _, long = known.rpartition(".")
    words = long.split("_")
    initials = "".join(word[:1] for word in words)
    return section == known_section and len(words) > 1 and short.lower() == initials.lower()


def unknown(kind: str, name: str, names: Iterable[str], hint: str = "") -> NotFoundError:
    known = sorted(names)
    guess = nearest(name, known)
    listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    suggestion = f"did you mean '{guess}'?" if guess else f"known: {listed or 'none'}"
    return NotFoundError(
        f"unknown {kind} '{name}'; {suggestion}", hint or (f"known: {listed}" if guess else "choose one of these")
    )


class Table:
    """Name -> "module:object", imported on `resolve`; then the names of installed packages."""

    def __init__(self, kind: str, entries: Mapping[str, str], group: str = "", part: str = "") -> None:
        """`group`: of the entry points that add names. `part`: the attribute of what an entry point names that holds
        the "module:object" of this table."""
        self.kind = kind
        self.group, self._part = group, part
        self._entries = dict(entries)

    @property
    def _plugins(self) -> dict[str, EntryPoint]:
        found = installed_plugins(self.group) if self.group else ()
        return {entry.name: entry for entry in found if entry.name not in self._entries}

    def names(self) -> list[str]:
        return sorted([*self._entries, *self._plugins])

    def __iter__(self) -> Iterator[str]:
        """The names in the order of the table, then those of installed packages."""
        return iter([*self._entries, *sorted(self._plugins)])

    def require(self, name: str) -> None:
        if name not in self._entries and name not in self._plugins:
            raise unknown(self.kind, name, self.names())

    def origin(self, name: str) -> str | None:
        """Package and version that a name comes from, for keys and records; None for a built-in name."""
        entry = self._plugins.get(name)
        return None if entry is None else _origin(entry)

    def resolve(self, name: str) -> Any:
        self.require(name)
        if name in self._entries:
            return _imported(self._entries[name])
        entry = self._plugins[name]
        try:
            found = entry.load()
            return _imported(getattr(found, self._part)) if self._part else found
        except Exception as error:  # another package's code may raise anything
            raise ConfigError(
                f"the {self.kind} '{name}' of {_origin(entry)} cannot be loaded: {type(error).__name__}: {error}",
                f"update or uninstall the package; its entry point is {self.group}: {name} = {entry.value}",
            ) from error


@cache
def installed_plugins(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _imported(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Pipeline:
    """What an entry point of `joulelab.pipelines` names. Both are "module:object": settings are checked on machines
    without a framework, where `run` cannot be imported."""

    settings: str
    """A subclass of `joulelab.runs.spec.RunSpec`."""
    run: str
    """A function that takes a `joulelab.runs.context.RunContext`."""


def import_file(path: Path, guide: str) -> ModuleType:
    """Import a user's file, again only if it has changed. Errors name the line of the file; `guide` is their hint.

    The module is registered in `sys.modules`, because dataclasses and pickle look it up there.
    """
    name = f"joulelab_user_{path.stem}"
    known, version = sys.modules.get(name), (str(path), path.stat().st_mtime_ns, path.stat().st_size)
    if known is not None and vars(known).get("__file_version__") == version:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    vars(module)["__file_version__"] = version
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        text = f"{path}{_line_in(path, error)}: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            raise DependencyMissing(text, f"pip install {error.name}") from error
        raise ConfigError(text, guide) from error
    return module


def _line_in(path: Path, error: Exception) -> str:
    """The last line of the user's file in the traceback."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


# Opened in this order; `meter.session.CONDITIONS` has those that need a setting or a library.
SENSORS = Table(
    "sensor",
    {
        "host": "joulelab.meter.sensors.cpu:HostSensor",
        "cores": "joulelab.meter.sensors.cpu:CoresSensor",
        "rapl": "joulelab.meter.sensors.rapl:RaplSensor",
        "nvml": "joulelab.meter.sensors.nvml:NvmlSensor",
        "amd": "joulelab.meter.sensors.amd:AmdSensor",
        "apple": "joulelab.meter.sensors.apple:AppleSensor",
        "hwmon": "joulelab.meter.sensors.node_meters:HwmonSensor",
        "cray": "joulelab.meter.sensors.node_meters:CraySensor",
        "ipmi": "joulelab.meter.sensors.node_meters:IpmiSensor",
        "redfish": "joulelab.meter.sensors.node_meters:RedfishSensor",
        "cpu-estimate": "joulelab.meter.sensors.cpu:CpuEstimateSensor",
        "replay": "joulelab.meter.sensors.replay:ReplaySensor",
    },
    "joulelab.sensors",
)

# A pipeline is a package, its settings, which a login node can check without torch, and the function that runs it.
_PIPELINES = {
    "classify": ("joulelab.distill.classify", "config:ClassifySpec", "recipe:run_classify"),
    "distilbert": ("joulelab.distill.distilbert", "config:DistilbertSpec", "recipe:run_distilbert"),
    "dpo": ("joulelab.distill.causal", "config:CausalSpec", "recipe:run_dpo"),
    "evaluate": ("joulelab.evaluate", "config:EvaluateSpec", "evaluate_pipeline:run_evaluate"),
    "fitnets-images": ("joulelab.distill.classify", "config:FitnetsImagesSpec", "recipe:run_fitnets_images"),
    "import": ("joulelab.runs", "imported:ImportSpec", "imported:refuse"),
    "infer": ("joulelab.infer", "config:InferSpec", "pipeline:run_infer"),
    "kd": ("joulelab.distill.causal", "config:CausalSpec", "recipe:run_kd"),
    "measure": ("joulelab.runs.measure", "result:MeasureSpec", "result:refuse"),
    "on-policy": ("joulelab.distill.causal", "config:CausalSpec", "recipe:run_on_policy"),
    "prepare-binarize": ("joulelab.distill.prepare", "config:BinarizeSpec", "recipe:run_binarize"),
    "prepare-dump": ("joulelab.distill.prepare", "config:DumpSpec", "recipe:run_dump"),
    "prepare-extract-student": ("joulelab.distill.prepare", "config:ExtractStudentSpec", "recipe:run_extract_student"),
    "prepare-reviews": ("joulelab.distill.prepare", "config:PrepareReviewsSpec", "recipe:run_prepare_reviews"),
    "prepare-token-counts": ("joulelab.distill.prepare", "config:TokenCountsSpec", "recipe:run_token_counts"),
    "self": ("joulelab.distill.causal", "config:CausalSpec", "recipe:run_self"),
    "serving": ("joulelab.infer.serving", "config:ServingSpec", "serving_pipeline:run_serving"),
    "sft": ("joulelab.distill.causal", "config:CausalSpec", "recipe:run_sft"),
    "squad": ("joulelab.distill.squad", "config:SquadSpec", "recipe:run_squad"),
    "synthetic": ("joulelab.distill.causal", "config:CausalSpec", "recipe:run_synthetic"),
    "train": ("joulelab.train", "zoo_config:TrainSpec", "zoo_pipeline:run_train"),
}
PIPELINE_SPECS = Table(
    "pipeline",
    {name: f"{package}.{spec}" for name, (package, spec, _) in _PIPELINES.items()},
    "joulelab.pipelines",
    "settings",
)
PIPELINES = Table(
    "pipeline",
    {name: f"{package}.{run}" for name, (package, _, run) in _PIPELINES.items()},
    "joulelab.pipelines",
    "run",
)

# What a pipeline can check of its models before a run's folder exists; unlike its settings this needs torch.
PIPELINE_CHECKS = Table(
    "pipeline",
    {
        "train": "joulelab.train.trainer:trainer_checks",
        "classify": "joulelab.distill.classify.recipe:text_checks",
        "distilbert": "joulelab.distill.distilbert.recipe:model_checks",
        "evaluate": "joulelab.evaluate.evaluate_pipeline:evaluate_checks",
        "squad": "joulelab.distill.squad.recipe:model_checks",
        **dict.fromkeys(
            ("dpo", "kd", "on-policy", "self", "sft", "synthetic"), "joulelab.distill.causal.recipe:model_checks"
        ),
    },
)

# Tools that run alongside the meter if the settings ask for them.
SIDECARS = Table(
    "tool alongside the meter",
    {"codecarbon": "joulelab.trackers.codecarbon:track_run", "trackers": "joulelab.trackers.tracker:start"},
)

# Experiment trackers that receive the metrics of a run: live (`trackers:`) or afterwards (`joulelab export`).
TRACKERS = Table(
    "tracker",
    {
        "mlflow": "joulelab.trackers.experiment_trackers:MlflowTracker",
        "tensorboard": "joulelab.trackers.experiment_trackers:TensorBoardTracker",
        "trackio": "joulelab.trackers.experiment_trackers:TrackioTracker",
        "wandb": "joulelab.trackers.experiment_trackers:WandbTracker",
    },
    "joulelab.trackers",
)

TRAINER_STATS = Table(
    "trainer stats",
    {
        "no-op": "joulelab.train.stats.hooks:NoOpStats",
        "no-op-sync": "joulelab.train.stats.hooks:NoOpSyncStats",
        "simple": "joulelab.train.stats.phase_times:SimpleStats",
        "simple-steps": "joulelab.train.stats.phase_times:SimpleStepStats",
        "codecarbon": "joulelab.train.stats.codecarbon_phases:CodeCarbonStats",
        "averaged-energy": "joulelab.train.stats.phase_energy:AveragedEnergyStats",
        "torch-profiler": "joulelab.train.stats.torch_profiler:TorchProfilerStats",
        "energy": "joulelab.train.stats.phase_energy:EnergyStats",
    },
    "joulelab.trainers",
)

# Classes that train: `--trainer NAME`. Those of installed packages are subclasses of `train.trainer:SimpleTrainer`.
TRAINERS = Table("trainer", {"simple": "joulelab.train.trainer:SimpleTrainer"}, "joulelab.trainer_classes")

# Evaluators of a student that the setting `evaluators` names, in addition to those of its pipeline.
EVALUATORS = Table(
    "evaluator",
    {
        "size": "joulelab.evaluate.evaluators:model_size",
    },
    "joulelab.evaluators",
)

# Judges, generation engines and readers of logs that are not built in; the built-in ones need more than a name.
JUDGES = Table("judge", {}, "joulelab.judges")
ENGINES = Table("engine", {}, "joulelab.engines")
IMPORTERS = Table("importer", {}, "joulelab.importers")

# Models of the zoo; reading an entry imports no framework.
ZOO = Table(
    "model",
    {
        "gpt2": "joulelab.zoo.models.language_models:GPT2",
        "bert": "joulelab.zoo.models.language_models:BERT",
        "reformer": "joulelab.zoo.models.language_models:REFORMER",
        "t5": "joulelab.zoo.models.language_models:T5",
        "opt": "joulelab.zoo.models.language_models:OPT",
        "bart": "joulelab.zoo.models.language_models:BART",
        "bigbird": "joulelab.zoo.models.language_models:BIGBIRD",
        "albert": "joulelab.zoo.models.language_models:ALBERT",
        "distilbert": "joulelab.zoo.models.language_models:DISTILBERT",
        "longformer": "joulelab.zoo.models.language_models:LONGFORMER",
        "resnet50": "joulelab.zoo.models.vision_models:RESNET50",
        "resnet152": "joulelab.zoo.models.vision_models:RESNET152",
        "convnext-large": "joulelab.zoo.models.vision_models:CONVNEXT_LARGE",
        "regnet-y-128gf": "joulelab.zoo.models.vision_models:REGNET_Y_128GF",
        "vit-g14": "joulelab.zoo.models.vision_models:VIT_G14",
        "dinov2": "joulelab.zoo.models.vision_models:DINOV2",
        "vjepa2": "joulelab.zoo.models.vision_models:VJEPA2",
        "whisper": "joulelab.zoo.models.multimodal_models:WHISPER",
        "llava": "joulelab.zoo.models.multimodal_models:LLAVA",
        "pna": "joulelab.zoo.models.graph_models:PNA",
        "dimenet": "joulelab.zoo.models.graph_models:DIMENET",
        "gflownet": "joulelab.zoo.models.graph_models:GFLOWNET",
    },
    "joulelab.models",
)

# Computations that need a framework, so that the verbs themselves import none, or a package further to the right.
CALCULATIONS = Table(
    "calculation",
    {
        "list-row": "joulelab.report.tables.run_list:list_row",
        "model-server": "joulelab.infer.serving.http_server:open_server",
        "model-cards": "joulelab.report.export:write_model_cards",
        "paper-cost": "joulelab.zoo.cost:cost_summary",
        "prompt-lengths": "joulelab.infer.decoding:prompt_lengths",
        "require-device": "joulelab.train.devices:require_device",
        "teacher-share": "joulelab.report.energy_sums:teacher_share",
    },
)

# What the extras of pyproject.toml install, by the names that are imported. A package of several extras is named by the
# first of them in hints.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("torch", "transformers", "tokenizers", "safetensors", "datasets", "gguf"),
    "report": ("altair", "vl_convert", "jinja2", "pyarrow"),
    "query": ("duckdb", "pytz", "pyarrow"),
    "vision": ("PIL",),
    "graphs": ("torch_geometric", "rdkit"),
    "peft": ("peft",),
    "lm-eval": ("lm_eval",),
    "math": ("math_verify",),
    "codecarbon": ("codecarbon",),
    "prometheus": ("prometheus_client",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "ui": ("starlette", "uvicorn"),
    "trackers": ("tensorboard", "mlflow", "wandb"),
    "trackio": ("trackio",),
}


def absent_packages(*packages: str) -> list[str]:
    """Those of the packages that are not installed; nothing is imported."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def install_hint(*extras: str) -> str:
    return f'pip install "joulelab[{",".join(dict.fromkeys(extras))}]"'


def require_packages(what: str, *packages: str, otherwise: str = "train") -> None:
    """Raise an error that names the absent packages and the extras that install them.

    A package that is in no extra, as a user's model may need one, is ascribed to the extra `otherwise`.
    """
    absent = absent_packages(*packages)
    if absent:
        extra_of = {name: extra for extra in reversed(list(EXTRAS)) for name in EXTRAS[extra]}
        raise _absence(what, absent, install_hint(*(extra_of.get(name, otherwise) for name in absent)))


def require_extra(what: str, extra: str) -> None:
    absent = absent_packages(*EXTRAS[extra])
    if absent:
        raise _absence(what, absent, install_hint(extra))


def _absence(what: str, absent: list[str], hint: str) -> DependencyMissing:
    names = " and ".join([", ".join(absent[:-1]), absent[-1]] if len(absent) > 1 else absent)
    message = f"{what} needs {names}, which {'is' if len(absent) == 1 else 'are'} not installed"
    return DependencyMissing(message, hint, absent)
