"""`python -m tools.study schedules`: idle time and memory of every pipeline schedule, simulated and by
formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fastmp.config.specs import SCHEDULES
from fastmp.plan.hardware import GPUS
from fastmp.plan.kernels import FUSED
from fastmp.plan.schedule_plot import draw as draw_timeline
from fastmp.plan.step_time import step_time
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.simulate import Costs, Simulation, simulate
from tools.study import published
from tools.study.page import parser, table, write

PIPELINES, CHUNKS, MICROBATCHES = (4, 8, 16), (1, 2, 4), (1, 2, 4, 8, 16)  # the last in units of the ranks
_EQUAL = (1.0, 1.0, 1.0)
_COSTS = {"1 + 1 + 1": Costs(*_EQUAL), "1 + 2 + 1": Costs(1.0, 2.0, 1.0), "messages 0.05": Costs(p2p=0.05)}
_DRAWN = (("1f1b", 1), ("1f1b", 2), ("zero_bubble", 1), ("dualpipe_v", 2))
_HIDDEN = {  # of a forward that overlaps a backward: all-to-alls make dgrad longer than wgrad
    "equal": Costs(*_EQUAL, hidden=1.0),
    "I = 1.5, W = 0.5": Costs(1.0, 1.5, 0.5, hidden=1.0),
}


@dataclass(frozen=True)
class Cell:
    """A schedule with its simulation; a chunk's forward takes 1 / vpp of the time of its rank's layers."""

    schedule: Schedule
    costs: Costs

    @property
    def run(self) -> Simulation:
        pairs, placement = self.schedule.all_pairs(), self.schedule.placement
        return simulate(self.schedule.orders(), self.costs, pairs=pairs, placement=placement)

    @property
    def bubble(self) -> float | None:
        """Return idle time over work by formula, for free messages and as many microbatches as ranks.

        That of DualPipeV is of equal times and twice as many microbatches; None for others.
        """
        forward, inputs, weights = (
            float(each)  # type: ignore[arg-type]
            for each in (self.costs.forward, self.costs.backward_input, self.costs.backward_weight)
        )
        whole, pp = forward + inputs + weights, self.schedule.pp
        idle = max(forward, inputs, forward + inputs - weights) if self.schedule.splits_backwards else whole
        if self.schedule.name == "dualpipe_v":
            if not (forward == inputs == weights and self.schedule.num_microbatches >= 2 * pp):
                return None
            idle = forward
        return (pp - 1) * idle / (self.schedule.num_microbatches * self.schedule.vpp * whole)

    @property
    def peak(self) -> int:
        """Return the peak number of chunk activations on a rank, by formula."""
        pp, vpp = self.schedule.pp, self.schedule.vpp
        every = self.schedule.num_microbatches * vpp
        if self.schedule.name == "dualpipe_v":
            return min(2 * pp + 1, every)
        if self.schedule.splits_backwards or vpp == 1:
            return min(pp + (vpp - 1) * pp, every)
        return min(2 * (pp - 1) + (vpp - 1) * pp + 1, every)


def main(arguments: list[str]) -> int:
    """Write the study's page and pictures; 0, or 2 with one line on stderr."""
    from tools.study.schedules_plot import draw_bubbles

    made = parser("schedules", "Idle time and memory of every pipeline schedule.")
    options = made.parse_args(arguments)
    pictures = {"schedules-bubbles.png": partial(draw_bubbles, [*cells()])}
    for name, vpp in _DRAWN:
        pictures[_picture(name, vpp)] = partial(_draw, name, vpp)
    return write(made.prog, options.out, "schedules", page(), pictures)


def cells(costs: Costs = _COSTS["1 + 1 + 1"]) -> Iterator[Cell]:
    """Yield every schedule of every size of the study."""
    for pp in PIPELINES:
        for spec in SCHEDULES.values():
            for vpp in CHUNKS if spec.vpp is None else (spec.vpp,):
                for times in MICROBATCHES:
                    yield Cell(Schedule(pp, pp * times, vpp, name=spec.name), costs)


