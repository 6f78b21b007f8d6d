"""Training step of GPT on any parallel layout, compared in float64 with one rank that has the whole model.

`differences` runs forward and backward of some microbatches, a step of AdamW, and an evaluation with the new
weights. The reference (`run_whole`) is plain autograd on the undivided model and torch's own AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.config import GPTConfig, RopeScaling
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import gpt_stages, sum_tied_gradients
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.grad_norm import global_grad_norm
from fastmp.pipeline.runner import Pipeline, PipelineResult
from fastmp.schedule.schedule import Schedule
from fastmp.tensor_parallel.context import cut_sequence
from tools.small_models import EXPERTS, QWEN, SEED, SMALL, make_gpt, part_of, placed

CLOSE = 1e-10  # of `differences`
GPT2, LLAMA, MIXTRAL = (replace(config, num_layers=4) for config in (SMALL, QWEN, EXPERTS))
TIED = replace(MIXTRAL, tie_embeddings=True)
SOME_DENSE = replace(
    MIXTRAL,
    dense_layers=(0, 2),
    qkv_bias=True,
    rope_scaling=RopeScaling("yarn", factor=4.0, original_max_seq_len=64),
)
BATCH, SEQUENCE = 8, 16  # of a microbatch, over all ranks
EVALUATED = 3  # microbatches
# Some gradients are zero but for rounding (biases of keys); a smaller eps would make steps of that rounding.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0}


class Whole(NamedTuple):
    """Reference results of the model on a single rank, with losses summed over `number` microbatches.

    updated: the weights after a step of AdamW. evaluation: the loss of some microbatches with them.
    """

    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    loss: Tensor
    aux: Tensor
    counts: list[Tensor]  # of the experts, for each microbatch
    norm: Tensor
    updated: dict[str, Tensor]
    evaluation: Tensor


@cache
def data_of(vocab_size: int, number: int) -> tuple[Tensor, ...]:
    """Return tokens and their successors (BATCH, SEQUENCE + 1) of each microbatch."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(vocab_size, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(number))


@cache
def run_whole(config: GPTConfig, number: int, device: str = "cpu") -> Whole:
    """Return the reference results, computed once in a process; ranks forked later share them."""
    model = make_gpt(config, device=device)
    data = [ids.to(device) for ids in data_of(config.vocab_size, max(number, EVALUATED))]
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    loss, aux = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    counts = []
    for ids in data[:number]:
        out = model.loss(ids[:, :-1], ids[:, 1:])
        tokens, own_aux = (out, torch.zeros_like(aux)) if config.moe is None else (out.tokens, out.aux)
        (tokens.sum() + own_aux).backward()
        loss, aux = loss + tokens.detach().sum(), aux + own_aux.detach()
        counts += [] if config.moe is None else [out.counts]
    grads = {name: param.grad for name, param in model.named_parameters()}
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    torch.optim.AdamW(model.parameters(), **ADAMW).step()
    model.eval()
    with torch.no_grad():
        outs = [model.loss(ids[:, :-1], ids[:, 1:]) for ids in data[:EVALUATED]]
    evaluation = sum((out if config.moe is None else out.tokens).sum() for out in outs)
    updated = {name: param.detach() for name, param in model.named_parameters()}
    return Whole(weights, grads, loss, aux, counts, norm, updated, evaluation)


