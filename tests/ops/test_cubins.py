"""Facts about the code of every Triton kernel, compiled as its launcher would launch it.

Always: nothing is spilled, no stack, shared memory within the limit, and a barrier wherever threads meet in
memory. The rest stands in the table of cubin_cases.py.
"""

from __future__ import annotations

import collections
import itertools
import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from access_tools import accesses, unordered
from cubin_cases import CASES, ONE_DTYPE, ROUTERS, WARP, WIDE, Facts
from cubin_tools import REGISTERS, SHARED_LIMIT, Launch, launches, meta

from fastmp.ops import OPS, _triton, adamw, cross_entropy_triton, grouped_mm_tiles
from fastmp.ops.registry import compute_dtype
from fastmp.testing.ops import samples

ARCHS = (80, 90, 100, 103)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# Bytes of stack a thread: none with the release that tile sizes were chosen for; others park a few words.
STACK = 0 if _triton.VERSION.startswith("3.6.") else 32
TENSOR_CORES = {80: r"mma\.sync\.aligned\.m16n8k16", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}


def check(launch: Launch, facts: Facts, wide: bool) -> None:
    assert launch.usage["LOCAL"] == 0, "registers are spilled"
    assert launch.usage["STACK"] <= facts.stack + STACK or wide  # functions of float64 may keep a table there
    assert launch.shared <= SHARED_LIMIT[launch.arch]
    assert not list(unordered(launch.ttgir, launch.storages))
    assert launch.usage["REG"] * launch.threads <= REGISTERS
    assert launch.wide_loads >= facts.loads * launch.vectors, (launch.wide_loads, launch.vectors)
    assert launch.wide_stores >= facts.stores * launch.vectors, (launch.wide_stores, launch.vectors)
    assert launch.count(r"cp\.async\.c[ag]\.shared\.global.*, 0x10") >= facts.copies * launch.vectors
    if wide:
        return
    for pattern in facts.has:
        assert re.search(pattern, launch.ptx), pattern
    for pattern in facts.lacks:
        assert not re.search(pattern, launch.ptx), pattern
    assert launch.usage["REG"] <= facts.registers
    assert launch.count(r"bar\.sync") <= facts.barriers
    if facts.exps is not None:
        fewest, most = facts.exps if isinstance(facts.exps, tuple) else (facts.exps, facts.exps)
        count = launch.count(r"ex2\.approx")
        assert fewest * launch.elements <= count <= most * launch.elements, (count, launch.elements)
    if launch.itemsize == 2:
        assert launch.resident * launch.threads >= facts.threads
    in_flight = launch.resident * launch.elements * launch.threads * launch.itemsize
    assert in_flight >= facts.bytes * (1 if launch.arch >= 90 else 0.5)


# Each case gives the op and its arguments from t, which makes tensors of the dtype, and the wider dtype it
# computes in; then the facts of the kernels that it launches, in order. Shapes are those of large models.


def parameters():
    """(case, dtype, arch): bf16 on Hopper; with --full on other GPUs; with --exhaustive in other dtypes."""
    found = []
    for name, dtype, arch in itertools.product(CASES, DTYPES, ARCHS):
        if dtype == "bf16" or not name.startswith(ONE_DTYPE):
            marks = pytest.mark.exhaustive if dtype != "bf16" else pytest.mark.full if arch != 90 else ()
            found.append(pytest.param(name, dtype, arch, id=f"{name}-{dtype}-sm_{arch}", marks=marks))
    return found


