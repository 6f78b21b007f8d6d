"""Bubbles of the pipeline schedules beside theory, and the time it takes to make and simulate orders.

`python -m benchmarks.bench_schedule` prints both, `--table` only the bubbles. There is no rival and no
tensor: the times are those of plain Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from fastmp.schedule.schedule import Schedule
from fastmp.schedule.simulate import Costs, simulate

WORKLOADS = ()
NAMES = ("1f1b", "zero_bubble")  # schedules whose bubble has a formula
COSTS = {
    "1 + 1 + 1": Costs(forward=1.0, backward_input=1.0, backward_weight=1.0),
    "1 + 2 + 1": Costs(forward=1.0, backward_input=2.0, backward_weight=1.0),  # with recomputation
    "messages 0.05": Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, p2p=0.05),
}
# pp, vpp, microbatches
LAYOUTS = ((4, 1, 8), (4, 2, 8), (8, 1, 32), (8, 2, 32), (8, 4, 32), (16, 1, 64), (16, 2, 64), (64, 2, 512))
SPEEDS = ((4, 2, 8), (64, 2, 512), (1024, 1, 128), (1024, 2, 1024))


def theory(pp: int, vpp: int, num_microbatches: int, schedule: str, costs: Costs) -> float:
    """Return the idle time over the work, where messages are free."""
    forward, inputs, weight = (float(x) for x in (costs.forward, costs.backward_input, costs.backward_weight))
    work = forward + inputs + weight
    idle = work if schedule == "1f1b" else max(forward, inputs, forward + inputs - weight)
    return (pp - 1) * idle / (num_microbatches * vpp * work)


def bubbles() -> Iterator[str]:
    """Return a row for each layout; AssertionError where a simulated bubble differs from theory."""
    yield "idle time in % of the work, 1f1b and zero_bubble, by the times of a chunk's forward, backward of"
    yield "inputs, backward of weights (1 + 1 + 1 where messages take 0.05); peak: most activations of a rank"
    yield f"{'pp':>4}{'vpp':>5}{'microbatches':>14}" + "".join(f"{name:>16}" for name in (*COSTS, "peak"))
    for pp, vpp, num_microbatches in LAYOUTS:
        cells = []
        for costs in COSTS.values():
            runs = {s: simulate(Schedule(pp, num_microbatches, vpp, name=s).orders(), costs) for s in NAMES}
            for schedule, run in runs.items():
                least = theory(pp, vpp, num_microbatches, schedule, costs)
                assert run.bubble > least if costs.p2p else abs(run.bubble - least) < 1e-9, (schedule, costs)
            cells.append(" ".join(f"{100 * run.bubble:5.2f}" for run in runs.values()))
        cells.append(" ".join(f"{max(run.peak_activations):4}" for run in runs.values()))
        yield f"{pp:>4}{vpp:>5}{num_microbatches:>14}" + "".join(f"{cell:>16}" for cell in cells)


def speeds(rounds: int = 3) -> Iterator[str]:
    """Return the CPU times of making one rank's order, and of checking and simulating all orders."""
    yield "CPU time, the least of some rounds"
    yield f"{'pp':>4}{'vpp':>5}{'microbatches':>14}{'one order':>16}{'simulate all':>16}{'a step':>16}"
    for pp, vpp, num_microbatches in SPEEDS:
        steps = 2 * pp * vpp * num_microbatches
        one = _least(partial(Schedule(pp, num_microbatches, vpp).order, 0), 20)
        ranks = Schedule(pp, num_microbatches, vpp).orders()
        whole = _least(partial(simulate, ranks), 1 if steps > 1_000_000 else rounds)
        times = (f"{one * 1e6:.0f} us", f"{whole * 1e3:.1f} ms", f"{whole / steps * 1e9:.0f} ns")
        yield f"{pp:>4}{vpp:>5}{num_microbatches:>14}" + "".join(f"{text:>16}" for text in times)


def _least(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def test_order(benchmark):
    benchmark(Schedule(64, 512, 2).order, 0)


def test_simulate(benchmark):
    benchmark(simulate, Schedule(64, 128, 2).orders())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_schedule", description=__doc__)
    parser.add_argument("--table", action="store_true", help="bubbles alone")
    options = parser.parse_args(arguments)
    print("\n".join(bubbles()))
    if not options.table:
        print("\n".join(speeds()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