def page() -> str:
    """Return the study's page."""
    timelines = "\n".join(
        f"![{name}, 4 ranks, chunks of a rank: {vpp}, 8 microbatches]({_picture(name, vpp)})\n"
        for name, vpp in _DRAWN
    )
    return f"""# Bubble and memory of pipeline schedules

Which pipeline schedule leaves the least idle time, and how many activations does it hold? The page is
written by:

```sh
python -m tools.study schedules --out docs/studies
```

To simulate your own sizes, run `fastmp plan schedule`. Orders come from `fastmp.schedule.schedule`, times
from its [simulator](../pipeline.md). F, I and W are the times of a chunk's forward, dgrad and wgrad; m
microbatches pass through pp ranks of v chunks each.

| | idle time over work | chunk activations of a rank |
|---|---|---|
| `1f1b`, v = 1 | (pp - 1) / m | pp |
| `1f1b`, v > 1 (interleaved) | (pp - 1) / (m v) | 2 (pp - 1) + (v - 1) pp + 1 |
| `zero_bubble` | (pp - 1) max(F, I, F + I - W) / (m v (F + I + W)) | v pp |
| `dualpipe_v`, v = 2, m >= 2 pp | (pp - 1) / (6 m) for F = I = W | 2 pp + 1 |

A chunk has 1 / (pp v) of the layers. The first rank of 1F1B therefore holds the activations of one
microbatch of the whole model, for any m; interleaving holds up to 1.5 times as much, zero bubble no more
than 1F1B. DualPipeV holds one chunk more, and idles as little as zero bubble if all times are equal.

![idle time over microbatches](schedules-bubbles.png)

## Simulation and formula

Idle time in percent of the work, for F = I = W = 1 (**equal**) and I = 2 (**recomputed**). Under
**messages**, each message takes 0.05; no formula covers them. Memory is the maximum over ranks, in
activations of the whole model for one microbatch.

{table(_header(), [*_rows()])}
## With EP communication overlap

A forward that [overlaps a backward](../pipeline.md#ep-communication-overlap) hides the all-to-alls of both:
here F = 1, I + W = 2, and the two take 2 in place of 3. The table has the time of a step over the work of a
rank without overlap, m v (F + I + W), the share of forwards that overlap, and memory as above, for two chunks
a rank. Zero bubble has no overlap.

DualPipeV splits the backwards at both ends of a step, and overlaps the others. With I = W its bubble is so
much smaller that a step takes less time. The shorter wgrad is, the less of the bubble it fills: with I = 3 W
the two schedules take the same time within 4 %, and DualPipeV holds 25 to 31 % less.

{table(_overlap_header(), [*_overlap_rows()])}
## Orders

{timelines}
## Step time of a 145.6 B model

145.6 B parameters on 1536 A100s (Narayanan et al. 2021) with tp 8 and pp 8: seconds of a step predicted by
`fastmp plan time`, by schedule.

{table(["schedule", "chunks", "idle over work", "seconds", "chunk activations"], [*_model_rows()])}"""


def _header() -> list[str]:
    pairs = (("equal", "formula"), ("recomputed", "formula"))
    return [
        "schedule",
        "pp",
        "v",
        "m",
        *(name for pair in pairs for name in pair),
        "messages",
        "memory",
        "formula",
    ]


def _rows() -> Iterator[list[str]]:
    tables = zip(*(cells(costs) for costs in _COSTS.values()), strict=True)
    for equal, recomputed, messages in tables:
        own = equal.schedule
        if own.pp > 8 or own.num_microbatches // own.pp not in (1, 4):
            continue
        shares = (
            equal.run.bubble,
            equal.bubble,
            recomputed.run.bubble,
            recomputed.bubble,
            messages.run.bubble,
        )
        held = (max(equal.run.peak_activations), equal.peak)
        yield [
            f"`{own.name}`",
            *(str(size) for size in (own.pp, own.vpp, own.num_microbatches)),
            *("-" if share is None else f"{share:.2%}" for share in shares),
            *(f"{number / (own.pp * own.vpp):.3g}" for number in held),
        ]


def _overlap_header() -> list[str]:
    names = ("1F1B", "DualPipeV")
    columns = (*_HIDDEN, "overlaps", "memory")
    return ["pp", "m", *(f"{name}, {column}" for column in columns for name in names)]


def _overlap_rows() -> Iterator[list[str]]:
    for pp in PIPELINES:
        for times in (2, 4, 8):
            schedules = [
                Schedule(pp, pp * times, 2, name=name, overlap=True)
                for name in SCHEDULES
                if SCHEDULES[name].overlaps
            ]
            work = 6 * pp * times  # of a rank, without overlap
            yield [
                *(str(pp), str(pp * times)),
                *(
                    f"{Cell(own, costs).run.makespan / work:.1%}"
                    for costs in _HIDDEN.values()
                    for own in schedules
                ),
                *(f"{sum(map(len, own.all_pairs())) / (2 * pp * pp * times):.0%}" for own in schedules),
                *(f"{own.peak_in_flight(0) / (2 * pp):.3g}" for own in schedules),
            ]


def _model_rows() -> Iterator[list[str]]:
    run = next(run for run in published.a100_runs() if run.name == "145.6 B")
    for name, spec in SCHEDULES.items():
        for vpp in (1, 2, 5, 10) if spec.vpp is None else (spec.vpp,):
            layout = replace(run.recipe.parallel, vpp=vpp, schedule=name)
            took = step_time(replace(run.recipe, parallel=layout), run.gpus, GPUS["a100"], FUSED)
            microbatches = run.recipe.train.global_batch_size * layout.tp * layout.pp // run.gpus
            cell = Cell(Schedule(layout.pp, microbatches, vpp, name=name), _COSTS["1 + 1 + 1"])
            yield [f"`{name}`", f"{vpp}", f"{took.bubble:.2%}", f"{took.seconds:.2f}", f"{cell.peak}"]


def _picture(name: str, vpp: int) -> str:
    return f"schedules-{name}-{vpp}.png"


def _draw(name: str, vpp: int, out: Path) -> None:
    schedule = Schedule(4, 8, vpp, name=name)
    run = Cell(schedule, Costs(*(each / vpp for each in _EQUAL))).run
    title = f"{name}, pp 4, vpp {vpp}, 8 microbatches: bubble {run.bubble:.3g}"
    draw_timeline([run.timeline(rank) for rank in range(4)], out, title=title)
