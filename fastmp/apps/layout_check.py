"""Dry run of a layout on forked ranks of this machine's CPU: one step with tiny widths."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fastmp.apps.train_main import make_trainer
from fastmp.config import CheckpointConfig, DataConfig, GraphConfig, ParallelConfig, Recipe
from fastmp.distributed.runtime import Runtime
from fastmp.plan.layout import check_layout, fewest_ranks
from fastmp.testing.ranks import run_ranks

_TIMEOUT = 240.0  # seconds of the dry run
_AGREES = 1e-4  # of the loss, relative, in float32
MOST = 2  # ranks of an axis, chunks of a rank
SEQUENCE = 32


def tiny(recipe: Recipe) -> tuple[Recipe, int]:
    """Return `recipe` with axes of at most `MOST` ranks and tiny widths, and its number of ranks.

    Schedule, chunks, recomputation, overlap, optimizer states and kinds of layers stay. What needs a GPU does
    not: FP8, graphs, and dispatchers other than an all-to-all. Raises ValueError for an encoder.

    Example:
        >>> from fastmp.config import ParallelConfig
        >>> made, ranks = tiny(Recipe(parallel=ParallelConfig(tp=8, pp=16)))
        >>> made.parallel.tp, made.parallel.pp, ranks
        (2, 2, 4)
    """
    model, layout = recipe.model, recipe.parallel
    if model.bert is not None:
        raise ValueError("--check trains on tokens that follow one another, of which an encoder has none")
    sizes = {axis: min(getattr(layout, axis), MOST) for axis in ("tp", "cp", "pp", "ep", "vpp")}
    etp = None if layout.etp is None else min(layout.etp, MOST)
    layout = replace(layout, **sizes, etp=etp, stage_layers=None, microbatch_group_size=None)
    layers, moe, latent = max(2, layout.pp * layout.vpp), model.moe, model.latent
    if moe is not None:
        moe = replace(
            moe,
            num_experts=8,
            top_k=2,
            num_groups=1,
            group_topk=1,
            expert_ffn_hidden_size=32,
            shared_expert_ffn_hidden_size=32 * (moe.shared_expert_ffn_hidden_size > 0),
            dispatcher="alltoall",
            symmetric_capacity=None,
            symmetric_overflow="drop",
        )
    if latent is not None:
        q_rank = None if latent.q_rank is None else 16
        latent = replace(latent, kv_rank=16, q_rank=q_rank, nope_size=8, rope_size=8, value_size=8)
    model = replace(
        model,
        num_layers=layers,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=None if model.num_kv_heads in (None, model.num_heads) else 2,
        head_size=None,
        ffn_hidden_size=64,
        vocab_size=0,
        max_seq_len=SEQUENCE,
        dense_layers=(0,) if model.dense_layers else (),
        full_attention_layers=(0,) if model.full_attention_layers else (),
        sliding_window=None if model.sliding_window is None else 8,
        rope_scaling=None,
        rotary_fraction=1.0,
        moe=moe,
        latent=latent,
    )
    ranks = fewest_ranks(layout)
    dp = ranks // (layout.tp * layout.cp * layout.pp)
    return (
        replace(
            recipe,
            model=model,
            parallel=layout,
            data=DataConfig(seq_len=SEQUENCE, micro_batch_size=1),
            train=replace(
                recipe.train,
                steps=1,
                global_batch_size=2 * layout.pp * dp,
                dtype="float32",
                precision="dtype",
                eval_interval=0,
                stall_seconds=0.0,
                sinks=(),
                profile="none",
            ),
            checkpoint=CheckpointConfig(),
            graphs=GraphConfig(),
        ),
        ranks,
    )


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
