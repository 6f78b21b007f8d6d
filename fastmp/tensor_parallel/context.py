"""Context parallelism: every rank of a group holds an equal part of one sequence, with balanced causal work.

The sequence is split into 2 * CP equal slices, and rank r holds slices r and 2 * CP - 1 - r, in this order
(CP 2: rank 0 has slices 0 and 3, rank 1 slices 1 and 2). A token attends to those before it, so slice i costs
i + 1/2 squares, and the two slices of any rank 2 * CP. (With contiguous parts the last rank would have
2 * CP - 1 times the work of the first.) Tokens, targets and position tables are split the same way.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from fastmp.distributed.collectives import gather_sequence, group_rank, group_size

__all__ = ["cut_sequence", "join_sequence", "local_positions", "local_slices"]


def local_slices(group: ProcessGroup | None) -> tuple[int, int]:
    """Return the indices of this rank's two slices out of 2 * CP: (r, 2 * CP - 1 - r)."""
    rank = group_rank(group)
    return rank, 2 * group_size(group) - 1 - rank


def local_positions(
    length: int, group: ProcessGroup | None, device: torch.device | None = None
) -> torch.Tensor:
    """Return the positions (length / CP,) int64 of this rank's tokens in a sequence of `length`, ascending.

    Raises:
        ValueError: 2 * CP does not divide `length`.
    """
    return cut_sequence(torch.arange(length, device=device), group, dim=0)


def cut_sequence(x: torch.Tensor, group: ProcessGroup | None, dim: int = 1) -> torch.Tensor:
    """Return this rank's slices (.., S/CP, ..) of `x` (.., S, ..), whose dimension `dim` is the sequence.

    All ranks have the same `x`, so nothing is communicated. The result is a differentiable copy, or `x`
    itself for a group of one.

    Raises:
        ValueError: 2 * CP does not divide the sequence.

    Example:
        >>> tokens = torch.arange(8)[None]
        >>> cut_sequence(tokens, group=None).shape  # with a group of 2: (1, 4)
        torch.Size([1, 8])
    """
    size = group_size(group)
    if size == 1:
        return x
    length = x.shape[dim]
    if length % (2 * size):
        raise ValueError(
            f"cut_sequence: a sequence of {length} tokens is not divisible by 2 x the context-parallel size "
            f"{size}"
        )
    first, second = local_slices(group)
    dim %= x.dim()
    index = [slice(None)] * x.dim()
    index[dim] = slice(first, second + 1, second - first)
    return x.unflatten(dim, (2 * size, length // (2 * size)))[tuple(index)].flatten(dim, dim + 1)


def join_sequence(x: torch.Tensor, group: ProcessGroup | None, dim: int = 1) -> torch.Tensor:
    """Gather the sequence (.., S, ..) from the slices (.., S/CP, ..) of all ranks, inverting `cut_sequence`.

    Forward is one all-gather. Backward is one reduce-scatter that sums the gradients of all ranks, as each
    rank computes something else from the result, for instance from keys and values.

    Raises:
        ValueError: the part of this rank has odd length.
    """
    size = group_size(group)
    if size == 1:
        return x
    if x.shape[dim] % 2:
        raise ValueError(
            f"join_sequence: the {x.shape[dim]} tokens of this rank are not two equal slices of the sequence"
        )
    # All ranks of the group, on the current stream; then put the slices of ranks 0, 1, ... in order.
    gathered = gather_sequence(x.movedim(dim, 0), group)
    slices = gathered.unflatten(0, (2 * size, -1)).unbind()  # 0, 2 * CP - 1, 1, 2 * CP - 2, ...
    return torch.cat(slices[::2] + slices[::-2]).movedim(0, dim)
