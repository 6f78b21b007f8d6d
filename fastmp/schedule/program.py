"""Program: the step of one pipeline rank as one list of instructions. Standard library only.

A chunk of the model is cut into spans, which run as one: consecutive segments of its layers, captured in one
CUDA graph or eager; the model's own code around its layers; and the loss. A program is the order in which
microbatches go through them, with the messages between ranks and the work of the whole step:

    forward  m0 before the layers
    forward  m0 0.attention to 0.preprocess    lane 0  graph 0  buffers 0
    forward  m0 0.dispatch to 0.combine
    ...
    send     m0 activations to rank 1

An instruction depends on the neighbouring span of its microbatch, or on its message, and on nothing else:
no edges are stored. `fastmp.schedule.planner` makes programs, and `fastmp.schedule.checks` proves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastmp.schedule.buffer_plan import (
    BufferPlan,
    Lease,
    ReplayStep,
    SpanSpec,
    TensorSpec,
    plan_buffers,
)
from fastmp.schedule.lanes import Flight
from fastmp.schedule.stage_map import StageMap
from fastmp.schedule.steps import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step

__all__ = ["KINDS", "LOSS", "Instruction", "Program", "Span", "buffer_plan", "in_words", "with_buffers"]

KINDS = {"forward": FORWARD, "backward": BACKWARD, "dgrad": BACKWARD_INPUT, "wgrad": BACKWARD_WEIGHT}
LOSS = "loss"  # the name of its span
_WORDS = {
    "fetch": "batch",
    "zero": "gradient buffers",
    "reduce": "rest of the buckets, tied embedding",
    "sum": "losses, tokens, counts",
    "decide": "whether the step counts",
    "update": "norm, clip, optimizer, router biases",
    "gather": "parameters that no forward waits for",
}


class Span(NamedTuple):
    """Code of a chunk that runs as one, forward and backward.

    segments: their numbers among those of the chunk's layer chains; None: the model's own code, its loss, or
        a whole chunk.
    stream: "compute", or "exchange" for overlapped communication.
    captured: it is one CUDA graph, or several where lanes or the order of weight gradients differ.
    trained: False: no gradient reaches it, and it has no backward instruction.
    """

    name: str
    chunk: int
    segments: range | None = None
    stream: str = "compute"
    captured: bool = False
    trained: bool = True


class Instruction(NamedTuple):
    """One entry of a program.

    op: forward, backward, dgrad or wgrad of a span; send or recv of a message; fetch of a batch; or zero,
        reduce, sum, decide, update or gather of the whole step. The backward of a loss is whole, but for
        weight gradients that can be deferred: these wait with those of the last stage.
    span: also of a message: the one that makes what is sent, or takes what is received.
    kind: of a message: "forward" for activations, "backward" for gradients.
    peer, tag: of a message: the other pipeline rank, and a number that is unique in the pipeline. The first
        activations of a stage have their shapes and dtypes ahead of them.
    flight, graph: of a captured span: the numbers of its `Flight` and its graph; -1: it runs eagerly.
    buffers: static buffers of its inputs, or of the output gradients of a backward.
    """

    op: str
    microbatch: int = -1
    span: int = -1
    kind: str = ""
    peer: int = -1
    tag: int = -1
    flight: int = -1
    graph: int = -1
    buffers: tuple[int, ...] = ()


class Program(NamedTuple):
    """The instructions of one rank in a step, or in an evaluation.

    regions: runs of instructions that one graph holds (scope "full_step").
    buffers, leases: as planned by `with_buffers`; a lease is from one instruction to another, inclusive.
    """

    rank: int
    stages: StageMap
    spans: tuple[Span, ...]
    instructions: tuple[Instruction, ...]
    flights: tuple[Flight, ...] = ()
    regions: tuple[range, ...] = ()
    buffers: tuple[TensorSpec, ...] = ()
    leases: tuple[Lease, ...] = ()

    @property
    def num_graphs(self) -> int:
        return len(self.regions) + 1 + max((now.graph for now in self.instructions), default=-1)

    @property
    def num_lanes(self) -> int:
        """The most flights at once; 0 without graphs of spans."""
        return 1 + max((flight.lane for flight in self.flights), default=-1)


def with_buffers(program: Program, specs: Sequence[SpanSpec] | None = None) -> Program:
    """Assign graphs, lanes and static buffers to the captured spans of a program from `make_program`.

    specs: the tensors of the captured spans, in order; a span without gradients loses its backwards. None:
        there are no buffers.

    Raises:
        ValueError: another number of specs.
    """
    captured = [number for number, span in enumerate(program.spans) if span.captured]
    if specs is None:
        specs = [SpanSpec(program.spans[number].name, ()) for number in captured]
    if len(specs) != len(captured):
        raise ValueError(f"with_buffers: expected specs of {len(captured)} captured spans, got {len(specs)}")
    if not captured:
        return program
    of_span = dict(zip(captured, specs))
    # Chunks without graphs take no lane, and flights that differ in exchanges alone share their graphs.
    counted = {
        number
        for number, span in enumerate(program.spans)
        if span.captured or (span.segments and span.stream == "compute")
    }
    steps = [
        Step(KINDS[now.op], now.microbatch, now.span)
        for now in program.instructions
        if now.op in KINDS and now.span in counted
    ]
    chunks = [[of_span[number]] if number in of_span else [] for number in range(len(program.spans))]
    plan = plan_buffers(steps, chunks)
    replays, out, places = iter(plan.replays), list[Instruction](), list[int]()
    for now in program.instructions:
        if now.op in KINDS and now.span in of_span:
            if now.op != "forward" and of_span[now.span].gradients is None:
                continue
            replay = next(replays)
            places.append(len(out))
            now = now._replace(flight=replay.flight, graph=replay.graph, buffers=replay.buffers)
        out.append(now)
    spans = [
        span._replace(
            trained=span.trained and (number not in of_span or of_span[number].gradients is not None)
        )
        for number, span in enumerate(program.spans)
    ]
    return program._replace(
        spans=tuple(spans),
        instructions=tuple(out),
        flights=plan.flights,
        buffers=plan.buffers,
        leases=tuple(Lease(each.buffer, places[each.first], places[each.last]) for each in plan.leases),
    )


def buffer_plan(program: Program) -> BufferPlan:
    """Return the graphs and buffers of a program as a plan of its captured instructions."""
    places = [i for i, now in enumerate(program.instructions) if now.graph >= 0]
    captured = [program.instructions[i] for i in places]
    number = {place: i for i, place in enumerate(places)}
    chunks: list[list[SpanSpec]] = [[] for _ in range(program.stages.vpp)]
    in_chunk = list[int]()  # of each span: its number among those of its chunk
    for span in program.spans:
        in_chunk.append(len(chunks[span.chunk]))
        chunks[span.chunk].append(SpanSpec(span.name, ()))
    replays = (
        ReplayStep(
            Step(KINDS[now.op], now.microbatch, program.spans[now.span].chunk),
            in_chunk[now.span],
            *(now.buffers, now.graph, now.flight),
        )
        for now in captured
    )
    return BufferPlan(
        tuple(map(tuple, chunks)),
        program.buffers,
        tuple(replays),
        tuple(Lease(buffer, number[first], number[last]) for buffer, first, last in program.leases),
        program.flights,
    )


def in_words(program: Program, now: Instruction, width: int = 0) -> str:
    """Describe an instruction; width: of its op."""
    if now.kind:
        what = "activations" if now.kind == FORWARD else "gradients"
        text = f"{what} {'to' if now.op == 'send' else 'from'} rank {now.peer}"
    elif now.span < 0:
        text = _WORDS[now.op]
    else:
        text = program.spans[now.span].name
    return " ".join([f"{now.op:{width}}", *[f"m{now.microbatch}"] * (now.microbatch >= 0), text])
