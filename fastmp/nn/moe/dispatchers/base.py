"""Dispatchers: they bring tokens to their experts, and the outputs back.

A rank's pairs of token and expert are sorted by expert (a permutation made on the device), so the pairs of
one expert-parallel rank lie in a row. `AllToAllDispatcher` sends them; what arrives is sorted by source, then
by expert, and is sorted once more. With expert tensor parallelism the ranks of an `etp` group, which hold
other tokens and other parts of the same experts, share their rows: all-gather in, reduce-scatter out.
`AllGatherDispatcher` brings all tokens of the etp-ep group to each of its ranks, which takes what is for its
experts; a reduce-scatter adds up the outputs. One rank alone has nothing to send (`LocalDispatcher`). Ranks
that divide each expert, but hold all of them, share all their tokens (`SharingDispatcher`).

How many rows go where is known on the device only. There all ranks of the etp-ep group gather each other's
counts, by a collective of fixed shape, in `preprocess`, and at once the copy of this one matrix to the host
starts: in a graph it is a node, ahead of whatever comes behind. `dispatch` begins by waiting for it, the only
time that the host waits for the device, and works out all sizes there and then. They come from one matrix,
which is the same on all ranks: they cannot disagree. A rank that cannot go on says so in its row, and all
ranks stop. With all experts on every rank nothing is copied: the number of rows follows from the number of
tokens, which hosts know.

T tokens of this rank, k experts of each, H hidden, E experts, L experts of this rank, M rows at the experts,
R ranks of the etp-ep group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from fastmp.distributed.collectives import (
    all_gather,
    all_to_all,
    gather_sequence,
    group_rank,
    group_size,
    reduce_scatter_sequence,
)
from fastmp.nn.moe.host_copies import HostCopies
from fastmp.nn.segment import Tensors
from fastmp.ops import block_rows, permutation, permute, unpermute

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "LocalDispatcher",
    "SharingDispatcher",
    "is_within",
    "uncompiled",
]

_HOST = torch.device("cpu")
_sum = np.add.reduce  # less than np.sum on the way to the same
P = ParamSpec("P")
T = TypeVar("T")
Matrix = TypeVar("Matrix", Tensor, np.ndarray)  # on the device, on the host


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which torch.compile leaves alone.

    A compiler may work on a copy of memory that a function writes to, where no peer looks, and it drops what
    a backward does besides gradients.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function, reason="it writes to memory in place")(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class LocalDispatcher:
    """The dispatcher for all experts on one rank: it sorts, and weighs on the way back.

    Nothing waits, and every shape is static.

    The three steps of a dispatcher pass each other tensors only:

    preprocess(indices (T, k), probs (T, k), room, refused) -> `num_prepared` tensors
    dispatch(tokens (T, H), *prepared) -> rows (M, H), offsets (L,), and `num_kept` more tensors
    combine(outputs (M, H), *those) -> (T, H), or (room, H) where that is more
    combine_onto(residual (T, H), out, outputs, *those) -> the sum of both by one kernel, in `out` where it
    is not None; or None, where there is no such kernel

    `expect(tokens)`, on all ranks alike: have room for so many tokens of a rank from the next dispatch on.
    `sizes(*those)`: the rows of each expert, where the host knows them. `dropped(*those)` (), where it
    `may_drop` some: how many of this rank's pairs were not sent. Pairs with index -1 go nowhere and count as
    zeros. `room`: the most tokens that a rank of the tensor-parallel group has, the same on all.
    `refused`: this rank's tokens are too few for the capacity; if others wait for it, all raise ValueError.
    `eager`: the segments that a graph cannot hold, because their shapes depend on data or on other ranks.
    `exchanges`: the segments that can run beside another microbatch's compute.
    """

    eager: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ()
    num_prepared = 3
    num_kept = 2
    may_drop = False

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def __deepcopy__(self, memo: dict[int, object]) -> LocalDispatcher:
        return self  # has no state, and a copy of a layer works in the same groups

    def check(self, rows: Tensor) -> None:
        """Raise ValueError for rows (T, H) that it does not send, or not here, before anything is sent."""

    def expect(self, tokens: int) -> None:
        pass

    def preprocess(self, indices: Tensor, probs: Tensor, room: int, refused: bool = False) -> Tensors:
        row_of, offsets = permutation(indices, self.num_experts)
        return probs, row_of, offsets

    def dispatch(self, tokens: Tensor, *prepared: Tensor) -> Tensors:
        probs, row_of, offsets = prepared
        return permute(tokens, row_of, row_of.numel()), offsets, probs, row_of

    def sizes(self, *kept: Tensor) -> list[int] | None:
        return None

    def dropped(self, *kept: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} sends all pairs")

    def combine(self, outputs: Tensor, *kept: Tensor) -> Tensor:
        probs, row_of = kept
        return unpermute(outputs, row_of, probs)

    def combine_onto(
        self, residual: Tensor, out: Tensor | None, outputs: Tensor, *kept: Tensor
    ) -> Tensor | None:
        return None


class SharingDispatcher(LocalDispatcher):
    """The dispatcher for `etp` ranks that each have a part of every expert: they share all tokens.

    one_sequence: the ranks hold parts of one sequence, so that each knows how many tokens the others have,
    and all shapes are static. Otherwise their hosts tell each other, without the device.
    own_stream: how rows travel, see `fastmp.distributed.collectives`.
    """

    exchanges = ("dispatch", "combine")

    def __init__(
        self, num_experts: int, etp_group: ProcessGroup, *, one_sequence: bool, own_stream: bool = False
    ) -> None:
        super().__init__(num_experts)
        self.etp_group, self.one_sequence, self.own_stream = etp_group, one_sequence, own_stream
        if one_sequence:
            return
        self.eager = ("preprocess", "dispatch", "experts", "combine")
        if _HOST not in etp_group._device_types:
            raise ValueError(
                f"MoELayer: {group_size(etp_group)} ranks share experts but not sequences, so their hosts "
                f"must tell each other sizes, which backend {dist.get_backend(etp_group)} cannot do: "
                'initialise with backend="cpu:gloo,cuda:nccl", as fastmp.init does'
            )

    def preprocess(self, indices: Tensor, probs: Tensor, room: int, refused: bool = False) -> Tensors:
        if not self.one_sequence:
            room = max(_accepted(_of_all_ranks(_refusable(room, refused), self.etp_group)))
        everyones = all_gather(_padded(indices, room, -1), self.etp_group)[0]
        return super().preprocess(everyones, probs, room)

    def dispatch(self, tokens: Tensor, *prepared: Tensor) -> Tensors:
        probs, row_of, offsets = prepared
        room = row_of.shape[0] // group_size(self.etp_group)
        tokens, probs = (
            gather_sequence(_padded(part, room), self.etp_group, own_stream=self.own_stream)
            for part in (tokens, probs)
        )
        return super().dispatch(tokens, probs, row_of, offsets)

    def combine(self, outputs: Tensor, *kept: Tensor) -> Tensor:
        partial = super().combine(outputs, *kept)
        return reduce_scatter_sequence(partial, self.etp_group, own_stream=self.own_stream)


class _Exchanging(LocalDispatcher):
    """The base of dispatchers over several ranks: their places in the etp-ep group, and the matrix of counts.

    etp_varies_first: neighbours in `etp_ep_group` are ranks of one etp group, not of one ep group.
    own_stream: how rows travel, see `fastmp.distributed.collectives`.
    """

    eager = ("dispatch", "experts", "combine")
    exchanges = ("dispatch", "combine")

    def __init__(
        self,
        num_experts: int,
        *,
        ep_group: ProcessGroup | None,
        etp_group: ProcessGroup | None,
        etp_ep_group: ProcessGroup,
        etp_varies_first: bool = True,
        own_stream: bool = False,
    ) -> None:
        super().__init__(num_experts)
        self.ep, self.etp = group_size(ep_group), group_size(etp_group)
        if num_experts % self.ep:
            raise ValueError(
                f"{type(self).__name__}: {num_experts} experts are not divisible by the expert-parallel size "
                f"{self.ep}"
            )
        self.ep_group, self.etp_group, self.etp_ep_group = ep_group, etp_group, etp_ep_group
        self.ep_rank, self.etp_rank = group_rank(ep_group), group_rank(etp_group)
        self.rank, self.etp_varies_first = group_rank(etp_ep_group), etp_varies_first
        self.num_local, self.own_stream = num_experts // self.ep, own_stream
        self.copies = HostCopies()

    def sizes(self, *kept: Tensor) -> list[int]:
        return self._values(kept[-1])[-self.num_local :]

    def _values(self, numbers: Tensor) -> list[int]:
        return numbers.tolist()

    def _everyones(self, counts: Tensor, tokens: int, room: int, refused: bool) -> Tensor:
        """The matrix (R, E + 1): a rank's rows for each expert, and its tokens, below 0 if refused."""
        last = _refusable(room, True) if refused else tokens
        return all_gather(F.pad(counts, (0, 1), value=last).unsqueeze(0), self.etp_ep_group)[0]

    def _arrived(self, copy_RX: Tensor) -> Tensor:
        """Wait for the matrix; the `_numbers` of it. ValueError where a rank has refused its tokens."""
        matrix_RX = self.copies.wait(copy_RX)
        _accepted(matrix_RX[:, -1].tolist())
        return torch.from_numpy(self._numbers(matrix_RX))

    def _numbers(self, matrix_RX: np.ndarray) -> np.ndarray:
        """All sizes that the host needs, int64, those of this rank's experts last."""
        raise NotImplementedError

    def _local(self, matrix_RX: Matrix) -> Matrix:
        """The columns of a matrix (R, E + 1) for this rank's experts, as (etp, ep, L)."""
        first = self.ep_rank * self.num_local
        local = matrix_RX[:, first : first + self.num_local]
        if self.etp_varies_first:
            return local.reshape(self.ep, self.etp, -1).swapaxes(0, 1)
        return local.reshape(self.etp, self.ep, -1)


