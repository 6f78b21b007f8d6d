"""Checks and times every op on one GPU: `python -m benchmarks.gpu_check [--out FILE] [--no-timing]`.

Needs torch, numpy, triton and fastmp. Every implementation of every op runs on NaN-poisoned memory and is
held against float64; one that is wrong gets no time. The kernels are then timed in CUDA graphs over several
copies of their inputs and set against the ceilings measured first in the same process; the public functions,
forward and backward, run in turn with plain torch, torch.compile and Liger. The result is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.cases import EAGER, Case
from benchmarks.measure import (
    copy_bandwidth,
    cpu_ms,
    environment,
    event_ms,
    in_turn,
    num_copies,
    num_rounds,
    runner,
    speedup,
    summarize,
    synchronize,
)
from fastmp.ops import OPS
from fastmp.testing.ops import check_op

BACKENDS = ("triton", "cuda", "reference")


@dataclass(frozen=True)
class Sizes:
    """How much is timed: shapes in place of a family's own, bytes of the bandwidth test, rounds in turn."""

    shapes: dict[str, tuple[tuple, ...]] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    bandwidth_bytes: int = 1 << 30
    gemm: int = 8192
    replays: int = 9
    rounds: int = 25


def correctness(device: str) -> list[dict[str, Any]]:
    """One row for each op, implementation and dtype; one that raises is a row with the error."""
    rows = []
    for op, entry in OPS.items():
        for backend in BACKENDS:
            if backend not in entry.implementations:
                continue
            try:
                results = check_op(op, device, backend=backend)
            except Exception as error:
                rows.append(
                    {"op": op, "backend": backend, "ok": False, "raised": f"{type(error).__name__}: {error}"}
                )
                continue
            rows += [{**asdict(r), "backend": backend, "ok": r.ok} for r in results]
    return rows


