"""The run that is reported, and the grid of the paper."""

from __future__ import annotations

import pytest

from examples.megatron_paper.finetuning.finetune_tasks import TASKS
from examples.megatron_paper.finetuning.selection import Point, Scored, choose, median_run
from fastmp.nn.bert_tasks import HEADS


def runs(*metrics):
    return [Scored(seed, metric) for seed, metric in enumerate(metrics)]


def test_the_median_is_that_of_a_run():
    assert median_run(runs(0.3, 0.1, 0.5, 0.4, 0.2)) == Scored(0, 0.3)
    assert median_run(runs(0.3, 0.1, 0.5, 0.4)) == Scored(0, 0.3)  # of an even number, the lower one
    assert median_run(runs(0.7)) == Scored(0, 0.7)


def test_ties_go_to_the_lowest_seed_in_any_order():
    some = runs(0.9, 0.5, 0.1, 0.5, 0.5)
    assert median_run(some) == median_run(some[::-1]) == Scored(1, 0.5)


def test_runs_that_diverged_are_the_lowest():
    assert median_run(runs(None, 0.2, None, 0.4, 0.3)) == Scored(1, 0.2)
    assert median_run(runs(None, None, 0.4)) == Scored(0, None)
    with pytest.raises(ValueError, match="there are no runs"):
        median_run([])


def test_the_best_point_has_the_highest_median_not_the_highest_run():
    low, high = Point(16, 1e-5), Point(32, 2e-5)
    chosen = choose([(low, runs(0.99, 0.1, 0.1)), (high, runs(0.5, 0.6, 0.7))])
    assert (chosen.point, chosen.run) == (high, Scored(1, 0.6))
    assert choose([(low, runs(0.5)), (high, runs(0.5))]).point == low  # the first of equal ones
    assert choose([(low, runs(None)), (high, runs(0.0))]).point == high
    with pytest.raises(ValueError, match="the grid has no points"):
        choose([])


@pytest.mark.parametrize(
    ("name", "epochs", "rows"),
    [  # Table 6
        ("mnli", 10, [(128, 1e-5), (128, 1e-5), (128, 1e-5)]),
        ("qqp", 12, [(128, 5e-5), (128, 3e-5), (256, 4e-5)]),
        ("squad1", 2, [(64, 3e-5), (48, 3e-5), (48, 1e-5)]),
        ("squad2", 2, [(48, 3e-5), (64, 3e-5), (48, 1e-5)]),
        ("race", 3, [(32, 2e-5), (16, 1e-5), (32, 2e-5)]),
    ],
)
def test_the_grid_is_table_6(name, epochs, rows):
    task = TASKS[name]
    assert task.epochs == epochs and task.head in HEADS
    assert [(point.batch_size, point.lr) for point in task.points.values()] == rows
    assert [(point.batch_size, point.lr) for point in task.grid] == sorted(set(rows), key=rows.index)
