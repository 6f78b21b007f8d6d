"""Diagnosis of a job that hangs or has lost a rank, from the last records of its ranks.

Standard library only. `diagnose` returns the first of these that explains the hang:

1. a collective that ranks started with different ops, shapes or dtypes,
2. a rank that failed or is gone,
3. a rank that is stopped, silent or was never seen,
4. a rank that others wait for while it is elsewhere,
5. ranks that wait for each other,
6. a rank whose heartbeats cannot be read.

Records are frozen and functions pure; `fastmp.watchdog.watchdog` collects the records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastmp.watchdog.records import MESSAGES, Call, RankRecord, kind_of_group

__all__ = ["Straggler", "HangReport", "diagnose", "stragglers"]

LISTED = 8  # ranks or calls that a report names one by one; it counts the others


@dataclass(frozen=True)
class HangReport:
    """Cause of a hang.

    Attributes:
        kind: "mismatch" (of op, shape or dtype), "gone", "failed", "stopped", "silent", "unseen" (never
            seen), "finished" (before others: uneven numbers of calls), "hung" (alive, but elsewhere), "order"
            (ranks wait for each other), "message" (without a matching send or receive), "unreadable" (no
            other cause was seen, and the heartbeats of these ranks cannot be read), or "unknown" (no cause
            was seen).
        ranks: that caused it.
        text: the report in sentences.
        step: in which it happened.
        call: the collective or message concerned.
        waiting: ranks that wait.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    step: int = 0
    call: Call | None = None
    waiting: tuple[int, ...] = ()


def diagnose(records: Iterable[RankRecord], world_size: int) -> HangReport:
    """Return the hang report of a job of `world_size` ranks; records of some ranks may be missing.

    Example:
        >>> records = [RankRecord(0), RankRecord(1, state="failed", reason="KeyError: 7")]
        >>> report = diagnose(records, world_size=2)
        >>> report.kind, report.ranks
        ('failed', (1,))
    """
    seen = {record.rank: record for record in records}
    missing = [RankRecord(rank, state="unseen") for rank in range(world_size) if rank not in seen]
    job = _Job(sorted([*seen.values(), *missing], key=lambda record: record.rank))
    steps = (_mismatch, _ended, _silent, _standstill, _unreadable, _unexplained)
    return next(report for step in steps if (report := step(job)) is not None)


