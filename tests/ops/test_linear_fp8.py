"""linear_fp8 and grouped_mm_fp8: float64 of the dequantised operands, routings, NaN, layouts, errors."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
import torch
from kernel_tools import set_programs
from marks import full

from fastmp.ops import (
    OPS,
    dequantize_rows,
    grouped_mlp_in_fp8,
    grouped_mm_fp8,
    linear_fp8,
    quantize_rows,
    quantize_weight,
)
from fastmp.ops import grouped_mm_fp8_triton as kernels
from fastmp.ops.core import launcher
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.ops.linear_fp8 import dequantized_weight
from fastmp.testing.ops import poisoned_memory, relative_error, samples

E8M0 = torch.float8_e8m0fnu
BLOCKS = pytest.mark.parametrize("block", [128, 32])


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def truth(q, s, w, w_scale):
    return dequantize_rows(q, s, torch.float64) @ dequantized_weight(w, w_scale, torch.float64).t()


@BLOCKS
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("rows", [1, 70, 300])
def test_both_directions_against_float64(rows, dtype, block):
    n, k = 3 * block, 5 * block
    w, w_t, w_scale = quantize_weight(numbers(n, k), block=block)
    for operands in (
        (*quantize_rows(numbers(rows, k) * 5, block=block, dtype=dtype), w, w_scale),
        (*quantize_rows(numbers(rows, n) * 1e-3, block=block, dtype=dtype), w_t, w_scale.t()),
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
    w, w_t, w_scale = quantize_weight(numbers(experts, n, k, seed=seed), block=block)
    for operands in (
        (*quantize_rows(numbers(rows, k), block=block), w, w_scale),
        (*quantize_rows(numbers(rows, n), block=block, dtype=E5M2), w_t, w_scale.transpose(-1, -2)),
    ):
        q, s, weight, weight_scale = operands
        with poisoned_memory():
            y = grouped_mm_fp8(*operands, offsets, out_dtype=torch.float32)
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            want = truth(q[start:end], s[start:end], weight[expert], weight_scale[expert])
            assert relative_error(y[start:end], want) <= 1e-6
        assert (y[ends[-1] :] == 0).all()


@BLOCKS
@pytest.mark.parametrize("form", ["silu", "gelu", "gelu_tanh"])
def test_mlp_in_is_the_gemm_the_activation_and_the_quantiser(form, block):
    """h is that of grouped_mm_fp8, and y what the activation of h is quantised to, byte for byte."""
    offsets = torch.tensor([10, 10, 60], dtype=torch.int32)
    w, _, w_scale = quantize_weight(numbers(3, 4 * block, 2 * block) * 0.1, block=block)
    operands = (*quantize_rows(numbers(64, 2 * block), block=block), w, w_scale, offsets)
    with poisoned_memory():
        y, y_scale, h = grouped_mlp_in_fp8(*operands, form=form)
    assert h.dtype == torch.bfloat16 and torch.equal(h, grouped_mm_fp8(*operands))
    want = torch.ops.fastmp.gated_activation_quantized(h, None, form, None, block, E4M3)
    assert torch.equal(y.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(y_scale, want[1]) and y_scale.stride() == want[1].stride()
    assert (y[60:].float() == 0).all() and (y_scale[60:].float() == 1).all()


@BLOCKS
@pytest.mark.parametrize("call", [linear_fp8, grouped_mm_fp8])
def test_nan_of_a_block_stays_in_its_row_or_its_columns(call, block):
    x, weight = numbers(6, 2 * block), numbers(3 * block, 2 * block)
    x[2, block], weight[block, 3] = torch.inf, torch.nan
    w, _, w_scale = quantize_weight(weight, block=block)
    operands = (*quantize_rows(x, block=block), w, w_scale)
    if call is grouped_mm_fp8:
        offsets = torch.tensor([6], dtype=torch.int32)
        operands = (*operands[:2], w[None], w_scale[None], offsets)
    nan = torch.zeros(6, 3 * block, dtype=torch.bool)
    nan[2], nan[:, block : 2 * block] = True, True
    assert torch.equal(call(*operands).isnan(), nan)


@pytest.fixture(params=[*full([80]), 90], ids=["pointers", "descriptors"])
def by_triton(request, monkeypatch):
    """Interpreted launches, as on GPUs without and with a TMA unit."""
    monkeypatch.setattr(launcher, "architecture_elsewhere", request.param)


@pytest.mark.interpret
@pytest.mark.parametrize("op", ["linear_fp8", "grouped_mm_fp8"])
@pytest.mark.parametrize("out_dtype", [torch.float32, *full([torch.float16])], ids=str)
def test_triton_equals_reference(op, out_dtype, by_triton):
    for given in samples(op, device="cpu", dtype=out_dtype):
        with poisoned_memory():
            y = OPS[op].implementations["triton"](*given)
        want = OPS[op].implementations["reference"](*given)
        assert y.dtype == out_dtype and y.is_contiguous()
        assert relative_error(y, want) <= (1e-6 if out_dtype == torch.float32 else 5e-4)


@pytest.mark.interpret
def test_mlp_in_by_triton_equals_reference(by_triton):
    for given in samples("grouped_mlp_in_fp8", device="cpu", dtype=torch.float32):
        with poisoned_memory():
            results = OPS["grouped_mlp_in_fp8"].implementations["triton"](*given)
        wanted = OPS["grouped_mlp_in_fp8"].implementations["reference"](*given)
        assert [t.stride() for t in results] == [t.stride() for t in wanted]
        assert torch.equal(results[0].view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(results[1].float().nan_to_num(-1), wanted[1].float().nan_to_num(-1))
        assert relative_error(results[2], wanted[2]) <= 1e-6


@pytest.mark.interpret
def test_every_tile_and_number_of_programs(monkeypatch, by_triton):
    """Several experts, rows and columns of tiles a program; operands that no vector load can reach."""
    offsets = torch.tensor([3, 3, 140, 150], dtype=torch.int32)
    w, _, w_scale = quantize_weight(numbers(4, 256, 256))
    q, s = quantize_rows(numbers(160, 256))
    apart = torch.nn.functional.pad(q.view(torch.uint8), (0, 3)).view(E4M3)[:, :-3]
    want = OPS["grouped_mm_fp8"].implementations["reference"](q, s, w, w_scale, offsets, torch.float32)
    for programs, rows, scales in ((1, q, s), (3, apart, s.contiguous()), (1000, q, s)):
        set_programs(monkeypatch, programs)
        y = kernels.launch("grouped_mm_fp8", rows, scales, w, w_scale, offsets, torch.float32)
        assert relative_error(y, want) <= 1e-6


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_triton_decodes_every_byte(dtype):
    q = torch.zeros(256, 128, dtype=torch.uint8)
    q[:, 0] = torch.arange(256)
    q, one = q.view(dtype), torch.zeros(128, 128).fill_diagonal_(1).to(E4M3)
    scales = torch.ones(256, 1), torch.ones(1, 1)
    y = kernels.launch("linear_fp8", q, scales[0], one[None], scales[1][None], None, torch.float32)
    finite = q[:, 0].float().isfinite()
    assert torch.equal(y[finite, 0], q[finite, 0].float()) and (~y[~finite].isfinite()).any(1).all()


@pytest.mark.parametrize(("block", "arch", "advice"), [(32, 90, "; quantise with block=128"), (128, 80, "")])
def test_a_gpu_without_the_tensor_cores_is_named(block, arch, advice, monkeypatch):
    monkeypatch.setattr(kernels, "architecture", lambda tensor: arch)
    message = f"linear_fp8: block {block} needs a GPU of compute capability .*, got {arch / 10}{advice}$"
    with pytest.raises(ValueError, match=message):
        kernels._check_architecture("linear_fp8", SimpleNamespace(is_cuda=True), block)


def test_layouts_of_operands_do_not_matter():
    q, s = quantize_rows(numbers(21, 256))
    w, _, w_scale = quantize_weight(numbers(128, 256))
    y = linear_fp8(q, s, w, w_scale)
    wide = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), -1).view(E4M3)
    for other in (
        (wide[:, 256:], s.contiguous(), w, w_scale),
        (q.t().contiguous().t(), s, w.t().contiguous().t(), w_scale.t().contiguous().t()),
    ):
        assert torch.equal(linear_fp8(*other), y)


def arguments():
    w, _, w_scale = quantize_weight(numbers(2, 128, 256))
    q, s = quantize_rows(numbers(8, 256))
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
    "K must be a multiple of block (128), got 192": lambda a: {
        "q": a["q"][:, :192],
        "w": a["w"][..., :192],
    },
    "N must be a multiple of block (128), got 96": lambda a: {"w": a["w"][:, :96]},
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


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("form must be", {"form": "relu"}),
        ("gate and up must each have a multiple of block (128) rows, got w (2, 128, 256)", {}),
    ],
)
def test_errors_of_mlp_in(message, change):
    with pytest.raises(ValueError, match="^grouped_mlp_in_fp8: .*" + re.escape(message)):
        grouped_mlp_in_fp8(**arguments() | {"form": "silu"} | change)


def test_costs():
    a = arguments()
    op = OPS["grouped_mm_fp8"]
    assert op.flops(*a.values(), torch.bfloat16) == 2 * 8 * 128 * 256
    moved = 8 * 256 + 2 * 128 * 256 + 4 * (8 * 2 + 2 * 2 + 2) + 2 * 8 * 128
    assert op.traffic(*a.values(), torch.bfloat16) == moved