def ceilings(device: str, sizes: Sizes) -> dict[str, float]:
    """Copy and read bandwidth, bf16 matrix product on random data, a launch alone and within a graph."""
    run = runner(device)
    source = torch.randn(sizes.bandwidth_bytes // 4, device=device)
    read = run([lambda: source.sum()], rounds=4)
    read_ms = min(read() for _ in range(sizes.replays))
    a, b = (torch.randn(sizes.gemm, sizes.gemm, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = run([lambda: a @ b], rounds=4)
    product_ms = min(product() for _ in range(sizes.replays))
    one = torch.zeros(1, device=device)
    node = run([lambda: one.add_(1)], rounds=100)
    node_ms = min(node() for _ in range(sizes.replays))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(200):
        one.add_(1)
    synchronize(device)
    launch_ms = (time.perf_counter() - start) / 200 * 1e3
    return {
        "copy_gbs": copy_bandwidth(device, sizes.bandwidth_bytes) / 1e9,
        "read_gbs": sizes.bandwidth_bytes / read_ms / 1e6,
        "bf16_gemm_tflops": 2 * sizes.gemm**3 / product_ms / 1e9,
        "eager_launch_us": launch_ms * 1e3,
        "graph_node_us": node_ms * 1e3,
    }


def families() -> list[ModuleType]:
    """The bench_<family>.py that time kernels of the registry."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    return [module for module in modules if hasattr(module, "SHAPES")]


def kernel_times(
    device: str, sizes: Sizes, backends_of: Callable[[str], list[str]], copy_gbs: float
) -> list[dict]:
    """Time, bandwidth and share of the copy bandwidth of the named implementations of every op, in turn.

    A mutating op overwrites its logits call after call; the numbers change, the time does not.
    """
    rows = []
    for family, op in ((f, op) for f in families() for op in f.SHAPES):
        entry = OPS[op]
        backends = backends_of(op)
        if not backends:
            continue
        for shape in sizes.shapes.get(op, family.SHAPES[op]):
            for dtype in sizes.dtypes:
                first = family.arguments(op, shape, dtype, device, 0)
                traffic = entry.traffic(*first)
                on_gpu = torch.device(device).type == "cuda"
                copies = num_copies(traffic) if on_gpu else 1
                rounds = num_rounds(copies * traffic) if on_gpu else 1
                inputs = [first] + [family.arguments(op, shape, dtype, device, s) for s in range(1, copies)]
                runs = {
                    b: runner(device)([lambda f=entry.implementations[b], a=a: f(*a) for a in inputs], rounds)
                    for b in backends
                }
                for backend, times in in_turn(runs, sizes.replays).items():
                    figures = summarize(times)
                    gbs = traffic / figures["ms"] / 1e6
                    rows.append(
                        {"op": op, "shape": shape, "dtype": str(dtype), "backend": backend, **figures}
                        | {"gbs": gbs, "of_copy": gbs / copy_gbs, "flops": entry.flops(*first)}
                    )
    return rows


def as_used(device: str, sizes: Sizes, cases: Sequence[Callable[[], Case]], copy_gbs: float) -> list[dict]:
    """Public functions forward+backward through autograd, rivals in turn, with speed-ups over plain torch."""
    rows = []
    on_gpu = torch.device(device).type == "cuda"
    timed = event_ms if on_gpu else cpu_ms
    for make in cases:
        case = make()
        calls = {name: case.both(name) for name in case.rivals}
        extra = {}
        for name, call in calls.items():
            call()
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                extra[name] = torch.cuda.max_memory_allocated() - before
        times = in_turn({n: lambda c=c: timed(c) for n, c in calls.items()}, sizes.rounds)
        floor_ms = (case.forward_bytes + case.backward_bytes) / copy_gbs / 1e6
        for name, values in times.items():
            figures = summarize(values)
            rows.append(
                {"case": case.name, "rival": name, **figures, "peak_extra_bytes": extra.get(name)}
                | {"of_floor": floor_ms / figures["ms"], "over_eager": speedup(values, times[EAGER])}
            )
    return rows


def check(device: str, sizes: Sizes, timing: bool = True) -> dict[str, Any]:
    """The whole run; "ok" says whether every implementation was right."""
    result: dict[str, Any] = {"environment": environment(device)}
    rows = result["correctness"] = correctness(device)
    wrong = {(r["op"], r["backend"]) for r in rows if not r["ok"]}
    result["ok"] = not wrong
    if not timing:
        return result
    result["ceilings"] = ceilings(device, sizes)
    copy_gbs = result["ceilings"]["copy_gbs"]
    result["kernels"] = kernel_times(
        device,
        sizes,
        lambda op: [b for b in BACKENDS[:2] if b in OPS[op].implementations and (op, b) not in wrong],
        copy_gbs,
    )
    cases = [
        lambda make=work.make, shape=shape, dtype=dtype: make(*shape, dtype, device)
        for family in families()
        for work in family.WORKLOADS
        for shape in work.cuda
        for dtype in sizes.dtypes
    ]
    result["as_used"] = as_used(device, sizes, cases, copy_gbs)
    return result


def report(result: dict[str, Any]) -> list[str]:
    """The result as lines to read."""
    environment = result["environment"]
    lines = [
        f"{environment['device']}, torch {environment['versions']['torch']}, commit {environment['commit']}"
    ]
    for row in result["correctness"]:
        if "raised" in row:
            lines.append(f"RAISED {row['op']} {row['backend']}: {row['raised']}")
        elif not row["ok"]:
            error = f"error {row['error']:.1e}, bound {row['bound']:.1e}"
            lines.append(f"WRONG {row['op']} {row['backend']} {row['dtype']}: {error}")
    lines.append(
        f"{sum(r['ok'] for r in result['correctness'])} of {len(result['correctness'])} checks are right"
    )
    if "ceilings" in result:
        lines.append(", ".join(f"{name} {value:.1f}" for name, value in result["ceilings"].items()))
    for row in result.get("kernels", ()):
        name = f"{row['op']} {list(row['shape'])} {row['dtype'].removeprefix('torch.')} {row['backend']}"
        lines.append(
            f"{name:<60} {row['ms'] * 1e3:10.1f} us {row['gbs']:8.0f} GB/s {row['of_copy']:6.1%} of copy"
        )
    for row in result.get("as_used", ()):
        name = f"{row['case']} {row['rival']}"
        lines.append(
            f"{name:<60} {row['ms']:10.3f} ms {row['of_floor']:6.1%} of floor {row['over_eager']:6.2f}x eager"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    parser.add_argument("--no-timing", action="store_true", help="correctness only, in seconds")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    result = check("cuda", Sizes(), timing=not options.no_timing)
    print("\n".join(report(result)))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
