"""Correctness of a family on a device: its ops on their samples, its public functions on random draws.

Results are compared with float64, forward and backward: with the reference of an op, and with a function
written in plain torch. Memory that nobody has written is NaN while they run. A family is checked in a process
of its own, `python -m benchmarks.correct FAMILY --device cuda --out FILE`, because a kernel that faults ends
its process. Several run at once, because most of the time is compilation. `--touch` only runs the kernels, in
float32 and bfloat16, for a tool that watches from outside.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastmp.ops import OPS
from fastmp.testing import functions as testing_functions
from fastmp.testing.functions import Draw, Function, converted, evaluate, leaves
from fastmp.testing.ops import DTYPES, check_op, poisoned_memory, relative_error, run, samples

BACKENDS = ("triton", "cuda", "reference")
DRAWS = 6
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
Rows = Iterator[dict[str, Any]]


def families() -> list[str]:
    return list(testing_functions.families())


def backends(op: str, device: str) -> list[str]:
    """Return the implementations of an op that run on the device, interpreted ones not among them."""
    there = BACKENDS if torch.device(device).type == "cuda" else BACKENDS[2:]
    return [backend for backend in there if backend in OPS[op].implementations]


def check_ops(family: str, device: str) -> Rows:
    """Yield a row for each op, implementation and dtype; one that raises is a row with the error."""
    ops = [op for op in OPS if OPS[op].family == family]
    for op, backend in [(one, backend) for one in ops for backend in backends(one, device)]:
        try:
            results = check_op(op, device, backend=backend)
        except Exception as error:
            yield {"op": op, "backend": backend, "ok": False, "raised": message(error)}
        else:
            yield from ({**asdict(result), "backend": backend, "ok": result.ok} for result in results)


def functions(family: str) -> Sequence[Function]:
    """Return the public functions of a family; none where it has ops only."""
    return testing_functions.families()[family].functions


def check_functions(
    family: str, device: str, draws: int = DRAWS, dtypes: Sequence[torch.dtype] = DTYPES
) -> Rows:
    """Yield a row for each public function and dtype: its error on a large case, and which draws were wrong.

    On awkward draws every element is within a tolerance; on the large case the error of each output is at
    most 1.1 times that of plain torch in the same dtype.
    """
    for function in functions(family):
        for dtype in dtypes:
            row = {"function": function.name, "dtype": str(dtype).removeprefix("torch."), "draws": draws}
            try:
                wrong = [seed for seed in range(draws) if not _agrees(function, dtype, device, seed)]
                error, bound = _large_error(function, dtype, device)
            except Exception as error:
                yield {**row, "ok": False, "raised": message(error)}
            else:
                right = not wrong and error <= bound
                yield {**row, "ok": right, "error": error, "bound": bound, "wrong_draws": wrong}


def drawn(function: Function, dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Draw the awkward arguments number `seed` of a check: (positional, keywords)."""
    special = dtype == torch.float64
    return function.draw(Draw(random.Random(seed), dtype, device=device, special=special))


def drawn_large(function: Function, dtype: torch.dtype, device: str) -> tuple:
    """Draw the large arguments of a check: (positional, keywords)."""
    return function.draw(Draw(random.Random(0), dtype, device=device, large=True))


def _agrees(function: Function, dtype: torch.dtype, device: str, seed: int) -> bool:
    arguments = drawn(function, dtype, device, seed)
    with poisoned_memory():
        ours = evaluate(function.call, *arguments)
    # on the CPU: of an infinite argument, torch's own functions may return NaN on a GPU
    on_cpu = converted(arguments, torch.float64, "cpu")
    truth = evaluate(function.eager, *on_cpu)
    largest = max((_largest(leaf.detach()) for leaf in leaves(on_cpu)), default=0.0)
    return all(_close(value.cpu(), want, dtype, largest) for value, want in zip(ours, truth, strict=True))


def _largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude of a tensor, 0 if there is none."""
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def _close(value: Tensor, want: Tensor, dtype: torch.dtype, argument: float) -> bool:
    """Return whether each element is within the tolerance, relative to itself or to the largest one.

    Sums that cancel have the error of their largest term, of which the largest `argument` may be a factor.
    """
    value, want = value.double(), want.double()
    if value.shape != want.shape or not torch.equal(value.isnan(), want.isnan()):
        return False
    within = max(TOLERANCE[dtype] * max(1.0, _largest(want)), 4 * torch.finfo(dtype).eps * argument)
    close = torch.isclose(value, want, rtol=TOLERANCE[dtype], atol=within, equal_nan=True)
    overflows = want.abs() >= torch.finfo(dtype).max / 4  # there rounding decides
    return bool((close | overflows).all())


def _large_error(function: Function, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Return (error, bound) of the output whose error is the largest share of its bound."""
    arguments = drawn_large(function, dtype, device)
    with poisoned_memory():
        ours = evaluate(function.call, *arguments)
    theirs = evaluate(function.eager, *arguments)
    truth = evaluate(function.eager, *converted(arguments, torch.float64))
    eps = torch.finfo(dtype).eps
    # float32: our weight gradients add their rows in order, where torch's GEMM splits them into parts
    least = {torch.float64: 1e-11, torch.float32: 4 * eps}.get(dtype, eps / 8)
    pairs = [
        (relative_error(value, want), max(1.1 * relative_error(peer, want), least))
        for value, peer, want in zip(ours, theirs, truth, strict=True)
    ]
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def touch(family: str, device: str) -> Iterator[str]:
    """Run our kernels of every op once on its samples, and nothing besides; yields what has run."""
    for op in (op for op in OPS if OPS[op].family == family):
        ours = [backend for backend in backends(op, device) if backend != "reference"]
        for backend in ours or backends(op, device):
            for dtype in (torch.float32, torch.bfloat16):
                for arguments in samples(op, device=device, dtype=dtype):
                    run(op, OPS[op].implementations[backend], arguments)
            yield f"{op} {backend}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.correct", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write each row there as it comes, as a line of JSON")
    parser.add_argument("--touch", action="store_true", help="run the kernels only")
    options = parser.parse_args(arguments)
    names = options.families or families()
    if unknown := set(names) - set(families()):
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(families())}")
    if options.touch:
        for name in names:
            for line in touch(name, options.device):
                print(line, flush=True)
        return 0
    right = []
    with options.out.open("w") if options.out else nullcontext() as file:

        def tell(line: dict[str, Any]) -> None:
            if file is not None:
                print(json.dumps(line), file=file, flush=True)

        for name in names:
            for row in chain(check_ops(name, options.device), check_functions(name, options.device)):
                tell(row)
                right.append(row["ok"])
                if not row["ok"]:
                    print(f"WRONG {row}")
        tell({"end": names})
    print(f"{sum(right)} of {len(right)} are right")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
