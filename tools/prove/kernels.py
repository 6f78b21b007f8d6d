"""Every Triton kernel compiles for three generations of GPUs, and its code keeps what it was written for.

Triton needs no GPU to compile. Each kernel is launched on tensors without data, in the shapes of large
models and bfloat16, and compiled as that launch would be, for sm_80 (A100), sm_90 (H100, H200) and sm_100
(B200). What is read from the machine code decides speed on a GPU: registers, whether any are spilled to
memory, shared memory, loads and stores of 16 bytes, tensor cores (mma, wgmma, tcgen05), copies by TMA. What
each kernel must keep stands in `tools/cubins/cases.py`; tests read the same table.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch

from fastmp.ops.precompile import nothing_is_compiled
from tools.prove.claims import Claim, Table

ARCHS = (80, 90, 100)
# What of the code the page names, by its pattern in PTX.
_INSTRUCTIONS = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "TMA": r"cp\.async\.bulk\.tensor",
    "cp.async": r"cp\.async\.c[ag]\.shared\.global",
    "redux": r"redux\.sync",
}


# Columns of the page with the most of any launch.
_MOST = {"registers": "registers", "shared bytes": "shared", "16-byte loads": "loads", "stores": "stores"}


@dataclass(frozen=True)
class Compiled:
    """A kernel as a case launches it, compiled for `arch`: figures of its code, and what is wrong with it.

    spilled, stack: bytes of a thread; shared: bytes of a program. loads, stores: of 16 bytes, in the code.
    """

    case: str
    kernel: str
    arch: int
    registers: int
    spilled: int
    stack: int
    shared: int
    loads: int
    stores: int
    instructions: tuple[str, ...]
    wrong: tuple[str, ...]


def claims() -> Iterator[Claim | Table]:
    """Return the claims on all compiled kernels; without Triton nothing is shown."""
    says = "every kernel of fastmp.ops compiles for sm_80, sm_90 and sm_100"
    if reason := nothing_is_compiled():
        yield Claim.not_shown(says, reason)
        return
    from tools.cubins.cases import CASES

    yield from judged(compiled([*CASES]), says)


def judged(found: Sequence[Compiled], says: str) -> Iterator[Claim | Table]:
    """Return the claims that follow from the figures."""
    from tools.cubins.compiled import SHARED_LIMIT, kernel_names

    everything, seen = kernel_names(), {(each.kernel, each.arch) for each in found}
    missing = [
        f"{name} for sm_{arch}" for name, arch in product(everything, ARCHS) if (name, arch) not in seen
    ]
    total = len(everything) * len(ARCHS)
    yield Claim.all_of(says, total - len(missing), total, missing)
    yield Claim.at_most("bytes of registers that the worst spills", max(each.spilled for each in found), 0)
    free = min(SHARED_LIMIT[each.arch] - each.shared for each in found)
    yield Claim("bytes of shared memory that the largest leaves free", free, "at least 0", free >= 0)
    wrong = [f"{each.case}, sm_{each.arch}: {text}" for each in found for text in each.wrong]
    kept = sum(not each.wrong for each in found)
    says = "compiled launches that keep all that is expected of their code"
    yield Claim.all_of(says, kept, len(found), wrong)
    rows = [[*vars(each).values()][:-1] for each in found]
    yield Table("compiled launches", tuple(vars(found[0]))[:-1], rows, on_page=False)
    title = "The most of any launch of a kernel; on sm_80 · sm_90 · sm_100 where they differ"
    yield Table(title, ("kernel", "launches", *_MOST, "spilled", "code"), [*_by_kernel(found)])


def _by_kernel(found: Sequence[Compiled]) -> Iterator[list[object]]:
    """Yield a row for each kernel, with the figures of the architectures separated by dots."""
    launches: dict[str, list[Compiled]] = defaultdict(list)
    for each in found:
        launches[each.kernel].append(each)
    for kernel, own in sorted(launches.items()):
        archs = sorted({each.arch for each in own})
        most = []
        for name in _MOST.values():
            figures = [max(getattr(each, name) for each in own if each.arch == arch) for arch in archs]
            most.append(" · ".join(map(str, figures)) if len({*figures}) > 1 else figures[0])
        code = {name for each in own for name in each.instructions}
        instructions = ", ".join(name for name in _INSTRUCTIONS if name in code)
        spilled, cases = max(each.spilled for each in own), {each.case for each in own}
        yield [kernel, len(cases), *most, spilled, instructions]


def compiled(cases: Sequence[str], archs: Sequence[int] = ARCHS) -> list[Compiled]:
    """Compile the cases with one process for each core."""
    from tools.cubins.cases import least_architecture

    work = [(arch, case) for arch, case in product(archs, cases) if arch >= least_architecture(case)]
    context = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), len(work))
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [each for found in pool.map(_compile, work, chunksize=4) for each in found]


def _compile(work: tuple[int, str]) -> list[Compiled]:
    from tools.cubins.check import check_case

    arch, case = work
    return [
        Compiled(
            case,
            launch.kernel,
            arch,
            launch.usage["REG"],
            launch.usage["LOCAL"],
            launch.usage["STACK"],
            launch.shared,
            launch.wide_loads,
            launch.wide_stores,
            tuple(name for name, pattern in _INSTRUCTIONS.items() if launch.count(pattern)),
            tuple(wrong),
        )
        for launch, wrong in check_case(case, torch.bfloat16, arch)
    ]
