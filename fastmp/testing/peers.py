"""Virtual ranks: the pieces of memory of several ranks, side by side in one process, and their threads.

Ranks that are forked from a process whose memory is shared (`shared_memory`) find each other in it, too.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 256  # bytes: where each part of a piece begins


@dataclass(frozen=True)
class PeerViews:
    """The memory of one rank as the ops of `fastmp.ops.exchange` take it, and the rank's place among all."""

    rank: int
    epochs: Tensor
    counts: Tensor
    rows: Tensor
    peer_offsets: Tensor


def shared_memory(num_bytes: int) -> Tensor:
    """Return zeroed bytes that forked processes share."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def virtual_ranks(
    etp: int,
    ep: int,
    *,
    num_experts: int,
    capacity: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    allocate: Callable[[int], Tensor] = lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
) -> list[PeerViews]:
    """Place the symmetric memory of etp x ep ranks side by side in zeroed bytes of `allocate`.

    The peer_offsets between them are as an etp-ep group would have them, etp ranks first.
    """
    ranks = etp * ep
    parts = (
        ((ranks + 1,), torch.int32),
        ((2, ranks, num_experts), torch.int32),
        ((2, capacity, hidden), dtype),
    )
    places, size = [], 0
    for shape, kind in parts:
        places.append(size)
        size += -(-math.prod(shape) * kind.itemsize // _ALIGNED) * _ALIGNED
    memory = allocate(ranks * size + _ALIGNED)
    start = -memory.data_ptr() % _ALIGNED
    begins = torch.arange(ranks, dtype=torch.int64) * size
    found = []
    for rank in range(ranks):
        views = [
            memory[start + rank * size + place :][: math.prod(shape) * kind.itemsize].view(kind).view(shape)
            for (shape, kind), place in zip(parts, places, strict=True)
        ]
        peer_offsets = (begins - begins[rank]).view(etp, ep).to(memory.device)
        found.append(PeerViews(rank, *views, peer_offsets))
    return found


def side_by_side(run: Callable[[PeerViews], Any], ranks: Sequence[PeerViews]) -> list[Any]:
    """Call `run` with each rank's memory, all at once, on threads, for barriers wait; results by rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))
