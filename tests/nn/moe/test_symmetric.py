"""Experts reached through shared memory are those reached by all-to-all: bit for bit, without the host."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from dispatcher_tools import MOST, E, K, dispatch_and_combine, results_of_layer, routing, routings
from marks import full
from moe_tools import hidden_states, make_moe, plain_moe, with_moe
from torch.utils.checkpoint import checkpoint

from fastmp.cuda_graphs.explanation.report import explain
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.factory import make_dispatcher
from fastmp.nn.moe.dispatchers.symmetric import SymmetricDispatcher
from fastmp.nn.moe.lossless import LosslessForwards
from fastmp.testing.ranks import run_ranks

H = 6  # width


def routings_case(rank, world, layout, number, dtype, capacity):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    moe = plain_moe(top_k=K).moe
    ordinary = make_dispatcher(moe, groups)
    shared = make_dispatcher(replace(moe, dispatcher="symmetric", symmetric_capacity=capacity), groups)
    assert type(shared) is SymmetricDispatcher and shared.spec.capturable
    groups.exchange.reserve(torch.empty(MOST, H, dtype=dtype), top_k=K, experts=E, factor=capacity)
    scales = torch.linspace(0.5, 2.0, E // groups.grid.ep, dtype=dtype)
    dropped_ever = 0
    for label, tokens, indices, probs, grad in routings(number, rank, H, dtype):
        if capacity is not None:
            kept, dropped = fitting(indices, groups, shared.exchange.views.capacity)
            found = through_counted(shared, scales, tokens, indices, probs, grad)
            assert found[-1] == dropped, (found[-1], dropped)
            dropped_ever += dropped
            found, indices = found[:-1], kept
        else:
            found = dispatch_and_combine(shared, scales, tokens, indices, probs, grad)
        expected = dispatch_and_combine(ordinary, scales, tokens, indices, probs, grad)
        for name, a, b in zip(("output", "tokens", "probs", "rows", "offsets"), found, expected, strict=True):
            assert torch.equal(a, b), f"{label}: {name} {a} {b}"
    return dropped_ever


def through_counted(dispatcher, *arguments):
    """Return the results of `dispatch_and_combine`, and the number of dropped assignments."""
    seen = []
    combine = dispatcher.combine
    dispatcher.combine = lambda outputs, *kept: (
        seen.append(dispatcher.dropped(*kept)) or combine(outputs, *kept)
    )
    try:
        return *dispatch_and_combine(dispatcher, *arguments), int(seen[0])
    finally:
        del dispatcher.combine


def fitting(indices, groups, capacity):
    """This rank's choices without those whose rows would be beyond the capacity, and how many these were.

    A reference with hosts: rows lie by expert, then by source (etp, ep), then in the source's order.
    """
    everyones = [None] * groups.etp_ep.size()
    place = (groups.etp.rank() if groups.etp else 0, groups.ep.rank() if groups.ep else 0)
    dist.all_gather_object(everyones, (place, indices.tolist()), group=groups.etp_ep)
    local, kept, dropped = E // groups.grid.ep, indices.clone(), 0
    for first in range(0, E, local):
        row = 0
        for expert in range(first, first + local):
            for source, choices in sorted(everyones):
                for t, chosen in enumerate(choices):
                    for slot, each in enumerate(chosen):
                        if each == expert:
                            if row >= capacity and source == place:
                                kept[t, slot] = -1
                                dropped += 1
                            row += 1
    return kept, dropped


@pytest.mark.parametrize(
    ("world", "layout", "number", "dtype", "capacity"),
    [
        (4, {"ep": 2, "etp": 2}, 12, torch.bfloat16, None),
        (4, {"ep": 4}, 12, torch.float32, 0.6),
        *full(
            [
                (8, {"ep": 8}, 48, torch.float32, 0.5),
                (4, {"ep": 2, "etp": 2, "order": "ep-dp-cp-tp-pp"}, 48, torch.float64, 0.5),
            ]
        ),
        *(
            pytest.param(8, layout, 200, dtype, capacity, marks=pytest.mark.exhaustive)
            for layout, dtype, capacity in (
                ({"ep": 8}, torch.float32, None),
                ({"ep": 8}, torch.bfloat16, 0.5),
                ({"ep": 4, "etp": 2}, torch.float64, None),
                ({"ep": 4, "etp": 2, "order": "ep-dp-cp-tp-pp"}, torch.float32, 0.5),
            )
        ),
    ],
    ids=str,
)
def test_any_routing_is_bitwise_that_of_the_all_to_all(world, layout, number, dtype, capacity):
    dropped = run_ranks(routings_case, world, layout, number, dtype, capacity, timeout=200)
    assert (sum(dropped) > 0) == (capacity is not None)


def layer_case(rank, world, layout, variants):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    groups.exchange.reserve(torch.empty(64, 16, dtype=torch.float64), top_k=3, experts=8)
    for options, sequence_parallel in variants:
        configs = (with_moe(dispatcher=dispatcher, **options) for dispatcher in ("alltoall", "symmetric"))
        results = [results_of_layer(config, groups, sequence_parallel) for config in configs]
        for number, (ordinary, shared) in enumerate(zip(*results, strict=True)):
            assert torch.equal(ordinary, shared), f"{options}, {sequence_parallel}: result {number}"


PLAIN = ({}, False)
LAYOUTS = [
    (2, {"tp": 2, "ep": 2, "etp": 1}, [({}, True)]),
    *full(
        [
            (2, {"ep": 2}, [PLAIN, ({"capacity_factor": 0.75}, False), ({"top_k": 3, "jitter": 0.1}, False)]),
            (4, {"ep": 4}, [PLAIN]),
            (4, {"ep": 2, "etp": 2}, [PLAIN]),
            (4, {"tp": 2, "ep": 2}, [PLAIN, ({}, True)]),
            (4, {"tp": 4, "ep": 2, "etp": 2, "order": "ep-dp-cp-tp-pp"}, [PLAIN, ({}, True)]),
            (8, {"tp": 2, "cp": 2, "ep": 4, "etp": 1}, [PLAIN]),
        ]
    ),
]


@pytest.mark.parametrize(("world", "layout", "variants"), LAYOUTS, ids=str)
def test_a_layer_is_bitwise_that_of_the_all_to_all(world, layout, variants):
    run_ranks(layer_case, world, layout, variants)


def dropping_case(rank, world):
    """Dropped assignments add nothing and get no gradient; each is counted once, recomputed or not."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    config = plain_moe(dispatcher="symmetric", symmetric_capacity=0.5, top_k=3)
    layer, counted = make_moe(config, groups), []
    hidden = hidden_states(8, 2, seed=rank).requires_grad_()
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.dropped_pairs.zero_()
        output, _, counts = run(hidden)
        output.square().sum().backward()
        counted.append(int(layer.dropped_pairs))
    with torch.no_grad():
        layer(hidden)
    layer.eval()(hidden)
    assert counts.sum() == 48 and int(layer.dropped_pairs) == counted[1] == counted[0]
    assert "dropped_pairs" not in layer.state_dict()
    everyones, mine = [0] * world, counted[0]
    dist.all_gather_object(everyones, mine)
    everyones_counts = torch.zeros(world, 8, dtype=torch.int64)
    everyones_counts[rank] = counts
    dist.all_reduce(everyones_counts)
    arriving = everyones_counts.sum(0).view(world, -1).sum(1)
    capacity = groups.exchange.views.capacity
    assert capacity == 24 and sum(everyones) == (arriving - capacity).clamp(min=0).sum()
    return mine


