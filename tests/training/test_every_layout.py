"""Every feature trains on every parallel layout as on one rank, and continues bitwise when it resumes."""

from __future__ import annotations

from functools import partial

import pytest
from feature_table import (
    batches,
    check_each,
    check_ranks,
    layout_of,
    one_rank,
    results_of,
    resume,
    train_as_one_rank,
)

from fastmp.training.checkpoint.format import read_manifest

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {
    "dense": "2 cp=2; 2 recompute; 2 pp=2; 2 pp=2 vpp=2 schedule=dualpipe_v recompute",
    "experts": """2 vpp=2 schedule=zero_bubble; 2 pp=2 vpp=2; 2 pp=2 schedule=zero_bubble;
        2 pp=2 stage_layers=3,1 recompute; 2 pp=2 vpp=2 schedule=dualpipe_v;
        2 pp=2 vpp=2 stage_layers=1,0,3,0 microbatch_group_size=4""",
    "shared expert": "2 tp=2 ep=2 etp=1 sp; 2 tp=2 etp=2 recompute",
    "shared expert, allgather": "2 ep=2 etp=1",
    "stand-in": "2 tp=2 ep=2 etp=1; 4 tp=2 ep=2 etp=2",
    "bert": "2 pp=2 vpp=2",
    "documents, sinks": "2 cp=2",
    "documents, mtp": "2 cp=2",
    "fp8": "2 tp=2 ep=2 etp=1 sp; 2 pp=2 schedule=zero_bubble",
    "fp8, muon": "2 tp=2",
    "latent": "2 tp=2 ep=2 etp=1 sp; 2 cp=2; 1 recompute_kv",
    "latent, fp8": "2 tp=2 sp",
    "sinks": "2 tp=2 ep=2 etp=1 sp; 2 cp=2",
    "mtp": "2 tp=2 ep=2 etp=1 sp",
    "mtp, tied": "2 pp=2 stage_layers=3,0",
    # The second rank has no layers, and nothing for Muon.
    "muon": "2 ep=2; 2 pp=2 vpp=2 stage_layers=1,0,3,0 microbatch_group_size=4",
    "muon, dense": "2 tp=2 sp",
    "hooks": "1 vpp=2 schedule=dualpipe_v; 2 pp=2 schedule=zero_bubble; 2 tp=2 sp",
}
FULL = {
    "dense": "1 vpp=2",
    "experts": "1 vpp=4 schedule=zero_bubble; 1 vpp=2 schedule=dualpipe_v",
    "shared expert": """2 tp=2 ep=2 etp=1; 4 tp=2 ep=2 etp=1 sp recompute; 4 ep=2 etp=2; 4 tp=4 ep=4 etp=1;
        8 tp=2 ep=2 etp=2 sp; 8 tp=2 ep=8 etp=1""",
    "shared expert, allgather": "4 tp=2 ep=2 etp=2",
    "stand-in": """2 ep=2 etp=1; 2 tp=2 etp=2; 2 etp=2; 4 tp=2 ep=2 etp=1; 4 ep=4 etp=1; 4 tp=4 ep=2 etp=2;
        4 tp=4 etp=1; 8 tp=2 ep=2 etp=2; 8 tp=2 ep=4 etp=1; 8 tp=4 ep=8 etp=1""",
    "bert": "4 tp=2 pp=2 schedule=zero_bubble recompute; 2",
    "bert, post": "2 tp=2 sp; 2 pp=2 vpp=2 schedule=dualpipe_v",
    "documents, moe": "2 pp=2 vpp=2 schedule=zero_bubble recompute",
    "documents, latent": "2 cp=2; 2 tp=2 sp; 2 cp=2 recompute_kv",
    "documents, sinks": "2 tp=2 sp",
    "documents, mtp": "2 pp=2 stage_layers=2,1",
    "fp8": """2 tp=2; 2; 2 etp=2; 2 cp=2; 2 pp=2 vpp=2; 2 pp=2 vpp=2 schedule=dualpipe_v; 2 ep=2 recompute;
        4 tp=2 pp=2 sp schedule=zero_bubble; 4 ep=2 etp=2; 8 tp=2 pp=2 ep=2 etp=1 sp""",
    "fp8, muon": "2; 2 pp=2; 2 ep=2",
    "latent": """2 tp=2; 2; 2 pp=2 schedule=zero_bubble; 2 pp=2 vpp=2; 2 ep=2; 2 etp=2; 2 tp=2 recompute;
        2 tp=2 sp recompute_kv; 4 tp=2 cp=2 sp recompute_kv; 2 pp=2 schedule=zero_bubble recompute_kv;
        4 tp=2 cp=2; 4 tp=2 cp=2 sp; 8 tp=2 pp=2 ep=2 etp=1 sp""",
    "latent, direct": "2 tp=2; 2 tp=2 ep=2 etp=1 sp; 4 tp=2 cp=2 sp",
    "sinks": """2 tp=2; 2; 2 pp=2 schedule=zero_bubble; 2 pp=2 vpp=2; 2 ep=2; 2 etp=2; 2 tp=2 recompute;
        4 tp=2 cp=2; 4 tp=2 cp=2 sp; 8 tp=2 pp=2 ep=2 etp=1 sp""",
    "mtp": """8 tp=2 pp=2 stage_layers=2,1 ep=2 etp=1 sp; 2 tp=2 recompute;
        2 pp=2 vpp=2 stage_layers=1,1,1,0 schedule=dualpipe_v""",
    "mtp, tied": "2 pp=2 vpp=2 stage_layers=1,1,1,0; 1 vpp=3",
    "mtp, dense": "4 tp=2 cp=2 sp; 2 pp=2 stage_layers=2,1 schedule=zero_bubble",
    "muon": "4 pp=2 vpp=2 ep=2; 4 tp=2 ep=2; 4 tp=4 etp=2",
    "muon, dense": "4",
    "hooks": """2 pp=2 vpp=2 schedule=dualpipe_v recompute; 4 pp=2 vpp=2 tp=2 sp schedule=dualpipe_v;
        4 pp=2 ep=2 schedule=zero_bubble""",
    "hooks, overlap": "2 ep=2",
}
EXHAUSTIVE = {
    "dense": """4 pp=4; 4 cp=2 tp=2 sp; 4 pp=2 tp=2 sp; 4 pp=2 vpp=2;
        4 pp=4 vpp=2 schedule=dualpipe_v stage_layers=0,1,1,1,0,0,0,1""",
    "experts": """4 pp=2 schedule=zero_bubble recompute; 4 pp=4 schedule=zero_bubble;
        4 cp=2 pp=2 vpp=2 ep=2; 4 pp=2 vpp=2 tp=2 ep=2 etp=1;
        4 pp=2 vpp=2 tp=2 sp recompute schedule=zero_bubble; 4 pp=2 vpp=2 ep=2;
        4 pp=2 vpp=2 tp=2 sp schedule=dualpipe_v; 8 pp=2 vpp=2 tp=2 ep=2 sp; 8 pp=4 ep=2 etp=1;
        8 cp=2 pp=2 vpp=2 tp=2 ep=4 etp=1 sp; 8 cp=8 ep=8""",
    "documents, dense": "4 pp=4; 4 cp=2 pp=2",
    "documents, llama": "4 pp=2 vpp=2 tp=2 sp; 4 pp=2 stage_layers=0,4",
    "documents, moe": """4 ep=2 pp=2 schedule=zero_bubble; 4 cp=2 ep=2 tp=2 etp=1;
        4 pp=2 vpp=2 ep=2 schedule=dualpipe_v""",
    "mtp": """2 pp=2 stage_layers=3,0; 2 cp=2; 2 tp=2; 2; 2 ep=2; 1 vpp=3;
        2 pp=2 stage_layers=2,1 schedule=zero_bubble; 2 pp=2 vpp=2 stage_layers=1,1,1,0; 4 tp=2 cp=2 sp""",
    "mtp, tied": "2 pp=2 vpp=2 stage_layers=1,1,1,0 schedule=dualpipe_v; 2 cp=2",
}


