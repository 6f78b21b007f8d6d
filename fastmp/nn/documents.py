"""Packed documents: rows of a batch that hold several documents, of which a token sees its own only.

Shapes: B batch, T the undivided sequence, n documents of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from fastmp.ops.attention import Borders
from fastmp.ops.core.registry import can_read_values

__all__ = ["Documents", "Positions"]

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Positions:
    """The position of each token of a batch.

    position_ids_BT: int64; they cover the undivided sequence also under sequence and context parallelism.
    """

    position_ids_BT: Tensor
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, kw_only=True)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returned when it was first asked for under `key`: layers share it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@dataclass(frozen=True, eq=False)
class Documents(Positions):
    """Which document each token of a batch is in, and its position there; made by `from_position_ids`.

    position_ids_BT: from 0 in each document.
    borders_n: (n + 1,) int32, where documents begin among the rows laid one after the other, and B * T
        (`cu_seqlens`). The last entries may repeat.
    longest: no document is longer.
    static: borders have one shape and `longest` one value in all batches, and their values are read on the
        device alone, as graphs need; so with `max_documents`.

    It is a pytree: two tensors, and `longest` and `static` around them.
    """

    borders_n: Tensor
    longest: int
    static: bool = False

    @classmethod
    def from_position_ids(cls, position_ids_BT: Tensor, *, max_documents: int | None = None) -> Documents:
        """Documents that begin where a position is 0, and with every row.

        Padding at the end of a row is documents of its own: any positions that start at 0.

        max_documents: no batch has more, documents that begin with a row included. Needed for CUDA graphs,
            where batches must be alike, and on a GPU, where counting documents would wait for it; else make
            this on the CPU, where batches come from, and move it with `to`. Beyond this number documents
            would be joined: a CPU raises, a GPU does not look.

        ValueError for other shapes, on a GPU without `max_documents`, and for more documents than that.
        """
        if position_ids_BT.dim() != 2 or not position_ids_BT.numel() or position_ids_BT.is_floating_point():
            raise ValueError(
                "Documents: position_ids must be integers (batch, sequence), got "
                f"{position_ids_BT.dtype} of shape {tuple(position_ids_BT.shape)}"
            )
        B, T = position_ids_BT.shape
        begins_BT = position_ids_BT == 0
        begins_BT[:, 0] = True
        readable = position_ids_BT.device.type == "cpu"
        count = int(begins_BT.sum()) if readable else None
        size = count if max_documents is None else max_documents
        if size is None:
            raise ValueError(
                "Documents: on a GPU, counting documents would wait for it; make this from a CPU's tensor "
                "and move it with .to(device), or give max_documents"
            )
        if count is not None and count > size:
            raise ValueError(f"Documents: the batch has {count} documents, more than max_documents {size}")
        begins = torch.nonzero_static(begins_BT.flatten(), size=size, fill_value=B * T).flatten()
        borders_n = torch.nn.functional.pad(begins, (0, 1), value=B * T).int()
        if max_documents is not None:
            return cls(position_ids_BT, borders_n, T, static=True)
        return cls(position_ids_BT, borders_n, int(borders_n.diff().max()))

    @classmethod
    def from_padding(cls, padding_BS: Tensor, *, static: bool = False) -> Documents:
        """A document for every row, and one for the padding behind it, where positions go on.

        padding_BS: bool, True for padding, which ends its row.
        static: as graphs need it; on a CPU, attention then takes a mask in place of one row after the other.

        ValueError for another dtype or shape, and on a CPU for padding that tokens follow.
        """
        if padding_BS.dtype != torch.bool or padding_BS.dim() != 2:
            raise ValueError(
                "Documents: padding must be bool of shape (batch, sequence), got "
                f"{padding_BS.dtype} of shape {tuple(padding_BS.shape)}"
            )
        B, S = padding_BS.shape
        if can_read_values(padding_BS) and bool((padding_BS[:, :-1] & ~padding_BS[:, 1:]).any()):
            raise ValueError("Documents: padding must end its row, but tokens follow it")
        starts_B = torch.arange(0, B * S, S, device=padding_BS.device)
        ends_B = starts_B + S - padding_BS.sum(1)
        borders_n = torch.nn.functional.pad(torch.stack((starts_B, ends_B), 1).flatten(), (0, 1), value=B * S)
        position_ids_BS = torch.arange(S, device=padding_BS.device).expand(B, S)
        return cls(position_ids_BS, borders_n.int(), S, static)

    def anew(self) -> Documents:
        """The same documents, of which `once` has made nothing yet: that lives as long as its user."""
        return self._each(lambda tensor: tensor)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Documents:
        """These documents on `device`; a copy from pinned memory does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Documents:
        """These documents in pinned memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Documents:
        return replace(
            self,
            position_ids_BT=change(self.position_ids_BT),
            borders_n=change(self.borders_n),
            _made={},
        )

    def borders(self, queries: range, keys: range) -> Borders:
        """Those of the parts of documents in these positions of every row; made once for all layers."""

        def part(positions: range) -> Tensor:
            T, length = self.position_ids_BT.shape[1], len(positions)
            if length == T:
                return self.borders_n
            within = (self.borders_n % T).clamp(positions.start, positions.stop) - positions.start
            return (self.borders_n // T * length + within).int()

        return self.once(
            (queries, keys),
            lambda: Borders(
                part(queries),
                part(keys),
                min(self.longest, len(queries)),
                min(self.longest, len(keys)),
                self.static,
            ),
        )


register_pytree_node(
    Documents,
    lambda own: ([own.position_ids_BT, own.borders_n], (own.longest, own.static)),
    lambda tensors, others: Documents(*tensors, *others),
)
