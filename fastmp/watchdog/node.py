"""Ranks of one machine: heartbeats in a directory in memory, and their node leader.

Ranks of a machine write their heartbeats to a private directory in memory instead of the job's store. The
lowest live rank is the node leader: it alone sends heartbeats to the store, and writes the answers into the
directory. There is no election: every rank reads the files of lower ranks, and leads if none of these lives.
Two leaders for a moment do no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fastmp.config.file_access import FOREIGN_ERRORS, read_file, read_json, replace_text
from fastmp.watchdog.channel import INVESTIGATE, Channel
from fastmp.watchdog.heartbeat import essence, message_spacing, node_message, pack
from fastmp.watchdog.inspector import process_state
from fastmp.watchdog.records import FILE_LIMIT

__all__ = ["Heartbeat", "Leader", "Node", "job_directory"]

KEPT_SECONDS = 86400.0  # of the files of a job that hung as it started, and of empty directories


class Heartbeat(NamedTuple):
    """Last heartbeat of a rank of this machine, and when its number changed."""

    content: dict[str, Any]
    since: float

    @property
    def state(self) -> str:
        """State that the rank itself has reported."""
        return self.content["record"]["state"]

    @property
    def away(self) -> bool:
        """True if the rank has left the job."""
        return self.content["away"]

    @property
    def process(self) -> tuple[int, int]:
        return self.content["record"]["pid"], self.content["host_id"][1]


class Node:
    """View of the ranks on this machine; a rank that has not joined sees itself only.

    Args:
        host_id: identity of the machine, and start of this process, see `host_id`.
        silence: seconds without a new heartbeat after which a rank counts as silent.
    """

    def __init__(self, rank: int, host_id: tuple[str, int], silence: float) -> None:
        self.rank, self.host_id, self.silence = rank, host_id, silence
        self.directory: Path | None = None
        self.beats: dict[int, Heartbeat] = {}

    def join(self, token: str) -> None:
        """Join the ranks of this machine with the same `token`, unless no directory is writable."""
        place = next(
            (p for p in (Path("/dev/shm"), Path(tempfile.gettempdir())) if os.access(p, os.W_OK)), None
        )
        if place is None:
            return
        with contextlib.suppress(OSError):
            self.directory = job_directory(place, "watchdog", token, self.host_id[0])

    def post(self, name: str, text: str) -> None:
        """Replace the text under `name` for the ranks of this machine."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                replace_text(self.directory / name, text)

    def read(self, name: str) -> str | None:
        """Return the text under `name`; None if there is none."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                return read_file(self.directory / name, FILE_LIMIT).decode()
        return None

    def beat(self, content: dict[str, Any], now: float) -> None:
        """Leave this rank's heartbeat."""
        self.beats[self.rank] = Heartbeat(content, now)
        self.post(_name(self.rank), json.dumps(content))

    def ranks(self) -> list[int]:
        """Return the ranks of this machine that have ever left a heartbeat, this one among them."""
        found = {self.rank}
        if self.directory is not None:
            with contextlib.suppress(OSError):
                found |= {int(name[5:]) for name in os.listdir(self.directory) if name.startswith("rank-")}
        return sorted(found)

    def hear(self, ranks: Iterable[int], now: float) -> dict[int, Heartbeat]:
        """Read the heartbeats of these ranks of this machine."""
        for rank in ranks:
            text = None if rank == self.rank else self.read(_name(rank))
            if text is not None:
                content, before = json.loads(text), self.beats.get(rank)
                same = before is not None and before.content["beat"] == content["beat"]
                self.beats[rank] = Heartbeat(content, before.since if same and before is not None else now)
        return {rank: self.beats[rank] for rank in ranks if rank in self.beats}

    def state(self, beat: Heartbeat, now: float) -> str:
        """Return "running", or that the process is seen to be "stopped" or "gone", or is "silent"."""
        state = process_state(*beat.process)
        return "silent" if state == "running" and now - beat.since > self.silence else state

    def leads(self, now: float) -> bool:
        """Return True if no lower rank of this machine lives: this rank speaks for all of them then."""
        for rank in self.ranks():
            if rank >= self.rank:
                break
            beat = self.hear([rank], now).get(rank)
            if beat and not beat.away and self.state(beat, now) == "running":
                return False
        return True

    def neighbours(self) -> set[int]:
        """Return the ranks before and after this one on this machine, in a circle."""
        ranks = self.ranks()
        at = ranks.index(self.rank)
        return {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {self.rank}

    def leave(self, now: float) -> None:
        """Remove the directory if this is the last rank of this machine."""
        others = self.hear([rank for rank in self.ranks() if rank != self.rank], now).values()
        last = all(
            beat.state not in ("running", "lost") or process_state(*beat.process) == "gone" for beat in others
        )
        if self.directory is not None and last:
            shutil.rmtree(self.directory, ignore_errors=True)


def _name(rank: int) -> str:
    return f"rank-{rank}"


def job_directory(place: Path, kind: str, token: str, machine: str) -> Path:
    """Make the directory in `place` that the ranks of a job on this machine share; others cannot enter it.

    Directories of this user's killed jobs are removed first.

    Args:
        token: the same on all ranks of the job.
        machine: its identity; containers may share the place, but not their process numbers.

    Raises:
        OSError: the directory cannot be made, or others can enter it; the message says what was found.
    """
    prefix, suffix = f"fastmp-{kind}-{os.getuid()}-", f"-{zlib.crc32(machine.encode()):08x}"
    for path in place.glob(f"{prefix}*{suffix}"):
        with contextlib.suppress(OSError, *FOREIGN_ERRORS):
            if not _access_of_others(path) and _is_left(path):
                shutil.rmtree(path, ignore_errors=True)
    path = place / f"{prefix}{token}{suffix}"
    made = False
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        made = True
    if found := _access_of_others(path):
        if made:  # on a file system whose modes say nothing
            with contextlib.suppress(OSError):
                path.rmdir()
        raise PermissionError(f"{path} is {found}, where a directory that only this user can enter is needed")
    return path


def _access_of_others(path: Path) -> str:
    """Return what lets others into a directory, such as its mode; "" if only this user can enter it."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "a link" if stat.S_ISLNK(status.st_mode) else "no directory"
    if status.st_uid != os.getuid():
        return f"owned by user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"of mode {mode:o}" if mode & 0o077 else ""


def _is_left(path: Path) -> bool:
    """Return True for the directory of a job all of whose ranks on this machine were killed.

    One with a hang report is kept for a day.
    """
    files = [file for file in path.glob("rank-*") if file.suffixes in ([], [".json"])]
    left = [read_json(file, FILE_LIMIT) for file in files]
    alive = [process_state(each["record"]["pid"], each["host_id"][1]) != "gone" for each in left]
    old = time.time() - path.stat().st_mtime > KEPT_SECONDS
    return not any(alive) and (old or (bool(left) and not (path / "report.json").exists()))


class Leader:
    """Node leader: sends the heartbeats of a machine to the job's store, and keeps the last message.

    asked: when a rank of the job was last seen to investigate a hang. While one does, messages are sent as
    they change, and the ranks of this machine include their collectives.
    """

    def __init__(self, node: Node, channel: Channel, world_size: int, interval: float) -> None:
        self.node, self.channel, self.world_size, self.interval = node, channel, world_size, interval
        self.asked = -1e9
        self._message, self._groups, self._sent = "", "", -1e9
        self._version = self._groups_version = 0

    def send(self, beat: int, now: float, last: bool) -> None:
        """Send the message of this machine if it is due; always if it is the `last` one of this rank.

        beat: number of the heartbeat of this rank.
        """
        node, channel, rank = self.node, self.channel, self.node.rank
        beats = node.hear(node.ranks(), now)
        if any(each.content["investigating"] for each in beats.values()):
            channel.send(INVESTIGATE, f"{rank} {beat}")
            self.asked = now
        self.asked = max(self.asked, channel.asked)
        if now - self.asked < node.silence:
            node.post("asked", f"{self.asked}")
        elif not last and now - self._sent < message_spacing(self.interval, self.world_size // len(beats)):
            return
        groups = json.dumps({of: each.content["record"]["groups"] for of, each in beats.items()})
        if groups != self._groups:
            self._groups, self._groups_version = groups, self._groups_version + 1
            channel.send(f"groups-{rank}", pack(json.loads(groups)))
        sent = node_message({of: (e.content, node.state(e, now), now - e.since) for of, e in beats.items()})
        known, is_new = essence(sent), self._version == 0
        if known != self._message:
            self._message, self._sent, self._version = known, now, self._version + 1
            channel.send(f"message-{rank}", pack(sent))
        channel.send(f"beat-{rank}", f"{beat} {self._version} {self._groups_version} {now - self._sent:.1f}")
        if is_new:
            channel.send(f"calls-{rank}", b"")
            channel.lead(rank)

    def send_calls(self) -> None:
        """Send the collectives that the ranks of this machine have left for the comparison."""
        texts = [self.node.read(f"calls-{rank}") for rank in self.node.ranks()]
        self.channel.send(f"calls-{self.node.rank}", pack([json.loads(text) for text in texts if text]))