class _Job:
    """Records of all ranks, indexed once, so that no step compares all pairs of ranks.

    members: ranks of each group. started: numbers of collectives by group and rank. together: recent
    collectives by (group, number) and rank.
    """

    def __init__(self, everyone: Sequence[RankRecord]) -> None:
        self.everyone = everyone
        self.by_rank = {record.rank: record for record in everyone}
        self.members: dict[str, frozenset[int]] = {}
        self.started: dict[str, dict[int, int]] = {}
        self.together: dict[tuple[str, int], dict[int, Call]] = {}
        self._inside: dict[str, set[int]] = {}
        self._behind: dict[tuple[str, int | None], frozenset[int]] = {}
        for record in everyone:
            rank = record.rank
            for name, ranks in record.groups.items():
                if name not in self.members:
                    self.members[name] = frozenset(ranks)
            for name, number in record.started.items():
                self.started.setdefault(name, {})[rank] = number
            for call in record.calls:
                if call.number is not None:
                    self.together.setdefault((call.group, call.number), {})[rank] = call
            if record.inside is not None:
                self._inside.setdefault(record.inside.group, set()).add(rank)

    def behind(self, record: RankRecord, group: str) -> frozenset[int]:
        """Return the ranks of a group that have started fewer collectives in it than `record`."""
        own = record.started.get(group)
        if (group, own) not in self._behind:
            members = self.members.get(group, frozenset())
            if own is None:  # a torch without a flight record: those that are in no call of the group
                found = members - self._inside.get(group, set())
            else:
                begun = self.started.get(group, {})
                found = frozenset(rank for rank in members if _is_before(group, begun.get(rank, 0), own))
            self._behind[group, own] = found
        found = self._behind[group, own]
        return found - {record.rank} if own is None and record.rank in found else found

    def waits_for(self, record: RankRecord) -> frozenset[int]:
        """Return the ranks missing from the call that blocks `record`."""
        call = record.inside
        if call is None or record.state == "finished":
            return frozenset()
        if call.peer is not None:
            peer = self.by_rank.get(call.peer)
            theirs = None if peer is None else peer.inside
            meets = theirs is not None and theirs.peer == record.rank and theirs.op != call.op
            return frozenset() if meets else frozenset((call.peer,))
        return self.behind(record, call.group)

    def awaited(self, record: RankRecord) -> Call | None:
        """Return the call in which other ranks wait for `record`; of several, the first in order."""
        found = []
        for other in self.everyone:
            if other.rank == record.rank:
                continue
            if other.inside is not None:
                left_out = [other.inside]
            else:
                left_out = [c for c in other.calls if c.number == record.started.get(c.group, 0) + 1]
            for call in left_out:
                if call.peer == record.rank or (
                    call.peer is None and record.rank in self.behind(other, call.group)
                ):
                    found.append((other, call))
        # A rank that waits in one call and has not started another of its groups shows their order.
        begun_there = {
            name: {
                other.started.get(name, 0)
                for other, _ in found
                if name in other.groups and other.rank in self.members[name]
            }
            for name in {call.group for _, call in found}
        }
        is_first = {
            (name, number): not any(_is_before(name, other, number) for other in begun_there[name])
            for name, number in {(call.group, call.number or 0) for _, call in found}
        }
        first = [call for _, call in found if is_first[call.group, call.number or 0]]
        return min(first or [call for _, call in found], key=lambda call: call.began, default=None)


def _mismatch(job: _Job) -> HangReport | None:
    """Return a report if ranks of one group started a collective differently; the first one counts."""
    different = [calls for calls in job.together.values() if len({c.signature for c in calls.values()}) > 1]
    if not different:
        return _aborted(job)
    calls = min(different, key=lambda calls: min(call.began for call in calls.values()))
    usual = _usual(calls, job)
    ranks = tuple(rank for rank, call in calls.items() if call.signature != usual)
    said = _list(f"{job.by_rank[rank]} began {calls[rank]} with {calls[rank].shape}" for rank in ranks)
    if len(ranks) < len(calls):
        expected = next(call for call in calls.values() if call.signature == usual)
        said += f", where the others of the group began {expected.op} with {expected.shape}"
    return _report("mismatch", job, ranks, f"{said}.", calls[ranks[0]])


def _usual(calls: Mapping[int, Call], job: _Job) -> Any:
    """Return the majority signature of `calls`, or of groups of the same kind; None without majority."""
    first = next(iter(calls.values()))
    of_kind = [
        call
        for (group, number), others in job.together.items()
        if number == first.number and kind_of_group(group) == kind_of_group(first.group)
        for call in others.values()
    ]
    for votes in (list(calls.values()), of_kind):
        (usual, count), *others = Counter(call.signature for call in votes).most_common()
        if len(votes) > 1 and all(other < count for _, other in others):
            return usual
    return None


def _aborted(job: _Job) -> HangReport | None:
    """Return a report if gloo aborted a rank that received data of unexpected size."""
    for record in job.everyone:
        if record.state != "gone" or "Aborted" not in record.reason or record.inside is None:
            continue
        call = job.awaited(record)
        if call is None:
            continue
        calls = job.together.get((call.group, call.number or 0), {})
        usual = _usual(calls, job) if calls and (len(calls) > 1 or len(job.everyone) > 2) else None
        odd = tuple(rank for rank, other in calls.items() if usual is not None and other.signature != usual)
        members = tuple(sorted(job.members.get(call.group, ())))
        ranks = odd or (members if len(members) == 2 and usual is None else (record.rank,))
        told = _list(
            f"{job.by_rank[rank]} began {calls[rank]} with {calls[rank].shape}" for rank in (odd or calls)
        )
        text = (
            f"{record} did not expect data of this size, and gloo aborted it in {record.inside.op}, "
            f"{_place(record)}."
        )
        text = f"{told}. {text}" if told else text
        return _report("mismatch", job, ranks, text, call)
    return None


