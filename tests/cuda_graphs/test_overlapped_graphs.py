"""Graphs of what computes, where two microbatches run at once: the bits of plain steps, whatever happens."""

from __future__ import annotations

import gc
from collections import defaultdict, deque

import pytest
import torch
from marks import full
from torch import nn

from fastmp.cuda_graphs import replay_program
from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.recording import RecordedGraph, RecordingBackend
from fastmp.cuda_graphs.capture import Capture
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.executor import StepExecutor
from fastmp.cuda_graphs.graph_set import Gradients, GraphSet
from fastmp.cuda_graphs.overlapped import OverlappedGraphManager
from fastmp.nn.overlap import OverlappedLayers
from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer
from fastmp.ops.wgrad import linear
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from fastmp.schedule.stream_schedule import OpStep

MICROBATCHES = 6
BUNDLES = 3  # of graphs: one on each of two lanes, and one for the last backward, which overlaps nothing
needs_cpp = pytest.mark.skipif(
    replay_program.REPLAY is None, reason="fastmp._replay is not built for this torch"
)


class Layer(SegmentedLayer):
    """compute | exchange | compute | exchange, with dropout, a residual, integers handed on, and a loss.

    eager: whether exchanges are such that a graph could not hold them.
    """

    eager = True

    def __init__(self, exchanges=True):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.there, self.exchanges = nn.Parameter(torch.randn(8, 8)), exchanges

    def segments(self):
        return (
            Segment("first", self._first),
            Segment("there", self._there, not (self.exchanges and self.eager), exchanges=self.exchanges),
            Segment("second", self._second),
            Segment("back", self._back, not (self.exchanges and self.eager), exchanges=self.exchanges),
        )

    def _first(self, x, *, scale):
        y = torch.tanh(linear(self.norm(x), self.first.weight, self.first.bias)) * scale
        return (
            nn.functional.dropout(y, 0.2),
            torch.arange(len(x), device=x.device).flip(0),
            y.square().sum(),
            x,
        )

    def _there(self, y, order, aux, x):
        return linear(y[order.tolist()] if self.exchanges else y[order], self.there), order, aux, x

    def _second(self, rows, order, aux, x):
        return linear(rows, self.second.weight, self.second.bias), order, aux, x

    def _back(self, rows, order, aux, x):
        return x + rows[order], aux


class Trained:
    """A chain of layers that trains, plainly, in parts, or in parts that graphs hold."""

    def __init__(self, *, graphs=None, overlapped=None, device="cpu", **options):
        torch.manual_seed(3)
        self.place = {"dtype": torch.float64, "device": device}
        self.chain = LayerChain([Layer(), Layer(exchanges=False), Layer()]).to(**self.place)
        self.embedding = torch.ones(8, **self.place, requires_grad=True)
        self.schedule = Schedule(1, MICROBATCHES, overlap=bool(graphs or overlapped))
        self.layers = OverlappedLayers([self.chain]) if self.schedule.overlap else None
        self.manager, self.rows = None, 5
        if graphs:
            backend = RecordingBackend() if device == "cpu" else CudaBackend()
            steps = self.schedule.together(0)
            self.manager = OverlappedGraphManager(self.layers, steps, backend=backend, **options)
        self.parameters = [*self.chain.parameters(), self.embedding]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4)
        self.pipeline = self.pipeline_of(self.schedule)

    def pipeline_of(self, schedule):
        options = {"group": None, "inputs": None, "pairs": schedule.all_pairs(), "overlap": self.layers}
        return Pipeline([self.chain], schedule.orders(), loss=self.loss, **options)

    def loss(self, batch):
        inputs, scale = batch
        out, *aux = self.chain(inputs * self.embedding, scale=scale)
        loss = out.square().sum() + sum(aux)
        self.seen.append(loss.detach())
        return loss

    def step(self, seed=0):
        """Losses and gradients of a step; all microbatches begin with random numbers of their own."""
        self.optimizer.zero_grad()
        if self.manager is not None:
            self.manager.begin_step()

        def batch(microbatch):
            numbers = torch.Generator().manual_seed(seed + microbatch)
            inputs = torch.randn(self.rows, 8, generator=numbers).to(**self.place)
            return inputs, torch.full((), 0.5 + microbatch / 4, **self.place)

        self.seen = []
        self.pipeline.train(batch)
        self.seen += [param.grad.clone() for param in self.parameters]
        self.optimizer.step()
        return self.seen

    def steps(self, number=5):
        torch.manual_seed(9)
        return [self.step(10 * i) for i in range(number)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) and all(number.isfinite().all() for number in ours[-1])
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True)), f"step {step}"


