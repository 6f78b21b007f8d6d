"""Overlap of reduce-scatter and all-gather with compute in a training step with a sharded optimizer.

`python -m benchmarks.bench_overlap` trains on ranks whose collectives take as long as over a slow link
(`benchmarks.slow_link`). It prints for each case the time of a step where the link takes no time, where
communication overlaps, and where every collective is waited for where it begins. Exposed is the time in which
a rank waits while something is on its link, hidden the rest of what is on the link. Of the replicas of a
stage, the one that waits least in a step counts: the other one waits for that, not for the link.

Most cases have layers that sleep (`benchmarks.asleep`), so that compute takes the same time on a busy machine
too; the last ones compute. Either way the link has the rate at which a reduce-scatter takes as much of a
microbatch's backward as it does in training Llama 3 8B, see `LLAMA`. There is no rival.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.asleep import Asleep, AsleepLayer, AsleepModel, OneSample, Times, slept
from benchmarks.bench_train import OneBatch
from benchmarks.measure import environment
from benchmarks.overlap_plot import draw
from benchmarks.slow_link import Link, common_seconds
from fastmp.config import GPTConfig, GraphConfig, OptimizerConfig, TrainConfig
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import token_loss
from fastmp.training.microbatches import PipelineLoss
from fastmp.training.trainer import Trainer

WORKLOADS = ()
# The time of a step's reduce-scatters (float32) over that of a microbatch's backward; gathers (bfloat16) are
# half of it over the forward, which is half as long. Both by `fastmp plan recipe` for 64 H100s, 400 TFLOP/s
# and 50 GB/s for each of them. Llama 3 8B, tp 4, dp 16: 151 ms over 176. Qwen3 30B A3B, tp 4, ep 16: 138 ms
# over 39.
LLAMA, QWEN = 0.86, 3.5
LAYERS, SIZE = 32, 1 << 15
# Of a layer of Llama 3 8B: the shares of attention in parameters and time, the parameters of a bucket, those
# of a table, which are also the arithmetic of the output.
ATTENTION, BUCKET, TABLE = (0.19, 0.25), 0.73, 2.4
TIMES = Times(0.004, 0.004, 0.004)
WARM_STEPS = 3  # the first one counts gradients, the second one captures
MODES = ("free", "overlapped", "at once")


@dataclass(frozen=True)
class Case:
    """Model and layout of a run. proportion: see `LLAMA`. overlap: True if backward sends buckets."""

    name: str
    pp: int = 1
    vpp: int = 1
    microbatches: int = 2
    schedule: str = "1f1b"
    graphs: GraphConfig = field(default_factory=GraphConfig)
    proportion: float = LLAMA
    computes: bool = False
    overlap: bool = True
    times: Times = TIMES
    num_layers: int = LAYERS
    table: float = TABLE

    @property
    def world(self) -> int:
        return 2 * self.pp


IN_GRAPHS = GraphConfig(enabled=True, warmup=1)
CASES = (
    Case("eager"),
    Case("graphs", graphs=IN_GRAPHS),
    Case("graphs, scope full", graphs=replace(IN_GRAPHS, scope=("full",))),
    Case("eager, as Qwen3 30B A3B", proportion=QWEN),
    Case("pipeline, 1f1b", pp=2, microbatches=4),
    Case("pipeline, 1f1b, 2 chunks", pp=2, vpp=2, microbatches=4),
    Case("pipeline, zero bubble", pp=2, microbatches=4, schedule="zero_bubble"),
    Case("pipeline, graphs", pp=2, microbatches=4, graphs=IN_GRAPHS),
    Case("GPT, eager", computes=True),
    Case("GPT, graphs", computes=True, graphs=IN_GRAPHS),
)


@dataclass
class Seen:
    """Times of one step on one rank, in seconds."""

    step: float
    communication: float
    exposed: float


@dataclass(frozen=True)
class Row:
    """A case's figures in ms, means over stages. `trace` has one step of each stage.

    Times of steps are the least of some, which other work only prolongs; the others are medians.
    """

    name: str
    ranks: int
    microbatches: int
    free_ms: float
    overlapped_ms: float
    at_once_ms: float
    communication_ms: float
    exposed_ms: float
    hidden: float
    trace: list[list[tuple[str, float, float]]]

    def line(self) -> str:
        times = (self.free_ms, self.overlapped_ms, self.at_once_ms, self.communication_ms, self.exposed_ms)
        return f"{self.name:<26}" + "".join(f"{ms:>12.1f}" for ms in times) + f"{self.hidden:>10.1%}"


DRAWN = {
    "eager": "eager: a step of two microbatches, and the beginning of the next one",
    "graphs, scope full": "graphs, scope full: one graph holds all layers",
    "pipeline, 1f1b, 2 chunks": "first rank of a pipeline of two, with two chunks",
}
HEADER = (
    f"{'ms of a step':<26}{'free link':>12}{'overlapped':>12}{'at once':>12}{'on the link':>12}"
    f"{'exposed':>12}{'hidden':>10}"
)


def _asleep_chunks(case: Case, stage: int) -> list[nn.Module]:
    """The chunks of a pipeline rank."""
    each, chunks = case.num_layers // (case.pp * case.vpp), []
    for chunk in range(case.vpp):
        number = chunk * case.pp + stage
        first, last = number == 0 and case.table, number == case.pp * case.vpp - 1 and case.table
        chunks.append(
            AsleepModel(
                [Asleep(case.table * SIZE, case.times.scaled(0))] if first else [],
                [AsleepLayer(SIZE, case.times, ATTENTION) for _ in range(each)],
                [Asleep(case.table * SIZE, case.times.scaled(case.table))] if last else [],
            )
        )
    return chunks


def make_trainer(case: Case, groups: ParallelGroups) -> Trainer:
    layer_size, batch = SIZE, case.microbatches * 2
    model: nn.Module | list[nn.Module]
    loss: Any
    data: Any
    if case.computes:
        config = GPTConfig(
            num_layers=16,
            hidden_size=192,
            num_heads=4,
            vocab_size=2816,
            max_seq_len=256,
            tie_embeddings=False,
        )
        model, loss, data = (
            GPT(config, Placement(dtype=torch.bfloat16)),
            token_loss,
            OneBatch(1, 256, 2816, 0),
        )
        layer_size = 12 * config.hidden_size**2
    else:
        chunks = _asleep_chunks(case, group_rank(groups.pp))
        model, data = chunks if case.pp > 1 else chunks[0], OneSample()
        loss = _sum_of
        if case.pp > 1:
            loss = PipelineLoss(lambda batch: batch["x"], lambda x, _: _summed(x), schedule=case.schedule)
    train = TrainConfig(steps=1 << 30, global_batch_size=batch, eval_interval=0, dtype="bfloat16")
    optimizer = OptimizerConfig(bucket_size=int(BUCKET * layer_size), schedule="constant")
    trainer = Trainer(model, data, loss, train, optimizer=optimizer, groups=groups, graphs=case.graphs)
    trainer.grads.overlap = case.overlap
    return trainer


def _sum_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return _summed(model(batch["x"]))


def _summed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(), torch.ones((), dtype=torch.int64)


class _Stopwatch:
    """Switches the link from mode to mode, two steps each, and notes the second one."""

    def __init__(self, case: Case, trainer: Trainer, link: Link, rounds: int, modes: Sequence[str]) -> None:
        self.case, self.trainer, self.link, self.modes = case, trainer, link, modes
        self.seen: dict[str, list[Seen]] = {mode: [] for mode in modes}
        self.last = WARM_STEPS + 2 * len(modes) * rounds
        self.starts: list[float] = []
        self.rate = math.inf if case.computes else self._rate(0.0)
        self.traced = (0.0, 0.0)
        self.optimizing: list[tuple[float, float]] = []
        step = trainer.optimizer.step

        def timed(*arguments: Any, **options: Any) -> None:
            start = time.perf_counter()
            step(*arguments, **options)
            self.optimizing.append((start, time.perf_counter()))

        trainer.optimizer.step = timed  # type: ignore[method-assign]

    def begin(self, number: int) -> None:
        """Begin a step: the previous one is over."""
        now = time.perf_counter()
        if number > WARM_STEPS and (number - WARM_STEPS) % 2 == 0:
            mode = self.modes[(number - WARM_STEPS) // 2 % len(self.modes) - 1]
            self._note(mode, self.starts[-1], now)
            if mode == "free":  # the machine may be busier than in the round before
                self.rate = self._rate(now - self.starts[-1])
        self.starts.append(now)
        mode = self.modes[max(0, number - WARM_STEPS) // 2 % len(self.modes)]
        self.link.rate = math.inf if mode == "free" else self.rate
        self.link.at_once = mode == "at once"

    def _note(self, mode: str, start: float, end: float) -> None:
        transfers = [each for each in self.link.transfers if each.end > start and each.start < end]
        waits = [each for each in self.link.waits if each.end > start and each.start < end]
        self.seen[mode].append(
            Seen(
                end - start,
                sum(each.end - each.start for each in transfers),
                common_seconds(transfers, waits),
            )
        )
        if mode == "overlapped":
            self.traced = start, end

    def _rate(self, step: float) -> float:
        """The rate at which a reduce-scatter of all gradients takes its share of a microbatch's backward."""
        times, layers = self.case.times, self.case.num_layers / self.case.pp
        backward = (times.backward_input + times.backward_weight) * layers
        if self.case.computes:
            backward = step / self.case.microbatches * 2 / 3
        num_bytes = sum(flat.grad.nbytes for flat in self.trainer.grads.flats) / 2  # two replicas
        return num_bytes / (self.case.proportion * backward)

    def trace(self) -> list[tuple[str, float, float]]:
        """(kind, start, end) of what happened in the last overlapped step and after it, in ms."""
        start, end = self.traced
        until = end + 0.3 * (end - start)
        every = [(each.kind, each.start, each.end) for each in (*slept, *self.link.transfers)]
        every += [("optimizer", *each) for each in self.optimizing]
        inside = [each for each in every if start <= each[1] < until and each[2] - each[1] > 2e-4]
        return sorted(
            (kind, round(1e3 * (a - start), 2), round(1e3 * (b - start), 2)) for kind, a, b in inside
        )


