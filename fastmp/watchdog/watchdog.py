"""A thread in every rank that tells the others it is alive, and finds out why the job stands still.

Each rank leaves a heartbeat for the ranks of its machine: step, phase, how many collectives it has begun. The
first of them that lives, the node leader, sends these on to the job's store, over a connection of its own.
A rank that has not moved for a while investigates a hang. The first leader that lives reads what all ranks
were doing, takes it (`fastmp.watchdog.diagnosis`) and prints it, then all leave. Files in a directory say the
same: records of ranks, stacks of all threads, flight records, the report. Training itself only sets
`fastmp.status.process_status`; nothing waits for a device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastmp.distributed.runtime import lost_peer
from fastmp.status import process_status
from fastmp.watchdog.channel import ALARM, REPORT, TOKEN, Channel
from fastmp.watchdog.collector import Collector, file_name
from fastmp.watchdog.diagnosis import LISTED, diagnose, stragglers
from fastmp.watchdog.heartbeat import compare_period, compared, heartbeat, unpack
from fastmp.watchdog.inspector import ProcessInspector, flight_records, host_id, process_state
from fastmp.watchdog.leader import Leader
from fastmp.watchdog.node import Node
from fastmp.watchdog.records import RankRecord

__all__ = ["PeerLost", "Watchdog"]

FILE_SECONDS = 60.0  # between two files of a rank whose job runs
WARN_SECONDS = 600.0  # between two warnings of one slow rank
MAX_RECORDS = 512  # that are written beside a report
FIRST_STEPS = 4  # which may compile, capture graphs, read data for the first time
PATIENCE = 4.0  # times the limit, in these steps and in the phases that take long
LONG_PHASES = ("start", "save", "evaluate", "end")


class PeerLost(ConnectionError):
    """Another rank is gone, has failed or does not answer; the message is the report."""


class Watchdog:
    """Watches over a job of several ranks, as a context manager around what all ranks do together.

    directory: for files; every rank makes it.
    seconds: how long no rank may make progress before the job is ended; `PATIENCE` times as long in the first
        steps and in long phases.
    note: called with a line about a rank that is slow, on the first rank; None prints it on stderr.
    interval: seconds between two heartbeats.

    A job that stands still ends with status 1 on all ranks: stacks and flight records are written, and one
    rank prints the report. An error in the block that says a peer is lost becomes `PeerLost` with the
    report. Any other one is told to the other ranks.
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
        self.interval = min(1.0, seconds / 8) if interval is None else interval
        self.report: str | None = None
        self._note = note or (lambda line: print(line, file=sys.stderr, flush=True))
        self._silence = max(4 * self.interval, min(2.0, seconds / 2))  # after which a rank counts as silent
        self._inspector = ProcessInspector(world_size)
        self._host_id = host_id()
        self._node = Node(rank, self._host_id, self._silence)
        self._joined = self._leads = False  # whether this rank knows, and speaks for, those of its machine
        self._state, self._words, self._left = "running", "", 0.0
        self._beat = 0
        self._moved = self._ticked = self._filed = time.monotonic()
        self._signature: Any = None
        self._first_step = process_status.step
        self._reported, self._wake, self._stop = threading.Event(), threading.Event(), False
        self._lost_at: float | None = None
        self._alarmed_at: float | None = None  # since when a rank is known to have gone without a word
        self._asked = ("", -1e9)  # what the leader has last written of ranks that look, and when
        self._error: BaseException | None = None
        self._looking = self._away = False  # away: it has left, and needs nothing more of its machine
        self._stacks: Any = None
        self._period = compare_period(self.interval, world_size)
        self._next_calls = self._after(time.time())  # when all ranks leave their calls
        self._send_calls_at: float | None = None  # when a leader sends those of its machine
        self._compare_at: float | None = None
        self._warned: dict[int, float] = {}
        self._channel = Channel(self.interval, rank, world_size)
        self._leader = Leader(self._node, self._channel, world_size, self.interval)
        self._collector = Collector(
            self.directory, world_size, self._node, self._channel, self.interval, self._silence
        )
        self._thread = threading.Thread(target=self._run, name="fastmp-watch", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.world_size > 1:
            self._open_files()
            if self.rank == 0:
                self._channel.send(TOKEN, uuid.uuid4().hex)
            self._channel.start()
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.world_size == 1:
            return
        self._left = time.time()
        if error is None:
            self._leave("finished", "")
        elif isinstance(error, Exception) and (lost_peer(error) or "timed out waiting" in str(error).lower()):
            self._error = error
            self._state, self._words, self._lost_at = "lost", _one_line(error), time.monotonic()
            self._wake.set()
            self._reported.wait(2 * self._silence + 4 * self.interval + 2.0)
            self._leave("lost", self._words)
            if self.report is not None:
                raise PeerLost(self.report.partition(". ")[0]) from error
        else:
            self._error = error
            self._leave("failed", _one_line(error))

    def _leave(self, state: str, words: str) -> None:
        """Say for the last time what this rank was doing."""
        self._state, self._words = state, words
        self._stop = True
        self._wake.set()
        self._thread.join(2.0)
        self._inspector.update(self._error)
        self._away = True
        self._publish()
        self._channel.close()
        self._node.leave(time.monotonic())
        faulthandler.cancel_dump_traceback_later()
        if sys.__stderr__ is not None:
            faulthandler.enable(file=sys.__stderr__)
        self._stacks.close()
        if state != "finished":
            self._write_own(self._content())
        elif self.report is None:
            with contextlib.suppress(OSError):
                for path in self.directory.glob(f"{file_name(self.rank)}.*"):
                    path.unlink()
                self.directory.rmdir()  # by the last one

    def _run(self) -> None:
        while not self._stop:
            soon = max(self._next_calls - time.time(), 0.0)
            self._wake.wait(min(self.interval / 4 if self._looking else self.interval, soon))
            self._wake.clear()
            try:
                self._tick()
            except Exception as error:  # a watch must not end what it watches over
                faulthandler.cancel_dump_traceback_later()
                said = f"fastmp: rank {self.rank}: the watch over the job ended: {_one_line(error)}"
                print(said, file=sys.stderr, flush=True)
                return

    def _tick(self) -> None:
        now = time.monotonic()
        signature = (
            process_status.step,
            str(process_status.phase),
            id(process_status.message),
            self._inspector.counts(),
            self._state,
        )
        suspended = now - self._ticked > self._silence  # a job that is resumed begins to count anew
        if signature != self._signature or suspended:
            self._signature, self._moved = signature, now
        self._ticked = now
        still, limit = now - self._moved, self._limit()
        if not self._joined and (self._channel.token or not self._channel.answers(self._silence)):
            self._joined = True
            if self._channel.token:
                self._node.join(self._channel.token)
        if suspended:
            self._node.beats.clear()
        self._hear(now)
        self._look_beside(now, still)
        looks = self._lost_at is not None or self._alarmed_at is not None or still > limit / 2
        leaves_calls = time.time() >= self._next_calls
        if looks and not self._looking:  # what was read long ago says nothing about who lives now
            self._collector.restart()
        self._looking = looks
        asked = looks or now - max(self._asked[1], self._leader.asked) < self._silence
        if leaves_calls or asked:
            self._inspector.update(self._error)
        else:
            self._inspector.look()
        self._publish(with_calls=asked)
        faulthandler.cancel_dump_traceback_later()  # a file system may hang for longer than a job
        # The store goes with the first rank, where that serves it.
        often = looks and not self._channel.answers(self._silence)
        if often or now - self._filed > (5 * self.interval if self.rank == 0 or looks else FILE_SECONDS):
            self._filed = now
            self._write_own(self._content())
        # Where code holds the interpreter, nobody puts it off any more, and stacks are written.
        faulthandler.dump_traceback_later(limit, file=self._stacks)
        if leaves_calls:
            self._leave_calls(now)
        if self._leads and self._send_calls_at is not None and now > self._send_calls_at:
            self._send_calls_at = None
            self._leader.send_calls()
        if looks:
            self._look(now, still, limit)
        elif self._compare_at is not None and self.rank == 0:
            self._channel.gathered = ("calls",) if now > self._compare_at - 1.5 * self.interval else ()
            if now > self._compare_at:
                self._compare(now)
        else:
            first = self._collector.first is None and self._leads and 0 not in self._node.beats
            self._channel.wanted, self._channel.gathered = (["message-0"] if first else ()), ()
            self._channel.claims = False

    def _after(self, clock: float) -> float:
        """The next time, the same on all machines, at which ranks send the calls that they have recorded."""
        return (clock // self._period + 1) * self._period

    def _limit(self) -> float:
        long = (
            str(process_status.phase) in LONG_PHASES or process_status.step - self._first_step < FIRST_STEPS
        )
        return self.seconds * (PATIENCE if long else 1.0)

    # What is told, and read.

    def _record(self) -> RankRecord:
        return self._inspector.record(
            rank=self.rank,
            state=self._state,
            words=self._words,
            left=self._left,
            still=time.monotonic() - self._moved,
        )

    def _content(self, with_calls: bool = True) -> dict[str, Any]:
        record = self._record() if with_calls else replace(self._record(), calls=())
        said = {"looks": self._looking, "away": self._away}
        return heartbeat(record, self._inspector.groups, self._beat, self._host_id, **said)

    def _publish(self, with_calls: bool = True) -> None:
        """Leave a heartbeat for the ranks of this machine; their leader sends all that they have left."""
        now = time.monotonic()
        self._beat += 1
        self._node.beat(self._content(with_calls), now)
        self._leads = (self._joined or self._looking or self._stop) and self._node.leads(now)
        self._channel.active = self._leads or self._channel.token is None
        if self._leads:
            self._leader.send(self._beat, now, last=self._stop)

    def _open_files(self) -> None:
        """Open the file for stacks, and write the first record."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:  # what is left of an earlier attempt
            with contextlib.suppress(OSError):
                os.replace(self.directory / "report.json", self.directory / "earlier-report.json")
        self._stacks = open(self._path("stacks"), "w")
        faulthandler.enable(file=self._stacks)
        self._write_own(self._content())

    def _path(self, kind: str) -> Path:
        return self.directory / f"{file_name(self.rank)}.{kind}"

    def _write_own(self, content: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            _replace(self._path("json"), json.dumps(content))

    # What is found out.

    def _hear(self, now: float) -> None:
        """Learn from the leader of this machine what it has heard of others; as the leader, pass it on."""
        if self._channel.report is None:
            self._channel.report = self._node.read("report")
        elif self._leads:
            self._node.post("report", self._channel.report)
        if self._channel.alarm and self._leads:
            self._node.post("alarm", "")
        text = self._node.read("asked")
        if text is not None and text != self._asked[0]:
            self._asked = (text, now)
        if self._alarmed_at is None and (self._channel.alarm or self._node.read("alarm") is not None):
            self._alarmed_at = now
        self._collector.meet(now)

    def _look_beside(self, now: float, still: float) -> None:
        """Notice that a rank next to this one is gone while this one waits for something, maybe for it.

        Collectives of gloo fail where a peer is gone. Exchanges through shared memory, and NCCL, do not.
        """
        if self._alarmed_at is not None or still <= 2 * self.interval:
            return
        for rank, beat in self._node.hear(self._node.neighbours(), now).items():
            if beat.said == "finished" or process_state(*beat.process) != "gone":
                continue
            if (self.directory / f"{file_name(rank)}.json").exists():
                # One that ends well takes its file away, even where its last heartbeat was lost.
                self._alarmed_at = now
                self._node.post("alarm", "")
                self._channel.send(ALARM, "")

    def _look(self, now: float, still: float, limit: float) -> None:
        """Write the hang report if this is the first leader that lives; otherwise wait for it."""
        if self._channel.report is None and not self._channel.answers(self._silence):
            with contextlib.suppress(OSError, ValueError):
                self._channel.report = json.loads((self.directory / "report.json").read_text())["text"]
        if self._channel.report is not None:
            self._end(self._channel.report)
            return
        begun = self._moved + limit / 2 if self._lost_at is None else self._lost_at
        if not self._leads or not self._collector.is_reporter(now, begun):
            return
        own = RankRecord.from_json(self._record().as_json(self._inspector.groups))
        records, here = (
            self._collector.everyone(now, own, self._lost_at is not None),
            self._collector.sees_all(),
        )
        patience, settled = self._silence + self.interval, True
        if not here and self._channel.answers(self._silence):
            if self._channel.rounds < self._collector.fresh:
                return
            patience += 2 * self.interval  # until a leader that is gone counts as silent
            heard = now - self._collector.heard
            settled = heard > patience and not self._collector.suspects
            if self._collector.suspects and heard < 2 * patience:
                return  # machines that were lost together are named together
        since = self._alarmed_at if self._lost_at is None else self._lost_at
        known = any(record.state in ("gone", "failed") for record in records)
        if since is not None and (known or self._lost_at is not None):
            # Whose connections closed may still be about to say why.
            all_left = len(records) == self.world_size and not any(r.state == "running" for r in records)
            waited = now - since > (2 * self.interval if known else patience)
            due = (waited and (known or settled)) or (known and all_left)
        else:
            waiting = [record for record in records if record.state in ("running", "finished")]
            due = still > limit and settled and all(record.still > 0.8 * limit for record in waiting)
        if due:
            self._report(records)

    def _report(self, records: Sequence[RankRecord]) -> None:
        report = diagnose(records, self.world_size)
        named = {*report.ranks, *report.waiting[:LISTED], self.rank}
        first = sorted(records, key=lambda record: (record.rank not in named, record.rank))[:MAX_RECORDS]
        content = {
            "time": time.time(),
            **asdict(report),
            "records": [record.as_json() for record in sorted(first, key=lambda record: record.rank)],
        }
        try:
            with open(self.directory / "report.json", "x") as file:
                json.dump(content, file, indent=1)
        except FileExistsError:  # another rank was quicker
            return
        except OSError:  # the report is on the screen at least
            pass
        print(f"fastmp: {report.text}\nfastmp: stacks are in {self.directory}", file=sys.stderr, flush=True)
        self._channel.send(REPORT, report.text)
        self._channel.send(ALARM, "")
        unable = report.ranks if report.kind in ("stopped", "silent") else ()
        alone = all(r.rank == self.rank or r.state not in ("running", "lost") for r in records)
        beats = (
            1 if self._collector.sees_all() else 3
        )  # for the leaders of other machines, then for their ranks
        self._end(report.text, seconds=0.0 if alone else beats * self.interval + 0.5, unable=unable)

    def _kill(self, ranks: Iterable[int]) -> None:
        """End processes of this machine that cannot leave by themselves."""
        for rank in ranks:
            process = self._collector.process(rank)
            if process is not None and process_state(*process) != "gone":
                with contextlib.suppress(OSError):
                    os.kill(process[0], signal.SIGKILL)

    def _end(self, text: str, seconds: float = 0.0, unable: Iterable[int] = ()) -> None:
        """Leave the evidence, then leave: by the main thread where it has an error to raise.

        seconds: to wait for the others, for which this rank may serve the store. unable: ranks to be killed.
        """
        self.report = text
        self._node.post("report", text)
        if self._leads and not seconds:  # the report may come from another machine, which cannot end them
            now = time.monotonic()
            there = self._node.hear(self._node.ranks(), now).items()
            here = [(rank, self._node.state(beat, now)) for rank, beat in there if not beat.away]
            stuck = [rank for rank, state in here if state in ("stopped", "silent")]
            unable = {*unable, *stuck}
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        with contextlib.suppress(OSError):
            _replace(self._path("flight.json"), "[" + ",\n".join(flight_records()) + "]")
        time.sleep(seconds)
        self._kill(unable)
        if self._lost_at is None:
            self._left, self._state, self._words = time.time(), "lost", "left after the hang report"
            self._write_own(self._content())
            self._away = True
            self._node.beat(self._content(), time.monotonic())
            self._node.leave(time.monotonic())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._stop = True
        self._reported.set()

    def _leave_calls(self, now: float) -> None:
        """Leave the collectives that all ranks compare next for the leader of this machine."""
        turn = int(self._next_calls / self._period)
        self._next_calls = self._after(time.time())
        calls = compared(self._inspector.recorded, self.world_size, turn)
        names = {call.group for call in calls}
        groups = {name: ranks for name, ranks in self._inspector.groups.items() if name in names}
        self._node.post(
            f"calls-{self.rank}", json.dumps(replace(self._record(), calls=calls).as_json(groups))
        )
        self._send_calls_at, self._compare_at = now + self.interval, now + 3 * self.interval

    def _compare(self, now: float) -> None:
        """Warn of ranks for which the others wait."""
        self._compare_at, self._channel.gathered = None, ()
        messages = [data for key, data in dict(self._channel.received).items() if key.startswith("calls-")]
        records = [RankRecord.from_json(content) for data in messages for content in unpack(data) or ()]
        for late in stragglers(records):
            if now - self._warned.get(late.rank, -WARN_SECONDS) >= WARN_SECONDS:
                self._warned[late.rank] = now
                record = next(record for record in records if record.rank == late.rank)
                self._note(
                    f"warning: {record} is slow: the others wait for it {late.share:.0%} of the time; to "
                    f"{late.op} it came {late.seconds:.3g} s after them"
                )


def _one_line(error: BaseException | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
