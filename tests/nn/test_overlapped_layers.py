"""Layers in parts, by segments of any kind: gradients as without, parts on the streams for their kinds."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from nn_tools import Clock
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastmp.nn import overlap
from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer
from fastmp.ops.wgrad import linear
from fastmp.schedule.schedule import BACKWARD, FORWARD, Schedule


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


def train(device, overlapped, *, frozen=False):
    """The losses of 4 microbatches, the gradients of parameters, and of the chain's inputs."""
    torch.manual_seed(3)
    chain = LayerChain([Layer(), Layer(exchanges=False), Layer()]).to(device, torch.float64)
    inputs = [torch.randn(5, 8, dtype=torch.float64, device=device) for _ in range(4)]
    embedding = torch.ones(8, dtype=torch.float64, device=device, requires_grad=not frozen)
    layers = overlap.OverlappedLayers([chain]) if overlapped else None
    losses, done = {}, []
    schedule = Schedule(1, 4, overlap=overlapped)

    def forward(microbatch):
        out, *aux = chain(inputs[microbatch] * embedding, scale=0.5)
        losses[microbatch] = out.square().sum() + sum(aux)
        done.append(losses[microbatch].item())

    for steps in schedule.together(0):
        forwards, backwards = (
            [s.microbatch for s in steps if s.kind == kind] for kind in (FORWARD, BACKWARD)
        )
        for microbatch in backwards:
            losses.pop(microbatch).backward()
        for microbatch in forwards:
            if layers is None:
                forward(microbatch)
                continue
            with layers.forward((microbatch, 0), *((other, 0) for other in backwards)):
                forward(microbatch)
        for microbatch in backwards if layers is not None else ():
            layers.backward((microbatch, 0))
    assert layers is None or not layers._live
    return done, [p.grad for p in (*chain.parameters(), *([] if frozen else [embedding]))]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_are_as_without(device, frozen):
    (losses, grads), (expected, plain) = (train(device, each, frozen=frozen) for each in (True, False))
    assert losses == expected
    assert all(torch.equal(a, b) and a.any() for a, b in zip(grads, plain, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_split_backward_leaves_wgrad_to_a_second_call(device):
    """The gradient of the input comes with the first call, those of weights in GEMMs with the second."""
    found = []
    for split in (False, True):
        torch.manual_seed(3)
        chain = LayerChain([Layer(), Layer()]).to(device, torch.float64)
        layers = overlap.OverlappedLayers([chain])
        x = torch.ones(5, 8, dtype=torch.float64, device=device, requires_grad=True)
        with layers.forward((0, 0)):
            out, *aux = chain(x, scale=0.5)
        (out.square().sum() + sum(aux)).backward()
        if split:
            layers.backward((0, 0), split=True)
            assert x.grad is not None and layers._live
            assert all(layer.second.weight.grad is None for layer in chain)  # `there` is in an exchange
        layers.backward((0, 0))
        assert not layers._live
        found.append([x.grad, *(param.grad for param in chain.parameters())])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found, strict=True))


def test_autograd_leaves_each_stream_alone(monkeypatch):
    """Autograd runs a node on the stream on which it was made, which waits for those behind the node.

    So a part of a backward must end in nodes that were made on its own stream.
    """
    now, seen = ["loss"], []

    @contextmanager
    def on(lane, part, exchange, tensors):
        now.append("exchange" if exchange else "compute")
        yield
        now.pop()

    class Cut(overlap._Cut):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.made = now[-1]
            return overlap_cut.forward(ctx, *inputs)

        @staticmethod
        def backward(ctx, grad):
            seen.append((ctx.made, now[-1]))
            return overlap_cut.backward(ctx, grad)

    overlap_cut = overlap._Cut
    monkeypatch.setattr(overlap._Lane, "on", on)
    monkeypatch.setattr(overlap, "_Cut", Cut)
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
    back = Layer._back
    monkeypatch.setattr(Layer, "_back", lambda self, rows, *rest: back(self, Sleeps.apply(rows), *rest))
    chain = LayerChain([Layer()]).cuda()
    layers = overlap.OverlappedLayers([chain])
    with layers.forward((0, 0)):
        out, aux = chain(torch.randn(5, 8, device="cuda", requires_grad=True))
    (out.sum() + aux).backward()
    torch.cuda.synchronize()
    layers._live[0, 0].backward(0)
    torch.cuda.current_stream().synchronize()
    assert not overlap.exchange_stream(out.device).query()  # it is still asleep
    layers.backward((0, 0))
    torch.cuda.synchronize()
    assert all(param.grad.any() for param in chain.parameters())


