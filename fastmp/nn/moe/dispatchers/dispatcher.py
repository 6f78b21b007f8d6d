"""The interface of token dispatchers, and what several of them share.

A rank's (token, expert) assignments are sorted by expert with a permutation made on the device, so that those
for one expert-parallel rank are consecutive rows. A dispatcher has three steps, one in each segment of an
expert layer:

    preprocess(indices, probs)  ->  Prepared         sort assignments, start to exchange counts
    dispatch(tokens, Prepared)  ->  rows, Dispatched  bring tokens to the ranks that hold their experts
    combine(outputs, Dispatched) -> tokens           bring outputs back, weighted by the probabilities

T tokens of this rank, k experts of each, H hidden, E experts, L experts of this rank, M rows at the experts,
R ranks of the etp-ep group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, ParamSpec, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import DispatcherSpec
from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.segment import Tensors

__all__ = [
    "DispatchState",
    "Dispatcher",
    "encode_rejection",
    "first_rows",
    "no_compile",
    "pad_rows",
    "raise_if_rejected",
]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class DispatchState:
    """The tensors that a dispatcher carries from one segment to the next; a subclass declares them as fields.

    Segments pass tensors only: `tensors` flattens the fields in their order, `with_tensors` restores them.
    """

    def tensors(self) -> Tensors:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    @classmethod
    def with_tensors(cls, tensors: Tensors) -> Self:
        return cls(*tensors)


PreparedT = TypeVar("PreparedT", bound=DispatchState)
DispatchedT = TypeVar("DispatchedT", bound=DispatchState)


class Dispatcher(Generic[PreparedT, DispatchedT]):
    """Bring tokens to their experts and the outputs back; the base of all dispatchers.

    A subclass sets the class attributes and implements `create`, `preprocess`, `dispatch` and `combine`.
    Assignments with index -1 go nowhere and count as zeros.

    spec: the facts of the dispatcher, of which `eager` and `exchanges` mark the segments of a layer.
    prepared, dispatched: the states between the segments.
    may_drop: True if `dropped` counts assignments that were not sent.
    adds_residual: True if it has `combine_onto`.
    fp8: the recipe of experts in FP8, for which tokens may be sent quantised; gradients never are.
    num_local: the experts of a rank.

    Raises ValueError where the `ep` expert-parallel ranks do not divide the experts.
    """

    spec: DispatcherSpec
    prepared: ClassVar[type[DispatchState]]
    dispatched: ClassVar[type[DispatchState]]
    may_drop = False
    adds_residual = False
    fp8: Fp8Recipe | None = None

    def __init__(self, num_experts: int, ep: int = 1) -> None:
        if num_experts % ep:
            raise ValueError(
                f"{type(self).__name__}: {num_experts} experts are not divisible by the expert-parallel size "
                f"{ep}"
            )
        self.num_experts, self.ep, self.num_local = num_experts, ep, num_experts // ep

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        """Return the dispatcher of a layer. Raises ValueError where it does not support the groups."""
        raise NotImplementedError(f"{cls.__name__} does not define create")

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # has no state of a layer, and a copy of a layer works in the same groups

    def check(self, rows: Tensor) -> None:
        """Raise ValueError for rows (T, H) that are not supported, before anything is sent."""

    def reserve(self, max_tokens: int) -> None:
        """Reserve memory for `max_tokens` tokens of a rank from the next dispatch on, on all ranks."""

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> PreparedT:
        """Sort the assignments, indices (T, k) and probs (T, k), and start to exchange their counts.

        max_tokens: the most tokens that a rank of the tensor-parallel group has, the same on all its ranks.
        rejected: this rank has too few tokens for the capacity; where other ranks wait for it, all raise
            ValueError in `dispatch`.
        """
        raise NotImplementedError

    def dispatch(self, tokens: Tensor, state: PreparedT) -> tuple[Tensor, Tensor, DispatchedT]:
        """Return rows (M, H) sorted by expert, offsets (L,) where each expert's rows end, and the state."""
        raise NotImplementedError

    def sizes(self, state: DispatchedT) -> list[int] | None:
        """Return the rows of each local expert if the host knows them."""
        return None

    def dropped(self, state: DispatchedT) -> Tensor:
        """Return the number () of this rank's assignments that were not sent."""
        raise NotImplementedError(f"{type(self).__name__} drops no tokens")

    def combine(self, outputs: Tensor, state: DispatchedT) -> Tensor:
        """Return the weighted sums (T, H), or (max_tokens, H), of the outputs (M, H) of each token."""
        raise NotImplementedError

    def combine_onto(
        self, residual: Tensor, out: Tensor | None, outputs: Tensor, state: DispatchedT
    ) -> Tensor:
        """Return combine + residual (T, H) from one kernel, written to `out` if passed."""
        raise NotImplementedError(f"{type(self).__name__} adds no residual")


def no_compile(function: Callable[P, T]) -> Callable[P, T]:
    """Exclude `function` from torch.compile.

    A compiler may work on a copy of memory that a function writes to, where no peer looks, and it drops what
    a backward does besides gradients.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function, reason="it writes to memory in place")(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def encode_rejection(tokens: int, rejected: bool) -> int:
    """Encode a rejected count of tokens as -1 - tokens, so that all ranks raise together."""
    return -1 - tokens if rejected else tokens


def raise_if_rejected(tokens_of_ranks: list[int]) -> list[int]:
    """Return the counts of all ranks. Raises ValueError if one of them is an encoded rejection."""
    if min(tokens_of_ranks) >= 0:
        return tokens_of_ranks
    rank, tokens = next(each for each in enumerate(tokens_of_ranks) if each[1] < 0)
    raise ValueError(
        f"MoELayer: the {-1 - tokens} tokens of rank {rank} of the expert group are too few: its "
        "experts would have a capacity of less than one token"
    )


def first_rows(rows: Tensor, count: int) -> Tensor:
    """Return the first `count` rows."""
    return rows if len(rows) == count else rows[:count]


def pad_rows(rows: Tensor, count: int, value: float = 0.0) -> Tensor:
    """Pad rows (T, H) to (count, H)."""
    return rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)), value=value)
