"""Whole steps in one graph are eager steps, bit for bit, on every layout that has one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import full
from test_train_documents import steps_of
from test_train_graphs import CONFIG, DENSE, EXPERTS, ONE, run
from test_train_pipeline import make_trainer
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastmp.config import GraphConfig, OptimizerConfig, ParallelConfig
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = GraphConfig(enabled=True, scope=("full_step",))
BUCKETS = OptimizerConfig(bucket_size=200)


def compare(groups=ParallelGroups.alone(), layout=ONE, steps=20, **options):
    graphed, graph = run(STEP, groups, layout, steps=steps, **options)
    eager, _ = run(None, groups, layout, steps=steps, **options)
    assert graph.num_graphs == 1
    assert len(graphed) == len(eager) and all(map(torch.equal, graphed, eager))


WHOLE = [
    (EXPERTS, ONE, 5),
    *full([(DENSE, ONE, 20), (EXPERTS, ParallelConfig(recompute=True), 20)]),
]


@pytest.mark.parametrize(("config", "layout", "steps"), WHOLE)
def test_a_rank_alone(config, layout, steps):
    compare(config=config, layout=layout, steps=steps)


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "layout", "steps"), WHOLE)
def test_a_gpu_alone(config, layout, steps):
    with sdpa_kernel(SDPBackend.MATH):  # whose backward adds up in one order
        compare(config=config, layout=layout, steps=steps, device="cuda")


def ranks_case(rank, world, grid, cases):
    groups = ParallelGroups.create(RankGrid(world_size=world, **grid))
    for config, layout, optimizer in cases:
        compare(groups, layout, config=config, optimizer=optimizer)


RANKS = {
    "tensor": (
        {"tp": 2},
        [
            (DENSE, ParallelConfig(tp=2, sequence_parallel=True), BUCKETS),
            (EXPERTS, ParallelConfig(tp=2, etp=1), BUCKETS),
        ],
    ),
    "data": (
        {},
        [
            (DENSE, ONE, BUCKETS),
            (EXPERTS, ParallelConfig(recompute=True), BUCKETS),
            (DENSE, ONE, replace(BUCKETS, name="muon", shard=False)),
        ],
    ),
    "pipeline": (
        {"pp": 2},
        [
            (DENSE, ParallelConfig(pp=2), BUCKETS),
            (CONFIG, ParallelConfig(pp=2, vpp=2), BUCKETS),
            (DENSE, ParallelConfig(pp=2, schedule="zero_bubble"), BUCKETS),
        ],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name):
    run_ranks(ranks_case, 2, *RANKS[name], timeout=180)


@pytest.mark.exhaustive
def test_a_pipeline_of_tensor_and_data_parallel_ranks():
    cases = [(DENSE, ParallelConfig(tp=2, pp=2, sequence_parallel=True), BUCKETS)]
    run_ranks(ranks_case, 8, {"tp": 2, "pp": 2}, cases, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    """The scale of a float16 loss changes inside the graph."""
    found = []
    for graphs in (STEP, None):
        trainer = make_trainer(config=DENSE, dtype=dtype, graphs=graphs, optimizer=OptimizerConfig())
        results = [trainer.train_step() for _ in range(12)]
        scale = [] if trainer.scaler is None else [trainer.scaler.scale]
        found.append([*(r.loss for r in results), *(r.grad_norm for r in results), *scale])
    assert all(torch.equal(a, b) or (a.isnan() & b.isnan()) for a, b in zip(*found))
    assert dtype != torch.float16 or int(trainer.optimizer.skipped_steps) > 0


@pytest.mark.full
def test_packed_documents():
    graphed, graph = steps_of(ParallelGroups.alone(), None, EXPERTS, STEP)
    assert graph.num_graphs == 1
    assert all(map(torch.equal, graphed, steps_of(ParallelGroups.alone(), None, EXPERTS, None)[0]))


def test_what_is_loaded_is_what_the_graph_reads(tmp_path):
    trainer = make_trainer(config=DENSE, graphs=STEP, run_dir=str(tmp_path))
    for _ in range(3):
        trainer.train_step()
    path = trainer.save()
    first = [trainer.train_step() for _ in range(3)]
    assert trainer.resume(path) and trainer.step == 3 and trainer.graphs.num_graphs == 1
    again = [trainer.train_step() for _ in range(3)]
    assert trainer.graphs.num_graphs == 1 and trainer.graphs.describe().startswith(
        "1 graph of the whole step"
    )
    assert all(
        torch.equal(a.loss, b.loss) and torch.equal(a.grad_norm, b.grad_norm) for a, b in zip(first, again)
    )
    trainer.close()
    assert trainer.graphs.num_graphs == 0 and trainer.train_step().loss.isfinite()


def exchange_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=2, ep=2))
    with pytest.raises(
        ValueError, match="scope 'full_step' cannot be captured, because dispatch, experts, comb"
    ):
        run(STEP, groups)


@pytest.mark.full
def test_experts_over_ranks_that_exchange_tokens_are_refused():
    run_ranks(exchange_case, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"verify_every": 4},
            "verify_every 4 compares the parts of a step, .* use scope 'full', or verify_ev",
        ),
        ({"scope": ("full_step", "attn")}, r"goes with no other, got \('full_step', 'attn'\)"),
        (
            {"impl": "transformer_engine"},
            "scope 'full_step' is of impl 'fastmp' only, got impl 'transformer_e",
        ),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        replace(STEP, **options)
