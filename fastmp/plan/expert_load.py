"""Load of expert-parallel ranks: stated, or measured in the metrics of a run. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastmp.config import Recipe
from fastmp.config.metrics_file import read_metrics
from fastmp.plan.parameters import expert_chunks, expert_stages

__all__ = ["Load", "MeasuredLoad"]


@dataclass(frozen=True)
class Load:
    """The load of the busiest rank over the mean.

    spread: its standard deviation from step to step, the same for all entries of a step.
    """

    mean: float
    spread: float = 0.0


class MeasuredLoad(NamedTuple):
    """The loads that a run has measured, in the "experts" records of its metrics.jsonl."""

    file: str
    records: list[tuple[tuple[int, ...], list[float], list[float]]]
    """The pipeline rank of each layer with experts, the load of the layer's busiest rank, and the load of the
    busiest rank of each pipeline rank in all its layers together."""

    @classmethod
    def read(cls, file: str, recipe: Recipe) -> MeasuredLoad:
        """Read the metrics of a run of the model of `recipe` with as many expert-parallel ranks.

        Raises:
            ValueError: the file is no such file, or has fewer than two records to measure a spread with.
        """
        ep, layers = recipe.parallel.ep, len(expert_stages(recipe))
        run: Mapping[str, Any] = {}
        found: list[tuple[tuple[int, ...], list[float], list[float]]] = []
        others: set[str] = set()
        for record in read_metrics(file):
            if record["kind"] == "run":
                run = record
            loads = record.get("rank_load"), record.get("stage_load"), run.get("expert_stages")
            if record["kind"] == "experts" and all(map(_is_list_of_numbers, loads)):
                own, of_stages, stages = loads
                if (run.get("ep"), len(own)) == (ep, layers) and len(of_stages) > max(stages, default=0):
                    found.append((tuple(stages) or (0,) * layers, own, of_stages))
                else:
                    others.add(f"ep {run.get('ep')} and {len(own)} layers with experts")
        if len(found) < 2:
            but = f", but of {' or '.join(sorted(others))}" if others else ""
            raise ValueError(
                f'{file}: expected two or more "experts" records of a run with ep {ep} and {layers} layers '
                f"with experts, got {len(found)}{but}"
            )
        return cls(file, found)

    def of_rank(self, recipe: Recipe, rank: int) -> Load:
        """Return the load of pipeline rank `rank` in all its layers.

        The loads of layers are added in each record, which measures how they correlate.
        """
        stages, chunks = expert_stages(recipe), [own for own in expert_chunks(recipe, rank) if own]
        if len(chunks) == 1 and all(of == stages for of, _, _ in self.records):
            series = [[load[rank] for _, _, load in self.records]]
        else:  # of another pipeline: as if the same rank were the busiest in all layers
            series = [
                [statistics.fmean(load[i] for i in own) for _, load, _ in self.records] for own in chunks
            ]
        return Load(max(map(statistics.fmean, series)), max(map(statistics.stdev, series)))


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int | float) for each in value)
