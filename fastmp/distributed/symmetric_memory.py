"""Symmetric memory: a buffer on each rank that all ranks of a group read and write.

Kernels reach peers' buffers by address (shared memory on a CPU, NVLink on GPUs), so rows go to another rank
without a host-device synchronisation. Kernels also order the accesses, see `fastmp.ops.exchange`.

On a CPU each rank makes an anonymous file (memfd) and the others map it through /proc while its maker waits.
The operating system frees it with its last map, however the ranks end, and backs only pages that are written.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastmp.config.dispatchers import row_capacity
from fastmp.config.file_access import read_file
from fastmp.distributed.collectives import gather_objects
from fastmp.distributed.exchange_layout import ExchangeLayout
from fastmp.status import process_status

__all__ = ["ExchangeViews", "SymmetricExchange", "SymmetricMemory"]

_RENDEZVOUS_TIMEOUT = timedelta(seconds=60)  # for peers that have all just taken part in a collective


class SymmetricMemory:
    """A zero-initialised buffer of `nbytes` on each rank of `group`, readable and writable by all of them.

    The constructor is a collective of hosts, so it cannot be captured in a CUDA graph.

    Attributes:
        local: this rank's buffer, (nbytes,) uint8.
        addresses: virtual address in this process of each rank's buffer.

    Args:
        group: the ranks that share the buffers.
        nbytes: size of each buffer, the same on all ranks.
        device: a CPU; a GPU with peer access (see `torch.distributed._symmetric_memory`); or "meta", for
            shapes only.

    Raises:
        ValueError: on all ranks, if their sizes differ or they run on several machines.
        RuntimeError: on all ranks, if one cannot allocate its buffer or map that of a peer.

    Example (needs several ranks):
        >>> memory = SymmetricMemory(groups.etp_ep, 4096, "cpu")
        >>> memory.local[:8] = 1
        >>> offset = memory.addresses[1] - memory.addresses[0]
    """

    def __init__(self, group: ProcessGroup, nbytes: int, device: torch.device | str) -> None:
        self.group, self.nbytes, device = group, nbytes, torch.device(device)
        self._handles: Any = None  # keep the buffers of peers mapped
        if device.type == "meta":
            self.local = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.addresses = [0] * group.size()
            return
        _check_same_host(group, nbytes)
        if device.type == "cpu":
            maps = _map_files(group, nbytes)
            self.local, self.addresses = maps[group.rank()], [each.data_ptr() for each in maps]
            self._handles = maps
        else:
            self.local, self.addresses, self._handles = _rendezvous(group, nbytes, device)

    def __deepcopy__(self, memo: dict[int, object]) -> SymmetricMemory:
        return self  # peers hold one address


class ExchangeViews(NamedTuple):
    """Views of a rank's buffer, as the ops of `fastmp.ops.exchange` take them."""

    epochs: Tensor  # (ranks + 1,) int32
    counts: Tensor  # (2, ranks, experts) int32
    rows: Tensor  # (2, capacity, hidden)
    peer_offsets: Tensor  # (etp, ep) int64, bytes from this rank's buffer to each rank's
    rank: int  # in the order of peer_offsets
    timeout: float  # seconds
    memory: SymmetricMemory

    @property
    def capacity(self) -> int:
        return self.rows.shape[1]


class _Kind(NamedTuple):
    """Properties of rows that all layers and ranks sharing the buffers agree on."""

    hidden: int
    dtype: torch.dtype
    device: str
    top_k: int
    experts: int
    capacity: float | None

    def __str__(self) -> str:
        return str(self._asdict())


