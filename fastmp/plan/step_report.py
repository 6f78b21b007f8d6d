"""`fastmp plan step`: the instructions of a pipeline rank in a training step, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from fastmp.config import Recipe
from fastmp.config.console import to_stderr
from fastmp.plan.layout import make_schedule
from fastmp.plan.parameters import stage_ranges
from fastmp.plan.resources import fitting_recipe, recipe_parser
from fastmp.plan.segments import chain_facts, full_scope_spans, span_specs
from fastmp.plan.shapes import Shapes, shapes_of
from fastmp.schedule.buffer_plan import SpanSpec
from fastmp.schedule.planner import TAIL, make_program
from fastmp.schedule.program import Program, in_words, with_buffers


def main(arguments: list[str]) -> int:
    """Print the step of a rank of a recipe; return 0, or 2 with all errors on stderr."""
    parser = recipe_parser(
        "fastmp plan step",
        "List what a pipeline rank does in a training step, in order: spans of the model, messages, graphs.",
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="pipeline rank (%(default)s)")
    options = parser.parse_args(arguments)
    found = fitting_recipe(parser.prog, options)
    if found is None:
        return 2
    try:
        scope = found.graphs.scope if found.graphs.enabled else ()
        program = step_program(found, shapes_of(found, options.world_size), options.rank, scope)
    except ValueError as error:
        to_stderr(f"{parser.prog}: {error}")
        return 2
    print(json.dumps(step_facts(program)) if options.json else "\n".join(describe_step(program)))
    return 0


def step_program(recipe: Recipe, shapes: Shapes, rank: int, scope: Sequence[str] | None) -> Program:
    """Plan the step of pipeline rank `rank` of a recipe that fits; scope: the segments to capture.

    ValueError for a rank outside the pipeline, or as `fastmp.schedule.scope.captured_segments`.
    """
    grid, schedule = shapes.grid, make_schedule(recipe.parallel, shapes.num_microbatches)
    if not 0 <= rank < grid.pp:
        raise ValueError(f"rank must be in [0, {grid.pp}), the pipeline ranks, got {rank}")
    # Captured spans end where buckets of gradients are reduced.
    reduces = max(grid.dp * grid.cp, 1 if recipe.model.moe is None else grid.edp) > 1
    span_size = recipe.optimizer.bucket_size if reduces else None
    own = schedule.stages.of_rank(_chains(recipe), rank)
    facts = [[chain_facts(shapes, layers, span_size) for layers in chains] for chains in own]
    tail = (*TAIL[:2], *["decide"] * may_be_void(recipe, shapes), *TAIL[2:])
    program = make_program(schedule, rank, facts, scope, tail=tail)
    return with_buffers(program, step_specs(recipe, shapes, program))


def step_specs(recipe: Recipe, shapes: Shapes, program: Program) -> list[SpanSpec]:
    """Return the tensors of the captured spans of a program, in order."""
    found, of_stages = list[SpanSpec](), _chains(recipe)
    for chunk, stage in enumerate(program.stages.stages(program.rank)):
        spans, chains = [span for span in program.spans if span.chunk == chunk], of_stages[stage]
        if any(span.captured and span.segments is None for span in spans):  # scope "full"
            found += chain(*full_scope_spans(shapes, stage, program.stages, chains[0]))
        else:
            found += span_specs(shapes, chain(*chains), spans)
    return found


def _chains(recipe: Recipe) -> list[list[range]]:
    """Return the layers of each chain of each stage; an MTP module has a chain of its own."""
    first, stages = recipe.model.num_layers, [[own] for own in stage_ranges(recipe)]
    stages[-1] += [range(layer, layer + 1) for layer in range(first, first + recipe.model.mtp_depth)]
    return stages


def step_facts(program: Program) -> dict[str, Any]:
    """Return a program as JSON has it; a range is its first number and the one after its last."""
    spans = [each._asdict() for each in program.spans]
    for span in spans:
        span["segments"] = span["segments"] and [span["segments"].start, span["segments"].stop]
    return {
        "rank": program.rank,
        **asdict(program.stages),
        "spans": spans,
        "instructions": [each._asdict() for each in program.instructions],
        "flights": [each._asdict() for each in program.flights],
        "regions": [[region.start, region.stop] for region in program.regions],
        "buffers": [each._asdict() for each in program.buffers],
        "leases": [each._asdict() for each in program.leases],
    }


def describe_step(program: Program) -> Iterator[str]:
    """Yield the lines that a person reads: the sizes, then the instructions."""
    every, graphs = program.instructions, program.num_graphs
    counts = {"instructions": len(every), "spans": len(program.spans), "graphs": graphs}
    counts |= {"buffers": len(program.buffers), "lanes": program.num_lanes}
    sizes = ", ".join(
        f"{number} {name.removesuffix('s') if number == 1 else name}" for name, number in counts.items()
    )
    yield f"rank {program.rank} of pp {program.stages.pp}: {sizes}"
    region_of = {i: number for number, region in enumerate(program.regions) for i in region}
    lines = [in_words(program, now, width=8) for now in every]
    column = 2 + max((len(line) for line, now in zip(lines, every) if now.graph >= 0 or region_of), default=0)
    for i, (now, line) in enumerate(zip(every, lines)):
        note, graph = "", max(now.graph, region_of.get(i, -1))
        if now.flight >= 0:
            note = f"lane {program.flights[now.flight].lane}  "
        if graph >= 0:
            note += f"graph {graph:{len(str(graphs - 1))}}"
        if now.buffers:
            note += f"  buffers {' '.join(map(str, now.buffers))}"
        yield f"{i:{len(str(len(every) - 1))}} {line:{column}}{note}".rstrip()


def may_be_void(recipe: Recipe, shapes: Shapes) -> bool:
    """Return True if the device may find that a step does not count, because rows did not fit."""
    moe = recipe.model.moe
    if moe is None or shapes.exchange is None:
        return False
    return bool(moe.activation_stash and not recipe.parallel.recompute) or moe.symmetric_overflow == "rerun"
