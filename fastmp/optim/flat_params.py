"""Parameters in flat buffers, in the places of their main gradients, and a rank's state of its own shards.

What every optimizer needs of a buffer: parameters that are views of it, masters of low-precision parameters,
averages, and a name for each part of them in a state dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from fastmp.distributed.collectives import group_size
from fastmp.ops.adamw import join_master, split_master
from fastmp.optim.grad_buffers import FlatBuffer, main_dtype

__all__ = ["FlatState", "check_separate"]


class FlatState:
    """The parameters of `grads` in a flat buffer of their own, and the state of this rank's shards.

    optimizer: the name that errors begin with. states: as of `AdamW`; with small ones bfloat16 parameters get
    a remainder in place of a master. averages: the names of the other state, one number for each element.
    narrow: whether small averages are bfloat16.

    Attributes: `params`, the buffer; `local`, where in the state the shard of each bucket lies; `master` or
    `remainder` (None: the parameters are their own master); `averages` {name: tensor}; `steps`, the number of
    steps of each bucket.
    """

    @torch.no_grad()
    def __init__(
        self, grads: FlatBuffer, optimizer: str, states: str, averages: Sequence[str], *, narrow: bool
    ) -> None:
        self.grads, self.optimizer = grads, optimizer
        layout, (name, first) = grads.layout, next(iter(grads.parameters.items()))
        main, small = main_dtype(first.dtype), _is_small(optimizer, states, name, first.dtype)
        self.sharded = layout.num_ranks > 1 and group_size(grads.group) > 1
        self.params = torch.zeros_like(grads.grad, dtype=first.dtype)
        empty = self.params.new_empty(layout.size // layout.num_ranks)
        average = torch.bfloat16 if small and narrow else main
        self.averages = {name: torch.zeros_like(empty, dtype=average) for name in averages}
        self.master = torch.zeros_like(empty, dtype=main) if first.dtype != main and not small else None
        self.remainder = torch.zeros_like(empty, dtype=torch.int16) if first.dtype != main and small else None
        self.steps = torch.zeros(len(layout.buckets), dtype=torch.int64, device=first.device)
        for view, param in zip(grads.views(self.params), grads.parameters.values(), strict=True):
            view.copy_(param)
            param.data = view
        self.local, start = list[slice](), 0
        for first_element, end in grads.shards:
            self.local.append(slice(start, start + end - first_element))
            start += end - first_element
        if self.master is not None:
            for (first_element, end), at in zip(grads.shards, self.local, strict=True):
                self.master[at].copy_(self.params[first_element:end])

    def bucket(self, number: int) -> Tensor:
        """The parameters of a bucket."""
        bucket = self.grads.layout.buckets[number]
        return self.params[bucket.start : bucket.end]

    def shard(self, number: int) -> Tensor:
        """The parameters of this rank's shard of a bucket."""
        return self.params[slice(*self.grads.shards[number])]

    def check(self) -> None:
        """Raise ValueError where the model has been moved, as by model.to(dtype), out of the buffers."""
        name, param = next(iter(self.grads.parameters.items()))
        if param.untyped_storage()._cdata != self.params.untyped_storage()._cdata:
            raise ValueError(
                f"{self.optimizer}: parameter {name!r} was {self.params.dtype} on {self.params.device} when "
                f"the optimizer was made, but has been moved to {param.dtype} on {param.device}; move the "
                "model first"
            )

    def masters(self, number: int) -> Tensor:
        """The masters of this rank's shard of a bucket; a copy where they are small."""
        if self.master is not None:
            return self.master[self.local[number]]
        own = self.shard(number)
        return own if self.remainder is None else join_master(own, self.remainder[self.local[number]])

    def set_masters(self, number: int, masters: Tensor) -> None:
        """Give this rank's shard of a bucket new masters, and round its parameters from them."""
        own, at = self.shard(number), self.local[number]
        if self.remainder is not None:
            high, low = split_master(masters)
            own.copy_(high)
            self.remainder[at].copy_(low)
            return
        own.copy_(masters)
        if self.master is not None:
            self.master[at].copy_(masters)

    def round(self) -> None:
        """Write this rank's shards of low-precision parameters from their masters."""
        if self.master is not None:
            for number, at in enumerate(self.local):
                self.shard(number).copy_(self.master[at])

    def master_of(self, name: str) -> Tensor:
        """The part of a parameter's master that this rank has, perhaps none; a copy where it is small."""
        if name not in self.grads.pieces:
            return self.params[:0].to(main_dtype(self.params.dtype))
        piece = self.grads.pieces[name]
        if self.master is not None:
            return self._shaped(self.master[slice(*piece.shard_range)], name)
        own = self.params[slice(*piece.global_range)]
        if self.remainder is not None:
            own = join_master(own, self.remainder[slice(*piece.shard_range)])
        return self._shaped(own, name)

    def entries(self) -> dict[str, dict[str, Tensor]]:
        """{name: {key: this rank's part}}, views, of the parameters of which it has one."""
        tensors = dict(self.averages)
        tensors |= {} if self.master is None else {"master": self.master}
        tensors |= {} if self.remainder is None else {"remainder": self.remainder}
        return {
            name: {key: self._shaped(each[slice(*piece.shard_range)], name) for key, each in tensors.items()}
            for name, piece in self.grads.pieces.items()
        }

    def _shaped(self, part: Tensor, name: str) -> Tensor:
        """This rank's part of something of a parameter, with the parameter's shape if it is whole."""
        param = self.grads.parameters[name]
        return part.as_strided(param.shape, param.stride()) if part.numel() == param.numel() else part


def check_separate(optimizer: str, parameters: Mapping[str, Parameter]) -> None:
    """Raise ValueError where two Parameters share memory: each would move to a place of its own."""

    def place(param: Parameter) -> tuple[int, int]:
        return param.untyped_storage()._cdata, int(param.storage_offset()) * param.element_size()

    storage, end, before = 0, 0, ""
    for name, param in sorted(parameters.items(), key=lambda item: place(item[1])):
        if place(param) < (storage, end) and param.numel():
            raise ValueError(f"{optimizer}: {before!r} and {name!r} share memory; tie them as one Parameter")
        storage, begin = place(param)
        end, before = begin + param.nbytes, name


def _is_small(optimizer: str, states: str, name: str, dtype: torch.dtype) -> bool:
    """Whether states are small; ValueError where parameters of this dtype cannot have such."""
    if states == "small" and dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"{optimizer}: small states need parameters in bfloat16 or float32, but {name!r} is {dtype}; use "
            "states='classic'"
        )
    return states == "small"
