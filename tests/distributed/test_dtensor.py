"""Ops on DTensors: sharded rows give the numbers, gradients and placements of the undivided tensors."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # this and the next: 300 modules that every forked rank would import anew
import torch.distributed.tensor.experimental
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from fastmp import ops
from fastmp.nn import RMSNorm
from fastmp.testing.ranks import run_ranks

B, S, H = 4, 6, 8
ROOT = Path(__file__).parents[2]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + len(shape)))


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(H, shape, generator=torch.Generator().manual_seed(0))


# Each case: the function, its row tensors for leading dimensions `s`, its parameters.
CASES = {
    "rms_norm": (ops.rms_norm, lambda s: [_random(*s, H)], [_random(H)]),
    "rms_norm with residual": (
        lambda x, residual, weight: ops.rms_norm(x, weight, residual=residual),
        lambda s: [_random(*s, H), _random(*s, H, seed=1)],
        [_random(H)],
    ),
    "layer_norm": (ops.layer_norm, lambda s: [_random(*s, H)], [_random(H), _random(H, seed=1)]),
    "layer_norm without bias": (ops.layer_norm, lambda s: [_random(*s, H)], [_random(H)]),
    "bias_gelu": (ops.bias_gelu, lambda s: [_random(*s, H)], [_random(H)]),
    "swiglu": (ops.swiglu, lambda s: [_random(*s, H)], []),
    "swiglu of two": (ops.swiglu, lambda s: [_random(*s, H), _random(*s, H, seed=1)], []),
    "geglu with bias": (lambda x, b: ops.geglu(x, bias=b), lambda s: [_random(*s, H)], [_random(H)]),
    "bias_dropout_add without a mask": (
        lambda x, residual, bias: ops.bias_dropout_add(x, bias, residual, p=0.5, training=False),
        lambda s: [_random(*s, H), _random(*s, H, seed=1)],
        [_random(H)],
    ),
    "softmax": (
        lambda x, mask: ops.scaled_masked_softmax(x, mask, causal=True),
        lambda s: [_random(*s, 5, H), _random(*s, 1, H, seed=1) > 1],
        [],
    ),
    "softmax with one mask": (
        ops.scaled_masked_softmax,
        lambda s: [_random(*s, 5, H)],
        [_random(5, H, seed=1) > 1],
    ),
    "cross_entropy": (
        lambda x, target: ops.cross_entropy(x, target, label_smoothing=0.1, reduction="none"),
        lambda s: [_random(*s, H), _ids(*s)],
        [],
    ),
    "mean of cross_entropy": (
        lambda x, target: ops.cross_entropy(x, target, reduction="mean"),
        lambda s: [_random(*s, H), _ids(*s)],
        [],
    ),
}


MASKED = (
    lambda x, residual, bias: ops.bias_dropout_add(x, bias, residual, p=0.5, seed=torch.tensor(7)),
    [_random(B, H), _random(B, H, seed=1)],
    [_random(H)],
)


def _leaves(tensors):
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def _compare(function, rows, parameters, mesh, placement) -> list:
    """Check numbers and gradients against the undivided call; placements of the outputs."""
    whole, divided = _leaves([*rows, *parameters]), []
    for i, tensor in enumerate(_leaves([*rows, *parameters])):
        placed = distribute_tensor(tensor, mesh, [placement if i < len(rows) else Replicate()])
        divided.append(placed.detach().requires_grad_(tensor.is_floating_point()))
    expected, results = function(*whole), function(*divided)
    expected, results = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (expected, results))
    losses = [0.0, 0.0]
    for i, (theirs, ours) in enumerate(zip(expected, results, strict=True)):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
        weights = _random(*theirs.shape, seed=10 + i)
        losses[0] += (theirs * weights).sum()
        losses[1] += (ours * distribute_tensor(weights, mesh)).sum()
    for loss in losses:
        loss.backward()
    for theirs, ours in zip(whole, divided, strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)
    return [r.placements[0] for r in results]


def _gathers_to_flatten(mesh):
    try:  # torch 2.10 and 2.11 refuse to
        distribute_tensor(torch.zeros(2, 2, 2), mesh, [Shard(1)]).reshape(4, 2)
    except RuntimeError:
        return False
    return True


def _every_case(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    wrong, gathers = {}, _gathers_to_flatten(mesh)
    for (shape, dim), (name, case) in itertools.product((((B,), 0), ((B, S), 1)), CASES.items()):
        function, rows, parameters = case
        # torch itself gathers what is sharded beyond the first dimension to flatten it into rows
        flat = "cross_entropy" in name and dim > 0
        if flat and not gathers:
            continue
        placements = _compare(function, rows(shape), parameters, mesh, Shard(dim))
        expected = Replicate() if flat else Partial() if name.startswith("mean") else Shard(dim)
        summed = name.startswith("mean")  # before torch 2.12 at once, over the ranks too
        if any(p != expected and not (summed and p == Replicate()) for p in placements):
            wrong[name, dim] = placements
    return wrong


def test_sharded_rows_give_what_whole_tensors_give():
    assert run_ranks(_every_case, 2) == [{}, {}]


def _statistics(rank, world_size):
    """A backward pass may want the statistics elsewhere, so they must be those of the whole tensor."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, weight, bias = _random(B, S, H), _random(H), _random(H, seed=1)
    for name, parameters in (("rms_norm", (weight,)), ("layer_norm", (weight, bias))):
        expected = ops.OPS[name](x, None, *parameters, 1e-5)[2]
        placed = [distribute_tensor(p, mesh) for p in parameters]
        stats = ops.OPS[name](distribute_tensor(x, mesh, [Shard(1)]), None, *placed, 1e-5)[2]
        assert stats.placements == (Shard(2),)
        assert torch.equal(stats.full_tensor(), expected)


