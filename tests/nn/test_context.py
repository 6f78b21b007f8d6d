"""A sequence cut over ranks is the whole sequence: loss and every gradient, with equal work on every rank."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from context_tools import BY_LENGTH, MODELS, run_step
from nn_tools import assert_same_gradients, text

from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement, SelfAttention, TransformerLayer
from fastmp.nn import core_attention as attention_layer
from fastmp.nn.dropout import Dropout
from fastmp.nn.moe.router import Router
from fastmp.tensor_parallel.context import cut_sequence, join_sequence
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks
from tools.small_models import EXPERTS, QWEN, SEED, SMALL, make_gpt

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def own_sequences(x_BS, groups):
    """This rank's slices of its sequences, from the sequences of all data-parallel ranks."""
    x_BS = x_BS.chunk(group_size(groups.dp))[group_rank(groups.dp)]
    return cut_sequence(x_BS, groups.cp)


def whole_and_cut(rank, world, layout, name, options):
    config = (MODELS | BY_LENGTH)[name]
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    generator = torch.Generator().manual_seed(11)
    tokens_BS, targets_BS = text(config, batch=4, sequence=32)
    weight_BS = torch.rand(tokens_BS.shape, dtype=torch.float64, generator=generator)
    batches = list(zip(*(x.chunk(2) for x in (tokens_BS, targets_BS, weight_BS))))
    one, many = make_gpt(config), make_gpt(config, groups, **options)
    expected = run_step(one, batches, ParallelGroups.alone())
    actual = run_step(many, [[own_sequences(x, groups) for x in batch] for batch in batches], groups)

    def same(what, ours, whole):
        torch.testing.assert_close(ours, whole, msg=lambda text: f"{what}: {text}", **CLOSE)

    for ours, whole in zip(actual[0], expected[0], strict=True):
        same("loss", ours, own_sequences(whole, groups))
    same("auxiliary loss", actual[1], expected[1])
    same("counts", actual[2], expected[2])
    assert_same_gradients(many, one, groups, "main_grad")
    with torch.no_grad():
        one.eval(), many.eval()
        whole = one.loss(*batches[0][:2])
        loss = many.loss(*(own_sequences(x, groups) for x in batches[0][:2]))
        if config.moe is not None:
            loss, whole = loss.tokens, whole.tokens
        same("evaluation", join_sequence(loss, groups.cp), whole.chunk(groups.grid.dp)[group_rank(groups.dp)])


