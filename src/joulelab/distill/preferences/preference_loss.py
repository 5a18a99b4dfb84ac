"""DPO and its variants: from the answers' log-probabilities to a loss over pairs.

How much more likely than under the reference has the chosen answer become, and how much more the rejected one? The
difference is the margin. If policy and reference are the same model it is 0, and the loss is ln 2 (DPO, Rafailov et
al., 2023) or 1 / (4 beta^2) (IPO, Azar et al., 2023), whatever the answers are.

Log-probabilities are computed chunk by chunk, without a full tensor of logits, and with gradients. A preference loss
weighs a token by the margin of its whole pair, so its gradient is not known when the logits exist for the first time,
as it is for cross-entropy: this is why `distill.chunked.chunked_loss`, which differentiates in the forward pass, cannot
serve here. Logits are kept for the backward pass up to a memory limit, in the dtype they were computed in; beyond it
they are computed a second time.

Shapes: N tokens, C tokens of a chunk, V vocabulary, D hidden, P pairs; the last axis of `_P2` is (chosen, rejected).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data.batches import TensorBatch
from joulelab.data.chat.packing import NAME as PACKED
from joulelab.distill.causal.models import lm_head_weight
from joulelab.distill.chunked import Projection, add_product, compiled, matmul_dtype, padded_projection
from joulelab.distill.preferences.pairs import Pair, PairLayout, Pairs
from joulelab.errors import ConfigError, JoulelabError
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.phases import ALL, Shard
from joulelab.train.optim import autocast, float32_matmul_precision
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

PreferenceLoss = Literal["dpo", "ipo", "ipo-sum", "length-normalized"]
_OVER_MEANS = ("ipo", "length-normalized")
_SEPARATE_ROWS = "set preferences.shared_prompt=false, which computes each prompt twice"
_TOLERANCE = 0.02
"""Relative difference of hidden states; rounding changes them by less, attending to the other answer by more."""


# losses: pure functions that return sums over pairs


def margins(policy_P2: Tensor, reference_P2: Tensor) -> Tensor:
    gains_P2 = policy_P2 - reference_P2
    return gains_P2[:, 0] - gains_P2[:, 1]


def dpo_loss(margins_P: Tensor, beta: float) -> Tensor:
    # -log sigmoid(beta (log-ratio of the chosen - log-ratio of the rejected)) (Rafailov et al.,
    # 2023, eq. 7). logsigmoid and not log(sigmoid): for a margin of -1,000 the latter is log(0).
    return -F.logsigmoid(beta * margins_P).sum()


def ipo_loss(margins_P: Tensor, beta: float) -> Tensor:
    """Pulls the margin to 1 / (2 beta) and no further, while DPO's gradient never reaches 0 (Azar et al., 2023)."""
    return (margins_P - 1 / (2 * beta)).square().sum()


