"""The loop over experts on several streams, which runs on a GPU only, computes what the others do."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from benchmarks.bench_moe_layer import NUM_STREAMS, WORKLOADS, Weights, loop_on_streams


class Stream:
    """Notes whom it waits for."""

    def __init__(self) -> None:
        self.awaited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(other)


def test_the_loop_on_streams(monkeypatch):
    (work,) = WORKLOADS
    case = work.case(work.tiny, torch.float32, "cpu")
    k = work.tiny[3]
    current, streams, used = Stream(), [Stream() for _ in range(NUM_STREAMS)], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: used.append(stream) or nullcontext())
    x, *weights = case.leaves
    out = loop_on_streams(streams)(x, Weights(*weights), k)
    eager = case.rivals["torch eager"]()
    for value, want in zip(
        (out, *torch.autograd.grad(out, case.leaves, case.grad)),
        (eager, *torch.autograd.grad(eager, case.leaves, case.grad)),
        strict=True,
    ):
        torch.testing.assert_close(value, want, rtol=2e-4, atol=2e-5)
    assert set(used) == set(streams) and current.awaited == streams
    assert all(stream.awaited == [current] for stream in streams)
