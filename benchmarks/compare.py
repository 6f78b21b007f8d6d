"""Timing of all rivals of one case in one direction, in turn, and the table's columns for each.

On a GPU a rival is timed twice: as a user calls it, and in a CUDA graph over copies of its inputs, unless it
cannot be captured. A ratio compares two times taken in the same way. On a CPU the least CPU time counts,
because other work of the machine only adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import EAGER, Case, is_ours
from benchmarks.conditions import Conditions
from benchmarks.measure import (
    Ceilings,
    CpuRun,
    EventRun,
    GraphRun,
    Run,
    cpu_ms,
    extra_bytes,
    in_turn,
    multiplied_in,
    name_of,
    num_copies,
    speedup,
    summarize,
)
from benchmarks.nvml import State

Times = Mapping[str, list[float]]
GRAPH, EVENTS, CPU_TIME = "CUDA graph", "CUDA events", "CPU time"
_MAX_COPIED = 1 << 30  # bytes: a call that moves more does not find its inputs in the cache


@dataclass(frozen=True)
class Row:
    """One rival's figures.

    `times_ms` has the time of each round, taken as `timing` says, and `ms` is the one that counts. `spread`
    is the 80th over the 20th percentile; where it is large on a GPU, a ratio means little. `over_peer` and
    `over_eager` say how many times faster the rival is than the best peer (`best_peer`, none of ours) and
    than plain torch. `called_ms` is the time with the host's launches in it. `flops` counts all arithmetic
    that has a formula, not only products. `around` has the columns of `Conditions`.
    """

    rival: str
    timing: str
    times_ms: list[float]
    ms: float
    spread: float
    called_ms: float
    floor_ms: float
    floor_of: str
    of_floor: float
    best_peer: str | None
    over_peer: float | None
    over_eager: float | None
    extra_bytes: int | None
    bytes: int
    flops: int
    around: dict[str, Any]

    def columns(self) -> dict[str, Any]:
        """Return all but the single times, rounded for a file."""
        values = {n: value for n, value in vars(self).items() if n not in ("times_ms", "around")}
        return {
            n: float(f"{v:.5g}") if isinstance(v, float) else v for n, v in (values | self.around).items()
        }


@dataclass
class Comparison:
    """The `rows` of rivals that ran, and the reasons why the others `failed`, by name."""

    rows: dict[str, Row] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def compare(
    case: Case,
    direction: str,
    ceilings: Ceilings,
    device: str,
    *,
    names: Sequence[str] = (),
    rounds: int | None = None,
    seconds: float = math.inf,
    conditions: Conditions | None = None,
) -> Comparison:
    """Time the rivals of `case`, or those in `names`, in turn: at most `rounds` times, about `seconds` long.

    A rival that raises has no row but a reason. With `conditions` its references take turns as well.
    """
    on_gpu = torch.device(device).type == "cuda"
    rounds = rounds or (20 if on_gpu else 7)
    result = Comparison()
    extra: dict[str, int] = {}
    for name in names or case.rivals:
        with _reported(name, result.failed):
            case.results(name, direction)()  # compiles
            extra[name] = extra_bytes(case.results(name, direction), device)
    if not extra:
        return result
    num_bytes, products = case.costs(direction)
    dtype = multiplied_in(case.name, case.leaves[0].dtype)
    if name_of(dtype) not in ceilings.gemm_tflops:  # a CPU, or a GPU without FP8
        dtype = case.leaves[0].dtype
    timed = _Timed(case, direction, list(extra), conditions, dtype)
    called, times = timed.on_gpu(rounds, seconds) if on_gpu else timed.on_cpu(rounds, seconds)
    floor_ms, floor_of = ceilings.floor(num_bytes, products, dtype)
    flops = next((_all_flops(case, direction, name) for name in extra if is_ours(name)), 0)
    for name in extra:
        best = _best_peer(name, extra, times, called, on_gpu)
        source = times if name in times else called
        values = source[name]
        figures, ms, around = summarize(values), _ms(values, on_gpu), {}
        if conditions is not None:
            costs = num_bytes, products
            around = conditions.columns(values, source, costs, dtype, timed.states[name])
        result.rows[name] = Row(
            rival=name,
            timing=CPU_TIME if not on_gpu else GRAPH if name in times else EVENTS,
            times_ms=values,
            ms=ms,
            spread=figures["p80"] / figures["p20"],
            called_ms=_ms(called[name], on_gpu),
            floor_ms=floor_ms,
            floor_of=floor_of,
            of_floor=floor_ms / ms,
            best_peer=best[0] if best else None,
            over_peer=best[1] if best else None,
            over_eager=_ratio(name, EAGER, times, called, on_gpu) if EAGER in extra else None,
            extra_bytes=extra[name],
            bytes=num_bytes,
            flops=max(flops, products),
            around=around,
        )
    return result


class _Timed:
    """Times of rivals in turn with the references of `conditions`, and the states in their rounds."""

    def __init__(
        self, case: Case, direction: str, names: list[str], conditions: Conditions | None, dtype: torch.dtype
    ) -> None:
        self.case, self.direction, self.names, self.conditions = case, direction, names, conditions
        self.references = {} if conditions is None else conditions.references(dtype)
        self.states: dict[str, list[State]] = {}

    def _run(self, kind: type[Run], name: str, calls: Sequence[Callable[[], Any]]) -> Run:
        """Make a run whose states are kept in place of those of the run before it."""
        if self.conditions is None:
            return kind(calls)
        self.states[name] = []
        return kind(calls, watch=self.conditions.watch(self.states[name]))

    def on_cpu(self, rounds: int, seconds: float) -> tuple[Times, Times]:
        call = getattr(self.case, self.direction)
        runs = {name: self._run(CpuRun, name, [call(name)]) for name in self.names}
        called = in_turn(runs | self.references, rounds, seconds)
        return called, called

    def on_gpu(self, rounds: int, seconds: float) -> tuple[Times, Times]:
        """Return the times of all rivals as called, and in a graph of those that can be captured."""
        case, (num_bytes, _) = self.case, self.case.costs(self.direction)
        copies = num_copies(num_bytes) if case.again and num_bytes < _MAX_COPIED else 1
        cases = [case] + [case.again(seed) for seed in range(1, copies)]
        calls = {name: [getattr(one, self.direction)(name) for one in cases] for name in self.names}
        runs = {name: self._run(EventRun, name, some) for name, some in calls.items()}
        called = in_turn(runs | self.references, rounds, seconds / 2)
        graphs: dict[str, Run] = {}
        for name in self.names if case.capturable else ():
            states = self.states.get(name)
            try:
                graphs[name] = self._run(GraphRun, name, calls[name])
            except Exception:  # cannot be captured: the times as called count
                if states is not None:
                    self.states[name] = states
        for graph in graphs.values():
            graph()
        return called, in_turn(graphs | self.references, rounds, seconds / 2) if graphs else {}


@contextmanager
def _reported(name: str, failed: dict[str, str]) -> Iterator[None]:
    """Set a rival that raises aside, with the first line of its message."""
    try:
        yield
    except Exception as error:
        message = str(error).strip().splitlines()
        failed[name] = f"{type(error).__name__}: {message[0] if message else ''}"


def _ms(times: list[float], on_gpu: bool) -> float:
    return summarize(times)["ms" if on_gpu else "min"]


def _ratio(name: str, other: str, times: Times, called: Times, on_gpu: bool) -> float:
    """Return how many times faster `name` is than `other`, both in a graph or both as called."""
    pair = times if name in times and other in times else called
    if on_gpu:
        return speedup(pair[name], pair[other])
    return min(pair[other]) / min(pair[name])


def _best_peer(
    name: str, names: Iterable[str], times: Times, called: Times, on_gpu: bool
) -> tuple[str, float] | None:
    ratios = {other: _ratio(name, other, times, called, on_gpu) for other in names if not is_ours(other)}
    best = min(ratios, key=ratios.__getitem__, default=None)
    return None if best is None else (best, ratios[best])


def _all_flops(case: Case, direction: str, name: str) -> int:
    """Return the FLOPs of a call of ours by the registered formulas; 0 where it cannot be counted."""
    call: Callable[[], Any] = case.results(name, direction)
    try:
        with FlopCounterMode(display=False) as counter:
            call()
    except Exception:
        return 0
    return counter.get_total_flops()


def print_cpu_table(cases: Iterable[Case], rivals: Sequence[str], rounds: int = 4) -> None:
    """Print CPU time and extra memory of a forward and backward: a row a case, a column a rival."""
    print(f"| | {' | '.join(rivals)} |\n{'|---' * (len(rivals) + 1)}|")
    for case in cases:
        calls = {rival: case.both(rival) for rival in rivals}
        times = in_turn({rival: partial(cpu_ms, call) for rival, call in calls.items()}, rounds)
        cells = (
            f"{min(times[rival]):.0f} ms, {extra_bytes(call, 'cpu') / 2**20:.0f} MiB"
            for rival, call in calls.items()
        )
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)
