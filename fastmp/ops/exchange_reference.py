"""References of the exchange ops in plain torch, for symmetric buffers of a CPU; see `exchange`."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.core.rowwise import sum_rows

_INT32 = 1 << 32
_LIBC, _MS_ASYNC = ctypes.CDLL(None), 1


def _int32(value: int) -> int:
    """Wrap an epoch to int32."""
    return (value + _INT32 // 2) % _INT32 - _INT32 // 2


def _next_half(epochs: Tensor) -> int:
    return (int(epochs[-1]) + 1) & 1


def _peer_view(view: Tensor, offset: int) -> Tensor:
    """Return the same view of the buffer that begins `offset` bytes further."""
    if offset == 0 or view.numel() == 0:
        return view
    if not view.is_cpu:
        raise RuntimeError(
            f"exchange: expected a symmetric buffer on the CPU, got {view.device}: plain torch cannot "
            "reach the memory of other GPUs; remove FASTMP_OPS=reference to use the Triton kernels"
        )
    memory = (ctypes.c_char * (view.numel() * view.element_size())).from_address(view.data_ptr() + offset)
    return torch.frombuffer(memory, dtype=view.dtype).view(view.shape)


def _of_peer(where: Tensor, peer: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the tokens whose row (T,) is one of `peer`'s, and these rows."""
    rows = where.long() - peer * capacity
    tokens = ((rows >= 0) & (rows < capacity)).nonzero().squeeze(1)
    return tokens, rows[tokens]


def _assignments(
    where: Tensor, rows: Tensor, peer_offsets: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, list[int]]]:
    """Yield for each slot and peer: the slot, its tokens with a row there, these rows, the peer's offsets."""
    by_peer = peer_offsets.t().tolist()
    for slot, row_of in enumerate(where.unbind(1)):
        for peer, members in enumerate(by_peer):
            yield slot, *_of_peer(row_of, peer, rows.shape[1]), members


def _check_barrier(op: str, view: Tensor, peer_offsets: Tensor, rank: int, timeout: float) -> None:
    """Raise RuntimeError for arguments with which a barrier would hang, or for unmapped memory of a peer."""
    table = peer_offsets.flatten().tolist()
    if not 0 < timeout < math.inf:
        raise RuntimeError(f"{op}: timeout must be a positive number of seconds, got {timeout}")
    if table[rank] != 0:
        raise RuntimeError(f"{op}: expected offset 0 for this rank, rank {rank}, got {table[rank]}")
    for other, offset in enumerate(table):
        if view.is_cpu and not _is_mapped(view.data_ptr() + offset, view.nbytes):
            raise RuntimeError(
                f"{op}: there is no memory of rank {other} at its offset of {offset} bytes; expected the "
                "peer_offsets that belong to this symmetric buffer"
            )


def _is_mapped(address: int, num_bytes: int) -> bool:
    """Return True if this process has memory at all of these bytes."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - first)
    return _LIBC.msync(ctypes.c_void_p(first), size, _MS_ASYNC) == 0


def reference_barrier(
    epochs: Tensor, peer_offsets: Tensor, rank: int, timeout: float, *, op: str = "exchange_barrier"
) -> None:
    """Signal this rank's arrival to all ranks, and wait for theirs.

    Plain torch orders nothing between processes: it relies on a processor that keeps the order of stores.
    """
    _check_barrier(op, epochs, peer_offsets, rank, timeout)
    # 1. The epoch of this exchange; a second attempt at it would find stale signals.
    epoch = _int32(int(epochs[-1]) + 1)
    if int(epochs[rank]) == epoch:
        raise RuntimeError(
            f"{op}: exchange {epoch} has failed on this rank before, and its state on other ranks is "
            "unknown; make new process groups"
        )
    # 2. Signal: store the epoch into this rank's slot at every rank.
    for offset in peer_offsets.flatten().tolist():
        _peer_view(epochs, offset)[rank] = epoch
    # 3. Wait until every rank has stored it here.
    deadline = time.monotonic() + timeout
    for other in range(len(epochs) - 1):
        while _int32((reached := int(epochs[other])) - epoch) < 0:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{op}: rank {other} has not come to exchange {epoch} within {timeout:g} s: "
                    f"the last one it came to is {reached}; find out why rank {other} is late "
                    "(fastmp hang RUN_DIR), or raise the timeout"
                )
            time.sleep(0)
    epochs[-1] = epoch


def reference_counts(
    own: Tensor, epochs: Tensor, counts: Tensor, peer_offsets: Tensor, rank: int, timeout: float
) -> Tensor:
    """All-gather the counts: write this rank's row into every rank's matrix, then return this rank's."""
    for view in (counts, epochs):
        _check_barrier("exchange_counts", view, peer_offsets, rank, timeout)
    half = _next_half(epochs)
    for offset in peer_offsets.flatten().tolist():
        _peer_view(counts, offset)[half, rank] = own
    reference_barrier(epochs, peer_offsets, rank, timeout, op="exchange_counts")
    return counts[half].clone()


