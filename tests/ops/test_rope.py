"""rope on the CPU: what it means, in place, gradients, layouts, compiled kernel against reference, errors."""

from __future__ import annotations

import cmath
import importlib
import math

import pytest
import torch
from every_op_tools import implementation
from kernel_tools import DTYPES, KERNELS, ON_CPU, TRITON, check_kernel, random, threads_agree

from fastmp.ops import OPS, rope, rope_cos_sin, rope_qk, rope_triton
from fastmp.testing.functions import as_tuple

module = importlib.import_module("fastmp.ops.rope")  # the name in the package is the function
EXACT = {"rtol": 1e-12, "atol": 1e-12}
FORMS = pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "pairs"))


def _angles(num_tokens, dim, dtype=torch.float64):
    return rope_cos_sin(num_tokens, dim, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def _as_complex(x, interleaved):
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    return torch.complex(*pairs.unbind(-1))


@FORMS
def test_multiplies_by_unit_complex_numbers(interleaved):
    x = random(9, 2, 3, 8)
    y = rope(x, *_angles(9, 6), interleaved=interleaved)
    for token in range(9):
        for pair in range(3):
            angle = token / 10000 ** (2 * pair / 6)
            before, after = (_as_complex(t[token, ..., :6], interleaved)[..., pair] for t in (x, y))
            torch.testing.assert_close(after, before * cmath.exp(1j * angle), **EXACT)
    assert torch.equal(y[..., 6:], x[..., 6:])


@FORMS
def test_scores_depend_on_distance_alone(interleaved):
    q, k = random(1, 16, seed=1).expand(40, 16), random(1, 16, seed=2).expand(40, 16)
    q, k = rope_qk(q, k, *_angles(40, 16), interleaved=interleaved)
    scores = q @ k.T
    for distance in (-7, 0, 3):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), **EXACT)


def test_angles():
    cos, sin = rope_cos_sin(5, 4, base=100.0)
    assert cos.shape == sin.shape == (5, 2) and cos.dtype == torch.float32
    assert cos[3].tolist() == pytest.approx([math.cos(3), math.cos(0.3)])
    assert sin[3].tolist() == pytest.approx([math.sin(3), math.sin(0.3)])
    positions = torch.tensor([[4, 0], [1, 3]])
    for whole, picked in zip((cos, sin), rope_cos_sin(positions, 4, base=100.0), strict=True):
        assert torch.equal(picked, whole[positions])
    far = rope_cos_sin(torch.tensor([1_000_000]), 128, base=500000.0)[0][0]
    truth = [math.cos(1_000_000 / 500000 ** (i / 64)) for i in range(64)]
    assert (far.double() - torch.tensor(truth, dtype=torch.float64)).abs().max() < 1e-7
    assert rope_cos_sin(3, 2, device="meta")[0].device.type == "meta"
    assert rope_cos_sin(3, 0)[0].shape == (3, 0)
    for arguments, message in (((3, 5), "dim must be even and not negative, got 5"), ((3, -2), "got -2")):
        with pytest.raises(ValueError, match=message):
            rope_cos_sin(*arguments)
    with pytest.raises(ValueError, match="base must be positive, got 0 for dim 4"):
        rope_cos_sin(3, 4, base=0)


def test_positions_of_each_sample_and_other_layouts():
    positions = torch.tensor([[0, 5], [1, 6], [2, 0], [3, 1]])
    x = random(4, 2, 3, 8)
    cos, sin = rope_cos_sin(positions, 8, dtype=torch.float64)
    y = rope(x, cos, sin)
    for sample in range(2):
        alone = rope(x[:, sample], *rope_cos_sin(positions[:, sample], 8, dtype=torch.float64))
        assert torch.equal(y[:, sample], alone)
    packed = rope(x.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1))
    assert torch.equal(packed, y.flatten(0, 1))
    batch_first = rope(x.transpose(0, 1).contiguous(), cos.transpose(0, 1), sin.transpose(0, 1))
    assert torch.equal(batch_first.transpose(0, 1), y)
    shared = rope(x.transpose(0, 1), cos[:, 0][None], sin[:, 0][None])
    assert torch.equal(shared.transpose(0, 1), rope(x, cos[:, 0], sin[:, 0]))
    one = rope(x, cos[1, 1], sin[1, 1])
    assert torch.equal(one[3], rope(x[3], cos[1, 1], sin[1, 1]))


