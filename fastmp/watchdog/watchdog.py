"""Hang watchdog: a thread in every rank that sends heartbeats and reports why a job hangs or has lost a rank.

1. Each rank leaves a heartbeat for the ranks of its machine: step, phase, number of collectives started.
2. The lowest live rank of each machine, the node leader, sends these to the job's store, over a connection
   of its own.
3. A rank without progress for half the limit investigates: node leaders send all they know.
4. The lowest live leader of the job collects the records of all ranks, diagnoses the hang
   (`fastmp.watchdog.diagnosis`), and writes and prints the hang report. All ranks leave.

Files in a directory have the same evidence, see `RankFiles`. Training itself only sets attributes of
`fastmp.status.process_status`; nothing synchronises with a device.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastmp.config.console import flush_quietly, to_stderr
from fastmp.distributed.runtime import Runtime, lost_peer
from fastmp.status import process_status
from fastmp.watchdog.channel import ALARM, REPORT, TOKEN, Channel
from fastmp.watchdog.collector import Collector
from fastmp.watchdog.diagnosis import LISTED, diagnose
from fastmp.watchdog.heartbeat import heartbeat
from fastmp.watchdog.inspector import ProcessInspector, host_id, process_state
from fastmp.watchdog.node import Leader, Node
from fastmp.watchdog.rank_files import RankFiles
from fastmp.watchdog.records import RankRecord
from fastmp.watchdog.stragglers import StragglerCheck

__all__ = ["PeerLost", "Watchdog", "watch"]

FILE_SECONDS = 60.0  # between two files of a rank whose job runs
MAX_RECORDS = 512  # in the file of a hang report
FIRST_STEPS = 4  # may compile, capture graphs, read data for the first time
PATIENCE = 4.0  # factor of the limit in these steps and in long phases
LONG_PHASES = ("start", "save", "evaluate", "end")


class PeerLost(ConnectionError):
    """Another rank is gone, has failed or does not answer; the message is the hang report."""


def watch(
    directory: Path, runtime: Runtime, seconds: float, *, note: Callable[[str], None] | None = None
) -> AbstractContextManager[Any]:
    """Return the hang watchdog of a job, or a null context on a single rank or for `seconds` 0.

    All ranks call it, as it begins with a barrier: rank 0 may have to create the parent of `directory`.
    """
    if runtime.world_size == 1 or not seconds:
        return nullcontext()
    dist.barrier()
    return Watchdog(directory, runtime.rank, runtime.world_size, seconds, note=note)


@dataclass
class _RankState:
    """This rank as its watchdog reports it; set by the main thread and by the watchdog thread."""

    state: str = "running"  # as in RankRecord
    reason: str = ""
    left_at: float = 0.0  # seconds since the epoch
    error: BaseException | None = None
    lost_at: float | None = None  # since when an error of this rank says that a peer is lost
    alarmed_at: float | None = None  # since when another rank is known to be gone
    investigating: bool = False
    stop: bool = False  # the thread is to end
    away: bool = False  # it has left, and needs nothing more of its machine


@dataclass
class _Progress:
    """The last change in the status and the collectives of this process, on the monotonic clock."""

    silence: float
    first_step: int = field(default_factory=lambda: process_status.step)
    signature: Any = None
    moved_at: float = field(default_factory=time.monotonic)
    ticked_at: float = field(default_factory=time.monotonic)

    def tick(self, now: float, signature: Any) -> bool:
        """Compare the signature with the last one; return True after a suspension of the whole process.

        A resumed job starts counting again.
        """
        suspended = now - self.ticked_at > self.silence
        if signature != self.signature or suspended:
            self.signature, self.moved_at = signature, now
        self.ticked_at = now
        return suspended

    def limit(self, seconds: float) -> float:
        """Return the seconds without progress after which the job hangs, in the present phase."""
        first_steps = process_status.step - self.first_step < FIRST_STEPS
        return seconds * (PATIENCE if first_steps or str(process_status.phase) in LONG_PHASES else 1.0)


class Watchdog:
    """Watchdog of a job of several ranks: a context manager around the work that all ranks share.

    A job that hangs ends with status 1 on all ranks: stacks and flight records are written, and one rank
    prints the hang report. An error in the block that means a lost peer becomes `PeerLost` with the report.
    Other errors are reported to the other ranks.

    Args:
        directory: for the files, see `RankFiles`; every rank creates it.
        seconds: without progress on any rank, after which the job is ended; `PATIENCE` times as long in the
            first steps and in long phases.
        note: called with a line about a straggler, on rank 0. None: print it to stderr.
        interval: seconds between two heartbeats. None: 1, or less for short limits.

    Raises:
        PeerLost: from the block, in place of the error of a closed connection.

    Example:
        >>> from fastmp.status import process_status
        >>> with Watchdog("hang", rank=0, world_size=1, seconds=300):
        ...     for step in range(1, 6):
        ...         process_status.step, process_status.phase = step, "forward"
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int,
        world_size: int,
        seconds: float,
        *,
        note: Callable[[str], None] | None = None,
        interval: float | None = None,
    ) -> None:
        self.directory, self.rank, self.world_size, self.seconds = Path(directory), rank, world_size, seconds
        self.interval = interval = min(1.0, seconds / 8) if interval is None else interval
        self.silence = max(4 * interval, min(2.0, seconds / 2))  # after which a rank counts as silent
        self.report: str | None = None
        note = note or to_stderr
        self._own, self._progress = _RankState(), _Progress(self.silence)
        self._inspector, self._files = ProcessInspector(world_size), RankFiles(self.directory, rank)
        self._node = Node(rank, host_id(), self.silence)
        self._channel = Channel(interval, rank, world_size)
        self._leader = Leader(self._node, self._channel, world_size, interval)
        self._collector = Collector(
            self.directory, world_size, self._node, self._channel, interval, self.silence
        )
        self._stragglers = StragglerCheck(self._node, self._channel, world_size, interval, note)
        self._joined = self._leads = False  # knows the ranks of its machine; is their leader
        self._beat, self._filed_at = 0, time.monotonic()
        self._asked = ("", -1e9)  # the leader's last note that a rank investigates, and when it came
        self._wake, self._reported = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastmp-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.world_size > 1:
            self._files.begin(self._content())
            if self.rank == 0:
                self._channel.send(TOKEN, uuid.uuid4().hex)
            self._channel.start()
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.world_size == 1:
            return
        own = self._own
        own.left_at = time.time()
        if error is None:
            self._leave("finished", "")
        elif isinstance(error, Exception) and (lost_peer(error) or "timed out waiting" in str(error).lower()):
            own.error = error
            own.state, own.reason, own.lost_at = "lost", _one_line(error), time.monotonic()
            self._wake.set()
            self._reported.wait(2 * self.silence + 4 * self.interval + 2.0)
            self._leave("lost", own.reason)
            if self.report is not None:
                raise PeerLost(self.report.partition(". ")[0]) from error
        else:
            own.error = error
            self._leave("failed", _one_line(error))

    def _leave(self, state: str, reason: str) -> None:
        """End the thread and publish the last heartbeat of this rank."""
        own = self._own
        own.state, own.reason, own.stop = state, reason, True
        self._wake.set()
        self._thread.join(2.0)
        self._inspector.update(own.error)
        own.away = True
        self._publish()
        self._channel.close()
        self._node.leave(time.monotonic())
        self._files.close()
        if state != "finished":
            self._files.write_record(self._content())
        elif self.report is None:
            self._files.remove()

    # Heartbeats.

    def _run(self) -> None:
        while not self._own.stop:
            interval = self.interval / 4 if self._own.investigating else self.interval
            self._wake.wait(min(interval, self._stragglers.seconds_left()))
            self._wake.clear()
            try:
                self._tick()
            except Exception as error:  # a watchdog must not end the job that it watches
                self._files.disarm()
                text = f"fastmp: rank {self.rank}: the watchdog of the job ended: {_one_line(error)}"
                to_stderr(text)
                return

    def _tick(self) -> None:
        now, own, status = time.monotonic(), self._own, process_status
        # 1. Has this process made progress?
        counts = self._inspector.counts()
        signature = (status.step, str(status.phase), id(status.message), counts, own.state)
        suspended = self._progress.tick(now, signature)
        stalled, limit = now - self._progress.moved_at, self._progress.limit(self.seconds)
        # 2. Join the ranks of this machine, and hear what they and the store say.
        if not self._joined and (self._channel.token or not self._channel.answers(self.silence)):
            self._joined = True
            if self._channel.token:
                self._node.join(self._channel.token)
        if suspended:
            self._node.beats.clear()
        self._hear(now)
        self._check_neighbours(now, stalled)
        # 3. Investigate after half the limit, or at once when a rank is gone.
        investigating = own.lost_at is not None or own.alarmed_at is not None or stalled > limit / 2
        if investigating and not own.investigating:  # old messages do not show which ranks live now
            self._collector.restart()
        own.investigating = investigating
        asked = investigating or now - max(self._asked[1], self._leader.asked) < self.silence
        # 4. Publish a heartbeat, with collectives if anybody may read them.
        posts_calls = self._stragglers.seconds_left() == 0.0
        if posts_calls or asked:
            self._inspector.update(own.error)
        else:
            self._inspector.look()
        self._publish(with_calls=asked)
        # 5. Write files; stacks are written if this thread does not come back within the limit.
        self._files.disarm()  # a file system may hang for longer than the limit
        self._write_record(now, investigating)
        self._files.arm(limit)
        # 6. Diagnose a hang, or compare arrivals at collectives.
        if posts_calls:
            self._stragglers.post(now, self._inspector, self._record())
        if self._leads:
            self._stragglers.send(now, self._leader)
        if investigating:
            self._investigate(now, stalled, limit)
        elif not self._stragglers.compare(now):
            first = self._collector.first is None and self._leads and 0 not in self._node.beats
            self._channel.wanted, self._channel.gathered = (["message-0"] if first else ()), ()
            self._channel.claims = False

    def _write_record(self, now: float, investigating: bool) -> None:
        # The store is lost with rank 0 if that serves it: then files are the only way to tell others.
        often = investigating and not self._channel.answers(self.silence)
        seconds = 5 * self.interval if self.rank == 0 or investigating else FILE_SECONDS
        if often or now - self._filed_at > seconds:
            self._filed_at = now
            self._files.write_record(self._content())

    def _record(self) -> RankRecord:
        own = self._own
        stalled = time.monotonic() - self._progress.moved_at
        return self._inspector.record(
            rank=self.rank, state=own.state, reason=own.reason, left_at=own.left_at, stalled=stalled
        )

    def _content(self, with_calls: bool = True) -> dict[str, Any]:
        record = self._record() if with_calls else replace(self._record(), calls=())
        flags = {"investigating": self._own.investigating, "away": self._own.away}
        return heartbeat(record, self._inspector.groups, self._beat, self._node.host_id, **flags)

    def _publish(self, with_calls: bool = True) -> None:
        """Leave a heartbeat for the ranks of this machine; their leader sends all heartbeats to the store."""
        now = time.monotonic()
        self._beat += 1
        self._node.beat(self._content(with_calls), now)
        active = self._joined or self._own.investigating or self._own.stop
        self._leads = active and self._node.leads(now)
        self._channel.active = self._leads or self._channel.token is None
        if self._leads:
            self._leader.send(self._beat, now, last=self._own.stop)

    def _hear(self, now: float) -> None:
        """Read what the leader of this machine has heard of others; as the leader, pass it on."""
        channel, node = self._channel, self._node
        if channel.report is None:
            channel.report = node.read("report")
        elif self._leads:
            node.post("report", channel.report)
        if channel.alarm and self._leads:
            node.post("alarm", "")
        text = node.read("asked")
        if text is not None and text != self._asked[0]:
            self._asked = (text, now)
        if self._own.alarmed_at is None and (channel.alarm or node.read("alarm") is not None):
            self._own.alarmed_at = now
        self._collector.meet(now)

    def _check_neighbours(self, now: float, stalled: float) -> None:
        """Raise the alarm if a neighbouring rank is gone while this rank waits.

        Collectives of gloo fail if a peer is gone. Exchanges through shared memory, and NCCL, hang.
        """
        if self._own.alarmed_at is not None or stalled <= 2 * self.interval:
            return
        for rank, beat in self._node.hear(self._node.neighbours(), now).items():
            if beat.state == "finished" or process_state(*beat.process) != "gone":
                continue
            if self._files.has_record(rank):  # not one that ended well and whose last heartbeat was lost
                self._own.alarmed_at = now
                self._node.post("alarm", "")
                self._channel.send(ALARM, "")

    # Diagnosis.

    def _investigate(self, now: float, stalled: float, limit: float) -> None:
        """Write the hang report if this is the lowest live leader; otherwise wait for it."""
        channel, collector, own = self._channel, self._collector, self._own
        # 1. Another rank has written the report.
        if channel.report is None and not channel.answers(self.silence):
            channel.report = self._files.read_report()
        if channel.report is not None:
            self._end_job(channel.report)
            return
        # 2. Collect the records of all ranks.
        begun = self._progress.moved_at + limit / 2 if own.lost_at is None else own.lost_at
        if not self._leads or not collector.is_reporter(now, begun):
            return
        record = RankRecord.from_json(self._record().as_json(self._inspector.groups))
        records = collector.everyone(now, record, own.lost_at is not None)
        # 3. Wait until other machines have answered, or count as silent.
        patience, settled = self.silence + self.interval, True
        if not collector.sees_all() and channel.answers(self.silence):
            if channel.rounds < collector.fresh:
                return
            patience += 2 * self.interval  # until a leader that is gone counts as silent
            heard = now - collector.heard
            settled = heard > patience and not collector.suspects
            if collector.suspects and heard < 2 * patience:
                return  # machines that were lost together are named together
        # 4. Report a lost rank soon, and a hang when no rank has made progress within the limit.
        since = own.alarmed_at if own.lost_at is None else own.lost_at
        known = any(record.state in ("gone", "failed") for record in records)
        if since is not None and (known or own.lost_at is not None):
            # A rank whose connections closed may still be about to report its error.
            all_left = len(records) == self.world_size and not any(r.state == "running" for r in records)
            waited = now - since > (2 * self.interval if known else patience)
            due = (waited and (known or settled)) or (known and all_left)
        else:
            waiting = [record for record in records if record.state in ("running", "finished")]
            due = stalled > limit and settled and all(record.stalled > 0.8 * limit for record in waiting)
        if due:
            self._write_report(records)

    def _write_report(self, records: Sequence[RankRecord]) -> None:
        """Diagnose the hang, tell all ranks, and leave."""
        report = diagnose(records, self.world_size)
        named = {*report.ranks, *report.waiting[:LISTED], self.rank}
        first = sorted(records, key=lambda record: (record.rank not in named, record.rank))[:MAX_RECORDS]
        content = {
            "time": time.time(),
            **asdict(report),
            "records": [record.as_json() for record in sorted(first, key=lambda record: record.rank)],
        }
        if not self._files.write_report(content):  # another rank was faster
            return
        to_stderr(f"fastmp: {report.text}\nfastmp: stacks are in {self.directory}")
        self._channel.send(REPORT, report.text)
        self._channel.send(ALARM, "")
        unable = report.ranks if report.kind in ("stopped", "silent") else ()
        only_one = all(r.rank == self.rank or r.state not in ("running", "lost") for r in records)
        # Beats for the leaders of other machines to hear of it, then for their ranks.
        beats = 1 if self._collector.sees_all() else 3
        self._end_job(report.text, seconds=0.0 if only_one else beats * self.interval + 0.5, unable=unable)

    def _end_job(self, text: str, seconds: float = 0.0, unable: Iterable[int] = ()) -> None:
        """Write the evidence and leave; a main thread that has an error to raise leaves by itself.

        seconds: to wait for the other ranks, as this one may serve the store.
        unable: ranks of this machine that cannot leave and are killed.
        """
        own, self.report = self._own, text
        self._node.post("report", text)
        if self._leads and not seconds:  # the report may come from another machine, which cannot kill them
            now = time.monotonic()
            beats = self._node.hear(self._node.ranks(), now).items()
            states = [(rank, self._node.state(beat, now)) for rank, beat in beats if not beat.away]
            unable = {*unable, *(rank for rank, state in states if state in ("stopped", "silent"))}
        self._files.write_evidence()
        time.sleep(seconds)
        self._kill(unable)
        if own.lost_at is None:
            own.left_at, own.state, own.reason = time.time(), "lost", "left after the hang report"
            self._files.write_record(self._content())
            own.away = True
            self._node.beat(self._content(), time.monotonic())
            self._node.leave(time.monotonic())
            flush_quietly()
            os._exit(1)
        own.stop = True
        self._reported.set()

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            process = self._collector.process(rank)
            if process is not None and process_state(*process) != "gone":
                with suppress(OSError):
                    os.kill(process[0], signal.SIGKILL)


def _one_line(error: BaseException | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
