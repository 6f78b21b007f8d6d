"""Compare replicas bit for bit: parameters, buffers and replicated gradients.

The checksum of a tensor is an integer sum of its bits, each times a weight of its position: exact in any
order of summation, and different if a bit changed or two elements were swapped. Replicas follow from the
process groups: one all-reduce a group of the largest and smallest checksum of each tensor shows if all are
equal. Only if they are not, ranks exchange names and checksums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.distributed.collectives import gather_objects, group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.grad_buffers import GradBuffer, main_grad
from fastmp.optim.named_params import named_buffers, named_parameters
from fastmp.tensor_parallel.attributes import parallel_attributes

__all__ = ["ReplicaError", "Replicas", "checksum", "make_equal"]

_AT_ONCE = 1 << 22  # elements, which bounds the memory for their bits and weights
_ODD = 0x1E3779B97F4A7C15  # spreads the weights of places over 64 bits; odd, so that no bit is lost
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_COPIES = ("FP8 weight", "transposed FP8 weight", "FP8 scales of")

Key = tuple[Any, ...]


class ReplicaError(ArithmeticError):
    """Raised if replicas differ; the message names the rank and the tensor."""


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 checksum of the bits of a tensor of any shape and dtype, 0-dim, on its device.

    Two tensors of one shape that differ in one element have different checksums; so have, of up to 2^31
    elements of 4 bytes, those that differ by an exchange of two.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, flat.numel(), _AT_ONCE):
        bits = flat[first : first + _AT_ONCE].view(_BITS[flat.element_size()]).long()
        places = torch.arange(first, first + bits.numel(), device=tensor.device)
        total += (bits * ((2 * places + 1) * _ODD)).sum()  # modulo 2^64
    return total


@torch.no_grad()
def make_equal(tensors: Iterable[Tensor], groups: ParallelGroups) -> None:
    """Give parameters and buffers the values of their first replica; all ranks call this."""
    for tensor in tensors:
        group = groups.edp if parallel_attributes(tensor).expert_parallel else groups.dp_cp
        if group is not None:
            contiguous = tensor.contiguous()
            dist.broadcast(contiguous, group=group, group_src=0)
            if contiguous is not tensor:
                tensor.copy_(contiguous)


class Replicas:
    """Compare replicated tensors across ranks; all ranks construct it and call `check` together.

    Replicas have the same name and the same place in the grid: parameters over data- and context-parallel
    ranks, unsharded ones over tensor-parallel ranks, experts over `edp`, and tied embeddings over stages. Of
    weights that are gathered in FP8 the FP8 copies are replicas.

    Args:
        chunks: this rank's chunks of the model.
        grads: their gradients, compared unless ZeRO-1 shards them (`grads.shard`).
    """

    def __init__(self, chunks: Sequence[nn.Module], grads: GradBuffer, groups: ParallelGroups) -> None:
        self._chunks, self._grads, self._groups = chunks, grads, groups

    def check(self, step: int) -> None:
        """Raise the same ReplicaError on all ranks if replicas differ; it names the ranks in the minority."""
        found = {key: checksum(tensor) for key, tensor in self._tensors()}
        different = self._differ(found)
        dist.all_reduce(different, dist.ReduceOp.MAX)
        if different:
            raise ReplicaError(f"step {step}: {_difference(*_everyones(found))}")

    def _differ(self, found: dict[Key, Tensor]) -> Tensor:
        """Return a 0-dim int64 flag on the device: a replica of one of these tensors has another checksum.

        Over each group, one all-reduce of the largest and the smallest checksum of every tensor.
        """
        sums = torch.stack(list(found.values()))
        different, groups = torch.zeros_like(sums[0]), self._groups
        for group, holds in (
            (groups.dp_cp, lambda key: not _is_expert(key)),
            (groups.edp, _is_expert),
            (groups.tp, lambda key: not _is_expert(key) and key[-1] is None),
            (groups.embedding, lambda key: not _is_expert(key) and key[2] is None),
        ):
            places = [place for place, key in enumerate(found) if holds(key)]
            if group is not None and places:
                own = sums[places]
                extremes = torch.stack((own, ~own))  # ~ reverses the order without overflow
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
                different = torch.maximum(different, (extremes[0] != ~extremes[1]).any().long())
        return different

    def _tensors(self) -> Iterator[tuple[Key, Tensor]]:
        """Yield (name, tensor) of this rank; replicas of a tensor have the same name on all ranks."""
        copies = self._grads.gathered_in_fp8
        for name, param in named_parameters(self._chunks):
            if name not in copies:
                yield ("parameter", name, *self._place(param)), param
                continue
            copies[name].refresh(param)
            for kind, tensor in zip(_COPIES, copies[name].tensors, strict=True):
                yield (kind, name, *self._place(param)), tensor
        for name, buffer in named_buffers(self._chunks):
            yield ("buffer", name, *self._place(buffer)), buffer
        if not self._grads.shard:
            for name, param in self._grads.parameters.items():
                yield ("gradient", name, *self._place(param)), main_grad(param)

    def _place(self, tensor: Tensor) -> Key:
        marks, groups = parallel_attributes(tensor), self._groups
        stage = None if marks.pipeline_shared else group_rank(groups.pp)
        if marks.expert_parallel:
            return stage, "expert", group_rank(groups.ep), group_rank(groups.etp)
        return stage, group_rank(groups.tp) if marks.tensor_model_parallel else None


def _is_expert(key: Key) -> bool:
    return "expert" in key[2:]


def _everyones(found: dict[Key, Tensor]) -> tuple[list[list[Key]], list[list[int]]]:
    """All-gather the names and checksums of all ranks; called once some are known to differ."""
    own = list(found), [int(value) for value in found.values()]
    keys, sums = zip(*gather_objects(own, dist.group.WORLD), strict=True)
    return list(keys), list(sums)


def _difference(keys: Sequence[Sequence[Key]], sums: Sequence[Sequence[int]]) -> str:
    """Return a message naming the ranks whose copy of a tensor differs, from all names and checksums."""
    held: dict[Key, dict[int, int]] = {}
    for rank, (names, own) in enumerate(zip(keys, sums, strict=True)):
        for key, value in zip(names, own, strict=True):
            held.setdefault(key, {})[rank] = value
    different = {key: values for key, values in held.items() if len(set(values.values())) > 1}
    key, values = next(iter(different.items()))
    usual, count = Counter(values.values()).most_common(1)[0]
    odd = [rank for rank, value in values.items() if value != usual]
    what = f"{key[0]} {key[1]}"
    more = f" (and {len(different) - 1} other tensors)" if len(different) > 1 else ""
    if 2 * count <= len(values):
        return f"ranks {_listed(values)} should hold the same {what}, but their bits differ{more}"
    rest = [rank for rank in values if rank not in odd]
    return f"{_ranks(odd)} should hold the same {what} as {_ranks(rest)}, but {_its(odd)} bits differ{more}"


def _listed(ranks: Iterable[int]) -> str:
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _its(ranks: Sequence[int]) -> str:
    return "their" if len(ranks) > 1 else "its"
