"""Experts with a stash compute what others do, bit for bit, whatever lies in the ring."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from marks import full
from moe_tools import make_moe, with_moe

from fastmp.config import ACTIVATIONS
from fastmp.config.specs import ActivationSpec
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.activation_stash import ActivationStash
from fastmp.nn.recompute import recompute
from fastmp.nn.segment import rerunning
from fastmp.ops.stash import HEAD, TAIL
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.status import process_status
from fastmp.testing.ranks import run_ranks

S, B, H = 6, 2, 16


def hidden(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    scale = 5.0 if number == 1 else 1.0  # an uneven load
    return (scale * torch.randn(S, B, H, generator=generator, dtype=torch.float64)).requires_grad_()


def layers_of(config, groups, dispatcher, stash=None, **placement):
    made = []
    for number in range(2):
        torch.manual_seed(number)
        moe = replace(config.moe, dispatcher=dispatcher)
        layer = make_moe(replace(config, moe=moe), groups, **placement)
        layer.stash = stash
        made.append(layer)
    return made


def run(layers, rank, order, *, deferred=False, main_grad=False, recomputed=False):
    """Outputs and gradients of microbatches: forwards "f" and backwards "b" (weights "w") as `order` says."""
    in_flight, seen, tasks = {}, [], {}
    for layer in layers:
        for param in layer.parameters():
            param.grad = None
            if main_grad:
                param.main_grad = torch.zeros_like(param)
    for kind, number in order:
        queue = WgradQueue() if deferred else None
        if kind == "f":
            x = hidden(rank, number)
            y, aux = x, 0.0
            with defer_wgrad(tasks.setdefault(number, WgradQueue()) if deferred else None):
                for layer in layers:
                    through = (lambda h, own=layer: recompute(own, h, rng=None)) if recomputed else layer
                    y, more, _ = through(y)
                    aux = aux + more
            in_flight[number] = x, y, aux
            seen.append(y.detach().clone())
        elif kind == "b":
            x, y, aux = in_flight.pop(number)
            with defer_wgrad(tasks.get(number, queue)):
                ((y * y).sum() + aux).backward()
            seen.append(x.grad)
        else:
            WgradQueue.run(tasks.pop(number).take())
    for layer in layers:
        for param in layer.parameters():
            seen.append(param.main_grad if main_grad else param.grad)
    return seen


ONE = [("f", 0), ("b", 0), ("f", 1), ("b", 1)]
PIPELINED = [("f", 0), ("f", 1), ("f", 2), ("b", 0), ("f", 3), ("b", 1), ("b", 2), ("b", 3)]
SPLIT = [
    *(("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("w", 0), ("f", 3), ("b", 2), ("w", 1)),
    *(("b", 3), ("w", 2), ("w", 3)),
]
CASES = {
    "one": (ONE, {}),
    "pipelined": (PIPELINED, {}),
    "main gradients": (PIPELINED, {"main_grad": True}),
    "deferred": (SPLIT, {"deferred": True}),
    "deferred, main gradients": (SPLIT, {"deferred": True, "main_grad": True}),
    "recomputed": (PIPELINED, {"recomputed": True}),
}


def bitwise_case(rank, world, layout, cases, options, activation="swiglu"):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    if activation not in ACTIVATIONS:  # one that no grouped GEMM has in its epilogue
        ACTIVATIONS.register(ActivationSpec(activation, f"stash_tools:{activation}"))
    config = replace(with_moe(**options), activation=activation)
    for name in cases:
        order, how = CASES[name]
        expected = run(layers_of(config, groups, "alltoall"), rank, order, **how)
        entries = 2 * 4
        sizes = []

        def size(balanced, capacity, sizes=sizes, entries=entries):
            sizes.append((balanced, capacity))
            return entries * capacity

        stash = ActivationStash(size, defers_wgrad=how.get("deferred", False))
        layers = layers_of(config, groups, "symmetric", stash)
        for again in range(2):
            found = run(layers, rank, order, **how)
            for number, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(a, b), f"{name}: result {number} of run {again}"
            if how.get("recomputed"):
                assert not stash.rings
                continue
            assert int(stash.overflowed) == 0 < int(stash.high_water)
            assert stash.state[HEAD] == stash.state[TAIL]
            for ring in stash.rings:  # whatever lies there, only what was pushed is read
                ring.fill_(torch.nan)
        assert len(sizes) <= 1 and all(0 < balanced <= capacity for balanced, capacity in sizes)


LAYOUTS = [
    (2, {"ep": 2}, {}),
    *full(
        [
            (4, {"ep": 2, "etp": 2}, {}),
            (4, {"tp": 2, "ep": 4, "etp": 1}, {"top_k": 3}),
            (2, {"ep": 2}, {"capacity_factor": 0.8}),
        ]
    ),
]


@pytest.mark.parametrize(("world", "layout", "options"), LAYOUTS, ids=str)
def test_bitwise_that_of_an_all_to_all(world, layout, options):
    run_ranks(bitwise_case, world, layout, list(CASES), options)


@pytest.mark.full
@pytest.mark.parametrize("activation", ["geglu_erf", "gelu_tanh", "squared_relu"])
def test_other_activations(activation):
    run_ranks(bitwise_case, 2, {"ep": 2}, ["pipelined", "deferred, main gradients"], {}, activation)


def overflow_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=2))
    stash = ActivationStash(lambda balanced, capacity: 3)
    layers = layers_of(with_moe(), groups, "symmetric", stash)
    run(layers, rank, ONE)
    assert int(stash.overflowed) > 0 and int(stash.high_water) > 3
    needed = int(stash.high_water)
    stash.grow(10 * needed)
    assert not stash.rings and stash.nbytes == 0
    expected = run(layers_of(with_moe(), groups, "alltoall"), rank, ONE)
    assert all(map(torch.equal, run(layers, rank, ONE), expected))
    assert int(stash.overflowed) == 0 and stash.rows == 10 * needed
    # a forward without a backward frees its rows, and so does an evaluation
    layers[0](hidden(rank, 0))
    gc.collect()
    assert stash.state[HEAD] == stash.state[TAIL]
    high, before = int(stash.high_water), stash.state.clone()
    with torch.no_grad():
        layers[0](hidden(rank, 1))
    with rerunning():
        (layers[0](hidden(rank, 1))[0].sum()).backward()
    assert torch.equal(stash.state, before)
    assert int(stash.high_water) == high


def test_overflow_growth_and_forwards_without_backward():
    run_ranks(overflow_case, 2)


def test_tickets_are_used_again_in_the_graph_that_has_them():
    class Graph:
        pass

    stash = ActivationStash(lambda balanced, capacity: capacity)
    stash.allocate(torch.empty(4, 2), (2, 2, 2), 4, 4)
    graph, offsets = Graph(), torch.tensor([1], dtype=torch.int32)

    def entry():
        made = stash.entry()
        made.reserve(offsets)
        return made

    eager = entry()
    with process_status.capturing(graph):
        first = entry()
        first.release()
        second = entry()
        assert first.ticket == second.ticket != eager.ticket
        kept = entry()
    kept.release()  # by the backward of another graph, or eagerly
    assert len({eager.ticket, second.ticket, kept.ticket, entry().ticket}) == 4
    del graph, first, second, kept
    gc.collect()
    eager.release()
    entries = [stash.entry() for _ in range(3)]
    assert [each.ticket for each in entries] == [0, 1, 2]


def other_width_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=2))
    stash = ActivationStash(lambda balanced, capacity: capacity)
    for options in ({}, {"expert_ffn_hidden_size": 8}):
        layer = layers_of(with_moe(**options), groups, "symmetric", stash)[0]
        if options:
            with pytest.raises(ValueError, match=r"of one kind, expected widths .* of torch.float64"):
                layer(hidden(rank, 0))
        else:
            layer(hidden(rank, 0))


@pytest.mark.full
def test_layers_of_another_width_do_not_fit():
    run_ranks(other_width_case, 2)
