"""Five minutes of experiments that decide open questions: `python -m benchmarks.experiments --out FILE`.

Each says what was predicted and what it decides before it measures. FILE is JSON, written after each one; a
later call with it makes those that it does not hold. One that raises costs only itself. `--device cpu --tiny`
tries the program.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import io
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_grouped_mm import arguments as grouped_arguments
from benchmarks.bench_linear_fp8 import linear_fp8_case
from benchmarks.bench_moe_layer import moe_layer_case
from benchmarks.cases import EAGER, OURS, TORCH
from benchmarks.conditions import COPY, GEMM, Conditions
from benchmarks.correct import BACKENDS, message
from benchmarks.gpu_rows import DTYPE
from benchmarks.measure import environment, runner, synchronize, write_json
from benchmarks.nvml import State, summary
from fastmp.ops import OPS, quantize_rows, rms_norm
from fastmp.ops.core import rowwise

Rows = Iterator[tuple[str, str]]  # what, measured


@dataclass(frozen=True)
class Bench:
    """The device, and how long a figure is sustained."""

    device: str
    tiny: bool = False

    def size(self, length: int, most: int = 256) -> int:
        return min(length, most) if self.tiny else length

    def random(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def ms(self, *calls: Callable[[], Any]) -> float:
        """Return the median time of a call after half a second of calls, in a CUDA graph of all of them."""
        run, times = runner(self.device)(calls), []
        until = time.perf_counter() + (0.0 if self.tiny else 0.5)
        while time.perf_counter() < until or len(times) < 3:
            times.append(run())
        return sorted(times)[len(times) // 2]


def sustained(bench: Bench) -> Rows:
    """Predicted: GEMM 790 to 800, then 660 to 700 TFLOP/s; copy 8 % less within seconds.

    Decides: which ceiling shares of the roofline mean.
    """
    conditions = Conditions(bench.device, tiny=bench.tiny)
    references = conditions.references(DTYPE)
    for name, amount, unit in (
        (GEMM, 2 * conditions.size**3 / 1e9, "TFLOP/s"),
        (COPY, 2 * conditions.bytes / 1e6, "GB/s"),
    ):
        for second in range(1 if bench.tiny else 8):
            states: list[State] = []
            references[name].watch = conditions.watch(states)
            until, rates = time.perf_counter() + (0.0 if bench.tiny else 1.0), []
            while time.perf_counter() < until or not rates:
                rates.append(amount / references[name]())
            rate = sorted(rates)[len(rates) // 2]
            yield f"{name}, second {second + 1}", f"{rate:.0f} {unit}, {summary(states)}"


def router(bench: Bench) -> Rows:
    """Predicted: 15 us (4096 x 128) and 25 us (7168 x 256) with 16-bit operands, 173 and 600 us in float32.

    Decides: whether the router's GEMMs leave the list of what is slow; the layer was measured at 2.64 ms
    before, and 2.09 ms are predicted.
    """
    for tokens, hidden, experts in ((4096, 2048, 128), (4096, 7168, 256)):
        x, w = bench.random(bench.size(tokens), bench.size(hidden)), bench.random(experts, bench.size(hidden))
        wide = bench.ms(lambda x=x, w=w: F.linear(x.float(), w.float()))
        yield f"{tuple(x.shape)} x {experts} in float32", f"{wide * 1e3:.1f} us"
        if x.is_cuda:  # torch's GEMM on a CPU has no other dtype for its result
            narrow = bench.ms(lambda x=x, w=w: torch.mm(x, w.t(), out_dtype=torch.float32))
            yield f"{tuple(x.shape)} x {experts} in 16 bits", f"{narrow * 1e3:.1f} us"
    shape = (24, 128, 8, 2, 128) if bench.tiny else (4096, 2048, 128, 8, 768)
    layer = moe_layer_case(*shape, DTYPE, bench.device)
    for rival in (OURS,) if bench.tiny else (OURS, TORCH):
        yield f"MoE layer, both ways, {rival}", f"{bench.ms(layer.both(rival)):.3f} ms"


def grouped(bench: Bench) -> Rows:
    """Predicted: added 7.6 to 6.3 ms (8 x 28672 x 4096), 1.05 to 0.92 (128 x 1536 x 2048), in Triton and in
    CUTLASS; stored 541 to 350 us; the first of a step, in float32, 6.1 and 0.48 ms, and 0.9 and 0.4 ms of
    `zero_` saved. 128 x 1536 x 2048 forward in CUTLASS 340 to 310 us.

    Decides: whether Triton's persistent kernel serves the additions that CUTLASS's serves on Hopper, and
    CUTLASS's, where each operand has one tensor map, grouped GEMMs of few rows.
    """
    for shape in ((8, 16384, 28672, 4096), (128, 32768, 1536, 2048)):
        shape = (4, 64, 32, 32) if bench.tiny else shape
        for op in ("grouped_mm_wgrad_", "grouped_mm_wgrad", "grouped_mm"):
            given = grouped_arguments(op, shape, DTYPE, bench.device, 0)
            for backend, function in OPS[op].implementations.items():
                if (backend == BACKENDS[-1]) == (bench.device == "cpu"):  # the reference, on a CPU alone
                    ms = bench.ms(lambda f=function, given=given: f(*given))
                    yield f"{op} {shape} {backend}", f"{ms:.3f} ms"
        total, *rest = grouped_arguments("grouped_mm_wgrad_", shape, DTYPE, bench.device, 0)
        zero = bench.ms(total.zero_)
        first = bench.ms(lambda t=total, g=rest: torch.ops.fastmp.grouped_mm_wgrad_(t, *g, False))
        yield f"first of a step {shape}", f"{first:.3f} ms, and no zero_ of {zero:.3f} ms"


def fp8(bench: Bench) -> Rows:
    """Predicted for large K: ours 800 to 950, F.scaled_mm 1,150 to 1,350, BF16 660 to 700 TFLOP/s.

    Decides: whether cuBLASLt serves FP8 linear layers on Hopper, and their weight gradients.
    """
    for rows, n, k in ((16384, 28672, 4096), (16384, 4096, 14336), (8192, 8192, 2048)):
        rows, n, k = bench.size(rows), bench.size(n), bench.size(k)
        case = linear_fp8_case(rows, n, k, DTYPE, bench.device)
        for rival in (rival for rival in (OURS, TORCH, EAGER, "DeepGEMM") if rival in case.rivals):
            rate = 2 * rows * n * k / bench.ms(case.forward(rival)) / 1e9
            yield f"{(rows, n, k)} {rival}", f"{rate:.0f} TFLOP/s"
        if bench.device == "cpu":
            continue
        scaling = F.ScalingType.BlockWise1x128  # of both: rows and columns of terms
        (gq, gs), (xq, xs) = quantize_rows(bench.random(n, rows)), quantize_rows(bench.random(k, rows))
        given = gq, xq.t(), gs, scaling, xs.t(), scaling
        ms = bench.ms(lambda given=given: F.scaled_mm(*given, output_dtype=DTYPE))
        yield f"{(n, k, rows)} wgrad by F.scaled_mm", f"{2 * rows * n * k / ms / 1e9:.0f} TFLOP/s"


def gated(bench: Bench) -> Rows:
    """Predicted: 66 us for 32768 x 768, where strips of rows took 92.

    Decides: whether the plain grid of backwards without sums stays.
    """
    for rows, width in ((32768, 768), (32768, 2048), (8192, 14336)):
        rows = bench.size(rows)
        grad, x = bench.random(rows, width), bench.random(rows, 2 * width)
        call = lambda grad=grad, x=x: torch.ops.fastmp.gated_activation_backward(grad, x, None, "silu")  # noqa: E731
        us = bench.ms(*[call] * 3) * 1e3
        yield f"{(rows, width)}", f"{us:.1f} us, {5 * grad.nbytes / us / 1e3:.0f} GB/s"


def threads(bench: Bench) -> Rows:
    """Predicted with 16 elements a thread: softmax 300 us, dropout's backward 72, where 32 took 396 and 88.

    Decides: the tiles of both.
    """
    softmax, dropout = (importlib.import_module(f"fastmp.ops.{name}") for name in ("softmax", "dropout"))
    keys = bench.size(8192)
    x, mask = bench.random(bench.size(4, 1), keys, keys), torch.rand(keys, device=bench.device) < 0.25
    grad, seed = bench.random(keys, keys), torch.tensor(1, device=bench.device)
    forward = lambda: torch.ops.fastmp.scaled_masked_softmax(x, mask, 0.1, False)  # noqa: E731
    backward = lambda: torch.ops.fastmp.bias_dropout_add_backward(grad, 0.1, seed, DTYPE, True)  # noqa: E731
    block_m, block_n, num_warps, whole = softmax.block_shape(keys, keys, DTYPE.itemsize)
    wide = lambda *sizes: (block_m, block_n, num_warps // 2, whole)  # noqa: E731
    for name, module, shape, plan, call, twice in (
        ("softmax", softmax, "block_shape", softmax._plan, forward, wide),
        ("dropout", dropout, "summing_block_shape", rowwise._plan, backward, dropout.block_shape),
    ):
        yield f"{name} as it is", f"{bench.ms(call) * 1e3:.1f} us"
        plan.cache_clear()
        with mock.patch.object(module, shape, twice):
            yield f"{name}, twice", f"{bench.ms(call) * 1e3:.1f} us"
        plan.cache_clear()


def host(bench: Bench) -> Rows:
    """Predicted: 0.44 ms for RMSNorm forward and backward as called, 0.27 for torch's.

    Decides: where the host time of norms goes.
    """
    rows, width = bench.size(8192), bench.size(4096)
    x, w = (bench.random(*shape).requires_grad_() for shape in ((rows, width), (width,)))
    grad, rounds = bench.random(rows, width), 3 if bench.tiny else 300

    def seconds(function: Callable[[], Tensor]) -> float:
        synchronize(bench.device)
        start = time.perf_counter()
        for _ in range(rounds):
            torch.autograd.grad(function(), (x, w), grad)
        synchronize(bench.device)
        return (time.perf_counter() - start) / rounds

    ours, theirs = (lambda: rms_norm(x, w)), (lambda: F.rms_norm(x, (width,), w))
    for name, function in ((OURS, ours), (EAGER, theirs)):
        seconds(function)
        yield name, f"{seconds(function) * 1e3:.3f} ms"
    with cProfile.Profile() as profile:
        seconds(ours)
    printed = io.StringIO()
    pstats.Stats(profile, stream=printed).sort_stats("tottime").print_stats(12)
    yield "profile", printed.getvalue()


EXPERIMENTS = (sustained, router, grouped, fp8, gated, threads, host)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [experiment.__name__ for experiment in EXPERIMENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--out", type=Path, help="the file to go on with and to write, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, briefly")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names):
        parser.error(f"unknown {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("experiments: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"environment": environment(options.device), "experiments": {}}
    if options.out and options.out.exists():
        found["experiments"] = json.loads(options.out.read_text())["experiments"]
    bench = Bench(options.device, options.tiny)
    for experiment in EXPERIMENTS:
        name, said = experiment.__name__, " ".join((experiment.__doc__ or "").split())
        if (options.names and name not in options.names) or name in found["experiments"]:
            continue
        print(f"\n{name}. {said}", flush=True)
        rows: list[tuple[str, str]] = []
        try:
            for what, measured in experiment(bench):
                print(f"   {what:<44} {measured}", flush=True)
                rows.append((what, measured))
        except Exception as error:
            print(f"   RAISED {message(error)}", flush=True)
            rows.append(("raised", message(error)))
        found["experiments"][name] = {"predicted": said, "measured": rows}
        if options.out:
            write_json(options.out, found)
        # A kernel that has faulted ends the process here: later ones would only raise.
        synchronize(options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
