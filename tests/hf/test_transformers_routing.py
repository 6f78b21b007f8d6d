"""Router replay in models of transformers: their own records, other weights, generation, gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_models import VOCAB, model_of

import fastmp
from fastmp.nn.moe import Routing

pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.full
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "dots1")
IDS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def made(family, accelerated=True):
    torch.manual_seed(0)
    model = model_of(family).eval()
    if accelerated:
        fastmp.accelerate(model)
    return model


def changed(model):
    """The same model with other weights, whose routers would choose otherwise."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in other.parameters():
            param += torch.randn(param.shape, generator=generator) * 0.1
    return other


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_replay(family, accelerated):
    model = made(family, accelerated)
    with fastmp.record_routing(model) as recorder:
        want = model(IDS).logits
    routing = recorder.routing()
    L, B, S, k = routing.experts.shape
    assert (B, S, k) == (*IDS.shape, 2) and routing.experts.min() >= 0
    if (family, accelerated) == ("deepseek_v2", False):
        with pytest.raises(ValueError, match="drops the scores of other groups"):
            fastmp.replay_routing(model, routing).__enter__()
        return
    with fastmp.replay_routing(model, routing):
        assert torch.equal(model(IDS).logits, want)
    # nothing stays
    with fastmp.record_routing(model) as recorder:
        assert torch.equal(model(IDS).logits, want)
    # other weights would choose other experts, and don't; a token without a record chooses
    other = changed(model)
    with fastmp.record_routing(other) as recorder:
        other(IDS)
    own = recorder.routing().experts
    assert not torch.equal(own, routing.experts)
    partial = routing.experts.clone()
    partial[:, :, 4:] = -1
    with fastmp.replay_routing(other, Routing(partial)), fastmp.record_routing(other) as recorder:
        loss = other(IDS, labels=IDS).loss
    found = recorder.routing().experts
    assert torch.equal(found[:, :, :4], routing.experts[:, :, :4])
    assert torch.equal(found[0, :, 4:], own[0, :, 4:])  # in the first layer, whose input is the same
    loss.backward()
    routers = [
        name for name, _ in other.named_parameters() if name.endswith(("gate.weight", "router.weight"))
    ]
    gates = [other.get_parameter(name).grad for name in routers]
    assert len(gates) == L and all(grad.any() for grad in gates)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_of_generation_are_those_of_the_whole_sequence(family):
    model = made(family)
    with fastmp.record_routing(model) as recorder:
        ids = model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    routing = recorder.routing()
    assert routing.experts.shape[1:3] == (2, ids.shape[1] - 1)
    with fastmp.record_routing(model) as recorder:
        model(ids[:, :-1])
    assert torch.equal(recorder.routing().experts, routing.experts)


def test_mistakes():
    model = made("qwen3_moe")
    with fastmp.record_routing(model) as recorder:
        model(IDS)
    experts = recorder.routing().experts
    for wrong, message in (
        (torch.cat((experts, experts)), "expected experts of 1 layers, got those of 2"),
        (experts[..., :1], "expected 2 experts of a token, got 1"),
        (experts[:, :, :3], "expected the experts of 14 tokens, got 6"),
        (experts + 100, "expected experts below"),
    ):
        with pytest.raises(ValueError, match=message), fastmp.replay_routing(model, Routing(wrong)):
            model(IDS)
    for nothing in (experts, recorder):
        with pytest.raises(ValueError, match="expected a Routing, got"):
            fastmp.replay_routing(model, nothing).__enter__()
    assert "forward" not in vars(model.model.layers[1].mlp.gate)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no router"):
        fastmp.record_routing(made("llama")).__enter__()
    with pytest.raises(ValueError, match="expected forwards of the model inside"):
        with fastmp.record_routing(model) as recorder:
            model.model(IDS)
        recorder.routing()


class IndicesTopKRouter(torch.nn.Module):
    """A router that reads the field `indices` of what `torch.topk` returns, and returns a fourth tensor."""

    top_k = 2

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden):
        logits = torch.nn.functional.linear(hidden.flatten(0, -2), self.weight)
        experts = torch.topk(logits, self.top_k).indices
        return logits, logits.gather(1, experts), experts, logits.sum()


class ArgmaxTopKRouter(IndicesTopKRouter):
    """A router that never calls `torch.topk`."""

    def forward(self, hidden):
        logits = torch.nn.functional.linear(hidden.flatten(0, -2), self.weight)
        experts = logits.argsort(1, descending=True)[:, : self.top_k]
        return logits, logits.gather(1, experts), experts


def test_routers_of_other_models():
    hidden = torch.randn(2, 3, 8)
    model = torch.nn.Sequential(IndicesTopKRouter())
    with fastmp.record_routing(model) as recorder:
        found = model(hidden)
    routing = recorder.routing()
    assert torch.equal(routing.experts.flatten(0, 2), found[2])
    other = Routing(3 - routing.experts)
    with fastmp.replay_routing(model, other):
        logits, weights, experts, _ = model(hidden)
    assert torch.equal(experts, 3 - found[2]) and torch.equal(weights, logits.gather(1, experts))
    # a replay that would be without effect is refused
    model = torch.nn.Sequential(ArgmaxTopKRouter())
    with pytest.raises(ValueError, match="ArgmaxTopKRouter does not choose experts by torch"):
        with fastmp.replay_routing(model, other):
            model(hidden)
    assert "forward" not in vars(model[0])
