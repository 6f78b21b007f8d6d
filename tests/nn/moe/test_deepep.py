"""Experts reached through DeepEP, or a stand-in with its interface, are those reached by all-to-all.

The stand-in runs on a CPU; the last test runs DeepEP itself, where it is installed.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

import deep_ep_stand_in
import pytest
import torch
from dispatcher_tools import KINDS, E, K, compare_routings, results_of_layer, routings
from gpu_ranks import skip_without_peer_access
from marks import full
from moe_tools import hidden_states, make_moe, plain_moe, with_moe
from torch.testing import assert_close

import fastmp
from fastmp.distributed.deepep_buffer import DeepEPBuffer
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.deepep import DeepEPDispatcher
from fastmp.nn.moe.dispatchers.factory import make_dispatcher
from fastmp.testing.ranks import run_ranks

H = 32
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def routings_case(rank, world, layout, number, dtype):
    deep_ep_stand_in.install()
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    moe = plain_moe(top_k=K).moe
    ordinary = make_dispatcher(moe, groups)
    deepep = make_dispatcher(replace(moe, dispatcher="deepep"), groups)
    assert type(deepep) is DeepEPDispatcher and deepep.spec.eager == ordinary.spec.eager
    # Sums of each rank's outputs are rounded before those of all ranks are added up.
    near = EXACT if dtype is torch.float64 else {}
    examples = routings(number, rank, H, dtype)
    compare_routings(deepep, ordinary, E // groups.grid.ep, examples, same_rows=groups.etp is None, **near)
    (buffer,) = deep_ep_stand_in.Buffer.made
    assert buffer.calls == number * ["dispatch", "combine", "dispatch again", "combine"]


@pytest.mark.parametrize(
    ("world", "layout", "number", "dtype"),
    [
        (2, {"ep": 2}, 12, torch.float64),
        *full(
            [
                (4, {"ep": 4}, 48, torch.float64),
                (4, {"ep": 4}, 48, torch.bfloat16),
                (4, {"ep": 2, "etp": 2}, 24, torch.float64),
                (4, {"ep": 2, "etp": 2, "order": "ep-dp-cp-tp-pp"}, 24, torch.float64),
            ]
        ),
    ],
    ids=str,
)
def test_any_routing_is_that_of_the_all_to_all(world, layout, number, dtype):
    run_ranks(routings_case, world, layout, number, dtype)


def layer_case(rank, world, layout, sequence_parallel):
    """With losses, a shared expert and dropped pairs; recomputed, and in evaluation mode."""
    deep_ep_stand_in.install()
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    configs = [with_moe(dispatcher=each, capacity_factor=0.75) for each in ("alltoall", "deepep")]
    layer = make_moe(configs[1], groups)
    assert copy.deepcopy(layer).dispatcher is layer.dispatcher
    results = [results_of_layer(config, groups, sequence_parallel, recomputed=True) for config in configs]
    for number, (ordinary, deepep) in enumerate(zip(*results, strict=True)):
        assert_close(deepep, ordinary, **EXACT, msg=f"result {number}")
    assert len(deep_ep_stand_in.Buffer.made) == 1


@pytest.mark.parametrize(
    ("world", "layout", "sequence_parallel"),
    full(
        [
            (2, {"tp": 2, "ep": 2, "etp": 1}, True),
            (4, {"ep": 4}, False),
            (4, {"tp": 2, "ep": 2}, False),
            (4, {"tp": 4, "ep": 2, "etp": 2, "order": "ep-dp-cp-tp-pp"}, True),
        ]
    ),
    ids=str,
)
def test_a_layer_is_that_of_the_all_to_all(world, layout, sequence_parallel):
    run_ranks(layer_case, world, layout, sequence_parallel)


def refused_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=2))

    def refused(match, dtype=torch.bfloat16, **options):
        config = plain_moe(dispatcher="deepep", top_k=options.pop("top_k", K))
        with pytest.raises(ValueError, match=match):
            make_moe(replace(config, **options), groups, dtype=dtype)

    refused(r"deepep.* between GPUs, got device cpu; .*alltoall.*symmetric")
    DeepEPBuffer.device_types = ("cpu",)
    sys.modules["deep_ep"] = None  # as where it is not installed
    refused(r"deepep.* needs the package deep_ep \(.*\): install .*alltoall.*symmetric")
    refused(r"deepep.* sends rows of torch.bfloat16, got torch.float32; .*alltoall", dtype=torch.float32)
    make_moe(plain_moe(dispatcher="deepep"), groups, device="meta")
    deep_ep_stand_in.install(dtypes=(torch.bfloat16,))
    refused(r"a multiple of 32 bytes, 16352 at most, got hidden_size 24 in torch.bfloat16", hidden_size=24)
    refused("got hidden_size 8192 in torch.bfloat16, 16384 bytes", hidden_size=8192)
    deep_ep_stand_in.install()
    layer = make_moe(plain_moe(dispatcher="deepep"), groups)
    layer(hidden_states(4, 2))
    other = make_moe(replace(plain_moe(dispatcher="deepep"), hidden_size=32), groups)
    with pytest.raises(ValueError, match=r"send rows of one kind; .* are \(32, .* reserved for \(16, "):
        other(hidden_states(4, 2, 32))
    few = make_moe(plain_moe(dispatcher="deepep", capacity_factor=0.1), groups)
    with pytest.raises(ValueError, match="the 8 tokens of this rank are too few"):
        few(hidden_states(4, 2))
    moe = plain_moe(dispatcher="deepep", num_experts=64, top_k=33).moe
    with pytest.raises(ValueError, match="top_k 33 x etp 1 are more than the 32 choices"):
        make_dispatcher(moe, groups)
    deep_ep_stand_in.Buffer.sizes = (4, 8)
    refused("deepep.* among 2 ranks, etp x ep: Unsupported number of EP ranks: 2; .*alltoall")


def test_errors():
    run_ranks(refused_case, 2)


def compare(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    moe = plain_moe(top_k=K).moe
    ordinary = make_dispatcher(moe, groups)
    deepep = make_dispatcher(replace(moe, dispatcher="deepep"), groups)
    examples = routings(len(KINDS), rank, H, torch.bfloat16, fastmp.init().device)
    compare_routings(deepep, ordinary, E // world, examples)


@pytest.mark.gpu
@pytest.mark.alone
def test_deepep_itself():
    pytest.importorskip("deep_ep", reason="DeepEP is not installed", exc_type=ImportError)
    skip_without_peer_access()
    run_ranks(compare, 2, device="cuda", timeout=240)
