"""Experts divided over ranks are the experts of one rank: outputs, losses, counts and every gradient."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe_tools import (
    SMALL,
    forced,
    hidden_states,
    make_moe,
    own_part,
    plain_moe,
    reduce_gradients,
    with_moe,
)
from nn_tools import assert_same_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.distributed.collectives import group_rank, reduce_from_group
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Placement
from fastmp.nn.moe.dispatchers.sharing import SharingDispatcher
from fastmp.nn.moe.router import Router
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks
from tools.small_models import part_of

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
# World size, layout; etp is tp unless given.
LAYOUTS = [
    pytest.param(2, {"ep": 2}, marks=pytest.mark.full),
    (2, {"tp": 2}),
    (2, {"tp": 2, "ep": 2, "etp": 1}),
    pytest.param(2, {"etp": 2}, marks=pytest.mark.full),
    pytest.param(2, {"cp": 2}, marks=pytest.mark.full),
    pytest.param(4, {"ep": 2}, marks=pytest.mark.full),
    pytest.param(4, {"tp": 2, "ep": 2}, marks=pytest.mark.full),
    pytest.param(4, {"tp": 2, "ep": 2, "etp": 1}, marks=pytest.mark.full),
    (4, {"tp": 4, "ep": 2, "etp": 2, "order": "ep-dp-cp-tp-pp"}),
    pytest.param(8, {"cp": 8, "ep": 8}, marks=pytest.mark.full),
    pytest.param(8, {"tp": 2, "cp": 2, "ep": 4, "etp": 1}, marks=pytest.mark.full),
    pytest.param(8, {"tp": 2, "ep": 2, "etp": 2}, marks=pytest.mark.full),
    pytest.param(8, {"ep": 2, "etp": 4}, marks=pytest.mark.full),
    pytest.param(8, {"tp": 2, "pp": 2, "ep": 4, "etp": 1}, marks=pytest.mark.full),
]


def layout_id(value) -> str:
    return "-".join(f"{key}{size}" for key, size in value.items()) if isinstance(value, dict) else str(value)


def run(layer, hidden, weight, tp_group):
    """Outputs, then the gradients of input and parameters in place."""
    output, aux, counts = layer(hidden)
    ((output * weight).sum() + reduce_from_group(aux, tp_group)).backward()
    return output.detach(), aux.detach(), counts


def compare(rank, config, groups, S, B, sequence_parallel, variant):
    full, weight = hidden_states(S, B), hidden_states(S, B, seed=6)
    one, many = make_moe(config), make_moe(config, groups, sequence_parallel=sequence_parallel)
    whole = full.clone().requires_grad_()
    output, aux, counts = run(one, whole, weight, None)
    mine = own_part(full, groups, sequence_parallel).clone().requires_grad_()
    result = run(many, mine, own_part(weight, groups, sequence_parallel), groups.tp)
    for total in result[1:]:
        if groups.tp_cp_dp is not None:
            dist.all_reduce(total, group=groups.tp_cp_dp)
    reduce_gradients(many, groups)

    def same(name, actual, expected):
        torch.testing.assert_close(actual, expected, msg=lambda text: f"{variant} {name}: {text}", **CLOSE)

    same("output", result[0], own_part(output, groups, sequence_parallel))
    same("aux", result[1], aux)
    same("counts", result[2], counts)
    same("gradient of the input", mine.grad, own_part(whole.grad, groups, sequence_parallel))
    for (name, param), undivided in zip(many.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(param, part_of(undivided, param, groups)), name
        same(f"gradient of {name}", param.grad, part_of(undivided.grad, param, groups))


def layouts_case(rank, world, layout):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    parts = groups.grid.cp * groups.grid.tp
    for dispatcher in ("alltoall", "allgather"):
        for sequence_parallel in (False, True) if groups.tp is not None else (False,):
            S = 2 * parts if sequence_parallel else 3 * groups.grid.cp  # 3 positions: TP does not divide them
            variant = f"{dispatcher}, sequence_parallel={sequence_parallel}"
            config = with_moe(dispatcher=dispatcher)
            compare(rank, config, groups, S, 2 * groups.grid.dp, sequence_parallel, variant)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=layout_id)
def test_layouts_equal_one_rank(world, layout):
    run_ranks(layouts_case, world, layout)


def loop_case(rank, world):
    """Ranks that share experts know the rows of each: products one after another, where that is faster."""
    module = sys.modules["fastmp.ops.grouped_mm"]  # the package's name is the function's
    module.grouped_mm_choice = lambda sizes, *arguments: seen.append(list(sizes)) or "loop"
    for layout in ({"ep": world}, {"ep": 2, "etp": world // 2}):
        groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
        for dispatcher in ("alltoall", "allgather"):
            seen = []
            compare(
                rank, with_moe(dispatcher=dispatcher), groups, 4, 2 * world, False, f"{layout}, {dispatcher}"
            )
            assert len(seen) > 1 and all(len(sizes) == 8 // groups.grid.ep for sizes in seen)


def test_products_in_a_loop_where_the_sizes_are_known():
    run_ranks(loop_case, 4)


# Each rank of an expert group with tokens of its own, some with none at all: compared with one rank that has
# the tokens of all.


def forced_case(rank, world, layout, dispatcher, examples):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    drawn = 0

    @settings(max_examples=examples)  # the profile draws the same examples in every process
    @given(
        sizes=st.lists(st.integers(0, 3), min_size=world, max_size=world),
        kind=st.sampled_from(("one expert", "equal", "one rank", "ties", "any")),
        k=st.sampled_from((1, 2, 8)),
        seed=st.integers(0, 2**20),
    )
    @example(sizes=[0] * world, kind="any", k=2, seed=0)
    @example(sizes=[0] * (world - 1) + [3], kind="one expert", k=8, seed=0)
    def case(sizes, kind, k, seed):
        nonlocal drawn
        drawn += 1
        logits = torch.randn(
            sum(sizes), 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        if kind == "one expert":
            logits[..., seed % 8] += 20.0
        elif kind == "equal":
            logits.zero_()
        elif kind == "one rank":
            logits[..., : 8 // groups.grid.ep] += 20.0
        elif kind == "ties":
            logits = logits.round()
        config = plain_moe(top_k=k, aux_loss=0.3, z_loss=0.1, dispatcher=dispatcher)
        one, many = make_moe(config), make_moe(config, groups)
        full, weight = forced(one, logits), hidden_states(len(logits), 1, seed=6)
        forced(many, logits)
        whole = full.clone().requires_grad_()
        output, aux, counts = run(one, whole, weight, None)
        mine = full.split(sizes)[rank].clone().requires_grad_()
        own_output, own_aux, own_counts = run(many, mine, weight.split(sizes)[rank], None)
        for total in (own_aux, own_counts):
            dist.all_reduce(total)
        reduce_gradients(many, groups)
        torch.testing.assert_close(own_output, output.split(sizes)[rank], **CLOSE)
        torch.testing.assert_close(own_aux, aux, **CLOSE)
        assert torch.equal(own_counts, counts)
        torch.testing.assert_close(mine.grad, whole.grad.split(sizes)[rank], **CLOSE)
        assert_same_gradients(many, one, groups)

    case()
    return drawn


@pytest.mark.parametrize(
    ("world", "layout", "dispatcher"),
    [
        (2, {"ep": 2}, "alltoall"),
        (2, {"ep": 2}, "allgather"),
        pytest.param(4, {"ep": 2, "etp": 2}, "alltoall", marks=pytest.mark.full),
        pytest.param(4, {"ep": 2, "etp": 2}, "allgather", marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_any_routing_and_ranks_without_tokens(world, layout, dispatcher):
    drawn = run_ranks(forced_case, world, layout, dispatcher, 14)
    assert len(set(drawn)) == 1 and drawn[0] >= 14


def test_any_routing_where_ranks_of_different_sequences_share_all_experts():
    assert run_ranks(forced_case, 2, {"etp": 2}, "alltoall", 14)[0] >= 14


def lengths_case(rank, world):
    """Two tensor-parallel groups with sequences of other lengths, one of which TP does not divide."""
    groups = ParallelGroups.create(RankGrid(world_size=world, tp=2, etp=world))
    config, dp_rank = plain_moe(aux_loss=0.0), group_rank(groups.dp)
    one, many = make_moe(config), make_moe(config, groups)
    for S in (3, 8):
        full = hidden_states((S, 5)[dp_rank], 2, seed=dp_rank)
        torch.testing.assert_close(many(full)[0], one(full)[0], **CLOSE)


def test_sequences_of_different_lengths_share_all_experts():
    run_ranks(lengths_case, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dispatcher", ("alltoall", "allgather"))
@pytest.mark.parametrize(
    ("world", "layout"), [(4, {"ep": 4}), (8, {"ep": 2, "etp": 2}), (8, {"ep": 8})], ids=layout_id
)
def test_any_routing_longer(world, layout, dispatcher):
    assert run_ranks(forced_case, world, layout, dispatcher, 80, timeout=280)[0] >= 70


def dropping_case(rank, world):
    """Capacity is a rank's own: what a rank keeps is what it would keep alone with its tokens."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    for dispatcher in ("alltoall", "allgather"):
        for policy in ("probs", "position"):
            config = plain_moe(capacity_factor=0.75, drop_policy=policy, dispatcher=dispatcher)
            one, many = make_moe(config), make_moe(config, groups)
            weight = hidden_states(6, 2, seed=20 + rank)
            results = []
            for layer in (one, many):
                mine = hidden_states(6, 2, seed=10 + rank).requires_grad_()
                output, _, counts = layer(mine)
                (output * weight).sum().backward()
                results.append((output, counts, mine.grad))
            assert results[0][0].ne(0).any() and results[0][1].sum() == 36
            for ours, alone in zip(results[1], results[0], strict=True):
                torch.testing.assert_close(ours, alone, **CLOSE)
            for param in one.parameters():
                dist.all_reduce(param.grad)
            assert_same_gradients(many.experts, one.experts, groups)


