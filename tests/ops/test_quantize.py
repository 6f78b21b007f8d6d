"""FP8 quantisers: the cast against torch's, the scale rule, special values, backends bit by bit, errors."""

from __future__ import annotations

import math

import pytest
import torch
from every_op_tools import implementation
from kernel_tools import KERNELS
from torch import Tensor

from fastmp.ops import dequantize_rows, quantize_rows, quantize_weight
from fastmp.ops.core import launcher
from fastmp.ops.core._triton import jit, tl
from fastmp.ops.core.fp8 import E4M3, E5M2, LARGEST, fp8_bytes
from fastmp.testing.ops import poisoned_memory, samples
from fastmp.testing.samples.gemms import draw_blocks

FORMATS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=("e4m3", "e5m2"))
BLOCKS = pytest.mark.parametrize("block", [128, 32])
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def same_bits(ours, theirs) -> None:
    """The same bytes, shapes and strides."""
    ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (ours, theirs))
    for value, want in zip(ours, theirs, strict=True):
        assert (value.dtype, value.shape, value.stride()) == (want.dtype, want.shape, want.stride())
        if value.dtype in DTYPES:  # NaN has many bit patterns
            torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True)
        else:
            assert torch.equal(bits(value), bits(want))


@jit
def cast_kernel(x, q, E5M2: tl.constexpr, BLOCK: tl.constexpr):
    """The cast of all GPUs before compute capability 8.9."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(q + at, fp8_bytes(tl.load(x + at), E5M2, False))


def cast(x: Tensor, form: torch.dtype, backend: str) -> Tensor:
    """The bytes of x, of which there are a multiple of 65,536."""
    if backend == "c++":
        return bits(torch.ops.fastmp_fp8.cast(x, form))
    q = torch.empty(x.shape, dtype=torch.uint8)
    launcher.launch(cast_kernel, x.numel() >> 16, (x, q), {"E5M2": form == E5M2, "BLOCK": 1 << 16})
    return q


def by_torch(x: Tensor, form: torch.dtype) -> Tensor:
    return bits(x.clamp(-LARGEST[form], LARGEST[form]).to(form))


def dense(form: torch.dtype) -> Tensor:
    """Every bfloat16 number; what FP8 represents, the ties between, and neighbours of each in float32."""
    bfloat16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = torch.arange(256, dtype=torch.uint8).view(form).float()
    numbers = numbers[numbers.isfinite()].unique()
    ties = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2)).view(torch.int32)
    near = torch.cat([ties + step for step in range(-3, 4)]).view(torch.float32)
    return torch.cat((bfloat16, near, near.new_zeros(-len(near) % (1 << 16))))


BACKENDS = pytest.mark.parametrize("backend", ["c++", pytest.param("triton", marks=pytest.mark.interpret)])


@BACKENDS
@FORMATS
def test_cast_equals_clamped_cast_of_torch(form, backend):
    x = dense(form)
    assert torch.equal(cast(x, form, backend), by_torch(x, form))


@pytest.mark.exhaustive
@BACKENDS
@FORMATS
def test_cast_equals_clamped_cast_of_torch_for_every_float32(form, backend):
    chunk = torch.arange(1 << 22, dtype=torch.int64)
    for start in range(-(1 << 31), 1 << 31, len(chunk)):
        x = (chunk + start).to(torch.int32).view(torch.float32)
        wrong = (cast(x, form, backend) != by_torch(x, form)).nonzero()
        assert not len(wrong), x[wrong[0]]


@KERNELS
@pytest.mark.parametrize("op", ["quantize_rows", "dequantize_rows", "quantize_weight"])
def test_kernels_equal_reference(op, dtype, backend):
    run = implementation(op, backend)
    for arguments in samples(op, device="cpu", dtype=dtype):
        with poisoned_memory():
            ours = run(*arguments)
        same_bits(ours, implementation(op, "reference")(*arguments))


@BACKENDS
@BLOCKS
@FORMATS
def test_kernels_equal_reference_on_special_values(form, block, backend):
    values = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38, -1.0, 448.0, 1e-38]
    x = draw_blocks(48, 256, generator=torch.Generator().manual_seed(0)).float()
    for row, value in enumerate(values):
        x[row, row * 17 % 256], x[row + 12] = value, value
        x[row + 24] *= 2.0 ** (25 * (row % 5 - 2))  # to both ends of float32
    for op in ("quantize_rows", "quantize_weight"):
        run = implementation(op, backend)
        given = (x, block, form) if op == "quantize_rows" else (torch.cat((x, x, x))[:128], block)
        ours = run(*given)
        same_bits(ours, implementation(op, "reference")(*given))
    run = implementation("dequantize_rows", backend)
    _, s = quantize_rows(x, block=block, dtype=form)
    every = torch.arange(256, dtype=torch.uint8).view(form).repeat(48, 1)
    for scales in (s, s.float().contiguous().to(s.dtype)):
        given = (every, scales, torch.float32)
        same_bits(run(*given), implementation("dequantize_rows", "reference")(*given))


@BACKENDS
def test_kernels_take_any_strides(backend):
    x = draw_blocks(64, 3, 256, generator=torch.Generator().manual_seed(0)).float()
    for op in ("quantize_rows", "quantize_weight"):
        run = implementation(op, backend)
        for view in (x[:, 1], x[:, 1:].transpose(0, 1), x.permute(1, 2, 0), x[::2, 1, :64], x[:, 0].t()):
            given = (view, 32, E4M3) if op == "quantize_rows" else (view, 32)
            same_bits(run(*given), implementation(op, "reference")(*given))
    run = implementation("dequantize_rows", backend)
    q, s = quantize_rows(x[:, 0])
    for rows, scales in ((q[3:50], s[3:50]), (q[::2], s.contiguous()[::2]), (q.t().contiguous().t(), s)):
        same_bits(run(rows, scales, torch.bfloat16), dequantize_rows(rows.contiguous(), scales.clone()))


@pytest.mark.gpu
@BLOCKS
@FORMATS
def test_gpu_casts_the_same_bytes(form, block):
    """The instruction of the GPU, where it has one, on what FP8 represents, the ties and their neighbours."""
    x = dense(form)
    x = x[x.abs() <= LARGEST[form]]
    x = x[: len(x) // (block - 1) * (block - 1)].view(-1, block - 1)
    x = torch.cat((x, torch.full((len(x), 1), LARGEST[form])), 1)  # makes the scale 1
    q, s = quantize_rows(x.cuda(), block=block, dtype=form)
    same_bits((q.cpu(), s.cpu()), implementation("quantize_rows", "reference")(x, block, form))


def positive_bfloat16() -> Tensor:
    """Every positive finite number, subnormal ones included."""
    return torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@FORMATS
def test_scale_puts_every_bfloat16_maximum_into_the_upper_half(form):
    amax = positive_bfloat16()
    q, s = quantize_rows(amax[:, None].expand(-1, 128), dtype=form)
    ratio = amax.double() / s.flatten().double()
    assert len(ratio) == 32639
    assert ((ratio > LARGEST[form] / 2) & (ratio <= LARGEST[form])).all()
    assert (s.double().log2() % 1 == 0).all()
    exact = (q.double() * s.double()).bfloat16()
    assert torch.equal(dequantize_rows(q, s), exact)


@FORMATS
def test_scales_of_blocks_of_32_are_bounded_by_their_format(form):
    amax = positive_bfloat16()
    _, s = quantize_rows(amax[:, None].expand(-1, 32), block=32, dtype=form)
    least = 2.0**-127
    ratio = amax.double() / s.flatten().double()
    bounded = s.flatten().double() == least
    assert ((ratio > LARGEST[form] / 2) | bounded).all() and (ratio <= LARGEST[form]).all()


@BLOCKS
@FORMATS
def test_error_is_half_a_unit_of_the_format(block, form):
    x = torch.randn(64, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    q, s = quantize_rows(x, block=block, dtype=form)
    y = dequantize_rows(q, s, torch.float64)
    step = s.double().repeat_interleave(block, 1)
    eps, tiny = torch.finfo(form).eps, torch.finfo(form).tiny
    bound = torch.maximum(x.double().abs() / step, torch.tensor(tiny, dtype=torch.float64)) * eps / 2 * step
    assert ((x - y).abs() <= bound).all()


@BLOCKS
@FORMATS
def test_blocks_with_nan_or_infinity_dequantise_to_nan(block, form):
    x = torch.ones(5, 256)
    x[0, 0], x[1, 100], x[2, 255], x[3] = math.nan, math.inf, -math.inf, 0.0
    q, s = quantize_rows(x, block=block, dtype=form)
    wrong = x.isfinite().logical_not().view(5, -1, block).any(-1).repeat_interleave(block, 1)
    assert torch.equal(dequantize_rows(q, s).isnan(), wrong)
    assert torch.equal(s.float()[3], torch.ones(256 // block))
    assert (bits(q)[wrong] == 0x7F).all() and (bits(q)[3] == 0).all()


@BLOCKS
def test_scales_are_m_major_in_columns_of_16_bytes(block):
    for rows in (0, 1, 5, 16, 17):
        _, s = quantize_rows(torch.ones(rows, 256), block=block)
        assert s.shape == (rows, 256 // block)
        assert s.stride(0) == 1 and s.stride(1) * s.element_size() % 16 == 0 and s.stride(1) >= rows


@BLOCKS
def test_weight_and_its_transpose_are_the_same_numbers(block):
    w = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(0))
    q, q_t, s = quantize_weight(w, block=block)
    assert torch.equal(bits(q), bits(q_t.transpose(-1, -2)))
    scales = s.float().repeat_interleave(block, 1).repeat_interleave(block, 2)
    assert ((q.float() * scales - w).abs() <= w.abs().amax() / 16).all()
    for rows, expert in zip(w, q, strict=True):
        want, _, _ = quantize_weight(rows, block=block)
        assert torch.equal(bits(expert), bits(want))


@BLOCKS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantising_what_was_dequantised_changes_nothing(block, dtype):
    x = torch.randn(9, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = dequantize_rows(*quantize_rows(x, block=block), dtype)
    assert torch.equal(dequantize_rows(*quantize_rows(y, block=block), dtype), y)


ROW = torch.ones(4, 256)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_rows(ROW[:, :200]), r"rows: K must be a multiple of block \(128\), got 200"),
        (lambda: quantize_rows(ROW, block=64), "quantize_rows: block must be one of 128, 32, got 64"),
        (lambda: quantize_rows(ROW, dtype=torch.bfloat16), "quantize_rows: dtype must be one of"),
        (lambda: quantize_rows(ROW.int()), "quantize_rows: x must have one of the dtypes"),
        (lambda: quantize_weight(torch.ones(100, 128)), r"N must be a multiple of block \(128\), got 100"),
        (lambda: quantize_weight(torch.ones(128, 100)), r"K must be a multiple of block \(128\), got 100"),
        (lambda: quantize_weight(torch.ones(128)), r"w must be \(N, K\) or \(L, N, K\), got shape \(128,\)"),
        (lambda: dequantize_rows(ROW, ROW), "dequantize_rows: q.dtype must be one of"),
        (lambda: dequantize_rows(ROW.to(E4M3), ROW), r"256 columns do not fit scales \(4, 256\) of"),
        (lambda: dequantize_rows(ROW.to(E4M3), torch.ones(3, 2)), r"expected s of shape \(4, 2\)"),
        (lambda: dequantize_rows(ROW.to(E4M3), ROW.half()), "s must have one of the dtypes"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
