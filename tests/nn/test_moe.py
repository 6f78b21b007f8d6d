"""The expert layer on one rank: what it computes, what it drops, its losses, its segments, its errors."""

from __future__ import annotations

import pytest
import torch
from moe_tools import hidden_states, make_moe, plain_moe, reference, with_moe

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
CONFIGS = {
    "all": with_moe(),
    "one expert": plain_moe(num_experts=1, top_k=1, aux_loss=0.5),
    "every expert": plain_moe(top_k=8),
    "sigmoid": plain_moe(score="sigmoid", expert_bias=True, routed_scale=2.5, aux_loss=0.5),
    "no sequence loss": with_moe(sequence_aux_loss=0.0),
    "ungated": with_moe(shared_expert_gate=False, normalize_topk=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_loop_over_tokens_and_experts(name):
    layer, hidden = make_moe(CONFIGS[name]), hidden_states(5, 2).requires_grad_()
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    leaves = (hidden, *layer.parameters())
    weight = hidden_states(5, 2, seed=6)
    results = []
    for output, aux, counts in (layer(hidden), reference(layer, hidden)):
        grads = torch.autograd.grad((output * weight).sum() + aux, leaves)
        results.append((output, torch.as_tensor(aux), counts, *grads))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, check_dtype=False, **CLOSE)
