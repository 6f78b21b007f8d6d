"""Features x parallel layouts: what is trained in each case, and the comparison that ranks make of it.

A layout is a line of text, "WORLD key=value ... flag ...": the number of ranks and the fields of
`ParallelConfig`, such as "4 tp=2 pp=2 schedule=zero_bubble sp".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import expert_stand_in
import pytest
import torch
from rank_cases import in_turn
from train_tools import DENSE, EXPERTS, PRE, SHARED_EXPERT, BertSamples, PackedSamples
from trainer_tools import (
    BUCKETS,
    MICRO_BATCH,
    OPTIMIZER,
    check_replicas,
    check_resume,
    checksums,
    hooked,
    make_groups,
    make_trainer,
    run,
)

from fastmp.config import BertConfig, GPTConfig, LatentConfig, MoEConfig, ParallelConfig, RopeScaling
from fastmp.config.precision import Fp8Recipe
from fastmp.testing.ranks import run_ranks

MUON = replace(BUCKETS, name="muon")
FP8 = Fp8Recipe(32)  # whose blocks divide small models
FP8_MODEL = GPTConfig(
    **{"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    init_std=0.1,
    activation="swiglu",
    ffn_hidden_size=128,
    dense_layers=(0,),
    moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=64, shared_expert_ffn_hidden_size=64),
)
FP8_GATHERED = replace(FP8_MODEL, num_layers=2, ffn_hidden_size=192)
RAGGED = replace(OPTIMIZER, bucket_size=6000, bucket_unit=100)  # shards that begin and end in FP8 tiles
LATENT_ATTENTION = LatentConfig(kv_rank=32, q_rank=48, nope_size=16, rope_size=8, value_size=16)
LATENT = GPTConfig(
    **{"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    **{"init_std": 0.1, "norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 96},
    **{"linear_bias": False, "position": "rope", "rope_interleaved": True, "tie_embeddings": False},
    rope_scaling=RopeScaling("yarn", factor=4.0, original_max_seq_len=4, mscale_all_dim=1.0),
    latent=LATENT_ATTENTION,
    dense_layers=(0,),
    moe=MoEConfig(
        **{"num_experts": 4, "expert_ffn_hidden_size": 64, "shared_expert_ffn_hidden_size": 64},
        **{"score": "sigmoid", "expert_bias": True, "num_groups": 2, "group_topk": 1},
    ),
)
DIRECT = replace(
    LATENT, latent=replace(LATENT_ATTENTION, q_rank=None), rope_scaling=None, rope_interleaved=False
)
LATENT_FP8 = replace(
    LATENT, latent=replace(LATENT_ATTENTION, q_rank=64, rope_size=16), ffn_hidden_size=64, num_layers=2
)
SINKS = GPTConfig(  # as GPT-OSS
    **{"num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 131},
    **{"max_seq_len": 16, "init_std": 0.1, "norm": "rmsnorm", "activation": "clamped_swiglu"},
    **{"ffn_hidden_size": 96, "linear_bias": True, "position": "rope", "tie_embeddings": False},
    **{"sliding_window": 5, "full_attention_layers": (1, 3), "attention_sinks": True},
    moe=MoEConfig(
        **{"num_experts": 4, "expert_ffn_hidden_size": 64, "pre_softmax": False, "aux_loss": 0.01},
        **{"linear_bias": True, "router_bias": True},
    ),
)
MTP = GPTConfig(
    **{"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    **{"init_std": 0.1, "norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 48},
    **{"linear_bias": False, "position": "rope", "tie_embeddings": False, "mtp_depth": 1, "mtp_weight": 0.3},
    dense_layers=(0,),
    moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=24, expert_bias=True, aux_loss=0.01),
)
TIED_MTP = replace(MTP, mtp_depth=2, tie_embeddings=True)
DENSE_MTP = replace(TIED_MTP, moe=None, dense_layers=())
SHARED = replace(SHARED_EXPERT, num_layers=2)
DROPOUT = replace(SHARED, dropout=0.1, attention_dropout=0.1, moe=replace(SHARED.moe, jitter=0.1))
LLAMA = replace(DENSE, position="rope", norm="rmsnorm", tie_embeddings=False, num_kv_heads=2)
# A load-balancing loss is one of all tokens together: without it, experts see documents one by one as well.
MOE = replace(EXPERTS, position="rope", moe=replace(EXPERTS.moe, aux_loss=0.0))
POST = replace(PRE, bert=BertConfig(post_norm=True))


def with_moe(config, **changes):
    return replace(config, moe=replace(config.moe, **changes))


@dataclass(frozen=True)
class Feature:
    """One training configuration, on one rank and on several.

    Attributes:
        options: those of `make`, everywhere.
        on_ranks: options of layouts, in place of those.
        tolerance: of losses, gradients, parameters and evaluations.
        trains: parts of the names of parameters, each of which some gradient reaches.
    """

    options: dict[str, Any]
    on_ranks: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., Any] = make_trainer
    steps: int = 2
    tolerance: float = 1e-10
    trains: tuple[str, ...] = ()


def of(config, **options):
    """Options of two microbatches a step."""
    return {"config": config, "global_batch_size": 2 * MICRO_BATCH, **options}


ALL_GATHER = {"config": with_moe(SHARED, dispatcher="allgather")}
FEATURES = {
    "dense": Feature({"config": DENSE}, {"optimizer": BUCKETS}, steps=3),
    "experts": Feature({"config": EXPERTS}, {"optimizer": BUCKETS}, steps=3),
    "shared expert": Feature(of(SHARED), steps=3),
    "shared expert, allgather": Feature(of(SHARED), ALL_GATHER, steps=3),
    "dropout": Feature(of(DROPOUT, dtype=torch.float32)),
    "dropout, bfloat16": Feature(of(DROPOUT, dtype=torch.bfloat16)),
    "stand-in": Feature({"clip": 1.0}, {"buckets": 100}, expert_stand_in.make_trainer, steps=3),
    "bert": Feature({"config": PRE, "samples": BertSamples}, steps=3),
    "bert, post": Feature({"config": POST, "samples": BertSamples}, steps=3),
    "documents, dense": Feature({"config": DENSE, "samples": PackedSamples}),
    "documents, llama": Feature({"config": LLAMA, "samples": PackedSamples}),
    "documents, moe": Feature({"config": MOE, "samples": PackedSamples}),
    "documents, latent": Feature(of(LATENT, samples=PackedSamples)),
    "documents, sinks": Feature(of(SINKS, samples=PackedSamples)),
    "documents, mtp": Feature(of(MTP, samples=PackedSamples)),
    "fp8": Feature(of(FP8_MODEL, fp8=FP8)),
    "fp8, gathered": Feature(of(FP8_GATHERED, fp8=FP8, dtype=torch.bfloat16, optimizer=RAGGED)),
    "fp8, muon": Feature(
        of(FP8_MODEL, fp8=FP8, optimizer=replace(MUON, bucket_size=10**6)), steps=3, tolerance=1e-9
    ),
    "latent": Feature(of(LATENT)),
    "latent, direct": Feature(of(DIRECT)),
    "latent, fp8": Feature(of(LATENT_FP8, fp8=FP8), tolerance=1e-9),
    "sinks": Feature(of(SINKS), trains=("attention.sinks", "router.bias", "fc1_bias", "fc2_bias")),
    "mtp": Feature(of(MTP), trains=("mtp.0",)),
    "mtp, tied": Feature(of(TIED_MTP), trains=("mtp.0", "mtp.1")),
    "mtp, dense": Feature(of(DENSE_MTP), trains=("mtp.0", "mtp.1")),
    "muon": Feature({"config": EXPERTS, "optimizer": MUON}, tolerance=1e-8),
    "muon, dense": Feature({"config": DENSE, "optimizer": MUON}, tolerance=1e-8),
    "hooks": Feature({"config": EXPERTS}, {"optimizer": BUCKETS}, hooked),
    "hooks, overlap": Feature({"config": EXPERTS}, {"optimizer": BUCKETS, "overlap_experts": True}, hooked),
}


@cache
def one_rank(name: str):
    """Return `run` of a feature on one rank."""
    feature = FEATURES[name]
    found = run(feature.make(**feature.options), feature.steps)
    curve, _, grads, *_ = found
    assert curve[0] != curve[-1]
    for part in feature.trains:
        assert any(part in key and grad.any() for key, grad in grads.items()), part
    if any("mtp." in key for key in grads):
        assert all(mtp > 0.1 for _, mtp, *_ in curve)
    return found


def layout_of(text: str) -> tuple[int, ParallelConfig]:
    """Return the number of ranks and the sizes that a line of text describes."""
    world, *words = text.split()
    sizes: dict[str, Any] = {}
    for word in words:
        name, given, value = word.partition("=")
        parts = [int(part) if part.isdigit() else part for part in value.split(",")]
        sizes[name] = (parts[0] if len(parts) == 1 else tuple(parts)) if given else True
    if sizes.pop("sp", False):
        sizes["sequence_parallel"] = True
    return int(world), ParallelConfig(**sizes)


@cache
def groups_of(world, tp, cp, pp, ep, etp):
    return make_groups(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def groups_on(text):
    """Return the sizes of a layout and its groups, which its cases in the same ranks share."""
    world, layout = layout_of(text)
    return layout, groups_of(world, *(getattr(layout, axis) for axis in ("tp", "cp", "pp", "ep", "etp")))


def train_as_one_rank(rank, world, name, text):
    """Train a feature on a layout; return the first difference from one rank, and what ranks compare."""
    feature, (layout, groups) = FEATURES[name], groups_on(text)
    trainer = feature.make(groups, layout, **feature.options | feature.on_ranks)
    curve, counts, grads, params, biases, evaluation = found = run(trainer, feature.steps)
    difference = ""
    try:
        check_as_one_rank(found, one_rank(name), feature.tolerance)
    except AssertionError as error:
        difference = f"rank {rank}: {error}"
    return difference, (curve, counts, evaluation), {*grads, *params, *biases}, checksums(trainer)


def check_as_one_rank(found, one_rank, tolerance=1e-10):
    """Compare losses, norms, loads, gradients, parameters, biases and the evaluation of two `run`s."""
    curve, counts, *named, evaluation = found
    expected, expected_counts, *expected_named, expected_evaluation = one_rank
    close = partial(torch.testing.assert_close, rtol=0, atol=tolerance)
    close(torch.tensor(curve), torch.tensor(expected), msg=lambda text: f"curve: {text}")
    assert counts == expected_counts, "loads of experts differ"
    for what, ours, theirs in zip(("gradient", "parameter", "bias"), named, expected_named, strict=True):
        for key, value in ours.items():
            close(value, theirs[key], msg=lambda text, key=key, what=what: f"{what} {key}: {text}")
    assert abs(evaluation.loss - expected_evaluation.loss) < tolerance, (evaluation, expected_evaluation)
    assert evaluation.num_tokens == expected_evaluation.num_tokens


def check_ranks(name, ranks):
    """Check what all ranks of a case return: no difference, one curve, all parameters, equal replicas."""
    differences, curves, names, bits = zip(*ranks)
    assert not any(differences), next(filter(None, differences))
    assert all(curve == curves[0] for curve in curves), "bits of the curve differ between ranks"
    _, _, grads, params, biases, _ = one_rank(name)
    assert set.union(*names) == {*grads, *params, *biases}
    check_replicas(bits)


def resume(rank, world, name, text, folder):
    """Check that a run which resumes continues bitwise; return the names of the saved tensors."""
    feature, (layout, groups) = FEATURES[name], groups_on(text)
    options = feature.options | {"run_dir": str(folder / f"{name}, {text}")}
    return list(check_resume(partial(feature.make, groups, layout, **options), steps=4))


def batches(test_set: str, cases: Sequence[tuple], marks: Sequence[Any] = ()) -> list[Any]:
    """Return parameters of a test: groups of cases, which end with their layout, for ranks to run in turn.

    test_set: "quick", or the mark of the cases.
    """
    marks = [*marks, *([] if test_set == "quick" else [getattr(pytest.mark, test_set)])]
    worlds: dict[int, list[tuple]] = {}
    for each in cases:
        worlds.setdefault(int(each[-1].split()[0]), []).append(each)
    return [
        pytest.param(world, some[first : first + 12], id=f"{test_set}-{world}-{first}", marks=marks)
        for world, some in worlds.items()
        for first in range(0, len(some), 12)
    ]


def results_of(check: Callable[..., Any], world: int, cases: Sequence[tuple], **options) -> list[Any]:
    """Return for each case the list of what `check(rank, world, *case)` returns on its ranks, or an error.

    One group of ranks runs all cases. If one raises or hangs, which ends the group, each case gets a group;
    the time limit of the first group leaves time for that within pytest's.
    """
    try:
        if world == 1:
            return [[result] for result in in_turn(0, 1, check, cases)]
        return list(zip(*run_ranks(in_turn, world, check, cases, timeout=30 + 10 * len(cases), **options)))
    except Exception as error:
        if len(cases) == 1:
            return [error]
    return [result for case in cases for result in results_of(check, world, [case], **options)]


def check_each(cases, results, check):
    """Call `check(case, ranks)` for each case; raise one error that names all cases which fail."""
    failures = []
    for case, ranks in zip(cases, results, strict=True):
        try:
            if isinstance(ranks, Exception):
                raise ranks
            check(case, ranks)
        except Exception as error:
            failures.append(f"{', '.join(map(str, case))}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases fail\n" + "\n".join(failures)
