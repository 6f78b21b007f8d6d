"""Row-parallel product whose bits do not depend on the number of ranks, for `fastmp.ops.batch_invariant`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.distributed.collectives import all_reduce_, group_rank, group_size
from fastmp.ops import exact
from fastmp.ops.core.registry import autocast
from fastmp.ops.invariant_mode import exactly

__all__ = ["exact_row_product"]


def exact_row_product(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """Return the sum over `group` of x (..., I/P) times the transpose of weight (O, I/P), rounded once.

    Ranks agree on the exponents of rows, which cost two small all-reduces, and add integers.

    Args:
        sequence_parallel: return this rank's part (S/P, ..., O) of x (S, ..., I/P).
    """
    x, weight = autocast(x, weight)
    with exactly(x):
        a, b = x.flatten(0, -2).double(), weight.double()
        of_a, of_b = exact.exponents(a), exact.exponents(b)
        if group_size(group) > 1:
            for exponents in (of_a, of_b):
                dist.all_reduce(exponents, dist.ReduceOp.MAX, group=group)
        parts = torch.stack(exact.integer_products(a, b, of_a, of_b))
        if group_size(group) > 1:
            all_reduce_(parts, group)
        main, rest = parts.unbind()
        y = exact.from_integers(main, rest, of_a, of_b).to(x.dtype).view(*x.shape[:-1], len(weight))
        return y.chunk(group_size(group))[group_rank(group)] if sequence_parallel else y