def test_statistics_of_sharded_rows_are_those_of_the_whole():
    run_ranks(_statistics, 2)


def _last_dimension(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for name in ("rms_norm", "swiglu", "cross_entropy"):
        function, rows, parameters = CASES[name]
        rows = rows((B,))
        _compare(function, rows[:1], [*rows[1:], *parameters], mesh, Shard(1))


def test_rows_that_are_cut_themselves_are_made_whole():
    run_ranks(_last_dimension, 2)


def _masked(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    assert _compare(*MASKED, mesh, Replicate()) == [Replicate()]
    with pytest.raises(NotImplementedError, match=r"bias_dropout_add: a shard cannot draw .*to_local"):
        _compare(*MASKED, mesh, Shard(0))
    x = distribute_tensor(_random(B, H), mesh)
    with pytest.raises(ValueError, match=r"x is a DTensor of shape \(4, 8\): give it a seed"):
        ops.bias_dropout_add(x, None, x, p=0.5)


def test_masks_of_dropout_are_those_of_whole_tensors():
    run_ranks(_masked, 2)


def _refused(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x, angles, target = (
        distribute_tensor(t, mesh, [Shard(0)]) for t in (_random(B, H), _random(B, H // 2), _ids(B))
    )
    with pytest.raises(NotImplementedError, match="rope_ writes into its arguments and takes no DTensors"):
        ops.rope(x, angles, angles, in_place=True)
    with pytest.raises(NotImplementedError, match=r"topk_router takes no DTensors: .*to_local"):
        ops.topk_router(x, 2)
    for option in ({"grad_in_place": True}, {"loss_grad": _random(B)}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} overwrites logits, which may not be DT"):
            ops.cross_entropy(x.requires_grad_(), target, **option, reduction="none")


def test_what_takes_no_sharded_tensors_says_so():
    run_ranks(_refused, 2)


ALONE = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from fastmp import ops

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
local = torch.randn(4, 8, dtype=torch.float64)
x = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
assert "fastmp.ops.core.dtensor" not in sys.modules
y = torch.compile(ops.bias_gelu, backend="aot_eager", fullgraph=True)(x)
y.sum().backward()
expected = local.clone().requires_grad_()
ops.bias_gelu(expected).sum().backward()
assert y.placements == x.grad.placements == (Shard(0),)
torch.testing.assert_close(x.grad.to_local(), expected.grad, rtol=1e-12, atol=1e-12)
"""


@pytest.mark.full
def test_compilers_find_the_strategies_by_themselves():
    """In a process of its own: in this one another test may have asked for them."""
    subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, check=True)


def _rotate(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    q, k = _random(S, B, 4, H), _random(S, B, 2, H, seed=1)
    cos, sin = ops.rope_cos_sin(torch.arange(S), H, dtype=torch.float64)
    cos, sin = cos.double(), sin.double()
    for dim in range(3):
        placements = _compare(
            lambda q, k: ops.rope_qk(
                q, k, *(distribute_tensor(t, mesh) if isinstance(q, DTensor) else t for t in (cos, sin))
            ),
            [q, k],
            [],
            mesh,
            Shard(dim),
        )
        assert placements == [Shard(dim)] * 2
    for alone in range(2):
        one, other = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (q, k))
        turned = ops.rope_qk(one, other, *(distribute_tensor(t, mesh) for t in (cos, sin)))[alone]
        turned.square().sum().backward()
        kept, untouched = (one, other) if alone == 0 else (other, one)
        torch.testing.assert_close(kept.grad.full_tensor(), 2 * (q, k)[alone], rtol=1e-12, atol=1e-12)
        assert not untouched.grad.to_local().any()


def test_rope_of_sharded_sequences_samples_and_heads():
    run_ranks(_rotate, 2)


def _norm_and_rotate(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    tables = ops.rope_cos_sin(S, H, dtype=torch.float64)

    def of_latents(x, weight):
        divided = isinstance(x, DTensor)
        return ops.latent_norm_rope(
            x, weight, *(distribute_tensor(t, mesh) if divided else t for t in tables)
        )

    for dim in range(2):
        placements = _compare(of_latents, [_random(S, B, 5 + H)], [_random(5)], mesh, Shard(dim))
        assert placements == [Shard(dim)] * 2


@pytest.mark.full
def test_latents_of_sharded_sequences_and_samples():
    run_ranks(_norm_and_rotate, 2)


def _norm_between_sequence_parts(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(RMSNorm(H, group=None, dtype=torch.float64))
    with torch.no_grad():
        model[0].weight.copy_(_random(H))
    parallelize_module(model, mesh, {"0": SequenceParallel(use_local_output=False)})
    x = _random(B, S, H)
    y = model(distribute_tensor(x, mesh, [Shard(1)]))
    y.square().sum().backward()
    weight = _random(H).requires_grad_()
    expected = F.rms_norm(x, (H,), weight, model[0].eps)
    expected.square().sum().backward()
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), weight.grad, rtol=1e-12, atol=1e-12)


def test_norm_under_torch_sequence_parallel():
    run_ranks(_norm_between_sequence_parts, 2)
