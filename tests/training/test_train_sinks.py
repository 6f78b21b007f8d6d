"""Models as GPT-OSS, with sinks and biases of experts: the same numbers on every layout and in graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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

from fastmp.config import GPTConfig, GraphConfig, MoEConfig, ParallelConfig
from fastmp.config.precision import Fp8Recipe
from fastmp.config.recipe import load_recipe
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.plan.layout import check_layout
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = GPTConfig(
    **{"num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 131},
    **{"max_seq_len": 16, "init_std": 0.1, "norm": "rmsnorm", "activation": "clamped_swiglu"},
    **{"ffn_hidden_size": 96, "linear_bias": True, "position": "rope", "tie_embeddings": False},
    **{"sliding_window": 5, "full_attention_layers": (1, 3), "attention_sinks": True},
    moe=MoEConfig(
        **{"num_experts": 4, "expert_ffn_hidden_size": 64, "pre_softmax": False, "aux_loss": 0.01},
        **{"linear_bias": True, "router_bias": True},
    ),
)
CONFIGS = Path(__file__).parents[2] / "configs"
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
    "tp, cp": (4, {"tp": 2, "cp": 2}),
    "tp, sp, cp": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "all": (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
}
QUICK = ("tp, sp, ep", "cp")


@pytest.fixture(scope="module")
def one_rank():
    return run(make_trainer(config=CONFIG, **SIZES), STEPS)


@pytest.mark.parametrize("layout", [*QUICK, *full([name for name in LAYOUTS if name not in QUICK])])
def test_every_layout_is_one_rank(one_rank, layout):
    """Losses, norm and every gradient to 1e-10, replicas bitwise equal."""
    world, sizes = LAYOUTS[layout]
    _, _, grads, *_ = one_rank
    for name in ("attention.sinks", "router.bias", "fc1_bias", "fc2_bias"):
        assert any(name in str(key) and value.any() for key, value in grads.items())
    results = run_layout(world, ParallelConfig(**sizes), STEPS, config=CONFIG, **SIZES)
    check_as_one_rank(results, one_rank)


def graphs_case(rank, world, layout, graphs):
    groups, small = make_groups(world, layout), replace(CONFIG, num_layers=2, full_attention_layers=(1,))
    (eager, _), (found, manager) = (run_graphed(each, groups, layout, small, 8) for each in (None, graphs))
    assert len(eager) == len(found) and all(map(torch.equal, eager, found))
    return manager is not None


@pytest.mark.parametrize(
    ("world", "sizes", "scope"),
    [
        (2, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, None),
        *full([(1, {}, "full_step"), (2, {"cp": 2}, None), (2, {"pp": 2}, None)]),
    ],
)
def test_graphs_are_bitwise_eager(world, sizes, scope):
    graphs = GraphConfig(enabled=True, warmup=1, **({} if scope is None else {"scope": (scope,)}))
    assert all(run_ranks(graphs_case, world, ParallelConfig(**sizes), graphs, timeout=120))


def symmetric_case(rank, world, graphs):
    layout = ParallelConfig(ep=2)
    groups, small = make_groups(world, layout), replace(CONFIG, num_layers=2, full_attention_layers=(1,))
    symmetric = replace(small, moe=replace(small.moe, dispatcher="symmetric", activation_stash=0.0))
    eager, _ = run_graphed(None, groups, layout, small, 6)
    found, manager = run_graphed(graphs, groups, layout, symmetric, 6)
    assert len(eager) == len(found) and all(map(torch.equal, eager, found))
    return manager.num_graphs


@pytest.mark.full
def test_biases_of_experts_in_symmetric_memory():
    """In graphs of whole layers, bit for bit as by an all-to-all."""
    assert all(run_ranks(symmetric_case, 2, GraphConfig(enabled=True, warmup=1), timeout=120))


def packed(groups, layout):
    trainer = make_trainer(groups, layout, config=CONFIG, samples=PackedSamples)
    return [trainer.train_step().loss.item(), trainer.evaluate().loss]


@pytest.mark.parametrize("sizes", [{"cp": 2}, *full([{"tp": 2, "sequence_parallel": True}])], ids=str)
def test_packed_documents(sizes):
    layout = ParallelConfig(**sizes)
    want = packed(make_groups(1, ParallelConfig()), ParallelConfig())
    for found in run_ranks(lambda rank, world: packed(make_groups(world, layout), layout), 2, timeout=120):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=0, atol=1e-10)


def test_what_takes_no_biases_of_experts_says_so():
    with pytest.raises(ValueError, match="set activation_stash 0 beside linear_bias"):
        replace(CONFIG.moe, dispatcher="symmetric")
    with pytest.raises(ValueError, match=r"no FP8 GEMM of experts has a bias; set moe\.linear_bias"):
        GroupedExperts(CONFIG).use_fp8(Fp8Recipe(32))
    recipe = load_recipe(CONFIGS / "gpt-oss-20b.toml")
    recipe = replace(recipe, train=replace(recipe.train, precision="fp8", fp8_block=32))
    with pytest.raises(ValueError, match="experts in FP8 have no biases: expected linear_bias false"):
        check_layout(recipe, 32)
