"""Each collective against its definition, forward and backward, and the collectives it launches."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rank_cases import in_turn
from torch._dynamo.backends.common import aot_autograd

from fastmp.distributed.collectives import (
    all_reduce_,
    all_to_all,
    copy_to_group,
    gather_from_group,
    gather_sequence,
    group_rank,
    group_size,
    reduce_from_group,
    reduce_scatter_sequence,
    split_to_group,
)
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks


def exchange(x, group, **options):
    """An all-to-all of equal parts."""
    size = group_size(group)
    parts = [x.shape[0] // size] * size
    return all_to_all(x, parts, parts, group, check=False, **options)


# Every function, what it launches forward and backward, and what it computes: from the list of all ranks'
# inputs (or gradients) and this rank, this rank's output (or input gradient).
FUNCTIONS = {
    "copy": (copy_to_group, {}, {"all_reduce": 1}, lambda x, r: x[r], lambda g, r: sum(g)),
    "reduce": (reduce_from_group, {"all_reduce": 1}, {}, lambda x, r: sum(x), lambda g, r: g[r]),
    "split": (
        split_to_group,
        {},
        {"all_gather": 1},
        lambda x, r: x[r].chunk(len(x), -1)[r],
        lambda g, r: torch.cat(g, -1),
    ),
    "gather": (
        gather_from_group,
        {"all_gather": 1},
        {},
        lambda x, r: torch.cat(x, -1),
        lambda g, r: g[r].chunk(len(g), -1)[r],
    ),
    "split dim 1": (
        lambda x, group: split_to_group(x, group, 1),
        {},
        {"all_gather": 1},
        lambda x, r: x[r].chunk(len(x), 1)[r],
        lambda g, r: torch.cat(g, 1),
    ),
    "gather dim 0": (
        lambda x, group: gather_from_group(x, group, 0),
        {"all_gather": 1},
        {},
        lambda x, r: torch.cat(x),
        lambda g, r: g[r].chunk(len(g))[r],
    ),
    "all to all": (
        exchange,
        {"all_to_all": 1},
        {"all_to_all": 1},
        lambda x, r: torch.cat([part.chunk(len(x))[r] for part in x]),
        lambda g, r: torch.cat([part.chunk(len(g))[r] for part in g]),
    ),
    "gather_sequence": (
        gather_sequence,
        {"all_gather": 1},
        {"reduce_scatter": 1},
        lambda x, r: torch.cat(x),
        lambda g, r: sum(g).chunk(len(g))[r],
    ),
    "reduce_scatter_sequence": (
        reduce_scatter_sequence,
        {"reduce_scatter": 1},
        {"all_gather": 1},
        lambda x, r: sum(x).chunk(len(x))[r],
        lambda g, r: torch.cat(g),
    ),
}
for name in ("all to all", "gather_sequence", "reduce_scatter_sequence"):
    function, *definition = FUNCTIONS[name]
    FUNCTIONS[f"{name}, own stream"] = (partial(function, own_stream=True), *definition)
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "slice of a wider tensor": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


def all_inputs(world_size: int, shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(world_size)]


def check_definition(rank, world_size, name):
    function, launched, launched_backward, forward, backward = FUNCTIONS[name]
    group = dist.group.WORLD
    for layout, arrange in LAYOUTS.items():
        inputs = all_inputs(world_size, (4, 8, 12), seed=1)
        x = arrange(inputs[rank]).requires_grad_()
        with count_collectives() as seen:
            y = function(x, group)
        assert seen.counts == launched, (layout, seen.calls)
        torch.testing.assert_close(y, forward(inputs, rank), rtol=0, atol=1e-12)
        assert torch.equal(x, inputs[rank]), f"{layout}: the caller's tensor was modified"

        grads = all_inputs(world_size, tuple(y.shape), seed=2)
        grad = arrange(grads[rank])
        with count_collectives() as seen:
            (grad_x,) = torch.autograd.grad(y, x, grad)
        assert seen.counts == launched_backward, (layout, seen.calls)
        torch.testing.assert_close(grad_x, backward(grads, rank), rtol=0, atol=1e-12)
        assert torch.equal(grad, grads[rank]), f"{layout}: the caller's gradient was modified"


@pytest.mark.parametrize("world_size", [2, 4])
def test_forward_and_backward(world_size):
    run_ranks(in_turn, world_size, check_definition, [(name,) for name in FUNCTIONS])


def check_second_derivative(rank, world_size):
    """Differentiate sum(f(x)^3) twice: f is linear, so its pair is used once more."""
    for function, _, _, _, _ in FUNCTIONS.values():
        x = torch.randn(4, 8, 12, dtype=torch.float64, requires_grad=True)
        y = function(x, dist.group.WORLD)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.shape == x.shape and second.abs().sum() > 0


def test_twice_differentiable():
    run_ranks(check_second_derivative, 2)


def check_dtypes(rank, world_size):
    group = dist.group.WORLD
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.full((4, 4), 1.0 + rank, dtype=dtype)
        assert torch.equal(reduce_from_group(x, group), torch.full((4, 4), 3.0, dtype=dtype))
        assert torch.equal(reduce_scatter_sequence(x, group), torch.full((2, 4), 3.0, dtype=dtype))
        assert gather_from_group(x, group)[0].tolist() == [1.0] * 4 + [2.0] * 4
    empty = torch.empty(0, 3)
    for function in (reduce_from_group, gather_sequence, reduce_scatter_sequence):
        assert function(empty, group).shape == (0, 3)


def test_dtypes_and_empty():
    run_ranks(check_dtypes, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_group_is_this_rank_alone(name):
    x = torch.randn(4, 8, 12, requires_grad=True)
    with count_collectives() as seen:
        assert FUNCTIONS[name][0](x, None) is x
    assert seen.counts == {}
    assert (group_size(None), group_rank(None)) == (1, 0)


def check_errors(rank, world_size):
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"split_to_group: dimension -1 has size 5, which a group of 2"):
        split_to_group(torch.ones(2, 5), group)
    with pytest.raises(ValueError, match=r"reduce_scatter_sequence: dimension 0 has size 3, which a group"):
        reduce_scatter_sequence(torch.ones(3, 2), group)
    with pytest.raises(ValueError, match=r"all_reduce_: a tensor of shape \(2, 3\) and strides \(1, 2\)"):
        all_reduce_(torch.ones(3, 2).t(), group)


def test_errors_name_the_sizes():
    run_ranks(check_errors, 2)


def check_all_to_all(rank, world_size):
    """Rank r sends (r + 2 s) % 3 rows to rank s: none at all between some."""
    sizes = [[(r + 2 * s) % 3 for s in range(world_size)] for r in range(world_size)]
    sizes[1] = [0] * world_size  # a rank with nothing to send
    sent, received = sizes[rank], [row[rank] for row in sizes]
    x = (
        torch.tensor(
            [[100.0 * rank + 10 * s + i, 1.0] for s in range(world_size) for i in range(sent[s])],
            dtype=torch.float64,
        )
        .view(-1, 2)
        .requires_grad_()
    )
    with count_collectives() as seen:
        y = all_to_all(x, sent, received, dist.group.WORLD)
    expected = [100.0 * s + 10 * rank + i for s in range(world_size) for i in range(received[s])]
    assert y[:, 0].tolist() == expected
    assert set(seen.counts) == {"all_to_all", "all_gather"}
    with count_collectives() as seen:
        y = all_to_all(x, sent, received, dist.group.WORLD, check=False)
        y.mul(torch.arange(len(y), dtype=torch.float64).unsqueeze(1)).sum().backward()
    assert seen.counts == {"all_to_all": 2}
    places = torch.arange(len(y), dtype=torch.float64).unsqueeze(1).expand(-1, 2).contiguous()
    assert torch.equal(x.grad, all_to_all(places, received, sent, dist.group.WORLD))
    for dtype in (torch.bfloat16, torch.float16, torch.int32):
        z = all_to_all(x.detach().to(dtype), sent, received, dist.group.WORLD)
        assert torch.equal(z, y.detach().to(dtype))
    return rank


@pytest.mark.parametrize("world_size", (2, 4))
def test_all_to_all_of_unequal_parts(world_size):
    run_ranks(check_all_to_all, world_size)


def check_sizes(rank, world_size):
    """Every rank gets the same error, and none is left waiting."""
    group, x = dist.group.WORLD, torch.ones(3, 2)
    wrong = {
        r"all_to_all: rank 0 of the group sends 2 rows to rank 1, which expects 1; send_sizes are "
        r"\[\[1, 2\], \[1, 2\]\], receive_sizes \[\[1, 1\], \[1, 2\]\]": ([1, 2], [1, 1 + rank]),
        r"all_to_all: on rank 1 of the group send_sizes \[1, 3\] sum to 4, but x has 3": (
            [1, 2 + rank],
            [1, 2],
        ),
        r"all_to_all: on rank 1 of the group send_sizes \[-1, 4\] and receive_sizes \[1, 1\] must not be": (
            [1, 2] if rank == 0 else [-1, 4],
            [1, 1],
        ),
        r"all_to_all: on rank 0 of the group send_sizes \[3\] and receive_sizes .* one number for each of": (
            [3],
            [1, 2],
        ),
    }
    for message, (send, receive) in wrong.items():
        with pytest.raises(ValueError, match=message):
            all_to_all(x, send, receive, group)
    with pytest.raises(ValueError, match="sum to 4, but x has 3 rows"):
        all_to_all(x, [1, 3], [2, 2], group, check=False)
    with pytest.raises(ValueError, match="rank 0 sends 3 rows to itself and expects 2"):
        all_to_all(x, [3], [2], None)


def test_all_to_all_refuses_sizes_that_disagree():
    run_ranks(check_sizes, 2)


def check_traced(rank, world_size):
    """One graph, without a break; the collectives are ops in the traced forward and backward."""
    graphs = []

    def keep(graph, inputs):
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([t.__name__.split(".")[0] for t in targets if "_c10d_functional" in str(t)])
        return graph.forward

    for name, (function, launched, launched_backward, _, _) in FUNCTIONS.items():
        x = torch.randn(4, 8, 12, dtype=torch.float64, requires_grad=True)
        eager = function(x.sin(), dist.group.WORLD)
        (eager_grad,) = torch.autograd.grad(eager.pow(2).sum(), x)
        graphs.clear()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, f=function: f(x.sin(), dist.group.WORLD),
            fullgraph=True,
            backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
        )
        y = compiled(x)
        (grad,) = torch.autograd.grad(y.pow(2).sum(), x)
        assert torch.equal(y, eager) and torch.equal(grad, eager_grad), name
        traced = [
            [re.sub("_into_tensor|_tensor|_single", "", op) for op in graph if op != "wait_tensor"]
            for graph in graphs
        ]
        assert traced == [list(launched), list(launched_backward)], (name, graphs)


@pytest.mark.full
def test_traceable(warm_compiler):
    run_ranks(check_traced, 2, timeout=240)


class Between(torch.nn.Module):
    """A collective with a pointwise op before and after it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.sin(), dist.group.WORLD).cos()


def check_exported(rank, world_size):
    """An exported program holds the collective as an op, waits for it, and computes what eager does."""
    for name, (function, launched, *_) in FUNCTIONS.items():
        model, x = Between(function), torch.randn(4, 8, 12, dtype=torch.float64)
        program = torch.export.export(model, (x,), strict=False)
        assert torch.equal(program.module()(x), model(x)), name
        ops = [str(node.target) for node in program.graph.nodes if "_c10d_functional" in str(node.target)]
        assert [re.sub("_into_tensor|_tensor|_single", "", op.split(".")[1]) for op in ops] == [
            op for collective in launched for op in (collective, "wait")
        ], (name, ops)


def test_exportable(warm_compiler):
    run_ranks(check_exported, 2, timeout=240)
