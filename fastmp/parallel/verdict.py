"""What went wrong in a job that stands still or has lost a rank, from what its ranks were last seen doing.

`judge` looks for the first of these that explains it: a collective that ranks began differently, a rank that
ended, a rank that shows no sign of life, a rank for which others wait while it is elsewhere, ranks that wait
for each other. Everything is a frozen record and a pure function; `fastmp.parallel.watch` collects the
records. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Call", "Late", "RankRecord", "Verdict", "judge", "latecomers"]

# Ranks may begin these with different sizes.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv")
MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Call:
    """A collective, or a message to or from `peer`, that a rank began.

    group: name of the process group, the same on all of its ranks; groups of one kind differ in what follows
        a space. number: how many collectives the rank began in this group, this one included; None for
        messages. began: seconds since the epoch, 0 where unknown.
    """

    op: str
    group: str = ""
    number: int | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    began: float = 0.0
    peer: int | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be alike on all ranks of a group."""
        return (self.op,) if self.op in _UNEVEN else (self.op, self.sizes, self.dtypes)

    def __str__(self) -> str:
        if self.peer is not None:
            return f"{self.op} {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        number = "" if self.number is None else f" number {self.number}"
        return f"{self.op}{number}" + (f" of group {self.group}" if self.group else "")

    @property
    def shape(self) -> str:
        """The sizes and dtypes of its tensors in words."""
        tensors = [f"{list(size)} {dtype}" for size, dtype in zip(self.sizes, self.dtypes)]
        return " and ".join(tensors) or "nothing"


@dataclass(frozen=True)
class RankRecord:
    """What was last seen of one rank.

    step: the step it is in, from 1. phase: the part of it. where: the innermost line of Python of its main
    thread outside torch. inside: the call that this thread is in; None where it is in none. calls: its last
    collectives, oldest first. begun: how many it began in each group. groups: the ranks of its groups.
    state: "running"; "stopped" or "gone", as a process of the same machine sees it; "silent", after no sign
        of life; "finished", "failed" or "lost" (a peer), as it said itself when it left, with `words`.
    still: seconds since anything changed. silent: seconds since its last sign of life. left: when it left, in
        seconds since the epoch.
    """

    rank: int
    host: str = "?"
    pid: int = 0
    step: int = 0
    phase: str = "start"
    where: str = ""
    inside: Call | None = None
    calls: tuple[Call, ...] = ()
    begun: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    state: str = "running"
    words: str = ""
    still: float = 0.0
    silent: float = 0.0
    left: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    def as_json(self) -> dict[str, Any]:
        """This record as an object for JSON; `from_json` takes it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RankRecord:
        """Make a record of what `as_json` returned, sent through JSON."""
        inside = content["inside"]
        return cls(
            **{
                **content,
                "inside": None if inside is None else _call(inside),
                "calls": tuple(map(_call, content["calls"])),
                "groups": {name: tuple(ranks) for name, ranks in content["groups"].items()},
            }
        )


def _call(content: Mapping[str, Any]) -> Call:
    sizes = tuple(map(tuple, content["sizes"]))
    return Call(**{**content, "sizes": sizes, "dtypes": tuple(content["dtypes"])})


@dataclass(frozen=True)
class Verdict:
    """Who held up the job: `kind`, the `ranks` that did, the `call` concerned, who is `waiting`, and a text.

    Kinds: "mismatch" (of op, shape or dtype), "gone", "failed", "stopped", "silent", "finished" (before
    others: uneven numbers of calls), "hung" (alive, but elsewhere), "order" (ranks wait for each other),
    "message" (a message that nobody sends or receives), "unknown".
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    step: int = 0
    call: Call | None = None
    waiting: tuple[int, ...] = ()


def judge(records: Iterable[RankRecord], world_size: int) -> Verdict:
    """Return the verdict on a job of `world_size` ranks, of some of which there may be no record."""
    seen = {record.rank: record for record in records}
    missing = [RankRecord(rank, state="unseen") for rank in range(world_size) if rank not in seen]
    everyone = sorted([*seen.values(), *missing], key=lambda record: record.rank)
    steps = (_mismatch, _ended, _silent, _standstill)
    return next(verdict for step in steps if (verdict := step(everyone)) is not None)


