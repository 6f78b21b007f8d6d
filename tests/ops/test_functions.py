"""Properties of every public function of fastmp.ops, whose plain-torch meaning is the truth.

A failure's seed is in the test's id or in hypothesis's output.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import random
from collections.abc import Callable
from itertools import compress

import pytest
import torch
from dispatch_modes import NoDeviceWaits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import scale_of
from marks import full
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

import fastmp.ops
from fastmp.testing.functions import Draw, as_tuple, converted, evaluate, functions, gradients_for, leaves
from fastmp.testing.ops import poisoned_memory

FUNCTIONS = functions()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EVERY = pytest.mark.parametrize("name", sorted(FUNCTIONS))
# share most of their code with one that is quick
SISTERS = {"geglu", "layer_norm", "rope_qk", "linear_log_probs", "linear_topk_distillation", "clamped_swiglu"}
EVERY_FAMILY = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in SISTERS else ()) for name in sorted(FUNCTIONS)],
)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
# Public, but with tests of their own: what has no tensors, no gradient or no kernel, or is part of another.
TESTED_ELSEWHERE = {
    "RouterOutput", "adamw_", "apply_capacity", "backends", "block_rows",
    "cross_entropy_from_stats",
    "dequantize_rows", "first_not_finite", "grouped_mlp_in_fp8", "grouped_mm_choice", "grouped_mm_fp8",
    "linear_fp8", "permutation", "quantize_rows", "quantize_weight", "rope_cos_sin", "warm_up",
}  # fmt: skip


def test_every_public_function_is_drawn():
    assert set(fastmp.ops.__all__) == FUNCTIONS.keys() | TESTED_ELSEWHERE


def drawn(name: str, source: random.Random, dtype: torch.dtype = torch.float64, **options):
    return FUNCTIONS[name].draw(Draw(source, dtype, **options))


def agree(name: str, positional: tuple, keywords: dict, dtype: torch.dtype) -> None:
    """Outputs and gradients are those of plain torch in float64, NaN and infinities in the same places."""
    function = FUNCTIONS[name]
    with poisoned_memory():
        ours = evaluate(function.call, positional, keywords)
    truth = evaluate(function.eager, *converted((positional, keywords), torch.float64))
    assert [t.shape for t in ours] == [t.shape for t in truth]
    largest = torch.finfo(dtype).max
    for value, want in zip(ours, truth, strict=True):
        assert not value.requires_grad
        value, want = value.double(), want.double()
        bounded = want.abs() < largest / 4  # close to the largest number rounding decides what overflows
        close = torch.isclose(value, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale_of(want))
        same = value.isnan() == want.isnan()
        assert (close | ~bounded).all() and same.all(), (name, dtype, value[~close][:4], want[~close][:4])


@EVERY
@pytest.mark.parametrize("seed", range(8))
def test_equals_plain_torch_in_float64(name, seed):
    agree(name, *drawn(name, random.Random(seed)), torch.float64)


class HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2; `uordblks` is the bytes in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later")
@EVERY
def test_calls_leave_no_memory_behind(name):
    """The least that is left of some windows of calls: what is kept once is not a leak."""
    heap = ctypes.CDLL(None)
    heap.mallinfo2.restype = HeapInfo
    positional, keywords = drawn(name, random.Random(0), torch.float32)
    left = []
    gc.freeze()  # for good, as after the collection of tests: collecting looks at nothing that is older
    for _ in range(8):
        before = heap.mallinfo2().uordblks
        for _ in range(50):
            evaluate(FUNCTIONS[name].call, positional, keywords)
        gc.collect()
        left.append((heap.mallinfo2().uordblks - before) / 50)
    assert min(left[1:]) < 8, f"bytes a call: {left}"


def fuzz(name: str, examples: int, dtypes, record, **options) -> None:
    draws = 0

    @settings(max_examples=examples)
    @given(source=st.randoms(use_true_random=False), dtype=st.sampled_from(dtypes))
    def case(source, dtype):
        nonlocal draws
        agree(name, *drawn(name, source, dtype, special=dtype == torch.float64, **options), dtype)
        draws += 1

    case()
    record("draws", draws)


LONGER = [pytest.param(200, marks=pytest.mark.full), pytest.param(2000, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("examples", [30, *LONGER])
@EVERY
def test_fuzz(name, examples, record_property):
    fuzz(name, examples, DTYPES, record_property)


LONGER_INTERPRETED = [
    pytest.param(10, marks=pytest.mark.full),
    pytest.param(60, marks=pytest.mark.exhaustive),
]
INTERPRETED = (torch.float32, torch.float16)  # the interpreter does not round bfloat16 to nearest


@pytest.mark.interpret
@pytest.mark.parametrize("examples", [2, *LONGER_INTERPRETED])
@EVERY_FAMILY
def test_fuzz_interpreted(name, examples, record_property):
    if not FUNCTIONS[name].interpret:
        pytest.skip(f"{name} cannot be interpreted")
    fuzz(name, examples, INTERPRETED, record_property, small=True)


@EVERY
@pytest.mark.parametrize("seed", range(3))
def test_gradcheck(name, seed):
    positional, keywords = drawn(name, random.Random(seed), small=True)
    inputs = leaves((positional, keywords))
    if sum(leaf.numel() for leaf in inputs) > 400:
        inputs = [leaf for leaf in inputs if leaf.numel() <= 400] or inputs[:1]
    places = {id(leaf): number for number, leaf in enumerate(inputs)}

    def call(*given):
        def put(value):
            if isinstance(value, torch.Tensor):
                return given[places[id(value)]] if id(value) in places else value.detach()
            return value

        out = FUNCTIONS[name].call(*map(put, positional), **{k: put(v) for k, v in keywords.items()})
        return tuple(o for o in as_tuple(out) if o.requires_grad)

    if any(out.numel() for out in call(*inputs)):
        torch.autograd.gradcheck(call, inputs, fast_mode=True)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, *full([torch.float32, torch.float16])], ids=str)
def test_error_is_that_of_plain_torch(name, dtype):
    """Root-mean-square error against float64, over 100,000 elements: at most 1.1 times plain torch's."""
    positional, keywords = drawn(name, random.Random(0), dtype, large=True)
    wide = converted((positional, keywords), torch.float64)
    function = FUNCTIONS[name]
    truth = evaluate(function.eager, *wide)
    ours, theirs = (evaluate(f, positional, keywords) for f in (function.call, function.eager))
    assert sum(t.numel() for t in truth) >= 100_000, f"samples of {name}: with draw.large, draw more elements"
    # One rounding to 16 bits costs a fifth of eps; in float32 approximations are granted two.
    floor = torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 1 / 8)
    for value, peer, want in zip(ours, theirs, truth, strict=True):
        scale = want.double().norm().item() or 1.0
        error, yardstick = ((t.double() - want).norm().item() / scale for t in (value, peer))
        assert error <= max(1.1 * yardstick, floor), (error, yardstick)


