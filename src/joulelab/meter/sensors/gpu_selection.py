"""Select the GPUs of this job among those that NVML lists, by the names that users, CUDA and Slurm give them.

The rules for `CUDA_VISIBLE_DEVICES` are CUDA's: entries are positions among the cards this process may open, or
prefixes of `GPU-` and `MIG-` ids; the first entry that matches nothing hides itself and all that follow. Slurm's
variables (the device's number on the node) matter only without CUDA's variable, and if a cgroup already shows this job
only its own cards, those are selected. These are pure functions over the list and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLURM_NODE_NUMBERS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
CUDA_POSITIONS = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


@dataclass(frozen=True)
class Listed:
    """One card as NVML lists it, with its MIG slices."""

    index: int
    uuid: str
    name: str
    minor: int | None = None
    """The N of /dev/nvidiaN, which is Slurm's number and not always NVML's index."""
    mig_uuids: tuple[str, ...] = ()

    def matches(self, uuid: str) -> bool:
        """Whether `uuid` is a prefix of the card's UUID, or of one of its slices in the new or the old notation."""
        if uuid.startswith("MIG-GPU-"):  # drivers before R470: MIG-<card>/<GPU instance>/<compute instance>
            return self.uuid == uuid.removeprefix("MIG-").split("/")[0]
        if uuid.startswith("MIG-"):
            return any(slice_uuid.startswith(uuid) for slice_uuid in self.mig_uuids)
        return uuid.startswith("GPU-") and self.uuid.startswith(uuid)


@dataclass(frozen=True)
class Selection:
    cards: tuple[Listed, ...]
    source: str
    """The variable or setting that decided, for the header of the trace and for error messages."""
    unknown: tuple[str, ...] = ()
    """Names that match no card."""
    remark: str = ""


def select_gpus(listed: Sequence[Listed], wanted: str, environ: Mapping[str, str]) -> Selection:
    """`wanted` is `energy.gpus`: auto, none, or names; a number is a position among the cards of this job."""
    if wanted == "none":
        return Selection((), "energy.gpus=none")
    given = _given_to_job(listed, environ)
    if wanted == "auto":
        return given
    found: list[Listed] = []
    unknown: list[str] = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        # a UUID is explicit, so it may select a card that CUDA does not see: a monitor may watch any card
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
        return Selection(tuple(listed), f"{source}, and the cgroup exposes no others")
    by_minor = {str(card.index if card.minor is None else card.minor): card for card in listed}
    found = [by_minor[number] for number in numbers if number in by_minor]
    return Selection(_once(found), source, tuple(number for number in numbers if number not in by_minor))


def _pick(name: str, cards: Sequence[Listed]) -> Listed | None:
    """The card that a name selects; a prefix of two UUIDs selects none, as with CUDA."""
    if name.isdigit():
        return cards[int(name)] if int(name) < len(cards) else None
    matching = [card for card in cards if card.matches(name)]
    return matching[0] if len(matching) == 1 else None


def _once(cards: Sequence[Listed]) -> tuple[Listed, ...]:
    """Two slices of one card are one device."""
    return tuple(dict.fromkeys(cards))


def _order_remark(listed: Sequence[Listed], environ: Mapping[str, str]) -> str:
    if len({card.name for card in listed}) < 2 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ""
    return (
        "this node has different GPU models: CUDA numbers them fastest first, NVML by PCI bus, so an index may select "
        "another GPU; set CUDA_DEVICE_ORDER=PCI_BUS_ID or name GPUs by UUID"
    )
