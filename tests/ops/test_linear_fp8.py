"""linear_fp8 and grouped_mm_fp8: float64 of the dequantised operands, routings, NaN, layouts, errors."""

from __future__ import annotations

import random
import re

import pytest
import torch

from fastmp.ops import OPS, grouped_mm_fp8, linear_fp8
from fastmp.ops.linear_fp8 import dequantized_rows, dequantized_weight
from fastmp.testing.ops import poisoned_memory, relative_error
from fastmp.testing.samples.linear_fp8 import E4M3, E5M2, quantized_rows, quantized_weight

E8M0 = torch.float8_e8m0fnu
BLOCKS = pytest.mark.parametrize("block", [128, 32])


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def truth(q, s, w, w_scale):
    return dequantized_rows(q, s, torch.float64) @ dequantized_weight(w, w_scale, torch.float64).t()


@BLOCKS
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("rows", [1, 70, 300])
def test_both_directions_against_float64(rows, dtype, block):
    n, k = 3 * block, 5 * block
    w, w_t, w_scale = quantized_weight(numbers(n, k), block)
    for operands in (
        (*quantized_rows(numbers(rows, k) * 5, block, dtype), w, w_scale),
        (*quantized_rows(numbers(rows, n) * 1e-3, block, dtype), w_t, w_scale.t()),
    ):
        want = truth(*operands)
        for out_dtype, bound in (
            (torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 4e-4),
        ):  # fmt: skip
            with poisoned_memory():
                y = linear_fp8(*operands, out_dtype=out_dtype)
            assert y.dtype == out_dtype and y.is_contiguous()
            assert relative_error(y, want) <= bound
    assert linear_fp8(*operands).dtype == torch.bfloat16


@BLOCKS
@pytest.mark.parametrize("seed", range(4))
def test_random_offsets_against_float64(seed, block):
    """Empty experts, rows of no expert, no rows at all."""
    source, experts, n, k = random.Random(seed), 5, 2 * block, 3 * block
    rows = source.choice([0, 3, 130, 200])
    ends = sorted(source.choice([0, rows // 2, source.randint(0, rows)]) for _ in range(experts))
    offsets = torch.tensor(ends, dtype=torch.int32)
    w, w_t, w_scale = quantized_weight(numbers(experts, n, k, seed=seed), block)
    for operands in (
        (*quantized_rows(numbers(rows, k), block), w, w_scale),
        (*quantized_rows(numbers(rows, n), block, E5M2), w_t, w_scale.transpose(-1, -2)),
    ):
        q, s, weight, weight_scale = operands
        with poisoned_memory():
            y = grouped_mm_fp8(*operands, offsets, out_dtype=torch.float32)
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            want = truth(q[start:end], s[start:end], weight[expert], weight_scale[expert])
            assert relative_error(y[start:end], want) <= 1e-6
        assert (y[ends[-1] :] == 0).all()


@BLOCKS
@pytest.mark.parametrize("call", [linear_fp8, grouped_mm_fp8])
def test_nan_of_a_block_stays_in_its_row_or_its_columns(call, block):
    x, weight = numbers(6, 2 * block), numbers(3 * block, 2 * block)
    x[2, block], weight[block, 3] = torch.inf, torch.nan
    w, _, w_scale = quantized_weight(weight, block)
    operands = (*quantized_rows(x, block), w, w_scale)
    if call is grouped_mm_fp8:
        offsets = torch.tensor([6], dtype=torch.int32)
        operands = (*operands[:2], w[None], w_scale[None], offsets)
    nan = torch.zeros(6, 3 * block, dtype=torch.bool)
    nan[2], nan[:, block : 2 * block] = True, True
    assert torch.equal(call(*operands).isnan(), nan)


def test_layouts_of_operands_do_not_matter():
    q, s = quantized_rows(numbers(21, 256))
    w, _, w_scale = quantized_weight(numbers(128, 256))
    y = linear_fp8(q, s, w, w_scale)
    wide = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), -1).view(E4M3)
    for other in (
        (wide[:, 256:], s.contiguous(), w, w_scale),
        (q.t().contiguous().t(), s, w.t().contiguous().t(), w_scale.t().contiguous().t()),
    ):
        assert torch.equal(linear_fp8(*other), y)


def arguments():
    w, _, w_scale = quantized_weight(numbers(2, 128, 256))
    q, s = quantized_rows(numbers(8, 256))
    return {"q": q, "s": s, "w": w, "w_scale": w_scale, "offsets": torch.tensor([4, 6], dtype=torch.int32)}


ERRORS = {
    "q must have one of the dtypes (torch.float8_e4m3fn, torch.float8_e5m2), got torch.float32": lambda a: {
        "q": a["q"].float()
    },
    "w must be torch.float8_e4m3fn, got torch.float8_e5m2": lambda a: {"w": a["w"].to(E5M2)},
    "s must be float32 (block 128) or float8_e8m0fnu (block 32), got torch.float64": lambda a: {
        "s": a["s"].double()
    },
    "s is torch.float32 but w_scale is torch.float8_e8m0fnu": lambda a: {"w_scale": a["w_scale"].to(E8M0)},
    "q must be (M, K), got shape (2, 4, 256)": lambda a: {"q": a["q"].view(2, 4, 256)},
    "q (8, 128) does not fit w (2, 128, 256): expected 128 in the last dimension of w": lambda a: {
        "q": a["q"][:, :128]
    },
    "K must be a multiple of the block 128, got 192": lambda a: {
        "q": a["q"][:, :192],
        "w": a["w"][..., :192],
    },
    "N must be a multiple of the block 128, got 96": lambda a: {"w": a["w"][:, :96]},
    "expected s of shape (8, 2) for q of shape (8, 256), got (8, 1)": lambda a: {"s": a["s"][:, :1]},
    "expected w_scale of shape (2, 1, 2) for w of shape (2, 128, 256), got (1, 1, 2)": lambda a: {
        "w_scale": a["w_scale"][:1]
    },
    "out_dtype must be one of": lambda a: {"out_dtype": torch.int32},
    "offsets must be int32, got torch.int64; pass offsets.int()": lambda a: {"offsets": a["offsets"].long()},
    "offsets of shape (1,) do not fit the 2 experts of w": lambda a: {"offsets": a["offsets"][:1]},
    "offsets [4, 9] must not be negative, fall, or pass the 8 rows of q": lambda a: {
        "offsets": torch.tensor([4, 9], dtype=torch.int32)
    },
    "q is on cpu but s is on meta": lambda a: {"s": a["s"].to("meta")},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    given = arguments()
    with pytest.raises(ValueError, match="^grouped_mm_fp8: " + re.escape(message)):
        grouped_mm_fp8(**given | ERRORS[message](given))
    if "offsets" not in message and "(2, 128, 256)" not in message:
        given = {name: value[0] if name.startswith("w") else value for name, value in given.items()}
        changed = given | ERRORS[message](arguments())
        if changed["w"].dim() == 3:
            changed["w"] = changed["w"][0]
        if changed["w_scale"].dim() == 3:
            changed["w_scale"] = changed["w_scale"][0]
        del changed["offsets"]
        with pytest.raises(ValueError, match="^linear_fp8: " + re.escape(message)):
            linear_fp8(**changed)


def test_costs():
    a = arguments()
    op = OPS["grouped_mm_fp8"]
    assert op.flops(*a.values(), torch.bfloat16) == 2 * 8 * 128 * 256
    moved = 8 * 256 + 2 * 128 * 256 + 4 * (8 * 2 + 2 * 2 + 2) + 2 * 8 * 128
    assert op.traffic(*a.values(), torch.bfloat16) == moved
