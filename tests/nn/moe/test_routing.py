"""Router replay: bits of a record, other weights, gradients by hand, layouts, generation with a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from marks import full
from moe_tools import SCORES, hidden_states, make_moe, mlp_of, plain_moe

from fastmp.apps.generation import generate
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe import Routing, RoutingRecorder, routed
from fastmp.testing.ranks import run_ranks
from tools.small_models import EXPERTS, make_gpt

GROUPED = {"score": "sigmoid", "normalize_topk": True, "expert_bias": True, "num_groups": 2, "group_topk": 1}
KINDS = {
    "softmax": {},
    "normalised": {"normalize_topk": True},
    "after": {"pre_softmax": False, "top_k": 2},
    "grouped": GROUPED,
    "no losses": {"aux_loss": 0.0, "sequence_aux_loss": 0.0, "z_loss": 0.0},
}
TOKENS = torch.randint(131, (3, 9), generator=torch.Generator().manual_seed(2))


def model_of(moe, dtype=torch.float32, groups=ParallelGroups.alone(), **options):
    config = replace(EXPERTS, init_std=0.5, moe=replace(EXPERTS.moe, **moe))
    return make_gpt(config, groups, dtype, **options)


def step(model, routing):
    """The loss of a training step, and all gradients."""
    model.zero_grad()
    losses = model.loss(TOKENS[:, :-1], TOKENS[:, 1:], routing=routing)
    losses.sum().backward()
    return [losses.sum().detach(), losses.counts, *(param.grad.clone() for param in model.parameters())]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_a_record_is_bitwise(kind, recompute):
    model, recorder = model_of(KINDS[kind], recompute=recompute), RoutingRecorder()
    want = step(model, recorder)
    routing = recorder.routing()
    assert routing.experts.shape == (2, 3, 8, model.config.moe.top_k)  # once, also if recomputed
    found = step(model, routing)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    plain = step(model, None)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "grouped"])
def test_other_weights_keep_the_experts(kind):
    model, recorder = model_of(KINDS[kind]), RoutingRecorder()
    model(TOKENS, routing=recorder)
    experts = recorder.routing().experts
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.router.weight.mul_(-1)
    own, again = RoutingRecorder(), RoutingRecorder()
    model(TOKENS, routing=own)
    assert not torch.equal(own.routing().experts, experts)
    partial = experts.clone()
    partial[:, 1:] = -1  # these sequences choose
    with routed(model, again), pytest.raises(ValueError, match="has no experts"):
        with routed(torch.nn.Linear(2, 2), again):
            pass
    losses = model.loss(TOKENS, TOKENS, routing=Routing(partial))
    wanted = F.one_hot(partial[0, 0].long(), 8).sum((0, 1)) + F.one_hot(
        own.routing().experts[0, 1:].long(), 8
    ).sum((0, 1, 2))
    assert torch.equal(losses.counts[0].long(), wanted)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_output_and_gradients_by_hand(score):
    layer = make_moe(plain_moe(score=score, normalize_topk=True))
    hidden = hidden_states(5, 2).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(10)]).view(1, 5, 2, 3)
    leaves = [hidden, layer.router.weight, layer.experts.fc1, layer.experts.fc2]
    with routed(layer, Routing(experts.transpose(1, 2).to(torch.int16))):
        found, _, counts = layer(hidden)
    tokens, chosen = hidden.flatten(0, 1), experts.flatten(0, 2)
    probs = SCORES[score](tokens @ layer.router.weight.t()).gather(1, chosen)
    probs = probs / probs.sum(1, keepdim=True)
    rows = [
        sum(
            p * mlp_of(x, layer.experts.fc1[e], layer.experts.fc2[e], layer.experts.activation)
            for p, e in zip(own, chosen_of.tolist())
        )
        for x, own, chosen_of in zip(tokens, probs, chosen)
    ]
    want = torch.stack(rows).view_as(hidden)
    grad = hidden_states(5, 2, seed=7)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
    pairs = [torch.autograd.grad(output, leaves, grad) for output in (found, want)]
    torch.testing.assert_close(*pairs, rtol=1e-10, atol=1e-10)
    assert torch.equal(counts.long(), F.one_hot(chosen, 8).sum((0, 1)))


def record_and_step(rank, world, layout, options):
    """The record of this rank and the loss with another routing, as numbers."""
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout)) if world > 1 else None
    groups = ParallelGroups.alone() if groups is None else groups
    model, recorder = model_of(GROUPED, torch.float64, groups, **options), RoutingRecorder()
    model(TOKENS[:, :8], routing=recorder)
    experts = recorder.routing().experts
    replayed = Routing((experts + 1) % 8)
    losses = model.loss(TOKENS[:, :-1], TOKENS[:, 1:], routing=replayed)
    losses.sum().backward()
    if options:  # gradients of norms and routers are parts
        return experts.tolist(), losses.tokens.tolist(), losses.aux.item()
    again = RoutingRecorder()
    with routed(model, again):
        model(TOKENS[:, :5])  # TP does not divide the sequence
    norm = model.final_norm.weight.grad.norm().item()
    return experts.tolist(), losses.tokens.tolist(), losses.aux.item(), norm, again.routing().experts.tolist()


@pytest.mark.parametrize(
    ("world", "layout", "options"),
    [
        (2, {"tp": 2, "ep": 2, "etp": 1}, {}),
        *full([(2, {"tp": 2}, {"sequence_parallel": True}), (4, {"tp": 4, "ep": 2, "etp": 2}, {})]),
    ],
)
def test_layouts_record_and_replay_as_one_rank(world, layout, options):
    want = record_and_step(0, 1, {}, {})
    for found in run_ranks(record_and_step, world, layout, options):
        assert found[0] == want[0]
        torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(want[1]), rtol=1e-9, atol=1e-9)
        assert found[2:4] == pytest.approx(want[2 : len(found)][:2], rel=1e-9)
        assert found[4:] == want[4 : len(found)]


@pytest.mark.parametrize("tp", [1, *full([2])])
def test_experts_of_generation_are_those_of_training(tp):
    if tp == 1:
        generated(0, 1)
    else:
        run_ranks(generated, tp)


def generated(rank, world):
    groups = (
        ParallelGroups.create(RankGrid(world_size=world, tp=world)) if world > 1 else ParallelGroups.alone()
    )
    model = model_of(GROUPED, torch.float64, groups).eval()
    prompts = [[5, 9, 2, 77, 30], [11], [64, 64, 3]]
    rows = generate(
        model, prompts, max_new_tokens=9, temperature=0.0, record_routing=True, groups=groups
    ).rows
    ids = [prompt + row.ids for prompt, row in zip(prompts, rows)]
    assert [row.routing.shape[1] for row in rows] == [len(each) - 1 for each in ids]
    width = max(map(len, ids)) - 1
    tokens = torch.tensor([each[:width] + [0] * (width - len(each)) for each in ids])
    recorder = RoutingRecorder()
    model.train()(tokens, routing=recorder)
    routing = Routing.padded([row.routing for row in rows], width)
    recorded = routing.experts >= 0
    assert torch.equal(recorder.routing().experts[recorded], routing.experts[recorded])
    assert recorded.sum() == sum(row.routing.numel() for row in rows)


def test_mistakes():
    model = model_of({})
    with pytest.raises(ValueError, match="no forward was recorded"):
        RoutingRecorder().routing()
    with pytest.raises(ValueError, match=r"experts \(layers, batch, .* got \(2, 3\) in torch.float32"):
        Routing(torch.zeros(2, 3))
    experts = torch.zeros(2, 3, 9, 3, dtype=torch.int16)
    for wrong, message in (
        (experts[:1], "expected experts of 2 layers, got those of 1"),
        (experts[:, :, :8], "3 sequences of 9 tokens, 3 of each, got 3 sequences of 8 tokens, 3 of each"),
        (experts[..., :2], "9 tokens, 3 of each, got 3 sequences of 9 tokens, 2 of each"),
        (experts + 8, "chosen has expert 8, but there are 8"),
    ):
        with pytest.raises(ValueError, match=message):
            model(TOKENS, routing=Routing(wrong))
    with pytest.raises(ValueError, match="expected a Routing or a RoutingRecorder, got Tensor"):
        model(TOKENS, routing=experts)
    assert all(layer.moe.routing is None for layer in model.layers)
    with pytest.raises(ValueError, match="record_routing needs eager steps, no speculation and no pipeline"):
        generate(model, [[1]], max_new_tokens=2, record_routing=True, speculative=True)


def test_graphs_are_not_misled():
    model = model_of({})
    model.layers.runner = lambda chain, tensors, shared: chain.run(tensors, shared)  # as a graph manager does
    with pytest.raises(ValueError, match="CUDA graphs hold the layers"):
        model(TOKENS, routing=RoutingRecorder())
