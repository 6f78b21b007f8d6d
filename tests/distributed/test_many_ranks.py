"""What starting a job costs a rank as ranks become many: bytes through the store, and descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_ranks import free_port

import fastmp
from fastmp.distributed import runtime
from fastmp.distributed.rendezvous import fresh_store
from fastmp.distributed.runtime import lost_peer
from fastmp.testing.ranks import run_ranks


class CountedStore(dist.Store):
    """Passes on to a store shared by the threads of a test, and counts the bytes of one rank's messages."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.operations, self.bytes = inner, 0, 0

    def _count(self, *texts: str | bytes) -> None:
        self.operations, self.bytes = self.operations + 1, self.bytes + sum(map(len, texts))

    def set(self, key, value):
        self._count(key, value)
        self.inner.set(key, value)

    def get(self, key):
        value = self.inner.get(key)
        self._count(key, value)
        return value

    def add(self, key, value):
        self._count(key, "12345678")
        return self.inner.add(key, value)

    def check(self, keys):
        self._count(*keys)
        return self.inner.check(keys)


def rendezvous_bytes(world_size: int) -> list[int]:
    """Bytes that each rank moves through the store to join a job with the ranks as threads."""
    stores = [CountedStore(dist.HashStore()) for _ in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        for store in stores:
            store.inner = stores[0].inner
        seconds = timedelta(seconds=30)
        joined = [
            pool.submit(fresh_store, store, rank, world_size, seconds)
            for rank, store in reversed(list(enumerate(stores)))
        ]
        for each in joined:
            each.result()
    assert max(store.operations for store in stores[1:]) < 80  # pauses double, up to a tenth of a second
    return [store.bytes for store in stores]


def test_a_rank_moves_as_many_bytes_to_join_whatever_the_number_of_ranks():
    for world_size in (2, 8, 64):
        leader, *others = rendezvous_bytes(world_size)
        assert leader < 1500 and max(others) < 2500


def descriptors(rank: int, world_size: int, port: int, most_connected: int) -> tuple:
    """Sockets of this rank after it has joined, and made and used another group; the limit of descriptors."""
    dist.destroy_process_group()
    runtime._MAX_CONNECTED = most_connected
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    before, joined = sockets(), fastmp.init(backend="gloo", join_seconds=20)
    group = dist.new_group()
    for each in (None, group):
        dist.all_reduce(torch.ones(1), group=each)
    made = sockets() - before
    dist.all_reduce(torch.ones(1))  # no rank leaves before; a barrier has neighbours of its own
    joined.close()
    return made, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


def sockets() -> int:
    folder, found = Path("/proc/self/fd"), 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            found += os.readlink(folder / name).startswith("socket:")
    return found


def test_descriptors_of_a_rank_do_not_grow_with_the_ranks_and_the_limit_is_raised():
    """In each group gloo opens a listener and the two neighbours of a ring, not a pair with every rank."""
    found = run_ranks(descriptors, 10, free_port(), 9)
    assert all(raised for _, raised in found)
    assert max(made for made, _ in found[1:]) <= 8  # the store's, and three of each group


def test_small_jobs_connect_at_once_and_the_users_choice_stays(monkeypatch):
    for ranks, own, expected in ((64, None, None), (65, None, "1"), (65, "0", "0")):
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
        if own is not None:
            monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", own)
        runtime._make_room_for_ranks(ranks)
        assert os.environ.get("TORCH_GLOO_LAZY_INIT") == expected
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)


def test_the_first_message_to_a_rank_that_has_gone_fails_as_any_other():
    text = "[gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused"
    assert lost_peer(RuntimeError(text))
