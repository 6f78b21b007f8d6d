"""Heartbeat messages: their content, how often node leaders send them, and which collectives are compared.

Sizes and rates keep the traffic of the process that serves the store below 1 MB/s at 16,384 ranks, and the
time that a rank spends below 1%. Pure functions; standard library only.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from fastmp.watchdog.records import Call, RankRecord, kind_of_group

__all__ = [
    "compare_period",
    "compared",
    "contents",
    "essence",
    "heartbeat",
    "message_spacing",
    "node_message",
    "pack",
    "unpack",
]

COMPARE_BEATS = 20  # between two comparisons of when ranks come to their collectives
_MESSAGES_PER_BEAT = 256  # that the store takes from all machines while nobody investigates a hang
_COMPARED_WHOLE = 512  # ranks up to which all recorded collectives are compared
_COMPARED_CALLS = 32  # collectives of each group of this kind
_COMPARED_RANKS = 2048  # up to which they are compared every COMPARE_BEATS

Content = dict[str, Any]


def pack(content: Any) -> bytes:
    """Return `content` as compressed JSON."""
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 1)


def unpack(data: bytes) -> Any:
    """Return the content of `pack`; None for no data."""
    return json.loads(zlib.decompress(data)) if data else None


def heartbeat(
    record: RankRecord,
    groups: Mapping[str, list[list[int]]],
    beat: int,
    host_id: tuple[str, int],
    **said: bool,
) -> Content:
    """Return the heartbeat number `beat` of a rank, with its packed groups.

    said: flags: `investigating` a hang, `away` after leaving the job.
    """
    common = {"beat": beat, "time": time.time(), "host_id": host_id, **said}
    return {**common, "record": record.as_json(groups)}


def message_spacing(interval: float, machines: int) -> float:
    """Return the seconds between two messages of a leader while the job runs."""
    return interval * max(1.0, machines / _MESSAGES_PER_BEAT)


def node_message(heartbeats: Mapping[int, tuple[Content, str, float]]) -> dict[int, Content]:
    """Return the message of a leader: heartbeats of its ranks without groups, and the state of each process.

    heartbeats: of each rank its content, the state of its process, and for how long it has been silent.
    """
    return {
        rank: {
            **{key: content[key] for key in ("beat", "host_id")},
            "record": {key: part for key, part in content["record"].items() if key != "groups"},
            "seen": state,
            "silent": round(silent, 1),
        }
        for rank, (content, state, silent) in heartbeats.items()
    }


def essence(sent: Mapping[int, Content]) -> str:
    """Return the part of a message that changes only if its ranks make progress."""
    return json.dumps(
        {
            rank: [{**content["record"], "stalled": 0}, content["seen"], content["host_id"]]
            for rank, content in sent.items()
        }
    )


def contents(data: bytes, groups: bytes) -> dict[int, tuple[RankRecord, Content]]:
    """Return the records of a message, with the process groups that its leader sends separately."""
    of_ranks = unpack(groups) or {}
    found = {}
    for rank, content in (unpack(data) or {}).items():
        record = RankRecord.from_json({**content["record"], "groups": of_ranks.get(rank, {})})
        found[int(rank)] = (record, content)
    return found


def compare_period(interval: float, world_size: int) -> float:
    """Return the seconds between two comparisons; rank 0 spends the same share of them in any world."""
    return COMPARE_BEATS * interval * max(1.0, world_size / _COMPARED_RANKS)


def compared(calls: Iterable[Call], world_size: int, turn: int) -> tuple[Call, ...]:
    """Return the collectives that a rank sends for the comparison number `turn`.

    In small jobs these are all. In large jobs they are the last of one kind of group, another kind each turn.
    """
    calls = tuple(calls)
    if world_size <= _COMPARED_WHOLE or not calls:
        return calls
    kinds = {kind_of_group(call.group) for call in calls}
    kind = min(kinds, key=lambda kind: zlib.crc32(f"{turn} {kind}".encode()))
    groups: dict[str, list[Call]] = {}
    for call in calls:
        if kind_of_group(call.group) == kind:
            groups.setdefault(call.group, []).append(call)
    return tuple(call for own in groups.values() for call in own[-_COMPARED_CALLS:])