def _ended(job: _Job) -> HangReport | None:
    """Return a report if ranks failed or are gone; the first one is the cause, later ones may be victims."""
    ended = [record for record in job.everyone if record.state in ("failed", "gone")]
    if not ended:
        return None
    first = min(ended, key=lambda record: record.left_at)
    call = job.awaited(first)
    if first.state == "failed":
        text = f"{first} failed in {_place(first)}: {first.reason}."
        return _report("failed", job, (first.rank,), text, call)
    crash = f" ({first.reason})" if first.reason else ""
    ranks = tuple(record.rank for record in ended if record.state == "gone")
    others = f" ({_words(rank for rank in ranks if rank != first.rank)} too)" if len(ranks) > 1 else ""
    text = f"{first} is gone{others}: killed or crashed{crash}, last seen in {_place(first)}."
    return _report("gone", job, ranks, text, call)


def _silent(job: _Job) -> HangReport | None:
    """Return a report if ranks cannot make progress, or were never seen."""
    for state, said in (
        ("stopped", "is stopped, by SIGSTOP or a debugger"),
        (
            "silent",
            "has shown no sign of life for {silent:.0f} s, cut off or in code that holds the interpreter",
        ),
        (
            "unseen",
            "has never shown a sign of life: it did not start, ended before its first heartbeat, or is cut "
            "off",
        ),
    ):
        found = [record for record in job.everyone if record.state == state]
        if found:
            begun = state in ("stopped", "silent")
            text = _list(
                f"{record} {said.format(silent=record.silent)}"
                + (f", last seen in {_place(record)}" if begun else "")
                for record in found
            )
            return _report(state, job, tuple(r.rank for r in found), f"{text}.", job.awaited(found[0]))
    return None


def _standstill(job: _Job) -> HangReport | None:
    """Return a report on live ranks: the awaited ranks with nothing to wait for themselves, or a cycle."""
    everyone, by_rank = job.everyone, job.by_rank
    waits = {record.rank: _nonempty([job.waits_for(record)]) for record in everyone}
    if not any(waits.values()):  # hosts that wait for a device are in no call: go by what they have begun
        waits = {
            record.rank: _nonempty(job.behind(record, group) for group in record.started)
            for record in everyone
        }
    sets = {id(ranks): ranks for groups in waits.values() for ranks in groups}
    wanted = frozenset().union(*sets.values())
    ends = [rank for rank in sorted(wanted) if not waits[rank]]
    hidden = frozenset(rank for rank in wanted if by_rank[rank].state == "unreadable")
    if hidden:  # whatever these do: a rank in no call is elsewhere, and a cycle of others cannot end
        ends = [rank for rank in ends if rank not in hidden and by_rank[rank].inside is None]
        waits = {rank: _nonempty(ranks - hidden for ranks in groups) for rank, groups in waits.items()}
    if ends:
        # A rank in no call at all is elsewhere; others may only be late for the same call.
        elsewhere = [rank for rank in ends if by_rank[rank].inside is None] or ends
        record = by_rank[elsewhere[0]]
        call = job.awaited(record)
        if record.state == "finished":
            text = (
                f"{record} has left the loop after step {record.step}: it has made fewer calls than others."
            )
            kind = "finished"
        elif call is not None and call.op in MESSAGES:
            kind, text = "message", f"{record} has not joined {call}: it is in {_place(record)}."
        else:
            kind, text = (
                "hung",
                f"{record} is alive, but for {record.stalled:.0f} s it has been in {_place(record)}.",
            )
        return _report(kind, job, tuple(elsewhere), text, call)
    cycle = _cycle(waits)
    return _deadlock(job, waits, cycle) if cycle else None


