"""Dry run of a layout on forked ranks of this machine's CPU: one step with tiny widths."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fastmp.apps.train_main import make_trainer
from fastmp.config import ParallelConfig, Recipe
from fastmp.distributed.runtime import Runtime
from fastmp.plan.dry_run import tiny
from fastmp.plan.layout import check_layout
from fastmp.testing.ranks import run_ranks

_TIMEOUT = 240.0  # seconds of the dry run
_AGREES = 1e-4  # of the loss, relative, in float32


def check_run(recipe: Recipe) -> str:
    """Train one step of the tiny form of `recipe` on forked ranks and on one; return what was found.

    Raises:
        ValueError: the layout does not fit, or the losses differ.
        RankError: a rank failed.
    """
    made, ranks = tiny(recipe)
    check_layout(made, ranks)
    alone = replace(made, parallel=ParallelConfig(recompute=made.parallel.recompute))
    one = run_ranks(_step, 1, alone, timeout=_TIMEOUT)[0]
    found = run_ranks(_step, ranks, made, timeout=_TIMEOUT)
    axes = ", ".join(
        f"{axis} {getattr(made.parallel, axis)}"
        for axis in ("tp", "cp", "pp", "ep", "etp", "vpp")
        if (getattr(made.parallel, axis) or 1) > 1
    )
    for loss in found:
        if not math.isclose(loss, one, rel_tol=_AGREES):
            raise ValueError(f"--check: {axes}: loss {loss:.6f} on {ranks} ranks, {one:.6f} on one")
    said = f"{axes} on {ranks} forked ranks" if axes else "one rank"
    return f"a step of {made.model.num_layers} tiny layers, {said}: loss {found[0]:.4f} as on one rank"


def _step(rank: int, world_size: int, recipe: Recipe) -> float:
    """Return the loss of the first step."""
    runtime = Runtime(rank=rank, world_size=world_size, local_rank=rank, device=torch.device("cpu"))
    _, trainer = make_trainer(recipe, runtime)
    try:
        return float(trainer.train_step().loss)
    finally:
        trainer.close()
