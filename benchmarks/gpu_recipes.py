"""Rows of the GPU check for whole training runs: recipes that one GPU trains with the data they make."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("gpt-small", "moe-small", "mla-small", "bert-small")
STEPS, TINY_STEPS = 60, 2
_WARM = 10  # steps before those that count: kernels are compiled, memory is allocated


def train(name: str, folder: Path, seconds: float, *, tiny: bool = False) -> dict[str, Any]:
    """Train a recipe of configs/ in a process of its own and return its row.

    Args:
        name: of the recipe.
        folder: for the run's directory and its log.
        seconds: after which the process is stopped.
        tiny: two steps, without a warm-up.

    Returns:
        The command, the median tokens/s of its steps, the largest memory in bytes and the last loss; or
        "raised".
    """
    steps = TINY_STEPS if tiny else STEPS
    options = ["train", "--recipe", f"configs/{name}.toml", "--steps", str(steps)]
    row: dict[str, Any] = {"recipe": name, "command": " ".join(["fastmp", *options])}
    quiet = ["--train.run-dir", str(folder), "--train.log-interval", "1", "--train.eval-interval", "0"]
    log = folder / f"{name}.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "fastmp", *options, *quiet]
        try:
            status: Any = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
    metrics = folder / name / "metrics.jsonl"
    if status or not metrics.exists():
        lines = log.read_text().splitlines() or [""]
        return {**row, "raised": f"status {status}: {lines[-1]}"}
    return {**row, **summary([json.loads(line) for line in metrics.read_text().splitlines()], tiny)}


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