def _unreadable(job: _Job) -> HangReport | None:
    """Return a report if nothing can be known of ranks."""
    found = [record for record in job.everyone if record.state == "unreadable"]
    if not found:
        return None
    text = _list(f"{record} cannot be seen: the store of the job does not answer" for record in found)
    ranks = tuple(record.rank for record in found)
    return _report("unreadable", job, ranks, f"{text}.", job.awaited(found[0]))


def _unexplained(job: _Job) -> HangReport:
    """Return a report that names no cause."""
    longest = max(job.everyone, key=lambda record: record.stalled)
    text = f"no rank was seen to hold up the others. The longest still is {longest}, in {_place(longest)}."
    inside = longest.inside or (longest.calls[-1] if longest.calls else None)
    return _report("unknown", job, (longest.rank,), text, inside)


_Waits = Mapping[int, tuple[frozenset[int], ...]]  # of each rank, the sets of ranks that it waits for


def _nonempty(sets: Iterable[frozenset[int]]) -> tuple[frozenset[int], ...]:
    return tuple(ranks for ranks in sets if ranks)


def _deadlock(job: _Job, waits: _Waits, cycle: Sequence[int]) -> HangReport:
    """Return a report of a cycle: the rank whose order deviates from the majority, else all of them."""
    before: dict[tuple[str, int], dict[int, Any]] = {}
    odd = tuple(rank for rank in cycle if _deviates(job.by_rank[rank], job, before))
    ranks = odd or tuple(sorted(cycle))
    said = _list(
        f"{job.by_rank[rank]} is in {job.by_rank[rank].inside} and waits for "
        f"{_words(sorted(frozenset().union(*waits[rank])))}"
        for rank in cycle
    )
    inside = [job.by_rank[rank].inside for rank in cycle]
    messages = [call for call in inside if call is not None and call.op in MESSAGES]
    call = messages[0] if messages else job.by_rank[ranks[0]].inside
    why = "nobody has the other end of a message" if messages else "they make their calls in different orders"
    return _report("message" if messages else "order", job, ranks, f"{said}: {why}.", call)


def _deviates(record: RankRecord, job: _Job, before: dict[tuple[str, int], dict[int, Any]]) -> bool:
    """Return True if most ranks had started other calls than `record` before its current call.

    before: cache of the calls that each rank had started before a call, by (group, number).
    """
    call = record.inside
    if call is None or call.number is None:
        return False
    key = (call.group, call.number)
    if key not in before:
        before[key] = {}
        for rank, own in job.together.get(key, {}).items():
            earlier = {
                kind_of_group(c.group): c.number
                for c in job.by_rank[rank].calls
                if c.began < own.began and c.group != call.group
            }
            before[key][rank] = tuple(sorted(earlier.items()))
    votes = Counter(before[key].values())
    usual, count = votes.most_common(1)[0] if votes else ((), 0)
    return 2 * count > len(before[key]) and before[key].get(record.rank, usual) != usual


def _is_before(group: str, number: int, other: int) -> bool:
    """Return True if collective `number` comes before `other`; epochs of exchanges are int32 and wrap."""
    if group.startswith("exchange:"):
        return (number - other) % (1 << 32) >= 1 << 31
    return number < other


def _report(kind: str, job: _Job, ranks: tuple[int, ...], text: str, call: Call | None) -> HangReport:
    """Make the report: add to the text the step, and the ranks that wait."""
    step, named = job.by_rank[ranks[0]].step, set(ranks)
    # The last heartbeat of a rank may be older than its last collective, unless others wait in this one.
    old = kind in ("gone", "stopped", "silent") and not any(r.inside == call for r in job.everyone)
    missed = "was not seen to join" if old else "did not join"
    others = [r for r in job.everyone if r.rank not in named and r.state in ("running", "lost") and r.inside]
    waiting: dict[str, list[int]] = {}
    for record in others:
        waiting.setdefault(str(record.inside), []).append(record.rank)
    parts = [text[:1].upper() + text[1:]]
    if kind in ("mismatch", "order"):
        parts.append(f"This was in step {step}.")
    elif call is not None and kind != "message":
        parts.append(f"It {missed} {call}{f' ({call.shape})' if call.sizes else ''}.")
    places = list(waiting.items())
    most = len(places) if len(places) <= LISTED else LISTED - 1
    parts += [f"{_words(at).capitalize()} waited in {where}." for where, at in places[:most]]
    if most < len(places):
        left = sum(len(at) for _, at in places[most:])
        parts.append(f"{left} other ranks waited in {len(places) - most} other calls.")
    return HangReport(kind, ranks, " ".join(parts), step, call, tuple(sorted(r.rank for r in others)))


