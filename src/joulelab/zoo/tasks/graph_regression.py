"""Regression of the HOMO-LUMO gap of molecules: absolute error in units of the standard deviation of the gaps.

Legend: B molecules, N atoms, E edges, F features of an atom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.data import sources
from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.molecules import MoleculeGraph, MoleculeRows, degree_histogram, open_pcqm4m
from joulelab.data.splits import SYNTHETIC_SIZES, parse_split
from joulelab.data.synthetic import SyntheticMolecules
from joulelab.zoo.graph_networks import DimeNet, Edges, Pna, Triplets, edges_within, triplets_of
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.pretrained import build_randomly_initialized
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest, refuse_dataset

STATISTICS_MOLECULES = 10_000
"""Number of leading training molecules from which mean, standard deviation and degrees are computed."""
HELD_OUT = 2_000
Inputs = Callable[[MoleculeGraph], Mapping[str, Tensor]]
Predict = Callable[[nn.Module, TensorBatch], Tensor]


def prepare_pna(request: WorkloadRequest) -> Workload:
    train, validation = open_molecules(request, with_positions=False)
    survey = train.molecules(train.rows[:STATISTICS_MOLECULES])
    degrees = torch.from_numpy(degree_histogram(survey))
    model = build_randomly_initialized(request, lambda: Pna(degrees=degrees, **request.size.settings))
    return _workload(request, model, predict_by_bonds, bonds_only, (train, validation), Scale.of(survey))


def prepare_dimenet(request: WorkloadRequest) -> Workload:
    train, validation = open_molecules(request, with_positions=True)
    scale = Scale.of(train.molecules(train.rows[:STATISTICS_MOLECULES]))
    model = build_randomly_initialized(request, lambda: DimeNet(**request.size.settings))
    geometry = partial(positions_and_angles, cutoff=request.size.settings["cutoff"])
    return _workload(request, model, predict_by_angles, geometry, (train, validation), scale)


def open_molecules(request: WorkloadRequest, with_positions: bool) -> tuple[MoleculeRows, MoleculeRows]:
    """Training and held-out molecules."""
    wanted, held_out = parse_split(request.split), parse_split("validation")
    if request.dataset == SYNTHETIC:
        # splits differ in their seed, so that no molecule is in two of them
        made = [SyntheticMolecules(seed=list(SYNTHETIC_SIZES).index(split.name)) for split in (wanted, held_out)]
        rows = [split.rows(SYNTHETIC_SIZES[split.name]) for split in (wanted, held_out)]
        return MoleculeRows(rows[0], made[0].molecules), MoleculeRows(rows[1], made[1].molecules)
    path = sources.parse(request.dataset).path
    if path is None or not path.is_file():
        raise refuse_dataset(request)
    return open_pcqm4m(path, wanted, with_positions), open_pcqm4m(path, held_out, with_positions, at_most=HELD_OUT)


@dataclass(frozen=True)
class Scale:
    mean_ev: float
    spread_ev: float

    @classmethod
    def of(cls, survey: MoleculeGraph) -> Self:
        return cls(float(survey.targets.mean()), float(survey.targets.std()) or 1.0)


def absolute_error(model: nn.Module, batch: TensorBatch, predict: Predict, spread_ev: float) -> ObjectiveOutput:
    predicted_B, targets_B = predict(model, batch), batch["targets"]
    # [B, 1] against [B] would broadcast to all pairs of molecules without an error
    assert predicted_B.shape == targets_B.shape == (batch.count,)
    loss_sum = (predicted_B - targets_B).abs().sum()
    return ObjectiveOutput(loss_sum, batch.count, {"error_ev": loss_sum.detach() * spread_ev})


def bonds_only(graph: MoleculeGraph) -> Mapping[str, Tensor]:
    return {"features": torch.from_numpy(graph.features), "bonds": torch.from_numpy(graph.bonds)}


def predict_by_bonds(model: nn.Module, batch: TensorBatch) -> Tensor:
    predicted_B: Tensor = model(batch["features"], batch["bonds"], batch["molecule"], batch.samples)
    return predicted_B


def positions_and_angles(graph: MoleculeGraph, cutoff: float) -> Mapping[str, Tensor]:
    """Edges and triplets are computed here, before the step: on a GPU their number would have to be read back."""
    positions_N3 = torch.from_numpy(graph.positions)
    edges = edges_within(cutoff, positions_N3, torch.from_numpy(graph.molecule))
    triplets = triplets_of(edges, len(positions_N3))
    numbers_N = torch.from_numpy(graph.numbers)
    return {"numbers": numbers_N, "positions": positions_N3, **edges._asdict(), **triplets._asdict()}


def predict_by_angles(model: nn.Module, batch: TensorBatch) -> Tensor:
    edges, triplets = Edges(batch["source"], batch["target"]), Triplets(batch["kj"], batch["ji"])
    predicted_B: Tensor = model(batch["numbers"], batch["positions"], batch["molecule"], edges, triplets, batch.samples)
    return predicted_B


def _workload(
    request: WorkloadRequest,
    model: nn.Module,
    predict: Predict,
    inputs: Inputs,
    data: tuple[MoleculeRows, MoleculeRows],
    scale: Scale,
) -> Workload:
    objective = PlainObjective(partial(absolute_error, predict=predict, spread_ev=scale.spread_ev))
    train, validation = (_batches(request, molecules, inputs, scale) for molecules in data)
    return Workload(model, objective, train, validation)


def _batches(request: WorkloadRequest, source: MoleculeRows, inputs: Inputs, scale: Scale) -> ShuffledRows:
    def make(rows: Rows, draw: int) -> TensorBatch:
        graph = source.molecules(rows)
        targets_B = torch.from_numpy(((graph.targets - scale.mean_ev) / scale.spread_ev).astype(np.float32))
        common = {"molecule": torch.from_numpy(graph.molecule), "targets": targets_B}
        return TensorBatch({**inputs(graph), **common}, len(rows), tokens=len(graph.features), count=len(rows))

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)
