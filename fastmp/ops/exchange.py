"""Token exchange over symmetric memory, without the host: the kernels of the symmetric dispatcher.

Every rank of a group owns a symmetric buffer that the other ranks can read and write, with the same layout on
all of them. An op gets views of its own rank's buffer and `peer_offsets`, the bytes from this rank's buffer
to each peer's, so one table serves every view.

    epochs  (R + 1,) int32     signal pad: the epoch that each rank has reached; last, this rank's latest
    counts  (2, R, E) int32    double-buffered
    rows    (2, C, H)          double-buffered

The buffer starts as zeros. An exchange is an epoch; its lowest bit selects the half, and kernels read the
epoch on the device, so captured launches can be replayed in any order. An exchange has one barrier.

    put: `exchange_push` writes rows to the peers, barrier, `exchange_take` copies the received rows out. They
    may be narrower than H, as rows in FP8 are: then the first columns of the buffer's rows hold them.
    get: `exchange_give` copies rows in, barrier, `exchange_pull` reads them from the peers.
    `exchange_counts` is a whole exchange: an all-gather of each rank's row of counts.

Two halves are enough for any sequence of exchanges. A rank that writes into a half in epoch n has passed the
barrier of epoch n - 1, and every rank arrives there after its last read of epoch n - 2. Epochs are compared
by their difference, so nothing is reset and they may wrap.

`exchange_places` computes the row of every (token, expert) assignment at its receiver from the counts of all
ranks alone. The rows at a rank are sorted by expert, then by source rank, then in the source's order, as if
all assignments had been sorted together. Rows beyond the capacity C are dropped by their source.

T tokens of this rank, k experts of each, H hidden, E experts; P expert-parallel ranks with E/P experts
each; D expert-tensor-parallel ranks that hold parts of the same experts; R = D P ranks. Ranks are numbered in
the order of `peer_offsets` (D, P): rank = d P + p. A row of peer p is named by p C + row, and each of p's D
ranks has it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.registry import compute_dtype, register
from fastmp.ops.exchange_reference import (
    empty_dprobs,
    reference_barrier,
    reference_counts,
    reference_give,
    reference_places,
    reference_pull,
    reference_push,
    reference_take,
)
from fastmp.ops.exchange_triton import (
    launch_barrier,
    launch_counts,
    launch_get,
    launch_give,
    launch_places,
    launch_put,
    launch_take,
)
from fastmp.profiling import traced


def _moved(where: Tensor, rows: Tensor, peer_offsets: Tensor) -> int:
    """Count the bytes of all assignments' rows, once for each of the D ranks that have them."""
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
    contract=(
        "epochs (R+1) int32; 0 < R; peer_offsets (D, P) int64; D * P == R; 0 <= rank < R; 0 < timeout; "
        "own (E) int32; counts (2, R, E) int32"
    ),
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
    contract=(
        "row_of (T, S) int32; indices (T, S) int32; matrix (R, E) int32; 0 < E; 0 <= rank < R; 0 < peers; "
        "E % peers == 0; R % peers == 0; 0 < capacity <= 2147483647"
    ),
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
    contract=(
        "x (T, H) rows; where (T, S) int32; probs (T, S) wide(x); y (T, S, H) x; epochs (R+1) int32; "
        "rows (2, C, W) floating; 0 < R; peer_offsets (D, P) int64; D * P == R; H <= W"
    ),
    reference=reference_push,
    triton=launch_put,
    fake=lambda x, where, probs, y, *rest: empty_dprobs(where, probs, y),
    flops=lambda x, where, probs, y, *rest: (
        where.numel() * x.shape[1] * ((probs is not None) + 2 * (y is not None))
    ),
    traffic=_push_traffic,
)
_barrier = register(
    "exchange_barrier(Tensor(a!) epochs, Tensor peer_offsets, int rank, float timeout) -> ()",
    contract=("epochs (R+1) int32; 0 < R; peer_offsets (D, P) int64; D * P == R; 0 <= rank < R; 0 < timeout"),
    reference=reference_barrier,
    triton=launch_barrier,
    fake=lambda *arguments: None,
)
_take = register(
    "exchange_take(Tensor rows, Tensor epochs, Tensor offsets, int width) -> Tensor",
    contract="rows (2, C, H) floating; epochs (R+1) int32; 0 < R; offsets (E) int32; 0 < E; 0 <= width <= H",
    reference=reference_take,
    triton=launch_take,
    fake=lambda rows, epochs, offsets, width: rows.new_empty(rows.shape[1], width),
    traffic=lambda rows, epochs, offsets, width: 2 * rows.shape[1] * width * rows.element_size(),
)
_give = register(
    "exchange_give(Tensor given, Tensor offsets, Tensor epochs, Tensor(a!) rows) -> ()",
    contract=(
        "rows (2, C, H) floating; given (C, H) rows; offsets (E) int32; 0 < E; epochs (R+1) int32; 0 < R"
    ),
    reference=reference_give,
    triton=launch_give,
    fake=lambda *arguments: None,
    traffic=lambda given, *rest: 2 * _bytes(given),
)
_pull = register(
    "exchange_pull(Tensor rows, Tensor epochs, Tensor peer_offsets, Tensor where, Tensor? probs,"
    " bool keep) -> (Tensor, Tensor)",
    contract=(
        "rows (2, C, H) floating; epochs (R+1) int32; 0 < R; peer_offsets (D, P) int64; D * P == R; "
        "where (T, S) int32; probs (T, S) wide(rows)"
    ),
    reference=reference_pull,
    triton=launch_get,
    fake=lambda rows, epochs, peer_offsets, where, probs, keep: (
        rows.new_empty(where.shape[0], rows.shape[2]),
        rows.new_empty((*where.shape, rows.shape[2]) if keep else (0,)),
    ),
    flops=lambda rows, epochs, peer_offsets, where, probs, keep: (
        where.numel() * rows.shape[2] * (peer_offsets.shape[0] + (probs is not None))
    ),
    traffic=_pull_traffic,
)


