"""`CudaBackend` against stand-ins for CUDA: its pools, its generators, what a graph holds."""

from __future__ import annotations

import ctypes
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from fastmp.cuda_graphs.backends import cuda
from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.capture import renew_accumulators
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.distributed.rng import RngTracker, Seeds
from fastmp.nn.recompute import recompute


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
        return lambda: (base[0], BareGraph.started[id(base)] + start)


class BareGraph:
    """A graph of CUDA as far as generators go, in C++."""

    started, drawn = None, None  # {id of a state: its offset}, and where numbers came from
    copies = 0  # launches that precede replays: of seed and offset for each generator that is drawn from

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
        BareGraph.started = {key: state[1] for key, state in self.states.items()}
        BareGraph.copies += sum(2 for increment in self.increments.values() if increment)
        BareGraph.drawn += [kernel() for kernel in self.kernels]
        for key, state in self.states.items():
            state[1] += self.increments[key]


class FakeGraph(BareGraph):
    """The same in Python."""

    def replay(self):
        super().replay()


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
    monkeypatch.setattr(cuda, "beside", lambda device: ())
    return fake


def _storage_at(address, device, nbytes):
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _tensor_on(place, storage):
    empty = torch.empty(0, dtype=place["dtype"])
    return empty.set_(storage, place["storage_offset"], place["size"], place["stride"])


class Allocator:
    """The pools of torch's allocator, as versions of torch treat that of a capture which fails.

    uses: how often each pool is in use; one that is released once more than used breaks the allocator.
    ends: whether `capture_end` stops routing allocations to the pool before it raises.
    releases: whether `reset` of the graph gives the pool back.
    """

    def __init__(self, ends, releases):
        self.ends, self.releases = ends, releases
        self.uses, self.routed, self.handles = Counter(), set(), 0

    def graph_pool_handle(self):
        self.handles += 1
        return (0, self.handles)

    def end(self, device, pool):
        if pool not in self.routed:
            raise RuntimeError("not currently recording to this pool")
        self.routed.remove(pool)

    def release(self, device, pool):
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0

    def memory_snapshot(self, pool):
        return [{"total_size": 1}] if self.uses[pool] else []


class PooledGraph:
    """A graph of CUDA as far as pools go; `fails`: whether a wait for the device is inside."""

    def __init__(self, allocator):
        self.allocator, self.pool, self.fails, self.alive = allocator, None, False, False

    def register_generator_state(self, generator):
        pass

    def capture_begin(self, pool, capture_error_mode):
        self.pool, self.alive = pool, True
        self.allocator.uses[pool] += 1
        self.allocator.routed.add(pool)
        self.allocator.capturing = self

    def capture_end(self):
        if self.fails and not self.allocator.ends:
            raise RuntimeError("the capture failed before")
        self.allocator.routed.remove(self.pool)
        if self.fails:
            raise RuntimeError("the capture failed before")

    def replay(self):
        assert not self.fails

    def reset(self):
        if self.alive and (not self.fails or self.allocator.releases):
            self.allocator.release(0, self.pool)
        self.alive = False


@pytest.mark.parametrize(
    ("ends", "releases"), [(False, False), (True, False), (True, True)], ids=("2.10", "2.13", "later")
)
def test_the_pool_of_a_capture_that_fails_is_released_once(calls, ends, releases):
    allocator = Allocator(ends, releases)
    cuda._reset_releases_pool.cache_clear()
    calls.CUDAGraph = lambda: PooledGraph(allocator)
    calls.graph_pool_handle.side_effect = allocator.graph_pool_handle
    calls.memory_snapshot = allocator.memory_snapshot
    calls._C._cuda_endAllocateToPool, calls._C._cuda_releasePool = allocator.end, allocator.release

    def wait():
        allocator.capturing.fails = True
        raise RuntimeError("operation not permitted when stream is capturing")

    calls.side.synchronize = wait
    backend = CudaBackend()
    backend.prepare()
    assert not +allocator.uses and not allocator.routed
    for _ in range(2):
        done, failed = backend.graph(), backend.graph()
        with done.capture():
            pass
        with pytest.raises(RuntimeError, match="not permitted"), failed.capture():
            wait()
        pool = failed.graph.pool
        assert backend.pools[0].handle != pool and not allocator.routed
        assert allocator.uses[pool] == 2  # of the graph that is there, and of the first one
    backend.reset()
    cuda._reset_releases_pool.cache_clear()