def check_product(launch: Launch, narrow: bool, apart: bool) -> None:
    """The tensor cores of the architecture, but not for tiles of 16 rows; TMA, or asynchronous copies."""
    loaded = {access.argument for access in accesses(launch.ttgir) if access.op == "tt.load"}
    assert not loaded & {"x", "w", "grad"}, "operands that no program loads ahead"
    if launch.itemsize != 2:
        return
    assert launch.wide_stores, "stores narrower than 16 bytes"
    arch = 80 if narrow else min(launch.arch, 100)
    assert launch.count(TENSOR_CORES[arch])
    tma = launch.arch >= 90 and not apart
    assert bool(launch.count(r"cp\.async\.bulk\.tensor")) == tma
    assert bool(launch.count(r"cp\.async\.c[ag]\.shared\.global")) != tma
    assert tma or apart or not launch.count(r"cp\.async\.ca")
    if launch.kernel == "grouped_mm_kernel":  # as many programs are launched as run at a time
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
        blocks = grouped_mm_tiles.Blocks(*(launch.constants[name] for name in names))
        each = blocks.programs_each(launch.itemsize, launch.arch, launch.constants["GATED"])
        assert each == min(launch.resident, 8 // blocks.num_warps)


@pytest.mark.parametrize(("name", "dtype", "arch"), parameters())
def test_kernel(name, dtype, arch):
    case, facts = CASES[name]
    tensor = meta(DTYPES[dtype])
    wide = compute_dtype(DTYPES[dtype])
    op, arguments = case(tensor, wide)
    moved = wide if op == "adamw_" or name in WIDE else DTYPES[dtype]  # what most of the bytes belong to
    found = launches(op, arguments, arch, moved.itemsize)
    assert len(found) == len(facts), [launch.kernel for launch in found]
    for launch, expected in zip(found, facts, strict=True):
        check(launch, expected, wide == torch.float64)
        if launch.kernel.startswith("grouped"):
            check_product(launch, "decode" in name, "apart" in name)


@pytest.mark.full
@pytest.mark.parametrize("op", sorted(name for name, op in OPS.items() if "triton" in op.implementations))
def test_samples(op):
    """Odd sizes, sizes of one, which the launcher makes constants, and tensors that are None."""
    for arguments in samples(op, device="meta", dtype=torch.bfloat16):
        for launch in launches(op, arguments, 90):
            assert launch.usage["LOCAL"] == 0, f"{launch.kernel} spills registers"
            assert not list(unordered(launch.ttgir, launch.storages))


@pytest.mark.parametrize("name", ["router deepseek-v3", "router backward deepseek-v3"])
def test_logits_in_float32_keep_a_token_within_a_warp(name):
    """A warp loads half of them at once; routers of models have such logits."""
    test_kernel(name, "fp32", 90)


def test_keys_that_hold_their_places_take_one_reduction_a_round():
    count = {}
    for dtype in (torch.bfloat16, torch.float32):
        (launch,) = launches(*CASES["router deepseek-v2"][0](meta(dtype), torch.float32), 90)
        count[dtype] = launch.count(WARP)
    rounds = ROUTERS["deepseek-v2"][1] * 2  # with those of the balancing loss
    assert count[torch.bfloat16] <= count[torch.float32] - rounds


def test_sizes_beyond_int32_change_nothing():
    case, _ = CASES["adamw"]
    found = [launches(*case(meta(torch.bfloat16), torch.float32, n), 90, 4)[0] for n in (1 << 20, 1 << 35)]
    few, many = ((launch.wide_loads, launch.wide_stores, launch.shared) for launch in found)
    assert few == many


@pytest.mark.parametrize("rows", [1 << 30, (1 << 30) + 1])
def test_a_ragged_descriptor_has_no_more_rows_than_its_limit(rows):
    t = meta(torch.bfloat16)
    (launch,) = launches("grouped_mm_wgrad", (t(rows, 64), t(rows, 64), t(8, dtype=torch.int32)), 90)
    assert launch.constants["TMA"] == (rows == 1 << 30)


def test_numbers_of_adamw_reach_the_kernel_in_float64():
    """A Python float would otherwise be passed as float32."""
    types = {param.name: param.annotation_type for param in adamw.adamw_kernel.params}
    numbers = ("lr", "beta1", "beta2", "log_beta1", "log_beta2", "eps", "weight_decay")
    assert {types[name] for name in numbers} == {"fp64"}


def test_one_kernel_of_adamw_serves_all_buckets():
    """Where a bucket begins, which of the counts is its own, and the seed compile nothing anew."""
    kept = {param.name for param in adamw.adamw_kernel.params if param.do_not_specialize}
    assert kept == {"first_element", "groups", "noise_seed", "step"}


def test_split_masters_are_computed_like_whole_ones():
    """The same floating-point instructions, fused alike, so that masters have the same bits."""
    counts = []
    for name in ("adamw groups", "adamw small"):
        (launch,) = launches(*CASES[name][0](meta(torch.bfloat16), torch.float32), 90, 4)
        code = re.findall(r"\b(FFMA|FMUL|FADD|MUFU\.\w+)\b", launch.sass)
        counts.append(collections.Counter(code))
    assert counts[0] == counts[1] and counts[0]["FFMA"]


def test_a_product_of_philox_is_one_instruction():
    """tl.randint4x has the same words and multiplies twice, once for each half of the 64 bits."""
    case, _ = CASES["dropout"]
    (launch,) = launches(*case(meta(torch.bfloat16), torch.float32), 90)
    groups = launch.elements / 4  # 20 products for four elements, of which some have a constant factor
    code = launch.sass
    assert 17 * groups <= len(re.findall(r"IMAD\.WIDE\.U32", code)) <= 20 * groups
    assert len(re.findall(r"IMAD\.HI\.U32", code)) <= 2 * groups


@pytest.mark.parametrize("columns", [1000, 16032, 32768, 50304, 131072, 151936, 262144, 300_000])
def test_rows_in_the_making_fit_the_second_level_cache(columns):
    """A row is half read, or half written, on average: 132 multiprocessors, and a cache of 50 MiB."""
    _, _, num_warps = cross_entropy_triton.loss_grad_sizes(columns, 2)
    programs = REGISTERS // (64 * 32 * num_warps)
    assert 132 * programs * columns * 2 // 2 <= 50 << 20
