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
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fastmp.watchdog.inspector import process_state

__all__ = ["Heartbeat", "Node"]


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
        prefix = f"fastmp-watchdog-{os.getuid()}-"
        suffix = f"-{zlib.crc32(self.host_id[0].encode()):08x}"
        _sweep(place, prefix, suffix)
        path = place / f"{prefix}{token}{suffix}"
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            if path.stat().st_uid == os.getuid() and not path.is_symlink():
                self.directory = path

    def post(self, name: str, text: str) -> None:
        """Replace the text under `name` for the ranks of this machine."""
        if self.directory is not None:
            temporary = self.directory / f".{name}.{self.rank}"
            with contextlib.suppress(OSError):
                temporary.write_text(text)
                os.replace(temporary, self.directory / name)

    def read(self, name: str) -> str | None:
        """Return the text under `name`; None if there is none."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                return (self.directory / name).read_text()
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


def _sweep(place: Path, prefix: str, suffix: str) -> None:
    """Remove the directories of this user's jobs whose ranks on this machine were all killed.

    `suffix` is of this machine: containers may share the memory, but not their process numbers.
    """
    for path in place.glob(f"{prefix}*{suffix}"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            left = [json.loads(file.read_text()) for file in path.glob("rank-*")]
            alive = [process_state(each["record"]["pid"], each["host_id"][1]) != "gone" for each in left]
            if left and not any(alive):
                shutil.rmtree(path, ignore_errors=True)
