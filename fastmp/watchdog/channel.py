"""Messages between node leaders through the job's store, over a connection that may block.

Keys of the leader with rank R:

| key | content |
|---|---|
| `message-R` | records of the ranks of its machine |
| `beat-R` | a few bytes: version of the message, sign of life |
| `groups-R` | process groups of these ranks |
| `calls-R` | recent collectives of these ranks |

`leaders` lists all ranks that have ever led. Only a few short keys are polled; the rest is read on demand, in
one request for all machines.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

__all__ = ["ALARM", "REPORTER", "KINDS", "INVESTIGATE", "TOKEN", "REPORT", "Channel"]

ALARM = "alarm"  # set: all ranks are to investigate
REPORT = "report"  # text of the hang report, set before the alarm
INVESTIGATE = "investigate"  # changes while any rank investigates: leaders then send all they know
REPORTER = "reporter"  # rank that is to write the report, and number of its heartbeat
TOKEN = "token"  # in the name of the directory that the ranks of a machine share
KINDS = ("message", "beat", "groups", "calls")  # of keys of a leader


class Channel:
    """Connection of a rank to the store, in a thread of its own, as it may block.

    The thread exchanges keys in rounds, `interval` seconds apart.

    Attributes:
        active: polls in every round. A rank that is not active connects only to send.
        claims: announces in each round that this rank is to write the report.
        wanted: keys to read in the next round, into `received`.
        gathered: kinds of keys to read from all leaders.
        alarm, report, token: as announced by ranks.
        asked: when a rank was last seen to investigate a hang.
        rounds: number of rounds so far.
    """

    _made = count()  # every watchdog of a process has its own keys

    def __init__(self, interval: float, rank: int = 0, world_size: int = 1) -> None:
        self.interval, self.rank, self.world_size = interval, rank, world_size
        self.active, self.claims = True, False
        self.wanted: Sequence[str] = ()
        self.gathered: Sequence[str] = ()
        self.received: dict[str, bytes] = {}
        self.alarm = False
        self.report: str | None = None
        self.token: str | None = None
        self.asked = -1e9
        self.rounds = 0
        self._looked = b""
        self._out: dict[str, bytes] = {}
        self._leader: int | None = None
        self._lock = threading.Lock()
        self._round, self._open = time.monotonic(), True
        self._wake, self._sent = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastmp-watchdog-channel", daemon=True)
        self._prefix = f"fastmp-watchdog-{next(self._made)}"
        self._root: Any = None
        self._store: Any = None

    def start(self) -> None:
        """Start the rounds, if there is a store."""
        with contextlib.suppress(Exception):  # a store that cannot be cloned: files have to do
            self._root = dist.distributed_c10d._get_default_store()
            self._connect()
        self._open = self._store is not None
        if self._open:
            self._thread.start()

    def send(self, key: str, text: str | bytes) -> None:
        """Set `key` to `text` in the next round, after the keys sent before."""
        with self._lock:
            self._out.pop(key, None)
            self._out[key] = text.encode() if isinstance(text, str) else text
        self._wake.set()

    def lead(self, rank: int) -> None:
        """List this rank as a leader in the next round, after the keys sent before."""
        with self._lock:
            self._leader = rank

    def answers(self, seconds: float) -> bool:
        """Return True if the store has answered within `seconds`, or is not polled."""
        return self._open and (
            not self.active or time.monotonic() - self._round < seconds + 2 * self.interval
        )

    def close(self) -> None:
        """Wait a moment for the last message to go."""
        self._sent.clear()
        self._wake.set()
        if self._open:
            self._sent.wait(1.0)
        self._open = False
        self._wake.set()

    def _connect(self) -> None:
        own = self._root.clone()
        own.set_timeout(timedelta(seconds=max(2.0, 2 * self.interval)))
        self._store = dist.PrefixStore(self._prefix, own)

    def _run(self) -> None:
        try:
            while self._open:
                self._wake.wait(self.interval)
                self._wake.clear()
                with self._lock:
                    (out, self._out), (leader, self._leader) = (self._out, {}), (self._leader, None)
                if self.active or out:
                    if self._store is None:
                        self._connect()
                    self._exchange(out, leader)
                    self._round, self.rounds = time.monotonic(), self.rounds + 1
                elif self._store is not None:
                    self._store = None  # a leader has taken over: one connection less to serve
                if not self.active:
                    self._round = time.monotonic()
                if not self._out:
                    self._sent.set()
        except Exception:  # the store is gone
            self._open = False
            self._sent.set()

    def _exchange(self, out: dict[str, bytes], leader: int | None = None) -> None:
        """Run a round: send, then read. `ALARM` is always read, as a check that the store answers."""
        store = self._store
        for key, text in out.items():
            store.set(key, text)
        if leader is not None and store.has_extended_api():
            store.append("leaders", f"{leader} ")
        for key in [*self.wanted, *([TOKEN] if self.token is None else [])]:
            if store.check([key]):
                self.received[key] = store.get(key)
        if self.claims:  # after REPORTER was read: what another rank has written there since the last round
            store.set(REPORTER, f"{self.rank} {self.rounds}")
        if self.token is None and TOKEN in self.received:
            self.token = self.received[TOKEN].decode()
        if self.gathered:
            self._gather(store, tuple(self.gathered))
        self.alarm = store.check([ALARM])
        if self.alarm and store.check([REPORT]):
            self.report = store.get(REPORT).decode()
        if store.check([INVESTIGATE]):
            looked = store.get(INVESTIGATE)
            if looked != self._looked:
                self._looked, self.asked = looked, time.monotonic()

    def _gather(self, store: Any, kinds: Sequence[str]) -> None:
        """Read a key of each of these kinds from all leaders; messages and groups only if changed."""
        leaders = self._leaders(store)
        before = {rank: self.received.get(f"beat-{rank}", b"").split()[1:3] for rank in leaders}
        for kind in kinds:
            keys = [f"{kind}-{rank}" for rank in leaders]
            if kind in ("message", "groups"):
                now = {rank: self.received.get(f"beat-{rank}", b"").split()[1:3] for rank in leaders}
                at = 0 if kind == "message" else 1
                keys = [f"{kind}-{rank}" for rank in leaders if before[rank][at:] != now[rank][at:]]
            if keys and not store.check(keys):  # to get one that is not there would block
                keys = [key for key in keys if store.check([key])]
            if keys:
                values = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
                self.received.update(zip(keys, values))

    def _leaders(self, store: Any) -> list[int]:
        """Return the ranks that have ever led; their keys exist."""
        if not store.has_extended_api():
            return [rank for rank in range(self.world_size) if store.check([f"beat-{rank}"])]
        if not store.check(["leaders"]):
            return []
        return sorted(set(map(int, store.get("leaders").split())))
