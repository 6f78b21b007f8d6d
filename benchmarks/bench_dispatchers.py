"""A layer of experts over ranks by each dispatcher: eager, in graphs, and two microbatches at once.

`python -m benchmarks.bench_dispatchers` measures ranks forked on this machine's CPU. On GPUs it runs under a
launcher: `fastmp launch -m benchmarks.bench_dispatchers`. All ways take turns in one process of each rank, on
the same tokens with the same weights; a step is forward and backward of some microbatches, and takes as long
as its slowest rank. Beside the dispatchers run all experts on each rank, which exchanges nothing, and an
all-to-all written in plain torch. A CPU has recorded graphs, which run every op again, and no streams: there,
graphs and two microbatches at once show what they cost, not what they save.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

import fastmp
from benchmarks.bench_moe_layer import Weights
from benchmarks.measure import environment, in_turn, speedup, synchronize
from fastmp.config import GPTConfig, MoEConfig
from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.overlapped import OverlappedGraphManager
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import LayerChain, Placement
from fastmp.nn.moe.activation_stash import ActivationStash
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.overlap import OverlappedLayers
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks

WORKLOADS = ()
MICROBATCHES, WARMUP = 4, 3  # in the third step all graphs are captured
EAGER, GRAPHS, OVERLAPPED, BOTH = "eager", "in graphs", "two at once", "two at once, graphs"
LOCAL, PLAIN, LIMITED, STASH = "local", "torch all-to-all", "symmetric, capacity", "symmetric, stash"
CAPACITY = 1.5
WAYS = (
    *((LOCAL, mode) for mode in (EAGER, GRAPHS)),
    *(("alltoall", mode) for mode in (EAGER, GRAPHS, OVERLAPPED, BOTH)),
    *(("allgather", mode) for mode in (EAGER, GRAPHS)),
    *(("symmetric", mode) for mode in (EAGER, GRAPHS, OVERLAPPED, BOTH)),
    *((LIMITED, mode) for mode in (EAGER, GRAPHS)),
    *((STASH, mode) for mode in (EAGER, GRAPHS)),
    *(("deepep", mode) for mode in (EAGER, GRAPHS, OVERLAPPED, BOTH)),
    (PLAIN, EAGER),
)
BASE = ("alltoall", EAGER)


class Shape(NamedTuple):
    """Tokens of a rank's microbatch, the layer's width, experts and choices, and an expert's hidden units."""

    tokens: int
    hidden: int
    experts: int
    top_k: int
    ffn: int


# Short and long microbatches of a small model; Qwen3-30B-A3B, and Mixtral 8x7B.
CPU_SHAPES = (Shape(32, 256, 32, 8, 96), Shape(512, 256, 32, 8, 96))
GPU_SHAPES = (Shape(512, 2048, 128, 8, 768), Shape(4096, 2048, 128, 8, 768), Shape(8192, 4096, 8, 2, 14336))
Step = Callable[[], Tensor]  # a step; returns the output of its last microbatch


@dataclass(frozen=True)
class Row:
    """Minimum step time of one dispatcher, and its median ratio to an eager all-to-all."""

    shape: Shape
    dtype: str
    dispatcher: str
    mode: str
    ms: float
    of_alltoall: float