def _layouts(dtype):
    """Queries and keys (or None) with angles, in the layouts that attention meets."""
    cos, sin = _angles(11, 16, dtype)
    fused = random(11, 2, 3, 6, 20, dtype=dtype)
    apart = random(11, 2, 4, 16, dtype=dtype, seed=1)
    batch_first = random(2, 4, 11, 33, dtype=dtype, seed=2).permute(2, 0, 1, 3)
    strided = random(11, 2, 4, 40, dtype=dtype, seed=3)[..., 1:35:2]
    return {
        "contiguous": (apart, apart[:, :, :1].clone(), cos, sin),
        "fused": (fused[:, :, :, :4], fused[:, :, :, 4], cos, sin),
        "queries and keys side by side": (fused[:, :, :, :5], None, cos, sin),
        "batch first": (batch_first, None, cos, sin),
        "four levels": (fused[:, :, :, :4].transpose(0, 1), None, cos[None], sin[None]),
        "last stride 2": (strided, None, cos, sin),
        "empty": (apart[:, :0], apart[:, :0, :1], cos, sin),
    }


LAYOUTS = pytest.mark.parametrize("layout", list(_layouts(torch.float32)))


def _own_copy(x):
    """The same numbers in the same layout, gaps between them included."""
    if x is None:
        return None
    base = (x if x._base is None else x._base).clone()
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


@FORMS
@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_is_bitwise_the_same(layout, dtype, interleaved):
    q, k, cos, sin = _layouts(dtype)[layout]
    mine = [x for x in (_own_copy(q), _own_copy(k)) if x is not None]
    given = [x for x in (q, k) if x is not None]
    call = rope if k is None else rope_qk
    want = call(*given, cos, sin, interleaved=interleaved)
    got = call(*mine, cos, sin, interleaved=interleaved, in_place=True)
    for own, x, value, expected in zip(mine, given, as_tuple(got), as_tuple(want), strict=True):
        assert value is own and own._version >= 1 and expected.is_contiguous()
        assert torch.equal(own, expected)
        own.copy_(x)  # nothing else was touched
        assert torch.equal(*((t if t._base is None else t._base) for t in (own, x)))


def _turns(*shape, dtype):
    """Any angles, cos and sin."""
    turns = random(*shape, seed=9, scale=3.0)
    compute = module.compute_dtype(dtype)
    return turns.cos().to(compute), turns.sin().to(compute)


def check(backend, q, k, cos, sin, interleaved, inverse=False):
    """Into new memory equal to the reference; in place bitwise the same, and nothing else is touched."""
    arguments = cos, sin, interleaved, inverse
    wide = q.dtype == torch.float64
    close = {} if wide else {"rtol": torch.finfo(q.dtype).eps, "atol": 1e-6}
    check_kernel(backend, "rope", q, k, *arguments, **close)
    views = [_own_copy(x) for x in (q, k)]
    implementation("rope_", backend)(*views, *arguments)
    wanted = implementation("rope", backend)(q, k, *arguments)
    for x, view, want in zip((q, k), views, wanted, strict=True):
        if x is not None:
            assert torch.equal(view, want)
            view.copy_(x)
            assert torch.equal(*((t if t._base is None else t._base) for t in (view, x)))


@FORMS
@KERNELS
def test_equals_reference(backend, dtype, interleaved):
    for shape, keys, angles in (
        ((5, 2, 4, 128), (5, 2, 1, 128), (5, 64)),
        ((7, 3, 5, 80), (7, 3, 2, 80), (7, 3, 10)),
        ((2, 9, 3, 31), None, (1, 9, 13)),
        ((3, 2, 3, 8), (3, 2, 8), (3, 2)),
        ((70, 2), None, (70, 1)),
        ((4, 3, 2, 6), (4, 3, 0, 6), (1, 1, 3)),
        ((0, 2, 3, 8), (0, 2, 1, 8), (0, 4)),
        ((2, 3, 4), None, (2,)),
        ((2, 3, 4), None, (2, 0)),
    ):
        q = random(*shape, dtype=dtype)
        k = None if keys is None else random(*keys, dtype=dtype, seed=1)
        check(backend, q, k, *_turns(*angles, dtype=dtype), interleaved, inverse=interleaved)


