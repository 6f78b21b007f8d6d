"""A hook of a weight's gradient sees and changes what plain autograd would give it, in every op.

Ops add weight gradients to `main_grad` themselves, or defer them; a weight with a hook goes through autograd.
"""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastmp
from fastmp.config.precision import Fp8Recipe
from fastmp.nn.moe.router import router_logits
from fastmp.ops import (
    grouped_mlp_in,
    grouped_mm,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_topk_distillation,
    wgrad,
)
from fastmp.ops.wgrad import WgradQueue, defer_wgrad, linear
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight, fp8_linear
from fastmp.testing.ranks import run_ranks

OFFSETS = torch.tensor([3, 3, 8], dtype=torch.int32)
TARGET = torch.tensor([3, 0, 5, 11, 2, -100, 7, 1])
TEACHER = torch.randn(12, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LIKELY = TARGET[:, None] % 3 + torch.arange(3)
LOG_PROBS = torch.log_softmax(TEACHER[:8, :3], -1) - 0.1


def fp8(x, w):
    quantized = QuantizedWeight(Fp8Recipe(32))
    quantized.refresh(w)
    return fp8_linear(x.repeat(1, 8), w, None, quantized)


def linear_in_python(x, w):
    with mock.patch.object(wgrad, "_in_cpp", None):
        return linear(x, w)


def chunks(reduction, **options):
    return lambda x, w: linear_cross_entropy(x, w, TARGET, reduction=reduction, workspace=256, **options)


# Functions of x (8, 4) and the weight, and the shape of the weight.
OPS = {
    "linear": (linear, (5, 4)),
    "linear in Python": (linear_in_python, (5, 4)),
    "grouped": (lambda x, w: grouped_mm(x, w, OFFSETS), (3, 5, 4)),
    "grouped, loop": (lambda x, w: grouped_mm(x, w, OFFSETS, sizes=[3, 0, 5]), (3, 5, 4)),
    "grouped, transposed": (lambda x, w: grouped_mm(x, w, OFFSETS, transposed=True), (3, 4, 5)),
    "mlp": (lambda x, w: grouped_mlp_in(x, w, OFFSETS, form="silu", gated=True), (3, 6, 4)),
    "router": (router_logits, (5, 4)),
    "fp8": (fp8, (32, 32)),
    "loss of few logits": (lambda x, w: linear_cross_entropy(x, w, TARGET), (12, 4)),
    "mean": (chunks("mean"), (12, 4)),
    "loss by token": (chunks("none"), (12, 4)),
    "known upstream": (lambda x, w: chunks("none", loss_grad=1.0)(x, w).sum(), (12, 4)),
    "log-probabilities": (lambda x, w: linear_log_probs(x, w, TARGET), (12, 4)),
    "distillation": (lambda x, w: linear_distillation(x, w, x.detach() + 1, TEACHER), (12, 4)),
    "top-k": (lambda x, w: linear_topk_distillation(x, w, LIKELY, LOG_PROBS), (12, 4)),
    "embedding": (lambda x, w: F.embedding(TARGET.relu(), w), (12, 4)),
}  # fmt: skip


def inputs(shape):
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(*each, dtype=torch.float64, generator=generator) for each in ((8, 4), shape))
    return x.requires_grad_(), nn.Parameter(w)


def gradient(w):
    return w.grad if w.grad is not None or not hasattr(w, "main_grad") else w.main_grad


def hooked(w, seen):
    """Mask the first row of a gradient, and note gradients and accumulated gradients."""

    def mask(grad):
        seen.append(grad.clone())
        return torch.cat([grad[:1] * 0, grad[1:] * 2])

    return w.register_hook(mask), w.register_post_accumulate_grad_hook(
        lambda w: seen.append(gradient(w).clone())
    )


