"""Every layout of a small GPT, dense and with experts, has the numbers of one rank: see `differences`.

They are drawn, with how each is run (schedule, chunks, recomputation, ...), so that every value of an axis
meets every value of every other axis with which it can go.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import prod
from typing import Any

import pytest
from marks import ON_GPUS, full

import fastmp
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from tools.prove.parity import (
    BATCH,
    CLOSE,
    GPT2,
    LLAMA,
    MIXTRAL,
    SOME_DENSE,
    TIED,
    differences,
    run_whole,
)

Layout = dict[str, Any]

MODELS = {
    "dense": {"gpt2": GPT2, "llama": LLAMA},
    "experts": {"mixtral": MIXTRAL, "tied mixtral": TIED},
}
WORLDS = (2, 4, 6, 8)
DRAWS = 24
AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
OPTIONS = {
    "vpp": (1, 2),
    "schedule": ("1f1b", "zero_bubble"),
    "sequence_parallel": (False, True),
    "recompute": (False, True),
    "uneven": (False, True),
    "group": ("pp", "pp + 1"),
}


def sizes(kind: str, world: int) -> Iterator[Layout]:
    """Every (tp, cp, pp, dp), and (ep, etp), that `world` ranks can have and the models' sizes allow."""
    for tp, cp, pp in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 3, 4, 8)):
        dp, rest = divmod(world, tp * cp * pp)
        if rest or not dp or BATCH % dp:
            continue
        for ep, etp in product((1, 2, 4, 8), (1, 2, 4)) if kind == "experts" else [(1, tp)]:
            if world % (pp * ep * etp) == 0:
                yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}


def fits(layout: Layout) -> bool:
    """Return True if the options have a meaning for the sizes."""
    alone = layout["pp"] == 1 and layout["uneven"]
    without_group = layout["group"] != "pp" and (layout["vpp"] == 1 or layout["pp"] == 1)
    return not (alone or without_group or (layout["sequence_parallel"] and layout["tp"] == 1))


def ways(kind: str, world: int) -> list[list[Layout]]:
    """For all sizes, every way to run them."""
    options = {"config": tuple(MODELS[kind]), **OPTIONS}
    return [
        [
            layout
            for values in product(*options.values())
            if fits(layout := own | dict(zip(options, values, strict=True)))
        ]
        for own in sizes(kind, world)
    ]


def pairs(layout: Layout) -> set[tuple]:
    """Any two axes with their values."""
    return set(combinations(layout.items(), 2))


@cache
def chosen(kind: str, worlds: tuple[int, ...] = WORLDS) -> tuple[Layout, ...]:
    """Layouts that have all possible pairs together: few ranks first, each with pairs not seen before."""
    draw, layouts = random.Random(5), []
    everything = [every for world in worlds for every in ways(kind, world)]
    missing = {pair for every in everything for way in every for pair in pairs(way)}
    least = 16  # new pairs that one must have
    while missing:
        for every in everything:
            drawn = draw.sample(every, min(DRAWS, len(every)))
            best = max(drawn, key=lambda way: len(pairs(way) & missing))
            if len(pairs(best) & missing) >= least:
                layouts.append(best)
                missing -= pairs(best)
        least = max(1, least // 2)
    return tuple(layouts)


def num_ranks(layout: Layout) -> int:
    return layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]


