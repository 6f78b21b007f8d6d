"""Loss and gradient from one launch, where the gradient of each token's loss is known beforehand."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import full
from torch import Tensor
from torch.testing import assert_close

from fastmp.ops import OPS, cross_entropy
from fastmp.testing.functions import Draw, functions

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MARGIN = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def case(tokens: int = 9, columns: int = 33, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + columns)
    logits = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) * 3
    return logits.to(dtype), torch.randint(columns, (tokens,), generator=generator)


def draws_agree(source: random.Random, dtype: torch.dtype, loss_margin: float = 0.0, **options) -> None:
    """A single launch gives the loss of two, in C++ to the bit, and their gradient but for rounding."""
    draw = Draw(source, dtype, **options)
    (logits, target), keywords = functions()["cross_entropy"].draw(draw)
    loss = cross_entropy(logits, target, **keywords)
    loss_grad = draw.tensor(*target.shape, grad=False).nan_to_num(1, 1, 1).to(loss.dtype)
    (grad,) = torch.autograd.grad(loss, logits, loss_grad)
    own = logits.detach().clone().requires_grad_()
    once = cross_entropy(own if draw.flag() else own * 1, target, loss_grad=loss_grad, **keywords)
    (at_once,) = torch.autograd.grad(once, own, loss_grad)
    assert_close(once, loss, rtol=loss_margin, atol=loss_margin, equal_nan=True)
    scale = grad.abs().nan_to_num(0).amax().item() if grad.numel() else 0.0
    assert_close(at_once, grad, rtol=MARGIN[dtype], atol=MARGIN[dtype] * scale, equal_nan=True)


@settings(max_examples=200)
@given(source=st.randoms(use_true_random=False), dtype=st.sampled_from(DTYPES))
def test_equals_two_launches(source, dtype):
    draws_agree(source, dtype, special=dtype == torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_two_launches_on_many_columns(dtype):
    for seed in range(4):
        draws_agree(random.Random(seed), dtype, large=True)


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(4))
def test_equals_two_launches_in_triton(seed):
    draws_agree(random.Random(seed), torch.float32, loss_margin=1e-6, small=True)


def test_rows_whose_logits_climb():
    """A later logit far above the first ones moves what exponentials are relative to."""
    logits, target = case(4, 5000)
    logits[1] += torch.linspace(-100, 100, 5000)
    logits[2] = -torch.inf
    logits[2, 4000:] = 1.0
    target[2] = 4500
    truth = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(truth, target, reduction="sum").backward()
    loss = cross_entropy(logits.requires_grad_(), target, loss_grad=torch.ones(4), reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert_close(grad.double(), truth.grad, rtol=1e-5, atol=1e-7)


def test_the_gradient_is_where_the_logits_were():
    logits, target = case(12)
    expected = torch.autograd.grad(
        cross_entropy(logits.requires_grad_(), target, reduction="none").sum(), logits
    )[0]
    for shape in ((12, 33), (3, 4, 33)):
        for folded in (shape, (12, 33), (2, 6, 33)):
            hidden = logits.detach().view(shape).clone().requires_grad_()
            own = hidden * 1
            rows = own if folded == shape else own.view(folded)
            loss = cross_entropy(
                rows, target.view(folded[:-1]), loss_grad=torch.ones(folded[:-1]), reduction="none"
            )
            (grad,) = torch.autograd.grad(loss.sum(), hidden)
            assert torch.equal(own, grad) and grad.shape == shape
            assert_close(grad.view(12, 33), expected, rtol=1e-5, atol=1e-7)
    leaf = logits.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        cross_entropy(leaf, target, loss_grad=torch.ones(12), reduction="none").sum(), leaf
    )
    assert grad.data_ptr() == leaf.data_ptr()


def test_logits_that_had_to_be_copied_stay():
    logits, target = case()
    apart = logits.t().contiguous().t().requires_grad_()
    loss = cross_entropy(apart, target, loss_grad=torch.ones(9), reduction="none")
    torch.autograd.grad(loss.sum(), apart)
    assert torch.equal(apart, logits)


def test_without_a_gradient_nothing_is_overwritten():
    logits, target = case()
    expected = cross_entropy(logits, target, reduction="none")
    kept = logits.clone()
    assert torch.equal(cross_entropy(logits, target, loss_grad=torch.ones(9), reduction="none"), expected)
    with torch.no_grad():
        needing = logits.requires_grad_()
        assert torch.equal(
            cross_entropy(needing, target, loss_grad=torch.ones(9), reduction="none"), expected
        )
    assert torch.equal(logits, kept)


def backward_of(change, *, before: bool = False, after: bool = False, view: bool = False) -> None:
    """Sends `change` of the expected upstream gradient through logits that others may use, too."""
    hidden, target = case()
    target[2] = -100
    expected = torch.linspace(0.5, 1.5, 9)
    logits = hidden.requires_grad_() * 2
    used = logits.square().sum() if before else 0.0
    rows = logits.view(3, 3, 33) if view else logits
    shape = rows.shape[:-1]
    loss = cross_entropy(rows, target.view(shape), loss_grad=expected.view(shape), reduction="none")
    used = used + (logits.square().sum() if after else 0.0)
    # (loss * x).sum() sends x back, and `used` its own gradient
    (loss.view(9) * change(expected.clone())).sum().add(used).backward()


def test_another_upstream_gradient_is_an_error():
    def of_token(token, factor):
        def change(grad):
            grad[token] *= factor
            return grad

        return change

    backward_of(of_token(2, 7.0))  # the token is ignored
    backward_of(of_token(3, 1 + 2**-22))  # rounding
    for factor in (1 + 1e-5, 0.0, -1.0, float("nan")):
        with pytest.raises(RuntimeError, match="other than the loss_grad"):
            backward_of(of_token(3, factor))


@pytest.mark.parametrize("view", [False, True])
def test_who_saved_the_logits_is_told(view):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_of(lambda grad: grad, before=True, view=view)


@pytest.mark.parametrize("view", [False, True])
def test_who_computes_with_the_overwritten_logits_is_told(view):
    with pytest.raises(RuntimeError, match="cross_entropy_loss_grad_: an argument is overwritten, but was"):
        backward_of(lambda grad: grad, after=True, view=view)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_the_gradient_exists_once(retain_graph):
    hidden, target = case()
    loss = cross_entropy(hidden.requires_grad_() * 2, target, loss_grad=torch.ones(9), reduction="none").sum()
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match=r"cross_entropy_loss_grad_: .* there is no second backward"):
        loss.backward()


def test_nothing_but_the_logits_and_two_numbers_a_token_are_kept():
    logits, target = case(64, 1000, torch.bfloat16)
    logits = logits.requires_grad_() * 1
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy(logits, target, loss_grad=torch.ones(64), token_weight=torch.ones(64), reduction="none")
    own = [t for t in kept if t.data_ptr() != logits.data_ptr()]
    assert len(kept) == 3 and sum(t.numel() for t in own) == 2 * 64


@pytest.mark.parametrize("backend", ["aot_eager", *full(["inductor"])])
def test_compiles_into_one_graph(backend):
    hidden, target = case()
    expected = torch.rand(9)

    def step(hidden, target, factor):
        logits = hidden * 2
        return (
            cross_entropy(
                logits, target, loss_grad=expected, label_smoothing=0.1, z_loss=1e-3, reduction="none"
            )
            * factor
        )

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = []
    for function in (step, compiled):
        leaf = hidden.clone().requires_grad_()
        loss = function(leaf, target, 1.0)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf, expected)))
    assert_close(results[0], results[1], rtol=0, atol=0)
    leaf = hidden.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="other than the loss_grad"):
        torch.autograd.grad(compiled(leaf, target, 2.0), leaf, expected)


def test_never_waits_for_the_device():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        logits = torch.empty(4, 5, 100, dtype=torch.bfloat16, device="meta", requires_grad=True)
        target = torch.empty(4, 5, dtype=torch.int64, device="meta")
        loss_grad = torch.empty(4, 5, device="meta")
        loss = cross_entropy(logits, target, loss_grad=loss_grad, reduction="none")
        (grad,) = torch.autograd.grad(loss, logits, loss_grad)
        assert grad.shape == logits.shape and grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_grad": torch.ones(3)}, r"expected loss_grad of shape \(4,\), like target, got \(3,\)"),
        ({"loss_grad": torch.ones(4, requires_grad=True)}, "loss_grad requires a gradient"),
        ({"logits": torch.zeros(1, 6, requires_grad=True).expand(4, 6)}, "loss_grad needs rows that do not"),
        ({"target": torch.tensor([0, 6, 0, 0])}, "target 6 is outside the vocabulary of 6"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "logits": torch.zeros(4, 6, requires_grad=True),
        "target": torch.zeros(4, dtype=torch.int64),
        "loss_grad": torch.ones(4),
        **change,
    }
    with pytest.raises(ValueError, match=f"cross_entropy: {message}"):
        cross_entropy(arguments.pop("logits"), arguments.pop("target"), **arguments, reduction="none")


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["loss_grad", "token_weight"])
def test_a_number_is_no_tensor(name, recorded):
    logits, target = torch.zeros(4, 6, requires_grad=recorded), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"cross_entropy: {name} must be a tensor of shape \(4,\), got 0.5"):
        cross_entropy(logits, target, **{name: 0.5}, reduction="none")


def test_costs_are_one_read_and_one_write():
    logits, target, ones = torch.zeros(8, 100, dtype=torch.bfloat16), torch.zeros(8).long(), torch.ones(8)
    arguments = (logits, target, ones, ones, 90, -100, 0.1, 0.0)
    op = OPS["cross_entropy_loss_grad_"]
    assert op.traffic(*arguments) == 8 * (200 * 2 + 8 + 3 * 4)
    assert op.flops(*arguments) == 8 * 90 * 10


@pytest.mark.full
def test_inductor_makes_one_buffer_of_the_size_of_the_logits():
    from torch._inductor.utils import run_and_get_code

    hidden, target = case(64, 16)
    weight = torch.randn(16, 1000)

    def step(hidden):
        return cross_entropy(hidden @ weight, target, loss_grad=torch.ones(64), reduction="none").sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True)
    _, sources = run_and_get_code(lambda: compiled(hidden.requires_grad_()).backward())
    source = "\n".join(sources)
    assert source.count("empty_strided_cpu((64, 1000)") == 1 and "clone" not in source