@EVERY
def test_compiles_to_one_graph(name):
    positional, keywords = drawn(name, random.Random(1), torch.float32, large=True)
    function = FUNCTIONS[name]
    torch.compiler.reset()
    compiled = torch.compile(function.call, fullgraph=True, backend="aot_eager")
    eager = evaluate(function.call, positional, keywords)
    for value, want in zip(evaluate(compiled, positional, keywords), eager, strict=True):
        assert torch.equal(value, want)


def with_rows(name: str, rows: int) -> tuple[tuple, dict]:
    """The same case with another number of rows."""
    return drawn(name, random.Random(1), torch.float32, rows=rows)


# gates, grouped GEMMs, indices and a reduced loss: quick to compile
UNKNOWN = ("bias_gelu", "grouped_mm", "permute", "cross_entropy")


@EVERY_FAMILY
def test_compiles_twice_for_any_number_of_rows(name):
    """Once for the first number, once for all others: forward and backward."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name].call, fullgraph=True, backend=counter)
    for rows in (24, 17, 32, 33, 40, 48, 5, 63, 64):
        evaluate(compiled, *with_rows(name, rows))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", [*UNKNOWN, *full(sorted(FUNCTIONS.keys() - {*UNKNOWN}))])
def test_compiles_with_sizes_unknown(name):
    """From the first call on, numbers among the options included."""
    torch.compiler.reset()
    call = FUNCTIONS[name].call
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (24, 17):
        arguments = with_rows(name, rows)
        for value, want in zip(evaluate(compiled, *arguments), evaluate(call, *arguments), strict=True):
            assert torch.equal(value, want)


@EVERY
def test_exports_for_any_number_of_rows(name):
    class Module(torch.nn.Module):
        """The function of the tensors among its arguments; the others are constants."""

        def forward(self, tensors):
            given = [tensors.get(f"_{i}", value) for i, value in enumerate(positional)]
            named = {key: tensors.get(key, value) for key, value in keywords.items()}
            return FUNCTIONS[name].call(*given, **named)

    def tensors(rows: int) -> dict[str, torch.Tensor]:
        positional, keywords = with_rows(name, rows)
        given = {f"_{i}": value for i, value in enumerate(positional)} | keywords
        return {k: v.detach() for k, v in given.items() if isinstance(v, torch.Tensor)}

    positional, keywords = with_rows(name, 24)
    other = tensors(17)
    dynamic = {
        key: {dim: Dim.DYNAMIC for dim in range(t.dim()) if t.shape[dim] != other[key].shape[dim]}
        for key, t in tensors(24).items()
    }
    exported = torch.export.export(Module(), (tensors(24),), dynamic_shapes=(dynamic,))
    for value, want in zip(as_tuple(exported.module()(other)), as_tuple(Module()(other)), strict=True):
        assert torch.equal(value, want)


@EVERY
def test_gradients_by_torch_func(name):
    """torch.func.grad gives what autograd does."""
    positional, keywords = drawn(name, random.Random(1), torch.float64, large=True)
    inputs = leaves((positional, keywords))
    _, *rest = evaluate(FUNCTIONS[name].call, positional, keywords)
    want = rest[-len(inputs) :]
    product = weighted_sum(name, positional, keywords, inputs)
    found = torch.func.grad(product)([leaf.detach() for leaf in inputs])
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def weighted_sum(name, positional, keywords, inputs):
    """Return a function from values of the leaves to the sum of the outputs times fixed numbers."""

    def product(values: list[torch.Tensor]) -> torch.Tensor:
        given = {id(leaf): value for leaf, value in zip(inputs, values, strict=True)}
        put = lambda value: given.get(id(value), value)  # noqa: E731
        outputs = as_tuple(
            FUNCTIONS[name].call(*map(put, positional), **{key: put(v) for key, v in keywords.items()})
        )
        differentiable = [out for out in outputs if out.requires_grad]
        grads = gradients_for(differentiable)
        return sum((out * grad).sum() for out, grad in zip(differentiable, grads, strict=True))

    return product


# of which, with the options drawn, the backward passes write in place
WITHOUT_VMAP = {
    "linear_cross_entropy": "cross_entropy_grad_",
    "linear_distillation": "distillation_grad_",
    "linear_log_probs": "log_probs_grad_",
    "linear_topk_distillation": "log_probs_grad_",
}


@EVERY
def test_gradients_of_samples_by_vmap(name):
    """torch.func.vmap of torch.func.grad gives the gradients of one sample after the other, or one error."""
    positional, keywords = drawn(name, random.Random(1), torch.float64)
    inputs = leaves((positional, keywords))
    gradients = torch.func.grad(weighted_sum(name, positional, keywords, inputs))
    samples = [torch.stack([leaf.detach(), leaf.detach() * 0.75]) for leaf in inputs]
    if name in WITHOUT_VMAP:
        with pytest.raises(RuntimeError, match=f"^{WITHOUT_VMAP[name]}: torch.func.vmap does not support"):
            torch.func.vmap(gradients, randomness="same")(samples)
        return
    wanted = zip(*(gradients([each[i] for each in samples]) for i in range(2)), strict=True)
    for found, want in zip(torch.func.vmap(gradients, randomness="same")(samples), wanted, strict=True):
        torch.testing.assert_close(found, torch.stack(want), rtol=1e-10, atol=1e-12)


@EVERY
def test_autocast(name):
    """float32 arguments under bfloat16 autocast run, and gradients come back in float32."""
    positional, keywords = drawn(name, random.Random(2), torch.float32, large=True)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = as_tuple(FUNCTIONS[name].call(*positional, **keywords))
    different = [out for out in outputs if out.requires_grad]
    inputs = leaves((positional, keywords))
    grads = torch.autograd.grad(different, inputs, gradients_for(different), allow_unused=True)
    assert all(grad is None or grad.dtype == torch.float32 for grad in grads)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        exact = as_tuple(FUNCTIONS[name].call(*positional, **keywords))
    for value, want in zip(outputs, exact, strict=True):
        error = (value.double() - want.double()).norm() / want.double().norm()
        assert error < 2e-2


@EVERY
def test_never_waits_for_the_device(name):
    positional, keywords = drawn(name, random.Random(3), torch.float32, large=True)

    mode = FakeTensorMode()

    def fake(value):
        if not isinstance(value, torch.Tensor):
            return value
        return mode.from_tensor(value.detach().to("meta")).requires_grad_(value.requires_grad)

    meta, named = [fake(v) for v in positional], {k: fake(v) for k, v in keywords.items()}
    with mode, NoDeviceWaits():
        outputs = [out for out in as_tuple(FUNCTIONS[name].call(*meta, **named)) if out.requires_grad]
        torch.autograd.grad(outputs, leaves((meta, named)), [torch.empty_like(o) for o in outputs])


@EVERY
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_repeats_bitwise_and_leaves_its_inputs_alone(name, dtype):
    positional, keywords = drawn(name, random.Random(4), dtype, large=True)
    before = copy.deepcopy((positional, keywords))
    first, second = (evaluate(FUNCTIONS[name].call, positional, keywords) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for now, then in zip(leaves((positional, keywords)), leaves(before), strict=True):
        assert torch.equal(now, then)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the numbers of `tensor` two elements apart, or its first index in the place of all others."""
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape) if tensor.dim() > 1 else tensor
    return torch.stack((tensor, tensor), -1)[..., 0]


