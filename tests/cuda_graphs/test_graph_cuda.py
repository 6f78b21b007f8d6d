"""Training through graphs of CUDA is eager training, bit for bit; captures leave no memory behind."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graph_tools import DENSE, MOE, SCOPES, assert_same_gpt, train_gpt
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, LayerChain, Placement
from fastmp.schedule.schedule import Schedule

pytestmark = pytest.mark.gpu
CUDA = {"device": "cuda"}


@pytest.fixture(autouse=True)
def _attention_whose_backward_has_an_order():
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.parametrize("own_buffers", (True, False), ids=("main_grad", "grad"))
@pytest.mark.parametrize(("config", "scope", "runs"), SCOPES)
def test_training_is_that_of_the_layers_themselves(config, scope, runs, own_buffers):
    eager = train_gpt(config, graphs=False, own_buffers=own_buffers, **CUDA)
    graphed = train_gpt(config, graphs=True, scope=scope, own_buffers=own_buffers, **CUDA)
    assert_same_gpt(graphed, eager)
    assert graphed[2].plan.num_graphs == 2 * runs


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@pytest.mark.parametrize("recompute", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("config", (DENSE, MOE), ids=("dense", "experts"))
def test_twenty_steps(config, recompute, dtype):
    options = {"steps": 20, "recompute": recompute, "dtype": dtype, **CUDA}
    assert_same_gpt(train_gpt(config, graphs=True, **options), train_gpt(config, graphs=False, **options))


@pytest.mark.parametrize(("config", "scope", "runs"), SCOPES)
def test_layers_that_are_recomputed_in_parts(config, scope, runs):
    graphed = train_gpt(config, graphs=True, scope=scope, recompute=True, **CUDA)
    assert_same_gpt(graphed, train_gpt(config, graphs=False, recompute=True, **CUDA))
    assert graphed[2].plan.num_graphs == 2 * runs


def managed():
    """A model in graphs, and a step of it: two microbatches of equal tokens, and their losses."""
    rng = RngTracker(3, device="cuda")
    model = GPT(DENSE, Placement(rng=rng, device="cuda", dtype=torch.bfloat16))
    manager = GraphManager([model.layers], Schedule(1, 2).order(0), backend=CudaBackend(rng))
    ids = torch.zeros(2, 8, dtype=torch.int64, device="cuda")

    def step():
        manager.begin_step()
        losses = []
        for _ in range(2):
            loss = model.loss(ids, ids).sum()
            loss.backward()
            losses.append(loss.detach())
        return losses

    return model, manager, step


def test_dropout_goes_on():
    _, manager, step = managed()
    losses = [loss.item() for _ in range(8) for loss in step()]
    assert manager.plan is not None and len(set(losses)) == len(losses)


def test_a_loss_of_the_step_before_does_not_keep_the_capture_from_its_stream():
    model, _, step = managed()
    ids = torch.zeros(2, 8, dtype=torch.int64, device="cuda")
    held = model.loss(ids, ids).sum()  # its graph holds the nodes that accumulate
    for _ in range(4):
        step()
    held.backward()


def test_captures_do_not_grow_memory():
    reserved = []
    for _ in range(50):
        _, manager, step = managed()
        for _ in range(4):
            step()
        assert manager.plan is not None
        manager.remove()
        del manager, step, _
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[3:]) == reserved[2]


def test_a_weak_tensor_is_the_tensor_without_its_memory():
    backend = CudaBackend()
    tensor = torch.arange(1 << 20, device="cuda", dtype=torch.int16).view(1024, 1024).t()[3:]
    weak, before = backend.weak(tensor), torch.cuda.memory_allocated()
    assert torch.equal(weak(), tensor) and weak().data_ptr() == tensor.data_ptr()
    assert weak().stride() == tensor.stride() and weak().dtype == tensor.dtype
    del tensor
    assert torch.cuda.memory_allocated() == before - (1 << 21)


@pytest.mark.parametrize("change", (torch.conj, lambda z: z.conj().imag))
def test_a_weak_tensor_has_what_is_computed_when_it_is_read(change):
    tensor = change(torch.randn(4, 6, device="cuda", dtype=torch.complex64))
    assert torch.equal(CudaBackend().weak(tensor)(), tensor)


def test_a_graph_holds_what_it_reads():
    graph, other = CudaBackend().graph(), torch.full((1 << 20,), 3.0, device="cuda")
    with graph.capture():
        result = other * 2
    del other
    taken = torch.zeros(1 << 20, device="cuda")
    graph.replay()
    assert (result == 6).all() and not taken.any()


def test_what_cannot_be_captured_leaves_the_device_usable():
    rng, x = RngTracker(3, device="cuda"), torch.ones(1024, device="cuda")
    backend = CudaBackend(rng)

    def draw():
        y = F.dropout(x)
        with rng.fork():
            return y + F.dropout(x)

    whole = backend.graph()
    with whole.capture():
        before = draw()
    for _ in range(2):
        graph = backend.graph()
        with pytest.raises(RuntimeError, match="captur"), graph.capture():
            draw().sum().item()
    states = rng.states()
    expected = [draw() for _ in range(4)]
    rng.restore(states)
    graph = backend.graph()
    with graph.capture():
        after = draw()
    for each, own, output in zip(expected, (whole, graph, whole, graph), (before, after, before, after)):
        own.replay()
        assert torch.equal(output, each)


class Reads(nn.Module):
    now = False

    def forward(self, x):
        return x * x.sum().item() if self.now else F.dropout(x)


def test_training_goes_on_after_a_capture_that_failed():
    def losses(graphs):
        rng = RngTracker(3, device="cuda")
        torch.manual_seed(0)
        chain, seen = LayerChain([nn.Linear(4, 4), Reads(), nn.Linear(4, 4)]).cuda(), []
        manager = GraphManager([chain], Schedule(1, 1).order(0), backend=CudaBackend(rng)) if graphs else None
        for step in range(7):
            chain[1].module.now = graphs and step == 2
            if graphs:
                manager.begin_step()
            try:
                loss = chain(torch.ones(64, 4, device="cuda"))[0].square().sum()
                loss.backward()
            except CaptureError as error:
                assert "segment '1.Reads'" in str(error)
            else:
                if step != 2:
                    seen.append(loss.detach())
            torch.manual_seed(step)
        assert not graphs or manager.num_graphs == 2
        return torch.stack(seen)

    assert torch.equal(losses(True), losses(False))


class Reduced(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        total = y.detach().clone()
        dist.all_reduce(total)
        return y + total


def test_a_process_group_is_destroyed_behind_its_graphs():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    chain, x = LayerChain([Reduced(4, 4)]).cuda(), torch.ones(2, 4, device="cuda")
    manager = GraphManager([chain], Schedule(1, 1).order(0), backend=CudaBackend())
    for _ in range(4):
        manager.begin_step()
        (y,) = chain(x)
        y.sum().backward()
    assert manager.num_graphs == 2 and torch.equal(
        y, 2 * F.linear(x, chain[0].module.weight, chain[0].module.bias)
    )
    manager.remove()
    dist.destroy_process_group()


def test_a_recomputation_that_was_not_traced():
    model = GPT(DENSE, Placement(rng=RngTracker(3, device="cuda"), device="cuda"), recompute=True)
    graph, x = CudaBackend(model.rng).graph(), torch.zeros(8, 1, 32, device="cuda", requires_grad=True)
    with pytest.raises(CaptureError, match="the traced run had 0"), graph.capture():
        model.layers(x)