def reference_places(
    row_of: Tensor, indices: Tensor, matrix: Tensor, rank: int, peers: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Map each assignment from its row on this rank to its row at the expert's ranks."""
    ends_RE = matrix.long()
    counts = torch.diff(ends_RE, dim=1, prepend=ends_RE.new_zeros(len(ends_RE), 1))
    num_experts, own = counts.shape[1], counts[rank]
    local = num_experts // peers
    totals = counts.sum(0).view(peers, local)
    ends = totals.cumsum(1)
    begins = (ends - totals).flatten() + counts[:rank].sum(0)  # of this rank's rows of each expert
    moved = begins - (ends_RE[rank] - own)
    valid = (row_of >= 0) & (indices >= 0) & (indices < num_experts)
    experts = indices.long().where(valid, 0)
    rows = row_of + moved[experts]
    kept = valid & (rows >= 0) & (rows < capacity)
    where = (experts // local * capacity + rows).where(kept, -1)
    beyond = (begins + own - capacity).clamp(min=0).minimum(own)
    offsets = ends[rank % peers].clamp(0, capacity)
    return where.to(torch.int32), offsets.to(torch.int32), beyond.sum().to(torch.int32)


def reference_push(
    x: Tensor,
    where: Tensor,
    probs: Tensor | None,
    y: Tensor | None,
    epochs: Tensor,
    rows: Tensor,
    peer_offsets: Tensor,
) -> Tensor:
    """Write each token, times its probability, to its rows; return the gradient of probs if `y` is given."""
    half = _next_half(epochs)
    wide = x if probs is None else x.to(probs.dtype)
    dprobs = empty_dprobs(where, probs, y).zero_()
    for slot, tokens, places, members in _assignments(where, rows, peer_offsets):
        values = wide[tokens] if probs is None else wide[tokens] * probs[tokens, slot, None]
        for offset in members:
            there = _peer_view(rows, offset)[half]
            there[:, : x.shape[1]].index_copy_(0, places, values.to(x.dtype))
        if y is not None and x.shape[1]:
            dprobs[tokens, slot] = sum_rows((y[tokens, slot].to(wide.dtype) * wide[tokens]).t())
    return dprobs


def empty_dprobs(where: Tensor, probs: Tensor | None, y: Tensor | None) -> Tensor:
    """Allocate the gradient of probs (T, k); without `y` it has no elements."""
    dtype = torch.float32 if probs is None else probs.dtype
    return where.new_empty((0,) if y is None else where.shape, dtype=dtype)


def _num_filled(offsets: Tensor, capacity: int) -> int:
    return min(max(int(offsets[-1]), 0), capacity)


def reference_take(rows: Tensor, epochs: Tensor, offsets: Tensor, width: int) -> Tensor:
    """Copy the received rows of the latest exchange, as many as the offsets tell; zeros after them."""
    filled = _num_filled(offsets, rows.shape[1])
    out = rows.new_zeros(rows.shape[1], width)
    out[:filled] = rows[int(epochs[-1]) & 1, :filled, :width]
    return out


def reference_give(given: Tensor, offsets: Tensor, epochs: Tensor, rows: Tensor) -> None:
    """Copy as many rows as the offsets tell into the half of the next exchange, for peers to read."""
    filled = _num_filled(offsets, rows.shape[1])
    rows[_next_half(epochs), :filled] = given[:filled]


def reference_pull(
    rows: Tensor, epochs: Tensor, peer_offsets: Tensor, where: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Add probs times each token's rows over the slots, in their order; a row is the sum over its D ranks."""
    half, hidden = int(epochs[-1]) & 1, rows.shape[2]
    wide = compute_dtype(rows.dtype)
    y = rows.new_zeros(*where.shape, hidden)
    for slot, tokens, places, members in _assignments(where, rows, peer_offsets):
        first, *others = (_peer_view(rows, offset)[half].index_select(0, places) for offset in members)
        for other in others:
            first = first.to(wide) + other.to(wide)
        y[tokens, slot] = first.to(y.dtype)
    total = rows.new_zeros(len(where), hidden, dtype=wide)
    inside = (where >= 0) & (where < peer_offsets.shape[1] * rows.shape[1])
    for slot, part in enumerate(y.unbind(1)):
        part = part.to(wide)
        if probs is not None:
            part = part * probs[:, slot, None].where(inside[:, slot, None], 0)
        total.add_(part)
    return total.to(rows.dtype), y if keep else y.new_empty(0)
