"""Layers in parts, by segments of any kind: gradients as without, parts on the streams for their kinds."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from nn_tools import Clock
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastmp.distributed.streams import exchange_stream
from fastmp.nn import overlap
from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer, StageOutput
from fastmp.ops.wgrad import linear
from fastmp.pipeline import cut, executor
from fastmp.pipeline.cut import Streams
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule, Step


class Layer(SegmentedLayer):
    """compute | exchange | compute | exchange, with a residual and integers that are handed on; a loss.

    Compute and exchanges have weights whose gradients can be deferred.
    """

    def __init__(self, exchanges=True):
        super().__init__()
        self.first, self.second, self.exchanges = nn.Linear(8, 8), nn.Linear(8, 8), exchanges
        self.there = nn.Parameter(torch.randn(8, 8))

    def segments(self):
        return (
            Segment("first", self._first),
            Segment("there", self._there, exchanges=self.exchanges),
            Segment("second", self._second),
            Segment("back", self._back, exchanges=self.exchanges),
        )

    def _first(self, x, *, scale=1.0):
        y = torch.tanh(self.first(x)) * scale
        return y, torch.arange(len(x), device=x.device).flip(0), y.square().sum(), x

    def _there(self, y, order, aux, x):
        return linear(y[order], self.there), order, aux, x

    def _second(self, rows, order, aux, x):
        return linear(rows, self.second.weight, self.second.bias), order, aux, x

    def _back(self, rows, order, aux, x):
        return 0.5 * x + rows[order], aux


class Model(nn.Module):
    """A chain behind an embedding and a linear layer, whose weight gradients can be deferred."""

    def __init__(self, layers, device, frozen=False):
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(8), requires_grad=not frozen)
        self.start, self.chain = nn.Linear(8, 8).requires_grad_(not frozen), LayerChain(layers)
        self.to(device, torch.float64)
        self.sums = []

    def forward(self, x):
        out, *aux = self.chain(linear(x * self.embedding, self.start.weight), scale=0.5)
        loss = out.square().sum() + sum(aux)
        self.sums.append(loss.item())
        return loss


def pipeline_of(model, schedule, layers=None, orders=None):
    orders = schedule.orders() if orders is None else orders
    options = {"group": None, "inputs": None, "pairs": schedule.all_pairs(), "overlap": layers}
    return Pipeline([model], orders, loss=model, **options)


def train(device, overlapped, *, frozen=False):
    """The losses of 4 microbatches, and the gradients of parameters, also of those before the layers."""
    torch.manual_seed(3)
    model = Model([Layer(), Layer(exchanges=False), Layer()], device, frozen)
    inputs = [torch.randn(5, 8, dtype=torch.float64, device=device) for _ in range(4)]
    layers = overlap.OverlappedLayers([model.chain]) if overlapped else None
    pipeline_of(model, Schedule(1, 4, overlap=overlapped), layers).train(inputs)
    return model.sums, [p.grad for p in model.parameters() if p.requires_grad and p is not model.start.bias]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_are_as_without(device, frozen):
    (losses, grads), (expected, plain) = (train(device, each, frozen=frozen) for each in (True, False))
    assert losses == expected
    assert all(torch.equal(a, b) and a.any() for a, b in zip(grads, plain, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_split_backward_leaves_wgrad_for_later(device):
    """Gradients of inputs come with dgrad, those of weights in GEMMs with wgrad, also before the layers."""
    kinds = [("forward", 0), ("backward_input", 0), ("forward", 1), ("backward_weight", 0)]
    kinds += [("backward_input", 1), ("backward_weight", 1)]
    order, found = [Step(kind, microbatch, 0) for kind, microbatch in kinds], []
    for overlapped in (False, True):
        torch.manual_seed(3)
        model = Model([Layer(), Layer()], device)
        layers = overlap.OverlappedLayers([model.chain]) if overlapped else None
        x, late = torch.ones(5, 8, dtype=torch.float64, device=device), []

        def fetch(microbatch, model=model, x=x, late=late):
            weights = [model.start.weight, *(layer.second.weight for layer in model.chain)]
            late.append([each.grad is None for each in (model.embedding, *weights)])
            return x + microbatch

        pipeline_of(model, Schedule(1, 2), layers, [order]).train(fetch)
        assert late == [[True] * 4, [False, True, True, True]]
        found.append([p.grad for p in model.parameters() if p is not model.start.bias])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("depths", [(1, 1), (1, 0), (0, 1)], ids=str)
def test_chunks_on_a_v_beside_each_other(depths):
    """Bits of DualPipeV with overlap, also of stages without layers, are those of plain 1F1B."""

    class Stage(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.before, self.behind = nn.Linear(8, 8), nn.Linear(8, 8)
            self.chain = LayerChain([Layer() for _ in range(depth)])
            self.double()

        def forward(self, x):
            x, *aux = self.chain(linear(x, self.before.weight, self.before.bias), scale=0.5)
            return StageOutput(linear(x, self.behind.weight, self.behind.bias), sum(aux) if aux else None)

    found = []
    for name, overlapped in (("1f1b", False), ("dualpipe_v", False), ("dualpipe_v", True)):
        torch.manual_seed(3)
        chunks, schedule = [Stage(depth) for depth in depths], Schedule(1, 5, 2, None, name, overlapped)
        batches = [torch.randn(5, 8, dtype=torch.float64) for _ in range(5)]
        options = {"inputs": lambda batch: batch, "loss": lambda y, _: y.square().sum()}
        options |= {"pairs": schedule.all_pairs(), "placement": schedule.placement}
        layers = overlap.OverlappedLayers([each.chain for each in chunks]) if overlapped else None
        result = Pipeline(chunks, schedule.orders(), group=None, overlap=layers, **options).train(batches)
        assert Counter(result.trace) == Counter(schedule.order(0))
        found.append([result.loss, *(p.grad for each in chunks for p in each.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) and b.any() for a, b in zip(found[0], other, strict=True))


class Exact(Layer):
    """Computes in float32, under autocast too, as a router."""

    def segments(self):
        exact = torch.autocast("cpu", enabled=False)
        return tuple(each._replace(run=exact(each.run)) for each in super().segments())

    def _first(self, x, *, scale):
        return super()._first(x.float(), scale=scale)


@pytest.mark.parametrize("where", ["in the chunk", "around the step"])
def test_a_backward_is_not_under_autocast(where):
    """Its dtypes are those of its forward, whatever runs it: bits are those without overlap."""
    found, cast = [], torch.autocast("cpu", dtype=torch.bfloat16)
    for overlapped in (False, True):
        torch.manual_seed(3)
        model = Model([Exact(), Exact()], "cpu").float()
        layers = overlap.OverlappedLayers([model.chain]) if overlapped else None
        pipeline = pipeline_of(model, Schedule(1, 4, overlap=overlapped), layers)
        if where == "in the chunk":
            model.forward = cast(model.forward)
        with cast if where == "around the step" else nullcontext():
            pipeline.train([torch.randn(5, 8) for _ in range(4)])
        found.append([p.grad for p in model.parameters() if p is not model.start.bias])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found, strict=True))


def test_phases_of_training_cover_all_parts(monkeypatch):
    """`fastmp trace diff` tells forwards and backwards apart by them, and they do not nest."""
    now, seen = [], set()

    @contextmanager
    def phase(name):
        assert not now
        now.append(name)
        yield
        now.clear()

    def note(name, run):
        def noted(*args):
            seen.add((name, *now))
            return run(*args)

        monkeypatch.setattr(cut.CutLayers, name, noted)

    monkeypatch.setattr(executor, "phase", phase)
    for name in ("forward", "backward"):
        note(name, getattr(cut.CutLayers, name))
    train("cpu", True)
    assert seen == {("forward", "forward"), ("backward", "forward"), ("backward", "backward")}


def test_keywords_of_layers_are_for_the_forward(monkeypatch):
    first_of, alive = Layer._first, []
    monkeypatch.setattr(Layer, "_first", lambda self, x, *, scale: first_of(self, x, scale=len(scale)))
    model = Model([Layer()], "cpu")

    def loss(x):
        scale = torch.ones(3)
        kept = weakref.ref(scale)
        out, *_ = model.chain(x, scale=scale)
        del scale
        alive.append(kept() is not None)
        return out.sum()

    layers, options = overlap.OverlappedLayers([model.chain]), {"group": None, "inputs": None, "loss": loss}
    x = torch.randn(5, 8, dtype=torch.float64)
    Pipeline([model], Schedule(1, 2).orders(), overlap=layers, **options).train([x, x])
    assert alive == [False, False]


def test_autograd_leaves_each_stream_alone(monkeypatch):
    """Autograd runs a node on the stream on which it was made, which waits for those behind the node.

    So a part of a backward must end in nodes that were made on its own stream.
    """
    now, seen = ["loss"], []

    @contextmanager
    def on(streams, span, exchange, tensors):
        now.append("exchange" if exchange else "compute")
        yield
        now.pop()

    class Cut(cut._Cut):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.made = now[-1]
            return cut_of.forward(ctx, *inputs)

        @staticmethod
        def backward(ctx, grad):
            seen.append((ctx.made, now[-1]))
            return cut_of.backward(ctx, grad)

    cut_of = cut._Cut
    monkeypatch.setattr(Streams, "on", on)
    monkeypatch.setattr(cut, "_Cut", Cut)
    train("cpu", True)
    assert set(seen) == {(name, name) for name in ("loss", "exchange", "compute")}


class Sleeps(torch.autograd.Function):
    """The identity, whose backward keeps a stream of a GPU busy for about half a second."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(1_000_000_000)
        return grad.clone()


