"""`fastmp plan time`: an estimate of the time of a step on named GPUs, by phase and by kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastmp.config import ParallelConfig, Recipe
from fastmp.config.console import to_stderr
from fastmp.plan.hardware import GPUS
from fastmp.plan.layer_time import FORWARD, INPUT, REPEATED, WEIGHT
from fastmp.plan.layout import make_schedule, other_schedules, schedule_name
from fastmp.plan.memory import memory
from fastmp.plan.resources import add_load, fitting_recipe, measured_load, recipe_parser, table
from fastmp.plan.shapes import shapes_of
from fastmp.plan.step_time import ONCE, step_time
from fastmp.plan.step_trace import step_trace


def main(arguments: list[str]) -> int:
    """Print the estimated time of a recipe's step; return 0, or 2 with all errors on stderr."""
    parser = recipe_parser(
        "fastmp plan time",
        "Estimate the time of a step on named GPUs in their servers, by phase and by kernel.",
    )
    parser.add_argument("--hardware", choices=GPUS, default="h100", help="GPUs of the servers (%(default)s)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the step of all pipeline ranks, for https://ui.perfetto.dev: streams, kernels, "
        "collectives and memory",
    )
    add_load(parser, "slows a step (default: all experts get equally many tokens)")
    options = parser.parse_args(arguments)
    found = fitting_recipe(parser.prog, options)
    if found is None:
        return 2
    try:
        measured = measured_load(options, found)
        load = 1.0 if measured is None else measured.of_layers
        facts = time_facts(found, options.world_size, options.hardware, load)
        if options.trace is not None:
            trace = step_trace(found, options.world_size, GPUS[options.hardware], load)
            options.trace.write_text(json.dumps(trace) + "\n")
            facts["trace"] = str(options.trace)
    except ValueError as error:
        to_stderr(f"{parser.prog}: {error}")
        return 2
    except OSError as error:
        to_stderr(f"{parser.prog}: {options.trace} cannot be written ({error.strerror})")
        return 2
    print(json.dumps(facts) if options.json else "\n".join(describe_time(facts)))
    return 0


def time_facts(recipe: Recipe, world_size: int, hardware: str, load: float = 1.0) -> dict[str, Any]:
    """Return the estimated step time of a fitting `recipe` on GPUs named `hardware`; seconds and bytes.

    load: rows of the busiest expert-parallel rank over those of a mean one.
    """
    gpu, shapes = GPUS[hardware], shapes_of(recipe, world_size)
    found = step_time(recipe, world_size, gpu, load=load)
    orders = make_schedule(recipe.parallel, shapes.num_microbatches).orders()
    others = []
    if recipe.parallel.schedule != ParallelConfig().schedule:
        for layout in other_schedules(recipe.parallel, shapes.num_microbatches):
            other = step_time(replace(recipe, parallel=layout), world_size, gpu, load=load)
            others.append({"schedule": name_of(layout), "seconds": other.seconds, "bubble": other.bubble})
    parts: dict[str, dict[str, float]] = {}
    for (phase, what), took in found.parts.items():
        parts.setdefault(what, {})[phase] = took
    return {
        "name": recipe.train.name,
        "layout": str(shapes.grid),
        "world_size": world_size,
        "hardware": gpu.name,
        "source": gpu.source,
        "compared": gpu.compared,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "bubble": found.bubble,
        "load": load,
        "schedule": name_of(recipe.parallel),
        "others": others,
        "memory": max(each.total for each in memory(recipe, shapes, orders)),
        "capacity": gpu.capacity,
        "parts": parts,
    }


def name_of(layout: ParallelConfig) -> str:
    """Return the schedule of a layout with its options."""
    return schedule_name(layout.schedule, layout.overlap_experts, layout.microbatch_group_size)


def describe_time(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    tokens, size = facts["tokens_per_second"], facts["world_size"]
    held, capacity = facts["memory"] / 2**30, facts["capacity"] / 2**30
    yield f"{facts['name']} on {size} x {facts['hardware']}: an estimate; nothing of it was measured"
    yield facts["layout"]
    yield _error(facts["compared"])
    yield (
        f"a step    {facts['seconds']:.3g} s: {tokens:,.0f} tokens/s, {tokens / size:,.0f} a GPU; "
        f"model FLOPs at {facts['mfu']:.1%} of the peak (MFU)"
    )
    fits = "fits into" if held < capacity else "does not fit into"
    yield f"memory    {held:.1f} GiB of the fullest rank, as far as it is counted, {fits} {capacity:.1f} GiB"
    if facts["load"] > 1.0:
        yield f"load      {facts['load']:.2f} times the mean on the busiest expert-parallel rank"
    if "trace" in facts:
        yield f"trace     {facts['trace']}: open it in https://ui.perfetto.dev"
    if facts["others"]:
        for label, each in zip(("schedule", *[""] * len(facts["others"])), (facts, *facts["others"])):
            yield f"{label:<10}{each['schedule']}: {each['seconds']:.3g} s, bubble {each['bubble']:.1%}"
    yield ""
    yield "seconds of the pipeline rank that works longest"
    phases = [FORWARD, REPEATED, INPUT, WEIGHT, ONCE]
    rows = []
    for what, own in sorted(facts["parts"].items(), key=lambda part: -sum(part[1].values())):
        cells = [f"{own[phase]:.3f}" if phase in own else "-" for phase in phases]
        whole = sum(own.values())
        rows.append([what, *cells, f"{whole:.3f}", f"{whole / facts['seconds']:.1%}"])
    yield from table(["", *phases, "all", "share"], rows)


def _error(compared: tuple[float, float] | None) -> str:
    """Return the line on the error of estimates against published runs."""
    if compared is None:
        return "error     unknown: compared with no published run on these GPUs"
    least, most = compared
    return (
        f"error     published runs on these GPUs are estimated at {least:.2f} to {most:.2f} times their speed"
    )
