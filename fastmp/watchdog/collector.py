"""Collection of the records of all ranks by a node leader that investigates a hang.

Records come from the directory of this machine, from messages of the leaders of other machines, and from
files if the store does not answer.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fastmp.config.file_access import read_file, read_json
from fastmp.watchdog.channel import REPORTER, Channel
from fastmp.watchdog.heartbeat import contents
from fastmp.watchdog.inspector import crash, process_state
from fastmp.watchdog.node import Node
from fastmp.watchdog.rank_files import file_name
from fastmp.watchdog.records import FILE_LIMIT, Call, RankRecord

__all__ = ["Collector", "Seen"]


_CERTAIN = ("running", "silent", "stopped", "gone")  # by increasing certainty


class Seen(NamedTuple):
    """Last heartbeat of a rank, its number, and when that changed.

    state: of the process, as its node leader sees it; empty if this process can look by itself.
    """

    record: RankRecord
    beat: int
    since: float
    host_id: tuple[str, int]  # and when the process started, in clock ticks after boot
    state: str = ""


class _Sender(NamedTuple):
    """Leader of another machine: its last heartbeat, when this changed, and its messages."""

    beat: bytes
    since: float
    data: bytes
    groups: bytes
    records: dict[int, tuple[RankRecord, dict[str, Any]]]


class Collector:
    """Collects the records of all ranks for the `node` of this rank, from `channel` and `directory`.

    interval, silence: seconds between two heartbeats, and after which a rank counts as silent. fresh: the
        first round of the channel with enough to diagnose. heard: when messages were first read.
    suspects: a leader has missed heartbeats, but not yet so many that its ranks count as silent.
    first: what was first seen of rank 0, if that is on another machine.
    """

    def __init__(
        self, directory: Path, world_size: int, node: Node, channel: Channel, interval: float, silence: float
    ) -> None:
        self.directory, self.world_size, self.rank = directory, world_size, node.rank
        self.node, self.channel, self.interval, self.silence = node, channel, interval, silence
        self.first: Seen | None = None
        self._rival = ("", 0.0)  # the last announcement of who writes the report, and when it came
        self.restart()

    def restart(self) -> None:
        """Forget old messages: they do not show which ranks live now."""
        self.seen: dict[int, Seen] = {}  # ranks of which there are only files
        self._senders: dict[int, _Sender] = {}  # leaders of other machines
        self._reporter = 0  # without a store: the rank that is to write the report, as far as this one knows
        self._claimed: float | None = None  # since when this rank announces that it writes the report
        self.fresh = self.channel.rounds + 3  # the round that runs now may not ask for all
        self.heard, self.suspects = math.inf, False
        self.node.beats.clear()

    def meet(self, now: float) -> None:
        """Keep the first message of rank 0: if that rank serves the store, there may be no other."""
        if self.first is None and "message-0" in self.channel.received:
            records = contents(self.channel.received.pop("message-0"), b"")
            if 0 in records:
                record, content = records[0]
                self.first = Seen(record, content["beat"], now, tuple(content["host_id"]))

    def sees_all(self) -> bool:
        """Return True if all ranks of the job are of this machine: no store is asked."""
        return len(self.node.ranks()) == self.world_size

    def is_reporter(self, now: float, begun: float) -> bool:
        """Return True if this leader is to write the report: the lowest live leader of the job.

        Leaders announce themselves under one key. A leader that reads a lower rank there waits for its
        report; one that is not contradicted for a while writes the report.
        """
        if self.sees_all():
            return True
        if self.channel.answers(self.silence):
            self.channel.wanted = [REPORTER]
            rival = self.channel.received.get(REPORTER, b"").decode()
            if rival != self._rival[0]:
                self._rival = (rival, now)
            lower = bool(rival) and int(rival.split()[0]) < self.rank
            if lower and now - self._rival[1] <= self.silence:
                self._claimed, self.channel.gathered, self.channel.claims = None, (), False
                return False
            self.channel.gathered, self.channel.claims = ("beat", "message", "groups"), True
            if self._claimed is None:
                self._claimed, self.fresh = now, self.channel.rounds + 3
            return min(self.node.ranks()) == 0 or now - self._claimed > self.silence
        while self._reporter < self.rank and (
            self._reporter in self.node.beats or not self._lives(self._reporter, now, begun)
        ):
            self._reporter += 1
        return self._reporter == self.rank

    def everyone(self, now: float, own: RankRecord, lost: bool) -> list[RankRecord]:
        """Return the last records of all ranks: of this machine, and from messages, or else from files.

        Files also tell of ranks that stopped before any message of theirs: within a second of their start.
        """
        known: dict[int, Seen] = {}
        if not self.sees_all():
            if self.channel.answers(self.silence):
                known = self._read_messages(now)
            there = {*known, *self.node.ranks()}
            known |= self._read(rank for rank in range(self.world_size) if rank not in there)
        for rank, beat in self.node.hear(self.node.ranks(), now).items():
            record, host = RankRecord.from_json(beat.content["record"]), tuple(beat.content["host_id"])
            known[rank] = Seen(record, beat.content["beat"], beat.since, host)
        records = []
        for rank, seen in known.items():
            if rank == self.rank:
                continue
            state, silent = self._state_of(seen, now), max(now - seen.since, 0.0)
            record = replace(seen.record, silent=silent, stalled=seen.record.stalled + silent)
            if state == "silent" and lost and seen.host_id[0] != self.node.host_id[0]:
                state = "gone"  # its connections are closed, and nobody here can look
            if state == "gone":
                record = self._crashed(replace(record, left_at=record.left_at or time.time() - silent))
            records.append(replace(record, state=state))
        if not self.sees_all():  # some have sent nothing, and files of other machines are not seen here
            if 0 not in known and self.first is not None:
                state = self._state_of(self.first, now)
                records.append(replace(self.first.record, state=state, silent=own.stalled))
            heard = {self.rank, *(record.rank for record in records)}
            state = "unseen" if self.channel.answers(self.silence) else "unreadable"
            records += [RankRecord(r, state=state) for r in range(self.world_size) if r not in heard]
        return [*records, own]

    def process(self, rank: int) -> tuple[int, int] | None:
        """Return the process of a rank of this machine and when it started; None if it is not known here."""
        beat, seen = self.node.beats.get(rank), self.seen.get(rank)
        if beat is not None:
            return beat.process
        if seen is not None and seen.host_id[0] == self.node.host_id[0]:
            return seen.record.pid, seen.host_id[1]
        return None

    def _read(self, ranks: Iterable[int]) -> dict[int, Seen]:
        """Return the last heartbeats that these ranks of other machines have left in files."""
        ranks, now = list(ranks), time.monotonic()
        for rank in ranks:
            with contextlib.suppress(KeyError, ValueError, OSError):
                content = read_json(self.directory / f"{file_name(rank)}.json", FILE_LIMIT)
                before = self.seen.get(rank)
                if before is None or content["beat"] != before.beat:
                    record = RankRecord.from_json(content["record"])
                    self.seen[rank] = Seen(record, content["beat"], now, tuple(content["host_id"]))
        return {rank: self.seen[rank] for rank in ranks if rank in self.seen}

    def _read_messages(self, now: float) -> dict[int, Seen]:
        """Return the ranks of other machines, by the last messages of their leaders."""
        received = dict(self.channel.received)
        found: dict[int, tuple[Any, Seen]] = {}
        suspects: dict[int, bool] = {}
        limit = self.silence + 2 * self.interval
        for key in [key for key in received if key.startswith("beat-")]:
            rank, beat = int(key[5:]), received[key].split()
            sender = self._senders.get(rank)
            groups = received.get(f"groups-{rank}", b"")
            data = received.get(f"message-{rank}", b"")
            if sender is None or (sender.data, sender.groups) != (data, groups):
                since = sender.since if sender is not None and sender.beat == beat[0] else now
                sender = _Sender(beat[0], since, data, groups, contents(data, groups))
            if sender.beat != beat[0]:
                sender = sender._replace(beat=beat[0], since=now)
            self._senders[rank] = sender
            late = now - sender.since
            for of, (record, content) in sender.records.items():
                silent, state = content["silent"] + float(beat[3]) + late, content["seen"]
                if state == "running" and late > limit:
                    state = "silent"  # as its leader is
                seen = Seen(record, content["beat"], now - silent, tuple(content["host_id"]), state)
                # Of two leaders of one machine, the one that has heard it last.
                order = (seen.beat, sender.since, _CERTAIN.index(state))
                if of not in found or order > found[of][0]:
                    found[of] = (order, seen)
                    suspects[of] = 3 * self.interval < late <= limit
        if found or self.channel.rounds >= self.fresh:  # all leaders that live have been read by then
            self.heard = min(self.heard, now)
        self.suspects = any(suspects.values())
        return {rank: seen for rank, (_, seen) in found.items()}

    def _lives(self, rank: int, now: float, begun: float) -> bool:
        """Return True if a rank may still write the report; always until it could have left a heartbeat."""
        seen = self._read([rank]).get(rank)
        if seen is None:
            return now - begun < self.silence
        return seen.record.state in ("running", "lost") and self._is_seen(seen, now) == "running"

    def _state_of(self, seen: Seen, now: float) -> str:
        """Return the state of a rank: its own report, or the observed state of its process."""
        said = seen.record.state
        return self._is_seen(seen, now) if said == "running" else said

    def _is_seen(self, seen: Seen, now: float) -> str:
        """Return the observed state of the process of a rank."""
        if seen.state:
            return seen.state
        if seen.host_id[0] == self.node.host_id[0]:
            state = process_state(seen.record.pid, seen.host_id[1])
            if state != "running":
                return state
        return "silent" if now - seen.since > self.silence else "running"

    def _crashed(self, record: RankRecord) -> RankRecord:
        """Add the reason and place of a crash to the record of a process that is gone."""
        with contextlib.suppress(OSError):
            stacks = read_file(self.directory / f"{file_name(record.rank)}.stacks", FILE_LIMIT).decode(
                errors="replace"
            )
            words, where, op = crash(stacks)
            if words:
                inside = Call(op) if op else record.inside
                return replace(record, reason=words, where=where or record.where, inside=inside)
        return record
