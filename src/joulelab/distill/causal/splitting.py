"""Which work of a teacher can be done in shares, and the settings of a run that does one; importable without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from joulelab.errors import JoulelabError
from joulelab.runs.sharding import Shard

if TYPE_CHECKING:
    from joulelab.distill.causal.config import CausalSpec

TEACHER_STEPS = {"kd": "logits", "synthetic": "generation", "dpo": "preferences"}
"""What a pipeline needs of its teacher."""


def judges(spec: CausalSpec) -> bool:
    """Whether the teacher judges answers."""
    return spec.pipeline == "dpo" or (spec.pipeline == "synthetic" and spec.generation.min_score is not None)


def teacher_generates(spec: CausalSpec) -> bool:
    """Whether the teacher writes answers."""
    step = TEACHER_STEPS.get(spec.pipeline) if spec.until in ("teacher", "student") else spec.until
    if step == "preferences":
        return spec.preferences.candidates_from == "teacher"
    return step == "generation"


def why_not_split(spec: CausalSpec) -> str | None:
    """Why the teacher's work cannot be done by tasks that know nothing of each other; nothing: it can."""
    step = TEACHER_STEPS.get(spec.pipeline) if spec.until in ("teacher", "student") else spec.until
    if step is None and spec.pipeline == "self":
        return "self learns from a student that is trained first: there is no teacher's work to split"
    if step is None:
        return f"{spec.pipeline} has no teacher whose work could be split"
    if step == "data":
        return "until=data is not the teacher's work; only that is split"
    if step == "logits" and spec.distill.teacher == "live":
        return "distill.teacher=live asks the teacher in every step of training; only a cache is made in shares"
    if step == "preferences" and spec.preferences.candidates_from == "start":
        return "preferences.candidates_from=start: the answers are written by a student that is trained first"
    return None


def require_split(spec: CausalSpec) -> None:
    """That the settings' `shard` makes sense, as a validator says it."""
    try:
        share = Shard.parse(spec.shard or "")
    except JoulelabError as error:
        raise ValueError(f"shard: {error.message}; {error.hint}") from None
    why_not = why_not_split(spec)
    if why_not is None and spec.until == "student":
        why_not = f"shard {share} is of one step, and until=student is all of them; set until=teacher"
    if why_not is not None:
        raise ValueError(why_not)


def teacher_share(spec: CausalSpec, share: Shard) -> dict[str, Any]:
    """Settings of the run that does this share: of the step the settings stop at, or of all the teacher's work."""
    whole = spec.until == "student"
    name = f"{spec.name}-teacher" if whole else spec.name
    return {
        **spec.model_dump(mode="json"),
        "name": f"{name[:60]}-{share.name}",
        "label": f"{spec.label or spec.name}, share {share} of the teacher's work",
        "until": "teacher" if whole else spec.until,
        "shard": str(share),
    }


def teacher_work(spec: CausalSpec) -> dict[str, Any]:
    """What decides it: runs that agree in this share their teacher's work."""
    asked: dict[str, Any] = {"distill": {"codec"}}
    if TEACHER_STEPS.get(spec.pipeline) != "logits":
        asked = {"generation": {"prompts", "prompt_tokens", "answer", "chain_of_thought"}}
        asked |= {"preferences": {"judge", "rubric", "rule"}} if judges(spec) else {}
    always = dict.fromkeys(("pipeline", "data", "teacher", "device"), True)
    settings = spec.model_dump(mode="json", include={**always, **asked})
    return {**settings, "tokenizer": spec.tokenizer, "temperature": spec.distill.kept_temperature}
