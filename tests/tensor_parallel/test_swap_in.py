"""Swapping fastmp's layers and loss into an existing model leaves logits and gradients as they were."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from marks import full
from rank_cases import in_turn
from torch import nn

from fastmp.distributed.collectives import group_size
from fastmp.tensor_parallel.embedding import VocabParallelEmbedding
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.tensor_parallel.loss import vocab_parallel_cross_entropy
from fastmp.testing.parallel import count_collectives, full_gradient
from fastmp.testing.ranks import run_ranks

V, H, HEADS, S, B = 40, 32, 4, 9, 3  # vocabulary, hidden, heads, sequence, batch


class Block(nn.Module):
    """A pre-norm transformer block as one writes it in plain torch."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Table, two blocks, and an output projection that shares the table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, H)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.table(tokens))))


def swap(model, group, gather_logits):
    model.table = VocabParallelEmbedding.from_embedding(model.table, group=group)
    for block in model.blocks:
        block.heads //= group_size(group)
        block.qkv = ColumnParallelLinear.from_linear(block.qkv, group=group, stride=3, gather_output=False)
        block.out = RowParallelLinear.from_linear(block.out, group=group, input_is_parallel=True)
        block.up = ColumnParallelLinear.from_linear(block.up, group=group, gather_output=False)
        block.down = RowParallelLinear.from_linear(block.down, group=group, input_is_parallel=True)
    model.head = ColumnParallelLinear.from_linear(model.head, group=group, gather_output=gather_logits)
    model.head.weight = model.table.weight
    return model


def compare(actual, expected, name):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


def check_plain(rank, tp, gather_logits):
    group = dist.group.WORLD if tp > 1 else None
    torch.manual_seed(0)
    plain = Model().double()
    swapped = swap(copy.deepcopy(plain), group, gather_logits)
    tokens, targets = torch.randint(V, (2, B, S))

    logits = plain(tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(B, S)
    losses.mean().backward()

    with count_collectives() as forward:
        ours = swapped(tokens)
        if gather_logits:
            our_losses = F.cross_entropy(ours.flatten(0, 1), targets.flatten(), reduction="none").view(B, S)
        else:
            our_losses = vocab_parallel_cross_entropy(ours, targets, group=group)
    with count_collectives() as backward:
        our_losses.mean().backward()

    compare(ours, logits if gather_logits else logits.chunk(tp, -1)[rank], "logits")
    compare(our_losses, losses, "loss")
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in swapped.named_parameters()]
    for (name, param), expected in zip(swapped.named_parameters(), plain.parameters(), strict=True):
        compare(full_gradient(param, group), expected.grad, name)
    if tp > 1:  # per block 2 forward and 2 backward; the table, the logits or the loss, the logits' input
        assert forward.counts == {"all_reduce": 2 * 2 + 1, "all_gather": 1}
        assert backward.counts == {"all_reduce": 2 * 2 + 1}
    else:
        assert forward.counts == backward.counts == {}


@pytest.mark.parametrize("tp", [1, 2, *full([4])])
def test_plain_torch_model(tp):
    gather_logits = [(True,), (False,)]  # for torch's loss, and for the sharded one
    if tp == 1:  # without any process group
        with torch.random.fork_rng():
            in_turn(0, 1, check_plain, gather_logits)
    else:
        run_ranks(in_turn, tp, check_plain, gather_logits)
