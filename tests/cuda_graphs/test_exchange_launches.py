"""How many operations a layer of experts over ranks leaves outside of its two graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_tools import MOE
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.cuda_graphs.backends.recording import RecordedGraph, RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Placement
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks

NO_KERNELS = {  # of aten: they make another view of a tensor, or memory that nothing is written to
    *("view", "_unsafe_view", "detach", "alias", "expand", "t", "transpose", "permute", "slice", "select"),
    *("unsqueeze", "squeeze", "as_strided", "split", "unbind", "_reshape_alias", "empty", "new_empty"),
    *("empty_like", "lift_fresh"),
}


class Launches(TorchDispatchMode):
    """Notes what would be a kernel on a GPU, a collective or a copy, in lists between replays."""

    def __init__(self):
        super().__init__()
        self.between: list[list[str]] = [[]]
        self.replaying = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not self.replaying and (func.namespace == "fastmp" or name not in NO_KERNELS):
            self.between[-1].append(name)
        return func(*args, **(kwargs or {}))


def launches_case(rank, world, shared):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    moe = replace(MOE.moe, shared_expert_ffn_hidden_size=shared)
    rng = RngTracker(1)
    config = replace(MOE, num_layers=3, dropout=0.0, moe=moe)
    model = GPT(config, Placement(groups, rng=rng))
    GradBuffer(model.named_parameters())
    manager = GraphManager([model.layers], Schedule(1, 1).order(0), backend=RecordingBackend(rng))
    replay, launches = RecordedGraph.replay, Launches()

    def counted(graph):
        launches.replaying = True
        replay(graph)
        launches.replaying = False
        launches.between.append([])

    RecordedGraph.replay = counted
    hidden = torch.randn(8, 2, MOE.hidden_size, requires_grad=True)
    for _ in range(4):
        manager.begin_step()
        with (launches := Launches()):
            output, *others = model.layers(hidden)
        found, loss = [launches.between], output.sum() + torch.stack(others[::2]).sum()
        with (launches := Launches()):
            loss.backward()
        found.append(launches.between)
    manager.remove()
    return found


@pytest.mark.full
@pytest.mark.parametrize("shared", (0, 16))
def test_operations_between_the_replays_of_a_layer(shared):
    """Of the layer in the middle: in front of the first one and behind the last one others are at work."""
    for forward, backward in run_ranks(launches_case, 2, shared):
        assert len(forward) == len(backward) == 3 + 1
        last = ["unpermute", "add", "bias_dropout_add_into"] if shared else ["unpermute_add_into"]
        assert sorted(forward[2]) == sorted(
            ["permute", "alltoall_base_", "permute"]
            + ["grouped_mlp_in", "grouped_mm", "unpermute", "alltoall_base_", *last]
        )
        copy = ["copy_"] if shared else []  # of the gradient of the shared expert's output
        assert sorted(backward[1]) == sorted(
            ["unpermute_backward_into", "alltoall_base_", "permute", "grouped_mm", "grouped_mm_wgrad_"]
            + ["gated_activation_backward", "grouped_mm", "grouped_mm_wgrad_", "unpermute"]
            + ["alltoall_base_", "unpermute_into", *copy]
        )
        if not shared:
            assert len(forward[2]) + len(backward[1]) < 20
