"""Newton-Schulz iteration: the nearly orthogonal factor of a matrix, the direction of a Muon update.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Each step of the iteration
maps the singular values s of X by 3.4445 s - 4.7750 s^3 + 2.0315 s^5, which brings those from 0.01 to 1 to
between 0.7 and 1.2 in five steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.profiling import traced

__all__ = ["orthogonalize"]

A, B, C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_SMALLEST = 1e-7  # norms are clamped to it, so that a zero matrix stays zero


@traced("fastmp.orthogonalize")
def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Return the nearly orthogonal factors of matrices (N, R, C), in their shape and dtype.

    On a CPU, the bits of a float32 or float64 matrix do not depend on the others in the batch.
    """
    if matrices_NRC.device.type == "cpu":  # MKL's batched products of float64 do depend on the others
        return torch.cat([_iterate(each) for each in matrices_NRC.split(1)])
    return _iterate(matrices_NRC)


def _iterate(matrices: Tensor) -> Tensor:
    # 1. Work on the wide orientation: X X^T is then the smaller Gram matrix.
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    # 2. Scale by the Frobenius norm, which bounds the singular values by one.
    narrow = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    norms = torch.stack(torch._foreach_norm(list(matrices.unbind()), 2, dtype=narrow))  # each by itself
    x = (x / norms.clamp(min=_SMALLEST)[:, None, None]).to(x.dtype)
    # 3. Iterate X <- A X + (B G + C G^2) X with G = X X^T.
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.mT if tall else x
