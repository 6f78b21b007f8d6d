"""Multi-token prediction in training: the same numbers on every layout, in graphs, overlapped and packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphed_trainers import run as run_graphed
from marks import exhaustive, full
from train_tools import PackedSamples
from trainer_tools import (
    MICRO_BATCH,
    check_as_one_rank,
    check_resume,
    make_groups,
    make_trainer,
    run,
    run_layout,
)

from fastmp.config import CheckpointConfig, GPTConfig, GraphConfig, MoEConfig, ParallelConfig
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = GPTConfig(
    **{"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    **{"init_std": 0.1, "norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 48},
    **{"linear_bias": False, "position": "rope", "tie_embeddings": False, "mtp_depth": 1, "mtp_weight": 0.3},
    dense_layers=(0,),
    moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=24, expert_bias=True, aux_loss=0.01),
)
TIED = replace(CONFIG, mtp_depth=2, tie_embeddings=True)
DENSE = replace(TIED, moe=None, dense_layers=())
CONFIGS = {"experts": CONFIG, "tied, depth 2": TIED, "dense": DENSE}
SIZES = {"global_batch_size": 2 * MICRO_BATCH}
STEPS = 2
ON_A_V = {"pp": 2, "vpp": 2, "stage_layers": (1, 1, 1, 0), "schedule": "dualpipe_v"}
LAYOUTS = {
    "pp, own stage": (2, {"pp": 2, "stage_layers": (3, 0)}),
    "tp, sp, ep": (2, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
    "cp": (2, {"cp": 2}),
    "tp": (2, {"tp": 2}),
    "dp": (2, {}),
    "ep": (2, {"ep": 2}),
    "pp, zero bubble": (2, {"pp": 2, "stage_layers": (2, 1), "schedule": "zero_bubble"}),
    "pp, vpp": (2, {"pp": 2, "vpp": 2, "stage_layers": (1, 1, 1, 0)}),
    "pp, on a v": (2, ON_A_V),
    "one rank, vpp": (1, {"vpp": 3}),
    "recompute": (2, {"tp": 2, "recompute": True}),
    "tp, sp, cp": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "all": (8, {"tp": 2, "pp": 2, "stage_layers": (2, 1), "ep": 2, "etp": 1, "sequence_parallel": True}),
}
QUICK = [("experts", "tp, sp, ep"), ("tied, depth 2", "pp, own stage")]
FULL = [
    *(("experts", name) for name in ("all", "recompute", "pp, on a v")),
    *(("tied, depth 2", name) for name in ("pp, vpp", "one rank, vpp")),
    *(("dense", name) for name in ("tp, sp, cp", "pp, zero bubble")),
]
CASES = [("experts", name) for name in LAYOUTS]
CASES += [
    ("tied, depth 2", name) for name in ("pp, own stage", "pp, vpp", "pp, on a v", "cp", "one rank, vpp")
]
CASES += [("dense", name) for name in ("tp, sp, cp", "pp, zero bubble")]


@pytest.fixture(scope="module")
def one_rank():
    return {name: run(make_trainer(config=config, **SIZES), STEPS) for name, config in CONFIGS.items()}


@pytest.mark.parametrize(
    ("config", "layout"),
    [*QUICK, *full(FULL), *exhaustive(case for case in CASES if case not in QUICK + FULL)],
)
def test_every_layout_is_one_rank(one_rank, config, layout):
    """Losses, norm and every gradient to 1e-10, replicas bitwise equal."""
    world, sizes = LAYOUTS[layout]
    curve, _, grads, *_ = one_rank[config]
    assert all(mtp > 0.1 for _, mtp, *_ in curve)
    results = run_layout(world, ParallelConfig(**sizes), STEPS, config=CONFIGS[config], **SIZES)
    check_as_one_rank(results, one_rank[config])
    assert {*grads} == {name for _, _, own, *_ in results for name in own}


def test_microbatches_do_not_change_the_loss():
    """Also where sequences predict different numbers of tokens."""
    curves = [
        run(make_trainer(config=DENSE, samples=PackedSamples, micro_batch=size, **SIZES), 1)[:3]
        for size in (MICRO_BATCH, 2)
    ]
    (want, _, grads), (found, _, others) = curves
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=0, atol=1e-10)
    for key, value in others.items():
        torch.testing.assert_close(value, grads[key], rtol=0, atol=1e-10, msg=key)


def graphs_case(rank, world, layout, graphs, options):
    groups, moe = make_groups(world, layout), replace(CONFIG.moe, **options.get("moe", {}))
    config, overlap = replace(CONFIG, moe=moe, dropout=0.1), options.get("overlap", False)
    ordinary = replace(CONFIG, dropout=0.1)
    eager, _ = run_graphed(None, groups, layout, ordinary, 8)
    found, manager = run_graphed(graphs, groups, layout, config, 8, overlap_experts=overlap)
    for ours, theirs in zip(found, eager, strict=True):
        # Overlapped backwards end at the layers: the embedding gets the gradients of its two uses one by one.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 if overlap else 0)
    return 0 if manager is None else manager.num_graphs


LAYERS = GraphConfig(enabled=True, warmup=1)
WHOLE, STEP = (replace(LAYERS, scope=(scope,)) for scope in ("full", "full_step"))
STASH = {"moe": {"dispatcher": "symmetric"}}


@pytest.mark.parametrize(
    ("world", "sizes", "graphs", "options"),
    [
        (1, {}, LAYERS, {}),
        *full(
            [
                (1, {}, STEP, {}),
                (2, {"ep": 2}, LAYERS, STASH),
                (2, {"ep": 2}, LAYERS, STASH | {"overlap": True}),
                (4, ON_A_V | {"ep": 2}, LAYERS, {"overlap": True}),
                (2, {"pp": 2, "stage_layers": (2, 1), "schedule": "zero_bubble"}, LAYERS, {}),
                (2, {"pp": 2, "vpp": 2, "stage_layers": (1, 1, 1, 0)}, WHOLE, {}),
            ]
        ),
        *exhaustive(
            [
                (1, {}, WHOLE, {}),
                (2, ON_A_V, WHOLE, {}),
                (2, {"ep": 2}, STEP, STASH),
                (2, {"ep": 2}, None, {"overlap": True}),
                (2, {"ep": 2}, LAYERS, {"overlap": True}),
                (2, {"pp": 2, "stage_layers": (3, 0)}, LAYERS, {}),
                (2, {"tp": 2, "recompute": True}, LAYERS, {}),
            ]
        ),
    ],
)
def test_graphs_and_overlap_are_eager(world, sizes, graphs, options):
    layout = ParallelConfig(**sizes)
    if world == 1:
        numbers = [graphs_case(0, 1, layout, graphs, options)]
    else:
        numbers = run_ranks(graphs_case, world, layout, graphs, options, timeout=120)
    assert all(numbers) == (graphs is not None)


def packed(groups, layout):
    trainer = make_trainer(groups, layout, config=CONFIG, samples=PackedSamples)
    result = trainer.train_step()
    return [result.loss.item(), result.mtp_loss.item(), trainer.evaluate().loss]


@pytest.mark.parametrize("sizes", [{"cp": 2}, *full([{"pp": 2, "stage_layers": (2, 1)}])], ids=str)
def test_packed_documents(sizes):
    layout = ParallelConfig(**sizes)
    want = packed(make_groups(1, ParallelConfig()), ParallelConfig())
    for found in run_ranks(lambda rank, world: packed(make_groups(world, layout), layout), 2, timeout=120):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=0, atol=1e-10)


def test_checkpoints_have_the_modules(tmp_path):
    options = SIZES | {"checkpoint": CheckpointConfig(), "run_dir": str(tmp_path)}
    saved = check_resume(lambda seed=11: make_trainer(config=CONFIG, seed=seed, **options))
    assert any("mtp.0.layers.3.moe.experts.fc1" in name for name in saved)
