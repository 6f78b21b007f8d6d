"""Rows that travel to their experts in FP8: the bytes of quantising after they have arrived."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from dispatcher_tools import MOST, E, K, compare_routings, routings
from marks import exhaustive, full
from moe_tools import plain_moe

from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.collectives import all_to_all
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.factory import make_dispatcher
from fastmp.nn.moe.dispatchers.fp8_rows import fp8_all_to_all, packed, unpacked
from fastmp.ops import dequantize_rows, linear_fp8, quantize_rows
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

RECIPES = pytest.mark.parametrize("recipe", [Fp8Recipe(), *full([Fp8Recipe(32)])], ids=str)


@pytest.mark.parametrize("recipe", [Fp8Recipe(), Fp8Recipe(32)], ids=str)
@pytest.mark.parametrize("multiple", [1, 16])
def test_bytes_there_and_back(recipe, multiple):
    x = torch.randn(5, 3 * recipe.block, dtype=torch.bfloat16)
    x[2] = 0
    rows, used = packed(*quantize_rows(x, block=recipe.block), multiple), x.shape[1] * 33 // 32
    assert rows.shape == (5, -(-used // multiple) * multiple)
    want = dequantize_rows(*quantize_rows(x, block=recipe.block))
    assert torch.equal(unpacked(rows, x.shape[1], recipe, x.dtype), want)
    assert not unpacked(torch.zeros_like(rows), x.shape[1], recipe, x.dtype).any()


def rounded(x, recipe):
    """Return x as FP8 keeps it."""
    return dequantize_rows(*quantize_rows(x, block=recipe.block), dtype=x.dtype)


def sent_in_fp8(x, send, receive, group, recipe):
    """Send rows, each of a token of its own."""
    row_of = torch.arange(len(x), dtype=torch.int32).view(-1, 1)
    rows = quantize_rows(x.detach(), block=recipe.block)
    return fp8_all_to_all(x, row_of, rows, send, receive, group, recipe)


def check_all_to_all(rank, world, recipe, routings):
    """Rows sent in FP8 and quantised again give the GEMMs of rows quantised where they came from."""
    group, H = dist.group.WORLD, 4 * recipe.block
    weight = QuantizedWeight(recipe)
    weight.refresh(torch.randn(2 * recipe.block, H, generator=torch.Generator().manual_seed(9)))
    for number in range(routings):
        drawn = torch.Generator().manual_seed(number)
        counts = torch.randint(0, 5, (world, world), generator=drawn)
        counts *= torch.randint(0, 2, (world, 1), generator=drawn)
        send, receive = counts[rank].tolist(), counts[:, rank].tolist()
        scale = 2.0 ** torch.randint(-20, 20, (1,), generator=drawn)
        x = scale * torch.randn(sum(send), H, generator=torch.Generator().manual_seed(1000 * number + rank))
        dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
        x = x.to(dtype).requires_grad_()
        arrived = sent_in_fp8(x, send, receive, group, recipe)
        exact = all_to_all(x.detach(), send, receive, group, check=False)
        assert torch.equal(arrived, rounded(exact, recipe))
        once, twice = (quantize_rows(rows, block=recipe.block) for rows in (exact, arrived.detach()))
        y, want = (linear_fp8(*rows, *weight.forward, out_dtype=torch.float32) for rows in (twice, once))
        assert torch.equal(y, want)
        grad = torch.randn(sum(receive), H, generator=torch.Generator().manual_seed(number)).to(dtype)
        arrived.backward(grad)
        assert torch.equal(x.grad, all_to_all(grad, receive, send, group, check=False))
    with count_collectives() as calls:
        sent_in_fp8(torch.randn(2 * world, H), [2] * world, [2] * world, group, recipe)
    assert calls.sizes == [2 * world * (H + H // 32)]  # 0.52 of BF16


@pytest.mark.parametrize("world", [2, *exhaustive([8])])
@RECIPES
def test_rows_travel_in_fp8(world, recipe):
    run_ranks(check_all_to_all, world, recipe, 200 if world == 8 else 12, timeout=240)


def check_symmetric(rank, world, layout, recipe, number, dtype):
    """Rows, outputs and gradients of both dispatchers are equal, and fewer bytes are pushed."""
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    width = 2 * recipe.block
    moe = plain_moe(top_k=K).moe
    ordinary, shared = (
        make_dispatcher(replace(moe, dispatcher=name), groups) for name in ("alltoall", "symmetric")
    )
    groups.exchange.reserve(torch.empty(MOST, width, dtype=dtype), top_k=K, experts=E)
    local = E // groups.grid.ep
    exact = []
    for fp8 in (recipe, None):  # in FP8 and in dtype by turns: they share the buffer
        ordinary.fp8 = shared.fp8 = fp8
        examples = list(routings(number, rank, width, dtype))
        compare_routings(shared, ordinary, local, examples, rtol=0, atol=0)
        exact.append(shared.dispatch(examples[0][1], shared.preprocess(*examples[0][2:4], MOST))[0])
    assert torch.equal(exact[0], rounded(exact[1], recipe))


@pytest.mark.parametrize(
    ("world", "layout", "number", "dtype"),
    [
        (4, {"ep": 2, "etp": 2}, 12, torch.bfloat16),
        *full([(4, {"ep": 4}, 48, torch.float64)]),
        *exhaustive([(8, {"ep": 8}, 200, torch.float32)]),
    ],
    ids=str,
)
@RECIPES
def test_rows_through_symmetric_memory_are_those_of_the_all_to_all(world, layout, number, dtype, recipe):
    run_ranks(check_symmetric, world, layout, recipe, number, dtype, timeout=240)
