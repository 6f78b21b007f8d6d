"""BERT: logits, losses and gradients of a plain reference on every layout, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bert_reference import POST, PRE, full_weights, logits_of, losses_of, make_bert, sample
from marks import full
from nn_tools import sum_partial_gradients, tp_groups
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fastmp.config import BertConfig
from fastmp.config.sizes import flops_per_token, num_parameters
from fastmp.distributed.collectives import gather_from_group, group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Bert, Documents, Placement, bert_stages, sum_tied_gradients
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks
from tools.small_models import part_of, placed

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CONFIGS = {"pre": PRE, "post": POST}


@torch.no_grad()
def load(model, weights, groups):
    for name, param in model.named_parameters():
        param.copy_(part_of(weights[name], param, groups))


def check_gradients(model, grads, groups):
    for name, param in model.named_parameters():
        expected = part_of(grads[name], param, groups)
        torch.testing.assert_close(
            param.grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
        )


def reference(config, data):
    """Full weights, and for all samples of `data` together the losses and their gradients."""
    weights = full_weights(config)
    found = [losses_of(config, weights, given) for given in data]
    masked, sentence = (torch.stack(losses).sum() for losses in zip(*found, strict=True))
    (masked + 2 * sentence).backward()
    return weights, masked.detach(), sentence.detach(), {name: leaf.grad for name, leaf in weights.items()}


def check_layout(config, tp, max_masked=None, **options):
    groups, given = tp_groups(tp), sample(config)
    weights, masked, sentence, grads = reference(config, [given])
    model = make_bert(config, groups, **options)
    load(model, weights, groups)
    with torch.no_grad():
        logits_SBV = gather_from_group(model(given.tokens, given.types, given.padding), model.group)
        expected_BSV, order_B2 = logits_of(config, weights, given)
        hidden = model.hidden(given.tokens, given.types, given.padding)
        torch.testing.assert_close(model.sentence_logits(model.gathered(hidden)), order_B2, **CLOSE)
    real = ~given.padding
    torch.testing.assert_close(
        logits_SBV[..., : config.vocab_size].transpose(0, 1)[real], expected_BSV[real], **CLOSE
    )
    for upstream in ({}, {"loss_grad": 1.0}):
        model.zero_grad()
        losses = model.loss(
            given.tokens, given.targets, token_types_BS=given.types, padding_BS=given.padding,
            sentence_order_B=given.order, max_masked=max_masked, **upstream,
        )  # fmt: skip
        torch.testing.assert_close(losses.masked.sum(), masked, **CLOSE)
        torch.testing.assert_close(losses.sentence.sum(), sentence, **CLOSE)
        (losses.masked.sum() + 2 * losses.sentence.sum()).backward()
        sum_partial_gradients(model.parameters(), model.group)
        check_gradients(model, grads, groups)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_plain_torch(name):
    check_layout(CONFIGS[name], 1)
    check_layout(CONFIGS[name], 1, max_masked=20)


@pytest.mark.parametrize(
    ("name", "tp", "options"),
    [
        ("post", 2, {"sequence_parallel": True}),
        *full(
            [
                ("pre", 2, {"sequence_parallel": True, "max_masked": 20, "recompute": True}),
                ("pre", 2, {"max_masked": 20}),
                ("post", 2, {"recompute": True, "shard_recompute_input": True}),
                ("pre", 4, {"sequence_parallel": True}),
                ("post", 4, {}),
            ]
        ),
    ],
    ids=str,
)
def test_equals_plain_torch_over_tensor_parallel_ranks(name, tp, options):
    run_ranks(lambda rank, world: check_layout(CONFIGS[name], tp, **options), tp)


def check_stages(rank, world, config, layout, vpp, schedule, options):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    data = [sample(config, seed) for seed in range(4)]
    weights, masked, sentence, grads = reference(config, data)
    on, others = placed(groups, dtype=torch.float64, **options)
    stages = bert_stages(config, on, vpp=vpp, **others)
    for stage in stages:
        load(stage, weights, groups)

    def loss(hidden, given):
        found = stages[-1].losses(hidden, given.targets, sentence_order_B=given.order, loss_grad=1.0)
        return found.masked.sum() + 2 * found.sentence.sum(), (found.masked.sum(), found.sentence.sum())

    pipeline = Pipeline(
        stages,
        Schedule(groups.grid.pp, len(data), vpp, None, schedule).orders(),
        group=groups.pp,
        backward_group=groups.pp_backward,
        inputs=lambda given: (given.tokens, given.types),
        loss=loss,
        shared=lambda given: {"documents": Documents.from_padding(given.padding)},
    )
    result = pipeline.train(data)
    sum_tied_gradients(stages, groups)
    if group_rank(groups.pp) == groups.grid.pp - 1:
        found = [torch.stack(losses).sum() for losses in zip(*result.stats.values(), strict=True)]
        torch.testing.assert_close(found, [masked, sentence], **CLOSE)
    for stage in stages:
        sum_partial_gradients(stage.parameters(), groups.tp)
        check_gradients(stage, grads, groups)


@pytest.mark.parametrize(
    ("name", "world", "layout", "vpp", "schedule", "options"),
    [
        ("pre", 2, {"pp": 2}, 2, "1f1b", {}),
        *full(
            [
                ("post", 2, {"pp": 2}, 1, "1f1b", {"recompute": True}),
                ("post", 2, {"pp": 2}, 2, "zero_bubble", {}),
                ("pre", 4, {"pp": 2, "tp": 2}, 1, "zero_bubble", {"sequence_parallel": True}),
            ]
        ),
    ],
    ids=str,
)
def test_stages_equal_plain_torch(name, world, layout, vpp, schedule, options):
    run_ranks(check_stages, world, CONFIGS[name], layout, vpp, schedule, options)


def test_initial_weights_are_those_of_one_rank():
    def case(rank, world):
        groups = ParallelGroups.create(RankGrid(world_size=world, tp=2, pp=2))
        torch.manual_seed(5)
        alone = dict(Bert(POST).named_parameters())
        torch.manual_seed(5)
        (stage,) = bert_stages(POST, Placement(groups))
        for name, param in stage.named_parameters():
            assert torch.equal(param, part_of(alone[name], param, groups)), name

    run_ranks(case, 4)


def test_rotary_positions_do_not_see_padding():
    """With rotary positions padding changes nothing for the tokens before it either."""
    config = replace(PRE, position="rope")
    model, given = make_bert(config), sample(config)
    logits = model(given.tokens, given.types, given.padding)
    length = int((~given.padding[1]).sum())
    alone = model(given.tokens[1:2, :length], given.types[1:2, :length])
    torch.testing.assert_close(logits[:length, 1], alone[:, 0], **CLOSE)


def test_static_borders_of_padding_compute_the_same():
    model, given = make_bert(PRE), sample(PRE)
    hidden = model.embed(given.tokens, given.types)
    ours, static = (
        model._run_layers(hidden, Documents.from_padding(given.padding, static=static))[0]
        for static in (False, True)
    )
    torch.testing.assert_close(ours, static, **CLOSE)


def test_token_types_are_added_to_a_model_without_them():
    without = replace(PRE, bert=BertConfig(num_token_types=0))
    model, given = make_bert(without), sample(without)
    before = model(given.tokens)
    with pytest.raises(ValueError, match="Bert: the model has no token types, but some were given"):
        model(given.tokens, given.types)
    model.add_token_types(3)
    assert model.config.bert.num_token_types == 3
    assert model.token_type_embedding.weight.dtype == torch.float64
    with pytest.raises(ValueError, match="Bert: the model has 3 token types, but none were given"):
        model(given.tokens)
    with pytest.raises(ValueError, match=r"TokenTypeEmbedding: token type 3 is not in 0 \.\. 2"):
        model(given.tokens, given.types + 2)
    with pytest.raises(ValueError, match=r"Bert\.add_token_types: the model has 3 token types"):
        model.add_token_types(2)
    model.token_type_embedding.weight.data.zero_()
    assert torch.equal(model(given.tokens, given.types), before)


def test_what_does_not_fit_is_refused():
    given = sample(PRE)
    model = make_bert(PRE)
    with pytest.raises(ValueError, match="Documents: padding must end its row, but tokens follow it"):
        model(given.tokens, given.types, given.padding.flip(1))
    with pytest.raises(ValueError, match=r"Documents: padding must be bool of shape .* got torch.int64"):
        model(given.tokens, given.types, given.types)
    number = int((given.targets != -100).sum())
    with pytest.raises(
        ValueError, match=f"Bert: the batch has {number} masked tokens, more than max_masked 2"
    ):
        model.loss(given.tokens, given.targets, token_types_BS=given.types, max_masked=2)
    with pytest.raises(ValueError, match="Bert: a sequence of 17 tokens is longer than max_seq_len 16"):
        model(torch.zeros(1, 17, dtype=torch.int64), torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"GPT: config\.bert describes an encoder: make a Bert of it"):
        GPT(PRE)
    with pytest.raises(ValueError, match=r"Bert: GPTConfig\.bert is None"):
        Bert(replace(PRE, bert=None))
    for wrong, message in (
        ({"sliding_window": 4}, "sliding_window is for GPT: leave it out beside bert"),
        ({"attention_sinks": True}, "attention_sinks is for GPT: leave it out beside bert"),
        ({"tie_embeddings": False}, "tie_embeddings must be on beside bert"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(PRE, **wrong)


@pytest.mark.parametrize("bert", [BertConfig(), BertConfig(0, True, False), BertConfig(3, True)], ids=str)
def test_parameters_and_flops_are_those_of_the_formulas(bert):
    config = replace(PRE, vocab_size=128, bert=bert)  # no padding
    model = Bert(config)
    assert sum(param.numel() for param in model.parameters()) == num_parameters(config)
    given = sample(config, batch=4)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        losses = model.loss(
            given.tokens, given.targets, token_types_BS=given.types if bert.num_token_types else None,
            sentence_order_B=given.order if bert.sentence_order else None, max_masked=32, loss_grad=1.0,
        )  # fmt: skip
        (losses.masked.sum() + (0 if losses.sentence is None else losses.sentence.sum())).backward()
    expected = 4 * 16 * flops_per_token(config, 16, causal=True, predicted=8)
    counts = counter.get_flop_counts()["Global"]
    products = sum(number for op, number in counts.items() if op.__name__ in ("mm", "addmm", "bmm"))
    assert products == pytest.approx(expected, rel=1e-9)


def test_context_parallel_ranks_are_refused():
    def case(rank, world):
        groups = ParallelGroups.create(RankGrid(world_size=world, cp=2))
        with pytest.raises(ValueError, match="cannot be divided over 2 context-parallel ranks"):
            Bert(PRE, Placement(groups))

    run_ranks(case, 2)