def test_a_backend_registers_the_streams_that_its_forward_advances(calls, monkeypatch):
    monkeypatch.setattr(cuda.torch, "Generator", FakeGenerator)
    calls.CUDAGraph = FakeGraph
    rng, layers, x = make()
    rng._streams["another"] = FakeGenerator(state=[3, 0])
    backend = CudaBackend(rng)
    with backend.trace_draws() as draws:
        layers.forward(x)
    forward = backend.graph(draws=draws)
    assert draws.moved == {"default", "tensor-parallel"}
    assert len(forward.generators) == 2 and len(backend.graph(forward).generators) == 2 + 2 * 2


def test_a_capture_joins_what_it_has_forked_before_it_ends(calls, monkeypatch):
    joined = []
    monkeypatch.setattr(cuda, "beside", lambda device: ("side", "exchanges"))
    monkeypatch.setattr(cuda, "join", lambda stream, device: joined.append(stream))
    graph = CudaBackend(None).graph()
    graph.graph.capture_end.side_effect = lambda: joined.append("end")
    joined.clear()  # of the graph that opened the pool
    with graph.capture():
        joined.append("work")
    assert joined == ["work", "side", "exchanges", "end"]


def test_an_error_ends_the_capture_and_says_what_it_was(calls):
    backend = CudaBackend()
    graph = backend.graph()
    calls.reset_mock()
    with pytest.raises(ValueError, match="a user's own"), graph.capture():
        raise ValueError("a user's own")
    assert backend.pools[0].handle == "a pool"


def test_a_device_that_is_lost_is_not_mended_for_ever(calls):
    calls.CUDAGraph().capture_end.side_effect = RuntimeError("an illegal memory access")
    backend = CudaBackend()
    for _ in range(2):
        calls.graph_pool_handle.side_effect = None
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


def test_memory_of_the_host_is_the_graphs(calls):
    calls.side.device = torch.device("cuda", 0)
    backend, given, copy = CudaBackend(), torch.ones(3), torch.zeros(3)
    graph = backend.graph()
    with graph.capture():
        copy.copy_(given)
    weak, storage = backend.weak(copy), StorageWeakRef(copy.untyped_storage())
    assert weak().data_ptr() == copy.data_ptr() and weak().device.type == "cpu"
    del weak, copy
    assert not storage.expired()
    graph.reset()
    assert storage.expired()


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


@pytest.fixture
def eager():
    """Where the draws of three steps come from: all forwards, then all backwards."""
    _, layers, x = make()
    steps = []
    for _ in range(3):
        outputs = [layers.forward(x) for _ in MICROBATCHES]
        for output in outputs:
            output.sum().backward()
        steps.append([kernel() for kernel in layers.taken()])
    assert len(set(steps[0])) < len(steps[0])  # some are repeated
    return steps


@pytest.fixture
def forwards(calls, monkeypatch):
    """The captured forwards of some microbatches: the backend, the layers, graphs and outputs."""
    monkeypatch.setattr(cuda.torch, "Generator", FakeGenerator)
    calls.CUDAGraph = FakeGraph
    rng, layers, x = make()
    backend = CudaBackend(rng)
    before = rng.states()
    with backend.trace_draws() as draws:
        layers.forward(x)
    assert draws.parts == [
        {"default": 16, "tensor-parallel": 0},
        {"default": 16 + 20, "tensor-parallel": 4 + 20},
    ]
    rng.restore(before)
    layers.taken()
    graphs, outputs = [backend.graph(draws=draws) for _ in MICROBATCHES], []
    for graph in graphs:
        with graph.capture():
            outputs.append(layers.forward(x))
        graph.graph.kernels = layers.taken()
    return backend, layers, graphs, outputs


def drawn(graphs):
    BareGraph.drawn = []
    for graph in graphs:
        graph.launch()
    return BareGraph.drawn


def test_recomputed_parts_of_graphs_draw_what_their_forwards_drew(eager, forwards):
    backend, layers, graphs, outputs = forwards
    backwards = [backend.graph(forward) for forward in graphs]
    for graph, output in zip(backwards, outputs):
        with graph.capture():
            output.sum().backward()
        graph.graph.kernels = layers.taken()
    assert [drawn([*graphs, *backwards]) for _ in range(3)] == eager


def test_an_eager_backward_of_a_replayed_forward_draws_what_that_drew(eager, forwards):
    """And the streams are afterwards those that graphs draw from."""
    _, layers, graphs, outputs = forwards
    first = drawn(graphs)
    for graph, output in zip(graphs, outputs):
        with graph.eager_backward():
            output.sum().backward()
    assert [*first, *(kernel() for kernel in layers.taken())] == eager[0]
    assert drawn(graphs) == eager[1][: len(first)]


