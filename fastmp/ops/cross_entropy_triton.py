"""Triton kernels of the cross-entropy family and their launches; see `cross_entropy`.

A program processes one row, in blocks of (BLOCK / VEC, VEC) elements: a lane holds VEC neighbours, 16 bytes.
Each lane keeps an online softmax of its own, one exponential a logit and one a block to rescale its sum; the
lanes reduce once, at the end of the row. A row that does not start on 16 bytes is read from the last boundary
before it. Only blocks that overlap the ends of the row are masked, vector by vector: a mask that may end
anywhere splits every access, so only rows that do begin or end within a vector use one.
"""

from __future__ import annotations

from functools import cache

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import cdiv, jit, next_power_of_2, tl
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.core.rowwise import empty_like
from fastmp.ops.reduction import divided, grad_of_each


def real_columns(columns: int, vocab_start: int, vocab_size: int) -> int:
    """Count the columns of a shard that are not padding."""
    if not (0 <= vocab_start <= 1 << 62 and vocab_size > 0):
        raise ValueError(
            "expected vocab_start from 0 to 2**62 and a positive vocab_size, got"
            f" vocab_start={vocab_start} and vocab_size={vocab_size}"
        )
    return min(max(vocab_size - vocab_start, 0), columns)


@jit
def fast_exp(x):
    return tl.exp2(x * 1.4426950408889634)


@jit
def scaled(x, scale):
    if scale is not None:
        x *= scale
    return x


@jit
def finite_log(x):
    """Clamp the logarithm of a number that may be zero, so that 0 * log 0 is 0, not NaN."""
    return tl.maximum(x, -1000.0)


