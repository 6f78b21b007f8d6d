"""Decoding token by token with a cache gives the logits of a forward over the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from marks import full
from nn_tools import text, tp_groups

from fastmp.config import LatentConfig, RopeScaling
from fastmp.nn import Documents, KeyValueCache, SelfAttention
from fastmp.testing.ranks import run_ranks
from tools.small_models import EXPERTS, QWEN, SMALL, make_gpt

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LENGTHS = (7, 1, 4)  # of the prompts of three rows
NEW = 8  # tokens that each row gets
CONFIGS = {
    "learned": SMALL,
    "rope": QWEN,
    "partly turned": replace(QWEN, head_size=8, rotary_fraction=0.5),
    "window": replace(QWEN, sliding_window=5),
    "sinks": replace(QWEN, sliding_window=5, full_attention_layers=(1,), attention_sinks=True),
    "some windows": replace(QWEN, sliding_window=5, full_attention_layers=(1,)),
    "scaled": replace(QWEN, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=8)),
    "experts": EXPERTS,
    "latent": replace(
        QWEN,
        **{"num_kv_heads": None, "head_size": None, "qk_norm": False, "rope_interleaved": True},
        latent=LatentConfig(kv_rank=24, q_rank=16, nope_size=8, rope_size=4, value_size=6),
    ),
    "one dense layer": replace(EXPERTS, dense_layers=(0,)),
}


@torch.no_grad()
def cached_logits(model, tokens_BS, columns=None):
    """The logits (B, NEW, V) from prompts that are padded on the right, then from one token of each row."""
    lengths_B, rows = torch.tensor(LENGTHS), torch.arange(len(LENGTHS))
    cache = KeyValueCache(max(LENGTHS) + NEW)
    prompts_BS = torch.where(torch.arange(max(LENGTHS)) < lengths_B[:, None], tokens_BS[:, : max(LENGTHS)], 3)
    hidden_SBH, *_ = model.layers(model.embed(prompts_BS, cache=cache), cache=cache)
    logits = [model.head(hidden_SBH[lengths_B - 1, rows].unsqueeze(0))]
    for i in range(NEW - 1):
        cache.follow(lengths_B + i, None if columns is None else max(LENGTHS) + i + columns)
        hidden_1BH, *_ = model.layers(
            model.embed(tokens_BS[rows, lengths_B + i].unsqueeze(1), cache=cache), cache=cache
        )
        logits.append(model.head(hidden_1BH))
    return torch.cat(logits).transpose(0, 1)


def whole_logits(model, tokens_BS):
    with torch.no_grad():
        logits_BSV = model(tokens_BS).transpose(0, 1)
    return torch.stack([row[n - 1 : n - 1 + NEW] for row, n in zip(logits_BSV, LENGTHS)])


def tokens_of(config):
    return text(config, batch=len(LENGTHS), sequence=max(LENGTHS) + NEW)[0]


QUICK = [("window", 1)]


@pytest.mark.parametrize(
    ("name", "columns"), [*QUICK, *full(case for case in product(CONFIGS, (1, None)) if case not in QUICK)]
)
def test_a_token_at_a_time_is_the_whole_sequence(name, columns):
    model, tokens_BS = make_gpt(CONFIGS[name]).eval(), tokens_of(CONFIGS[name])
    expected = whole_logits(model, tokens_BS)
    torch.testing.assert_close(cached_logits(model, tokens_BS, columns), expected, **CLOSE)
    assert expected.std() > 0.1


def on_ranks(rank, world, name):
    model, tokens_BS = make_gpt(CONFIGS[name], tp_groups(world)).eval(), tokens_of(CONFIGS[name])
    torch.testing.assert_close(cached_logits(model, tokens_BS), whole_logits(model, tokens_BS), **CLOSE)


@pytest.mark.parametrize("name", full(["rope", "experts", "latent"]))
def test_ranks_hold_their_own_heads(name):
    run_ranks(on_ranks, 2, name)


@pytest.mark.parametrize(
    ("layer", "options", "length", "named"),
    [
        ({"causal": False}, {}, 1, "needs causal=True.* got causal=False"),
        ({}, {"documents": Documents.from_position_ids(torch.zeros(1, 1).long())}, 1, "or documents"),
        ({}, {}, 2, "expected 1 new tokens per row after a filled cache, got 2"),
        ({}, {}, 9, "prompts of 9 tokens do not fit 4 places"),
    ],
)
@torch.no_grad()
def test_what_no_cache_serves(layer, options, length, named):
    cache = KeyValueCache(4)
    if length == 2:
        cache.follow(torch.tensor([1]))
    attention = SelfAttention(SMALL, **layer)
    with pytest.raises(ValueError, match=named):
        attention(torch.zeros(length, 1, SMALL.hidden_size), cache=cache, **options)
