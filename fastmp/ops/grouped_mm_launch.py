"""Launches of the grouped GEMM kernels of `grouped_mm_triton`: a descriptor, its plan, and the launch.

A launch is described by a `GemmDesc` or `WgradDesc`: everything but the number of rows, which enters as a
class. A plan (tile, grid, sizes and constants of the kernel) is made once for each descriptor.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.ops.core import launcher
from fastmp.ops.core._triton import INTERPRETED, MAX_COUNT, cdiv, check_count, next_power_of_2, tl
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.core.rowwise import vector_width
from fastmp.ops.core.tma import MAX_ROWS, descriptor, ragged, use_tma
from fastmp.ops.grouped_mm_tiles import TileConfig, gemm_tiles, overlaps_tiles, row_class, wgrad_tiles
from fastmp.ops.grouped_mm_triton import grouped_mm_kernel, grouped_wgrad_kernel

GROUP = 16  # row tiles in a group, walked over first, so that their block of the weight stays in L2
_MULTIPROCESSORS_ELSEWHERE = 2  # few, so that interpreted programs walk over tiles, too


@cache
def _gpu(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def gpu_of(tensor: Tensor) -> tuple[int, int]:
    """Return the compute capability of the tensor's GPU (90 is 9.0) and its number of multiprocessors."""
    if tensor.is_cuda:
        return _gpu(tensor.device.index)
    return launcher.architecture_elsewhere, _MULTIPROCESSORS_ELSEWHERE


def architecture(tensor: Tensor) -> int:
    """Return the compute capability of the tensor's GPU as one number (90 is 9.0)."""
    return gpu_of(tensor)[0]


def _tile_architecture(arch: int, tma: bool) -> int:
    """Return the architecture to choose tiles for: without TMA, addresses take registers of the widest."""
    return arch if tma else 80


def aligned(a: Tensor, b: Tensor) -> bool:
    """Return True if both tensors begin on 16 bytes."""
    return not (a.data_ptr() | b.data_ptr()) & 15


def max_rows(tile: TileConfig, num_tiles: int, num_experts: int, num_k: int) -> int:
    """Return the number of rows up to which no count overflows, even if one program took all steps.

    It may be negative.
    """
    blocks = MAX_COUNT // (num_tiles * max(1, cdiv(num_k, tile.block_k)))
    return min(MAX_COUNT, (blocks - num_experts) * tile.block_m)


def check_counts(name: str, num_rows: int, tiles: int, programs: int, steps: int) -> None:
    """Check the counts of a persistent GEMM with more than `max_rows` rows of its plan.

    Args:
        tiles: of the whole launch.
        programs: that share the tiles.
        steps: of a tile.

    Raises:
        ValueError: rows, tiles or the steps of a program are a count that `check_count` does not accept.
    """
    steps *= cdiv(tiles, programs)
    for what, count in (("rows", num_rows), ("tiles", tiles), ("steps of a program", steps)):
        check_count(name, what, count)


