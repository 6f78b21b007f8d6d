"""Shared by the tests of pipelines of GPT: a step and an evaluation on any layout beside one whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from nn_tools import EXPERTS, QWEN, SEED, SMALL, make_gpt, part_of, placed
from torch import Tensor

from fastmp.config import GPTConfig, RopeScaling
from fastmp.nn import gpt_stages, sum_tied_gradients
from fastmp.parallel.collectives import group_rank, group_size
from fastmp.parallel.context import cut_sequence
from fastmp.parallel.grads import GradBuffer
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.optimizer import global_grad_norm
from fastmp.parallel.pipeline import Pipeline, PipelineResult
from fastmp.parallel.rng import RngTracker
from fastmp.parallel.schedule import Schedule

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
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


class Whole(NamedTuple):
    """What one rank says: of the undivided model, losses summed over `number` microbatches."""

    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    loss: Tensor
    aux: Tensor
    counts: list[Tensor]  # of the experts, for each microbatch
    norm: Tensor
    evaluation: Tensor


@cache
def data_of(vocab_size: int, number: int) -> tuple[Tensor, ...]:
    """Tokens and their successors (BATCH, SEQUENCE + 1) of each microbatch."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(vocab_size, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(number))


@cache
def run_whole(config: GPTConfig, number: int) -> Whole:
    """Made once in a process; ranks forked later find it."""
    model, data = make_gpt(config), data_of(config.vocab_size, max(number, EVALUATED))
    loss, aux = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    counts = []
    for ids in data[:number]:
        out = model.loss(ids[:, :-1], ids[:, 1:])
        tokens, own_aux = (out, torch.zeros(())) if config.moe is None else (out.tokens, out.aux)
        (tokens.sum() + own_aux).backward()
        loss, aux = loss + tokens.detach().sum(), aux + own_aux.detach()
        counts += [] if config.moe is None else [out.counts]
    grads = {name: param.grad for name, param in model.named_parameters()}
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    model.eval()
    with torch.no_grad():
        outs = [model.loss(ids[:, :-1], ids[:, 1:]) for ids in data[:EVALUATED]]
    evaluation = sum((out if config.moe is None else out.tokens).sum() for out in outs)
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return Whole(weights, grads, loss, aux, counts, norm, evaluation)


def own_batches(config: GPTConfig, number: int, groups: ParallelGroups) -> list[tuple[Tensor, Tensor]]:
    """This rank's (tokens, targets) of each microbatch: its sequences, its part of them."""
    dp, cp = groups.dp, groups.cp
    data = [ids.chunk(group_size(dp))[group_rank(dp)] for ids in data_of(config.vocab_size, number)]
    return [(cut_sequence(ids[:, :-1], cp), cut_sequence(ids[:, 1:], cp)) for ids in data]


def total(tensor: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
    for group in groups:
        if group is not None:
            dist.all_reduce(tensor, group=group)
    return tensor


def compare(
    config: GPTConfig,
    groups: ParallelGroups,
    vpp: int,
    number: int,
    schedule: str = "1f1b",
    microbatch_group_size: int | None = None,
    layers: tuple[int, ...] | None = None,
    promise: float | None = None,
    **options: Any,
) -> None:
    """A training step of `number` microbatches and an evaluation, all numbers held against one whole model.

    promise: the gradient of token losses promised to the output layer; options: of GPT and its placement.
    """
    whole = run_whole(config, number)
    tp, dp_cp = groups.tp, groups.dp_cp
    rng = RngTracker(SEED, tp_rank=group_rank(tp))
    on, others = placed(groups, rng=rng, dtype=torch.float64, **options)
    stages = gpt_stages(config, on, vpp=vpp, layers=layers, **others)
    numbered = {
        (i, name): param for i, stage in enumerate(stages) for name, param in stage.named_parameters()
    }
    for (_, name), param in numbered.items():
        assert torch.equal(param, part_of(whole.weights[name], param, groups)), name
    grads = None
    if groups.grid.world_size > 1:
        named = [(f"{i}.{name}", param) for (i, name), param in numbered.items()]
        grads = GradBuffer(named, dp_group=dp_cp, tp_group=tp, edp_group=groups.edp)
    pp, rank = groups.grid.pp, group_rank(groups.pp)
    planned = Schedule(pp, number, vpp, microbatch_group_size, schedule)
    pipeline = Pipeline(
        stages,
        planned.orders(),
        group=groups.pp,
        backward_group=groups.pp_backward,
        inputs=lambda batch: batch[0],
        loss=lambda hidden, batch: stages[-1].token_losses(hidden, batch[1], loss_grad_BS=promise).sum(),
    )
    own = own_batches(config, max(number, EVALUATED), groups)
    result = pipeline.train(own[:number])
    assert result.trace == planned.order(rank)
    assert result.peak == planned.peak_in_flight(rank)
    if grads is not None:
        grads.reduce()
    sum_tied_gradients(stages, groups, grads)
    if grads is not None:
        check_norm(grads, groups, whole)
    for (_, name), param in numbered.items():
        grad = param.grad if grads is None else param.main_grad
        expected = part_of(whole.grads[name], param, groups)
        torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
    if stages[-1].part.last:
        torch.testing.assert_close(total(result.loss, dp_cp), whole.loss, **CLOSE)
    if config.moe is not None:
        check_experts(groups, stages, result, whole)
    for stage in stages:
        stage.eval()
    evaluated = pipeline.evaluate(own[:EVALUATED])
    if evaluated.loss is not None:
        torch.testing.assert_close(total(evaluated.loss, dp_cp), whole.evaluation, **CLOSE)


def check_norm(grads: GradBuffer, groups: ParallelGroups, whole: Whole) -> None:
    torch.testing.assert_close(global_grad_norm(grads, **groups.norm), whole.norm, **CLOSE)


def check_experts(groups: ParallelGroups, stages, result: PipelineResult, whole: Whole) -> None:
    mine = torch.zeros((), dtype=torch.float64) if result.stage_loss is None else result.stage_loss
    over = groups.dp_cp, groups.pp
    torch.testing.assert_close(total(mine, *over), whole.aux, **CLOSE)
    for chunk, stage in enumerate(stages):
        with_experts = [layer for layer in range(stage.config.num_layers) if stage.config.layers[layer].moe]
        rows = [row for row, layer in enumerate(with_experts) if layer in stage.part.layers]
        for microbatch, counts in enumerate(whole.counts if rows else ()):
            own = total(result.stats[microbatch, chunk], groups.tp_cp_dp)
            assert torch.equal(own, counts[rows])
