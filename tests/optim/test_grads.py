"""GradBuffer on plain torch modules: layout, accumulation, and what is sent how often."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from marks import full
from optim_tools import Tied, make_model
from torch import nn

from fastmp.distributed.streams import exchange_stream, side_stream
from fastmp.ops.wgrad import linear
from fastmp.optim import grad_buffers as grads_module
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.testing.ranks import run_ranks


def test_parameters_lie_in_reverse_order_each_at_a_multiple_of_64():
    model = make_model()
    buffer = GradBuffer(model.named_parameters())
    (flat,) = buffer.flats
    names = ("3.bias", "3.weight", "1.bias", "1.weight", "0.bias", "0.weight")
    for number, name in enumerate(names):
        param = buffer.parameters[name]
        assert flat.layout.ranges[name] == (64 * number, 64 * number + param.numel())
        assert param.main_grad.data_ptr() == flat.grad[64 * number :].data_ptr()
        assert param.main_grad.shape == param.shape
    assert flat.grad.numel() == 64 * len(names)


@pytest.mark.parametrize(
    ("dtype", "main"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_accumulates_microbatches_in_the_main_dtype(dtype, main):
    model = make_model(dtype)
    plain = copy.deepcopy(model)
    buffer = GradBuffer(model.named_parameters())
    expected = {name: torch.zeros_like(p, dtype=main) for name, p in plain.named_parameters()}
    for _ in range(3):
        x = torch.randn(7, 6).to(dtype)
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for name, param in plain.named_parameters():
            expected[name] += param.grad
            param.grad = None
    for name, param in model.named_parameters():
        assert param.grad is None
        assert param.main_grad.dtype == main
        assert torch.equal(param.main_grad, expected[name]), name
    buffer.zero()
    assert all(not p.main_grad.any() for p in model.parameters())


def test_products_of_microbatches_are_not_rounded_to_bfloat16():
    """Errors against the float64 products of what the layers of a bfloat16 model took and got."""
    torch.manual_seed(0)
    options = {"group": None, "bias": False, "dtype": torch.bfloat16}
    model = nn.Sequential(
        ColumnParallelLinear(48, 96, **options), nn.GELU(), RowParallelLinear(96, 48, **options)
    )
    GradBuffer(model.named_parameters())
    exact, rounded = {}, {}

    def note(layer, given, y):
        def product(grad):
            product = grad.flatten(0, -2).double().t() @ given[0].detach().flatten(0, -2).double()
            exact[layer] = exact.get(layer, 0) + product
            rounded[layer] = rounded.get(layer, 0) + product.bfloat16().double()

        y.register_hook(product)

    for layer in (model[0], model[2]):
        layer.register_forward_hook(note)
    for x in torch.randn(8, 64, 2, 48).bfloat16():
        model(x).square().sum().backward()
    for layer, grad in exact.items():
        error, of_rounding = ((sum_ - grad).norm() for sum_ in (layer.weight.main_grad, rounded[layer]))
        assert error < of_rounding / 100 and layer.weight.grad is None


def test_each_kind_of_parameters_has_a_buffer():
    layers = [nn.Linear(2, 3, dtype=torch.bfloat16), nn.Linear(3, 2, dtype=torch.float64)]
    model = nn.ModuleList([*layers, nn.Linear(2, 2, dtype=torch.bfloat16), nn.LayerNorm(2)])
    model[2].weight.expert_parallel = True
    model[3].weight.sequence_parallel = True  # summed over tensor-parallel ranks, of which there is one
    buffer = GradBuffer(model.named_parameters(), grad_dtype=torch.bfloat16)
    kinds = {(f.plan.dtype, f.plan.experts, f.plan.partial, f.grad.dtype): f for f in buffer.flats}
    assert {kind: list(flat.layout.ranges) for kind, flat in kinds.items()} == {
        ("bfloat16", False, False, torch.bfloat16): ["2.bias", "0.bias", "0.weight"],
        ("float64", False, False, torch.float64): ["1.bias", "1.weight"],
        ("bfloat16", True, False, torch.bfloat16): ["2.weight"],
        ("float32", False, False, torch.float32): ["3.bias", "3.weight"],
    }
    buffer.remove_hooks()
    with pytest.raises(ValueError, match=r"grad_dtype is torch.float16, but parameter '2.bias' is torch.bf"):
        GradBuffer(model.named_parameters(), grad_dtype=torch.float16)


def test_tied_parameter_has_one_place_and_both_contributions():
    model = Tied()
    plain = copy.deepcopy(model)
    buffer = GradBuffer(model.named_parameters(remove_duplicate=False))
    assert list(buffer.parameters) == ["embedding.weight"]
    assert buffer.flats[0].layout.ranges == {"embedding.weight": (0, 44)}
    x = torch.arange(8)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    weight, expected = model.embedding.weight, plain.embedding.weight
    torch.testing.assert_close(weight.main_grad, expected.grad, rtol=0, atol=1e-12)


def test_frozen_and_unused_parameters():
    model = make_model()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    buffer = GradBuffer([*model.named_parameters(), ("unused", unused)])
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert "0.weight" not in buffer.parameters and not hasattr(model[0].weight, "main_grad")
    assert not unused.main_grad.any()


def test_second_buffer_is_refused_until_hooks_are_removed():
    model = make_model()
    buffer = GradBuffer(model.named_parameters())
    with pytest.raises(ValueError, match=r"0\.weight.*already in one"):
        GradBuffer(model.named_parameters())
    buffer.remove_hooks()
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert model[0].weight.grad is not None
    GradBuffer(model.named_parameters())


class Sent:
    """Notes the collectives that the gradient buffer starts, as (name, elements)."""

    def __init__(self, calls=None):
        self.calls = [] if calls is None else calls
        for name in ("all_reduce_", "reduce_scatter_"):
            setattr(grads_module, name, self._noting(name, getattr(grads_module, name)))

    def _noting(self, name, real):
        def call(x, group, overlap=False):
            self.calls.append((name, x.numel()))
            return real(x, group, overlap)

        return call


def sums_of(model, inputs):
    model(inputs.reshape(-1, 6)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("world", [2, *full([3, 4])])
def test_every_rank_gets_the_sums_of_all_or_of_its_shards(world, shard):
    torch.manual_seed(3)
    inputs = torch.randn(2, world, 5, 6, dtype=torch.float64)

    def rank_main(rank, world_size):
        sent = Sent()
        model = make_model()
        grads = GradBuffer(model.named_parameters(), dp_group=dist.group.WORLD, shard=shard, bucket_size=64)
        for microbatch in inputs:
            model(microbatch[rank]).square().sum().backward()
        assert sent.calls == [], "nothing is sent before the last microbatch is done"
        grads.reduce()
        (flat,) = grads.flats
        return sent.calls, flat.pieces, flat.own

    expected = sums_of(make_model(), inputs)
    found = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in expected.items()}
    for calls, pieces, own in run_ranks(rank_main, world):
        size = {2: 128, 3: 384, 4: 256}[world] if shard else 128
        assert calls == [("reduce_scatter_" if shard else "all_reduce_", size)] * 3
        for name, piece in pieces.items():
            if shard:
                found[name][slice(*piece.param_range)] += own[name]
            else:
                torch.testing.assert_close(own[name], expected[name].flatten(), rtol=0, atol=1e-10)
    if shard:
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad.flatten(), rtol=0, atol=1e-10)


def test_partial_sums_are_added_over_tensor_parallel_ranks_in_one_call():
    def rank_main(rank, world_size):
        model = make_model()
        for param in model[1].parameters():
            param.sequence_parallel = True
        buffer = GradBuffer(model.named_parameters(), tp_group=dist.group.WORLD)
        for param in model.parameters():
            param.main_grad.fill_(rank + 1)
        sent = Sent()
        buffer.reduce()
        return sent.calls, {name: p.main_grad.unique().tolist() for name, p in model.named_parameters()}

    for rank, (calls, values) in enumerate(run_ranks(rank_main, 2)):
        assert calls == [("all_reduce_", 128)]
        for name, value in values.items():
            assert value == ([3.0] if name.startswith("1.") else [rank + 1.0]), name


def test_a_buffer_over_ranks_goes_with_its_model():
    """Groups have threads and sockets, which a buffer that nobody can reach would keep."""

    def rank_main(rank, world_size):
        model = make_model()
        buffer = GradBuffer(model.named_parameters(), dp_group=dist.group.WORLD, overlap=True)
        for _ in range(2):
            buffer.zero()
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            buffer.reduce()
        gone = weakref.ref(buffer), weakref.ref(model[0].weight)
        del model, buffer
        gc.collect()
        return [each() is None for each in gone]

    assert run_ranks(rank_main, 2) == [[True, True]] * 2


def test_reduce_without_zero_sends_everything_again():
    """For whoever sets main gradients to zero, or writes them, without the buffer."""

    def rank_main(rank, world_size):
        sent, model = Sent(), make_model()
        options = {"dp_group": dist.group.WORLD, "bucket_size": 64, "overlap": True}
        grads = GradBuffer(model.named_parameters(), **options)
        for _ in range(3):
            for param in model.parameters():
                param.main_grad.fill_(rank + 1.0)
            grads.reduce()
            assert all(bool((p.main_grad == 3.0).all()) for p in model.parameters())
        return len(sent.calls)

    assert run_ranks(rank_main, 2) == [9, 9]


def test_parameters_of_fully_shard_are_refused():
    param = nn.Parameter(torch.zeros(2))
    param.placements = ()
    with pytest.raises(ValueError, match=r"'w' is a DTensor, as fully_shard makes them, .* docs/fsdp2.md"):
        GradBuffer([("w", param)])


def test_buckets_are_sent_in_one_order_as_soon_as_they_are_full():
    """Rank 1 gets the gradients of the two layers the other way around: it waits with the second bucket."""
    torch.manual_seed(3)
    inputs = torch.randn(3, 2, 5, 6, dtype=torch.float64)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = (nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(2))

        def backward(self, x, order):
            for name in order:
                self.get_submodule(name)(x).square().sum().backward()

    def rank_main(rank, world_size):
        model, events = Two(), []
        grads = GradBuffer(
            model.named_parameters(), dp_group=dist.group.WORLD, shard=True, bucket_size=1, overlap=True
        )
        Sent(events)
        order = ["second", "first"] if rank == 0 else ["first", "second"]
        for _ in range(2):
            grads.zero()
            for microbatch in inputs[:, rank]:
                events.append("microbatch")
                for name in order:
                    model.backward(microbatch, [name])
                    events.append(name)
            events.append("reduce")
            grads.reduce()
        seen = list(events)
        with pytest.raises(
            ValueError, match=r"expected 3 gradients of parameter 'second.weight' .* got number 4"
        ):
            grads.zero()
            for microbatch in [*inputs[:, rank], inputs[0, rank]]:
                model.backward(microbatch, ["second"])
        return seen

    found = run_ranks(rank_main, 2)
    sent = ("reduce_scatter_", 128)
    for rank, quiet in enumerate((["microbatch", "second", "first"], ["microbatch", "first", "second"])):
        last = [sent, "second", sent, "first"] if rank == 0 else ["first", sent, sent, "second"]
        assert found[rank] == [*quiet * 3, "reduce", sent, sent, *quiet * 2, "microbatch", *last, "reduce"]


class Pair:
    """A group of two ranks, this one the first."""

    size = staticmethod(lambda: 2)
    rank = staticmethod(lambda: 0)


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [side_stream, exchange_stream])
def test_a_bucket_is_sent_behind_gradients_that_a_product_adds_on_another_stream(monkeypatch, beside):
    weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
    grads = GradBuffer([("weight", weight)], dp_group=Pair(), overlap=True)
    sent, side = [], beside(weight.device)
    monkeypatch.setattr(grads_module, "all_reduce_", lambda x, group, overlap: sent.append(x.clone()))
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    for _ in range(2):
        grads.zero()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = linear(x, weight)
        torch.cuda.current_stream().wait_stream(side)
        y.register_hook(lambda grad: torch.cuda._sleep(100_000_000))
        y.sum().backward()
        grads.reduce()
    torch.cuda.synchronize()
    assert weight.main_grad.any() and torch.equal(sent[-1].view(64, 64), weight.main_grad)


def test_a_step_with_fewer_gradients_is_complete_at_its_end():
    """The second step leaves a layer out: its bucket, and all behind it, are sent by `reduce`."""
    inputs = torch.randn(2, 5, 6, dtype=torch.float64)

    def rank_main(rank, world_size):
        model, plain = make_model(), make_model()
        grads = GradBuffer(
            model.named_parameters(), dp_group=dist.group.WORLD, shard=True, bucket_size=1, overlap=True
        )
        for layers in (slice(None), slice(0, 3), slice(None)):
            grads.zero()
            model[layers](inputs[rank]).square().sum().backward()
            grads.reduce()
            plain.zero_grad()
            plain[layers](inputs.reshape(-1, 6)).square().sum().backward()
            for name, piece in grads.flats[0].pieces.items():
                grad = dict(plain.named_parameters())[name].grad
                expected = torch.zeros_like(grads.parameters[name]) if grad is None else grad
                part = expected.flatten()[slice(*piece.param_range)]
                torch.testing.assert_close(grads.flats[0].own[name], part, rtol=0, atol=1e-10)
        return True

    assert run_ranks(rank_main, 2) == [True, True]


def test_gradients_of_experts_are_summed_over_the_ranks_that_hold_the_same_experts():
    """Two ranks that share all but the experts, then two that share the experts alone."""

    def rank_main(rank, world_size):
        found = []
        for shared in ({"dp_group": dist.group.WORLD}, {"edp_group": dist.group.WORLD}):
            model = make_model()
            model[3].weight.expert_parallel = True
            grads = GradBuffer(model.named_parameters(), **shared)
            for param in model.parameters():
                param.main_grad.fill_(1.0 + rank)
            grads.reduce()
            found.append({name: param.main_grad.mean().item() for name, param in model.named_parameters()})
        return found

    for rank, (dense, experts) in enumerate(run_ranks(rank_main, 2)):
        own = 1.0 + rank
        assert all(grad == (own if name == "3.weight" else 3.0) for name, grad in dense.items())
        assert all(grad == (3.0 if name == "3.weight" else own) for name, grad in experts.items())