def along_rows(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the tensor with unit column stride, copied only where it has another, and its strides."""
    strides = tensor.stride()
    if strides[-1] != 1:
        tensor = tensor.contiguous()
        strides = tensor.stride()
    return tensor, strides


def block_e(num_experts: int) -> int:
    """Return the length of a vector with an entry for each expert, and one for rows of no expert."""
    return max(16, next_power_of_2(num_experts + 1))


class Epilogue(NamedTuple):
    """Outputs for h = x w^T + bias: form(h), or form(gate) * up if gated; and h itself if kept."""

    form: str = "none"
    gated: bool = False
    keep: bool = False


_epilogue = cache(Epilogue)  # a hit costs less than a new tuple
STORE = Epilogue()


class GemmDesc(NamedTuple):
    """Everything a grouped GEMM's launch depends on, except the number of rows; the key of its plan."""

    row_class: float  # of ROW_CLASSES
    w_shape: tuple[int, int, int]  # (E, N, K)
    w_strides: tuple[int, int, int]  # in elements; the last is 1
    x_pitch: int  # elements from row to row
    itemsize: int  # bytes
    arch: int
    multiprocessors: int
    aligned: bool  # x and w begin on 16 bytes
    transposed: bool  # x w instead of x w^T
    has_bias: bool
    epilogue: Epilogue


class WgradDesc(NamedTuple):
    """Everything a grouped wgrad's launch depends on, except the number of rows; the key of its plan."""

    shape: tuple[int, int, int]  # (E, N, K) of the gradient
    strides: tuple[int, int, int]  # of the gradient, in elements; the last is 1
    grad_pitch: int  # elements from row to row
    x_pitch: int
    itemsize: int  # bytes of the operands
    arch: int
    multiprocessors: int
    aligned: bool  # the operands begin on 16 bytes and fit TMA's ragged descriptors
    accumulate: bool
    out_itemsize: int  # bytes of the gradient
    out_aligned: bool  # it begins on 16 bytes


class GemmPlan(NamedTuple):
    """Launch parameters that follow from a descriptor."""

    tile: TileConfig
    num_tiles: int  # of a GEMM: side by side; of a wgrad: of an expert
    programs: int  # at most
    max_rows: int  # with more, counts of the launch are checked
    sizes: tuple[int, ...]  # arguments of the kernel after num_rows
    constants: dict[str, Any]


def _constants(itemsize: int, tma: bool, num_experts: int, tile: TileConfig) -> dict[str, Any]:
    """Return the constants that both kernels have."""
    compute = tl.float64 if itemsize == 8 else tl.float32
    return {
        "TMA": tma, "COMPUTE": compute, "BLOCK_E": block_e(num_experts), "GROUP": GROUP,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


@cache
def plan_gemm(*fields: Any) -> GemmPlan:
    desc = GemmDesc(*fields)  # here, not at every launch: making it costs a microsecond
    (num_experts, num_n, num_k), (w_jump, w_pitch, _) = desc.w_shape, desc.w_strides
    (form, gated, keep), itemsize, arch, transposed = desc.epilogue, desc.itemsize, desc.arch, desc.transposed
    tma = num_k > 0 and use_tma(arch, itemsize, desc.aligned, desc.x_pitch, w_jump, w_pitch)
    # 1. The tile.
    if transposed:
        num_n, num_k = num_k, num_n
    width = num_n // 2 if gated else num_n
    tile = gemm_tiles(desc.row_class, width, num_k, itemsize, _tile_architecture(arch, tma), gated)
    # 2. Sizes and pitches in vectors, which proves their alignment to the compiler.
    w_vector = vector_width(itemsize, num_n if transposed else num_k, w_jump, w_pitch)
    k_vector = vector_width(itemsize, num_k, desc.x_pitch, *(() if transposed else (w_jump, w_pitch)))
    n_vector = vector_width(itemsize, width, *((w_jump, w_pitch) if transposed else ()))
    sizes = (
        num_experts, width // n_vector, num_k // k_vector, desc.x_pitch // k_vector, w_jump // w_vector,
        w_pitch // w_vector,
    )  # fmt: skip
    # 3. Constants of the kernel.
    constants = {
        "FORM": form, "GATED": gated, "KEEP": keep, "HAS_BIAS": desc.has_bias, "TRANSPOSED": transposed,
        "FLAT": tma and overlaps_tiles(arch, form, gated, desc.has_bias and transposed),
        "N_VECTOR": n_vector, "K_VECTOR": k_vector, "W_VECTOR": w_vector, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip
    constants |= _constants(itemsize, tma, num_experts, tile)
    # 4. The grid.
    tiles, programs = cdiv(width, tile.block_n), tile.programs_per_sm(itemsize, arch, gated)
    most = max_rows(tile, tiles, num_experts, num_k)
    return GemmPlan(tile, tiles, programs * desc.multiprocessors, most, sizes, constants)


class RingOperands(NamedTuple):
    """Operands in ring buffers and their first rows there, () int64; None for operands in no ring."""

    x_start: Tensor | None = None
    y_start: Tensor | None = None
    y: Tensor | None = None  # (R, N), or (R, N / 2) if gated
    h: Tensor | None = None  # (R, N), if it is kept
    num_rows: int = 0  # of a result for an x in a ring


_NO_RING = RingOperands()


def _gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, epilogue: Epilogue,
    ring: RingOperands = _NO_RING,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch the grouped GEMM; return what the epilogue stores, and h (None unless it is kept)."""
    x_shape, w_shape = x.shape, w.shape
    x_start, y_start, y, h, num_rows = ring
    if x_start is None:
        num_rows = x_shape[0]
    num_experts, columns = w_shape[0], w_shape[2 if transposed else 1]
    if y is None:
        y = x.new_empty(num_rows, columns // 2 if epilogue.gated else columns)
        h = x.new_empty(num_rows, columns) if epilogue.keep else None
    if not (num_rows and y.numel()):
        return y, h
    (x, x_strides), (w, w_strides) = along_rows(x), along_rows(w)
    tile, tiles, programs, most, sizes, constants = plan_gemm(  # the fields of GemmDesc
        row_class(num_rows, num_experts), w_shape, w_strides, x_strides[0], x.element_size(),
        *gpu_of(x), aligned(x, w), transposed, bias is not None, epilogue,
    )  # fmt: skip
    tiles *= cdiv(num_rows, tile.block_m) + num_experts
    if num_rows > most:
        check_counts("grouped_mm", num_rows, tiles, programs, cdiv(x_shape[1], tile.block_k))
    if constants["TMA"]:
        x = descriptor(x, x_shape, x_strides, tile.block_m, tile.block_k)
        w_block = (tile.block_k, tile.block_n) if transposed else (tile.block_n, tile.block_k)
        w = descriptor(w, w_shape, w_strides, 1, *w_block)
    launcher.launch(
        grouped_mm_kernel, tiles if tiles < programs else programs,  # faster than `min`
        (
            x, w, None if bias is None else bias.contiguous(), offsets.contiguous(), y, h, x_start, y_start,
            num_rows, *sizes,
        ),
        constants,
    )  # fmt: skip
    return y, h


def launch(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return _gemm(x, w, None, offsets, transposed, STORE)[0]


def launch_bias(x: Tensor, w: Tensor, bias: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return _gemm(x, w, bias, offsets, transposed, STORE)[0]


def launch_mlp_in(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, form: str, gated: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    y, h = _gemm(x, w, bias, offsets, False, _epilogue(form, gated, keep))
    return y, x.new_empty(0) if h is None else h


def launch_mlp_in_ring(
    x: Tensor, w: Tensor, offsets: Tensor, start: Tensor, h: Tensor, y: Tensor, form: str
) -> None:
    _gemm(x, w, None, offsets, False, _epilogue(form, True, True), RingOperands(y_start=start, y=y, h=h))


def launch_from_ring(
    x: Tensor, w: Tensor, offsets: Tensor, start: Tensor, transposed: bool, capacity: int
) -> Tensor:
    return _gemm(x, w, None, offsets, transposed, STORE, RingOperands(x_start=start, num_rows=capacity))[0]


@cache
def _plan_wgrad(*fields: Any) -> GemmPlan:
    desc = WgradDesc(*fields)
    (num_experts, num_n, num_k), (out_jump, out_pitch, _) = desc.shape, desc.strides
    grad_pitch, x_pitch, itemsize = desc.grad_pitch, desc.x_pitch, desc.itemsize
    tma = use_tma(desc.arch, itemsize, desc.aligned, grad_pitch, x_pitch)
    # 1. The tile.
    tile = wgrad_tiles(num_n, num_k, itemsize, _tile_architecture(desc.arch, tma))
    # 2. Sizes and pitches in vectors, which proves their alignment to the compiler.
    n_vector = vector_width(itemsize, num_n, grad_pitch)
    k_vector = vector_width(itemsize, num_k, x_pitch, out_jump, out_pitch)
    sizes = (
        num_experts, num_n // n_vector, num_k // k_vector, grad_pitch // n_vector, x_pitch // k_vector,
        out_jump // k_vector, out_pitch // k_vector,
    )  # fmt: skip
    # 3. Constants of the kernel. The TMA unit stores 16 and 32 bits, and adds in 32; 128 KB of sums in parts.
    out_itemsize = desc.out_itemsize
    on_16_bytes = desc.out_aligned and all(
        n > 0 and n * out_itemsize % 16 == 0 for n in (out_jump, out_pitch)
    )
    out_tma = tma and on_16_bytes and (out_itemsize == 4 or not desc.accumulate)
    constants = {
        "ACCUMULATE": desc.accumulate, "OUT_TMA": out_tma, "INTERPRETED": INTERPRETED, "N_VECTOR": n_vector,
        "K_VECTOR": k_vector, "BLOCK_N": tile.block_m, "BLOCK_K": tile.block_n, "BLOCK_R": tile.block_k,
        "PARTS": out_itemsize // 2 if out_tma else 2 if tma else 4,
    }  # fmt: skip
    constants |= _constants(itemsize, tma, num_experts, tile)
    # 4. The grid: loads by TMA hide the store of a tile in the same program, others in another one.
    tiles = cdiv(num_n, tile.block_m) * cdiv(num_k, tile.block_n)
    programs = num_experts * tiles
    if tma:
        programs = min(programs, tile.programs_per_sm(itemsize, desc.arch) * desc.multiprocessors)
    most = min(MAX_COUNT, (MAX_COUNT // tiles - num_experts) * tile.block_k)
    return GemmPlan(tile, tiles, programs, most, sizes, constants)


def _wgrad(
    out: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, accumulate: bool,
    grad_start: Tensor | None = None, x_start: Tensor | None = None, capacity: int | None = None,
) -> None:  # fmt: skip
    """Launch the grouped wgrad: out = grad^T x, or out += grad^T x, over each expert's rows.

    grad_start, x_start: the first rows of operands in rings, of at most `capacity` rows.
    """
    shape, strides = out.shape, out.stride()
    if out.numel() == 0:
        return
    if strides[2] != 1:  # a transposed gradient: sum in memory of its own, add in its dtype, round once
        sums = x.new_empty(shape, dtype=compute_dtype(x.dtype))
        _wgrad(sums, grad, x, offsets, False, grad_start, x_start, capacity)
        if accumulate:
            out += sums
        else:
            out.copy_(sums)
        return
    (grad, (grad_pitch, _)), (x, (x_pitch, _)) = along_rows(grad), along_rows(x)
    num_rows = most = x.shape[0]
    if capacity is not None:
        num_rows, most = capacity, max(grad.shape[0], num_rows)
    tile, tiles, programs, countable, sizes, constants = _plan_wgrad(  # the fields of WgradDesc
        shape, strides, grad_pitch, x_pitch, x.element_size(), *gpu_of(x),
        0 < num_rows <= most <= MAX_ROWS and aligned(grad, x), accumulate, out.element_size(),
        out.data_ptr() & 15 == 0,
    )  # fmt: skip
    if num_rows > countable:
        steps = cdiv(num_rows, tile.block_k) + shape[0]
        check_counts("grouped_mm_wgrad", num_rows, tiles, programs, steps)
    if constants["TMA"]:
        grad = ragged(grad, grad_pitch, shape[1], tile.block_k, tile.block_m)
        x = ragged(x, x_pitch, shape[2], tile.block_k, tile.block_n)
    if constants["OUT_TMA"]:
        out = descriptor(out, shape, strides, 1, tile.block_m, tile.block_n // constants["PARTS"])
    launcher.launch(
        grouped_wgrad_kernel, programs,
        (grad, x, offsets.contiguous(), out, grad_start, x_start, num_rows, *sizes),
        constants,
    )  # fmt: skip


def launch_wgrad(grad: Tensor, x: Tensor, offsets: Tensor, *ring: Any) -> Tensor:
    out = x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])
    _wgrad(out, grad, x, offsets, False, *ring)
    return out


def launch_wgrad_(out: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool = True) -> None:
    _wgrad(out, grad, x, offsets, add)


def launch_wgrad_from_ring_(out: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, *ring: Any) -> None:
    _wgrad(out, grad, x, offsets, True, *ring)
