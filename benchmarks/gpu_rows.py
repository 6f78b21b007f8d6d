"""Rows of the GPU check: items to time, their order, and the process that times a part of them.

`python -m benchmarks.gpu_rows` is such a process. It reads a job from its standard input. To its standard
output it writes lines of JSON: {"begin": item}, {"row": row} and {"end": item} for each item. A kernel that
faults ends only this process, and the last line says which item it was.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import correct
from benchmarks.cases import EAGER, Workload, families, is_ours, title
from benchmarks.compare import compare
from benchmarks.conditions import Conditions
from benchmarks.measure import (
    Ceilings,
    extra_bytes,
    in_turn,
    measure_ceilings,
    multiplied_in,
    name_of,
    num_copies,
    num_rounds,
    runner,
    summarize,
    synchronize,
)
from benchmarks.nvml import State
from fastmp.ops import OPS
from fastmp.testing.ops import poisoned_memory, run

DTYPE = torch.bfloat16
PHASES = ("functions", "kernels")
# Families whose comparison with peers matters most come first.
FIRST = ("grouped_mm", "linear_cross_entropy", "cross_entropy", "norm")
# By how much outputs may differ, in the 2-norm: from an op's reference, and from a function in plain torch,
# where routers may break ties in another way. The share of integers that may differ is that of such ties.
_IN_BLOCKS = ("fp8", "quantize")  # in the names of ops that take whole blocks of 128 elements
_FROM_REFERENCE, _FROM_TORCH, _TIES = torch.finfo(DTYPE).eps / 2, 0.1, 1e-3


@dataclass(frozen=True)
class Item:
    """Implementations timed together at one shape: an op alone ("kernels"), or a public function and its
    baselines.
    """

    phase: str
    family: str
    name: str
    shape: tuple

    @property
    def key(self) -> str:
        return f"{self.phase} {title(self.name, self.shape, DTYPE)}"

    @property
    def what(self) -> dict[str, Any]:
        """The columns that all rows of it share."""
        if self.phase == "kernels":
            return {"op": self.name, "shape": self.shape, "dtype": name_of(DTYPE)}
        return {"case": title(self.name, self.shape, DTYPE), "workload": self.name}

    @property
    def module(self) -> ModuleType:
        return families()[self.family]

    @property
    def work(self) -> Workload:
        return next(work for work in self.module.WORKLOADS if work.name == self.name)


def items(phases: Sequence[str] = PHASES, only: Sequence[str] = (), *, tiny: bool = False) -> list[Item]:
    """List what is timed on a GPU: first shapes before all others, the families in FIRST before others.

    tiny: one small shape of each instead, to try the program itself.
    """
    found: list[tuple[tuple, Item]] = []
    for family, module in families().items():
        if only and family not in only:
            continue
        shapes = {("kernels", op): some for op, some in getattr(module, "SHAPES", {}).items()}
        shapes |= {("functions", work.name): work.cuda for work in module.WORKLOADS if DTYPE in work.dtypes}
        tinies = {work.name: work.tiny for work in module.WORKLOADS}
        rank = FIRST.index(family) if family in FIRST else len(FIRST)
        for (phase, name), some in shapes.items():
            if tiny:
                least = 256 if any(part in name for part in _IN_BLOCKS) else 16
                few = tuple(min(length, least) for length in some[0]) if phase == "kernels" else tinies[name]
                some = () if few is None else (few,)
            found += [
                ((i > 0, rank, family, PHASES.index(phase), i), Item(phase, family, name, shape))
                for i, shape in enumerate(some)
                if phase in phases
            ]
    return [item for _, item in sorted(found, key=lambda entry: entry[0])]


@dataclass(frozen=True)
class Job:
    """Work of one process: time `items`, or run each once to compile it.

    wrong: the (op, implementation) that are known to be wrong, which are not timed. tiny: timed briefly.
    """

    device: str
    items: tuple[Item, ...] = ()
    ceilings: Ceilings | None = None
    wrong: tuple[tuple[str, str], ...] = ()
    compile_only: bool = False
    tiny: bool = False

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @cached_property
    def conditions(self) -> Conditions:
        return Conditions(self.device, tiny=not self.on_gpu)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Job:
        read = json.loads(text)
        read["items"] = tuple(Item(**{**item, "shape": tuple(item["shape"])}) for item in read["items"])
        read["ceilings"] = read["ceilings"] and Ceilings(**read["ceilings"])
        read["wrong"] = tuple(map(tuple, read["wrong"]))
        return cls(**read)


def rows(item: Item, job: Job) -> Iterator[dict[str, Any]]:
    """Yield the rows of an item; one that raises is a row with the error."""
    try:
        yield from (_kernel_rows if item.phase == "kernels" else _function_rows)(item, job)
    except Exception as error:
        yield {**item.what, "raised": correct.message(error)}


def _backends(op: str, job: Job) -> list[str]:
    """Return the implementations that are timed: on a GPU all but plain torch's."""
    timed = correct.BACKENDS[:2] if job.on_gpu else correct.BACKENDS[2:]
    return [name for name in timed if name in OPS[op].implementations and (op, name) not in job.wrong]