def preference_loss(
    kind: PreferenceLoss, beta: float, policy_P2: Tensor, reference_P2: Tensor, tokens_P2: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss summed over pairs, and the margins.

    Log-probabilities are sums over an answer's tokens. `length-normalized` is DPO over means per token: with sums a
    policy can gain by length alone. `ipo` uses means per token too, as TRL does; `ipo-sum` is the paper's sum.
    """
    # Dividing policy and reference alike: the reference's sum over the same tokens has the same
    # bias by length.
    if kind in _OVER_MEANS:
        policy_P2, reference_P2 = policy_P2 / tokens_P2, reference_P2 / tokens_P2
    margins_P = margins(policy_P2, reference_P2)
    loss = ipo_loss if kind in ("ipo", "ipo-sum") else dpo_loss
    return loss(margins_P, beta), margins_P


# log-probabilities of given tokens, chunk by chunk


@dataclass(frozen=True, eq=False)
class TargetLogProbabilities:
    """Computes log-probabilities of given tokens; without state between calls."""

    chunk: int = 4096
    """Tokens whose logits exist at a time."""
    kept_bytes: int = 4 * 2**30
    """Logits that may be kept for the backward pass; beyond this they are computed twice."""
    compile_mode: str = "off"

    def __post_init__(self) -> None:
        functions: dict[str, Callable[..., Any]] = {"_score": score_chunk, "_differentiate": gradient_chunk}
        for name, function in functions.items():
            object.__setattr__(self, name, compiled(function, self.compile_mode))

    def __call__(self, features_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        """logs_N in float32, differentiable by features and weight."""
        call = _Call(self, targets_N, matmul_dtype(features_ND), torch.is_grad_enabled())
        logs_N: Tensor = _ChunkedLogProbabilities.apply(features_ND, weight_VD, call)  # type: ignore[no-untyped-call]
        return logs_N

    def score(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return self._score(*arguments)  # type: ignore[attr-defined,no-any-return]

    def differentiate(self, *arguments: Any) -> Tensor:
        return self._differentiate(*arguments)  # type: ignore[attr-defined,no-any-return]


def score_chunk(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and the log-sum-exp of the logits."""
    # In float32 whatever the products' type: bf16 has 8 bits, and log-probabilities of an answer
    # are sums over hundreds of tokens. The norm is kept for the backward pass, so that softmax
    # needs no second reduction.
    norm_C = torch.logsumexp(logits_CV.float(), -1)
    return logits_CV.gather(-1, targets_C[:, None]).squeeze(-1).float() - norm_C, norm_C


def gradient_chunk(logits_CV: Tensor, norm_C: Tensor, targets_C: Tensor, grads_C: Tensor) -> Tensor:
    """Gradient by the logits, in their dtype: (hit - softmax) times the gradient of each log-probability."""
    softmax_CV = (logits_CV.float() - norm_C[:, None]).exp_()
    if not torch.compiler.is_compiling():  # in place: every pass over the vocabulary counts
        grads_C1 = grads_C[:, None].float()
        return softmax_CV.mul_(-grads_C1).scatter_add_(1, targets_C[:, None], grads_C1).to(logits_CV.dtype)
    # compared, not scattered: this way all of it is one kernel when compiled
    hit_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    return ((hit_CV.float() - softmax_CV) * grads_C[:, None]).to(logits_CV.dtype)


@dataclass(frozen=True, eq=False)
class _Call:
    settings: TargetLogProbabilities
    targets_N: Tensor
    dtype: torch.dtype
    needs_grad: bool

    def chunks(self) -> list[slice]:
        size = self.settings.chunk
        return [slice(start, start + size) for start in range(0, len(self.targets_N), size)]


class _ChunkedLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_ND: Tensor, weight_VD: Tensor, call: _Call) -> Tensor:
        with torch.autocast(features_ND.device.type, enabled=False):
            projection, cast_ND = padded_projection(weight_VD, None, call.dtype), features_ND.detach().to(call.dtype)
            logit_bytes = len(call.targets_N) * projection.weight_VD.shape[0] * projection.weight_VD.element_size()
            # Kept logits save one matrix product of the size of the forward pass; beyond the limit
            # memory is scarcer than time.
            keep = call.needs_grad and logit_bytes <= call.settings.kept_bytes
            logs, norms, kept = [features_ND.new_zeros(0, dtype=torch.float32)], [], []
            for rows in call.chunks():
                logits_CV = _logits(cast_ND[rows], projection)
                logs_C, norm_C = call.settings.score(logits_CV, call.targets_N[rows])
                logs.append(logs_C)
                norms.append(norm_C)
                kept.append(logits_CV if keep else None)
        if call.needs_grad:
            ctx.call, ctx.kept, ctx.norms = call, kept, norms
            ctx.save_for_backward(features_ND, weight_VD)
        return torch.cat(logs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        features_ND, weight_VD = ctx.saved_tensors
        call: _Call = ctx.call
        with torch.autocast(features_ND.device.type, enabled=False):
            projection, cast_ND = padded_projection(weight_VD, None, call.dtype), features_ND.detach().to(call.dtype)
            grad_ND = torch.empty_like(features_ND)
            trained = ctx.needs_input_grad[1]
            grad_VD = torch.zeros_like(projection.weight_VD, dtype=torch.float32) if trained else None
            for number, rows in enumerate(call.chunks()):
                # Freed as soon as it is used, so that the peak is that of the forward pass.
                logits_CV, ctx.kept[number] = ctx.kept[number], None
                logits_CV = _logits(cast_ND[rows], projection) if logits_CV is None else logits_CV
                targets_C, norm_C = call.targets_N[rows], ctx.norms[number]
                grad_CV = call.settings.differentiate(logits_CV, norm_C, targets_C, grads[0][rows])
                grad_ND[rows] = (grad_CV @ projection.weight_VD).to(grad_ND.dtype)
                if grad_VD is not None:
                    add_product(grad_VD, grad_CV.T, cast_ND[rows])
        return grad_ND, None if grad_VD is None else grad_VD[: len(weight_VD)].to(weight_VD.dtype), None


def _logits(features_CD: Tensor, projection: Projection) -> Tensor:
    return F.linear(features_CD, projection.weight_VD, projection.bias_V)


# log-probabilities of the answers of a batch of pairs


def answer_log_probabilities(
    called: nn.Module, model: nn.Module, batch: TensorBatch, log_probabilities: TargetLogProbabilities
) -> Tensor:
    """[pairs, 2], summed over an answer's tokens. `called` is the model, or the wrapper that the loop calls."""
    logs_N = log_probabilities(_answer_features(called, model, batch), lm_head_weight(model), batch["targets"])
    sums = logs_N.new_zeros(2 * batch.samples).index_add(0, batch["owners"], logs_N)
    return sums.view(-1, 2)


@torch.no_grad()
def require_shared_prompt(model: nn.Module) -> None:
    """Raise if the model cannot share a prompt between two answers. Tested on seven tokens instead of looked up by
    name: an answer's hidden states must be those of a separate row."""
    pair = Pair(*(np.array(ids) for ids in ([1, 2, 3], [4, 5], [6, 7])))
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        shared_ND, separate_ND = (
            _answer_features(model, model, PairLayout(shared, aligned=8).batch([pair]).to(device)).float()
            for shared in (True, False)
        )
    finally:
        model.train(was_training)
    if (shared_ND - separate_ND).norm() > _TOLERANCE * separate_ND.norm():
        raise ConfigError(
            f"{type(model).__name__} computes two answers after one prompt differently from each alone", _SEPARATE_ROWS
        )


def _answer_features(called: nn.Module, model: nn.Module, batch: TensorBatch) -> Tensor:
    """The hidden states that predict the answers' tokens."""
    hidden_BTD: Tensor = called(**model_inputs(model, batch), hidden_only=True)
    return hidden_BTD.flatten(0, 1).index_select(0, batch["places"])


def model_inputs(model: nn.Module, batch: TensorBatch) -> dict[str, Tensor]:
    """Rows without a shared prompt need neither mask nor positions: their padding comes after everything used."""
    if "attention_mask" not in batch.tensors:
        return {"input_ids": batch["input_ids"]}
    mask_B1TT = _attention_mask(model, batch["attention_mask"])
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": mask_B1TT}


def _attention_mask(model: nn.Module, visible_B1TT: Tensor) -> Tensor:
    """The mask in the form that the model's attention implementation expects."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and window < visible_B1TT.shape[-1]:
        raise ConfigError(
            f"rows have {visible_B1TT.shape[-1]} tokens, but the model's sliding window sees {window}: the mask of a "
            "shared prompt would ignore the window",
            _SEPARATE_ROWS,
        )
    kind = config._attn_implementation
    if kind in ("sdpa", PACKED):
        return visible_B1TT
    if kind == "eager":
        added = torch.zeros_like(visible_B1TT, dtype=torch.float32)
        # The lowest finite number and not -inf: a row that sees nothing (padding) would be softmax
        # of -inf only, which is NaN.
        return added.masked_fill(~visible_B1TT, torch.finfo(torch.float32).min)
    raise ConfigError(
        f"attention '{kind}' does not accept the mask of a shared prompt", f"use sdpa or {_SEPARATE_ROWS}"
    )


def disable_dropout(model: nn.Module) -> nn.Module:
    """In place. The reference's values are computed without dropout; with it the first margins would not be 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


# objective of the training loop


class PreferenceObjective:
    """DPO, IPO (over means or sums) or length-normalized DPO, against cached values of the reference or a live one.

    Logged parts, each a mean over pairs: `margin` (times beta, as DPO's reward margin), `accuracy` (share of pairs with
    a margin above 0), `chosen` and `rejected` (each answer's gain over the reference, in nats).
    """

    def __init__(
        self,
        student: nn.Module,
        kind: PreferenceLoss = "dpo",
        beta: float = 0.1,
        log_probabilities: TargetLogProbabilities | None = None,
        live_reference: nn.Module | None = None,
    ) -> None:
        """`student` is the model itself, with `hidden_only`; the loop may call it through a wrapper."""
        if beta <= 0:
            raise ConfigError(f"beta is {beta}; expected more than 0", "0.1 is usual")
        self._student, self._kind, self._beta = student, kind, beta
        self._log_probabilities, self._live = log_probabilities or TargetLogProbabilities(), live_reference
        if live_reference is not None:
            live_reference.eval().requires_grad_(False)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}  # the reference is not trained, so checkpoints do not hold it

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: PhaseMaker) -> ObjectiveOutput:
        reference_P2 = self._reference(batch, phase)
        with phase("forward.student"):
            policy_P2 = answer_log_probabilities(model, self._student, batch, self._log_probabilities)
        with phase("forward.loss"):
            loss, margins_P = preference_loss(self._kind, self._beta, policy_P2, reference_P2, batch["answer_tokens"])
            gains_P2 = (policy_P2 - reference_P2).detach()
            parts = {
                "margin": self._beta * margins_P.detach().sum(),
                "accuracy": (margins_P.detach() > 0).float().sum(),
                "chosen": gains_P2[:, 0].sum(),
                "rejected": gains_P2[:, 1].sum(),
            }
        return ObjectiveOutput(loss, batch.count, parts)

    def _reference(self, batch: TensorBatch, phase: PhaseMaker) -> Tensor:
        if self._live is not None:
            with phase("forward.reference"), torch.no_grad():
                return answer_log_probabilities(self._live, self._live, batch, self._log_probabilities)
        if "reference" not in batch.tensors:
            raise ConfigError(
                "the batch has no log-probabilities of the reference, and there is no live reference",
                "pass the ReferenceLogProbabilities of the initial student to PairBatches",
            )
        return batch["reference"]


