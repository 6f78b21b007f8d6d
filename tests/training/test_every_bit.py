"""Graphs, symmetric memory and overlapped exchanges change no bit of what a feature trains on any layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import deep_ep_stand_in
import pytest
import torch
from feature_table import (
    DENSE,
    EXPERTS,
    FP8,
    FP8_MODEL,
    LATENT,
    LLAMA,
    MOE,
    MTP,
    POST,
    SHARED_EXPERT,
    SINKS,
    batches,
    check_each,
    groups_on,
    layout_of,
    of,
    results_of,
    with_moe,
)
from graphed_trainers import CONFIG, run
from graphed_trainers import DENSE as SMALL_DENSE
from graphed_trainers import EXPERTS as SMALL_EXPERTS
from marks import ON_GPUS
from train_tools import MAX_MASKED, PRE, BertSamples, PackedSamples, Samples
from trainer_tools import OPTIMIZER

import fastmp
from fastmp.config import GraphConfig, OptimizerConfig
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.training.graphing import CheckedStepGraphs

pytestmark = pytest.mark.usefixtures("one_thread")

BUCKETS = OptimizerConfig(bucket_size=200)
SYMMETRIC = with_moe(SMALL_EXPERTS, dispatcher="symmetric")
SMALL_FP8 = with_moe(replace(CONFIG, hidden_size=32, num_heads=2, num_layers=2), expert_ffn_hidden_size=32)


def small(config, **options):
    return {"config": config, "optimizer": BUCKETS, **options}


def documents(config):
    return {"config": config, "data": PackedSamples(4, 3, max_documents=12)}


def bert(config):
    masked = {"max_masked": 4 * MAX_MASKED, "static_shapes": True}
    return {"config": replace(config, dropout=0.1), "data": BertSamples(4), "bert": masked}


def exchanged(bucket=OPTIMIZER.bucket_size, config=(), dtype=torch.float32, samples=Samples, **moe):
    """Options of experts that exchange rows, four microbatches a step on any layout."""
    shared = replace(with_moe(SHARED_EXPERT, **moe), dropout=0.1, tie_embeddings=False)
    return {
        "config": replace(shared, **dict(config)),
        "optimizer": replace(OPTIMIZER, bucket_size=bucket),
        **{"dtype": dtype, "data": None, "samples": samples},
    }


RERUN = {"dispatcher": "symmetric", "symmetric_capacity": 1.0, "symmetric_overflow": "rerun"}
TRAINED = {  # name of a feature -> options of `graphed_trainers.run`
    "model": {"config": CONFIG},
    "interleaved": small(CONFIG),
    "dense": small(SMALL_DENSE),
    "experts": small(SMALL_EXPERTS),
    "symmetric": small(SYMMETRIC),
    "deep symmetric": small(replace(SYMMETRIC, num_layers=4)),
    "replicated muon": small(SMALL_DENSE, optimizer=replace(BUCKETS, name="muon", shard=False)),
    "bert": bert(PRE),
    "bert, post": bert(POST),
    "documents, dense": documents(DENSE),
    "documents, llama": documents(LLAMA),
    "documents, dropout": documents(replace(LLAMA, attention_dropout=0.1)),
    "documents, moe": documents(MOE),
    "documents, experts": documents(SMALL_EXPERTS),
    "fp8": {"config": SMALL_FP8, "fp8": FP8},
    "fp8, shared expert": of(FP8_MODEL, fp8=FP8, data=None, optimizer=OPTIMIZER, steps=3),
    "latent": {"config": replace(LATENT, num_layers=2)},
    "sinks": {"config": replace(SINKS, num_layers=2, full_attention_layers=(1,))},
    "mtp": {"config": replace(MTP, dropout=0.1)},
    "exchanges": exchanged(),
    "exchanges, documents": exchanged(samples=PackedSamples),
    "exchanges, bfloat16": exchanged(config={"tie_embeddings": True}, dtype=torch.bfloat16),
    "exchanges, allgather": exchanged(dispatcher="allgather"),
    "exchanges, allgather, documents": exchanged(samples=PackedSamples, dispatcher="allgather"),
    "exchanges, symmetric": exchanged(dispatcher="symmetric"),
    "exchanges, symmetric, buckets": exchanged(bucket=3000, dispatcher="symmetric"),
    "exchanges, symmetric, not shared": exchanged(shared_expert_ffn_hidden_size=0, dispatcher="symmetric"),
    "exchanges, rerun": exchanged(**RERUN),
    "exchanges, deepep": exchanged(dispatcher="deepep"),
    "exchanges, capacity": exchanged(capacity_factor=1.0),
    "exchanges, buckets": exchanged(bucket=3000),
    "exchanges, tied, dense first": exchanged(config={"tie_embeddings": True, "dense_layers": (0,)}),
    "exchanges, dense first": exchanged(config={"dense_layers": (0,)}),
    **{
        f"{name}, buckets of {size}": {
            "config": config,
            "optimizer": replace(OPTIMIZER, bucket_size=size),
            "data": None,
            "steps": 3,
        }
        for name, config in (("dense", DENSE), ("experts", EXPERTS))
        for size in (500, 20_000)
    },
}
SCOPES = {"layers": None, "full": ("full",), "full_step": ("full_step",), "moe_router": ("moe_router",)}
SCOPES["attention, experts"] = ("attn", "experts")
ON_A_V = "pp=2 vpp=2 schedule=dualpipe_v"
MTP_ON_A_V = "pp=2 vpp=2 stage_layers=1,1,1,0 schedule=dualpipe_v"
# Once for each group: schedules and recomputation leave the optimizer as it is.
EACH_GROUP = {
    "dense": "4 cp=2; 4 pp=2; 8 cp=2 tp=2 sp",
    "experts": "4 ep=2; 4 tp=2 ep=2 sp; 4 pp=2 vpp=2; 8 pp=2 vpp=2 tp=2 ep=2 etp=1",
}
OTHERS = {
    "dense": f"""4 recompute; 4 {ON_A_V} recompute; 8 pp=4; 8 pp=2 tp=2 sp; 4 pp=2 vpp=2;
        8 pp=4 vpp=2 schedule=dualpipe_v stage_layers=0,1,1,1,0,0,0,1""",
    "experts": f"""4 vpp=2 schedule=zero_bubble; 4 pp=2 schedule=zero_bubble;
        4 pp=2 stage_layers=3,1 recompute; 4 pp=2 vpp=2 stage_layers=1,0,3,0 microbatch_group_size=4;
        4 {ON_A_V}; 4 pp=2 vpp=2 ep=2; 4 pp=2 schedule=zero_bubble recompute; 8 pp=4 schedule=zero_bubble;
        8 cp=2 pp=2 vpp=2 ep=2; 8 pp=2 vpp=2 tp=2 sp recompute schedule=zero_bubble; 8 {ON_A_V} tp=2 sp""",
}


def sharded(size, layouts):
    return {(f"{name}, buckets of {size}", "replicated optimizer"): text for name, text in layouts.items()}


# (feature, what changes): layouts
QUICK = {
    ("model", "layers; verified"): "1",
    ("experts", "full; verified"): "1",
    ("experts", "full_step"): "1",
    ("documents, moe", "layers; verified"): "1",
    ("fp8", "layers; no stash"): "2 ep=2",
    ("fp8", "full_step; symmetric; no stash"): "2 ep=2",
    ("latent", "layers"): "1 recompute_kv",
    ("sinks", "layers"): "2 tp=2 ep=2 etp=1 sp",
    ("mtp", "layers"): "1",
    ("exchanges", "overlap"): "2 ep=2",
    ("exchanges", "layers; overlap"): "2 ep=2",
}
QUICK_ON_GPUS = {  # in the full set on CPUs
    ("model", "layers; verified"): f"2 pp=2 vpp=2; 2 pp=2 schedule=zero_bubble; 2 {ON_A_V}",
    ("model", "full; verified"): f"2 {ON_A_V}",
    ("symmetric", "full; verified"): "2 ep=2",
}
FULL_ON_GPUS = {  # and on CPUs
    ("dense", "full_step"): "2; 2 cp=2; 2 pp=2; 2 pp=2 schedule=zero_bubble",
    ("experts", "full_step"): "2 recompute",
    ("replicated muon", "full_step"): "2",
    ("symmetric", "full_step"): "2 ep=2; 2 ep=2 overlap_experts",
    ("interleaved", "full_step"): f"2 pp=2 vpp=2; 2 {ON_A_V}",
}
FULL_ON_ONE_GPU = {  # and on a CPU
    ("dense", "full; verified"): "1; 1 recompute",
    ("dense", "full_step"): "1",
    ("experts", "full_step"): "1 recompute",
}
FULL = {
    ("dense", "full; verified"): "2 tp=2 sp; 2 pp=2 schedule=zero_bubble",
    ("experts", "full; verified"): "2; 2 pp=2 stage_layers=2,0",
    ("interleaved", "full; verified"): "2 pp=2 vpp=2",
    ("symmetric", "full_step"): "4 ep=2 pp=2 overlap_experts",
    ("deep symmetric", "full_step"): f"4 ep=2 pp=2 vpp=2 overlap_experts; 4 ep=2 {ON_A_V} overlap_experts",
    ("documents, experts", "full_step"): "1",
    ("bert", "layers; verified"): "1",
    ("bert", "full; verified"): "1",
    ("bert, post", "layers; verified"): "1",
    ("bert, post", "full; verified"): "1",
    ("documents, llama", "layers; verified"): "1 recompute",
    ("documents, dropout", "layers; verified"): "1",
    ("documents, moe", "moe_router; verified"): "1",
    ("documents, moe", "full; verified"): "1 recompute",
    ("fp8", "full; symmetric; no stash"): "2 ep=2",
    ("fp8", "layers; symmetric; no stash"): "2 ep=2",
    ("fp8, shared expert", "overlap"): "2 ep=2",
    ("latent", "layers"): "2 tp=2 ep=2 etp=1 sp; 2 cp=2; 2 pp=2",
    ("latent", "full_step"): "1; 1 recompute_kv",
    ("latent", "full"): "2 cp=2 recompute_kv",
    ("sinks", "layers"): "2 cp=2; 2 pp=2",
    ("sinks", "full_step"): "2",
    ("sinks", "layers; symmetric; no stash"): "2 ep=2",
    ("mtp", "full_step"): "1",
    ("mtp", "layers; symmetric"): "2 ep=2",
    ("mtp", "layers; symmetric; overlap"): "2 ep=2",
    ("mtp", "layers; overlap"): f"4 {MTP_ON_A_V} ep=2",
    ("mtp", "layers"): "2 pp=2 stage_layers=2,1 schedule=zero_bubble",
    ("mtp", "full"): "2 pp=2 vpp=2 stage_layers=1,1,1,0",
    ("exchanges, documents", "overlap"): "4 pp=2 vpp=2 ep=2",
    ("exchanges, bfloat16", "overlap"): "2 ep=2",
    ("exchanges, allgather, documents", "overlap"): "2 ep=2",
    ("exchanges, symmetric", "overlap"): "2 ep=2; 4 pp=2 ep=2",
    ("exchanges, rerun", "overlap"): "2 ep=2",
    ("exchanges, deepep", "overlap"): "2 ep=2",
    ("exchanges, allgather", "overlap"): "2 ep=1 etp=2",
    ("exchanges", "overlap"): "4 tp=2 ep=2 etp=2 sp",
    ("exchanges, capacity", "overlap"): "4 tp=2 ep=2 etp=1",
    ("exchanges, tied, dense first", "overlap"): "4 pp=2 ep=2",
    ("exchanges, dense first", "overlap"): f"4 {ON_A_V} ep=2",
    ("exchanges, symmetric, buckets", "layers; overlap"): "2 ep=2",
    ("exchanges, symmetric, not shared", "attention, experts; overlap"): "2 ep=2",
    ("exchanges, bfloat16", "moe_router; overlap"): "2 ep=2",
    ("exchanges, rerun", "layers; overlap"): "2 ep=2",
    ("exchanges, deepep", "layers; overlap"): "2 ep=2",
    ("exchanges, dense first", "layers; overlap"): "4 pp=2 vpp=2 ep=2",
    ("exchanges, symmetric", "layers; verified; overlap"): "4 pp=2 ep=2",
    ("exchanges", "layers; overlap"): f"4 {ON_A_V} ep=2",
}
TENSOR = {("dense", "full_step"): "2 tp=2 sp", ("experts", "full_step"): "2 tp=2 etp=1"}  # also on GPUs
EXHAUSTIVE = {
    ("dense", "full_step"): "8 tp=2 pp=2 sp",
    ("documents, llama", "layers; verified"): "2 pp=2 vpp=2",
    ("documents, moe", "layers; verified"): "2 pp=2 schedule=zero_bubble recompute; 2 cp=2 ep=2",
    ("documents, dense", "full; verified"): "2 pp=2 stage_layers=0,4",
    ("documents, moe", "full; verified"): "2 tp=2 sp",
    ("mtp", "full"): f"1; 2 {MTP_ON_A_V}",
    ("mtp", "full_step; symmetric"): "2 ep=2",
    ("mtp", "overlap"): "2 ep=2",
    ("mtp", "layers; overlap"): "2 ep=2",
    ("mtp", "layers"): "2 pp=2 stage_layers=3,0; 2 tp=2 recompute",
    ("exchanges, buckets", "layers; overlap"): "4 ep=2",
    ("exchanges", "layers; overlap"): "4 tp=2 ep=2 etp=2 sp",
}
SHARDED = [sharded(500, OTHERS), sharded(20_000, OTHERS), sharded(20_000, EACH_GROUP)]
NUM_GRAPHS = {  # of each rank, in four microbatches that overlap; the last rank does not split the backward
    "2 pp=2 vpp=2": (14, 14),
    "2 pp=2 schedule=zero_bubble": (6, 10),
    "2 pp=2 stage_layers=2,0": (4, 2),
}


def cases_of(*tables):
    return [
        (*key, text.strip()) for table in tables for key, texts in table.items() for text in texts.split(";")
    ]


def changed(options, how):
    words = how.split("; ")
    config, changes = options["config"], {"overlap_experts": "overlap" in words}
    if words[0] in SCOPES:
        verify = 4 if "verified" in words else 0
        changes["graphs"] = GraphConfig(enabled=True, warmup=1, scope=SCOPES[words[0]], verify_every=verify)
    if "replicated optimizer" in words:
        changes["optimizer"] = replace(options["optimizer"], shard=False)
    if "no stash" in words:  # before symmetric memory, in which biases of experts go with none
        config = with_moe(config, activation_stash=0.0)
    if "symmetric" in words:
        config = with_moe(config, dispatcher="symmetric")
    return options | changes | {"config": config}


def compare_bits(rank, world, feature, how, text, device="cpu"):
    """Train a feature with and without a change; return the first difference and the number of graphs."""
    deep_ep_stand_in.install()
    # A warm-up, a recording, and two replays with an evaluation between them; two more for a verified step.
    options, (layout, groups) = {"steps": 6 if "verified" in how else 4} | TRAINED[feature], groups_on(text)
    device = fastmp.init().device if world > 1 else device
    found = []
    for each in (options, changed(options, how)):
        each = {"graphs": None, "overlap_experts": False, **each}
        each["overlap_experts"] |= layout.overlap_experts
        found.append(run(groups=groups, layout=layout, device=device, **each))
    (before, _), (after, graphs) = found
    # Overlapped backwards end at the layers: the embedding gets the gradients of its two uses one by one.
    tolerance = 1e-12 if "replicated" in how or (feature == "mtp" and "overlap" in how) else 0
    difference = "" if len(before) == len(after) else f"{len(before)} numbers without, {len(after)} with"
    for number, (ours, theirs) in enumerate(zip(after, before)):
        same = (
            torch.allclose(ours, theirs, rtol=0, atol=tolerance) if tolerance else torch.equal(ours, theirs)
        )
        if not same and not difference:
            difference = f"rank {rank}: number {number} of {len(before)} differs"
    if graphs is None:
        return difference, None
    planned = 2 if isinstance(graphs, CheckedStepGraphs) else 1
    if isinstance(graphs, GraphManager):
        planned = graphs.plan.num_graphs
        assert planned <= 3 * 4 * sum(map(len, graphs.captured_spans))
    if graphs.failure is not None or graphs.num_graphs != planned:
        difference = f"{graphs.failure}: {planned} graphs planned, {graphs.describe()}"
    return difference, graphs.num_graphs


def check_bits(case, ranks):
    _, how, text = case
    differences, numbers = zip(*ranks)
    assert not any(differences), next(filter(None, differences))
    _, layout = layout_of(text)
    if not how.startswith(tuple(SCOPES)):
        assert numbers == (None,) * len(ranks)
    elif how == "full; verified" and layout.schedule != "dualpipe_v":
        assert numbers == (NUM_GRAPHS[text] if layout.pp > 1 else (2,) * len(ranks)), numbers
    else:
        assert all(numbers), numbers


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        *batches("quick", cases_of(QUICK)),
        *batches(
            "full", cases_of(sharded(500, EACH_GROUP), FULL, FULL_ON_ONE_GPU, QUICK_ON_GPUS, FULL_ON_GPUS)
        ),
        *batches("exhaustive", cases_of(TENSOR, EXHAUSTIVE, *SHARDED)),
    ],
)
def test_no_bit_changes(world, cases):
    check_each(cases, results_of(compare_bits, world, cases), check_bits)


ON_A_GPU = {("experts", "full; verified"): "1", ("experts", "full_step"): "1"}


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        *batches("quick", cases_of(ON_A_GPU), [pytest.mark.gpu]),
        *batches("full", cases_of(FULL_ON_ONE_GPU), [pytest.mark.gpu]),
        *batches("quick", cases_of(QUICK_ON_GPUS), ON_GPUS.marks),
        *batches("full", cases_of(FULL_ON_GPUS), ON_GPUS.marks),
        *batches("exhaustive", cases_of(TENSOR), ON_GPUS.marks),
    ],
)
def test_no_bit_changes_on_gpus(world, cases):
    ranks = {"device": "cuda"} if world > 1 else {}
    results = results_of(partial(compare_bits, device="cuda"), world, cases, **ranks)
    check_each(cases, results, check_bits)