def _check_tensor(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple, dims: str) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{op}: {name} must be {dtype} {dims} = {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )


@checks.memoized
def _check_ranks(op: str, epochs: Tensor, peer_offsets: Tensor, rank: int) -> None:
    if peer_offsets.dtype != torch.int64 or peer_offsets.dim() != 2:
        raise ValueError(
            f"{op}: peer_offsets must be int64 (D, P), got {peer_offsets.dtype} {tuple(peer_offsets.shape)}"
        )
    ranks = peer_offsets.numel()
    _check_tensor(op, "epochs", epochs, torch.int32, (ranks + 1,), "(R + 1,)")
    checks.require(0 <= rank < ranks, op + ": rank must be one of the {} ranks, got {}", ranks, rank)
    checks.check_same_device(op, epochs=epochs, peer_offsets=peer_offsets)


def _check_timeout(op: str, timeout: float) -> None:
    fits = 0 < timeout < math.inf
    checks.require(fits, op + ": timeout must be a positive number of seconds, got {}", timeout)


def _check_epochs(op: str, epochs: Tensor) -> None:
    if epochs.dtype != torch.int32 or epochs.dim() != 1 or epochs.shape[0] < 2:
        raise ValueError(f"{op}: epochs must be int32 (R + 1,), got {epochs.dtype} {tuple(epochs.shape)}")


def _check_rows(op: str, rows: Tensor, epochs: Tensor) -> None:
    checks.check_floating(op, "rows", rows)
    if rows.dim() != 3 or rows.shape[0] != 2:
        raise ValueError(f"{op}: rows must be (2, C, H), got {tuple(rows.shape)}")
    _check_epochs(op, epochs)
    checks.check_same_device(op, rows=rows, epochs=epochs)


@checks.memoized
def _check_assignments(
    op: str, where: Tensor, probs: Tensor | None, rows: Tensor, epochs: Tensor, peer_offsets: Tensor
) -> None:
    _check_rows(op, rows, epochs)
    _check_ranks(op, epochs, peer_offsets, 0)
    if where.dtype != torch.int32 or where.dim() != 2:
        raise ValueError(f"{op}: where must be int32 (T, k), got {where.dtype} {tuple(where.shape)}")
    checks.check_same_device(op, rows=rows, where=where)
    if probs is not None:
        _check_tensor(op, "probs", probs, compute_dtype(rows.dtype), tuple(where.shape), "like where (T, k)")
        checks.check_same_device(op, rows=rows, probs=probs)


@checks.memoized
def _check_values(op: str, name: str, value: Tensor, shape: tuple, described: str, rows: Tensor) -> None:
    _check_tensor(op, name, value, rows.dtype, shape, described)
    checks.check_same_device(op, **{name: value, "rows": rows})


