"""Layout of the symmetric memory in which the ranks of an expert group exchange rows.

The layout is the same on all ranks and known beforehand: `fastmp plan` counts these bytes,
`SymmetricExchange` reserves them. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExchangeLayout"]

_ALIGNMENT = 16  # bytes that one store moves
_INT32 = 4


@dataclass(frozen=True)
class ExchangeLayout:
    """Byte offsets in one rank's buffer, for exchanges among `ranks` of rows (hidden,) of `itemsize` bytes.

    | offset | tensor | shape |
    |---|---|---|
    | 0 | int32 epochs | (ranks + 1,) |
    | `counts_at` | int32 counts | (2, ranks, experts) |
    | `rows_at` | rows | (2, capacity, hidden) |

    Counts and rows are double-buffered: an exchange may begin while a peer still reads the rows of the last
    one, see `fastmp.ops.exchange`.
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


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT
