"""Correctness and speed on this GPU: `python -m benchmarks.gpu_check [--out FILE] [--no-timing]`.

First every implementation of every op, and every public function, is compared with float64 on NaN-poisoned
memory, each family in a process of its own. Where compute-sanitizer is installed, it watches a small pass.
Then kernels are timed in CUDA graphs over several copies of their inputs, and public functions in turn with
their rivals, beside ceilings that are measured first. What is wrong is not timed. The run takes under ten
minutes: what there is no time for is dropped, later shapes first, and named. The result is one JSON object,
written after every row.

It needs torch, numpy, triton and fastmp.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import correct, sanitizer
from benchmarks.cases import Case, Workload, title
from benchmarks.compare import compare
from benchmarks.measure import (
    Ceilings,
    environment,
    extra_bytes,
    in_turn,
    measure_ceilings,
    name_of,
    num_copies,
    num_rounds,
    runner,
    summarize,
    synchronize,
)
from benchmarks.report import size
from fastmp.ops import OPS

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 540.0  # seconds
_GRACE = 30.0  # seconds after which the budget is enforced on what is stuck


@dataclass(frozen=True)
class Sizes:
    """How much is timed; `shapes` replace those of a family."""

    shapes: dict[str, tuple[tuple, ...]] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    bandwidth_bytes: int | None = None
    gemm: int | None = None
    replays: int = 9
    rounds: int = 15


class Budget:
    """The seconds of the whole run, and what was `dropped` for lack of them."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.dropped: list[str] = []

    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def allows(self, what: str) -> bool:
        """Return whether there is time left; if not, `what` is dropped."""
        if self.left() > 0:
            return True
        self.dropped.append(what)
        return False


