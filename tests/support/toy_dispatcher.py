"""A dispatcher from outside of fastmp: an all-gather of tokens at a fixed size, so that graphs can hold it.

All ranks of the expert group must have equally many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fastmp.config import DISPATCHERS, DispatcherSpec, MoEConfig
from fastmp.config.dispatchers import DispatchSizes, RingTransfer, TensorFact, Tensors
from fastmp.distributed.collectives import all_gather, gather_sequence, group_rank, reduce_scatter_sequence
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe import Dispatcher, DispatchState
from fastmp.ops import permutation, permute, unpermute

MAX_TOKENS = 1 << 20


@dataclass(slots=True)
class StaticPrepared(DispatchState):
    probs: Tensor
    row_of: Tensor
    offsets: Tensor


@dataclass(slots=True)
class StaticDispatched(DispatchState):
    probs: Tensor
    row_of: Tensor


def _prepared(sizes: DispatchSizes) -> Tensors:
    row_of = TensorFact((sizes.ranks * sizes.tokens, sizes.top_k), "int32")
    return {"probs": None, "row_of": row_of, "offsets": TensorFact((sizes.num_local,), "int32")}


def _dispatched(sizes: DispatchSizes) -> Tensors:
    tokens, dtype = sizes.ranks * sizes.tokens, "float32" if sizes.itemsize == 4 else "bfloat16"
    return {
        "rows": TensorFact((tokens * sizes.top_k, sizes.hidden_size), dtype, grad=True),
        "offsets": None,
        "probs": TensorFact((tokens, sizes.top_k), "float32", grad=True),
        "row_of": None,
    }


def _problems(sizes: DispatchSizes):
    if sizes.tokens > MAX_TOKENS:
        yield ("data.micro_batch_size",), f"dispatcher 'static' takes {MAX_TOKENS} tokens, got {sizes.tokens}"


STATIC = DispatcherSpec(
    "static",
    "toy_dispatcher:StaticDispatcher.create",
    traffic=lambda sizes: (RingTransfer("etp-ep", sizes.ranks * sizes.tokens * sizes.row),) * 2,
    saved_bytes=lambda sizes: 1000 * sizes.tokens,
    prepared=_prepared,
    dispatched=_dispatched,
    rows=lambda sizes: sizes.ranks * sizes.choices,
    problems=_problems,
    help="tokens gathered at a fixed size",
)


class StaticDispatcher(Dispatcher[StaticPrepared, StaticDispatched]):
    spec = STATIC
    prepared, dispatched = StaticPrepared, StaticDispatched

    def __init__(self, moe: MoEConfig, groups: ParallelGroups) -> None:
        super().__init__(moe.num_experts)
        self.group, self.num_local = groups.etp_ep, moe.num_experts // groups.grid.ep
        self.first = group_rank(groups.ep) * self.num_local

    @classmethod
    def create(cls, moe: MoEConfig, groups: ParallelGroups) -> Self:
        return cls(moe, groups)

    def preprocess(
        self, indices: Tensor, probs: Tensor, max_tokens: int, rejected: bool = False
    ) -> StaticPrepared:
        row_of, offsets = permutation(all_gather(indices, self.group)[0] - self.first, self.num_local)
        return StaticPrepared(probs, row_of, offsets)

    def dispatch(self, tokens: Tensor, state: StaticPrepared) -> tuple[Tensor, Tensor, StaticDispatched]:
        tokens, probs = (gather_sequence(each, self.group) for each in (tokens, state.probs))
        rows = permute(tokens, state.row_of, state.row_of.numel())
        return rows, state.offsets, StaticDispatched(probs, state.row_of)

    def combine(self, outputs: Tensor, state: StaticDispatched) -> Tensor:
        return reduce_scatter_sequence(unpermute(outputs, state.row_of, state.probs), self.group)


def register() -> None:
    DISPATCHERS.register(STATIC)
