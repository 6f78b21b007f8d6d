"""Experts reached through shared memory on GPUs are those reached otherwise; on a CPU the same code runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from dispatcher_tools import KINDS, MOST, E, K, compare_routings, routings, train_moe_layer
from gpu_ranks import skip_without_peer_access
from marks import ON_GPUS, full
from moe_tools import plain_moe
from torch.testing import assert_close

import fastmp
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.symmetric_memory import SymmetricExchange, SymmetricMemory
from fastmp.nn.moe.dispatchers.factory import make_dispatcher
from fastmp.nn.moe.dispatchers.local import LocalDispatcher
from fastmp.nn.moe.dispatchers.symmetric import SymmetricDispatcher
from fastmp.testing.ranks import run_ranks

H = 32
NEAR = {"rtol": 1e-9, "atol": 1e-9}  # in float64: sums over choices may be rounded otherwise


def send_to_itself(device):
    """The memory of a group of one rank, and exchanges of this rank with itself through it."""
    memory = SymmetricMemory(dist.group.WORLD, 4096, device)
    assert memory.addresses == [memory.local.data_ptr()] and not memory.local.any()
    exchange = SymmetricExchange(dist.group.WORLD, etp=1, ep=1, etp_varies_first=True, timeout=30.0)
    most = torch.empty(MOST, H, dtype=torch.float64, device=device)
    views = exchange.reserve(most, top_k=K, experts=E)
    assert views.rows.device == torch.device(device) and views.peer_offsets.tolist() == [[0]]
    moe = plain_moe(top_k=K, dispatcher="symmetric").moe
    examples = routings(len(KINDS), 1, H, torch.float64, device)
    compare_routings(SymmetricDispatcher(moe, exchange), LocalDispatcher(E), E, examples, **NEAR)
    number = 5 * len(KINDS)  # exchanges: counts, rows and outputs, and the gradients of both
    assert exchange.epochs() == (number, number)
    assert not memory.local.any()


def alone_case(rank, world):
    send_to_itself("cpu")


def test_a_rank_that_sends_to_itself():
    run_ranks(alone_case, 1)


@pytest.mark.gpu
def test_a_gpu_that_sends_to_itself():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        send_to_itself("cuda:0")
    finally:
        dist.destroy_process_group()


def compare(rank, world):
    """Dispatcher "symmetric" against "alltoall": routings, then whole layers, eager and in graphs."""
    device = fastmp.init().device
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    moe = plain_moe(top_k=K).moe
    ordinary = make_dispatcher(moe, groups)
    shared = make_dispatcher(replace(moe, dispatcher="symmetric"), groups)
    most = torch.empty(MOST, H, dtype=torch.float64, device=device)
    groups.exchange.reserve(most, top_k=K, experts=E)
    compare_routings(shared, ordinary, E // world, routings(len(KINDS), rank, H, most.dtype, device), **NEAR)

    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))  # with memory of its own
    results = {}
    for dispatcher in ("alltoall", "symmetric"):
        eager, _ = results[dispatcher] = train_moe_layer(dispatcher, groups, device, graphs=False)
        graphed, manager = train_moe_layer(dispatcher, groups, device, graphs=True)
        assert manager.num_graphs == manager.plan.num_graphs > 0
        for number, (a, b) in enumerate(zip(graphed, eager, strict=True)):
            assert torch.equal(a, b), f"{dispatcher}, result {number}"
        manager.remove()
    for number, (a, b) in enumerate(zip(results["symmetric"][0], results["alltoall"][0], strict=True)):
        assert_close(a, b, **NEAR, msg=f"result {number}")


@pytest.mark.parametrize("device", [*full(["cpu"]), ON_GPUS])
def test_two_ranks(device):
    if device == "cuda":
        skip_without_peer_access()
    run_ranks(compare, 2, device=device, timeout=240)
