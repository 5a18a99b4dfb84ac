"""A teacher behind a server: log-probabilities of its most likely tokens at every token of the student's documents.

The OpenAI protocol has no scores of a given text with token ids; `prompt_logprobs` is vLLM's extension of it. A reply
lists the k most likely tokens of every position and the token of the text. What is missing is estimated from the
student's own sample, without bias (`logit_cache.scored_tokens`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from joulelab.data.chat.packing import NOT_TRAINED, PADDING, CausalBatch
from joulelab.distill.logit_cache.scored_tokens import ScoredTargets
from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation.server import Endpoint, ServerGenerator
from joulelab.infer.generation.settings import GenerationSettings

_CONCURRENT_REQUESTS = 32
_TEST_TIMEOUT_S = 60.0
_ROUNDING = 0.01
"""Of a sum of probabilities that a server computes in half precision."""
_HINT = "use a server with the extension prompt_logprobs, for example vLLM (--max-logprobs for more than 20 tokens)"


@dataclass(frozen=True, eq=False)
class _ScoredDocument:
    """For every token of a document but the first: the listed tokens and the token itself."""

    ids_TK: NDArray[np.int64]
    log_p_TK: NDArray[np.float32]
    own_log_p_T: NDArray[np.float32]


def require_scores(address: str, model: str, listed: int, vocabulary: int, api_key: str | None) -> None:
    """Refuse a server that cannot score a text, by a request of two tokens, before anything is trained."""
    if listed > vocabulary:
        raise ConfigError(
            f"on_policy.listed_tokens={listed:,} is more than the {vocabulary:,} tokens of the vocabulary",
            "the most likely 20 to 100 tokens have nearly all of the probability",
        )
    failed = "see the server's log; the run was not started"
    endpoint = Endpoint(address, api_key, timeout_s=_TEST_TIMEOUT_S, tries=1, after_failure=failed)
    body = {"model": model, "prompt": [0, 1], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": listed}
    try:
        endpoint.require_reachable()
        _read_scores(endpoint.post("/completions", body), [0, 1], listed, vocabulary)
    except JoulelabError as error:
        hint = _HINT if "prompt_logprobs" in error.message else error.hint
        raise ConfigError(f"teacher.server cannot score the student's tokens: {error.message}", hint) from error


def unmetered_location(address: str, model: str, metered_gpus: str, api_key: str | None) -> str | None:
    """Why this node's meter cannot measure the server, if it cannot."""
    endpoint = Endpoint(address, api_key, tries=1)
    return ServerGenerator(endpoint, model, GenerationSettings(), metered_gpus=metered_gpus).energy_gap


class ServerTeacher:
    """Scores batches by requests, one per document."""

    def __init__(
        self, address: str, model: str, listed: int, vocabulary: int, metered_gpus: str, api_key: str | None
    ) -> None:
        self._endpoint = Endpoint(address, api_key, after_failure="see the server's log; the run can be resumed")
        self._model, self._listed, self._vocabulary = model, listed, vocabulary
        # it knows where a server runs and whether its GPUs are metered
        located = ServerGenerator(self._endpoint, model, GenerationSettings(), metered_gpus=metered_gpus)
        self.energy_gap, self.identity = located.energy_gap, located.identity

    def targets(
        self, batch: CausalBatch, log_mu_N: torch.Tensor, device: torch.device, check: Callable[[], None]
    ) -> ScoredTargets:
        """Targets of the trained tokens of a batch in host memory, in reading order; `log_mu_N` are the
        log-probabilities with which the student sampled them."""
        rows, numbers = batch.ids.numpy(), batch.documents.numpy()
        trained = batch.labels.numpy() != NOT_TRAINED
        places = [
            (row, np.flatnonzero(numbers[row] == number))
            for row in range(len(rows))
            for number in range(int(numbers[row].max(initial=PADDING)) + 1)
        ]
        with ThreadPoolExecutor(_CONCURRENT_REQUESTS, thread_name_prefix="scoring") as pool:
            pending = [pool.submit(self._score, rows[row][place].tolist()) for row, place in places]
            parts = []
            try:
                for (row, place), future in zip(places, pending, strict=True):
                    scored, at = future.result(), np.flatnonzero(trained[row][place][1:])
                    parts.append((scored.ids_TK[at], scored.log_p_TK[at], scored.own_log_p_T[at]))
                    check()
            finally:
                for future in pending:
                    future.cancel()
        ids_NK, log_p_NK, own_N = (torch.from_numpy(np.concatenate(one)).to(device) for one in zip(*parts, strict=True))
        sampled_N = torch.from_numpy(rows[trained]).to(device)
        return ScoredTargets.of(ids_NK, log_p_NK, sampled_N, own_N, log_mu_N.to(device), self._vocabulary)

    def _score(self, ids: Sequence[int]) -> _ScoredDocument:
        body = {
            "model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "stream": False,
            "prompt_logprobs": self._listed,
        }  # fmt: skip
        return _read_scores(self._endpoint.post("/completions", body), ids, self._listed, self._vocabulary)


