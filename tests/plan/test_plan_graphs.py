"""`fastmp plan graphs` beside what a manager of graphs plans once it has seen the recipe's model run."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import deep_ep_stand_in
import pytest
import torch
from marks import full

from fastmp.apps import plan as command
from fastmp.config import (
    DataConfig,
    GPTConfig,
    GraphConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Documents
from fastmp.nn.overlap import OverlappedLayers
from fastmp.optim.from_config import make_grads
from fastmp.plan.graphs import graph_facts
from fastmp.plan.layout import make_grid, problems
from fastmp.plan.shapes import shapes_of
from fastmp.plan.step_report import step_program, step_specs
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks
from fastmp.training.graphing import make_graphs
from fastmp.training.language import gpt_and_loss
from fastmp.training.microbatches import MicrobatchRunner
from fastmp.training.trainer import Trainer

DENSE = GPTConfig(num_layers=4, hidden_size=16, num_heads=4, vocab_size=64, max_seq_len=16)
MOE = replace(DENSE, moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=8, aux_loss=0.1))
SHARED = replace(MOE, moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=8, shared_expert_ffn_hidden_size=8))
MIXED = replace(SHARED, dense_layers=(0, 2), qkv_bias=False)
AHEAD = replace(MIXED, position="rope", mtp_depth=2)
GATHERED = replace(MOE, moe=replace(MOE.moe, dispatcher="allgather", capacity_factor=1.0))
SYMMETRIC = replace(SHARED, moe=replace(SHARED.moe, dispatcher="symmetric"))
DEEPEP = replace(SHARED, moe=replace(SHARED.moe, dispatcher="deepep"))
FRONT = ["attention", "router", "preprocess"]
FULL = ["full"]


def recipe(model, microbatches=2, dp=1, **layout):
    return Recipe(
        model=model,
        parallel=ParallelConfig(**layout),
        data=DataConfig(seq_len=16, micro_batch_size=2),
        train=TrainConfig(global_batch_size=2 * microbatches * dp, dtype="float32"),
    )


def scoped(made, scope):
    return replace(made, graphs=GraphConfig(scope=None if scope is None else tuple(scope)))


ROOM = {"symmetric_capacity": 2.0, "symmetric_overflow": "rerun", "activation_stash": 0.0}
RERUN = recipe(replace(MIXED, moe=replace(SYMMETRIC.moe, **ROOM)), ep=2, dp=2)


def in_buckets(made, size):
    """The recipe with small buckets."""
    return replace(made, optimizer=OptimizerConfig(bucket_size=size))


def masked(made):
    return replace(made, data=replace(made.data, document_masking=True))


def size_of(made, dp):
    size = dp * made.parallel.tp * made.parallel.cp * made.parallel.pp
    assert problems(made, size) == []
    return size


CASES = {
    "dense": (recipe(DENSE), 1, None),
    "dense, buckets": (in_buckets(recipe(DENSE, dp=2), 5000), 2, None),
    "experts, buckets": (in_buckets(recipe(MOE, dp=2, microbatches=4, pp=2), 3000), 2, None),
    "tp, experts of replicas": (in_buckets(recipe(MOE, tp=2, etp=1), 3000), 1, None),
    "dense, mlp": (recipe(DENSE), 1, ["mlp"]),
    "recomputed": (recipe(DENSE, recompute=True), 1, None),
    "experts": (recipe(MOE), 1, None),
    "experts, front": (recipe(MOE), 1, FRONT),
    "experts, every other": (recipe(SHARED), 1, ["router", "shared_experts", "experts"]),
    "experts, back": (recipe(MOE), 1, ["preprocess", "combine"]),
    "ep": (recipe(MOE, ep=2, dp=2), 2, None),
    "ep, shared": (recipe(SHARED, ep=2, dp=2), 2, None),
    "ep, router": (recipe(SHARED, ep=2, dp=2), 2, ["router"]),
    "ep, all-gather": (recipe(GATHERED, ep=2, dp=2), 2, None),
    "ep, deepep": (recipe(DEEPEP, ep=2, dp=2), 2, None),
    "ep, symmetric": (recipe(SYMMETRIC, ep=2, dp=2), 2, None),
    "ep, symmetric, experts": (recipe(SYMMETRIC, ep=2, dp=2), 2, ["moe"]),
    "ep, symmetric, every other": (
        recipe(
            replace(SYMMETRIC, moe=replace(SYMMETRIC.moe, symmetric_capacity=1.5)),
            **{"tp": 2, "ep": 2, "etp": 1, "recompute": True},
        ),
        1,
        ["router", "shared_experts", "dispatch", "combine"],
    ),
    "ep, two at once": (
        in_buckets(recipe(MIXED, microbatches=3, ep=2, dp=2, overlap_experts=True), 3000),
        2,
        None,
    ),
    "ep, symmetric, two at once": (recipe(SYMMETRIC, ep=2, dp=2, overlap_experts=True), 2, None),
    "pp, vpp, two at once": (
        recipe(MIXED, microbatches=4, pp=2, vpp=2, ep=2, dp=2, overlap_experts=True),
        2,
        ["attn", "moe_router"],
    ),
    "documents, two at once": (masked(recipe(SHARED, ep=2, dp=2, overlap_experts=True)), 2, None),
    "ep, recomputed": (recipe(SHARED, ep=2, dp=2, recompute=True), 2, None),
    "recomputed, front": (recipe(MOE, microbatches=4, pp=2, recompute=True), 1, FRONT),
    "tp, sp": (recipe(DENSE, tp=2, sequence_parallel=True), 1, ["attention"]),
    "tp, etp": (recipe(SHARED, tp=2), 1, [*FRONT, "shared_experts", "experts"]),
    "etp beyond tp": (recipe(SHARED, etp=2, dp=2), 2, None),
    "tp, ep": (recipe(MOE, tp=2, ep=2, etp=1), 1, None),
    "cp": (recipe(DENSE, cp=2), 1, None),
    "pp": (recipe(DENSE, microbatches=4, pp=2), 1, ["attention"]),
    "pp, vpp": (recipe(MOE, microbatches=4, pp=2, vpp=2), 1, FRONT),
    "pp, zero bubble": (recipe(DENSE, microbatches=4, pp=2, schedule="zero_bubble"), 1, None),
    "pp, on a v": (recipe(DENSE, microbatches=5, pp=2, vpp=2, schedule="dualpipe_v"), 1, None),
    "full, pp, on a v": (recipe(MOE, microbatches=3, pp=2, vpp=2, schedule="dualpipe_v"), 1, FULL),
    "pp, on a v, two at once": (
        recipe(
            MIXED,
            **{"microbatches": 5, "pp": 2, "vpp": 2, "ep": 2, "dp": 2},
            **{"overlap_experts": True, "schedule": "dualpipe_v"},
        ),
        2,
        None,
    ),
    "pp, uneven": (recipe(DENSE, microbatches=3, pp=2, stage_layers=(3, 1)), 1, ["mlp"]),
    "full, experts": (recipe(MOE), 1, FULL),
    "some dense": (recipe(MIXED), 1, None),
    "some dense, front": (recipe(MIXED, dp=2, ep=2), 2, FRONT),
    "pp, some dense": (recipe(MIXED, microbatches=3, pp=2, stage_layers=(1, 3)), 1, ["attn", "mlp"]),
    "full, pp, some dense": (recipe(MIXED, microbatches=3, pp=2, stage_layers=(1, 3)), 1, FULL),
    "full, tp, sp": (recipe(DENSE, tp=2, sequence_parallel=True), 1, FULL),
    "full, cp": (recipe(DENSE, cp=2), 1, FULL),
    "full, pp, vpp": (recipe(MOE, microbatches=4, pp=2, vpp=2), 1, FULL),
    "full, pp, cp, zero bubble": (
        recipe(SHARED, microbatches=4, pp=2, cp=2, recompute=True, schedule="zero_bubble"),
        1,
        FULL,
    ),
    "documents": (masked(recipe(SHARED, cp=2, recompute=True)), 1, None),
    "documents, not in graphs": (masked(recipe(DENSE)), 1, ["mlp"]),
    "pp, documents": (masked(recipe(DENSE, microbatches=4, pp=2, schedule="zero_bubble")), 1, None),
    "full, documents": (masked(recipe(MOE)), 1, FULL),
    "full, pp, documents": (masked(recipe(DENSE, microbatches=4, pp=2, vpp=2)), 1, FULL),
    "mtp": (recipe(AHEAD, ep=2, dp=2), 2, None),
    "mtp, pp, zero bubble": (recipe(AHEAD, microbatches=4, pp=2, schedule="zero_bubble"), 1, FRONT),
    "mtp, two at once": (recipe(AHEAD, ep=2, dp=2, overlap_experts=True), 2, None),
    "full, mtp": (recipe(AHEAD), 1, FULL),
    "full, mtp, pp": (recipe(AHEAD, microbatches=3, pp=2, stage_layers=(4, 0)), 1, FULL),
    "full, mtp, pp, vpp": (masked(recipe(AHEAD, microbatches=4, pp=2, vpp=2)), 1, FULL),
    "full, pp, uneven": (recipe(MOE, microbatches=3, pp=2, stage_layers=(4, 0)), 1, FULL),
}


def seen_case(rank, world, made, scope):
    """Return the captured regions that a manager saw in a step, and the numbers of its plan."""
    deep_ep_stand_in.install()
    groups = ParallelGroups.create(make_grid(made, world))
    layout, number = made.parallel, shapes_of(made, world).num_microbatches
    rng = RngTracker(1)
    model, loss = gpt_and_loss(made.model, groups, layout, rng=rng)
    chunks = [model] if layout.pp * layout.vpp == 1 else model
    overlap = OverlappedLayers([each.layers for each in chunks]) if layout.overlap_experts else None
    runner = MicrobatchRunner(chunks, loss, groups=groups, num_microbatches=number, overlap=overlap)
    config = GraphConfig(enabled=True, scope=scope, warmup=1)
    span_size = (
        made.optimizer.bucket_size if make_grads(runner.chunks, made.optimizer, groups).communicates else None
    )
    manager = make_graphs(runner, config, rng=rng, device=torch.device("cpu"), span_size=span_size)
    manager.begin_step()
    tokens = torch.zeros(2, made.data.seq_len, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    if made.data.document_masking:
        position_ids = torch.arange(made.data.seq_len).repeat(2, 1)
        batch["documents"] = Documents.from_position_ids(position_ids, max_documents=2)
    runner.train(lambda microbatch: batch)
    manager.begin_step()
    planned, pp_rank = manager.plan, group_rank(groups.pp)
    return pp_rank, (planned.chunks, planned.num_graphs, planned.inputs(), planned.nbytes)


QUICK = {
    *(
        "dense",
        "experts, front",
        "recomputed, front",
        "pp, vpp",
    ),
    *("ep, two at once", "pp, uneven", "full, pp, cp, zero bubble", "some dense, front", "documents"),
}


@pytest.mark.parametrize(
    ("made", "dp", "scope"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, case in CASES.items()
    ],
)
def test_the_plan_is_that_of_a_manager(made, dp, scope):
    size = size_of(made, dp)
    facts = graph_facts(scoped(made, scope), size)
    seen = [seen_case(0, 1, made, scope)] if size == 1 else run_ranks(seen_case, size, made, scope)
    shapes = shapes_of(made, size)
    for rank, planned in seen:
        own = facts["ranks"][rank]
        chunks, graphs, inputs, nbytes = planned
        program, spans = step_program(made, shapes, rank, scope), [*chain(*chunks)]
        assert [span[1:] for span in spans] == [span[1:] for span in step_specs(made, shapes, program)]
        assert len(own["spans"]) == made.parallel.vpp
        if scope != ["full"]:  # where a manager calls them by the functions that it captures
            assert [span.name for span in spans] == [*chain(*own["spans"])]
        assert (graphs, inputs) == (own["graphs"], own["inputs"])
        assert nbytes == own["input_bytes"] + own["gradient_bytes"]
        assert own["graphs"] <= own["replays"]
        turns = made.parallel.placement == "v" and rank == made.parallel.pp - 1  # chunk 1 follows chunk 0
        assert own["lanes"] == (own["in_flight"] // 2 + 1 if turns else own["in_flight"])


def whole_step_case(rank, world, made):
    groups = ParallelGroups.alone() if world == 1 else ParallelGroups.create(make_grid(made, world))
    rng = RngTracker(1)
    model, loss = gpt_and_loss(made.model, groups, made.parallel, rng=rng)
    data, graphs = Batches(made), GraphConfig(enabled=True, scope=("full_step",), warmup=1)
    trainer = Trainer(model, data, loss, made.train, groups=groups, rng=rng, graphs=graphs)
    for _ in range(2):
        trainer.train_step()
    return trainer.graphs.num_graphs, trainer.graphs.static_bytes


class Batches:
    """Batches of a recipe, of zeros."""

    micro_batch_size = 2

    def __init__(self, made):
        self.made = made

    def batch(self, *_):
        tokens = torch.zeros(2, self.made.data.seq_len, dtype=torch.int64)
        batch = {"tokens": tokens, "targets": tokens}
        if self.made.data.document_masking:
            position_ids = torch.arange(self.made.data.seq_len).repeat(2, 1)
            batch["documents"] = Documents.from_position_ids(position_ids, max_documents=2)
        return batch


@pytest.mark.parametrize(
    "name", ["full, experts", *full(["full, documents", "full, pp, documents", "full, cp", "rerun"])]
)
def test_the_plan_of_a_whole_step_is_what_its_graph_has(name):
    made = RERUN if name == "rerun" else CASES[name][0]
    size = size_of(made, 2 if name == "rerun" else 1)
    seen = [whole_step_case(0, 1, made)] if size == 1 else run_ranks(whole_step_case, size, made)
    for own in graph_facts(scoped(made, ["full_step"]), size)["ranks"]:
        assert {(own["graphs"], own["input_bytes"] + own["gradient_bytes"])} == set(seen)


def test_buffers_follow_what_is_in_flight():
    for number in (8, 32):
        made = recipe(replace(DENSE, num_layers=16), microbatches=number, pp=4, vpp=2)
        ranks = graph_facts(scoped(made, ["attention"]), 4)["ranks"]
        peaks = [Schedule(4, number, 2).peak_in_flight(rank) for rank in range(4)]
        assert [own["inputs"] for own in ranks] == [2 * peak for peak in peaks] == [22, 18, 14, 10]
        assert [own["lanes"] for own in ranks] == peaks
        assert [own["replays"] for own in ranks] == [2 * 4 * number] * 4
        if number > 8:
            assert [own["graphs"] for own in ranks] == [2 * 4 * peak for peak in peaks]


TRAIN = '[train]\ndtype = "float32"\nglobal_batch_size = 32\n'


def run(capsys, tmp_path, *arguments, text=f"[parallel]\nep = 2\n[model.moe]\n{TRAIN}"):
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    status = command.main(["graphs", str(file), "--world-size", "2", *arguments])
    return status, capsys.readouterr()


def test_people_and_programs_read_it(capsys, tmp_path):
    status, text = run(capsys, tmp_path)
    assert status == 0 and text.err == ""
    assert "captured  attention, router, preprocess\n" in text.out
    why = "sizes of what other ranks send are known at run time"
    assert f"eager     dispatch, experts, combine: {why}\n" in text.out
    text = run(capsys, tmp_path, "--scope", "full", text=TRAIN)[1]
    assert text.err == "" and "captured  embedding, attention, mlp, loss\n" in text.out
    text = run(capsys, tmp_path, "--scope", "full_step", text=TRAIN)[1]
    assert "captured  embedding, attention, mlp, loss, sums over ranks, optimizer\n" in text.out
    facts = json.loads(run(capsys, tmp_path, "--json", "--scope", "attention")[1].out)
    assert facts["captured"] == ["attention"]
    (rank,) = facts["ranks"]
    hidden = 256 * 8 * 192 * 4
    assert (rank["graphs"], rank["inputs"], rank["input_bytes"]) == (8, 4, 4 * hidden)
    assert rank["spans"] == [["0.attention", "1.attention", "2.attention", "3.attention"]]


@pytest.mark.full
def test_the_page_shows_what_is_printed(capsys, tmp_path, monkeypatch):
    """And the picture of its example is drawn, to the names in it."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "cuda-graphs.md").read_text()
    [expected] = re.findall(r"\$ fastmp plan graphs mixtral.toml --world-size 64\n(.*?)```", page, re.DOTALL)
    text = (root / "configs" / "mixtral-8x7b.toml").read_text()
    (tmp_path / "mixtral.toml").write_text(
        text.replace("recompute = true", "recompute = true\npp = 4\nvpp = 2")
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["graphs", "mixtral.toml", "--world-size", "64"]
    assert command.main([*arguments, "--plot", "a.svg"]) == 0
    assert capsys.readouterr().out == expected
    drawn = (tmp_path / "a.svg").read_text()
    for words in ("graph: forward of run 1", "graph: backward of run 0", "eager", "combine"):
        assert f"<!-- {words} -->" in drawn
    by_ranks = [
        "graphs",
        str(root / "configs" / "qwen3-30b-a3b.toml"),
        "--dispatcher",
        "symmetric",
        "--ep",
        "8",
    ]
    for size, words in (("64", "forward of run 1"), ("32", "backward of run 0")):  # each layer fills a bucket
        assert command.main([*by_ranks, "--world-size", size, "--plot", "b.svg"]) == 0
        drawn = (tmp_path / "b.svg").read_text()
        assert f"<!-- graph: {words} -->" in drawn and "<!-- eager -->" not in drawn
    assert command.main([*arguments, "--plot", "a.xyz"]) == 2
    assert "xyz" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command.main([*arguments, "--plot", "a.svg"]) == 2
    assert "matplotlib is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (
            ("--scope", "moe"),
            TRAIN,
            "graphs: scope ['moe'] names no segment; choose from ['attention', 'attn', 'mlp']",
        ),
        (
            ("--scope", "full"),
            f"[parallel]\nep = 2\n[model.moe]\n{TRAIN}",
            "graphs: scope 'full' cannot be captured, because dispatch, experts, combine must run eagerly",
        ),
        ((), "[parallel]\ntp = 4\n", "world_size 2 is not a multiple of tp 4"),
    ],
)
def test_what_does_not_fit(capsys, tmp_path, arguments, text, message):
    status, said = run(capsys, tmp_path, *arguments, text=text)
    assert status == 2 and said.out == "" and said.err.startswith("fastmp plan graphs: ")
    assert message in said.err
