"""The Triton kernels of grouped products and LoRA in Triton's interpreter, against the reference.

bfloat16 is left out: the interpreter's products of it are wrong.
"""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest
import torch
from kernel_tools import random, set_programs
from marks import full

from fastmp.ops import grouped_mm_launch as kernels
from fastmp.ops.core import launcher
from fastmp.ops.core.registry import OPS
from fastmp.testing.ops import poisoned_memory

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
]

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
ROUTINGS = {  # sizes, rows of no expert, rank of LoRA
    "some": ([3, 0, 70, 0, 64], 5, 5),
    "none": ([0, 0], 3, 8),
    "one": ([0, 130, 0], 0, 16),
    "no rows": ([0, 0, 0], 0, 8),
    "many experts": ([1] * 15, 1, 32),
    "several steps of LoRA": ([3, 0, 70, 0, 34], 5, 70),
}


def calls(sizes, spare, r, n, k, dtype):
    """(op, arguments) of every op of the family; `n` is even."""
    offsets = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows, experts = sum(sizes) + spare, len(sizes)
    x, w = (
        random(rows, k, dtype=dtype, seed=0),
        random(experts, n, k, dtype=dtype, seed=1) * max(k, 1) ** -0.5,
    )
    grad, bias = random(rows, n, dtype=dtype, seed=2), random(experts, n, dtype=dtype, seed=3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    low, a, b = (
        random(*shape, dtype=dtype, seed=seed) * max(r, 1) ** -0.5
        for seed, shape in ((7, (rows, r)), (8, (experts, r, k)), (9, (experts, n, r)))
    )
    transposed = w.mT.contiguous()
    return [
        ("grouped_mm", (x, w, offsets, False)),
        ("grouped_mm", (grad, w, offsets, True)),
        ("grouped_mm_bias", (x, w, bias, offsets, False)),
        ("grouped_mm_bias", (grad, w, random(experts, k, dtype=dtype, seed=6), offsets, True)),
        ("grouped_mm_wgrad", (grad, x, offsets)),
        ("grouped_mm_wgrad_", (random(experts, n, k, dtype=wide, seed=4), grad, x, offsets)),
        ("grouped_mm_wgrad_", (random(experts, n, k, dtype=dtype, seed=5), grad, x, offsets)),
        ("grouped_mlp_in", (x, w, bias, offsets, "silu", True, True)),
        ("grouped_mlp_in", (x, w, None, offsets, "gelu", True, False)),
        ("grouped_mlp_in", (x, w, bias, offsets, "gelu_tanh", False, True)),
        ("grouped_mlp_in", (x, w, None, offsets, "silu", False, False)),
        ("grouped_mm_lora", (x, w, None, low, b, offsets, False, False)),
        ("grouped_mm_lora", (x, w, bias, low, b, offsets, False, False)),
        ("grouped_mm_lora", (grad, w, None, low, a, offsets, True, True)),
        ("grouped_mm_lora", (x, transposed, bias, low, b, offsets, True, False)),
        ("grouped_mm_lora", (grad, transposed, None, low, a, offsets, False, True)),
    ]


def run(op, backend, arguments):
    written = (arguments[0].clone(), *arguments[1:]) if op.endswith("_") else arguments
    with poisoned_memory():
        result = OPS[op].implementations[backend](*written)
    result = result if isinstance(result, tuple) else (result,)
    return [*(t for t in result if t is not None), *(written[:1] if op.endswith("_") else ())]


def check(op, arguments):
    dtype = next(a for a in arguments[1:] if isinstance(a, torch.Tensor)).dtype
    for value, want in zip(run(op, "triton", arguments), run(op, "reference", arguments), strict=True):
        assert value.is_contiguous()
        torch.testing.assert_close(value, want, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("routing", "dtype"),
    [
        ("some", torch.float32),
        *(
            pytest.param(routing, torch.float32, marks=pytest.mark.full)
            for routing in ROUTINGS
            if routing != "some"
        ),
        *(pytest.param("some", dtype, marks=pytest.mark.full) for dtype in (torch.float64, torch.float16)),
    ],
    ids=str,
)
def test_equals_reference(routing, dtype):
    for op, arguments in calls(*ROUTINGS[routing], 34, 65, dtype):
        check(op, arguments)


@pytest.mark.parametrize(
    "shape", [(2, 0, 5), (2, 4, 0), (1, 2, 1), (0, 4, 5), *full([((5, 140, 130),)])], ids=str
)
def test_shapes(shape):
    """Ranks of LoRA, columns and terms."""
    for op, arguments in calls([5, 0, 18], 2, *shape, torch.float32):
        check(op, arguments)


@pytest.fixture
def by_tma(monkeypatch):
    """Launches as on a GPU that has a TMA unit; tells the shapes of what is described to it."""
    seen, describe = [], kernels.descriptor
    lora = sys.modules["fastmp.ops.grouped_lora"]  # the package's name is the function's

    def described(tensor, *arguments):
        seen.append(tuple(tensor.shape))
        return describe(tensor, *arguments)

    monkeypatch.setattr(launcher, "architecture_elsewhere", 90)
    for module in (kernels, lora):
        monkeypatch.setattr(module, "descriptor", described)
    return seen


@pytest.mark.parametrize("routing", ("some", "none", "no rows"))
def test_by_descriptors(routing, by_tma):
    for op, arguments in calls(*ROUTINGS[routing], 48, 72, torch.float16):
        check(op, arguments)
    assert bool(by_tma) == (routing != "no rows")
    del by_tma[:]
    for op, arguments in calls(*ROUTINGS[routing], 34, 65, torch.float16):
        check(op, arguments)
    assert not by_tma  # rows that do not start at multiples of 16 bytes


@pytest.mark.parametrize("r", [12, *full([40])])
def test_the_terms_of_lora_have_no_descriptors(r, by_tma, monkeypatch):
    """Three programs walk over all tiles, in one loop for a rank of at most 32."""
    set_programs(monkeypatch, 3)
    for op, arguments in calls([3, 0, 40, 21, 33], 5, r, 48, 32, torch.float16):
        if op == "grouped_mm_lora":
            del by_tma[:]
            check(op, arguments)
            assert by_tma == [tuple(each.shape) for each in arguments[:2]]


@pytest.mark.parametrize("tma", (*full([False]), True), ids=("pointers", "descriptors"))
def test_neither_nan_of_another_expert_nor_of_nobody_comes_through(tma, request):
    if tma:
        request.getfixturevalue("by_tma")
    for op, arguments in calls([3, 70, 20], 5, 5, 48, 64, torch.float16):
        if op.startswith("grouped_mm_wgrad"):
            grad, x = arguments[-3:-1]
            grad[3:73], x[3:73], grad[93:], x[93:] = torch.nan, torch.inf, torch.inf, torch.nan
            finite = run(op, "triton", arguments)[-1][[0, 2]]
        else:
            arguments[0][3:73], arguments[0][93:] = torch.nan, torch.inf
            finite = torch.cat(
                [run(op, "triton", arguments)[0][rows] for rows in (slice(3), slice(73, None))]
            )
        assert finite.isfinite().all()
        check(op, arguments)


@pytest.mark.parametrize("layout", ("padded", "transposed", "apart", "one element further"))
def test_layouts(layout):
    def lay(tensor):
        if not tensor.is_floating_point():
            return tensor
        if layout == "padded":
            return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
        if layout == "transposed":
            return tensor.mT.contiguous().mT
        if layout == "apart":
            return torch.stack([tensor, tensor], 1)[:, 0]
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    for op, arguments in calls([3, 0, 18], 2, 5, 32, 24, torch.float32):
        laid = tuple(lay(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        result = [t.contiguous() for t in run(op, "triton", laid)]
        if op.endswith("_"):  # a clone keeps its strides: the sum was taken as it lies
            assert layout != "transposed" or laid[0].stride(-1) != 1
        torch.testing.assert_close(result, run(op, "reference", arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", (False, True))
def test_a_narrow_sum_is_rounded_once(transposed):
    """Of the same products: a float32 sum with the same start, rounded afterwards, has the same bits."""
    total, grad, x, offsets = next(
        a
        for op, a in calls([30, 0, 18], 2, 5, 32, 24, torch.float16)
        if a[0].dtype == a[1].dtype and op[-1] == "_"
    )
    found = []
    for dtype in (torch.float16, torch.float32):
        start = total.to(dtype)
        start = start.mT.contiguous().mT if transposed else start
        found += run("grouped_mm_wgrad_", "triton", (start, grad, x, offsets))
    torch.testing.assert_close(found[0], found[1].half(), rtol=0, atol=0)


@pytest.mark.full
def test_offsets_that_no_rows_fit_are_taken_as_the_nearest_that_do():
    """No check is made on a GPU: nothing outside the tensors is touched, and the rest is as documented."""
    for ends in ([-3, 4, 2, 9], [5, 99, 7, 200], [30, 1, 1, 1]):
        for op, arguments in calls([3, 4, 2, 0], 1, 3, 8, 16, torch.float32):
            arguments = tuple(
                torch.tensor(ends, dtype=torch.int32)
                if isinstance(a, torch.Tensor) and a.dtype == torch.int32
                else a
                for a in arguments
            )
            check(op, arguments)


@pytest.mark.parametrize("programs", full([1, 3, 1000]))
def test_any_number_of_programs_and_tiles(programs, monkeypatch):
    """Several rows and columns of tiles a group; the result does not depend on who makes a tile."""
    tile = kernels.TileConfig(16, 16, 16, 4, 2)
    monkeypatch.setattr(kernels, "gemm_tiles", lambda *arguments: tile)
    monkeypatch.setattr(kernels, "wgrad_tiles", lambda *arguments: tile)
    set_programs(monkeypatch, programs)
    monkeypatch.setattr(kernels, "GROUP", 2)
    for plan in ("plan_gemm", "_plan_wgrad"):  # without the cache of other tiles
        monkeypatch.setattr(kernels, plan, getattr(kernels, plan).__wrapped__)
    for op, arguments in calls([37, 0, 15, 17], 20, 5, 34, 33, torch.float32):
        check(op, arguments)


@pytest.mark.parametrize(
    "sizes", ([37, 0, 15, 17, 1], *full([[0, 0, 70], [40], [0, 0], [16, 32, 48]])), ids=str
)
def test_programs_walk_over_tiles_of_weight_gradients(sizes, by_tma, monkeypatch):
    """Ends within a step, experts without rows, tails of 48 x 72, and programs without a tile."""
    tile = kernels.TileConfig(32, 32, 16, 4, 2)
    monkeypatch.setattr(kernels, "wgrad_tiles", lambda *arguments: tile)
    monkeypatch.setattr(kernels, "_plan_wgrad", kernels._plan_wgrad.__wrapped__)
    launched = Mock(wraps=launcher.launch)
    monkeypatch.setattr(launcher, "launch", launched)
    for programs in (1, 4, 9):
        set_programs(monkeypatch, programs)
        for op, arguments in calls(sizes, 3, 5, 48, 72, torch.float16):
            if "wgrad" in op:
                check(op, arguments)
                assert launched.call_args.args[1] == min(programs, 6 * len(sizes))
