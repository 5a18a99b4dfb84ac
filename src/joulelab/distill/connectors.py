"""From the student's features to the teacher's: where the two differ in width, something must learn to translate.

For vectors that is a linear map, for maps of a CNN the 1x1 convolution of FitNets. It is trained along with the student
and thrown away afterwards. Shapes: B batch, H width; maps are [B, C, H, W].
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def make_connector(student_width: int, teacher_width: int, layer_norm: bool = False) -> nn.Module:
    """Identity where the widths agree, else a linear map from the student's width to the teacher's."""
    meet: nn.Module = nn.Identity() if student_width == teacher_width else nn.Linear(student_width, teacher_width)
    return nn.Sequential(meet, nn.LayerNorm(teacher_width)) if layer_norm else meet


def make_regressor(student_channels: int, teacher_channels: int, layer_norm: bool = False) -> nn.Module:
    """FitNets' regressor for maps; the norm is over each place's channels, as GroupNorm of one group is not."""
    if student_channels == teacher_channels and not layer_norm:
        return nn.Identity()
    meet: nn.Module = nn.Identity()
    if student_channels != teacher_channels:
        meet = nn.Conv2d(student_channels, teacher_channels, kernel_size=1)
    return nn.Sequential(meet, ChannelNorm(teacher_channels)) if layer_norm else meet


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map."""

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        return super().forward(maps_BCHW.movedim(1, -1)).movedim(-1, 1)


def to_same_size(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Maps of different sizes meet at the smaller one, by averaging; vectors are left as they are."""
    if student.dim() < 4 or student.shape[-2:] == teacher.shape[-2:]:
        return student, teacher
    height, width = (min(sizes) for sizes in zip(student.shape[-2:], teacher.shape[-2:], strict=True))
    return F.adaptive_avg_pool2d(student, (height, width)), F.adaptive_avg_pool2d(teacher, (height, width))
