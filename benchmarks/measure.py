"""How things are timed: CPU time on a CPU, events around CUDA graphs on a GPU, rivals always in turn.

Ratios are taken between calls made in turn in one process. A GPU runs a graph of calls over several copies of
the inputs, so that no call finds its data in the cache. Floors are the bytes an op must move over the copy
bandwidth measured in the same process.
"""

from __future__ import annotations

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

from benchmarks import peers

Call = Callable[[], Any]


def summarize(times_ms: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile and least of some times."""
    ordered = sorted(times_ms)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return {"ms": statistics.median(ordered), "p20": at(0.2), "p80": at(0.8), "min": ordered[0]}


def speedup(ours_ms: Sequence[float], theirs_ms: Sequence[float]) -> float:
    """Median over the rounds of theirs / ours."""
    return statistics.median(b / a for a, b in zip(ours_ms, theirs_ms, strict=True))


def in_turn(
    rivals: dict[str, Callable[[], float]], rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Times of each rival, one after the other, `rounds` times over, each starting a round in its turn.

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


def cpu_ms(call: Call) -> float:
    """CPU time of one call over all threads of this process, in ms."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def event_ms(call: Call) -> float:
    """Time of one call on the GPU's own clock, in ms; waits for it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class GraphRun:
    """A CUDA graph of calls; calling it replays the graph and returns the time of one call in ms.

    Results are kept until the same call comes round again, so that no call writes where the one before it
    wrote, which would be in the cache.
    """

    def __init__(self, calls: Sequence[Call], rounds: int = 1) -> None:
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
        return event_ms(self.graph.replay) / self.count


class EventRun:
    """The same interface without a graph: events around calls that the host launches one by one."""

    def __init__(self, calls: Sequence[Call], rounds: int = 1) -> None:
        self.calls = list(calls) * rounds
        calls[0]()

    def __call__(self) -> float:
        return event_ms(lambda: [call() for call in self.calls]) / len(self.calls)


class CpuRun:
    """The same interface on a CPU: CPU time of one call in ms, averaged over the calls."""

    def __init__(self, calls: Sequence[Call], rounds: int = 1) -> None:
        self.calls = list(calls) * rounds
        calls[0]()

    def __call__(self) -> float:
        return cpu_ms(lambda: [call() for call in self.calls]) / len(self.calls)


def runner(device: str) -> type[GraphRun] | type[CpuRun]:
    return GraphRun if torch.device(device).type == "cuda" else CpuRun


def num_copies(bytes_per_call: int, cache_bytes: int = 60 << 20) -> int:
    """Copies of the inputs that together exceed the cache three times; 2 to 16."""
    return min(16, max(2, -(-3 * cache_bytes // max(bytes_per_call, 1))))


def num_rounds(bytes_per_round: int, total_bytes: int = 2 << 30) -> int:
    """Rounds that move 2 GiB, half a millisecond on a large GPU, beside which a launch is little; 1 to 20."""
    return min(20, max(1, total_bytes // max(bytes_per_round, 1)))


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str, num_bytes: int = 1 << 30) -> float:
    """Bytes read plus bytes written per second by a large copy: best of several, in place of a data sheet.

    On a GPU nothing moves bytes faster. A CPU can: by writing in place, or by reading several places at once.
    """
    on_gpu = torch.device(device).type == "cuda"
    sources = [torch.ones(num_bytes // 4, device=device) for _ in range(2 if on_gpu else 1)]
    sinks = [torch.empty_like(s).fill_(0) for s in sources]
    pairs = zip(sources, sinks, strict=True)
    run = runner(device)([lambda s=s, t=t: t.copy_(s) for s, t in pairs], rounds=2 if on_gpu else 1)
    return 2 * num_bytes / (min(run() for _ in range(9 if on_gpu else 5)) * 1e-3)


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches, measured in this process: what floors are made of."""

    copy_gbs: float
    gemm_tflops: dict[str, float]  # by dtype

    def floor(self, num_bytes: int, flops: int, dtype: torch.dtype) -> tuple[float, str]:
        """(ms, what sets it): the bytes over the copy bandwidth, or the FLOPs over the rate of products."""
        copy_ms = num_bytes / self.copy_gbs / 1e6
        rate = self.gemm_tflops.get(name_of(dtype), math.inf)
        gemm_ms = flops / rate / 1e9
        return (gemm_ms, "matrix products") if gemm_ms > copy_ms else (copy_ms, "copy")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_ceilings(
    device: str,
    *,
    copy_bytes: int | None = None,
    gemm_size: int | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Ceilings:
    """Copy bandwidth, and products of random square matrices: seconds on a CPU, less on a GPU."""
    on_gpu = torch.device(device).type == "cuda"
    copy_bytes = copy_bytes or (1 << 30 if on_gpu else 1 << 28)
    gemm_size = gemm_size or (8192 if on_gpu else 1024)
    rates = {name_of(dtype): gemm_rate(device, gemm_size, dtype) / 1e12 for dtype in dtypes}
    return Ceilings(copy_bandwidth(device, copy_bytes) / 1e9, rates)


def gemm_rate(device: str, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of a product of random square matrices: best of several."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    on_gpu = torch.device(device).type == "cuda"
    run = runner(device)([lambda: a @ b], rounds=4 if on_gpu else 1)
    return 2 * size**3 / (min(run() for _ in range(9 if on_gpu else 5)) * 1e-3)


def extra_bytes(call: Call, device: str) -> int:
    """Most memory a call holds at once beyond what was there before and what it returns.

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


def size(num_bytes: int) -> str:
    """In the unit that leaves a few digits: 512 B, 33 KiB, 1.6 GiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


def huge_pages_granted(num_bytes: int = 32 << 20) -> bool:
    """Whether the system backs memory with huge pages when asked to."""
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


def environment(device: str) -> dict[str, Any]:
    """What a result needs to be read later: device, versions and commit; nothing that names a machine."""
    import fastmp
    from fastmp.ops import _triton

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
