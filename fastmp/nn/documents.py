"""Packed documents: rows that hold several documents, with attention masked at their borders.

Shapes: B batch, T the full sequence, n documents of a batch.
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

    position_ids_BT: int64, of the full sequence also under sequence and context parallelism.
    """

    position_ids_BT: Tensor
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, kw_only=True)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return `make()`, computed once for each `key` and shared by layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@dataclass(frozen=True, eq=False)
class Documents(Positions):
    """The documents of a packed batch; made by `from_position_ids`.

    position_ids_BT: positions, from 0 in each document.
    borders_n: `cu_seqlens`, (n + 1,) int32: where documents begin in the flattened batch, and B * T. The last
        entries may repeat.
    longest: the most tokens of a document.
    static: shapes and `longest` are the same in all batches and values are read only on the device, as CUDA
        graphs need; True with `max_documents`.

    It is registered as a pytree of two tensors.

    Example:
        >>> Documents.from_position_ids(torch.tensor([[0, 1, 2, 0, 1]])).borders_n
        tensor([0, 3, 5], dtype=torch.int32)
    """

    borders_n: Tensor
    longest: int
    static: bool = False

    @classmethod
    def from_position_ids(cls, position_ids_BT: Tensor, *, max_documents: int | None = None) -> Documents:
        """Make documents that begin at each position 0 and at the start of each row.

        Padding at the end of a row is a document: positions that start at 0.

        Args:
            position_ids_BT: integers (batch, sequence).
            max_documents: the most documents of a batch. Required for CUDA graphs, which need fixed shapes,
                and for position ids on a GPU, where counting would synchronise; otherwise build documents on
                the CPU and move them with `to`. Surplus documents would be joined: a CPU raises, a GPU does
                not check.

        Raises:
            ValueError: other shapes or dtypes, a GPU without `max_documents`, or more documents than that.
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
        """Make a document of each row's tokens, and one of the padding after them; positions continue.

        Args:
            padding_BS: bool, True for padding at the end of a row.
            static: as CUDA graphs need; on a CPU, attention then uses a mask instead of a loop over rows.

        Raises:
            ValueError: another dtype or shape, or, on a CPU, tokens after padding.
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

    def fresh(self) -> Documents:
        """Return the same documents with an empty cache of `once`."""
        return self._each(lambda tensor: tensor)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Documents:
        """Return these documents on `device`; a copy from pinned memory is asynchronous."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Documents:
        """Return these documents in pinned memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Documents:
        return replace(
            self,
            position_ids_BT=change(self.position_ids_BT),
            borders_n=change(self.borders_n),
            _made={},
        )

    def borders(self, queries: range, keys: range) -> Borders:
        """Return the borders for queries and keys at these positions of every row, shared by all layers."""

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
