"""Inspection of this process from the watchdog thread: line of Python, and collectives.

| call | source |
|---|---|
| collectives | torch's flight recorder, which counts them by process group |
| messages | `fastmp.status` or frames of the main thread, as gloo's recorder omits them |
| exchanges through symmetric memory | the epochs in that memory |
"""

from __future__ import annotations

import json
import linecache
import os
import re
import socket
import sys
import threading
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fastmp.config.file_access import read_file
from fastmp.status import process_status
from fastmp.watchdog.records import MESSAGES, Call, RankRecord, calls_kept, pack_ranks

__all__ = ["ProcessInspector", "crash", "flight_records", "process_state", "host_id"]

_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_TORCH = os.path.dirname(torch.__file__) + os.sep


def flight_records(entries: bool = True) -> list[str]:
    """Return the flight records of this process as JSON; without `entries`, only the counts of each group.

    torch has one recorder for NCCL, and one for all other backends.
    """
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    texts = [dump(entries, False) for dump in dumps if dump is not None]
    return [text.decode() if isinstance(text, bytes) else text for text in texts]


def host_id() -> tuple[str, int]:
    """Return (identity of this machine and its PID namespace, start of this process in clock ticks)."""
    try:
        boot = read_file("/proc/sys/kernel/random/boot_id", 100).decode().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}", _stat(os.getpid())[1]
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}", 0


def process_state(pid: int, started: int) -> str:
    """Return "running", "stopped" or "gone" for a process of this machine.

    started: its start in clock ticks after boot; another process may have the same PID later.
    """
    try:
        state, start = _stat(pid)
    except (OSError, ValueError):
        return "gone"
    if start != started or state in "ZX":
        return "gone"
    return "stopped" if state in "Tt" else "running"


