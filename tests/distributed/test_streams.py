"""Streams next to the current one have the priority of what runs on them."""

from __future__ import annotations

import pytest
import torch

from fastmp.distributed import streams


def test_exchanges_have_high_priority(monkeypatch):
    """Blocks of a GEMM that was launched before would otherwise go first."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: made.append(priority))
    streams.exchange_stream.__wrapped__(torch.device("cuda"))
    streams.side_stream.__wrapped__(torch.device("cuda"))
    assert made == [-1, 0]


@pytest.mark.gpu
def test_priorities_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    current = torch.cuda.current_stream(device)
    assert streams.exchange_stream(device).priority < current.priority == streams.side_stream(device).priority
