"""The judgement of compiled kernels: what of the facts in `cases` their code does not keep.

Of every kernel: nothing is spilled, no stack, shared memory within the limit, a barrier wherever threads
meet in memory, no 32-bit integer that may overflow, and the parameters that a launch gives. The rest stands
in the table of `cases`. Takes a few seconds a kernel, of which Triton keeps what it has compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from fastmp.ops import grouped_mm_tiles
from fastmp.ops.core import _triton, launcher
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.grouped_lora import overlaps_lora
from fastmp.ops.grouped_mm_tiles import overlaps_tiles
from tools.cubins.accesses import accesses, unordered
from tools.cubins.cases import CASES, WIDE
from tools.cubins.compiled import REGISTERS, SHARED_LIMIT, Launch, launches, meta, parameters_of
from tools.cubins.facts import Facts
from tools.cubins.ranges import overflows

# Tile sizes and the counts in `cases` were chosen with one release of Triton. Others park a few words on the
# stack (3.8 more in grouped GEMMs with a bias: 112 bytes on Hopper, up to 336 on Blackwell), keep as little
# as half as much on a multiprocessor and, as 3.9, order the router's reductions by up to four times as many
# barriers: they are slower, not wrong.
TUNED = (_triton.VERSION or "").startswith("3.6.")
STACK, STACK_OF_BIAS = (0, 0) if TUNED else (32, 336)  # bytes a thread
MORE, LESS = (1, 1.0) if TUNED else (4, 0.5)
TENSOR_CORES = {80: r"mma\.sync\.aligned\.m16n8k16", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
TMA, ASYNC_COPY = r"cp\.async\.bulk\.tensor", r"cp\.async\.c[ag]\.shared\.global"


def check_case(name: str, dtype: torch.dtype, arch: int) -> list[tuple[Launch, list[str]]]:
    """Return the launches of a case of `CASES` in order, each with the facts that its code violates.

    arch: compute capability as one number (90 is 9.0).
    """
    case, facts = CASES[name]
    wide = compute_dtype(dtype)
    op, arguments = case(meta(dtype), wide)
    moved = wide if op == "adamw_" or name in WIDE else dtype  # what most of the bytes belong to
    found = launches(op, arguments, arch, moved.itemsize)
    if len(found) != len(facts):
        kernels = ", ".join(launch.kernel for launch in found)
        raise ValueError(f"{name}: {op} launches {kernels}; `cases` has facts of {len(facts)}")
    judged = []
    for launch, expected in zip(found, facts, strict=True):
        wrong = [*broken(launch, expected, wide == torch.float64)]
        wrong += broken_parameters(launch.compiled, launch.constants)
        if launch.kernel.startswith("grouped"):
            wrong += broken_gemm(launch, narrow="decode" in name, apart="apart" in name)
        judged.append((launch, wrong))
    return judged


def broken(launch: Launch, facts: Facts, wide: bool = False) -> Iterator[str]:
    """Yield what of `facts` the code of a launch does not keep. wide: it computes in float64."""
    vectors = launch.vectors
    if launch.usage["LOCAL"]:
        yield f"{launch.usage['LOCAL']} bytes of registers are spilled"
    # functions of float64 may keep a table there
    biased = launch.kernel.startswith("grouped") and launch.constants.get("HAS_BIAS")
    stack = facts.stack + (STACK_OF_BIAS if biased else STACK)
    yield from _most("bytes of stack", launch.usage["STACK"], stack, unless=wide)
    yield from _most("bytes of shared memory", launch.shared, SHARED_LIMIT[launch.arch])
    yield from overflows(launch.ttir, launch.limits)
    for load, store in unordered(launch.ttgir, launch.storages):
        yield f"nothing orders a load of {load.argument} and a store of {store.argument}"
    yield from _most("registers of a program", launch.usage["REG"] * launch.threads, REGISTERS)
    yield from _least("loads of 16 bytes", launch.wide_loads, facts.loads * vectors)
    if not facts.quantizes or launch.itemsize == 2:
        yield from _least("stores of 16 bytes", launch.wide_stores, facts.stores * vectors)
    yield from _least("copies of 16 bytes", launch.count(rf"{ASYNC_COPY}.*, 0x10"), facts.copies * vectors)
    if wide:
        return
    yield from (f"no {pattern}" for pattern in facts.has if not re.search(pattern, launch.ptx))
    yield from (f"there is {pattern}" for pattern in facts.lacks if re.search(pattern, launch.ptx))
    yield from _most("registers", launch.usage["REG"], facts.registers)
    yield from _most("barriers", launch.count(r"bar\.sync"), facts.barriers * MORE)
    if facts.exps is not None:
        fewest, most = facts.exps if isinstance(facts.exps, tuple) else (facts.exps, facts.exps)
        count = launch.count(r"ex2\.approx")
        yield from _least("exponentials", count, fewest * launch.elements)
        yield from _most("exponentials", count, most * launch.elements)
    if launch.itemsize == 2:
        yield from _least(
            "threads on a multiprocessor", launch.resident * launch.threads, facts.threads * LESS
        )
    in_flight = launch.resident * launch.elements * launch.threads * launch.itemsize
    yield from _least("bytes in flight", in_flight, facts.bytes * LESS * (1 if launch.arch >= 90 else 0.5))


def broken_parameters(compiled: Any, constants: dict[str, Any]) -> Iterator[str]:
    """Yield how the parameters of compiled code differ from the ones that a launch gives to the driver."""
    names = compiled.src.fn.arg_names
    given = launcher.driver_arguments(compiled, sum(name not in constants for name in names))
    if given is None:
        yield "launched by Triton, not by the driver"
        return
    kinds, descriptors = given
    ranks, sizes = iter(len(block) for *_, block in descriptors), []
    for kind in kinds:
        if kind == "T":
            rank = next(ranks)
            sizes += [128, *rank * [4], *rank * [8]]  # tensor map, shape, strides
        elif kind != "-":
            sizes.append(4 if kind in "if" else 8)
    sizes += [8, 8]  # scratch memory
    if (wanted := parameters_of(compiled.asm["ptx"])) != sizes:
        yield f"parameters of {wanted} bytes, a launch gives {sizes}"


def broken_gemm(launch: Launch, *, narrow: bool, apart: bool) -> Iterator[str]:
    """Yield what the code of a grouped GEMM lacks.

    That is the tensor cores of the architecture, except for tiles of 16 rows (`narrow`), and TMA, or
    asynchronous copies where rows lie `apart`.
    """
    loaded = {access.argument for access in accesses(launch.ttgir) if access.op == "tt.load"}
    if ahead := loaded & {"x", "q", "w", "grad"}:
        yield f"no program loads {', '.join(sorted(ahead))} ahead"
    if launch.itemsize != 2:
        return
    by_tma = launch.constants.get("OUT_TMA", False)
    reductions = launch.count(r"cp\.reduce\.async\.bulk\.tensor\S*\.add")
    if bool(reductions) != (by_tma and launch.constants["ACCUMULATE"]):
        yield f"{reductions} additions by TMA"
    if not (launch.wide_stores or by_tma):
        yield "stores narrower than 16 bytes"
    if by_tma and (launch.count(r"st\.global") or "out" in loaded):
        yield "the gradient is read or written by threads beside the TMA unit"
    if launch.kernel == "grouped_wgrad_kernel" and launch.constants["TMA"]:
        yield from _not_ahead(launch)
    cores = TENSOR_CORES[80 if narrow else min(launch.arch, 100)]
    if not launch.count(cores):
        yield f"no {cores}"
    tma = launch.arch >= 90 and not apart
    if bool(launch.count(TMA)) != tma or bool(launch.count(ASYNC_COPY)) == tma:
        yield f"not by {'TMA' if tma else 'asynchronous copies'} alone"
    if not (tma or apart) and launch.count(r"cp\.async\.ca"):
        yield "copies through the first-level cache"
    persistent = "grouped_mm_kernel", "grouped_lora_kernel", "grouped_mm_fp8_kernel"
    if launch.kernel in persistent:  # as many programs as run at a time
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
        tile = grouped_mm_tiles.TileConfig(*(launch.constants[name] for name in names))
        fp8, gated = launch.kernel == "grouped_mm_fp8_kernel", launch.constants.get("GATED", False)
        each = tile.programs_per_sm(1 if fp8 else launch.itemsize, launch.arch, gated)
        if "HAS_BIAS" in launch.constants:  # the kernels of `overlaps_tiles`, not that in FP8
            yield from _not_overlapped(launch)
        if each != (fit := min(launch.resident, 8 // tile.num_warps)):
            yield f"{each} programs are launched for a multiprocessor, on which {fit} fit"


def _not_overlapped(launch: Launch) -> Iterator[str]:
    """Yield the reasons why a grouped GEMM does not load its next tile during the epilogue."""
    flat = launch.constants["FLAT"]
    has_bias, transposed = launch.constants["HAS_BIAS"], launch.constants["TRANSPOSED"]
    form, gated = launch.constants.get("FORM", "none"), launch.constants.get("GATED", False)
    rule = overlaps_tiles(launch.arch, form, gated, has_bias and transposed)
    expected = launch.constants["TMA"] and rule
    if launch.kernel == "grouped_lora_kernel":
        expected = expected and overlaps_lora(launch.arch, launch.constants["BLOCK_R"])
    if flat != expected:
        yield f"{'flattened' if flat else 'not flattened'}, unlike the rule of `overlaps_tiles`"
    if not flat:
        return
    yield from _not_ahead(launch)
    wide = launch.constants["BLOCK_M"] >= 64 and not gated
    if launch.arch == 90 and wide and "pendings = 1" not in launch.ttgir:
        yield "no wgmma stays in flight over a step"


def _not_ahead(launch: Launch) -> Iterator[str]:
    """Yield an error unless a loop in SASS multiplies a step, loads a later one, and then stores a tile.

    A loop that Triton has not pipelined loads a step, waits for it, and multiplies.
    """
    if launch.arch == 103:  # Triton's cuobjdump does not disassemble it; sm_100 has the same loop
        return
    line = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\w+)\S*(?: .*?0x([0-9a-f]+))?.*;"
    code = [(int(at, 16), name, target) for at, name, target in re.findall(line, launch.sass)]
    products = [at for at, name, _ in code if name.endswith("MMA")]
    jumps = [(int(target, 16), at) for at, name, target in code if name == "BRA" and target]
    _, last = min((at - to, at) for to, at in jumps if to <= products[0] < at)  # the innermost loop
    loop = [name for at, name, _ in code if products[0] <= at <= last]
    stores = [n for n, name in enumerate(loop) if name in ("STG", "UTMASTG", "UTMAREDG")]
    if not stores or "UTMALDG" not in loop[: stores[0]]:
        yield "the next tile's loads are not issued before the store of this one"


def _most(what: str, found: float, bound: float, *, unless: bool = False) -> Iterator[str]:
    if found > bound and not unless:
        yield f"{found:.7g} {what}, at most {bound:.7g} expected"


def _least(what: str, found: float, bound: float) -> Iterator[str]:
    if found < bound:
        yield f"{found:.7g} {what}, at least {bound:.7g} expected"
