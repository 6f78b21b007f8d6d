"""Counts on their way to the host: eagerly, in graphs that are recorded, and by stand-ins for a GPU's."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from fastmp.cuda_graphs.backends.recording import Pool, RecordedGraph
from fastmp.nn.moe import host_copies
from fastmp.nn.moe.host_copies import HostCopies


def test_a_replay_makes_the_copy_again():
    copies, given = HostCopies(), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    graph = RecordedGraph(Pool())
    with graph.capture():
        copy = copies.start(given * 10)
    assert copies.wait(copy).tolist() == [[10, 20], [30, 40]]
    given += 1
    assert copies.wait(copy).tolist() == [[10, 20], [30, 40]]
    graph.replay()
    assert copies.wait(copy).tolist() == [[20, 30], [40, 50]]


class OnDevice(torch.Tensor):
    """A tensor of a GPU, as far as copies can tell."""

    is_cuda = True
    device = torch.device("cuda", 0)


def on_device(*values):
    return torch.tensor(values, dtype=torch.int32).as_subclass(OnDevice)


@pytest.fixture
def cuda(monkeypatch):
    """Stands for `torch.cuda`: writes down what happens; `capturing` is to be set."""
    log, numbers, fake = [], count(), SimpleNamespace(capturing=False)

    class Event:
        def __init__(self, external):
            assert external, "an ordinary event of a capture is no node of the graph"
            self.number = next(numbers)
            log.append(f"event {self.number}")

        def record(self, stream):
            log.append(f"{stream} records {self.number}")

        def synchronize(self):
            log.append(f"waits for {self.number}")

    def pinned(like):
        assert not fake.capturing, "a capture allocates no pinned memory"
        log.append("allocates")
        return torch.empty(like.shape, dtype=like.dtype)

    fake.log = log
    monkeypatch.setattr(host_copies, "_pinned", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    return fake


def test_the_host_waits_for_the_copy_and_for_nothing_behind_it(cuda):
    copies = HostCopies()
    copy = copies.start(on_device(1, 2))
    assert cuda.log == ["allocates", "event 0", "stream records 0"]
    assert copies.wait(copy).tolist() == [1, 2]
    assert cuda.log[3:] == ["waits for 0", "allocates"]  # for a capture


def test_a_capture_takes_memory_that_was_laid_aside(cuda):
    copies = HostCopies()
    copies.wait(copies.start(on_device(1, 2)))
    captured = []
    for number in (1, 2):
        cuda.capturing = True
        captured.append(copies.start(on_device(number, 0)))
        cuda.capturing = False
        assert copies.wait(captured[-1]).tolist() == [number, 0]
        cuda.log.clear()
        copies.wait(captured[-1])  # of a replay: the same event, and nothing is allocated
        assert cuda.log == [f"waits for {number}"]
    assert captured[0].data_ptr() != captured[1].data_ptr()


def test_a_capture_without_such_memory_leaves_the_copy_to_the_wait(cuda):
    copies, given = HostCopies(), on_device(1, 2)
    cuda.capturing = True
    copy = copies.start(given)
    assert copy is given and not cuda.log
    cuda.capturing = False
    assert copies.wait(copy).tolist() == [1, 2]
    assert cuda.log == ["allocates", "event 0", "stream records 0", "waits for 0", "allocates"]
