"""Exchanges of experts beside another microbatch's compute: every bit as without, in the planned order."""

from __future__ import annotations

from dataclasses import replace

import deep_ep_stand_in
import pytest
import torch
from marks import exhaustive, full
from train_tools import SHARED_EXPERT, PackedSamples, Samples
from trainer_tools import OPTIMIZER, make_groups
from trainer_tools import make_trainer as make_any

from fastmp.config import GraphConfig, ParallelConfig, TrainConfig
from fastmp.nn import overlap
from fastmp.nn.gpt import GPT
from fastmp.nn.segment import LayerChain
from fastmp.pipeline.runner import Pipeline
from fastmp.pipeline.schedule import Schedule
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = replace(SHARED_EXPERT, dropout=0.1)
STEPS, MICROBATCHES = 2, 4
# World size, layout, and what else
CASES = [
    (2, {"ep": 2}, {}),
    *full(
        [
            (4, {"pp": 2, "vpp": 2, "ep": 2}, {"documents": True}),
            (2, {"ep": 2}, {"dtype": torch.bfloat16, "tied": True}),
            (2, {"ep": 2}, {"dispatcher": "allgather", "documents": True}),
            (2, {"ep": 2}, {"dispatcher": "symmetric"}),
            (2, {"ep": 2}, {"dispatcher": "symmetric", "room": 1.0}),  # steps are run again
            (2, {"ep": 2}, {"dispatcher": "deepep"}),
            (2, {"ep": 1, "etp": 2}, {"dispatcher": "allgather"}),
            (4, {"pp": 2, "ep": 2}, {"dispatcher": "symmetric"}),
            (4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, {}),
            (4, {"tp": 2, "ep": 2, "etp": 1}, {"capacity": 1.0}),
            (4, {"pp": 2, "ep": 2}, {"tied": True, "dense_layers": (0,)}),
            (4, {"pp": 2, "vpp": 2, "ep": 2, "schedule": "dualpipe_v"}, {"dense_layers": (0,)}),
        ]
    ),
]


def make_trainer(groups, layout, *, overlapped, dtype=torch.float32, documents=False, graphs=None, **options):
    moe = replace(CONFIG.moe, dispatcher=options.get("dispatcher", "alltoall"))
    moe = replace(moe, capacity_factor=options.get("capacity"))
    if "shared" in options:
        moe = replace(moe, shared_expert_ffn_hidden_size=options["shared"])
    if "room" in options:
        moe = replace(moe, symmetric_capacity=options["room"], symmetric_overflow="rerun")
    config = replace(
        CONFIG,
        moe=moe,
        tie_embeddings=options.get("tied", False),
        dense_layers=options.get("dense_layers", ()),
    )
    sizes = {"bucket_size": options["bucket"]} if "bucket" in options else {}
    return make_any(
        groups,
        layout,
        config=config,
        dtype=dtype,
        samples=PackedSamples if documents else Samples,
        optimizer=replace(OPTIMIZER, **sizes),
        graphs=graphs,
        overlap_experts=overlapped,
    )


def run(trainer, steps=STEPS):
    results = [trainer.train_step() for _ in range(steps)]
    numbers = [
        (r.loss.item(), r.aux_loss.item(), r.grad_norm.item(), r.expert_counts.tolist()) for r in results
    ]
    return numbers, [param.detach().clone() for param in trainer.model.parameters()]


@pytest.mark.parametrize(("world", "sizes", "options"), CASES)
def test_every_bit_is_as_without(world, sizes, options):
    layout = ParallelConfig(**sizes)

    def rank_main(rank, world_size):
        deep_ep_stand_in.install()
        groups = make_groups(world_size, layout)
        (plain, params), (numbers, overlapped) = (
            run(make_trainer(groups, layout, overlapped=overlapped, **options))
            for overlapped in (False, True)
        )
        return plain, numbers, [torch.equal(a, b) for a, b in zip(params, overlapped, strict=True)]

    for plain, numbers, equal in run_ranks(rank_main, world):
        assert numbers == plain and plain[0][0] > 0 and equal and all(equal)


# World size, layout, scope of graphs, and what else
GRAPHED = [
    (2, {"ep": 2}, None, {}),
    *full(
        [
            (2, {"ep": 2}, None, {"dispatcher": "symmetric", "bucket": 3000}),
            (2, {"ep": 2}, ("attn", "experts"), {"dispatcher": "symmetric", "shared": 0}),
            (2, {"ep": 2}, ("moe_router",), {"dtype": torch.bfloat16, "tied": True}),
            (2, {"ep": 2}, None, {"dispatcher": "symmetric", "room": 1.0}),  # steps are run again
            (2, {"ep": 2}, None, {"dispatcher": "deepep"}),
            (4, {"pp": 2, "vpp": 2, "ep": 2}, None, {"dense_layers": (0,)}),
            (4, {"pp": 2, "ep": 2}, None, {"dispatcher": "symmetric", "verify": 2}),
            (4, {"pp": 2, "vpp": 2, "ep": 2, "schedule": "dualpipe_v"}, None, {}),
        ]
    ),
    *exhaustive(
        [
            (4, {"ep": 2}, None, {"bucket": 3000}),
            (4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, None, {}),
        ]
    ),
]


