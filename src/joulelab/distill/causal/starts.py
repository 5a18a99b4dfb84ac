"""Teacher and student by their shapes, looked at before anything is computed: a slip would be told hours later."""

from __future__ import annotations

from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.shapes import SHAPES
from joulelab.errors import ConfigError
from joulelab.zoo.extract_student import check_layers
from joulelab.zoo.pretrained import causal_lm_config


def require_models(spec: CausalSpec) -> None:
    """That they are language models, and that the student's layers or embeddings are the teacher's to give."""
    student = spec.student
    if spec.until == "student" and student.model is not None:
        causal_lm_config(student.model)
    if spec.until == "data" or not (spec.has_teacher or student.teacher_embeddings):
        return
    teacher = causal_lm_config(spec.teacher.model)
    if spec.until != "student":
        return
    if student.layers is not None:
        check_layers(student.layers, int(teacher.num_hidden_layers))
    if student.teacher_embeddings:
        require_room_for_embeddings(int(teacher.hidden_size), SHAPES[str(student.size)].width)


def require_room_for_embeddings(teacher_width: int, student_width: int) -> None:
    if teacher_width < student_width:
        raise ConfigError(
            f"the teacher's embeddings have {teacher_width} numbers a word, the student's {student_width}",
            "set student.teacher_embeddings=false, or a narrower size",
        )
