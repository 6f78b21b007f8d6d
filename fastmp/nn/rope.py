"""Frequencies of rotary positions for longer contexts, as configured by `RopeScaling`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmp.config import RopeScaling

__all__ = ["attention_factor", "scaled_frequencies"]


def scaled_frequencies(
    scaling: RopeScaling, frequencies: Tensor, *, base: float, length: int | Tensor = 0
) -> Tensor:
    """Scale `frequencies` (D / 2,), base^(-2i / D) in float64, in radians a token.

    length: tokens of the sequence, for "dynamic" and "longrope"; as a tensor () on the device for "dynamic".
    """
    if scaling.kind == "longrope":
        long = not isinstance(length, Tensor) and scaling.extends(length)
        return frequencies / frequencies.new_tensor(scaling.long_factor if long else scaling.short_factor)
    numbers = torch.arange(frequencies.numel(), dtype=frequencies.dtype, device=frequencies.device)
    if scaling.kind == "dynamic":  # a base g^(D / (D - 2)) times as large, raised to -2i / D
        over = length - scaling.original_max_seq_len
        over = over.clamp(min=0).to(frequencies.dtype) if isinstance(over, Tensor) else max(over, 0)
        growth = 1.0 + scaling.factor / scaling.original_max_seq_len * over
        return frequencies * growth ** (-numbers / max(frequencies.numel() - 1, 1))
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return torch.lerp(slow, frequencies, ((turns - low) / (high - low)).clamp(0.0, 1.0))
    first, last = _range(scaling, 2 * frequencies.numel(), base)
    return torch.lerp(frequencies, slow, ((numbers - first) / (last - first)).clamp(0.0, 1.0))


def attention_factor(scaling: RopeScaling) -> float:
    """Return the factor of the cos and sin tables, and so of both queries and keys."""
    if scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_max_seq_len))


def _range(scaling: RopeScaling, dim: int, base: float) -> tuple[float, float]:
    """Return the indices of the frequencies between which YaRN blends from unscaled to scaled."""

    def number(turns: float) -> float:
        """Return the index of the frequency with this many turns in a sequence of the original length."""
        return dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = number(scaling.beta_fast), number(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return (first, last) if last != first else (first, first + 0.001)  # as the authors do, so as to divide
