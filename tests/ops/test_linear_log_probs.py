"""Log-probabilities and entropies from hidden states: their formulas, where gradients go, what is held.

That they equal plain torch is tested with all functions, in test_functions.py.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import extra_bytes
from fastmp.ops import linear_cross_entropy, linear_log_probs
from fastmp.optim.grad_buffers import GradBuffer

N, H, V = 22, 12, 40
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def problem(dtype=torch.float64):
    """Leaves hidden (11, 2, H) and weight (V, H), targets below 33 with some ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in ((11, 2, H), (V, H))
    )
    target = torch.randint(33, (11, 2), generator=generator)
    target.view(-1)[::7] = -100
    return hidden, weight, target


def test_without_a_temperature_it_is_the_negative_cross_entropy():
    hidden, weight, target = problem()
    for workspace in (None, 4 * V * 8):
        ours = linear_log_probs(hidden, weight, target, vocab_size=33, workspace=workspace)
        loss = linear_cross_entropy(
            hidden, weight, target, vocab_size=33, workspace=workspace, reduction="none"
        )
        torch.testing.assert_close(ours, -loss, **CLOSE)
        pairs = [torch.autograd.grad(out.sum(), (hidden, weight)) for out in (ours, -loss)]
        torch.testing.assert_close(*pairs, **CLOSE)


@pytest.mark.parametrize("workspace", (None, 4 * V * 8))
def test_entropy_and_its_gradient_are_those_of_a_categorical_distribution(workspace):
    """Alone, without the log-probabilities, and beside them; a temperature for each token."""
    hidden, weight, target = problem()
    temperature = torch.linspace(0.3, 3, N, dtype=torch.float64).view(11, 2)
    live = target != -100
    categorical = torch.distributions.Categorical(logits=F.linear(hidden, weight) / temperature[..., None])
    log_probs, entropy = linear_log_probs(
        hidden, weight, target, temperature=temperature, return_entropy=True, workspace=workspace
    )
    torch.testing.assert_close(log_probs[live], categorical.log_prob(target.clamp(min=0))[live], **CLOSE)
    torch.testing.assert_close(entropy[live], categorical.entropy()[live], **CLOSE)
    assert not log_probs[~live].any() and not entropy[~live].any()
    want = torch.autograd.grad(categorical.entropy()[live].sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), (hidden, weight)), want, **CLOSE)


