"""exchange_*: rows of tokens to other ranks' memory and back, without the host: the steps of one exchange.

Every rank of a group has a buffer of symmetric memory, with the same layout on all ranks. An op gets views of
its own rank's buffer and `peer_offsets`: the bytes from this buffer to each rank's. One table therefore
serves every view of the buffer.

    epochs  (R + 1,) int32        the epoch (exchange number) each rank has reached; last, this rank's own
    counts  (2, R, E) int32
    rows    (2, C, H)

All of it begins as zeros. An exchange uses the half named by the lowest bit of its epoch, which kernels read
on the device: recorded launches can be replayed in any order. It has one barrier.

    push: `exchange_push` writes rows to other ranks, barrier, `exchange_take` copies what has come.
    pull: `exchange_give` copies rows in, barrier, `exchange_pull` reads those of other ranks.
    `exchange_counts` is a whole one: each rank's row of counts to all others.

Two halves are enough for exchanges of any kinds in any order. Who writes into a half in exchange n has
passed the barrier of n - 1, and every rank came there when it had read what it wanted of exchange n - 2.
Epochs are compared by their difference, so they are never reset and may wrap.

Which row of whom a pair of token and expert goes to (`exchange_places`) follows from everybody's counts
alone. The rows at a rank lie by expert, then by source, then in the source's order, as if all pairs had
been sorted together. Those beyond the capacity C are written by nobody.

T tokens of this rank, k experts of each, H hidden, E experts; P expert-parallel ranks with E/P experts
each; D ranks that hold parts of the same experts; R = D P ranks. Ranks are numbered in the order of
`peer_offsets` (D, P): rank = d P + p. A row of peer p is named by p C + row, and each of p's D ranks has it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.ops.core.rowwise import sum_rows
from fastmp.ops.exchange_triton import (
    launch_barrier,
    launch_counts,
    launch_give,
    launch_places,
    launch_pull,
    launch_push,
    launch_take,
)
from fastmp.profiling import traced

_INT32 = 1 << 32
_LIBC, _MS_ASYNC = ctypes.CDLL(None), 1


def _wrap_int32(value: int) -> int:
    """Return `value` wrapped to int32."""
    return (value + _INT32 // 2) % _INT32 - _INT32 // 2


def _half_to_come(epochs: Tensor) -> int:
    return (int(epochs[-1]) + 1) & 1


def _elsewhere(view: Tensor, offset: int) -> Tensor:
    """The same view of the memory that begins `offset` bytes further."""
    if offset == 0 or view.numel() == 0:
        return view
    if not view.is_cpu:
        raise RuntimeError(
            f"exchange: plain torch reaches memory of other ranks on a CPU only, not {view.device}"
        )
    memory = (ctypes.c_char * (view.numel() * view.element_size())).from_address(view.data_ptr() + offset)
    return torch.frombuffer(memory, dtype=view.dtype).view(view.shape)


def _of_peer(where: Tensor, peer: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The tokens whose row (T,) is one of `peer`'s, and the numbers of these rows."""
    rows = where.long() - peer * capacity
    tokens = ((rows >= 0) & (rows < capacity)).nonzero().squeeze(1)
    return tokens, rows[tokens]


def _pairs(
    where: Tensor, rows: Tensor, peer_offsets: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, list[int]]]:
    """For each slot and peer: the slot, its tokens with a row there, these rows, and the peer's offsets."""
    by_peer = peer_offsets.t().tolist()
    for slot, row_of in enumerate(where.unbind(1)):
        for peer, members in enumerate(by_peer):
            yield slot, *_of_peer(row_of, peer, rows.shape[1]), members


def _check_meeting(op: str, view: Tensor, peer_offsets: Tensor, rank: int, timeout: float) -> None:
    """Raise RuntimeError for what a barrier would hang with, or for memory of ranks that is not there."""
    table = peer_offsets.flatten().tolist()
    if not 0 < timeout < math.inf:
        raise RuntimeError(f"{op}: timeout must be a positive number of seconds, got {timeout}")
    if table[rank] != 0:
        raise RuntimeError(f"{op}: the distance of rank {rank}, this one, must be 0, got {table[rank]}")
    for other, offset in enumerate(table):
        if view.is_cpu and not _is_mapped(view.data_ptr() + offset, view.nbytes):
            raise RuntimeError(f"{op}: there is no memory of rank {other} at its distance of {offset} bytes")