def cases_of(table):
    return [(name, text.strip()) for name, layouts in table.items() for text in layouts.split(";")]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        *batches("quick", cases_of(QUICK)),
        *batches("full", cases_of(FULL)),
        *batches("exhaustive", cases_of(EXHAUSTIVE)),
    ],
)
def test_every_layout_is_one_rank(world, cases):
    for name, _ in cases:
        one_rank(name)  # before ranks are forked, which share it
    results = results_of(train_as_one_rank, world, cases)
    check_each(cases, results, lambda case, ranks: check_ranks(case[0], ranks))


RESUMED = {
    "stand-in": "2 tp=2 ep=2 etp=1",
    "dropout": "2 tp=2 ep=2 etp=1",
    "mtp": "1",
    "fp8, gathered": "2",
}
RESUMED_FULL = {
    "stand-in": "2 ep=2 etp=1; 4 tp=2 ep=2 etp=1; 4 tp=2 etp=2; 4 ep=2 etp=2",
    "dropout, bfloat16": "1; 4 tp=2 ep=2 etp=1",
}


@pytest.mark.parametrize(
    ("world", "cases"),
    [*batches("quick", cases_of(RESUMED)), *batches("full", cases_of(RESUMED_FULL))],
)
def test_resume_is_bitwise(tmp_path, world, cases):
    """Also with dropout and jitter; each shard is saved once, and with it biases and further modules."""

    def check(case, ranks):
        (name, text), (names, *_) = case, ranks
        if name.startswith("dropout"):
            assert sum(each.endswith("expert_bias") for each in names) == 2
        if name == "mtp":
            assert any("mtp.0.layers.3.moe.experts.fc1" in each for each in names)
        if name == "stand-in":
            _, layout = layout_of(text)
            (path,) = (tmp_path / f"{name}, {text}" / "gpt" / "checkpoints").glob("step-*")
            tensors = read_manifest(path).tensors
            assert len(tensors["model/experts.up"].shards) == layout.ep * (layout.etp or layout.tp)
            assert len(tensors["model/up.weight"].shards) == layout.tp

    check_each(cases, results_of(partial(resume, folder=tmp_path), world, cases), check)
