"""Exact products and sums, and the mode that serves torch's products by them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastmp.ops import batch_invariant, exact, linear_log_probs
from fastmp.ops.attention import attend


def draw(*shape, seed=0):
    """Numbers whose exponents lie far apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.randn(shape, generator=generator).mul(3).exp()


def test_products_depend_on_no_order():
    a, b = draw(7, 300).double(), draw(5, 300, seed=1).double()
    of_a, of_b = exact.exponents(a), exact.exponents(b)
    parts = exact.integer_products(a, b, of_a, of_b)
    assert all(torch.equal(part, part.round()) and part.abs().max() < 2**53 for part in parts)
    for order in (torch.randperm(300), torch.arange(300).flip(0)):
        halves = [
            exact.integer_products(a[:, own], b[:, own], of_a, of_b) for own in (order[:77], order[77:])
        ]
        assert all(torch.equal(x + y, want) for x, y, want in zip(*halves, parts, strict=True))


def test_the_largest_sums_do_not_round():
    """All slices full, as many terms as there may be: sums of 2^52 and more."""
    a = torch.full((1, exact.MOST), 1 - 2.0**-40, dtype=torch.float64)
    main, rest = exact.integer_products(a, a, exact.exponents(a), exact.exponents(a))
    assert main.item() == exact.MOST * 2 ** (2 * exact.BITS)
    b = torch.full((1, exact.MOST), 1 - 2.0**-19, dtype=torch.float64)
    main, rest = exact.integer_products(b, b, exact.exponents(b), exact.exponents(b))
    high, low = exact.slices(b[:, :1], exact.exponents(b))
    assert main.item() == exact.MOST * int(high) ** 2 and rest.item() == exact.MOST * 2 * int(high) * int(low)
    with pytest.raises(ValueError, match=f"at most {exact.MOST} terms of a dot product"):
        exact.exact_product(torch.zeros(1, exact.MOST + 1), torch.zeros(1, exact.MOST + 1))


def test_products_are_more_accurate_than_those_of_float32():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 500, generator=generator) for rows in (33, 20))
    truth = a.double() @ b.double().T
    assert (exact.exact_product(a, b) - truth).abs().max() < 1e-8 < (a @ b.T - truth).abs().max()
    # of any numbers, the bound of the module's docstring
    a, b = draw(33, 500), draw(20, 500, seed=1)
    largest = a.abs().amax(1).double()[:, None] * b.abs().amax(1).double()
    error = (exact.exact_product(a, b) - a.double() @ b.double().T).abs()
    assert (error <= 2.0**-33 * 500 * largest).all()


def test_exponential_and_logarithm():
    x = -torch.rand(10000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 600
    torch.testing.assert_close(exact.exp(x), x.exp(), rtol=1e-14, atol=0)
    assert exact.exp(torch.tensor([0.0, -0.0, -torch.inf, -691]).double()).tolist() == [1, 1, 0, 0]
    y = (x / 10).exp() * 1e10
    torch.testing.assert_close(exact.log(y), y.log(), rtol=1e-14, atol=1e-15)
    assert exact.log(torch.ones(1).double()).item() == 0
    assert torch.equal(exact.exp(x)[-3:], exact.exp(x[-3:])) and torch.equal(
        exact.log(y)[-3:], exact.log(y[-3:])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_rows_depend_on_themselves_alone(seed, dtype):
    """Products, softmax and attention of random batches."""
    x, w, bias = (
        draw(*shape, seed=seed + i).to(dtype) for i, shape in enumerate(((37, 65), (29, 65), (29,)))
    )
    q = draw(2, 4, 9, 16, seed=seed).to(dtype)
    functions = {
        "linear": lambda rows: F.linear(x[rows], w, bias),
        "3-dimensional": lambda rows: F.linear(x[rows, None], w)[:, 0],
        "mm": lambda rows: x[rows] @ w.t(),
        "bmm": lambda rows: torch.bmm(x[rows].expand(2, -1, -1), w.t().expand(2, -1, -1))[1],
        "softmax": lambda rows: x[rows].softmax(-1),
        "log_softmax": lambda rows: x[rows].log_softmax(-1),
        "sigmoid": lambda rows: x[rows].sigmoid(),
        "log_probs": lambda rows: linear_log_probs(x[rows], w, torch.arange(37)[rows] % 29, temperature=0.7),
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), batch_invariant():
        for name, function in functions.items():
            want = function(torch.arange(37))
            for size in (1, 2, 13):
                rows = torch.randperm(37, generator=generator)[:size]
                assert torch.equal(function(rows), want[rows]), name
        want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        for end in (1, 2, 7):
            found = F.scaled_dot_product_attention(*[q[1:, :, :end]] * 3, is_causal=True)
            assert torch.equal(found, want[1:, :, :end])
            mask = (torch.arange(9) < end).expand(1, 9)
            found = F.scaled_dot_product_attention(q[:, :, end - 1 : end], q, q, attn_mask=mask)
            assert torch.equal(found[:, :, 0], want[:, :, end - 1])


def test_attention_of_three_dimensions_and_of_groups():
    torch.manual_seed(0)
    seen = torch.rand(2, 8, 4) > 0.5
    seen[..., 0] = True
    for q, k, options in (
        (torch.randn(2, 8, 4), torch.randn(2, 4, 4), {"attn_mask": seen}),
        (torch.randn(2, 4, 8, 4), torch.randn(2, 2, 8, 4), {"is_causal": True, "enable_gqa": True}),
    ):
        want = F.scaled_dot_product_attention(q, k, k, **options)
        with batch_invariant():
            found = F.scaled_dot_product_attention(q, k, k, **options)
        torch.testing.assert_close(found, want)


def test_results_are_those_outside_the_mode():
    generator, target = torch.Generator().manual_seed(0), torch.arange(17)
    x, w = (torch.randn(rows, 20, generator=generator) for rows in (17, 30))
    w /= 4
    target[3] = -100

    def results():
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        q = F.linear(*leaves).view(1, 17, 2, 15).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        log_probs, entropy = linear_log_probs(
            *leaves, target, temperature=0.8, return_entropy=True, vocab_size=28
        )
        total = attended.sum() + log_probs.sum() - entropy.sum()
        return attended, log_probs, entropy, *torch.autograd.grad(total, leaves)

    want = results()
    with batch_invariant():
        found = results()
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(F.linear(x, w), F.linear(x, w))  # nothing stays


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.zeros(2, 2).double() @ torch.zeros(2, 2).double(), "got torch.float64 on cpu"),
        (
            lambda: attend(*[torch.zeros(1, 1, 2, 8)] * 3, dropout_p=0.1),
            "attention dropout is not supported, got 0.1",
        ),
    ],
)
def test_mistakes(call, message):
    with batch_invariant(), pytest.raises(ValueError, match=message):
        call()
