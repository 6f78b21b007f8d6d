"""permutation, permute and unpermute: order, drops, empty and full cases, gradients, errors."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from every_op_tools import implementation, op_backends
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import DTYPES, random
from torch._subclasses.fake_tensor import FakeTensorMode

from fastmp.ops import OPS, permutation, permute, quantize_rows, unpermute
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.testing.ops import poisoned_memory

FAMILY = ("permutation", "permute", "unpermute", "unpermute_backward")
REFERENCE = {name: OPS[name].implementations["reference"] for name in FAMILY}
BACKENDS = [case for case in op_backends(("c++", "reference")) if case.values[0] == "permutation"]


def by_hand(indices: list[list[int]], num_experts: int) -> tuple[list[list[int]], list[int]]:
    """The definition, in plain Python."""
    rows = [[-1] * len(slots) for slots in indices]
    offsets, row = [], 0
    for expert in range(num_experts):
        for token, slots in enumerate(indices):
            for slot, chosen in enumerate(slots):
                if chosen == expert:
                    rows[token][slot] = row
                    row += 1
        offsets.append(row)
    return rows, offsets


@settings(max_examples=200)
@given(
    tokens=st.sampled_from((0, 1, 2, 5, 17, 40)),
    slots=st.sampled_from((1, 2, 3, 8)),
    num_experts=st.sampled_from((1, 2, 3, 7, 16)),
    pattern=st.sampled_from(("any", "one expert", "all equal", "few experts", "dropped", "out of range")),
    source=st.randoms(use_true_random=False),
)
@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_is_the_stable_sort_of_any_pattern(op, backend, tokens, slots, num_experts, pattern, source):
    last = num_experts - 1
    draw = {
        "any": lambda: source.randint(0, last),
        "one expert": lambda: last,
        "all equal": lambda slot=0: slot % num_experts,
        "few experts": lambda: source.choice([0, last]),
        "dropped": lambda: source.choice([-1, -1, source.randint(0, last)]),
        "out of range": lambda: source.choice([-(1 << 31), -2, num_experts, (1 << 31) - 1, 0]),
    }[pattern]
    chosen = [[draw() for _ in range(slots)] for _ in range(tokens)]
    indices = torch.tensor(chosen, dtype=torch.int32).view(tokens, slots)
    with poisoned_memory():
        row_of, offsets = implementation(op, backend)(indices, num_experts)
    assert (row_of.tolist(), offsets.tolist()) == by_hand(chosen, num_experts)
    assert row_of.dtype == offsets.dtype == torch.int32 and row_of.is_contiguous()
    kept = row_of[row_of >= 0].sort().values
    assert torch.equal(kept, torch.arange(len(kept), dtype=torch.int32))


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_many_assignments(op, backend):
    """The assignments fill several blocks of the compiled kernel, in any layout."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(-1, 70, (30001, 6), generator=generator, dtype=torch.int32)
    for given_indices in (indices, indices[:, 1:4], indices.t().contiguous().t()):
        results = implementation(op, backend)(given_indices, 64)
        for value, want in zip(results, REFERENCE[op](given_indices.contiguous(), 64), strict=True):
            assert torch.equal(value, want)
    assert len(torch.unique(results[0])) == (results[0] >= 0).sum() + 1


@pytest.mark.parametrize("columns", (1024, 1023))
def test_outputs_larger_than_the_caches(columns):
    """Rows that are aligned, and rows that are not, with some that nothing maps to."""
    x, y = random(1030, columns, dtype=torch.float32), random(4200, columns, dtype=torch.float32, seed=1)
    indices = torch.randint(-1, 9, (1030, 4), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    row_of, _ = permutation(indices, 9)
    probs = torch.rand(1030, 4, generator=torch.Generator().manual_seed(3))
    assert y.nbytes > 16 << 20
    with poisoned_memory():
        rows = OPS["permute"].overload(x, row_of, 4200)
        grads = OPS["unpermute_backward"].overload(x, y, row_of, probs)
    assert torch.equal(rows, REFERENCE["permute"](x, row_of, 4200))
    wanted = REFERENCE["unpermute_backward"](x, y, row_of, probs)
    for value, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-4)