def _stat(pid: int) -> tuple[str, int]:
    fields = read_file(f"/proc/{pid}/stat", 1 << 16).decode(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


class ProcessInspector:
    """Inspector of this process; `counts` and `look` are cheap, `update` takes milliseconds.

    Attributes:
        recorded: all collectives in the last flight record.
        groups: packed ranks of each process group.
    """

    def __init__(self, world_size: int = 1) -> None:
        self._kept = calls_kept(world_size)
        self._main = threading.main_thread().ident
        self.recorded: tuple[Call, ...] = ()
        self._calls: tuple[Call, ...] = ()
        self._begun: dict[str, int] = {}
        self.groups: dict[str, list[list[int]]] = {}
        self._where = ""
        self._inside: Call | None = None

    def counts(self) -> list[str]:
        """Return a value that changes whenever a collective or an exchange starts or ends."""
        exchange = process_status.exchange()
        return [*flight_records(entries=False), str(exchange and exchange.epochs())]

    def update(self, error: BaseException | None = None) -> None:
        """Read the flight record, then `look`."""
        world = dist.distributed_c10d._world
        for group in list(world.pg_names):  # those that this rank is in
            ranks = world.pg_group_ranks.get(group)  # None while the main thread makes the group
            if ranks is not None and _key(group) not in self.groups:
                packed = pack_ranks(sorted(ranks))
                self.groups |= {_key(group, backend): packed for backend in ("gloo", "nccl")}
        recent: dict[str, list[Call]] = {}
        for record in flight_records():
            for entry in json.loads(record).get("entries", []):
                if not entry["is_p2p"]:
                    call = _recorded(entry)
                    recent.setdefault(call.group, []).append(call)
        for name, calls in recent.items():
            self._begun[name] = max(self._begun.get(name, 0), calls[-1].number or 0)
        self.recorded = tuple(call for calls in recent.values() for call in calls)
        kept = [call for calls in recent.values() for call in calls[-self._kept :]]
        self._calls = tuple(sorted(kept, key=lambda call: call.began))
        self.look(error)

    def look(self, error: BaseException | None = None) -> None:
        """Read the line and the call of the main thread, or those at which `error` was raised."""
        frames: list[tuple[FrameType, int]] = []  # innermost first
        if error is not None:
            frames = [(frame, line) for frame, line in walk_tb(error.__traceback__)][::-1]
        else:
            frame = sys._current_frames().get(self._main or 0)
            while frame is not None:
                frames.append((frame, frame.f_lineno))
                frame = frame.f_back
        self._where, self._inside = "", None
        waits = bool(frames) and ".wait(" in linecache.getline(frames[0][0].f_code.co_filename, frames[0][1])
        for frame, line in frames:
            path = frame.f_code.co_filename
            if self._inside is None and path.endswith(_C10D):
                self._inside = _in_frame(frame)
            if not path.startswith(_TORCH) and not path.startswith("<"):
                self._where = place(path, line, frame.f_code.co_name)
                break
        message, exchange = process_status.message, self._exchange()
        if exchange is not None:
            self._inside = exchange
        elif message is not None:
            op, group, peer, _, tensors = message
            sizes, dtypes = tuple(tuple(x.shape) for x in tensors), tuple(str(x.dtype) for x in tensors)
            peer = dist.get_global_rank(group, peer)
            self._inside = Call(op, _key(group), sizes=sizes, dtypes=dtypes, peer=peer)
        elif self._inside is not None and self._inside.op not in MESSAGES:
            name = self._inside.group
            same = [call for call in self._calls if call.group in (name, f"{name}/nccl")]
            self._inside = same[-1] if same else self._inside
        elif self._inside is None and waits and self._calls:
            self._inside = self._calls[-1]

    def _exchange(self) -> Call | None:
        """Read the epochs of exchanges through symmetric memory; return the exchange that is running."""
        memory = process_status.exchange()
        if memory is None:
            return None
        begun, done = memory.epochs()
        name = f"exchange:{_key(memory.group)}"
        self._begun[name] = begun
        if name not in self.groups:
            self.groups[name] = pack_ranks(sorted(dist.get_process_group_ranks(memory.group)))
        return Call("exchange", name, begun) if begun != done else None

    def record(self, **said: Any) -> RankRecord:
        """Return the record of this process without its groups; `said` are the other fields."""
        return RankRecord(
            host=socket.gethostname(),
            pid=os.getpid(),
            step=process_status.step,
            phase=str(process_status.phase),
            where=self._where,
            inside=self._inside,
            calls=self._calls,
            started=dict(self._begun),
            **said,
        )


def place(path: str, line: int, function: str) -> str:
    """Format a line of a program in a few words."""
    return f"{os.sep.join(path.split(os.sep)[-2:])}:{line} in {function}"


def crash(stacks: str) -> tuple[str, str, str]:
    """Parse the output of faulthandler: (reason of the crash, line of the main thread, torch.distributed op).

    All are empty if there was no crash; the op is empty outside torch.distributed.
    """
    _, fatal, rest = stacks.partition("Fatal Python error: ")
    if not fatal:
        return "", "", ""
    where, op = "", ""
    main = rest.split("most recent call first")[-1]  # the oldest thread comes last
    for path, line, function in re.findall(r'File "(.*?)", line (\d+) in (\w+)', main):
        if not op and path.endswith(_C10D):
            op = function
        if not path.startswith(_TORCH):
            where = place(path, int(line), function)
            break
    return rest.partition("\n")[0], where, op


def _recorded(entry: dict[str, Any]) -> Call:
    (name, desc), (backend, _, op) = entry["process_group"], entry["profiling_name"].partition(":")
    return Call(
        op=op,
        group=_named(desc, name, backend),
        number=entry["collective_seq_id"],
        sizes=tuple(map(tuple, entry["input_sizes"])),
        dtypes=tuple(entry["input_dtypes"]),
        began=entry["time_created_ns"] / 1e9,
    )


def _key(group: dist.ProcessGroup, backend: str = "gloo") -> str:
    return _named(group.group_desc, group.group_name, backend)


def _named(desc: str, name: str, backend: str) -> str:
    """Return the name of a group in records; its backends count collectives separately."""
    return f"{desc} {name}" + ("/nccl" if backend == "nccl" else "")


def _in_frame(frame: FrameType) -> Call | None:
    """Return the call of a torch.distributed frame, from its arguments."""
    given, op = frame.f_locals, frame.f_code.co_name
    if "group" not in given or op.startswith("_"):
        return None
    group: Any = given["group"] or dist.group.WORLD
    if op not in MESSAGES:
        return Call(op, _key(group))
    end = "dst" if op == "send" else "src"
    peer = given.get(end)
    if peer is None and given.get(f"group_{end}") is not None:
        peer = dist.get_global_rank(group, given[f"group_{end}"])
    tensor = given.get("tensor")
    sizes, dtypes = ((tuple(tensor.shape),), (str(tensor.dtype),)) if tensor is not None else ((), ())
    return Call(op, _key(group), sizes=sizes, dtypes=dtypes, peer=peer)
