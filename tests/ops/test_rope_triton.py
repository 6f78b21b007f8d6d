"""The Triton kernel of rope in Triton's interpreter, against the reference."""

from __future__ import annotations

import importlib

import pytest
import torch
from marks import DTYPES

from fastmp.ops import rope_triton
from fastmp.testing.ops import poisoned_memory

module = importlib.import_module("fastmp.ops.rope")  # the name in the package is the function
pytestmark = pytest.mark.interpret

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}


def _random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _angles(*shape, dtype):
    turns = _random(*shape, dtype=torch.float64, seed=9) * 3
    compute = module.compute_dtype(dtype)
    return turns.cos().to(compute), turns.sin().to(compute)


def _check(q, k, cos, sin, interleaved, inverse=False):
    """Into new memory equal to the reference; in place bitwise the same, and nothing else is touched."""
    arguments = (cos, sin, interleaved, inverse)
    with poisoned_memory():
        results = module.launch(q, k, *arguments)
    for value, want in zip(results, module.reference(q, k, *arguments), strict=True):
        assert value.is_contiguous() and value.shape == want.shape
        torch.testing.assert_close(value, want, **TOLERANCE[q.dtype])
    bases = [None if x is None else (x if x._base is None else x._base).clone() for x in (q, k)]
    views = [
        None if x is None else base.as_strided(x.shape, x.stride(), x.storage_offset())
        for x, base in zip((q, k), bases, strict=True)
    ]
    module.launch_(*views, *arguments)
    for x, base, view, want in zip((q, k), bases, views, results, strict=True):
        if x is not None:
            assert torch.equal(view, want)
            view.copy_(x)
            assert torch.equal(base, x if x._base is None else x._base)


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "pairs"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "keys", "angles"),
    [
        ((5, 2, 4, 128), (5, 2, 1, 128), (5, 64)),
        ((7, 3, 5, 80), (7, 3, 2, 80), (7, 3, 10)),
        ((2, 9, 3, 31), None, (1, 9, 13)),
        ((3, 2, 3, 8), (3, 2, 8), (3, 2)),
        ((70, 2), None, (70, 1)),
        ((4, 3, 2, 6), (4, 3, 0, 6), (1, 1, 3)),
        ((0, 2, 3, 8), (0, 2, 1, 8), (0, 4)),
        ((2, 3, 4), None, (2,)),
        ((2, 3, 4), None, (2, 0)),
    ],
    ids=str,
)
def test_equals_reference(shape, keys, angles, dtype, interleaved):
    q = _random(*shape, dtype=dtype, seed=0)
    k = None if keys is None else _random(*keys, dtype=dtype, seed=1)
    _check(q, k, *_angles(*angles, dtype=dtype), interleaved, inverse=interleaved)


@pytest.mark.parametrize("inverse", (False, True))
def test_layouts(inverse):
    float32 = {"dtype": torch.float32}
    fused = _random(6, 2, 3, 6, 16, seed=3, **float32)  # each of three groups: four queries, a key, a value
    cos, sin = _angles(6, 8, **float32)
    _check(fused[:, :, :, :4], fused[:, :, :, 4], cos, sin, False, inverse)
    _check(fused[:, :, :, :5], None, cos, sin, True, inverse)
    batch_first = _random(2, 3, 6, 16, seed=4, **float32).permute(2, 0, 1, 3)
    _check(batch_first, _random(6, 2, 1, 16, seed=5, **float32), cos, sin, False, inverse)
    _check(batch_first.transpose(0, 1), None, cos[None], sin[None], False, inverse)
    _check(_random(16, 6, 2, seed=6, **float32).permute(1, 2, 0), None, cos, sin, False, inverse)
    _check(_random(6, 5, 40, seed=7, **float32)[:, :, 3:35:2], None, cos, sin, True, inverse)
    wide = torch.cat((cos, sin), -1)
    _check(fused[:, 0, 0], None, wide[:, :8], wide[:, 8:], False, inverse)


def test_more_dimensions_apart_than_levels():
    """Every second index of each of four leading dimensions: launched slice by slice."""
    x = _random(4, 4, 6, 4, 8, dtype=torch.float32, seed=8)[::2, ::2, ::2, ::2]
    cos, sin = _angles(2, 2, 3, dtype=torch.float32)
    assert len(rope_triton.levels([x.shape], [x.stride()], cos.shape, cos.stride())) == 4
    _check(x, None, cos, sin, False)
    _check(x, None, *_angles(1, 2, 3, dtype=torch.float32), True)
    _check(x, x[:, :, 1:2], *_angles(2, 4, dtype=torch.float32), False)


def test_rows_beyond_one_step_of_the_grid():
    """Blocks of rows that end inside a token, and programs of keys after those of queries."""
    q, k = _random(37, 5, 64, dtype=torch.float16, seed=1), _random(37, 3, 64, dtype=torch.float16, seed=2)
    assert rope_triton.block_shape(32, 2)[0] < 37 * 3
    _check(q, k, *_angles(37, 32, dtype=torch.float16), False)