def test_hooks_of_layers():
    chain = LayerChain([Layer(), Layer()])
    layers, called = overlap.OverlappedLayers([chain]), []

    def hook(module, inputs):
        called.append(module)

    chain[0].first.register_forward_pre_hook(hook)
    chain[1].register_forward_pre_hook(hook)
    with pytest.raises(ValueError, match=r"Layer is not called, nor its hook <function .*hook"):
        layers.begin_step()
    hook.replayed = True
    layers.begin_step()
    with layers.forward((0, 0)):
        chain(torch.randn(5, 8, requires_grad=True))
    assert called == [chain[0].first, chain[1]]
    chain[0].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="Layer is not called, nor its hook"):
        layers.begin_step()


def test_what_would_lose_gradients_is_refused():
    chain, x = LayerChain([Layer()]), torch.randn(5, 8, requires_grad=True)
    layers = overlap.OverlappedLayers([chain])
    with layers.forward((3, 0)), pytest.raises(ValueError, match="keyword 'scale' of all layers has a graph"):
        chain(x, scale=x.sum())
    with layers.forward((3, 0)):
        chain(x, scale=torch.ones((), requires_grad=True))
        with pytest.raises(ValueError, match="chunk 0 were called again with microbatch 3 before"):
            chain(x)


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
    monkeypatch.setattr(overlap, "exchange_stream", lambda device: exchanges)
    lane = overlap._Lane(torch.empty(1))
    lane._device = torch.device("cuda")
    for part, exchange in enumerate((False, True, False, True)):
        with lane.on(part, exchange, ()):
            pass
    lane.join(())
    with lane.on(3, True, ()):  # a backward, behind whose loss it comes
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
        monkeypatch.setattr(overlap, "exchange_stream", lambda device: self.exchanges)
        make = overlap._Lane.__init__

        def on_cuda(lane, x):
            make(lane, x)
            lane._device = torch.device("cuda")

        monkeypatch.setattr(overlap._Lane, "__init__", on_cuda)

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
        end = overlap._Lane.end

        def ends_here(lane):
            end(lane)
            step.find_races()
            ends.append(sum(ref.nbytes() for ref in map(storage_of, step.live) if ref is not None))

        def joins(lane, tensors):
            taken, held = (sum(map(len, each.values())) for each in (lane._taken, lane._held))
            assert held < taken / 2  # of a forward, what the last parts have taken
            join(lane, tensors)

        join = overlap._Lane.join
        monkeypatch.setattr(overlap._Lane, "end", ends_here)
        monkeypatch.setattr(overlap._Lane, "join", joins)
        train("cpu", True, frozen=frozen)
        step.find_races()
    assert not step.races
    assert len(ends) == 4 and ends[2] <= ends[1]


def storage_of(ref):
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def test_no_memory_is_recorded_for_a_stream_in_a_capture(monkeypatch):
    """The allocator keeps such memory from being used again until the capture ends."""
    recorded, lane = [], overlap._Lane(torch.empty(1))
    lane._device = torch.device("cuda")
    tensor = Mock(is_cuda=True, record_stream=recorded.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "main")
    for captures, expected in ((True, []), (False, ["main"])):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        lane.lend([tensor])
        assert recorded == expected