def own_batches(
    config: GPTConfig, number: int, groups: ParallelGroups, device: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's (tokens, targets) of each microbatch: its sequences, and its slice of them."""
    dp, cp = groups.dp, groups.cp
    whole = data_of(config.vocab_size, number)
    data = [ids.chunk(group_size(dp))[group_rank(dp)].to(device) for ids in whole]
    return [(cut_sequence(ids[:, :-1], cp), cut_sequence(ids[:, 1:], cp)) for ids in data]


def total(tensor: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
    """All-reduce `tensor` over the groups in place and return it."""
    for group in groups:
        if group is not None:
            dist.all_reduce(tensor, group=group)
    return tensor


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest |found - expected| / (1 + |expected|); inf for another shape or dtype, or NaN."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return torch.inf
    far = (found.detach() - expected).abs() / (1 + expected.abs())
    return far.nan_to_num(nan=torch.inf).max().item() if far.numel() else 0.0


def differences(
    config: GPTConfig,
    groups: ParallelGroups,
    vpp: int,
    number: int,
    schedule: str = "1f1b",
    microbatch_group_size: int | None = None,
    layers: tuple[int, ...] | None = None,
    loss_grad: float | None = None,
    shard: bool = False,
    device: str = "cpu",
    **options: Any,
) -> dict[str, float]:
    """Return the largest difference to `run_whole` on this rank, by kind of number.

    Kinds: "weights" as drawn, "order" of steps and memory held (0 or infinite), "gradients" with their
    "norm", "parameters" after a step of AdamW, "loss", "evaluation", and of experts "auxiliary loss" and
    "loads". A rank that does not have a number leaves it out.

    Args:
        vpp, number, schedule, microbatch_group_size, layers: chunks of a rank, microbatches, and how they
            go through a pipeline.
        loss_grad: the upstream gradient of token losses, announced to the output layer.
        shard: gradients, of which a rank then has a part, and the optimizer are divided over data-parallel
            ranks.
        options: of GPT and its placement.
    """
    whole = run_whole(config, number, device)
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp), device=device)
    on, others = placed(groups, rng=rng, dtype=torch.float64, device=device, **options)
    planned = Schedule(groups.grid.pp, number, vpp, microbatch_group_size, schedule)
    stages = gpt_stages(config, on, vpp=vpp, layers=layers, placement=planned.placement, **others)
    named = [(i, name, param) for i, stage in enumerate(stages) for name, param in stage.named_parameters()]
    found = {"weights": max(difference(p, part_of(whole.weights[name], p, groups)) for _, name, p in named)}
    buffers = None
    if groups.grid.world_size > 1:
        by_name = [(f"{i}.{name}", param) for i, name, param in named]
        buffers = GradBuffer(
            by_name, dp_group=groups.dp_cp, tp_group=groups.tp, edp_group=groups.edp, shard=shard
        )
        optimizer: Any = AdamW(buffers, **ADAMW)
    else:
        optimizer = torch.optim.AdamW({param: None for _, _, param in named}, **ADAMW)  # each once
    pipeline = Pipeline(
        stages,
        planned.orders(),
        placement=planned.placement,
        group=groups.pp,
        backward_group=groups.pp_backward,
        inputs=lambda batch: batch[0],
        loss=lambda hidden, batch: stages[-1].token_losses(hidden, batch[1], loss_grad_BS=loss_grad).sum(),
    )
    own, rank = own_batches(config, max(number, EVALUATED), groups, device), group_rank(groups.pp)
    result = pipeline.train(own[:number])
    as_planned = result.trace == planned.order(rank) and result.peak == planned.peak_in_flight(rank)
    found["order"] = 0.0 if as_planned else torch.inf
    if buffers is not None:
        buffers.reduce()
    sum_tied_gradients(stages, groups, buffers)
    if buffers is not None:
        found["norm"] = difference(global_grad_norm(buffers, **groups.norm), whole.norm)
    if not shard:
        grads = [
            (name, param, param.grad if buffers is None else param.main_grad) for _, name, param in named
        ]
        found["gradients"] = max(difference(g, part_of(whole.grads[name], p, groups)) for name, p, g in grads)
    optimizer.step()
    found["parameters"] = max(difference(p, part_of(whole.updated[name], p, groups)) for _, name, p in named)
    if stages[-1].stage_spec.last:
        assert result.loss is not None
        found["loss"] = difference(total(result.loss, groups.dp_cp), whole.loss)
    if config.moe is not None:
        found.update(_of_experts(groups, stages, result, whole))
    for stage in stages:
        stage.eval()
    evaluated = pipeline.evaluate(own[:EVALUATED])
    if evaluated.loss is not None:
        found["evaluation"] = difference(total(evaluated.loss, groups.dp_cp), whole.evaluation)
    return found


def _of_experts(
    groups: ParallelGroups, stages: Any, result: PipelineResult, whole: Whole
) -> Iterator[tuple[str, float]]:
    mine = torch.zeros_like(whole.aux) if result.stage_loss is None else result.stage_loss
    yield "auxiliary loss", difference(total(mine, groups.dp_cp, groups.pp), whole.aux)
    alike = True
    for chunk, stage in enumerate(stages):
        with_experts = [layer for layer in range(stage.config.num_layers) if stage.config.layers[layer].moe]
        rows = [row for row, layer in enumerate(with_experts) if layer in stage.stage_spec.layers]
        for microbatch, counts in enumerate(whole.counts if rows else ()):
            own = total(result.stats[microbatch, chunk], groups.tp_cp_dp)
            alike &= torch.equal(own, counts[rows])
    yield "loads", 0.0 if alike else torch.inf