def _place(record: RankRecord) -> str:
    step = f"step {record.step}, {record.phase}"
    return f"{step}, at {record.where}" if record.where else step


def _words(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) > LISTED:
        names = [*names[:7], f"{len(names) - 7} others"]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _list(parts: Iterable[str]) -> str:
    """Join the parts with semicolons; of many, list the first and count the others."""
    parts = list(parts)
    if len(parts) > LISTED:
        parts = [*parts[: LISTED - 1], f"and so for {len(parts) - LISTED + 1} other ranks"]
    return "; ".join(parts)


def _cycle(waits: _Waits) -> list[int]:
    """Return a cycle of ranks, each of which waits for the next; empty if there is none."""
    first = {id(ranks): min(ranks) for groups in waits.values() for ranks in groups}
    checked: set[int] = set()
    for start in sorted(waits):
        path: dict[int, None] = {}
        rank = start
        while rank not in path and rank not in checked and waits.get(rank):
            path[rank] = None
            rank = min(first[id(ranks)] for ranks in waits[rank])
        if rank in path:
            ring = list(path)
            return ring[ring.index(rank) :]
        checked |= path.keys()
    return []


@dataclass(frozen=True)
class Straggler:
    """Rank that all others of a group wait for.

    Attributes:
        share: fraction of the time in which they wait, at most 1.
        seconds: mean delay after the next to last rank, over the collectives that it joined last.
        op: the collective with the longest delay.
    """

    rank: int
    share: float
    seconds: float
    op: Call


def stragglers(records: Sequence[RankRecord]) -> list[Straggler]:
    """Return the ranks that alone delay others for a quarter of the time, by 10 ms a collective or more.

    Arrivals at the collectives that all ranks of a group have on record are compared, if these span a second.
    Asynchronous collectives wait for a rank at the same time, which counts once. Clocks of machines must
    agree better than the delays to be seen.
    """
    arrivals: dict[str, dict[int, dict[int, Call]]] = {}
    for record in records:
        for call in record.calls:
            if call.number is not None:
                arrivals.setdefault(call.group, {}).setdefault(call.number, {})[record.rank] = call
    members = {name: ranks for record in records for name, ranks in record.groups.items()}
    found: dict[int, Straggler] = {}
    for group, numbers in arrivals.items():
        complete = [calls for calls in numbers.values() if len(calls) == len(members.get(group, ())) > 1]
        times = [call.began for calls in complete for call in calls.values()]
        span = max(times, default=0.0) - min(times, default=0.0)
        if span < 1.0:
            continue
        waits: dict[int, list[tuple[float, Call]]] = {}  # since when all others wait for a rank, and for what
        for calls in complete:
            last = max(calls, key=lambda rank: calls[rank].began)
            next_to_last = max(call.began for rank, call in calls.items() if rank != last)
            waits.setdefault(last, []).append((next_to_last, calls[last]))
        for rank, each in waits.items():
            share = min(_covered((since, call.began) for since, call in each) / span, 1.0)  # sums round
            mean = sum(call.began - since for since, call in each) / len(each)
            worst = max(each, key=lambda wait: wait[1].began - wait[0])
            if share > 0.25 and mean >= 0.01 and share > getattr(found.get(rank), "share", 0.0):
                found[rank] = Straggler(rank, share, mean, worst[1])
    return sorted(found.values(), key=lambda late: -late.share)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of `intervals`."""
    length, end = 0.0, -math.inf
    for begin, stop in sorted(intervals):
        if stop > end:
            length += stop - max(begin, end)
            end = stop
    return length