def _read_scores(reply: Mapping[str, Any], ids: Sequence[int], listed: int, vocabulary: int) -> _ScoredDocument:
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    found = choice.get("prompt_logprobs") or reply.get("prompt_logprobs")
    if not isinstance(found, list) or len(found) != len(ids):
        what = "no prompt_logprobs" if not isinstance(found, list) else f"prompt_logprobs of {len(found)} tokens"
        raise JoulelabError(f"the server returned {what} for a text of {len(ids)} tokens", _HINT)
    ids_TK = np.zeros((len(ids) - 1, listed), dtype=np.int64)
    log_p_TK = np.full((len(ids) - 1, listed), -math.inf, dtype=np.float32)
    own_T = np.zeros(len(ids) - 1, dtype=np.float32)
    for place, (token, position) in enumerate(zip(ids[1:], found[1:], strict=True)):
        scores = _position_scores(position, token, listed, vocabulary)
        own_T[place] = scores[token]
        # The token of the text is reported in addition to the k most likely ones, if it is none of them. The list must
        # not depend on what was sampled, so it is then no part of it.
        if len(scores) > listed:
            del scores[token]
        best = sorted((one for one in scores if one < vocabulary), key=lambda one: -scores[one])[:listed]
        ids_TK[place, : len(best)] = best
        log_p_TK[place, : len(best)] = [scores[one] for one in best]
    return _ScoredDocument(ids_TK, log_p_TK, own_T)


def _position_scores(position: Any, token: int, listed: int, vocabulary: int) -> dict[int, float]:
    """Log-probabilities by token. Anything that is not a distribution over the student's tokens
    would train it on nonsense."""
    where = f"the server's prompt_logprobs at token {token}"
    try:
        scores = {int(one): float(value["logprob"]) for one, value in position.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise JoulelabError(f'{where} are {position!s:.80}; expected {{"id": {{"logprob": number}}}}', _HINT) from None
    if token not in scores:
        raise JoulelabError(f"the server's prompt_logprobs lack token {token} of the text itself", _HINT)
    if len(scores) < listed:
        raise JoulelabError(f"{where} list {len(scores)} tokens instead of on_policy.listed_tokens={listed}", _HINT)
    total = sum(math.exp(min(score, 1.0)) for score in scores.values())
    if not total <= 1 + _ROUNDING:  # also NaN
        raise JoulelabError(f"{where} are not log-probabilities: the sum of the probabilities is {total:.3g}", _HINT)
    # A padded vocabulary has such tokens too, but they have no probability.
    unknown = sum(math.exp(score) for one, score in scores.items() if not 0 <= one < vocabulary)
    if unknown > _ROUNDING:
        raise JoulelabError(
            f"{where} give {unknown:.0%} to tokens outside of the student's vocabulary of {vocabulary:,}",
            "use a server whose model has the student's tokenizer (teacher.model names it)",
        )
    return scores
