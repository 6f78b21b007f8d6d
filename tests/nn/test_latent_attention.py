"""Latent attention: the formulas of DeepSeek-V2, written out, and what no configuration may ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import full

from fastmp.config import GPTConfig, LatentConfig, RopeScaling
from fastmp.cuda_graphs.partition import called_modules
from fastmp.nn import GPT, Placement
from fastmp.nn.latent_attention import LatentAttention
from fastmp.ops import rope_cos_sin

LATENT = LatentConfig(kv_rank=24, q_rank=20, nope_size=12, rope_size=8, value_size=10)
CONFIG = GPTConfig(
    hidden_size=32, num_heads=4, max_seq_len=16, position="rope", linear_bias=False, latent=LATENT
)
YARN = RopeScaling("yarn", factor=8.0, original_max_seq_len=4, attention_factor=1.0, mscale_all_dim=0.5)


def turned(x_SBND, interleaved):
    """Rotate the last dimension, pair by pair, by the angle of the position."""
    cos, sin = rope_cos_sin(len(x_SBND), x_SBND.shape[-1], dtype=torch.float64)
    pairs = x_SBND.unflatten(-1, (-1, 2)) if interleaved else x_SBND.unflatten(-1, (2, -1)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def expected(layer, x, interleaved, scale):
    sizes, heads = layer.sizes, layer.num_heads
    if sizes.q_rank is None:
        q = x @ layer.q.weight.t()
    else:
        q = normed(x @ layer.q_down.weight.t(), layer.q_norm.weight) @ layer.q_up.weight.t()
    q = q.unflatten(-1, (heads, -1))
    latent, shared = (x @ layer.kv_down.weight.t()).split((sizes.kv_rank, sizes.rope_size), -1)
    kv = (normed(latent, layer.kv_norm.weight) @ layer.kv_up.weight.t()).unflatten(-1, (heads, -1))
    k, v = kv.split((sizes.nope_size, sizes.value_size), -1)
    shared = turned(shared.unsqueeze(2), interleaved).expand(-1, -1, heads, -1)
    k = torch.cat((k, shared), -1)
    q = torch.cat((q[..., : sizes.nope_size], turned(q[..., sizes.nope_size :], interleaved)), -1)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbnv->sbnv", probs, v).flatten(2) @ layer.proj.weight.t()


@pytest.mark.parametrize("interleaved", [True, *full([False])])
@pytest.mark.parametrize("q_rank", [20, *full([None])])
def test_formulas(interleaved, q_rank):
    config = replace(CONFIG, rope_interleaved=interleaved, latent=replace(LATENT, q_rank=q_rank))
    torch.manual_seed(0)
    layer = LatentAttention(config, Placement(dtype=torch.float64))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(9, 2, 32, dtype=torch.float64, requires_grad=True)
    output, bias = layer(x)
    want = expected(layer, x, interleaved, scale=20**-0.5)
    torch.testing.assert_close(output, want, rtol=1e-11, atol=1e-11)
    assert bias is None
    inputs, grad = (x, *layer.parameters()), torch.randn_like(output)
    found, wanted = (torch.autograd.grad(y, inputs, grad) for y in (output, want))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_hooks_reach_every_parameter():
    """Hooks that wait for gathered parameters: of modules that are called, or that these name."""
    layer = LatentAttention(CONFIG)
    with called_modules() as called:
        layer(torch.randn(4, 1, 32))
    reached = {*called, *(named for module in called for named in getattr(module, "prefetch_next", ()))}
    assert all(module in reached for module in layer.modules() if module._parameters)


def test_yarn_scales_the_scores():
    """DeepSeek's factor: (0.1 x 0.5 x ln 8 + 1)^2."""
    assert LatentAttention(CONFIG).scale == 20**-0.5
    scaled = LatentAttention(replace(CONFIG, rope_scaling=YARN))
    assert scaled.scale == pytest.approx(20**-0.5 * 1.2188, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position": "learned"}, "latent needs position \"rope\", got 'learned'"),
        ({"linear_bias": True}, "latent attention has no linear_bias: set it to false"),
        ({"qk_norm": True}, "latent attention has no qk_norm: set it to false"),
        ({"num_kv_heads": 2}, "latent attention has sizes of its own: leave num_kv_heads out"),
        ({"head_size": 8}, "latent attention has sizes of its own: leave head_size out"),
        ({"latent": None, "rope_scaling": YARN}, "mscale_all_dim scales the scores of latent attention"),
    ],
)
def test_what_does_not_go_with_it(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(CONFIG, **changes)
    with pytest.raises(ValueError, match="rope_size must be even, got 5"):
        LatentConfig(rope_size=5)


def test_keys_are_made_again_once_where_layers_are_recomputed():
    """Otherwise attention would keep its own tensors out of reach of the layer's recomputation."""
    config, on = replace(CONFIG, vocab_size=32), Placement(dtype=torch.float64, recompute_kv=True)
    for recompute in (False, True):
        model, calls = GPT(config, on, recompute=recompute), []

        def note(*_, calls=calls):
            calls.append(torch.is_grad_enabled())

        for layer in model.layers:
            layer.attention.kv_up.register_forward_hook(note)
        tokens = torch.arange(16)[None]
        model.loss(tokens, tokens).sum().backward()
        assert calls == [True] * CONFIG.num_layers + [recompute] * CONFIG.num_layers
