"""Which of a node's GPUs belong to this job. NVML shows cards; users, CUDA and Slurm each name them in their own way.

The rules for `CUDA_VISIBLE_DEVICES` are CUDA's: entries are positions among the cards this process may open, or `GPU-`
and `MIG-` ids of which the beginning is enough; the first entry that fits nothing hides itself and all that follow.
Slurm's variables (the device's number on the node) matter only where CUDA's is absent, and where a cgroup already shows
this job its own cards and no others, those are the answer. Pure functions over what NVML listed and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLURM_NODE_NUMBERS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
CUDA_POSITIONS = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


@dataclass(frozen=True)
class Listed:
    """One card as NVML shows it, with the MIG slices it is cut into."""

    index: int
    uuid: str
    name: str
    minor: int | None = None
    """The N of /dev/nvidiaN: what Slurm counts by, and not always NVML's index."""
    mig_uuids: tuple[str, ...] = ()

    def answers_to(self, uuid: str) -> bool:
        """`uuid` may be a beginning of the card's own, or name one of its slices in the new or the old way."""
        if uuid.startswith("MIG-GPU-"):  # drivers before R470: MIG-<card>/<GPU instance>/<compute instance>
            return self.uuid == uuid.removeprefix("MIG-").split("/")[0]
        if uuid.startswith("MIG-"):
            return any(slice_uuid.startswith(uuid) for slice_uuid in self.mig_uuids)
        return uuid.startswith("GPU-") and self.uuid.startswith(uuid)


@dataclass(frozen=True)
class Selection:
    cards: tuple[Listed, ...]
    source: str
    """What decided it, for the trace's header and for people whose GPU is missing."""
    unknown: tuple[str, ...] = ()
    """Names that fit no card."""
    remark: str = ""


def select_gpus(listed: Sequence[Listed], wanted: str, environ: Mapping[str, str]) -> Selection:
    """`wanted` is `energy.gpus`: auto, none, or names; a number among them counts the cards this job was given."""
    if wanted == "none":
        return Selection((), "energy.gpus=none")
    given = _given_to_job(listed, environ)
    if wanted == "auto":
        return given
    found: list[Listed] = []
    unknown: list[str] = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        # a UUID is explicit enough to reach beyond what CUDA may see: a monitor watches other people's cards too
        card = _pick(name, given.cards) or (None if name.isdigit() else _pick(name, listed))
        if card is None:
            unknown.append(name)
        else:
            found.append(card)
    return Selection(_once(found), f"energy.gpus={wanted}", tuple(unknown), given.remark)


def _given_to_job(listed: Sequence[Listed], environ: Mapping[str, str]) -> Selection:
    if "CUDA_VISIBLE_DEVICES" not in environ:
        for variable in SLURM_NODE_NUMBERS:
            if environ.get(variable):
                return _by_node_number(listed, variable, environ[variable])
    for variable in CUDA_POSITIONS:
        if variable in environ:
            return _by_cuda_rules(listed, variable, environ)
    return Selection(tuple(listed), "all GPUs that NVML shows")


def _by_cuda_rules(listed: Sequence[Listed], variable: str, environ: Mapping[str, str]) -> Selection:
    names = [name.strip() for name in environ[variable].split(",")]
    found: list[Listed] = []
    unknown: list[str] = []
    for name in names:
        card = _pick(name, listed)
        if card is None:
            unknown = [] if names == [""] else [name]
            break
        found.append(card)
    remark = _order_remark(listed, environ) if any(name.isdigit() for name in names) else ""
    return Selection(_once(found), f"{variable}={environ[variable]}", tuple(unknown), remark)


def _by_node_number(listed: Sequence[Listed], variable: str, value: str) -> Selection:
    numbers = [name.strip() for name in value.split(",")]
    source = f"{variable}={value}"
    if len(listed) <= len(numbers):
        return Selection(tuple(listed), f"{source}, and a cgroup shows no others")
    by_minor = {str(card.index if card.minor is None else card.minor): card for card in listed}
    found = [by_minor[number] for number in numbers if number in by_minor]
    return Selection(_once(found), source, tuple(number for number in numbers if number not in by_minor))


def _pick(name: str, cards: Sequence[Listed]) -> Listed | None:
    """The one card a name means; a beginning that fits two means none, as with CUDA."""
    if name.isdigit():
        return cards[int(name)] if int(name) < len(cards) else None
    fitting = [card for card in cards if card.answers_to(name)]
    return fitting[0] if len(fitting) == 1 else None


def _once(cards: Sequence[Listed]) -> tuple[Listed, ...]:
    """Two slices of one card are one meter."""
    return tuple(dict.fromkeys(cards))


def _order_remark(listed: Sequence[Listed], environ: Mapping[str, str]) -> str:
    if len({card.name for card in listed}) < 2 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ""
    return (
        "this node has different GPUs, and CUDA numbers them fastest first, NVML by bus: a number may mean another; "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID or name GPUs by UUID"
    )