def run_case(
    rank: int, world: int, case: Case, rounds: int, modes: Sequence[str] = MODES
) -> tuple[int, dict[str, list[Seen]], list]:
    """Train; return this rank's stage, what it has seen in each mode, and a trace; for `run_ranks`."""
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=case.pp))
    link = Link()
    with link.installed():
        trainer = make_trainer(case, groups)
        watch = _Stopwatch(case, trainer, link, rounds, modes)
        trainer.config = replace(trainer.config, steps=watch.last + 1)
        trainer.train(before_step=watch.begin)
        trainer.close()
    return group_rank(groups.pp), watch.seen, watch.trace()


def measure(case: Case, rounds: int) -> Row:
    results = run_ranks(run_case, case.world, case, rounds, timeout=580)

    def mean(mode: str, name: str) -> float:
        found, middle = [], min if name == "step" else statistics.median
        for stage in range(case.pp):
            replicas = [seen[mode] for number, seen, _ in results if number == stage]
            least = [min(getattr(each, name) for each in step) for step in zip(*replicas, strict=True)]
            found.append(middle(least))
        return 1e3 * statistics.mean(found)

    communication, exposed = mean("overlapped", "communication"), mean("overlapped", "exposed")
    traces = {stage: trace for stage, _, trace in results}
    return Row(
        case.name, case.world, case.microbatches,
        *(mean(mode, "step") for mode in MODES),
        communication, exposed, 1 - exposed / communication, [traces[stage] for stage in range(case.pp)],
    )  # fmt: skip


