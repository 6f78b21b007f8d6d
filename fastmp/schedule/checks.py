"""Check the programs of all pipeline ranks: nothing runs before what it needs. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from fastmp.schedule.buffer_plan import plan_errors
from fastmp.schedule.program import KINDS, Instruction, Program, buffer_plan, in_words
from fastmp.schedule.steps import FORWARD

__all__ = ["check_program"]

_TAIL = ("reduce", "sum", "decide", "update", "gather")
_HOST, _MESSAGES = ("fetch", "decide"), ("send", "recv")
Done = tuple[str, int, int]  # what is done, of which microbatch and span


def check_program(programs: Sequence[Program]) -> None:
    """Check that the programs of all pipeline ranks run together, without conflicts over graph memory.

    1. A microbatch goes through every span: forward once, then backward, or dgrad and later wgrad.
    2. An instruction comes after its neighbouring span of the same microbatch and direction, or its message.
    3. Two ranks have their messages in one order, and all ranks finish, even if a send waits for its recv.
    4. Leases of a buffer do not overlap, a lane holds one flight, and flights of a bundle replay the same
       graphs in the same order, see `plan_errors`. A captured span has graphs in all of its instructions.
    5. A region has no instruction of the host, and `decide` comes before everything that changes parameters.

    Args:
        programs: of pipeline rank 0, 1, and so on.

    Raises:
        ValueError: naming the rank and the instruction.

    Example:
        >>> from fastmp.schedule.schedule import Schedule
        >>> from fastmp.schedule.planner import make_program
        >>> check_program([make_program(Schedule(2, 4), rank, [[]]) for rank in range(2)])
    """
    for rank, program in enumerate(programs):
        if (program.rank, program.stages, program.stages.pp) != (rank, programs[0].stages, len(programs)):
            got = ", ".join(f"rank {each.rank} of {each.stages}" for each in programs)
            raise ValueError(f"program: expected those of all pipeline ranks of one StageMap, got {got}")
        _check_numbers(program)
        _check_order(program)
        _check_regions(program)
        _check_graphs(program)
    _check_messages(programs)


def _error(program: Program, i: int, problem: str) -> ValueError:
    what = in_words(program, program.instructions[i])
    return ValueError(f"program: rank {program.rank}, instruction {i}, {what}: {problem}")


def _check_numbers(program: Program) -> None:
    """Check that all numbers of spans, flights, instructions and replays exist."""
    every, spans = program.instructions, program.spans

    def expect(holds: bool, what: str, got: object) -> None:
        if not holds:
            raise ValueError(f"program: rank {program.rank}: expected {what}, got {got}")

    chunks = [chunk for chunk, _ in groupby(span.chunk for span in spans)]
    expect(chunks == [*range(program.stages.vpp)], "the spans of each chunk in a row", f"chunks {chunks}")
    for i, now in enumerate(every):
        has_span, is_message = now.op in KINDS or now.op in _MESSAGES, now.op in _MESSAGES
        form = (now.span >= 0, now.kind != "", now.flight >= 0) == (has_span, is_message, now.graph >= 0)
        numbers = now.span in range(-1, len(spans)) and now.flight in range(-1, len(program.flights))
        known = has_span or now.op in ("fetch", "zero", *_TAIL)
        expect(known and form and numbers, f"a known op, span and flight as instruction {i}", now)
    for region in program.regions:
        expect(0 <= region.start < region.stop <= len(every), f"regions of {len(every)} instructions", region)
    replays = {i for i, now in enumerate(every) if now.graph >= 0}
    for lease in program.leases:
        expect({lease.first, lease.last} <= replays, "leases from replay to replay", lease)


def _check_order(program: Program) -> None:
    """Check 1 and 2 of `check_program`, and the end of the step; what a rank receives is taken as sent."""
    done = dict[Done, int]()
    for i, now in enumerate(program.instructions):
        for each in _needed(program, now):
            if each not in done:
                raise _error(program, i, f"needs the {_in_words(program, each)}, which has not run")
        if now.op in KINDS and now.op != "forward" and not program.spans[now.span].trained:
            raise _error(program, i, "is of a span that is not trained")
        if now.kind and _beside(program, now.span, _way(now)) != (now.peer, -1):
            raise _error(program, i, f"{program.spans[now.span].name} has no neighbour there")
        behind = _TAIL[_TAIL.index(now.op) + 1 :] if now.op in _TAIL else () if now.op == "fetch" else _TAIL
        if any((op, -1, -1) in done for op in behind):
            raise _error(program, i, "comes after the end of the step")
        for each in _does(now):
            if each in done:
                raise _error(program, i, f"has run as instruction {done[each]} before")
            done[each] = i
    trains = ("zero", -1, -1) in done
    microbatches = [microbatch for name, microbatch, _ in done if name == "fetch"]
    wanted = [(op, -1, -1) for op in _TAIL if trains and op != "decide"]
    for number, span in enumerate(program.spans):
        ways = ("forward", "gradient", "wgrad") if trains and span.trained else ("forward",)
        wanted += ((way, microbatch, number) for microbatch in microbatches for way in ways)
    for each in wanted:
        if each not in done:
            raise ValueError(f"program: rank {program.rank}: the {_in_words(program, each)} is missing")


def _does(now: Instruction) -> list[Done]:
    """Return the work of an instruction; a whole backward makes both gradients."""
    names = {"backward": ("gradient", "wgrad"), "dgrad": ("gradient",)}.get(now.op, (now.op + now.kind,))
    return [(name, now.microbatch, now.span) for name in names]


def _needed(program: Program, now: Instruction) -> Iterator[Done]:
    """Yield the dependencies of an instruction; tensors of another rank arrive as a message."""
    if now.op in _TAIL:
        yield "zero", -1, -1
    elif now.op == "wgrad":
        yield "gradient", now.microbatch, now.span
    elif now.op == "send":
        if now.kind == FORWARD or program.spans[now.span].trained:
            yield "forward" if now.kind == FORWARD else "gradient", now.microbatch, now.span
        else:
            yield from _given(program, now, 1)
    elif now.op == "forward":
        yield "fetch", now.microbatch, -1
        yield from _given(program, now, -1)
    elif now.op in KINDS:
        yield "zero", -1, -1
        yield "forward", now.microbatch, now.span
        yield from _given(program, now, 1)


def _given(program: Program, now: Instruction, way: int) -> Iterator[Done]:
    """Yield what gives a span its tensors (way -1) or gradients (way 1): nothing at an end of the model."""
    number, (rank, other) = now.span, _beside(program, now.span, way)
    while way > 0 and other >= 0 and not program.spans[other].trained:  # gradients pass it by
        number, (rank, other) = other, _beside(program, other, way)
    if other >= 0:
        yield "forward" if way < 0 else "gradient", now.microbatch, other
    elif rank >= 0:
        yield "recvforward" if way < 0 else "recvbackward", now.microbatch, number


def _way(message: Instruction) -> int:
    """Return -1 if the other end of a message is before this one in the model, 1 if it is behind."""
    return 1 if (message.kind == FORWARD) == (message.op == "send") else -1


def _beside(program: Program, number: int, way: int) -> tuple[int, int]:
    """Return (rank, span) before (way -1) or behind (way 1) a span.

    The span is -1 on another rank; both are -1 at an end of the model.
    """
    spans, stages = program.spans, program.stages
    chunk, other = spans[number].chunk, number + way
    if 0 <= other < len(spans) and spans[other].chunk == chunk:
        return program.rank, other
    stage = stages.stage(program.rank, chunk) + way
    if not 0 <= stage < len(stages):
        return -1, -1
    if (rank := stages.rank(stage)) != program.rank:
        return rank, -1
    own = [i for i, span in enumerate(spans) if span.chunk == stages.chunk(stage)]
    return rank, own[-1 if way < 0 else 0]


def _in_words(program: Program, each: Done) -> str:
    name, microbatch, number = each
    words = {"recvforward": "message with activations", "recvbackward": "message with gradients"}.get(
        name, name
    )
    span = f" of {program.spans[number].name}" if number >= 0 else ""
    return f"{words}{span}" + f" of microbatch {microbatch}" * (microbatch >= 0)


def _check_regions(program: Program) -> None:
    """Check 5 of `check_program`."""
    for region in program.regions:
        for i in region:
            now = program.instructions[i]
            if now.op in _HOST:
                raise _error(program, i, "runs on the host, inside of a region that one graph holds")
            if now.graph >= 0:
                raise _error(program, i, f"has graph {now.graph}, inside of a region that one graph holds")
    for before, after in pairwise(program.regions):
        if after.start < before.stop:
            raise _error(program, after.start, "is in two regions")


def _check_graphs(program: Program) -> None:
    """Check 4 of `check_program`."""
    flight_of, lane_of = dict[tuple[int, int], int](), dict[int, int]()  # of a span; of a graph
    for i, now in enumerate(program.instructions):
        captured = now.op in KINDS and program.spans[now.span].captured and bool(program.flights)
        if captured != (now.graph >= 0):
            raise _error(program, i, f"has {'no' if captured else 'a'} graph, unlike its span")
        if captured:
            flight = program.flights[now.flight]
            number = flight_of.setdefault((now.microbatch, now.span), now.flight)
            if (now.flight, now.microbatch) != (number, flight.microbatch):
                raise _error(program, i, f"is in the flight of another microbatch, {now.flight}")
            if lane_of.setdefault(now.graph, flight.lane) != flight.lane:
                raise _error(program, i, f"has a graph of another lane, {lane_of[now.graph]}")
    for error in plan_errors(buffer_plan(program)):
        raise ValueError(f"program: rank {program.rank}: {error}")
    read = sorted((buffer, i) for i, now in enumerate(program.instructions) for buffer in now.buffers)
    if read != sorted(lease[:2] for lease in program.leases):
        raise ValueError(f"program: rank {program.rank}: a lease does not begin where its buffer is read")


def _check_messages(programs: Sequence[Program]) -> None:
    """Check 3 of `check_program`: a rank waits in each message until its peer has come to it."""
    rows = [[i for i, now in enumerate(each.instructions) if now.kind] for each in programs]
    at = [0] * len(programs)

    def head(rank: int) -> Instruction | None:
        return programs[rank].instructions[rows[rank][at[rank]]] if at[rank] < len(rows[rank]) else None

    waiting = [*range(len(programs))]
    while waiting:
        rank = waiting.pop()
        own = head(rank)
        other = None if own is None else head(own.peer)
        if own is not None and other is not None and _meet(own, other, rank):
            at[rank] += 1
            at[own.peer] += 1
            waiting += [rank, own.peer]
    for rank, program in enumerate(programs):
        if (own := head(rank)) is not None:
            other = head(own.peer)
            where = "its end" if other is None else in_words(programs[own.peer], other)
            raise _error(program, rows[rank][at[rank]], f"waits for rank {own.peer}, which is at {where}")


def _meet(one: Instruction, other: Instruction, rank: int) -> bool:
    """Return True if two messages are the ends of one, the first of which is on `rank`."""
    ops = {one.op, other.op} == {"send", "recv"}
    return (
        ops
        and other.peer == rank
        and (one.microbatch, one.kind, one.tag) == (other.microbatch, other.kind, other.tag)
    )
