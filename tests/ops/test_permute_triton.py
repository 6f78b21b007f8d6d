"""The Triton kernels of permutation, permute and unpermute, interpreted, against the references."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from every_op_tools import BEYOND, NothingWalksThrough, only_ends_run, sparse
from kernel_tools import check_kernel, random
from marks import DTYPES

from fastmp.ops import permute_triton as kernels
from fastmp.ops import quantize_rows
from fastmp.ops.core.fp8 import E4M3
from fastmp.ops.core.registry import OPS
from fastmp.ops.quantize import block_shape
from fastmp.testing.ops import samples

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
]
REFERENCE, LAUNCH = (
    {op: OPS[op].implementations[backend] for op in OPS if backend in OPS[op].implementations}
    for backend in ("reference", "triton")
)
check = partial(check_kernel, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ("permute", "unpermute", "unpermute_backward"))
def test_equals_reference(op, dtype):
    for arguments in samples(op, device="cpu", dtype=dtype):
        check(op, *arguments)


@pytest.mark.parametrize("experts", (1, 3, 32, 200, 257))
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (64, 4), (203, 3), (300, 2)], ids=str)
def test_permutation(shape, experts):
    """Blocks of assignments full and cut short, fewer and more experts than a program sums."""
    generator = torch.Generator().manual_seed(experts)
    indices = torch.randint(-2, experts + 2, shape, generator=generator, dtype=torch.int32)
    check("permutation", indices, experts)
    check("permutation", indices.t().contiguous().t().clamp(max=experts - 1), experts)


def test_permutation_of_many_blocks(monkeypatch):
    """More blocks than one step of the sums takes, and comparisons in several steps."""
    for name, value in (("BLOCK_ASSIGNMENTS", 16), ("STEP", 4), ("BLOCK_BLOCKS", 16)):
        monkeypatch.setattr(kernels, name, value)
    indices = torch.randint(-1, 5, (301, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    check("permutation", indices, 5)


@pytest.mark.parametrize("shift", (0, 1))
@pytest.mark.parametrize("columns", (1, 66, 513, 2060))
def test_columns(columns, shift):
    """Widths and row pitches that allow 16-byte accesses, and others; several blocks of columns."""
    x, y = (random(n, columns + shift, dtype=torch.float32, seed=n)[:, shift:] for n in (5, 23))
    row_of, _ = REFERENCE["permutation"](torch.arange(20, dtype=torch.int32).view(5, 4) % 7, 6)
    probs = random(5, 4, dtype=torch.float32)
    check("permute", x, row_of, 20)
    check("unpermute", y, row_of, probs)
    check("unpermute", y, row_of, None)
    check("unpermute_backward", x, y, row_of, probs, rtol=1e-4)


def test_nan_of_a_dropped_assignment_stays_out():
    x = random(2, 40, dtype=torch.float32)
    y = torch.full((3, 40), torch.nan)
    row_of = torch.tensor([[-1, 3], [7, -1]], dtype=torch.int32)
    probs = torch.full((2, 2), torch.nan)
    assert not LAUNCH["unpermute"](y, row_of, probs).any()
    assert not any(t.any() for t in LAUNCH["unpermute_backward"](x, y, row_of, probs))


def test_many_unused_rows():
    """Programs that find no row to clear, some, and all of theirs."""
    row_of = torch.arange(70, dtype=torch.int32).view(70, 1)
    row_of[3:9] = -1
    check("permute", random(70, 9, dtype=torch.float32), row_of, 300, rtol=0, atol=0)


def test_rows_without_an_assignment_are_found_whatever_the_memory_held(monkeypatch):
    """Numbers of assignments that exist, and go elsewhere or nowhere."""
    generator = torch.Generator().manual_seed(0)
    row_of = torch.randperm(150, generator=generator)[:80].view(40, 2).int()
    row_of[::5] = -1
    x, y = random(40, 9, dtype=torch.float32), random(150, 9, dtype=torch.float32)
    probs = random(40, 2, dtype=torch.float32)

    new_empty = torch.Tensor.new_empty

    def held(like: torch.Tensor, *shape: int, **options) -> torch.Tensor:
        return new_empty(like, *shape, **options).random_(-3, 90, generator=generator)

    monkeypatch.setattr(torch.Tensor, "new_empty", held)
    for _ in range(3):
        check("permute", x, row_of, 150, rtol=0, atol=0)
        check("unpermute_backward", x, y, row_of, probs)


@pytest.mark.full
def test_offsets_beyond_two_to_the_35():
    """Tokens and rows of more than 2^35 elements: the first and last assignments, and rows at either end."""
    columns = 1 << 16
    many = BEYOND // columns + 5
    few = random(4, columns, dtype=torch.float16)
    tall = sparse(many * columns, torch.float16).view(many, columns)
    tall[[0, 1, many - 2, many - 1]] = few
    row_of = torch.tensor([[many - 1], [0], [many - 2], [1]], dtype=torch.int32)
    probs = random(4, 1, dtype=torch.float32, seed=1)
    with NothingWalksThrough(), only_ends_run():
        gathered = LAUNCH["unpermute"](tall, row_of, probs)
    torch.testing.assert_close(gathered, (few[[3, 0, 2, 1]] * probs).half(), rtol=2e-3, atol=1e-3)

    row_of = sparse(many, torch.int32).view(many, 1)
    row_of[0], row_of[-1] = many - 1, many - 4
    weights = sparse(many, torch.float32).view(many, 1)
    weights[0], weights[-1] = 1, 2
    block_m, _ = kernels.block_shape(columns, 2, 4)
    other = sparse(many * columns, torch.float16).view(many, columns)
    other[many - 1], other[many - 4] = 1, 1
    with NothingWalksThrough(), only_ends_run(1, also=[-(-many // block_m) - 1]):
        scattered = LAUNCH["permute"](tall, row_of, many)
        dy, dprobs = LAUNCH["unpermute_backward"](tall, other, row_of, weights)
    block_m, block_n = block_shape(columns, 2)
    last_tile = -(-many // block_m) * (columns // block_n) - 1
    with NothingWalksThrough(), only_ends_run(1, also=[last_tile]):
        q, s = LAUNCH["permute_quantized"](tall, None, row_of, many, 128, E4M3)
    for row, part, block in ((many - 1, few[0, :128], 0), (many - 4, few[3, -128:], columns // 128 - 1)):
        want, scale = quantize_rows(part.view(1, 128))
        assert torch.equal(q[row].view(-1, 128)[block].view(torch.uint8), want[0].view(torch.uint8))
        assert s[row, block] == scale
    assert torch.equal(scattered[many - 1], few[0]) and torch.equal(scattered[many - 4], few[3])
    assert torch.equal(dy[many - 1], few[0]) and torch.equal(dy[many - 4], 2 * few[3])
    sums = few[[0, 3]].float().sum(1)
    torch.testing.assert_close(dprobs[[0, many - 1], 0], sums, rtol=1e-3, atol=1e-1)
