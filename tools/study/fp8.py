"""FP8 training curves: losses of small models in FP8 and in their dtype, from the same weights and data.

A recipe is trained with several seeds and three precisions. Runs of one seed start from the same weights and
see the same batches, so their losses differ by rounding alone. The spread of the seeds says how much a
difference means.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from fastmp.training.metrics import read_metrics
from tools.study.page import machine, measurement, parser, save, table, write

RECIPES = ("gpt-small", "moe-small")
PRECISIONS = {
    "dtype": (),
    "e4m3": ("--train.precision", "fp8", "--train.fp8-block", "32"),
    "e5m2": ("--train.precision", "fp8", "--train.fp8-block", "32", "--train.fp8-grad", "e5m2"),
}
SEEDS = (1, 2, 3)
WINDOW, LAST = 10, 10  # steps of a mean loss, and means at the end that are compared
GOAL = 0.01  # nats
_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Write OUT/fp8.md from OUT/fp8.json; with --measure, train first."""
    made = parser("fp8", __doc__ or "", measures="the losses")
    made.add_argument("--steps", type=int, default=500, help="steps of each run (default: %(default)s)")
    options = made.parse_args(arguments)
    file = Path(options.out) / "fp8.json"
    if options.measure:
        file.parent.mkdir(parents=True, exist_ok=True)
        save(measure(options.steps), file)
    found = measurement(made.prog, file, [("runs",), ("steps",)])
    if found is None:
        print(f"{made.prog}: there is no {file}; train with --measure", file=sys.stderr)
        return 2
    return write(made.prog, options.out, "fp8", page(found), {})


def measure(steps: int) -> dict[str, Any]:
    """Train every recipe with every precision and seed, one run on each core; return their losses."""
    cases = [*product(RECIPES, PRECISIONS, SEEDS)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        losses = [*pool.map(lambda case: _losses(folder, steps, *case), cases)]
    runs: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (recipe, precision, seed), own in zip(cases, losses, strict=True):
        runs.setdefault(recipe, {}).setdefault(precision, {})[str(seed)] = own
    return {"machine": machine(), "steps": steps, "runs": runs}


def _losses(folder: str, steps: int, recipe: str, precision: str, seed: int) -> list[float]:
    """Return the losses of a run, the means of each `WINDOW` steps, rounded to a hundred thousandth."""
    name = f"{recipe}-{precision}-{seed}"
    start = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "fastmp", "train", f"configs/{recipe}.toml"]
    changes = {
        "steps": steps, "seed": seed, "name": name, "run-dir": folder, "log-interval": 1, "eval-interval": 0,
    }  # fmt: skip
    options = [f"--train.{option}={value}" for option, value in changes.items()]
    command = [*start, *PRECISIONS[precision], *options, "--checkpoint.interval=0"]
    subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = read_metrics(Path(folder) / name / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    return [round(mean(losses[i : i + WINDOW]), 5) for i in range(0, len(losses), WINDOW)]


def differences(found: dict[str, Any], recipe: str, precision: str) -> list[float]:
    """Return for each seed the mean loss of the last steps, less that of the same seed in the dtype."""
    own, exact = found["runs"][recipe][precision], found["runs"][recipe]["dtype"]
    return [mean(own[seed][-LAST:]) - mean(exact[seed][-LAST:]) for seed in own]


def spread(found: dict[str, Any], recipe: str) -> float:
    """Return the largest less the smallest mean loss of the last steps, over the seeds in the dtype."""
    means: list[float] = [mean(own[-LAST:]) for own in found["runs"][recipe]["dtype"].values()]
    return max(means) - min(means)


def _rows(found: dict[str, Any]) -> Iterator[list[str]]:
    for recipe, runs in found["runs"].items():
        exact = mean(mean(own[-LAST:]) for own in runs["dtype"].values())
        for precision in list(runs)[1:]:
            each = differences(found, recipe, precision)
            cells = (f"{value:+.4f}" for value in (mean(each), *each))
            yield [recipe, precision, f"{exact:.4f}", *cells, f"{spread(found, recipe):.4f}"]


def page(found: dict[str, Any]) -> str:
    """Return the page."""
    seeds = [f"seed {seed}" for seed in SEEDS]
    header = ["recipe", "gradients", "loss in dtype", "mean difference", *seeds, "spread of seeds"]
    where = found["machine"]
    return f"""# Training curves in FP8

Train the small recipes in FP8 and in their own dtype, with the same weights and batches, and compare losses:

```sh
python -m tools.study fp8 --out docs/studies   # --measure: train again, on your machine
```

Differences of the mean loss over the last {WINDOW * LAST} of {found["steps"]} steps, in nats: FP8 less the
dtype of the model (float32 on a CPU). `e4m3` and `e5m2` are formats of upstream gradients; blocks have 32
elements, which divide small models.

{table(header, [*_rows(found)])}
The spread is the largest less the smallest loss of the seeds in the dtype. Measured with {where["cpu"]},
torch {where["torch"]}. [Train in FP8](../how-to/fp8.md) explains the numbers.
"""
