"""Replays are the captured work, bit for bit, on the memory of the capture: also where that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastmp.config import GPTConfig, MoEConfig
from fastmp.cuda_graphs.backends.recording import CaptureError, Pool, RecordedGraph
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement, TransformerLayer
from fastmp.nn.recompute import recompute
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.testing.ranks import run_ranks

DENSE = GPTConfig(hidden_size=32, num_heads=4, dropout=0.2, attention_dropout=0.1, max_seq_len=16)
MOE = GPTConfig(
    **{"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "norm": "rmsnorm", "position": "rope"},
    **{"activation": "swiglu", "qk_norm": True, "dropout": 0.2, "max_seq_len": 16},
    moe=MoEConfig(
        num_experts=4, expert_ffn_hidden_size=16, aux_loss=0.1, jitter=0.1, shared_expert_ffn_hidden_size=16
    ),
)


def numbers(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def forward(layer, x, recomputed, rng):
    outputs = recompute(layer, x, rng=rng) if recomputed else layer(x)
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs[:2]


def backward(outputs, grad, x):
    grads = (grad, *(torch.ones_like(other) for other in outputs[1:]))
    torch.autograd.backward(outputs, grads, inputs=None)
    own, x.grad = x.grad, None
    return own


def compare(config, groups, sequence_parallel=False, recomputed=False):
    """A layer captured once and replayed on other numbers, beside itself run eagerly."""
    rng = RngTracker(3, tp_rank=group_rank(groups.tp))
    layer = TransformerLayer(config, Placement(groups, sequence_parallel, rng, dtype=torch.float64))
    grads = GradBuffer(layer.named_parameters())
    x, grad = numbers(1, 8, 2, 32).requires_grad_(), numbers(2, 8, 2, 32)
    pool = Pool()
    forwards = RecordedGraph(pool, rng)
    backwards = RecordedGraph(pool, rng, forwards)
    with forwards.capture():
        outputs = forward(layer, x, recomputed, rng)
    with backwards.capture():
        x_grad = backward(outputs, grad, x)
    outputs = [output.detach() for output in outputs]
    for seed in (3, 4, 5):
        with torch.no_grad():
            x.copy_(numbers(seed, 8, 2, 32))
            grad.copy_(numbers(10 + seed, 8, 2, 32))
            for param in layer.parameters():  # an optimizer's step
                param.mul_(1.01)
        streams = rng.states()
        grads.zero()
        expected = forward(layer, x, recomputed, rng)
        expected_grad = backward(expected, grad, x)
        kept, after = {n: p.main_grad.clone() for n, p in layer.named_parameters()}, rng.states()
        rng.restore(streams)
        grads.zero()
        forwards.replay()
        backwards.replay()
        assert all(torch.equal(after[name], state) for name, state in rng.states().items())
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert torch.equal(x_grad, expected_grad)
        for name, param in layer.named_parameters():
            assert torch.equal(param.main_grad, kept[name]), name


@pytest.mark.parametrize("recomputed", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("config", (DENSE, MOE), ids=("dense", "experts"))
def test_a_layer(config, recomputed):
    compare(config, ParallelGroups.alone(), recomputed=recomputed)


def ranks_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, tp=world))
    for config in (DENSE, MOE):
        for sequence_parallel in (False, True):
            compare(config, groups, sequence_parallel, recomputed=sequence_parallel)


def test_collectives_of_two_ranks():
    run_ranks(ranks_case, 2)


def test_what_is_let_go_is_overwritten():
    pool, x = Pool(), torch.arange(8.0)
    first, second = RecordedGraph(pool), RecordedGraph(pool)
    with first.capture():
        doubled = x * 2
    address = doubled.data_ptr()
    del doubled
    with second.capture():
        tripled = x * 3
    assert tripled.data_ptr() == address and pool.nbytes == 64
    first.replay()
    assert torch.equal(tripled, x * 2)  # as on a GPU
    second.replay()
    assert torch.equal(tripled, x * 3)


def test_what_is_held_is_not_overwritten():
    pool, x = Pool(), torch.arange(8.0).requires_grad_()
    graph, other = RecordedGraph(pool), RecordedGraph(pool)
    with graph.capture():
        output = (x * 2).exp()  # exp keeps its result for backward
    held = output.detach()
    with other.capture():
        result = x.detach() * 3
    assert result.data_ptr() != held.data_ptr() and pool.nbytes == 2 * 64
    assert torch.equal(torch.autograd.grad(output, x, torch.ones(8))[0], 2 * held)


def test_memory_of_a_step_is_what_it_needs_at_once():
    x, pool = torch.ones(1024), Pool()
    with RecordedGraph(pool).capture():
        for _ in range(10):
            x = x + 1
    assert pool.nbytes == 2 * 4096


def test_empty_tensors_views_and_changes_in_place():
    pool, x = Pool(), torch.arange(6.0)
    graph = RecordedGraph(pool)
    with graph.capture():
        parts = (x + 1).view(2, 3).t().split(2)
        parts[0].mul_(10)
        nothing = x.new_empty(0, 3) * 2
        output = torch.cat([part.reshape(-1) for part in parts])[torch.arange(6)].expand(2, 6)
    x.copy_(torch.arange(6.0) * 2)
    graph.replay()
    assert output.tolist() == [[10, 70, 30, 90, 5, 11]] * 2 and nothing.shape == (0, 3)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda x: x.sum().item(), r"aten::_local_scalar_dense reads a value on the host"),
        (lambda x: bool((x > 0).all()), r"aten::_local_scalar_dense reads a value on the host"),
        (lambda x: x.nonzero(), r"aten::nonzero makes a shape that depends on data"),
        (lambda x: x[x > 0], r"aten::index makes a shape that depends on data"),
        (lambda x: torch.rand(3, generator=torch.Generator()), r"draws from a generator of its own"),
    ],
)
def test_what_cannot_be_captured(work, message):
    x = torch.arange(4.0)
    with pytest.raises(CaptureError, match=rf"{message}.*called in .*test_recording.py:\d+, .*lambda x"):
        with RecordedGraph(Pool()).capture():
            work(x)


def test_a_second_capture_is_refused():
    graph = RecordedGraph(Pool())
    with graph.capture():
        torch.ones(2) + 1
    with pytest.raises(CaptureError, match="captured already"), graph.capture():
        pass


class Mixed(nn.Module):
    """Autocast casts the first product, and not the second."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.narrow(x)
        with torch.autocast("cpu", enabled=False):
            return self.wide(x.float())


