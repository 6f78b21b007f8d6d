"""Errors between the tables of a recipe and the ranks: all at once, with fields and values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastmp.config import DataConfig, GPTConfig, GraphConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig
from fastmp.plan.layout import check_layout, make_grid, problems

DENSE = GPTConfig(
    num_layers=8, hidden_size=64, num_heads=8, num_kv_heads=4, ffn_hidden_size=192, max_seq_len=64
)
EXPERTS = replace(
    DENSE, moe=MoEConfig(num_experts=8, expert_ffn_hidden_size=48, shared_expert_ffn_hidden_size=32)
)


def recipe(model=DENSE, *, seq_len=32, micro_batch_size=2, global_batch_size=16, **layout):
    return Recipe(
        model=model,
        parallel=ParallelConfig(**layout),
        data=DataConfig(seq_len=seq_len, micro_batch_size=micro_batch_size),
        train=TrainConfig(global_batch_size=global_batch_size),
    )


@pytest.mark.parametrize(
    ("made", "world_size"),
    [
        (recipe(), 1),
        (recipe(tp=4, cp=2, pp=2, sequence_parallel=True), 16),
        (recipe(pp=2, vpp=2, stage_layers=(0, 3, 3, 2)), 4),
        (recipe(pp=2, vpp=2, microbatch_group_size=3, global_batch_size=18), 2),
        (recipe(EXPERTS, tp=4, ep=8, etp=1, recompute=True, shard_recompute_input=True), 8),
        (recipe(EXPERTS, cp=8, ep=8), 8),
        (recipe(pp=4, vpp=2, schedule="dualpipe_v", global_batch_size=6), 4),
    ],
)
def test_what_fits_has_no_problems(made, world_size):
    assert problems(made, world_size) == [] and problems(made, None) == []
    check_layout(made, world_size)
    assert make_grid(made, world_size).world_size == world_size


PROBLEMS = [
    (recipe(tp=3), 4, "parallel.tp", "world_size 4 is not a multiple of tp 3 x cp 1 x pp 1 = 3"),
    (recipe(EXPERTS, ep=8), 4, "parallel.ep", "world_size 4 is not a multiple of tp 1 x ep 8 x pp 1 = 8"),
    (recipe(EXPERTS, tp=2, etp=3, ep=2), 4, "parallel.etp", "is not a multiple of etp 3 x ep 2 x pp 1 = 6"),
    (
        recipe(global_batch_size=1 << 50),
        1,
        "train.global_batch_size",
        "microbatches of a rank, more than 65536",
    ),
    (recipe(), 0, "world_size", "world_size must be positive, got 0"),
    (recipe(tp=8), 8, "parallel.tp", "num_kv_heads 4 is not divisible by tp 8"),
    (recipe(tp=3), 3, "parallel.tp", "num_heads 8 is not divisible by tp 3"),
    (
        recipe(replace(DENSE, ffn_hidden_size=90), tp=4),
        4,
        "parallel.tp",
        "ffn_hidden_size 90 is not divisible",
    ),
    (recipe(EXPERTS, ep=3), 3, "parallel.ep", "num_experts 8 is not divisible by ep 3"),
    (recipe(EXPERTS, etp=5), 5, "parallel.etp", "expert_ffn_hidden_size 48 is not divisible by etp 5"),
    (recipe(EXPERTS, tp=5), 5, "parallel.tp", "expert_ffn_hidden_size 48 is not divisible by tp 5"),
    (recipe(EXPERTS, tp=5), 5, "parallel.tp", "shared_expert_ffn_hidden_size 32 is not divisible by tp 5"),
    (recipe(seq_len=128), 1, "data.seq_len", "data.seq_len 128 is longer than model.max_seq_len 64"),
    (recipe(cp=3), 3, "data.seq_len", "seq_len 32 is not divisible by 2 x cp 3"),
    (
        recipe(seq_len=36, cp=2, tp=4, sequence_parallel=True),
        8,
        "data.seq_len",
        "by tp 4 x cp 2 under sequence",
    ),
    (
        recipe(seq_len=30, tp=4, sequence_parallel=True),
        4,
        "data.seq_len",
        "30 is not divisible by tp 4 under",
    ),
    (recipe(tp=2, tp_overlap=True), 2, "parallel.tp_overlap", "needs sequence_parallel=True, got"),
    (recipe(shard_recompute_input=True), 1, "parallel.shard_recompute_input", "got recompute=False and"),
    (
        recipe(seq_len=31, micro_batch_size=1, tp=3, recompute=True, shard_recompute_input=True),
        3,
        "parallel.shard_recompute_input",
        "1984 elements, is not divisible by tp 3",
    ),
    (recipe(pp=3), 3, "parallel.stage_layers", "num_layers 8 is not divisible by pp 3 x vpp 1 = 3 stages"),
    (recipe(pp=2, stage_layers=(4, 5)), 2, "parallel.stage_layers", "[4, 5] sum to 9, but num_layers is 8"),
    (
        recipe(pp=4, vpp=2, stage_layers=(2, 0, 2, 1, 1, 0, 1, 1)),
        4,
        "parallel.stage_layers",
        "[2, 0, 2, 1, 1, 0, 1, 1] leave pipeline rank 1 without a layer",
    ),
    (
        recipe(global_batch_size=10),
        4,
        "train.global_batch_size",
        "10 is not divisible by micro_batch_size 2 x 4",
    ),
    (
        recipe(pp=4, vpp=2, microbatch_group_size=3),
        4,
        "parallel.microbatch_group_size",
        "microbatch_group_size 3 is less than pp 4",
    ),
    (
        recipe(pp=4, schedule="dualpipe_v"),
        4,
        "parallel.vpp",
        "dualpipe_v needs vpp 2, got 1; use --vpp 2",
    ),
    (
        recipe(pp=4, vpp=2, microbatch_group_size=4, schedule="dualpipe_v"),
        4,
        "parallel.microbatch_group_size",
        "dualpipe_v has no microbatch groups, got microbatch_group_size 4; leave it out",
    ),
    (
        recipe(pp=4, vpp=2, schedule="dualpipe_v", stage_layers=(2, 2, 0, 1, 1, 0, 1, 1)),
        4,
        "parallel.stage_layers",
        "[2, 2, 0, 1, 1, 0, 1, 1] leave pipeline rank 2 without a layer",
    ),
    (
        recipe(pp=4, vpp=2, global_batch_size=12),
        4,
        "train.global_batch_size",
        "num_microbatches 6 leaves a last",
    ),
    (
        recipe(overlap_experts=True),
        1,
        "parallel.overlap_experts",
        "overlap_experts has no exchange to overlap: the model has no experts",
    ),
    (
        recipe(EXPERTS, tp=2, etp=1, overlap_experts=True),
        2,
        "parallel.overlap_experts",
        "overlap_experts has no exchange to overlap: the model has ep 1 x etp 1",
    ),
    (
        recipe(EXPERTS, ep=2, overlap_experts=True, global_batch_size=4),
        2,
        "parallel.overlap_experts",
        "overlap_experts runs two microbatches at once, but a step has 1 of a rank",
    ),
    (
        recipe(EXPERTS, ep=2, overlap_experts=True, recompute=True),
        2,
        "parallel.overlap_experts",
        "overlap_experts runs layers in parts, but parallel.recompute is set",
    ),
    (
        replace(
            recipe(EXPERTS, ep=2, overlap_experts=True), graphs=GraphConfig(enabled=True, scope=("full",))
        ),
        2,
        "parallel.overlap_experts",
        "overlap_experts runs layers in parts, which graphs.scope 'full' would run whole",
    ),
    (
        replace(
            recipe(EXPERTS, ep=2, overlap_experts=True),
            graphs=GraphConfig(enabled=True, impl="transformer_engine"),
        ),
        2,
        "parallel.overlap_experts",
        "overlap_experts runs layers in parts, which graphs.impl 'transformer_engine' would run whole",
    ),
    (
        recipe(EXPERTS, ep=2, pp=2, overlap_experts=True, schedule="zero_bubble"),
        4,
        "parallel.overlap_experts",
        "overlap_experts is of 1f1b and dualpipe_v, got 'zero_bubble'",
    ),
    (recipe(ep=2), 2, "parallel.ep", "parallel.ep is 2, but the model has no experts: model.moe is absent"),
    (recipe(etp=1), 2, "parallel.etp", "parallel.etp is 1, but the model has no experts"),
    (
        recipe(replace(EXPERTS, moe=MoEConfig(num_experts=8, top_k=1, capacity_factor=0.4)), tp=4),
        4,
        "model.moe.capacity_factor",
        "a capacity of 0.8 tokens is less than one: capacity_factor 0.4 x 16 tokens x top_k 1 / 8 experts",
    ),
    (
        recipe(replace(EXPERTS, moe=MoEConfig(num_experts=8, top_k=1, normalize_topk=True, aux_loss=0.0))),
        1,
        "model.moe.top_k",
        "top_k 1 with normalize_topk gives every expert the weight 1, and the router no gradient",
    ),
]


@pytest.mark.parametrize(("made", "world_size", "field", "message"), PROBLEMS, ids=[p[-1] for p in PROBLEMS])
def test_each_problem_names_the_field_to_change_and_the_values(made, world_size, field, message):
    found = [each for each in problems(made, world_size) if message in each.message]
    assert len(found) == 1 and found[0].fields[0] == field
    with pytest.raises(ValueError, match=f"change {field}"):
        check_layout(made, world_size)


def test_all_problems_are_in_one_error():
    made = recipe(tp=3, cp=4, pp=3, seq_len=36, global_batch_size=7)
    with pytest.raises(ValueError) as raised:
        check_layout(made, 8)
    first, *others = str(raised.value).splitlines()
    assert first == "recipe 'gpt' does not fit 8 ranks: "
    assert [line.partition(" is not")[0].strip() for line in others] == [
        "world_size 8",
        "num_heads 8",
        "num_kv_heads 4",
        "seq_len 36",
        "num_layers 8",
    ]


def test_a_rank_without_a_layer_is_one_problem():
    made = recipe(pp=4, vpp=2, stage_layers=(2, 0, 2, 1, 1, 0, 1, 1), global_batch_size=8)
    assert [problem.fields for problem in problems(made, 4)] == [("parallel.stage_layers",)]


def test_fields_are_those_of_the_recipe():
    for made, world_size, *_ in PROBLEMS:
        for problem in problems(made, world_size):
            for name in set(problem.fields) - {"world_size"}:
                value = replace(made, model=EXPERTS) if name.startswith("model.moe") else made
                for part in name.split("."):
                    value = getattr(value, part)


def test_fp8_blocks_divide_the_sizes_of_a_rank():
    model = GPTConfig(num_layers=2, hidden_size=256, num_heads=4, ffn_hidden_size=384)
    train = TrainConfig(precision="fp8", dtype="bfloat16")
    made = Recipe(model=model, train=train)
    assert problems(made, 1) == []
    wrong = replace(made, parallel=ParallelConfig(tp=2, tp_overlap=True, sequence_parallel=True))
    first, second = map(str, problems(wrong, 2))
    assert "FP8 blocks of 128 do not divide ffn_hidden_size / tp 2 = 192; change train.fp8_block" in first
    assert "tp_overlap" in second
    small = replace(wrong, parallel=ParallelConfig(tp=2), train=replace(train, fp8_block=32))
    assert problems(small, 2) == []
    moe = MoEConfig(num_experts=4, expert_ffn_hidden_size=128, dispatcher="symmetric")
    (stash,) = map(str, problems(replace(made, model=replace(model, moe=moe)), 1))
    assert "expected activation_stash 0, got 1.2" in stash
    with pytest.raises(ValueError, match="fp8_block must be 128 or 32, got 64"):
        replace(train, fp8_block=64)