@checks.memoized
def _check_offsets(op: str, offsets: Tensor, rows: Tensor, epochs: Tensor) -> None:
    _check_rows(op, rows, epochs)
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or not offsets.shape[0]:
        raise ValueError(f"{op}: offsets must be int32 (E/P,), got {offsets.dtype} {tuple(offsets.shape)}")
    checks.check_same_device(op, rows=rows, offsets=offsets)


def _check_contiguous(op: str, **views: Tensor) -> None:
    """Check that views of the symmetric buffer are contiguous, as the peers' are taken to be."""
    for name, view in views.items():
        if not view.is_contiguous():
            raise ValueError(
                f"{op}: {name} must be contiguous, got shape {tuple(view.shape)} with strides "
                f"{view.stride()}; pass views of the symmetric buffer as it was allocated"
            )


@traced("fastmp.exchange_counts")
def exchange_counts(
    own: Tensor, epochs: Tensor, counts: Tensor, peer_offsets: Tensor, rank: int, timeout: float
) -> Tensor:
    """All-gather every rank's row of counts; a whole exchange of its own.

    Args:
        own: (E,) int32, the end of each expert's rows on this rank (inclusive prefix sum of its assignments),
            from `permutation`.
        epochs, counts: this rank's symmetric buffer (see the module), contiguous; both are written to.
        peer_offsets: (D, P) int64: bytes from this rank's buffer to each rank's, multiples of 16, 0 for its
            own.
        rank: this rank's index in `peer_offsets`.
        timeout: seconds to wait for the other ranks, more than 0.

    Returns:
        (R, E) int32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the timeout is not positive and finite.
        RuntimeError: on a CPU, an offset leads to unmapped memory, or this rank's own is not 0; or a rank,
            named in the message, has not arrived in time, and in every later call. On a GPU the kernel traps
            after `timeout`: later CUDA calls raise "unspecified launch failure".
    """
    op = "exchange_counts"
    _check_ranks(op, epochs, peer_offsets, rank)
    _check_timeout(op, timeout)
    _check_tensor(op, "own", own, torch.int32, tuple(counts.shape[-1:]), "(E,), as counts has it,")
    _check_tensor(op, "counts", counts, torch.int32, (2, peer_offsets.numel(), own.numel()), "(2, R, E)")
    checks.check_same_device(op, epochs=epochs, own=own, counts=counts)
    _check_contiguous(op, epochs=epochs, counts=counts, peer_offsets=peer_offsets)
    return _counts(own, epochs, counts, peer_offsets, rank, float(timeout))