@jit
def offsets(start, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Return the offsets of a block's vectors (BLOCK / VEC, 1) and elements (BLOCK / VEC, VEC)."""
    first = start + tl.arange(0, BLOCK // VEC)[:, None] * VEC
    return first, first + tl.arange(0, VEC)[None, :]


@jit
def load_edge(
    base, first, at, begin, end,
    OTHER: tl.constexpr, VEC: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load base[at] for begin <= at < end, else OTHER."""
    whole = (first >= begin) & (first + VEC <= end)
    x = tl.load(base + at, mask=whole, other=OTHER, eviction_policy=EVICT)
    if (begin > 0) | (end % VEC > 0):
        rest = (at >= begin) & (at < end) & ~whole
        x = tl.where(rest, tl.load(base + at, mask=rest, other=OTHER, eviction_policy=EVICT), x)
    return x


@jit
def store_edge(base, first, at, value, begin, end, VEC: tl.constexpr):
    """Store base[at] = value for begin <= at < end."""
    whole = (first >= begin) & (first + VEC <= end)
    tl.store(base + at, value, mask=whole)
    if (begin > 0) | (end % VEC > 0):
        tl.store(base + at, value, mask=(at >= begin) & (at < end) & ~whole)


@jit
def row_stats(
    base, begin, end, scale,
    ACC: tl.constexpr, WITH_SUM: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    VEC: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Return maximum, and sums of exponentials and of base[begin:end] relative to it (to 0 if it is -inf).

    With a `scale`, exponentials are of scaled differences. WITH_ENTROPY replaces the last sum by that of each
    exponential times its logarithm.
    """
    LANES: tl.constexpr = BLOCK // VEC
    # Online softmax: each lane has a running maximum and a sum of exponentials relative to it.
    top = tl.full((LANES,), float("-inf"), ACC)
    total = tl.zeros((LANES,), ACC)
    plain = tl.zeros((LANES,), ACC)
    seen = tl.zeros((LANES,), ACC)
    for start in range(0, end, BLOCK):
        # 1. Load a block; mask it only at the ends of the row.
        first, at = offsets(start, BLOCK, VEC)
        if (start >= begin) & (start + BLOCK <= end):
            x = tl.load(base + at, eviction_policy=EVICT).to(ACC)
        else:
            x = load_edge(base, first, at, begin, end, float("-inf"), VEC, EVICT).to(ACC)
        # 2. Rescale the running sum to the new maximum (0 for -inf: no inf - inf), then add the block.
        higher = tl.maximum(top, tl.max(x, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        gap, below = scaled(top - finite, scale), scaled(x - finite[:, None], scale)
        shrink, exponentials = fast_exp(gap), fast_exp(below)
        if WITH_ENTROPY:
            plain = (plain + total * finite_log(gap)) * shrink
            plain += tl.sum(exponentials * finite_log(below), 1)
        total = total * shrink + tl.sum(exponentials, 1)
        if WITH_SUM:
            inside = (at >= begin) & (at < end)
            plain += seen * (tl.where(top == float("-inf"), 0.0, top) - finite)
            plain += tl.sum(tl.where(inside, x - finite[:, None], 0.0), 1)
            seen += tl.sum(tl.where(inside, 1.0, 0.0), 1)
        top = higher
    # 3. Reduce over the lanes: sums relative to the row's maximum.
    row_top = tl.max(top, 0)
    finite = tl.where(row_top == float("-inf"), 0.0, row_top)
    gap = scaled(top - finite, scale)
    shrink = fast_exp(gap)
    if WITH_ENTROPY:
        plain = (plain + total * finite_log(gap)) * shrink
    if WITH_SUM:
        plain += seen * (tl.where(top == float("-inf"), 0.0, top) - finite)
    return row_top, tl.sum(total * shrink, 0), tl.sum(plain, 0)


@jit
def row_start(logits, row, row_stride, VEC: tl.constexpr):
    """Return the last 16-byte boundary before a row, and the row's offset from it in elements."""
    aligned = row * row_stride // VEC * VEC
    return logits + tl.multiple_of(aligned, VEC), (row * row_stride - aligned).to(tl.int32)


@jit
def _token_loss(
    top, total, target_logit, plain, vocab_size,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Cross-entropy with smoothing over the vocabulary, and z-loss, from finite statistics of a row.

    Relative to the maximum until the end: `plain` is the sum of logits, less the maximum each.
    """
    log_total = tl.log(total)
    row_lse = top + log_total
    value = (1 - SMOOTHING) * (log_total + (top - target_logit)) + Z_LOSS * row_lse * row_lse
    if SMOOTHING > 0:
        value += SMOOTHING * (log_total - plain / vocab_size)
    return value


@jit(fixed="row_stride real vocab_start")
def stats_kernel(
    logits,  # (N, V)
    target,  # (N,) int64
    out,  # (N, 3), or (N, 5) with WITH_SUM
    row_stride, real, vocab_start,
    WITH_SUM: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one row of a shard."""
    ACC: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    # 1. Maximum and sums of the row.
    base, begin = row_start(logits, row, row_stride, VEC)
    top, total, plain = row_stats(base, begin, begin + real, None, ACC, WITH_SUM, False, BLOCK, VEC, "")
    # 2. The target's logit if this shard has that column, else 0, so that shards can be added.
    column = tl.load(target + row) - vocab_start
    here = (column >= 0) & (column < real)
    out += row * (5 if WITH_SUM else 3)
    tl.store(out, top)
    tl.store(out + 1, total)
    tl.store(out + 2, tl.load(base + begin + column, mask=here, other=0.0).to(ACC))
    if WITH_SUM:
        tl.store(out + 3, plain)
        tl.store(out + 4, real)


@jit(dynamic="tokens", fixed="shards vocab_size ignore_index")
def merge_kernel(
    stats,  # (P, N, WIDTH)
    target,  # (N,) int64
    token_weight,  # (N,) or None
    loss,  # (N,)
    merged,  # (N, 2)
    tokens, shards, vocab_size, ignore_index,
    WIDTH: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of all shards into the loss, maximum and sum of BLOCK tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    # 1. The maximum over the shards.
    top = tl.full((BLOCK,), float("-inf"), stats.dtype.element_ty)
    place = token
    for _ in range(shards):
        top = tl.maximum(top, tl.load(stats + place * WIDTH, mask=inside, other=0.0))
        place += tokens
    # 2. All sums relative to it.
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros_like(top)
    target_logit = tl.zeros_like(top)
    plain = tl.zeros_like(top)
    place = token
    for _ in range(shards):
        at = stats + place * WIDTH
        place += tokens
        own = tl.load(at, mask=inside, other=0.0)
        total += tl.load(at + 1, mask=inside, other=1.0) * fast_exp(own - top)
        target_logit += tl.load(at + 2, mask=inside, other=0.0)
        if SMOOTHING > 0:
            gap = tl.where(own == float("-inf"), 0.0, own) - top
            plain += tl.load(at + 3, mask=inside, other=0.0)
            plain += tl.load(at + 4, mask=inside, other=0.0) * gap
    # 3. The loss; NaN where the target is no column, 0 where it is ignored.
    value = _token_loss(top, total, target_logit, plain, vocab_size, SMOOTHING, Z_LOSS)
    if token_weight is not None:
        value *= tl.load(token_weight + token, mask=inside, other=0.0)
    wanted = tl.load(target + token, mask=inside, other=0)
    value = tl.where((wanted >= 0) & (wanted < vocab_size), value, float("nan"))
    tl.store(loss + token, tl.where(wanted == ignore_index, 0.0, value), mask=inside)
    tl.store(merged + token * 2, tl.where(total == total, top, total), mask=inside)
    tl.store(merged + token * 2 + 1, total, mask=inside)


@jit
def _row_grad(
    source, sink, begin, end, columns, live, top, total, scale, vocab_size, target_at,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Write the gradient of source[begin:end] to sink, and zeros up to `columns`; the last block first."""
    # 1. d loss / d logit = probability * slope - shift, and - share at the target.
    slope = scale / total
    if Z_LOSS > 0:
        slope *= 1 + 2 * Z_LOSS * (top + tl.log(total))
    shift = scale * SMOOTHING / vocab_size
    share = scale * (1 - SMOOTHING)
    blocks = tl.cdiv(begin + columns, BLOCK)
    for block in range(0, blocks):
        start = (blocks - 1 - block) * BLOCK
        first, at = offsets(start, BLOCK, VEC)
        whole = (start >= begin) & (start + BLOCK <= end)
        # 2. Load a block; blocks inside the row need no mask, and ignored rows are not read.
        if whole:
            x = tl.load(source + at, mask=live, other=0.0, eviction_policy=EVICT)
        else:
            x = load_edge(source, first, at, begin, tl.where(live, end, 0), 0.0, VEC, EVICT)
        # 3. Probability of each column, from the row's maximum and sum.
        grad = fast_exp(x.to(top.dtype) - top) * slope - shift
        grad -= tl.where(at == target_at, share, 0.0)
        grad = tl.where(live, grad, 0.0)
        if whole:
            tl.store(sink + at, grad)
        else:
            store_edge(sink, first, at, tl.where(at < end, grad, 0.0), begin, begin + columns, VEC)


@jit(fixed="row_stride out_stride columns real vocab_start vocab_size ignore_index")
def grad_kernel(
    logits, out,  # (N, V); may be the same memory
    target,  # (N,) int64
    merged,  # (N, 2)
    grad_loss,  # (N,)
    token_weight,  # (N,) or None
    row_stride, out_stride, columns, real, vocab_start, vocab_size, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one row's logits."""
    row = tl.program_id(0).to(tl.int64)
    source, begin = row_start(logits, row, row_stride, VEC)
    sink = out + tl.multiple_of(row * out_stride - begin, VEC)
    # The upstream gradient becomes NaN where the target is no column, as the loss is.
    top, total = tl.load(merged + row * 2), tl.load(merged + row * 2 + 1)
    wanted = tl.load(target + row)
    scale = tl.load(grad_loss + row)
    if token_weight is not None:
        scale *= tl.load(token_weight + row)
    scale = tl.where((wanted >= 0) & (wanted < vocab_size), scale, float("nan"))
    column = wanted - vocab_start
    target_at = tl.where((column >= 0) & (column < real), column + begin, -1).to(tl.int32)
    _row_grad(
        source, sink, begin, begin + real, columns, wanted != ignore_index, top, total, scale, vocab_size,
        target_at, SMOOTHING, Z_LOSS, BLOCK, VEC, "",
    )  # fmt: skip


@jit(fixed="row_stride real vocab_start vocab_size ignore_index")
def loss_kernel(
    logits,  # (N, V)
    target,  # (N,) int64
    token_weight,  # (N,) or None
    loss,  # (N,)
    merged,  # (N, 2)
    row_stride, real, vocab_start, vocab_size, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Compute the loss, the maximum and the sum of a row that holds the whole vocabulary."""
    ACC: tl.constexpr = loss.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    base, begin = row_start(logits, row, row_stride, VEC)
    top, total, plain = row_stats(base, begin, begin + real, None, ACC, SMOOTHING > 0, False, BLOCK, VEC, "")
    wanted = tl.load(target + row)
    column = wanted - vocab_start
    here = (column >= 0) & (column < real)
    target_logit = tl.load(base + begin + column, mask=here, other=0.0).to(ACC)
    top = tl.where(top == float("-inf"), 0.0, top)
    value = _token_loss(top, total, target_logit, plain, vocab_size, SMOOTHING, Z_LOSS)
    if token_weight is not None:
        value *= tl.load(token_weight + row)
    value = tl.where((wanted >= 0) & (wanted < vocab_size), value, float("nan"))
    tl.store(loss + row, tl.where(wanted == ignore_index, 0.0, value))
    tl.store(merged + row * 2, tl.where(total == total, top, total))
    tl.store(merged + row * 2 + 1, total)


@jit(fixed="row_stride columns vocab_size ignore_index")
def loss_grad_kernel(
    logits,  # (N, V), overwritten by its gradient
    target,  # (N,) int64
    loss_grad,  # (N,), the upstream gradient of each loss
    token_weight,  # (N,) or None
    loss,  # (N,)
    row_stride, columns, vocab_size, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row, and overwrite its logits with their gradient.

    The second read hits the second-level cache: the launch sizes leave so few programs on a multiprocessor
    that the rows in flight fit there. The first read is marked evict_last, the second evict_first.
    """
    ACC: tl.constexpr = loss.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    base, begin = row_start(logits, row, row_stride, VEC)
    wanted = tl.load(target + row)
    live = wanted != ignore_index
    real = (wanted >= 0) & (wanted < vocab_size)
    # 1. The target's logit, before any thread overwrites it: the reductions below are barriers.
    target_logit = tl.load(base + begin + wanted, mask=real, other=0.0).to(ACC)
    # 2. First read: statistics and loss of the row.
    end = begin + tl.where(live, vocab_size, 0).to(tl.int32)
    top, total, plain = row_stats(base, begin, end, None, ACC, SMOOTHING > 0, False, BLOCK, VEC, "evict_last")
    top = tl.where(top == float("-inf"), 0.0, top)
    value = _token_loss(top, total, target_logit, plain, vocab_size, SMOOTHING, Z_LOSS)
    scale = tl.load(loss_grad + row)
    if token_weight is not None:
        weight = tl.load(token_weight + row)
        value *= weight
        scale *= weight
    value = tl.where(real, value, float("nan"))
    scale = tl.where(real, scale, float("nan"))
    tl.store(loss + row, tl.where(live, value, 0.0))
    # 3. Second read: the gradient over the logits.
    target_at = tl.where(real, wanted + begin, -1).to(tl.int32)
    _row_grad(
        base, base, begin, begin + vocab_size, columns, live, top, total, scale, vocab_size, target_at,
        SMOOTHING, Z_LOSS, BLOCK, VEC, "evict_first",
    )  # fmt: skip


def launch_sizes(columns: int, itemsize: int) -> tuple[int, int, int]:
    """Choose (BLOCK, VEC, num_warps) for rows of `columns`: 16 bytes a load, at most 8 KiB a block.

    Two loads a thread leave registers for several programs on a multiprocessor, so that some load while
    others compute, and little of a row's last block is padding.
    """
    vec = 16 // itemsize
    block = min(max(next_power_of_2(columns + vec - 1), 32 * vec), 512 * vec)
    return block, vec, max(block // (64 * vec), 1)


def loss_grad_sizes(columns: int, itemsize: int) -> tuple[int, int, int]:
    """Choose (BLOCK, VEC, num_warps) of the fused loss and gradient: two loads a thread, but more warps.

    Long rows get so many warps that few rows are in flight on a multiprocessor. On average half of a row is
    live: 132 multiprocessors take 35 MB of the second-level cache at most, for rows of up to 512 KiB.
    """
    vec = 16 // itemsize
    max_warps = 8 if columns * itemsize <= 64 << 10 else 16 if columns * itemsize <= 256 << 10 else 32
    block = min(max(next_power_of_2(columns + vec - 1), 32 * vec), max_warps * 64 * vec)
    return block, vec, max(block // (64 * vec), 1)


_RESERVED = 2048  # bytes of shared memory that a block of the CUDA C++ kernel leaves to the system
_LONG_ROW = 64 << 10  # bytes, see `loss_grad_prefers_cuda`


def loss_grad_bytes(columns: int, itemsize: int, shared: int) -> dict[str, int]:
    """Count the bytes per row that each kernel of the fused loss and gradient reads and writes.

    The Triton kernel reads a row twice, the second time mostly from the second-level cache. The CUDA C++
    kernel keeps the beginning of a row in shared memory; two blocks share a multiprocessor's `shared` bytes.
    """
    row = columns * itemsize
    return {"triton": 3 * row, "cuda": 2 * row + max(0, row - (shared // 2 - _RESERVED))}


@cache
def loss_grad_prefers_cuda(columns: int, itemsize: int, shared: int) -> bool:
    """Return True if the CUDA C++ kernel saves a tenth of the bytes or more, of a row of 64 KiB or more.

    On an H200 it took 0.80 of Triton's time on rows of 98 KiB, 0.91 on 250 KiB, but 1.58 on 31 KiB, of which
    each costs it more than the second read of a cached row.
    """
    moved = loss_grad_bytes(columns, itemsize, shared)
    return columns * itemsize >= _LONG_ROW and 10 * moved["cuda"] <= 9 * moved["triton"]


def shape_of(op, logits):
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise RuntimeError(f"{op}: columns must lie next to each other, got stride {logits.stride(1)}")
    return logits.shape


def launch_stats(logits, target, vocab_start, vocab_size, with_sum):
    tokens, columns = shape_of("cross_entropy_stats", logits)
    out = logits.new_empty(tokens, 5 if with_sum else 3, dtype=compute_dtype(logits.dtype))
    block, vec, num_warps = launch_sizes(columns, logits.element_size())
    real = real_columns(columns, vocab_start, vocab_size)
    if tokens:
        launcher.launch(
            stats_kernel, tokens,
            (logits, target.contiguous(), out, logits.stride(0), real, vocab_start),
            {
                "WITH_SUM": with_sum, "BLOCK": block, "VEC": 1 if logits.data_ptr() % 16 else vec,
                "num_warps": num_warps,
            },
        )  # fmt: skip
    return out


def launch_merge(stats, target, token_weight, vocab_size, ignore_index, label_smoothing, z_loss):
    shards, tokens, width = stats.shape
    if width != 5 and (label_smoothing or width != 3):
        raise RuntimeError(
            f"cross_entropy_merge: expected stats (P, N, 3), or (P, N, 5) with label smoothing, got"
            f" {tuple(stats.shape)}"
        )
    loss, merged = stats.new_empty(tokens), stats.new_empty(tokens, 2)
    weight = None if token_weight is None else token_weight.contiguous()
    if tokens:
        launcher.launch(
            merge_kernel, cdiv(tokens, 128),
            (
                stats.contiguous(), target.contiguous(), weight, loss, merged, tokens, shards, vocab_size,
                ignore_index,
            ),
            {"WIDTH": width, "SMOOTHING": label_smoothing, "Z_LOSS": z_loss, "BLOCK": 128, "num_warps": 4},
        )  # fmt: skip
    return loss, merged


def launch_loss(
    logits, target, stats, token_weight, vocab_start, vocab_size, ignore_index, smoothing, z_loss,
    grad_in_place, divisor=None,
):  # fmt: skip
    """Compute (loss, merged) from the statistics of all shards or, without them, from the logits."""
    if stats is not None:
        options = vocab_size, ignore_index, smoothing, z_loss
        loss, merged = launch_merge(stats, target, token_weight, *options)
        return divided(loss, divisor), merged
    tokens, columns = shape_of("cross_entropy", logits)
    block, vec, num_warps = launch_sizes(columns, logits.element_size())
    dtype = compute_dtype(logits.dtype)
    loss, merged = logits.new_empty(tokens, dtype=dtype), logits.new_empty(tokens, 2, dtype=dtype)
    weight = None if token_weight is None else token_weight.contiguous()
    if tokens:
        launcher.launch(
            loss_kernel, tokens,
            (
                logits, target.contiguous(), weight, loss, merged, logits.stride(0),
                real_columns(columns, vocab_start, vocab_size), vocab_start, vocab_size, ignore_index,
            ),
            {
                "SMOOTHING": smoothing, "Z_LOSS": z_loss, "BLOCK": block,
                "VEC": 1 if logits.data_ptr() % 16 else vec, "num_warps": num_warps,
            },
        )  # fmt: skip
    return divided(loss, divisor), merged


def launch_grad_into(
    out, logits, target, merged, grad_loss, token_weight, vocab_start, vocab_size, ignore_index, smoothing,
    z_loss, divisor=None,
):  # fmt: skip
    grad_loss = grad_of_each(grad_loss, target, divisor)
    tokens, columns = shape_of("cross_entropy_grad", logits)
    if merged.shape != (tokens, 2):
        raise RuntimeError(f"cross_entropy_grad: expected merged ({tokens}, 2), got {tuple(merged.shape)}")
    block, vec, num_warps = launch_sizes(columns, logits.element_size())
    if logits.data_ptr() % 16 or out.data_ptr() % 16 or (logits.stride(0) - out.stride(0)) % vec:
        vec = 1
    weight = None if token_weight is None else token_weight.contiguous()
    if tokens:
        launcher.launch(
            grad_kernel, tokens,
            (
                logits, out, target.contiguous(), merged.contiguous(), grad_loss.contiguous(), weight,
                logits.stride(0), out.stride(0), columns, real_columns(columns, vocab_start, vocab_size),
                vocab_start, vocab_size, ignore_index,
            ),
            {"SMOOTHING": smoothing, "Z_LOSS": z_loss, "BLOCK": block, "VEC": vec, "num_warps": num_warps},
        )  # fmt: skip


def launch_grad(logits, *options):
    out = empty_like(logits)
    launch_grad_into(out, logits, *options)
    return out


def launch_loss_grad(logits, target, loss_grad, token_weight, vocab_size, *options):
    ignore_index, smoothing, z_loss = options
    tokens, columns = shape_of("cross_entropy_loss_grad_", logits)
    block, vec, num_warps = loss_grad_sizes(columns, logits.element_size())
    loss = logits.new_empty(tokens, dtype=compute_dtype(logits.dtype))
    weight = None if token_weight is None else token_weight.contiguous()
    if tokens:
        launcher.launch(
            loss_grad_kernel, tokens,
            (
                logits, target.contiguous(), loss_grad.contiguous(), weight, loss, logits.stride(0), columns,
                min(vocab_size, columns), ignore_index,
            ),
            {
                "SMOOTHING": smoothing, "Z_LOSS": z_loss, "BLOCK": block,
                "VEC": 1 if logits.data_ptr() % 16 else vec, "num_warps": num_warps,
            },
        )  # fmt: skip
    return loss
