"""Memory that ranks share: all see what one writes, nothing is left behind, and some ranks cannot have it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import run_launcher
from hypothesis import given
from hypothesis import strategies as st
from marks import full
from torch.distributed import _symmetric_memory as symmetric

from fastmp.config.dispatchers import row_capacity
from fastmp.distributed import symmetric_memory
from fastmp.distributed.exchange_layout import ExchangeLayout
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.symmetric_memory import SymmetricMemory
from fastmp.status import process_status
from fastmp.testing.ranks import RankError, run_ranks


def at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def shared_files() -> list[str]:
    """Files of peers' memory that this process has open or mapped."""
    names = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [name for name in (*names, *mapped) if "fastmp-symmetric" in name]


def writes_case(rank, world):
    """Each rank leaves its number in everyone's memory, in a place of its own."""
    memory = SymmetricMemory(dist.group.WORLD, 4096 + world, "cpu")
    assert memory.local.shape == (4096 + world,) and not memory.local.any()
    assert memory.addresses[rank] == memory.local.data_ptr() and memory.local.data_ptr() % 4096 == 0
    dist.barrier()
    for peer in range(world):
        at(memory.addresses[peer], 4096 + world)[4096 + rank] = rank + 1
    dist.barrier()
    assert memory.local[4096:].tolist() == list(range(1, world + 1)) and not memory.local[:4096].any()
    assert sum("/memfd" in name for name in shared_files()) == world  # maps alone: no file is open
    del memory
    gc.collect()
    return shared_files()


@pytest.mark.parametrize("world", (2, *full([4]), pytest.param(8, marks=pytest.mark.exhaustive)))
def test_every_rank_writes_to_every_rank(world):
    assert run_ranks(writes_case, world) == [[]] * world


def killed_case(rank, world):
    memory = SymmetricMemory(dist.group.WORLD, 1 << 20, "cpu")
    memory.local.fill_(rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(at(memory.addresses[1], 1)[0])  # what the dead rank wrote can still be read


@pytest.mark.full
def test_a_killed_rank_leaves_nothing_behind():
    before = set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(killed_case, 2)
    left = (set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))) - before
    assert not [name for name in left if "fastmp-symmetric" in name]


LAUNCHED = """
import fastmp, torch.distributed as dist
from fastmp.distributed.symmetric_memory import SymmetricMemory
runtime = fastmp.init(backend="gloo")
memory = SymmetricMemory(dist.group.WORLD, 64, "cpu")
memory.local.fill_(7 + dist.get_rank())
dist.barrier()
import ctypes
seen = [ctypes.c_uint8.from_address(address).value for address in memory.addresses]
assert seen == [7, 8], seen
dist.barrier()
runtime.close()
"""


@pytest.mark.full
def test_launched_ranks(tmp_path):
    program = tmp_path / "launched.py"
    program.write_text(textwrap.dedent(LAUNCHED))
    launch = [sys.executable, "-m", "fastmp", "launch", "--nproc-per-node", "2", str(program)]
    run_launcher(launch, os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, 100)


def error_case(rank, world):
    group, place = dist.group.WORLD, symmetric_memory._this_host()
    with pytest.raises(ValueError, match=r"the same number of bytes on all ranks, got \[64, 65\]"):
        SymmetricMemory(group, 64 + rank, "cpu")
    with pytest.raises(ValueError, match=r"the same number of bytes on all ranks, got \[0, 0\]"):
        SymmetricMemory(group, 0, "cpu")
    symmetric_memory._this_host = lambda: place._replace(name=f"node{rank}", boot=f"boot{rank}")
    with pytest.raises(ValueError, match=r"ranks 0 and 1 .* run on node0 and node1; .*alltoall"):
        SymmetricMemory(group, 64, "cpu")
    symmetric_memory._this_host = lambda: place
    mapped = symmetric_memory._mapped
    if rank == 1:
        symmetric_memory._mapped = lambda path, nbytes: mapped("/proc/0/fd/0", nbytes)
    with pytest.raises(
        RuntimeError, match="SymmetricMemory: rank 1 of the group cannot map the memory of rank 0"
    ):
        SymmetricMemory(group, 64, "cpu")
    symmetric_memory._mapped = mapped
    with patch.object(os, "ftruncate", side_effect=OSError("no room") if rank == 1 else None):
        with pytest.raises(RuntimeError, match=r"rank 1 of the group cannot make 64 bytes .*: no room"):
            SymmetricMemory(group, 64, "cpu")
    gc.collect()
    assert shared_files() == []
    SymmetricMemory(group, 64, "cpu")  # and the group still works
    return rank