@pytest.mark.parametrize("ambient", (True, False))
def test_a_replay_casts_as_its_capture_did(ambient):
    layer, x, graph = Mixed(), torch.randn(4, 8), RecordedGraph(Pool())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.no_grad():
        with graph.capture():
            output = layer(x)
        x.copy_(torch.randn(4, 8))
        expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
        graph.replay()
    assert torch.equal(output, expected) and not torch.equal(expected, layer(x))


def test_what_is_conjugate_or_negative_when_it_is_read():
    def work(z, weight):
        product = (z @ weight) @ weight.conj().t()
        return product.conj(), product.conj().imag, (product * 2).conj().t()[1:], product.imag + 1

    z, weight = (torch.randn(4, 4, dtype=torch.complex128) for _ in range(2))
    graph = RecordedGraph(Pool())
    with graph.capture():
        outputs = work(z, weight)
    z.copy_(torch.randn(4, 4, dtype=torch.complex128))
    graph.replay()
    for output, expected in zip(outputs, work(z, weight), strict=True):
        assert torch.equal(output, expected)
        assert (output.is_conj(), output.is_neg()) == (expected.is_conj(), expected.is_neg())


@pytest.mark.parametrize("trained", (True, False))
def test_what_ops_make_where_gradients_are_wanted(trained):
    """Of an LSTM, a workspace that its backward reads."""
    layer, x, graph = nn.LSTM(6, 6), torch.randn(5, 2, 6), RecordedGraph(Pool(), has_backward=True)

    def work():
        layer.zero_grad(set_to_none=False)
        with torch.set_grad_enabled(trained):
            output = layer(x)[0]
            if trained:
                output.square().sum().backward()
        return output.detach(), *(param.grad for param in layer.parameters() if trained)

    work()
    with graph.capture():
        outputs = work()
    x.copy_(torch.randn(5, 2, 6))
    graph.replay()
    got = [output.clone() for output in outputs]
    assert all(map(torch.equal, got, work()))
