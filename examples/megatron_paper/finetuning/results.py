"""Result files of fine-tuning: one file for each finished run, and a summary as JSON and as a table.

    NAME/finetune.json                 the task and the recipe, which every later start must equal
    NAME/batch32-lr2e-05-seed1234/     a run: its checkpoints, metrics.jsonl, and, once it has ended,
        result.json                    its metrics, or that it diverged
        predictions.json               what it says of the development set
    NAME/results.json, results.md      all runs, the medians and the best point

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.megatron_paper.finetuning.selection import Point, Scored, choose, median_run
from fastmp.config.file_access import read_json, write_whole

__all__ = ["FinetuneResult", "check_same", "read_result", "write_json", "write_results"]

LIMIT = 1 << 20  # bytes of a file that says what was done


@dataclass(frozen=True)
class FinetuneResult:
    """Finished run: its point, seed and metrics; None if it diverged."""

    point: Point
    seed: int
    metrics: Mapping[str, float] | None

    def scored(self, metric: str) -> Scored:
        """Return the seed with the deciding metric."""
        return Scored(self.seed, None if self.metrics is None else self.metrics[metric])


def check_same(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`. Raises ValueError if an earlier start wrote something else."""
    content = json.loads(json.dumps(content))
    if not path.exists():
        write_json(path, content)
        return
    earlier = read_json(path, LIMIT)
    differing = sorted(_differing(earlier, content, ""))
    if differing:
        raise ValueError(
            f"{path.parent}: an earlier start had another {', '.join(differing[:5])}; "
            "choose another finetune.name, or start it as before to go on"
        )


def _differing(one: Any, other: Any, name: str) -> list[str]:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [name or "recipe"]
    keys = dict.fromkeys([*one, *other])
    return [
        each
        for key in keys
        for each in _differing(one.get(key), other.get(key), f"{name}.{key}" if name else key)
    ]


def read_result(path: Path, point: Point, seed: int, metric: str) -> FinetuneResult | None:
    """Return the result of the run at `path`; None if it is unfinished. Raises ValueError for another run's
    file.
    """
    if not path.exists():
        return None
    content = read_json(path, LIMIT)
    metrics = content.get("metrics")
    if content.get("point") != asdict(point) or content.get("seed") != seed:
        raise ValueError(f"{path}: is not the result of {point} with seed {seed}")
    if metrics is not None and not (isinstance(metrics, dict) and isinstance(metrics.get(metric), float)):
        raise ValueError(f"{path}: has no metric {metric}")
    return FinetuneResult(point, seed, metrics)


def write_results(
    directory: Path, task: str, metric: str, grid: Sequence[Point], results: Sequence[FinetuneResult]
) -> str:
    """Write results.json and results.md of the finished runs; return the table.

    The best point is named once every point has a run.
    """
    by_point = [(point, [each for each in results if each.point == point]) for point in grid]
    scored = [(point, [each.scored(metric) for each in runs]) for point, runs in by_point if runs]
    best = choose(scored) if len(scored) == len(grid) else None
    rows = []
    for point, runs in by_point:
        median = median_run([each.scored(metric) for each in runs]) if runs else None
        rows.append(
            {
                **asdict(point),
                "median": None if median is None else asdict(median),
                "runs": [{"seed": each.seed, "metrics": each.metrics} for each in runs],
            }
        )
    chosen = None if best is None else {**asdict(best.point), **asdict(best.run)}
    content = {"task": task, "metric": metric, "points": rows, "best": chosen}
    table = _table(task, metric, content)
    write_json(directory / "results.json", content)
    write_whole(directory / "results.md", table)
    return table


def _table(task: str, metric: str, content: Mapping[str, Any]) -> str:
    lines = [f"| {task} | seeds | {metric}, median | of all |", "|---|---:|---:|---|"]
    for row in content["points"]:
        every = [run["metrics"] and run["metrics"][metric] for run in row["runs"]]
        median = row["median"] and row["median"]["metric"]
        name = f"batch {row['batch_size']}, lr {row['lr']:g}"
        shown = " ".join(map(_shown, every))
        lines.append(f"| {name} | {len(every)} | {_shown(median) if every else '-'} | {shown} |")
    best = content["best"]
    if best is not None and best["metric"] is not None:
        (row,) = (row for row in content["points"] if (row["batch_size"], row["lr"]) == _key(best))
        metrics = next(run["metrics"] for run in row["runs"] if run["seed"] == best["seed"])
        lines += [
            "",
            f"best: batch {best['batch_size']}, lr {best['lr']:g}; its median run, seed {best['seed']}: "
            + ", ".join(f"{name} {_shown(value, name)}" for name, value in metrics.items()),
        ]
    return "\n".join(lines) + "\n"


def _key(best: Mapping[str, Any]) -> tuple[int, float]:
    return best["batch_size"], best["lr"]


def _shown(value: float | None, name: str = "") -> str:
    """Return a share in percent; thresholds are not converted."""
    if value is None:
        return "diverged"
    return f"{value:.3f}" if name.endswith("threshold") else f"{100 * value:.2f}"


def write_json(path: Path, content: Any) -> None:
    """Write `content` atomically, in a new directory if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")