def run_of(kind: str, layout: Layout) -> dict[str, Any]:
    """The arguments of `differences`."""
    pp, vpp = layout["pp"], layout["vpp"]
    config, stages = MODELS[kind][layout["config"]], pp * vpp
    config = replace(config, num_layers=max(config.num_layers, pp))
    group = pp + (layout["group"] != "pp")
    layers = None
    if layout["uneven"] or config.num_layers % stages:  # the first stages have one more
        layers = [config.num_layers // stages + (i < config.num_layers % stages) for i in range(stages)]
        if layout["uneven"]:
            layers = [layers[0] + 1, *layers[1:-1], layers[-1] - 1] if layers[-1] else layers[::-1]
    return {
        "config": config,
        "vpp": vpp,
        "number": max(2, group) * (1 + layout["uneven"]),
        "schedule": layout["schedule"],
        "microbatch_group_size": group,
        "layers": layers,
        "loss_grad": 1.0 if layout["recompute"] else None,
        "sequence_parallel": layout["sequence_parallel"],
        "recompute": layout["recompute"],
    }


def layouts_case(rank: int, world: int, kind: str, layouts: list[Layout]) -> None:
    made: dict[RankGrid, ParallelGroups] = {}
    for layout in layouts:
        grid = RankGrid(world_size=world, **{axis: layout[axis] for axis in AXES})
        groups = made[grid] = made.get(grid) or ParallelGroups.create(grid)
        try:
            found = differences(groups=groups, device=str(fastmp.init().device), **run_of(kind, layout))
        except Exception as error:
            raise AssertionError(f"{layout}") from error
        assert max(found.values()) <= CLOSE, (layout, found)


def run_layouts(kind: str, world: int, layouts: list[Layout], device: str = "cpu") -> None:
    for layout in layouts if device == "cpu" else ():  # here, so that no forked rank has to
        run = run_of(kind, layout)
        run_whole(run["config"], run["number"])
    run_ranks(layouts_case, world, kind, layouts, timeout=240, device=device)


def first_part(kind: str, world: int, rest: bool = False) -> list[Layout]:
    """The layouts of so many ranks; of eight one half, which `rest` leaves out."""
    layouts = [layout for layout in chosen(kind) if num_ranks(layout) == world]
    return layouts[rest::2] if world == 8 else [] if rest else layouts


WORLD = [2, *full([4, 6]), pytest.param(8, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("device", ["cpu", ON_GPUS])
@pytest.mark.parametrize("world", WORLD)
@pytest.mark.parametrize("kind", MODELS)
def test_a_layout_has_the_numbers_of_one_rank(kind, world, device):
    run_layouts(kind, world, first_part(kind, world), device)


SOME_DENSE_LAYOUTS = [  # sizes of the grid, and how it is run
    ({"tp": 2}, {}),
    ({"tp": 2, "cp": 2, "ep": 4, "etp": 1}, {"sequence_parallel": True, "recompute": True}),
    ({"pp": 2, "dp": 2, "ep": 2}, {"layers": (1, 3)}),
    ({"pp": 2, "tp": 2, "ep": 2, "etp": 1}, {"vpp": 2, "schedule": "zero_bubble", "number": 4}),
]


def some_dense_case(rank: int, world: int, sizes: Layout, options: Layout) -> None:
    groups = ParallelGroups.create(RankGrid(world_size=world, **sizes))
    found = differences(SOME_DENSE, groups, **{"vpp": 1, "number": 2} | options)
    assert max(found.values()) <= CLOSE, found


@pytest.mark.parametrize(("sizes", "options"), [*full(SOME_DENSE_LAYOUTS)])
def test_some_layers_are_dense_others_have_experts(sizes, options):
    run_whole(SOME_DENSE, options.get("number", 2))
    world = prod(sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    sizes = {axis: size for axis, size in sizes.items() if axis != "dp"}
    run_ranks(some_dense_case, world, sizes, options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
def test_the_other_half_of_the_layouts_of_eight_ranks(kind):
    run_layouts(kind, 8, first_part(kind, 8, rest=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
def test_sixteen_ranks(kind):
    layouts = chosen(kind, (16,))
    run_layouts(kind, 16, layouts if kind == "dense" else layouts[::3])


def test_layouts_cover_every_pair_of_values():
    assert sum(len(first_part(kind, world)) for kind in MODELS for world in WORLDS) >= 60
    for kind in MODELS:
        possible = {
            pair for world in WORLDS for every in ways(kind, world) for way in every for pair in pairs(way)
        }
        covered = {pair for layout in chosen(kind) for pair in pairs(layout)}
        assert not possible - covered, kind
