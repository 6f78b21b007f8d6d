"""Selection of the reported run: the grid point with the best median over seeds.

Shoeybi et al. 2019, section 5.3, tune batch size and learning rate on the development set, and report the
median of its metric over five seeds. Standard library only.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chosen", "Point", "Scored", "choose", "median_run"]


@dataclass(frozen=True)
class Point:
    """A point of a grid: the examples of a step, and the highest learning rate."""

    batch_size: int
    lr: float

    def __str__(self) -> str:
        return f"batch{self.batch_size}-lr{self.lr:g}"


@dataclass(frozen=True)
class Scored:
    """Finished run: its seed and its metric on the development set; None if it diverged."""

    seed: int
    metric: float | None


@dataclass(frozen=True)
class Chosen:
    """The best point, and the run at it that has the median metric."""

    point: Point
    run: Scored


def median_run(runs: Sequence[Scored]) -> Scored:
    """Return the run with the median metric; of an even number of runs, the lower of the two.

    A run that diverged is below all others. Among runs with the median, it is that of the lowest seed.
    ValueError where there are no runs.
    """
    if not runs:
        raise ValueError("median_run: there are no runs")
    value = statistics.median_low(map(_value, runs))
    return min((run for run in runs if _value(run) == value), key=lambda run: run.seed)


def choose(grid: Sequence[tuple[Point, Sequence[Scored]]]) -> Chosen:
    """Return the first point with the highest median. Raises ValueError as `median_run`."""
    medians = [Chosen(point, median_run(runs)) for point, runs in grid]
    if not medians:
        raise ValueError("choose: the grid has no points")
    return max(medians, key=lambda chosen: _value(chosen.run))  # max takes the first


def _value(run: Scored) -> float:
    return float("-inf") if run.metric is None else run.metric
