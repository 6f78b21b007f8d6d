"""Plan the program of a pipeline rank: cut its chunks, and unroll its schedule. Standard library only."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from fastmp.schedule.messages import RankProgram, forward_orders, rank_programs
from fastmp.schedule.program import KINDS, LOSS, Instruction, Program, Span
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.scope import span_kinds
from fastmp.schedule.stage_map import StageMap
from fastmp.schedule.steps import BACKWARD_WEIGHT, FORWARD, Step, together
from fastmp.schedule.stream_schedule import (
    SegmentCost,
    SegmentFacts,
    kind_of,
    partition_segments,
    step_launches,
)

__all__ = ["TAIL", "make_program", "program_of"]

TAIL = ("reduce", "sum", "update", "gather")
_BEFORE, _BETWEEN, _BEHIND = "before the layers", "between the layers", "behind the layers"
_OPS = {kind: op for op, kind in KINDS.items()}
_LAYERS = SegmentCost("layers")  # in launch order without overlap, where costs do not matter


def make_program(
    schedule: Schedule,
    rank: int,
    facts: Sequence[Sequence[Sequence[SegmentFacts]]],
    scope: Sequence[str] | None = (),
    *,
    tail: Sequence[str] = TAIL,
    forward_only: bool = False,
) -> Program:
    """Plan the step of a pipeline rank; ranks with equal arguments agree on all programs.

    `with_buffers` gives its captured spans graphs. Until then they run eagerly, as in a warm-up step.

    If the schedule overlaps microbatches, layers are cut at their exchanges as well: those of the first chain
    of a chunk. A chunk of which nothing is captured or overlapped is one span. A model of one stage is called
    by its loss.

    Args:
        facts: the segments of each chunk of this rank: those of each layer chain in it, in order.
        scope: the segments to capture, as in `captured_segments`; None: all that can be, (): none.
        tail: the instructions after the last backward; "decide" comes before "update".
        forward_only: an evaluation, without gradients and graphs.

    Raises:
        ValueError: another number of chunks, or as `captured_segments`.

    Example:
        >>> facts = [[[SegmentFacts("0.attention"), SegmentFacts("0.mlp")]]]
        >>> [now.op for now in make_program(Schedule(1, 1), 0, facts).instructions]
        ['zero', 'fetch', 'forward', 'backward', 'reduce', 'sum', 'update', 'gather']
    """
    if len(facts) != schedule.vpp:
        raise ValueError(f"make_program: expected facts of {schedule.vpp} chunks, got {len(facts)}")
    stages, overlap = schedule.stages, schedule.overlap and not forward_only
    program = program_of(
        _messages(schedule, forward_only)[rank],
        stages,
        rank,
        facts,
        () if forward_only else scope,
        pairs=schedule.pairs(rank) if overlap else (),
        overlap=overlap,
        whole=len(stages) == 1,
    )
    if forward_only:
        return program
    whole_step = "full_step" in (scope or ())
    # Add the work of the whole step. A batch is fetched ahead of everything that one graph holds.
    ahead, rest = list[Instruction](), list[Instruction]()
    for now in program.instructions:
        (ahead if whole_step and now.op == "fetch" else rest).append(now)
    every = (*ahead, Instruction("zero"), *rest, *map(Instruction, tail))
    cuts = [len(ahead) - 1, *(i for i, now in enumerate(every) if now.op == "decide"), len(every)]
    regions = [range(before + 1, after) for before, after in pairwise(cuts)] if whole_step else []
    return program._replace(instructions=every, regions=tuple(regions))


def program_of(
    given: RankProgram,
    stages: StageMap,
    rank: int,
    facts: Sequence[Sequence[Sequence[SegmentFacts]]],
    scope: Sequence[str] | None = (),
    *,
    pairs: Container[int] = (),
    overlap: bool = False,
    whole: bool = False,
) -> Program:
    """Plan the forwards and backwards of a rank, with its messages: what `fastmp.pipeline.Pipeline` runs.

    Args:
        given: the steps and messages of the rank.
        facts, scope: as in `make_program`.
        pairs: positions of forwards that overlap the next step; overlap: cut the layers at their exchanges.
        whole: the loss calls the only stage itself, so that both are one span if nothing is cut.
    """
    # 1. Cut the chunks into spans.
    spans, chunks = list[Span](), list[_Chunk]()
    for chunk, stage in enumerate(stages.stages(rank)):
        chunks.append(_cut(spans, chunk, facts[chunk], scope, overlap, stage, stages, whole))
    # 2. Unroll the schedule over them. Messages stand where all ranks agree to post them, and a batch is
    #    fetched right before its first use.
    groups = [*together(given.steps, pairs)]
    out, fetched, at = list[Instruction](), set[int](), 0
    for group, layers in zip(groups, _launches(groups, chunks, overlap), strict=True):
        out += _posted(given, at, rank, stages, chunks)
        new = {step.microbatch for step in group} - fetched
        out += (Instruction("fetch", microbatch) for microbatch in new)
        fetched |= new
        out += _unrolled(group, layers, chunks, spans)
        at += len(group)
    out += _posted(given, at, rank, stages, chunks)
    return Program(rank, stages, tuple(spans), tuple(out))


class _Chunk(NamedTuple):
    """The spans of a chunk by number: the one before its layers; its layers; the code behind, and the loss.

    A chunk that is not cut has neither of the first two: its only code overlaps nothing.

    ops: runs of layer spans on one stream, with their costs; a single run without overlap.
    """

    before: range
    ops: list[range]
    costs: list[SegmentCost]
    behind: range

    @property
    def ends(self) -> tuple[int, int]:
        """Numbers of the span that receives activations, and of the one that sends them."""
        return (self.before or self.behind)[0], self.behind[-1]


@lru_cache(maxsize=8)
def _messages(schedule: Schedule, forward_only: bool) -> list[RankProgram]:
    stages = schedule.stages
    orders = forward_orders(stages, schedule.num_microbatches) if forward_only else schedule.orders()
    pairs = () if forward_only else schedule.all_pairs()
    return rank_programs(orders, forward_only=forward_only, pairs=pairs, placement=stages.placement)


def _cut(
    spans: list[Span],
    chunk: int,
    chains: Sequence[Sequence[SegmentFacts]],
    scope: Sequence[str] | None,
    overlap: bool,
    stage: int,
    stages: StageMap,
    whole: bool,
) -> _Chunk:
    """Append the spans of a chunk, which is stage number `stage`, to `spans`; whole: as in `program_of`."""
    layers = _layer_ops(chunk, chains[:1] if overlap else chains, scope, overlap)
    full, joined = "full" in (scope or ()) and not overlap, f" and {LOSS}" * whole
    title = f" of chunk {chunk}" * (stages.vpp > 1)
    first, ops = len(spans), list[range]()
    if layers:
        # 1. Code before the layers, the layers, and the code behind them.
        spans.append(Span(_BEFORE + title, chunk))
        for _, own in layers:
            ops.append(range(len(spans), len(spans) + len(own)))
            spans += own
        behind = len(spans)
        spans.append(Span(_BEHIND + title + joined, chunk))
        ops = ops if overlap else [range(ops[0].start, behind)]
    else:
        # 2. Or the whole chunk. Under scope "full" a stage without layers, which returns what it gets, has no
        #    graph.
        behind = first
        spans.append(Span(f"chunk {chunk}{joined}", chunk, captured=full and (stage == 0 or any(chains))))
    if stage == stages.last and not whole:
        spans.append(Span(LOSS, chunk, captured=full))
    before = range(first, first + bool(layers))
    return _Chunk(before, ops, [cost for cost, _ in layers], range(behind, len(spans)))


def _layer_ops(
    chunk: int, chains: Sequence[Sequence[SegmentFacts]], scope: Sequence[str] | None, overlap: bool
) -> list[tuple[SegmentCost, list[Span]]]:
    """Return the spans of each op of a chunk's layers; none if they are not cut."""
    found, start = list[tuple[SegmentCost, list[Span]]](), 0
    for chain in chains:
        kinds = _kinds(chain, scope, overlap)
        if (chain and overlap) or any(captured for captured, _ in kinds):
            if found:
                found.append((_LAYERS, [Span(_BETWEEN, chunk)]))
            for places, cost in partition_segments(chain) if overlap else [(range(len(chain)), _LAYERS)]:
                own = list[Span]()
                for (captured, _), group in groupby(places, kinds.__getitem__):
                    first, *_, last = [*group] * 2
                    name, end = chain[first].name, chain[last].name
                    segments = range(start + first, start + last + 1)
                    stream = "exchange" if cost.exchange else "compute"
                    name = name if first == last else f"{name} to {end}"
                    own.append(Span(name, chunk, segments, stream, captured))
                found.append((cost, own))
        start += len(chain)
    return found


