"""Records of ranks, and their compact form as JSON. Standard library only.

The size of a record does not grow with the world: process groups are written as arithmetic progressions of
ranks, and recent collectives as a table of distinct operations with one short row per collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

__all__ = [
    "FILE_LIMIT",
    "MAX_RANKS",
    "MESSAGES",
    "Call",
    "RankRecord",
    "calls_kept",
    "kind_of_group",
    "pack_ranks",
    "unpack_ranks",
]

# Ranks may begin these with different sizes.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv")
MESSAGES = ("send", "recv")
MAX_RANKS = 1 << 20
FILE_LIMIT = 1 << 26  # bytes of a file: a report has the records of hundreds of ranks
_MAX_KEPT, _MIN_KEPT = 24, 4


def calls_kept(world_size: int) -> int:
    """Return how many recent collectives of each process group a rank reports.

    24 up to 512 ranks; from there on the sum over all ranks stays the same, down to 4 collectives a rank.
    """
    return max(_MIN_KEPT, min(_MAX_KEPT, _MAX_KEPT * 512 // world_size))


def kind_of_group(group: str) -> str:
    """Return the kind of a group: groups of one kind differ in what follows a space."""
    return group.partition(" ")[0] + ("/nccl" if group.endswith("/nccl") else "")


def pack_ranks(ranks: Sequence[int]) -> list[list[int]]:
    """Return ascending `ranks` as blocks [first, stride, count, stride, count, ...], fastest stride first.

    Any group of a parallel layout is one block, whatever its size.

    >>> pack_ranks([0, 1, 8, 9, 16, 17])
    [[0, 1, 2, 8, 3]]
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][2] == 1:
            runs[-1][1:] = [rank - runs[-1][0], 2]
        elif runs and rank == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([rank, 1, 1])
    shapes = {(stride, count) for _, stride, count in runs}
    if len(runs) > 1 and len(shapes) == 1 and runs[0][2] > 1:
        return [[first, *runs[0][1:], *outer] for first, *outer in pack_ranks([run[0] for run in runs])]
    return runs


def unpack_ranks(blocks: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that `pack_ranks` has packed; equal groups are one object."""
    return _unpacked(tuple(map(tuple, blocks)))


@lru_cache(maxsize=1 << 16)
def _unpacked(blocks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    found: list[int] = []
    for first, *steps in blocks:
        ranks = [first]
        for at in range(len(steps) - 2, -1, -2):  # from the slowest stride to the fastest
            stride, count = steps[at : at + 2]
            if len(found) + len(ranks) * count > MAX_RANKS:
                raise ValueError(f"a process group of more than {MAX_RANKS} ranks")
            ranks = [rank + stride * i for rank in ranks for i in range(count)]
        found += ranks
    return tuple(found)


@dataclass(frozen=True)
class Call:
    """A collective that a rank started, or a message to or from `peer`.

    Attributes:
        group: name of the process group, the same on all of its ranks: kind, space, number.
        number: of collectives that the rank has started in this group, this one included; None for messages.
        began: seconds since the epoch, 0 if unknown.
    """

    op: str
    group: str = ""
    number: int | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    began: float = 0.0
    peer: int | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Properties that must be identical on all ranks of a group."""
        return (self.op,) if self.op in _UNEVEN else (self.op, self.sizes, self.dtypes)

    def __str__(self) -> str:
        if self.peer is not None:
            return f"{self.op} {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        number = "" if self.number is None else f" number {self.number}"
        return f"{self.op}{number}" + (f" of group {self.group}" if self.group else "")

    @property
    def shape(self) -> str:
        """Sizes and dtypes of its tensors in words."""
        tensors = [f"{list(size)} {dtype}" for size, dtype in zip(self.sizes, self.dtypes)]
        return " and ".join(tensors) or "nothing"


@dataclass(frozen=True)
class RankRecord:
    """Last known state of one rank.

    Attributes:
        step, phase: where training is; steps count from 1.
        where: innermost line of Python of the main thread outside torch.
        inside: the call that the main thread is in, or None.
        calls: last collectives, oldest first.
        started: number of collectives started, by group.
        groups: ranks of each process group.
        state: "running"; "stopped" or "gone", as observed on the same machine; "silent" without new
            heartbeats; "unseen" without any; "unreadable" if heartbeats cannot be read; "finished", "failed"
            or "lost" (a peer), as reported when it left. An unseen or unreadable rank has no other fields.
        reason: error with which it left.
        stalled: seconds without progress.
        silent: seconds since its last heartbeat.
        left_at: when it left, in seconds since the epoch.
    """

    rank: int
    host: str = "?"
    pid: int = 0
    step: int = 0
    phase: str = "start"
    where: str = ""
    inside: Call | None = None
    calls: tuple[Call, ...] = ()
    started: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    state: str = "running"
    reason: str = ""
    stalled: float = 0.0
    silent: float = 0.0
    left_at: float = 0.0

    def __str__(self) -> str:
        if self.state in ("unseen", "unreadable"):
            return f"rank {self.rank}"
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    def as_json(self, groups: Mapping[str, list[list[int]]] | None = None) -> dict[str, Any]:
        """Return this record as an object for JSON; `from_json` takes it back.

        groups: the packed groups, where the caller keeps them; they are packed from the record otherwise.
        """
        if groups is None:
            groups = {name: pack_ranks(ranks) for name, ranks in self.groups.items()}
        inside = () if self.inside is None else (self.inside,)
        return {**vars(self), "inside": _packed(inside), "calls": _packed(self.calls), "groups": groups}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RankRecord:
        """Make a record of what `as_json` returned, sent through JSON."""
        return cls(
            **{
                **content,
                "inside": next(iter(_unpacked_calls(content["inside"])), None),
                "calls": _unpacked_calls(content["calls"]),
                "groups": {name: unpack_ranks(blocks) for name, blocks in content["groups"].items()},
            }
        )


def _packed(calls: Iterable[Call]) -> list[Any]:
    """Return calls as [operations, which of them, numbers, microseconds since the call before]."""
    kinds: dict[Any, int] = {}
    rows, numbers, times, clock = [], [], [], 0
    for call in calls:
        kind = (call.op, call.group, call.sizes, call.dtypes, call.peer)
        rows.append(kinds.setdefault(kind, len(kinds)))
        numbers.append(call.number)
        began = round(call.began * 1e6)
        times.append(began - clock)
        clock = began
    return [list(kinds), rows, numbers, times]


def _unpacked_calls(content: Sequence[Any]) -> tuple[Call, ...]:
    kinds, rows, numbers, times = content
    kinds = [(*names, tuple(map(tuple, sizes)), tuple(dtypes), peer) for *names, sizes, dtypes, peer in kinds]
    calls, clock = [], 0
    for row, number, time in zip(rows, numbers, times, strict=True):
        op, group, sizes, dtypes, peer = kinds[row]
        clock += time
        calls.append(Call(op, group, number, sizes, dtypes, clock / 1e6, peer))
    return tuple(calls)
