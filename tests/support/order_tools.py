"""Log the order in which ranks start their collectives and messages, and find deadlocks in these logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_EXCHANGES = ("fastmp::exchange_barrier", "fastmp::exchange_counts")
_MESSAGES = ("send", "recv_")


class Started(NamedTuple):
    """A call that a rank started: a collective of `ranks`, or a point-to-point message.

    Args:
        group: Name of the communicator.
        sizes: Shapes and dtypes of the tensors; None where they may differ between ranks (all-to-all).
        peer: Rank on the other side of a message; None for a collective.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    sizes: tuple[tuple[tuple[int, ...], torch.dtype], ...] | None
    peer: int | None = None

    def call(self, rank: int) -> Any:
        """Return a key that matches this call, started by `rank`, with the calls of its other members."""
        if self.peer is None:
            return self.group, self.ranks
        return self.group, *((rank, self.peer) if self.op == "send" else (self.peer, rank)), self.sizes

    def members(self, rank: int) -> tuple[int, ...]:
        return self.ranks if self.peer is None else (rank, self.peer)


class OrderLog(TorchDispatchMode):
    """Record every call that a rank starts, in host order, replays of captured graphs included.

    Args:
        exchange: Members of the group with symmetric memory; its ops have no process group to read them from.
    """

    def __init__(self, exchange: Sequence[int] = ()) -> None:
        super().__init__()
        self.exchange, self.started = tuple(exchange), list[Started]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.started.append(_started(func, args))
        elif func._schema.name in _EXCHANGES:
            self.started.append(Started(func._schema.name, "exchange", self.exchange, ()))
        return func(*args, **(kwargs or {}))


def _started(func: Any, args: Sequence[Any]) -> Started:
    op = func._schema.name.removeprefix("c10d::")
    given = {arg.name: value for arg, value in zip(func._schema.arguments, args)}
    group = dist.ProcessGroup.unbox(given["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    sizes = None if "alltoall" in op else tuple((tuple(each.shape), each.dtype) for each in tensors)
    peer = ranks[given["dst" if op == "send" else "src"]] if op in _MESSAGES else None
    return Started(op, group.group_name, ranks, sizes, peer)


def problems(logs: Sequence[Sequence[Started]]) -> list[str]:
    """Return a description of each mismatch and deadlock in the logs of all ranks.

    1. All members of a communicator must start the same calls in the same order, and both ranks of a pair the
       same messages.
    2. The logs must finish on a simulated machine where each rank runs one call at a time, in host order, and
       blocks until all members have joined. This machine has a single queue, fewer than any GPU: an order
       without deadlock there has none on any hardware.
    """
    return [*_differences(logs), *_deadlock(logs)]


def _differences(logs: Sequence[Sequence[Started]]) -> Iterator[str]:
    calls: dict[Any, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for rank, log in enumerate(logs):
        for each in log:
            members = tuple(sorted(each.members(rank)))
            what = (each.op, each.sizes) if each.peer is None else each.call(rank)
            calls[each.group, members][rank].append(what)
    for (group, members), by_rank in calls.items():
        for rank in members[1:]:
            first, other = by_rank[members[0]], by_rank[rank]
            if first != other:
                at = next((i for i, pair in enumerate(zip(first, other)) if pair[0] != pair[1]), None)
                at = min(len(first), len(other)) if at is None else at
                yield (
                    f"group {group} of ranks {members}: call {at} of {len(first)} is {first[at : at + 1]} on "
                    f"rank {members[0]}, of {len(other)} {other[at : at + 1]} on rank {rank}"
                )


def _deadlock(logs: Sequence[Sequence[Started]]) -> Iterator[str]:
    at, moved = [0] * len(logs), True

    def call(rank: int) -> Any:
        return logs[rank][at[rank]].call(rank) if at[rank] < len(logs[rank]) else None

    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while at[rank] < len(log):
                members = log[at[rank]].members(rank)
                if any(call(member) != call(rank) for member in members):
                    break
                for member in members:
                    at[member] += 1
                moved = True
    stuck = [f"rank {rank} in {log[at[rank]]}" for rank, log in enumerate(logs) if at[rank] < len(log)]
    if stuck:
        yield f"deadlock: {'; '.join(stuck)}"