def test_errors_are_the_same_on_all_ranks():
    assert run_ranks(error_case, 2) == [0, 1]


def rendezvous_case(rank, world):
    """torch's symmetric memory is mocked, but for its ranks' waiting for each other in the group's store."""
    group, attempts = dist.group.WORLD, itertools.count()
    store = dist.distributed_c10d._get_process_group_store(group)
    failing = {"empty": None, "rendezvous": None, "synchronize": None}

    def fails(name):
        if rank in (failing[name] or ()):
            raise RuntimeError(f"no {name} on rank {rank}")

    def empty(nbytes, dtype, device):
        fails("empty")
        return torch.ones(nbytes, dtype=dtype)

    def rendezvous(local, group):
        attempt = next(attempts)
        fails("rendezvous")
        store.set(f"{attempt} {rank}", str(local.data_ptr()))
        starts = [int(store.get(f"{attempt} {other}")) for other in range(world)]
        return SimpleNamespace(buffer_ptrs=[start - 64 for start in starts])

    patches = (
        patch.object(symmetric, "empty", empty),
        patch.object(symmetric, "rendezvous", rendezvous),
        patch.object(torch.cuda, "synchronize", lambda device: fails("synchronize")),
        patch.object(symmetric_memory, "_RENDEZVOUS_TIMEOUT", timedelta(seconds=0.5)),
    )
    before, cuda = store.timeout, torch.device("cuda:0")
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        for name, message in (
            (
                "empty",
                "rank 1 of the group cannot allocate 128 bytes of symmetric memory .* no empty on rank 1",
            ),
            (
                "rendezvous",
                "rank 1 of the group cannot reach the memory of its peers .* no rendezvous on rank 1",
            ),
            ("synchronize", "rank 1 of the group cannot reach .* no synchronize on rank 1"),
        ):
            failing[name] = (1, 2)
            with pytest.raises(RuntimeError, match=message):
                SymmetricMemory(group, 128, cuda)
            failing[name] = None
        memory = SymmetricMemory(group, 128, cuda)
        assert memory.addresses[rank] == memory.local.data_ptr() and not memory.local.any()
    assert store.timeout == before
    return rank


def test_a_rank_that_fails_in_the_rendezvous_is_named_on_all_ranks():
    assert run_ranks(rendezvous_case, 3, timeout=60) == [0, 1, 2]


def reserve_case(rank, world, layout):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    differing = {"top_k": (2, 3), "factor": (None, 0.5), "dtype": (torch.bfloat16, torch.float16)}
    for name, values in differing.items():
        own = {"top_k": 2, "experts": 4, name: values[groups.exchange.group.rank() == 3]}
        tokens = torch.zeros(3, 8, dtype=own.pop("dtype", torch.float32))
        with pytest.raises(ValueError, match=rf"{values[0]}.* on rank 0 and .*{values[1]}.* on rank 3"):
            groups.exchange.reserve(tokens, **own)
    exchange, (etp, ep) = groups.exchange, (groups.grid.etp, groups.grid.ep)
    sizes = {"top_k": 2, "experts": 4}
    views = exchange.reserve(torch.zeros(3 + rank, 8), **sizes)
    assert views.rows.shape == (2, row_capacity(2 + world, ep=ep, etp=etp, **sizes), 8)
    assert views.epochs.shape == (world + 1,) and views.counts.shape == (2, world, 4)
    assert exchange.reserve(torch.zeros(1, 8), **sizes) is views
    assert views.rank == (groups.etp.rank() if groups.etp else 0) * ep + (
        groups.ep.rank() if groups.ep else 0
    )
    places = torch.zeros(world, 2, dtype=torch.int64)
    for part in (views.epochs, views.counts, views.rows):
        assert part.data_ptr() % 16 == 0 and part.is_contiguous()
    dist.barrier()
    base = exchange.memory.local.data_ptr()
    for number, distance in enumerate(views.peer_offsets.flatten().tolist()):
        assert distance % 16 == 0 and (distance == 0) == (number == views.rank)
        places[number, 0] = 1
        at(base + distance, 4 * world).view(torch.int32)[views.rank] = views.rank + 1
    dist.barrier()
    assert views.epochs[:-1].tolist() == list(range(1, world + 1))
    with pytest.raises(
        ValueError, match=rf"{world + 3} tokens of a rank, but .* reserved memory for {world + 2}"
    ):
        exchange.reserve(torch.zeros(world + 3, 8), **sizes)
    with pytest.raises(ValueError, match=r"expected {'hidden': 8, .* got {'hidden': 16, "):
        exchange.reserve(torch.zeros(3, 16), **sizes)
    return rank


