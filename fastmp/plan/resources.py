"""`fastmp plan recipe`: the layout check, and the memory, FLOPs and traffic of each rank."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from fastmp.config import GPTConfig, ParallelConfig, Recipe
from fastmp.config.command_line import Parser
from fastmp.config.console import to_stderr
from fastmp.config.data_files import expected_vocab_size, is_megatron
from fastmp.config.option_names import SYNONYMS
from fastmp.config.recipe import add_options, given_options, read_recipe
from fastmp.config.sizes import (
    count_parameters,
    flops_per_token,
    head_flops_per_token,
    layer_flops_per_token,
    mtp_parameters,
    projection_flops_per_token,
)
from fastmp.plan import traffic
from fastmp.plan.activations import layer_input, layer_parts
from fastmp.plan.layer_time import not_repeated
from fastmp.plan.layout import make_schedule, other_schedules, problems, schedule_name
from fastmp.plan.memory import memory
from fastmp.plan.parameters import stage_kinds, stage_layers, stage_map
from fastmp.plan.rank_load import MeasuredLoad
from fastmp.plan.shapes import Shapes, shapes_of
from fastmp.plan.stash_size import describe_stash, stash_facts
from fastmp.schedule.simulate import Costs, Simulation, simulate

_ATTENTION_BACKWARD = 2.5  # backward over forward: five GEMMs for two


def main(arguments: list[str]) -> int:
    """Print the memory, FLOPs and traffic of each rank; return 0, or 2 with all errors on stderr."""
    parser = recipe_parser(
        "fastmp plan recipe",
        "Check a recipe against a number of ranks; print the memory, FLOPs and traffic of each.",
    )
    add_load(parser)
    options = parser.parse_args(arguments)
    found = fitting_recipe(parser.prog, options)
    if found is None:
        return 2
    try:
        facts = recipe_facts(found, options.world_size, measured_load(options, found))
    except ValueError as error:
        to_stderr(f"{parser.prog}: {error}")
        return 2
    print(json.dumps(facts) if options.json else "\n".join(describe_recipe(facts)))
    return 0


def recipe_parser(prog: str, description: str) -> Parser:
    """Return a parser that takes a recipe file, a number of ranks, and the options of `fastmp train`."""
    usage = f"{prog} FILE --world-size N [options]"
    example = f"  {prog} configs/mixtral-8x7b.toml --world-size 64 --tp 2"
    parser = Parser(prog=prog, usage=usage, description=f"{description}\n\n{example}", synonyms=SYNONYMS)
    parser.add_argument("file", metavar="FILE", help="TOML file of the run, as in configs/")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--json", action="store_true", help="print the numbers, as JSON")
    add_options(parser, first=("data", "parallelism", "optimizer and precision"))
    return parser


_SIZES = "sizes the activation stash (default: model.moe.activation_stash)"


def add_load(parser: Parser, purpose: str = _SIZES) -> None:
    """Add the option for the metrics of a run; purpose: the use of their load, for its help."""
    parser.add_argument(
        "--load",
        metavar="FILE",
        help=f"metrics.jsonl of a run, whose expert load {purpose}",
    )


def measured_load(options: argparse.Namespace, recipe: Recipe) -> MeasuredLoad | None:
    """Return the load in the file that `options` name; None without one. Raises as `MeasuredLoad.read`."""
    return None if options.load is None else MeasuredLoad.read(options.load, recipe)


def fitting_recipe(prog: str, options: argparse.Namespace) -> Recipe | None:
    """Return the recipe that `options` name, or None with all its errors on stderr."""
    try:
        found, errors, unused = read_recipe(options.file, given_options(options))
    except ValueError as error:
        to_stderr(f"{prog}: {error}")
        return None
    if not found.model.vocab_size:
        size = expected_vocab_size(found.data)
        found = replace(found, model=replace(found.model, vocab_size=size))
        if not size:
            path, tokenizer = found.data.first_path, found.data.tokenizer
            where = (
                f"data.tokenizer {tokenizer}" if path is None or is_megatron(path) else f"data.path {path}"
            )
            errors.append(f"model.vocab_size is not set, and {where} has no vocabulary; set model.vocab_size")
    # Where a parallel size could not be read, nothing can be said about the number of ranks.
    sizes = {"parallel.tp", "parallel.cp", "parallel.pp", "parallel.ep", "parallel.etp"}
    known = options.world_size if unused.isdisjoint(sizes) else None
    errors += [str(each) for each in problems(found, known) if not unused & set(each.fields)]
    if errors:
        lines = errors
        if len(errors) > 1:
            ranks = "" if options.world_size is None else f" on {options.world_size} ranks"
            lines = [f"{len(errors)} problems{ranks}:", *(f"  {each}" for each in errors)]
        to_stderr("\n".join([f"{prog}: recipe {options.file}: {lines[0]}", *lines[1:]]))
    return None if errors else found


def recipe_facts(recipe: Recipe, world_size: int, measured: MeasuredLoad | None = None) -> dict[str, Any]:
    """Return the memory, FLOPs and traffic of each rank of a recipe that fits; sizes are in bytes."""
    model, layout, shapes = recipe.model, recipe.parallel, shapes_of(recipe, world_size)
    tokens = recipe.train.global_batch_size * recipe.data.seq_len
    sources = recipe.data.sources
    whole = sum(weight for weight, _ in sources)
    run = _simulate(recipe, shapes)
    flops, sent = hardware_flops(recipe, shapes), traffic.step(recipe, shapes)
    layer = traffic.layer(shapes, shard_recompute_input=layout.shard_recompute_input)
    layers = stage_layers(recipe)
    ranks = [
        {
            "layers": run.stages.of_rank(layers, rank),
            "peak_in_flight": run.peak_activations[rank],
            **asdict(held),
            "flops": flops[rank],
            "sent": sent[rank],
        }
        for rank, held in enumerate(memory(recipe, shapes, run.orders, measured))
    ]
    count, stash, parts = count_parameters(model), stash_facts(recipe, shapes, measured), layer_parts(shapes)
    if stash is not None:
        parts["moe"] += stash["entry_bytes"]
    return {
        "name": recipe.train.name,
        "layout": str(shapes.grid),
        "dtype": "bfloat16" if recipe.train.dtype == "auto" else recipe.train.dtype,
        "parameters": count.total,
        "active_parameters": count.active,
        "mtp_parameters": mtp_parameters(model).total,
        "tokens_per_step": tokens,
        "sources": {path: float(weight / whole) for weight, path in sources},
        "microbatches": shapes.num_microbatches,
        "hardware_flops": sum(flops) * world_size // shapes.grid.pp,
        "model_flops": tokens
        * flops_per_token(model, recipe.data.seq_len, causal=True, predicted=recipe.data.predicted),
        "recompute": layout.recompute,
        "schedule": layout.schedule,
        "microbatch_group_size": layout.microbatch_group_size,
        "overlap_experts": layout.overlap_experts,
        "chunks": layout.vpp,
        "dense_layers": len(model.dense_layers),
        "bubble": run.bubble,
        "others": _others(recipe, shapes, measured),
        "layer": {
            "activations": parts,
            "input": layer_input(shapes, layout.shard_recompute_input),
            "sent": {
                "forward": _positive(layer.forward),
                "backward": _positive(layer.backward),
                "recomputation": _positive(layer.repeated) if layout.recompute else {},
            },
        },
        "stash": stash,
        "fullest": max(range(len(ranks)), key=lambda rank: ranks[rank]["total"]),
        "ranks": ranks,
    }


def hardware_flops(recipe: Recipe, shapes: Shapes, *, causal: bool = True) -> list[float]:
    """Return the FLOPs of a rank's GEMMs and attention in one step, for each pipeline rank.

    Model FLOPs (`fastmp.config.sizes`) are those that the mathematics asks for. Hardware FLOPs also have the
    scores that fused attention computes again in its backward, the layers that recomputation runs again, and
    the padding of the vocabulary. Attention counts the keys that a token sees. All experts get equally many
    tokens. `causal` as in `flops_per_token`.
    """
    model, grid = recipe.model, shapes.grid
    of_kinds = {kind: _layer_flops(kind, recipe, causal) for kind in set(model.layers)}
    of_stages = [sum(of_kinds[kind] for kind in kinds) for kinds in stage_kinds(recipe)]
    rows = recipe.data.seq_len, shapes.vocab * grid.tp, recipe.data.predicted
    logits_of_all, before = head_flops_per_token(model, *rows)
    output = 3 * (logits_of_all + before * grid.tp)  # which every tensor-parallel rank does
    everywhere = grid.tp * shapes.rows / shapes.tokens  # ranks that project a token
    output += model.mtp_depth * 3 * (logits_of_all + projection_flops_per_token(model) * everywhere)
    tokens = (
        recipe.data.seq_len * recipe.data.micro_batch_size * shapes.num_microbatches / (grid.tp * grid.cp)
    )
    of_stages[-1] += output
    places = stage_map(recipe.parallel)
    return [tokens * sum(places.of_rank(of_stages, rank)) for rank in range(grid.pp)]


def _layer_flops(model: GPTConfig, recipe: Recipe, causal: bool) -> float:
    """Return the FLOPs of a token in a layer of this kind, forward and backward."""
    matrices, attention = layer_flops_per_token(model, recipe.data.seq_len, causal=causal)
    again = matrices + attention - not_repeated(model) if recipe.parallel.recompute else 0.0
    if recipe.parallel.recompute_kv:
        again += 2.0 * sum(each.elements for each in model.attention.projections if each.name == "kv_up")
    return 3 * matrices + (1 + _ATTENTION_BACKWARD) * attention + again


def _others(recipe: Recipe, shapes: Shapes, measured: MeasuredLoad | None) -> list[dict[str, Any]]:
    """Return the bubble and memory of the other schedules, if the recipe's is not the default."""
    layout, found = recipe.parallel, []
    if layout.schedule == ParallelConfig().schedule:
        return []
    for other in other_schedules(layout, shapes.num_microbatches):
        made = replace(recipe, parallel=other)
        run = _simulate(made, shapes)
        found.append(
            {
                "schedule": other.schedule,
                "microbatch_group_size": other.microbatch_group_size,
                "overlap_experts": other.overlap_experts,
                "bubble": run.bubble,
                "peak_in_flight": max(run.peak_activations),
                "total": max(held.total for held in memory(made, shapes, run.orders, measured)),
            }
        )
    return found


