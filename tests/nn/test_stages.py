"""GPT over pipeline stages is the undivided GPT: weights, loss, experts' losses and loads, every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from nn_tools import EXPERTS, QWEN, SEED, SMALL, make_gpt, part_of

from fastmp.nn import gpt_stages, sum_tied_gradients
from fastmp.nn.stages import layers_of_stages
from fastmp.parallel.collectives import group_rank, group_size
from fastmp.parallel.grads import GradBuffer
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.layers import parallel_attributes
from fastmp.parallel.optimizer import global_grad_norm
from fastmp.parallel.pipeline import Pipeline
from fastmp.parallel.rng import RngTracker
from fastmp.parallel.schedule import orders
from fastmp.testing import run_ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
GPT2, LLAMA, MIXTRAL = (replace(config, num_layers=4) for config in (SMALL, QWEN, EXPERTS))
TIED = replace(MIXTRAL, tie_embeddings=True)


def data_of(config, number, batch, sequence=8):
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(config.vocab_size, (batch, sequence + 1), generator=generator) for _ in range(number)
    ]


def run_whole(config, data):
    model = make_gpt(config, None)
    loss = aux = torch.zeros((), dtype=torch.float64)
    counts = []
    for ids in data:
        out = model.loss(ids[:, :-1], ids[:, 1:])
        own_loss, own_aux = (out.sum(), 0.0) if config.moe is None else (out.tokens.sum(), out.aux)
        (own_loss + own_aux).backward()
        loss, aux = loss + own_loss.detach(), aux + torch.as_tensor(own_aux).detach()
        counts.append(None if config.moe is None else out.counts)
    return model, loss, aux, counts


def pipeline_of(stages, groups, vpp, number, schedule, promise):
    pp = 1 if groups is None else groups.grid.pp
    return Pipeline(
        stages,
        orders(pp, number, vpp, schedule=schedule),
        group=None if groups is None else groups.pp,
        inputs=lambda ids: ids[:, :-1],
        loss=lambda hidden, ids: stages[-1].token_losses(hidden, ids[:, 1:], loss_grad_BS=promise).sum(),
    )


def total(tensor, *groups):
    for group in groups:
        if group is not None:
            dist.all_reduce(tensor, group=group)
    return tensor


def compare(config, groups, vpp, number, schedule="1f1b", layers=None, promise=None, **options):
    tp, dp = (None, None) if groups is None else (groups.tp, groups.dp)
    data = data_of(config, number, 2 * group_size(dp))
    whole, loss, aux, counts = run_whole(config, data)
    rng = RngTracker(SEED, tp_rank=group_rank(tp))
    stages = gpt_stages(
        config, groups=groups, vpp=vpp, layers=layers, rng=rng, dtype=torch.float64, **options
    )
    named = {}
    for stage in stages:
        named |= dict(stage.named_parameters())
    undivided = dict(whole.named_parameters())
    for name, param in named.items():
        assert torch.equal(param, part_of(undivided[name], param, groups)), name
    grads = None
    if groups is not None:
        numbered = [(f"{i}.{n}", p) for i, stage in enumerate(stages) for n, p in stage.named_parameters()]
        grads = GradBuffer(numbered, dp_group=groups.dp_cp, tp_group=tp, edp_group=groups.edp)
    own = [ids.chunk(group_size(dp))[group_rank(dp)] for ids in data]
    pipeline = pipeline_of(stages, groups, vpp, number, schedule, promise)
    result = pipeline.train(own)
    sum_tied_gradients(stages, groups)
    if grads is not None:
        grads.all_reduce()
    for name, param in named.items():
        grad = param.grad if grads is None else param.main_grad
        expected = part_of(undivided[name].grad, param, groups)
        torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
    if grads is not None:
        sums = {"tp_group": tp, "mp_group": groups.mp}
        sums |= {"etp_group": groups.etp, "expert_mp_group": groups.expert_mp}
        norm = torch.stack([p.grad.square().sum() for p in whole.parameters()]).sum().sqrt()
        torch.testing.assert_close(global_grad_norm(grads.parameters.values(), **sums), norm, **CLOSE)
    if stages[-1].part.last:
        torch.testing.assert_close(total(result.loss, dp), loss, **CLOSE)
    if config.moe is not None:
        check_experts(groups, stages, result, aux, counts, number)
    for model in (whole, *stages):
        model.eval()
    with torch.no_grad():
        expected = (
            sum(whole.loss(i[:, :-1], i[:, 1:]).sum() for i in data[:3]) if config.moe is None else None
        )
    evaluated = pipeline.evaluate(own[:3])
    if evaluated.loss is not None and expected is not None:
        torch.testing.assert_close(total(evaluated.loss, dp), expected, **CLOSE)


def check_experts(groups, stages, result, aux, counts, number):
    mine = torch.zeros((), dtype=torch.float64) if result.stage_loss is None else result.stage_loss
    over = () if groups is None else (groups.dp, groups.pp)
    torch.testing.assert_close(total(mine, *over), aux, **CLOSE)
    for chunk, stage in enumerate(stages):
        for microbatch in range(number if len(stage.part.layers) else 0):
            own = total(result.stats[microbatch, chunk], *(() if groups is None else (groups.tp_cp_dp,)))
            assert torch.equal(own, counts[microbatch][stage.part.layers.start : stage.part.layers.stop])


def layout_case(rank, world, layout, runs):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    for run in runs:
        compare(groups=groups, **run)


def test_chunks_of_one_rank():
    for config in (GPT2, LLAMA, TIED):
        compare(config, None, 2, 2)


DENSE = [
    {"config": GPT2, "vpp": 1, "number": 4},
    {"config": GPT2, "vpp": 2, "number": 4, "promise": 1.0},
    {"config": LLAMA, "vpp": 2, "number": 8, "schedule": "zero_bubble"},
    {"config": GPT2, "vpp": 1, "number": 4, "schedule": "zero_bubble", "promise": 1.0},
    {"config": GPT2, "vpp": 2, "number": 4, "layers": (1, 0, 3, 0)},
    {"config": LLAMA, "vpp": 1, "number": 4, "layers": (3, 1), "recompute": True},
    {"config": TIED, "vpp": 2, "number": 4, "recompute": True, "schedule": "zero_bubble"},
]
LAYOUTS = [
    (2, {"pp": 2}, DENSE),
    (
        4,
        {"pp": 4},
        [
            {"config": replace(GPT2, num_layers=8), "vpp": 2, "number": 8},
            {"config": LLAMA, "vpp": 1, "number": 8},
        ],
    ),
    (8, {"pp": 4, "tp": 2}, [{"config": GPT2, "vpp": 1, "number": 4, "sequence_parallel": True}]),
    (
        4,
        {"pp": 2, "tp": 2},
        [
            {"config": GPT2, "vpp": 2, "number": 4},
            {"config": LLAMA, "vpp": 2, "number": 4, "sequence_parallel": True},
            {"config": LLAMA, "vpp": 1, "number": 4, "schedule": "zero_bubble", "sequence_parallel": True},
        ],
    ),
    (
        4,
        {"pp": 2, "ep": 2},
        [
            {"config": MIXTRAL, "vpp": 1, "number": 4},
            {"config": TIED, "vpp": 2, "number": 4},
            {"config": MIXTRAL, "vpp": 1, "number": 4, "schedule": "zero_bubble"},
        ],
    ),
    (4, {"pp": 2, "tp": 2, "ep": 2, "etp": 1}, [{"config": MIXTRAL, "vpp": 2, "number": 4}]),
]


@pytest.mark.parametrize(
    ("world", "layout", "runs"), LAYOUTS, ids=lambda v: str(v) if type(v) is dict else ""
)
def test_stages_equal_the_undivided_model(world, layout, runs):
    run_ranks(layout_case, world, layout, runs, timeout=120)


def test_layers_of_stages():
    assert layers_of_stages(8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert layers_of_stages(5, 3, (1, 4, 0)) == [range(0, 1), range(1, 5), range(5, 5)]
    with pytest.raises(ValueError, match="6 layers are not divisible by 4 stages"):
        layers_of_stages(6, 4)
    for wrong in ((2, 2), (2, 2, 1), (4, -1, 1, 0)):
        with pytest.raises(ValueError, match=r"layers \[.*\] must be 4 numbers .* that sum to 4"):
            layers_of_stages(4, 4, wrong)


def test_marks_of_a_stage_are_those_of_the_model():
    marks = {name: parallel_attributes(p) for name, p in make_gpt(GPT2, None).named_parameters()}
    (stage,) = gpt_stages(GPT2, groups=None)
    assert {name: parallel_attributes(p) for name, p in stage.named_parameters()} == marks
    for part in gpt_stages(GPT2, groups=None, vpp=2):
        assert {name: parallel_attributes(p) for name, p in part.named_parameters()}.items() <= marks.items()


def test_the_two_tied_tables_are_equal_whatever_the_streams_and_one_of_them_is_marked():
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, pp=2))
        torch.manual_seed(rank)
        stages = gpt_stages(GPT2, groups=groups, vpp=2, init="sharded")
        for _ in range(2):
            table = stages[-rank].word_embedding.weight
            assert parallel_attributes(table).pipeline_replica == (rank == 1)
            assert not any(
                p.pipeline_replica for stage in stages for p in stage.parameters() if p is not table
            )
            stages = [stage.double() for stage in stages]  # the mark outlives a conversion
        return table.detach()

    first, last = run_ranks(rank_main, 2)
    assert torch.equal(first, last)
