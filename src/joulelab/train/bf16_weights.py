"""Weights that are stored and trained in bfloat16, without the float32 copy that mixed precision keeps.

bfloat16 has 8 significant bits: an update below 1/512 of a weight vanishes when the sum is rounded to the nearest
number, and a training with a small learning rate stops. Two remedies, both over any optimizer:

    stochastic   round up with the probability of the distance to the lower neighbor. The expected weight is the exact
                 one (Gupta et al., 2015), and no further memory is needed.
    kahan        round to the nearest number and keep what was lost in a second bfloat16 tensor, which is added to the
                 weight before the next update (Kahan, 1965; Zamirai et al., 2020, for bfloat16). 2 more bytes a weight.

`Bf16Updates` steps another optimizer on float32 copies of some weights at a time, so that the arithmetic of the update
is that of a float32 training. With stochastic rounding, AdamW and Adafactor are kernels on a GPU (`adamw_kernel`,
`adafactor_kernel`), which need neither the copies nor most of the passes over them. AdamW's moments are float32, or
bfloat16 rounded in the same way: the second moment moves by 1/1000 of the distance to the last square, which rounding
to the nearest bfloat16 number would lose.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.errors import ConfigError
from joulelab.train.parallel import local_shard

COMPENSATION = "compensation"
"""Key of the optimizer's state: what rounding has removed from a weight."""
_SEED, _STEP = "rounding_seed", "rounding_step"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements whose float32 copies exist at a time: large enough for one kernel to be efficient, 0.4 GB with the gradients
# and random bits.
_BUCKET = 2**25


