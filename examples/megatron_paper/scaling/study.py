"""`scaling`: the scaling tables of Megatron-LM, as published and as predicted.

The prediction is that of `fastmp plan time`, with kernels as they were published in 2019. Two of its numbers
are calibrated, on two published ones; every other row is predicted, and its residual printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from examples.megatron_paper.scaling import paper
from examples.megatron_paper.scaling.paper import BASELINE, REPLICAS, TABLE_1, counted_flops
from fastmp.config import OptimizerConfig, Recipe, TrainConfig
from fastmp.config.console import to_stderr
from fastmp.config.sizes import flops_per_token, num_parameters
from fastmp.plan.hardware import GPUS
from fastmp.plan.kernels import FASTMP, FUSED, UNFUSED
from fastmp.plan.published_runs import step_time_elsewhere
from fastmp.plan.step_time import ONCE, StepTime, step_time
from tools.study import published
from tools.study.page import Draw, measurement, parser, save, table, write
from tools.study.published import PADDED
from tools.study.recent import section

V100 = GPUS["v100"]
TOLERANCE = 0.1
_NEEDS = (("cpu",), ("cores",), ("rows",))  # of a measurement


@dataclass(frozen=True)
class ScalingPoint:
    """Published figure and its prediction."""

    what: str
    published: float
    predicted: float
    unit: str = ""
    calibrated: bool = False

    @property
    def residual(self) -> float:
        return self.predicted / self.published - 1.0

    def cells(self) -> list[str]:
        shown = [f"{x:.0%}" if self.unit == "%" else f"{x:.3g}{self.unit}" for x in self.numbers]
        return [self.what, *shown, "calibrated" if self.calibrated else f"{self.residual:+.1%}"]

    @property
    def numbers(self) -> tuple[float, float]:
        return self.published, self.predicted


def main(arguments: list[str]) -> int:
    """Write the study's page and pictures; 0, or 2 with one line on stderr."""
    from examples.megatron_paper.scaling.plot import draw_hardware, draw_residuals

    made = parser(
        "scaling",
        "Model and data parallelism as published, predicted, and measured.",
        measures="times",
        package="examples.megatron_paper",
    )
    options = made.parse_args(arguments)
    try:
        file = Path(options.out, "scaling.json")
        measured = _measure() if options.measure else measurement(made.prog, file, _NEEDS)
    except ValueError as error:
        to_stderr(str(error))
        return 2
    rows, modern = [*paper_rows()], hardware_rows()
    pictures: dict[str, Draw] = {
        "scaling-residuals.png": partial(draw_residuals, rows),
        "scaling-hardware.png": partial(draw_hardware, modern),
    }
    if measured:
        pictures["scaling.json"] = partial(save, measured)
    return write(made.prog, options.out, "scaling", page(rows, modern, measured), pictures)


def _measure() -> dict[str, Any]:
    from examples.megatron_paper.scaling.measured import measure

    return measure()


def rate(recipe: Recipe, gpus: int) -> float:
    """Return the FLOP/s of a V100 in a job of `gpus`."""
    return counted_flops(recipe) / step_time(recipe, gpus, V100, UNFUSED).seconds / gpus


def efficiency(recipe: Recipe, gpus: int) -> float:
    """Return parameters times sequences a second of a V100, over those of one with the smallest model."""

    def speed(recipe: Recipe, gpus: int) -> float:
        work = num_parameters(recipe.model, PADDED) * recipe.train.global_batch_size
        return work / step_time(recipe, gpus, V100, UNFUSED).seconds / gpus

    return speed(recipe, gpus) / speed(TABLE_1[0].recipe(), 1)


