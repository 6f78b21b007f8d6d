"""The Triton kernels of exchanges, interpreted: ranks one after the other, forked, and in turns."""

from __future__ import annotations

import pytest
import torch
from exchange_tools import (
    PeerViews,
    Routing,
    all_steps,
    expected,
    far_away,
    one_after_the_other,
    routing,
    routings,
    shared_memory,
    virtual_ranks,
)
from marks import full
from torch import Tensor
from torch.utils._pytree import tree_map

from fastmp.ops import OPS, exchange_triton
from fastmp.ops.core import launcher
from fastmp.ops.core._triton import jit, tl
from fastmp.testing.ops import samples
from fastmp.testing.ranks import run_ranks

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")]


def reference(op: str, *arguments: object) -> object:
    return OPS[op].implementations["reference"](*arguments)


def triton(op: str, *arguments: object) -> object:
    """The kernels of exchanges; sorting and the like are tested elsewhere."""
    return OPS[op].implementations["triton" if op.startswith("exchange") else "reference"](*arguments)


def memories(given: Routing, dtype: torch.dtype, **options) -> list[PeerViews]:
    hidden, sizes = given.x[0].shape[1], {"num_experts": given.num_experts, "capacity": given.capacity}
    return virtual_ranks(given.etp, given.ep, hidden=hidden, dtype=dtype, **sizes, **options)


def assert_close(results, wanted, what: str) -> None:
    """Rows that are moved bit for bit; sums up to rounding, to bfloat16 towards 0 here."""
    for name, want in vars(wanted).items():
        value = getattr(results, name)
        if name in ("dx", "out", "dy", "dprobs"):
            bound = 5e-2 if wanted.rows.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(value, want, rtol=bound, atol=bound)
        else:
            assert torch.equal(value, want.to(value.dtype)), (what, name, value, want)


def some(*cases: object, all_of: int, each: int) -> list:
    """Cases (first, count, ...); in the exhaustive set, all from 0 on, `each` at a time."""
    every = [pytest.param(first, each, marks=pytest.mark.exhaustive) for first in range(0, all_of, each)]
    return [cases[0], *full(cases[1:]), *every]


@pytest.mark.parametrize(("first", "count"), some((0, 2), all_of=200, each=25))
def test_exchanges_are_one_permutation_of_all_assignments(first, count):
    same_as_one_permutation(torch.float32, first, count, 8 if count > 2 else 4)


@pytest.mark.full
def test_in_bfloat16():
    same_as_one_permutation(torch.bfloat16, 0, 8, 4)


def same_as_one_permutation(dtype: torch.dtype, first: int, count: int, most_ranks: int) -> None:
    for number, given in enumerate(routings(count, dtype, first=first, most_ranks=most_ranks)):
        wanted = expected(reference, given)
        for rank, results in enumerate(one_after_the_other(triton, given, memories(given, dtype))):
            assert_close(results, wanted[rank], f"routing {first + number}, rank {rank}")


@pytest.mark.parametrize("op", full(sorted(name for name in OPS if name.startswith("exchange_"))))
def test_samples(op):
    """Numbers that wrap, room for one row, odd widths, gaps between rows: all is as plain torch has it."""
    for arguments in samples(op, device="cpu", dtype=torch.float32):
        found, wanted = (
            tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, arguments) for _ in range(2)
        )
        results = triton(op, *found), reference(op, *wanted)
        torch.testing.assert_close((results[0], found), (results[1], wanted), rtol=1e-5, atol=1e-5)


def test_elements_that_32_bits_cannot_number():
    far_away(triton, (1 << 20) + 3, 1 << 12)


def _forked(rank, world, cases):
    for given, ranks, wanted in cases:
        for _ in range(2):
            assert_close(all_steps(triton, given, ranks[rank]), wanted[rank], f"rank {rank}")


@pytest.mark.parametrize("count", full([3]))
def test_forked_ranks(count):
    cases = []
    for seed in range(1000):
        given = routing(seed, torch.float32, 4, 8)
        if given.etp * given.ep == 4 and len(cases) < count:
            cases.append(
                (given, memories(given, torch.float32, allocate=shared_memory), expected(reference, given))
            )
    run_ranks(_forked, 4, cases, timeout=240)


