"""Reduced losses: what torch's own reductions give, whatever gradient they then receive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import cross_entropy, linear_cross_entropy, linear_log_probs, linear_topk_distillation

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SMALL, LARGE = (12, 33, 7), (384, 1031, 96)  # tokens, vocabulary, hidden size
REDUCED = pytest.mark.parametrize("reduction", ("mean", "sum"))


def problem(
    dtype: torch.dtype = torch.float64, ignored: slice = slice(0, 4), sizes: tuple[int, int, int] = SMALL
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, target); the targets `ignored` are."""
    tokens, vocabulary, size = sizes
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, tokens // 3, size, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, size, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(vocabulary, (3, tokens // 3), generator=generator)
    target.view(-1)[ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


def plain(hidden: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, -2)
    return F.cross_entropy(logits, target.flatten(), **options)


def separate(hidden: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
    return cross_entropy(F.linear(hidden, weight), target, **options)


def in_chunks(hidden: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
    workspace = target.numel() // 2 * len(weight) * hidden.element_size()
    return linear_cross_entropy(hidden, weight, target, workspace=workspace, **options)


def by_kernel(hidden: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
    """The kernel of the loss sums where logits are a matrix whose targets may be read."""
    return cross_entropy(F.linear(hidden, weight).flatten(0, -2), target.flatten(), **flat(options))


def of_few_logits(hidden: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
    return linear_cross_entropy(hidden.flatten(0, -2), weight, target.flatten(), **flat(options))


def flat(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: option.flatten() if isinstance(option, Tensor) else option for name, option in options.items()
    }


OURS = pytest.mark.parametrize("ours", (separate, by_kernel, of_few_logits, linear_cross_entropy, in_chunks))


def loss_and_gradients(function, inputs: tuple, scale: float = 1.0, **options) -> list[Tensor]:
    loss = function(*inputs, **options)
    return [loss.detach(), *torch.autograd.grad(loss * scale, inputs[:2])]


@OURS
@REDUCED
@pytest.mark.parametrize("scale", (1.0, -0.3))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_equals_torch(ours, reduction, scale, smoothing):
    """Some targets are ignored; the loss is scaled by any number before backward."""
    options = {"reduction": reduction, "label_smoothing": smoothing}
    torch.testing.assert_close(
        loss_and_gradients(ours, problem(), scale, **options),
        loss_and_gradients(plain, problem(), scale, **options),
        **EXACT,
    )


@OURS
@REDUCED
def test_all_ignored(ours, reduction):
    """The mean of nothing is NaN, as in torch; gradients are zero."""
    inputs = problem(ignored=slice(None))
    loss, *grads = loss_and_gradients(ours, inputs, reduction=reduction)
    expected = loss_and_gradients(plain, inputs, reduction=reduction)
    assert loss.isnan() == expected[0].isnan() == (reduction == "mean")
    assert not any(grad.any() for grad in grads) and not any(grad.any() for grad in expected[1:])


@OURS
def test_weights_of_tokens_divide_the_mean(ours):
    inputs = problem()
    weight = torch.rand(inputs[2].shape, dtype=torch.float64)
    losses = separate(*inputs, reduction="none")
    expected = (losses * weight).sum() / weight[inputs[2] != -100].sum()
    value = ours(*inputs, token_weight=weight, reduction="mean")
    torch.testing.assert_close(value, expected, **EXACT)
    grads = [torch.autograd.grad(loss, inputs[:2]) for loss in (value, expected)]
    torch.testing.assert_close(*grads, **EXACT)


@OURS
def test_the_mean_is_the_default(ours):
    inputs = problem()
    assert torch.equal(ours(*inputs), ours(*inputs, reduction="mean"))


@OURS
def test_mistakes_are_named(ours):
    inputs = problem()
    with pytest.raises(ValueError, match="reduction must be one of none, mean, sum, got 'average'"):
        ours(*inputs, reduction="average")
    for name in ("ignore_index", "label_smoothing", "z_loss"):
        with pytest.raises(ValueError, match=f": expected {name} to be an? (integer|number), got None"):
            ours(*inputs, **{name: None})
    for wrong in (8.0, "8"):
        with pytest.raises(ValueError, match=f": expected vocab_size to be an integer, got {wrong!r}"):
            ours(*inputs, vocab_size=wrong)
    upstream = torch.ones(inputs[2].shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"loss_grad .* pass reduction='none' with it, got 'mean'"):
        ours(*inputs, reduction="mean", loss_grad=upstream)


@REDUCED
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_narrow_gradients_are_as_accurate_as_torchs(reduction, dtype):
    """Under a loss scale as of float16 training, gradients do not vanish before they are scaled."""
    scale, narrow = 2.0**10, problem(dtype, sizes=LARGE)
    wide = tuple(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in narrow)
    truth = loss_and_gradients(plain, wide, scale, reduction=reduction)
    theirs = loss_and_gradients(plain, narrow, scale, reduction=reduction)
    for ours in (linear_cross_entropy, of_few_logits, in_chunks):
        values = loss_and_gradients(ours, narrow, scale, reduction=reduction)
        for value, peer, want in zip(values[1:], theirs[1:], truth[1:], strict=True):
            error, yardstick = ((t.double() - want).norm() for t in (value, peer))
            assert error <= 1.1 * yardstick


@REDUCED
def test_main_gradients_receive_what_the_loss_receives(reduction):
    inputs = problem()
    expected = loss_and_gradients(plain, inputs, 0.3, reduction=reduction)
    inputs[1].main_grad = torch.ones_like(inputs[1])
    (in_chunks(*inputs, reduction=reduction) * 0.3).backward()
    assert inputs[1].grad is None
    torch.testing.assert_close(inputs[1].main_grad - 1, expected[2], **EXACT)
    torch.testing.assert_close(inputs[0].grad, expected[1], **EXACT)


LOSSES = {
    "plain": lambda x, w, target: cross_entropy(x, target),
    "loss_grad": lambda x, w, target: cross_entropy(x, target, reduction="none", loss_grad=torch.ones(12)),
    "token_weight": lambda x, w, target: cross_entropy(x, target, token_weight=torch.ones(12)),
    "class weights": lambda x, w, target: cross_entropy(x, target, torch.ones(x.shape[1])),
    "few logits": linear_cross_entropy,
    "chunks": lambda x, w, target: linear_cross_entropy(x, w, target, workspace=1000),
    "log_probs": linear_log_probs,
    "topk ids": lambda x, w, target: linear_topk_distillation(x, w, target, -torch.ones(12, 1)),
    "topk": lambda x, w, log_probs: linear_topk_distillation(
        x, w, torch.zeros(12, 1, dtype=torch.int64), log_probs
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", ("contiguous", "offset", "strided"))
def test_targets_without_memory_are_named(loss, layout):
    """Freed or shrunk, as FSDP does: the host, which looks at their values, must not read them."""
    x, w = torch.randn(12, 7), torch.randn(7, 7)
    dtype = torch.float32 if loss == "topk" else torch.int64
    memory = torch.zeros(24, dtype=dtype)
    target = {"contiguous": memory[:12], "offset": memory[12:], "strided": memory[::2]}[layout]
    target = target[:, None] if loss.startswith("topk") else target
    LOSSES[loss](x, w, target)
    for left in (0, 8):
        memory.untyped_storage().resize_(left)
        name = {"topk": "teacher_log_probs", "topk ids": "teacher_ids"}.get(loss, "target")
        with pytest.raises(ValueError, match=f"expected memory for all elements of {name} "):
            LOSSES[loss](x, w, target)
