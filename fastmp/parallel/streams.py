"""The stream of a GPU on which layers work beside the current one."""

from __future__ import annotations

import functools

import torch

__all__ = ["side_stream"]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a GPU. Backwards of what ran there run there, too."""
    return torch.cuda.Stream(device)
