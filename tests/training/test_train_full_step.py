"""Whole steps in one graph: 16 bits, resuming, evaluations, and what cannot be captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphed_trainers import CONFIG, DENSE, EXPERTS, ONE, make_graphed, run
from marks import full
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_tools import Samples
from trainer_tools import make_groups, make_trainer

from fastmp.config import GraphConfig, OptimizerConfig, ParallelConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = GraphConfig(enabled=True, scope=("full_step",))
EVALUATION = GraphConfig(enabled=True, evaluation=True)
BUCKETS = OptimizerConfig(bucket_size=200)
PIPELINE = ParallelConfig(ep=2, pp=2)
SHARED_MEMORY = replace(EXPERTS, moe=replace(EXPERTS.moe, dispatcher="symmetric"))


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
    groups = make_groups(2, ep=2)
    with pytest.raises(
        ValueError, match="scope 'full_step' cannot be captured, because dispatch, experts, comb"
    ):
        run(STEP, groups)
    with pytest.raises(
        ValueError, match="the evaluation cannot be one graph, because dispatch, experts, combine"
    ):
        evaluated(EVALUATION, groups, ParallelConfig(ep=2), EXPERTS)


@pytest.mark.full
def test_experts_over_ranks_that_exchange_tokens_are_refused():
    run_ranks(exchange_case, 2)


class HeldOut(Samples):
    """With seven batches to evaluate, of which a pipeline of four microbatches gets three at last."""

    def validation_batches(self, dp_rank, dp_size, *, max_batches=None):
        for number in range(7 if max_batches is None else max_batches):
            yield self.samples(10**6 + (number * dp_size + dp_rank) * self.micro_batch_size)


def evaluated(graphs, groups=ParallelGroups.alone(), layout=ONE, config=DENSE, device="cpu"):
    """The losses of some evaluations and of the steps between them; the graphs of the evaluations."""
    trainer = make_graphed(graphs, groups, layout, config, device=device, data=HeldOut(4))
    losses = []
    for _ in range(3):
        losses += [trainer.evaluate().loss, trainer.train_step().loss.item()]
        losses.append(trainer.evaluate(max_batches=1).loss)
    return losses, trainer.evaluation_graphs


def evaluations_case(rank, world, grid, config, layout, shapes, device="cpu"):
    given = make_groups(world, **grid), layout, config, device
    found, graphs = evaluated(EVALUATION, *given)
    assert graphs.num_graphs == shapes and "of the evaluation" in graphs.describe()
    assert found == evaluated(None, *given)[0]
    assert found == evaluated(replace(EVALUATION, scope=("full_step",)), *given)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "grid", "config", "layout", "shapes"),
    [
        (1, {}, EXPERTS, ONE, 1),
        (2, {}, DENSE, ONE, 1),
        (2, {"tp": 2}, DENSE, ParallelConfig(tp=2, sequence_parallel=True), 1),
        (2, {"ep": 2}, SHARED_MEMORY, ParallelConfig(ep=2), 1),
        (2, {"pp": 2}, CONFIG, ParallelConfig(pp=2, vpp=2), 3),
    ],
)
def test_evaluations(world, grid, config, layout, shapes):
    case = grid, config, layout, shapes
    run_ranks(evaluations_case, 2, *case) if world > 1 else evaluations_case(0, 1, *case)


def overflowing_case(rank, world, grid, layout, capacity):
    """Held-out batches that do not fit into symmetric memory are evaluated again, by all-to-all."""
    groups, rerun = make_groups(world, **grid), {"symmetric_overflow": "rerun", "activation_stash": 0.0}
    limited = replace(SHARED_MEMORY.moe, symmetric_capacity=capacity, **rerun)
    found, graphs = evaluated(EVALUATION, groups, layout, replace(SHARED_MEMORY, moe=limited))
    assert graphs.num_graphs > 0
    assert found == evaluated(None, groups, layout, EXPERTS)[0]


@pytest.mark.parametrize("capacity", [0.8, *full([1.2, 2.0])])
@pytest.mark.parametrize(
    ("grid", "layout"), [({"ep": 2}, ParallelConfig(ep=2)), *full([({"ep": 2, "pp": 2}, PIPELINE)])], ids=str
)
def test_evaluations_that_overflow_are_those_of_an_all_to_all(grid, layout, capacity):
    run_ranks(overflowing_case, 2 * layout.pp, grid, layout, capacity, timeout=180)


@pytest.mark.gpu
@pytest.mark.parametrize("config", (EXPERTS, *full([DENSE])))
def test_evaluations_on_a_gpu(config):
    with sdpa_kernel(SDPBackend.MATH):  # whose backward adds up in one order
        evaluations_case(0, 1, {}, config, ONE, 1, "cuda")


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
