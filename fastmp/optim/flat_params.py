"""Parameters in flat buffers, at the places of their main gradients, and the sharded optimizer state.

`FlatState` is the part of an optimizer that does not depend on its update rule: parameters that are views of
a buffer, master weights of low-precision parameters, moments, and the state-dict entries of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from fastmp.config import StateSpec
from fastmp.distributed.collectives import group_size
from fastmp.ops.adamw import join_master, split_master
from fastmp.optim.fp8_gather import Fp8Shards
from fastmp.optim.grad_buffers import FlatBuffer, main_dtype

__all__ = ["FlatState", "check_separate"]


class FlatState:
    """The parameters of one gradient buffer, flat, and the optimizer state of this rank's shards.

    Args:
        grads: the gradients; parameter i lies where its gradient does.
        optimizer: the name that error messages begin with.
        states: "classic" or "small", see `AdamW`; with small states bfloat16 parameters have a remainder in
            place of a master weight.
        spec: the moments, one number for each element.

    Attributes:
        params: (layout.size,), the buffer that parameters are views of.
        local: for each bucket, the slice of the state tensors that holds this rank's shard.
        master, remainder: (layout.size / ranks,); both None where parameters are their own master weights.
        moments: {name: (layout.size / ranks,)}.
        steps: (buckets,) int64, the number of updates of each bucket.
        fp8: FP8 copies that ranks gather in place of the parameters; None: they gather parameters.
    """

    @torch.no_grad()
    def __init__(self, grads: FlatBuffer, optimizer: str, states: str, spec: StateSpec) -> None:
        self.grads, self.optimizer = grads, optimizer
        layout, (name, first) = grads.layout, next(iter(grads.parameters.items()))
        main, small = main_dtype(first.dtype), _is_small(optimizer, states, name, first.dtype)
        self.sharded = layout.num_ranks > 1 and group_size(grads.group) > 1
        self.params = torch.zeros_like(grads.grad, dtype=first.dtype)
        empty = self.params.new_empty(layout.size // layout.num_ranks)
        moment = torch.bfloat16 if small and spec.narrow else main
        self.moments = {name: torch.zeros_like(empty, dtype=moment) for name in spec.moments}
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
        self.fp8 = Fp8Shards(grads, self.params) if grads.copies else None

    def bucket(self, number: int) -> Tensor:
        """Return the parameters of a bucket, flat."""
        bucket = self.grads.layout.buckets[number]
        return self.params[bucket.start : bucket.end]

    def shard(self, number: int) -> Tensor:
        """Return the parameters of this rank's shard of a bucket, flat."""
        return self.params[slice(*self.grads.shards[number])]

    def check(self) -> None:
        """Raise ValueError if the model was moved out of the buffers, as by model.to(dtype)."""
        name, param = next(iter(self.grads.parameters.items()))
        if param.untyped_storage()._cdata != self.params.untyped_storage()._cdata:
            raise ValueError(
                f"{self.optimizer}: parameter {name!r} was {self.params.dtype} on {self.params.device} when "
                f"the optimizer was made, but has been moved to {param.dtype} on {param.device}; move the "
                "model first"
            )

    def master_weights(self, number: int) -> Tensor:
        """Return the master weights of this rank's shard of a bucket; a copy with small states."""
        if self.master is not None:
            return self.master[self.local[number]]
        own = self.shard(number)
        return own if self.remainder is None else join_master(own, self.remainder[self.local[number]])

    def set_master_weights(self, number: int, new: Tensor) -> None:
        """Set the master weights of this rank's shard of a bucket, and round its parameters from them."""
        own, at = self.shard(number), self.local[number]
        if self.remainder is not None:
            high, low = split_master(new)
            own.copy_(high)
            self.remainder[at].copy_(low)
            return
        own.copy_(new)
        if self.master is not None:
            self.master[at].copy_(new)

    def round(self) -> None:
        """Write this rank's shards of low-precision parameters from their master weights."""
        if self.master is not None:
            for number, at in enumerate(self.local):
                self.shard(number).copy_(self.master[at])

    def master_of(self, name: str) -> Tensor:
        """Return this rank's shard of a master weight, perhaps empty; a copy with small states."""
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
        """Return {name: {key: this rank's shard}}, views, for the parameters that it has a shard of."""
        tensors = dict(self.moments)
        tensors |= {} if self.master is None else {"master": self.master}
        tensors |= {} if self.remainder is None else {"remainder": self.remainder}
        return {
            name: {key: self._shaped(each[slice(*piece.shard_range)], name) for key, each in tensors.items()}
            for name, piece in self.grads.pieces.items()
        }

    def _shaped(self, part: Tensor, name: str) -> Tensor:
        """Return `part` in the shape of the parameter if it holds all of its elements, else flat."""
        param = self.grads.parameters[name]
        return part.as_strided(param.shape, param.stride()) if part.numel() == param.numel() else part


def check_separate(optimizer: str, parameters: Mapping[str, Parameter]) -> None:
    """Raise ValueError if two Parameters share memory: each would get memory of its own."""

    def place(param: Parameter) -> tuple[int, int]:
        return param.untyped_storage()._cdata, int(param.storage_offset()) * param.element_size()

    storage, end, before = 0, 0, ""
    for name, param in sorted(parameters.items(), key=lambda item: place(item[1])):
        if place(param) < (storage, end) and param.numel():
            raise ValueError(f"{optimizer}: {before!r} and {name!r} share memory; tie them as one Parameter")
        storage, begin = place(param)
        end, before = begin + param.nbytes, name


def _is_small(optimizer: str, states: str, name: str, dtype: torch.dtype) -> bool:
    """Return True for small states. Raises ValueError for a dtype that does not support them."""
    if states == "small" and dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"{optimizer}: small states need parameters in bfloat16 or float32, but {name!r} is {dtype}; use "
            "states='classic'"
        )
    return states == "small"
