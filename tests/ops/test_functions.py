"""What holds for every public function of fastmp.ops: its plain-torch meaning is the truth.

A failure's seed is in the test's id or in hypothesis's output.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.testing.functions import Draw, as_tuple, converted, evaluate, functions, gradients_for, leaves
from fastmp.testing.ops import poisoned_memory

FUNCTIONS = functions()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EVERY = pytest.mark.parametrize("name", sorted(FUNCTIONS))
full = lambda *values: [pytest.param(value, marks=pytest.mark.full) for value in values]  # noqa: E731
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


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


def scale_of(values: torch.Tensor) -> float:
    """The magnitude that an absolute error is held against: sums of many terms cancel."""
    finite = values[values.isfinite()]
    return max(1.0, finite.abs().max().item()) if len(finite) else 1.0


@EVERY
@pytest.mark.parametrize("seed", range(8))
def test_equals_plain_torch_in_float64(name, seed):
    agree(name, *drawn(name, random.Random(seed)), torch.float64)


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
@pytest.mark.parametrize("examples", [5, *LONGER_INTERPRETED])
@EVERY
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, *full(torch.float32, torch.float16)], ids=str)
def test_error_is_that_of_plain_torch(name, dtype):
    """Root-mean-square error against float64, over 100,000 elements: at most 1.1 times plain torch's."""
    positional, keywords = drawn(name, random.Random(0), dtype, large=True)
    wide = converted((positional, keywords), torch.float64)
    function = FUNCTIONS[name]
    truth = evaluate(function.eager, *wide)
    ours, theirs = (evaluate(f, positional, keywords) for f in (function.call, function.eager))
    assert sum(t.numel() for t in truth) >= 100_000
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


class NoCopiesBetweenDevices(TorchDispatchMode):
    """On meta tensors, what would make the host wait for a GPU is a copy to another device or a read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device")
            assert device is None or torch.device(device) == args[0].device, "a copy to another device"
        assert func is not torch.ops.aten._local_scalar_dense.default, "the value of a tensor is read"
        return func(*args, **(kwargs or {}))


@EVERY
def test_never_waits_for_the_device(name):
    positional, keywords = drawn(name, random.Random(3), torch.float32, large=True)

    mode = FakeTensorMode()

    def fake(value):
        if not isinstance(value, torch.Tensor):
            return value
        return mode.from_tensor(value.detach().to("meta")).requires_grad_(value.requires_grad)

    meta, named = [fake(v) for v in positional], {k: fake(v) for k, v in keywords.items()}
    with mode, NoCopiesBetweenDevices():
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


@EVERY
def test_is_a_range_in_the_profiler(name):
    positional, keywords = drawn(name, random.Random(5), torch.float32, large=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        evaluate(FUNCTIONS[name].call, positional, keywords)
    ranges = {event.key for event in profile.key_averages()}
    assert f"fastmp.{name}" in ranges
    assert any(key.startswith("fastmp.") and key.endswith("_backward") for key in ranges)
