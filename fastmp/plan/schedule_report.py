"""`fastmp plan schedule`: the order of steps on each pipeline rank, and the bubble."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from fastmp.config.command_line import Parser
from fastmp.config.console import to_stderr
from fastmp.config.specs import SCHEDULES
from fastmp.schedule.schedule import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
    Step,
    integers,
)
from fastmp.schedule.simulate import Costs, Simulation, simulate

_MAX_RANKS, _MAX_STEPS = 32, 128  # longer lists are shortened for people, never in JSON


def main(arguments: list[str]) -> int:
    """Print a schedule, and draw it on request; return 0, or 2 with one line on stderr if it is invalid."""
    parser = Parser(
        prog="fastmp plan schedule",
        description="Print the order of forward and backward steps on each pipeline rank, and the bubble."
        "\n\n  fastmp plan schedule --pp 4 --vpp 2 --num-microbatches 8",
    )
    parser.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, metavar="N", help="virtual stages of a rank (1)")
    parser.add_argument(
        "--num-microbatches", type=int, required=True, metavar="N", help="microbatches of one step"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="microbatches that run through a chunk before the next chunk (pp)",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="order of work (%(default)s)")
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="run the forward of one microbatch with the backward of another [EP overlap]",
    )
    for name, text in [
        ("forward", "time of the forward of a chunk"),
        ("backward-input", "time of the input gradients of a chunk [dgrad]"),
        ("backward-weight", "time of the weight gradients of a chunk [wgrad]"),
        ("p2p", "time of a send between two pipeline ranks"),
        ("hidden", "time saved by running a forward and a backward together, with --overlap"),
    ]:
        default = 0.0 if name in ("p2p", "hidden") else 1.0
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="X", help=f"{text} ({default:g})"
        )
    parser.add_argument("--json", action="store_true", help="print orders, warm-up, peaks and bubble as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the schedule into a png, svg or pdf")
    options = parser.parse_args(arguments)
    times = (options.forward, options.backward_input, options.backward_weight, options.p2p, options.hidden)
    sizes = (options.pp, options.num_microbatches, options.vpp, options.group_size, options.schedule)
    try:
        if options.hidden and not options.overlap:
            raise ValueError(f"--hidden {options.hidden:g} has no effect without --overlap: add it")
        schedule = Schedule(*sizes, overlap=options.overlap)
        run = simulate(
            schedule.orders(), Costs(*times), pairs=schedule.all_pairs(), placement=schedule.placement
        )
        if options.plot:
            _plot_schedule(run, schedule, options.plot)
    except (ValueError, OSError) as error:
        what = str(error).removeprefix("Schedule: ").removeprefix("simulate: ")
        to_stderr(f"fastmp plan schedule: {what}")
        return 2
    except ImportError:
        what = "no picture: matplotlib is missing (pip install matplotlib)"
        to_stderr(f"fastmp plan schedule: {what}")
        return 2
    print(
        json.dumps(schedule_facts(run, schedule))
        if options.json
        else "\n".join(describe_schedule(run, schedule))
    )
    return 0


def schedule_facts(run: Simulation, schedule: Schedule) -> dict[str, object]:
    """Return the orders and their figures; a step is an integer, or [kind, microbatch, chunk] if split."""
    split = schedule.splits_backwards
    return {
        "orders": [[list(step) for step in order] if split else integers(order) for order in run.orders],
        "warmup": [schedule.warmup(rank) for rank in range(schedule.pp)],
        "peak_in_flight": list(run.peak_activations),
        **(
            {"pairs": [list(schedule.pairs(rank)) for rank in range(schedule.pp)]} if schedule.overlap else {}
        ),
        "bubble": run.bubble,
    }


def describe_schedule(run: Simulation, schedule: Schedule) -> Iterator[str]:
    """Yield the lines that a person reads: figures, then each rank's steps as `_short` writes them."""
    pp, path = schedule.pp, run.critical_path
    grouped = run.vpp > 1 and SCHEDULES[schedule.name].vpp is None
    groups = f" in groups of {schedule.group_size or pp}" if grouped else ""
    sizes = f"pp {pp} x vpp {run.vpp}, {run.num_microbatches} microbatches{groups}"
    yield f"{schedule.name}{' with overlap' * schedule.overlap}: {sizes}"
    yield (
        f"bubble {run.bubble:.4g} of the work: ranks idle {run.bubble / (1 + run.bubble):.1%} of "
        f"{run.makespan:g}, while a forward takes {run.costs.forward:g}, its backward "
        f"{run.costs.backward_input:g} + {run.costs.backward_weight:g}, a message {run.costs.p2p:g}"
    )
    if schedule.overlap:
        yield f"a forward and a backward that run at once take {run.costs.hidden:g} less"
    steps = sum(event.end - event.start for event in path)
    yield f"critical path: {len(path)} steps take {steps:g}, messages {run.makespan - steps:g}\n"
    width = len(str(pp - 1))
    for rank, order in enumerate(run.orders):
        if pp > _MAX_RANKS and _MAX_RANKS - 1 <= rank < pp - 1:
            if rank == pp - 2:
                yield "..."
            continue
        texts = [*_texts(order, schedule.pairs(rank))]
        if len(texts) > _MAX_STEPS:
            texts = [*texts[: _MAX_STEPS // 2], "...", *texts[-_MAX_STEPS // 4 :]]
        first, peak = schedule.warmup(rank), run.peak_activations[rank]
        yield f"rank {rank:<{width}}  warm-up {first:<3} peak {peak:<3}  {' '.join(texts)}"


def _texts(order: Sequence[Step], pairs: Sequence[int]) -> Iterator[str]:
    """Yield each step, or two that run at once with a | between them."""
    for i, step in enumerate(order):
        if i in pairs:
            yield f"{_short(step)}|{_short(order[i + 1])}"
        elif i - 1 not in pairs:
            yield _short(step)


def _short(step: Step) -> str:
    """Return a step as its chunk + 1, after - if it is a backward, before i or w if it is half of one."""
    sign = "" if step.kind == FORWARD else "-"
    half = {BACKWARD_INPUT: "i", BACKWARD_WEIGHT: "w"}.get(step.kind, "")
    return f"{sign}{step.chunk + 1}{half}"


def _plot_schedule(run: Simulation, schedule: Schedule, out: str) -> None:
    from fastmp.plan.schedule_plot import draw

    sizes = f"pp {schedule.pp}, vpp {schedule.vpp}, {schedule.num_microbatches} microbatches"
    title = f"{schedule.name}{' with overlap' * schedule.overlap}, {sizes}: bubble {run.bubble:.3g}"
    draw([run.timeline(rank) for rank in range(schedule.pp)], out, title=title)