def _is_mapped(address: int, num_bytes: int) -> bool:
    """Return True if this process has memory at all of these bytes."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - first)
    return _LIBC.msync(ctypes.c_void_p(first), size, _MS_ASYNC) == 0


def reference_barrier(
    epochs: Tensor, peer_offsets: Tensor, rank: int, timeout: float, *, op: str = "exchange_barrier"
) -> None:
    """Tell all ranks that this one has come, and wait for all of them.

    Plain torch orders nothing between processes: it relies on a processor that keeps the order of stores.
    """
    _check_meeting(op, epochs, peer_offsets, rank, timeout)
    epoch = _wrap_int32(int(epochs[-1]) + 1)
    if int(epochs[rank]) == epoch:
        raise RuntimeError(
            f"{op}: exchange {epoch} has failed on this rank before, and nobody knows what others took it "
            "for; make new process groups"
        )
    for offset in peer_offsets.flatten().tolist():
        _elsewhere(epochs, offset)[rank] = epoch
    deadline = time.monotonic() + timeout
    for other in range(len(epochs) - 1):
        while _wrap_int32((reached := int(epochs[other])) - epoch) < 0:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{op}: rank {other} has not come to exchange {epoch} within {timeout:g} s: "
                    f"the last one it came to is {reached}"
                )
            time.sleep(0)
    epochs[-1] = epoch


def reference_counts(
    own: Tensor, epochs: Tensor, counts: Tensor, peer_offsets: Tensor, rank: int, timeout: float
) -> Tensor:
    """Write this rank's row into everybody's matrix, and return the matrix here when all have done so."""
    for view in (counts, epochs):
        _check_meeting("exchange_counts", view, peer_offsets, rank, timeout)
    half = _half_to_come(epochs)
    for offset in peer_offsets.flatten().tolist():
        _elsewhere(counts, offset)[half, rank] = own
    reference_barrier(epochs, peer_offsets, rank, timeout, op="exchange_counts")
    return counts[half].clone()


def reference_places(
    row_of: Tensor, indices: Tensor, matrix: Tensor, rank: int, peers: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Move each pair from its row among this rank's pairs to its row at the expert's ranks."""
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
    """Write each token, times its probability, to its rows; the gradient of probs where `y` is there."""
    half = _half_to_come(epochs)
    wide = x if probs is None else x.to(probs.dtype)
    dprobs = _dprobs(where, probs, y).zero_()
    for slot, tokens, places, members in _pairs(where, rows, peer_offsets):
        values = wide[tokens] if probs is None else wide[tokens] * probs[tokens, slot, None]
        for offset in members:
            _elsewhere(rows, offset)[half].index_copy_(0, places, values.to(x.dtype))
        if y is not None and x.shape[1]:
            dprobs[tokens, slot] = sum_rows((y[tokens, slot].to(wide.dtype) * wide[tokens]).t())
    return dprobs


def _dprobs(where: Tensor, probs: Tensor | None, y: Tensor | None) -> Tensor:
    dtype = torch.float32 if probs is None else probs.dtype
    return where.new_empty((0,) if y is None else where.shape, dtype=dtype)


def _num_filled(offsets: Tensor, capacity: int) -> int:
    return min(max(int(offsets[-1]), 0), capacity)


def reference_take(rows: Tensor, epochs: Tensor, offsets: Tensor) -> Tensor:
    """Copy the rows of the latest exchange that the offsets say are there; zeros behind them."""
    filled = _num_filled(offsets, rows.shape[1])
    out = rows.new_zeros(rows.shape[1:])
    out[:filled] = rows[int(epochs[-1]) & 1, :filled]
    return out


def reference_give(given: Tensor, offsets: Tensor, epochs: Tensor, rows: Tensor) -> None:
    """Copy the rows that the offsets say are there to where others will look in the exchange to come."""
    filled = _num_filled(offsets, rows.shape[1])
    rows[_half_to_come(epochs), :filled] = given[:filled]


