"""Programs in random orders show which of them meet in memory by luck, and find nothing in sound kernels.

Each broken kernel here is right where programs run one after another and a store is seen at once.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastmp.ops.core._triton import TensorDescriptor, jit, tl
from tools import interleave

pytestmark = pytest.mark.interpret
ORDERS = 20


@jit
def count_kernel(step, out, FORM: tl.constexpr):
    """Every program reads the count; the last one to be done advances it."""
    done = tl.load(step)
    count = (done & 0xFFFFFFFF) + 1
    tl.store(out + tl.program_id(0), count)
    if FORM != "no barrier":
        tl.debug_barrier()
    if FORM == "the last one of the grid":
        if tl.program_id(0) == tl.num_programs(0) - 1:
            tl.store(step, count)
    else:
        before = tl.atomic_add(step, 1 << 32, sem="relaxed")
        tl.store(step, count, mask=(before >> 32) == tl.num_programs(0) - 1)


def count(form: str) -> tuple[Tensor, ...]:
    step, out = torch.tensor([7]), torch.zeros(6, dtype=torch.int64)
    count_kernel[(6,)](step, out, FORM=form)
    return step, out


@jit
def histogram_kernel(ids, counts, FORM: tl.constexpr):
    """Count ids of 0 to 3, two a program."""
    chosen = tl.load(ids + 2 * tl.program_id(0) + tl.arange(0, 2))
    bins = tl.arange(0, 4)
    found = tl.sum((chosen[:, None] == bins[None, :]).to(tl.int32), 0)
    if FORM == "read, add, write":
        tl.store(counts + bins, tl.load(counts + bins) + found)
    else:
        tl.atomic_add(counts + bins, found, sem="relaxed")


def histogram(form: str) -> tuple[Tensor, ...]:
    counts = torch.zeros(4, dtype=torch.int32)
    histogram_kernel[(6,)](torch.arange(12) % 4, counts, FORM=form)
    return (counts,)


@jit
def total_kernel(source, sink, rows):
    """Add up rows of 16 by descriptors, each program its own to the one sum."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        sink.store([0, 0], sink.load([0, 0]) + source.load([row, 0]))


def by_descriptor(form: str) -> tuple[Tensor, ...]:
    x, y = torch.arange(6 * 16.0).view(6, 16), torch.zeros(1, 16)
    blocks = [TensorDescriptor.from_tensor(tensor, [1, 16]) for tensor in (x, y)]
    total_kernel[(6 if form == "many programs" else 1,)](*blocks, 6)
    return (y,)


@jit
def difference_kernel(source, x, size, BLOCK: tl.constexpr):
    """x[i] = source[i] - source[i + 1]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after = tl.load(source + at + 1, mask=at + 1 < size, other=0.0)
    own = tl.load(source + at)
    tl.debug_barrier()
    tl.store(x + at, own - after)


def difference(form: str) -> tuple[Tensor, ...]:
    """In place, a block finds its right neighbour unchanged only if that one is later."""
    x = torch.arange(6 * 128.0).square()
    difference_kernel[(6,)](x if form == "in place" else x.clone(), x, len(x), BLOCK=128)
    return (x,)


@jit
def shift_kernel(x, out, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Double x in place, then add each number's right neighbour, whom another thread has written."""
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at))
    if FORM != "neighbour" and FORM != "own":
        tl.debug_barrier()
    tl.store(out + at, tl.load(x + (at if FORM == "own" else (at + 1) % BLOCK)))


def shift(form: str) -> tuple[Tensor, ...]:
    x, out = torch.arange(128.0), torch.zeros(128)
    shift_kernel[(1,)](x, out, FORM=form, BLOCK=128)
    return x, out


@jit
def sum_kernel(x, partials, ticket, total, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Each program sums a block, the last one to be done adds the sums."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(partials + tl.program_id(0), tl.sum(tl.load(x + at), 0))
    if FORM != "no barrier":
        tl.debug_barrier()
    before = tl.atomic_add(ticket, 1, sem="relaxed" if FORM == "relaxed" else "acq_rel")
    if before == tl.num_programs(0) - 1:
        blocks = tl.arange(0, 8)
        sums = tl.load(partials + blocks, mask=blocks < tl.num_programs(0), other=0.0, cache_modifier=".cg")
        tl.store(total, tl.sum(sums, 0))


def total(form: str) -> tuple[Tensor, ...]:
    partials, ticket, result = torch.full((6,), torch.nan), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    sum_kernel[(6,)](torch.arange(6 * 32.0), partials, ticket, result, FORM=form, BLOCK=32)
    return ticket, result


def wrong(call, form: str, late: bool) -> int:
    """In how many orders the result is not that of one program after another, or a race is found."""
    want, found = call(form), 0
    for seed in range(ORDERS):
        try:
            with interleave.interleaved(seed, late=late) as turns:
                found += not all(map(torch.equal, call(form), want))
        except interleave.Race:
            found += 1
        assert turns.launches == 1 and turns.switches >= turns.programs - 1
    return found


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("call", "form"),
    [
        (count, "sound"),
        (histogram, "atomic"),
        (difference, "out of place"),
        (shift, "own"),
        (shift, "after a barrier"),
        (total, "sound"),
    ],
)
def test_kernels_that_are_right_have_one_result(call, form, late):
    assert wrong(call, form, late) == 0


@pytest.mark.parametrize(
    ("call", "form", "late"),
    [
        (count, "the last one of the grid", False),
        (count, "no barrier", True),
        (histogram, "read, add, write", False),
        (difference, "in place", False),
        (by_descriptor, "many programs", False),
        (shift, "neighbour", True),
        (total, "relaxed", True),
        (total, "no barrier", True),
    ],
)
def test_kernels_that_are_broken_are_caught(call, form, late):
    assert wrong(call, form, late) >= ORDERS // 10


def test_a_seed_is_an_order():
    def results(seed: int) -> str:
        with interleave.interleaved(seed, late=True):
            return str([*histogram("read, add, write"), *total("relaxed")])

    runs = [results(seed) for seed in (*range(5), *range(5))]
    assert runs[:5] == runs[5:] and len(set(runs)) > 1


def test_the_interpreter_is_as_before():
    from triton.runtime import interpreter

    def names() -> list[dict]:
        parts = interpreter.GridExecutor, interpreter.ReduceOps, interpreter.interpreter_builder
        return [{n: v for n, v in vars(part).items() if not n.startswith("grid")} for part in parts]

    before = names()
    with pytest.raises(ZeroDivisionError), interleave.interleaved(0):
        histogram("atomic")
        raise ZeroDivisionError
    assert names() == before
