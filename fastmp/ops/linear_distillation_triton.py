"""Triton kernels of the distillation losses and their launches.

One program a row, as in `cross_entropy_triton`. It reads the same row of the student's and the teacher's
logits, whose normalisers are known. The gradient overwrites the student's logits, the last block first, which
may still be in a cache.
"""

from __future__ import annotations

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import jit, tl
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.cross_entropy_triton import (
    fast_exp,
    launch_sizes,
    load_edge,
    offsets,
    real_columns,
    row_start,
    scaled,
    shape_of,
    store_edge,
)
from fastmp.ops.linear_log_probs_triton import load_scale, packed


@jit
def _kl_terms(weight, mixture, gap):
    """Return the KL terms w (e^gap - 1 - gap) of m = w e^gap; m for a zero w, the series for a small gap."""
    terms = mixture - weight - weight * gap
    if gap.dtype == tl.float32:
        series = gap * 2.75573192e-6 + 2.48015873e-5
        series = series * gap + 1.98412698e-4
        series = series * gap + 1.38888889e-3
        series = series * gap + 8.33333333e-3
        series = series * gap + 4.16666667e-2
        series = series * gap + 1.66666667e-1
        series = series * gap + 0.5
        terms = tl.where(tl.abs(gap) < 0.5, weight * gap * gap * series, terms)
    return tl.where(weight == 0, mixture, terms)


@jit
def _mixture_log(gap, BETA: tl.constexpr):
    """Return log m relative to the larger of p and q, where gap = log p - log q."""
    small = fast_exp(-tl.abs(gap))
    return tl.log(tl.where(gap >= 0, (1 - BETA) + BETA * small, BETA + (1 - BETA) * small))


@jit
def _load_normalisers(normalisers, row):
    """Load top, log total, and those of the teacher, of a row."""
    at = normalisers + row * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@jit(fixed="row_stride teacher_stride real")
