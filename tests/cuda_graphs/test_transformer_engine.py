"""Transformer Engine's own `make_graphed_callables`, driven from a plan, over recorded graphs.

Its graph.py is read from the wheel in the environment variable TRANSFORMER_ENGINE_WHEEL (`pip download
--no-deps transformer-engine`: that one is pure Python) or from an installed package, and run with stand-ins
for what needs a GPU: that tests which arguments it gets, and no kernel.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from graph_tools import DENSE, MOE
from hypothesis import given
from hypothesis import strategies as st

from fastmp.config import GraphConfig
from fastmp.cuda_graphs import transformer_engine
from fastmp.cuda_graphs.backends.recording import Pool, RecordedGraph
from fastmp.cuda_graphs.transformer_engine import TransformerEngineManager, arguments
from fastmp.nn import GPT, Placement
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.buffer_plan import SpanSpec, TensorSpec, plan_buffers
from fastmp.schedule.schedule import BACKWARD, FORWARD, Schedule, Step
from fastmp.training.graphing import make_graphs
from fastmp.training.language import token_loss
from fastmp.training.microbatches import MicrobatchRunner

GRAPH = "transformer_engine/pytorch/graph.py"
HIDDEN = TensorSpec((4, 2, 8), "bfloat16")
RUN = SpanSpec("run", (HIDDEN,), (HIDDEN,))


def test_the_order_of_a_rank_and_its_samples():
    steps = Schedule(4, 8, 2).order(0)
    own = arguments(plan_buffers(steps, [[RUN, RUN], [RUN]]), steps)
    assert own.order[:12] == [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, -2] and own.layers == [2, 1]
    assert list(own.samples)[:5] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0)]
    assert list(own.samples)[-1] == (1, 7, 0) and len(own.samples) == 8 * 3


@given(pp=st.integers(1, 4), vpp=st.integers(1, 3), groups=st.integers(1, 3), data=st.data())
def test_every_forward_has_its_sample(pp, vpp, groups, data):
    runs = [[RUN] * data.draw(st.integers(1, 3)) for _ in range(vpp)]
    rank = data.draw(st.integers(0, pp - 1))
    steps = Schedule(pp, pp * groups, vpp).order(rank)
    own = arguments(plan_buffers(steps, runs), steps)
    assert len(own.samples) == pp * groups * sum(own.layers) and list(own.samples) == sorted(own.samples)
    for chunk in range(vpp):
        assert own.order.count(chunk + 1) == own.order.count(-chunk - 1) == pp * groups
    held, numbers = {}, dict.fromkeys(own.order, 0)
    for code in own.order:  # a buffer is held by one microbatch at a time
        chunk, microbatch = abs(code) - 1, numbers[code]
        numbers[code] += 1
        for run in range(own.layers[chunk]):
            place = chunk, microbatch, run
            if code > 0:
                assert all(set(own.samples[place]).isdisjoint(buffers) for buffers in held.values())
                held[place] = own.samples[place]
            else:
                del held[place]


def test_orders_that_it_does_not_take():
    steps = Schedule(2, 2, name="zero_bubble").order(0)
    with pytest.raises(ValueError, match="does not support split backwards, got a backward_input of"):
        arguments(plan_buffers(steps, [[RUN]]), steps)
    steps = [Step(FORWARD, 1, 0), Step(BACKWARD, 1, 0), Step(FORWARD, 0, 0), Step(BACKWARD, 0, 0)]
    with pytest.raises(ValueError, match="forward of microbatch 1 chunk 0 comes where microbatch 0 should"):
        arguments(plan_buffers(steps, [[RUN]]), steps)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ValueError, match="impl 'transformer_engine' needs that package, pip install"):
        make_graphs(
            MicrobatchRunner([GPT(DENSE)], token_loss),
            GraphConfig(enabled=True, impl="transformer_engine"),
            rng=None,
            device=torch.device("cpu"),
            manager=TransformerEngineManager,
        )


def test_layers_that_are_recomputed_are_refused():
    layers = GPT(DENSE, recompute=True).layers
    with pytest.raises(ValueError, match="Transformer Engine does not support recomputed layers; use rec"):
        TransformerEngineManager([layers], Schedule(1, 1).order(0))


def test_training_goes_on_where_it_cannot_capture(monkeypatch):
    """It captures before anything of the step has run."""

    def make(*args, **options):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(transformer_engine, "_make_graphed_callables", lambda: make)
    monkeypatch.setattr(transformer_engine._Backend, "streams", lambda self: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    layout = (DENSE, 0, 1, 1, 2)
    eager, _ = run_rank(*layout, graphs=False, own_buffers=True)
    graphed, manager = run_rank(*layout, graphs=True, own_buffers=True)
    manager.end_step()
    assert all(map(torch.equal, graphed, eager)) and len(graphed) == len(eager)
    assert "Transformer Engine could not capture: OutOfMemoryError: on purpose" in manager.describe()


def source():
    """The text of its graph.py; None where it is not to be found."""
    wheel = os.environ.get("TRANSFORMER_ENGINE_WHEEL")
    if wheel:
        return zipfile.ZipFile(wheel).read(GRAPH).decode()
    found = importlib.util.find_spec("transformer_engine")
    return None if found is None else (Path(found.origin).parents[1] / GRAPH).read_text()


class Graph:
    """In place of torch.cuda.CUDAGraph."""

    pool = None

    def __init__(self):
        self.recorded = RecordedGraph(Graph.pool)

    def replay(self):
        self.recorded.replay()

    def reset(self):
        self.recorded = None


def weak(x):
    if isinstance(x, torch.Tensor):
        return Graph.pool.place(x.detach()).tensor()
    return x if x is None else tuple(weak(each) for each in x)


@pytest.fixture
def engine(monkeypatch):
    """Its graph.py among stand-ins for the modules that it imports, and for `torch.cuda`."""
    text = source()
    if text is None:
        pytest.skip("no Transformer Engine: neither installed nor in TRANSFORMER_ENGINE_WHEEL")
    Graph.pool = Pool()
    nobody = {name: type(name, (), {}) for name in ("DelayedScaling", "Recipe", "OperationFuser")}
    modules = {name: type(name, (torch.nn.Module,), {}) for name in ("Base", "Operation", "Sequential")}
    state = mock.Mock(is_first_fp8_module=lambda: False, is_fp8_enabled=lambda: False)
    rng = {"get_all_rng_states": dict, "set_all_rng_states": lambda states: None}
    contents = {
        "": {},
        ".common": {},
        ".common.recipe": nobody,
        ".pytorch": {},
        ".pytorch.constants": {"dist_group_type": object},
        ".pytorch.quantization": {
            "autocast": lambda **options: mock.MagicMock(),
            "FP8GlobalStateManager": state,
            "get_default_fp8_recipe": None,
        },
        ".pytorch.distributed": {"graph_safe_rng_available": lambda: False, **rng},
        ".pytorch.module": {},
        ".pytorch.module.base": {"TransformerEngineBaseModule": modules["Base"]},
        ".pytorch.ops": {"Sequential": modules["Sequential"]},
        ".pytorch.ops.op": {"BasicOperation": modules["Operation"]},
        ".pytorch.ops.fuser": {"OperationFuser": nobody["OperationFuser"]},
        ".pytorch.utils": {"make_weak_ref": weak},
        ".pytorch.attention": {},
        ".pytorch.attention.linear_attention": {},
        ".pytorch.attention.linear_attention.base": {"LinearAttentionBase": modules["Base"]},
    }
    for name, names in contents.items():
        module = ModuleType(f"transformer_engine{name}")
        module.__path__ = []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, own in {
        "CUDAGraph": Graph,
        "graph": lambda graph, pool: graph.recorded.capture(),
        "graph_pool_handle": lambda: (0, 1),
        "memory_snapshot": lambda pool: [],
        "synchronize": lambda: None,
        "Stream": lambda: None,
        "stream": lambda stream: mock.MagicMock(),
        "current_stream": lambda: None,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }.items():
        monkeypatch.setattr(torch.cuda, name, own)
    graph = ModuleType("transformer_engine.pytorch.graph")
    exec(compile(text, GRAPH, "exec"), vars(graph))
    graph.make_graphed_callables = mock.Mock(wraps=graph.make_graphed_callables)
    monkeypatch.setitem(sys.modules, graph.__name__, graph)
    return SimpleNamespace(make=graph.make_graphed_callables)


def run_rank(config, rank, pp, vpp, num_microbatches, graphs, own_buffers, scope=None, steps=3):
    """What a rank of a pipeline sends in all steps, and its gradients; what it receives is drawn."""
    torch.manual_seed(rank)
    config = replace(config, num_layers=2)
    chains = [GPT(config, Placement(dtype=torch.float64)).layers for _ in range(vpp)]
    names = [(f"{i}.{name}", p) for i, chain in enumerate(chains) for name, p in chain.named_parameters()]
    buffer = GradBuffer(names) if own_buffers else None
    steps_of_rank, sent = Schedule(pp, num_microbatches, vpp).order(rank), []
    manager = None
    if graphs:
        manager = TransformerEngineManager(chains, steps_of_rank, scope=scope, warmup=1)
    numbers = torch.Generator().manual_seed(7)
    for _ in range(steps):
        if manager is not None:
            manager.begin_step()
        in_flight = {}
        for step in steps_of_rank:
            x = torch.randn(8, 2, 32, dtype=torch.float64, generator=numbers)
            key = step.microbatch, step.chunk
            if step.kind == FORWARD:
                x.requires_grad_()
                y, *others = chains[step.chunk](x)
                sent += [y.detach(), *(other.detach().double() for other in others)]
                in_flight[key] = x, [y, *(other for other in others if other.requires_grad)]
            else:
                start, ends = in_flight.pop(key)
                torch.autograd.backward(ends, [x, *(torch.ones_like(end) for end in ends[1:])])
                sent.append(start.grad)
        sent += [p.grad.clone() if buffer is None else p.main_grad.clone() for _, p in names]
    return sent, manager


CASES = [(DENSE, None, True), (MOE, ["attention", "router"], False)]


@pytest.mark.parametrize(("config", "scope", "own_buffers"), CASES, ids=("dense", "experts"))
def test_a_rank_of_a_pipeline(engine, config, scope, own_buffers):
    layout = (config, 0, 4, 2, 8)
    eager, _ = run_rank(*layout, graphs=False, own_buffers=own_buffers)
    graphed, manager = run_rank(*layout, graphs=True, own_buffers=own_buffers, scope=scope)
    assert len(eager) == len(graphed)
    assert all(torch.equal(a, b) for a, b in zip(graphed, eager))
    (call,) = engine.make.call_args_list
    assert call.kwargs["_reuse_graph_input_output_buffers"]
    assert len(call.args[1]) == 8 * len(call.args[0])
    assert manager.plan.num_graphs < 2 * len(call.args[1])  # which has graphs for each microbatch
    manager.remove()
