"""The order of norms decides whether a deep encoder trains (Shoeybi et al. 2019, section 5.3)."""

from __future__ import annotations

import math

import pytest
import torch

from fastmp.config import BertConfig, GPTConfig
from fastmp.nn.bert import Bert

VOCAB_SIZE, SEQ_LEN, BATCH, WIDTH = 32, 16, 16, 32
MASK = VOCAB_SIZE - 1
CHANCE = math.log(VOCAB_SIZE)


def samples(step):
    """Rows of one token each, a fifth of them masked: a masked one is found by looking at any other."""
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(MASK, (BATCH, 1), generator=draw).expand(BATCH, SEQ_LEN)
    masked = torch.rand(BATCH, SEQ_LEN, generator=draw) < 0.2
    return rows.masked_fill(masked, MASK), rows.masked_fill(~masked, -100)


def last_loss(num_layers, post_norm, steps=160):
    """The mean loss of the last 20 steps of AdamW, at one learning rate from the first step on."""
    torch.manual_seed(0)
    config = GPTConfig(
        num_layers=num_layers, hidden_size=WIDTH, num_heads=4, vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN,
        activation="gelu", init_std=0.64 / math.sqrt(WIDTH),  # as strong a layer as one of BERT-large
        bert=BertConfig(num_token_types=0, post_norm=post_norm, sentence_order=False),
    )  # fmt: skip
    model = Bert(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        tokens, targets = samples(step)
        loss = model.loss(tokens, targets).masked.sum() / (targets != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@pytest.mark.exhaustive
def test_at_depth_norms_before_the_parts_train_and_norms_behind_them_do_not():
    """A shallow model learns the task in either order; at 48 layers one of them stays at chance."""
    assert last_loss(6, post_norm=False) < 0.5 * CHANCE
    assert last_loss(6, post_norm=True) < 0.5 * CHANCE
    assert last_loss(48, post_norm=False) < 0.8 * CHANCE
    assert last_loss(48, post_norm=True) > 0.9 * CHANCE