class _Torch(torch.nn.Module):
    """Expert parallelism in plain torch: rows are sorted before and after the all-to-all."""

    def __init__(self, layer: MoELayer, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.router, self.fc1, self.fc2 = (
            torch.nn.Parameter(weight.detach().clone())
            for weight in (layer.router.weight, layer.experts.fc1, layer.experts.fc2)
        )
        self.top_k, self.group = layer.moe.top_k, group

    def forward(self, x_S1H: Tensor) -> tuple[Tensor, Tensor]:
        x, ranks, local = x_S1H.flatten(0, 1), self.group.size(), len(self.fc1)
        experts, probs = Weights(self.router, self.fc1, self.fc2).route(x, self.top_k)
        pairs = experts.flatten().argsort(stable=True)
        tokens, counts = pairs // self.top_k, experts.flatten().bincount(minlength=ranks * local)
        arriving = all_to_all_single(counts, None, None, self.group).view(ranks, local)
        sent, received = counts.view(ranks, local).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all_single_autograd(x[tokens], received, sent, self.group)
        owner = torch.arange(local, device=x.device).repeat(ranks)
        order = owner.repeat_interleave(arriving.flatten()).argsort(stable=True)
        ends = arriving.sum(0).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows[order], self.fc1.transpose(1, 2), offs=ends).chunk(2, -1)
        outputs = F.grouped_mm(F.silu(gate) * up, self.fc2.transpose(1, 2), offs=ends)
        rows = all_to_all_single_autograd(outputs[order.argsort()], sent, received, self.group)
        weighted = (rows * probs.flatten()[pairs, None]).to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, weighted).view_as(x_S1H), x.new_zeros(())


def _layer(dispatcher: str, config: GPTConfig, groups: ParallelGroups, on: Placement) -> MoELayer:
    """The layer with the same weights for all dispatchers."""
    assert config.moe is not None
    moe = config.moe
    if dispatcher == LIMITED:
        moe = replace(moe, dispatcher="symmetric", symmetric_capacity=CAPACITY)
    elif dispatcher not in (LOCAL, PLAIN):
        moe = replace(moe, dispatcher="symmetric" if dispatcher == STASH else dispatcher)
    own = ParallelGroups.alone() if dispatcher == LOCAL else groups
    torch.manual_seed(1)
    layer = MoELayer(replace(config, moe=moe), replace(on, groups=own))
    if dispatcher == STASH:  # of one layer, for the largest load
        layer.stash = ActivationStash(lambda balanced, capacity: capacity)
    return layer


class _Upstream(torch.autograd.Function):
    """A loss whose gradient is given, without traffic of its own."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def _step(layer: torch.nn.Module, mode: str, x: Tensor, grad: Tensor) -> Step:
    """Make the step of one way, which has run until all graphs are captured."""
    chain = LayerChain([layer])
    manager = layers = None
    if not isinstance(layer, _Torch):
        GradBuffer(chain.named_parameters())
    schedule = Schedule(1, MICROBATCHES, overlap=mode in (OVERLAPPED, BOTH))
    if schedule.overlap:
        layers = OverlappedLayers([chain])
    if mode in (GRAPHS, BOTH):
        backend = CudaBackend() if x.is_cuda else RecordingBackend()
        manager = (
            GraphManager([chain], schedule.order(0), backend=backend)
            if layers is None
            else OverlappedGraphManager(layers, schedule.together(0), backend=backend)
        )

    outputs: list[Tensor] = []

    def loss(_: int) -> Tensor:
        output, aux, *_ = chain(x)
        outputs[:] = [output.detach()]
        return _Upstream.apply(output, grad) + aux

    options: dict[str, Any] = {"pairs": schedule.all_pairs(), "overlap": layers}
    pipeline = Pipeline([chain], schedule.orders(), group=None, inputs=None, loss=loss, **options)

    def run() -> Tensor:
        if manager is not None:
            manager.begin_step()
        pipeline.train(range(MICROBATCHES))
        return outputs[0]

    for _ in range(WARMUP):
        run()
    return run


def run_shape(
    rank: int, world: int, shape: Shape, rounds: int, device: str = "cpu"
) -> tuple[dict[tuple[str, str], list[float]], dict[str, str]]:
    """Time all ways: the ms of each round on this rank, and why others are not measured; for `run_ranks`."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    grid = RankGrid(world_size=world, ep=world)
    groups, limited = ParallelGroups.create(grid), ParallelGroups.create(grid)  # with memory of its own
    moe = MoEConfig(
        num_experts=shape.experts, top_k=shape.top_k, expert_ffn_hidden_size=shape.ffn, normalize_topk=True
    )
    config = GPTConfig(
        hidden_size=shape.hidden,
        num_heads=1,
        activation="swiglu",
        linear_bias=False,
        init_std=shape.hidden**-0.5,
        moe=moe,
    )
    on = Placement(device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(shape.tokens, 1, shape.hidden, generator=generator) for _ in range(2))
    x, grad = x.to(device, dtype).requires_grad_(), grad.to(device, dtype)
    steps: dict[tuple[str, str], Step] = {}
    absent: dict[str, str] = {}
    for dispatcher, mode in WAYS:
        if dispatcher in absent:
            continue
        try:
            layer: torch.nn.Module = _layer(
                dispatcher, config, limited if dispatcher == LIMITED else groups, on
            )
        except ValueError as error:
            absent[dispatcher] = str(error)
            continue
        if dispatcher == PLAIN:
            assert groups.ep is not None and isinstance(layer, MoELayer)
            layer = _Torch(layer, groups.ep)
        steps[dispatcher, mode] = _step(layer, mode, x, grad)
        output = steps[dispatcher, mode]()
        if mode == EAGER and dispatcher == LOCAL:
            expected = output.clone()
        torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
        if isinstance(layer, MoELayer) and layer.dropped_pairs is not None:
            assert not layer.dropped_pairs, f"{dispatcher} drops pairs: a step has less to do"

    def timed(step: Step) -> float:
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        step()
        synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    return in_turn({way: partial(timed, step) for way, step in steps.items()}, rounds), absent


