"""Matrices whose singular values are all near one: the direction in which Muon moves a weight.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Each step of the iteration
maps the singular values s of X by 3.4445 s - 4.7750 s^3 + 2.0315 s^5, which brings those from 0.01 to 1 to
between 0.7 and 1.2 in five steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.profiling import traced

__all__ = ["STEPS", "orthogonalize"]

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
_SMALLEST = 1e-7  # norm of a matrix that is divided by its norm; smaller ones stay smaller


@traced("fastmp.orthogonalize")
def orthogonalize(matrices_NRC: Tensor, *, steps: int = STEPS) -> Tensor:
    """The nearly orthogonal factors (N, R, C) of N matrices of R rows and C columns, in their dtype.

    The bits of a float32 or float64 matrix on a CPU do not depend on which others come with it.
    """
    if matrices_NRC.device.type == "cpu":  # MKL's batched products of float64 do depend on the others
        return torch.cat([_iterate(each, steps) for each in matrices_NRC.split(1)])
    return _iterate(matrices_NRC, steps)


def _iterate(matrices: Tensor, steps: int) -> Tensor:
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the products of X with its transpose are then the small ones
    narrow = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    norms = torch.stack(torch._foreach_norm(list(matrices.unbind()), 2, dtype=narrow))  # each by itself
    x = (x / norms.clamp(min=_SMALLEST)[:, None, None]).to(x.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.mT if tall else x
