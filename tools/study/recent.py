"""Published runs of today's models beside their estimates: a section of the study of scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log

from fastmp.config.sizes import flops_per_token
from fastmp.plan.hardware import GPUS
from fastmp.plan.published_runs import PublishedRun, published_runs, residual
from tools.study.page import table

_HEADER = ["run", "layout", "published", "estimate", "residual", "source, version, date"]


def section() -> str:
    """Return the section of the page."""
    runs = published_runs()
    tokens = rank_correlation(runs, flops=False)
    flops = rank_correlation(runs, flops=True)
    own = [run for run in runs if not run.note]
    mean = exp(sum(log(residual(run)) for run in own) / len(own))
    return f"""## Today's models

{len(runs)} runs on H100, H200, B200 and GB200, in tokens/s of a GPU. Nothing was calibrated to them. Each
recipe has what its source says. What it does not say is assumed: no recomputation in Megatron-Bridge's runs,
stages with equal work. Wgrads are in FP8 where those of the run are, which fastmp has in BF16.

{table(_HEADER, [*_rows(runs)])}
**Rank correlation** (Spearman) of published and estimated rates: {tokens:.2f} for tokens/s, {flops:.2f} for
FLOP/s, which leaves the size of the models out.

**Residuals by GPU**, without rows that have a note: {_bounds(own)}. On average an
estimate is {mean:.2f} times the published rate.

What the residuals show, and what was done about it:

- **Power.** GEMMs were at 0.8 of the peak on every GPU, as short benchmarks have them. An H100 or H200
  sustains 720 TFLOP/s in BF16 at its 700 W by an independent measurement, and the model now has that share,
  {GPUS["h100"].gemms:.2f}. MosaicML's dense BF16 runs are estimated at {_range(runs, _DENSE_BF16)} times
  their rate, for 1.35 to 1.58 before. No source gives the sustained rate of an H100 limited to 500 W, as
  torchtitan's were ({_range(runs, _LIMITED)}), or of a B200, which has the share of an A100 here.
- **FP8 of all three GEMMs.** With wgrads in FP8, as their software has them, Megatron-Bridge's dense runs on
  H100s are estimated at {_range(runs, _DENSE_FP8)} times their rate, for 0.85 to 0.93 with BF16 wgrads.
- **Host.** Rows with that note have microbatches of one or two sequences, and reach a third of the estimate;
  their source is up to twice as fast where tokens are dropped, so that no host waits for counts of tokens.
  The model now has a host: 25 us for each launch of eager code, as in the [study of graphs](graphs.md), and 2
  launches for each wait. A layer takes as long as the slower of host and GPU. fastmp has 51 launches for a
  layer of experts, and is not bound by them here; how many those runs had is not known.
- **Exchanges.** On H100s rows with EP communication overlap were estimated at 1.39 to 1.43 times their
  rate, because an exchange cost the compute beside it nothing. Its kernels hold SMs: DeepEP 20 of 132, as
  DeepSeek-V3's report says, NCCL 16 or more. Compute beside any collective is now slower by their share, also
  beside reductions of gradients: these rows are at {_range(runs, _OVERLAP)}, DeepSeek-V3 without overlap at
  {_range(runs, _EXCHANGED)}. No source separates what the common use of the memory's bandwidth costs.
- **Imbalance.** Where the sources say anything, they force balanced experts: the rows tell nothing about it.
  `fastmp plan time --load metrics.jsonl` adds the wait for the busiest rank that a run has measured.
"""


_DENSE_BF16 = {"model": "MPT"}
_LIMITED = {"note": "GPUs of 500 W"}
_DENSE_FP8 = {"model": "Llama", "precision": "fp8", "hardware": "h100"}
_OVERLAP = {"overlap": "True", "hardware": "h100"}
_EXCHANGED = {"model": "DeepSeek", "overlap": "False", "hardware": "h100"}


def _range(runs: Sequence[PublishedRun], like: dict[str, str]) -> str:
    """Return the least and the most residual of the runs with these properties."""

    def fits(run: PublishedRun) -> bool:
        layout, precision = run.recipe.parallel, run.recipe.train.precision
        own = {**vars(run), "precision": precision, "overlap": str(layout.overlap_experts)}
        return all(own[key].startswith(value) for key, value in like.items())

    found = [residual(run) for run in runs if fits(run)]
    least, most = f"{min(found):.2f}", f"{max(found):.2f}"
    return least if least == most else f"{least} to {most}"


def _bounds(runs: Sequence[PublishedRun]) -> str:
    by_gpu: dict[str, list[float]] = {}
    for run in runs:
        by_gpu.setdefault(run.hardware, []).append(residual(run))
    return ", ".join(
        f"{min(own):.2f} to {max(own):.2f} on {name.upper()} ({len(own)} rows)"
        for name, own in by_gpu.items()
    )


def _rows(runs: Sequence[PublishedRun]) -> Iterator[list[str]]:
    for run in runs:
        layout, size = run.recipe.parallel, run.recipe.data.micro_batch_size
        axes = [f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "vpp", "ep")]
        axes = [axis for axis in axes if not axis.endswith(" 1")]
        axes += (
            [f"microbatch {size}"] + ["recomputed"] * layout.recompute + ["overlap"] * layout.overlap_experts
        )
        found, source = residual(run), run.source
        yield [
            run.name,
            ", ".join(axes),
            f"{run.tokens_per_second:,.0f}",
            f"{run.tokens_per_second * found:,.0f}",
            f"{found:.2f}" + f" ({run.note})" * bool(run.note),
            f"[{source.name}](https://{source.address}), {source.version}, {source.date}",
        ]


def rank_correlation(runs: Sequence[PublishedRun], *, flops: bool) -> float:
    """Return Spearman's rank correlation of published and estimated rates of `runs`."""

    def rate(run: PublishedRun) -> float:
        work = flops_per_token(run.recipe.model, run.recipe.data.seq_len, causal=True) if flops else 1.0
        return run.tokens_per_second * work

    published = _ranks([rate(run) for run in runs])
    estimated = _ranks([rate(run) * residual(run) for run in runs])
    n = len(runs)
    return 1.0 - 6.0 * sum((a - b) ** 2 for a, b in zip(published, estimated)) / (n * (n * n - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]