def paper_rows() -> Iterator[ScalingPoint]:
    """Yield what Megatron-LM published of scaling in 2019, beside the prediction."""
    small, large = TABLE_1[0], TABLE_1[-1]
    yield ScalingPoint("1.2 B on 1 GPU, FLOP/s", BASELINE / 1e12, rate(small.recipe(), 1) / 1e12, " T", True)
    yield ScalingPoint(
        "8.3 B on 8 GPUs, weak scaling", paper.MODEL_PARALLEL, efficiency(large.recipe(), 8), "%"
    )
    gpus = 8 * REPLICAS
    hybrid = efficiency(large.recipe(batch=8 * REPLICAS), gpus)
    yield ScalingPoint("8.3 B on 512 GPUs (section 5.1)", paper.HYBRID, hybrid, "%")
    yield ScalingPoint("8.3 B on 512 GPUs (abstract)", paper.HYBRID_IN_ABSTRACT, hybrid, "%")
    in_flops = rate(large.recipe(batch=8 * REPLICAS), gpus) * gpus
    yield ScalingPoint("8.3 B on 512 GPUs, FLOP/s", paper.HYBRID_FLOPS / 1e15, in_flops / 1e15, " P")
    for heads, found in paper.OF_HEADS.items():
        yield ScalingPoint(
            f"8.3 B on 8 GPUs, {heads} heads (Table 7)", found, efficiency(large.recipe(heads=heads), 8), "%"
        )
    alone = step_time(small.recipe(), 1, V100, UNFUSED).seconds
    for n, found in paper.SPEEDUP.items():
        faster = alone / step_time(small.recipe(tp=n), n, V100, UNFUSED).seconds
        if n > 1:
            yield ScalingPoint(f"1.2 B on {n} GPUs, times as fast (Table 8)", found, faster, "x", n == 2)


def other_rows() -> Iterator[ScalingPoint]:
    """Yield what else was published, on other hardware or with other kernels; nothing is adjusted to it."""
    for shape, gpus, days in paper.TRAINED:
        seconds = step_time(shape.recipe(batch=512), gpus, V100, UNFUSED).seconds
        yield ScalingPoint(
            f"V100 x {gpus}, {shape.name}: days of an epoch", days, seconds * paper.EPOCH / 86400
        )
    for name, run in [*paper.case_runs(), *(("a100", run) for run in published.a100_runs())]:
        seconds = step_time(run.recipe, run.gpus, GPUS[name], FUSED).seconds
        found = counted_flops(run.recipe) / seconds / run.gpus / 1e12
        yield ScalingPoint(f"{name.upper()} x {run.gpus}, {run.name}: TFLOP/s of a GPU", run.tflops, found)
    newer = (("h100", published.h100_runs()), ("h800", published.h800_runs()))
    for name, run in ((name, run) for name, runs in newer for run in runs):
        tokens = run.recipe.train.global_batch_size * run.recipe.data.seq_len
        flops = tokens * flops_per_token(run.recipe.model, causal=True)
        found = flops / step_time_elsewhere(run.recipe, run.gpus, name).seconds / run.gpus / 1e12
        yield ScalingPoint(f"{name.upper()} x {run.gpus}, {run.name}: TFLOP/s of a GPU", run.tflops, found)


def hardware_rows() -> dict[str, list[tuple[int, StepTime, float]]]:
    """Return {GPU: [(GPUs of a job, its step, efficiency over one)]} of Table 1 with fastmp's kernels."""
    found = {}
    for name, gpu in GPUS.items():
        jobs = []
        for replicas in (1, REPLICAS):
            for shape in TABLE_1:
                recipe = shape.recipe(batch=paper.BATCH * replicas)
                recipe = replace(
                    recipe,
                    parallel=replace(recipe.parallel, sequence_parallel=shape.tp > 1, recompute=False),
                    optimizer=OptimizerConfig(),
                    train=TrainConfig(global_batch_size=recipe.train.global_batch_size, dtype="bfloat16"),
                )
                gpus = shape.tp * replicas
                took = step_time(recipe, gpus, gpu, FASTMP)
                jobs.append((gpus, took, counted_flops(recipe) / took.seconds / gpus))
        first = jobs[0][2]
        found[name] = [(gpus, took, speed / first) for gpus, took, speed in jobs]
    return found


