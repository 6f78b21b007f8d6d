"""GradBuffer on plain torch modules: layout, accumulation, and what is sent how often."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastmp.parallel import grads as grads_module
from fastmp.parallel.grads import GradBuffer
from fastmp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.testing.ranks import run_ranks


def make_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 4, dtype=torch.float64)
        self.output = nn.Linear(4, 11, bias=False, dtype=torch.float64)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.embedding(x))


def count_all_reduces(monkeypatch_target):
    """Replace the module's all_reduce by one that also notes the sizes it was given."""
    sizes, real = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    monkeypatch_target.dist.all_reduce = counted
    return sizes


def test_layout_is_contiguous_in_reverse_order_vectors_last():
    model = make_model()
    buffer = GradBuffer(model.named_parameters())
    start = 0
    for name in ("3.weight", "0.weight", "3.bias", "1.bias", "1.weight", "0.bias"):
        param = buffer.parameters[name]
        assert buffer.ranges[name] == (start, start + param.numel())
        assert param.main_grad.data_ptr() == buffer.buffers[torch.float64][start:].data_ptr()
        assert param.main_grad.shape == param.shape
        start += param.numel()
    assert buffer.buffers[torch.float64].numel() == start


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


def test_mixed_dtypes_have_a_buffer_each():
    model = nn.ModuleList([nn.Linear(2, 3, dtype=torch.bfloat16), nn.Linear(3, 2, dtype=torch.float64)])
    buffer = GradBuffer(model.named_parameters())
    assert {d: b.numel() for d, b in buffer.buffers.items()} == {torch.float64: 8, torch.float32: 9}


def test_parameters_of_one_dtype_lie_together_and_begin_aligned():
    model = nn.ModuleList([nn.Linear(2, 3, dtype=d) for d in (torch.bfloat16, torch.float32) * 2])
    buffer = GradBuffer(model.named_parameters())
    assert buffer.buffers[torch.float32].numel() == 64 + 18  # 18 of float32, a gap, 18 of bfloat16
    assert [buffer.ranges[f"{i}.weight"][0] for i in range(4)] == [70, 6, 64, 0]
    assert [buffer.ranges[f"{i}.bias"][0] for i in range(4)] == [79, 15, 76, 12]


def test_tied_parameter_has_one_place_and_both_contributions():
    model = Tied()
    plain = copy.deepcopy(model)
    buffer = GradBuffer(model.named_parameters(remove_duplicate=False))
    assert list(buffer.parameters) == ["embedding.weight"]
    assert buffer.buffers[torch.float64].numel() == 44
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


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("world", [2, 4])
def test_data_parallel_sum_is_one_all_reduce_per_step(world, num_microbatches):
    torch.manual_seed(3)
    inputs = torch.randn(num_microbatches, world, 5, 6, dtype=torch.float64)

    def rank_main(rank, world_size):
        sizes = count_all_reduces(grads_module)
        model = make_model()
        buffer = GradBuffer(model.named_parameters(), dp_group=dist.group.WORLD)
        for microbatch in inputs:
            model(microbatch[rank]).square().sum().backward()
            assert sizes == [], "nothing is sent before the last microbatch is done"
        buffer.all_reduce()
        return sizes, {name: p.main_grad for name, p in model.named_parameters()}

    results = run_ranks(rank_main, world)
    model = make_model()
    model(inputs.reshape(-1, 6)).square().sum().backward()
    num_elements = sum(p.numel() for p in model.parameters())
    for sizes, main_grads in results:
        assert sizes == [num_elements]
        for name, param in model.named_parameters():
            torch.testing.assert_close(main_grads[name], param.grad, rtol=0, atol=1e-10)


def test_sequence_parallel_marks_are_summed_over_tp_in_one_call():
    def rank_main(rank, world_size):
        model = make_model()
        for param in model[1].parameters():
            param.sequence_parallel = True
        buffer = GradBuffer(model.named_parameters(), tp_group=dist.group.WORLD)
        for param in model.parameters():
            param.main_grad.fill_(rank + 1)
        sizes = count_all_reduces(grads_module)
        buffer.all_reduce()
        return sizes, {name: p.main_grad.unique().tolist() for name, p in model.named_parameters()}

    for rank, (sizes, values) in enumerate(run_ranks(rank_main, 2)):
        assert sizes == [10]
        for name, value in values.items():
            assert value == ([3.0] if name.startswith("1.") else [rank + 1.0]), name
