"""The dispatcher of one rank that holds all experts: it sorts rows, and weights them on the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import LOCAL
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.dispatcher import Dispatcher, DispatchState
from fastmp.ops import permutation, permute, unpermute

__all__ = ["LocalDispatched", "LocalDispatcher", "LocalPrepared"]


@dataclass(slots=True)
class LocalPrepared(DispatchState):
    probs: Tensor  # (T, k)
    row_of: Tensor  # (T, k), the row of each assignment
    offsets: Tensor  # (E,), where each expert's rows end


@dataclass(slots=True)
class LocalDispatched(DispatchState):
    probs: Tensor  # (T, k)
    row_of: Tensor  # (T, k)


class LocalDispatcher(Dispatcher[LocalPrepared, LocalDispatched]):
    """Sort the rows of one rank by expert. Nothing waits, and every shape is static."""

    spec = LOCAL
    prepared, dispatched = LocalPrepared, LocalDispatched

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        return cls(moe.num_experts)

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> LocalPrepared:
        row_of, offsets = permutation(indices, self.num_experts)
        return LocalPrepared(probs, row_of, offsets)

    def dispatch(self, tokens: Tensor, state: LocalPrepared) -> tuple[Tensor, Tensor, LocalDispatched]:
        rows = permute(tokens, state.row_of, state.row_of.numel())
        return rows, state.offsets, LocalDispatched(state.probs, state.row_of)

    def combine(self, outputs: Tensor, state: LocalDispatched) -> Tensor:
        return unpermute(outputs, state.row_of, state.probs)