def page(
    rows: list[ScalingPoint],
    modern: dict[str, list[tuple[int, StepTime, float]]],
    measured: dict[str, Any] | None = None,
) -> str:
    """Return the study's page, with what `measured.measure` returned."""
    header = ["", "published", "predicted", "residual"]
    worst = max(abs(row.residual) for row in rows if not row.calibrated)
    predicted = sum(not row.calibrated for row in rows)
    others = [*other_rows()]
    in_flops = rate(TABLE_1[-1].recipe(), 8) / rate(TABLE_1[0].recipe(), 1)
    return f"""# Published scaling, predicted

How close do the predictions of `fastmp plan time` come to published measurements? The page compares its
[cost model](../planning.md#how-long-a-step-takes) with Megatron-LM's tables (Shoeybi et al. 2019, arXiv
1909.08053) of V100s in DGX-2H servers, and with later papers. No GPU was used. The page is written by:

```sh
python -m examples.megatron_paper scaling --out docs/studies
```

## The paper, predicted

{table(header, [row.cells() for row in rows])}
The largest residual of the {predicted} predicted rows is {worst:.1%}; a test keeps all of them within
{TOLERANCE:.0%}.

![published and predicted efficiencies](scaling-residuals.png)

**Two numbers are calibrated**, each on one published number; no row has a number of its own.

- Unfused 16-bit kernels of 2019 reach {UNFUSED.memory:.2f} of the memory's bandwidth. With that, one GPU
  computes the model of 1.2 B parameters at the published 39 TFLOP/s. Kernels that stream well reach 0.83.
- Ranks arrive late at each all-reduce of a layer, with a standard deviation of {UNFUSED.late * 1e3:.2f} ms,
  and all wait for the last one. With this delay, two GPUs are 1.64 times as fast as one; without it, the
  model is too fast for every tensor-parallel row. A lower bandwidth does not explain the difference: it is
  a constant per all-reduce, not per byte, as the rows of 8 GPUs show with messages of 25 and 50 MB. The
  cause was not published.

Everything else comes from data sheets, published rates, and kernel passes over tensors, counted in the
published source.

**74% or 76%.** Section 5.1 says 74% for 512 GPUs, the abstract 76%. 15.1 PFLOP/s / 512 / 39 TFLOP/s are
{paper.HYBRID_FLOPS / 512 / BASELINE:.1%}: the abstract follows from the totals; the section must have a
measurement of its own.

**Definition of efficiency.** The models differ in shape, so the result depends on how FLOPs and efficiency
are counted. The paper does not define either; its authors published both with step times in 2020 (below):
TFLOP/s by formula (3) of Narayanan et al. 2021, and "scaling" as the ratio of parameters over the ratio of
times. Both are counted here in the same way. By FLOPs, 8.3 B on 8 GPUs would be at {in_flops:.0%} instead
of {rows[1].predicted:.0%}, {1 - in_flops / rows[1].published:.1%} below the published number.

## Breakdown of a step

Table 1's models on V100s with the kernels of 2019, {paper.BATCH} sequences a replica: shares of a step.

{table(["", "parameters", *_PARTS, "step"], [*_share_rows()])}
## Other published numbers

Nothing was adjusted to these numbers; they show the limits of the model.

{table(header, [row.cells() for row in others])}
- Days of an epoch (Table 2) include validation and checkpoints; the model leaves both out.
- 1.16 B to 8.67 B: tables of Megatron-LM's repository (images/tables.tex), of 2020. A replica has 8
  sequences on V100s and 16 on A100s; tensor parallelism is 1 to 8.
- A100, 1.7 B and more: Table 1 of Narayanan et al. 2021 (arXiv 2104.04473). Microbatches of one sequence,
  and 2 or 3 chunks a rank, are assumed; the table does not name them. Its numbers were checked only by
  parameter counts of shapes, and 1008 B on 3072 GPUs by the 502 PFLOP/s of the abstract.
- H800: DeepSeek-V3, 180,000 GPU hours for 10^12 tokens (arXiv 2412.19437, section 1), a step of 19.9 s. Which
  layers a rank had is not known; here the rank of both heads has none. Wgrads are in FP8, as theirs; making
  norms and SwiGLU again in backward is not counted.
- H100: Table 4 of Dubey et al. 2024 (arXiv 2407.21783), sequences of 8192 tokens. The model has no congestion
  between 1000 servers and no late ranks.

{section()}
## Table 1 on other GPUs

The same shapes with fastmp's own kernels (fused attention, sequence parallelism, no recomputation, ZeRO-1):
weak scaling over one GPU of the same kind. It can exceed 100%, because 64 replicas shard the optimizer. The
faster a GPU is relative to its links, the more communication costs: these models are small for today's
GPUs, and 8 sequences a replica leave little compute to hide the gradient reduction.

{table(["GPUs", *(name.upper() for name in modern)], [*_modern_rows(modern)])}
![efficiency of Table 1 on other GPUs](scaling-hardware.png)
{_measured_section(measured) if measured else ""}"""


