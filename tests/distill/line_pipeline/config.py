"""Settings: a teacher fits a line to points, a student fits the teacher."""

from pydantic import Field

from joulelab.distill.config import DistillSpec
from joulelab.runs.spec import Section
from joulelab.train.config import PipelineTraining


class Points(Section):
    """Points on a line."""

    count: int = Field(64, ge=4)
    """How many."""


class LineDistill(Section):
    """loss = alpha (y - student)^2 + (1 - alpha) (teacher - student)^2."""

    alpha: float = Field(0.5, ge=0, le=1)
    """Weight of the points."""


class LineSpec(DistillSpec):
    """Distill a line."""

    data: Points = Points()
    """The points."""
    teacher: PipelineTraining = PipelineTraining(epochs=20, learning_rate=0.1, schedule="constant")
    """How the teacher is trained."""
    distill: LineDistill = LineDistill()
    """What the student learns from."""
    training: PipelineTraining = PipelineTraining(epochs=20, learning_rate=0.1, schedule="constant")
    """How the student is trained."""

    @property
    def has_teacher(self):
        return self.until == "teacher" or self.distill.alpha < 1

    @property
    def trainings(self):
        return (*([self.teacher] if self.has_teacher else []), self.training)
