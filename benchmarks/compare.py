"""Timing of all rivals of one case in one direction, in turn, and the table's columns for each.

On a GPU a rival is timed twice: as a user calls it, and in a CUDA graph over copies of its inputs, unless it
cannot be captured. A ratio compares two times taken in the same way. On a CPU the least CPU time counts,
because other work of the machine only adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import EAGER, Case, is_ours
from benchmarks.measure import (
    Ceilings,
    CpuRun,
    EventRun,
    GraphRun,
    extra_bytes,
    in_turn,
    num_copies,
    speedup,
    summarize,
)

GRAPH, EVENTS, CPU_TIME = "CUDA graph", "CUDA events", "CPU time"
_MAX_COPIED = 1 << 30  # bytes: a call that moves more does not find its inputs in the cache


@dataclass(frozen=True)
class Row:
    """One rival's figures.

    `times_ms` has the time of each round, taken as `timing` says, and `ms` is the one that counts. `spread`
    is the 80th over the 20th percentile; where it is large on a GPU, a ratio means little. `over_peer` and
    `over_eager` say how many times faster the rival is than the best peer (`best_peer`, none of ours) and
    than plain torch. `called_ms` is the time with the host's launches in it. `flops` counts all arithmetic
    that has a formula, not only products.
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

    def columns(self) -> dict[str, Any]:
        """Return all but the single times, rounded for a file."""
        values = {name: value for name, value in vars(self).items() if name != "times_ms"}
        return {n: float(f"{v:.5g}") if isinstance(v, float) else v for n, v in values.items()}


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
) -> Comparison:
    """Time the rivals of `case`, or those in `names`, in turn: at most `rounds` times, about `seconds` long.

    A rival that raises has no row but a reason.
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
    if on_gpu:
        called, times = _gpu_times(case, direction, list(extra), rounds, seconds)
    else:
        runs = {name: CpuRun([getattr(case, direction)(name)]) for name in extra}
        called = times = in_turn(runs, rounds, seconds)
    num_bytes, products = case.costs(direction)
    floor_ms, floor_of = ceilings.floor(num_bytes, products, case.leaves[0].dtype)
    flops = next((_all_flops(case, direction, name) for name in extra if is_ours(name)), 0)
    for name in extra:
        best = _best_peer(name, times, called, on_gpu)
        values = times.get(name, called[name])
        figures, ms = summarize(values), _ms(values, on_gpu)
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
        )
    return result


def _gpu_times(
    case: Case, direction: str, names: list[str], rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the times of all rivals as called, and in a graph of those that can be captured."""
    num_bytes, _ = case.costs(direction)
    copies = num_copies(num_bytes) if case.again and num_bytes < _MAX_COPIED else 1
    cases = [case] + [case.again(seed) for seed in range(1, copies)]
    calls = {name: [getattr(one, direction)(name) for one in cases] for name in names}
    called = in_turn({name: EventRun(c) for name, c in calls.items()}, rounds, seconds / 2)
    graphs: dict[str, GraphRun] = {}
    for name in names if case.capturable else ():
        with _reported(name, {}):
            graphs[name] = GraphRun(calls[name])
    for graph in graphs.values():
        graph()
    times = in_turn(graphs, rounds, seconds / 2) if graphs else {}
    return called, times


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


Times = Mapping[str, list[float]]


def _ratio(name: str, other: str, times: Times, called: Times, on_gpu: bool) -> float:
    """Return how many times faster `name` is than `other`, both in a graph or both as called."""
    pair = times if name in times and other in times else called
    if on_gpu:
        return speedup(pair[name], pair[other])
    return min(pair[other]) / min(pair[name])


def _best_peer(name: str, times: Times, called: Times, on_gpu: bool) -> tuple[str, float] | None:
    ratios = {other: _ratio(name, other, times, called, on_gpu) for other in called if not is_ours(other)}
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
