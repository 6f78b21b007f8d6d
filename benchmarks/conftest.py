"""`pytest benchmarks/ --benchmark-only`: files are bench_*.py; the summary has floor and ratio columns.

Times are CPU time on a CPU and CUDA events on a GPU. A ratio comes from calls made in turn with plain torch,
not from the rows of the table, which pytest-benchmark times one after the other.
"""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.cases import EAGER, Case
from benchmarks.measure import EventClock, copy_bandwidth, cpu_ms, in_turn, speedup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOCK = EventClock() if DEVICE == "cuda" else time.process_time


def pytest_collect_file(file_path, parent):
    named = parent.session.isinitpath(file_path)  # on the command line: pytest collects it by itself
    if file_path.name.startswith("bench_") and file_path.suffix == ".py" and not named:
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def bandwidth(device) -> float:
    return copy_bandwidth(device, 1 << 30 if device == "cuda" else 1 << 28)


@pytest.fixture
def compare(benchmark, device, bandwidth):
    """Benchmark one rival of a case in one direction, with its floor and its speed-up over plain torch."""

    def run(case: Case, rival: str, direction: str) -> None:
        if rival not in case.rivals:
            pytest.skip(f"{rival} is not installed")
        call, eager = (getattr(case, direction)(name) for name in (rival, EAGER))
        call(), eager()
        on_gpu = device == "cuda"
        rounds = 20 if on_gpu else 3

        def timed(function):
            start = CLOCK()
            function()
            return (CLOCK() - start) * 1e3

        rivals = {"this": call, "eager": eager}
        measure = timed if on_gpu else cpu_ms
        times = in_turn({name: lambda f=f: measure(f) for name, f in rivals.items()}, rounds)
        # CPU time only ever grows by what else the machine does, so there the least counts
        least = min(times["eager"]) / min(times["this"])
        ratio = speedup(times["this"], times["eager"]) if on_gpu else least
        num_bytes = case.forward_bytes + (case.backward_bytes if direction == "both" else 0)
        floor_ms = num_bytes / bandwidth * 1e3
        benchmark.group = (
            f"{case.name} {'forward' if direction == 'forward' else 'forward+backward'} on {device}"
        )
        benchmark.extra_info.update(
            rival=rival,
            floor_ms=round(floor_ms, 4),
            floor_share=round(floor_ms / min(times["this"]), 3),
            speedup_over_eager=round(ratio, 2),
        )
        benchmark.pedantic(call, rounds=rounds, warmup_rounds=1)

    return run


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    rows = [b for b in session.benchmarks if b.extra_info.get("rival")] if session else []
    if not rows:
        return
    kind = "CUDA events" if DEVICE == "cuda" else "CPU time"
    terminalreporter.section(f"fastmp: ms ({kind}), floor = bytes / copy bandwidth, ratio in turn with eager")
    if DEVICE == "cpu":
        terminalreporter.write_line("a CPU can read, or write in place, faster than it copies: above 100%")
    for group in dict.fromkeys(row.group for row in rows):
        terminalreporter.write_line(group)
        for row in (r for r in rows if r.group == group):
            info = row.extra_info
            terminalreporter.write_line(
                f"  {info['rival']:<16} {row.stats.min * 1e3:9.3f} ms  floor {info['floor_ms']:8.3f} ms"
                f"  of floor {info['floor_share']:6.1%}  {info['speedup_over_eager']:6.2f}x eager"
            )