# The reference model's log-probabilities of both answers of every pair, computed once.
#
# The reference is the student before preference training: any other model would pull the policy toward itself, and
# the first margins would not be 0. One line per pair, by content, appended as computed: an interrupted pass resumes,
# and a shuffle cannot misalign it.


class ReferenceLogProbabilities:
    """Called with pairs, returns their [pairs, 2] log-probabilities (chosen, rejected), summed over tokens."""

    def __init__(self, logs: dict[str, tuple[float, float]]) -> None:
        self._logs = logs

    @classmethod
    def open(cls, file: Path, identity: str) -> ReferenceLogProbabilities:
        """`identity` names the weights; lines of other models are ignored."""
        lines = read_lines(file) if file.exists() else iter(())
        own = ((line["key"], line["chosen"], line["rejected"]) for line in lines if line.get("model") == identity)
        return cls({key: (chosen, rejected) for key, chosen, rejected in own})

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, pair: Pair) -> bool:
        return pair.key in self._logs

    def __call__(self, pairs: Sequence[Pair]) -> NDArray[np.float64]:
        missing = [pair.key for pair in pairs if pair.key not in self._logs]
        if missing:
            raise JoulelabError(
                f"the reference has no log-probabilities for {len(missing)} of {len(pairs)} pairs ({missing[0]}, ...)",
                "compute them for these pairs first (write_reference)",
            )
        return np.array([self._logs[pair.key] for pair in pairs], dtype=np.float64)


