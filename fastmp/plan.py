"""`fastmp plan`: what a layout means, before a single process starts. Never imports torch.

fastmp plan groups --world-size 16 --tp 4                           which ranks form which groups
fastmp plan recipe configs/mixtral-8x7b.toml --world-size 64        what a rank of a recipe would hold
fastmp plan schedule --pp 4 --vpp 2 --num-microbatches 8            what pipeline ranks do in which order
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from fastmp.config import Recipe
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.schedule import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SCHEDULES,
    Step,
    integers,
    orders,
    warmup,
)
from fastmp.parallel.simulate import Costs, Simulation, simulate
from fastmp.sizes import count_parameters, flops_per_token, pad_vocab
from fastmp.train.recipe import load_recipe

DENSE = ("tp", "cp", "dp", "pp", "mp", "embedding")
EXPERT = ("etp", "ep", "edp", "pp")
_LINE_WIDTH, _MAX_RUNS = 80, 8  # longer lists are shortened for people, never in JSON
_MOST_RANKS, _MOST_STEPS = 32, 128


class _Parser(argparse.ArgumentParser):
    """argparse, with mistakes as one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fastmp plan groups`; their names are those of `RankGrid`."""
    parser.add_argument(
        "--world-size", "--world_size", type=int, required=True, metavar="N", help="number of ranks"
    )
    for name, text in [
        ("tp", "tensor-parallel size"),
        ("cp", "context-parallel size"),
        ("pp", "pipeline stages"),
        ("ep", "expert-parallel size"),
    ]:
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=text)
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel size (default: what is left)")
    parser.add_argument(
        "--etp", type=int, metavar="N", help="tensor-parallel size inside an expert (default: tp)"
    )
    parser.add_argument(
        "--order", default="tp-cp-ep-dp-pp", help="axes, fastest first (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="every group, as JSON")


def groups(grid: RankGrid) -> dict[str, dict[str, list[list[int]]]]:
    """All groups of both grids: {"dense": {"tp": [[...]], ...}, "expert": {"etp": ..., ...}}."""
    return {
        "dense": {name: grid.ranks(name) for name in DENSE},
        "expert": {name: grid.ranks(name) for name in EXPERT},
    }


def describe(grid: RankGrid) -> Iterator[str]:
    """The lines a person reads; long lists are shortened and say how many groups there are."""
    yield f"{grid}"
    yield f"order {'-'.join(grid.order)}: {grid.order[0]} varies fastest"
    for title, table in groups(grid).items():
        yield f"\n{title}"
        for name, lists in table.items():
            shown = "every rank alone" if len(lists[0]) == 1 else _shorten(lists)
            yield f"  {name:<9}  {f'{len(lists)} x {len(lists[0])}':<9}  {shown}"


def _shorten(lists: list[list[int]]) -> str:
    """As many groups as fit on a line, and the last one."""
    text = _members(lists[0])
    for i, group in enumerate(lists[1:], start=1):
        member_text = _members(group)
        if len(text) + len(member_text) > _LINE_WIDTH:
            return f"{text} ... {_members(lists[-1])}" if i < len(lists) - 1 else f"{text} {member_text}"
        text += f" {member_text}"
    return text


def _members(group: list[int]) -> str:
    """[0-3,8-11]: runs of neighbouring ranks, with the middle of a long group left out."""
    runs: list[list[int]] = []
    for rank in group:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    texts = [("," if len(run) == 2 and run[1] == run[0] + 1 else "-").join(map(str, run)) for run in runs]
    if len(texts) > _MAX_RUNS:
        texts = [*texts[:4], "...", texts[-1]]
    return f"[{','.join(texts)}]"


def recipe_facts(recipe: Recipe, world_size: int) -> dict[str, int | float | str]:
    """What `recipe` is on `world_size` ranks. ValueError where the layout does not divide it."""
    model, layout, data = recipe.model, recipe.parallel, recipe.data
    grid = RankGrid(world_size=world_size, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    _check_divisions(recipe, grid)
    samples = data.micro_batch_size * grid.dp
    if recipe.train.global_batch_size % samples:
        raise ValueError(
            f"train.global_batch_size {recipe.train.global_batch_size} is not divisible by "
            f"data.micro_batch_size {data.micro_batch_size} x {grid.dp} data-parallel ranks"
        )
    count = count_parameters(model)
    experts, others = count_parameters(model, pad_vocab(model.vocab_size, grid.tp)).per_rank(
        grid.tp, grid.ep, grid.etp
    )
    narrow = recipe.train.dtype != "float32"  # a narrow parameter has a float32 master, a wide one is its own
    held = experts + others
    return {
        "name": recipe.train.name,
        "layout": str(grid),
        "parameters": count.total,
        "active_parameters": count.active,
        "flops_per_token": flops_per_token(model, data.seq_len, causal=True),
        "tokens_per_step": recipe.train.global_batch_size * data.seq_len,
        "microbatches": recipe.train.global_batch_size // samples,
        "dtype": "bfloat16" if narrow else "float32",
        "rank_expert_parameters": experts,
        "rank_other_parameters": others,
        "rank_weight_bytes": held * (2 if narrow else 4),
        "rank_gradient_bytes": held * 4,
        "rank_optimizer_bytes": held * (12 if narrow else 8),
    }


def _check_divisions(recipe: Recipe, grid: RankGrid) -> None:
    """What the layers would refuse when they are made."""
    model, moe = recipe.model, recipe.model.moe
    divided = [("num_heads", model.num_heads, "tp"), ("num_kv_heads", model.kv_heads, "tp")]
    if moe is None:
        divided += [("ffn_hidden_size", model.ffn_size, "tp")]
    else:
        divided += [
            ("num_experts", moe.num_experts, "ep"),
            ("expert_ffn_hidden_size", moe.expert_ffn_hidden_size, "etp"),
            ("shared_expert_ffn_hidden_size", moe.shared_expert_ffn_hidden_size, "tp"),
        ]
    if recipe.parallel.sequence_parallel:
        divided += [("seq_len", recipe.data.seq_len, "tp")]
    for name, size, axis in divided:
        if size % grid.size(axis):
            raise ValueError(f"{name} {size} is not divisible by {axis} {grid.size(axis)}")


def describe_recipe(facts: dict[str, int | float | str]) -> Iterator[str]:
    """The lines a person reads."""
    weights, gradients, optimizer = (
        float(facts[f"rank_{part}_bytes"]) / 2**30 for part in ("weight", "gradient", "optimizer")
    )
    yield f"{facts['name']}: {_billions(facts['parameters'])} parameters" + (
        f", {_billions(facts['active_parameters'])} of them for one token"
        if facts["active_parameters"] != facts["parameters"]
        else ""
    )
    yield f"{facts['layout']}"
    yield (
        f"a step    {facts['tokens_per_step']:,} tokens in {facts['microbatches']} microbatches, "
        f"{float(facts['flops_per_token']) * float(facts['tokens_per_step']):.3g} model FLOPs"
    )
    yield (
        f"a rank    {_billions(facts['rank_expert_parameters'])} parameters of experts, "
        f"{_billions(facts['rank_other_parameters'])} others"
    )
    yield (
        f"memory    {weights + gradients + optimizer:.1f} GiB a rank without activations: weights in "
        f"{facts['dtype']} {weights:.1f}, gradients {gradients:.1f}, optimizer {optimizer:.1f}"
    )


def _billions(number: int | float | str) -> str:
    return f"{float(number) / 1e9:.2f} B" if float(number) >= 1e8 else f"{float(number) / 1e6:.2f} M"


def main(argv: list[str] | None = None) -> int:
    """Print a layout or a recipe on it; 0, or 2 with one line on stderr where something does not fit."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["recipe"]:
        return _recipe_main(arguments[1:])
    if arguments[:1] == ["schedule"]:
        return _schedule_main(arguments[1:])
    parser = _Parser(
        prog="fastmp plan",
        usage="fastmp plan [groups] --world-size N [--tp N] [--pp N] [options]\n"
        "       fastmp plan recipe FILE --world-size N [--json]\n"
        "       fastmp plan schedule --pp N --num-microbatches N [--vpp N] [options]",
        description="Print which ranks form which groups, what a rank of a recipe would hold, or what "
        "pipeline ranks do in which order.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    options = vars(parser.parse_args(arguments[1:] if arguments[:1] == ["groups"] else arguments))
    as_json = options.pop("json")
    try:
        grid = RankGrid(**options)
    except ValueError as error:
        print(f"fastmp plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(groups(grid)) if as_json else "\n".join(describe(grid)))
    return 0


def _recipe_main(arguments: list[str]) -> int:
    parser = _Parser(
        prog="fastmp plan recipe",
        description="Check a recipe for a number of ranks, and print what each of them would hold.",
        allow_abbrev=False,
    )
    parser.add_argument("file", help="a recipe, as in configs/")
    parser.add_argument(
        "--world-size", "--world_size", type=int, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument("--json", action="store_true", help="the numbers, as JSON")
    options = parser.parse_args(arguments)
    try:
        facts = recipe_facts(load_recipe(options.file), options.world_size)
    except ValueError as error:
        print(f"fastmp plan recipe: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts) if options.json else "\n".join(describe_recipe(facts)))
    return 0


def schedule_facts(run: Simulation, schedule: str, group_size: int | None) -> dict[str, object]:
    """Orders, as integers or, with split backwards, as [kind, microbatch, chunk], and their figures."""
    pp = len(run.orders)
    split = schedule != "1f1b"
    sizes = (pp, run.num_microbatches, run.vpp, group_size, schedule)
    return {
        "orders": [[list(step) for step in order] if split else integers(order) for order in run.orders],
        "warmup": [warmup(rank, *sizes) for rank in range(pp)],
        "peak_in_flight": list(run.peak_activations),
        "bubble": run.bubble,
    }


def describe_schedule(run: Simulation, schedule: str, group_size: int | None) -> Iterator[str]:
    """The lines a person reads: figures, then each rank's steps as chunk + 1, with - for a backward."""
    pp, path = len(run.orders), run.critical_path
    sizes = (pp, run.num_microbatches, run.vpp, group_size, schedule)
    groups = f" in groups of {group_size or pp}" if run.vpp > 1 else ""
    yield f"{schedule}: pp {pp} x vpp {run.vpp}, {run.num_microbatches} microbatches{groups}"
    yield (
        f"bubble {run.bubble:.4g} of the work: ranks idle {run.bubble / (1 + run.bubble):.1%} of "
        f"{run.makespan:g}, while a forward takes {run.costs.forward:g}, its backward "
        f"{run.costs.backward_input:g} + {run.costs.backward_weight:g}, a message {run.costs.p2p:g}"
    )
    steps = sum(event.end - event.start for event in path)
    yield f"critical path: {len(path)} steps take {steps:g}, messages {run.makespan - steps:g}\n"
    width = len(str(pp - 1))
    for rank, order in enumerate(run.orders):
        if pp > _MOST_RANKS and _MOST_RANKS - 1 <= rank < pp - 1:
            if rank == pp - 2:
                yield "..."
            continue
        texts = [_short(step) for step in order]
        if len(texts) > _MOST_STEPS:
            texts = [*texts[: _MOST_STEPS // 2], "...", *texts[-_MOST_STEPS // 4 :]]
        first, peak = warmup(rank, *sizes), run.peak_activations[rank]
        yield f"rank {rank:<{width}}  warm-up {first:<3} peak {peak:<3}  {' '.join(texts)}"


def _short(step: Step) -> str:
    """chunk + 1, - for a backward, i or w for the halves of one."""
    sign = "" if step.kind == FORWARD else "-"
    half = {BACKWARD_INPUT: "i", BACKWARD_WEIGHT: "w"}.get(step.kind, "")
    return f"{sign}{step.chunk + 1}{half}"


def _schedule_main(arguments: list[str]) -> int:
    parser = _Parser(
        prog="fastmp plan schedule",
        description="Print what each pipeline rank does in one step, in which order, and what that costs.",
        allow_abbrev=False,
    )
    parser.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, metavar="N", help="chunks of each rank (default: 1)")
    parser.add_argument(
        "--num-microbatches", "--num_microbatches", type=int, required=True, metavar="N", help="of one step"
    )
    parser.add_argument(
        "--group-size",
        "--group_size",
        type=int,
        metavar="N",
        help="microbatches through a chunk before the next one (default: pp)",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default: %(default)s")
    for name, text in [
        ("forward", "time of a chunk's forward"),
        ("backward-input", "time of a chunk's backward of its inputs"),
        ("backward-weight", "time of a chunk's backward of its weights"),
        ("p2p", "time of a message between two ranks"),
    ]:
        default = 0.0 if name == "p2p" else 1.0
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="X", help=f"{text} (default: {default:g})"
        )
    parser.add_argument("--json", action="store_true", help="orders, warm-up, peaks and bubble, as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw it: png, svg or pdf")
    options = parser.parse_args(arguments)
    costs = Costs(options.forward, options.backward_input, options.backward_weight, options.p2p)
    chosen = (options.schedule, options.group_size)
    try:
        run = simulate(
            orders(options.pp, options.num_microbatches, options.vpp, options.group_size, options.schedule),
            costs,
        )
        if options.plot:
            _plot_schedule(run, options.schedule, options.plot)
    except (ValueError, OSError) as error:
        what = str(error).removeprefix("schedule: ").removeprefix("simulate: ")
        print(f"fastmp plan schedule: {what}", file=sys.stderr)
        return 2
    except ImportError:
        what = 'no picture: matplotlib is missing (pip install "fastmp[viz]")'
        print(f"fastmp plan schedule: {what}", file=sys.stderr)
        return 2
    print(
        json.dumps(schedule_facts(run, *chosen))
        if options.json
        else "\n".join(describe_schedule(run, *chosen))
    )
    return 0


def _plot_schedule(run: Simulation, schedule: str, out: str) -> None:
    from fastmp.parallel.schedule_plot import draw

    pp = len(run.orders)
    title = (
        f"{schedule}, pp {pp}, vpp {run.vpp}, {run.num_microbatches} microbatches: bubble {run.bubble:.3g}"
    )
    draw([run.timeline(rank) for rank in range(pp)], out, title=title)