@pytest.fixture(params=[pytest.param("C++", marks=needs_cpp), "Python"])
def way(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(replay_program, "REPLAY", None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("runs", "options"),
    [
        (4, {}),
        *full(
            [
                (3, {"scope": ["first"], "warmup": 1}),
                (5, {"span_size": 1}),
                (4, {"verify_every": 2}),
            ]
        ),
    ],
    ids=str,
)
def test_the_bits_are_eager_ones(runs, options):
    graphed = Trained(graphs=True, **options)
    assert_same(graphed.steps(), Trained().steps())
    assert graphed.manager.num_graphs == 3 * runs * BUNDLES


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", [{}, {"verify_every": 2}], ids=str)
def test_the_bits_are_eager_ones_on_a_gpu(options):
    """With exchanges on a stream of their own, beside replays."""
    graphed = Trained(graphs=True, device="cuda", **options)
    assert_same(graphed.steps(8), Trained(device="cuda").steps(8))
    assert graphed.manager.num_graphs == 3 * 4 * BUNDLES
    graphed.manager.remove()


@needs_cpp
def test_all_of_it_is_a_flat_program(monkeypatch):
    graphed = Trained(graphs=True)
    graphed.steps(3)
    monkeypatch.setattr(StepExecutor, "run_captured_span", None)  # which Python would call
    monkeypatch.setattr(StepExecutor, "backward_graph", None)
    graphed.steps(2)


def test_graphs_replay_in_the_order_of_parts(monkeypatch):
    """A part of a forward comes between two of a backward; gradients of weights have graphs of their own."""
    graphed, ran = Trained(graphs=True), []
    graphed.steps(3)
    steps_of = defaultdict(deque)  # a graph serves the microbatches of a lane in turn
    for graph, step in _graphs_of(graphed.manager):
        steps_of[id(graph)].append(step)
    assert {len(steps) for steps in steps_of.values()} == {1, 2, 3}
    replay = RecordedGraph.replay
    monkeypatch.setattr(
        RecordedGraph, "replay", lambda graph: ran.append(steps_of[id(graph)].popleft()) or replay(graph)
    )
    graphed.steps(1)
    assert ran == list(graphed.manager.order)
    kinds = "".join({FORWARD: "f", BACKWARD_INPUT: "b", BACKWARD_WEIGHT: "w"}[step.kind] for step in ran)
    assert kinds.startswith("ffff")
    assert kinds.count("f") == kinds.count("b") == kinds.count("w") == 4 * MICROBATCHES
    assert "bf" in kinds[4:-8] and "fb" in kinds[4:-8] and kinds.endswith("bw")
    assert str(ran[0]) == "forward of microbatch 0 op 0"


def _graphs_of(manager):
    (graph_set,) = manager._all()
    forwards = {slot.key: graph_set.captured[slot.graph] for slot in graph_set.slots if slot.kind == FORWARD}
    for slot in graph_set.slots:
        captured = forwards[slot.key]
        of_kind = {FORWARD: captured.forward}
        if slot.kind != FORWARD:
            of_kind = {
                BACKWARD_INPUT: captured.backward.graph,
                BACKWARD_WEIGHT: captured.weight.graph,
            }
        yield of_kind[slot.kind], OpStep(*slot.step)


@pytest.mark.full
@pytest.mark.parametrize("fails", [0, 5, 9, 11])
@pytest.mark.parametrize("what", ["forward", "backward", "weights"])
def test_a_step_whose_capture_fails_goes_on_eagerly(fails, what, monkeypatch):
    capture, calls = getattr(Capture, what), []

    def failing(self, *arguments):
        calls.append(what)
        if len(calls) == fails + 1:
            raise CaptureError("on purpose")
        return capture(self, *arguments)

    monkeypatch.setattr(Capture, what, failing)
    graphed = Trained(graphs=True, fallback=True)
    assert_same(graphed.steps(), Trained().steps())
    assert "on purpose" in graphed.manager.failure and graphed.layers.runner is None


@pytest.mark.full
@pytest.mark.usefixtures("way")
def test_what_a_graph_copies_to_the_host_is_read_where_it_lies(monkeypatch):
    """Integers stand for what lies on a host: a part hands them on without a copy of their own."""
    noted, there = [], Layer._there
    monkeypatch.setattr(GraphSet, "copies_out", lambda self, tensor: tensor.is_floating_point())

    def note(self, y, order, aux, x):
        noted.append(order.data_ptr())
        return there(self, y, order, aux, x)

    plain = Trained().steps(5)
    monkeypatch.setattr(Layer, "_there", note)
    graphed = Trained(graphs=True)
    assert_same(graphed.steps(5), plain)
    (graph_set,) = graphed.manager._all()
    in_graphs = set().union(*(captured.storages for captured in graph_set.captured.values()))
    replayed = noted[-2 * MICROBATCHES :]  # the layer that exchanges nothing is in graphs
    assert set(replayed) <= in_graphs and len(set(replayed)) == 2 * BUNDLES


@pytest.mark.full
@pytest.mark.usefixtures("way")
def test_steps_of_another_size_and_a_pause():
    graphed, plain, found = Trained(graphs=True), Trained(), []
    for trained in (graphed, plain):
        seen = trained.steps(4)
        trained.rows = 3
        seen += trained.steps(3)
        if trained is graphed:
            with trained.manager.paused():
                assert trained.layers.runner is None
                seen += trained.steps(1)
        else:
            seen += trained.steps(1)
        trained.rows = 5
        found.append(seen + trained.steps(2))
    assert_same(*found)
    assert graphed.manager.num_graphs == 2 * 3 * 4 * BUNDLES


@pytest.mark.full
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("replayed", [False, True])
def test_hooks_are_called_as_in_eager_steps(replayed):
    """One that a replay would skip has its layer run eagerly, in parts all the same."""
    counts = []

    def count(module, args):
        counts.append(type(module).__name__)

    count.replayed = replayed
    found = []
    for graphs in (False, True):
        trained = Trained(graphs=graphs, overlapped=True)
        trained.chain[0].norm.register_forward_pre_hook(count)
        counts.clear()
        found.append((trained.steps(5), list(counts)))
    (eager, often), (graphed, called) = found
    assert_same(graphed, eager)
    assert called == often == ["LayerNorm"] * 5 * MICROBATCHES
    assert trained.manager.num_graphs == 3 * (4 if replayed else 2) * BUNDLES


def test_exchanges_are_not_for_graphs_and_orders_are_checked(monkeypatch):
    for eager in (True, False):
        monkeypatch.setattr(Layer, "eager", eager)
        for scope in (["there"], ["full"]):
            with pytest.raises(ValueError, match=r"has there.*, which overlap_experts overlaps with"):
                Trained(graphs=True, scope=scope)
    monkeypatch.undo()
    graphed = Trained(graphs=True)
    graphed.steps(4)
    graphed.pipeline = graphed.pipeline_of(Schedule(1, MICROBATCHES))
    with pytest.raises(
        GraphError, match=r"is about to run, but the forward of microbatch 1 op 0, .* planned"
    ):
        graphed.step()


@pytest.mark.full
def test_layers_run_by_themselves_without_the_manager():
    graphed, plain = Trained(graphs=True), Trained()
    graphed.steps(4)
    plain.steps(4)
    del graphed.manager
    gc.collect()
    graphed.manager = None
    assert_same(graphed.steps(2), plain.steps(2))


@pytest.mark.usefixtures("way")
def test_an_exchange_that_writes_to_one_of_two_views_is_refused(monkeypatch):
    first, there = Layer._first, Layer._there

    def twice(self, x, *, scale):
        y, order, aux, x = first(self, x, scale=scale)
        return (y, order, aux, x, order.view(-1)) if self.exchanges else (y, order, aux, x)

    def writes(self, y, order, aux, x, *others):
        for other in others:
            other.add_(0)
        return there(self, y, order, aux, x)

    monkeypatch.setattr(Layer, "_first", twice)
    monkeypatch.setattr(Layer, "_there", writes)
    Trained(overlapped=True).steps(4)
    with pytest.raises(GraphError, match=r"'0.there' writes in place to a tensor that the graph before it"):
        Trained(graphs=True, warmup=1).steps(4)


@pytest.mark.full
def test_a_verified_backward_leaves_gradients_of_others_alone(monkeypatch):
    """Those that have arrived may be on their way to other ranks, and change meanwhile."""
    graphed, plain = Trained(graphs=True, verify_every=1), Trained()
    weight, replay = graphed.chain[0].norm.weight, Gradients.replay
    graphed.steps(3)
    plain.steps(3)
    graph_set = graphed.manager._graph_set
    forwards = [slot for slot in graph_set.slots if slot.kind == FORWARD and slot.step.chunk == 0]
    first = [graph_set.captured[slot.graph].weight for slot in forwards]

    def arrives(gradients):
        own = replay(gradients)
        if any(gradients is each for each in first):
            weight.grad += 1
        return own

    monkeypatch.setattr(Gradients, "replay", arrives)
    place = MICROBATCHES + [id(param) for param in graphed.parameters].index(id(weight))
    torch.manual_seed(4)
    seen = graphed.step()[place]
    torch.manual_seed(4)
    torch.testing.assert_close(seen, plain.step()[place] + MICROBATCHES, rtol=0, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("forwards", [1, 2, 4])
def test_a_step_that_fails_while_it_is_watched_makes_no_plan(forwards, monkeypatch):
    graphed, plain, calls = Trained(graphs=True, warmup=1), Trained(), []
    loss = torch.Tensor.square

    def fails(tensor):
        calls.append(tensor.shape)
        if len(calls) == 4 * forwards:  # behind the three layers of a forward
            raise RuntimeError("on purpose")
        return loss(tensor)

    monkeypatch.setattr(torch.Tensor, "square", fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        graphed.step()
    monkeypatch.undo()
    assert_same(graphed.steps(4), plain.steps(4))
    assert graphed.manager.num_graphs == 3 * 4 * BUNDLES


class Wide(torch.autograd.Function):
    """A product in float32, backward too, as that of a router."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x.float() @ weight.float()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad @ weight.float().t()).to(x.dtype), (x.float().t() @ grad).to(weight.dtype)


@pytest.mark.parametrize("graphs", [False, True])
def test_autocast_around_a_forward_is_not_for_the_backward_beside_it(graphs, monkeypatch):
    second, found = Layer._second, []

    def wide(self, rows, *rest):
        return second(self, Wide.apply(rows, self.there), *rest)

    monkeypatch.setattr(Layer, "_second", wide)
    for options in ({"overlapped": True, "graphs": graphs}, {}):
        trained = Trained(**options)
        trained.chain.float()
        trained.place["dtype"] = torch.float32
        runner = trained.chain.runner or LayerChain.run

        def under_autocast(chain, tensors, keywords, runner=runner):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return runner(chain, tuple(each.float() for each in tensors), keywords)

        trained.chain.runner = under_autocast
        found.append(trained.steps(4))
    for own, other in zip(*found, strict=True):
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
