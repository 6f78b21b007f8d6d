"""FP8 quantisers: the cast against torch's, the scale rule, special values, backends bit by bit, errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastmp.ops import dequantize_rows, quantize_rows, quantize_weight
from fastmp.ops.core.fp8 import E4M3, E5M2, LARGEST

FORMATS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=("e4m3", "e5m2"))
BLOCKS = pytest.mark.parametrize("block", [128, 32])
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


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
