"""Teacher and student by their shapes, looked at before anything is computed: a slip would be told hours later."""

from __future__ import annotations

import torch

from joulelab.distill.causal.config import CausalSpec, CausalStudent
from joulelab.distill.causal.shapes import SHAPES
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import causal_lm_config, import_transformers
from joulelab.zoo.students import check_layers


def require_models(spec: CausalSpec) -> None:
    """That they are language models, and that the student's layers or embeddings are the teacher's to give."""
    student = spec.student
    if spec.until == "student" and student.model is not None:
        causal_lm_config(student.model)
    if spec.until == "student" and student.lora is not None:
        _require_targets(student, spec.teacher.model)
    if spec.until == "data" or not (spec.has_teacher or student.teacher_embeddings):
        return
    teacher = causal_lm_config(spec.teacher.model)
    if spec.until != "student":
        return
    if student.layers is not None:
        check_layers(student.layers, int(teacher.num_hidden_layers))
    if student.teacher_embeddings:
        require_room_for_embeddings(int(teacher.hidden_size), SHAPES[str(student.size)].width)


def _require_targets(student: CausalStudent, teacher: str) -> None:
    """That adapters find a layer; the student's names are known from its shape, without any weight."""
    assert student.lora is not None
    transformers = import_transformers()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    if student.size is None:
        shape = causal_lm_config(student.model or teacher)
    else:  # drawn ones are Llamas
        shape = transformers.LlamaConfig(num_hidden_layers=1, **small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape)
    layers = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.dim() == 2}
    wanted = student.lora.targets
    if not any(name.rpartition(".")[2] in layers for name in wanted):
        raise ConfigError(
            f"no layer of the student has a name that student.lora.targets gives: {', '.join(wanted) or 'none'}",
            f"its layers are {', '.join(sorted(layers))}",
        )


def require_room_for_embeddings(teacher_width: int, student_width: int) -> None:
    if teacher_width < student_width:
        raise ConfigError(
            f"the teacher's embeddings have {teacher_width} numbers a word, the student's {student_width}",
            "set student.teacher_embeddings=false, or a narrower size",
        )
