"""An evaluation: all rows of a task in batches, which data-parallel ranks share, until each has its score.

Which rows make up a batch depends on the task and the batch size alone. Ranks take turns at what is left, so
a batch is the same computation on any number of them, and after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastmp.apps.evaluation.journal import Journal, Values
from fastmp.apps.evaluation.scoring import Score, ScoredText, Scorer
from fastmp.apps.evaluation.tasks import EvalTask
from fastmp.cuda_graphs.backends.interface import Backend
from fastmp.distributed.collectives import all_gather, communication_device, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.gpt import GPT
from fastmp.training.checkpoint.collective_load import agree

__all__ = ["evaluate"]


def evaluate(
    task: EvalTask,
    model: GPT,
    *,
    groups: ParallelGroups = ParallelGroups.alone(),
    batch_size: int = 8,
    journal: Journal | None = None,
    report: Callable[[int, int, int], None] = lambda *of_rows: None,
    backend: Backend | None = None,
) -> dict[str, Any]:
    """Evaluate a model on a task; return the same figures on all ranks.

    Args:
        task: the rows to score, and their summary.
        model: a GPT in evaluation mode, or this rank's pipeline stage (`fastmp.apps.generation.load_model`).
        groups: process groups of the model; data-parallel ranks share the batches.
        batch_size: rows of a batch; it determines GEMM shapes, and thus the last bits of the result.
        journal: finished batches on rank 0, which are not evaluated again.
        report: called with (rows, tokens read, targets scored) of all ranks after each batch, extrapolated
            from this rank.
        backend: captures batches of each shape as a graph, see `Scorer`; None: eager.

    Returns:
        The figures of `task.summarize`.

    Raises:
        ValueError: on all ranks, if a row does not fit the model, scores are not finite, or the journal does
            not fit the task.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    world = dist.group.WORLD if groups.grid.world_size > 1 else None
    scorer = Scorer(model, groups, likeliest=task.likeliest, backend=backend)
    batches = [task.order[i : i + batch_size] for i in range(0, len(task.order), batch_size)]
    scores = _from_journal(journal, batches, world)
    left = [number for number in range(len(batches)) if number not in scores]
    if left:
        scorer.expect(agree(world, partial(_rows, scorer, task, batches[left[0]])))
    rank, size = group_rank(groups.dp), group_size(groups.dp)
    for begin in range(0, len(left), size):
        turn = left[begin : begin + size]
        own = turn[rank % len(turn)]  # ranks without one do another's again: experts need all of them
        rows = agree(world, partial(_rows, scorer, task, batches[own]))
        made = _gather(scorer(rows), batch_size, groups.dp)
        for number, values in zip(turn, made):
            scores[number] = values[: len(batches[number])]
            if not all(math.isfinite(log_prob) for log_prob, _ in scores[number]):
                raise ValueError(
                    f"{task.name}: log-probabilities are not finite: the weights are not, or a number is too "
                    "large for their dtype"
                )
            if journal is not None:
                journal.add(number, scores[number])
        done = sum(len(batches[number]) for number in turn)
        read, scored = sum(len(row.ids) - 1 for row in rows), sum(row.scored for row in rows)
        report(done, read * done // len(rows), scored * done // len(rows))
    of_rows = {row: Score(*value) for n, batch in enumerate(batches) for row, value in zip(batch, scores[n])}
    return task.summarize([of_rows[row] for row in range(len(task.rows))])


def _from_journal(
    journal: Journal | None, batches: Sequence[Sequence[int]], world: dist.ProcessGroup | None
) -> dict[int, Values]:
    """Return the finished batches of rank 0's journal on all ranks."""

    def check() -> None:
        for number, values in finished.items():
            if not 0 <= number < len(batches) or len(values) != len(batches[number]):
                assert journal is not None
                raise ValueError(f"{journal.path}: batch {number} is damaged: delete the file to begin anew")

    finished = dict(journal.finished) if journal is not None else {}
    agree(world, check)
    if world is None:
        return finished
    everyones = [finished]
    dist.broadcast_object_list(everyones, group=world, group_src=0)
    return everyones[0]


def _rows(scorer: Scorer, task: EvalTask, numbers: Sequence[int]) -> list[ScoredText]:
    rows = [task.rows[number] for number in numbers]
    scorer.check(rows)
    return rows


def _gather(scores: Sequence[Score], batch_size: int, group: dist.ProcessGroup | None) -> list[Values]:
    """Return the scores of each rank of a group, padded to `batch_size`."""
    if group is None:
        return [[(score.log_prob, score.likeliest) for score in scores]]
    values = torch.zeros(1, batch_size, 2, dtype=torch.float64)
    values[0, : len(scores)] = torch.tensor(scores, dtype=torch.float64)
    gathered, _ = all_gather(values.to(communication_device()), group)
    return [[(log_prob, likeliest == 1) for log_prob, likeliest in rank] for rank in gathered.tolist()]
