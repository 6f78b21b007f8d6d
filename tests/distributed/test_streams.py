"""Streams next to the current one have the priority of what runs on them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("capturing", "waits"), [({}, True), ({"main", "side"}, True), ({"main"}, False)],
    ids=["eager", "forked in this capture", "before this capture"],
)  # fmt: skip
def test_a_capture_waits_for_what_takes_part_in_it(capturing, waits, monkeypatch):
    """A wait for earlier work would break the capture, and a replay would not know of it."""
    side, now, waited = SimpleNamespace(name="side"), [], []
    main = SimpleNamespace(name="main", wait_stream=waited.append)
    now.append(main)

    @contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1].name in capturing)
    streams.join(side, torch.device("cuda"))
    assert waited == [side] * waits and now == [main]


@pytest.mark.gpu
def test_priorities_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    current = torch.cuda.current_stream(device)
    assert streams.exchange_stream(device).priority < current.priority == streams.side_stream(device).priority
