"""Models with latent attention: the same numbers on every layout, in graphs and with packed documents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphed_trainers import run as run_graphed
from marks import full
from train_tools import PackedSamples
from trainer_tools import (
    MICRO_BATCH,
    check_as_one_rank,
    make_groups,
    make_trainer,
    run,
    run_layout,
)

from fastmp.config import GPTConfig, GraphConfig, LatentConfig, MoEConfig, ParallelConfig, RopeScaling
from fastmp.config.precision import Fp8Recipe
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT = LatentConfig(kv_rank=32, q_rank=48, nope_size=16, rope_size=8, value_size=16)
CONFIG = GPTConfig(
    **{"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    **{"init_std": 0.1, "norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 96},
    **{"linear_bias": False, "position": "rope", "rope_interleaved": True, "tie_embeddings": False},
    rope_scaling=RopeScaling("yarn", factor=4.0, original_max_seq_len=4, mscale_all_dim=1.0),
    latent=LATENT,
    dense_layers=(0,),
    moe=MoEConfig(
        **{"num_experts": 4, "expert_ffn_hidden_size": 64, "shared_expert_ffn_hidden_size": 64},
        **{"score": "sigmoid", "expert_bias": True, "num_groups": 2, "group_topk": 1},
    ),
)
DIRECT = replace(CONFIG, latent=replace(LATENT, q_rank=None), rope_scaling=None, rope_interleaved=False)
SIZES = {"global_batch_size": 2 * MICRO_BATCH}
STEPS = 2
LAYOUTS = {
    "tp, sp, ep": (2, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
    "cp": (2, {"cp": 2}),
    "tp": (2, {"tp": 2}),
    "dp": (2, {}),
    "pp, zero bubble": (2, {"pp": 2, "schedule": "zero_bubble"}),
    "pp, vpp": (2, {"pp": 2, "vpp": 2}),
    "ep": (2, {"ep": 2}),
    "etp": (2, {"etp": 2}),
    "recompute": (2, {"tp": 2, "recompute": True}),
    "keys again": (1, {"recompute_kv": True}),
    "keys again, tp, sp": (2, {"tp": 2, "sequence_parallel": True, "recompute_kv": True}),
    "keys again, tp, sp, cp": (4, {"tp": 2, "cp": 2, "sequence_parallel": True, "recompute_kv": True}),
    "keys again, pp": (2, {"pp": 2, "schedule": "zero_bubble", "recompute_kv": True}),
    "tp, cp": (4, {"tp": 2, "cp": 2}),
    "tp, sp, cp": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "all": (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
}
QUICK = ("tp, sp, ep", "cp", "keys again")


@pytest.fixture(scope="module")
def one_rank():
    return {name: run(make_trainer(config=config, **SIZES), STEPS) for name, config in CONFIGS.items()}


CONFIGS = {"q latent, yarn": CONFIG, "direct": DIRECT}


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        *(("q latent, yarn", name) for name in QUICK),
        *full([("q latent, yarn", name) for name in LAYOUTS if name not in QUICK]),
        *full([("direct", name) for name in ("tp", "tp, sp, ep", "tp, sp, cp")]),
    ],
)
def test_every_layout_is_one_rank(one_rank, config, layout):
    """Losses, norm and every gradient to 1e-10, replicas bitwise equal."""
    world, sizes = LAYOUTS[layout]
    results = run_layout(world, ParallelConfig(**sizes), STEPS, config=CONFIGS[config], **SIZES)
    check_as_one_rank(results, one_rank[config])


def graphs_case(rank, world, layout, graphs):
    groups = make_groups(world, layout)
    small = replace(CONFIG, num_layers=2)
    (eager, _), (found, manager) = (run_graphed(each, groups, layout, small, 8) for each in (None, graphs))
    assert len(eager) == len(found) and all(map(torch.equal, eager, found))
    return manager is not None


@pytest.mark.parametrize(
    ("world", "sizes", "scope"),
    [
        (2, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, None),
        *full([(1, {}, "full_step"), (2, {"cp": 2}, None), (2, {"pp": 2}, None)]),
        (1, {"recompute_kv": True}, None),
        *full([(1, {"recompute_kv": True}, "full_step"), (2, {"cp": 2, "recompute_kv": True}, "full")]),
    ],
)
def test_graphs_are_bitwise_eager(world, sizes, scope):
    graphs = GraphConfig(enabled=True, warmup=1, **({} if scope is None else {"scope": (scope,)}))
    layout = ParallelConfig(**sizes)
    if world == 1:
        assert graphs_case(0, 1, layout, graphs)
    else:
        assert all(run_ranks(graphs_case, world, layout, graphs, timeout=120))


def packed(groups, layout):
    trainer = make_trainer(groups, layout, config=CONFIG, samples=PackedSamples)
    return [trainer.train_step().loss.item(), trainer.evaluate().loss]


PACKED = [{"tp": 2, "sequence_parallel": True}, {"cp": 2, "recompute_kv": True}]


@pytest.mark.parametrize("sizes", [{"cp": 2}, *full(PACKED)], ids=str)
def test_packed_documents(sizes):
    layout = ParallelConfig(**sizes)
    want = packed(make_groups(1, ParallelConfig()), ParallelConfig())
    for found in run_ranks(lambda rank, world: packed(make_groups(world, layout), layout), 2, timeout=120):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=0, atol=1e-10)


def test_trains_in_fp8_on_ranks_as_on_one():
    latent = replace(LATENT, kv_rank=32, q_rank=64, rope_size=16)
    config = replace(CONFIG, latent=latent, ffn_hidden_size=64, num_layers=2)

    def losses(world, layout):
        trainer = make_trainer(make_groups(world, layout), layout, config=config, fp8=Fp8Recipe(32), **SIZES)
        return [trainer.train_step().loss.item() for _ in range(STEPS)]

    layout, want = ParallelConfig(tp=2, sequence_parallel=True), losses(1, ParallelConfig())
    for found in run_ranks(lambda rank, world: losses(world, layout), 2, timeout=120):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=0, atol=1e-9)