@FORMS
@LAYOUTS
@KERNELS
def test_layouts(backend, dtype, layout, interleaved):
    for inverse in (False, True):
        check(backend, *_layouts(dtype)[layout], interleaved, inverse)


@pytest.mark.parametrize("inverse", (False, True))
@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_other_strides(backend, inverse):
    fused, transposed, apart = (
        random(*shape, dtype=torch.float32, seed=seed)
        for seed, shape in enumerate(((6, 2, 3, 6, 16), (16, 6, 2), (6, 5, 40)))
    )
    cos, sin = _turns(6, 8, dtype=torch.float32)
    check(backend, transposed.permute(1, 2, 0), None, cos, sin, False, inverse)
    check(backend, apart[:, :, 3:35:2], None, cos, sin, True, inverse)
    wide = torch.cat((cos, sin), -1)
    check(backend, fused[:, 0, 0], None, wide[:, :8], wide[:, 8:], False, inverse)


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_more_dimensions_apart_than_levels(backend):
    """Every second index of each of four leading dimensions: launched slice by slice."""
    x = random(4, 4, 6, 4, 8, dtype=torch.float32, seed=8)[::2, ::2, ::2, ::2]
    cos, sin = _turns(2, 2, 3, dtype=torch.float32)
    assert len(rope_triton.levels([x.shape], [x.stride()], cos.shape, cos.stride())) == 4
    check(backend, x, None, cos, sin, False)
    check(backend, x, None, *_turns(1, 2, 3, dtype=torch.float32), True)
    check(backend, x, x[:, :, 1:2], *_turns(2, 4, dtype=torch.float32), False)


@pytest.mark.parametrize("backend", [TRITON])
def test_rows_beyond_one_step_of_the_grid(backend):
    """Blocks of rows that end inside a token, and programs of keys after those of queries."""
    q, k = (random(37, heads, 64, dtype=torch.float16, seed=heads) for heads in (5, 3))
    assert rope_triton.block_shape(32, 2)[0] < 37 * 3
    check(backend, q, k, *_turns(37, 32, dtype=torch.float16), False)


