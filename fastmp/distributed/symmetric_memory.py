"""Memory of each rank of a group that all ranks of the group read and write: shared on a CPU, NVLink on GPUs.

Kernels reach it by address, so rows go to another rank without its host, or this
one, knowing how many there are. Who may write what when, kernels see to: `fastmp.ops.exchange`.

On a CPU each rank makes an anonymous file, which no directory ever lists: the others map it through /proc
while its maker waits for them. The kernel frees it with its last map, however its ranks end, and takes no
memory for pages that nobody writes.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastmp.distributed.exchange_layout import ExchangeLayout, row_capacity
from fastmp.status import process_status

__all__ = ["ExchangeViews", "PeerExchange", "PeerMemory"]

_RENDEZVOUS_TIMEOUT = timedelta(seconds=60)  # of a rank for its peers, all of which have just been heard of


class PeerMemory:
    """`nbytes` of each rank of `group`, zeros at first, which all of its ranks can read and write.

    Ranks make it together, and their hosts talk to each other: outside of graphs only.

    local: this rank's bytes (nbytes,) uint8.
    addresses: where this process has the memory of each rank of the group.

    Args:
        device: a CPU; a GPU that reaches those of its peers, see `torch.distributed._symmetric_memory`; or
            "meta", where there are shapes only.

    Raises ValueError, on all ranks: they ask for different sizes, or run on several machines; RuntimeError
    where one of them cannot get the memory, or reach that of another.
    """

    def __init__(self, group: ProcessGroup, nbytes: int, device: torch.device | str) -> None:
        self.group, self.nbytes, device = group, nbytes, torch.device(device)
        self._kept: Any = None  # what holds the memory of peers
        if device.type == "meta":
            self.local = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.addresses = [0] * group.size()
            return
        _agree_on_place(group, nbytes)
        if device.type == "cpu":
            maps = _map_files(group, nbytes)
            self.local, self.addresses = maps[group.rank()], [each.data_ptr() for each in maps]
            self._kept = maps
        else:
            self.local, self.addresses, self._kept = _rendezvous(group, nbytes, device)

    def __deepcopy__(self, memo: dict[int, object]) -> PeerMemory:
        return self  # peers know one address


class ExchangeViews(NamedTuple):
    """A rank's `memory` as the ops of `fastmp.ops.exchange` take it; `rows` is (2, C, H)."""

    flags: Tensor
    counts: Tensor
    rows: Tensor
    distances: Tensor
    rank: int
    timeout: float
    memory: PeerMemory

    @property
    def capacity(self) -> int:
        return self.rows.shape[1]


class _Kind(NamedTuple):
    """What the rows of all layers and ranks that share memory have in common."""

    hidden: int
    dtype: torch.dtype
    device: str
    top_k: int
    experts: int
    capacity: float | None

    def __str__(self) -> str:
        return str(self._asdict())


