"""Fine-tuning tasks: their files, the head, the deciding metric, and the paper's grid.

TASKS has the rows of Table 6 of Shoeybi et al. 2019 (its "3.8B" is the model of 3.9 billion parameters).
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.megatron_paper.finetuning import formats
from examples.megatron_paper.finetuning.formats import Examples
from examples.megatron_paper.finetuning.selection import Point

__all__ = ["TASKS", "FinetuneTask"]


@dataclass(frozen=True)
class FinetuneTask:
    """Fine-tuning task and the layout of its published files.

    read: the examples of a file, or of a directory. train, dev: where they are below the directory of the
        data. Of dev, the first decides which run is best; `also` are read where they are there.
    head: what is predicted: one of several "classes" of a text, a "span" of it, or one of its "choices".
    num_outputs: the number of classes. metric: the name of the metric that decides.
    epochs, points: Table 6, by the size of the model.
    """

    read: Callable[[Path], Examples[Any]]
    train: str
    dev: str
    head: str
    metric: str
    epochs: int
    points: Mapping[str, Point]
    num_outputs: int = 1
    also: Mapping[str, str] = field(default_factory=dict)

    @property
    def grid(self) -> list[Point]:
        """Return the distinct points of Table 6 in order."""
        return list(dict.fromkeys(self.points.values()))


def _rows(*rows: tuple[int, float]) -> dict[str, Point]:
    return {size: Point(*row) for size, row in zip(("336M", "1.3B", "3.9B"), rows, strict=True)}


TASKS = {
    "mnli": FinetuneTask(
        read=formats.read_mnli,
        train="train.tsv",
        dev="dev_matched.tsv",
        also={"mismatched": "dev_mismatched.tsv"},
        head="classes",
        num_outputs=3,
        metric="accuracy",
        epochs=10,
        points=_rows((128, 1e-5), (128, 1e-5), (128, 1e-5)),
    ),
    "qqp": FinetuneTask(
        read=formats.read_qqp,
        train="train.tsv",
        dev="dev.tsv",
        head="classes",
        num_outputs=2,
        metric="accuracy",
        epochs=12,
        points=_rows((128, 5e-5), (128, 3e-5), (256, 4e-5)),
    ),
    "squad1": FinetuneTask(
        read=formats.read_squad1,
        train="train-v1.1.json",
        dev="dev-v1.1.json",
        head="span",
        metric="f1",
        epochs=2,
        points=_rows((64, 3e-5), (48, 3e-5), (48, 1e-5)),
    ),
    "squad2": FinetuneTask(
        read=formats.read_squad2,
        train="train-v2.0.json",
        dev="dev-v2.0.json",
        head="span",
        metric="best_f1",
        epochs=2,
        points=_rows((48, 3e-5), (64, 3e-5), (48, 1e-5)),
    ),
    "race": FinetuneTask(
        read=formats.read_race,
        train="train",
        dev="dev",
        also={"test": "test"},
        head="choices",
        metric="accuracy",
        epochs=3,
        points=_rows((32, 2e-5), (16, 1e-5), (32, 2e-5)),
    ),
}