def _simulate(recipe: Recipe, shapes: Shapes) -> Simulation:
    """Simulate the schedule with a unit of time for a layer's forward and two for its backward.

    With recomputation the backward takes three. EP communication overlap hides nothing here.
    """
    layout, layers = recipe.parallel, stage_layers(recipe)
    costs = Costs(
        forward=layers,
        backward_input=[number * (2 if layout.recompute else 1) for number in layers],
        backward_weight=layers,
    )
    schedule = make_schedule(layout, shapes.num_microbatches)
    return simulate(schedule.orders(), costs, pairs=schedule.all_pairs(), placement=schedule.placement)


def _positive(sent: Mapping[str, int]) -> dict[str, int]:
    return {group: number for group, number in sent.items() if number}


def describe_recipe(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    yield f"{facts['name']}: {_short(facts['parameters'])} parameters in {facts['dtype']}" + (
        f", {_short(facts['active_parameters'])} of them for one token"
        if facts["active_parameters"] != facts["parameters"]
        else ""
    )
    if facts["mtp_parameters"]:
        yield f"and {_short(facts['mtp_parameters'])} parameters of MTP modules"
    yield facts["layout"]
    done = facts["hardware_flops"] / facts["model_flops"] - 1
    yield (
        f"a step    {facts['tokens_per_step']:,} tokens in {facts['microbatches']} microbatches, "
        f"{facts['model_flops']:.3g} model FLOPs; {done:.0%} more with what is computed again"
    )
    if facts["sources"]:
        yield "data      " + ", ".join(f"{share:.2%} {path}" for path, share in facts["sources"].items())
    if len(facts["ranks"]) > 1:
        chunks = f" of {facts['chunks']} chunks" if facts["chunks"] > 1 else ""
        idle = facts["bubble"] / (1 + facts["bubble"])
        yield (
            f"pipeline  {facts['schedule']}{chunks}, bubble {facts['bubble']:.3g} of the work: ranks idle "
            f"{idle:.1%} of a step, if layers alone take time"
        )
    yield from _describe_others(facts)
    yield ""
    yield from _describe_memory(facts)
    yield ""
    yield from _describe_traffic(facts)


def _describe_others(facts: dict[str, Any]) -> Iterator[str]:
    """Yield a row for the schedule and each other one; nothing without others."""
    if not facts["others"]:
        return
    ranks = facts["ranks"]
    own = {key: facts[key] for key in ("schedule", "bubble")}
    own |= {key: facts[key] for key in ("microbatch_group_size", "overlap_experts")}
    own |= {key: max(rank[key] for rank in ranks) for key in ("peak_in_flight", "total")}
    rows = []
    for each in (own, *facts["others"]):
        name = schedule_name(*(each[key] for key in ("schedule", "overlap_experts", "microbatch_group_size")))
        rows.append(
            [name, f"{each['bubble']:.3g}", f"{each['peak_in_flight']}", f"{each['total'] / 2**30:.2f}"]
        )
    yield from table(["schedule", "bubble", "chunks in flight", "GiB of the fullest rank"], rows)


def _describe_memory(facts: dict[str, Any]) -> Iterator[str]:
    ranks, again = facts["ranks"], facts["recompute"]
    most = max(rank["total"] for rank in ranks)
    unit, name_of_unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    chosen = "recomputed" if again else "kept"
    yield f"memory of a rank in {name_of_unit}; the total has activations {chosen}"
    header = ["pipeline rank", "layers", "parameters", "weights", "gradients", "optimizer"]
    header += ["activations: kept", "recomputed", "loss", "total"]
    rows = []
    for first, last, rank in _runs(ranks):
        parameters = rank["expert_parameters"] + rank["other_parameters"]
        classes = ("weights", "gradients", "optimizer", "activations", "recomputed", "loss", "total")
        rows.append(
            [
                f"{first}" if first == last else f"{first}-{last}",
                "+".join(map(str, rank["layers"])),
                _short(parameters),
                *(f"{rank[name] / unit:.2f}" for name in classes),
            ]
        )
    yield from table(header, rows)
    if exchange := max(rank["exchange"] for rank in ranks):
        yield f"of it {exchange / unit:.2f} {name_of_unit} are memory in which peers leave rows for experts"
    if facts["stash"] is not None:
        yield from describe_stash(facts["stash"])
    parts = facts["layer"]["activations"]
    with_experts = " with experts" if facts["dense_layers"] else ""
    yield (
        f"a layer{with_experts} keeps of a microbatch "
        + ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in parts.items())
        + f"; recomputed, {facts['layer']['input'] / 2**20:.1f} MiB"
    )


def _describe_traffic(facts: dict[str, Any]) -> Iterator[str]:
    directions = facts["layer"]["sent"]
    busiest = max(facts["ranks"], key=lambda rank: sum(rank["sent"].values()))
    if not busiest["sent"]:
        yield "nothing is sent"
        return
    yield "sent by a rank: MiB for a layer and microbatch, GiB in a step by the rank that sends most"
    rows = []
    for group, total in busiest["sent"].items():
        once = [directions[name].get(group, 0) / 2**20 for name in directions]
        rows.append([group, *(f"{sent:.1f}" if sent else "-" for sent in once), f"{total / 2**30:,.2f}"])
    yield from table(["group", *directions, "a step"], rows)


def _runs(ranks: list[dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (first, last, facts) for each range of consecutive ranks with the same output."""
    shown = [{**rank, "sent": None, "flops": None, "peak_in_flight": None} for rank in ranks]
    first = 0
    for last in range(len(ranks)):
        if last + 1 == len(ranks) or shown[last + 1] != shown[first]:
            yield first, last, ranks[first]
            first = last + 1


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield a table's lines: columns under their names, aligned right except the first."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        yield "  " + "  ".join(cells).rstrip()


def _short(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
