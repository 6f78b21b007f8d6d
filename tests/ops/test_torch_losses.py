"""`cross_entropy` in place of torch's: the same arguments give the same losses and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import cross_entropy

# (shape of the logits, shape of the target): classes are dimension 1, as in torch
SHAPES = (((5,), ()), ((4, 5), (4,)), ((4, 5, 3), (4, 3)), ((2, 5, 1, 3), (2, 1, 3)), ((0, 5), (0,)))


def loss_and_grad(function, logits: Tensor, *arguments, **options) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    loss = function(logits, *arguments, **options)
    (grad,) = torch.autograd.grad(loss, logits, torch.full_like(loss, 0.7))
    return loss.detach(), grad


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("options", ({}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 2}))
def test_equals_torch(shapes, weighted, options):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    target = torch.randint(5, shapes[1], generator=generator)
    target.view(-1)[:1] = options.get("ignore_index", -100) if target.numel() > 1 else 1
    weight = torch.rand(5, generator=generator, dtype=torch.float64) if weighted else None
    # torch takes the weight by position too
    ours, expected = (
        loss_and_grad(f, logits, target, weight, **options) for f in (cross_entropy, F.cross_entropy)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_takes_torchs_names():
    logits, target = torch.randn(3, 4), torch.tensor([0, 3, 1])
    arguments = {"input": logits, "target": target, "weight": torch.ones(4), "label_smoothing": 0.0}
    torch.testing.assert_close(cross_entropy(**arguments), F.cross_entropy(**arguments))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_class_weights_of_narrow_logits(dtype):
    """Ids of padding after `vocab_size`, of ignored tokens, and a factor for each token as well."""
    logits, target = torch.randn(2, 7, 9).to(dtype), torch.randint(8, (2, 7))
    target[0, :3] = -100
    weight, tokens = torch.rand(9), torch.rand(2, 7)
    loss = cross_entropy(logits, target, weight, vocab_size=8, token_weight=tokens, reduction="none")
    expected = F.cross_entropy(logits[..., :8].float().movedim(-1, 1), target, weight[:8], reduction="none")
    torch.testing.assert_close(loss, expected * tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target": torch.rand(4, 6)},
            "expected int64 target of shape .* class probabilities are not supported",
        ),
        ({"weight": torch.ones(5)}, r"expected weight of shape \(6,\) .* got \(5,\)"),
        ({"weight": torch.ones(6, requires_grad=True)}, "weight requires a gradient"),
        (
            {"weight": torch.ones(6), "label_smoothing": 0.1},
            "class weights with label_smoothing 0.1 are not supported",
        ),
        (
            {"input": torch.rand(4, 6, 6), "target": torch.ones(4, 6, dtype=torch.int64)},
            r"classes may be dimension 1 or 2 of logits \(4, 6, 6\).*flatten\(0, -2\)",
        ),
    ],
)
def test_says_what_is_not_supported(change, message):
    arguments = {"input": torch.zeros(4, 6), "target": torch.zeros(4, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=f"cross_entropy: .*{message}"):
        cross_entropy(**arguments)


@pytest.mark.full
def test_torchs_own_samples():
    """All sample inputs that torch tests its function with, but for class probabilities."""
    from torch.testing._internal.common_methods_invocations import op_db

    (torchs,) = [op for op in op_db if op.name == "nn.functional.cross_entropy"]
    samples = list(torchs.sample_inputs("cpu", torch.float64))
    of_ids = [sample for sample in samples if not sample.args[0].is_floating_point()]
    assert len(of_ids) >= 10
    for sample in of_ids:
        ours, expected = (
            loss_and_grad(f, sample.input, *sample.args, **sample.kwargs) for f in (cross_entropy, torchs.op)
        )
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    for sample in samples:
        if sample.args[0].is_floating_point():
            with pytest.raises(ValueError, match="class probabilities are not supported"):
                cross_entropy(sample.input, *sample.args, **sample.kwargs)
