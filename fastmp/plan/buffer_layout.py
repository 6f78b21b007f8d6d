"""`fastmp plan optimizer`: the layout of flat buffers and buckets, and the shards of each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastmp.config import Recipe
from fastmp.optim.flat_layout import Buffer, fill_order
from fastmp.plan.memory import grad_bytes, state_bytes
from fastmp.plan.parameters import rank_buffers, rank_parameters
from fastmp.plan.resources import fitting_recipe, recipe_parser, table
from fastmp.plan.shapes import Shapes, shapes_of


def main(arguments: list[str]) -> int:
    """Print the flat buffers of a recipe; return 0, or 2 with all errors on stderr."""
    parser = recipe_parser(
        "fastmp plan optimizer",
        "Print the flat buffers and buckets of a recipe's parameters, and the shard of each rank.",
    )
    parser.add_argument("--stage", type=int, default=0, metavar="P", help="pipeline rank (%(default)s)")
    options = parser.parse_args(arguments)
    found = fitting_recipe(parser.prog, options)
    if found is None:
        return 2
    if not 0 <= options.stage < found.parallel.pp:
        parser.error(f"--stage {options.stage} is not one of {found.parallel.pp} pipeline ranks")
    facts = optimizer_facts(found, options.world_size, options.stage)
    print(json.dumps(facts) if options.json else "\n".join(describe_optimizer(facts)))
    return 0


def optimizer_facts(recipe: Recipe, world_size: int, stage: int) -> dict[str, Any]:
    """Return the buffers of a rank of pipeline rank `stage`, in JSON-able form; sizes are in bytes."""
    shapes = shapes_of(recipe, world_size)
    buffers, names = rank_buffers(recipe, shapes, stage), list(rank_parameters(recipe, shapes, stage))
    order = fill_order(buffers, names)
    return {
        "layout": str(shapes.grid),
        "stage": stage,
        "optimizer": recipe.optimizer.name,
        "states": recipe.optimizer.states,
        "bytes": {
            "weight": shapes.itemsize,
            "gradient": grad_bytes(recipe, shapes),
            "state": state_bytes(recipe, shapes),
            "matrix_state": state_bytes(recipe, shapes, whole=True),
        },
        "shard": recipe.optimizer.shard,
        "buffers": [_of_buffer(recipe, shapes, buffer) for buffer in buffers],
        "buckets": [{"buffer": i, **asdict(buffers[i].layout.buckets[j])} for i, j in order],
    }


def _of_buffer(recipe: Recipe, shapes: Shapes, buffer: Buffer) -> dict[str, Any]:
    layout, grid = buffer.layout, shapes.grid
    held = sum(end - start for start, end in layout.ranges.values())
    return {
        "of": ("experts" if buffer.experts else "partial sums" if buffer.partial else "all others")
        + (", matrices" if buffer.whole else ", FP8 weights" if buffer.fp8 else ""),
        "dtype": buffer.dtype,
        "parameters": len(layout.ranges),
        "elements": layout.size,
        "padding": layout.size - held,
        "replicas": grid.edp if buffer.experts else grid.dp * grid.cp,
        "ranks": layout.num_ranks,
        "buckets": len(layout.buckets),
        "weights": layout.size * shapes.itemsize,
        "gradients": layout.size * grad_bytes(recipe, shapes),
        "state": layout.size // layout.num_ranks * state_bytes(recipe, shapes, buffer.whole),
        "ranges": {name: list(place) for name, place in layout.ranges.items()},
    }


def describe_optimizer(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    each = facts["bytes"]
    differs = each["matrix_state"] != each["state"]
    of_matrix = f" (in matrices of {facts['optimizer']} {each['matrix_state']})" if differs else ""
    yield facts["layout"]
    yield (
        f"{facts['states']} states: a parameter has {each['weight']} bytes, a gradient {each['gradient']}, "
        f"its state {each['state']}{of_matrix}, divided by the ranks that share it"
    )
    yield ""
    total = sum(buffer["weights"] + buffer["gradients"] + buffer["state"] for buffer in facts["buffers"])
    unit, name_of_unit = (2**30, "GiB") if total >= 2**30 else (2**20, "MiB")
    yield f"buffers of pipeline rank {facts['stage']}, in {name_of_unit} a rank"
    header = ["of", "parameters", "elements", "padding", "ranks", "buckets", "weights", "gradients", "state"]
    rows = [
        [
            *(buffer["of"], str(buffer["parameters"]), f"{buffer['elements']:,}"),
            f"{buffer['padding'] / max(1, buffer['elements']):.2%}",
            *(str(buffer["ranks"]), str(buffer["buckets"])),
            *(f"{buffer[name] / unit:.2f}" for name in ("weights", "gradients", "state")),
        ]
        for buffer in facts["buffers"]
    ]
    yield from table(header, rows)
    yield from _describe_replicas(facts)
    yield ""
    yield "buckets, in the order in which backward fills them"
    rows = [
        [
            str(number),
            facts["buffers"][bucket["buffer"]]["of"],
            f"{bucket['end'] - bucket['start']:,}",
            bucket["names"][0] + (f" ... {bucket['names'][-1]}" if len(bucket["names"]) > 1 else ""),
        ]
        for number, bucket in enumerate(facts["buckets"])
    ]
    yield from _shortened(list(table(["bucket", "of", "elements", "parameters"], rows)))


def _describe_replicas(facts: dict[str, Any]) -> Iterator[str]:
    """Yield why nothing is divided where it is not."""
    for buffer in facts["buffers"]:
        if buffer["replicas"] == 1:
            axis = "edp is 1" if buffer["of"].startswith("experts") else "dp x cp is 1"
            yield f"{buffer['of']}: {axis}: a rank holds the whole state, as no other has these parameters"
        elif not facts["shard"]:
            yield f"{buffer['of']}: optimizer.shard is off: {buffer['replicas']} ranks hold the same state"


def _shortened(lines: list[str]) -> Iterator[str]:
    most = 12
    if len(lines) <= most + 1:
        yield from lines
        return
    yield from lines[:most]
    yield f"  ... {len(lines) - most - 1} more, see --json"
    yield lines[-1]
