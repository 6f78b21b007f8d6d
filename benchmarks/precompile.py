"""Compile the Triton kernels of `gpu_check` and of the GPU tests beforehand, on all cores.

    python -m benchmarks.precompile                      # for the GPU of this machine
    python -m benchmarks.precompile --arch 90            # for an H100 or H200, on a machine without a GPU

Kernels are listed on tensors without data and compiled into Triton's cache (TRITON_CACHE_DIR), where any
process with the same versions of fastmp and Triton finds them. Set TRITON_STORE_BINARY_ONLY=1 to keep a
cache small that is to be carried to another machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import correct, gpu_rows
from benchmarks.cases import families, is_ours
from benchmarks.gpu_rows import DTYPE, Item
from benchmarks.predict import without_data
from fastmp.ops import OPS
from fastmp.ops.core import launcher
from fastmp.ops.precompile import Code, compile_all, current_architecture, recording, require_compilation
from fastmp.testing.functions import evaluate
from fastmp.testing.ops import DTYPES, run, samples

Codes = dict[Code, None]


def kernels_of_op(op: str, arch: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Codes:
    """Return the kernels that `check_op` launches for the Triton implementation of an op."""
    launch = OPS[op].implementations.get("triton")
    with recording(arch) as codes:
        for dtype in dtypes if launch is not None else ():
            for arguments in samples(op, device="meta", dtype=dtype):
                run(op, launch, arguments)
    return codes


def kernels_of_functions(family: str, arch: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Codes:
    """Return the kernels that `correct.check_functions` launches for a family."""
    with recording(arch) as codes:
        for function in correct.functions(family):
            for dtype in dtypes:
                for seed in range(correct.DRAWS):
                    evaluate(function.call, *correct.drawn(function, dtype, "meta", seed))
                evaluate(function.call, *correct.drawn_large(function, dtype, "meta"))
    return codes


class _ByTriton(TorchDispatchMode):
    """Run the Triton launcher of each op of ours as well as the op on tensors without data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.removeprefix("fastmp::")
        if name in OPS and "triton" in OPS[name].implementations:
            OPS[name].implementations["triton"](*args)
        return func(*args, **(kwargs or {}))


def kernels_of_items(items: Iterable[Item], arch: int) -> Codes:
    """Return the kernels of our own rows among the timed items; whole training steps are left out."""
    codes: Codes = {}

    def record(kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]) -> None:
        codes[Code.of(kernel, arguments, constants)] = None

    for item in items:
        # tile configs of `arch`; launches on tensors without data are recorded
        tiles = launcher.intercept_launches(lambda *launch: None, arch)
        with tiles, mock.patch.object(launcher, "launch", record), without_data():
            for call in _calls(item):
                call()
    return codes


def _calls(item: Item) -> Iterator[Any]:
    """Yield what is timed of ours, on tensors without data."""
    if item.phase == "kernels":
        if "triton" in OPS[item.name].implementations:
            arguments = item.module.arguments(item.name, item.shape, DTYPE, "cpu", 0)
            yield lambda: OPS[item.name].implementations["triton"](*arguments)
    elif "step" not in item.work.directions and item.family != "attention":  # whose kernels are torch's
        case = item.work.case(item.shape, DTYPE, "cpu")
        for direction in item.work.directions:
            for rival in filter(is_ours, case.rivals):
                with _ByTriton():
                    yield case.results(rival, direction)


def kernels(phases: Sequence[str], only: Sequence[str], arch: int) -> Codes:
    """Return the kernels of phases of `gpu_check`, each once; `only`: the families, all where it is empty."""
    codes: Codes = {}
    if "correctness" in phases:
        for family in (name for name in correct.families() if not only or name in only):
            for op in (op for op in OPS if OPS[op].family == family):
                codes |= kernels_of_op(op, arch)
            codes |= kernels_of_functions(family, arch)
    return codes | kernels_of_items(gpu_rows.items([p for p in phases if p in gpu_rows.PHASES], only), arch)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precompile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    phases, every = ("correctness", *gpu_rows.PHASES), sorted({*correct.families(), *families()})
    parser.add_argument(
        "--arch", type=int, help="compute capability (90 is 9.0); default: that of the GPU here"
    )
    parser.add_argument("--phase", nargs="+", choices=phases, default=phases, help="default: all")
    parser.add_argument("--families", nargs="+", choices=every, default=(), help="default: all")
    parser.add_argument("--processes", type=int, help="default: one for each core")
    parser.add_argument("--most", type=int, help="compile so many kernels only")
    options = parser.parse_args(arguments)
    try:
        require_compilation()
        arch = options.arch or current_architecture()
    except ValueError as error:
        parser.error(str(error))
    start = time.monotonic()
    codes = list(kernels(options.phase, options.families, arch))[: options.most]
    print(f"{len(codes)} kernels for sm_{arch}, listed in {time.monotonic() - start:.0f} s", flush=True)

    def progress(done: int, of: int) -> None:
        if done and (done % 200 == 0 or done == of):
            print(f"{done} of {of} compiled after {time.monotonic() - start:.0f} s", flush=True)

    compile_all(codes, arch, processes=options.processes, progress=progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