class Captured:
    """Stands in for a graph."""


def growing_case(rank, world):
    """Memory grows where more tokens are expected, unless a graph of any rank holds it, and is given back."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    exchange, sizes = groups.exchange, {"top_k": 2, "experts": 4}

    def rows(tokens):
        return exchange.reserve(torch.zeros(tokens, 8), **sizes).rows.shape[1]

    exchange.request(5)
    exchange.request(4)
    first = rows(3)
    assert first == row_capacity(5, ep=world, etp=1, **sizes) and rows(5) == first
    exchange.request(5)
    assert rows(1) == first
    views, graph = exchange.views, Captured()
    if rank == 1:
        with process_status.capturing(graph):
            assert rows(2) == first
    exchange.request(9)
    with pytest.raises(ValueError, match="9 tokens per rank requested, but graphs hold the memory for 5"):
        rows(1)
    assert rows(5) == first and exchange.views is views
    graph.itself = graph  # for the garbage collector
    del graph
    exchange.request(9)
    with (
        process_status.capturing(Captured()),
        pytest.raises(RuntimeError, match="run one batch eagerly first"),
    ):
        rows(1)
    exchange.request(9)
    assert rows(1) == row_capacity(9, ep=world, etp=1, **sizes) and not exchange.views.rows.any()
    before = shared_files()
    assert len(before) == 2 * world  # those that somebody still goes back through, too
    del views
    gc.collect()
    assert len(shared_files()) == world


def test_memory_grows_where_no_graph_holds_it():
    run_ranks(growing_case, 2)


@pytest.mark.parametrize(
    "layout",
    ({"ep": 2, "etp": 2, "order": "ep-dp-cp-tp-pp"}, *full([{"ep": 4}, {"ep": 2, "etp": 2}])),
    ids=str,
)
def test_views_of_an_expert_group(layout):
    run_ranks(reserve_case, 4, layout)


@given(
    ranks=st.integers(2, 72),
    experts=st.integers(1, 300),
    hidden=st.integers(1, 9000),
    itemsize=st.sampled_from((2, 4, 8)),
    capacity=st.integers(1, 1 << 20),
)
def test_parts_of_a_layout_do_not_touch(ranks, experts, hidden, itemsize, capacity):
    layout = ExchangeLayout(ranks, experts, hidden, itemsize, capacity)
    assert layout.counts_at >= 4 * (ranks + 1)
    assert layout.rows_at >= layout.counts_at + 8 * ranks * experts
    assert layout.nbytes >= layout.rows_at + 2 * capacity * hidden * itemsize
    assert layout.counts_at % 16 == layout.rows_at % 16 == layout.nbytes % 16 == 0


@pytest.mark.parametrize(
    ("factor", "rows"), [(None, 4 * 100 * 2 * 2), (1.0, 100 * 2 * 2), (1.25, 500), (0.001, 1), (9.0, 1600)]
)
def test_rows_of_a_rank(factor, rows):
    assert row_capacity(100, top_k=2, experts=8, ep=4, etp=2, factor=factor) == rows
    assert row_capacity(100, top_k=8, experts=8, ep=4, etp=1) == 4 * 100 * 2  # no more than its experts
