"""A slowed link for collectives between processes, which notes when it transfers and who waits for it.

Inside `Link.installed()` the collectives of torch.distributed that fastmp uses take as long as over a link of
some bytes per second, in the background. A thread for each group waits until all ranks have joined a
collective, and then sleeps as long as the transfer takes. So the collectives of one group are served one
after the other, as by NCCL, and those of several groups share the link of their rank. Sleeping takes nothing
from the core that computes.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["Interval", "Link", "Transfer", "common_seconds"]

_KINDS = {
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
}


class Interval(NamedTuple):
    """A time from start to end, in seconds of `time.perf_counter`."""

    start: float
    end: float


class Transfer(NamedTuple):
    """A collective on the link: from when all ranks have joined it to when it is done."""

    start: float
    end: float
    kind: str


def common_seconds(first: Sequence[Interval | Transfer], second: Sequence[Interval | Transfer]) -> float:
    """Return how long intervals of both run at the same time; those of one do not overlap each other."""
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in first for b in second)


class _Work:
    """The handle of a collective."""

    def __init__(self, link: Link) -> None:
        self._link, self._done = link, threading.Event()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> bool:
        start = time.perf_counter()
        self._done.wait()
        self._link.waits.append(Interval(start, time.perf_counter()))
        return True

    def complete(self) -> None:
        self._done.set()


class Link:
    """A rank's link to the others.

    rate: bytes that a rank sends per second, infinity for a link that takes no time.
    at_once: every collective is waited for where it begins, so that nothing overlaps.

    Attributes: `transfers` and `waits`, what has been on the link, and when the rank waited for something.
    """

    def __init__(self, rate: float = math.inf) -> None:
        self.rate, self.at_once = rate, False
        self.transfers: list[Transfer] = []
        self.waits: list[Interval] = []
        self._queues: dict[Any, queue.SimpleQueue] = {}
        self._line = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[Link]:
        """Let collectives go over this link."""
        real = {name: getattr(dist, name) for name in _KINDS if hasattr(dist, name)}
        try:
            for name, call in real.items():
                setattr(dist, name, self._slowed(call, _KINDS[name]))
            yield self
        finally:
            for name, call in real.items():
                setattr(dist, name, call)

    def _slowed(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*tensors: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
            ranks = dist.get_world_size(group)
            whole = max(x.nbytes for x in tensors if hasattr(x, "nbytes"))
            sent = whole * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
            work = _Work(self)
            joined = real(*tensors, group=group, async_op=True, **options)
            self._queue(group).put((joined, sent / self.rate, kind, work))
            if async_op and not self.at_once:
                return work
            work.wait()
            return work if async_op else None

        return call

    def _queue(self, group: Any) -> queue.SimpleQueue:
        if group not in self._queues:
            self._queues[group] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._queues[group],), daemon=True).start()
        return self._queues[group]

    def _serve(self, waiting: queue.SimpleQueue) -> None:
        while True:
            joined, seconds, kind, work = waiting.get()
            joined.wait()
            with self._line:
                start = time.perf_counter()
                time.sleep(seconds)
                self.transfers.append(Transfer(start, time.perf_counter(), kind))
            work.complete()