def _kernel_rows(item: Item, job: Job) -> Iterator[dict[str, Any]]:
    """Time an op alone: a mutating one overwrites its inputs call after call; the time does not change.

    The tiles that are timed are checked first: other shapes may have other tiles.
    """
    op, device, entry = item.name, job.device, OPS[item.name]
    make = partial(item.module.arguments, op, item.shape, DTYPE, device)
    first, right = make(0), []
    for backend in _backends(op, job):
        if reason := wrong_at(op, backend, first):
            yield {**item.what, "backend": backend, "raised": reason}
        else:
            right.append(backend)
    if not right:
        return
    traffic, flops = entry.traffic(*first), entry.flops(*first) if entry.flops else 0
    copies = num_copies(traffic) if job.on_gpu else 1
    inputs = [first] + [make(seed) for seed in range(1, copies)]
    calls = {b: [lambda f=entry.implementations[b], a=a: f(*a) for a in inputs] for b in right}
    extra = {b: extra_bytes(some[0], device) for b, some in calls.items()}
    rounds = num_rounds(copies * traffic) if job.on_gpu else 1
    states: dict[str, list[State]] = {b: [] for b in right}
    watch, multiplied = job.conditions.watch, multiplied_in(op, DTYPE)
    runs = {b: runner(device)(some, rounds, watch(states[b])) for b, some in calls.items()}
    floor_ms, floor_of = job.ceilings.floor(traffic, flops, multiplied)
    times = in_turn(runs | job.conditions.references(multiplied), 2 if job.tiny else 9)
    for backend in right:
        figures, costs = summarize(times[backend]), (traffic, flops)
        around = job.conditions.columns(times[backend], times, costs, multiplied, states[backend])
        yield {**item.what, "backend": backend, **figures} | {
            "floor_ms": floor_ms,
            "floor_of": floor_of,
            "of_floor": floor_ms / figures["ms"],
            "gbs": traffic / figures["ms"] / 1e6,
            "bytes": traffic,
            "flops": flops,
            "extra_bytes": extra[backend],
            **around,
        }


def wrong_at(op: str, backend: str, arguments: tuple) -> str:
    """Return why an implementation is not to be timed with these arguments, "" where it is right."""
    try:
        error, bound = difference(op, backend, arguments)
    except Exception as reason:
        return correct.message(reason)
    return "" if error <= bound else f"wrong at this shape: error {error:.1e}, bound {bound:.1e}"


def difference(op: str, backend: str, arguments: tuple) -> tuple[float, float]:
    """Return (error, bound) of the output that differs most from the reference's in the same dtype.

    Floating outputs differ in the 2-norm, integers by the share that is not equal.
    """
    with poisoned_memory():
        values = run(op, OPS[op].implementations[backend], arguments)
    wants = run(op, OPS[op].implementations["reference"], arguments)
    pairs = [
        (rms_difference(value, want), _FROM_REFERENCE)
        if want.is_floating_point()
        else ((value != want).double().mean().nan_to_num().item(), _TIES)
        for value, want in zip(values, wants, strict=True)
    ]
    return max(pairs, key=lambda pair: pair[0] / pair[1], default=(0.0, 1.0))


def rms_difference(value: Tensor, want: Tensor) -> float:
    """Return the 2-norm of the difference over that of `want`; infinite where one of them is not finite."""
    if value.shape != want.shape:
        return torch.inf
    apart = size = 0.0
    parts = zip(
        value.detach().reshape(-1).split(1 << 26), want.detach().reshape(-1).split(1 << 26), strict=True
    )
    for a, b in parts:  # in parts: float64 takes four times the memory
        a, b = a.double(), b.double()
        apart, size = apart + (a - b).square().sum().item(), size + b.square().sum().item()
    if apart == 0:
        return 0.0
    ratio = (apart / max(size, torch.finfo(torch.float32).tiny)) ** 0.5
    return ratio if ratio == ratio else torch.inf