def test_recomputed_parts_of_a_whole_step_draw_what_their_forwards_drew(eager, calls, monkeypatch):
    monkeypatch.setattr(cuda.torch, "Generator", FakeGenerator)
    calls.CUDAGraph = FakeGraph
    rng, layers, x = make()
    backend, before = CudaBackend(rng), rng.states()

    def step():
        outputs = [layers.forward(x) for _ in MICROBATCHES]
        for output in outputs:
            output.sum().backward()

    with backend.trace_draws() as draws:
        step()
    assert len(draws.parts) == 2 * len(MICROBATCHES)
    rng.restore(before)
    layers.taken()
    graph = backend.graph(draws=draws, has_backward=True)
    with graph.capture():
        step()
    graph.graph.kernels = layers.taken()
    assert [drawn([graph]) for _ in range(3)] == eager


class Seed:
    """A tensor that one kernel writes and another one reads."""

    def __init__(self, source):
        self.source = source

    def write(self):
        self.value = self.source()

    def read(self):
        return self.value


class Seeded(Layers):
    """Parts that draw seeds; `mixed`: from one of two streams also something else, as attention does."""

    def __init__(self, rng, mixed):
        super().__init__(rng)
        self.mixed, rng._draw = mixed, self._draw_seed

    def _draw_seed(self, device):
        watched, default = self.rng._ended is not None, self.rng._default
        before = default.get_offset() if watched else 0
        seed = Seed(default.draw(4))
        self.kernels.append(seed.write)
        return seed, default.get_offset() - before if watched else 0

    def part(self, x):
        self.kernels.append(self.rng.seed(x.device).read)
        with self.rng.fork("tensor-parallel"):
            if self.mixed:
                self._draw(8)
            self.kernels.append(self.rng.seed(x.device).read)
        return x * x


@pytest.mark.parametrize("mixed", (False, True), ids=("seeds", "mixed"))
def test_a_recomputation_reads_the_seeds_of_its_forward(calls, monkeypatch, mixed):
    """No Python, and no copy, precedes the replay of a backward; `mixed`: two copies for each generator."""
    monkeypatch.setattr(cuda.torch, "Generator", FakeGenerator)
    calls.CUDAGraph = FakeGraph
    rng, _, x = make()
    layers, expected = Seeded(rng, mixed), []
    for _ in range(2):
        outputs = [layers.forward(x) for _ in MICROBATCHES]
        for output in outputs:
            output.sum().backward()
        expected.append([source for kernel in layers.taken() if (source := kernel())])

    rng, _, x = make()
    layers, backend, before = Seeded(rng, mixed), CudaBackend(rng), rng.states()
    with backend.trace_draws() as draws:
        layers.forward(x)
    assert [list(part) for part in draws.parts] == [["tensor-parallel"] if mixed else []] * 2
    rng.restore(before)
    layers.taken()
    forwards, outputs = [backend.graph(draws=draws) for _ in MICROBATCHES], []
    for graph in forwards:
        with graph.capture():
            outputs.append(layers.forward(x))
        graph.graph.kernels = layers.taken()
    backwards = [backend.graph(forward) for forward in forwards]
    for graph, output in zip(backwards, outputs):
        with graph.capture():
            output.sum().backward()
        graph.graph.kernels = layers.taken()
    launched = {graph.launch.__func__ for graph in (*forwards, *backwards)}
    assert launched == {cuda.CudaGraph.replay if mixed else BareGraph.replay}
    for sources in expected:
        seen = []
        for graphs, copies in ((forwards, 2 * 2), (backwards, 2 * 2 if mixed else 0)):
            monkeypatch.setattr(BareGraph, "copies", 0)
            seen += drawn(graphs)
            assert BareGraph.copies == copies * len(MICROBATCHES)
        assert [source for source in seen if source] == sources


def test_a_recomputation_that_draws_another_seed_is_refused():
    rng = RngTracker(1)
    seeds = Seeds({})
    with rng.noting(seeds):
        first = rng.seed(torch.device("cpu"))
    with rng.again(seeds):
        assert rng.seed(torch.device("cpu")) is first
        with pytest.raises(RuntimeError, match="draws more seeds of stream 'default' than the forward"):
            rng.seed(torch.device("cpu"))


def test_more_recomputed_parts_than_traced(calls, monkeypatch):
    monkeypatch.setattr(cuda.torch, "Generator", FakeGenerator)
    calls.CUDAGraph = FakeGraph
    rng, layers, x = make()
    draws = cuda.DrawTrace([{"default": 16, "tensor-parallel": 0}], {"default", "tensor-parallel"})
    graph = CudaBackend(rng).graph(draws=draws)
    with pytest.raises(CaptureError, match="the traced run had 1"), graph.capture():
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