class SymmetricExchange:
    """Symmetric buffers for the all-to-alls of an etp-ep group, allocated by the first `reserve`.

    All layers share them, forward and backward: an exchange is over before the next one needs its half.

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
        # Group rank of each (etp, ep) coordinate, the order that ops use.
        steps = (1, etp) if etp_varies_first else (ep, 1)
        self._order = [d * steps[0] + p * steps[1] for d in range(etp) for p in range(ep)]
        self.rank = self._order.index(group.rank())
        self._kind: _Kind | None = None
        self._views: ExchangeViews | None = None
        self._max_tokens = self._requested = 0  # per rank
        self._graphs: weakref.WeakSet[object] = weakref.WeakSet()  # that replay with these buffers

    def __deepcopy__(self, memo: dict[int, object]) -> SymmetricExchange:
        return self  # a copied layer has the same peers

    @property
    def memory(self) -> SymmetricMemory | None:
        """The buffers; None before the first `reserve`."""
        return None if self._views is None else self._views.memory

    @property
    def views(self) -> ExchangeViews:
        """Views that the last `reserve` returned."""
        assert self._views is not None, "SymmetricExchange: nothing is reserved"
        return self._views

    @property
    def balanced_rows(self) -> int:
        """The rows that a rank receives of the largest batch, if all experts get equally many tokens."""
        assert self._kind is not None, "SymmetricExchange: nothing is reserved"
        return self._max_tokens * self._kind.top_k * self.etp

    def epochs(self) -> tuple[int, int]:
        """Return the epochs of the last exchange that this rank has started and finished (CPU only)."""
        return int(self.views.epochs[self.rank]), int(self.views.epochs[-1])

    def request(self, tokens: int) -> None:
        """Have the next `reserve` grow the buffers to `tokens` per rank; the same number on all ranks.

        That `reserve` raises ValueError if captured graphs still use smaller buffers.
        """
        self._requested = max(self._requested, tokens)

    def reserve(
        self, tokens: Tensor, *, top_k: int, experts: int, factor: float | None = None
    ) -> ExchangeViews:
        """Return views for an exchange of `tokens` (T, H); the first call is a collective and allocates them.

        The buffers hold the largest T of all ranks in that call, or the number given to `request`.

        Args:
            tokens: this rank's tokens, which fix hidden size, dtype and device.
            top_k, experts: of the router.
            factor: capacity factor, see `fastmp.config.dispatchers.row_capacity`.

        Raises:
            ValueError: more tokens or other rows than allocated; on all ranks, if ranks allocate differently;
                and as `request` and `SymmetricMemory`.
            RuntimeError: a call that has to allocate is captured in a graph.
        """
        kind = _Kind(tokens.shape[1], tokens.dtype, tokens.device.type, top_k, experts, factor)
        first = self._views is None or self._views.rows.is_meta
        if first or (kind == self._kind and self._requested > self._max_tokens):
            try:
                self._views, self._max_tokens = self._reserve(tokens, kind)
            finally:
                self._requested = 0
            self._kind = kind
            if tokens.device.type == "cpu":
                process_status.exchange = weakref.ref(self)
        if kind != self._kind:
            raise ValueError(
                "SymmetricExchange: layers that share memory exchange rows of one kind, "
                f"expected {self._kind}, got {kind}"
            )
        if len(tokens) > self._max_tokens:
            raise ValueError(
                f"SymmetricExchange: {len(tokens)} tokens of a rank, but its first batch reserved memory for "
                f"{self._max_tokens}; begin with the largest batch, call MoELayer.reserve before, or use "
                'moe.dispatcher "alltoall"'
            )
        if process_status.graph is not None:
            self._graphs.add(process_status.graph)
        elif tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            self._graphs.add(SymmetricExchange)  # captured by other code: in use from now on
        return self.views

    def _reserve(self, tokens: Tensor, kind: _Kind) -> tuple[ExchangeViews, int]:
        device, ranks, hidden = tokens.device, self.etp * self.ep, tokens.shape[1]
        # 1. Raise under capture: the allocation is a collective of hosts.
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captures or process_status.graph is not None:
            raise RuntimeError(
                "SymmetricExchange: buffers cannot be allocated during capture; run one batch eagerly first"
            )
        if self._graphs:
            gc.collect()  # drops graphs that are no longer referenced
        if self._views is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # peers may still be reading the old buffers
        # 2. All ranks of the group agree on the size and kind of rows.
        own = max(len(tokens), self._requested), kind, bool(self._graphs)
        everyones = [own] if device.type == "meta" else gather_objects(own, self.group)
        max_tokens = max(number for number, *_ in everyones)
        if any(held for *_, held in everyones):
            raise ValueError(
                f"SymmetricExchange: {max_tokens} tokens per rank requested, but graphs hold the memory for "
                f"{self._max_tokens}; call MoELayer.reserve before they are captured, let go of them, or use "
                'moe.dispatcher "alltoall"'
            )
        for rank, (_, other, _) in enumerate(everyones):
            if other != everyones[0][1]:
                raise ValueError(
                    "SymmetricExchange: ranks of one group exchange rows of one kind, but reserve memory for "
                    f"{everyones[0][1]} on rank 0 and {other} on rank {rank}"
                )
        # 3. Allocate; peers map the buffers.
        capacity = row_capacity(
            max_tokens, top_k=kind.top_k, experts=kind.experts, ep=self.ep, etp=self.etp, factor=kind.capacity
        )
        layout = ExchangeLayout(ranks, kind.experts, hidden, tokens.element_size(), capacity)
        memory = SymmetricMemory(self.group, layout.nbytes, device)

        def view(start: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            nbytes = math.prod(shape) * dtype.itemsize
            return memory.local[start : start + nbytes].view(dtype).view(shape)

        # 4. Offsets from this rank's buffer to each rank's, in the order (etp, ep).
        peer_offsets = torch.empty(self.etp, self.ep, dtype=torch.int64, device=device)
        if device.type != "meta":
            here = memory.addresses[self.group.rank()]
            offsets = [memory.addresses[rank] - here for rank in self._order]
            peer_offsets.copy_(torch.tensor(offsets).view_as(peer_offsets))
        views = ExchangeViews(
            epochs=view(0, ranks + 1),
            counts=view(layout.counts_at, 2, ranks, kind.experts),
            rows=view(layout.rows_at, 2, capacity, hidden, dtype=tokens.dtype),
            peer_offsets=peer_offsets,
            rank=self.rank,
            timeout=self.timeout,
            memory=memory,
        )
        return views, max_tokens


class _Host(NamedTuple):
    """Host identity: processes share memory if boot id and PID namespace are equal."""

    name: str
    boot: str
    pid_namespace: str


def _this_host() -> _Host:
    boot = read_file("/proc/sys/kernel/random/boot_id", 100).decode().strip()
    return _Host(socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"))


def _check_same_host(group: ProcessGroup, nbytes: int) -> None:
    everyones = gather_objects((nbytes, _this_host()), group)
    sizes, hosts = [size for size, _ in everyones], [host for _, host in everyones]
    if nbytes < 1 or len(set(sizes)) > 1:
        raise ValueError(f"SymmetricMemory: expected the same number of bytes on all ranks, got {sizes}")
    for rank, host in enumerate(hosts):
        if host[1:] != hosts[0][1:]:
            raise ValueError(
                f"SymmetricMemory: ranks 0 and {rank} of the group share no memory: they run on "
                f"{hosts[0].name} and {host.name}; "
                'across machines and containers, use moe.dispatcher "alltoall", "allgather" or '
                '"deepep"'
            )


def _map_files(group: ProcessGroup, nbytes: int) -> list[Tensor]:
    """Map an anonymous file of each rank of `group` (gloo collectives of hosts)."""
    # 1. Make this rank's file.
    own, problem = -1, ""
    try:
        own = os.memfd_create("fastmp-symmetric")
        os.ftruncate(own, nbytes)
    except OSError as error:
        problem = f"cannot make {nbytes} bytes of shared memory: {error}"
    try:
        # 2. Exchange process ids and descriptors; fail on all ranks together.
        files = gather_objects((os.getpid(), own, problem), group)
        _raise_first([problem for *_, problem in files])
        maps: list[Tensor] = []
        try:
            for pid, file, _ in files:
                maps.append(_mapped(f"/proc/{pid}/fd/{file}", nbytes))
        except RuntimeError as error:
            problem = f"cannot map the memory of rank {len(maps)}: {error}"
        # 3. Every rank has mapped every file: descriptors may be closed.
        _raise_first(gather_objects(problem, group))
    finally:
        if own >= 0:
            os.close(own)
    return maps


def _mapped(path: str, nbytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _rendezvous(group: ProcessGroup, nbytes: int, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """Allocate torch symmetric memory and return (local buffer, addresses of all ranks, handle)."""
    from torch.distributed import _symmetric_memory as symmetric

    problem = ""
    try:
        local = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        local.zero_()
    except RuntimeError as error:
        problem = f"cannot allocate {nbytes} bytes of symmetric memory on {device}: {error}"
    _raise_first(gather_objects(problem, group))
    # A rank that fails leaves its peers waiting in the store: they time out first, then all ranks agree.
    offset, started = 0, time.monotonic()
    store: Any = dist.distributed_c10d._get_process_group_store(group)  # `timeout` has no annotation
    timeout = store.timeout
    limit = min(timeout, _RENDEZVOUS_TIMEOUT)
    store.set_timeout(limit)
    try:
        handle = symmetric.rendezvous(local, group)
        starts = handle.buffer_ptrs
        # The allocator may place several buffers in one block.
        offset = local.data_ptr() - starts[group.rank()]
        torch.cuda.synchronize(device)  # zeros are written before any peer may write
    except RuntimeError as error:
        problem = f"cannot reach the memory of its peers from {device}: {error}"
    finally:
        store.set_timeout(timeout)
    waited = time.monotonic() - started >= limit.total_seconds()
    everyones = gather_objects((problem, waited, offset), group)
    _raise_first(["" if waited else problem for problem, waited, _ in everyones])
    _raise_first([problem for problem, *_ in everyones])
    offsets = [offset for *_, offset in everyones]
    return local, [start + offset for start, offset in zip(starts, offsets, strict=True)], handle


def _raise_first(problems: list[str]) -> None:
    """Raise RuntimeError on all ranks with the first rank's problem, if any rank has one."""
    for rank, problem in enumerate(problems):
        if problem:
            raise RuntimeError(f"SymmetricMemory: rank {rank} of the group {problem}")