def test_dropped_assignments_are_counted_once():
    assert sum(run_ranks(dropping_case, 2)) > 0


def evaluated_case(rank, world):
    """In evaluation mode nothing is dropped, with gradients or without, also of a copy; in training it is."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    ordinary = make_moe(plain_moe(top_k=3), groups)
    layer = make_moe(plain_moe(dispatcher="symmetric", symmetric_capacity=0.5, top_k=3), groups)
    hidden = hidden_states(8, 2, seed=rank)
    expected = ordinary.eval()(hidden)[0]
    for each in (layer, copy.deepcopy(layer)):
        output = each.eval()(hidden)[0]
        output.sum().backward()
        assert torch.equal(output, expected) and each.dropped_pairs == 0
        assert [segment.capturable for segment in each.segments()] == [True] * 2 + [False] * 3
        with torch.no_grad(), each.train().all_to_all():
            assert torch.equal(each(hidden)[0], expected)
        assert all(segment.capturable for segment in each.segments())
        output = each(hidden)[0]
        output.sum().backward()
        assert not torch.equal(output, expected)
    return int(layer.dropped_pairs)


def stages_case(rank, world):
    """Of two stages the second one has experts; its two ranks drop an assignment and two."""
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=2, ep=2))
    config = plain_moe(dispatcher="symmetric", symmetric_capacity=0.5)
    last = group_rank(groups.pp) == 1
    stage = make_moe(config, groups) if last else torch.nn.Identity()
    forwards = LosslessForwards([stage], groups)
    before = forwards.count()
    if last:
        stage.dropped_pairs += 1 + group_rank(groups.ep)
    found = forwards.needed, forwards.dropped_since(before).item()
    assert forwards.count().sum() == 0
    return found


def test_all_stages_learn_what_one_has_dropped():
    assert run_ranks(stages_case, 4) == [(True, 3)] * 4


def test_evaluations_drop_nothing():
    assert sum(run_ranks(evaluated_case, 2)) > 0


def refused_case(rank, world):
    three = ParallelGroups.create(RankGrid(world_size=world, ep=3))
    with pytest.raises(ValueError, match=r"num_experts 8 is not divisible by the expert-parallel size 3"):
        make_moe(plain_moe(dispatcher="symmetric"), three)
    with pytest.raises(ValueError, match=r"SymmetricDispatcher: 8 experts .* size 3"):
        make_dispatcher(plain_moe(dispatcher="symmetric").moe, three)
    layer = make_moe(plain_moe(dispatcher="symmetric", num_experts=9), three)
    layer(hidden_states(4, 2))
    with pytest.raises(ValueError, match=r"10 tokens of a rank, .* reserved memory for 8; .*alltoall"):
        layer(hidden_states(5, 2))
    other = make_moe(plain_moe(dispatcher="symmetric", num_experts=9, top_k=2), three)
    with pytest.raises(ValueError, match="exchange rows of one kind"):
        other(hidden_states(4, 2))
    late = ParallelGroups.create(RankGrid(world_size=world, ep=3), timeout=timedelta(seconds=1))
    layer = make_moe(plain_moe(dispatcher="symmetric", num_experts=9), late)
    layer(hidden_states(4, 2))
    if rank != 1:
        with pytest.raises(RuntimeError, match="rank 1 has not come"):
            layer(hidden_states(4, 2))
    return rank


def test_errors():
    assert run_ranks(refused_case, 3) == [0, 1, 2]


def asked_case(rank, world):
    """Gradients of some inputs, of outputs that lie in no order, of recomputed ones, and of gradients."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    moe = plain_moe(top_k=K).moe
    ordinary, shared = (
        make_dispatcher(replace(moe, dispatcher=d), groups) for d in ("alltoall", "symmetric")
    )
    groups.exchange.reserve(torch.empty(MOST, H), top_k=K, experts=E)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(H, MOST - rank, generator=generator).t()
    indices = routing("any", rank, generator)[: len(tokens)]
    tokens = tokens[: len(indices)]
    probs = torch.rand(K, len(indices), generator=generator).t()

    def layer(dispatcher, tokens, probs):
        rows, _, state = dispatcher.dispatch(tokens, dispatcher.preprocess(indices, probs, MOST))
        return dispatcher.combine(rows * 2.0, state)[: len(tokens)]

    def recomputed(times, reentrant):
        def run(dispatcher, tokens, probs, left=times):
            inner = layer if left == 1 else lambda d, t, p: run(d, t, p, left - 1)
            return checkpoint(inner, dispatcher, tokens, probs, use_reentrant=reentrant)

        return run

    def gradients(run, dispatcher, *, asked=(True, True), loss=lambda output: output.square().sum()):
        inputs = [x.detach().requires_grad_(needed) for x, needed in zip((tokens, probs), asked, strict=True)]
        output = run(dispatcher, *inputs)
        loss(output).backward()
        return [output.detach(), *(x.grad for x, needed in zip(inputs, asked, strict=True) if needed)]

    def total(output):  # whose gradient is one number, expanded
        return output.sum()

    for run, options in (
        (layer, {"asked": (True, False)}),
        (layer, {"asked": (False, True)}),
        (layer, {"loss": total}),
        *((recomputed(times, reentrant), {}) for times in (1, 2) for reentrant in (False, True)),
    ):
        both = (gradients(run, dispatcher, **options) for dispatcher in (ordinary, shared))
        for a, b in zip(*both, strict=True):
            assert torch.equal(a, b), options
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        layer(shared, tokens.requires_grad_(), probs)
    assert not any(x.shape == (*indices.shape, H) for x in saved)  # rows are for the gradient of probs
    (first,) = torch.autograd.grad(layer(shared, tokens, probs).square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    return len(saved)


@pytest.mark.full
def test_gradients_that_are_asked_for():
    run_ranks(asked_case, 2)


def compiled_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    layer, results = make_moe(with_moe(dispatcher="symmetric", symmetric_capacity=0.5), groups), []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        layer.dropped_pairs.zero_()
        hidden = hidden_states(4, 2, seed=rank).requires_grad_()
        output, aux, _ = run(hidden)
        (output.square().sum() + aux).backward()
        results.append((output, hidden.grad, layer.dropped_pairs.clone()))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)
    return int(layer.dropped_pairs)


@pytest.mark.full
def test_a_compiled_layer_leaves_memory_where_peers_look():
    import_module("torch._dynamo")  # here, not in every rank
    assert sum(run_ranks(compiled_case, 2)) > 0


def explained_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    report = explain(make_moe(with_moe(dispatcher="symmetric"), groups), hidden_states(4, 2).requires_grad_())
    return report.captured, report.num_spans, len(report.segments), str(report)


def test_explain_finds_nothing_that_a_graph_could_not_hold():
    for *found, text in run_ranks(explained_case, 2):
        assert found == [True, 1, 6], text
