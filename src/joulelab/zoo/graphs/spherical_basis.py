"""How DimeNet sees a distance and an angle at once: spherical Bessel functions times spherical harmonics.

    basis[l, n] = u(d / c) * N[l, n] * j_l(z[l, n] * d / c) * Y_l(angle),  z[l, n]: the n-th zero of j_l

torch_geometric derives the same functions symbolically, which takes ten seconds and scipy, and evaluates them one by
one in single precision, where j_6 of a bond length is mostly rounding error. Recurrences in double precision need none
of that.

Legend: E edges, W triplets, L orders, R zeros of each order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_HALVINGS = 60  # more than double precision can tell apart


class SphericalBasis(nn.Module):
    def __init__(self, orders: int, zeros: int, cutoff: float, envelope: nn.Module) -> None:
        super().__init__()
        self.cutoff, self.envelope = cutoff, envelope
        zeros_LR = bessel_zeros(orders, zeros)
        following_LR = torch.stack([spherical_bessel(order + 1, row)[-1] for order, row in enumerate(zeros_LR)])
        self.register_buffer("zeros", zeros_LR, persistent=False)
        self.register_buffer("norm", math.sqrt(2) / following_LR.abs(), persistent=False)

    def forward(self, distance_E: Tensor, cosine_W: Tensor, kj_W: Tensor) -> Tensor:
        radial_ELR = self._radial((distance_E / self.cutoff).double()).to(distance_E.dtype)
        angular_WL = torch.stack(harmonics(radial_ELR.shape[1], cosine_W), dim=1)
        return (radial_ELR[kj_W] * angular_WL[:, :, None]).flatten(1)

    def _radial(self, share_E: Tensor) -> Tensor:
        assert isinstance(self.zeros, Tensor) and isinstance(self.norm, Tensor)
        # each order has zeros of its own, so of the order l only its own row is wanted
        values = spherical_bessel(len(self.zeros) - 1, share_E[:, None, None] * self.zeros)
        own_ELR = torch.stack([value_ELR[:, order] for order, value_ELR in enumerate(values)], dim=1)
        fading_E: Tensor = self.envelope(share_E)
        return fading_E[:, None, None] * self.norm * own_ELR


def spherical_bessel(order: int, x: Tensor) -> list[Tensor]:
    """j_0 to j_order of x > 0, in x's precision."""
    values = [x.sin() / x, x.sin() / x**2 - x.cos() / x]
    for lower in range(1, order):
        values.append((2 * lower + 1) / x * values[-1] - values[-2])
    return values[: order + 1]


def bessel_zeros(orders: int, count: int) -> Tensor:
    """The first zeros of j_0 to j_(orders - 1), found by halving: one of j_(l + 1) lies between any two of j_l."""
    zeros = torch.arange(1, count + orders, dtype=torch.float64) * math.pi
    rows = [zeros[:count]]
    for order in range(1, orders):
        low, high = zeros[:-1], zeros[1:]
        at_low = spherical_bessel(order, low)[-1]
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            beyond = spherical_bessel(order, middle)[-1] * at_low > 0
            low, high = torch.where(beyond, middle, low), torch.where(beyond, high, middle)
        zeros = (low + high) / 2
        rows.append(zeros[:count])
    return torch.stack(rows)


def harmonics(orders: int, cosine: Tensor) -> list[Tensor]:
    """Y_l of an angle, all without azimuth: Legendre polynomials of its cosine, normalised over the sphere."""
    polynomials = [torch.ones_like(cosine), cosine]
    for order in range(1, orders - 1):
        polynomials.append(((2 * order + 1) * cosine * polynomials[-1] - order * polynomials[-2]) / (order + 1))
    return [math.sqrt((2 * order + 1) / (4 * math.pi)) * value for order, value in enumerate(polynomials[:orders])]