def rows_of(shape: Shape, of_ranks: Sequence[dict[tuple[str, str], list[float]]], device: str) -> list[Row]:
    """Make rows of the times of all ranks."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    first, *_ = of_ranks
    times = {
        way: [max(each) for each in zip(*(seen[way] for seen in of_ranks), strict=True)] for way in first
    }
    return [Row(shape, dtype, *way, min(each), speedup(times[BASE], each)) for way, each in times.items()]


def table(rows: Sequence[Row], absent: dict[str, str]) -> str:
    """The rows of one shape, and what is not among them."""
    shape = rows[0].shape
    lines = [f"{'  '.join(f'{name} {size}' for name, size in shape._asdict().items())}, {rows[0].dtype}"]
    lines.append(f"{'':<44}{'ms a step':>12}{'of an eager all-to-all':>26}")
    for row in rows:
        lines.append(f"  {row.dispatcher + ', ' + row.mode:<42}{row.ms:>12.2f}{row.of_alltoall:>26.2f}")
    return "\n".join(lines + [f"  {name}: not measured: {why}" for name, why in absent.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_dispatchers", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="on a CPU; a launcher has its own number")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    options = parser.parse_args(arguments)
    runtime = fastmp.init() if "RANK" in os.environ else None
    torch.set_num_threads(1)
    device = "cpu" if runtime is None else str(runtime.device)
    rank, ranks = (0, options.ranks) if runtime is None else (runtime.rank, runtime.world_size)
    rows: list[Row] = []
    absent: dict[str, str] = {}
    for shape in CPU_SHAPES if device == "cpu" else GPU_SHAPES:
        if runtime is None:
            results = run_ranks(run_shape, ranks, shape, options.rounds, timeout=600)
        else:
            results = [None] * ranks
            dist.all_gather_object(results, run_shape(rank, ranks, shape, options.rounds, device))
        absent = results[0][1]
        found = rows_of(shape, [seen for seen, _ in results], device)
        rows += found
        if rank == 0:
            print(table(found, absent), flush=True)
    if options.out and rank == 0:
        saved = [
            {
                **asdict(row),
                "shape": row.shape._asdict(),
                "ms": float(f"{row.ms:.4g}"),
                "of_alltoall": round(row.of_alltoall, 3),
            }
            for row in rows
        ]
        result = {
            **environment(device), "ranks": ranks, "rounds": options.rounds, "microbatches": MICROBATCHES,
            "capacity": CAPACITY, "rows": saved, "not_measured": absent,
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
