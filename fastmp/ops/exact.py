"""Dot products and sums whose bits depend on no order: of tiles, of threads, of ranks.

A row of numbers is cut into two slices of 18 bits below its largest exponent, as integers in float64.
Products of slices and their sums then are integers below 2^53, which float64 adds without rounding, so every
GEMM, of any library, returns the same bits for a row, whatever other rows, columns or padding there are (K.
Ozaki et al., "Error-free transformations of matrix multiplication", 2012). What lies 36 bits below the
largest number of a row is rounded away first, and results are rounded once: a product of K terms is off by
at most 2^-33 K times the largest numbers of both rows, less than by float32 unless numbers of a row lie more
than 2^12 apart.

Exponential and logarithm are made of additions and multiplications, as the vectors and the remainders of a
library's loops may differ in their last bits. Arguments and results are float64 unless noted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BITS = 18  # of a slice
MOST = 1 << (52 - 2 * BITS)  # terms of a dot product
SUM_BITS = 35  # of the terms of `exact_sum`, which are at most 1
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # with 32 bits: its products with integers are exact
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent for int64 exponents within [-1022, 1023]."""
    return (exponent + 1023).bitwise_left_shift(52).view(torch.float64)


def exponents(x: Tensor) -> Tensor:
    """Return the least e (..., 1), int64, such that all numbers of a row of x (..., K) are below 2^e."""
    if x.shape[-1] == 0:
        return x.new_zeros(*x.shape[:-1], 1, dtype=torch.int64)
    largest = x.abs().amax(-1, keepdim=True)
    return torch.frexp(largest).exponent.long().clamp(-400, 400)


def slices(x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Cut x (..., K) into two integers of `BITS` bits: x = (high + low / 2^BITS) 2^(exponent - BITS)."""
    scaled = x * power_of_two(BITS - exponent)
    high = scaled.round()
    return high, ((scaled - high) * (1 << BITS)).round()


def integer_products(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two exact integer parts (..., M, N) of a (..., M, K) times b (..., N, K).

    Parts over disjoint columns K, with the same exponents, add up exactly in any order.
    """
    if a.shape[-1] > MOST:
        raise ValueError(
            f"batch_invariant: expected at most {MOST} terms of a dot product, got {a.shape[-1]}"
        )
    (high_a, low_a), (high_b, low_b) = slices(a, of_a), slices(b, of_b)
    main = high_a @ high_b.mT
    return main, torch.cat((high_a, low_a), -1) @ torch.cat((low_b, high_b), -1).mT


def from_integers(main: Tensor, rest: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    """Return the products whose parts these are."""
    return (main + rest * 2.0**-BITS) * power_of_two(of_a + of_b.mT - 2 * BITS)


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a (..., M, K) times the transpose of b (..., N, K): (..., M, N)."""
    a, b = a.double(), b.double()
    of_a, of_b = exponents(a), exponents(b)
    return from_integers(*integer_products(a, b, of_a, of_b), of_a, of_b)


def exact_sum(x: Tensor) -> Tensor:
    """Sum x (..., K), at most 1 each, over the last dimension; sums of parts add up exactly."""
    return (x * 2.0**SUM_BITS).round().sum(-1) * 2.0**-SUM_BITS


def exp(x: Tensor) -> Tensor:
    """Return exp(x) for x of at most 0; 0 below -690."""
    bounded = x.clamp(min=-700.0)
    # 1. x = n log 2 + r, with r within half of log 2
    n = (bounded * (1 / math.log(2))).round()
    r = (bounded - n * LN2_HIGH) - n * LN2_LOW
    # 2. The series of exp(r)
    total = torch.full_like(r, 1 / math.factorial(14))
    for power in range(13, -1, -1):
        total = total * r + 1 / math.factorial(power)
    return (total * power_of_two(n.nan_to_num().long())).masked_fill(x < -690.0, 0)


def log(x: Tensor) -> Tensor:
    """Return log(x) for positive, finite x."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    n = exponent.double() - small.double()
    # log m = 2 artanh(f), with f = (m - 1) / (m + 1) within 0.172
    f = (mantissa - 1) / (mantissa + 1)
    square, total = f * f, torch.full_like(f, 1 / 23)
    for power in range(21, 0, -2):
        total = total * square + 1 / power
    return n * LN2_HIGH + (n * LN2_LOW + 2 * f * total)


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, scale: float
) -> Tensor:
    """Return the attention (B, N, C, V).

    Args:
        q: (B, N, C, D).
        k, v: (B, N, E, D) and (B, N, E, V).
        bias: added to the scores, broadcastable to (B, N, C, E); -inf where a query does not see a key.
        sinks: logits that only count in the denominators, broadcastable to (N, C).
    """
    # 1. Scores, and their exponentials relative to the largest
    scores = exact_product(q, k) * scale
    scores = scores if bias is None else scores + bias
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.double().unsqueeze(-1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -torch.inf, 0)
    p = exp(scores - top)
    total = exact_sum(p)
    if sinks is not None:
        total = total + exact_sum(exp(sinks - top))
    # 2. Their sum of values. Exponents of a key's value go to its weight: of keys that a query does not see,
    # weights are zero, and nothing depends on their values.
    v = v.double()
    of_v = exponents(v)
    weights = p * power_of_two(of_v).mT
    of_p, of_one = exponents(weights), of_v.new_zeros(1, 1)
    parts = integer_products(weights, (v * power_of_two(-of_v)).mT, of_p, of_one)
    return from_integers(*parts, of_p, of_one) / total.masked_fill(total == 0, 1)[..., None]