def same_bytes(ours: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for value, want in zip(ours, wanted, strict=True):
        assert (value.dtype, value.shape, value.stride()) == (want.dtype, want.shape, want.stride())
        assert torch.equal(value.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("backend", ["c++", pytest.param("triton", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_rows_are_the_quantised_rows(dtype, backend):
    """Byte for byte, from wide tokens and from FP8 ones, with dropped assignments and empty rows."""
    x = random(37, 400, dtype=dtype)[:, 8:392]
    indices = torch.randint(-1, 9, (37, 3), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    row_of, _ = permutation(indices, 7)
    quantized = implementation("permute_quantized", backend)
    permuted, by_rows = (implementation(op, "reference") for op in ("permute", "quantize_rows"))
    for block, form, num_rows in ((128, E4M3, 150), (32, E5M2, 60), (32, E4M3, 0)):
        wanted = by_rows(permuted(x, row_of, num_rows), block, form)
        q, s = by_rows(x, block, form)
        apart = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), 1).view(form)[:, :384]
        with poisoned_memory():
            same_bytes(quantized(x, None, row_of, num_rows, block, form), wanted)
            same_bytes(quantized(q, s, row_of, num_rows, block, form), wanted)
            same_bytes(quantized(apart, s.contiguous(), row_of, num_rows, block, form), wanted)


def test_quantized_functions():
    x, row_of = random(6, 256, dtype=torch.bfloat16), torch.tensor([[0], [4], [-1], [2], [1], [7]]).int()
    wanted = quantize_rows(permute(x, row_of, 8))
    same_bytes(permute(x, row_of, 8, quantize=True), wanted)
    q, s = quantize_rows(x)
    same_bytes(permute(q, row_of, 8, scales=s), wanted)
    assert (wanted[1][3] == 1).all()
    with pytest.raises(ValueError, match=r"permute: H must be a multiple of block \(128\), got 200"):
        permute(x[:, :200], row_of, 8, quantize=True)
    with pytest.raises(ValueError, match=r"permute: expected scales of shape \(6, 2\) .*, got \(5, 2\)"):
        permute(q, row_of, 8, scales=s[:5])
    with pytest.raises(ValueError, match=r"permute: x.dtype must be one of .*, got torch.bfloat16"):
        permute(x, row_of, 8, scales=s)


def test_nothing_is_kept():
    """All assignments dropped: zeros, and zero gradients, whatever the rows and probabilities hold."""
    row_of, offsets = permutation(torch.full((3, 2), -1, dtype=torch.int32), 4)
    assert (row_of == -1).all() and not offsets.any()
    y = torch.full((5, 4), torch.nan, dtype=torch.float64, requires_grad=True)
    probs = torch.full((3, 2), torch.nan, dtype=torch.float64, requires_grad=True)
    out = unpermute(y, row_of, probs)
    assert not any(t.any() for t in (out, *torch.autograd.grad(out.sum(), (y, probs))))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sums_are_wide_and_in_the_order_of_the_slots(dtype):
    """In the narrow type 1 + eps / 4 + ... would stay 1; large terms that cancel tell the order."""
    y = torch.tensor([[1.0], [2.0**-10], [2.0**-10], [2.0**-10], [2.0**-10]]).to(dtype)
    row_of = torch.arange(5, dtype=torch.int32).view(1, 5)
    wanted = torch.tensor([[1 + 2.0**-8]]).to(dtype)
    large = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0]).view(1, 4)
    ones = torch.ones(4, 1, dtype=dtype)
    for backend in (None, "reference"):
        op = OPS["unpermute"].implementations[backend] if backend else OPS["unpermute"].overload
        assert torch.equal(op(y, row_of, None), wanted)
        assert (
            op(ones, row_of[:, :4].contiguous(), large).item() == 1.0
        )  # 2^24 + 1 is lost, the last 1 is not


@pytest.mark.parametrize("slots", (7, 8, 9, 16, 17, 40))
def test_more_slots_than_are_summed_at_once(slots):
    y, probs = random(3 * slots, 21), random(3, slots, seed=1)
    row_of = torch.randperm(3 * slots, generator=torch.Generator().manual_seed(2)).to(torch.int32)
    row_of[::5] = -1
    arguments = y, row_of.view(3, slots), probs
    torch.testing.assert_close(unpermute(*arguments), REFERENCE["unpermute"](*arguments))


def test_second_derivatives():
    """permute and the plain sum are linear and can be differentiated again; with probabilities, once."""
    x, row_of = random(4, 3).requires_grad_(), torch.tensor([[0, 3], [1, -1], [5, 2], [-1, 4]]).int()
    y, probs = random(7, 3).requires_grad_(), random(4, 2, seed=3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: permute(x, row_of, 7), x)
    assert torch.autograd.gradgradcheck(lambda y: unpermute(y, row_of), y)
    (dy,) = torch.autograd.grad(unpermute(y, row_of, probs).sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="unpermute: its backward is not differentiable"):
        dy.sum().backward()


@pytest.mark.parametrize("weighted", (True, False))
def test_onto_a_residual_in_a_place_of_its_own(weighted):
    generator = torch.Generator().manual_seed(3)
    row_of, _ = permutation(torch.randint(0, 4, (9, 2), generator=generator, dtype=torch.int32), 4)
    y, residual = (torch.randn(n, 40, generator=generator).bfloat16().requires_grad_() for n in (18, 9))
    probs = torch.rand(9, 2, generator=generator).requires_grad_() if weighted else None
    leaves = [y, residual, probs][: 2 + weighted]
    grad, expected = (
        torch.randn(9, 40, generator=generator).bfloat16(),
        unpermute(y, row_of, probs) + residual,
    )
    wanted = torch.autograd.grad(expected, leaves, grad)
    whole = torch.full((9, 80), torch.nan, dtype=torch.bfloat16)
    for out in (None, torch.full_like(residual, torch.nan, requires_grad=False), whole[:, ::2].detach()):
        made = unpermute(y, row_of, probs, residual=residual, out=out)
        assert torch.equal(made, expected) and (out is None or made.data_ptr() == out.data_ptr())
        assert all(map(torch.equal, torch.autograd.grad(made, leaves, grad), wanted))


def test_a_residual_may_be_the_place():
    row_of, y, residual = (
        torch.tensor([[0, 2], [1, -1]], dtype=torch.int32),
        random(3, 4),
        random(2, 4, seed=1),
    )
    expected = unpermute(y, row_of) + residual
    assert torch.equal(unpermute(y, row_of, residual=residual, out=residual), expected)


def test_a_view_is_no_place_for_what_has_a_gradient():
    """A write to another view would take its gradient from it."""
    row_of, y = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32), random(3, 4).requires_grad_()
    whole, residual = random(2, 2, 4), random(2, 4)
    with pytest.raises(ValueError, match=r"unpermute_add_into: out \[2, 4\] is a view; pass out.detach\(\)"):
        unpermute(y, row_of, residual=residual, out=whole[0])
    first, second = (unpermute(y, row_of, residual=residual, out=each.detach()) for each in whole)
    (grad,) = torch.autograd.grad(first.sum() + 2 * second.sum(), y)
    assert torch.equal(grad, torch.full_like(y, 3))


@pytest.mark.parametrize("backend", (None, "reference"))
def test_the_host_learns_nothing_of_the_order(backend):
    """On meta tensors every read of a number raises; shapes follow from shapes alone."""
    op = OPS["permutation"].implementations[backend] if backend else OPS["permutation"].overload
    with FakeTensorMode() if backend is None else nullcontext():
        indices = torch.empty(8192, 8, dtype=torch.int32, device="meta")
        row_of, offsets = op(indices, 256)
    assert row_of.shape == indices.shape and offsets.shape == (256,)
    assert row_of.dtype == offsets.dtype == torch.int32


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_as_one_graph(dynamic):
    def chain(x, indices, probs):
        row_of, offsets = permutation(indices, 4)
        rows = permute(x, row_of, row_of.numel())
        return unpermute(rows * 2, row_of, probs), offsets

    indices = torch.randint(-1, 4, (6, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x, probs = random(6, 5).requires_grad_(), random(6, 2, seed=1).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = []
    for function in (chain, compiled):
        out, offsets = function(x, indices, probs)
        results.append((out, offsets, *torch.autograd.grad(out.sum(), (x, probs))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


INDICES = torch.zeros(2, 2, dtype=torch.int32)
MATRIX = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: permutation(INDICES.long(), 2),
            r"permutation: indices must be int32 .*torch.int64 \(2, 2\)",
        ),
        (lambda: permutation(INDICES[0], 2), r"permutation: indices must be int32 \(T, k\), .*\(2,\)"),
        (lambda: permutation(INDICES, 0), r"permutation: num_experts must be from 1 to 2147483647, got 0"),
        (
            lambda: permutation(INDICES[:1].expand(1 << 30, 2), 2),
            r"permutation: int32 cannot number the assignments of indices \(1073741824, 2\)",
        ),
        (lambda: permute(MATRIX[0], INDICES, 2), r"permute: x must be a matrix, got shape \(3,\)"),
        (lambda: permute(MATRIX.int(), INDICES, 2), r"permute: x must have .*got torch.int32"),
        (lambda: permute(MATRIX, INDICES.long(), 2), r"permute: row_of must be int32 .*torch.int64"),
        (lambda: permute(MATRIX, INDICES.to("meta"), 2), r"permute: x is on cpu but row_of is on meta"),
        (lambda: permute(MATRIX, INDICES[:1], 2), r"permute: row_of \(1, 2\) does not fit x \(2, 3\)"),
        (lambda: permute(MATRIX, INDICES, -1), r"permute: num_rows must be from 0 to 2147483647, got -1"),
        (lambda: unpermute(MATRIX, INDICES[0]), r"unpermute: row_of must be int32 \(T, k\)"),
        (
            lambda: unpermute(MATRIX, INDICES, MATRIX),
            r"expected probs of shape \(2, 2\) for row_of .*got \(2, 3\)",
        ),
        (
            lambda: unpermute(MATRIX.bfloat16(), INDICES, MATRIX[:, :2].bfloat16()),
            r"probs must be torch.float32 for y of torch.bfloat16, got torch.bfloat16",
        ),
        (
            lambda: unpermute(MATRIX, INDICES, MATRIX[:, :2].to("meta")),
            r"unpermute: y is on cpu but probs is on meta",
        ),
        (lambda: unpermute(MATRIX, INDICES, out=MATRIX), r"unpermute: out \(2, 3\) needs a residual"),
        (lambda: unpermute(MATRIX, INDICES, residual=MATRIX[:1]), r"expected residual of .* got \(1, 3\)"),
        (
            lambda: unpermute(MATRIX, INDICES, residual=MATRIX, out=MATRIX.clone().requires_grad_()),
            r"unpermute: out \(2, 3\) requires a gradient",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("count", [1 << 31, 1 << 40, (1 << 63) - 1])
def test_counts_beyond_int32_raise_before_memory_is_taken(count):
    raw = torch.ops.fastmp
    starts = torch.zeros(1, dtype=torch.int32)
    for errors, op, *arguments in (
        (ValueError, permutation, INDICES),
        (ValueError, permute, MATRIX, INDICES),
        (RuntimeError, raw.permutation, INDICES),
        (RuntimeError, raw.permute, MATRIX, INDICES),
        (RuntimeError, raw.block_rows, starts, starts),
    ):
        with pytest.raises(errors, match=rf"num_\w+ must be from [01] to 2147483647, got {count}"):
            op(*arguments, count)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", (8, 64, 256, 512))
def test_sort_on_gpu(experts):
    """Real sizes, without synchronisation, the same every time, and from a graph with other numbers."""
    generator = torch.Generator("cuda").manual_seed(experts)

    def draw() -> torch.Tensor:
        shape, options = (8192, 8), {"generator": generator, "device": "cuda", "dtype": torch.int32}
        return torch.randint(-1, experts, shape, **options)

    indices, others = draw(), draw()
    permutation(indices, experts)  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [permutation(indices, experts) for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = REFERENCE["permutation"](indices.cpu(), experts)
    for run in runs:
        assert all(torch.equal(value.cpu(), want) for value, want in zip(run, wanted, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = permutation(indices, experts)
    indices.copy_(others)
    graph.replay()
    wanted = REFERENCE["permutation"](others.cpu(), experts)
    assert all(torch.equal(value.cpu(), want) for value, want in zip(captured, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_two_to_the_31_elements_on_gpu():
    """Rows turned round: where offsets of 32 bits would wrap, and the first row is the last."""
    columns = 7168
    many = (1 << 31) // columns + 1000
    if torch.cuda.mem_get_info()[0] < 6 * many * columns * 2:
        pytest.skip(f"needs {6 * many * columns * 2 >> 30} GiB of free GPU memory")
    x = torch.zeros(many, columns, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([0, 1, many // 2, many - 2, many - 1], device="cuda")
    x[ends] = torch.randn(5, columns, device="cuda").bfloat16()
    row_of = torch.arange(many - 1, -1, -1, dtype=torch.int32, device="cuda").unsqueeze(1)
    probs = torch.full((many, 1), 0.5, device="cuda")
    rows = permute(x, row_of, many)
    assert torch.equal(rows[many - 1 - ends], x[ends])
    assert torch.equal(unpermute(rows, row_of, probs)[ends], x[ends] / 2)
    dy, dprobs = torch.ops.fastmp.unpermute_backward(x, rows, row_of, probs)
    assert torch.equal(dy[many - 1 - ends], x[ends] / 2)
    torch.testing.assert_close(dprobs[ends, 0], x[ends].float().square().sum(1))