def test_eager(benchmark):
    _benchmark(benchmark, CASES[0])


def test_graphs(benchmark):
    _benchmark(benchmark, CASES[1])


def _benchmark(benchmark: Any, case: Case) -> None:
    """Benchmark a whole training run; the times of its steps are in `extra_info`."""
    row = benchmark.pedantic(measure, args=(case, 1 if benchmark.disabled else 3))
    benchmark.extra_info.update({name: value for name, value in asdict(row).items() if name != "trace"})


def _saved(row: Row) -> dict[str, Any]:
    """Round the figures of a row for a file; of traces it gets those that are drawn."""
    values = {n: float(f"{v:.5g}") if isinstance(v, float) else v for n, v in asdict(row).items()}
    return {**values, "trace": row.trace[:1] if row.name in DRAWN else []}


def _compact(text: str) -> str:
    """Put every event of a trace on one line."""
    return re.sub(r'\[\s+("[a-z_-]+"),\s+([-\d.]+),\s+([-\d.]+)\s+\]', r"[\1, \2, \3]", text)


def draw_rows(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw the first stage of the cases in `DRAWN`."""
    traces = [(DRAWN[row["name"]], row["trace"][0]) for row in rows if row["name"] in DRAWN]
    draw(traces, out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_overlap", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--plot", type=Path, help="draw steps of some of the cases: png, svg or pdf")
    parser.add_argument("--from", type=Path, metavar="FILE", help="draw those in FILE, written by --out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="NAME", help="cases with NAME in theirs")
    options = parser.parse_args(arguments)
    if source := getattr(options, "from"):
        draw_rows(json.loads(source.read_text())["rows"], options.plot)
        return 0
    torch.set_num_threads(1)
    rows = []
    print(HEADER)
    for case in CASES:
        if options.only in case.name:
            rows.append(measure(case, options.rounds))
            print(rows[-1].line(), flush=True)
    if options.out:
        result = {**environment("cpu"), "rounds": options.rounds, "rows": [_saved(row) for row in rows]}
        options.out.write_text(_compact(json.dumps(result, indent=1)) + "\n")
    if options.plot:
        draw_rows([asdict(row) for row in rows], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