@pytest.mark.parametrize(("world", "sizes", "scope", "options"), GRAPHED)
def test_what_computes_may_be_in_graphs(world, sizes, scope, options):
    layout = ParallelConfig(**sizes)
    graphs = GraphConfig(enabled=True, scope=scope, verify_every=options.get("verify", 0))

    def rank_main(rank, world_size):
        deep_ep_stand_in.install()
        groups = make_groups(world_size, layout)
        plain, params = run(make_trainer(groups, layout, overlapped=False, **options), 5)
        trainer = make_trainer(groups, layout, overlapped=True, graphs=graphs, **options)
        numbers, overlapped = run(trainer, 5)
        captured = (
            trainer.graphs.num_graphs,
            trainer.graphs.plan.num_graphs,
            sum(map(len, trainer.graphs.captured_spans)),
            trainer.graphs.failure,
        )
        trainer.close()
        return plain, numbers, [torch.equal(a, b) for a, b in zip(params, overlapped, strict=True)], captured

    for plain, numbers, equal, (captured, planned, runs, failure) in run_ranks(rank_main, world, timeout=120):
        assert numbers == plain and plain[0][0] > 0 and equal and all(equal)
        assert failure is None and captured == planned <= 3 * runs * MICROBATCHES


@pytest.mark.full
def test_a_forward_runs_beside_the_backward_before_it():
    def rank_main(rank, world_size):
        ran = []

        class Recorded(overlap._Microbatch):
            def forward(self, part, shared):
                ran.append(("forward", self._sections[part].name))
                super().forward(part, shared)

            def backward(self, part):
                which = self._parts[part]
                kind = "weights" if which.deferred else "backward"
                ran.append((kind, self._sections[which.first].name))
                super().backward(part)

        layout = ParallelConfig(ep=2)
        groups = make_groups(world_size, layout)
        trainer = make_trainer(groups, layout, overlapped=True)
        overlap._Microbatch = Recorded
        trainer.train_step()
        assert not trainer.runner.overlap._live
        return ran

    ran, same = run_ranks(rank_main, 2)
    assert ran == same
    runs = [
        f"{layer}.{part}" for layer in range(4) for part in ("attention", "dispatch", "experts", "combine")
    ]
    assert ran[:16] == [("forward", name) for name in runs]
    beside = ran[16 : 16 + 16 + 24]  # 16 parts forward, 16 back, 8 of weights
    assert [name for kind, name in beside if kind == "forward"] == runs
    assert [name for kind, name in beside if kind == "backward"] == runs[::-1]
    assert beside[:5] == [
        ("backward", "3.combine"),
        ("forward", "0.attention"),
        ("backward", "3.experts"),
        ("forward", "0.dispatch"),
        ("backward", "3.dispatch"),
    ]
    rest = ran[-24:]
    assert [name for kind, name in rest if kind == "backward"] == runs[::-1]
    assert rest[:3] == [("backward", "3.combine"), ("backward", "3.experts"), ("weights", "3.experts")]


def test_evaluation_is_as_ever_and_what_does_not_go_with_it_is_refused():
    layers = GPT(CONFIG).layers
    before = LayerChain.forward
    runs_parts = overlap.OverlappedLayers([layers])
    x_SBH = torch.randn(8, 2, CONFIG.hidden_size, requires_grad=True)
    with runs_parts.forward((0, 0)):
        out_SBH, *_ = layers(x_SBH)
    assert out_SBH.grad_fn is not None and runs_parts._live
    runs_parts.begin_step()
    assert not runs_parts._live
    layers.eval()
    with torch.no_grad(), runs_parts.forward((0, 0)):
        assert torch.equal(layers(x_SBH)[0], before(layers, x_SBH)[0])
    assert not runs_parts._live
    with pytest.raises(ValueError, match="layers are run in parts, which recompute=True does not know"):
        overlap.OverlappedLayers([GPT(CONFIG, recompute=True).layers])
    model, train = GPT(CONFIG), TrainConfig(steps=1, global_batch_size=4, eval_interval=0)
    with pytest.raises(
        ValueError, match="overlap_experts needs a model whose layers are a LayerChain; Linear"
    ):
        Trainer(torch.nn.Linear(2, 2), Samples(4), token_loss, train, overlap_experts=True)
    with pytest.raises(ValueError, match="has no exchange to overlap: no layer sends rows"):
        Trainer(model, Samples(4), token_loss, train, overlap_experts=True)
    with pytest.raises(ValueError, match="pairs of overlapped steps need overlap="):
        schedule = Schedule(1, 2, overlap=True)
        Pipeline([model], schedule.orders(), group=None, inputs=id, loss=id, pairs=schedule.all_pairs())
