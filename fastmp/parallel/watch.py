"""A thread in every rank that tells the others it is alive, and finds out why the job stands still.

Each rank puts a heartbeat into a store, over a connection of its own: step, phase, how many collectives it
has begun. A rank that has not moved for a while looks for the first rank that lives; that one reads what all
were doing, takes the verdict (`fastmp.parallel.verdict`) and prints it, then all leave. Files in a directory
say the same: records of ranks, stacks of all threads, flight records, the verdict. Training itself only sets
`fastmp.pulse.pulse`; nothing waits for a device.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from fastmp.parallel.doing import Doing, crash, flight_records, process_state, this_machine
from fastmp.parallel.mail import ALARM, VERDICT, Mail
from fastmp.parallel.runtime import lost_peer
from fastmp.parallel.verdict import Call, RankRecord, judge, latecomers
from fastmp.pulse import pulse

__all__ = ["PeerLost", "Watch"]

FILE_SECONDS = 60.0  # between two files of a rank whose job runs
WARN_SECONDS = 600.0  # between two warnings of one slow rank
COMPARE_BEATS = 20  # between two comparisons of when ranks come to their collectives
FIRST_STEPS = 4  # which may compile, capture graphs, read data for the first time
PATIENCE = 4.0  # times the limit, in these steps and in the phases that take long
LONG_PHASES = ("start", "save", "evaluate", "end")


class PeerLost(ConnectionError):
    """Another rank is gone, has failed or does not answer; the message is the verdict."""


class _Seen(NamedTuple):
    """A rank's last heartbeat, its number, and when this process saw the number change."""

    record: RankRecord
    beat: int
    since: float
    machine: tuple[str, int]  # and when the process started, in clock ticks after boot


