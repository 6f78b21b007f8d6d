"""The dispatcher of one rank that holds all experts: it sorts rows, and weights them on the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import LOCAL
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.base import Dispatcher, DispatchState
from fastmp.ops import permutation, permute, unpermute

__all__ = ["Dispatched", "LocalDispatcher", "Prepared"]


@dataclass(slots=True)
class Prepared(DispatchState):
    probs: Tensor  # (T, k)
    row_of: Tensor  # (T, k), the row of each pair
    offsets: Tensor  # (E,), where each expert's rows end


@dataclass(slots=True)
class Dispatched(DispatchState):
    probs: Tensor  # (T, k)
    row_of: Tensor  # (T, k)


class LocalDispatcher(Dispatcher[Prepared, Dispatched]):
    """Sort the rows of one rank by expert. Nothing waits, and every shape is static."""

    spec = LOCAL
    prepared, dispatched = Prepared, Dispatched

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        return cls(moe.num_experts)

    def preprocess(self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False) -> Prepared:
        row_of, offsets = permutation(indices, self.num_experts)
        return Prepared(probs, row_of, offsets)

    def dispatch(self, tokens: Tensor, state: Prepared) -> tuple[Tensor, Tensor, Dispatched]:
        rows = permute(tokens, state.row_of, state.row_of.numel())
        return rows, state.offsets, Dispatched(state.probs, state.row_of)

    def combine(self, outputs: Tensor, state: Dispatched) -> Tensor:
        return unpermute(outputs, state.row_of, state.probs)