@pytest.mark.gpu
@pytest.mark.alone
def test_compute_goes_on_beside_the_exchange_of_a_backward(monkeypatch):
    back, asleep = Layer._back, []
    monkeypatch.setattr(Layer, "_back", lambda self, rows, *rest: back(self, Sleeps.apply(rows), *rest))
    model = Model([Layer()], "cuda")
    x = torch.randn(5, 8, dtype=torch.float64, device="cuda")
    pipeline = pipeline_of(model, Schedule(1, 1), overlap.OverlappedLayers([model.chain]))
    exchange = cut.CutLayers.backward

    def backward(layers, span, exchanges=False):
        exchange(layers, span, exchanges)
        if exchanges and not asleep:  # the first in a backward: "back"
            torch.cuda.current_stream().synchronize()
            asleep.append(not exchange_stream(x.device).query())

    monkeypatch.setattr(cut.CutLayers, "backward", backward)
    torch.cuda.synchronize()
    pipeline.train([x])
    torch.cuda.synchronize()
    assert asleep == [True]
    assert all(param.grad.any() for param in model.chain.parameters())


def test_hooks_of_layers():
    model, called = Model([Layer(), Layer()], "cpu"), []
    pipeline = pipeline_of(model, Schedule(1, 1), overlap.OverlappedLayers([model.chain]))
    x = torch.randn(5, 8, dtype=torch.float64)

    def hook(module, inputs):
        called.append(module)

    model.chain[0].first.register_forward_pre_hook(hook)
    model.chain[1].register_forward_pre_hook(hook)
    with pytest.raises(ValueError, match=r"Layer is not called, nor its hook <function .*hook"):
        pipeline.train([x])
    hook.replayed = True
    pipeline.train([x])
    assert called == [model.chain[0].first, model.chain[1]]
    model.chain[0].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="Layer is not called, nor its hook"):
        pipeline.train([x])


