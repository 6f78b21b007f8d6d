"""Rows of the GPU check for whole training runs: recipes that one GPU trains with the data they make.

Two models of the size of a GPU, dense and of experts, also have the kernels of one step, by time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SHAPE = """--model.hidden-size 2048 --model.num-heads 16 --model.max-seq-len 4096 --model.init-std 0.02
    --model.activation swiglu --data.seq-len 4096 --data.micro-batch-size 2 --train.global-batch-size 8"""
_EXPERTS = "--model.moe.num-experts 64 --model.moe.top-k 8 --model.moe.expert-ffn-hidden-size 768"
# {row: (recipe, options)}; rows with options are profiled.
PROFILED = {
    "dense-1b": ("gpt-small", f"--model.num-layers 16 {_SHAPE}".split()),
    "moe-2.6b": ("moe-small", f"--model.num-layers 8 {_SHAPE} {_EXPERTS}".split()),
}
RECIPES = (*PROFILED, "gpt-small", "moe-small", "mla-small", "bert-small")
STEPS, TINY_STEPS = 60, 3
_WARM = 10  # steps before those that count: kernels are compiled, memory is allocated
_MOST = 30  # kernels in a table


def command(name: str, *, tiny: bool = False) -> list[str]:
    """Return the words after `fastmp` that train a row; tiny: three steps of the recipe as it is."""
    recipe, options = PROFILED.get(name, (name, []))
    steps = TINY_STEPS if tiny else STEPS
    words = ["train", "--recipe", f"configs/{recipe}.toml", "--steps", str(steps), *(() if tiny else options)]
    if name in PROFILED:
        words += ["--profile", "torch", "--profile-steps", f"{steps - 1}:{steps}"]
    return words


def train(name: str, folder: Path, seconds: float, *, tiny: bool = False) -> dict[str, Any]:
    """Train a row of `RECIPES` in a process of its own and return its figures.

    Args:
        name: of the row.
        folder: for the run's directory and its log.
        seconds: after which the process is stopped.
        tiny: a few steps, without a warm-up.

    Returns:
        The command, the median tokens/s of its steps, the largest memory in bytes, the last loss and, of one
        that is profiled, its kernels; or "raised".
    """
    words = command(name, tiny=tiny)
    row: dict[str, Any] = {"recipe": name, "command": " ".join(["fastmp", *words])}
    quiet = ["--train.run-dir", str(folder), "--train.log-interval", "1", "--train.eval-interval", "0"]
    quiet += ["--checkpoint.interval", "0"]
    log = folder / f"{name}.log"
    with log.open("w") as file:
        try:
            status: Any = subprocess.run(
                [sys.executable, "-m", "fastmp", *words, *quiet],
                cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
    metrics = folder / PROFILED.get(name, (name,))[0] / "metrics.jsonl"
    if status or not metrics.exists():
        lines = log.read_text().splitlines() or [""]
        return {**row, "raised": f"status {status}: {lines[-1]}"}
    row |= summary([json.loads(line) for line in metrics.read_text().splitlines()], tiny)
    traces = [*metrics.parent.glob("profile-*.json")] if name in PROFILED else []
    return row | (kernel_table(json.loads(traces[0].read_text())["traceEvents"]) if traces else {})


def kernel_table(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the kernels of a trace by time, in ms: the GPU's, or without any the CPU's ops."""
    timed = [event for event in events if "dur" in event]
    for kind in ("kernel", "cpu_op"):
        if chosen := [event for event in timed if event.get("cat") == kind]:
            break
    else:
        return {}
    totals: Counter[str] = Counter()
    for event in chosen:
        totals[event["name"][:120]] += event["dur"] / 1e3
    first, last = min(e["ts"] for e in chosen), max(e["ts"] + e["dur"] for e in chosen)
    most = [[kernel, ms] for kernel, ms in totals.most_common(_MOST)]
    return {"kernels": most, "kernels_ms": sum(totals.values()), "span_ms": (last - first) / 1e3}


def summary(records: Sequence[dict[str, Any]], tiny: bool = False) -> dict[str, Any]:
    """Return the figures of a run from the records of its metrics.jsonl."""
    steps = [record for record in records if record["kind"] == "train"]
    timed = [record for record in steps if tiny or record["step"] > _WARM]
    return {
        "steps": len(timed),
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in timed),
        "memory_bytes": max(record["memory_bytes"] for record in steps),
        "loss": steps[-1]["loss"],
    }