def _measured_section(measured: dict[str, Any]) -> str:
    header = ["tp x replicas", "h", "layers", "GFLOPs", "CPU s", "in collectives", "GFLOPs / CPU s"]
    return f"""
## Measured on ranks

`python -m examples.megatron_paper scaling --measure` trains Table 1's models on forked ranks, scaled down:
widths an eighth, layers a tenth, 4 sequences of 128 tokens a replica, float32, one thread a rank, joined by
gloo, on {measured["cores"]} cores of {measured["cpu"]}, shared with other work. Times are
therefore CPU times of all ranks together, the best of 8 steps, without waiting: they measure the work added
by parallelism, not the speed of ranks on their own cores or of a GPU.

{table(header, [*_measured_rows(measured)])}
In brackets is the number of collectives: with tp above 1 four for each layer and two more around them, with
replicas one of all gradients.
"""


def _measured_rows(measured: dict[str, Any]) -> Iterator[list[str]]:
    for row in measured["rows"]:
        yield [
            f"{row['tp']} x {row['replicas']}",
            *(str(row[name]) for name in ("hidden", "layers")),
            f"{row['flops'] / 1e9:.1f}",
            f"{row['seconds']:.3f}",
            f"{row['communication'] / row['seconds']:.0%} ({row['collectives']})",
            f"{row['flops'] / row['seconds'] / 1e9:.1f}",
        ]


_NAMES = {"tp": "all-reduces of layers"}
_PARTS = ("GEMMs", "attention", "other kernels", "all-reduces of layers", "end of the step")


def _share_rows() -> Iterator[list[str]]:
    for replicas in (1, REPLICAS):
        for shape in TABLE_1:
            recipe, gpus = shape.recipe(batch=paper.BATCH * replicas), shape.tp * replicas
            took = step_time(recipe, gpus, V100, UNFUSED)
            seconds = dict.fromkeys(_PARTS, 0.0)
            for (phase, what), part in took.parts.items():
                seconds["end of the step" if phase == ONCE else _NAMES.get(what, what)] += part
            shares = [f"{part / took.seconds:.1%}" for part in seconds.values()]
            count = f"{num_parameters(recipe.model, 51200) / 1e9:.4f} B"
            unit = "GPU" if gpus == 1 else "GPUs"
            yield [f"{gpus} {unit}, h {shape.hidden}", count, *shares, f"{took.seconds:.2f} s"]


def _modern_rows(modern: dict[str, list[tuple[int, StepTime, float]]]) -> Iterator[list[str]]:
    for jobs in zip(*modern.values(), strict=True):
        cells = [f"{share:.0%} ({took.mfu:.0%} of peak)" for _, took, share in jobs]
        yield [f"{jobs[0][0]}", *cells]
