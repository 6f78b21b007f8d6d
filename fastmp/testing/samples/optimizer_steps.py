"""Samples of the optimizer step: AdamW, and the search for a non-finite gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fastmp.ops.adamw import UNIT, split_master
from fastmp.testing.functions import OpFamily


def adamw_arguments(
    num_elements: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    steps: int = 0,
    first: int | None = None,
    scalars: bool = False,
    found_inf: bool | None = None,
    split: bool = False,
    noisy: bool = False,
) -> tuple:
    """Return arguments of `torch.ops.fastmp.adamw_` after `steps` updates, for gradients of `dtype`.

    A 16-bit dtype comes with a copy of the parameters in it. With `scalars`, learning rate and factors of
    the gradient are tensors. With `first`, the elements are of three groups, in runs of any length.
    Masters that are `split` are bfloat16 parameters and remainders; averages that are `noisy` are bfloat16.
    """
    main = torch.float64 if dtype == torch.float64 else torch.float32
    device = generator.device

    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=main, device=device)

    param, grad, exp_avg, exp_avg_sq = (
        torch.randn(num_elements, generator=generator, dtype=main, device=device) for _ in range(4)
    )
    exp_avg, exp_avg_sq = (exp_avg * 0.1, exp_avg_sq.square() * 0.01) if steps else (exp_avg * 0, exp_avg * 0)
    table: tuple = (None, None, None, 0)
    if first is not None:
        units = -(-(first % UNIT + num_elements) // UNIT)
        groups = torch.randint(0, 3, (units + 1,), generator=generator, dtype=torch.uint8, device=device)
        factors = torch.tensor([1.0, 0.0, 0.5], device=device)
        table = (groups, factors, torch.tensor([0.1, 0.2, 0.0], dtype=main, device=device), first)
    if noisy:
        exp_avg, exp_avg_sq = exp_avg.bfloat16(), exp_avg_sq.bfloat16()
    own, remainder = split_master(param) if split else (param, None)
    return (
        own,
        grad.to(dtype),
        exp_avg,
        exp_avg_sq,
        torch.tensor(steps, device=device),
        param.to(dtype) if dtype.itemsize == 2 and not split else None,
        number(3e-3) if scalars else None,
        number(0.125) if scalars else None,
        number(0.7) if scalars else None,
        None if found_inf is None else torch.tensor(found_inf, device=device),
        *(2e-3, 0.9, 0.95, 1e-8, 0.1),
        *table,
        remainder,
        0x0123456789ABCDEF,
    )


def adamw_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield first and later steps, empty and skipped ones, split masters and bfloat16 moments."""
    yield adamw_arguments(5000, dtype, generator)
    yield adamw_arguments(1031, dtype, generator, steps=7, first=61, scalars=True, found_inf=False)
    yield adamw_arguments(4096, dtype, generator, steps=1000, first=1 << 33, scalars=True)
    yield adamw_arguments(0, dtype, generator, steps=2)
    dropped = adamw_arguments(64, dtype, generator, steps=3, found_inf=True)
    dropped[1][5] = torch.nan
    yield dropped
    if dtype != torch.float64:
        yield adamw_arguments(1024, dtype, generator, steps=5, first=192, split=True, noisy=True)
        yield adamw_arguments(
            203, dtype, generator, steps=9, first=6, split=True, noisy=True, found_inf=False
        )


def finite_samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    """Yield buffers with no, one or several non-finite numbers, searched or not."""
    for size, bad, wanted in (
        (5000, {}, True),
        (5000, {4999: math.nan}, True),
        (13000, {12000: -math.inf, 4100: math.inf}, True),
        (300, {0: math.nan}, False),
        (0, {}, True),
    ):
        x = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for index, value in bad.items():
            x[index] = value
        yield x, torch.tensor(wanted)


FAMILIES = {
    "adamw": OpFamily(adamw_samples),
    "finite": OpFamily(finite_samples),
}
