"""A stand-in for the package `deep_ep`: the interface of its `Buffer`, over all-to-alls of gloo, on a CPU.

It takes what DeepEP takes, but any floating-point dtype, and refuses the rest as DeepEP does. Rows arrive by
source, then in the order of the source's tokens.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar

import torch
import torch.distributed as dist

from fastmp.distributed.deepep_buffer import DeepEPBuffer
from fastmp.ops.core.registry import compute_dtype

OF_A_MACHINE = 2  # ranks; handles between machines have another tensor


def install(*, device_types=("cpu",), dtypes=(torch.bfloat16, torch.float32, torch.float64)):
    """Make `import deep_ep` in this process find the stand-in; call it in a forked rank."""
    package = ModuleType("deep_ep")
    package.Buffer, package.topk_idx_t = Buffer, torch.int64
    sys.modules["deep_ep"] = package
    DeepEPBuffer.device_types, DeepEPBuffer.dtypes = device_types, dtypes
    Buffer.made.clear()


class _Config:
    def __init__(self, ranks):
        self.ranks = ranks

    def get_nvl_buffer_size_hint(self, row_bytes, ranks):
        assert ranks == self.ranks
        return row_bytes * ranks

    def get_rdma_buffer_size_hint(self, row_bytes, ranks):
        raise AssertionError("built for one machine")


class Buffer:
    made: ClassVar[list[Buffer]] = []  # in this process
    sizes: ClassVar[tuple[int, ...]] = (2, 4, 8)  # of groups

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.group, self.num_nvl_bytes, self.calls = group, num_nvl_bytes, []
        self.made.append(self)
        dist.barrier(group)

    @staticmethod
    def is_sm90_compiled():
        return True

    @classmethod
    def get_dispatch_config(cls, ranks):
        assert ranks in cls.sizes, f"Unsupported number of EP ranks: {ranks}"
        return _Config(ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype is torch.int64 and topk_idx.is_contiguous()
        ranks = self.group.size()
        assert num_experts % ranks == 0
        chosen = torch.where(topk_idx < 0, ranks, topk_idx // (num_experts // ranks))
        goes = torch.zeros(len(topk_idx), ranks + 1, dtype=torch.bool).scatter_(1, chosen, True)[:, :ranks]
        of_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts).int()
        assert len(of_expert) == num_experts
        return goes.sum(0).int(), None, of_expert, goes.contiguous(), None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
    ):
        self.calls.append("dispatch" if handle is None else "dispatch again")
        assert x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            goes, received, *_ = handle
            return self._sent(x, goes, received), None, None, None, None, None
        goes, ranks, experts = is_token_in_rank, self.group.size(), len(num_tokens_per_expert)
        assert torch.equal(goes.sum(0).int(), num_tokens_per_rank)
        assert (
            topk_idx.is_contiguous() and topk_weights.is_contiguous() and topk_idx.shape == topk_weights.shape
        )
        assert topk_idx.shape[1] <= 32 and topk_weights.dtype is compute_dtype(x.dtype)
        received = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        chosen, weights = (self._sent(each, goes, received) for each in (topk_idx, topk_weights))
        local = experts // ranks
        chosen = chosen - self.group.rank() * local
        own = (chosen >= 0) & (chosen < local)
        chosen, weights = chosen.where(own, -1), weights.where(own, 0)
        counts = chosen[own].bincount(minlength=local).tolist()
        handle = (goes, received) if ranks <= OF_A_MACHINE else (goes, received, torch.empty(3))
        return self._sent(x, goes, received), chosen, weights, counts, handle, None

    def combine(self, x, handle, topk_weights=None):
        self.calls.append("combine")
        assert x.is_contiguous()
        goes, received, *_ = handle
        assert len(x) == received.sum()
        if topk_weights is not None:
            assert topk_weights.is_contiguous() and topk_weights.dtype is compute_dtype(x.dtype)
            topk_weights = self._summed(topk_weights, goes, received)
        return self._summed(x, goes, received), topk_weights, None

    def _sent(self, x, goes, received):
        """The rows of x at the ranks that `goes` (T, R) names, and those that came from them."""
        return self._exchanged(torch.cat([x[to] for to in goes.t()]), goes.sum(0).tolist(), received.tolist())

    def _summed(self, rows, goes, received):
        back = self._exchanged(rows, received.tolist(), goes.sum(0).tolist())
        total = torch.zeros(len(goes), rows.shape[1], dtype=compute_dtype(rows.dtype))
        for to, part in zip(goes.t(), back.split(goes.sum(0).tolist()), strict=True):
            total[to] += part
        return total.to(rows.dtype)

    def _exchanged(self, rows, sent, received):
        bytes_of_rows = rows.contiguous().view(torch.uint8)
        found = bytes_of_rows.new_empty(sum(received), bytes_of_rows.shape[1])
        dist.all_to_all_single(found, bytes_of_rows, received, sent, group=self.group)
        return found.view(rows.dtype)