class Watch:
    """Watches over a job of several ranks, as a context manager around what all ranks do together.

    directory: for files; every rank makes it.
    seconds: how long no rank may make progress before the job is ended; `PATIENCE` times as long in the first
        steps and in long phases.
    note: called with a line about a rank that is slow, on the first rank; None prints it on stderr.
    interval: seconds between two heartbeats.

    A job that stands still ends with status 1 on all ranks: stacks and flight records are written, and one
    rank prints the verdict. An error in the block that says a peer is lost becomes `PeerLost` with the
    verdict. Any other one is told to the other ranks.
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
        self.verdict: str | None = None
        self._note = note or (lambda line: print(line, file=sys.stderr, flush=True))
        self._silence = max(4 * self.interval, min(2.0, seconds / 2))  # after which a rank counts as silent
        self._doing = Doing()
        self._machine = this_machine()
        self._seen: dict[int, _Seen] = {}
        self._state, self._words, self._left = "running", "", 0.0
        self._judge = 0  # the rank that is to take the verdict, as far as this one knows
        self._beat = 0
        self._moved = self._ticked = self._filed = time.monotonic()
        self._signature: Any = None
        self._first_step = pulse.step
        self._judged, self._wake, self._stop = threading.Event(), threading.Event(), False
        self._lost_at: float | None = None
        self._alarmed_at: float | None = None  # since when a rank is known to have gone without a word
        self._neighbours: dict[int, _Seen] = {}  # the ranks next to this one, if of this machine
        self._beside = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}  # those to hear from
        self._error: BaseException | None = None
        self._looking, self._fresh = False, 0  # from which round of letters on there is enough to judge by
        self._first: _Seen | None = None  # what was first seen of rank 0
        self._stacks: Any = None
        self._period = COMPARE_BEATS * self.interval
        self._next_calls = self._after(time.time())  # when all ranks send their calls
        self._compare_at: float | None = None
        self._warned: dict[int, float] = {}
        self._mail = Mail(self.interval)
        self._thread = threading.Thread(target=self._run, name="fastmp-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self.world_size > 1:
            self._open_files()
            self._publish()
            self._mail.start()
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
            self._judged.wait(2 * self._silence + 4 * self.interval + 2.0)
            self._leave("lost", self._words)
            if self.verdict is not None:
                raise PeerLost(self.verdict.partition(". ")[0]) from error
        else:
            self._error = error
            self._leave("failed", _one_line(error))

    def _leave(self, state: str, words: str) -> None:
        """Say for the last time what this rank was doing."""
        self._state, self._words = state, words
        self._stop = True
        self._wake.set()
        self._thread.join(2.0)
        self._doing.update(self._error)
        self._publish()
        self._mail.close()
        faulthandler.cancel_dump_traceback_later()
        if sys.__stderr__ is not None:
            faulthandler.enable(file=sys.__stderr__)
        self._stacks.close()
        if state != "finished":
            self._write_own(self._content())
        elif self.verdict is None:
            with contextlib.suppress(OSError):
                for path in self.directory.glob(f"{_name(self.rank)}.*"):
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
        signature = (pulse.step, str(pulse.phase), id(pulse.message), self._doing.counts(), self._state)
        suspended = now - self._ticked > self._silence  # a job that is resumed begins to count anew
        if signature != self._signature or suspended:
            self._signature, self._moved = signature, now
        self._ticked = now
        still, limit = now - self._moved, self._limit()
        self._look_beside(now, still)
        looks = self._lost_at is not None or self._alarmed_at is not None or still > limit / 2
        sends_calls = time.time() >= self._next_calls
        if looks and not self._looking:  # what was read long ago says nothing about who lives now
            self._seen.clear()
            self._mail.received.clear()
            self._judge, self._fresh = 0, self._mail.rounds + 3  # the round that runs now may not ask for all
        self._looking = looks
        if sends_calls or looks:
            self._doing.update(self._error)
        else:
            self._doing.look()
        self._publish(with_calls=looks)
        faulthandler.cancel_dump_traceback_later()  # a file system may hang for longer than a job
        # The store goes with the first rank, where that serves it.
        if looks or now - self._filed > (5 * self.interval if self.rank == 0 else FILE_SECONDS):
            self._filed = now
            self._write_own(self._content())
        # Where code holds the interpreter, nobody puts it off any more, and stacks are written.
        faulthandler.dump_traceback_later(limit, file=self._stacks)
        if looks:
            self._look(now, still, limit)
        elif self._compare_at is not None and self.rank == 0:
            if now > self._compare_at:
                self._compare(now)
        elif self._first is None and self.rank > 0:
            self._read([0])
        elif self._beside:
            self._hear(now)
        else:
            self._mail.wanted = ()
        if sends_calls:
            self._next_calls, self._compare_at = self._after(time.time()), now + 3 * self.interval
            record = replace(self._record(), calls=self._doing.recorded)
            self._mail.send(f"calls-{self.rank}", json.dumps(record.as_json()))
            if self.rank == 0 and not looks:
                self._mail.wanted = [f"calls-{rank}" for rank in range(self.world_size)]

    def _after(self, clock: float) -> float:
        """The next time, the same on all machines, at which ranks send the calls that they have recorded."""
        return (clock // self._period + 1) * self._period

    def _limit(self) -> float:
        long = str(pulse.phase) in LONG_PHASES or pulse.step - self._first_step < FIRST_STEPS
        return self.seconds * (PATIENCE if long else 1.0)

    # What is told, and read.

    def _record(self) -> RankRecord:
        return self._doing.record(
            rank=self.rank,
            state=self._state,
            words=self._words,
            left=self._left,
            still=time.monotonic() - self._moved,
        )

    def _content(self, with_calls: bool = True) -> dict[str, Any]:
        record = self._record() if with_calls else replace(self._record(), calls=())
        common = {"beat": self._beat, "time": time.time(), "machine": self._machine}
        return {**common, "record": record.as_json()}

    def _publish(self, with_calls: bool = True) -> None:
        """Send a heartbeat, small enough for a store that many ranks write to every second."""
        self._beat += 1
        self._mail.send(f"rank-{self.rank}", json.dumps(self._content(with_calls)))

    def _open_files(self) -> None:
        """Open the file for stacks, and write the first record."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:  # what is left of an earlier attempt
            with contextlib.suppress(OSError):
                os.replace(self.directory / "verdict.json", self.directory / "earlier-verdict.json")
        self._stacks = open(self._path("stacks"), "w")
        faulthandler.enable(file=self._stacks)
        self._write_own(self._content())

    def _path(self, kind: str) -> Path:
        return self.directory / f"{_name(self.rank)}.{kind}"

    def _write_own(self, content: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            _replace(self._path("json"), json.dumps(content))

    def _read(self, ranks: Iterable[int]) -> dict[int, _Seen]:
        """Return the last heartbeats of these ranks; from files where the store has none of them."""
        ranks, now = list(ranks), time.monotonic()
        self._mail.wanted = [f"rank-{rank}" for rank in ranks]
        answers = self._mail.answers(self._silence)
        for rank in ranks:
            letter = self._mail.received.get(f"rank-{rank}", "") if answers else ""
            with contextlib.suppress(KeyError, ValueError, OSError):
                content = json.loads(letter or (self.directory / f"{_name(rank)}.json").read_text())
                before = self._seen.get(rank)
                if before is None or content["beat"] != before.beat:
                    record = RankRecord.from_json(content["record"])
                    self._seen[rank] = _Seen(record, content["beat"], now, tuple(content["machine"]))
                    self._first = self._first or (self._seen[0] if rank == 0 else None)
        return {rank: self._seen[rank] for rank in ranks if rank in self._seen}

    # What is found out.

    def _look_beside(self, now: float, still: float) -> None:
        """Notice that a rank next to this one is gone while this one waits for something, maybe for it.

        Collectives of gloo fail where a peer is gone. Exchanges through shared memory, and NCCL, do not.
        """
        if self._alarmed_at is None and self._mail.alarm:
            self._alarmed_at = now
        if still > 2 * self.interval:
            for rank, seen in self._neighbours.items():
                if rank not in self._beside and process_state(seen.record.pid, seen.machine[1]) == "gone":
                    self._beside.add(rank)  # its last letter says whether it had finished
                    self._mail.received.pop(f"rank-{rank}", None)

    def _hear(self, now: float) -> None:
        """Learn which processes the ranks next to this one are, and of one that is gone how it ended."""
        if self._mail.answers(self._silence):
            known = [rank for rank in self._beside if f"rank-{rank}" in self._mail.received]
        else:  # only of a rank of this attempt is there a file of this attempt
            known = [rank for rank in self._beside if rank in self._neighbours]
        for rank, seen in self._read(known).items():
            self._beside.discard(rank)
            self._neighbours.pop(rank, None)
            if seen.machine[0] != self._machine[0]:
                continue
            if process_state(seen.record.pid, seen.machine[1]) != "gone":
                self._neighbours[rank] = seen
            elif seen.record.state != "finished" and (self.directory / f"{_name(rank)}.json").exists():
                # One that ends well takes its file away, even where its last letter does not arrive.
                self._alarmed_at = now
                self._mail.send(ALARM, "")
        self._mail.wanted = [f"rank-{rank}" for rank in self._beside]

    def _look(self, now: float, still: float, limit: float) -> None:
        """Take the verdict if this is the first rank that lives; otherwise wait for it."""
        if self._mail.verdict is None and not self._mail.answers(self._silence):
            with contextlib.suppress(OSError, ValueError):
                self._mail.verdict = json.loads((self.directory / "verdict.json").read_text())["text"]
        if self._mail.verdict is not None:
            self._end(self._mail.verdict)
            return None
        while self._judge < self.rank and not self._lives(self._judge, now):
            self._judge += 1
        if self._judge < self.rank:
            self._read([self._judge])
            return None
        records = self._everyone(now)
        if self._mail.answers(self._silence) and self._mail.rounds < self._fresh:
            return None
        since = self._alarmed_at if self._lost_at is None else self._lost_at
        known = any(record.state in ("gone", "failed") for record in records)
        if since is not None and (known or self._lost_at is not None):
            # Whose connections closed may still be about to say why.
            all_left = len(records) == self.world_size and not any(r.state == "running" for r in records)
            patience = 2 * self.interval if known else self._silence + self.interval
            if now - since > patience or (known and all_left):
                self._take_verdict(records)
        elif still > limit and all(
            record.still > 0.8 * limit for record in records if record.state in ("running", "finished")
        ):
            self._take_verdict(records)
        return None

    def _lives(self, rank: int, now: float) -> bool:
        """Whether a rank may be expected to take the verdict; True until there is time enough to tell."""
        seen = self._read([rank]).get(rank)
        if seen is None:
            begun = self._moved + self._limit() / 2 if self._lost_at is None else self._lost_at
            return now - begun < self._silence
        return seen.record.state in ("running", "lost") and self._is_seen(seen, now) == "running"

    def _state_of(self, seen: _Seen, now: float) -> str:
        """Return the state of a rank: what it says itself, unless its process is seen to be in another."""
        said = seen.record.state
        return self._is_seen(seen, now) if said == "running" else said

    def _is_seen(self, seen: _Seen, now: float) -> str:
        """Return the state in which the process of a rank is seen to be."""
        if seen.machine[0] == self._machine[0]:
            state = process_state(seen.record.pid, seen.machine[1])
            if state != "running":
                return state
        return "silent" if now - seen.since > self._silence else "running"

    def _everyone(self, now: float) -> list[RankRecord]:
        records = []
        for rank, seen in self._read(range(self.world_size)).items():
            if rank == self.rank:
                continue
            state, silent = self._state_of(seen, now), now - seen.since
            record = replace(seen.record, silent=silent, still=seen.record.still + silent)
            if state == "silent" and self._lost_at is not None and seen.machine[0] != self._machine[0]:
                state = "gone"  # its connections are closed, and nobody here can look
            if state == "gone":
                record = self._crashed(replace(record, left=record.left or time.time() - silent))
            records.append(replace(record, state=state))
        if not self._mail.answers(self._silence):  # and no files of other machines are seen here
            if 0 not in self._seen and self._first is not None:
                state = self._state_of(self._first, now)
                records.append(replace(self._first.record, state=state, silent=now - self._moved))
            known = {self.rank, *(record.rank for record in records)}
            records += [RankRecord(r, state="unknown") for r in range(self.world_size) if r not in known]
        return [*records, self._record()]

    def _crashed(self, record: RankRecord) -> RankRecord:
        """Add to the record of a process that is gone what it wrote as it crashed, if it did."""
        with contextlib.suppress(OSError):
            stacks = (self.directory / f"{_name(record.rank)}.stacks").read_text()
            words, where, op = crash(stacks)
            if words:
                inside = Call(op) if op else record.inside
                return replace(record, words=words, where=where or record.where, inside=inside)
        return record

    def _take_verdict(self, records: Sequence[RankRecord]) -> None:
        verdict = judge(records, self.world_size)
        content = {
            "time": time.time(),
            **asdict(verdict),
            "records": [record.as_json() for record in records],
        }
        try:
            with open(self.directory / "verdict.json", "x") as file:
                json.dump(content, file, indent=1)
        except FileExistsError:  # another rank was quicker
            return
        except OSError:  # the verdict is on the screen at least
            pass
        print(f"fastmp: {verdict.text}\nfastmp: stacks are in {self.directory}", file=sys.stderr, flush=True)
        self._mail.send(VERDICT, verdict.text)
        self._mail.send(ALARM, "")
        unable = verdict.ranks if verdict.kind in ("stopped", "silent") else ()
        alone = all(r.rank == self.rank or r.state not in ("running", "lost") for r in records)
        self._end(verdict.text, seconds=0.0 if alone else self.interval + 0.5, unable=unable)

    def _kill(self, ranks: Iterable[int]) -> None:
        """End processes of this machine that cannot leave by themselves."""
        for rank in ranks:
            seen = self._seen.get(rank)
            if seen is not None and seen.machine[0] == self._machine[0]:
                if process_state(seen.record.pid, seen.machine[1]) != "gone":
                    with contextlib.suppress(OSError):
                        os.kill(seen.record.pid, signal.SIGKILL)

    def _end(self, text: str, seconds: float = 0.0, unable: Iterable[int] = ()) -> None:
        """Leave the evidence, then leave: by the main thread where it has an error to raise.

        seconds: to wait for the others, for which this rank may serve the store. unable: ranks to be killed.
        """
        self.verdict = text
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        with contextlib.suppress(OSError):
            _replace(self._path("flight.json"), "[" + ",\n".join(flight_records()) + "]")
        time.sleep(seconds)
        self._kill(unable)
        if self._lost_at is None:
            self._left, self._state, self._words = time.time(), "lost", "left on the verdict"
            self._write_own(self._content())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._stop = True
        self._judged.set()

    def _compare(self, now: float) -> None:
        """Warn of ranks for which the others wait."""
        self._compare_at, self._mail.wanted = None, ()
        letters = [text for key, text in self._mail.received.items() if key.startswith("calls-")]
        records = [RankRecord.from_json(json.loads(text)) for text in letters]
        for late in latecomers(records):
            if now - self._warned.get(late.rank, -WARN_SECONDS) >= WARN_SECONDS:
                self._warned[late.rank] = now
                record = next(record for record in records if record.rank == late.rank)
                self._note(
                    f"warning: {record} is slow: the others wait for it {late.share:.0%} of the time; to "
                    f"{late.op} it came {late.seconds:.3g} s after them"
                )


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _one_line(error: BaseException | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
