"""A sequence cut over ranks is the whole sequence: loss and every gradient, with equal work on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from nn_tools import EXPERTS, QWEN, SMALL, make_gpt, part_of, text

from fastmp.parallel import cut_sequence, join_sequence
from fastmp.parallel.collectives import group_rank, group_size
from fastmp.parallel.grads import GradBuffer
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.testing import run_ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LLAMA = replace(QWEN, qk_norm=False)
MODELS = {
    "gpt2": replace(SMALL, max_seq_len=32),
    "llama": replace(LLAMA, max_seq_len=32),
    "qwen3": replace(QWEN, max_seq_len=32),
    "moe": replace(EXPERTS, max_seq_len=32),
}


def own_sequences(x_BS, groups):
    """Of the sequences of all data-parallel ranks this rank's, and of these its slices."""
    x_BS = x_BS.chunk(group_size(groups.dp))[group_rank(groups.dp)]
    return cut_sequence(x_BS, groups.cp)


def run_step(model, batches, groups):
    """Losses of every microbatch, sums of the auxiliary ones and of counts; gradients in `main_grad`."""
    grads = (
        GradBuffer(model.named_parameters())
        if groups is None
        else GradBuffer(
            model.named_parameters(), dp_group=groups.dp_cp, tp_group=groups.tp, edp_group=groups.edp
        )
    )
    losses, aux, counts = [], torch.zeros((), dtype=torch.float64), 0
    for tokens_BS, targets_BS, weight_BS in batches:
        loss = model.loss(tokens_BS, targets_BS)
        total = ((loss if model.config.moe is None else loss.tokens) * weight_BS).sum()
        if model.config.moe is not None:
            aux += loss.aux.detach()
            counts = counts + loss.counts
            total = total + loss.aux
            loss = loss.tokens
        total.backward()
        losses.append(loss.detach())
    grads.all_reduce()
    if groups is not None and model.config.moe is not None:
        if groups.dp_cp is not None:
            dist.all_reduce(aux, group=groups.dp_cp)
        dist.all_reduce(counts, group=groups.tp_cp_dp)
    return losses, aux, counts


def whole_and_cut(rank, world, layout, name, options):
    config = MODELS[name]
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    generator = torch.Generator().manual_seed(11)
    tokens_BS, targets_BS = text(config, batch=4, sequence=32)
    weight_BS = torch.rand(tokens_BS.shape, dtype=torch.float64, generator=generator)
    batches = list(zip(*(x.chunk(2) for x in (tokens_BS, targets_BS, weight_BS))))
    one, many = make_gpt(config, None), make_gpt(config, groups, **options)
    expected = run_step(one, batches, None)
    actual = run_step(many, [[own_sequences(x, groups) for x in batch] for batch in batches], groups)

    def same(what, ours, whole):
        torch.testing.assert_close(ours, whole, msg=lambda text: f"{what}: {text}", **CLOSE)

    for ours, whole in zip(actual[0], expected[0], strict=True):
        same("loss", ours, own_sequences(whole, groups))
    same("auxiliary loss", actual[1], expected[1])
    same("counts", actual[2], expected[2])
    for (path, full), param in zip(one.named_parameters(), many.parameters(), strict=True):
        same(path, param.main_grad, part_of(full.main_grad, param, groups))
    with torch.no_grad():
        one.eval(), many.eval()
        whole = one.loss(*batches[0][:2])
        loss = many.loss(*(own_sequences(x, groups) for x in batches[0][:2]))
        if config.moe is not None:
            loss, whole = loss.tokens, whole.tokens
        same("evaluation", join_sequence(loss, groups.cp), whole.chunk(groups.grid.dp)[group_rank(groups.dp)])


SEQUENCE, RECOMPUTE = {"sequence_parallel": True}, {"recompute": True}
CASES = [
    ("gpt2", 2, {"cp": 2}, {}),
    ("gpt2", 4, {"cp": 4}, RECOMPUTE),
    ("gpt2", 4, {"cp": 2, "tp": 2}, {}),
    ("gpt2", 4, {"cp": 2, "tp": 2}, SEQUENCE | RECOMPUTE),
    ("gpt2", 4, {"cp": 2}, {}),
    ("llama", 2, {"cp": 2}, RECOMPUTE),
    ("llama", 4, {"cp": 4}, {}),
    ("qwen3", 4, {"cp": 2, "tp": 2}, SEQUENCE),
    ("qwen3", 4, {"cp": 2, "tp": 2}, RECOMPUTE | {"shard_recompute_input": True}),
    ("moe", 2, {"cp": 2}, {}),
    ("moe", 2, {"cp": 2, "ep": 2}, RECOMPUTE),
    ("moe", 4, {"cp": 2, "tp": 2, "ep": 4, "etp": 1}, SEQUENCE),
    ("moe", 4, {"cp": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
    ("moe", 4, {"cp": 2, "ep": 2}, {}),
    ("moe", 8, {"cp": 8, "ep": 8}, RECOMPUTE),
    ("moe", 8, {"cp": 2, "tp": 2, "ep": 4, "etp": 1}, SEQUENCE | RECOMPUTE),
]


@pytest.mark.parametrize(("name", "world", "layout", "options"), CASES)
def test_loss_and_every_gradient(name, world, layout, options):
    run_ranks(whole_and_cut, world, layout, name, options)
