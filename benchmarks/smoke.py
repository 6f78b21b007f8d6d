"""Every op on its samples in bfloat16, each implementation a line: `python -m benchmarks.smoke`.

It is the first thing to run on a new GPU: a line says whether the implementation is right, the largest error
as a share of its bound, and the seconds it took. A kernel that faults leaves a process in which nothing works
any more; the rest then goes on in a new one. The status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks import correct
from benchmarks.measure import synchronize
from fastmp.ops import OPS
from fastmp.testing.ops import check_op


def implementations(device: str) -> list[str]:
    """List the op/backend pairs that run on the device; on a GPU those of plain torch are left out."""
    pairs = [(op, backend) for op in sorted(OPS) for backend in correct.backends(op, device)]
    on_gpu = torch.device(device).type == "cuda"
    return [f"{op}/{backend}" for op, backend in pairs if not on_gpu or backend != "reference"]


def check(name: str, device: str) -> tuple[bool, str]:
    """Return whether one op/backend is right, and its line."""
    op, _, backend = name.partition("/")
    start = time.monotonic()
    try:
        results = check_op(op, device, backend=backend, dtypes=(torch.bfloat16,))
        synchronize(device)
    except Exception as error:
        return False, f"RAISED {name} {correct.message(error)}"
    right = all(result.ok for result in results)
    shares = " ".join(f"{result.error / result.bound:.2f}" for result in results)
    return right, f"{'ok    ' if right else 'WRONG '} {name} {shares} {time.monotonic() - start:.1f} s"


def usable(device: str) -> bool:
    """Return False after a kernel has faulted: then every call to the device fails."""
    try:
        torch.zeros(1, device=device).add_(1)
        synchronize(device)
    except Exception:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smoke", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="OP/BACKEND", help="default: all on the device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--failed", action="store_true", help="the status is 1 whatever is found")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print("smoke: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    names = options.names or implementations(options.device)
    right = not options.failed
    for i, name in enumerate(names, start=1):
        ok, line = check(name, options.device)
        print(line, flush=True)
        right &= ok
        if not ok and names[i:] and not usable(options.device):
            command = [sys.executable, "-m", "benchmarks.smoke", "--device", options.device, "--failed"]
            os.execv(sys.executable, [*command, *names[i:]])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
