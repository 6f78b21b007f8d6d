"""Training through graphs of CUDA is eager training, bit for bit; captures leave no memory behind."""

from __future__ import annotations

import gc

import pytest
import torch
from graph_tools import DENSE, MOE, assert_same, train
from test_graph_manager import SCOPES
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastmp.graphs.cuda import CudaBackend
from fastmp.graphs.errors import CaptureError
from fastmp.graphs.manager import GraphManager
from fastmp.nn import GPT
from fastmp.parallel.rng import RngTracker
from fastmp.parallel.schedule import order

pytestmark = pytest.mark.gpu
CUDA = {"device": "cuda"}


@pytest.fixture(autouse=True)
def _attention_whose_backward_has_an_order():
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.parametrize("own_buffers", (True, False), ids=("main_grad", "grad"))
@pytest.mark.parametrize(("config", "scope", "runs"), SCOPES)
def test_training_is_that_of_the_layers_themselves(config, scope, runs, own_buffers):
    eager = train(config, graphs=False, own_buffers=own_buffers, **CUDA)
    graphed = train(config, graphs=True, scope=scope, own_buffers=own_buffers, **CUDA)
    assert_same(graphed, eager)
    assert graphed[2].plan.num_graphs == 2 * runs


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@pytest.mark.parametrize("recompute", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("config", (DENSE, MOE), ids=("dense", "experts"))
def test_twenty_steps(config, recompute, dtype):
    options = {"steps": 20, "recompute": recompute, "dtype": dtype, **CUDA}
    assert_same(train(config, graphs=True, **options), train(config, graphs=False, **options))


@pytest.mark.parametrize(("config", "scope", "runs"), SCOPES)
def test_layers_that_are_recomputed_in_parts(config, scope, runs):
    graphed = train(config, graphs=True, scope=scope, recompute=True, **CUDA)
    assert_same(graphed, train(config, graphs=False, recompute=True, **CUDA))
    assert graphed[2].plan.num_graphs == 2 * runs


def managed():
    """A model in graphs, and a step of it: two microbatches of equal tokens, and their losses."""
    rng = RngTracker(3, device="cuda")
    model = GPT(DENSE, groups=None, rng=rng, device="cuda", dtype=torch.bfloat16)
    manager = GraphManager([model.layers], order(0, 1, 2), backend=CudaBackend(rng))
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


def test_what_cannot_be_captured_leaves_the_device_usable():
    graph, x = CudaBackend().graph(), torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="captur"), graph.capture():
        (x + 1).sum().item()
    assert (x + 1).sum().item() == 8.0


def test_a_recomputation_that_was_not_watched():
    model = GPT(DENSE, groups=None, rng=RngTracker(3, device="cuda"), device="cuda", recompute=True)
    graph, x = CudaBackend(model.rng).graph(), torch.zeros(8, 1, 32, device="cuda", requires_grad=True)
    with pytest.raises(CaptureError, match="the run that was watched had 0"), graph.capture():
        model.layers(x)
