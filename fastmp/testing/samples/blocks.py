"""Sample arguments of block_rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#   blocks, largest number of rows of a block, dropped blocks
_CASES = ((33, 40, 0), (129, 9, 20), (1, 700, 0), (8, 0, 0), (17, 3, 17))


def _tables(sizes: Tensor, order: Tensor, nowhere: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return starts, places and the number of rows of blocks that move to `order`; `nowhere` are dropped."""
    starts = sizes.cumsum(0) - sizes
    places = torch.empty_like(starts)
    places[order] = sizes[order].cumsum(0) - sizes[order]
    places[nowhere] = -1
    return starts.to(torch.int32), places.to(torch.int32), int(sizes.sum())


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for blocks, most, dropped in _CASES:
        sizes = torch.randint(0, most + 1, (blocks,), generator=generator)
        order, nowhere = (torch.randperm(blocks, generator=generator) for _ in range(2))
        yield _tables(sizes, order, nowhere[:dropped])
