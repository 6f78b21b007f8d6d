"""Exchanges over symmetric memory: bit for bit one permutation of all assignments; order at barriers."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from every_op_tools import implementation, op_backends
from exchange_tools import (
    PeerViews,
    all_steps,
    assert_same,
    expected,
    far_away,
    one_after_the_other,
    routing,
    routings,
    shared_memory,
    side_by_side,
    virtual_ranks,
)
from marks import exhaustive, full

from fastmp.ops import OPS, exchange
from fastmp.testing.ranks import run_ranks
from fastmp.testing.samples.token_dispatch import exchange_samples

TENSORS = ("x", "indices", "probs", "grad", "outputs", "row_grads")  # of a routing
BACKENDS = [case.values[1] for case in op_backends(("c++", "reference")) if case.values[0] == "exchange_push"]
BACKEND = pytest.mark.parametrize("backend", [BACKENDS[0], *full(BACKENDS[1:])])


def runs(backend):
    return lambda op, *arguments: implementation(op, backend)(*arguments)


def memories(given, dtype, **options) -> list[PeerViews]:
    hidden, sizes = given.x[0].shape[1], {"num_experts": given.num_experts, "capacity": given.capacity}
    return virtual_ranks(given.etp, given.ep, hidden=hidden, dtype=dtype, **sizes, **options)


@BACKEND
@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (torch.float32, 16),
        *full([(torch.bfloat16, 64), (torch.float64, 32)]),
        *exhaustive([(torch.float32, 200), (torch.bfloat16, 200)]),
    ],
)
def test_exchanges_are_one_permutation_of_all_assignments(backend, dtype, count):
    run = runs(backend)
    overflown = 0
    for number, given in enumerate(routings(count, dtype)):
        wanted = expected(run, given)
        for rank, results in enumerate(one_after_the_other(run, given, memories(given, dtype))):
            assert_same(results, wanted[rank], f"routing {number}, rank {rank}")
            overflown += int(results.dropped)
    assert overflown > 0


@BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, *full([torch.bfloat16])], ids=str)
def test_ranks_that_wait_for_each_other(backend, dtype):
    """Virtual ranks on threads, over several steps in the same memory."""
    run = runs(backend)
    for seed in range(3):
        given = routing(seed, dtype, 6, None)
        wanted, ranks = expected(run, given), memories(given, dtype)
        for _ in range(3):
            for rank, results in enumerate(side_by_side(lambda here: all_steps(run, given, here), ranks)):  # noqa: B023
                assert_same(results, wanted[rank], f"routing {seed}, rank {rank}")


def _forked(rank, world, backend, cases):
    for given, ranks, wanted in cases:
        for _ in range(2):
            assert_same(all_steps(runs(backend), given, ranks[rank]), wanted[rank], f"rank {rank}")


@BACKEND
@pytest.mark.parametrize(("world", "count"), [(4, 8), *exhaustive([(8, 50), (8, 200)])])
def test_forked_ranks(backend, world, count):
    cases = []
    for seed in range(100_000):
        given = routing(seed, torch.float32, world, None)
        if given.etp * given.ep == world:
            memory = memories(given, torch.float32, allocate=shared_memory)
            cases.append((given, memory, expected(runs(backend), given)))
        if len(cases) == count:
            break
    run_ranks(_forked, world, backend, cases, timeout=120)


def _stress(run, here: PeerViews, exchanges: int, seed: int) -> None:
    """Push this rank's number to all, exchange after exchange, at its own pace: what comes is of this one."""
    pace = random.Random(seed + here.rank)
    ranks = here.peer_offsets.numel()
    where = (torch.arange(ranks, dtype=torch.int32) * here.rows.shape[1] + here.rank).view(1, ranks)
    offsets = torch.tensor([ranks], dtype=torch.int32)
    for number in range(exchanges):
        if pace.random() < 0.1:
            time.sleep(pace.random() * 1e-3)
        x = torch.full((1, here.rows.shape[2]), float(number * ranks + here.rank))
        run("exchange_push", x, where, None, None, here.epochs, here.rows, here.peer_offsets)
        run("exchange_barrier", here.epochs, here.peer_offsets, here.rank, 30.0)
        if pace.random() < 0.1:
            time.sleep(pace.random() * 1e-3)
        got = run("exchange_take", here.rows, here.epochs, offsets, here.rows.shape[2])
        assert torch.equal(got[:, 0], number * ranks + torch.arange(ranks, dtype=torch.float32)), number
    assert int(here.epochs[-1]) == exchanges


