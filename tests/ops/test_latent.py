"""latent_norm_rope: rms_norm and rope in one op, its gradients, dtypes, tables, Triton kernels and errors."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import DTYPES, KERNELS, check_kernel

from fastmp.ops import OPS, latent_norm_rope, norm_triton, rms_norm, rope, rope_cos_sin
from fastmp.testing.ops import poisoned_memory, samples

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NAMES = ("latent_norm_rope", "latent_norm_rope_backward")


def inputs(dtype=torch.float64, rank=37, half=5, own=False, kind=None):
    """x (9, 2, C + 2 R), weight, tables, gradients of both results."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    positions = torch.randint(40, (9, 2), generator=generator) if own else 9
    wide = torch.promote_types(dtype, torch.float32)
    x, weight = draw(9, 2, rank + 2 * half).requires_grad_(), draw(rank).to(kind or dtype).requires_grad_()
    tables = rope_cos_sin(positions, dim=2 * half, dtype=wide)
    return x, weight, tables, (draw(9, 2, rank), draw(9, 2, 2 * half))


def separately(x, weight, tables, eps, interleaved):
    rank = len(weight)
    return rms_norm(x[..., :rank], weight, eps=eps), rope(x[..., rank:], *tables, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_separate_ops(dtype, own, interleaved):
    """Bit for bit on one backend: the same rows, sums and roundings."""
    x, weight, tables, grads = inputs(dtype, own=own)
    with poisoned_memory():
        results = latent_norm_rope(x, weight, *tables, eps=1e-5, interleaved=interleaved)
        found = torch.autograd.grad(results, (x, weight), grads)
    wanted = separately(x, weight, tables, 1e-5, interleaved)
    for value, want in zip(results, wanted, strict=True):
        assert value.is_contiguous() and torch.equal(value, want)
    for value, want in zip(found, torch.autograd.grad(wanted, (x, weight), grads), strict=True):
        assert value.dtype == want.dtype and torch.equal(value, want)


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_go_unused(used):
    x, weight, tables, grads = inputs()
    leaves = (x, weight) if used == 0 else (x,)
    found, wanted = (
        torch.autograd.grad(results[used], leaves, grads[used])
        for results in (latent_norm_rope(x, weight, *tables), separately(x, weight, tables, 1e-6, False))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_float32_weight_of_16_bit_latents():
    x, weight, tables, grads = inputs(torch.bfloat16, kind=torch.float32)
    results = latent_norm_rope(x, weight, *tables)
    assert [y.dtype for y in results] == [torch.bfloat16] * 2
    gradients = torch.autograd.grad(results, (x, weight), grads)
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32]


def test_autocast_leaves_a_float32_weight_alone():
    x, weight, tables, _ = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results = latent_norm_rope(x, weight, *tables)
    wanted = latent_norm_rope(x.bfloat16(), weight, *tables)
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_tables_of_size_one_hold_for_all():
    x, weight, (cos, sin), _ = inputs()
    for one in ((slice(3, 4), slice(None)), (slice(3, 4), None)):
        results = latent_norm_rope(x, weight, cos[one], sin[one])
        wanted = latent_norm_rope(x, weight, cos[3].expand(9, 2, -1), sin[3].expand(9, 2, -1))
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@KERNELS
@pytest.mark.parametrize("op", NAMES)
def test_equals_reference(backend, dtype, op):
    bound = TOLERANCE[dtype]
    for arguments in samples(op, device="cpu", dtype=dtype):
        check_kernel(backend, op, *arguments, rtol=bound, atol=bound)


def test_samples_have_latents_too_long_for_registers():
    longest = max(len(arguments[1]) for arguments in samples(NAMES[0], device="cpu", dtype=torch.bfloat16))
    assert norm_triton.backward_block_shape(longest, 2) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(9, 2, 46)}, r"expected x \(..., 47\) for weight \(37,\) and cos \(9, 5\)"),
        ({"x": torch.zeros(8, 2, 47)}, r"cos \(9, 5\) does not fit the leading dimensions of x \(8, 2, 47\)"),
        ({"x": torch.zeros(47)}, r"cos \(9, 5\) has more dimensions than x \(47,\), or none"),
        ({"x": torch.zeros(9, 2, 47, dtype=torch.int32)}, "got torch.int32"),
        ({"x": torch.zeros(9, 2, 47, dtype=torch.float64)}, "x is torch.float64 but weight is torch.float32"),
        ({"weight": torch.zeros(0)}, r"expected weight of shape \(C,\), got \(0,\)"),
        ({"weight": torch.zeros(37, device="meta")}, "x is on cpu but weight is on meta"),
        ({"sin": torch.zeros(9, 4)}, r"expected sin of shape \(9, 5\)"),
        ({"cos": torch.zeros(9, 5, dtype=torch.float64)}, "cos must be torch.float32 for x of torch.float32"),
        ({"cos": torch.zeros(9, 5, requires_grad=True)}, "requires a gradient, but receives none"),
        ({"eps": -1.0}, "eps must not be negative, got -1.0"),
    ],
)
def test_wrong_arguments(change, message):
    given = {"x": torch.zeros(9, 2, 47), "weight": torch.zeros(37), "cos": torch.zeros(9, 5)}
    given |= {"sin": torch.zeros(9, 5)} | change
    with pytest.raises(ValueError, match=f"latent_norm_rope: .*{message}"):
        latent_norm_rope(**given)


@pytest.mark.parametrize("backend", ["c++", "reference"])
@pytest.mark.parametrize(
    ("op", "place", "wrong"),
    [
        (NAMES[0], 0, torch.zeros(9, 2, 46)),
        (NAMES[0], 2, torch.zeros(8, 5)),
        (NAMES[0], 3, torch.zeros(9, 4)),
        (NAMES[1], 0, torch.zeros(9, 2, 36)),
        (NAMES[1], 1, torch.zeros(9, 2, 9)),
        (NAMES[1], 6, torch.zeros(9)),
    ],
)
def test_raw_ops_check_shapes(op, place, wrong, backend):
    forward = [torch.zeros(9, 2, 47), torch.zeros(37), *torch.zeros(2, 9, 5)]
    if op == NAMES[0]:
        arguments = [*forward, 1e-6, False]
    else:
        arguments = [torch.zeros(9, 2, 37), torch.zeros(9, 2, 10), *forward, torch.zeros(9, 2), False]
    call = OPS[op].overload if backend == "c++" else OPS[op].implementations[backend]
    call(*arguments)
    arguments[place] = wrong
    with pytest.raises((ValueError, RuntimeError), match=f"{op}: "):
        call(*arguments)
