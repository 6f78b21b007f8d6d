"""Check the programs of all pipeline ranks: nothing runs before what it needs. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from fastmp.schedule.buffer_plan import plan_errors
from fastmp.schedule.program import KINDS, Instruction, Program, buffer_plan, in_words
from fastmp.schedule.steps import FORWARD

__all__ = ["check_program"]

_TAIL = ("reduce", "sum", "decide", "update", "gather")
_HOST = ("fetch", "decide")
Done = tuple[str, int, int]  # what is done, of which microbatch and span


def check_program(programs: Sequence[Program]) -> None:
    """Check that the programs of all pipeline ranks run together, without conflicts over graph memory.

    1. A microbatch goes through every span: forward once, then backward, or dgrad and later wgrad.
    2. An instruction comes after its neighbouring span of the same microbatch and direction, or its message.
    3. Two ranks have their messages in one order, and all ranks finish, even if a send waits for its recv.
    4. Leases of a buffer do not overlap, a lane holds one flight, and flights of a bundle replay the same
       graphs in the same order, see `plan_errors`.
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
        if (program.rank, program.stages.pp) != (rank, len(programs)):
            raise ValueError(
                f"program: expected the programs of pipeline ranks 0 to {program.stages.pp - 1}, got "
                f"{len(programs)} of ranks {[each.rank for each in programs]}"
            )
        _check_order(program)
        _check_regions(program)
        for error in plan_errors(buffer_plan(program)):
            raise ValueError(f"program: rank {rank}: {error}")
    _check_messages(programs)


def _error(program: Program, i: int, problem: str) -> ValueError:
    what = in_words(program, program.instructions[i])
    return ValueError(f"program: rank {program.rank}, instruction {i}, {what}: {problem}")


def _check_order(program: Program) -> None:
    """Check 1 and 2 of `check_program`, and the end of the step; what a rank receives is taken as sent."""
    done = dict[Done, int]()
    for i, now in enumerate(program.instructions):
        for each in _needed(program, now):
            if each not in done:
                raise _error(program, i, f"needs the {_in_words(program, each)}, which has not run")
        behind = _TAIL[_TAIL.index(now.op) + 1 :] if now.op in _TAIL else () if now.op == "fetch" else _TAIL
        if any((op, -1, -1) in done for op in behind):
            raise _error(program, i, "comes after the end of the step")
        for each in _does(now):
            if each in done:
                raise _error(program, i, f"has run as instruction {done[each]} before")
            done[each] = i
    trains = ("zero", -1, -1) in done
    microbatches = [microbatch for name, microbatch, _ in done if name == "fetch"]
    for number, span in enumerate(program.spans):
        ways = ("forward", "gradient", "wgrad") if trains and span.trained else ("forward",)
        for each in ((way, microbatch, number) for microbatch in microbatches for way in ways):
            if each not in done:
                raise ValueError(f"program: rank {program.rank}: the {_in_words(program, each)} is missing")


def _does(now: Instruction) -> list[Done]:
    """Return what an instruction does; a whole backward makes both gradients."""
    names = {"backward": ("gradient", "wgrad"), "dgrad": ("gradient",)}.get(now.op, (now.op + now.kind,))
    return [(name, now.microbatch, now.span) for name in names]


def _needed(program: Program, now: Instruction) -> Iterator[Done]:
    """Yield the dependencies of an instruction; tensors of another rank arrive as a message."""
    if now.op == "send":
        yield "forward" if now.kind == FORWARD else "gradient", now.microbatch, now.span
    elif now.op == "wgrad":
        yield "gradient", now.microbatch, now.span
    elif now.op in KINDS:
        forward = now.op == "forward"
        if forward:
            yield "fetch", now.microbatch, -1
        else:
            yield "zero", -1, -1
            yield "forward", now.microbatch, now.span
        name = "forward" if forward else "gradient"
        before = _neighbour(program, now.span, -1 if forward else 1)
        if before is not None:
            yield (
                name if before != now.span else f"recv{'forward' if forward else 'backward'}",
                now.microbatch,
                before,
            )


def _neighbour(program: Program, number: int, way: int) -> int | None:
    """Return the span before (way -1) or behind (way 1) a span on this rank.

    None at an end of the model, and the span itself if the neighbour is on another rank.
    """
    spans, stages, rank = program.spans, program.stages, program.rank
    chunk = spans[number].chunk
    other = number + way
    while 0 <= other < len(spans) and spans[other].chunk == chunk:
        if way < 0 or spans[other].trained:  # no gradient comes through a span that is not trained
            return other
        other += way
    stage = stages.stage(rank, chunk) + way
    if not 0 <= stage < len(stages):
        return None
    if stages.rank(stage) != rank:
        return number
    own = [i for i, span in enumerate(spans) if span.chunk == stages.chunk(stage)]
    return own[-1] if way < 0 else own[0]


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