def reference_pull(
    rows: Tensor, epochs: Tensor, peer_offsets: Tensor, where: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Add probs times each token's rows over the slots, in their order; a row is the sum over its D ranks."""
    half, hidden = int(epochs[-1]) & 1, rows.shape[2]
    wide = compute_dtype(rows.dtype)
    y = rows.new_zeros(*where.shape, hidden)
    for slot, tokens, places, members in _pairs(where, rows, peer_offsets):
        first, *others = (_elsewhere(rows, offset)[half].index_select(0, places) for offset in members)
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


def _moved(where: Tensor, rows: Tensor, peer_offsets: Tensor) -> int:
    """The bytes of all pairs' rows, once for each of the D ranks that have them."""
    return where.numel() * rows.shape[2] * rows.element_size() * peer_offsets.shape[0]


def _bytes(*tensors: Tensor | None) -> int:
    return sum(math.prod(t.shape) * t.element_size() for t in tensors if t is not None)


def _push_traffic(x, where, probs, y, epochs, rows, peer_offsets) -> int:
    written = _moved(where, rows, peer_offsets)
    return written + _bytes(x, where, probs, y, probs if y is not None else None)


def _pull_traffic(rows, epochs, peer_offsets, where, probs, keep) -> int:
    read = _moved(where, rows, peer_offsets)
    out = len(where) * rows.shape[2] * rows.element_size()
    return read + out * (1 + (where.shape[1] if keep else 0)) + _bytes(where, probs)


_counts = register(
    "exchange_counts(Tensor own, Tensor(a!) epochs, Tensor(b!) counts, Tensor peer_offsets, int rank,"
    " float timeout) -> Tensor",
    reference=reference_counts,
    triton=launch_counts,
    fake=lambda own, epochs, counts, *rest: counts.new_empty(counts.shape[1:]),
    traffic=lambda own, epochs, counts, peer_offsets, *rest: _bytes(
        own, counts, epochs, epochs, peer_offsets
    ),
)
_places = register(
    "exchange_places(Tensor row_of, Tensor indices, Tensor matrix, int rank, int peers, int capacity)"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference_places,
    triton=launch_places,
    fake=lambda row_of, indices, matrix, rank, peers, capacity: (
        row_of.new_empty(row_of.shape),
        row_of.new_empty(matrix.shape[1] // peers),
        row_of.new_empty(()),
    ),
)
_push = register(
    "exchange_push(Tensor x, Tensor where, Tensor? probs, Tensor? y, Tensor epochs, Tensor(a!) rows,"
    " Tensor peer_offsets) -> Tensor",
    reference=reference_push,
    triton=launch_push,
    fake=lambda x, where, probs, y, *rest: _dprobs(where, probs, y),
    flops=lambda x, where, probs, y, *rest: (
        where.numel() * x.shape[1] * ((probs is not None) + 2 * (y is not None))
    ),
    traffic=_push_traffic,
)
_barrier = register(
    "exchange_barrier(Tensor(a!) epochs, Tensor peer_offsets, int rank, float timeout) -> ()",
    reference=reference_barrier,
    triton=launch_barrier,
    fake=lambda *arguments: None,
)
_take = register(
    "exchange_take(Tensor rows, Tensor epochs, Tensor offsets) -> Tensor",
    reference=reference_take,
    triton=launch_take,
    fake=lambda rows, *rest: rows.new_empty(rows.shape[1:]),
    traffic=lambda rows, epochs, offsets: _bytes(rows),
)
_give = register(
    "exchange_give(Tensor given, Tensor offsets, Tensor epochs, Tensor(a!) rows) -> ()",
    reference=reference_give,
    triton=launch_give,
    fake=lambda *arguments: None,
    traffic=lambda given, *rest: 2 * _bytes(given),
)
_pull = register(
    "exchange_pull(Tensor rows, Tensor epochs, Tensor peer_offsets, Tensor where, Tensor? probs, bool keep)"
    " -> (Tensor, Tensor)",
    reference=reference_pull,
    triton=launch_pull,
    fake=lambda rows, epochs, peer_offsets, where, probs, keep: (
        rows.new_empty(where.shape[0], rows.shape[2]),
        rows.new_empty((*where.shape, rows.shape[2]) if keep else (0,)),
    ),
    flops=lambda rows, epochs, peer_offsets, where, probs, keep: (
        where.numel() * rows.shape[2] * (peer_offsets.shape[0] + (probs is not None))
    ),
    traffic=_pull_traffic,
)


def _like(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple, described: str) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{op}: {name} must be {dtype} {described} = {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )


@checks.memoized
def _check_ranks(op: str, epochs: Tensor, peer_offsets: Tensor, rank: int) -> None:
    if peer_offsets.dtype != torch.int64 or peer_offsets.dim() != 2:
        raise ValueError(
            f"{op}: peer_offsets must be int64 (D, P), got {peer_offsets.dtype} {tuple(peer_offsets.shape)}"
        )
    ranks = peer_offsets.numel()
    _like(op, "epochs", epochs, torch.int32, (ranks + 1,), "(R + 1,)")
    checks.require(0 <= rank < ranks, op + ": rank must be one of the {} ranks, got {}", ranks, rank)
    checks.check_same_device(op, epochs=epochs, peer_offsets=peer_offsets)


def _check_timeout(op: str, timeout: float) -> None:
    fits = 0 < timeout < math.inf
    checks.require(fits, op + ": timeout must be a positive number of seconds, got {}", timeout)


def _check_flags(op: str, epochs: Tensor) -> None:
    if epochs.dtype != torch.int32 or epochs.dim() != 1 or epochs.shape[0] < 2:
        raise ValueError(f"{op}: epochs must be int32 (R + 1,), got {epochs.dtype} {tuple(epochs.shape)}")


def _check_rows(op: str, rows: Tensor, epochs: Tensor) -> None:
    checks.check_floating(op, "rows", rows)
    if rows.dim() != 3 or rows.shape[0] != 2:
        raise ValueError(f"{op}: rows must be (2, C, H), got {tuple(rows.shape)}")
    _check_flags(op, epochs)
    checks.check_same_device(op, rows=rows, epochs=epochs)


@checks.memoized
def _check_pairs(
    op: str, where: Tensor, probs: Tensor | None, rows: Tensor, epochs: Tensor, peer_offsets: Tensor
) -> None:
    _check_rows(op, rows, epochs)
    _check_ranks(op, epochs, peer_offsets, 0)
    if where.dtype != torch.int32 or where.dim() != 2:
        raise ValueError(f"{op}: where must be int32 (T, k), got {where.dtype} {tuple(where.shape)}")
    checks.check_same_device(op, rows=rows, where=where)
    if probs is not None:
        _like(op, "probs", probs, compute_dtype(rows.dtype), tuple(where.shape), "like where (T, k)")
        checks.check_same_device(op, rows=rows, probs=probs)


@checks.memoized
def _check_values(op: str, name: str, value: Tensor, shape: tuple, described: str, rows: Tensor) -> None:
    _like(op, name, value, rows.dtype, shape, described)
    checks.check_same_device(op, **{name: value, "rows": rows})


@checks.memoized
def _check_offsets(op: str, offsets: Tensor, rows: Tensor, epochs: Tensor) -> None:
    _check_rows(op, rows, epochs)
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or not offsets.shape[0]:
        raise ValueError(f"{op}: offsets must be int32 (E/P,), got {offsets.dtype} {tuple(offsets.shape)}")
    checks.check_same_device(op, rows=rows, offsets=offsets)


def _whole(op: str, **views: Tensor) -> None:
    """Check that views of the memory are without gaps, for other ranks' are taken to be like them."""
    for name, view in views.items():
        if not view.is_contiguous():
            raise ValueError(
                f"{op}: {name} must be contiguous, got strides {view.stride()} of {tuple(view.shape)}"
            )


@traced("fastmp.exchange_counts")
def exchange_counts(
    own: Tensor, epochs: Tensor, counts: Tensor, peer_offsets: Tensor, rank: int, timeout: float
) -> Tensor:
    """Give every rank this rank's row of counts: a whole exchange, whose result is the matrix of all rows.

    Args:
        own: (E,) int32: how many pairs this rank has for the experts up to each one, which is where their
            rows end (`permutation`).
        epochs, counts: this rank's memory (see the module), contiguous; both are written to.
        peer_offsets: (D, P) int64: bytes from this rank's buffer to each rank's, multiples of 16.
        rank: this rank's number, in the order of `peer_offsets`.
        timeout: seconds to wait for the others, more than 0.

    Returns:
        (R, E) int32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the timeout is not positive and finite.
        RuntimeError: on a CPU, a distance leads to no memory, or this rank's own is not 0; or a rank has not
            come in time, which the message names, and from then on. On a GPU the kernel traps after
            `timeout`: a later call of CUDA raises "unspecified launch failure", and so does each after it.
    """
    op = "exchange_counts"
    _check_ranks(op, epochs, peer_offsets, rank)
    _check_timeout(op, timeout)
    _like(op, "own", own, torch.int32, tuple(counts.shape[-1:]), "(E,), as counts has it,")
    _like(op, "counts", counts, torch.int32, (2, peer_offsets.numel(), own.numel()), "(2, R, E)")
    checks.check_same_device(op, epochs=epochs, own=own, counts=counts)
    _whole(op, epochs=epochs, counts=counts, peer_offsets=peer_offsets)
    return _counts(own, epochs, counts, peer_offsets, rank, float(timeout))


@traced("fastmp.exchange_places")
def exchange_places(
    row_of: Tensor, indices: Tensor, matrix: Tensor, rank: int, peers: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the row of each pair at the ranks of its expert, from everybody's counts; nobody communicates.

    Args:
        row_of: (T, k) int32, the pair's row among this rank's pairs, as `permutation` numbers them.
        indices: (T, k) int32, the pair's expert; pairs that have none, or no row, go nowhere.
        matrix: (R, E) int32, from `exchange_counts`.
        rank: this rank's number.
        peers: P, expert-parallel ranks, which divide the experts evenly.
        capacity: C, of which all ranks have the same.

    Returns:
        where (T, k) int32: p C + row for row of peer p, or -1 for a pair that goes nowhere;
        offsets (E/P,) int32: the row after the last one of each of this rank's experts, at most C;
        dropped () int32: this rank's pairs that go nowhere because their row is beyond the capacity.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, P does not divide E, or rows are too many for int32.
    """
    op = "exchange_places"
    for name, pairs in (("row_of", row_of), ("indices", indices)):
        if pairs.dtype != torch.int32 or pairs.dim() != 2:
            raise ValueError(f"{op}: {name} must be int32 (T, k), got {pairs.dtype} {tuple(pairs.shape)}")
    checks.check_shape(op, row_of.shape, to=("row_of", row_of), indices=indices)
    if matrix.dtype != torch.int32 or matrix.dim() != 2 or not matrix.shape[1]:
        raise ValueError(f"{op}: matrix must be int32 (R, E), got {matrix.dtype} {tuple(matrix.shape)}")
    checks.check_same_device(op, row_of=row_of, indices=indices, matrix=matrix)
    ranks, num_experts = matrix.shape
    checks.require(0 <= rank < ranks, op + ": rank must be one of the {} ranks, got {}", ranks, rank)
    divides = peers > 0 and num_experts % peers == 0 and ranks % peers == 0
    checks.require(
        divides, op + ": {} peers do not divide {} experts and {} ranks", peers, num_experts, ranks
    )
    few = capacity > 0 and peers * capacity < 1 << 31
    checks.require(few, op + ": int32 cannot number {} rows of each of {} peers", capacity, peers)
    return _places(row_of, indices, matrix, rank, peers, capacity)


@traced("fastmp.exchange_push")
def exchange_push(
    x: Tensor,
    where: Tensor,
    probs: Tensor | None,
    y: Tensor | None,
    epochs: Tensor,
    rows: Tensor,
    peer_offsets: Tensor,
) -> Tensor:
    """Write each token to its rows at other ranks, into the half of the exchange to come.

    With `probs` and `y` it is the gradient of `exchange_pull` with them.

    Args:
        x: (T, H) of rows' dtype, any strides (last stride 1 avoids a copy).
        where: (T, k) int32 from `exchange_places`; a pair with a number outside [0, P C) goes nowhere. Two
            pairs with one number, which `exchange_places` never makes, race for the row.
        probs: (T, k) float32 (float64 for float64 rows), which multiply the token; or None.
        y: (T, k, H) as `exchange_pull` kept it, or None; only with `probs`.
        epochs, rows: this rank's memory, contiguous; others' rows are written to.
        peer_offsets: (D, P) int64, see `exchange_counts`.

    Returns:
        The gradient of probs (T, k), in probs' dtype: the dot product of each pair's rows of x and y, and 0
        for pairs that go nowhere. Without y, a tensor of no elements.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or there is y without probs.
    """
    op = "exchange_push"
    _check_pairs(op, where, probs, rows, epochs, peer_offsets)
    tokens, slots, hidden = *where.shape, rows.shape[2]
    _check_values(op, "x", x, (tokens, hidden), "(T, H)", rows)
    if y is not None:
        _check_values(op, "y", y, (tokens, slots, hidden), "(T, k, H)", rows)
        checks.require(probs is not None, op + ": y {} comes with probs, which are None", y.shape)
    _whole(op, epochs=epochs, rows=rows, peer_offsets=peer_offsets)
    return _push(x, where, probs, y, epochs, rows, peer_offsets)


@traced("fastmp.exchange_barrier")
def exchange_barrier(epochs: Tensor, peer_offsets: Tensor, rank: int, timeout: float) -> None:
    """Wait until all ranks have come here: the exchange to come becomes the latest one.

    What they wrote before can be read after it. For arguments and errors see `exchange_counts`.
    """
    _check_ranks("exchange_barrier", epochs, peer_offsets, rank)
    _check_timeout("exchange_barrier", timeout)
    _whole("exchange_barrier", epochs=epochs, peer_offsets=peer_offsets)
    _barrier(epochs, peer_offsets, rank, float(timeout))


@traced("fastmp.exchange_take")
def exchange_take(rows: Tensor, epochs: Tensor, offsets: Tensor) -> Tensor:
    """Copy what others have pushed here in the latest exchange.

    Args:
        rows, epochs: this rank's memory, contiguous.
        offsets: (E/P,) int32 from `exchange_places`; the last one is the number of rows that are there.

    Returns:
        (C, H); rows that nobody has written are zeros.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_offsets("exchange_take", offsets, rows, epochs)
    _whole("exchange_take", rows=rows, epochs=epochs)
    return _take(rows, epochs, offsets)


@traced("fastmp.exchange_give")
def exchange_give(given: Tensor, offsets: Tensor, epochs: Tensor, rows: Tensor) -> None:
    """Copy rows to where others will pull them from, in the exchange to come.

    Args:
        given: (C, H) of rows' dtype, any strides (last stride 1 avoids a copy).
        offsets: (E/P,) int32 from `exchange_places`; the last one is the number of rows that are copied.
        epochs, rows: this rank's memory, contiguous; `rows` is written to.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_offsets("exchange_give", offsets, rows, epochs)
    _check_values("exchange_give", "given", given, tuple(rows.shape[1:]), "(C, H)", rows)
    _whole("exchange_give", rows=rows, epochs=epochs)
    _give(given, offsets, epochs, rows)


@traced("fastmp.exchange_pull")
def exchange_pull(
    rows: Tensor, epochs: Tensor, peer_offsets: Tensor, where: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Add up each token's rows at other ranks, weighted, which they have given in the latest exchange.

    Args:
        rows, epochs: this rank's memory, contiguous.
        peer_offsets: (D, P) int64, see `exchange_counts`.
        where: (T, k) int32 from `exchange_places`; a number outside [0, P C) adds nothing.
        probs: (T, k) float32 (float64 for float64 rows), or None for a plain sum.
        keep: return the rows as well, for the gradient of probs.

    Returns:
        out (T, H): the sum over the slots of probs times the pair's row, in float32 (float64 for float64
        rows), in order, rounded once. A pair's row is the sum over the D ranks that have it, rounded to its
        dtype.
        y (T, k, H): these rows, zeros for pairs that go nowhere; without `keep`, a tensor of no elements.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_pairs("exchange_pull", where, probs, rows, epochs, peer_offsets)
    _whole("exchange_pull", rows=rows, epochs=epochs, peer_offsets=peer_offsets)
    return _pull(rows, epochs, peer_offsets, where, probs, keep)