def _kinds(
    chain: Sequence[SegmentFacts], scope: Sequence[str] | None, overlap: bool
) -> list[tuple[bool, int]]:
    """Return `span_kinds` of a chain; none is captured apart if a graph holds the whole chunk or step."""
    none, names = [(False, -1)] * len(chain), {*(scope or ())}
    if scope is not None and not names:
        return none
    kinds = span_kinds(chain, scope, overlap=overlap and "full_step" not in names)
    return none if "full_step" in names or ("full" in names and not overlap) else kinds


def _launches(
    groups: Sequence[Sequence[Step]], chunks: Sequence[_Chunk], overlap: bool
) -> Iterator[list[tuple[Step, str, range]]]:
    """Yield (step, kind, spans) of each op of the layers, for each group of concurrent steps."""
    if not overlap:
        yield from ([(step, step.kind, own) for own in chunks[step.chunk].ops] for (step,) in groups)
        return
    for launches in step_launches(groups, [chunk.costs for chunk in chunks]):
        yield [(step, kind_of(step, op), chunks[step.chunk].ops[op.first]) for step, op in launches]


def _unrolled(
    group: Sequence[Step],
    layers: Sequence[tuple[Step, str, range]],
    chunks: Sequence[_Chunk],
    spans: Sequence[Span],
) -> Iterator[Instruction]:
    """Yield the instructions of a step, or of a forward and the backward that it overlaps."""
    forwards = [step for step in group if step.kind == FORWARD]
    backwards = [step for step in group if step.kind != FORWARD]
    # 1. Code around the layers overlaps nothing. The backward comes first, and ends before the forward has
    #    left its layers: a loss of that forward adds to the same gradients.
    runs = [(step, step.kind, chunks[step.chunk].behind) for step in backwards]
    runs += [(step, FORWARD, chunks[step.chunk].before) for step in forwards]
    runs += layers
    runs += [(step, step.kind, chunks[step.chunk].before) for step in backwards]
    runs += [(step, FORWARD, chunks[step.chunk].behind) for step in forwards]
    # 2. Spans go forward in order, backward in reverse.
    for step, kind, numbers in runs:
        for number in numbers if kind == FORWARD else reversed(numbers):
            loss_alone = spans[number].name == LOSS and kind != FORWARD  # its backward is not split
            if not (loss_alone and kind == BACKWARD_WEIGHT):
                yield Instruction("backward" if loss_alone else _OPS[kind], step.microbatch, number)


def _posted(
    given: RankProgram, at: int, rank: int, stages: StageMap, chunks: Sequence[_Chunk]
) -> Iterator[Instruction]:
    """Yield the messages before step number `at`, with the spans that make or take them."""
    for each in given.posts[at]:
        forward, sends = each.kind == FORWARD, each.source == rank
        chunk = chunks[stages.chunk(each.stage if sends else each.stage + (1 if forward else -1))]
        span = chunk.ends[forward == sends]
        op, peer = ("send", each.target) if sends else ("recv", each.source)
        yield Instruction(op, each.microbatch, span, each.kind, peer, given.tags[each])
