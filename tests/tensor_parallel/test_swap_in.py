"""Swapping fastmp's layers and loss into existing models leaves logits and gradients as they were."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


@pytest.mark.parametrize("gather_logits", [True, False], ids=["torch loss", "sharded loss"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_plain_torch_model(tp, gather_logits):
    if tp == 1:  # without any process group
        with torch.random.fork_rng():
            check_plain(0, 1, gather_logits)
    else:
        run_ranks(check_plain, tp, gather_logits)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
    dropout_off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=HEADS,
        n_embd=H,
        vocab_size=V,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        **dropout_off,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    return model


def swap_gpt2(model, group):
    tp, body = group_size(group), model.transformer
    body.wte = VocabParallelEmbedding.from_embedding(body.wte, group=group)
    for block in body.h:
        attention, mlp = block.attn, block.mlp
        attention.num_heads //= tp
        attention.split_size //= tp
        attention.c_attn = ColumnParallelLinear.from_linear(
            attention.c_attn, group=group, stride=3, gather_output=False
        )
        attention.c_proj = RowParallelLinear.from_linear(
            attention.c_proj, group=group, input_is_parallel=True
        )
        mlp.c_fc = ColumnParallelLinear.from_linear(mlp.c_fc, group=group, gather_output=False)
        mlp.c_proj = RowParallelLinear.from_linear(mlp.c_proj, group=group, input_is_parallel=True)
    model.lm_head = ColumnParallelLinear.from_linear(model.lm_head, group=group)
    model.lm_head.weight = body.wte.weight
    return model


def check_gpt2(rank, tp):
    group = dist.group.WORLD if tp > 1 else None
    plain = gpt2()
    swapped = swap_gpt2(copy.deepcopy(plain), group)
    tokens, targets = torch.randint(V, (2, B, S))
    logits, ours = plain(tokens).logits, swapped(tokens).logits
    compare(ours, logits, "logits")
    for result in (logits, ours):
        F.cross_entropy(result.flatten(0, 1), targets.flatten()).backward()
    for (name, param), expected in zip(swapped.named_parameters(), plain.parameters(), strict=True):
        conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))  # stored (in, out) in `plain`
        compare(full_gradient(param, group), expected.grad.t() if conv else expected.grad, name)


@pytest.mark.parametrize("tp", [1, 2])
def test_transformers_gpt2(tp):
    gpt2()  # imported in the parent, for the ranks
    if tp == 1:
        with torch.random.fork_rng():
            check_gpt2(0, 1)
    else:
        run_ranks(check_gpt2, tp)
