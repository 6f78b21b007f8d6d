"""Table 1 scaled down, on forked ranks of this machine: what compute and communication take of a step.

Widths are an eighth, layers a tenth; a rank computes on one thread, ranks are joined by gloo. Collectives run
where they are called, one after the other. Times are CPU times of a rank, its threads together: unlike the
clock they mean the same where ranks, or other programs, share cores. Waiting is not in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from examples.megatron_paper.scaling.paper import TABLE_1, Shape
from fastmp.config import DataConfig, ParallelConfig, Recipe, TrainConfig
from fastmp.config.sizes import flops_per_token
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Placement, gpt_stages
from fastmp.optim.from_config import make_grads
from fastmp.plan.layout import make_grid
from fastmp.testing.ranks import run_ranks
from tools.study.page import machine

_SEQUENCE, _BATCH, _VOCABULARY, _STEPS = 128, 4, 1024, 8
_RENAMED = ("all_gather_single", "reduce_scatter_single")  # their names in newer versions of torch
_NAMES = _RENAMED if hasattr(dist, _RENAMED[0]) else ("all_gather_into_tensor", "reduce_scatter_tensor")
_COLLECTIVES = ("all_reduce", *_NAMES)
LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))  # (ranks that divide a model, replicas)


def scaled(shape: Shape, replicas: int) -> Recipe:
    """Return a shape of Table 1 scaled down, 4 sequences of 128 tokens a replica."""
    recipe = shape.recipe()
    model = replace(
        recipe.model, num_layers=shape.layers // 10, hidden_size=shape.hidden // 8, dropout=0.0,
        vocab_size=_VOCABULARY, max_seq_len=_SEQUENCE,
    )  # fmt: skip
    return replace(
        recipe,
        model=model,
        parallel=ParallelConfig(tp=shape.tp),
        data=DataConfig(seq_len=_SEQUENCE, micro_batch_size=_BATCH),
        train=TrainConfig(global_batch_size=_BATCH * replicas, dtype="float32"),
    )


def measure() -> dict[str, Any]:
    """Return a row for each of `LAYOUTS`, with CPU seconds of all ranks together."""
    rows = []
    for tp, replicas in LAYOUTS:
        shape = next(each for each in TABLE_1 if each.tp == tp)
        recipe, ranks = scaled(shape, replicas), tp * replicas
        of_ranks = run_ranks(_time_steps, ranks, recipe, timeout=300)
        best = [min(own) for own in of_ranks]
        tokens = recipe.train.global_batch_size * _SEQUENCE
        rows.append(
            {
                "tp": tp,
                "replicas": replicas,
                "hidden": recipe.model.hidden_size,
                "layers": recipe.model.num_layers,
                "flops": tokens * flops_per_token(recipe.model),
                "seconds": sum(seconds for seconds, *_ in best),
                "communication": sum(communication for _, communication, _ in best),
                "collectives": best[0][2],
            }
        )
    return {**machine(), "rows": rows}


def _time_steps(rank: int, size: int, recipe: Recipe) -> list[tuple[float, float, int]]:
    """Return (CPU seconds, those in collectives, number of collectives) of each step of a rank."""
    groups = ParallelGroups.create(make_grid(recipe, size))
    [model] = gpt_stages(recipe.model, Placement(groups))
    grads = make_grads([model], recipe.optimizer, groups)
    tokens = torch.randint(
        _VOCABULARY, (_BATCH, _SEQUENCE + 1), generator=torch.Generator().manual_seed(rank)
    )
    found = []
    for step in range(_STEPS + 1):
        if size > 1:
            dist.barrier()
        with _timed_collectives() as took:
            start = time.process_time()
            grads.zero()
            model.loss(tokens[:, :-1], tokens[:, 1:], loss_grad_BS=1.0).sum().backward()
            grads.reduce()
            if step:  # the first one warms up
                found.append((time.process_time() - start, sum(took), len(took)))
    return found


class _Done:
    """The work of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def _timed_collectives() -> Iterator[list[float]]:
    """Yield a list that receives the seconds of each collective, which is waited for at once."""
    found: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., _Done]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done:
            start = time.process_time()
            function(*args, **kwargs)
            found.append(time.process_time() - start)
            return _Done()

        return call

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, timed(getattr(dist, name))))
        yield found
