"""Timing: CPU time on a CPU, events around CUDA graphs on a GPU, rivals always in turn.

Ratios are between calls made in turn in one process. A GPU runs a graph of calls over several copies of the
inputs, so that no call finds its data in the cache. A floor is the bytes that an op must move over the copy
bandwidth, which is measured in the same process.
"""

from __future__ import annotations

import json
import math
import mmap
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import nvml, peers

Call = Callable[[], Any]


def summarize(times_ms: Sequence[float]) -> dict[str, float]:
    """Return median, 20th and 80th percentile and least of some times."""
    ordered = sorted(times_ms)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return {"ms": statistics.median(ordered), "p20": at(0.2), "p80": at(0.8), "min": ordered[0]}


def speedup(ours_ms: Sequence[float], theirs_ms: Sequence[float]) -> float:
    """Return the median over the rounds of theirs / ours."""
    return statistics.median(b / a for a, b in zip(ours_ms, theirs_ms, strict=True))


def in_turn(
    rivals: dict[str, Callable[[], float]], rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Time the rivals one after the other, `rounds` times over; each starts a round in its turn.

    After three rounds no further one is begun once `seconds` have gone by.
    """
    times: dict[str, list[float]] = {name: [] for name in rivals}
    names = list(rivals)
    until = time.perf_counter() + seconds
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() > until:
            break
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(rivals[name]())
    return times


def _nothing() -> None:
    pass


def cpu_ms(call: Call, watch: Call = _nothing) -> float:
    """Return the CPU time of one call over all threads of this process, in ms; calls `watch` after it."""
    start = time.process_time()
    call()
    ms = (time.process_time() - start) * 1e3
    watch()
    return ms


def event_ms(call: Call, watch: Call = _nothing) -> float:
    """Return the time of one call on the GPU's own clock, in ms; waits for it.

    `watch` is called while the GPU works: if the GPU waited for it, it would rest and cool.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    watch()
    end.synchronize()
    return start.elapsed_time(end)


class GraphRun:
    """A CUDA graph of calls; calling it replays the graph and returns the time of one call in ms.

    Results are kept until the same call comes round again, so that no call writes where the one before it
    wrote, which would be in the cache. `watch` is called during each replay.
    """

    def __init__(self, calls: Sequence[Call], rounds: int = 1, watch: Call = _nothing) -> None:
        self.watch = watch
        self.count = len(calls) * rounds
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        results: list[Any] = [None] * len(calls)
        # A capture that fails leaves its stream the current one; the outer context puts it back.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self.graph):
            for _ in range(rounds):
                for i, call in enumerate(calls):
                    results[i] = call()
        self.graph.replay()
        torch.cuda.synchronize()

    def __call__(self) -> float:
        self.graph.replay()  # busy while the timed replay is enqueued: else its launch would count
        return event_ms(self.graph.replay, self.watch) / self.count


class EventRun:
    """Calls that the host launches one by one, between events; the interface of `GraphRun`."""

    clock = staticmethod(event_ms)

    def __init__(self, calls: Sequence[Call], rounds: int = 1, watch: Call = _nothing) -> None:
        self.calls, self.watch = list(calls) * rounds, watch
        calls[0]()

    def __call__(self) -> float:
        return self.clock(lambda: [call() for call in self.calls], self.watch) / len(self.calls)


class CpuRun(EventRun):
    """Calls on a CPU, whose mean CPU time is returned in ms."""

    clock = staticmethod(cpu_ms)


Run = GraphRun | EventRun


def runner(device: str) -> type[GraphRun] | type[CpuRun]:
    return GraphRun if torch.device(device).type == "cuda" else CpuRun


def num_copies(bytes_per_call: int, cache_bytes: int = 60 << 20) -> int:
    """Return how many copies of the inputs exceed the cache three times; 2 to 16."""
    return min(16, max(2, -(-3 * cache_bytes // max(bytes_per_call, 1))))


def num_rounds(bytes_per_round: int, total_bytes: int = 2 << 30) -> int:
    """Return how many rounds move 2 GiB, beside which a launch takes little time; 1 to 20."""
    return min(20, max(1, total_bytes // max(bytes_per_round, 1)))


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def copy_run(device: str, num_bytes: int) -> Run:
    """Return a run of large copies, each of which reads and writes so many bytes.

    On a GPU nothing moves bytes faster; there a kernel copies, for the copies of a graph may go to copy
    engines, which reach two thirds of that. A CPU can: by writing in place, or by reading several places.
    """
    on_gpu = torch.device(device).type == "cuda"
    sources = [torch.ones(num_bytes // 4, device=device) for _ in range(2 if on_gpu else 1)]
    sinks = [torch.empty_like(s).fill_(0) for s in sources]
    pairs = zip(sources, sinks, strict=True)
    copy = (lambda s, t: torch.neg(s, out=t)) if on_gpu else (lambda s, t: t.copy_(s))
    return runner(device)([lambda s=s, t=t: copy(s, t) for s, t in pairs], rounds=2 if on_gpu else 1)


FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Ceilings:
    """The best rates that this machine reaches, the least of several runs; floors are made of them."""

    copy_gbs: float
    gemm_tflops: dict[str, float]  # by dtype

    def floor(self, num_bytes: int, flops: int, dtype: torch.dtype) -> tuple[float, str]:
        """Return (ms, what sets it): bytes over the copy bandwidth, or FLOPs over the rate of products."""
        copy_ms = num_bytes / self.copy_gbs / 1e6
        rate = self.gemm_tflops.get(name_of(dtype), math.inf)
        gemm_ms = flops / rate / 1e9
        return (gemm_ms, "matrix products") if gemm_ms > copy_ms else (copy_ms, "copy")


def multiplied_in(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose GEMMs set the roofline of an op or workload that computes in `dtype`."""
    return FP8 if "_fp8" in name else dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_ceilings(
    device: str,
    *,
    copy_bytes: int | None = None,
    gemm_size: int | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Ceilings:
    """Measure the copy bandwidth and products of random square matrices; takes seconds on a CPU."""
    on_gpu = torch.device(device).type == "cuda"
    copy_bytes = copy_bytes or (1 << 30 if on_gpu else 1 << 28)
    gemm_size = gemm_size or (8192 if on_gpu else 1024)
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        dtypes = (*dtypes, FP8)
    rounds = 9 if on_gpu else 5

    def best(run: Run, amount: int) -> float:
        return amount / (min(run() for _ in range(rounds)) * 1e-3)

    rates = {
        name_of(dtype): best(gemm_run(device, gemm_size, dtype), 2 * gemm_size**3) / 1e12 for dtype in dtypes
    }
    return Ceilings(best(copy_run(device, copy_bytes), 2 * copy_bytes) / 1e9, rates)


def gemm_run(device: str, size: int, dtype: torch.dtype) -> Run:
    """Return a run of GEMMs of random square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    multiply = lambda: a @ b  # noqa: E731
    if dtype == FP8:
        one = torch.ones((), device=device)
        multiply = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return runner(device)([multiply], rounds=4 if torch.device(device).type == "cuda" else 1)


def extra_bytes(call: Call, device: str) -> int:
    """Return the peak memory of a call beyond its inputs and its result.

    `call` returns everything that stays. On a GPU by the statistics of torch's allocator, on a CPU by what
    torch.profiler sees of it: every tensor that torch or a kernel of ours makes, freed or not; scratch that
    a library takes from the system by itself is not in it.
    """
    return _extra_on_gpu(call) if torch.device(device).type == "cuda" else _extra_on_cpu(call)


def _extra_on_gpu(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return extra


def _extra_on_cpu(call: Call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call()
    del result  # only now: what it holds is no extra
    events = []
    waiting = list(seen.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields))
    events.sort(key=lambda event: event[0])
    if not events:
        return 0
    first, last = events[0][1], events[-1][1]
    peak = max(fields.total_allocated for _, fields in events)
    return max(peak, first.total_allocated - first.alloc_size) - last.total_allocated


def huge_pages_granted(num_bytes: int = 32 << 20) -> bool:
    """Return whether the system backs memory with huge pages when asked to."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists() or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False

    def granted() -> int:
        return int(re.search(r"AnonHugePages:\s+(\d+)", rollup.read_text()).group(1)) << 10

    before = granted()
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, num_bytes, 4096):
            memory[offset] = 1
        return granted() - before >= num_bytes // 4


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return match.group(1).strip() if match else platform.machine()


def write_json(path: Path, content: Any) -> None:
    """Write a file of results at once, so that it is whole whenever the process ends."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=2, default=str) + "\n")
    part.replace(path)


def environment(device: str) -> dict[str, Any]:
    """Return the device, versions and commit of a result; nothing in it names a machine."""
    import fastmp
    from fastmp.ops.core import _triton

    root = Path(fastmp.__file__).resolve().parent.parent
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    versions = {
        "fastmp": fastmp.__version__,
        "torch": torch.__version__,
        "triton": _triton.VERSION,
        "python": platform.python_version(),
    }
    versions |= {name: number for name, number in peers.versions().items() if number}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described = {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": properties.total_memory >> 30,
            "sensors": nvml.sensors(device)[1],
        }
        versions["cuda"] = torch.version.cuda
    else:
        described = {
            "device": _cpu_name(),
            "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "huge_pages": huge_pages_granted(),
        }
    return {**described, "versions": versions, "commit": commit}
