"""What a `CudaBackend` asks of CUDA, in which order; random numbers against a stand-in for its generators."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

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
    """`torch.cuda` and all that was asked of it; its memory is that of the CPU."""
    fake = mock.MagicMock()
    fake.graph_pool_handle.side_effect = ["a pool", "another pool"]
    fake.side.device = torch.device("cpu")
    fake._C._construct_storage_from_data_pointer = _storage_at
    fake._C._construct_CUDA_Tensor_From_Storage_And_Metadata = _tensor_on
    names = {name: getattr(torch, name) for name in ("Tensor", "Generator", "_conj", "_neg_view")}
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=fake, zeros=fake.zeros, _C=fake._C, **names))
    monkeypatch.setattr(cuda, "_stream_of_captures", lambda device: fake.side)
    monkeypatch.setattr(cuda, "_NOT_ENDED", [])
    return fake


def _storage_at(address, device, nbytes):
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _tensor_on(place, storage):
    empty = torch.empty(0, dtype=place["dtype"])
    return empty.set_(storage, place["storage_offset"], place["size"], place["stride"])


def test_the_order_of_a_capture_and_a_replay(calls):
    rng = mock.MagicMock()
    rng.generators.return_value = {"default": mock.Mock(), "tensor-parallel": mock.Mock()}
    backend = CudaBackend(rng)
    assert not calls.CUDAGraph.mock_calls and backend.nbytes == 0
    backend.graph()  # the first one makes the pool
    calls.reset_mock()
    graph = backend.graph()
    with graph.capture():
        calls.work()
    graph.replay()
    backend.reset()
    backend.graph()
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
        own.reset(),
        own.reset(),
        mock.call.current_stream(),
        mock.call.side.wait_stream(current),
        mock.call.graph_pool_handle(),
        own,
    ]
    assert calls.mock_calls[: len(wanted)] == wanted and backend.pool == "another pool"
    assert not calls.synchronize.called and not calls.empty_cache.called  # others may wait for this rank
    backend.prepare()
    assert calls.empty_cache.called


def test_an_error_ends_the_capture_and_says_what_it_was(calls):
    backend = CudaBackend()
    graph = backend.graph()
    calls.reset_mock()
    with pytest.raises(ValueError, match="a user's own"), graph.capture():
        raise ValueError("a user's own")
    assert calls.CUDAGraph().capture_end.call_count == 1 and backend.pool == "a pool"


@pytest.mark.parametrize("said", (True, False), ids=("raised", "found at the end"))
def test_after_a_capture_that_does_not_end_others_have_a_new_pool(calls, said):
    rng, made = mock.MagicMock(), [mock.Mock(name=name) for name in ("first", "failed", "mends", "next")]
    rng.generators.return_value = {"default": mock.Mock(), "tensor-parallel": mock.Mock()}
    calls.CUDAGraph.side_effect = made
    backend = CudaBackend(rng)
    graph = backend.graph()
    made[1].capture_end.side_effect = RuntimeError("the capture failed before")
    reason = "operation not permitted" if said else "failed before"
    with pytest.raises(RuntimeError, match=reason), graph.capture():
        if said:
            raise RuntimeError("operation not permitted when stream is capturing")
    place = calls.side.device.index, "a pool"
    assert calls._C.mock_calls == [
        mock.call._cuda_endAllocateToPool(*place),
        mock.call._cuda_releasePool(*place),
    ]
    assert cuda._NOT_ENDED == [made[1]] and made[1].reset.called
    registered = [mock.call(each) for each in rng.generators().values()]
    assert made[2].register_generator_state.mock_calls == registered and made[2].capture_end.called
    with backend.graph().capture():
        pass
    assert made[3].capture_begin.mock_calls == [
        mock.call(pool="another pool", capture_error_mode="thread_local")
    ]
    assert not calls.empty_cache.called


def test_a_device_that_is_lost_is_not_mended_for_ever(calls):
    calls.CUDAGraph().capture_end.side_effect = RuntimeError("an illegal memory access")
    backend = CudaBackend()
    for _ in range(2):
        calls.graph_pool_handle.side_effect = ["a pool"]
        with pytest.raises(RuntimeError, match="illegal"):
            backend.graph()
    calls.side.wait_stream.side_effect = RuntimeError("an illegal memory access")
    backend.reset()


def test_a_graph_holds_what_no_capture_has_made(calls):
    backend = CudaBackend()
    first, second = backend.graph(), backend.graph()
    given, other = torch.ones(3), torch.ones(3)
    with first.capture():
        made = given.view(3) + 1
        result = made * 2
    with second.capture():
        torch.add(result, other, out=result)
    storages = [StorageWeakRef(each.untyped_storage()) for each in (given, other, made, result)]
    del given, other, made, result
    assert [each.expired() for each in storages] == [False, False, True, True]
    backend.reset()
    assert all(each.expired() for each in storages)


@pytest.mark.parametrize("change", (torch.conj, torch.real, torch.imag, lambda z: z.conj().imag))
def test_a_weak_tensor_has_what_is_computed_when_it_is_read(calls, change):
    numbers = torch.randn(4, 6, dtype=torch.complex64)
    tensor = change(numbers.t()[1:])
    weak = CudaBackend().weak(tensor)
    assert torch.equal(weak(), tensor) and (weak().is_conj(), weak().is_neg()) == (
        tensor.is_conj(),
        tensor.is_neg(),
    )
    numbers.zero_()
    assert not weak().any()


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
        graph.graph.kernels = layers.taken()
    for graph, output in zip(backwards, outputs):
        with graph.capture():
            output.sum().backward()
        graph.graph.kernels = layers.taken()
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
