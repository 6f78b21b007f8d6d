"""Self-attention against a plain float64 formula: causal or not, padded, grouped heads, divided over TP."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from dispatch_modes import CalledOps
from nn_tools import assert_same_gradients, sum_partial_gradients, tp_groups

from fastmp.distributed.collectives import group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement, RotaryPositions, SelfAttention
from fastmp.testing.ranks import run_ranks
from tools.small_models import QWEN, SEED, SMALL, local_shard, placed

S, B = 10, 3
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(config=SMALL, groups=ParallelGroups.alone(), **options):
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp))
    on, others = placed(groups, rng=rng, dtype=torch.float64, **options)
    attention = SelfAttention(config, on, **others)
    with torch.no_grad():  # biases start at zero; random ones have to arrive in the right place too
        for name, param in attention.named_parameters():
            if name.endswith("bias"):
                full = torch.randn(
                    param.numel() * (1 if not param.tensor_model_parallel else attention.qkv.tp_size),
                    dtype=torch.float64,
                    generator=torch.Generator().manual_seed(len(name)),
                )
                param.copy_(local_shard(full, param, groups.tp))
    return attention


def inputs():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(S, B, SMALL.hidden_size, dtype=torch.float64, generator=generator)


def plain(attention, config, x_SBH, causal=True, padding_BS=None, turned=lambda x_SD, norm: x_SD):
    """Softmax attention, head by head, with the documented order of the rows of qkv."""
    D, R = config.head_dim, config.num_heads // config.kv_heads
    out = torch.empty_like(x_SBH)
    for b in range(B):
        heads = []
        for g in range(config.kv_heads):
            rows = slice(g * (R + 2) * D, (g + 1) * (R + 2) * D)
            bias = 0 if attention.qkv.bias is None else attention.qkv.bias[rows]
            *queries, key, value = (x_SBH[:, b] @ attention.qkv.weight[rows].T + bias).split(D, dim=1)
            key = turned(key, attention.k_norm)
            for query in queries:
                score = turned(query, attention.q_norm) @ key.T / math.sqrt(D)
                for i in range(S):
                    for j in range(S):
                        if (causal and j > i) or (padding_BS is not None and padding_BS[b, j] and i != j):
                            score[i, j] = -math.inf
                heads.append(score.softmax(-1) @ value)
        out[:, b] = torch.cat(heads, dim=1) @ attention.proj.weight.T
    return out


PADDING = {
    "none": None,
    "right": torch.arange(S) >= torch.tensor([[S], [6], [3]]),
    "left": torch.arange(S) < torch.tensor([[0], [4], [S]]),  # the last sequence is all padding
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
@pytest.mark.parametrize("kv_heads", (8, 4, 1))
def test_attention_is_the_plain_formula(kv_heads, causal, padding):
    config = replace(SMALL, num_kv_heads=kv_heads)
    attention, x_SBH, mask = make(config, causal=causal), inputs(), PADDING[padding]
    x_SBH.requires_grad_()
    output, bias = attention(x_SBH) if mask is None else attention(x_SBH, mask)
    expected = plain(attention, config, x_SBH.detach(), causal, mask)
    torch.testing.assert_close(output, expected, **CLOSE)
    assert bias is attention.proj.bias
    output.square().sum().backward()
    assert x_SBH.grad.isfinite().all()


def turned(x_SD, norm):
    """The norm of every query or key and rotary positions of `QWEN`, element by element."""
    D = x_SD.shape[1]
    x_SD = x_SD / (x_SD.square().mean(1, keepdim=True) + QWEN.layernorm_epsilon).sqrt() * norm.weight
    out = torch.empty_like(x_SD)
    for s in range(S):
        for i in range(D // 2):
            angle = s * QWEN.rope_base ** (-2 * i / D)
            a, b = x_SD[s, i], x_SD[s, i + D // 2]
            out[s, i] = a * math.cos(angle) - b * math.sin(angle)
            out[s, i + D // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("kv_heads", (8, 2))
def test_rotary_attention_with_normalised_heads_is_the_plain_formula(kv_heads):
    config = replace(QWEN, num_kv_heads=kv_heads)
    attention, x_SBH = make(config), inputs()
    with torch.no_grad():
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.uniform_(0.5, 1.5)
        with CalledOps() as calls:
            output, bias = attention(x_SBH)
        torch.testing.assert_close(output, plain(attention, config, x_SBH, turned=turned), **CLOSE)
    assert bias is None and Counter(calls.names) == {"rms_norm": 2, "rope": 1}


def test_rotary_positions_are_exact_in_any_model_and_not_saved():
    rotary = RotaryPositions(QWEN)
    exact = RotaryPositions(QWEN, Placement(dtype=torch.float64))
    assert not rotary.state_dict() and rotary.cos.dtype == torch.float32
    assert torch.equal(rotary.to(torch.bfloat16).cos, exact.cos.float())
    assert torch.equal(rotary.to(torch.float64).sin, exact.sin)
    moved = RotaryPositions(QWEN, Placement(device="meta", dtype=torch.bfloat16)).to_empty(device="cpu")
    assert torch.equal(moved.sin, exact.sin.float())


@pytest.mark.parametrize(
    "wrong", (torch.zeros(B, S), torch.zeros(S, B, dtype=torch.bool)), ids=("dtype", "shape")
)
def test_a_mask_of_another_kind_is_refused(wrong):
    with pytest.raises(
        ValueError, match=r"key_padding_mask must be bool of shape \(batch, sequence\) \(3, 10\), got"
    ):
        make()(inputs(), wrong)


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("sequence_parallel", (False, True), ids=("plain", "sequence"))
def test_heads_are_divided_over_tp(tp, sequence_parallel):
    length = 8

    def case(rank, world):
        groups = tp_groups(tp)
        one, many = make(), make(groups=groups, sequence_parallel=sequence_parallel)
        x_SBH, mask = inputs()[:length], PADDING["left"][:, :length]
        whole, _ = one(x_SBH, mask)
        part = slice(rank * length // tp, (rank + 1) * length // tp) if sequence_parallel else slice(None)
        output, bias = many(x_SBH[part], mask)
        torch.testing.assert_close(output, whole[part], **CLOSE)
        (whole + one.proj.bias).square().sum().backward()
        (output + bias).square().sum().backward()
        sum_partial_gradients(many.parameters(), groups.tp)
        for (name, full), param in zip(one.named_parameters(), many.parameters()):
            assert torch.equal(local_shard(full.detach(), param, groups.tp), param), name
        assert_same_gradients(many, one, groups)

    run_ranks(case, tp)


def test_heads_that_tp_does_not_divide_are_refused():
    def case(rank, world):
        groups = tp_groups(world)
        wrong = {
            "num_heads 8 is not divisible by the tensor-parallel size 3": SMALL,
            "num_kv_heads 4 is not divisible by the tensor-parallel size 3": replace(
                SMALL, hidden_size=96, num_heads=12
            ),
        }
        for message, config in wrong.items():
            with pytest.raises(ValueError, match=f"SelfAttention: {message}"):
                SelfAttention(config, Placement(groups))
        with pytest.raises(
            ValueError, match=r"dropout 0\.1 of tensor-parallel shards over 3 ranks needs rng"
        ):
            SelfAttention(
                replace(SMALL, hidden_size=96, num_heads=6, num_kv_heads=3, attention_dropout=0.1),
                Placement(groups),
            )

    run_ranks(case, 3)


def test_attention_dropout_differs_between_tp_ranks_and_leaves_the_default_stream():
    """Equal weights on both ranks: without dropout both compute the same heads, with it they must differ."""
    config = replace(SMALL, attention_dropout=0.5)

    def case(rank, world):
        attention = make(config, tp_groups(world))
        with torch.no_grad():
            attention.qkv.weight.copy_(make(config).qkv.weight[: attention.qkv.weight.shape[0]])
            attention.qkv.bias.zero_()
        seen = []
        attention.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
        before = torch.get_rng_state()
        attention(inputs())
        attention(inputs())
        attention.eval()
        attention(inputs())
        assert torch.equal(before, torch.get_rng_state())
        return seen

    (first, second, without), (other, _, other_without) = run_ranks(case, 2)
    assert torch.equal(without, other_without)
    assert not torch.equal(first, other) and not torch.equal(first, second)
