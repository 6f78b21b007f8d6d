"""Streams of a GPU beside the current one: for shared experts, and for exchanges of tokens."""

from __future__ import annotations

import functools

import torch

__all__ = ["beside", "exchange_stream", "side_stream"]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a GPU. Backwards of what ran there run there, too."""
    return torch.cuda.Stream(device)


@functools.cache
def exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of exchanges that run beside another microbatch's compute.

    It has high priority: NCCL runs synchronous collectives on the current stream, and at normal priority
    their blocks start behind the last wave of a GEMM that was launched before.
    """
    return torch.cuda.Stream(device, priority=-1)


def beside(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """The streams of a GPU on which layers work beside the current one."""
    return side_stream(device), exchange_stream(device)
