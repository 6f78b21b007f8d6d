"""Short texts that ranks leave for each other in the job's store, over a connection that may block."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

__all__ = ["ALARM", "VERDICT", "Mail"]

ALARM = "alarm"  # the key by which a rank calls on all to look for a verdict
VERDICT = "verdict"  # that under which a rank announces it, before it gives the alarm


class Mail:
    """A rank's connection to the store, in a thread of its own, which may block as long as it likes.

    interval: seconds between two rounds, of which there have been `rounds`. `wanted` are the keys whose last
    letters come into `received` at the next one, `alarm` and `verdict` are what a rank has announced.
    """

    _made = count()  # every watch of a process has keys of its own

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.wanted: Sequence[str] = ()
        self.received: dict[str, str] = {}
        self.alarm = False
        self.verdict: str | None = None
        self.rounds = 0
        self._out: dict[str, str] = {}
        self._lock = threading.Lock()
        self._round, self._open = time.monotonic(), True
        self._wake, self._sent = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastmp-watch-mail", daemon=True)
        self._prefix = f"fastmp-watch-{next(self._made)}"
        self._store: Any = None

    def start(self) -> None:
        """Begin with the rounds, where there is a store."""
        with contextlib.suppress(Exception):  # a store that cannot be cloned: files have to do
            store: Any = dist.distributed_c10d._get_default_store()
            own = store.clone()
            own.set_timeout(timedelta(seconds=max(2.0, 2 * self.interval)))
            self._store = dist.PrefixStore(self._prefix, own)
        self._open = self._store is not None
        if self._open:
            self._thread.start()

    def send(self, key: str, text: str) -> None:
        """Leave `text` under `key` in the next round."""
        with self._lock:
            self._out[key] = text
        self._wake.set()

    def answers(self, seconds: float) -> bool:
        """Whether the store has answered within the last `seconds`."""
        return self._open and time.monotonic() - self._round < seconds + 2 * self.interval

    def close(self) -> None:
        """Wait a moment for the last letter to go."""
        self._sent.clear()
        self._wake.set()
        if self._open:
            self._sent.wait(1.0)
        self._open = False
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._open:
                self._wake.wait(self.interval)
                self._wake.clear()
                with self._lock:
                    out, self._out = self._out, {}
                for key, text in out.items():
                    self._store.set(key, text)
                for key in list(self.wanted):
                    if self._store.check([key]):
                        self.received[key] = self._store.get(key).decode()
                self.alarm = self._store.check([ALARM])  # in every round: it tells whether the store answers
                if self.alarm and self._store.check([VERDICT]):
                    self.verdict = self._store.get(VERDICT).decode()
                self._round, self.rounds = time.monotonic(), self.rounds + 1
                if not self._out:
                    self._sent.set()
        except Exception:  # the store is gone
            self._open = False
            self._sent.set()
