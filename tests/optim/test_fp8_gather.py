"""FP8 weights of a sharded optimizer: ranks gather bytes, which are those of the gathered weights."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from marks import exhaustive, full
from torch import nn

from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.collectives import all_gather_
from fastmp.ops import dequantize_rows, quantize_weight
from fastmp.ops.core.fp8 import E4M3, block_scales
from fastmp.optim.adamw import AdamW
from fastmp.optim.fp8_gather import cast_, dequantize_outside_, tile_amax_
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.tensor_parallel import fp8_linear
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL = (float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-45, -1e-40, 0.0, -0.0, 448.0, 449.0)
LAYOUTS = 200


def weight(shape, dtype, draw, generator):
    """Numbers of many magnitudes: zero and subnormal tiles, the largest ones, NaN and infinity."""
    w = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-6, 6, shape, generator=generator)
    flat = w.view(-1)
    for _ in range(draw.randrange(3)):  # whole ranges of one magnitude, so that tiles are of it
        start = draw.randrange(len(flat))
        flat[start : start + draw.randrange(len(flat))] *= draw.choice((0.0, 2.0**-120, 2.0**-140, 2.0**120))
    for _ in range(draw.randrange(4)):
        flat[draw.randrange(len(flat))] = draw.choice(SPECIAL)
    return w.to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def expected_others(w, block):
    """What a rank has of the parts of others: dequantised numbers."""
    q, _, s = quantize_weight(w, block=block)
    rows = bits(s).view(*s.shape, -1).repeat_interleave(block, -3).flatten(0, -3).view(s.dtype).squeeze(-1)
    return dequantize_rows(q.view(-1, w.shape[-1]), rows, dtype=w.dtype).view(-1)


def random_members(number, world):
    """A random model: weights and experts of one block and dtype, and parameters that are not in FP8."""
    draw, generator = random.Random(number), torch.Generator().manual_seed(number)
    block = draw.choice((32, 32, 32, 128))
    dtype = draw.choice((torch.bfloat16, torch.float32, torch.float16, torch.float64))
    named, copies = {}, {}
    for index in range(draw.randint(1, 4)):
        shape = block * draw.randint(1, 3), block * draw.randint(1, 3)
        shape = (draw.randint(1, 3), *shape) if draw.random() < 0.4 else shape
        param = nn.Parameter(weight(shape, dtype, draw, generator))
        param.expert_parallel = len(shape) == 3
        named[f"weight{index}"] = param
        copies[param] = QuantizedWeight(Fp8Recipe(block))
        if draw.random() < 0.5:
            named[f"norm{index}"] = nn.Parameter(
                torch.randn(draw.randint(1, 99), generator=generator).to(dtype)
            )
    options = {"bucket_size": draw.choice((1, 5000, 10**6)), "bucket_unit": draw.choice((1, 100, 1024))}
    states = "small" if dtype == torch.bfloat16 and draw.random() < 0.3 else "classic"
    return named, copies, options, states


def check_layout(number, rank, world, monkeypatch):
    """Steps on one layout; return the number of weights whose tiles lie on several ranks."""
    named, copies, options, states = random_members(number, world)
    group = dist.group.WORLD
    grads = GradBuffer(named.items(), dp_group=group, edp_group=group, shard=True, fp8=copies, **options)
    assert set(grads.gathered_in_fp8) == ({n for n in named if "weight" in n} if world > 1 else set())
    optimizer = AdamW(grads, lr=0.0, weight_decay=0.0, states=states)
    lr, torn = number % 2 * 0.01, 0
    for step in range(2):
        for flat in grads.flats:
            flat.grad.normal_(generator=torch.Generator().manual_seed(step))
            for name, param in flat.parameters.items() if flat.copies else ():
                own = slice(*flat.pieces[name].param_range) if name in flat.pieces else slice(0)
                mine = param.data.view(-1)[own].clone()
                param.data.normal_()  # numbers of others matter nothing
                param.data.view(-1)[own] = mine
        optimizer.step(lr)
    with monkeypatch.context() as patch:
        patch.setattr(fp8_linear, "quantize_weight", None)  # the copies are fresh
        for param, each in copies.items() if world > 1 else ():
            each.refresh(param)
    for flat in optimizer.flats:
        gathered = flat.params.clone()
        for bucket in flat.grads.layout.buckets:
            all_gather_(gathered[bucket.start : bucket.end], group)
        for name, w in zip(flat.grads.parameters, flat.grads.views(gathered), strict=True):
            param = named[name]
            if name not in flat.grads.copies:
                assert torch.equal(bits(param.data), bits(w))
                continue
            block = copies[param].recipe.block
            for found, wanted in zip(copies[param].tensors, quantize_weight(w, block=block), strict=True):
                assert found.shape == wanted.shape and found.dtype == wanted.dtype
                assert torch.equal(bits(found), bits(wanted)), (number, name)
            piece = flat.grads.pieces.get(name)
            start, end = (0, 0) if piece is None else piece.param_range
            wanted = expected_others(w, block)
            wanted[start:end] = w.reshape(-1)[start:end]
            torch.testing.assert_close(param.data.view(-1), wanted, rtol=0, atol=0, equal_nan=True)
            torn += bool(start % (block * w.shape[-1]) or end % (block * w.shape[-1]))
    return torn


@pytest.mark.parametrize("world", [1, 2, *full([4]), *exhaustive([8])])
def test_bytes_are_those_of_gathered_weights(world, monkeypatch):
    """On random layouts, in all dtypes: q, its transpose and scales, whoever owns what part of a tile."""

    def rank_main(rank, world):
        return sum(check_layout(number, rank, world, monkeypatch) for number in range(LAYOUTS // 4))

    torn = sum(run_ranks(rank_main, world, timeout=240))
    assert torn > 20 or world == 1, "tiles are cut"


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_parts_of_a_weight_have_the_bytes_of_the_whole(dtype, block):
    """Any cut: the part before it and after it, without ranks; every number that BF16 has among them."""
    if dtype == torch.bfloat16:
        w = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
        w = w[torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    else:
        w = weight((2 * block, 3 * block), dtype, random.Random(3), torch.Generator().manual_seed(3))
    columns, size = w.shape[1], w.numel()
    q, _, s = quantize_weight(w, block=block)
    for cut in (0, 1, columns - 1, columns * block, columns * block + 77, size - 1, size):
        amax = torch.zeros(2, *s.shape, dtype=torch.int32)
        pieces = (0, cut), (cut, size)
        for each, (first, last) in zip(amax, pieces, strict=True):
            tile_amax_(each, w.view(-1)[first:last], (first, last), columns, block)
        scales = block_scales(amax.amax(0), block, E4M3)
        assert torch.equal(bits(scales.s), bits(s))
        found = torch.zeros(size, dtype=torch.uint8)
        for first, last in pieces:
            cast_(found[first:last], w.view(-1)[first:last], (first, last), columns, scales)
        assert torch.equal(found, bits(q).view(-1))
        others = torch.full_like(w, 7.0).view(-1)
        dequantize_outside_(others, q, s, (cut, size))
        assert bool((others[cut:] == 7).all())
        torch.testing.assert_close(
            others[:cut], expected_others(w, block)[:cut], rtol=0, atol=0, equal_nan=True
        )


def test_weights_that_others_read_are_gathered_in_their_dtype():
    """A weight of two modules, one whose memory is transposed, and all without ZeRO-1."""

    def rank_main(rank, world):
        layers = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(4)]
        layers[1].weight = layers[0].weight
        layers[2].weight = nn.Parameter(layers[2].weight.detach().t())
        for layer in layers:
            layer.fp8 = fp8_linear.quantized(layer, Fp8Recipe(32), "weight")
        weights = fp8_linear.quantized_weights(layers)
        assert set(map(id, weights)) == {id(layers[2].weight), id(layers[3].weight)}
        named = [(str(i), layer.weight) for i, layer in enumerate(layers)]
        grads = GradBuffer(named, dp_group=dist.group.WORLD, shard=True, fp8=weights)
        optimizer = AdamW(grads)
        with count_collectives() as seen:
            optimizer.step()
        grads.remove_hooks()
        other = GradBuffer(named, dp_group=dist.group.WORLD, shard=False, fp8=weights)
        return sorted(grads.gathered_in_fp8), seen.sizes, sorted(other.gathered_in_fp8)

    for names, sizes, replicated in run_ranks(rank_main, 2):
        assert names == ["3"] and replicated == []
        assert sizes == [16 * 4, 64 * 64, 2 * 2 * 64 * 64] or sizes == [16 * 4, 2 * 2 * 64 * 64, 64 * 64]
