"""Growth of control work with the number of ranks: start-up, heartbeats, a step, a checkpoint, a diagnosis.

`python -m benchmarks.scale` simulates jobs of 64 to 16,384 ranks in one process. Each part calls the
product's own functions for one rank, for one machine, or for all ranks in turn, with torch's "fake" backend
or a store that counts what passes through it. It prints a table with the growth of each quantity, the
exponent of a power law. `--json`, `--page` and `--plot` write the results, the table of docs/scale.md and
its picture. Times are CPU times of this process: compare ratios. There is no baseline.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import environment
from fastmp.config import GPTConfig, TrainConfig
from fastmp.distributed import rendezvous
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rendezvous import fresh_store
from fastmp.nn import GPT, Placement
from fastmp.training.checkpoint.storage import ShardedTensorRef, ShardSavePlanner
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer
from fastmp.watchdog.channel import Channel
from fastmp.watchdog.diagnosis import diagnose
from fastmp.watchdog.heartbeat import contents, heartbeat, node_message, pack
from fastmp.watchdog.inspector import host_id
from fastmp.watchdog.node import Leader, Node
from fastmp.watchdog.records import Call, RankRecord, calls_kept, pack_ranks

WORKLOADS = ()
WORLDS = (64, 256, 1024, 4096, 16_384)
MACHINE = 8  # ranks
INTERVAL = 1.0  # seconds between two heartbeats
ITEMS = 8  # parameters of a stage whose optimizer state is sharded
OVERHEAD = 9  # bytes of a request to the store beside keys and values
RESULTS = Path(__file__).parent / "results" / "scale.json"
PAGE = Path(__file__).parent.parent / "docs" / "scale.md"


class Quantity(NamedTuple):
    """A row of the table.

    total: it is a sum over all ranks, which may grow like N log N; else it is of one rank, and may grow like
    log N. why: what requires it to grow faster, if anything does.
    """

    name: str
    text: str
    unit: str
    total: bool = False
    why: str = ""


EVERY_GROUP = "torch.distributed has every rank create all groups"
QUANTITIES = (
    Quantity("new_groups", "`new_group` calls of a rank", "calls", why=EVERY_GROUP),
    Quantity("group_seconds", "time in which a rank makes its groups", "s", why=EVERY_GROUP),
    Quantity("join_bytes", "store traffic of all ranks to join", "B", total=True),
    Quantity("heartbeat_bytes", "heartbeat of a rank", "B"),
    Quantity("message_bytes", "message of a node leader", "B"),
    Quantity("store_rate", "store traffic of all heartbeats", "B/s", total=True),
    Quantity("leader_share", "share of a node leader's time", "s/s"),
    Quantity("step_collectives", "small collectives of a rank in a step", "calls"),
    Quantity("step_bytes", "bytes of these", "B"),
    Quantity("plan_seconds", "checkpoint plan of all ranks, on rank 0", "s", total=True),
    Quantity("records_bytes", "records read for a diagnosis", "B", total=True),
    Quantity("records_seconds", "decoding them, on one rank", "s", total=True),
    Quantity("diagnose_seconds", "the diagnosis itself", "s", total=True),
)


def grid_of(world_size: int) -> RankGrid:
    return RankGrid(world_size=world_size, tp=8, pp=4, ep=8, etp=1)


@contextmanager
def pretended(world_size: int) -> Iterator[list[Any]]:
    """A torch.distributed of which this process is rank 0, and where collectives do nothing.

    It counts the calls of `new_group`, and gives all groups the backend "fake".
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # makes the backend "fake" known

    inner, calls = dist.new_group, []

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        calls.append(backend)
        return inner(*args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    dist.new_group = new_group
    try:
        yield calls
    finally:
        dist.new_group = inner
        dist.destroy_process_group()


def groups_of_a_rank(world_size: int) -> dict[str, float]:
    """Create the process groups of rank 0."""
    with pretended(world_size) as calls:
        begin = time.process_time()
        ParallelGroups.create(grid_of(world_size))
        return {"new_groups": len(calls), "group_seconds": time.process_time() - begin}


class CountingStore:
    """A store in this process that counts the bytes of all requests and answers.

    arrive: called at the first look for a key that is not there. `comes` makes all looks successful.
    """

    def __init__(self, arrive: Callable[[], None] = lambda: None) -> None:
        self.inner, self.bytes, self._arrive = dist.HashStore(), 0, arrive

    def comes(self, key: str) -> bool:
        self._count(([key],), None)
        if not self.inner.check([key]):
            arrive, self._arrive = self._arrive, lambda: None
            arrive()
        return True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = getattr(self.inner, name)(*arguments)
            self._count(arguments, answer)
            return answer

        return call

    def _count(self, arguments: Sequence[Any], answer: Any) -> None:
        parts: list[Any] = [answer]
        for each in arguments:
            parts += each if isinstance(each, list) else [each]
        self.bytes += OVERHEAD + sum(len(x) if isinstance(x, (str, bytes)) else 8 for x in parts)


def join(world_size: int) -> dict[str, float]:
    """Let all ranks agree on a store, one after the other: who would wait lets the others come first."""

    def others() -> None:
        for rank in range(1, world_size):
            fresh_store(store, rank, world_size, timedelta(seconds=60))

    store: Any = CountingStore(others)
    inner, look = dist.PrefixStore, rendezvous._is_there
    dist.PrefixStore = lambda prefix, store: store  # a counting store is none of torch's
    rendezvous._is_there = CountingStore.comes
    try:
        fresh_store(store, 0, world_size, timedelta(seconds=60))
    finally:
        dist.PrefixStore, rendezvous._is_there = inner, look
    return {"join_bytes": store.bytes}


class Job:
    """Simulated ranks of a large model over NCCL: what each would report."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.host_id = world_size, host_id()
        self._groups: list[dict[str, list[list[int]]]] = [{} for _ in range(world_size)]
        grid, every = grid_of(world_size), list(range(world_size))
        kinds = {"default_pg": [every], "fastmp:checkpoint": [every]}
        axes = ("tp", "dp", "pp", "ep", "edp", "tp-dp", "tp-pp", "cp-dp")
        kinds |= {f"fastmp:{axes}": grid.ranks(axes) for axes in axes}
        for kind, groups in kinds.items():
            for number, ranks in enumerate(groups):
                packed = pack_ranks(ranks)
                for rank in ranks:
                    own = self._groups[rank]
                    own |= {f"{kind} {number}{backend}": packed for backend in ("", "/nccl")}

    def heartbeat(self, rank: int, beat: int, stuck: bool = False) -> dict[str, Any]:
        """Return the heartbeat of a rank; in a job that is `stuck`, all wait for one in the middle."""
        groups, inside = self._groups[rank], None
        calls: tuple[Call, ...] = ()
        late = stuck and rank == self.world_size // 2
        begun = {name: 5000 + 7 * beat - late for name in groups if name.endswith("/nccl")}
        if stuck:
            kept = calls_kept(self.world_size)
            calls = tuple(
                Call("all_reduce", name, last - kept + i + 1, ((4096, 2048),), ("BFloat16",), 1.7e9 + i)
                for i in range(kept)
                for name, last in begun.items()
            )
            inside = None if late else next(c for c in calls[::-1] if c.group == "default_pg 0/nccl")
        record = RankRecord(
            rank, f"node{rank // MACHINE:05d}", os.getpid(), 100 + beat, "backward of microbatch 3 chunk 0",
            "tensor_parallel/layers.py:210 in forward", inside, calls, begun, stalled=400.0 * stuck,
        )  # fmt: skip
        return heartbeat(record, groups, beat, self.host_id, investigating=stuck, away=False)


@dataclass
class Traffic:
    """Cost of heartbeats: of one rank, of one machine's message, of all machines through the store."""

    heartbeat_bytes: float
    message_bytes: float
    store_rate: float
    leader_share: float


def heartbeat_traffic(world_size: int, beats: int = 24) -> Traffic:
    """Run the ranks of the first machine for some heartbeats; count what their leader sends and polls."""
    job, store = Job(world_size), CountingStore()
    token, ranks = uuid4().hex, range(MACHINE)
    nodes = [Node(rank, job.host_id, 4 * INTERVAL) for rank in ranks]
    channel = Channel(INTERVAL, 0, world_size)
    channel._store, channel.token = store, token
    leader = Leader(nodes[0], channel, world_size, INTERVAL)
    for node in nodes:
        node.join(token)
    size, seconds, sent, settled = 0, 0.0, 0, 0
    try:
        for beat in range(2 * beats):
            if beat == beats:  # the first half holds what is sent once
                settled, seconds = store.bytes, 0.0
            made = [job.heartbeat(rank, beat) for rank in ranks]
            for node, content in list(zip(nodes, made))[1:]:
                node.beat(content, beat * INTERVAL)
            begin = time.process_time()
            nodes[0].beat(made[0], beat * INTERVAL)
            assert nodes[0].leads(beat * INTERVAL)
            leader.send(beat, beat * INTERVAL, last=False)
            out, channel._out = channel._out, {}
            channel._exchange(out, channel._leader)
            channel._leader = None
            seconds += time.process_time() - begin
            size = len(json.dumps(made[0]))
            sent = len(store.inner.get("message-0"))
    finally:
        for node in nodes:
            node.beat({**made[node.rank], "away": True}, 0.0)
        for node in nodes:
            node.leave(0.0)
    rate = (store.bytes - settled) / (beats * INTERVAL) * (world_size / MACHINE)
    return Traffic(size, sent, rate, seconds / (beats * INTERVAL))


class _SmallCollectives(TorchDispatchMode):
    """Counts control collectives on each rank, which carry at most 4 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            size = sum(x.nbytes for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
            if size <= 4096:
                self.calls, self.bytes = self.calls + 1, self.bytes + size
        return func(*args, **(kwargs or {}))


def step(world_size: int) -> dict[str, float]:
    """Train rank 0 of a small model for two steps, and count the small collectives of the second one."""
    model = GPTConfig(num_layers=1, hidden_size=64, num_heads=2, vocab_size=512, max_seq_len=16)

    class Samples:
        micro_batch_size = 1

        def batch(self, *place: int) -> dict[str, torch.Tensor]:
            ids = torch.zeros(1, 16, dtype=torch.int64)
            return {"tokens": ids, "targets": ids}

    with pretended(world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size), local_only=True)
        config = TrainConfig(global_batch_size=world_size, steps=2)
        trainer = Trainer(GPT(model, Placement(groups=groups)), Samples(), token_loss, config, groups=groups)
        trainer.train_step()
        with _SmallCollectives() as counted:
            trainer.train_step()
    return {"step_collectives": counted.calls, "step_bytes": counted.bytes}


def checkpoint_plan(world_size: int) -> dict[str, float]:
    """Plan a checkpoint for ranks that each hold one shard of every parameter's optimizer state."""
    plans = []
    for rank in range(world_size):
        shard = torch.empty(16, device="meta")
        state = {
            f"optimizer/layers.{item}.mlp.weight/exp_avg": ShardedTensorRef(
                (16 * world_size,), torch.float32, [((16 * rank,), shard)]
            )
            for item in range(ITEMS)
        }
        planner = ShardSavePlanner()
        planner.set_up_planner(state)
        plans.append(planner.create_local_plan())
    spent = []
    for _ in range(3):
        begin = time.process_time()
        ShardSavePlanner().create_global_plan(plans)
        spent.append(time.process_time() - begin)
    return {"plan_seconds": min(spent)}


def diagnosis(world_size: int) -> dict[str, float]:
    """Send the records of all ranks of a hung job, read them as the reporting rank, and diagnose them."""
    job, late = Job(world_size), world_size // 2
    machines = [range(first, first + MACHINE) for first in range(0, world_size, MACHINE)]
    size, seconds, records = 0, 0.0, []
    for ranks in machines:
        beats = {rank: (job.heartbeat(rank, 9, stuck=True), "running", 0.0) for rank in ranks}
        message = pack(node_message(beats))
        groups = pack({rank: beat["record"]["groups"] for rank, (beat, *_) in beats.items()})
        begin = time.process_time()
        records += [record for record, _ in contents(message, groups).values()]
        seconds += time.process_time() - begin
        size += len(message) + len(groups)
    begin = time.process_time()
    report = diagnose(records, world_size)
    diagnosed = time.process_time() - begin
    if (report.kind, report.ranks) != ("hung", (late,)):
        raise RuntimeError(f"the diagnosis should name rank {late}, got {report.text}")
    return {"records_bytes": size, "records_seconds": seconds, "diagnose_seconds": diagnosed}


PARTS = (
    groups_of_a_rank,
    join,
    lambda world_size: vars(heartbeat_traffic(world_size)),
    step,
    checkpoint_plan,
    diagnosis,
)


def measure(world_size: int) -> dict[str, float]:
    """Return all quantities at a world size."""
    found: dict[str, float] = {"world_size": world_size}
    for part in PARTS:
        gc.collect()  # what other parts have left is not searched while this one is timed
        gc.freeze()
        found |= part(world_size)
    return found


def exponents(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return for each quantity the exponent a of its growth N^a, by least squares over the logarithms.

    N log N has an exponent of 1.1 to 1.2 here, and log N one of 0.1 to 0.2.
    """
    x = [math.log(row["world_size"]) for row in rows]
    mean = sum(x) / len(x)
    found = {}
    for name, *_ in QUANTITIES:
        y = [math.log(max(row[name], 1e-9)) for row in rows]
        spread = sum((a - mean) ** 2 for a in x)
        found[name] = sum((a - mean) * (b - sum(y) / len(y)) for a, b in zip(x, y)) / spread
    return found


def table(rows: Sequence[dict[str, float]]) -> str:
    """Return the results as a table in Markdown."""
    grown = exponents(rows)
    heads = ["", *(f"{row['world_size']:,} ranks" for row in rows), "growth"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(rows) + 1)]
    for quantity in QUANTITIES:
        cells = [_number(row[quantity.name], quantity.unit) for row in rows]
        lines.append(f"| {quantity.text} | {' | '.join(cells)} | N^{grown[quantity.name]:.2f} |")
    return "\n".join(lines)


def _number(value: float, unit: str) -> str:
    if unit == "calls":
        return f"{value:,.0f}"
    if unit == "s/s":
        return f"{value:.2%}"
    scales = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
    size, prefix = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    return f"{value / size:.3g} {prefix}{unit}"


def draw(rows: Sequence[dict[str, float]], out: str | Path) -> None:
    """Draw sums over all ranks and quantities of one rank against the number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    worlds = [row["world_size"] for row in rows]
    for axes, total in zip(figure.subplots(1, 2), (True, False)):
        for quantity in QUANTITIES:
            if quantity.total == total:
                first = rows[0][quantity.name] or 1.0
                axes.plot(
                    worlds,
                    [row[quantity.name] / first for row in rows],
                    "o-",
                    label=quantity.text.replace("`", ""),
                )
        bound = [n * math.log(n) if total else math.log(n) for n in worlds]
        axes.plot(worlds, [each / bound[0] for each in bound], "k--", label="N log N" if total else "log N")
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=f"relative to {worlds[0]} ranks")
        axes.set_title("sums over all ranks" if total else "one rank", loc="left", fontsize=10)
        axes.legend(fontsize=7, frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(out)


def write_page(rows: Sequence[dict[str, float]], described: dict[str, Any], page: Path = PAGE) -> None:
    """Replace the table of the page, and what it was measured with."""
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    before, _, rest = page.read_text().partition(begin)
    versions = ", ".join(f"{name} {number}" for name, number in described["versions"].items())
    made = f"Measured on the CPU with {versions}, at commit {described['commit']}."
    page.write_text(f"{before}{begin}{table(rows)}\n\n{made}\n{end}{rest.partition(end)[2]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, metavar="N", help="numbers of ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--page", action="store_true", help="write the table of docs/scale.md")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture here")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for world_size in options.worlds:
        rows.append(measure(world_size))
        print(f"{world_size} ranks: done", file=sys.stderr, flush=True)
    described = environment("cpu")
    print(table(rows))
    if options.json:
        content = {**described, "growth": exponents(rows), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.page:
        write_page(rows, described)
    if options.plot:
        draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