def test_dropping_does_not_depend_on_where_experts_are():
    run_ranks(dropping_case, 2)


def short_case(rank, world):
    """Fewer positions than TP ranks, as in generation: the last ranks have no token; capacity is of the
    others'."""
    groups = ParallelGroups.create(RankGrid(world_size=world, tp=world, ep=2, etp=2))
    for S in (1, 2, 5):
        for dispatcher in ("alltoall", "allgather"):
            config = with_moe(dispatcher=dispatcher)
            compare(rank, config, groups, S, 2, False, f"{dispatcher}, S={S}")
    many = make_moe(plain_moe(top_k=4, capacity_factor=1.0), groups)
    assert many._capacity(hidden_states(5, 4)) == 4 and many(hidden_states(5, 4))[0].shape == (5, 4, 16)


def test_sequences_shorter_than_the_tensor_parallel_group():
    run_ranks(short_case, 4)


def bfloat16_case(rank, world, layout, dispatcher):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    config = with_moe(dispatcher=dispatcher)
    one, many = (make_moe(config, own, dtype=torch.bfloat16) for own in (ParallelGroups.alone(), groups))
    full = hidden_states(8, 2 * groups.grid.dp).bfloat16()
    mine = own_part(full, groups, False).clone().requires_grad_()
    output, aux, _ = many(mine)
    expected = own_part(one(full)[0], groups, False)
    (output.float().square().sum() + reduce_from_group(aux, groups.tp)).backward()
    assert all(param.grad.dtype == torch.bfloat16 for param in many.parameters())
    error = (output.float() - expected.float()).norm() / expected.float().norm()
    assert output.dtype == torch.bfloat16 and error < 1e-2, error


