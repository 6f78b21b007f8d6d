"""Periodic comparison of when ranks join their collectives, which warns of stragglers while a job runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from fastmp.watchdog.channel import Channel
from fastmp.watchdog.diagnosis import stragglers
from fastmp.watchdog.heartbeat import compare_period, compared, unpack
from fastmp.watchdog.inspector import ProcessInspector
from fastmp.watchdog.node import Leader, Node
from fastmp.watchdog.records import RankRecord

__all__ = ["StragglerCheck"]

WARN_SECONDS = 600.0  # between two warnings of one straggler


class StragglerCheck:
    """Three steps, an interval or two apart, at times that are the same on all machines:

    1. every rank posts its recent collectives to the ranks of its machine (`post`),
    2. the node leaders send these to the store (`send`),
    3. rank 0 reads and compares them, and warns of stragglers (`compare`).

    interval: seconds between two heartbeats. warn: called with a line about a straggler, on rank 0.
    """

    def __init__(
        self, node: Node, channel: Channel, world_size: int, interval: float, warn: Callable[[str], None]
    ) -> None:
        self._node, self._channel, self._world_size, self._interval = node, channel, world_size, interval
        self._warn = warn
        self._period = compare_period(interval, world_size)
        self._next_at = self._after(time.time())
        self._send_at: float | None = None
        self._compare_at: float | None = None
        self._warned: dict[int, float] = {}  # when there was the last warning of a rank

    def _after(self, clock: float) -> float:
        return (clock // self._period + 1) * self._period

    def seconds_left(self) -> float:
        """Return the seconds until the next `post`."""
        return max(self._next_at - time.time(), 0.0)

    def post(self, now: float, inspector: ProcessInspector, record: RankRecord) -> None:
        """Step 1: leave the collectives that all ranks compare next."""
        turn = int(self._next_at / self._period)
        self._next_at = self._after(time.time())
        calls = compared(inspector.recorded, self._world_size, turn)
        names = {call.group for call in calls}
        groups = {name: ranks for name, ranks in inspector.groups.items() if name in names}
        content = replace(record, calls=calls).as_json(groups)
        self._node.post(f"calls-{self._node.rank}", json.dumps(content))
        self._send_at, self._compare_at = now + self._interval, now + 3 * self._interval

    def send(self, now: float, leader: Leader) -> None:
        """Step 2, on node leaders: send the collectives of the ranks of this machine when they are due."""
        if self._send_at is not None and now > self._send_at:
            self._send_at = None
            leader.send_calls()

    def compare(self, now: float) -> bool:
        """Step 3, on rank 0: read the collectives and compare them when due; return False if none are."""
        if self._compare_at is None or self._node.rank:
            return False
        self._channel.gathered = ("calls",) if now > self._compare_at - 1.5 * self._interval else ()
        if now <= self._compare_at:
            return True
        self._compare_at, self._channel.gathered = None, ()
        messages = [data for key, data in dict(self._channel.received).items() if key.startswith("calls-")]
        records = [RankRecord.from_json(content) for data in messages for content in unpack(data) or ()]
        for straggler in stragglers(records):
            if now - self._warned.get(straggler.rank, -WARN_SECONDS) >= WARN_SECONDS:
                self._warned[straggler.rank] = now
                record = next(record for record in records if record.rank == straggler.rank)
                self._warn(
                    f"warning: {record} is slow: the others wait for it {straggler.share:.0%} of the time; "
                    f"to {straggler.op} it came {straggler.seconds:.3g} s after them"
                )
        return True