@pytest.mark.parametrize("half", (0, 1, 7, 8, 15, 16, 17, 48, 100))
@FORMS
def test_every_width_on_every_instruction_set(half, interleaved):
    """Tails of all lengths; `base` code runs where the wider sets are absent."""
    for dtype in DTYPES:
        q, k = random(3, 2, 2 * half + 3, dtype=dtype), random(3, 1, 2 * half + 3, dtype=dtype, seed=1)
        arguments = (q, k, *_angles(3, 2 * half, dtype), interleaved, False)
        tolerance = EXACT if dtype == torch.float64 else {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
        for value, want in zip(torch.ops.fastmp.rope(*arguments), module.reference(*arguments), strict=True):
            torch.testing.assert_close(value, want, **tolerance)


@FORMS
def test_in_place_gradients(interleaved):
    """A tensor of its own, and views of a fused projection one by one and side by side."""
    weight = random(11, 2, 3, 6, 20, seed=5).requires_grad_()
    cos, sin = _angles(11, 16)

    def loss(in_place, view):
        fused = weight * 2
        options = {"interleaved": interleaved, "in_place": in_place}
        if view == "whole":
            turned = [rope(fused, cos, sin, **options)]
        elif view == "side by side":
            turned = [rope(fused[:, :, :, :5], cos, sin, **options), fused[:, :, :, 5]]
        elif view == "pair of views":
            turned = [*rope_qk(fused[:, :, :, :4], fused[:, :, :, 4], cos, sin, **options), fused[:, :, :, 5]]
        else:
            turned = [*rope_qk(fused, weight[:, :, :, 4] * 3, cos, sin, **options)]
        return sum(t.sin().sum() * (i + 1) for i, t in enumerate(turned))

    for view in ("whole", "side by side", "pair of views", "pair"):
        for compiled in (False, True):
            torch.compiler.reset()
            run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
            (want,) = torch.autograd.grad(loss(False, view), weight)
            (got,) = torch.autograd.grad(run(True, view), weight)
            torch.testing.assert_close(got, want, **EXACT)


def test_overwriting_what_autograd_saved_is_noticed():
    x = random(4, 2, 8).requires_grad_()
    h = x * 1
    other = h.sin()
    rope(h, *_angles(4, 8), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


def test_second_derivatives():
    q, k = random(3, 2, 6).requires_grad_(), random(3, 1, 6, seed=1).requires_grad_()
    cos, sin = _angles(3, 4)
    assert torch.autograd.gradgradcheck(lambda q, k: rope_qk(q, k, cos, sin), (q, k))
    weight = random(3, 2, 6, seed=2)
    (dx,) = torch.autograd.grad((rope(q * q, cos, sin, in_place=True) * weight).sum(), q, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), q)
    torch.testing.assert_close(again, 2 * rope(weight, cos, -sin), **EXACT)


def test_saves_angles_only():
    q, k = random(3, 2, 6).requires_grad_(), random(3, 1, 6).requires_grad_()
    cos, sin = _angles(3, 4)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope_qk(q, k, cos, sin)
        rope_qk(q * 1, k * 1, cos, sin, in_place=True)
    assert {t.data_ptr() for t in saved if t.numel() > 1} == {cos.data_ptr(), sin.data_ptr()}


@ON_CPU
def test_results_do_not_depend_on_the_number_of_threads(backend):
    x = random(301, 2, 7, 72, dtype=torch.float32)
    arguments = (x, None, *_angles(301, 60, torch.float32), False, True)
    assert threads_agree(lambda: implementation("rope", backend)(*arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_stay_in_their_pair(dtype):
    x = random(3, 1, 40, dtype=dtype)
    x[1, 0, 2], x[2, 0, 3] = torch.nan, torch.inf
    wide = module.reference(x.double(), None, *_angles(3, 40), False, False)[0]
    cos, sin = _angles(3, 40, dtype)
    for y in (rope(x, cos, sin), module.reference(x, None, cos, sin, False, False)[0]):
        torch.testing.assert_close(y.double(), wide, rtol=1e-2, atol=1e-2, equal_nan=True)
        assert y.isnan().nonzero().tolist() == [[1, 0, 2], [1, 0, 22]]


ONES, ANGLES = torch.ones(4, 2, 6), torch.ones(4, 3)
TRAINED = torch.ones(4, 3).requires_grad_()


@pytest.mark.parametrize(
    ("x", "cos", "sin", "message"),
    [
        (ONES.int(), ANGLES, ANGLES, r"x must have one of the dtypes .* got torch.int32"),
        (ONES, ANGLES, ANGLES[:, :2], r"cos \(4, 3\) and sin \(4, 2\) differ in shape"),
        (ONES[0, 0], ANGLES, ANGLES, r"cos \(4, 3\) has more dimensions than x \(6,\)"),
        (ONES[..., :5], ANGLES, ANGLES, r"cos \(4, 3\) rotates 6 elements of a head, but x \(4, 2, 5\) has"),
        (ONES[:3], ANGLES, ANGLES, r"cos \(4, 3\) does not fit the leading dimensions of x \(3, 2, 6\)"),
        (
            ONES.bfloat16(),
            ANGLES.half(),
            ANGLES,
            r"cos must be torch.float32 or torch.bfloat16 for x of torch.bfloat16, got torch.float16",
        ),
        (ONES.double(), ANGLES.double(), ANGLES, r"sin must be torch.float64 for x of torch.float64, got"),
        (ONES, ANGLES.to("meta"), ANGLES, r"x is on cpu but cos is on meta"),
        (ONES, TRAINED, ANGLES, r"cos \(4, 3\) requires a gradient, but receives none"),
    ],
)
def test_wrong_arguments(x, cos, sin, message):
    with pytest.raises(ValueError, match="rope: " + message):
        rope(x, cos, sin)


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_angles_in_the_dtype_of_x(dtype, in_place):
    """transformers makes them so; the arithmetic is in float32 all the same."""
    cos, sin = (t.to(dtype) for t in rope_cos_sin(5, 6))
    q, k, grad = (
        torch.randn(5, 2, 4, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)
    )
    results = []
    for angles in ((cos, sin), (cos.float(), sin.float())):
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        turned = rope_qk(*(2 * leaf for leaf in leaves), *angles, in_place=in_place)
        single = rope(2 * leaves[0], *angles, in_place=in_place)
        results.append((*turned, single, *torch.autograd.grad((*turned, single), leaves, (grad, grad, grad))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_wrong_pairs():
    with pytest.raises(
        ValueError, match=r"cos \(4, 3\) does not fit the leading dimensions of k \(3, 2, 6\)"
    ):
        rope_qk(ONES, ONES[:3], ANGLES, ANGLES)
    with pytest.raises(ValueError, match=r"rope: q has dtype torch\.float32 but k has dtype torch\.bfloat16"):
        rope_qk(ONES, ONES.bfloat16(), ANGLES, ANGLES)
    with pytest.raises(ValueError, match="rope: q has width 6 but k has width 8"):
        rope_qk(ONES, torch.ones(4, 2, 8), ANGLES, ANGLES)


def test_what_cannot_be_overwritten():
    with pytest.raises(ValueError, match=r"would overwrite x \(4, 2, 6\), a leaf that requires grad"):
        rope(ONES.clone().requires_grad_(), ANGLES, ANGLES, in_place=True)
    with pytest.raises(ValueError, match=r"elements of their own, got \(4, 2, 6\) with strides \(0, 6, 1\)"):
        rope(ONES[:1].expand(4, 2, 6), ANGLES, ANGLES, in_place=True)
    leaf = ONES.clone().requires_grad_()
    with torch.no_grad():
        assert rope(leaf, ANGLES, ANGLES, in_place=True) is leaf


def test_the_op_itself_refuses_what_does_not_fit():
    if OPS["rope"].serving["cpu"] != "c++":
        pytest.skip(f"no compiled kernel: {OPS['rope'].reasons['cpu']}")
    for cos, sin in ((ANGLES[:3], ANGLES[:3]), (ANGLES, ANGLES[:2]), (ANGLES.double(), ANGLES.double()),
                     (torch.ones(4, 4), torch.ones(4, 4)), (ANGLES, ANGLES[0])):  # fmt: skip
        with pytest.raises(RuntimeError, match="rope: cos"):
            torch.ops.fastmp.rope(ONES, None, cos, sin, False, False)


def test_cost_formulas():
    q, k = torch.zeros(5, 2, 4, 10, dtype=torch.bfloat16), torch.zeros(5, 2, 1, 10, dtype=torch.bfloat16)
    arguments = (q, k, *_angles(5, 6, torch.float32), False, False)
    angles = 2 * 5 * 3 * 4
    assert OPS["rope"].traffic(*arguments) == 2 * 2 * (400 + 100) + angles
    assert OPS["rope_"].traffic(*arguments) == 2 * 2 * (40 + 10) * 6 + angles
    assert OPS["rope"].flops(*arguments) == 3 * 50 * 6
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        rope_qk(*arguments[:4])
    assert counter.get_total_flops() == 3 * 50 * 6


def test_block_shapes():
    for itemsize in (2, 4, 8):
        for half in (1, 10, 32, 36, 64, 128, 256):
            block_m, block_half = rope_triton.block_shape(half, itemsize)
            assert block_half & (block_half - 1) == 0 and half <= block_half < max(2 * half, 16)
            assert block_m * block_half * itemsize == 2 * 32 * rope_triton.NUM_WARPS * 16  # two loads
    assert rope_triton.block_shape(1 << 20, 2) == (1, 1 << 20)


def _levels(tensors, cos):
    return rope_triton.levels(
        [t.shape for t in tensors], [t.stride() for t in tensors], cos.shape, cos.stride()
    )


def test_leading_dimensions_fold():
    cos = torch.ones(11, 8)
    q, k = torch.ones(11, 2, 4, 16), torch.ones(11, 2, 1, 16)
    assert _levels([q, k], cos) == [((11, 11), (128, 32), 8), ((8, 2), (16, 16), 0)]
    assert _levels([q], torch.ones(11, 2, 8)) == [((22,), (64,), 8), ((4,), (16,), 0)]
    batch_first = [((2,), (64,), 0), ((11,), (128,), 8), ((4,), (16,), 0)]
    assert _levels([q.transpose(0, 1)], cos[None]) == batch_first
    fused = torch.ones(11, 2, 3, 6, 16)[:, :, :, :5]
    assert _levels([fused], cos) == [((11,), (576,), 8), ((6,), (96,), 0), ((5,), (16,), 0)]
    assert _levels([torch.ones(1, 1, 16)], torch.ones(1, 8)) == []
    assert _levels([torch.ones(11, 16)], cos) == [((11,), (16,), 8)]