def correctness(device: str, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all families, checked at once; one that dies or takes too long is a row too."""
    until = time.monotonic() + seconds
    running = {}
    for family in correct.families():
        out, log = folder / f"{family}.json", folder / f"{family}.log"
        command = [sys.executable, "-m", "benchmarks.correct", family, "--device", device, "--out", str(out)]
        with log.open("w") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
        running[family] = process, out, log
    rows: list[dict[str, Any]] = []
    for family, (process, out, log) in running.items():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            sanitizer.stop(process)
            rows.append({"family": family, "ok": False, "raised": f"not done after {seconds:.0f} s"})
            continue
        if out.exists():
            rows += [{"family": family, **row} for row in json.loads(out.read_text())]
        else:
            last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
            rows.append({"family": family, "ok": False, "raised": f"status {process.returncode}: {last}"})
    return rows


def launch_costs(device: str, sizes: Sizes) -> dict[str, float]:
    """Return the read bandwidth, and the time of a launch from the host and of a node within a graph."""
    run = runner(device)
    num_bytes = sizes.bandwidth_bytes or 1 << 30
    source = torch.randn(num_bytes // 4, device=device)
    read = run([lambda: source.sum()], rounds=4)
    read_ms = min(read() for _ in range(sizes.replays))
    one = torch.zeros(1, device=device)
    node = run([lambda: one.add_(1)], rounds=100)
    node_ms = min(node() for _ in range(sizes.replays))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(200):
        one.add_(1)
    synchronize(device)
    launch_us = (time.perf_counter() - start) / 200 * 1e6
    return {
        "read_gbs": num_bytes / read_ms / 1e6,
        "eager_launch_us": launch_us,
        "graph_node_us": node_ms * 1e3,
    }


def families() -> list[ModuleType]:
    """Return the modules bench_<family>.py."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    return [importlib.import_module(f"benchmarks.{name}") for name in names]


def kernels(sizes: Sizes) -> Iterator[tuple[ModuleType, str, tuple]]:
    """Yield (family, op, shape) for every op that is timed alone, all first shapes before any second one."""
    listed = [
        (i, family, op, shape)
        for family in families()
        for op in getattr(family, "SHAPES", ())
        for i, shape in enumerate(sizes.shapes.get(op, family.SHAPES[op]))
    ]
    for _, family, op, shape in sorted(listed, key=lambda entry: entry[0]):
        yield family, op, shape


def kernel_rows(
    device: str,
    sizes: Sizes,
    backends_of: Callable[[str], list[str]],
    ceilings: Ceilings,
    budget: Budget,
) -> Iterator[dict[str, Any]]:
    """Yield time, bandwidth and share of the floor for the named implementations of every op, in turn.

    A mutating op overwrites its inputs call after call; the numbers change, the time does not.
    """
    for family, op, shape in kernels(sizes):
        backends = backends_of(op)
        for dtype in sizes.dtypes if backends else ():
            if budget.allows(f"kernel {title(op, shape, dtype)}"):
                rows = _kernel_rows(family, op, shape, dtype, device, sizes, backends, ceilings)
                yield from or_error(rows, {"op": op, "shape": shape, "dtype": name_of(dtype)})


def or_error(rows: Iterator[dict[str, Any]], what: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows; where making them raises, yield `what` with the error, so that others go on."""
    try:
        yield from rows
    except Exception as error:
        yield {**what, "raised": correct.message(error)}


def _kernel_rows(
    family: ModuleType,
    op: str,
    shape: tuple,
    dtype: torch.dtype,
    device: str,
    sizes: Sizes,
    backends: list[str],
    ceilings: Ceilings,
) -> Iterator[dict[str, Any]]:
    entry = OPS[op]
    first = family.arguments(op, shape, dtype, device, 0)
    traffic, flops = entry.traffic(*first), entry.flops(*first) if entry.flops else 0
    on_gpu = torch.device(device).type == "cuda"
    copies = num_copies(traffic) if on_gpu else 1
    rounds = num_rounds(copies * traffic) if on_gpu else 1
    inputs = [first] + [family.arguments(op, shape, dtype, device, s) for s in range(1, copies)]
    calls = {b: [lambda f=entry.implementations[b], a=a: f(*a) for a in inputs] for b in backends}
    extra = {b: extra_bytes(some[0], device) for b, some in calls.items()}
    runs = {b: runner(device)(some, rounds) for b, some in calls.items()}
    floor_ms, floor_of = ceilings.floor(traffic, flops, dtype)
    for backend, times in in_turn(runs, sizes.replays).items():
        figures = summarize(times)
        yield {"op": op, "shape": shape, "dtype": name_of(dtype), "backend": backend, **figures} | {
            "floor_ms": floor_ms,
            "floor_of": floor_of,
            "of_floor": floor_ms / figures["ms"],
            "gbs": traffic / figures["ms"] / 1e6,
            "bytes": traffic,
            "flops": flops,
            "extra_bytes": extra[backend],
        }


def workloads(device: str) -> Iterator[tuple[Workload, tuple]]:
    """Yield (workload, shape), all first shapes before any second one."""
    listed = [
        (i, work, shape)
        for family in families()
        for work in family.WORKLOADS
        for i, shape in enumerate(work.shapes(device))
    ]
    for _, work, shape in sorted(listed, key=lambda entry: entry[0]):
        yield work, shape


def function_rows(
    device: str,
    sizes: Sizes,
    listed: Sequence[tuple[Workload, tuple]],
    ceilings: Ceilings,
    budget: Budget,
) -> Iterator[dict[str, Any]]:
    """Yield public functions beside their rivals, through autograd; a rival that raises is a row too."""
    for work, shape in listed:
        for dtype in (dtype for dtype in sizes.dtypes if dtype in work.dtypes):
            name = title(work.name, shape, dtype)
            case = cache(partial(work.case, shape, dtype, device))  # for both directions
            for direction in reversed(work.directions):  # forward and backward first
                if budget.allows(f"{name} {direction}"):
                    rows = _function_rows(work, case, direction, device, sizes, ceilings)
                    yield from or_error(rows, {"case": name, "direction": direction})


def _function_rows(
    work: Workload,
    make: Callable[[], Case],
    direction: str,
    device: str,
    sizes: Sizes,
    ceilings: Ceilings,
) -> Iterator[dict[str, Any]]:
    case = make()
    compared = compare(case, direction, ceilings, device, rounds=sizes.rounds, seconds=20.0)
    what = {"case": case.name, "workload": work.name, "direction": direction}
    for row in compared.rows.values():
        yield {**what, **row.columns()}
    for rival, reason in compared.failed.items():
        yield {**what, "rival": rival, "raised": reason}


def check(
    device: str,
    sizes: Sizes,
    *,
    timing: bool = True,
    seconds: float = BUDGET,
    listed: Sequence[tuple[Workload, tuple]] | None = None,
    result: dict[str, Any] | None = None,
    save: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run everything and return the result; "ok" says that all is right and that every row could be timed.

    `result` is filled as the run goes on, and `save` is called after each phase and each row.
    """
    result = {} if result is None else result
    budget = Budget(seconds)
    result |= {"environment": environment(device), "ok": False, "dropped": budget.dropped}
    with tempfile.TemporaryDirectory() as folder:
        checked = correctness(device, 0.5 * seconds, Path(folder))
        result["correctness"] = checked
        save()
        on_gpu = torch.device(device).type == "cuda"
        watched = sanitizer.run(ROOT, Path(folder), min(0.3 * seconds, budget.left())) if on_gpu else []
        result["sanitizer"] = watched
    result["ok"] = all(row["ok"] for row in checked) and all(row["ok"] for row in watched)
    save()
    if not timing:
        return result
    right = {(r["op"], r["backend"]) for r in checked if "backend" in r and r["ok"]}
    right -= {(r["op"], r["backend"]) for r in checked if "backend" in r and not r["ok"]}
    options = {"copy_bytes": sizes.bandwidth_bytes, "gemm_size": sizes.gemm}
    ceilings = measure_ceilings(device, **options)
    result["ceilings"] = vars(ceilings) | launch_costs(device, sizes)
    timed = correct.BACKENDS[:2] if on_gpu else correct.BACKENDS[2:]

    def backends_of(op: str) -> list[str]:
        return [backend for backend in timed if (op, backend) in right]

    phases = {
        "kernels": kernel_rows(device, sizes, backends_of, ceilings, budget),
        "functions": function_rows(device, sizes, listed or list(workloads(device)), ceilings, budget),
    }
    for phase, rows in phases.items():
        result[phase] = []
        for row in rows:
            result[phase].append(row)
            result["ok"] &= "raised" not in row or "rival" in row  # a rival may fail
            save()
    return result


def report(result: dict[str, Any]) -> list[str]:
    """Return the result as lines to read."""
    described, checked = result["environment"], result.get("correctness", [])
    lines = [f"{described['device']}, torch {described['versions']['torch']}, commit {described['commit']}"]
    for row in (r for r in checked if not r["ok"]):
        what = row.get("op") or row.get("function") or row["family"]
        name = " ".join([what, *(row[key] for key in ("backend", "dtype") if key in row)])
        why = row.get("raised") or f"error {row['error']:.1e}, bound {row['bound']:.1e}"
        if row.get("wrong_draws"):
            why += f", wrong draws {row['wrong_draws']}"
        lines.append(f"{'RAISED' if 'raised' in row else 'WRONG'} {name}: {why}")
    lines.append(f"{sum(r['ok'] for r in checked)} of {len(checked)} checks are right")
    for row in result.get("sanitizer", ()):
        found = row.get("raised") or f"{row['errors']} errors " + " | ".join(row.get("first", ()))
        lines.append(f"compute-sanitizer {row['tool']}: {found}".rstrip())
    if not result.get("sanitizer"):
        lines.append("compute-sanitizer is not installed: nothing was run under it")
    for name, value in result.get("ceilings", {}).items():
        values = value.items() if isinstance(value, dict) else [("", value)]
        lines += [f"{name} {kind} {figure:.4g}".replace("  ", " ") for kind, figure in values]
    for row in result.get("kernels", ()):
        if "raised" in row:
            lines.append(f"RAISED {row['op']} {list(row['shape'])} {row['dtype']}: {row['raised']}")
            continue
        name = f"{row['op']} {list(row['shape'])} {row['dtype']} {row['backend']}"
        times = f"{row['ms'] * 1e3:10.1f} us {row['gbs']:8.0f} GB/s {row['of_floor']:6.1%} of floor"
        lines.append(f"{name:<60} {times} {size(row['extra_bytes'])} extra")
    for row in result.get("functions", ()):
        name = f"{row['case']} {row['direction']} {row.get('rival', '')}"
        if "raised" in row:
            lines.append(f"{'RAISED ' * ('rival' not in row)}{name:<60} {row['raised']}")
            continue
        times = f"{row['ms']:10.3f} ms {row['of_floor']:6.1%} of floor {row['over_peer']:6.2f}x best peer"
        lines.append(f"{name:<60} {times} {size(row['extra_bytes'])} extra [{row['timing']}]")
    lines += [f"no time left for: {what}" for what in result.get("dropped", ())]
    return lines


def write(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        content = json.dumps(result, indent=2, default=str) + "\n"
        part = out.with_name(f"{out.name}.part")  # so that the file is whole whenever the process dies
        part.write_text(content)
        part.replace(out)


def give_up(result: dict[str, Any], out: Path | None) -> None:
    """Write what there is and leave: the budget is over and something is stuck."""
    result["ok"] = False
    result.setdefault("dropped", []).append("all that followed: something was stuck")
    write(result, out)
    print("gpu_check: out of time, something is stuck; what there is has been written", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    parser.add_argument("--no-timing", action="store_true", help="correctness only")
    parser.add_argument("--seconds", type=float, default=BUDGET, help=f"time budget (default {BUDGET:.0f})")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    result: dict[str, Any] = {}
    watchdog = threading.Timer(options.seconds + _GRACE, give_up, (result, options.out))
    watchdog.daemon = True
    watchdog.start()
    options_of_check = {"timing": not options.no_timing, "seconds": options.seconds}
    check("cuda", Sizes(), **options_of_check, result=result, save=partial(write, result, options.out))
    watchdog.cancel()
    print("\n".join(report(result)))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