class AllToAllDispatcher(_Exchanging):
    """Sends each pair to its expert: an all-to-all over `ep` with sizes that vary, then the rows of `etp`."""

    num_prepared = 7
    num_kept = 4

    def preprocess(self, indices: Tensor, probs: Tensor, room: int, refused: bool = False) -> Tensors:
        row_of, offsets = permutation(indices, self.num_experts)
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        matrix_RX = self._everyones(counts, indices.shape[0], room, refused)
        copy_RX = self.copies.start(matrix_RX)
        starts, places, offsets = self._blocks(matrix_RX)
        # The places of all rows that can arrive, unless a rank has more than `room` tokens.
        most = self.etp * self.ep * room * min(indices.shape[1], self.num_local)
        return probs, row_of, block_rows(starts, places, most), starts, places, offsets, copy_RX

    def dispatch(self, tokens: Tensor, *prepared: Tensor) -> Tensors:
        probs, row_of, row_of_arrived, starts, places, offsets, copy_RX = prepared
        rows = permute(tokens, row_of, row_of.numel())  # while the copy is on its way
        numbers = self._arrived(copy_RX)
        sent, received, by_etp = self._splits(numbers)
        rows = self._exchanged(_first(rows, sum(sent)), sent, received)
        if self.etp > 1:
            rows = gather_sequence(_padded(rows, max(by_etp)), self.etp_group, own_stream=self.own_stream)
        if len(row_of_arrived) < len(rows):
            row_of_arrived = block_rows(starts, places, len(rows))
        row_of_arrived = _first(row_of_arrived, len(rows))
        rows = permute(rows, row_of_arrived, sum(by_etp))
        return rows, offsets, probs, row_of, row_of_arrived, numbers

    def combine(self, outputs: Tensor, *kept: Tensor) -> Tensor:
        return unpermute(*self._returned(outputs, *kept))

    def combine_onto(
        self, residual: Tensor, out: Tensor | None, outputs: Tensor, *kept: Tensor
    ) -> Tensor | None:
        return unpermute(*self._returned(outputs, *kept), residual=residual, out=out)

    def _returned(self, outputs: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that come back to their tokens, where each pair's is, and the pairs' weights."""
        probs, row_of, row_of_arrived, numbers = kept
        sent, received, by_etp = self._splits(numbers)
        rows = unpermute(outputs, row_of_arrived, None)
        if self.etp > 1:
            rows = reduce_scatter_sequence(rows, self.etp_group, own_stream=self.own_stream)
            rows = _first(rows, by_etp[self.etp_rank])
        return self._exchanged(rows, received, sent), row_of, probs

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return all_to_all(rows, sent, received, self.ep_group, check=False, own_stream=self.own_stream)

    def _numbers(self, matrix_RX: np.ndarray) -> np.ndarray:
        sent = _sum(matrix_RX[self.rank, :-1].reshape(self.ep, -1), 1)
        local = self._local(matrix_RX)
        arriving = _sum(local, 2)
        of_experts = _sum(local, (0, 1))
        return np.concatenate((sent, arriving[self.etp_rank], _sum(arriving, 1), of_experts))

    def _splits(self, numbers: Tensor) -> tuple[list[int], list[int], list[int]]:
        """The rows sent to and received from each `ep` rank, and those that arrive at each `etp` rank."""
        values, ep = self._values(numbers), self.ep
        return values[:ep], values[ep : 2 * ep], values[2 * ep : 2 * ep + self.etp]

    def _blocks(self, matrix_RX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where blocks of rows of one expert start as they arrive, where they go, and where experts end.

        Behind the rows of each etp rank comes a block of padding, which goes nowhere.
        """
        rows = self._local(matrix_RX).reshape(self.etp, -1)
        totals = rows.sum(1, keepdim=True)
        sizes = torch.cat((rows, totals.max() - totals), 1).flatten()
        starts = (sizes.cumsum(0) - sizes).to(torch.int32)
        by_expert = rows.reshape(-1, self.num_local).t()
        ends = by_expert.reshape(-1).cumsum(0).view_as(by_expert)
        places = (ends - by_expert).t().reshape(self.etp, -1)
        offsets = ends[:, -1].to(torch.int32)
        return starts, F.pad(places, (0, 1), value=-1).flatten().to(torch.int32), offsets


class AllGatherDispatcher(_Exchanging):
    """Brings all tokens of the etp-ep group here; a reduce-scatter takes the outputs back."""

    num_kept = 3

    def preprocess(self, indices: Tensor, probs: Tensor, room: int, refused: bool = False) -> Tensors:
        # One place more, for dropped pairs; bincount would wait to know how many places there are.
        counts = indices.new_zeros(self.num_experts + 1, dtype=torch.int32)
        counts.index_add_(
            0, indices.flatten() % (self.num_experts + 1), torch.ones_like(counts[:1]).expand(indices.numel())
        )
        matrix_RX = self._everyones(counts[:-1], indices.shape[0], room, refused)
        return indices, probs, self.copies.start(matrix_RX)

    def dispatch(self, tokens: Tensor, *prepared: Tensor) -> Tensors:
        indices, probs, copy_RX = prepared
        numbers = self._arrived(copy_RX)
        longest, _, *of_experts = self._values(numbers)
        tokens, probs = (
            gather_sequence(_padded(part, longest), self.etp_ep_group, own_stream=self.own_stream)
            for part in (tokens, probs)
        )
        # Outside [0, L) are experts of other ranks, dropped pairs and padding: they get no row.
        indices = all_gather(_padded(indices, longest, -1), self.etp_ep_group)[0]
        row_of, offsets = permutation(indices - self.ep_rank * self.num_local, self.num_local)
        rows = permute(tokens, row_of, sum(of_experts))
        return rows, offsets, probs, row_of, numbers

    def combine(self, outputs: Tensor, *kept: Tensor) -> Tensor:
        probs, row_of, numbers = kept
        partial = unpermute(outputs, row_of, probs)
        own = self._values(numbers)[1]
        return _first(reduce_scatter_sequence(partial, self.etp_ep_group, own_stream=self.own_stream), own)

    def _numbers(self, matrix_RX: np.ndarray) -> np.ndarray:
        """The most tokens that a rank has, this rank's tokens, and the rows of each of its experts."""
        tokens, local = matrix_RX[:, -1], self._local(matrix_RX)
        own = tokens.max(), tokens[self.rank]
        return np.concatenate((own, _sum(local, (0, 1))), dtype=np.int64)


def _refusable(tokens: int, refused: bool) -> int:
    """Mark a number of tokens as too few, if `refused`, by one below 0."""
    return -1 - tokens if refused else tokens


def _accepted(tokens_of_ranks: list[int]) -> list[int]:
    """Check the tokens of all ranks; ValueError where one has refused its own."""
    if min(tokens_of_ranks) >= 0:
        return tokens_of_ranks
    rank, tokens = next(each for each in enumerate(tokens_of_ranks) if each[1] < 0)
    raise ValueError(
        f"MoELayer: the {-1 - tokens} tokens of rank {rank} of the expert group are too few: its "
        "experts would have a capacity of less than one token"
    )


def _of_all_ranks(number: int, group: ProcessGroup) -> list[int]:
    """Gather a number of each rank of `group`, from host to host."""
    return all_gather(torch.tensor([number], device=_HOST), group)[0].tolist()


def is_within(group: ProcessGroup, other: ProcessGroup | None) -> bool:
    if other is None:
        return False
    return set(dist.get_process_group_ranks(group)) <= set(dist.get_process_group_ranks(other))


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]


def _padded(rows: Tensor, count: int, value: float = 0.0) -> Tensor:
    return rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)), value=value)
