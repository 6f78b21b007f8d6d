"""What a `CudaBackend` asks of CUDA, in which order; random numbers against a stand-in for its generators."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from fastmp.graphs import cuda
from fastmp.graphs.cuda import CudaBackend
from fastmp.graphs.errors import CaptureError
from fastmp.graphs.pieces import renew_accumulators
from fastmp.nn.recompute import recompute
from fastmp.parallel.rng import RngTracker


class FakeGenerator:
    """A generator of CUDA: wrappers of one state, [seed, offset], that can be exchanged."""

    capture = None  # {id of a state: how far the capture is on in it}
    device = torch.device("cuda", 0)

    def __init__(self, device=None, state=None):
        self.state = [0, 0] if state is None else state

    def graphsafe_get_state(self):
        return FakeGenerator(state=self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def _outside(self):
        assert self.capture is None, "not inside a capture"
        return self.state

    def get_state(self):
        return torch.tensor(self._outside())

    def set_state(self, state):
        self._outside()[:] = state.tolist()

    def initial_seed(self):
        return self._outside()[0]

    def get_offset(self):
        return self._outside()[1]

    def manual_seed(self, seed):
        self._outside()[:] = [seed, 0]

    def set_offset(self, offset):
        self._outside()[1] = offset

    def draw(self, count):
        """A function that tells where the numbers came from."""
        if self.capture is None:
            here = tuple(self.state)
            self.state[1] += count
            return lambda: here
        base, start = self.state, self.capture[id(self.state)]
        self.capture[id(base)] += count
        return lambda: (base[0], FakeGraph.started[id(base)] + start)


class FakeGraph:
    """A graph of CUDA as far as generators go."""

    started, drawn = None, None  # {id of a state: its offset}, and where numbers came from

    def __init__(self):
        self.states = {}
        self.kernels = []

    def register_generator_state(self, generator):
        self.states[id(generator.state)] = generator.state

    def capture_begin(self, pool, capture_error_mode):
        FakeGenerator.capture = dict.fromkeys(self.states, 0)

    def capture_end(self):
        self.increments, FakeGenerator.capture = FakeGenerator.capture, None

    def replay(self):
        FakeGraph.started = {key: state[1] for key, state in self.states.items()}
        FakeGraph.drawn += [kernel() for kernel in self.kernels]
        for key, state in self.states.items():
            state[1] += self.increments[key]


@pytest.fixture
def calls(monkeypatch):
    """`torch.cuda` and all that was asked of it."""
    fake = mock.MagicMock()
    fake.graph_pool_handle.side_effect = ["a pool", "another pool"]
    names = SimpleNamespace(cuda=fake, Tensor=torch.Tensor, Generator=torch.Generator, zeros=fake.zeros)
    monkeypatch.setattr(cuda, "torch", names)
    monkeypatch.setattr(cuda, "_stream_of_captures", lambda device: fake.side)
    return fake


def test_the_order_of_a_capture_and_a_replay(calls):
    rng = mock.MagicMock()
    rng.generators.return_value = {"default": mock.Mock(), "tensor-parallel": mock.Mock()}
    backend = CudaBackend(rng)
    calls.reset_mock()
    graph = backend.graph()
    with graph.capture():
        calls.work()
    graph.replay()
    backend.reset()
    current, own = calls.current_stream(), mock.call.CUDAGraph()
    registered = [own.register_generator_state(each) for each in rng.generators().values()]
    wanted = [
        own,
        *registered,
        mock.call.current_stream(),
        mock.call.side.wait_stream(current),
        mock.call.stream(calls.side),
        mock.call.stream().__enter__(),
        mock.call.current_blas_handle(),
        own.capture_begin(pool="a pool", capture_error_mode="thread_local"),
        mock.call.work(),
        own.capture_end(),
        mock.call.stream().__exit__(None, None, None),
        mock.call.current_stream().wait_stream(calls.side),
        own.replay(),
        mock.call.synchronize(),
        own.reset(),
        own.reset(),
        mock.call.graph_pool_handle(),
        own,
    ]
    assert calls.mock_calls[: len(wanted)] == wanted and backend.pool == "another pool"


def test_an_error_ends_the_capture_and_says_what_it_was(calls):
    graph = CudaBackend().graph()
    calls.reset_mock()
    calls.CUDAGraph().capture_end.side_effect = RuntimeError("the capture failed before")
    with pytest.raises(RuntimeError, match="operation not permitted"), graph.capture():
        raise RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(ValueError, match="a user's own"), graph.capture():
        raise ValueError("a user's own")
    assert calls.CUDAGraph().capture_end.call_count == 2


class Layers:
    """Draws outside of, inside and between recomputed parts, from two streams; notes where from."""

    def __init__(self, rng):
        self.rng, self.kernels = rng, []

    def _draw(self, count):
        self.kernels.append(self.rng._default.draw(count))

    def part(self, x):
        self._draw(8)
        with self.rng.fork("tensor-parallel"):
            self._draw(4)
        self._draw(12)
        return x * x

    def forward(self, x):
        self._draw(16)
        x = recompute(self.part, x, rng=self.rng)
        with self.rng.fork("tensor-parallel"):
            self._draw(20)
        return recompute(self.part, x, rng=self.rng)

    def taken(self):
        kernels, self.kernels = self.kernels, []
        return kernels


def make():
    rng = RngTracker(1)
    rng._default = FakeGenerator(state=[1, 0])
    rng._streams = {"tensor-parallel": FakeGenerator(state=[2, 0])}
    return rng, Layers(rng), torch.ones(2, requires_grad=True)


MICROBATCHES = (0, 1, 2)


def test_recomputed_parts_of_graphs_draw_what_their_forwards_drew(calls, monkeypatch):
    rng, layers, x = make()
    outputs, eager = [], []
    for _ in range(3):
        outputs = [layers.forward(x) for _ in MICROBATCHES]
        for output in outputs:
            output.sum().backward()
        eager.append([kernel() for kernel in layers.taken()])
    assert len(set(eager[0])) < len(eager[0])  # some are repeated

    monkeypatch.setattr(cuda.torch, "Generator", FakeGenerator)
    calls.CUDAGraph = FakeGraph
    rng, layers, x = make()
    backend = CudaBackend(rng)
    before = rng.states()
    with backend.watch() as watched:
        layers.forward(x)
    assert watched == [
        {"default": 16, "tensor-parallel": 0},
        {"default": 16 + 20, "tensor-parallel": 4 + 20},
    ]
    rng.restore(before)
    layers.taken()
    forwards = [backend.graph(watched=watched) for _ in MICROBATCHES]
    backwards = [backend.graph(forward) for forward in forwards]
    seen, outputs = [], []
    for graph in forwards:
        with graph.capture():
            outputs.append(layers.forward(x))
        graph._graph.kernels = layers.taken()
    for graph, output in zip(backwards, outputs):
        with graph.capture():
            output.sum().backward()
        graph._graph.kernels = layers.taken()
    for _ in range(3):
        FakeGraph.drawn = []
        for graph in (*forwards, *backwards):
            graph.replay()
        seen.append(FakeGraph.drawn)
    assert seen == eager


def test_more_recomputed_parts_than_watched(calls, monkeypatch):
    monkeypatch.setattr(cuda.torch, "Generator", FakeGenerator)
    calls.CUDAGraph = FakeGraph
    rng, layers, x = make()
    graph = CudaBackend(rng).graph(watched=[{"default": 16, "tensor-parallel": 0}])
    with pytest.raises(CaptureError, match="the run that was watched had 1"), graph.capture():
        layers.forward(x)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_parameter_gets_a_new_node_that_accumulates(dtype):
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    param.grad = torch.ones(3, dtype=dtype)
    address, hooked = param.data_ptr(), []
    param.register_post_accumulate_grad_hook(hooked.append)
    held = param * 2
    old = get_gradient_edge(param).node
    renew_accumulators([param])
    assert get_gradient_edge(param).node is not old
    (param * 3 + held).sum().backward()
    assert param.grad.tolist() == [6.0] * 3 and param.data_ptr() == address
    assert len(hooked) == 2 and param._version == 0
