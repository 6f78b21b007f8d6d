"""FP8 linear layers: the function and gradients of dequantised operands, on one rank and over a group."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from marks import full
from torch.utils.checkpoint import checkpoint

from fastmp.config.precision import Fp8Recipe
from fastmp.ops import dequantize_rows, quantize_rows, quantize_weight
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight, fp8_linear
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.testing.parallel import count_collectives, full_gradient
from fastmp.testing.ranks import run_ranks

I, O = 128, 256
recipes = pytest.mark.parametrize(
    "recipe", [Fp8Recipe(), Fp8Recipe(32, "e5m2"), *full([Fp8Recipe(32), Fp8Recipe(grad="e5m2")])], ids=str
)


def close(value, want, tolerance=1e-10):
    torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance)


def rounded(x, recipe, dtype=torch.float8_e4m3fn):
    """Return x as FP8 keeps it."""
    rows = quantize_rows(x.reshape(-1, x.shape[-1]), block=recipe.block, dtype=dtype)
    return dequantize_rows(*rows, dtype=x.dtype).view(x.shape)


def rounded_weight(w, recipe):
    q, _, scale = quantize_weight(w, block=recipe.block)
    return q.to(w.dtype) * scale.to(w.dtype).repeat_interleave(recipe.block, 0).repeat_interleave(
        recipe.block, 1
    )


def operands(dtype=torch.float64):
    torch.manual_seed(0)
    x, grad = torch.randn(3, 5, I, dtype=dtype), torch.randn(3, 5, O, dtype=dtype)
    return x.requires_grad_(), torch.nn.Parameter(torch.randn(O, I, dtype=dtype) / 8), grad


@recipes
def test_gemms_of_dequantised_operands(recipe):
    x, weight, grad = operands()
    bias = torch.randn(O, dtype=torch.float64, requires_grad=True)
    fp8 = QuantizedWeight(recipe)
    fp8.refresh(weight)
    y = fp8_linear(x, weight, bias, fp8)
    y.backward(grad)
    kept, held = rounded(x.detach(), recipe), rounded_weight(weight.detach(), recipe)
    assert 0 < (kept - x).norm() / x.norm() < 0.05 and 0 < (held - weight).norm() / weight.norm() < 0.05
    close(y, kept @ held.t() + bias)
    narrow = rounded(grad, recipe, {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[recipe.grad])
    close(x.grad, narrow @ held)
    close(weight.grad, grad.flatten(0, 1).t() @ kept.flatten(0, 1))  # of the gradient that is not quantised
    close(bias.grad, grad.sum((0, 1)))


def test_saves_the_input_in_fp8():
    x, weight, grad = operands(torch.bfloat16)
    fp8 = QuantizedWeight(Fp8Recipe())
    fp8.refresh(weight)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fp8_linear(x, weight, None, fp8)
    assert sum(t.numel() * t.element_size() for t in saved) <= x.numel() * (1 + 4 / 128) + 64
    y.backward(grad)
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_weights_are_quantised_when_they_have_changed():
    torch.manual_seed(0)
    layer = ColumnParallelLinear(I, O, group=None, bias=False, fp8=Fp8Recipe())
    x = torch.randn(4, I)
    first = layer(x)
    made = layer.fp8["weight"].forward.q
    assert torch.equal(layer(x), first)
    with torch.no_grad():
        layer.weight.mul_(-1)
    close(layer(x), -first, 0.0)
    assert layer.fp8["weight"].forward.q is made  # graphs read it there
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert not twin(x).any() and torch.equal(layer(x), -first)
    layer.load_state_dict({"weight": torch.zeros(O, I)})
    assert not layer(x).any()


def test_deferred_weight_gradient():
    x, weight, grad = operands()
    fp8 = QuantizedWeight(Fp8Recipe())
    fp8.refresh(weight)
    fp8_linear(x, weight, None, fp8).backward(grad)
    want, weight.grad = weight.grad, None
    weight.main_grad, queue = torch.zeros_like(weight), WgradQueue()
    with defer_wgrad(queue):
        fp8_linear(x, weight, None, fp8).backward(grad)
    assert weight.grad is None and not weight.main_grad.any()
    WgradQueue.run(queue.take())
    close(weight.main_grad, want)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_sizes_that_blocks_do_not_divide(layer):
    with pytest.raises(ValueError, match="FP8 blocks of 128 do not divide input_size 192"):
        layer(192, 256, group=None, fp8=Fp8Recipe())


def check_layers(rank, tp, sp, recipe):
    group, S = dist.group.WORLD, 4 * tp
    options = {"dtype": torch.float64, "bias": False, "fp8": recipe}
    made = []
    for which in (group, None):
        torch.manual_seed(0)
        made.append(
            (
                ColumnParallelLinear(
                    I, 2 * O, group=which, sequence_parallel=sp, stride=2, gather_output=False, **options
                ),
                RowParallelLinear(O, I, group=which, sequence_parallel=sp, input_is_parallel=True, **options),
            )
        )
    torch.manual_seed(1)
    x, probe = torch.randn(2, S, 2, I, dtype=torch.float64)
    results = []
    for which, (up, down) in zip((group, None), made, strict=True):
        own = sp and which is not None
        leaf = (x.chunk(tp)[rank] if own else x).clone().requires_grad_()
        with count_collectives() as calls:
            h = up(leaf)
            gate, value = h.chunk(2, -1)
            y = down(torch.nn.functional.silu(gate) * value)
            y.backward(probe.chunk(tp)[rank] if own else probe)
        results.append((y.detach(), leaf.grad, up, down, calls))
    (y, dx, up, down, _), (whole_y, whole_dx, whole_up, whole_down, _) = results
    part = (lambda t: t.chunk(tp)[rank]) if sp else (lambda t: t)
    close(y, part(whole_y))
    close(dx, part(whole_dx))
    for ours, theirs in ((up, whole_up), (down, whole_down)):
        close(full_gradient(ours.weight, group), theirs.weight.grad)
    # the bytes themselves: a rank's weight is a part of the whole one
    q, whole_q = down.fp8["weight"].forward.q, whole_down.fp8["weight"].forward.q
    assert torch.equal(q.view(torch.uint8), whole_q.chunk(tp, 1)[rank].view(torch.uint8))


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), *full([Fp8Recipe(32, "e5m2")])], ids=str)
def test_layers_over_ranks_are_the_undivided_layers(sp, recipe):
    run_ranks(check_layers, 2, sp, recipe)


def test_recomputation_leaves_out_the_last_gemm():
    x, weight, grad = operands()
    fp8 = QuantizedWeight(Fp8Recipe())
    fp8.refresh(weight)
    fp8_linear(x, weight, None, fp8).backward(grad)
    want, x.grad, weight.grad = (x.grad, weight.grad), None, None
    y = checkpoint(lambda leaf: fp8_linear(leaf, weight, None, fp8), x, use_reentrant=False)
    with torch.profiler.profile() as profile:
        y.backward(grad)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["fastmp::linear_fp8"] == 1 and counts["fastmp::quantize_rows"] == 2  # dgrad alone
    assert torch.equal(x.grad, want[0]) and torch.equal(weight.grad, want[1])


@pytest.mark.full
def test_compiled_layers_are_eager_ones():
    torch.manual_seed(0)
    layer = ColumnParallelLinear(I, O, group=None, fp8=Fp8Recipe())
    x = torch.randn(4, I, requires_grad=True)
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        (grad,) = torch.autograd.grad(layer(x).sum(), x)
        found = compiled(x)
        assert torch.equal(found, layer(x)) and torch.equal(torch.autograd.grad(found.sum(), x)[0], grad)
        with torch.no_grad():
            layer.weight.mul_(2)
