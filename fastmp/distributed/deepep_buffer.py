"""DeepEP buffer: expert-parallel dispatch and combine across machines.

DeepEP (https://github.com/deepseek-ai/DeepEP) sends a token once to each rank that has some of its experts:
over NVLink within a machine, over RDMA between machines. It is an optional package, used through the class
`deep_ep.Buffer` of its versions 1.2 and 2.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["DeepEPBuffer"]

_OF_A_MACHINE = 8  # ranks, which DeepEP takes to reach each other by NVLink


class DeepEPBuffer:
    """`deep_ep.Buffer` of an etp-ep group, made by the first `reserve` and shared by all layers.

    Attributes:
        device_types, dtypes: of the rows that DeepEP sends.
        index_dtype: of its expert indices.
    """

    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    index_dtype = torch.int64

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._buffer: Any = None
        self._reserved: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> DeepEPBuffer:
        return self  # a copied layer has the same peers

    def check(self, rows: Tensor) -> None:
        """Check that DeepEP is installed and can send `rows` (T, H) between these ranks, without allocating.

        Meta tensors always pass.

        Raises:
            ValueError: the device, the dtype, the bytes of a row or the number of ranks is not supported, or
                DeepEP is not installed.
        """
        if rows.is_meta:
            return
        what = 'moe.dispatcher "deepep"'
        if rows.device.type not in self.device_types:
            raise ValueError(
                f'{what} sends rows between GPUs, got device {rows.device}; take "alltoall" or, for ranks of '
                'one machine, "symmetric"'
            )
        if rows.dtype not in self.dtypes:
            names = " or ".join(str(dtype) for dtype in self.dtypes)
            raise ValueError(f'{what} sends rows of {names}, got {rows.dtype}; take "alltoall"')
        kind, ranks = _package(what).Buffer, self.group.size()
        # Kernels for Hopper copy half a row at a time, in units of 16 bytes, by way of 8 KiB less 8 bytes.
        step, most = (32, 2 * (8192 - 16)) if kind.is_sm90_compiled() else (16, 2**31)
        row_bytes = rows.shape[1] * rows.element_size()
        if row_bytes % step or row_bytes > most:
            raise ValueError(
                f"{what} sends rows of a multiple of {step} bytes, {most} at most, got hidden_size "
                f'{rows.shape[1]} in {rows.dtype}, {row_bytes} bytes; take "alltoall"'
            )
        try:
            kind.get_dispatch_config(ranks)
        except AssertionError as error:
            raise ValueError(f'{what} among {ranks} ranks, etp x ep: {error}; take "alltoall"') from None

    def reserve(self, rows: Tensor) -> Any:
        """Return the buffer for rows like `rows` (T, H); the first call is a collective and makes it.

        Raises:
            ValueError: the hidden size, dtype or device differs from the first call; and as `check`.
        """
        if rows.is_meta:
            return _Shapes(self.group.size())
        wanted = (rows.shape[1], rows.dtype, rows.device)
        if self._buffer is None:
            self.check(rows)
            self._buffer, self._reserved = self._make(rows.shape[1] * rows.element_size()), wanted
        if wanted != self._reserved:
            raise ValueError(
                "DeepEPBuffer: layers that share a buffer send rows of one kind; (hidden, dtype, device) are "
                f"{wanted}, but it was reserved for {self._reserved}"
            )
        return self._buffer

    def _make(self, row_bytes: int) -> Any:
        package, ranks = _package("DeepEPBuffer"), self.group.size()
        self.index_dtype = getattr(package, "topk_idx_t", torch.int64)
        configs = package.Buffer.get_dispatch_config(ranks), package.Buffer.get_combine_config(ranks)
        by_nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
        by_rdma = 0
        if ranks > _OF_A_MACHINE:  # a build for one machine has no such hint
            by_rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)
        return package.Buffer(self.group, by_nvlink, by_rdma)


class _Shapes:
    """Stand-in for meta tensors: each rank receives as many rows as it sends, and one for each expert."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_dispatch_layout(self, indices: Tensor, num_experts: int) -> tuple[Any, ...]:
        return None, None, range(num_experts), None, None

    def dispatch(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_expert: range = range(0),
        **_: Any,
    ) -> tuple[Any, ...]:
        counts = [1] * (len(num_tokens_per_expert) // self.ranks)
        return _like(x), _like(topk_idx), _like(topk_weights), counts, (), None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        return _like(x), _like(topk_weights), None


def _like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty_like(tensor)


def _package(what: str) -> ModuleType:
    try:
        import deep_ep
    except ImportError as error:
        raise ValueError(
            f"{what} needs the package deep_ep ({error}): install https://github.com/deepseek-ai/DeepEP, or "
            'take "alltoall", or, for ranks of one machine, "symmetric"'
        ) from None
    return deep_ep