@torch.no_grad()
def write_reference(
    file: Path,
    identity: str,
    model: nn.Module,
    pairs: Pairs,
    *,
    batch_size: int,
    log_probabilities: TargetLogProbabilities,
    precision: str = "fp32",
    layout: PairLayout | None = None,
    called: nn.Module | None = None,
    tick: Callable[[int, int], None] = lambda pairs, tokens: None,
    shard: Shard = ALL,
) -> ReferenceLogProbabilities:
    """One pass over the pairs of this shard that the file lacks; `tick` gets pairs and tokens so far, earlier attempts
    included.

    Batches are cut before it is known what is stored, and a batch that lacks one pair is computed as a whole: the last
    bits of a number depend on the other rows of its batch, and an interrupted or sharded pass must give the same.

    `precision` is the training's, so that policy and reference round alike. The model has `hidden_only` and is on its
    device; it is in eval mode here, and restored afterwards. `called` is a wrapper around it, such as a compiled one.
    """
    layout, device = layout or PairLayout(), next(model.parameters()).device
    known = ReferenceLogProbabilities.open(file, identity)
    done, tokens = 0, 0
    if layout.shared_prompt:
        require_shared_prompt(model)
    was_training, lines = model.training, LineFile(file)
    model.eval()
    try:
        for some in _shard_batches(pairs, batch_size, shard):
            batch = layout.batch(some)
            if any(pair not in known for pair in some):
                with float32_matmul_precision(precision), autocast(precision, device):
                    logs_P2 = answer_log_probabilities(
                        model if called is None else called, model, batch.to(device), log_probabilities
                    ).tolist()
                new = [(pair, *logs) for pair, logs in zip(some, logs_P2, strict=True) if pair not in known]
                lines.append(*({"key": pair.key, "model": identity, "chosen": a, "rejected": b} for pair, a, b in new))
            done, tokens = done + len(some), tokens + batch.tokens
            tick(done, tokens)
        lines.sync()
    finally:
        lines.close()
        model.train(was_training)
    return ReferenceLogProbabilities.open(file, identity)


def _shard_batches(pairs: Pairs, batch_size: int, shard: Shard) -> Iterator[list[Pair]]:
    """The batches of this shard, of pairs of similar length."""
    order = np.argsort(pairs.lengths.sum(1), kind="stable").tolist()
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for index in shard.units([pairs.pair(batch[0]).key for batch in batches]):
        yield [pairs.pair(at) for at in batches[index]]