@pytest.mark.parametrize("dispatcher", ("alltoall", "allgather"))
def test_in_bfloat16(dispatcher):
    run_ranks(bfloat16_case, 4, {"tp": 2, "ep": 2, "etp": 2}, dispatcher)


# (forward, backward) collectives of a training step, one sequence loss and one Switch loss included: the
# counts of all ranks (sizes on the host where each has all experts), then what moves rows. Of the all-gathers
# of all tokens one is for indices, one for probabilities.
COLLECTIVES = {
    ("alltoall", "ep"): (
        {"all_reduce": 1, "all_gather": 1, "all_to_all": 2},
        {"all_to_all": 2},
    ),
    ("alltoall", "etp"): (
        {"all_reduce": 1, "all_gather": 4, "reduce_scatter": 1},
        {"all_gather": 1, "reduce_scatter": 2},
    ),
    ("allgather", "ep"): (
        {"all_reduce": 1, "all_gather": 4, "reduce_scatter": 1},
        {"all_gather": 1, "reduce_scatter": 2},
    ),
}


def collectives_case(rank, world):
    counted = {}
    for dispatcher, axis in COLLECTIVES:
        groups = ParallelGroups.create(RankGrid(world_size=world, **{axis: world}))
        layer = make_moe(with_moe(dispatcher=dispatcher), groups)
        with count_collectives() as forward:
            output, aux, _ = layer(hidden_states(4, 2).requires_grad_())
        with count_collectives() as backward:
            (output.sum() + aux).backward()
        counted[dispatcher, axis] = forward.counts, backward.counts
        with count_collectives() as evaluation:
            layer.eval()(hidden_states(4, 2))
        expected = {name: n for name, n in forward.counts.items() if name != "all_reduce"}
        assert evaluation.counts == expected
    return counted