class PeerExchange:
    """The memory through which the ranks of an etp-ep group send each other rows, once it is reserved.

    All layers share it, forward and backward: an exchange is over before the next one needs its half of it.

    Args:
        group: the etp-ep group, whose ranks are in the order of the grid.
        etp, ep: its sizes.
        etp_varies_first: neighbours in `group` are ranks of one etp group, not of one ep group.
        timeout: seconds that a CPU or a GPU waits for a peer.
    """

    def __init__(
        self, group: ProcessGroup, *, etp: int, ep: int, etp_varies_first: bool, timeout: float
    ) -> None:
        self.group, self.etp, self.ep, self.timeout = group, etp, ep, timeout
        # Of each rank in the order (etp, ep), which ops know: its number in the group.
        steps = (1, etp) if etp_varies_first else (ep, 1)
        self._order = [d * steps[0] + p * steps[1] for d in range(etp) for p in range(ep)]
        self.rank = self._order.index(group.rank())
        self._kind: _Kind | None = None
        self._views: ExchangeViews | None = None
        self._room = self._expected = 0  # tokens of a rank
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()  # graphs

    def __deepcopy__(self, memo: dict[int, object]) -> PeerExchange:
        return self  # the peers of a copy are the same

    @property
    def memory(self) -> PeerMemory | None:
        return None if self._views is None else self._views.memory

    @property
    def views(self) -> ExchangeViews:
        """What `reserve` has returned last."""
        assert self._views is not None, "PeerExchange: nothing is reserved"
        return self._views

    def numbers(self) -> tuple[int, int]:
        """The exchange that this rank has come to, and the last one that is over; where hosts read them."""
        return int(self.views.flags[self.rank]), int(self.views.flags[-1])

    def expect(self, tokens: int) -> None:
        """Have room for so many tokens of a rank from the next `reserve` on.

        All ranks say the same. Memory that is too small is left for another, unless graphs hold it: that
        `reserve` raises a ValueError then.
        """
        self._expected = max(self._expected, tokens)

    def reserve(
        self, tokens: Tensor, *, top_k: int, experts: int, factor: float | None = None
    ) -> ExchangeViews:
        """Return the memory for `tokens` (T, H); the first call, on all ranks together, gets it.

        It has room for the most tokens that a rank of that call has, or for those that are expected, of their
        width and dtype, see `fastmp.distributed.exchange_layout.row_capacity`.

        Raises ValueError for more tokens than that or others, on all ranks where they differ in what they
        reserve, and as `expect` and `PeerMemory`; RuntimeError where a call that gets memory is captured.
        """
        kind = _Kind(tokens.shape[1], tokens.dtype, tokens.device.type, top_k, experts, factor)
        first = self._views is None or self._views.rows.is_meta
        if first or (kind == self._kind and self._expected > self._room):
            try:
                self._views, self._room = self._reserve(tokens, kind)
            finally:
                self._expected = 0
            self._kind = kind
            if tokens.device.type == "cpu":
                process_status.exchange = weakref.ref(self)
        if kind != self._kind:
            raise ValueError(
                "PeerExchange: layers that share memory exchange rows of one kind, "
                f"but these are {kind}, and it was reserved for {self._kind}"
            )
        if len(tokens) > self._room:
            raise ValueError(
                f"PeerExchange: {len(tokens)} tokens of a rank, but its first batch reserved memory for "
                f"{self._room}; begin with the largest batch, call MoELayer.expect before, or use "
                'moe.dispatcher "alltoall"'
            )
        if process_status.graph is not None:
            self._holders.add(process_status.graph)
        elif tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            self._holders.add(PeerExchange)  # a capture of others, whose end nobody tells
        return self.views

    def _reserve(self, tokens: Tensor, kind: _Kind) -> tuple[ExchangeViews, int]:
        device, ranks, hidden = tokens.device, self.etp * self.ep, tokens.shape[1]
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captures or process_status.graph is not None:
            raise RuntimeError(
                "PeerExchange: the memory of peers is reserved by hosts; run one batch eagerly first"
            )
        if self._holders:
            gc.collect()  # those that nobody replays any more
        if self._views is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # what has been left for peers, or is read there
        own = max(len(tokens), self._expected), kind, bool(self._holders)
        everyones = [own] if device.type == "meta" else _gather(own, self.group)
        room = max(number for number, *_ in everyones)
        if any(held for *_, held in everyones):
            raise ValueError(
                f"PeerExchange: {room} tokens of a rank are expected, but graphs hold the memory for "
                f"{self._room}; call MoELayer.expect before they are captured, let go of them, or use "
                'moe.dispatcher "alltoall"'
            )
        for rank, (_, other, _) in enumerate(everyones):
            if other != everyones[0][1]:
                raise ValueError(
                    "PeerExchange: ranks of one group exchange rows of one kind, but reserve memory for "
                    f"{everyones[0][1]} on rank 0 and {other} on rank {rank}"
                )
        capacity = row_capacity(
            room, top_k=kind.top_k, experts=kind.experts, ep=self.ep, etp=self.etp, factor=kind.capacity
        )
        layout = ExchangeLayout(ranks, kind.experts, hidden, tokens.element_size(), capacity)
        memory = PeerMemory(self.group, layout.nbytes, device)

        def view(start: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            nbytes = math.prod(shape) * dtype.itemsize
            return memory.local[start : start + nbytes].view(dtype).view(shape)

        distances = torch.empty(self.etp, self.ep, dtype=torch.int64, device=device)
        if device.type != "meta":
            here = memory.addresses[self.group.rank()]
            further = [memory.addresses[number] - here for number in self._order]
            distances.copy_(torch.tensor(further).view_as(distances))
        views = ExchangeViews(
            flags=view(0, ranks + 1),
            counts=view(layout.counts_at, 2, ranks, kind.experts),
            rows=view(layout.rows_at, 2, capacity, hidden, dtype=tokens.dtype),
            distances=distances,
            rank=self.rank,
            timeout=self.timeout,
            memory=memory,
        )
        return views, room


class _Place(NamedTuple):
    """Which processes can share memory: those with the same boot of a machine, and the same process ids."""

    host: str
    boot: str
    processes: str


def _place() -> _Place:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return _Place(socket.gethostname(), boot.read_text().strip(), os.readlink("/proc/self/ns/pid"))


def _agree_on_place(group: ProcessGroup, nbytes: int) -> None:
    everyones = _gather((nbytes, _place()), group)
    sizes, places = [size for size, _ in everyones], [place for _, place in everyones]
    if nbytes < 1 or len(set(sizes)) > 1:
        raise ValueError(f"PeerMemory: ranks of one group ask for the same number of bytes, got {sizes}")
    for rank, place in enumerate(places):
        if place[1:] != places[0][1:]:
            raise ValueError(
                f"PeerMemory: ranks 0 and {rank} of the group share no memory: they run on "
                f"{places[0].host} and {place.host}; "
                'across machines, and containers, experts need moe.dispatcher "alltoall", "allgather" or '
                '"deepep"'
            )


def _map_files(group: ProcessGroup, nbytes: int) -> list[Tensor]:
    """Map a file of each rank."""
    own, problem = -1, ""
    try:
        own = os.memfd_create("fastmp-peers")
        os.ftruncate(own, nbytes)
    except OSError as error:
        problem = f"cannot make {nbytes} bytes of shared memory: {error}"
    try:
        files = _gather((os.getpid(), own, problem), group)
        _raise_first([problem for *_, problem in files])
        maps: list[Tensor] = []
        try:
            for pid, file, _ in files:
                maps.append(_mapped(f"/proc/{pid}/fd/{file}", nbytes))
        except RuntimeError as error:
            problem = f"cannot map the memory of rank {len(maps)}: {error}"
        _raise_first(_gather(problem, group))  # and from here on nobody needs the numbers of files
    finally:
        if own >= 0:
            os.close(own)
    return maps


def _mapped(path: str, nbytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _rendezvous(group: ProcessGroup, nbytes: int, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """Allocate symmetric memory of torch and exchange its handles: the tensor, addresses, and the handle."""
    from torch.distributed import _symmetric_memory as symmetric

    problem = ""
    try:
        local = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        local.zero_()
    except RuntimeError as error:
        problem = f"cannot allocate {nbytes} bytes of symmetric memory on {device}: {error}"
    _raise_first(_gather(problem, group))
    # A rank that fails leaves its peers waiting in the store. They give up first; then all ranks agree.
    offset, started = 0, time.monotonic()
    store: Any = dist.distributed_c10d._get_process_group_store(group)  # whose `timeout` has no annotation
    timeout = store.timeout
    limit = min(timeout, _RENDEZVOUS_TIMEOUT)
    store.set_timeout(limit)
    try:
        handle = symmetric.rendezvous(local, group)
        starts = handle.buffer_ptrs
        offset = local.data_ptr() - starts[group.rank()]  # allocators may cut one block up
        torch.cuda.synchronize(device)  # a peer may write once it has heard of these zeros
    except RuntimeError as error:
        problem = f"cannot reach the memory of its peers from {device}: {error}"
    finally:
        store.set_timeout(timeout)
    waited = time.monotonic() - started >= limit.total_seconds()
    everyones = _gather((problem, waited, offset), group)
    _raise_first(["" if waited else problem for problem, waited, _ in everyones])
    _raise_first([problem for problem, *_ in everyones])
    offsets = [offset for *_, offset in everyones]
    return local, [start + offset for start, offset in zip(starts, offsets, strict=True)], handle


def _gather(value: Any, group: ProcessGroup) -> list[Any]:
    everyones: list[Any] = [value] * group.size()
    dist.all_gather_object(everyones, value, group=group)
    return everyones


def _raise_first(problems: list[str]) -> None:
    """RuntimeError, on all ranks, with the problem of the first one that has one."""
    for rank, problem in enumerate(problems):
        if problem:
            raise RuntimeError(f"PeerMemory: rank {rank} of the group {problem}")