def _function_rows(item: Item, job: Job) -> Iterator[dict[str, Any]]:
    """Time a public function beside its rivals, through autograd; a rival that raises is a row too."""
    work = item.work
    wrong = _wrong_rivals(item, job) if "step" not in work.directions else {}
    case = work.case(item.shape, DTYPE, job.device)  # only now: a large one leaves no room for another
    for rival, reason in wrong.items():
        yield {**item.what, "rival": rival, "raised": reason}
    names = [name for name in case.rivals if name not in wrong]
    for direction in reversed(work.directions):  # forward and backward first
        options = {"rounds": 2 if job.tiny else 15, "seconds": 20.0, "names": names}
        options["conditions"] = job.conditions
        compared = compare(case, direction, job.ceilings, job.device, **options)
        for row in compared.rows.values():
            yield {**item.what, "direction": direction, **row.columns()}
        for rival, reason in compared.failed.items():
            yield {**item.what, "direction": direction, "rival": rival, "raised": reason}


def _wrong_rivals(item: Item, job: Job) -> dict[str, str]:
    """Return ours that differ from plain torch at this shape, with the reason.

    Empty where plain torch fails, and for a random case, whose results differ from call to call.
    """
    work = item.work
    direction = "both" if "both" in work.directions else work.directions[0]

    def results(rival: str) -> list[Tensor]:
        case = work.case(item.shape, DTYPE, job.device)  # of its own: some write over their inputs
        return _tensors(case.results(rival, direction)())

    case = work.case(item.shape, DTYPE, job.device)
    random, names = case.random, list(case.rivals)
    del case
    if random:
        return {}
    try:
        wants = results(EAGER)
    except Exception:
        return {}
    wrong = {}
    for rival in filter(is_ours, names):
        try:
            with poisoned_memory():
                values = results(rival)
            most = max(rms_difference(value, want) for value, want in zip(values, wants, strict=True))
            if most > _FROM_TORCH:
                wrong[rival] = f"wrong at this shape: differs from {EAGER} by {most:.1e}"
        except Exception as error:
            wrong[rival] = correct.message(error)
    gc.collect()  # what rivals keep for their next call refers to itself
    return wrong


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in _tensors(part)]


def compile_all(item: Item, job: Job) -> None:
    """Run each call of an item once; what cannot run here will say so when it is timed."""
    calls: list[Callable[[], Any]] = []
    if item.phase == "kernels":
        arguments = item.module.arguments(item.name, item.shape, DTYPE, job.device, 0)
        calls = [lambda b=b: OPS[item.name].implementations[b](*arguments) for b in _backends(item.name, job)]
    else:
        case = item.work.case(item.shape, DTYPE, job.device)
        calls = [case.results(name, way) for name in case.rivals for way in item.work.directions]
    for call in calls:
        try:
            call()
            synchronize(job.device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        except Exception:
            continue


def ceilings(device: str, *, tiny: bool = False) -> dict[str, Any]:
    """Measure the rates of copies, reads and products, and the time of a launch and of a graph's node."""
    rates = measure_ceilings(device, copy_bytes=1 << 22 if tiny else None, gemm_size=64 if tiny else None)
    run = runner(device)
    num_bytes = 1 << 22 if tiny else 1 << 30
    source, one = torch.randn(num_bytes // 4, device=device), torch.zeros(1, device=device)
    read = run([lambda: source.sum()], rounds=4)
    read_ms = min(read() for _ in range(9))
    node = run([lambda: one.add_(1)], rounds=100)
    node_ms = min(node() for _ in range(9))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(200):
        one.add_(1)
    synchronize(device)
    return vars(rates) | {
        "read_gbs": num_bytes / read_ms / 1e6,
        "eager_launch_us": (time.perf_counter() - start) / 200 * 1e6,
        "graph_node_us": node_ms * 1e3,
    }


def work(job: Job, tell: Callable[[dict[str, Any]], None]) -> None:
    """Do a job; without items it measures the ceilings."""
    if not job.items:
        tell({"ceilings": ceilings(job.device, tiny=job.tiny)})
    for item in job.items:
        tell({"begin": item.key})
        if job.compile_only:
            try:
                compile_all(item, job)
            except Exception as error:
                print(f"{item.key}: {correct.message(error)}", file=sys.stderr)
        else:
            for row in rows(item, job):
                tell({"row": row})
        tell({"end": item.key})
        gc.collect()
        if job.on_gpu:
            torch.cuda.synchronize()  # raises if a kernel has faulted: nothing works in this process any more
            torch.cuda.empty_cache()


def main() -> int:
    messages = os.fdopen(os.dup(1), "w")  # what libraries print goes to the standard error
    os.dup2(2, 1)
    job = Job.decode(sys.stdin.read())
    work(job, lambda message: print(json.dumps(message, default=str), file=messages, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