def test_what_would_lose_gradients_is_refused():
    chain, x = LayerChain([Layer()]).double(), torch.ones(5, 8, dtype=torch.float64, requires_grad=True)
    layers = overlap.OverlappedLayers([chain])

    def train(loss):
        options = {"group": None, "inputs": None, "overlap": layers}
        Pipeline([chain], Schedule(1, 1).orders(), loss=lambda _: loss(), **options).train([None])

    with pytest.raises(ValueError, match="keyword 'scale' of all layers has a graph"):
        train(lambda: chain(x, scale=x.sum())[0].sum())
    train(lambda: chain(x, scale=torch.ones((), requires_grad=True))[0].sum())
    with pytest.raises(ValueError, match="chunk 0 were called again with microbatch 0 before"):
        train(lambda: chain(chain(x)[0])[0].sum())
    with pytest.raises(ValueError, match="chunk 0 has not called its layers, or without gradients"):
        train(lambda: (x * 2).sum())
    assert torch.equal(chain(x)[0], chain.run((x,), {})[0])  # after a step that failed


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))

    def record_event(self):
        return f"{self.name} {len(self.log)}"


def test_a_part_waits_for_the_one_before_alone(monkeypatch):
    """On streams that note what they are told: not for what else is on the stream of that part."""
    log = []
    main, exchanges = Stream("main", log), Stream("exchanges", log)

    @contextmanager
    def on(stream):
        log.append((stream.name, "runs"))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cut, "exchange_stream", lambda device: exchanges)
    own = Streams(torch.empty(1))
    own._device = torch.device("cuda")
    for part, exchange in enumerate((False, True, False, True)):
        with own.on(part, exchange, ()):
            pass
    own.join(())
    with own.on(3, True, ()):  # a backward, behind whose loss it comes
        pass
    assert log == [
        ("main", "waits for all of", "main"),
        ("main", "runs"),
        ("exchanges", "waits for", "main 2"),
        ("exchanges", "runs"),
        ("main", "waits for", "exchanges 4"),
        ("main", "runs"),
        ("exchanges", "waits for", "main 6"),
        ("exchanges", "runs"),
        ("main", "waits for", "exchanges 8"),
        ("exchanges", "waits for all of", "main"),
        ("exchanges", "runs"),
    ]