def sums_kernel(
    logits, teacher_logits,  # (N, V), with one alignment of their rows
    normalisers,  # (N, 4)
    scale,  # (N,) or None
    out,  # (N, 2)
    row_stride, teacher_stride, real,
    BETA: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Compute KL(q || m) and KL(p || m) of one row of a shard; zero where BETA rules one out."""
    LANES: tl.constexpr = BLOCK // VEC
    ACC: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    base, begin = row_start(logits, row, row_stride, VEC)
    teacher = teacher_logits + tl.multiple_of(row * teacher_stride - begin, VEC)
    end = begin + real
    factor = None if scale is None else load_scale(scale, row)
    top, log_total, teacher_top, teacher_log_total = _load_normalisers(normalisers, row)
    of_q = tl.zeros((LANES,), ACC)
    of_p = tl.zeros((LANES,), ACC)
    for start in range(0, end, BLOCK):
        # 1. Load a block of both; mask it only at the ends of the row.
        first, at = offsets(start, BLOCK, VEC)
        if (start >= begin) & (start + BLOCK <= end):
            x = tl.load(base + at)
            y = tl.load(teacher + at)
        else:
            x = load_edge(base, first, at, begin, end, float("-inf"), VEC, "")
            y = load_edge(teacher, first, at, begin, end, float("-inf"), VEC, "")
        # 2. Log-probabilities, probabilities and the mixture; all zero where nothing was loaded.
        log_p = scaled(x.to(ACC) - top, factor) - log_total
        log_q = scaled(y.to(ACC) - teacher_top, factor) - teacher_log_total
        p, q = fast_exp(log_p), fast_exp(log_q)
        gap = log_p - log_q
        # 3. Terms of the divergences.
        if BETA == 0:
            of_q += tl.sum(_kl_terms(q, p, gap), 1)
        elif BETA == 1:
            of_p += tl.sum(_kl_terms(p, q, -gap), 1)
        else:
            log_m = _mixture_log(gap, BETA)
            m = BETA * q + (1 - BETA) * p
            of_q += tl.sum(_kl_terms(q, m, tl.where(gap >= 0, log_m + gap, log_m)), 1)
            of_p += tl.sum(_kl_terms(p, m, tl.where(gap >= 0, log_m, log_m - gap)), 1)
    tl.store(out + row * 2, tl.sum(of_q, 0))
    tl.store(out + row * 2 + 1, tl.sum(of_p, 0))


@jit(fixed="row_stride teacher_stride columns real")
def grad_kernel(
    logits, teacher_logits,  # (N, V), with one alignment of their rows
    normalisers,  # (N, 4)
    kl_p, grad_loss,  # (N,)
    scale,  # (N,) or None
    row_stride, teacher_stride, columns, real,
    BETA: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Overwrite one row of the student's logits with their gradient."""
    row = tl.program_id(0).to(tl.int64)
    base, begin = row_start(logits, row, row_stride, VEC)
    teacher = teacher_logits + tl.multiple_of(row * teacher_stride - begin, VEC)
    end = begin + real
    factor = None if scale is None else load_scale(scale, row)
    top, log_total, teacher_top, teacher_log_total = _load_normalisers(normalisers, row)
    row_kl = tl.load(kl_p + row)
    share = scaled(tl.load(grad_loss + row), factor) * (1 if BETA == 1 else 1 - BETA)
    blocks = tl.cdiv(begin + columns, BLOCK)
    for block in range(0, blocks):
        # 1. Load a block of both, from the end of the row.
        start = (blocks - 1 - block) * BLOCK
        first, at = offsets(start, BLOCK, VEC)
        whole = (start >= begin) & (start + BLOCK <= end)
        if whole:
            x = tl.load(base + at)
            y = tl.load(teacher + at)
        else:
            x = load_edge(base, first, at, begin, end, 0.0, VEC, "")
            y = load_edge(teacher, first, at, begin, end, 0.0, VEC, "")
        # 2. d / d logit, from the log-probabilities.
        log_p = scaled(x.to(top.dtype) - top, factor) - log_total
        log_q = scaled(y.to(top.dtype) - teacher_top, factor) - teacher_log_total
        p = fast_exp(log_p)
        if BETA == 0:
            grad = share * (p - fast_exp(log_q))
        else:
            gap = log_p - log_q
            if BETA < 1:
                log_m = _mixture_log(gap, BETA)
                gap = tl.where(gap >= 0, -log_m, gap - log_m)
            grad = share * tl.where(p == 0, 0.0, p * (gap - row_kl))
        # 3. Padding columns get zeros.
        if whole:
            tl.store(base + at, grad)
        else:
            store_edge(base, first, at, tl.where(at < end, grad, 0.0), begin, begin + columns, VEC)


def _sizes(op, logits, teacher_logits):
    """Return the tile, with vectors of one element unless rows of both begin at one alignment."""
    if teacher_logits.shape != logits.shape or teacher_logits.dtype != logits.dtype:
        raise ValueError(
            f"{op}: expected teacher_logits {logits.dtype} {tuple(logits.shape)}, like logits, got"
            f" {teacher_logits.dtype} {tuple(teacher_logits.shape)}"
        )
    shape_of(op, teacher_logits)
    block, vec, num_warps = launch_sizes(logits.shape[1], logits.element_size())
    together = (logits.stride(0) - teacher_logits.stride(0)) % vec == 0
    aligned = together and logits.data_ptr() % 16 == teacher_logits.data_ptr() % 16 == 0
    return {"BLOCK": block, "VEC": vec if aligned else 1, "num_warps": num_warps}


def launch_sums(logits, teacher_logits, normalisers, scale, beta, vocab_start, vocab_size):
    tokens, columns = shape_of("distillation_sums", logits)
    sizes = _sizes("distillation_sums", logits, teacher_logits)
    out = logits.new_empty(tokens, 2, dtype=compute_dtype(logits.dtype))
    strides = logits.stride(0), teacher_logits.stride(0)
    real = real_columns(columns, vocab_start, vocab_size)
    if tokens:
        launcher.launch(
            sums_kernel, tokens,
            (logits, teacher_logits, *packed(normalisers, scale), out, *strides, real),
            {"BETA": float(beta), **sizes},
        )  # fmt: skip
    return out


def launch_grad(logits, teacher_logits, normalisers, kl_p, grad_loss, scale, beta, vocab_start, vocab_size):
    tokens, columns = shape_of("distillation_grad_", logits)
    sizes = _sizes("distillation_grad_", logits, teacher_logits)
    strides = logits.stride(0), teacher_logits.stride(0)
    real = real_columns(columns, vocab_start, vocab_size)
    if tokens:
        launcher.launch(
            grad_kernel, tokens,
            (logits, teacher_logits, *packed(normalisers, kl_p, grad_loss, scale), *strides, columns, real),
            {"BETA": float(beta), **sizes},
        )  # fmt: skip
