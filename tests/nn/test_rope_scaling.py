"""Scaled rotary frequencies: what each kind leaves and divides, and what transformers computes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastmp.config import RopeScaling
from fastmp.nn import RotaryPositions
from fastmp.nn.documents import Positions
from fastmp.nn.rope import attention_factor, scaled_frequencies
from tools.small_models import QWEN

BASE, DIM = 500_000.0, 64
PLAIN = BASE ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
KINDS = {
    "linear": RopeScaling("linear", factor=4.0),
    "llama3": RopeScaling("llama3", factor=8.0, original_max_seq_len=8192),
    "llama3, wide": RopeScaling("llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=9.0),
    "yarn": RopeScaling("yarn", factor=16.0, original_max_seq_len=4096),
    "yarn, given": RopeScaling("yarn", factor=4.0, beta_fast=20.0, truncate=False, attention_factor=1.25),
    "yarn, kimi": RopeScaling("yarn", factor=32.0, original_max_seq_len=4096, beta_fast=1.0),
    "yarn, short": RopeScaling("yarn", factor=2.0, original_max_seq_len=32),
}


@pytest.mark.parametrize("name", KINDS)
def test_fast_frequencies_stay_and_slow_ones_are_divided(name):
    scaling = KINDS[name]
    ratio = PLAIN / scaled_frequencies(scaling, PLAIN, base=BASE)
    assert (ratio.diff() >= -1e-12).all() and ratio.min() >= 1.0 - 1e-12
    assert ratio[-1].item() == pytest.approx(scaling.factor)
    turns = scaling.original_max_seq_len * PLAIN / (2 * math.pi)
    if scaling.kind == "llama3":
        assert torch.equal(ratio == 1.0, turns >= scaling.high_freq_factor)
        between = (turns < scaling.high_freq_factor) & (turns > scaling.low_freq_factor)
        assert torch.equal((ratio > 1.0) & (ratio < scaling.factor), between) and between.sum() >= 3


BY_LENGTH = {  # kinds whose frequencies depend on the length of the sequence
    "dynamic": RopeScaling("dynamic", factor=4.0, original_max_seq_len=4096),
    "longrope": RopeScaling(
        "longrope",
        factor=32.0,
        original_max_seq_len=4096,
        short_factor=tuple(1.0 + 0.01 * i for i in range(DIM // 2)),
        long_factor=tuple(1.0 + i for i in range(DIM // 2)),
    ),
}
BY_LENGTH["longrope, given"] = replace(BY_LENGTH["longrope"], attention_factor=1.25)
BY_LENGTH["longrope, same length"] = replace(BY_LENGTH["longrope"], factor=1.0)
LENGTHS = (1, 4096, 4097, 10_000)


@pytest.mark.parametrize("name", BY_LENGTH)
@pytest.mark.parametrize("length", LENGTHS)
def test_transformers_has_the_same_frequencies_at_any_length(name, length):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from hf_models import Float64
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = BY_LENGTH[name]
    with Float64():
        theirs, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config_of(scaling, 4096), "cpu", seq_len=length)
    ours = scaled_frequencies(scaling, PLAIN, base=BASE, length=length)
    assert theirs.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)
    if scaling.kind == "dynamic":
        there = scaled_frequencies(scaling, PLAIN, base=BASE, length=torch.tensor(length))
        torch.testing.assert_close(there, ours, rtol=1e-14, atol=0)


SMALL: dict[str, Any] = {"factor": 4.0, "original_max_seq_len": 8}


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("dynamic", **SMALL),
        RopeScaling("longrope", **SMALL, short_factor=(1.0, 1.5, 2.0), long_factor=(2.0, 4.0, 8.0)),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_given_positions_have_the_angles_of_the_longest(scaling):
    """A batch whose largest position is p has the angles of a sequence of p + 1 tokens, cut from it."""
    rotary = RotaryPositions(replace(QWEN, rope_scaling=scaling, max_seq_len=20)).double()
    for length in (5, 8, 9, 13, 20):
        table = rotary(length)
        own = scaled_frequencies(scaling, frequencies(rotary), base=QWEN.rope_base, length=length)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * own
        close = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(table[0], angles.cos() * attention_factor(scaling), **close)
        ids_BT = torch.tensor([[0, 1, 2, 0], [0, 1, 2, length - 1]])
        for given, whole in zip(rotary(4, Positions(ids_BT)), table, strict=True):
            torch.testing.assert_close(given, whole[ids_BT.t()], **close)


def test_layers_share_the_angles_of_full_sequences():
    """Views of a table: nothing is computed, and autograd keeps nothing more."""
    rotary = RotaryPositions(replace(QWEN, rope_scaling=RopeScaling("dynamic", **SMALL), max_seq_len=20))
    for length, shared in ((8, True), (13, False), (20, True)):
        tables = [table for _ in range(2) for table in rotary(length)]
        own = {table.untyped_storage().data_ptr() for table in tables}
        assert (own <= {buffer.untyped_storage().data_ptr() for buffer in rotary.buffers()}) == shared


def frequencies(rotary):
    return rotary.base ** -(torch.arange(0, rotary.dim, 2, dtype=torch.float64) / rotary.dim)


def config_of(scaling, longest):
    sizes = {"head_dim": DIM, "hidden_size": DIM, "num_attention_heads": 1}
    return SimpleNamespace(
        rope_parameters=rope_parameters(scaling, BASE),
        **sizes,
        max_position_embeddings=longest,
        standardize_rope_params=lambda: None,
    )


@pytest.mark.parametrize("name", KINDS)
def test_transformers_has_the_same_frequencies(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = KINDS[name]
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config_of(scaling, 65536), "cpu")
    ours = scaled_frequencies(scaling, PLAIN, base=BASE)
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)


def rope_parameters(scaling, base):
    names = {"kind": "rope_type", "original_max_seq_len": "original_max_position_embeddings"}
    return {"rope_theta": base} | {names.get(name, name): value for name, value in vars(scaling).items()}


def test_tables_have_the_factor_and_a_cast_keeps_them_wide():
    scaling = RopeScaling("yarn", factor=16.0, original_max_seq_len=4)
    rotary = RotaryPositions(replace(QWEN, rope_scaling=scaling)).to(torch.bfloat16)
    factor = 0.1 * math.log(16.0) + 1.0
    assert rotary.cos.dtype == torch.float32
    torch.testing.assert_close(
        rotary.cos.square() + rotary.sin.square(), torch.full_like(rotary.cos, factor**2)
    )


@pytest.mark.parametrize(
    "fields, message",
    (
        ({"kind": "ntk"}, "kind must be one of linear, dynamic, llama3, yarn, longrope, got 'ntk'"),
        ({"kind": "longrope"}, "longrope needs as many short_factor as long_factor, got 0 and 0"),
        ({"long_factor": (2.0,)}, "short_factor and long_factor are of kind 'longrope' only, got 'llama3'"),
        (
            {"kind": "longrope", "short_factor": (1.0,), "long_factor": (0.0,)},
            "short_factor and long_factor must be positive, got 0.0",
        ),
        ({"factor": 0.5}, "factor must be 1 or more, got 0.5"),
        ({"beta_fast": 0.5}, "beta_slow must be at most beta_fast, got 1.0 and 0.5"),
        ({"high_freq_factor": 1.0}, "low_freq_factor must be less than high_freq_factor, got 1.0 and 1.0"),
    ),
)
def test_a_scaling_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"RopeScaling: {message}"):
        RopeScaling(**fields)


@pytest.mark.parametrize(
    "fields, message",
    (
        ({"rotary_fraction": 0.0}, "rotary_fraction must be above 0 and at most 1, got 0.0"),
        ({"rotary_fraction": 0.5}, "rotary_fraction 0.5 turns 3 of 6 elements of a head: expected an even"),
        ({"rotary_fraction": 0.1}, "rotary_fraction 0.1 turns 0 of 6 elements of a head: expected an even"),
        ({"rotary_fraction": 0.5, "position": "learned"}, 'rotary_fraction needs position "rope", got'),
    ),
)
def test_a_share_of_a_head_that_cannot_turn_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"GPTConfig: {message}"):
        replace(QWEN, **fields)


def test_a_part_of_a_head_has_frequencies_of_its_own_size():
    half = RotaryPositions(replace(QWEN, head_size=8, rotary_fraction=0.5))
    whole = RotaryPositions(replace(QWEN, head_size=4))
    assert half.dim == 4 and torch.equal(half.cos, whole.cos) and torch.equal(half.sin, whole.sin)
