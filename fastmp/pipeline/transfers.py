"""Point-to-point transfers in flight between pipeline ranks, and the groups that they run on."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fastmp.status import process_status

__all__ = ["Transfer", "same_ranks"]


class Transfer(NamedTuple):
    """Tensors in flight to or from rank `peer` of `group`; `op` is "send" or "recv"."""

    op: str
    group: dist.ProcessGroup | None
    peer: int
    works: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the transfer and return the tensors."""
        process_status.message = self
        for work in self.works:
            work.wait()
        process_status.message = None
        return self.tensors

    @property
    def is_complete(self) -> bool:
        """True if it is over; not allowed during capture."""
        return all(work.is_completed() for work in self.works)


def same_ranks(
    group: dist.ProcessGroup | None, backward_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the group for gradients. Raises ValueError if its ranks are not those of `group`."""
    if backward_group is None:
        return group
    ranks = [None if each is None else dist.get_process_group_ranks(each) for each in (group, backward_group)]
    if ranks[0] != ranks[1]:
        raise ValueError(f"Pipeline: group has the ranks {ranks[0]}, but backward_group {ranks[1]}")
    return backward_group
