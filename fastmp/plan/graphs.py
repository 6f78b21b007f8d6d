"""`fastmp plan graphs`: the CUDA graphs of a recipe and their static buffers, before anything is captured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastmp.config import Recipe
from fastmp.config.console import to_stderr
from fastmp.plan.layout import make_schedule
from fastmp.plan.pipeline_time import shorter
from fastmp.plan.rank_load import MeasuredLoad
from fastmp.plan.resources import add_load, fitting_recipe, measured_load, recipe_parser, table
from fastmp.plan.segments import all_segments, exchange_segments, segments, step_inputs, update_inputs
from fastmp.plan.shapes import Shapes, shapes_of
from fastmp.plan.stash_size import describe_stash, stash_facts
from fastmp.plan.step_report import may_be_void, step_program
from fastmp.schedule.scope import captured_segments


def main(arguments: list[str]) -> int:
    """Print the CUDA graphs of a recipe; return 0, or 2 with all errors on stderr."""
    parser = recipe_parser(
        "fastmp plan graphs",
        "List the CUDA graphs and static buffers of each pipeline rank, before anything is captured.",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw two layers and their graphs: png, svg or pdf")
    add_load(parser)
    options = parser.parse_args(arguments)
    found = fitting_recipe(parser.prog, options)
    if found is None:
        return 2
    try:
        facts = graph_facts(found, options.world_size, measured_load(options, found))
        if options.plot:
            _plot(facts, options.plot)
    except (ValueError, OSError) as error:
        to_stderr(f"{parser.prog}: {error}")
        return 2
    except ImportError:
        what = "no picture: matplotlib is missing (pip install matplotlib)"
        to_stderr(f"{parser.prog}: {what}")
        return 2
    print(json.dumps(facts) if options.json else "\n".join(describe_graphs(facts)))
    return 0


def _plot(facts: dict[str, Any], out: str) -> None:
    from fastmp.plan.graphs_plot import draw

    of_layer = {name: name in facts["captured"] for name in facts["layer"]}
    ends = {span.rpartition(" to ")[2] for chunk in facts["ranks"][0]["spans"] for span in chunk}
    draw(of_layer, range(2), out, ends=ends, title=f"{facts['name']}: two layers of a microbatch")


def graph_facts(recipe: Recipe, world_size: int, measured: MeasuredLoad | None = None) -> dict[str, Any]:
    """Plan the graphs of each pipeline rank of a recipe that fits; sizes are in bytes.

    ValueError as `fastmp.schedule.scope.captured_segments`.
    """
    layout, scope, shapes = recipe.parallel, recipe.graphs.scope, shapes_of(recipe, world_size)
    whole_step, whole = "full_step" in (scope or ()), bool({"full", "full_step"} & {*(scope or ())})
    if whole_step:
        ranks = [_of_whole_step(recipe, shapes)] * layout.pp
    else:
        ranks = [_of_rank(recipe, shapes, rank) for rank in range(layout.pp)]
    able = all_segments(shapes)
    apart = exchange_segments(shapes) if layout.overlap_experts and not whole_step else []
    captured = captured_segments(scope, able, apart)
    behind = ["loss"] * whole + ["sums over ranks", "optimizer"] * whole_step
    return {
        "name": recipe.train.name,
        "layout": str(shapes.grid),
        "schedule": layout.schedule,
        "microbatches": shapes.num_microbatches,
        "segments": list(able),
        "layer": [segment.name for segment in segments(shapes)],
        "captured": ["embedding"] * whole + [name for name in able if name in captured] + behind,
        "exchange_bytes": 0 if shapes.exchange is None else shapes.exchange.nbytes,
        "stash": stash_facts(recipe, shapes, measured),
        "eager": [name for name, can in able.items() if not can and name not in apart],
        "beside": [
            name
            for name, can in able.items()
            if can and scope is None and name not in captured and name not in apart
        ],
        "apart": apart,
        "ranks": ranks,
    }


def bytes_beside_activations(recipe: Recipe, shapes: Shapes) -> list[int]:
    """Return the bytes of the static buffers of each pipeline rank that hold no activation.

    They are gradients, or under scope "full_step" the inputs of a step; none without graphs. Other static
    inputs are tensors that layers keep until their backward, which `fastmp.plan.memory` counts.
    """
    layout = recipe.parallel
    if not recipe.graphs.enabled:
        return [0] * layout.pp
    if "full_step" in (recipe.graphs.scope or ()):
        return [_of_whole_step(recipe, shapes)["input_bytes"]] * layout.pp
    few = shorter(make_schedule(layout, shapes.num_microbatches)).num_microbatches  # holds as much at once
    shapes = replace(shapes, num_microbatches=few)
    return [_of_rank(recipe, shapes, rank)["gradient_bytes"] for rank in range(layout.pp)]


def _of_whole_step(recipe: Recipe, shapes: Shapes) -> dict[str, Any]:
    """Plan the full-iteration graph of a rank under scope "full_step"; two graphs if a step may be void."""
    inputs, spans, moe = step_inputs(shapes), ["whole step"], recipe.model.moe
    if moe is not None and may_be_void(recipe, shapes):
        layers = recipe.model.num_layers - len(recipe.model.dense_layers)
        inputs += update_inputs(layers, moe.num_experts, recipe.parallel.pp, recipe.parallel.ep)
        spans = ["step up to its sums", "update"]
    return {
        "spans": [spans],
        "in_flight": 1,
        "lanes": 1,
        "graphs": len(spans),
        "replays": len(spans),
        "inputs": len(inputs),
        "input_bytes": sum(spec.nbytes for spec in inputs),
        "gradients": 0,
        "gradient_bytes": 0,
    }


def _of_rank(recipe: Recipe, shapes: Shapes, rank: int) -> dict[str, Any]:
    """Count the graphs of a pipeline rank, where spans are captured one by one, and their buffers."""
    program = step_program(recipe, shapes, rank, recipe.graphs.scope)
    replays = [now for now in program.instructions if now.graph >= 0]
    inputs = {buffer for now in replays if now.op == "forward" for buffer in now.buffers}
    sizes = [spec.nbytes for spec in program.buffers]
    input_bytes = sum(sizes[buffer] for buffer in inputs)
    return {
        "spans": [
            [span.name for span in program.spans if span.captured and span.chunk == chunk]
            for chunk in range(program.stages.vpp)
        ],
        "in_flight": make_schedule(recipe.parallel, shapes.num_microbatches).peak_in_flight(rank),
        "lanes": program.num_lanes,
        "graphs": program.num_graphs,
        "replays": len(replays),
        "inputs": len(inputs),
        "input_bytes": input_bytes,
        "gradients": len(sizes) - len(inputs),
        "gradient_bytes": sum(sizes) - input_bytes,
    }


def describe_graphs(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the report's lines."""
    yield facts["layout"]
    yield f"{facts['name']}: {facts['schedule']}, {facts['microbatches']} microbatches"
    yield f"captured  {', '.join(facts['captured']) or 'nothing'}"
    if facts["beside"]:
        yield f"eager     {', '.join(facts['beside'])}: beside the exchange of tokens"
    if facts["apart"]:
        yield f"eager     {', '.join(facts['apart'])}: beside the compute of another microbatch"
    if facts["eager"]:
        yield f"eager     {', '.join(facts['eager'])}: sizes of what other ranks send are known at run time"
    if facts["exchange_bytes"]:
        size = f"{facts['exchange_bytes'] / 2**20:,.1f} MiB"
        yield f"exchange  {size} of a rank, in which its peers leave rows for its experts, beside the graphs"
    if facts["stash"] is not None:
        yield from describe_stash(facts["stash"])
    yield ""
    header = ["pipeline rank", "spans", "lanes", "graphs", "replays", "inputs", "MiB", "gradients", "MiB"]
    rows = []
    for rank, own in enumerate(facts["ranks"]):
        spans = "+".join(str(len(chunk)) for chunk in own["spans"])
        counts = [str(own[name]) for name in ("lanes", "graphs", "replays", "inputs")]
        inputs, gradients = (f"{own[name] / 2**20:,.1f}" for name in ("input_bytes", "gradient_bytes"))
        rows.append([str(rank), spans, *counts, inputs, str(own["gradients"]), gradients])
    yield from table(header, rows)
