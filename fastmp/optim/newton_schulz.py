"""Newton-Schulz iteration: the nearly orthogonal factor of a matrix, the direction of a Muon update.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Each step of the iteration
maps the singular values s of X by 3.4445 s - 4.7750 s^3 + 2.0315 s^5, which brings those from 0.01 to 1 to
between 0.7 and 1.2 in five steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.profiling import traced

__all__ = ["orthogonalize"]

A, B, C = 3.4445, -4.7750, 2.0315
_STEPS = 5


@traced("fastmp.orthogonalize")
def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Return the nearly orthogonal factors of matrices (N, R, C), in their shape and dtype.

    The result does not depend on the scale of a matrix: a power of two changes no bit. A matrix of zeros
    stays zero, and an empty one as it is. On a CPU, the bits of a float32 or float64 matrix do not depend on
    the others in the batch.
    """
    if not matrices_NRC.numel():
        return matrices_NRC
    if matrices_NRC.device.type == "cpu":  # MKL's batched products of float64 do depend on the others
        return torch.cat([_iterate(each) for each in matrices_NRC.split(1)])
    return _iterate(matrices_NRC)


def _iterate(matrices: Tensor) -> Tensor:
    wide = torch.float32 if matrices.dtype.itemsize < 4 else matrices.dtype
    # 1. Scale the largest magnitude into [1, 2) by a power of two, which is exact: the squares of a strongly
    #    clipped matrix would underflow. frexp's mantissa is in [0.5, 1); a zero matrix has none.
    largest = torch.linalg.vector_norm(matrices, math.inf, (1, 2), dtype=wide)
    zero = largest == 0
    powers = (largest / (2 * torch.frexp(largest).mantissa)).masked_fill(zero, 1)
    x = matrices / powers.to(matrices.dtype)[:, None, None]
    # 2. Scale by the Frobenius norm, which bounds the singular values by one.
    norms = torch.stack(torch._foreach_norm(list(x.unbind()), 2, dtype=wide))  # each by itself
    x = (x / norms.masked_fill(zero, 1)[:, None, None]).to(x.dtype)
    # 3. Work on the wide orientation: X X^T is then the smaller Gram matrix.
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    # 4. Iterate X <- A X + (B G + C G^2) X with G = X X^T.
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.mT if tall else x