def _mismatch(everyone: Sequence[RankRecord]) -> Verdict | None:
    """The first collective that ranks of one group began differently."""
    together: dict[tuple[str, int], dict[int, Call]] = {}
    for record in everyone:
        for call in record.calls:
            if call.number is not None:
                together.setdefault((call.group, call.number), {})[record.rank] = call
    different = [calls for calls in together.values() if len({c.signature for c in calls.values()}) > 1]
    if not different:
        return _aborted(everyone, together)
    calls = min(different, key=lambda calls: min(call.began for call in calls.values()))
    usual = _usual(calls, together)
    ranks = tuple(rank for rank, call in calls.items() if call.signature != usual)
    said = "; ".join(
        f"{_rank(rank, everyone)} began {calls[rank]} with {calls[rank].shape}" for rank in ranks
    )
    if len(ranks) < len(calls):
        expected = next(call for call in calls.values() if call.signature == usual)
        said += f", where the others of the group began {expected.op} with {expected.shape}"
    return _verdict("mismatch", everyone, ranks, f"{said}.", calls[ranks[0]])


def _usual(calls: Mapping[int, Call], together: Mapping[tuple[str, int], dict[int, Call]]) -> Any:
    """The signature that most of `calls` have; else most at this place in groups of this kind; else None."""
    first = next(iter(calls.values()))
    of_kind = [
        call
        for (group, number), others in together.items()
        for call in others.values()
        if number == first.number and _kind(group) == _kind(first.group)
    ]
    for votes in (list(calls.values()), of_kind):
        (usual, count), *others = Counter(call.signature for call in votes).most_common()
        if len(votes) > 1 and all(other < count for _, other in others):
            return usual
    return None


def _aborted(
    everyone: Sequence[RankRecord], together: Mapping[tuple[str, int], dict[int, Call]]
) -> Verdict | None:
    """A rank that gloo aborted, as data of a size came that it did not expect; its own call is not known."""
    for record in everyone:
        if record.state != "gone" or "Aborted" not in record.words or record.inside is None:
            continue
        call = _awaited(record, everyone)
        if call is None:
            continue
        calls = together.get((call.group, call.number or 0), {})
        usual = _usual(calls, together) if len(calls) > 1 or len(everyone) > 2 else None
        odd = tuple(rank for rank, other in calls.items() if usual is not None and other.signature != usual)
        members = next(iter(r.groups[call.group] for r in everyone if call.group in r.groups), ())
        ranks = odd or (tuple(members) if len(members) == 2 and usual is None else (record.rank,))
        told = "; ".join(
            f"{_rank(rank, everyone)} began {calls[rank]} with {calls[rank].shape}"
            for rank in (odd or tuple(calls))
        )
        text = (
            f"{told}. {record} did not expect data of this size, and gloo aborted it in {record.inside.op}, "
            f"{_place(record)}."
        )
        return _verdict("mismatch", everyone, ranks, text, call)
    return None


def _ended(everyone: Sequence[RankRecord]) -> Verdict | None:
    """The rank that failed or vanished first; those that left because they lost a peer are its victims."""
    ended = [record for record in everyone if record.state in ("failed", "gone")]
    if not ended:
        return None
    first = min(ended, key=lambda record: record.left)
    call = _awaited(first, everyone)
    if first.state == "failed":
        text = f"{first} failed in {_place(first)}: {first.words}."
        return _verdict("failed", everyone, (first.rank,), text, call)
    crash = f" ({first.words})" if first.words else ""
    ranks = tuple(record.rank for record in ended if record.state == "gone")
    others = f" ({_words(rank for rank in ranks if rank != first.rank)} too)" if len(ranks) > 1 else ""
    text = f"{first} is gone{others}: killed or crashed{crash}, last seen in {_place(first)}."
    return _verdict("gone", everyone, ranks, text, call)


def _silent(everyone: Sequence[RankRecord]) -> Verdict | None:
    for state, said in (
        ("stopped", "is stopped, by SIGSTOP or a debugger,"),
        (
            "silent",
            "has shown no sign of life for {:.0f} s, cut off or in code that holds the interpreter,",
        ),
        ("unseen", "has never shown a sign of life: it did not start, or is cut off,"),
    ):
        found = [record for record in everyone if record.state == state]
        if found:
            said = said.format(found[0].silent)
            text = "; ".join(f"{record} {said} in {_place(record)}" for record in found) + "."
            call = _awaited(found[0], everyone)
            return _verdict(state, everyone, tuple(record.rank for record in found), text, call)
    return None