def backward(name, w, x, queue=None, recomputed=False):
    call = OPS[name][0]
    with defer_wgrad(queue):
        y = checkpoint(call, x, w, use_reentrant=False) if recomputed else call(x, w)
        (y.sin().sum() if y.dim() else y).backward()
    if queue is not None:
        queue.run(queue.take())


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [
        *((name, False) for name in OPS),
        *((name, True) for name in ("linear", "grouped", "mlp", "fp8", "mean")),
    ],
)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("main", [False, True])
def test_a_hook(name, main, deferred, recomputed):
    """It is called once in each backward, before the hooks after accumulation, and can be removed."""
    x, w = inputs(OPS[name][1])
    backward(name, w, x)
    plain = w.grad
    w.grad, seen = None, []
    masked = torch.cat([plain[:1] * 0, plain[1:] * 2])
    if main:
        GradBuffer([("weight", w)])
    queue = WgradQueue() if deferred else None
    handles = hooked(w, seen)
    for _ in range(2):
        backward(name, w, x, queue, recomputed)
    torch.testing.assert_close(seen, [plain, masked, plain, 2 * masked], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient(w), 2 * masked, rtol=1e-10, atol=1e-10)
    for handle in handles:
        handle.remove()
    backward(name, w, x, queue, recomputed)
    torch.testing.assert_close(gradient(w), 2 * masked + plain, rtol=1e-10, atol=1e-10)
    assert len(seen) == 4 and (w.grad is None) == main


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", ["linear", "grouped", "mlp", "mean"])
def test_a_hook_under_autocast_gets_the_gradient_of_the_weight_itself(name, deferred):
    results = []
    for own in (False, True):
        x, w = (leaf.detach().float().requires_grad_() for leaf in inputs(OPS[name][1]))
        seen = []
        if own:
            w = nn.Parameter(w)
            GradBuffer([("weight", w)])
        hooked(w, seen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            backward(name, w, x, WgradQueue() if deferred and own else None)
        assert [each.dtype for each in seen] == [torch.float32] * 2
        results.append(seen)
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


HEADS = ("mean", "loss by token", "log-probabilities", "distillation", "top-k")
IN_PYTHON = ("linear in Python", "grouped", "grouped, loop", "mlp", "router", "fp8", *HEADS)


class TestHooksThatComeTooLate:
    """A gradient that an op has promised to `main_grad` cannot pass a hook any more: an error says so."""

    @pytest.mark.full
    def test_of_compiled_code(self):
        x, w = inputs((12, 4))
        GradBuffer([("weight", w)])
        compiled = torch.compile(OPS["loss by token"][0], fullgraph=True, backend="aot_eager")
        compiled(x, w).sum().backward()
        w.register_hook(lambda grad: 2 * grad)
        with pytest.raises(ValueError, match="wgrad: weight has a gradient hook that compiled code"):
            compiled(x, w).sum().backward()

    @pytest.mark.parametrize(
        ("name", "how"),
        [
            *((name, how) for name in IN_PYTHON for how in ("now", "deferred")),
            *((name, "recomputed") for name in ("grouped", "grouped, loop", "mlp", "router", "fp8")),
            *((name, "autocast") for name in ("linear in Python", "grouped", "mlp", "router", "mean")),
        ],
    )
    def test_between_forward_and_backward(self, name, how):
        x, w = inputs(OPS[name][1])
        if how == "autocast":
            x, w = (type(each)(each.detach().float()).requires_grad_() for each in (x, w))
        call, seen = OPS[name][0], []
        GradBuffer([("weight", w)])
        queue = WgradQueue() if how == "deferred" else None
        with defer_wgrad(queue), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            y = checkpoint(call, x, w, use_reentrant=False) if how == "recomputed" else call(x, w)
            loss = y.sin().sum() if y.dim() else y
        w.register_hook(seen.append)
        with defer_wgrad(queue), pytest.raises(ValueError, match=r"wgrad: .* whose forward ran before it"):
            loss.backward()
        assert not seen and not w.main_grad.any()

    def test_of_a_deferred_gradient_without_main_grad(self):
        x, w = inputs((5, 4))
        queue = WgradQueue()
        with defer_wgrad(queue):
            loss = linear(x, w).sum()
            w.register_hook(lambda grad: 2 * grad)
            with pytest.raises(ValueError, match="register the hook before the forward"):
                loss.backward()


def test_a_table_that_is_also_the_output_layer_calls_its_hook_once():
    _, w = inputs((12, 4))
    seen = []
    GradBuffer([("table", w)])
    hooked(w, seen)
    linear_cross_entropy(F.embedding(TARGET.relu(), w), w, TARGET).backward()
    plain = w.detach().clone().requires_grad_()
    linear_cross_entropy(F.embedding(TARGET.relu(), plain), plain, TARGET).backward()
    torch.testing.assert_close(seen[0], plain.grad)
    assert len(seen) == 2


def test_a_hook_of_several_gradients():
    x, w = inputs((5, 4))
    bias, seen = nn.Parameter(torch.zeros(5, dtype=torch.float64)), []
    GradBuffer([("weight", w), ("bias", bias)])
    handle = torch.autograd.graph.register_multi_grad_hook([w, bias], lambda grads: seen.extend(grads))
    linear(x, w, bias).sum().backward()
    assert [grad.shape for grad in seen] == [w.shape, bias.shape]
    handle.remove()


@pytest.mark.full
def test_data_parallelism_by_hooks_of_autograd_nodes_gets_every_gradient():
    def rank_main(rank, world_size):
        _, w = inputs((5, 4))
        layer = nn.Linear(4, 5, bias=False)
        layer.weight, layer.forward = w, lambda x: linear(x, layer.weight)
        model, queue = DistributedDataParallel(layer), WgradQueue()
        with defer_wgrad(queue):
            model(torch.full((3, 4), float(rank), dtype=torch.float64)).sum().backward()
        assert not queue.take()
        return w.grad

    for grad in run_ranks(rank_main, 2):
        torch.testing.assert_close(grad, torch.full((5, 4), 1.5, dtype=torch.float64))


def test_ops_ask_for_main_grad_in_one_place():
    """`main_grad_of` leaves a weight with hooks to autograd: no op reads the attribute by itself."""
    package = Path(fastmp.__file__).parent
    reads = set()
    for folder in ("ops", "tensor_parallel", "nn", "objectives", "hf"):
        for path in (package / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "main_grad" in text else ():
                call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)  # as of getattr
                by_name = call and any(getattr(each, "value", None) == "main_grad" for each in node.args)
                of_weight = (
                    isinstance(node, ast.Attribute)
                    and node.attr == "main_grad"
                    and not (isinstance(node.value, ast.Name) and node.value.id in ("ctx", "self", "head"))
                )
                if by_name or of_weight:
                    reads.add(path.relative_to(package).as_posix())
    assert reads == {"ops/wgrad.py"}
