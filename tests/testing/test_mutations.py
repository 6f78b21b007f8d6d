"""Every collective of a tensor- and data-parallel MLP, broken in every way: found, with the right cause."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from marks import full
from torch import nn

from fastmp.testing.differential import Subject, verify


def reduced(x: torch.Tensor, ranks, axis: str, mutation: str) -> torch.Tensor:
    """Return the sum of `x` over `axis`, or what a broken reduction makes of it."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if mutation == "dropped":
        return x
    group = ranks.group() if mutation == "all ranks" else ranks.group(axis)
    dist.all_reduce(x, group=group)
    if mutation == "twice":
        dist.all_reduce(x, group=group)
    if mutation == "negated":
        return -x
    return x / group.size() if mutation == "averaged" else x


class Region(torch.autograd.Function):
    """A reduction in the forward or in the backward pass, and the identity in the other one."""

    @staticmethod
    def forward(ctx, x, ranks, forward, backward):
        ctx.ranks, ctx.mutation = ranks, backward
        return x.view_as(x) if forward is None else reduced(x, ranks, "tp", forward)

    @staticmethod
    def backward(ctx, grad):
        grad = grad if ctx.mutation is None else reduced(grad, ctx.ranks, "tp", ctx.mutation)
        return grad, None, None, None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.ranks, self.broken = None, {}

    def forward(self, x):
        residual, x = x, self.norm(x)
        if self.ranks is None:
            return residual + self.down(torch.tanh(self.up(x)))
        x = Region.apply(x, self.ranks, None, self.broken.get("backward", ""))
        partial = torch.tanh(self.up(x)) @ self.down.weight.t()
        return (
            Region.apply(partial, self.ranks, self.broken.get("forward", ""), None)
            + self.down.bias
            + residual
        )


class Mutant(Subject):
    layouts: ClassVar = {"dp": (1, 2), "tp": (1, 2, 4)}
    placements: ClassVar = {"up.*": {"tp": 0}, "down.weight": {"tp": 1}}

    def __init__(self, **broken: str) -> None:
        self.broken = broken

    def dense(self, case):
        return MLP()

    def parallel(self, dense, ranks):
        dense.ranks, dense.broken = ranks, self.broken
        dense.up.weight = nn.Parameter(ranks.shard(dense.up.weight, "tp", 0))
        dense.up.bias = nn.Parameter(ranks.shard(dense.up.bias, "tp", 0))
        dense.down.weight = nn.Parameter(ranks.shard(dense.down.weight, "tp", 1))
        return dense

    def inputs(self, case, generator):
        return [torch.randn(case["tokens"], 4, generator=generator)]

    def synchronize(self, model, ranks):
        for param in model.parameters():
            param.grad = reduced(param.grad, ranks, "dp", self.broken.get("data", ""))


# (where, mutation, kind of the first wrong tensor, cause)
MUTATIONS = [
    ("forward", "dropped", "output", "missing all-reduce"),
    ("forward", "twice", "output", "counted n times"),
    ("forward", "averaged", "output", "divided by the group size"),
    ("forward", "negated", "output", "wrong sign"),
    ("backward", "dropped", "gradient", "missing all-reduce"),
    ("backward", "twice", "gradient", "counted n times"),
    ("backward", "averaged", "gradient", "divided by the group size"),
    ("backward", "negated", "gradient", "wrong sign"),
    ("data", "dropped", "gradient", "missing all-reduce"),
    ("data", "twice", "gradient", "counted n times"),
    ("data", "averaged", "gradient", "divided by the group size"),
]


def test_unbroken() -> None:
    assert verify(Mutant(), cases=8).smallest is None


@pytest.mark.parametrize(("where", "mutation", "kind", "cause"), [MUTATIONS[4], *full(MUTATIONS)])
def test_is_found_and_named(where: str, mutation: str, kind: str, cause: str) -> None:
    found = verify(Mutant(**{where: mutation}), cases=10).smallest
    assert found is not None
    assert (found.kind, found.cause.name) == (kind, cause), str(found)
    assert found.case.world_size == 2
    assert f"{'dp' if where == 'data' else 'tp'}" in found.cause.detail or mutation == "negated"


@pytest.mark.full
@pytest.mark.parametrize("where", ["forward", "backward", "data"])
def test_reduction_over_all_ranks_is_found(where: str) -> None:
    """Where the other axis has the same values it counts them again; else no simple relation is left."""
    found = verify(Mutant(**{where: "all ranks"}), cases=12).smallest
    assert found is not None
    assert found.kind == ("output" if where == "forward" else "gradient")
    assert found.case.world_size >= 2
