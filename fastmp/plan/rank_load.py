"""Load of expert-parallel ranks: stated, or measured in the metrics of a run. Standard library only."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastmp.config import Recipe
from fastmp.config.metrics_file import read_metrics
from fastmp.plan.parameters import expert_chunks, expert_stages

__all__ = ["Load", "MeasuredLoad"]

_LARGEST = 1 << 40  # load of a rank, its spread, or number of a pipeline rank


@dataclass(frozen=True)
class Load:
    """The load of the busiest rank over the mean.

    spread: its standard deviation from step to step, the same for all entries of a step.
    variance: of an entry over microbatches, and its covariance with the other layers; 0: what independent
        choices of tokens give.
    """

    mean: float
    spread: float = 0.0
    variance: float = 0.0


class LoadRecord(NamedTuple):
    """The lists of a record.

    stages: the pipeline rank of each layer with experts.
    layers: the load of each layer's busiest rank.
    ranks: the load of the busiest rank of each pipeline rank, in all its layers together.
    spreads: its standard deviation over microbatches.
    """

    stages: tuple[int, ...]
    layers: list[float]
    ranks: list[float]
    spreads: list[float]


class MeasuredLoad(NamedTuple):
    """The loads that a run has measured, in the "experts" records of its metrics.jsonl."""

    file: str
    records: list[LoadRecord]

    @classmethod
    def read(cls, file: str, recipe: Recipe) -> MeasuredLoad:
        """Read the metrics of a run of the model of `recipe` with as many expert-parallel ranks.

        Raises:
            ValueError: the file is no such file, or has fewer than two records to measure a spread with.
        """
        ep, layers = recipe.parallel.ep, len(expert_stages(recipe))
        run: Mapping[str, Any] = {}
        found: list[LoadRecord] = []
        others: set[str] = set()
        for record in read_metrics(file):
            if record["kind"] == "run":
                run = record
            lists: list[Any] = [record.get(name) for name in ("rank_load", "stage_load", "stage_spread")]
            lists.insert(0, run.get("expert_stages"))
            if record["kind"] == "experts" and all(map(_is_list_of_numbers, lists)):
                own = LoadRecord(tuple(lists[0]) or (0,) * layers, *lists[1:])
                fits = len(own.ranks) == len(own.spreads) > max(own.stages, default=0)
                if fits and (run.get("ep"), len(own.layers)) == (ep, layers):
                    found.append(own)
                else:
                    others.add(f"ep {run.get('ep')} and {len(own.layers)} layers with experts")
        if len(found) < 2:
            but = f", but of {' or '.join(sorted(others))}" if others else ""
            raise ValueError(
                f'{file}: expected two or more "experts" records of a run with ep {ep} and {layers} layers '
                f"with experts, got {len(found)}{but}"
            )
        return cls(file, found)

    @property
    def of_layers(self) -> float:
        """Load of a layer's busiest rank over the mean, averaged over layers and records."""
        return statistics.fmean(statistics.fmean(record.layers) for record in self.records)

    def of_rank(self, recipe: Recipe, rank: int) -> Load:
        """Return the load of pipeline rank `rank`, if entries of all its layers are in the ring at once.

        Loads of layers are added in each microbatch and record, which measures how they correlate.
        """
        stages, chunks = expert_stages(recipe), [own for own in expert_chunks(recipe, rank) if own]
        same = all(record.stages == stages for record in self.records)
        if same and len(chunks) == 1:
            series = [[record.ranks[rank] for record in self.records]]
        else:  # of another pipeline: as if one rank were the busiest in all layers
            layers = [record.layers for record in self.records]
            series = [[statistics.fmean(loads[i] for i in own) for loads in layers] for own in chunks]
        # The spread is of all layers together. Of n layers one has 1 / n of the variance of their sum, with
        # its covariances; more layers than were measured together are assumed to correlate as much.
        variances = []
        for record in self.records:
            numbers = Counter(record.stages)
            of = [rank] if same else list(numbers)
            variances.append(
                max(max(numbers[stage], stages.count(rank)) * record.spreads[stage] ** 2 for stage in of)
            )
        mean, spread = max(map(statistics.fmean, series)), max(map(statistics.stdev, series))
        return Load(mean, spread, statistics.fmean(variances))


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, int | float) and 0 <= each < _LARGEST for each in value
    )
