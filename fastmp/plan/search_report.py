"""Report of a search of layouts: arguments, facts and tables of `fastmp plan search`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fastmp.config import DISPATCHERS, GPTConfig, Recipe
from fastmp.config.command_line import Parser, did_you_mean, number
from fastmp.config.data_files import expected_vocab_size
from fastmp.config.option_names import SYNONYMS
from fastmp.config.recipe import add_options, given_options, load_as, load_recipe
from fastmp.config.specs import SCHEDULES
from fastmp.plan.hardware import GPU, GPUS
from fastmp.plan.published_runs import NEAR, nearest_run, residual, run_distance
from fastmp.plan.resources import table
from fastmp.plan.search import SLOWEST, Found, SearchResult, search
from fastmp.plan.space import AXES, GRAPHS, PRECISIONS, RECOMPUTE, STATES, Candidate, Space

FREE = 0.1  # of a GPU's memory, kept free for what the plan does not count
CONFIGS = Path("configs")
# Of a transformers model, which has no recipe: tokens of a sample and of an optimizer step.
DEFAULT_LENGTH, DEFAULT_TOKENS = 4096, 1 << 22
# Options of a recipe that a search chooses: what is given on the command line is kept.
_OPTIONS = {
    **{f"parallel.{axis}": axis for axis in ("tp", "cp", "pp", "ep", "etp", "vpp", "schedule")},
    "parallel.overlap_experts": "overlap",
    "data.micro_batch_size": "micro_batch_size",
    "model.moe.dispatcher": "dispatcher",
    "train.precision": "precision",
}
# What `--why` knows of axes that are no numbers.
_VALUES = {
    "dispatcher": tuple(DISPATCHERS),
    "precision": PRECISIONS,
    "recompute": RECOMPUTE,
    "schedule": tuple(SCHEDULES),
    "overlap": ("false", "true"),
    "graphs": GRAPHS,
    "states": tuple(STATES),
}
# Options of a recipe that no search keeps.
_UNKEPT = (
    "stage_layers",
    "microbatch_group_size",
    "shard_recompute_input",
    "tp_overlap",
    "sequence_parallel",
)


def search_parser(prog: str) -> Parser:
    """Return the parser of the command."""
    example = f"  {prog} qwen3-30b-a3b --gpus 8 --hardware h100 --train.precision dtype"
    about = (
        "Search the fastest layouts of a model on a number of GPUs. Options of `fastmp train` that a search "
        "chooses keep the value given here."
    )
    usage = f"{prog} MODEL --gpus N [options]"
    parser = Parser(prog=prog, usage=usage, description=f"{about}\n\n{example}", synonyms=SYNONYMS)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="TOML file of a run, the name of one in configs/, or a directory with config.json of "
        f"transformers: samples of {DEFAULT_LENGTH:,} tokens, {DEFAULT_TOKENS:,} a step, if options say "
        "nothing else",
    )
    parser.add_argument("--gpus", type=number(int, 1), required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--hardware", choices=GPUS, default="h100", help="GPUs of the servers (%(default)s)")
    parser.add_argument(
        "--memory",
        type=number(float, 0),
        metavar="GIB",
        help=f"memory of a GPU that the plan may fill (default: all but {FREE:.0%}% of it)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=number(int, 1),
        metavar="T",
        help="tokens of an optimizer step (default: those of the recipe)",
    )
    parser.add_argument(
        "--network",
        type=number(float, 0),
        metavar="GB_PER_S",
        help="network bandwidth of a server in one direction, in GB/s (default: that of its maker)",
    )
    parser.add_argument(
        "--ignore",
        metavar="NAME",
        action="append",
        default=[],
        help="ignore this unknown key of config.json; may be repeated",
    )
    parser.add_argument("--why", metavar="AXIS=VALUE", help="say why no best layout has this, as in tp=8")
    parser.add_argument("--out", metavar="FILE", help="write the recipe of the fastest layout")
    parser.add_argument(
        "--check", action="store_true", help="train a step of the fastest layout with tiny widths, on the CPU"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers, as JSON")
    add_options(parser, first=())
    return parser


def space_of(options: argparse.Namespace, model: GPTConfig | None = None) -> Space:
    """Return the space that parsed options name. Raises ValueError with all errors.

    model: of the transformers directory that `options.model` is; None: a recipe.
    """
    given = given_options(options)
    fixed = _fixed(given)
    if model is None:
        path = _recipe_path(options.model)
        neutral = load_recipe(path, given)
    else:
        path = Path(options.model)
        neutral = load_as(Recipe, None, given, **_tables_of(path, model, given))
    neutral = _without_choices(neutral)
    if options.tokens_per_step is not None:
        length = neutral.data.seq_len
        if options.tokens_per_step % length:
            raise ValueError(
                f"--tokens-per-step {options.tokens_per_step} is no multiple of data.seq_len {length}"
            )
        train = replace(neutral.train, global_batch_size=options.tokens_per_step // length)
        neutral = replace(neutral, train=train)
    if not neutral.model.vocab_size:
        size = expected_vocab_size(neutral.data)
        if not size:
            raise ValueError(f"model.vocab_size is not set in {path}, nor known of its data; set it")
        neutral = replace(neutral, model=replace(neutral.model, vocab_size=size))
    gpu = GPUS[options.hardware]
    if options.network is not None:
        gpu = replace(gpu, network=options.network * 1e9 / gpu.per_server)
    space, free = (Space(neutral, options.gpus, gpu, kept) for kept in (fixed, {}))
    for option, kept, possible in (
        ("train.precision", space.precisions(), free.precisions()),
        ("parallel.recompute", space.recomputations(), free.recomputations()),
        ("optimizer.states", space.states(), free.states()),
    ):
        if not kept:
            expected = ", ".join(map(repr, possible))
            raise ValueError(
                f"the options leave no {option} to search: expected one of {expected} on {gpu.name} with "
                f"train.dtype {neutral.train.dtype!r}"
            )
    return space


def _recipe_path(name: str) -> Path:
    """Return the path of a recipe, or of the one in configs/ with this name. Raises ValueError."""
    path = Path(name)
    if path.suffix == ".toml":
        return path
    known = sorted(CONFIGS.glob("*.toml"))
    if (found := CONFIGS / f"{name}.toml") in known:
        return found
    if path.is_dir():
        raise ValueError(
            f"{name}: no config.json in this directory: expected a directory of a transformers model, a TOML "
            f"file, or the name of one in {CONFIGS}"
        )
    hint = did_you_mean(name, [each.stem for each in known])
    expected = ": expected a TOML file, the name of one there, or a directory of a transformers model"
    raise ValueError(f"no recipe {found}{hint or expected}")


def _tables_of(directory: Path, model: GPTConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a recipe for a transformers model, as a TOML file has them."""
    length = given.get("data", {}).get("seq_len") or min(DEFAULT_LENGTH, model.max_seq_len)
    data = {"seq_len": length} | ({} if model.bert is None else {"masked_lm": {}})
    batch = max(1, DEFAULT_TOKENS // length)
    train = {"name": directory.absolute().name, "global_batch_size": batch}
    own = asdict(model, dict_factory=lambda pairs: {key: value for key, value in pairs if value is not None})
    return {"model": json.loads(json.dumps(own)), "data": data, "train": train}


def _without_choices(recipe: Recipe) -> Recipe:
    """Return a recipe whose own layout does not limit the search."""
    layout = type(recipe.parallel)()
    return replace(recipe, parallel=layout, graphs=type(recipe.graphs)())


def _fixed(given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return {axis: values} of the options that are given. Raises ValueError for one that has no axis."""
    found: dict[str, tuple[Any, ...]] = {}
    of_graphs = [f"graphs.{name}" for name in given.get("graphs", {}) if name != "enabled"]
    of_layout = [f"parallel.{name}" for name in given.get("parallel", {}) if name in _UNKEPT]
    for path in (*of_layout, *of_graphs):
        option = path.replace("_", "-")
        raise ValueError(f"a search chooses {path} itself: leave out --{option}")
    for option, axis in _OPTIONS.items():
        value: Any = given
        for name in option.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[axis] = (value,)
    layout, optimizer = given.get("parallel", {}), given.get("optimizer", {})
    kinds = set(RECOMPUTE)
    if "recompute" in layout:
        kinds &= {"full"} if layout["recompute"] else {"none", "kv"}
    if "recompute_kv" in layout:
        kinds &= {"kv"} if layout["recompute_kv"] else {"none", "full"}
    if kinds != set(RECOMPUTE):
        found["recompute"] = tuple(name for name in RECOMPUTE if name in kinds)
    if {"states", "grad_dtype"} & optimizer.keys():
        found["states"] = tuple(
            name
            for name, own in STATES.items()
            if optimizer.get("states", own[0]) == own[0] and optimizer.get("grad_dtype", own[1]) == own[1]
        )
    if "enabled" in given.get("graphs", {}):
        found["graphs"] = ("layers", "full_step") if given["graphs"]["enabled"] else ("none",)
    return found


def memory_limit(options: argparse.Namespace, gpu: GPU) -> float:
    """Return the bytes that the plan of a rank may have."""
    if options.memory is None:
        return (1.0 - FREE) * gpu.capacity
    return float(options.memory) * 2**30


def search_facts(space: Space, limit: float) -> dict[str, Any]:
    """Return the results of a search; seconds and bytes."""
    result = search(space, limit)
    front = {each.candidate for each in result.front}
    tokens = space.recipe.train.global_batch_size * space.recipe.data.seq_len
    return {
        "name": space.recipe.train.name,
        "gpus": space.gpus,
        "hardware": space.gpu.name,
        "source": space.gpu.source,
        "tokens_per_step": tokens,
        "memory_limit": limit,
        "layouts": result.layouts,
        "nodes": result.nodes,
        "estimated": result.estimated,
        "slowest": SLOWEST,
        "best": [_row(each, space, each.candidate in front) for each in result.best],
        "front": [_row(each, space, True) for each in result.front],
        "least_memory": None if math.isinf(result.least_memory) else result.least_memory,
        "rejected": dict(result.rejected.most_common()),
        "nearest": _nearest(space, result),
    }


def _nearest(space: Space, result: SearchResult) -> dict[str, Any] | None:
    """Return the published run that resembles the fastest candidate most; None without a candidate."""
    if not result.best:
        return None
    recipe = space.recipe_of(result.best[0].candidate)
    hardware = next(name for name, gpu in GPUS.items() if gpu.name == space.gpu.name)
    run = nearest_run(recipe, space.gpus, hardware)
    return {
        "name": run.name,
        "factors_of_two": run_distance(run, recipe, space.gpus, hardware),
        "tokens_per_second_per_gpu": run.tokens_per_second,
        "residual": residual(run),
        "source": f"{run.source.name}, {run.source.version}, {run.source.date}",
        "address": run.source.address,
        "note": run.note,
    }


def _row(found: Found, space: Space, in_front: bool) -> dict[str, Any]:
    parts: dict[str, float] = {}
    for (_, what), seconds in found.step.parts.items():
        parts[what] = parts.get(what, 0.0) + seconds
    return {
        **found.candidate.facts(),
        "microbatch_group_size": space.recipe_of(found.candidate).parallel.microbatch_group_size,
        "seconds": found.step.seconds,
        "tokens_per_second_per_gpu": found.step.tokens_per_second / space.gpus,
        "mfu": found.step.mfu,
        "memory": found.memory,
        "front": in_front,
        "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
    }


def describe_search(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    limit = facts["memory_limit"] / 2**30
    yield f"{facts['name']} on {facts['gpus']} x {facts['hardware']}: estimates; nothing of them was measured"
    yield (
        f"{facts['tokens_per_step']:,} tokens a step, at most {limit:.1f} GiB of a GPU; searched "
        f"{facts['layouts']} layouts in {facts['nodes']:,} ways"
    )
    if not facts["best"]:
        yield from _describe_nothing(facts)
        return
    yield ""
    yield "the fastest of each layout; * none is faster with less memory"
    cells = {name: [_cells(row)[name] for row in facts["best"]] for name in _cells(facts["best"][0])}
    shown = {name: own for name, own in cells.items() if len(set(own)) > 1}
    header = ["layout", *shown, "s/step", "tokens/s/GPU", "MFU", "GiB", "takes longest"]
    rows = []
    for place, row in enumerate(facts["best"]):
        rows.append(
            [
                ("* " if row["front"] else "  ") + layout_name(row),
                *(own[place] for own in shown.values()),
                f"{row['seconds']:.3g}",
                f"{row['tokens_per_second_per_gpu']:,.0f}",
                f"{row['mfu']:.1%}",
                f"{row['memory'] / 2**30:.1f}",
                limits(row),
            ]
        )
    yield from table(header, rows)
    same = [f"{name} {own[0]}" for name, own in cells.items() if name not in shown and own[0] != "-"]
    if same:
        yield "all       " + ", ".join(same)
    yield from _describe_nearest(facts["nearest"])
    front = facts["front"]
    ends = " to ".join(f"{own['seconds']:.3g} s with {own['memory'] / 2**30:.1f} GiB" for own in _ends(front))
    yield f"front     {len(front)} of time and memory: {ends}" + ", see --json" * (len(front) > 1)


def _describe_nearest(nearest: Mapping[str, Any]) -> Iterator[str]:
    if nearest["factors_of_two"] > NEAR:
        far = f"{nearest['factors_of_two']:.1f} factors of two away in size, GPUs and precision"
        yield f"nearest   no published run is near: {nearest['name']} is {far}"
        return
    yield (
        f"nearest   {nearest['name']}: published {nearest['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
        f"estimated at {nearest['residual']:.2f} times that"
    )
    yield f"          {nearest['source']}"
    if nearest["note"]:
        yield f"          {nearest['note']}"


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the choices of a row, {column: cell}."""
    schedule = row["schedule"] + f" x{row['vpp']}" * (row["vpp"] > 1) + " overlap" * row["overlap"]
    if row["microbatch_group_size"] is not None:
        schedule += f" in groups of {row['microbatch_group_size']}"
    return {
        "microbatch": str(row["micro_batch_size"]),
        "schedule": schedule,
        "recompute": row["recompute"],
        "dispatcher": row["dispatcher"] if row["ep"] > 1 else "-",
        "precision": row["precision"],
        "states": row["states"],
        "graphs": row["graphs"],
    }


def _ends(front: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [front[0], front[-1]] if len(front) > 1 else front


def _describe_nothing(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "no layout fits:"
    if not facts["layouts"]:
        yield (
            f"  no sizes that the options keep divide {facts['gpus']} GPUs, the heads, the layers and the "
            "experts; change --gpus, or leave out --tp, --cp, --pp, --ep, --etp"
        )
    elif not facts["nodes"]:
        yield (
            f"  a step of {facts['tokens_per_step']:,} tokens is not the same number of samples for each "
            "data-parallel rank; change --gpus, --tokens-per-step or --data.micro-batch-size"
        )
    if facts["least_memory"] is not None:
        yield f"  the least that a rank needs is {facts['least_memory'] / 2**30:.1f} GiB"
    for reason, times in list(facts["rejected"].items())[:5]:
        if reason != "memory":
            yield f"  {times} times: {reason}"


def layout_name(row: Mapping[str, Any]) -> str:
    """Return the axes of a row that are larger than one."""
    axes = [f"{axis}{row[axis]}" for axis in ("tp", "cp", "pp", "ep") if row[axis] > 1]
    if row["etp"] != row["tp"]:  # of dense models they are equal
        axes.append(f"etp{row['etp']}")
    return " ".join(axes) or "dp only"


def limits(row: Mapping[str, Any]) -> str:
    """Return the shares of a step of what takes longest, GEMMs included."""
    parts = [f"{what} {seconds / row['seconds']:.0%}" for what, seconds in list(row["parts"].items())[:2]]
    return ", ".join(parts)


def read_condition(text: str) -> tuple[str, Any]:
    """Return the axis and the value of `--why tp=8`. Raises ValueError."""
    axis, equals, value = text.partition("=")
    axis = axis.strip().replace("-", "_")
    if not equals or axis not in AXES:
        raise ValueError(f"--why: expected AXIS=VALUE with an axis of {', '.join(AXES)}, got {text!r}")
    kinds = {field.name: field.type for field in fields(Candidate)}
    if kinds[axis] == "int":
        if not value.isdecimal():
            raise ValueError(f"--why: expected a number for {axis}, got {value!r}")
        return axis, int(value)
    known = _VALUES[axis]
    if value not in known:
        raise ValueError(f"--why: expected {axis} of {', '.join(map(repr, known))}, got {value!r}")
    return axis, value == "true" if kinds[axis] == "bool" else value


def why(space: Space, limit: float, facts: Mapping[str, Any], condition: tuple[str, Any]) -> Iterator[str]:
    """Yield why the fastest candidate does not meet `condition`, an axis and its value."""
    axis, value = condition
    best = facts["best"]
    if best and best[0][axis] == value:
        yield f"why       the fastest layout has {axis} {value}"
        return
    kept = dict(space.fixed)
    if axis in kept and value not in kept[axis]:
        options = ", ".join(map(str, kept[axis]))
        yield f"why       {axis} {value} contradicts the options given, which keep {options}"
        return
    kept[axis] = (value,)
    result = search(Space(space.recipe, space.gpus, space.gpu, kept), limit)
    yield from _describe_why(result, space, limit, facts, axis, value)


def _describe_why(
    result: SearchResult, space: Space, limit: float, facts: Mapping[str, Any], axis: str, value: Any
) -> Iterator[str]:
    if result.best:
        own = _row(result.best[0], space, False)
        longer = own["seconds"] / facts["best"][0]["seconds"]
        yield (
            f"why       with {axis} {value} the fastest is {layout_name(own)}, {longer:.2f} times as long as "
            "the fastest of all:"
        )
        yield f"          {own['seconds']:.3g} s, {own['memory'] / 2**30:.1f} GiB; {limits(own)}"
        return
    if not result.nodes:
        yield (f"why       {axis} {value} divides nothing here: {_indivisible(space, axis, value)}")
        return
    yield f"why       with {axis} {value} nothing fits: {result.nodes} ways to run {result.layouts} layouts"
    if not math.isinf(result.least_memory):
        yield (
            f"          memory: a rank needs {result.least_memory / 2**30:.1f} GiB or more, of "
            f"{limit / 2**30:.1f}"
        )
    for reason, times in result.rejected.most_common(5):
        if reason != "memory":
            yield f"          {times} times: {reason}"


def _indivisible(space: Space, axis: str, value: Any) -> str:
    """Return what the value of an axis does not divide, as far as the layout check says."""
    from fastmp.plan.layout import problems

    recipe = space.recipe
    if axis in ("tp", "cp", "pp", "ep", "etp", "vpp"):
        layout = replace(recipe.parallel, **{axis: value})
        found = problems(replace(recipe, parallel=layout), space.gpus)
        if found:
            return str(found[0])
    own = {"tp": f"a server has {space.gpu.per_server} GPUs"}
    return own.get(axis, f"the search has no such {axis}")