def test_collectives_of_a_step():
    for counted in run_ranks(collectives_case, 2):
        assert counted == COLLECTIVES


def balance_case(rank, world):
    """The bias of a router follows the counts of all ranks, and is the same on all of them."""
    groups = ParallelGroups.create(RankGrid(world_size=world, tp=2, ep=2, etp=1))
    config = with_moe(expert_bias=True, bias_update_rate=0.1)
    one, many = make_moe(config), make_moe(config, groups)
    full = hidden_states(4, 2 * groups.grid.dp)
    for _ in range(3):
        one.router.update_expert_bias(one(full)[2])
        counts = many(own_part(full, groups, False))[2]
        dist.all_reduce(counts, group=groups.tp_cp_dp)
        many.router.update_expert_bias(counts)
    assert one.router.expert_bias.count_nonzero() > 0
    assert torch.equal(many.router.expert_bias, one.router.expert_bias)


def test_balancing_by_a_bias_is_the_same_on_all_ranks():
    run_ranks(balance_case, 4)


class AsyncOps(TorchDispatchMode):
    """Notes of each collective of rows whether it is asynchronous; NCCL runs others on the current stream."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in ("alltoall_base_", "_reduce_scatter_base_", "_allgather_base_"):
            given = {arg.name: arg.default_value for arg in func._schema.arguments}
            given |= zip(given, args)
            sent = given["input" if "input" in given else "input_tensor"]
            if sent.is_floating_point():
                self.seen.append((name, given.get("asyncOp", given.get("async_op"))))
        return func(*args, **(kwargs or {}))


def streams_of_exchanges(rank, world):
    """By dispatcher and axis, and whether there is a shared expert."""
    seen = {}
    for shared in (0, 16):
        for dispatcher, axis in COLLECTIVES:
            groups = ParallelGroups.create(RankGrid(world_size=world, **{axis: world}))
            config = plain_moe(dispatcher=dispatcher, shared_expert_ffn_hidden_size=shared)
            layer = make_moe(config, groups)
            with AsyncOps() as ops:
                layer(hidden_states(8, 2).requires_grad_())[0].sum().backward()
            seen[dispatcher, axis, shared > 0] = ops.seen
    return seen


def test_rows_travel_on_the_stream_of_their_group_next_to_a_shared_expert():
    """At high priority; where nothing runs next to them they stay on the current stream."""
    for seen in run_ranks(streams_of_exchanges, 2):
        for (*_, shared), ops in seen.items():
            assert len(ops) >= 4
            assert {is_async for _, is_async in ops} == {shared}


def sharded_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=2, etp=2))
    layer = make_moe(plain_moe(), groups, init="sharded")
    parts = [torch.empty_like(layer.experts.fc1) for _ in range(world)]
    dist.all_gather(parts, layer.experts.fc1.detach())
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(world)]
    dist.all_gather(states, torch.get_rng_state())
    return (group_rank(groups.ep), group_rank(groups.etp)), parts, states


def test_sharded_weights_are_equal_on_replicas_and_different_elsewhere():
    results = run_ranks(sharded_case, 8)
    places, parts = [place for place, _, _ in results], results[0][1]
    for a, part in zip(places, parts, strict=True):
        for b, other in zip(places, parts, strict=True):
            assert torch.equal(part, other) == (a == b)
    assert all(torch.equal(state, results[0][2][0]) for state in results[0][2])
    whole = torch.cat([part.flatten() for part in parts[:4]])
    assert len(set(whole.tolist())) == whole.numel() and abs(whole.std() / SMALL.init_std - 1) < 0.05


def refused(message, make, *arguments):
    with pytest.raises(ValueError, match=message):
        make(*arguments)


def bad_case(rank, world):
    """The same error on every rank, at once: run_ranks would tell of ranks that hang."""
    three = ParallelGroups.create(RankGrid(world_size=world, ep=3))
    for dispatcher in ("alltoall", "allgather"):
        config = plain_moe(dispatcher=dispatcher)
        message = "num_experts 8 is not divisible by the expert-parallel size 3"
        refused(message, make_moe, config, three)
    tensor = ParallelGroups.create(RankGrid(world_size=world, etp=3))
    refused(
        "expert_ffn_hidden_size 14 is not divisible by the expert tensor-parallel size 3",
        make_moe,
        plain_moe(expert_ffn_hidden_size=14),
        tensor,
    )
    different = {
        r"different num_experts: \[8, 8, 9\]": plain_moe(num_experts=9 if rank == 2 else 8),
        r"different top_k: \[2, 3, 2\]": plain_moe(top_k=3 if rank == 1 else 2),
        r"different hidden_size: \[16, 16, 32\]": replace(plain_moe(), hidden_size=32 if rank == 2 else 16),
        r"different activation: \['gelu', 'swiglu', 'swiglu'\]": replace(
            plain_moe(), activation="gelu" if rank == 0 else "swiglu"
        ),
        r"different dispatcher: \['allgather', 'alltoall', 'alltoall'\]": plain_moe(
            dispatcher="allgather" if rank == 0 else "alltoall"
        ),
    }
    for message, config in different.items():
        refused(f"MoELayer: ranks of one expert group have {message}", make_moe, config, three)
    refused(
        r"different dtype: \['torch.float64', 'torch.float64', 'torch.float32'\]",
        lambda: make_moe(plain_moe(), three, dtype=torch.float32 if rank == 2 else torch.float64),
    )
    for dispatcher, groups in (("alltoall", three), ("allgather", three), ("alltoall", tensor)):
        config = plain_moe(
            num_experts=9,
            top_k=1,
            normalize_topk=False,
            capacity_factor=1.0,
            dispatcher=dispatcher,
            expert_ffn_hidden_size=15,
        )
        own = make_moe(config, groups)  # ranks of one sequence each
        for short, tokens in ((0, 8), (2, 2)):
            refused(
                rf"MoELayer: the {tokens} tokens of rank {short} of the expert group are too few",
                own,
                hidden_states(tokens if rank == short else 20, 1),
            )
    small = ParallelGroups.create(RankGrid(world_size=world, tp=3, ep=1, etp=3))
    layer = make_moe(plain_moe(top_k=1, normalize_topk=False, capacity_factor=1.0), small)
    refused(  # the last rank has no token of these four positions
        r"a capacity of 0.5 tokens is less than one: capacity_factor 1 x 4 tokens x top_k 1 / 8 experts",
        layer,
        hidden_states(4, 2),
    )
    refused(
        r"Router: jitter 0.1 of the tokens of 3 ranks needs rng=RngTracker",
        lambda: Router(plain_moe(jitter=0.1), Placement(small)),
    )
    return rank


def test_ranks_without_a_backend_on_the_host_cannot_share_experts_across_sequences():
    class OnlyDevices:
        _device_types = (torch.device("cuda"),)
        size = staticmethod(lambda: 2)

    with patch.object(dist, "get_backend", return_value="nccl"):
        with pytest.raises(ValueError, match=r"2 ranks share experts .* backend nccl cannot do"):
            SharingDispatcher(8, OnlyDevices(), one_sequence=False)


def test_bad_input_is_the_same_error_on_every_rank():
    assert run_ranks(bad_case, 3, timeout=30) == [0, 1, 2]