def cast_weights(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters in place, and no buffers: `module.to(dtype)` would round the frequencies of rotary embeddings
    too, which moves the angle of position 1,000 by whole radians."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


def require_castable(module: nn.Module) -> None:
    """Raise for layers that torch does not compute with bfloat16 weights and float32 statistics."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm):
            raise ConfigError(
                f"weights=bf16: {type(module).__name__} has batch normalization, whose running statistics are float32",
                "set weights=fp32; precision=bf16 computes its products in bf16 all the same",
            )


@torch.no_grad()
def copy_stochastically_(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Round float32 numbers to bfloat16, up or down with the probability that makes the expected value exact."""
    # A bfloat16 number is the upper half of a float32 one. Adding 16 random bits to the lower half carries into the
    # upper half with the probability lower half / 2^16, which is the distance to the lower neighbor.
    bits = source.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    # Not for infinity and NaN, which the noise could turn into one another or into numbers.
    target.copy_(torch.where(source.isfinite(), rounded, source))


class Bf16Updates(torch.optim.Optimizer):
    """An optimizer over bfloat16 weights whose updates are computed in float32 and rounded as configured.

    Random bits depend on a seed, the number of the step and the shard only, and both are in the state: replicas of a
    model stay equal, and a resumed training rounds as the interrupted one would have.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        rounding: str,
        seed: int,
        shard: int = 0,
        moments: torch.dtype = torch.float32,
    ) -> None:
        """`inner` was made with these weights; it is used as a function and keeps no state. `shard` numbers the part
        of a sharded model that this process holds; 0 for replicas. `moments`: dtype of AdamW's."""
        super().__init__([{**group, _SEED: seed, _STEP: 0} for group in inner.param_groups], inner.defaults)
        self._inner, self._rounding, self._shard, self._moments = inner, rounding, shard, moments
        self._is_adamw = isinstance(inner, torch.optim.AdamW)
        self._is_adafactor = type(inner) is torch.optim.Adafactor  # not that of sharded models
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)

    def takes_factor(self) -> bool:
        """Whether `step` can multiply all gradients by a factor while it reads them, which saves a pass over them."""
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        # The total norm of sharded gradients, hence the factor, is a sharded tensor itself.
        return all(self._takes_kernel(weight) and not hasattr(weight, "to_local") for weight in weights)

    @torch.no_grad()
    def step(self, closure: Any = None, factor: float | Tensor = 1.0) -> None:  # type: ignore[override]
        """`factor`: of all gradients, a number or a tensor on the device, where `takes_factor`; else 1."""
        factors: dict[torch.device, Tensor] = {}
        for number, group in enumerate(self.param_groups):
            entropy = np.random.SeedSequence([group[_SEED], group[_STEP], self._shard, number])
            weights = [weight for weight in group["params"] if weight.grad is not None]
            by_kernel: list[Tensor] = []
            others: list[Tensor] = []
            for weight in weights:
                (by_kernel if self._takes_kernel(weight) else others).append(weight)
            seeds = entropy.generate_state(len(by_kernel) + 2)  # the first two are the generators'
            for weight, seed in zip(by_kernel, seeds[2:], strict=True):
                if weight.device not in factors:
                    factors[weight.device] = _one_number(factor, weight.device)
                self._step_kernel(group, weight, factors[weight.device], int(seed) >> 1)
            generators: dict[torch.device, torch.Generator] = {}
            for bucket in _buckets(others):
                device = bucket[0].device
                if device not in generators:
                    seed = int(entropy.generate_state(1, np.uint64)[0]) >> 1
                    generators[device] = torch.Generator(device).manual_seed(seed)
                self._step_bucket(group, bucket, generators[device])
            group[_STEP] += 1

    def _takes_kernel(self, weight: Tensor) -> bool:
        return (
            (self._is_adamw or (self._is_adafactor and weight.dim() <= 2))
            and self._rounding == "stochastic"
            and weight.is_cuda
            and weight.dtype == torch.bfloat16
            and local_shard(weight).is_contiguous()
            and has_triton()
        )

    def _step_kernel(self, group: dict[str, Any], weight: Tensor, factor: Tensor, seed: int) -> None:
        state = self.state[weight]
        if not state:
            state.update(self._empty_state(weight))
        if state["step"].is_cuda:  # of a checkpoint; on the host it can be read without waiting for the device
            state["step"] = state["step"].cpu()
        state["step"] += 1
        assert weight.grad is not None
        parts = local_shard(weight.detach()), local_shard(weight.grad).contiguous()
        common: dict[str, Any] = {
            "step": int(state["step"]), "seed": seed, "rate": float(group["lr"]), "decay": group["weight_decay"],
        }  # fmt: skip
        if self._is_adamw:
            from joulelab.train.adamw_kernel import update

            mean, square = (local_shard(state[name]) for name in _MOMENTS)
            update(*parts, mean, square, factor, **common, betas=group["betas"], epsilon=group["eps"])
            return
        from joulelab.train.adafactor_kernel import update_matrix, update_vector

        common |= {"beta2_decay": group["beta2_decay"], "epsilons": group["eps"], "threshold": group["d"]}
        if weight.dim() == 2:
            update_matrix(*parts, state["row_var"], state["col_var"], factor, **common)
        else:
            update_vector(*parts, state["variance"], factor, **common)

    def _empty_state(self, weight: Tensor) -> dict[str, Tensor]:
        """As torch names and keeps it, so that a checkpoint can be read with or without the kernels."""
        state = {"step": torch.tensor(0.0)}
        if self._is_adamw:
            return state | {name: torch.zeros_like(weight, dtype=self._moments) for name in _MOMENTS}
        if weight.dim() == 2:
            rows, columns = weight.shape
            return state | {
                "row_var": weight.new_zeros(rows, 1, dtype=torch.float32),
                "col_var": weight.new_zeros(1, columns, dtype=torch.float32),
            }
        return state | {"variance": torch.zeros_like(weight, dtype=torch.float32)}

    def _step_bucket(self, group: dict[str, Any], weights: Sequence[Tensor], generator: torch.Generator) -> None:
        copies = [self._copy(weight) for weight in weights]
        states = [_inner_state(self.state[weight]) for weight in weights]
        inner = self._inner
        inner.param_groups = [{**group, "params": copies}]
        inner.state = defaultdict(dict, zip(copies, states, strict=True))
        inner.step()
        for weight, copy in zip(weights, copies, strict=True):
            self._keep_state(weight, inner.state[copy], generator)
            if copy is not weight:
                self._write(weight, copy, generator)
        inner.param_groups, inner.state = [], defaultdict(dict)  # frees the copies

    def _keep_state(self, weight: Tensor, state: dict[str, Any], generator: torch.Generator) -> None:
        for name, value in state.items():
            if self._is_adamw and name in _MOMENTS and self._moments != value.dtype:
                kept = torch.empty_like(value, dtype=self._moments)
                copy_stochastically_(local_shard(kept), local_shard(value), generator)
                value = kept
            self.state[weight][name] = value

    def _copy(self, weight: Tensor) -> Tensor:
        """In float32, with what earlier roundings have removed."""
        if weight.dtype != torch.bfloat16:
            return weight
        copy, lost = weight.detach().float(), self.state[weight].get(COMPENSATION)
        if lost is not None:
            copy += lost
        assert weight.grad is not None
        copy.grad = weight.grad.float()
        return copy

    def _write(self, weight: Tensor, copy: Tensor, generator: torch.Generator) -> None:
        if self._rounding == "kahan":
            weight.copy_(copy)
            self.state[weight][COMPENSATION] = copy.sub_(weight).to(weight.dtype)
        else:
            copy_stochastically_(local_shard(weight), local_shard(copy), generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts an optimizer's state to the dtype of the weights, which would round the moments to bfloat16."""
        super().load_state_dict(state_dict)
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for name, weight in zip(names, weights, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                if isinstance(value, Tensor) and key != "step":  # torch knows the device of the step count
                    self.state[weight][key] = value.to(weight.device)


def _inner_state(state: dict[str, Any]) -> dict[str, Any]:
    """What the inner optimizer keeps of a weight, as it expects it."""
    found = {name: value for name, value in state.items() if name != COMPENSATION}
    for name in _MOMENTS:
        if name in found:
            found[name] = found[name].float()
    return found


def _one_number(value: float | Tensor, device: torch.device) -> Tensor:
    """In float32 on the device, without waiting for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).reshape(1)
    return torch.full((1,), value, device=device)


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _buckets(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive weights on one device, few enough that their float32 copies are small; a larger one is alone."""
    bucket: list[Tensor] = []
    elements = 0
    for weight in weights:
        count = local_shard(weight).numel()
        if bucket and (elements + count > _BUCKET or weight.device != bucket[0].device):
            yield bucket
            bucket, elements = [], 0
        bucket.append(weight)
        elements += count
    if bucket:
        yield bucket