@BACKEND
@pytest.mark.parametrize("exchanges", [50, *full([500]), pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_exchange_after_exchange_at_different_paces(backend, exchanges):
    ranks = virtual_ranks(1, 4, num_experts=4, capacity=4, hidden=64, allocate=shared_memory)
    run_ranks(lambda rank, world: _stress(runs(backend), ranks[rank], exchanges, 0), 4, timeout=120)


@BACKEND
def test_a_barrier_left_out_shows(backend):
    """The test above can fail: where exchanges are only counted, ranks read what is not there yet."""

    def without(op, *arguments):
        if op != "exchange_barrier":
            return runs(backend)(op, *arguments)
        arguments[0][-1] += 1

    ranks = virtual_ranks(1, 4, num_experts=4, capacity=4, hidden=64)
    with pytest.raises(AssertionError):
        side_by_side(lambda here: _stress(without, here, 300, 0), ranks)


@BACKEND
def test_numbers_wrap(backend):
    ranks = virtual_ranks(1, 3, num_experts=3, capacity=3, hidden=4)
    for here in ranks:
        here.epochs[:] = (1 << 31) - 3
    run = runs(backend)

    def go(here: PeerViews) -> int:
        for _ in range(6):
            run("exchange_barrier", here.epochs, here.peer_offsets, here.rank, 10.0)
        return int(here.epochs[-1])

    assert side_by_side(go, ranks) == [-(1 << 31) + 3] * 3


@BACKEND
@pytest.mark.parametrize("op", ["exchange_barrier", "exchange_counts"])
def test_a_rank_that_does_not_come_is_named(backend, op):
    ranks = virtual_ranks(1, 3, num_experts=3, capacity=3, hidden=4)
    ranks[0].epochs[1] = 1  # rank 1 has come
    here, timeout = ranks[0], 0.05
    arguments = (here.epochs, here.peer_offsets, 0, timeout)
    if op == "exchange_counts":
        arguments = (torch.zeros(3, dtype=torch.int32), here.epochs, here.counts, *arguments[1:])
    with pytest.raises(RuntimeError, match=r"rank 2 has not come to exchange 1 within 0.05 s: .* 0"):
        implementation(op, backend)(*arguments)
    assert here.epochs.tolist() == [1, 1, 0, 0] and [int(r.epochs[0]) for r in ranks] == [1, 1, 1]
    for each in ranks:
        each.epochs[2] = 1  # too late: it may have gone on, with what rank 0 had not finished
    with pytest.raises(RuntimeError, match=rf"{op}: exchange 1 has failed on this rank before, .* groups"):
        implementation(op, backend)(*arguments)


NOT_FINITE = "timeout (must be a positive number of seconds|to be finite in float32), got"


@BACKEND
@pytest.mark.parametrize("op", ["exchange_barrier", "exchange_counts"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeout": math.nan}, f"{NOT_FINITE} nan"),
        ({"timeout": math.inf}, f"{NOT_FINITE} inf"),
        ({"timeout": -1.0}, "timeout must be a positive number of seconds, got -1"),
        ({0: 16}, "expected offset 0 for this rank, rank 0, got 16"),
        ({1: -(1 << 63)}, "there is no memory of rank 1 at .* of -9223372036854775808 bytes"),
        ({1: 1 << 50}, "there is no memory of rank 1 at .* of 1125899906842624 bytes"),
    ],
    ids=str,
)
def test_a_barrier_that_would_hang_or_crash_raises(backend, op, change, message):
    """And nothing is written before."""
    here = virtual_ranks(1, 3, num_experts=3, capacity=3, hidden=4)[0]
    peer_offsets, timeout = here.peer_offsets.clone(), change.get("timeout", 0.05)
    for rank in change.keys() - {"timeout"}:
        peer_offsets[0, rank] = change[rank]
    arguments = (here.epochs, peer_offsets, 0, timeout)
    if op == "exchange_counts":
        arguments = (torch.ones(3, dtype=torch.int32), here.epochs, here.counts, *arguments[1:])
    with pytest.raises(RuntimeError, match=f"{op}: .*{message}"):
        implementation(op, backend)(*arguments)
    with pytest.raises(ValueError if "timeout" in change else RuntimeError, match=f"{op}: .*{message}"):
        getattr(exchange, op)(*arguments)
    assert not here.epochs.any() and not here.counts.any()


@BACKEND
def test_a_barrier_waits_for_the_last(backend):
    ranks = virtual_ranks(1, 2, num_experts=2, capacity=3, hidden=4)
    passed = threading.Event()

    def first() -> None:
        implementation("exchange_barrier", backend)(ranks[0].epochs, ranks[0].peer_offsets, 0, 10.0)
        passed.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert not passed.wait(0.05)
    implementation("exchange_barrier", backend)(ranks[1].epochs, ranks[1].peer_offsets, 1, 10.0)
    assert passed.wait(5)
    thread.join()


@BACKEND
def test_rows_beyond_the_capacity_are_not_written(backend):
    """Neither by numbers that are wrong, nor at the end of what is there."""
    run, (here,) = runs(backend), virtual_ranks(1, 1, num_experts=1, capacity=4, hidden=8)
    here.rows.fill_(7)
    where = torch.tensor([[4, -1], [5, 1 << 30], [-(1 << 31), (1 << 31) - 1], [3, 4]], dtype=torch.int32)
    run("exchange_push", torch.ones(4, 8), where, None, None, here.epochs, here.rows, here.peer_offsets)
    assert (here.rows[0] == 7).all() and (here.rows[1, :3] == 7).all() and (here.rows[1, 3] == 1).all()
    for end, filled in ((9, 4), (-3, 0), (2, 2)):
        here.rows.fill_(7)
        offsets = torch.tensor([end], dtype=torch.int32)
        run("exchange_give", torch.ones(4, 8), offsets, here.epochs, here.rows)
        assert (here.rows[1, :filled] == 1).all() and (here.rows[1, filled:] == 7).all()
        taken = run("exchange_take", here.rows, here.epochs, offsets, here.rows.shape[2])
        assert (taken[:filled] == 7).all() and (taken[filled:] == 0).all()


@BACKEND
def test_special_values(backend):
    """A dropped assignment adds no NaN, neither of its probability nor of what lies in the buffer."""
    run, (here,) = runs(backend), virtual_ranks(1, 1, num_experts=1, capacity=4, hidden=3)
    here.rows.fill_(torch.nan)
    here.rows[0, 1] = torch.tensor([1.0, torch.inf, -0.0])
    where = torch.tensor([[-1, 1], [4, 9]], dtype=torch.int32)
    probs = torch.tensor([[torch.nan, 2.0], [torch.nan, torch.inf]])
    out, y = run("exchange_pull", here.rows, here.epochs, here.peer_offsets, where, probs, True)
    assert out.tolist() == [[2.0, torch.inf, 0.0], [0.0, 0.0, 0.0]]
    assert y[0, 1].tolist() == [1.0, torch.inf, 0.0] and y.view(-1, 3)[[0, 2, 3]].tolist() == [[0.0] * 3] * 3
    dprobs = run(
        "exchange_push",
        torch.ones(2, 3),
        where,
        probs,
        torch.full_like(y, torch.nan),
        here.epochs,
        here.rows,
        here.peer_offsets,
    )
    assert dprobs[0, 0] == 0 and dprobs[0, 1].isnan() and dprobs[1].tolist() == [0, 0]


@BACKEND
def test_elements_that_32_bits_cannot_number(backend):
    far_away(runs(backend), (1 << 20) + 3, 1 << 12)


def _arguments(op: str) -> list:
    return list(next(exchange_samples(op, torch.float32, torch.Generator().manual_seed(0))))


@pytest.mark.parametrize(
    ("op", "place", "wrong", "message"),
    [
        ("exchange_counts", 0, torch.zeros(3, dtype=torch.int32), "own must be torch.int32"),
        ("exchange_counts", 1, torch.zeros(4, dtype=torch.int32), "epochs must be torch.int32"),
        ("exchange_counts", 3, torch.zeros(2, dtype=torch.int64), "peer_offsets must be int64"),
        ("exchange_counts", 4, 4, "rank must be one of the 4 ranks, got 4"),
        ("exchange_places", 0, torch.zeros(33, 2), "row_of must be int32"),
        ("exchange_places", 4, 3, "3 peers do not divide 4 experts and 4 ranks"),
        ("exchange_places", 5, 1 << 30, "int32 cannot number 1073741824 rows"),
        ("exchange_push", 0, torch.zeros(33, 513), "x must be torch.float32"),
        ("exchange_push", 0, torch.zeros(33, 512).half(), "x must be torch.float32"),
        ("exchange_push", 2, torch.zeros(33, 2).double(), "probs must be torch.float32"),
        ("exchange_push", 2, None, "y .* comes with probs"),
        ("exchange_push", 5, torch.zeros(80, 512), "rows must be"),
        ("exchange_push", 5, torch.zeros(512, 80, 2).transpose(0, 2), "rows must be contiguous"),
        ("exchange_barrier", 0, torch.zeros(3), "epochs must be torch.int32"),
        ("exchange_take", 2, torch.zeros(2), "offsets must be int32"),
        ("exchange_take", 3, 513, "rows have 512 columns, got width 513"),
        ("exchange_give", 0, torch.zeros(79, 512), "given must be torch.float32"),
        ("exchange_pull", 3, torch.zeros(33), "where must be int32"),
    ],
)
def test_what_does_not_fit_is_refused(op, place, wrong, message):
    arguments = _arguments(op)
    getattr(exchange, op)(*arguments)
    arguments[place] = wrong
    with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
        getattr(exchange, op)(*arguments)


def test_costs():
    push, pull = (OPS[f"exchange_{name}"] for name in ("push", "pull"))
    x, where, probs, y, epochs, rows, peer_offsets = _arguments("exchange_push")
    assert push.traffic(x, where, None, None, epochs, rows, peer_offsets) == 33 * 512 * 4 * 3 + 33 * 2 * 4
    peer_offsets = torch.zeros(2, 2, dtype=torch.int64)
    wanted = 33 * 512 * 4 * (1 + 4) + 33 * 2 * 4
    assert push.traffic(x, where, None, None, epochs, rows, peer_offsets) == wanted
    assert push.traffic(x, where, probs, y, epochs, rows, peer_offsets) == wanted + 33 * 2 * (512 * 4 + 8)
    assert pull.traffic(rows, epochs, peer_offsets, where, None, False) == wanted
    assert push.flops(x, where, probs, y, epochs, rows, peer_offsets) == 33 * 2 * 512 * 3


def few_connections(ranks: int, connections: str) -> str:
    """Return why kernels of `ranks` cannot wait for each other on one GPU, or "".

    A hardware queue that two streams share holds the second one back until the first one's kernel is done.
    connections: CUDA_DEVICE_MAX_CONNECTIONS; 8 where it is "".
    """
    if int(connections or 8) > ranks:
        return ""
    return (
        f"{ranks} virtual ranks wait for each other on streams of one GPU: set CUDA_DEVICE_MAX_CONNECTIONS "
        f"to {ranks + 1} or more, it is {connections or 'not set: 8'}"
    )


@pytest.mark.parametrize(
    ("connections", "few"), [("", False), ("8", False), ("4", False), ("3", True), ("1", True)]
)
def test_virtual_ranks_need_a_queue_each_and_one_for_the_rest(connections, few):
    assert bool(few_connections(3, connections)) == few


NOBODY_COMES = """
import torch
from fastmp.ops.exchange import exchange_barrier

memory = torch.zeros(64, dtype=torch.int32, device="cuda")
peer_offsets = torch.tensor([[0, 128]], device="cuda")  # rank 1 is memory alone
memory[1] = 1  # and has come to the first exchange
exchange_barrier(memory[:3], peer_offsets, 0, 60.0)
assert memory[2] == 1
print("met", flush=True)
exchange_barrier(memory[:3], peer_offsets, 0, 0.5)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.alone
def test_a_barrier_on_a_gpu_times_out():
    done = subprocess.run([sys.executable, "-c", NOBODY_COMES], capture_output=True, text=True, timeout=120)
    assert done.stdout == "met\n" and done.returncode != 0 and "CUDA error" in done.stderr, done.stderr


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_virtual_ranks_on_gpu(dtype):
    """Each rank on a stream of its own, without synchronisation, then all of them captured and replayed."""
    given = routing(0, dtype, 3, 64)
    ranks = given.etp * given.ep
    if few := few_connections(ranks, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")):
        pytest.skip(few)
    where = torch.device("cuda")
    moved = dataclasses.replace(
        given, **{name: [t.to(where) for t in getattr(given, name)] for name in TENSORS}
    )
    memory = memories(given, dtype, allocate=lambda size: torch.zeros(size, dtype=torch.uint8, device=where))
    streams = [torch.cuda.Stream() for _ in range(ranks)]

    def run(op, *arguments):
        return OPS[op].overload(*arguments)

    def everybody() -> list:
        """Barriers are launched on all streams before anyone waits for a device."""
        start, found = torch.cuda.current_stream(), []
        for here, stream in zip(memory, streams, strict=True):
            stream.wait_stream(start)
            with torch.cuda.stream(stream):
                found.append(all_steps(run, moved, here))
        for stream in streams:
            start.wait_stream(stream)
        return found

    for here in memory:  # alone, so that kernels are compiled: epochs say that all have come
        here.epochs[:-1] = 1 << 20
    everybody()
    torch.cuda.synchronize()
    for here in memory:
        here.epochs.zero_()
    torch.cuda.synchronize()
    wanted = expected(runs("reference"), given)

    def check(found: list) -> None:
        torch.cuda.synchronize()
        for rank, results in enumerate(found):
            for name, want in vars(wanted[rank]).items():
                bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
                torch.testing.assert_close(
                    getattr(results, name).cpu(), want, rtol=bound, atol=bound, check_dtype=False
                )

    torch.cuda.set_sync_debug_mode("error")
    try:
        found = everybody()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = everybody()
    for _ in range(3):
        graph.replay()
        check(found)