class CapturedStreams(TorchDispatchMode):
    """A captured step on two streams: finds memory that is freed while the other stream may still read it.

    live: the storages of the step. races: (allocated on, read on).
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.main, self.exchanges = Clock("main"), Clock("exchanges")
        self.current, self.live, self.races = self.main, {}, []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(cut, "exchange_stream", lambda device: self.exchanges)
        make = Streams.__init__

        def on_cuda(own, x):
            make(own, x)
            own._device = torch.device("cuda")

        monkeypatch.setattr(Streams, "__init__", on_cuda)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def find_races(self):
        for ref in [ref for ref in self.live if ref.expired()]:
            owner, read = self.live.pop(ref)
            for other in read.keys() - {owner}:
                if owner.knows.get(other.name, 0) < read[other]:
                    self.races.append((owner.name, other.name))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.find_races()
        made = func(*args, **(kwargs or {}))
        self.current.done += 1
        for tensor in tree_leaves((args, kwargs, made)):
            if isinstance(tensor, torch.Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                _, read = self.live.setdefault(ref, (self.current, {}))
                read[self.current] = self.current.done
        del tensor
        return made


@pytest.mark.parametrize("frozen", (False, True))
def test_a_captured_step_uses_memory_of_exchanges_again(frozen, monkeypatch):
    """No tensor is kept to the end of the capture, and none is freed while another stream reads it."""
    ends = []
    with CapturedStreams(monkeypatch) as step:
        end = Streams.end

        def ends_here(own):
            end(own)
            step.find_races()
            ends.append(sum(ref.nbytes() for ref in map(storage_of, step.live) if ref is not None))

        def joins(own, tensors):
            taken, held = (sum(map(len, each.values())) for each in (own._taken, own._held))
            assert held < taken / 2  # of a forward, what the last parts have taken
            join(own, tensors)

        join = Streams.join
        monkeypatch.setattr(Streams, "end", ends_here)
        monkeypatch.setattr(Streams, "join", joins)
        train("cpu", True, frozen=frozen)
        step.find_races()
    assert not step.races
    assert len(ends) == 4 and ends[2] <= ends[1]


def storage_of(ref):
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def test_no_memory_is_recorded_for_a_stream_in_a_capture(monkeypatch):
    """The allocator keeps such memory from being used again until the capture ends."""
    recorded, own = [], Streams(torch.empty(1))
    own._device = torch.device("cuda")
    tensor = Mock(is_cuda=True, record_stream=recorded.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "main")
    for captures, expected in ((True, []), (False, ["main"])):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        own.lend([tensor])
        assert recorded == expected
