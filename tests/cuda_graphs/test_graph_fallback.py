"""Before a step captures, its backend gets ready; after a capture that fails, training goes on eagerly."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_tools import assert_same_as_eager, eager, linear, managed, total
from torch import nn

from fastmp.cuda_graphs.backends.recording import RecordedGraph, RecordingBackend
from fastmp.cuda_graphs.restore import repeatable_backward
from fastmp.nn.segment import LayerChain
from fastmp.ops.core import backends
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step


class FailingBackend(RecordingBackend):
    """The capture of graph number `fails` stops before its end; `prepared` counts calls of `prepare`."""

    def __init__(self, fails=None, error=RuntimeError):
        super().__init__()
        self.fails, self.error, self.made, self.prepared = fails, error, 0, 0

    def prepare(self):
        self.prepared += 1

    def graph(self, forward=None, draws=None, pool=0):
        graph, self.made = Failing(self.pools[pool], self.rng, forward), self.made + 1
        graph.error = self.error if self.made - 1 == self.fails else None
        return graph


class Failing(RecordedGraph):
    @contextmanager
    def capture(self):
        with super().capture():
            yield
            if self.error is not None:
                raise self.error("on purpose")


@pytest.mark.parametrize("rows", ([3] * 6, [3, 3, 3, 5, 5, 3]))
def test_the_manager_prepares_each_step_that_captures(rows):
    backend = FailingBackend()
    chain = LayerChain([linear(), eager(), linear()])
    manager = managed(chain, True, microbatches=1, backend=backend)
    for size in rows:
        manager.begin_step()
        total(chain(torch.ones(size, 4, dtype=torch.float64))).backward()
    assert backend.prepared == len(set(rows)) and manager.num_graphs == 4 * len(set(rows))


class Noisy(nn.Module):
    """Draws random numbers, and counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.up = linear()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return nn.functional.dropout(self.up(x), 0.5)


OVERLAPPING = [Step(kind, i, 0) for kind in (FORWARD, BACKWARD) for i in (0, 1)]


def overlapping(graphs, fails=None, steps=5, error=RuntimeError):
    """Two microbatches in flight; gradients, buffers and losses of all steps."""
    chain, seen = LayerChain([Noisy(), eager(), Noisy()]), []
    manager = None
    if graphs:
        manager = managed(chain, True, backend=FailingBackend(fails, error), fallback=True)
        manager.order = tuple(OVERLAPPING)
    data = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for param in chain.parameters():
            param.grad = None
        if graphs:
            manager.begin_step()
        losses = []
        for weight in (1, 10):
            x = torch.randn(3, 4, generator=data, dtype=torch.float64, requires_grad=True)
            losses.append((total(chain(x)) * weight, x))
        for loss, x in losses:
            loss.backward()
            seen += [loss.detach(), x.grad]
        seen += [param.grad.clone() for param in chain.parameters()]
    if graphs:
        manager.end_step()
        assert manager.num_graphs == 0 and "on purpose" in manager.failure
        assert "no graphs, all runs eagerly: graphs: capture of the" in manager.describe()
        assert chain.runner is None
    return [*seen, *(buffer.clone() for buffer in chain.buffers())]


@pytest.mark.parametrize("fails", range(8))  # four forwards, four backwards
def test_a_step_whose_capture_fails_goes_on_eagerly(fails):
    assert_same_as_eager(lambda graphs: overlapping(graphs, fails))


def split(graphs, fails=None):
    """The same with backwards in two parts."""
    chain, seen, queue = LayerChain([linear(), eager(), linear()]), [], WgradQueue()
    manager = managed(chain, graphs, backend=FailingBackend(fails), fallback=True)
    if graphs:
        manager.order = tuple(
            Step(kind, i, 0) for i in (0, 1) for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        )
    data = torch.Generator().manual_seed(5)
    for _ in range(4):
        for param in chain.parameters():
            param.grad = None
        if graphs:
            manager.begin_step()
        for weight in (1, 10):
            with defer_wgrad(queue):
                x = torch.randn(3, 4, generator=data, dtype=torch.float64)
                (total(chain(x)) * weight).backward()
            WgradQueue.run(queue.take())
        seen += [param.grad.clone() for param in chain.parameters()]
    if graphs:
        manager.end_step()
        assert "on purpose" in manager.failure
    return seen


@pytest.mark.parametrize("fails", range(6))
def test_split_backwards_go_on_eagerly(fails):
    assert_same_as_eager(lambda graphs: split(graphs, fails))


def test_memory_that_runs_out_in_a_backward_ends_the_graphs_only():
    assert_same_as_eager(lambda graphs: overlapping(graphs, fails=5, error=torch.OutOfMemoryError))


def test_compiled_code_may_have_its_backward_captured():
    """It refuses a backward that keeps the autograd graph, unless it is told not to reuse its memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU())
    y = torch.compile(model, backend="aot_eager")(torch.randn(3, 4))
    for _ in range(2):
        with repeatable_backward([y], does_work=True):
            y.sum().backward(retain_graph=True)


WITHOUT_CPP = """
import sys
import torch
torch.__version__ = type(torch.__version__)("2.99.0")
from fastmp.apps.train_main import make_trainer
from fastmp.config.recipe import load_recipe
from fastmp.distributed.runtime import init
from fastmp.ops.core import backends
assert "this is 2.99.0" in backends.AUTOGRAD_ABSENT

def losses(**graphs):
    sizes = {"train": {"steps": 8, "run_dir": sys.argv[2], "eval_interval": 0, "global_batch_size": 4,
        "stall_seconds": 0.0}, "data": {"micro_batch_size": 2, "seq_len": 32}, "checkpoint": {"interval": 0}}
    recipe = load_recipe(sys.argv[1], {**sizes, "model": {"num_layers": 2}, "graphs": graphs})
    torch.manual_seed(1)
    trainer = make_trainer(recipe, runtime)[1]
    found = [trainer.train_step().loss.item() for _ in range(4)]
    assert not graphs or (trainer.graphs.num_graphs and trainer.graphs.failure is None)
    trainer.close()
    return found

runtime = init()
eager = losses()
for scope in (None, ["full"], ["full_step"]):
    assert losses(enabled=True, scope=scope) == eager, scope
runtime.close()
"""


@pytest.mark.full
def test_derivatives_in_python_are_captured_too(tmp_path):
    """Those of a torch that the library was not compiled for; a fused loss may then have saved None."""
    if backends.AUTOGRAD_ABSENT:
        pytest.skip(backends.AUTOGRAD_ABSENT)
    recipe = Path(__file__).parents[2] / "configs" / "moe-small.toml"
    command = [sys.executable, "-c", WITHOUT_CPP, str(recipe), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
