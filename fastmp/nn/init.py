"""Initial weights: N(0, std), narrower for projections into the residual stream (Radford et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from fastmp.config import GPTConfig

__all__ = ["normal", "residual_normal"]

Init = Callable[[torch.Tensor], torch.Tensor]


def normal(config: GPTConfig) -> Init:
    """Return a function that draws a tensor from N(0, init_std), in place."""
    return partial(nn.init.normal_, mean=0.0, std=config.init_std)


def residual_normal(config: GPTConfig) -> Init:
    """Return `normal` scaled by 1 / sqrt(2 N), for the two projections of N layers into the residual."""
    return partial(nn.init.normal_, mean=0.0, std=config.init_std / math.sqrt(2 * config.num_layers))
