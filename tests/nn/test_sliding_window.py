"""A token sees the last tokens of a window only, by the plain formula; tests/hf has Mistral."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nn_tools import text

from fastmp.nn import Placement, SelfAttention, flops_per_token
from fastmp.nn.attention import attend
from fastmp.ops.attention_masks import ages_of
from tools.small_models import QWEN, make_gpt

WINDOWED = replace(QWEN, max_seq_len=24, sliding_window=5)


@pytest.mark.parametrize("padded", (False, True))
def test_a_layer_is_one_with_a_mask_of_the_window(padded, monkeypatch):
    torch.manual_seed(2)
    layer = SelfAttention(WINDOWED, Placement(dtype=torch.float64))
    x_SBH = torch.randn(24, 2, WINDOWED.hidden_size, dtype=torch.float64, requires_grad=True)
    padding_BT = torch.arange(24) >= torch.tensor([[24], [15]])
    output = layer(x_SBH, padding_BT if padded else None)[0]
    [grad] = torch.autograd.grad(output.sin().sum(), x_SBH)
    seen = (ages_of(24, 24, x_SBH.device) >= 0) & (ages_of(24, 24, x_SBH.device) < 5)
    if padded:
        seen = seen & (~padding_BT[:, None, None, :] | torch.eye(24, dtype=torch.bool))

    def with_mask(q, k, v, *, dropout_p, **_):
        return attend(q, k, v, causal=False, mask=seen, dropout_p=dropout_p)

    monkeypatch.setattr("fastmp.nn.core_attention.attend", with_mask)
    expected = layer(x_SBH)[0]
    [expected_grad] = torch.autograd.grad(expected.sin().sum(), x_SBH)
    torch.testing.assert_close((output, grad), (expected, expected_grad), rtol=1e-11, atol=1e-11)


def test_some_layers_may_see_all():
    """The second of two reaches everything that the first one's window has made."""
    config = replace(WINDOWED, full_attention_layers=(1,))
    assert [layer.sliding_window for layer in config.layers] == [5, None]
    model, (tokens_BS, _) = make_gpt(config), text(config, batch=1, sequence=24)
    with torch.no_grad():
        hidden, logits = model.layers[0](model.embed(tokens_BS)), model(tokens_BS)
        tokens_BS[0, 3] += 1
        changed = [model.layers[0](model.embed(tokens_BS)) != hidden, model(tokens_BS) != logits]
    seen = [each.any(-1).squeeze(1).nonzero().flatten().tolist() for each in changed]
    assert seen == [list(range(3, 8)), list(range(3, 24))]
    flops = [flops_per_token(each, 24) for each in (WINDOWED, config, replace(WINDOWED, sliding_window=None))]
    assert flops[1] - flops[0] == pytest.approx(flops[2] - flops[1]) and flops[1] > flops[0]


def test_a_window_needs_causality_and_a_positive_size():
    with pytest.raises(
        ValueError, match="SelfAttention: sliding_window 5 needs causal=True, got causal=False"
    ):
        SelfAttention(WINDOWED, causal=False)
    with pytest.raises(ValueError, match="sliding_window must be positive, got 0"):
        replace(WINDOWED, sliding_window=0)


@pytest.mark.parametrize("window", (1, 7, 24, 100))
def test_flops_count_the_pairs_of_the_window(window):
    config, whole = replace(QWEN, sliding_window=window), replace(QWEN, sliding_window=None)
    ages = ages_of(24, 24, torch.device("cpu"))
    hidden = int(((ages >= 0) & (ages >= window)).sum()) / 24
    of_a_key = 3 * 4 * QWEN.num_layers * QWEN.num_heads * QWEN.head_dim
    fewer = flops_per_token(whole, 24, causal=True) - flops_per_token(config, 24, causal=True)
    assert fewer == pytest.approx(of_a_key * hidden, rel=1e-12)
    fewer = flops_per_token(whole, 24) - flops_per_token(config, 24)
    assert fewer == pytest.approx(of_a_key * max(0, 24 - window), rel=1e-12)