SEQUENCE, RECOMPUTE = {"sequence_parallel": True}, {"recompute": True}
CASES = [  # `test_layouts` draws all else
    ("gpt2", 2, {"cp": 2}, {}),
    ("qwen3", 4, {"cp": 2, "tp": 2}, SEQUENCE),
    pytest.param("window", 2, {"cp": 2}, RECOMPUTE, marks=pytest.mark.full),
    *(pytest.param(name, 2, {"cp": 2}, RECOMPUTE, marks=pytest.mark.full) for name in BY_LENGTH),
    pytest.param("window", 4, {"cp": 4}, {}, marks=pytest.mark.full),
    pytest.param(
        "qwen3", 4, {"cp": 2, "tp": 2}, RECOMPUTE | {"shard_recompute_input": True}, marks=pytest.mark.full
    ),
    pytest.param("moe", 2, {"cp": 2, "ep": 2}, RECOMPUTE, marks=pytest.mark.full),
    ("moe", 4, {"cp": 2, "tp": 2, "ep": 4, "etp": 1}, SEQUENCE | RECOMPUTE),
    pytest.param(
        *("moe", 4, {"cp": 2, "tp": 2, "ep": 2, "etp": 2}),
        RECOMPUTE | {"shard_recompute_input": True},
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("name", "world", "layout", "options"), CASES)
def test_loss_and_every_gradient(name, world, layout, options):
    run_ranks(whole_and_cut, world, layout, name, options)


def groups_of(world, **layout):
    return ParallelGroups.create(RankGrid(world_size=world, **layout))


# (forward, backward) of the whole model: each layer gathers keys and values together.
COLLECTIVES = {
    False: lambda L: ({"all_gather": L}, {"reduce_scatter": L}),
    True: lambda L: ({"all_gather": L}, {"all_gather": L, "reduce_scatter": L}),
}


def collectives_case(rank, world):
    config, groups = MODELS["qwen3"], groups_of(world, cp=world)
    for recompute, expected in COLLECTIVES.items():
        model = make_gpt(config, groups, recompute=recompute)
        with count_collectives() as forward:
            loss = model.loss(*(cut_sequence(x, groups.cp) for x in text(config))).sum()
        with count_collectives() as backward:
            loss.backward()
        assert (forward.counts, backward.counts) == expected(config.num_layers)
        keys_and_values = (16, 3, config.kv_heads, 2, config.head_dim)
        assert all(math.prod(shapes[0]) == math.prod(keys_and_values) for _, shapes in forward.calls)


def test_one_gather_and_one_reduce_scatter_a_layer():
    run_ranks(collectives_case, 2)


def pairs_case(rank, world):
    """Return the number of (query, key) pairs this rank attends to."""
    pairs, attend = [], attention_layer.attend

    def count(q, k, v, **options):
        C, E = q.shape[2], k.shape[2]
        pairs.append(C * (E - C) + C * (C + 1) // 2)
        return attend(q, k, v, **options)

    attention_layer.attend = count
    attention = SelfAttention(SMALL, Placement(groups_of(world, cp=world)))
    attention(torch.randn(48 // world, 1, SMALL.hidden_size))
    return sum(pairs)


@pytest.mark.parametrize("world", (2, 4))
def test_every_rank_attends_to_equally_many_pairs(world):
    pairs = run_ranks(pairs_case, world)
    assert pairs == [48 * 49 // 2 // world] * world  # together each pair of the whole sequence once


PADDING = {
    "none": None,
    "right": torch.arange(16) >= torch.tensor([[16], [9], [3]]),
    "left": torch.arange(16) < torch.tensor([[0], [6], [16]]),  # the last sequence is all padding
}


def padding_case(rank, world):
    groups, generator = groups_of(world, cp=world), torch.Generator().manual_seed(5)
    x_TBH, weight_TBH = torch.randn(2, 16, 3, SMALL.hidden_size, dtype=torch.float64, generator=generator)
    for config, window in ((SMALL, None), (QWEN, None), (QWEN, 5)):
        config = replace(config, sliding_window=window)
        for causal in (True, False) if window is None else (True,):
            for padding_BT in PADDING.values():
                results = []
                for over in (ParallelGroups.alone(), groups):
                    RngTracker(SEED)
                    on = Placement(over, dtype=torch.float64)
                    attention = SelfAttention(config, on, causal=causal)
                    x = cut_sequence(x_TBH, over.cp, dim=0).clone().requires_grad_()
                    output, _ = attention(x) if padding_BT is None else attention(x, padding_BT)
                    (output * cut_sequence(weight_TBH, over.cp, dim=0)).sum().backward()
                    results.append((output, x.grad))
                for whole, part in zip(*results):
                    torch.testing.assert_close(part, cut_sequence(whole, groups.cp, dim=0), **CLOSE)
    with pytest.raises(
        ValueError, match=r"bool of shape \(batch, sequence\) \(3, 16\), got .* shape \(3, 8\)"
    ):
        attention(x, padding_BT[:, :8])


def test_padding_and_attention_without_causality():
    run_ranks(padding_case, 2)


def dropout_case(rank, world):
    """A mask of replicas, then those of shards: of the sequence, of jittered tokens, of heads."""
    groups, config = groups_of(world, tp=2, cp=2), replace(EXPERTS, attention_dropout=0.5)
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp), cp_rank=group_rank(groups.cp))
    on, ones = Placement(groups, rng=rng), torch.ones(4, 1, config.hidden_size)
    router = Router(replace(config, moe=replace(config.moe, jitter=0.1)), on)
    attention, heads = SelfAttention(config, on, causal=False), []
    attention.proj.register_forward_pre_hook(lambda module, args: heads.append(args[0].detach()))
    with torch.no_grad():
        attention.qkv.weight.fill_(0.1)  # a query sees equal values: nothing but dropout can differ
    state = torch.get_rng_state()
    replica, shard = (Dropout(0.3, replace(on, sequence_parallel=sharded))(ones) for sharded in (False, True))
    jittered, _ = router._jittered(ones), attention(ones)
    assert torch.equal(state, torch.get_rng_state())
    return replica, (shard, jittered, *heads)


def test_cp_ranks_draw_for_other_tokens_and_tp_ranks_alike_for_replicas():
    results = run_ranks(dropout_case, 4)  # tp varies fastest
    replicas = [replica for replica, _ in results]
    assert torch.equal(replicas[0], replicas[1]) and torch.equal(replicas[2], replicas[3])
    assert not torch.equal(replicas[0], replicas[2])
    for drawn in zip(*(shards for _, shards in results), strict=True):
        assert len({tuple(numbers.flatten().tolist()) for numbers in drawn}) == 4


def refused_case(rank, world):
    groups, config = groups_of(world, cp=world), replace(EXPERTS, dropout=0.1)
    for wrong, match in (
        (
            replace(SMALL, dropout=0.1),
            r"Dropout: dropout 0\.1 of context-parallel shards over 2 ranks needs rng",
        ),
        (
            replace(SMALL, attention_dropout=0.1),
            "SelfAttention: dropout 0.1 of context-parallel shards over 2",
        ),
        (
            replace(SMALL, moe=replace(EXPERTS.moe, jitter=0.1)),
            "jitter 0.1 of the tokens of 2 ranks needs rng",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            TransformerLayer(wrong, Placement(groups))
    model = TransformerLayer(config, Placement(groups, rng=RngTracker(SEED)))
    with pytest.raises(
        ValueError, match=r"no stream 'context-parallel'; there is .*; make the tracker with cp_rank="
    ):
        model(torch.ones(4, 1, config.hidden_size))
    gpt = make_gpt(SMALL, groups)
    tokens_BS = torch.zeros(1, 11, dtype=torch.int64)
    with pytest.raises(ValueError, match="a sequence of 22 tokens is longer than max_seq_len 20"):
        gpt(tokens_BS)
    with pytest.raises(
        ValueError, match="a sequence of 18 tokens is not divisible by 2 x the context-parallel size 2"
    ):
        gpt(tokens_BS[:, :9])


def test_what_cannot_be_cut_or_would_drop_alike_is_refused():
    run_ranks(refused_case, 2)


def repeated_case(rank, world):
    """Recomputation draws the masks again, a copy of the model shares groups and streams."""
    groups = groups_of(world, cp=world)
    config = replace(MODELS["moe"], dropout=0.2, attention_dropout=0.2, moe=replace(EXPERTS.moe, jitter=0.1))
    batch = [cut_sequence(x, groups.cp) for x in text(config)]
    results = []
    for recompute in (False, True):
        model = make_gpt(config, groups, recompute=recompute)
        start = model.rng.states()
        loss = model.loss(*batch)
        (loss.tokens.sum() + loss.aux).backward()
        results.append([loss.tokens, *(param.grad for param in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    twin = copy.deepcopy(model)
    model.rng.restore(start)
    assert torch.equal(twin.loss(*batch).tokens, loss.tokens) and twin.cp_group is model.cp_group


def test_recomputation_and_copies_draw_the_same_masks():
    run_ranks(repeated_case, 2)
