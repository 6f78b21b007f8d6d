"""The expert layer cut into segments: what crosses the borders, and how often the host waits for the device.

On meta tensors everything that would make the host wait for a GPU is a copy to another device or a read of a
value, in forward and in backward.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from capture_tools import new_in_capture
from dispatch_modes import NoDeviceWaits
from marks import full
from moe_tools import hidden_states, make_moe, plain_moe, with_moe
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastmp.distributed.collectives import group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe import layer as layer_module
from fastmp.nn.moe.dispatchers import sharing
from fastmp.nn.moe.dispatchers.allgather import AllGatherDispatcher
from fastmp.nn.moe.dispatchers.alltoall import AllToAllDispatcher
from fastmp.nn.moe.host_copies import HostCopies
from fastmp.testing.ranks import run_ranks

needs_shapes_of_collectives = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="collectives take no meta tensors before torch 2.11",
)
FRONT = ["router", "preprocess", "shared_experts"]
BACK = ["dispatch", "experts", "combine"]


def run_on_meta(config, groups=ParallelGroups.alone(), sequence_parallel=False):
    """Forward and backward with waiting refused; the shapes that cross each border."""
    mode, crossing = FakeTensorMode(), {}
    with mode, NoDeviceWaits():
        layer = make_moe(
            config, groups, device="meta", dtype=torch.bfloat16, sequence_parallel=sequence_parallel
        )
        hidden = torch.empty(6, 2, 16, device="meta", dtype=torch.bfloat16).requires_grad_()
        residual = torch.empty(6, 2, 16, device="meta", dtype=torch.bfloat16).requires_grad_()
        tensors = (hidden, residual)
        for segment in layer.segments(carried=1):
            tensors = segment.run(*tensors)
            assert isinstance(tensors, tuple) and all(isinstance(t, torch.Tensor) for t in tensors)
            crossing[segment.name] = [tuple(t.shape) for t in tensors]
        output, aux, _, carried = tensors
        assert carried is residual
        leaves = (hidden, *layer.parameters())
        grads = torch.autograd.grad(
            (output, aux), leaves, (torch.empty_like(output), torch.empty_like(aux)), allow_unused=True
        )
        assert [g.shape for g in grads] == [leaf.shape for leaf in leaves]
    return crossing


@pytest.mark.parametrize("capacity", (None, "probs", "position"))
def test_one_rank_never_waits(capacity):
    drop = {} if capacity is None else {"capacity_factor": 1.0, "drop_policy": capacity}
    crossing = run_on_meta(with_moe(expert_bias=True, **drop))
    T, H, E, k, hidden = 12, 16, 8, 3, (6, 2, 16)
    assert list(crossing) == FRONT + BACK
    rest = [(), (E,), hidden, hidden]  # aux, counts, the layer's input, what is carried
    assert crossing["router"] == [(T, H), (T, k), (T, k), *rest]
    assert crossing["preprocess"] == crossing["shared_experts"] == [(T, H), (T, k), (T, k), (E,), *rest]
    assert crossing["dispatch"] == [(T * k, H), (E,), (T, k), (T, k), *rest]
    assert crossing["experts"] == [(T * k, H), (T, k), (T, k), *rest]
    assert crossing["combine"] == [hidden, (), (E,), hidden]


def copies_case(rank, world_size, layout, dispatcher, sequence_parallel, tokens):
    """Rank 0 of a world of shapes only; the matrix of counts is made up where it is copied."""
    dist.destroy_process_group()
    size = RankGrid(world_size=layout["world_size"], **layout["axes"]).world_size
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    groups = ParallelGroups.create(RankGrid(world_size=size, **layout["axes"]))
    copies = []

    def made_up(self, copy):
        assert copy.is_meta and copy.shape[0] == group_size(groups.etp_ep)
        copies.append(tuple(copy.shape))
        counts = [3 * tokens - 7, *[1] * 7, tokens]
        assert copy.shape[1] == len(counts)
        return np.tile(np.array(counts, dtype=np.int32), (copy.shape[0], 1))

    def on_the_host(function):
        def outside(*args):
            with unset_fake_temporarily():
                return function(*args)

        return outside

    HostCopies.wait = made_up
    sharing._of_all_ranks = lambda number, group: [number] * group.size()
    for kind in (AllToAllDispatcher, AllGatherDispatcher):
        for name in ("sizes", "_received_counts", "_values"):
            setattr(kind, name, on_the_host(getattr(kind, name)))
    layer_module._agree = lambda *args: None
    crossing = run_on_meta(with_moe(dispatcher=dispatcher), groups, sequence_parallel)
    return len(copies), crossing


DIVIDED = {
    "ep": (2, {"ep": 2}, False),
    "tp-sequence": (4, {"tp": 2, "ep": 2}, True),
    "tp": (4, {"tp": 2, "ep": 2}, False),
}


@needs_shapes_of_collectives
@pytest.mark.parametrize(
    ("divided", "dispatcher"),
    [
        *(("ep", "allgather"), ("ep", "symmetric"), ("tp-sequence", "alltoall"), ("tp", "symmetric")),
        *full([("ep", "alltoall"), ("tp-sequence", "allgather"), ("tp-sequence", "symmetric")]),
        *full([("tp", "alltoall"), ("tp", "allgather")]),
    ],
)
def test_divided_experts_wait_once_or_never(divided, dispatcher):
    world, axes, sequence_parallel = DIVIDED[divided]
    layout = {"world_size": world, "axes": axes}
    T = 12 if sequence_parallel or "tp" not in axes else 6
    ((copies, crossing),) = run_ranks(copies_case, 1, layout, dispatcher, sequence_parallel, T)
    assert copies == (0 if dispatcher == "symmetric" else 1)
    assert list(crossing) == FRONT + BACK
    assert crossing["router"][0] == (T, 16)
    assert crossing["combine"] == [(6, 2, 16), (), (8,), (6, 2, 16)]


@needs_shapes_of_collectives
@pytest.mark.parametrize(
    ("axes", "sequence_parallel", "T"),
    [
        ({"tp": 4}, True, 12),
        ({"tp": 4}, False, 4),
        ({"tp": 2, "etp": 4}, True, 12),
        ({"tp": 2, "etp": 4}, False, 6),
        ({"etp": 4}, False, 12),
    ],
    ids=("tp-sequence", "tp", "beyond-tp-sequence", "beyond-tp", "dp"),
)
def test_ranks_that_hold_all_experts_never_wait(axes, sequence_parallel, T):
    layout = {"world_size": 4, "axes": axes}
    ((copies, crossing),) = run_ranks(copies_case, 1, layout, "alltoall", sequence_parallel, T)
    assert copies == 0
    assert crossing["router"][0] == (T, 16)
    assert crossing["dispatch"][0] == (3 * 4 * T, 16)  # k rows of the tokens of four ranks
    assert crossing["combine"] == [(6, 2, 16), (), (8,), (6, 2, 16)]


def flags_case(rank, world):
    layouts = {"edp": {}, "tp": {"tp": 2}, "ep": {"ep": 2}, "etp": {"etp": 2}}
    groups = {
        name: ParallelGroups.create(RankGrid(world_size=world, **axes)) for name, axes in layouts.items()
    }
    return {
        name: {segment.name: segment.capturable for segment in make_moe(with_moe(), own).segments()}
        for name, own in groups.items()
    }


def test_what_can_be_captured():
    alone = {segment.name: segment.capturable for segment in make_moe(with_moe()).segments()}
    assert alone == dict.fromkeys(FRONT + BACK, True)
    divided = dict.fromkeys(FRONT, True) | dict.fromkeys(BACK, False)
    told = divided | {"preprocess": False}  # on the host, how many tokens there are
    for flags in run_ranks(flags_case, 2):
        assert flags == {"edp": alone, "tp": alone, "ep": divided, "etp": told}


def test_without_a_shared_expert_there_is_no_segment_for_it():
    layer = make_moe(plain_moe())
    assert [segment.name for segment in layer.segments()] == FRONT[:2] + BACK
    x = hidden_states(4, 2)
    tensors = (x,)
    for segment in layer.segments():
        tensors = segment.run(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, layer(x), strict=True))


def calls_of_a_layer(device):
    """Return a layer of experts and its input, a training step of it, and a forward without gradients."""
    layer = make_moe(with_moe(), device=device, dtype=torch.bfloat16)
    hidden = hidden_states(64, 4).to(device, torch.bfloat16).requires_grad_()
    static = hidden.detach().clone()

    def step():
        output, aux, _ = layer(hidden)
        (output.float().square().sum() + aux).backward()
        return output.detach()

    @torch.no_grad()
    def forward():
        return layer(static)[0]

    return layer, hidden, static, step, forward


def test_a_forward_without_gradients_has_kernels_of_its_own():
    """A captured one finds them loaded where one was launched before, as in the GPU test below."""
    *_, step, forward = calls_of_a_layer("meta")
    new = new_in_capture(step, forward)
    assert [(code.kernel, dict(code.constants)["KEEP"]) for code in new] == [("grouped_mm_kernel", False)]
    assert new_in_capture(lambda: (step(), forward()), forward) == []


@pytest.mark.gpu
def test_one_rank_never_waits_for_a_gpu_and_can_be_captured():
    layer, hidden, static, step, forward = calls_of_a_layer("cuda")
    expected = step()  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(output, expected)
    exact = make_moe(with_moe())
    exact.load_state_dict(layer.state_dict())
    truth = exact(hidden.detach().cpu().double())[0]
    assert (output.cpu().double() - truth).norm() < 2e-2 * truth.norm()

    forward()  # its kernels are loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    static.copy_(hidden.detach().flip(0))
    graph.replay()
    assert torch.equal(captured, forward())


@pytest.mark.gpu
def test_a_kernel_that_is_new_in_a_capture_is_loaded_there(captures_may_load):
    """Training steps come first; the forward without gradients is captured before it ever ran."""
    *_, step, forward = calls_of_a_layer("cuda")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    graph.replay()
    assert torch.equal(captured, forward())
