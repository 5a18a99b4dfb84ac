"""Answers from a server that speaks the OpenAI protocol: vLLM, for one, in an environment of its own."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from joulelab.errors import ConfigError
from joulelab.infer.generation.answers import Answer, Prompt
from joulelab.infer.generation.server_place import ServerPlace, address_of, place_of, unmetered_gpus
from joulelab.infer.generation.server_requests import Endpoint, read_answer, request_body
from joulelab.infer.generation.settings import GenerationSettings


class ServerGenerator:
    """Many requests are under way at once, so that the server can batch them; answers come in the prompts' order.

    `energy_gap` is nothing where the server computes on this node and its GPUs are metered: a meter of this node then
    has its joules. Else it says why not, and the stage's energy has to be reported missing.
    """

    def __init__(
        self,
        server: str | Endpoint,
        model: str,
        settings: GenerationSettings,
        *,
        api_key: str | None = None,
        concurrency: int = 32,
        on_this_node: bool | None = None,
        metered_gpus: str = "auto",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`server` is its address up to /v1. `on_this_node` overrides what is seen of the server's place;
        `metered_gpus` is `energy.gpus`; `extra` goes into every request as it is."""
        if settings.num_beams > 1:
            raise ConfigError(
                "the OpenAI protocol has no beam search", "set num_beams=1, or use a model in this process"
            )
        self.settings, self.prompts_at_once = settings, concurrency
        self._endpoint = Endpoint(server, api_key) if isinstance(server, str) else server
        self._model, self._extra = model, dict(extra or {})
        asked = f"?{json.dumps(self._extra, sort_keys=True)}" if self._extra else ""
        self.identity = f"{self._endpoint.base_url.rstrip('/')}#{model}{asked}"
        address_of(self._endpoint.base_url)
        self._endpoint.require_answer()
        self.place = ServerPlace(bool(on_this_node), "the settings say so")
        if on_this_node is None:
            self.place = place_of(self._endpoint.base_url)
        self._metered_gpus = metered_gpus

    @property
    def energy_gap(self) -> str | None:
        if not self.place.here:
            return f"the server's joules are not in this node's meter: {self.place.reason}"
        beside = unmetered_gpus(self.place.pids, self._metered_gpus)
        if beside:
            return f"the server computes on GPUs that are not metered here: {', '.join(beside)}; set energy.gpus"
        return None

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[list[Answer]]:
        under_way: deque[list[Future[Answer]]] = deque()
        with ThreadPoolExecutor(self.prompts_at_once, thread_name_prefix="asking") as pool:
            try:
                for prompt in prompts:
                    under_way.append([pool.submit(self._ask, prompt, number) for number in range(self.settings.n)])
                    if len(under_way) > self.prompts_at_once:
                        yield [future.result() for future in under_way.popleft()]
                while under_way:
                    yield [future.result() for future in under_way.popleft()]
            finally:
                for future in (one for some in under_way for one in some):
                    future.cancel()

    def _ask(self, prompt: Prompt, answer: int) -> Answer:
        path, body = request_body(self._model, self.settings, prompt, answer, self._extra)
        return read_answer(self._endpoint.post(path, body), self.settings.max_new_tokens)
