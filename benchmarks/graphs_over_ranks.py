"""Host time of expert-parallel layers whose graphs do nothing; `bench_graphs` prints it.

Each layer is a run of its own, as where gradients are summed in buckets. With an all-to-all, the exchange and
the experts run between two graphs: here with their compute, where the host of a GPU only launches it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.report import NOT_MEASURED
from fastmp.config import GPTConfig, MoEConfig
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.overlapped import OverlappedGraphManager
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import LayerChain, Placement, TransformerLayer
from fastmp.nn.moe.dispatchers.alltoall import AllToAllDispatcher
from fastmp.nn.overlap import OverlappedLayers
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks
from tools.silent_graphs import SilentBackend

RANKS, LAYERS, MICROBATCHES = 2, 2, 4
WARMUP = 3  # steps, after which all graphs are captured
DISPATCHERS = ("alltoall", "symmetric")
MOE = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=16, aux_loss=0.01)
CONFIG = GPTConfig(hidden_size=64, num_heads=4, activation="swiglu", max_seq_len=16, moe=MOE)


def layer_us(rank: int, world: int, dispatcher: str, steps: int) -> tuple[float, float]:
    """Return the least times of a layer's forward and backward on this rank, in us; for `run_ranks`."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    config = replace(CONFIG, moe=replace(MOE, dispatcher=dispatcher))
    chain = LayerChain([TransformerLayer(config, Placement(groups)) for _ in range(LAYERS)])
    order = Schedule(1, MICROBATCHES).order(0)
    manager = GraphManager([chain], order, backend=SilentBackend(), span_size=1)
    GradBuffer(chain.named_parameters())
    hidden = torch.randn(CONFIG.max_seq_len, 1, CONFIG.hidden_size, requires_grad=True)
    times: list[tuple[int, int]] = []
    for _ in range(WARMUP + steps):
        manager.begin_step()
        for _ in range(MICROBATCHES):
            start = time.perf_counter_ns()
            output, *others = chain(hidden)
            middle = time.perf_counter_ns()
            made = (output, *others[::2])  # behind each auxiliary loss are the counts of its experts
            grads = [torch.ones_like(each) for each in made]
            begun = time.perf_counter_ns()
            torch.autograd.backward(made, grads)
            times.append((middle - start, time.perf_counter_ns() - begun))
    forward, backward = zip(*times[WARMUP * MICROBATCHES :])
    return min(forward) / 1e3 / LAYERS, min(backward) / 1e3 / LAYERS


def two_at_once_us(rank: int, world: int, dispatcher: str, graphs: bool, steps: int) -> float:
    """Return the least time of a layer and microbatch, both ways, where two run at once; for `run_ranks`."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    config = replace(CONFIG, moe=replace(MOE, dispatcher=dispatcher))
    chain = LayerChain([TransformerLayer(config, Placement(groups)) for _ in range(LAYERS)])
    layers, schedule = OverlappedLayers([chain]), Schedule(1, MICROBATCHES, overlap=True)
    backend = SilentBackend()
    manager = OverlappedGraphManager(layers, schedule.together(0), backend=backend) if graphs else None
    GradBuffer(chain.named_parameters())
    hidden = torch.randn(CONFIG.max_seq_len, 1, CONFIG.hidden_size, requires_grad=True)

    def loss(_: int) -> torch.Tensor:
        output, *others = chain(hidden)
        return sum((each.sum() for each in others[::2]), start=output.sum())

    options: dict[str, Any] = {"pairs": schedule.all_pairs(), "overlap": layers}
    pipeline = Pipeline([chain], schedule.orders(), group=None, inputs=None, loss=loss, **options)
    times = []
    for _ in range(WARMUP + steps):
        start = time.perf_counter_ns()
        if manager is not None:
            manager.begin_step()
        pipeline.train(range(MICROBATCHES))
        times.append(time.perf_counter_ns() - start)
    return min(times[WARMUP:]) / 1e3 / LAYERS / MICROBATCHES


def layers_over_ranks(device: str, steps: int = 30) -> Iterator[str]:
    yield f"experts over {RANKS} ranks, a layer and microbatch in us, graphs that do nothing: both ways"
    for dispatcher in DISPATCHERS:
        if device == "cpu":
            times = run_ranks(layer_us, RANKS, dispatcher, steps)
            found = "".join(f"{max(each):>10.1f}" for each in zip(*times))
        else:
            found = f"  {NOT_MEASURED}"
        yield f"{dispatcher:>20}{found}"
    yield "the same of two microbatches at once, forward and backward: eager, and what computes in graphs"
    for dispatcher in DISPATCHERS:
        found = f"  {NOT_MEASURED}"
        if device == "cpu":
            ways = [run_ranks(two_at_once_us, RANKS, dispatcher, graphs, steps) for graphs in (False, True)]
            found = "".join(f"{max(times):>10.1f}" for times in ways)
        yield f"{dispatcher:>20}{found}"


def sizes_on_the_host(ranks: int = 8, experts: int = 64, rounds: int = 2000) -> Iterator[str]:
    """Host time of an all-to-all besides its operations: turning the counts of all ranks into sizes."""
    dispatcher = AllToAllDispatcher(experts, ep_group=None, etp_group=None, etp_ep_group=None)
    dispatcher.ep, dispatcher.num_local = ranks, experts // ranks  # a rank of a group that nobody asks
    copy_RX = dispatcher.copies.start(torch.full((ranks, experts + 1), 7, dtype=torch.int32))
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        numbers = dispatcher._received_counts(copy_RX)
        dispatcher._splits(numbers)  # in `dispatch`
        dispatcher._values(numbers)[-dispatcher.num_local :]  # in `sizes`, of the experts' GEMMs
        dispatcher._splits(numbers)  # in `combine`
        times.append(time.perf_counter_ns() - start)
    yield f"all sizes of an all-to-all in us, {ranks} ranks, {experts} experts: {min(times) / 1e3:.1f}"