SEEDS = (13, 21, 5, 14, 0)  # of routings of two or three ranks of ep, or two of etp; drops and overflows


class Memory:
    """Allocates for `virtual_ranks`, and keeps what it gave."""

    def __call__(self, num_bytes: int) -> Tensor:
        self.whole = torch.zeros(num_bytes, dtype=torch.uint8)
        return self.whole


def in_turns(run, seed: int, late: bool, times: int = 2) -> None:
    """Steps of two or three ranks, in an order that `seed` draws; what each gets is what it should."""
    from tools.interleave import together

    given, allocate = routing(SEEDS[seed % len(SEEDS)], torch.float32, 3, 4), Memory()
    ranks, wanted = memories(given, torch.float32, allocate=allocate), expected(reference, given)

    def program(here: PeerViews):
        return lambda: [all_steps(run, given, here) for _ in range(times)]

    results = together(seed, [program(here) for here in ranks], shared=allocate.whole, late=late)
    for rank, found in enumerate(results):
        for each in found:
            assert_close(each, wanted[rank], f"order {seed}, rank {rank}")


@pytest.mark.parametrize(("first", "orders"), some((0, 1), (1, 5), all_of=200, each=10))
def test_ranks_in_turns(first, orders):
    """Every other order has late stores: seen by others after a release at the latest moment."""
    for seed in range(first, first + orders):
        in_turns(triton, seed, late=seed % 2 == 0)


def without_barrier(op: str, *arguments):
    if op != "exchange_barrier":
        return triton(op, *arguments)
    arguments[0][-1] += 1


def number_used_again(op: str, *arguments):
    """All exchanges but the first have the number of the one before."""
    if op == "exchange_barrier" and int(arguments[0][-1]) > 1:
        arguments[0][-1] -= 1
    return triton(op, *arguments)


def one_half(op: str, *arguments):
    """Numbers that are even, so that the other half is never used."""
    if op == "exchange_barrier":
        triton(op, *arguments)
        arguments[0][-1] += 1
        return None
    return triton(op, *arguments)


@pytest.mark.parametrize("mistake", [without_barrier, *full([number_used_again, one_half])])
def test_mistakes_show_in_some_order(mistake):
    wrong = 0
    for seed in range(40):
        try:
            in_turns(mistake, seed, late=False, times=1)
        except AssertionError:
            wrong += 1
            break
    assert wrong


@jit(dynamic="rank", fixed="num_ranks")
def _come_without_release(epochs, peer_offsets, rank, num_ranks, RANKS: tl.constexpr):
    """A barrier whose atomics order nothing."""
    ranks = tl.arange(0, RANKS)
    others = ranks < num_ranks
    number = tl.load(epochs + num_ranks) + 1
    theirs = epochs + rank + exchange_triton._elements(tl.load(peer_offsets + ranks, mask=others, other=0), 4)
    zeros = tl.zeros([RANKS], tl.int32)
    tl.atomic_xchg(theirs, zeros + number, mask=others, sem="relaxed", scope="sys")
    behind = 1
    while behind > 0:
        reached = tl.atomic_add(epochs + ranks, zeros, mask=others, sem="relaxed", scope="sys")
        behind = tl.max((others & (reached - number < 0)).to(tl.int32), 0)
    tl.store(epochs + num_ranks, number)


@pytest.mark.full
def test_a_barrier_that_does_not_release_shows():
    def relaxed(op: str, *arguments):
        if op != "exchange_barrier":
            return triton(op, *arguments)
        epochs, peer_offsets, rank, _ = arguments
        launcher.launch(
            _come_without_release,
            1,
            (epochs, peer_offsets, rank, peer_offsets.numel()),
            {"RANKS": 32, "num_warps": 1},
        )

    with pytest.raises(AssertionError):
        for seed in range(40):
            in_turns(relaxed, seed, late=True, times=1)
