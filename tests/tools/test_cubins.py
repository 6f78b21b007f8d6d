"""Facts about the code of every Triton kernel, compiled as its launcher would launch it.

The expected facts are in tools/cubins: those of all kernels in check.py, those of each case in cases.py.
"""

from __future__ import annotations

import collections
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from fastmp.ops import OPS, adamw, cross_entropy_triton, grouped_mm_launch, grouped_mm_tiles
from fastmp.ops.core import launcher
from fastmp.testing.ops import samples
from tools.cubins.accesses import unordered
from tools.cubins.cases import ANY, CASES, ONE_DTYPE, ROUTERS, WARP, least_architecture
from tools.cubins.check import TUNED, broken, broken_gemm, broken_parameters, check_case
from tools.cubins.compiled import REGISTERS, launches, meta
from tools.cubins.facts import Facts

ARCHS = (80, 90, 100, 103)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def parameters():
    """(case, dtype, arch): bf16 on Hopper, or the first GPU that can run the case; with --full on other GPUs;
    with --exhaustive in other dtypes.
    """
    found = []
    for name, dtype, arch in itertools.product(CASES, DTYPES, ARCHS):
        least = least_architecture(name)
        if arch >= least and (dtype == "bf16" or not name.startswith(ONE_DTYPE)):
            quick = arch == max(90, least)
            marks = pytest.mark.exhaustive if dtype != "bf16" else () if quick else pytest.mark.full
            found.append(pytest.param(name, dtype, arch, id=f"{name}-{dtype}-sm_{arch}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "dtype", "arch"), parameters())
def test_kernel(name, dtype, arch):
    for launch, wrong in check_case(name, DTYPES[dtype], arch):
        assert not wrong, f"{launch.kernel}: {wrong}"


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


@pytest.mark.skipif(not TUNED, reason="other releases of Triton keep reductions that 3.6 leaves out")
def test_keys_that_hold_their_places_take_one_reduction_a_round():
    count = {}
    for dtype in (torch.bfloat16, torch.float32):
        launch, _ = launches(*CASES["router deepseek-v2"][0](meta(dtype), torch.float32), 90)
        count[dtype] = launch.count(WARP)
    rounds = ROUTERS["deepseek-v2"][1] * 2  # with those of the balancing loss
    assert count[torch.bfloat16] <= count[torch.float32] - rounds


def test_sizes_beyond_int32_change_nothing():
    case, _ = CASES["adamw"]
    found = [launches(*case(meta(torch.bfloat16), torch.float32, n), 90, 4)[0] for n in (1 << 20, 1 << 35)]
    few, many = ((launch.wide_loads, launch.wide_stores, launch.shared) for launch in found)
    assert few == many


def test_a_kernel_with_another_number_of_parameters_is_found():
    """As a release of Triton may add one for scratch memory, or leave it out."""
    (launch,) = launches(*CASES["grouped few"][0](meta(torch.bfloat16), torch.float32), 90)
    assert [*broken_parameters(launch.compiled, launch.constants)] == []
    ptx = re.sub(r",\s*\.param[^,)]*\)", "\n)", launch.ptx, count=1)
    fewer = SimpleNamespace(src=launch.compiled.src, metadata=launch.compiled.metadata, asm={"ptx": ptx})
    assert ["bytes, a launch gives" in wrong for wrong in broken_parameters(fewer, launch.constants)] == [
        True
    ]


def test_a_grouped_gemm_of_two_loops_does_not_overlap_its_tiles(monkeypatch):
    case, _ = CASES["grouped few"]
    plan = grouped_mm_launch.plan_gemm.__wrapped__
    monkeypatch.setattr(grouped_mm_launch, "plan_gemm", plan)
    monkeypatch.setattr(grouped_mm_launch, "overlaps_tiles", lambda *arguments: False)
    (launch,) = launches(*case(meta(torch.bfloat16), torch.float32), 90)
    assert [*broken_gemm(launch, narrow=False, apart=False)] == [
        "not flattened, unlike the rule of `overlaps_tiles`"
    ]
    claimed = replace(launch, constants={**launch.constants, "FLAT": True})
    assert [*broken_gemm(claimed, narrow=False, apart=False)] == [
        "the next tile's loads are not issued before the store of this one"
    ]


@pytest.mark.parametrize(
    ("arch", "dtype", "out_dtype", "pitch", "reduces"),
    [
        (90, torch.bfloat16, torch.float32, 64, True),
        (100, torch.float16, torch.float32, 68, True),
        (80, torch.bfloat16, torch.float32, 64, False),
        (90, torch.bfloat16, torch.bfloat16, 64, False),
        (90, torch.float32, torch.float32, 64, False),
        (90, torch.bfloat16, torch.float32, 66, False),
    ],
)
def test_tma_adds_to_aligned_float32_gradients(arch, dtype, out_dtype, pitch, reduces, monkeypatch):
    monkeypatch.setattr(launcher, "SETS_TENSOR_MAPS", True)
    t, constants = meta(dtype), []
    arguments = t(4, 64, 64, dtype=out_dtype, pitch=pitch), t(256, 64), t(256, 64), t(4, dtype=torch.int32)
    with launcher.intercept_launches(lambda kernel, arguments, given: constants.append(given), arch):
        OPS["grouped_mm_wgrad_"].implementations["triton"](*arguments)
    assert [each["OUT_TMA"] for each in constants] == [reduces]


def test_a_wgrad_without_stages_does_not_load_its_next_tile_ahead(monkeypatch):
    case, _ = CASES["grouped wgrad accumulating"]
    tile = replace(grouped_mm_tiles.wgrad_tiles(4096, 4096, 2, 90), num_stages=1)
    monkeypatch.setattr(grouped_mm_launch, "_plan_wgrad", grouped_mm_launch._plan_wgrad.__wrapped__)
    monkeypatch.setattr(grouped_mm_launch, "wgrad_tiles", lambda *arguments: tile)
    (launch,) = launches(*case(meta(torch.bfloat16), torch.float32), 90)
    assert "the next tile's loads are not issued before the store of this one" in [
        *broken_gemm(launch, narrow=False, apart=False)
    ]


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
    """The start of a bucket, its count and the seed compile nothing anew."""
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


def test_facts_that_are_not_kept_are_named():
    ((launch, wrong),) = check_case("gated silu", torch.bfloat16, 90)
    assert not wrong
    asked = Facts(loads=9, exps=2, registers=8, lacks=(r"ex2\.approx",), has=("no such code",))
    said = list(broken(launch, asked))
    ends = ("36 expected", "no such code", r"ex2\.approx", "at most 8 expected", "64 expected")
    assert len(said) == 5 and all(map(str.endswith, said, ends)), said
    greedy = SimpleNamespace(asm=launch.compiled.asm, metadata=SimpleNamespace(shared=1 << 20, num_warps=4))
    (said,) = broken(replace(launch, compiled=greedy), ANY)
    assert said == f"{1 << 20} bytes of shared memory, at most {227 << 10} expected"