def test_a_token_that_is_all_but_certain():
    """In float32 its log-probability and entropy are off by a unit of it, and neither has the wrong sign."""
    hidden = torch.ones(3, 1)
    logits = torch.tensor([80.0, 80.0 - math.log(1e6), 60.0, -math.inf])
    for temperature in (1.0, 0.7, 3.0):
        args = hidden, logits[:, None], torch.tensor([0, 1, 2])
        log_probs, entropy = linear_log_probs(*args, temperature=temperature, return_entropy=True)
        wide = (logits.double() / temperature).log_softmax(0)
        truth = -(wide.exp() * wide)[:3].sum()
        torch.testing.assert_close(log_probs.double(), wide[:3], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(entropy.double(), truth.expand(3), rtol=1e-4, atol=2e-7)
        assert (log_probs <= 0).all() and (entropy >= 0).all()


def test_the_usual_objective_reaches_its_optimum():
    """A policy gradient with an entropy bonus: the optimum is softmax(advantage / bonus)."""
    size = 5
    advantage = torch.linspace(-1, 1, size, dtype=torch.float64)
    weight, hidden = (
        torch.zeros(size, 1, dtype=torch.float64, requires_grad=True),
        torch.ones(size, 1).double(),
    )
    for _ in range(400):
        log_probs, entropy = linear_log_probs(
            hidden, weight, torch.arange(size), temperature=2.0, return_entropy=True
        )
        objective = (log_probs.exp() * advantage).sum() + 0.5 * entropy.mean()
        (grad,) = torch.autograd.grad(objective, weight)
        weight.data += 8 * size * grad
    found = (weight.detach()[:, 0] / 2).softmax(0)
    torch.testing.assert_close(found, (advantage / 0.5).softmax(0), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("chunks", (1, 4))
def test_main_gradients_are_summed_over_microbatches(chunks):
    hidden, weight, target = problem()
    plain, ours = (nn.Parameter(weight.detach().clone()) for _ in range(2))
    grads = GradBuffer([("head", ours)])
    for factor in (1.0, 0.25):
        options = {"temperature": 0.7, "return_entropy": True, "workspace": -(-N // chunks) * V * 8}
        for head in (plain, ours):
            log_probs, entropy = linear_log_probs(hidden * factor, head, target, **options)
            (factor * log_probs.sum() - entropy.sum()).backward()
    assert ours.grad is None
    torch.testing.assert_close(ours.main_grad, plain.grad, **CLOSE)
    grads.remove_hooks()


@pytest.mark.parametrize("skip_ignored", (False, True))
@pytest.mark.parametrize("entropy", (False, True))
@pytest.mark.parametrize("workspace", (None, 4 * V * 8))
def test_a_second_backward_is_the_first_one_again(workspace, entropy, skip_ignored):
    """Also where the first has overwritten the logits that the forward pass kept."""
    hidden, weight, target = problem()
    options = {"temperature": 0.7, "return_entropy": entropy, "workspace": workspace}
    options["skip_ignored"] = skip_ignored
    out = linear_log_probs(hidden, weight, target, **options)
    total = sum(each.sum() for each in out) if entropy else out.sum()
    first, *others = (torch.autograd.grad(total, (hidden, weight), retain_graph=True) for _ in range(3))
    for each in others:
        torch.testing.assert_close(each, first, **CLOSE)


@pytest.mark.parametrize(("chunks", "products"), ((1, 6), (4, 8)))
def test_operations(chunks, products):
    hidden, weight = torch.randn(16, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linear_log_probs(hidden, weight, torch.arange(16), workspace=16 // chunks * V * 4).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    mine = sum(n for op, n in counts.items() if "fastmp.log_probs" not in str(op))
    assert mine == products * 16 * V * H


def test_extra_memory_is_a_tenth_of_plain_torch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 16, generator=generator).requires_grad_()
    weight = torch.randn(50304, 16, generator=generator).requires_grad_()
    target = torch.randint(50304, (2048,), generator=generator)

    def ours():
        log_probs, entropy = linear_log_probs(x, weight, target, temperature=0.8, return_entropy=True)
        return torch.autograd.grad(log_probs.sum() + entropy.sum(), (x, weight))

    assert extra_bytes(ours, "cpu") < 0.1 * 2 * 2048 * 50304 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"hidden": torch.zeros(4, 7)}, r"hidden \(4, 7\) does not fit weight \(9, 8\)"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": math.nan}, "temperature must be positive and finite, got nan"),
        (
            {"temperature": torch.ones(3)},
            r"expected temperature of shape \(4,\), one for each token, got \(3,\)",
        ),
        ({"temperature": torch.ones(4, requires_grad=True)}, "temperature requires a gradient"),
        ({"temperature": torch.tensor([1.0, 0, 1, 1])}, r"every temperature must be positive, got 0.0$"),
    ),
)
def test_mistakes_are_named_with_both_values(change, message):
    arguments = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(9, 8), "target": torch.zeros(4).long()}
    with pytest.raises(ValueError, match=f"linear_log_probs: {message}"):
        linear_log_probs(**{**arguments, **change})


def test_a_wrong_target_is_nan_where_it_is_not_looked_for():
    """As on a GPU, where looking would make the device wait: log-probability, entropy and gradient."""
    stats = torch.ops.fastmp.log_probs_stats(torch.zeros(2, 4), torch.tensor([1, 4]), None, 0, 4, True)
    logits, per_token = torch.zeros(2, 4), torch.ones(2)
    torch.ops.fastmp.log_probs_grad_(
        logits, torch.tensor([1, 4]), stats[:, 0], stats[:, 1].log(), per_token, None, None, None, 0, 4, -100
    )
    torch.testing.assert_close(logits[0], torch.tensor([-0.25, 0.75, -0.25, -0.25]))
    assert logits[1].isnan().all()
    log_probs, entropy = torch.compile(linear_log_probs, fullgraph=True, backend="aot_eager")(
        torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 4]), return_entropy=True
    )
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [False, True]
