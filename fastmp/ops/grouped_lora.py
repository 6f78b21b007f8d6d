"""Batched LoRA over experts: a grouped GEMM with a frozen weight, plus low-rank terms of each expert.

For rows sorted by expert, y = x w[e]^T + scale (x a[e]^T) b[e]^T. The weight w + scale b a of an expert is
never materialised, and w has no gradient. The second GEMM of the low-rank terms accumulates onto x w[e]^T: in
registers on a GPU, in place on a CPU, so no third tensor of y's size exists. The kernel takes tile, operands
and walk over the experts from `grouped_mm_triton`, and loads the few R terms by pointers after the K ones.

Backward, with low = scale x a^T and dlow = scale dy b, are four grouped GEMMs with R rows, columns or terms,
and dx = dy w + dlow a by the same kernel as forward.

M rows, E experts, N x K the weight of one, R the rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_SIZE,
    MAX_WALKING,
    cdiv,
    jit,
    limits,
    next_power_of_2,
    tl,
)
from fastmp.ops.core.registry import (
    Differentiable,
    autocast,
    compute_dtype,
    raise_if_create_graph,
    register,
    without_autocast,
)
from fastmp.ops.core.rowwise import vector_width
from fastmp.ops.core.tma import descriptor
from fastmp.ops.grouped_mm import check_ends, check_offsets, column_sums, grouped_flops, spans
from fastmp.ops.grouped_mm_epilogues import store_parts
from fastmp.ops.grouped_mm_launch import (
    STORE,
    GemmDesc,
    GemmPlan,
    aligned,
    along_rows,
    check_counts,
    gpu_of,
    plan_gemm,
)
from fastmp.ops.grouped_mm_tiles import row_class
from fastmp.ops.grouped_mm_triton import expert_ends, load_block, load_weight, place_of
from fastmp.profiling import traced


def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    low: Tensor,
    v: Tensor,
    offsets: Tensor,
    transposed: bool,
    v_transposed: bool,
) -> Tensor:
    """Return x w[e]^T + low v[e]^T + bias[e], or w[e], v[e] where they are transposed; rounded once."""
    y = x.new_empty(len(x), w.shape[2 if transposed else 1])
    dtype, end = compute_dtype(x.dtype), 0
    with without_autocast(x.device.type):
        for expert, (start, end) in enumerate(spans(offsets, len(x))):
            if start == end:
                continue
            weight = (w[expert] if transposed else w[expert].t()).to(dtype)
            factor = (v[expert] if v_transposed else v[expert].t()).to(dtype)
            h = torch.addmm(x[start:end].to(dtype) @ weight, low[start:end].to(dtype), factor)
            y[start:end] = h if bias is None else h + bias[expert]
    y[end:] = 0
    return y


_BLOCK_R = 64  # most terms of LoRA in a step
_FLAT_R = 32  # and next to the operands of the next tile in shared memory


@limits(
    n_vectors=MAX_SIZE, k_vectors=MAX_SIZE, r_vectors=MAX_SIZE, num_experts=MAX_EXPERTS, num_rows=MAX_COUNT,
    programs=MAX_WALKING, lengths=MAX_COUNT, tiles=MAX_COUNT, owned=MAX_COUNT, turns=MAX_COUNT,
    group=MAX_SIZE, first_m=MAX_COUNT, first_n=16 * MAX_SIZE,
)  # fmt: skip
@jit(
    dynamic="num_rows",
    fixed="num_experts n_vectors k_vectors x_pitch w_jump w_pitch r_vectors low_pitch v_jump v_pitch",
)
def grouped_lora_kernel(
    x,  # (M, K), rows x_pitch vectors apart, or a TMA descriptor
    w,  # (E, N, K), or (E, K, N) if TRANSPOSED; matrices w_jump, rows w_pitch vectors apart; or a descriptor
    bias,  # (E, N), if HAS_BIAS
    low,  # (M, R), rows low_pitch vectors apart
    v,  # (E, N, R), or (E, R, N) if V_TRANSPOSED; matrices v_jump, rows v_pitch vectors apart
    offsets,  # (E,) int32, where each expert's rows end
    y,  # (M, N)
    num_rows, num_experts, n_vectors, k_vectors, x_pitch, w_jump, w_pitch, r_vectors, low_pitch, v_jump,
    v_pitch,
    HAS_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, V_TRANSPOSED: tl.constexpr, FLAT: tl.constexpr,
    TMA: tl.constexpr, COMPUTE: tl.constexpr, N_VECTOR: tl.constexpr, K_VECTOR: tl.constexpr,
    W_VECTOR: tl.constexpr, R_VECTOR: tl.constexpr, V_VECTOR: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store y = x w[e]^T + low v[e]^T + bias[e]. Vectors: see `grouped_mm_kernel`."""
    num_n, num_k, num_r = n_vectors * N_VECTOR, k_vectors * K_VECTOR, r_vectors * R_VECTOR
    experts = tl.arange(0, BLOCK_E)
    # 1. Rows and tiles of every expert, from the offsets; last_tiles: where its tiles end.
    ends = expert_ends(offsets, experts, num_experts, num_rows, num_rows)
    starts = expert_ends(offsets, experts - 1, num_experts, num_rows, num_rows)
    tiles_n = tl.cdiv(num_n, BLOCK_N)
    lengths = ends - starts
    tiles = tl.cdiv(lengths, BLOCK_M) * tiles_n
    last_tiles = tl.cumsum(tiles, 0)
    steps = tl.cdiv(num_k, BLOCK_K)
    pid, programs, num_tiles = tl.program_id(0), tl.num_programs(0), tl.max(last_tiles, 0)
    first_tile = pid
    if FLAT:
        # 2. One loop over the K steps of all tiles of experts, see `grouped_mm_kernel`. A tile's last step
        # adds the terms of LoRA, at most BLOCK_R, while the next tile is loaded.
        owned = tl.sum(tl.where(experts < num_experts, tiles, 0), 0)
        turns = tl.cdiv(tl.maximum(owned - pid, 0), programs) * steps
        tile, step = pid - programs, steps - 1
        expert, end, first_m, first_n = 0, 0, 0, 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        for _ in range(0, turns):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                expert, end, first_m, first_n = place_of(
                    tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
                )
            first_k = step * BLOCK_K
            a = x.load([first_m, first_k])
            b = load_weight(
                w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
            if step == steps - 1:
                rows = first_m + tl.arange(0, BLOCK_M)
                rs = tl.arange(0, BLOCK_R)
                terms = load_block(low, rows[:, None], rs[None, :], end, num_r, low_pitch, R_VECTOR)
                factor = load_weight(
                    v, expert, first_n, 0, num_n, num_r, v_jump, v_pitch, False, V_TRANSPOSED, V_VECTOR,
                    BLOCK_N, BLOCK_R,
                )  # fmt: skip
                acc = tl.dot(terms, factor, acc, input_precision="ieee", out_dtype=COMPUTE)
                store_parts(
                    y, None, bias, expert, num_experts, acc, acc, rows, end, first_n, num_n, "none", False,
                    False, HAS_BIAS, BLOCK_M, BLOCK_N, 1,
                )  # fmt: skip
                acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        first_tile = owned + pid
    # 3. One tile after another. With FLAT only tiles of rows of no expert are left, which have no terms.
    for tile in range(first_tile, num_tiles, programs):
        expert, end, first_m, first_n = place_of(
            tile, experts, ends, last_tiles, tiles_n, BLOCK_M, BLOCK_N, GROUP
        )
        rows = first_m + tl.arange(0, BLOCK_M)
        has_terms = expert < num_experts
        # 3a. Accumulate over K in steps of BLOCK_K.
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        if not FLAT:
            for step in range(0, tl.where(has_terms, steps, 0)):
                first_k = step * BLOCK_K
                if TMA:
                    a = x.load([first_m, first_k])
                else:
                    ks = first_k + tl.arange(0, BLOCK_K)
                    a = load_block(x, rows[:, None], ks[None, :], end, num_k, x_pitch, K_VECTOR)
                b = load_weight(
                    w, expert, first_n, first_k, num_n, num_k, w_jump, w_pitch, TMA, TRANSPOSED, W_VECTOR,
                    BLOCK_N, BLOCK_K,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
            # 3b. Continue with the terms of LoRA, mostly one step.
            for step in tl.range(0, tl.where(has_terms, tl.cdiv(num_r, BLOCK_R), 0), num_stages=1):
                first_r = step * BLOCK_R
                rs = first_r + tl.arange(0, BLOCK_R)
                a = load_block(low, rows[:, None], rs[None, :], end, num_r, low_pitch, R_VECTOR)
                b = load_weight(
                    v, expert, first_n, first_r, num_n, num_r, v_jump, v_pitch, False, V_TRANSPOSED, V_VECTOR,
                    BLOCK_N, BLOCK_R,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=COMPUTE)
        # 3c. Epilogue: add the bias; only rows of this expert are stored.
        store_parts(
            y, None, bias, expert, num_experts, acc, acc, rows, end, first_n, num_n, "none", False, False,
            HAS_BIAS, BLOCK_M, BLOCK_N, 1,
        )  # fmt: skip


def overlaps_lora(arch: int, r: int) -> bool:
    """Return True if a GEMM that loads the next tile while it stores this one can add r terms of LoRA there.

    Triton 3.6 fails to compile a GEMM inside of a branch for Blackwell.
    """
    return arch < 100 and r <= _FLAT_R


@cache
def _plan(r: int, v_strides: tuple[int, ...], v_transposed: bool, *fields: Any) -> GemmPlan:
    """Plan a launch for low (M, r), contiguous; fields: those of the `GemmDesc` of x and w."""
    desc = GemmDesc(*fields)
    gemm = plan_gemm(*fields)
    itemsize, (v_jump, v_pitch, _) = desc.itemsize, v_strides
    columns = desc.w_shape[2 if desc.transposed else 1]
    v_vector = vector_width(itemsize, columns if v_transposed else r, v_jump, v_pitch)
    r_vector = vector_width(itemsize, r, *(() if v_transposed else (v_jump, v_pitch)))
    sizes = r // r_vector, r // r_vector, v_jump // v_vector, v_pitch // v_vector
    ours = set(grouped_lora_kernel.arg_names) | {"num_warps", "num_stages"}
    constants = {name: value for name, value in gemm.constants.items() if name in ours}
    constants |= {
        "FLAT": constants["FLAT"] and overlaps_lora(desc.arch, r), "V_TRANSPOSED": v_transposed,
        "R_VECTOR": r_vector, "V_VECTOR": v_vector,
        "BLOCK_R": min(_BLOCK_R, max(16, next_power_of_2(max(r, 1)))),
    }  # fmt: skip
    return gemm._replace(sizes=(*gemm.sizes, *sizes), constants=constants)


def launch(
    x: Tensor, w: Tensor, bias: Tensor | None, low: Tensor, v: Tensor, offsets: Tensor, transposed: bool,
    v_transposed: bool,
) -> Tensor:  # fmt: skip
    num_rows, w_shape = x.shape[0], w.shape
    y = x.new_empty(num_rows, w_shape[2 if transposed else 1])
    if y.numel() == 0:
        return y
    low = low.contiguous()
    (x, x_strides), (w, w_strides), (v, v_strides) = along_rows(x), along_rows(w), along_rows(v)
    tile, tiles, programs, most, sizes, constants = _plan(
        low.shape[1], v_strides, v_transposed,
        row_class(num_rows, w_shape[0]), w_shape, w_strides, x_strides[0], x.element_size(),
        *gpu_of(x), aligned(x, w), transposed, bias is not None, STORE,
    )  # fmt: skip
    tiles *= cdiv(num_rows, tile.block_m) + w_shape[0]
    if num_rows > most:
        check_counts("grouped_mm_lora", num_rows, tiles, programs, cdiv(x.shape[1], tile.block_k))
    if constants["TMA"]:
        x = descriptor(x, x.shape, x_strides, tile.block_m, tile.block_k)
        w_block = (tile.block_k, tile.block_n) if transposed else (tile.block_n, tile.block_k)
        w = descriptor(w, w_shape, w_strides, 1, *w_block)
    launcher.launch(
        grouped_lora_kernel, min(tiles, programs),
        (
            x, w, None if bias is None else bias.contiguous(), low, v, offsets.contiguous(), y, num_rows,
            *sizes,
        ),
        constants,
    )  # fmt: skip
    return y


def _flops(x: Any, w: Any, bias: Any, low: Any, *_: Any) -> int:
    columns = w.shape[1] * w.shape[2] // max(x.shape[1], 1)
    return grouped_flops(x, w) + 2 * x.shape[0] * low.shape[1] * columns


register(
    "grouped_mm_lora(Tensor x, Tensor w, Tensor? bias, Tensor low, Tensor v, Tensor offsets, bool transposed,"
    " bool v_transposed) -> Tensor",
    contract=(
        "x (M, K) floating; transposed ? w (E, K, N) x; no transposed ? w (E, N, K) x; bias (E, N) x; "
        "low (M, G) x; v_transposed ? v (E, G, N) x; no v_transposed ? v (E, N, G) x; offsets (#E) int32"
    ),
    reference=reference,
    fake=lambda x, w, bias, low, v, offsets, transposed, v_transposed: x.new_empty(
        x.shape[0], w.shape[2 if transposed else 1]
    ),
    triton=launch,
    flops=_flops,
)


def _times(scale: float, rows: Tensor) -> Tensor:
    """Multiply rows by `scale` in place; no other tensor may share their memory."""
    return rows if scale == 1 else rows.mul_(scale)


def _forward(x, w, bias, a, b, offsets, scale, transposed):
    ops = torch.ops.fastmp
    low = _times(scale, ops.grouped_mm(x, a, offsets, False))
    return ops.grouped_mm_lora(x, w, bias, low, b, offsets, transposed, False), low


def _setup(ctx, inputs, output):
    x, w, _, a, b, offsets, ctx.scale, ctx.transposed = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, a, b, offsets, output[1])


@traced("fastmp.grouped_lora_backward")
def _backward(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    raise_if_create_graph("grouped_lora")
    ops = torch.ops.fastmp
    x, w, a, b, offsets, low = ctx.saved_tensors
    needs_x, _, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
    dx = dbias = da = db = None
    if needs_x or needs_a:
        dlow = _times(ctx.scale, ops.grouped_mm(grad, b, offsets, True))
    if needs_x:
        dx = ops.grouped_mm_lora(grad, w, None, dlow, a, offsets, not ctx.transposed, True)
    if needs_a:
        da = ops.grouped_mm_wgrad(dlow, x, offsets)
    if needs_b:
        db = ops.grouped_mm_wgrad(grad, low, offsets)
    if needs_bias:
        dbias = column_sums(grad, offsets)
    return dx, None, dbias, da, db, None, None, None


_grouped_lora = Differentiable("grouped_lora", _forward, _setup, _backward)


@checks.memoized
def _check(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, scale: float,
    transposed: bool,
) -> None:  # fmt: skip
    name = "grouped_lora"

    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    checks.check_floating(name, "x", x)
    checks.check_finite(name, x.dtype, scale=scale)
    require(len(x.shape) == 2, "x must be (M, K), got shape {}", x.shape)
    require(len(w.shape) == 3, "w must be (E, N, K), got shape {}", w.shape)
    require(len(a.shape) == 3, "a must be (E, R, K), got shape {}", a.shape)
    experts, terms, columns = w.shape[0], w.shape[1 if transposed else 2], w.shape[2 if transposed else 1]
    misfit = "x {} does not fit w {}: expected {} in dimension {} of w"
    require(x.shape[1] == terms, misfit, x.shape, w.shape, x.shape[1], 1 if transposed else 2)
    checks.check_shape(name, (experts, a.shape[1], terms), to=("w", w), a=a)
    checks.check_shape(name, (experts, columns, a.shape[1]), to=("a", a), b=b)
    checks.check_shape(name, (experts, columns), to=("w", w), bias=bias)
    checks.check_same(name, x=x, w=w, a=a, b=b, bias=bias)
    check_offsets(name, offsets, w)
    checks.check_same_device(name, x=x, offsets=offsets)


@traced("fastmp.grouped_lora")
def grouped_lora(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    scale: float = 1.0,
    transposed: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Grouped GEMM with LoRA: y[r] = w[e] @ x[r] + scale * b[e] @ (a[e] @ x[r]) + bias[e].

    Differentiable once in x, a, b and bias; w is frozen. Under autocast it runs in the autocast dtype.

    Args:
        x: (M, K) float64, float32, bfloat16 or float16, rows in the order of the experts.
        w: (E, N, K) of the same dtype and device, without requires_grad; contiguous avoids a copy.
        a: (E, R, K) of the same dtype and device: LoRA's A of each expert.
        b: (E, N, R) of the same dtype and device: LoRA's B of each expert.
        offsets: (E,) int32 on the same device: the end of each expert's rows, not decreasing, at most M. Rows
            after the last one are zeros in the result and in the gradient of x.
        scale: LoRA's alpha / R.
        transposed: w is (E, K, N), as models with transposed experts store it; a and b stay as they are.
        bias: (E, N) of the same dtype and device, or None.

    Returns:
        (M, N), contiguous, of x's dtype; sums are in float32 (float64 for float64 inputs). On a GPU the
        result is rounded once, on a CPU in 16 bits the sum without LoRA is rounded before.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a w that requires grad; on the CPU also
            offsets that decrease or exceed M (elsewhere they are clamped).

    Example:
        x, w = torch.randn(6, 16), torch.randn(2, 32, 16)  # 4 rows of expert 0, 2 of expert 1
        a = torch.randn(2, 8, 16, requires_grad=True)
        b = torch.zeros(2, 32, 8, requires_grad=True)
        y = grouped_lora(x, w, a, b, torch.tensor([4, 6], dtype=torch.int32), scale=2.0)  # (6, 32)
        y.sum().backward()

    Hu et al., "LoRA", 2021 (arXiv 2106.09685).
    """
    if w.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "grouped_lora: expected a frozen w, got one that requires grad; call w.requires_grad_(False)"
        )
    x, w, a, b, bias = autocast(x, w, a, b, bias)
    _check(x, w, a, b, offsets, bias, scale, transposed)
    check_ends("grouped_lora", offsets, "x", x.shape[0])
    return _grouped_lora(x, w, bias, a, b, offsets, scale, transposed)[0]
