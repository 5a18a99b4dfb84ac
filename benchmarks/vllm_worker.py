"""vLLM in its own process and environment, for `generation_speed.py`: loads one model, generates every case, and
prints what was generated when. Imports nothing of joulelab.

    PYTHON benchmarks/vllm_worker.py WORK.json

The work file has `model` (a folder), `room` (tokens per row, at most), `memory` (share of the GPU's) and `cases`: each
with `answers`, `new_tokens`, `seconds`, and `rounds`, lists of prompts as token ids. The first round is a warm-up; the
others are generated until `seconds` have passed. One JSON line per case, with monotonic times in nanoseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    begin_ns = time.monotonic_ns()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the work file")
    work: dict[str, Any] = json.loads(parser.parse_args().work.read_text())
    import vllm  # type: ignore[import-not-found,unused-ignore]

    engine = vllm.LLM(
        work["model"], dtype=work["dtype"], max_model_len=work["room"], gpu_memory_utilization=work["memory"]
    )
    _report(event="loaded", version=vllm.__version__, begin_ns=begin_ns, end_ns=time.monotonic_ns())
    for case in work["cases"]:
        # No seed per request: FlashInfer's sampler, where it is installed, has none.
        settings = vllm.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=case["new_tokens"], n=case["answers"])
        warm_ns = time.monotonic_ns()
        _generate(engine, settings, case["rounds"][0])
        ready_ns, tokens, requests = time.monotonic_ns(), 0, 0
        for prompts in case["rounds"][1:]:
            tokens += _generate(engine, settings, prompts)
            requests += 1
            if time.monotonic_ns() - ready_ns > 1e9 * case["seconds"]:
                break
        end_ns = time.monotonic_ns()
        _report(
            event="case", case=case["name"], tokens=tokens, requests=requests, warm_up_ns=[warm_ns, ready_ns],
            window_ns=[ready_ns, end_ns],
        )  # fmt: skip


def _generate(engine: Any, settings: Any, prompts: list[list[int]]) -> int:
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
    return sum(len(answer.token_ids) for one in found for answer in one.outputs)


def _report(**values: Any) -> None:
    print("RESULT " + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
