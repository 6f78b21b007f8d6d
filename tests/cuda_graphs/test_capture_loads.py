"""Captures load nothing: every Triton kernel of a captured region was launched by an eager step before."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from capture_tools import new_in_capture
from graph_tools import DENSE, MOE, SCOPES, train_gpt
from marks import full
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.cuda_graphs.backends.recording import RecordedGraph, RecordingBackend
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Placement
from fastmp.ops import OPS, bias_dropout_add
from fastmp.ops.core import launcher
from fastmp.ops.precompile import Code


class Loads(TorchDispatchMode):
    """Lists the Triton kernels that a GPU would load for ops of ours, eagerly and in captures."""

    def __init__(self) -> None:
        super().__init__()
        self.capturing = self.replaying = False
        self.loaded: dict[Code, None] = {}
        self.captured: dict[Code, None] = {}
        self.new: list[Code] = []

    def launch(self, kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]) -> None:
        code = Code.of(kernel, arguments, constants)
        if self.capturing:
            self.captured[code] = None
            if code not in self.loaded:
                self.new.append(code)
        self.loaded[code] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("fastmp::")
        if not self.replaying and name in OPS and "triton" in OPS[name].implementations:
            OPS[name].implementations["triton"](*args)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def loads(monkeypatch):
    """Kernels are those of a GPU of compute capability 9.0; replays, which launch nothing, are left out."""
    loads, capture, replay = Loads(), RecordedGraph.capture, RecordedGraph.replay

    @contextmanager
    def captured(graph):
        with capture(graph):
            loads.capturing = True
            try:
                yield
            finally:
                loads.capturing = False

    def replayed(graph):
        loads.replaying = True
        try:
            replay(graph)
        finally:
            loads.replaying = False

    monkeypatch.setattr(RecordedGraph, "capture", captured)
    monkeypatch.setattr(RecordedGraph, "replay", replayed)
    with (
        mock.patch.object(launcher, "launch", loads.launch),
        launcher.intercept_launches(lambda *launch: None, 90),
    ):
        yield loads


@pytest.mark.parametrize("recompute", [False, *full([True])])
@pytest.mark.parametrize(("config", "scope", "runs"), [SCOPES[-1], *full(SCOPES[:-1])])
def test_training(config, scope, runs, recompute, loads):
    options = {"recompute": recompute, "steps": 3, "num_microbatches": 2, "dtype": torch.bfloat16}
    with loads:
        train_gpt(config, graphs=True, scope=scope, **options)
    assert loads.captured
    assert loads.new == []


def _loss(model, ids):
    losses = model.loss(ids, ids)
    return losses.sum() if isinstance(losses, torch.Tensor) else losses.tokens.sum() + losses.aux


def _step(model, ids):
    loss = _loss(model, ids)
    loss.backward()
    return loss.detach()


def _in_one_graph(config, function, trains):
    """Call a function of a model and token ids after a step, until it is a graph."""
    rng = RngTracker(1)
    model = GPT(config, Placement(rng=rng, dtype=torch.bfloat16))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    graph = FunctionGraph(
        lambda ids: function(model, ids), [model], backend=RecordingBackend(rng), name="it", advice="-",
        trains=trains,
    )  # fmt: skip
    _step(model, ids)
    with torch.set_grad_enabled(trains):
        for _ in range(3):
            graph(ids)
    assert graph.num_graphs == 1


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "experts"])
def test_an_evaluation_in_one_graph_after_training(config, loads):
    """Without gradients kernels keep less: other variants than those of training."""
    with loads:
        _in_one_graph(config, lambda model, ids: model.eval()(ids), trains=False)
    assert loads.captured
    assert loads.new == []


def test_a_training_step_in_one_graph(loads):
    with loads:
        _in_one_graph(DENSE, _step, trains=True)
    assert loads.captured
    assert loads.new == []


def test_a_variant_that_is_new_in_a_capture_is_found(loads):
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    with loads, RecordingBackend().graph().capture():
        torch.ops.fastmp.bias_gelu(x, None, "none")
    assert [code.kernel for code in loads.new] == ["bias_gelu_kernel"]


def test_a_drawn_mask_of_dropout_has_the_kernel_of_a_given_seed():
    """The GPU test of dropout gives a seed first, and captures a draw of the generator."""
    x, seed = torch.empty(257, 516, device="meta"), torch.empty((), dtype=torch.int64, device="meta")

    def dropped(**seed):
        return bias_dropout_add(x, None, x.clone(), p=0.3, **seed)

    assert new_in_capture(lambda: dropped(seed=seed), dropped) == []