def _standstill(everyone: Sequence[RankRecord]) -> Verdict:
    """Every rank lives: find those for which others wait, and which wait for nobody."""
    waits = {record.rank: _waits_for(record, everyone) for record in everyone}
    if not any(waits.values()):  # hosts that wait for a device are in no call: go by what they have begun
        waits = {record.rank: _all_behind(record, everyone) for record in everyone}
    by_rank = {record.rank: record for record in everyone}
    wanted = {rank for ranks in waits.values() for rank in ranks}
    ends = [rank for rank in sorted(wanted) if not waits[rank]]
    if ends:
        # Who is in no call at all is the one who is elsewhere; the others may only be late in the same call.
        elsewhere = [rank for rank in ends if by_rank[rank].inside is None] or ends
        record = by_rank[elsewhere[0]]
        call = _awaited(record, everyone)
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
                f"{record} is alive, but for {record.still:.0f} s it has been in {_place(record)}.",
            )
        return _verdict(kind, everyone, tuple(elsewhere), text, call)
    cycle = _cycle(waits)
    if cycle:
        return _deadlock(everyone, by_rank, waits, cycle)
    longest = max(everyone, key=lambda record: record.still)
    text = f"no rank was seen to hold up the others. The longest still is {longest}, in {_place(longest)}."
    inside = longest.inside or (longest.calls[-1] if longest.calls else None)
    return _verdict("unknown", everyone, (longest.rank,), text, inside)


def _deadlock(
    everyone: Sequence[RankRecord],
    by_rank: Mapping[int, RankRecord],
    waits: Mapping[int, set[int]],
    cycle: Sequence[int],
) -> Verdict:
    """Ranks wait for each other: name the one whose call is unlike those of most others, else all of them."""
    odd = tuple(rank for rank in cycle if _deviates(by_rank[rank], everyone))
    ranks = odd or tuple(sorted(cycle))
    said = "; ".join(
        f"{by_rank[rank]} is in {by_rank[rank].inside} and waits for {_words(sorted(waits[rank]))}"
        for rank in cycle
    )
    inside = [by_rank[rank].inside for rank in cycle]
    messages = [call for call in inside if call is not None and call.op in MESSAGES]
    call = messages[0] if messages else by_rank[ranks[0]].inside
    why = "nobody has the other end of a message" if messages else "they make their calls in different orders"
    return _verdict("message" if messages else "order", everyone, ranks, f"{said}: {why}.", call)


def _deviates(record: RankRecord, everyone: Sequence[RankRecord]) -> bool:
    """Whether most ranks that began the call of `record` had by then begun other numbers of other calls."""
    call = record.inside
    if call is None or call.number is None:
        return False
    before = {}
    for other in everyone:
        at = next((c.began for c in other.calls if (c.group, c.number) == (call.group, call.number)), None)
        if at is not None:
            earlier = {
                _kind(c.group): c.number for c in other.calls if c.began < at and c.group != call.group
            }
            before[other.rank] = tuple(sorted(earlier.items()))
    votes = Counter(before.values())
    usual, count = votes.most_common(1)[0] if votes else ((), 0)
    return 2 * count > len(before) and record.rank in before and before[record.rank] != usual


def _kind(group: str) -> str:
    """The kind of a group: groups of one kind differ in what follows a space."""
    return group.partition(" ")[0] + ("/nccl" if group.endswith("/nccl") else "")


def _waits_for(record: RankRecord, everyone: Sequence[RankRecord]) -> set[int]:
    """The ranks without which the call that `record` is in cannot end, of those that have not joined it."""
    call = record.inside
    if call is None or record.state == "finished":
        return set()
    if call.peer is not None:
        peer = next((other for other in everyone if other.rank == call.peer), None)
        theirs = None if peer is None else peer.inside
        meets = theirs is not None and theirs.peer == record.rank and theirs.op != call.op
        return set() if meets else {call.peer}
    return _behind(record, call.group, everyone)


def _behind(record: RankRecord, group: str, everyone: Sequence[RankRecord]) -> set[int]:
    """The ranks of a group that have begun fewer collectives in it than `record`."""
    members = record.groups.get(group, ())
    own = record.begun.get(group)
    if own is None:  # a torch without a flight record: those that are in no call of the group
        there = {other.rank for other in everyone if other.inside and other.inside.group == group}
        return set(members) - there - {record.rank}
    begun = {other.rank: other.begun.get(group, 0) for other in everyone}
    return {rank for rank in members if _is_before(group, begun.get(rank, 0), own)}


def _is_before(group: str, number: int, other: int) -> bool:
    """Whether a collective of a group comes before another; the numbers of exchanges are int32 and wrap."""
    if group.startswith("exchange:"):
        return (number - other) % (1 << 32) >= 1 << 31
    return number < other


def _all_behind(record: RankRecord, everyone: Sequence[RankRecord]) -> set[int]:
    return {rank for group in record.begun for rank in _behind(record, group, everyone)}


