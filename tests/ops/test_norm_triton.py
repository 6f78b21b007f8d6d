"""The Triton kernels of rms_norm and layer_norm in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from marks import DTYPES

from fastmp.ops import norm
from fastmp.ops import norm_triton as module
from fastmp.testing.ops import poisoned_memory

pytestmark = pytest.mark.interpret

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
FORMS = pytest.mark.parametrize(
    ("centred", "with_bias"),
    [(False, False), (True, True), (True, False)],
    ids=["rms_norm", "layer_norm", "layer_norm without bias"],
)


def _random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _check(x, residual, weight, bias, grad, grad_total, centred):
    forward = centred, x, residual, weight, bias, 1e-5
    wanted = norm.reference(*forward)
    total = x if residual is None else wanted[1]
    grad_total = None if residual is None else grad_total
    backward = centred, grad, grad_total, total, weight, wanted[2], bias is not None
    with poisoned_memory():
        results = *module.launch(*forward), *module.launch_backward(*backward)
    tolerance = TOLERANCE[x.dtype]
    for value, want in zip(results, (*wanted, *norm.reference_backward(*backward)), strict=True):
        assert value.is_contiguous() and value.dtype == want.dtype
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance * scale)


def _case(shape, dtype, centred, with_bias, with_residual, kind=None):
    x, residual, grad, grad_total = (_random(*shape, dtype=dtype, seed=seed) for seed in range(4))
    weight, bias = (_random(shape[-1], dtype=kind or dtype, seed=seed) for seed in (4, 5))
    _check(
        x, residual if with_residual else None, weight, bias if with_bias else None, grad, grad_total, centred
    )


@FORMS
@pytest.mark.parametrize("with_residual", (True, False), ids=("residual", "alone"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(dtype, with_residual, centred, with_bias):
    for shape in ((7,), (37, 130), (3, 2, 24), (90, 17), (0, 8), (3, 0)):
        _case(shape, dtype, centred, with_bias, with_residual)


@FORMS
@pytest.mark.parametrize("with_residual", (True, False), ids=("residual", "alone"))
def test_rows_too_long_for_registers(monkeypatch, with_residual, centred, with_bias):
    """Several blocks of columns, of rows a program, and a last one of each cut short."""
    for name in ("block_shape", "backward_block_shape"):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(module, "WIDE_BLOCK", (1, 32, 4))
    monkeypatch.setattr(module, "WIDE_BACKWARD_BLOCK", (2, 32, 4))
    monkeypatch.setattr(
        module, "num_programs", lambda num_rows, block_m, num_warps: min(2, -(-num_rows // 2))
    )
    for shape in ((19, 75), (2, 32), (5, 3)):
        _case(shape, torch.float32, centred, with_bias, with_residual)


@FORMS
def test_several_blocks_a_program(monkeypatch, centred, with_bias):
    for name in ("block_shape", "backward_block_shape"):
        monkeypatch.setattr(module, name, lambda *_: (2, 32, 4))
    monkeypatch.setattr(module, "num_programs", lambda num_rows, block_m, num_warps: 3)
    _case((23, 19), torch.float32, centred, with_bias, True)


@FORMS
def test_float32_parameters(centred, with_bias):
    _case((9, 40), torch.float16, centred, with_bias, True, torch.float32)


@pytest.mark.parametrize("layout", ("rows apart", "transposed", "expanded gradients", "strided parameters"))
def test_layouts(layout):
    x, residual, grad, grad_total = (_random(20, 40, dtype=torch.float32, seed=seed) for seed in range(4))
    weight, bias = (_random(40, dtype=torch.float32, seed=seed) for seed in (4, 5))
    if layout == "rows apart":
        x, residual, grad, grad_total = x[:, :35], residual[:, 5:], grad[:, 3:38], grad_total[:, :35]
        weight, bias = weight[:35], bias[:35]
    elif layout == "transposed":
        x, residual, grad, grad_total = x.t(), residual.t(), grad.t(), grad_total.t()
        weight, bias = weight[:20], bias[:20]
    elif layout == "expanded gradients":
        grad = grad_total = torch.ones(()).expand(20, 40)
    else:
        weight, bias = (_random(80, dtype=torch.float32, seed=seed)[::2] for seed in (4, 5))
    _check(x, residual, weight, bias, grad, grad_total, True)
