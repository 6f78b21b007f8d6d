"""An estimated step as a trace for https://ui.perfetto.dev or chrome://tracing (Chrome's JSON).

A process of the trace is a pipeline rank, whose tensor-, context-, expert- and data-parallel ranks do the
same. Its threads are the steps of the schedule, the compute stream, and the communication of each process
group; a counter has its memory. Slices of category "estimate" add up to the parts of `StepTime` for the rank
that works longest; collectives have the bytes that a rank sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastmp.config import Recipe
from fastmp.plan import traffic
from fastmp.plan.hardware import GPU
from fastmp.plan.layer_time import FORWARD, INPUT, REPEATED, WEIGHT
from fastmp.plan.memory import Memory, held_over_time, memory
from fastmp.plan.parameters import stage_kinds
from fastmp.plan.shapes import Shapes
from fastmp.plan.step_gaps import CATEGORY, Table
from fastmp.plan.step_time import IDLE, IMBALANCE, ONCE, StepModel, hide, step_model
from fastmp.schedule.simulate import Event, Simulation, simulate
from fastmp.schedule.steps import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from fastmp.schedule.steps import FORWARD as FORWARD_STEP

_PHASES = {
    FORWARD_STEP: (FORWARD,),
    BACKWARD: (REPEATED, INPUT, WEIGHT),
    BACKWARD_INPUT: (REPEATED, INPUT),
    BACKWARD_WEIGHT: (WEIGHT,),
}
_COMPUTE = ("GEMMs", "attention", "quantisers", "other kernels", "host", IMBALANCE)  # of the compute stream
_STEPS, _STREAM = 0, 1  # threads; groups follow


def step_trace(recipe: Recipe, world_size: int, gpu: GPU, load: float = 1.0) -> dict[str, Any]:
    """Return the trace of a step of `recipe` on `world_size` GPUs; load: as of `step_time`.

    Raises:
        ValueError: as `step_time`.
    """
    model = step_model(recipe, world_size, gpu, load=load)
    schedule = model.schedule
    run = simulate(schedule.orders(), model.costs, pairs=schedule.all_pairs(), placement=schedule.placement)
    threads, sent = _threads(model), _sent(recipe, model.shapes)
    events: list[dict[str, Any]] = []
    for rank, own in enumerate(memory(recipe, model.shapes, run.orders)):
        events += _names(rank, model.shapes, threads)
        events += _of_rank(model, run, rank, threads, sent)
        events += _memory(recipe, model, run, rank, own)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "fastmp": {
                "name": recipe.train.name,
                "hardware": gpu.name,
                "world_size": world_size,
                "seconds": model.seconds(run.makespan),
                "slowest": model.slowest(run.busy),
            }
        },
    }


def _threads(model: StepModel) -> dict[str, int]:
    """Return {consumer: its thread}; a process group has its own."""
    found = dict.fromkeys(_COMPUTE, _STREAM)
    groups = {what for stage in model.stages for own in stage.of.values() for what in own}
    for number, group in enumerate(sorted(groups - found.keys()), _STREAM + 1):
        found[group] = number
    return found


def _names(rank: int, shapes: Shapes, threads: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    name = f"pipeline rank {rank} ({shapes.grid.world_size // shapes.grid.pp} alike)"
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
    streams = {_STEPS: "schedule", _STREAM: "compute"}
    streams |= {thread: f"communication: {what}" for what, thread in threads.items() if thread > _STREAM}
    for thread, stream in streams.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": rank,
            "tid": thread,
            "args": {"sort_index": thread},
        }


def _of_rank(
    model: StepModel,
    run: Simulation,
    rank: int,
    threads: Mapping[str, int],
    sent: Sequence[Mapping[str, Counter[str]]],
) -> Iterator[dict[str, Any]]:
    """Yield the slices of a rank: steps, what they consist of, idle time, and the end of the step."""
    places = model.schedule.stages
    timeline, ended = iter(run.timeline(rank)), 0.0
    for steps in model.schedule.together(rank):
        together = [next(timeline) for _ in steps]
        start, end = min(event.start for event in together), max(event.end for event in together)
        # 1. The pipeline bubble before these steps.
        yield from _idle(rank, ended, start)
        # 2. The steps, and what they consist of, one after the other.
        table, nbytes = Table(), Counter[tuple[str, str]]()
        for event in together:
            stage = places.stage(rank, event.step.chunk)
            for phase in _PHASES[event.step.kind]:
                for what, took in model.stages[stage].of[phase].items():
                    table[phase, what] = table.get((phase, what), 0.0) + took
                nbytes.update({(phase, group): n for group, n in sent[stage].get(phase, {}).items()})
            yield _slice(_title(event), rank, _STEPS, event.start, event.end, "schedule")
        if len(together) > 1:
            hide(table, model.costs.saved(*(places.stage(rank, step.chunk) for step in steps)))
        yield from _parts(rank, start, table, nbytes, threads, together)
        ended = end
    # 3. The end of the step: the optimizer, exposed gradients and parameters; then other ranks finish.
    yield from _idle(rank, ended, run.makespan)
    at = run.makespan
    for what, took in model.ends[rank].items():
        if took > 0.0:
            yield _slice(what, rank, _STREAM, at, at + took, CATEGORY, phase=ONCE, what=what)
            at += took
    yield from _idle(rank, at, model.seconds(run.makespan))


def _parts(
    rank: int,
    start: float,
    table: Table,
    nbytes: Mapping[tuple[str, str], int],
    threads: Mapping[str, int],
    together: Sequence[Event],
) -> Iterator[dict[str, Any]]:
    at, microbatch = start, together[0].step.microbatch
    for (phase, what), took in table.items():
        if took <= 0.0:
            continue
        args: dict[str, Any] = {"phase": phase, "what": what, "microbatch": microbatch}
        if threads[what] > _STREAM:
            args |= {"group": True, "bytes": nbytes.get((phase, what), 0)}
        yield _slice(what, rank, threads[what], at, at + took, CATEGORY, **args)
        at += took


def _idle(rank: int, start: float, end: float) -> Iterator[dict[str, Any]]:
    if end - start > 1e-12:
        yield _slice(IDLE, rank, _STREAM, start, end, CATEGORY, phase=ONCE, what=IDLE)


def _slice(
    name: str, rank: int, thread: int, start: float, end: float, category: str, **args: Any
) -> dict[str, Any]:
    place = {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": thread}
    return {**place, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


def _title(event: Event) -> str:
    return f"{event.step.kind} of microbatch {event.step.microbatch}, chunk {event.step.chunk}"


def _memory(
    recipe: Recipe, model: StepModel, run: Simulation, rank: int, own: Memory
) -> Iterator[dict[str, Any]]:
    """Yield the counter of a rank's memory: what it always holds, and activations after each step."""
    held = held_over_time(recipe, model.shapes, rank, run.orders[rank])
    always = own.weights + own.gradients + own.optimizer
    for time, activations in zip((0.0, *(event.end for event in run.timeline(rank))), (0, *held)):
        args = {"weights, gradients, optimizer": always, "activations": activations}
        yield {"ph": "C", "name": "memory (bytes)", "pid": rank, "ts": time * 1e6, "args": args}


def _sent(recipe: Recipe, shapes: Shapes) -> list[dict[str, Counter[str]]]:
    """Return the bytes that a rank sends in each stage for a microbatch: {phase: {group: bytes}}."""
    found: list[dict[str, Counter[str]]] = []
    for kinds in stage_kinds(recipe):
        own = {FORWARD: Counter[str](), INPUT: Counter[str](), REPEATED: Counter[str]()}
        for kind in kinds:
            sent = traffic.layer(
                replace(shapes, model=kind), shard_recompute_input=recipe.parallel.shard_recompute_input
            )
            own[FORWARD] += sent.forward
            own[INPUT] += sent.backward
            own[REPEATED] += sent.repeated
        found.append(own)
    embedding, loss = traffic.embedding(shapes), traffic.loss(shapes)
    found[0][FORWARD] += embedding.forward
    found[0][INPUT] += embedding.backward
    found[-1][INPUT] += loss.forward
    return found