@traced("fastmp.exchange_places")
def exchange_places(
    row_of: Tensor, indices: Tensor, matrix: Tensor, rank: int, peers: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the destination row of each assignment from the counts of all ranks, without communication.

    Args:
        row_of: (T, k) int32, the assignment's row on this rank, from `permutation`.
        indices: (T, k) int32, the assignment's expert; one without an expert or a row is dropped.
        matrix: (R, E) int32, from `exchange_counts`.
        rank: this rank's index.
        peers: P, expert-parallel ranks, which divide the experts evenly.
        capacity: C, the same on all ranks.

    Returns:
        where (T, k) int32: p C + row for row of peer p, or -1 for a dropped assignment;
        offsets (E/P,) int32: the end of the rows of each of this rank's experts, at most C;
        dropped () int32: this rank's assignments dropped because their row is beyond the capacity.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, P does not divide E, or rows are too many for int32.
    """
    op = "exchange_places"
    for name, tensor in (("row_of", row_of), ("indices", indices)):
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise ValueError(f"{op}: {name} must be int32 (T, k), got {tensor.dtype} {tuple(tensor.shape)}")
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
    """Put each token into its rows at the peers, in the half of the next exchange.

    With `probs` and `y` it is the backward of `exchange_pull`.

    Args:
        x: (T, W) of rows' dtype, W at most H, any strides (last stride 1 avoids a copy); it is written to the
            first W columns.
        where: (T, k) int32 from `exchange_places`; an assignment outside [0, P C) is dropped. Two assignments
            with one row, which `exchange_places` never makes, race for it.
        probs: (T, k) float32 (float64 for float64 rows), factors of the token; or None.
        y: (T, k, W) as `exchange_pull` kept it, or None; only with `probs`.
        epochs, rows: this rank's symmetric buffer, contiguous; the peers' rows are written to.
        peer_offsets: (D, P) int64, see `exchange_counts`.

    Returns:
        The gradient of probs (T, k), in probs' dtype: the dot product of each assignment's rows of x and
        y, and 0 for dropped ones. Without y, an empty tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or there is y without probs.
    """
    op = "exchange_push"
    _check_assignments(op, where, probs, rows, epochs, peer_offsets)
    tokens, slots = where.shape
    width = min(x.shape[-1], rows.shape[2])
    _check_values(op, "x", x, (tokens, width), "(T, W), W at most H,", rows)
    if y is not None:
        _check_values(op, "y", y, (tokens, slots, width), "(T, k, W)", rows)
        checks.require(
            probs is not None, op + ": y {} comes with probs, got None: pass both or neither", y.shape
        )
    _check_contiguous(op, epochs=epochs, rows=rows, peer_offsets=peer_offsets)
    return _push(x, where, probs, y, epochs, rows, peer_offsets)


@traced("fastmp.exchange_barrier")
def exchange_barrier(epochs: Tensor, peer_offsets: Tensor, rank: int, timeout: float) -> None:
    """Wait until all ranks have arrived, which completes the exchange and advances the epoch.

    Writes before the barrier are visible after it. For arguments and errors see `exchange_counts`.
    """
    _check_ranks("exchange_barrier", epochs, peer_offsets, rank)
    _check_timeout("exchange_barrier", timeout)
    _check_contiguous("exchange_barrier", epochs=epochs, peer_offsets=peer_offsets)
    _barrier(epochs, peer_offsets, rank, float(timeout))


@traced("fastmp.exchange_take")
def exchange_take(rows: Tensor, epochs: Tensor, offsets: Tensor, width: int | None = None) -> Tensor:
    """Copy the rows that peers have put here in the latest exchange out of the symmetric buffer.

    Args:
        rows, epochs: this rank's symmetric buffer, contiguous.
        offsets: (E/P,) int32 from `exchange_places`; the last one is the number of received rows.
        width: W, the columns that peers have put; None: all.

    Returns:
        (C, W); rows beyond the received ones are zeros.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_offsets("exchange_take", offsets, rows, epochs)
    _check_contiguous("exchange_take", rows=rows, epochs=epochs)
    width = rows.shape[2] if width is None else width
    checks.require(
        0 <= width <= rows.shape[2], "exchange_take: rows have {} columns, got width {}", rows.shape[2], width
    )
    return _take(rows, epochs, offsets, width)


@traced("fastmp.exchange_give")
def exchange_give(given: Tensor, offsets: Tensor, epochs: Tensor, rows: Tensor) -> None:
    """Copy rows into the symmetric buffer, for peers to get in the next exchange.

    Args:
        given: (C, H) of rows' dtype, any strides (last stride 1 avoids a copy).
        offsets: (E/P,) int32 from `exchange_places`; the last one is the number of rows to copy.
        epochs, rows: this rank's symmetric buffer, contiguous; `rows` is written to.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_offsets("exchange_give", offsets, rows, epochs)
    _check_values("exchange_give", "given", given, tuple(rows.shape[1:]), "(C, H)", rows)
    _check_contiguous("exchange_give", rows=rows, epochs=epochs)
    _give(given, offsets, epochs, rows)


@traced("fastmp.exchange_pull")
def exchange_pull(
    rows: Tensor, epochs: Tensor, peer_offsets: Tensor, where: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Get each token's rows from the peers, given in the latest exchange, and return their weighted sum.

    Args:
        rows, epochs: this rank's symmetric buffer, contiguous.
        peer_offsets: (D, P) int64, see `exchange_counts`.
        where: (T, k) int32 from `exchange_places`; an assignment outside [0, P C) adds nothing.
        probs: (T, k) float32 (float64 for float64 rows), or None for a plain sum.
        keep: return the rows as well, for the gradient of probs.

    Returns:
        out (T, H): the sum over the slots of probs times the assignment's row, in float32 (float64 for
        float64 rows), in order, rounded once. An assignment's row is the sum over the D ranks that have it,
        rounded to its dtype.
        y (T, k, H): these rows, zeros for dropped assignments; without `keep`, an empty tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_assignments("exchange_pull", where, probs, rows, epochs, peer_offsets)
    _check_contiguous("exchange_pull", rows=rows, epochs=epochs, peer_offsets=peer_offsets)
    return _pull(rows, epochs, peer_offsets, where, probs, keep)