@EVERY
@pytest.mark.parametrize("layout", ("every second", "expanded"))
def test_strides_change_nothing(name, layout):
    """Arguments and gradients that are strided, or share memory, give what contiguous copies give."""
    with_strides = drawn(name, random.Random(8), rows=17)
    inputs = leaves(with_strides)
    strided = {id(leaf): laid_out(leaf.detach(), layout) for leaf in inputs}

    def results(own: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        def put(value):
            return own(strided[id(value)]).requires_grad_() if id(value) in strided else value

        positional, keywords = with_strides
        positional, keywords = [put(v) for v in positional], {k: put(v) for k, v in keywords.items()}
        outputs = as_tuple(FUNCTIONS[name].call(*positional, **keywords))
        trained = [out for out in outputs if out.requires_grad]
        upstream = [own(laid_out(grad, layout)) for grad in gradients_for(trained)]
        return [*outputs, *torch.autograd.grad(trained, leaves((positional, keywords)), upstream)]

    found, wanted = results(lambda t: t.detach()), results(torch.Tensor.contiguous)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@EVERY
def test_frozen_arguments(name):
    """The gradient of one argument alone is the same as beside those of the others."""
    for seed in range(4):
        positional, keywords = drawn(name, random.Random(seed))
        inputs = leaves((positional, keywords))
        upstream = gradients_for(as_tuple(FUNCTIONS[name].call(*positional, **keywords)))

        def gradients(wanted: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            outputs = as_tuple(FUNCTIONS[name].call(*positional, **keywords))  # noqa: B023
            trained = [out.requires_grad for out in outputs]
            return torch.autograd.grad(
                [*compress(outputs, trained)],
                wanted,
                [*compress(upstream, trained)],  # noqa: B023
                materialize_grads=True,
            )

        together = gradients(inputs)
        for leaf, want in zip(inputs, together, strict=True):
            for other in inputs:
                other.requires_grad_(other is leaf)
            torch.testing.assert_close(gradients([leaf]), (want,), rtol=1e-11, atol=1e-11)


LINEAR = {"permute", "rope", "rope_qk"}  # differentiated any number of times, which their own tests check


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - LINEAR))
def test_second_derivative_raises(name):
    positional, keywords = drawn(name, random.Random(1), rows=17)
    outputs = [out for out in as_tuple(FUNCTIONS[name].call(*positional, **keywords)) if out.requires_grad]
    upstream = [grad.requires_grad_() for grad in gradients_for(outputs)]
    with pytest.raises(RuntimeError, match=r"(not differentiable|no derivative) \(.*create_graph=True"):
        grads = torch.autograd.grad(outputs, leaves((positional, keywords)), upstream, create_graph=True)
        torch.autograd.grad(sum(grad.sum() for grad in grads if grad.requires_grad), upstream)