def _awaited(record: RankRecord, everyone: Sequence[RankRecord]) -> Call | None:
    """The call in which others wait for `record`: where there are several, the first that it would make."""
    found = []
    for other in everyone:
        if other.rank == record.rank:
            continue
        begun = record.begun
        left_out = [c for c in other.calls if c.number == begun.get(c.group, 0) + 1]
        for call in left_out if other.inside is None else [other.inside]:
            if call.peer == record.rank or (
                call.peer is None and record.rank in _behind(other, call.group, everyone)
            ):
                found.append((other, call))
    # Who waits in one call and has not begun another, though it is in its group too, shows their order.
    first = [
        call
        for _, call in found
        if not any(
            other.rank in other.groups.get(call.group, ())
            and _is_before(call.group, other.begun.get(call.group, 0), call.number or 0)
            for other, _ in found
        )
    ]
    return min(first or [call for _, call in found], key=lambda call: call.began, default=None)


def _verdict(
    kind: str, everyone: Sequence[RankRecord], ranks: tuple[int, ...], text: str, call: Call | None
) -> Verdict:
    """Add to the text which step it was, and who waits where."""
    step = next(record.step for record in everyone if record.rank == ranks[0])
    others = [r for r in everyone if r.rank not in ranks and r.state in ("running", "lost") and r.inside]
    waiting: dict[str, list[int]] = {}
    for record in others:
        waiting.setdefault(str(record.inside), []).append(record.rank)
    parts = [text[:1].upper() + text[1:]]
    if kind in ("mismatch", "order"):
        parts.append(f"This was in step {step}.")
    elif call is not None and kind != "message":
        parts.append(f"It did not join {call}{f' ({call.shape})' if call.sizes else ''}.")
    parts += [f"{_words(at).capitalize()} waited in {where}." for where, at in waiting.items()]
    return Verdict(kind, ranks, " ".join(parts), step, call, tuple(sorted(r.rank for r in others)))


def _rank(rank: int, everyone: Sequence[RankRecord]) -> str:
    return str(next(record for record in everyone if record.rank == rank))


def _place(record: RankRecord) -> str:
    step = f"step {record.step}, {record.phase}"
    return f"{step}, at {record.where}" if record.where else step


def _words(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) > 8:
        names = [*names[:7], f"{len(names) - 7} others"]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _cycle(waits: Mapping[int, set[int]]) -> list[int]:
    """Ranks each of which waits for the next, and the last for the first; none if there is no such ring."""
    for start in sorted(waits):
        path, rank = [], start
        while rank not in path and waits.get(rank):
            path.append(rank)
            rank = min(waits[rank])
        if rank in path:
            return path[path.index(rank) :]
    return []


@dataclass(frozen=True)
class Late:
    """A rank for which all others of a group wait.

    share: the part of the time in which they do. seconds: how much later it comes than the next to last, in
        the mean over the collectives where it was last. op: the collective at which it was the latest.
    """

    rank: int
    share: float
    seconds: float
    op: Call


def latecomers(records: Sequence[RankRecord]) -> list[Late]:
    """Ranks that alone keep others waiting for a quarter of the time, by 10 ms each time or more.

    Their arrival at the collectives that all ranks of a group still have on record is compared, where these
    cover a second; the clocks of machines must agree better than the delays that are to be seen.
    """
    arrivals: dict[str, dict[int, dict[int, Call]]] = {}
    for record in records:
        for call in record.calls:
            if call.number is not None:
                arrivals.setdefault(call.group, {}).setdefault(call.number, {})[record.rank] = call
    members = {name: ranks for record in records for name, ranks in record.groups.items()}
    found: dict[int, Late] = {}
    for group, numbers in arrivals.items():
        complete = [calls for calls in numbers.values() if len(calls) == len(members.get(group, ())) > 1]
        times = [call.began for calls in complete for call in calls.values()]
        span = max(times, default=0.0) - min(times, default=0.0)
        if span < 1.0:
            continue
        delays: dict[int, list[tuple[float, Call]]] = {}
        for calls in complete:
            last = max(calls, key=lambda rank: calls[rank].began)
            next_to_last = max(call.began for rank, call in calls.items() if rank != last)
            delays.setdefault(last, []).append((calls[last].began - next_to_last, calls[last]))
        for rank, each in delays.items():
            total = sum(delay for delay, _ in each)
            share, mean, worst = total / span, total / len(each), max(each, key=lambda pair: pair[0])
            if share > 0.25 and mean >= 0.01 and share > getattr(found.get(rank), "share", 0.0):
                found[rank] = Late(rank, share, mean, worst[1])
    return sorted(found.values(), key=lambda late: -late.share)
