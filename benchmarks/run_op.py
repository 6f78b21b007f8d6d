"""A few calls of one op, for a profiler: `python -m benchmarks.run_op OP`; `benchmarks/profile.sh` uses it.

OP is an op of `torch.ops.fastmp` that a family times alone, or the name of a workload, which runs forward and
backward. Only these calls are between cudaProfilerStart and Stop; everything is compiled before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.cases import OURS, families
from benchmarks.measure import synchronize
from fastmp.ops import OPS
from fastmp.profiling import enable_nvtx, region


def find(name: str, shape: tuple | None, dtype: torch.dtype, device: str, backend: str | None) -> tuple:
    """Return (call, shape) of an op or a workload; ValueError where there is none of that name."""
    for family in families().values():
        if name in getattr(family, "SHAPES", ()):
            shape = shape or family.SHAPES[name][0]
            arguments = family.arguments(name, shape, dtype, device, 0)
            run: Callable = OPS[name].overload if backend is None else OPS[name].implementations[backend]
            return partial(run, *arguments), shape
    for work in (work for family in families().values() for work in family.WORKLOADS if work.name == name):
        shape = shape or work.shapes(device)[0]
        return work.case(shape, dtype, device).both(OURS), shape
    names = {op for f in families().values() for op in getattr(f, "SHAPES", ())}
    names |= {work.name for f in families().values() for work in f.WORKLOADS}
    raise ValueError(f"no op or workload {name!r}; there are {', '.join(sorted(names))}")


def repeat(call: Callable[[], Any], name: str, times: int, device: str) -> None:
    on_gpu = torch.device(device).type == "cuda"
    call()
    synchronize(device)
    if on_gpu:
        enable_nvtx()
        torch.cuda.profiler.start()
    for _ in range(times):
        with region(f"fastmp.run_op.{name}"):
            call()
    synchronize(device)
    if on_gpu:
        torch.cuda.profiler.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_op", description=__doc__)
    parser.add_argument("op")
    parser.add_argument("--shape", type=_number, nargs="+", help="by default the first one of its benchmark")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", help="triton, cuda or reference; by default what serves the device")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    shape = tuple(options.shape) if options.shape else None
    dtype = getattr(torch, options.dtype)
    try:
        call, shape = find(options.op, shape, dtype, options.device, options.backend)
    except ValueError as error:
        parser.error(str(error))
    repeat(call, options.op, options.times, options.device)
    served = options.backend or "what serves it"
    print(f"{options.op} {list(shape)} {options.dtype} on {options.device}, {served}: {options.times} times")
    return 0


def _number(text: str) -> int | str:
    """Shapes of some workloads hold names as well."""
    return int(text) if text.lstrip("-").isdecimal() else text


if __name__ == "__main__":
    sys.exit(main())