@EVERY
def test_autograd_keeps_no_copies(name):
    """Arguments, results and a few numbers a row are saved for backward."""
    positional, keywords = drawn(name, random.Random(1), torch.float32, large=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = as_tuple(FUNCTIONS[name].call(*positional, **keywords))
    given = (*positional, *keywords.values(), *outputs)
    known = {value.untyped_storage().data_ptr() for value in given if isinstance(value, torch.Tensor)}
    others = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    kept = 1031 * 128 if name == "grouped_mlp_in" else 0  # what the activation is computed from
    assert sum(t.numel() for t in others) <= kept + 4 * 2048, [tuple(t.shape) for t in others]


@EVERY
def test_is_a_range_in_the_profiler(name):
    positional, keywords = drawn(name, random.Random(5), torch.float32, large=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        evaluate(FUNCTIONS[name].call, positional, keywords)
    ranges = {event.key for event in profile.key_averages()}
    assert f"fastmp.{name}" in ranges
    assert any(key.startswith("fastmp.") and key.endswith("_backward") for key in ranges)


@EVERY
def test_numbers_that_are_not_finite_are_refused(name):
    """In the dtype of arithmetic, by an error that names the argument."""
    call = FUNCTIONS[name].call
    numbers = [n for n, p in inspect.signature(call).parameters.items() if "float" in str(p.annotation)]
    positional, keywords = drawn(name, random.Random(3), torch.float32, large=True)
    for number in numbers:
        for value in (float("nan"), float("inf"), 1e308):
            given = inspect.signature(call).bind_partial(*positional, **keywords)
            given.arguments[number] = value
            with pytest.raises(ValueError, match=number):
                call(*given.args, **given.kwargs)
