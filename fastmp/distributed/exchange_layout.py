"""What lies where in the memory that ranks of an expert group share, and how many rows it has room for.

The same on all ranks, and known beforehand: `fastmp plan` counts these bytes, `PeerExchange` reserves them.
Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ExchangeLayout", "row_capacity"]

_ALIGNMENT = 16  # bytes that one store moves
_INT32 = 4


@dataclass(frozen=True)
class ExchangeLayout:
    """The parts of one rank's memory, for exchanges among `ranks` of rows (hidden,) of `itemsize` bytes.

    First int32 flags (ranks + 1,), at `counts_at` int32 counts (2, ranks, experts), and at `rows_at` rows (2,
    capacity, hidden). There are two of each because an exchange may begin while a peer still reads what
    the last one brought; see `fastmp.ops.exchange`.
    """

    ranks: int
    experts: int
    hidden: int
    itemsize: int
    capacity: int

    @property
    def counts_at(self) -> int:
        return _aligned(_INT32 * (self.ranks + 1))

    @property
    def rows_at(self) -> int:
        return self.counts_at + _aligned(_INT32 * 2 * self.ranks * self.experts)

    @property
    def nbytes(self) -> int:
        return self.rows_at + _aligned(2 * self.capacity * self.hidden * self.itemsize)


def row_capacity(
    tokens: int, *, top_k: int, experts: int, ep: int, etp: int, factor: float | None = None
) -> int:
    """Return the rows that a rank has room for, where each of ep x etp ranks sends the pairs of `tokens`.

    factor: room over what comes where all experts get equally many tokens, but never more than can come;
        None: as many as can come, if every token goes to experts of one rank.
    """
    most = max(ep * etp * tokens * min(top_k, experts // ep), 1)
    return most if factor is None else min(most, max(math.ceil(factor * tokens * top_k * etp), 1))


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT
