"""adamw_ on the CPU: values against torch.optim.AdamW, dropped steps, scalars as tensors, slices, errors."""

from __future__ import annotations

import ctypes
import decimal
import math
from functools import partial

import every_op_tools
import pytest
import torch
from cpp_tools import compiled, pointers, runnable
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import DTYPES, ON_CPU, TRITON, threads_agree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from fastmp.ops import OPS, adamw_
from fastmp.ops import adamw as module
from fastmp.testing.ops import run
from fastmp.testing.samples.optimizer_steps import adamw_arguments

ON_ALL = pytest.mark.parametrize("backend", ["c++", "reference", TRITON])
implementation = partial(every_op_tools.implementation, "adamw_")


def drawn(num_elements, dtype=torch.float32, seed=0, **options):
    return adamw_arguments(num_elements, dtype, torch.Generator().manual_seed(seed), **options)


class Torch:
    """torch.optim.AdamW on the parameters of a flat buffer: those that are decayed, and the others."""

    def __init__(self, param, num_decayed, *, betas, eps, weight_decay, **options):
        self.parts = [param[:num_decayed].clone(), param[num_decayed:].clone()]
        groups = [{"params": [p], "weight_decay": w} for p, w in zip(self.parts, (weight_decay, 0.0))]
        self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, **options)

    def load(self, exp_avg, exp_avg_sq, step):
        for part, m, v in zip(self.parts, self._split(exp_avg), self._split(exp_avg_sq)):
            count = torch.tensor(float(step))
            self.optimizer.state[part] = {"step": count, "exp_avg": m.clone(), "exp_avg_sq": v.clone()}

    def _split(self, tensor):
        return tensor.split([len(part) for part in self.parts])

    def step(self, grad, lr):
        for part, piece in zip(self.parts, self._split(grad)):
            part.grad = piece.to(part.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def results(self):
        states = [self.optimizer.state[part] for part in self.parts]
        averages = [torch.cat([state[key] for state in states]) for key in ("exp_avg", "exp_avg_sq")]
        return torch.cat(self.parts), *averages


NUMBERS = {"betas": (0.9, 0.95), "eps": 1e-8}
OPTIONS = {**NUMBERS, "weight_decay": 0.1}


def decayed_up_to(end, num_elements, dtype=torch.float64):
    """A table of two groups: the elements before `end`, and those from there on, which are not decayed."""
    first = 640 - end % 64
    units = torch.arange(-(-(first % 64 + num_elements) // 64))
    groups = (units >= (first % 64 + end) // 64).byte()
    return groups, torch.ones(2, dtype=dtype), torch.tensor([0.1, 0.0], dtype=dtype), first


def named(table):
    return dict(zip(("groups", "group_lr", "group_decay", "first"), table, strict=True))


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "plain"))
@pytest.mark.parametrize("num_decayed", (0, 7, 1031))
def test_steps_equal_torch_in_float64(num_decayed, fused):
    param = torch.randn(1031, dtype=torch.float64)
    theirs = Torch(param, num_decayed, **OPTIONS, fused=fused)
    m, v, step = torch.zeros_like(param), torch.zeros_like(param), torch.tensor(0)
    for t in range(20):
        grad, lr = torch.randn(1031, dtype=torch.float64) * 10.0 ** (t % 5 - 2), 1e-2 / (t + 1)
        adamw_(param, grad, m, v, step, lr=lr, **named(decayed_up_to(num_decayed, 1031)), **NUMBERS)
        theirs.step(grad, lr)
    for ours, expected in zip((param, m, v), theirs.results()):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert step == 20


@ON_CPU
@pytest.mark.parametrize("grad_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_no_less_accurate_than_torch(grad_dtype, backend):
    """Root mean square error against float64 over 1e5 elements, at most 1.1 times torch's (whose kernel has
    fused multiply-adds, which the reference has not)."""
    inputs = drawn(100_000, torch.float32, steps=50)
    param, grad, m, v = inputs[:4]
    grad = grad.to(grad_dtype)
    results = {}
    for dtype in (torch.float64, torch.float32):
        torch_s = Torch(param.to(dtype), 60_000, **OPTIONS, fused=True)
        torch_s.load(m.to(dtype), v.to(dtype), 50)
        torch_s.step(grad, 2e-3)
        results[dtype] = torch_s.results()
    arguments_ = (param, grad, *inputs[2:15], *decayed_up_to(60_000, 100_000), None, 0)
    ours = run("adamw_", implementation(backend), arguments_)[:3]
    for value, theirs, truth in zip(ours, results[torch.float32], results[torch.float64]):
        error, bound = ((x.double() - truth).square().mean().sqrt() for x in (value, theirs))
        assert error <= (1.1 if backend == "c++" else 1.3) * bound


def plain(param, grad, m, v, step, out, lr_tensor, inv_scale, clip, found_inf, *numbers):
    """The formula of the docstring, in float64."""
    lr, beta1, beta2, eps, decay, groups, group_lr, group_decay, first = numbers[:9]
    if found_inf is not None and found_inf:
        return param, m, v, step
    lr = lr if lr_tensor is None else lr_tensor.item()
    g = grad.double() * (1 if inv_scale is None else inv_scale.item()) * (1 if clip is None else clip.item())
    t = step.item() + 1
    m, v = beta1 * m.double() + (1 - beta1) * g, beta2 * v.double() + (1 - beta2) * g * g
    if groups is not None:
        group = [groups[(first % 64 + i) // 64].item() for i in range(len(param))]
        lr, decay = lr * group_lr[group].double(), group_decay[group].double()
    root = (v / (1 - beta2**t)).sqrt()
    return param * (1 - lr * decay) - lr / (1 - beta1**t) * m / (root + eps), m, v, torch.tensor(t)


@ON_CPU
@settings(max_examples=100)
@given(
    num_elements=st.sampled_from((0, 1, 2, 3, 15, 16, 17, 31, 64, 257, 1031)),
    dtype=st.sampled_from(DTYPES),
    steps=st.sampled_from((0, 1, 10, 100_000)),
    first=st.sampled_from((None, 0, 1, 64, 127, (1 << 40) + 6)),
    scalars=st.booleans(),
    found_inf=st.sampled_from((None, False, True)),
    seed=st.integers(0, 1000),
)
def test_any_size_and_option(backend, num_elements, dtype, steps, first, scalars, found_inf, seed):
    inputs = drawn(num_elements, dtype, seed, steps=steps, first=first, scalars=scalars, found_inf=found_inf)
    param, m, v, step, *out = run("adamw_", implementation(backend), inputs)
    expected = plain(*inputs)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    for value, want in zip((param, m, v), expected):
        torch.testing.assert_close(value.double(), want.double(), rtol=tolerance, atol=tolerance / 10)
    assert step == expected[3]
    for copy in out if not found_inf else ():
        assert torch.equal(copy, param.to(copy.dtype))


@ON_ALL
@pytest.mark.parametrize(
    "flag",
    [torch.tensor(True), torch.tensor(1.0), torch.tensor(math.nan), torch.tensor([2.0]), torch.tensor(-1)],
    ids=str,
)
def test_a_dropped_step_changes_nothing(flag, backend):
    inputs = drawn(5000, torch.bfloat16, steps=3, scalars=True)
    inputs[1][::7], inputs[1][1::7] = torch.nan, torch.inf
    inputs[0][5], inputs[2][6], inputs[5][7] = torch.nan, -0.0, torch.inf
    results = run("adamw_", implementation(backend), (*inputs[:9], flag, *inputs[10:]))
    for value, before in zip(results, (inputs[0], *inputs[2:6])):
        assert torch.equal(value.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))


@ON_ALL
def test_dropped_steps_do_not_count(backend):
    """Steps 2 and 4 of six are dropped: the rest goes on as if they had never been."""
    inputs = drawn(5000, torch.float64, found_inf=False)
    other = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in inputs)
    grads = torch.randn(6, 5000, dtype=torch.float64)
    for t, grad in enumerate(grads):
        dropped = t in (2, 4)
        implementation(backend)(inputs[0], grad, *inputs[2:9], torch.tensor(dropped), *inputs[10:])
        if not dropped:
            implementation(backend)(other[0], grad, *other[2:])
        assert torch.equal(inputs[0], other[0]) and inputs[4] == other[4]
    assert inputs[4] == 4


@ON_ALL
def test_scalars_on_the_device_are_those_given_as_numbers(backend):
    inputs = list(drawn(300, torch.float64, steps=4))
    scaled = list(drawn(300, torch.float64, steps=4))
    scaled[1] = inputs[1] / (0.25 * 0.6)
    rate, scale, clip = (torch.tensor(x, dtype=torch.float64) for x in (inputs[10], 0.25, [0.6]))
    scaled[6:9] = rate, scale.float(), clip
    scaled[10] = 0.0
    left, right = (run("adamw_", implementation(backend), tuple(a)) for a in (inputs, scaled))
    for a, b in zip(left, right):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_are_updated_as_in_the_whole(dtype):
    """Ranks that share the work may cut anywhere, on no boundary of 16 bytes."""
    inputs = drawn(2000, dtype, steps=2, first=75)
    whole = run("adamw_", OPS["adamw_"].overload, inputs)
    groups, group_lr, group_decay, first = inputs[15:19]
    for begin, end in ((0, 3), (3, 500), (500, 777), (777, 2000)):
        buffers = [a if a is None else a[begin:end] for a in (*inputs[:4], inputs[5])]
        count = inputs[4].clone()
        adamw_(
            *buffers[:4], count, low_precision_out=buffers[4], lr=inputs[10],
            groups=groups[(first + begin) // 64 - first // 64 :], group_lr=group_lr, group_decay=group_decay,
            first=first + begin, **NUMBERS,
        )  # fmt: skip
        assert count == 3
    for value, want in zip((inputs[0], inputs[2], inputs[3]), whole):
        assert torch.equal(value, want)
    if inputs[5] is not None:
        assert torch.equal(inputs[5], whole[4])


@ON_CPU
def test_results_do_not_depend_on_the_number_of_threads(backend):
    inputs = drawn(200_003, torch.bfloat16, steps=1, first=31)
    assert threads_agree(lambda: run("adamw_", implementation(backend), inputs))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@ON_ALL
def test_special_gradients_go_where_torch_sends_them(backend):
    inputs = drawn(8, torch.float32)
    inputs[1].copy_(torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, 3e38, -1e20]))
    theirs = Torch(inputs[0], 8, **OPTIONS, fused=True)
    theirs.step(inputs[1], inputs[10])
    results = run("adamw_", implementation(backend), inputs)
    for value, want in zip(results, theirs.results()):
        torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-9, equal_nan=True)


@ON_CPU
@pytest.mark.parametrize("beta", (0.0, 0.5, 0.999, 0.9999999))
@pytest.mark.parametrize("steps", (0, 9))
def test_bias_correction_does_not_cancel(beta, steps, backend):
    """The update of a single element from m = v = 0, g = 1 is known exactly, also for beta next to one."""
    context = decimal.Context(prec=50)
    exact = context.create_decimal_from_float(beta)
    correction = context.subtract(1, context.power(exact, steps + 1))
    ratio = float(context.divide(context.subtract(1, exact), correction))  # of both m and v
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    numbers = 1.0, beta, beta, 0.0, 0.0
    inputs = (zero, one, zero, zero, torch.tensor(steps), *[None] * 5, *numbers, *[None] * 3, 0, None, 0)
    param = run("adamw_", implementation(backend), inputs)[0]
    # 1 - beta itself has a rounding error of 2^-53
    assert param.item() == pytest.approx(-ratio / math.sqrt(ratio), rel=2e-16 / (1 - beta) + 1e-14)


KERNEL = """
#include "cpu/adamw.cpp"
namespace fastmp::FASTMP_ISA {
template <class T, class G, class O>
void step(T* p, const G* g, T* m, T* v, O* out, int64_t n) {
  AdamwSpan span{p, g, m, v, out, nullptr, 1, n};
  span.factor = 0.5, span.weight1 = 0.1, span.beta2 = 0.95, span.decay = 0.9, span.step_size = 1e-2;
  span.inv_root = 2.0, span.eps = 1e-8;
  update<T, G, T, O>(span);
}
extern "C" void wide(double* p, const double* g, double* m, double* v, int64_t n) {
  step<double, double, void>(p, g, m, v, nullptr, n);
}
extern "C" void narrow(float* p, const BFloat16* g, float* m, float* v, Half* out, int64_t n) {
  step(p, g, m, v, out, n);
}
}  // namespace fastmp::FASTMP_ISA
"""


@pytest.mark.full
def test_instruction_sets_agree(tmp_path):
    """The kernels of the sets that this machine would not choose; the first element is not theirs."""
    libraries = compiled(tmp_path, KERNEL, runnable()[:2])
    for n in (1, 2, 8, 18, 1009):
        for name, dtype, tolerance in (("wide", torch.float64, 1e-14), ("narrow", torch.bfloat16, 1e-6)):
            p, g, m, v = drawn(n, dtype, steps=1)[:4]
            expected_m = m + 0.1 * (g * 0.5 - m)
            expected_v = 0.95 * v + 0.05 * (g.to(m.dtype) * 0.5).square()
            expected = p * 0.9 - 1e-2 * expected_m / (expected_v.sqrt() * 2.0 + 1e-8)
            for isa, library in libraries.items():
                mine = [t.clone() for t in (p, m, v)]
                out = [torch.full((n,), math.nan, dtype=torch.float16)] if name == "narrow" else []
                getattr(library, name)(*pointers(mine[0], g, *mine[1:], *out), ctypes.c_int64(n))
                for value, want in zip(mine, (expected, expected_m, expected_v)):
                    close = {"rtol": tolerance, "atol": tolerance, "msg": f"{isa} {name} {n}"}
                    torch.testing.assert_close(value[1:], want[1:], **close)
                assert mine[0][0] == p[0] and all(t[0].isnan() for t in out)
                assert all(torch.equal(t[1:], mine[0][1:].half()) for t in out)


def test_writes_are_seen_by_autograd():
    inputs = drawn(6, torch.bfloat16)
    before = [inputs[i]._version for i in (0, 2, 3, 4, 5)]
    adamw_(*inputs[:5], low_precision_out=inputs[5])
    assert all(inputs[i]._version > b for i, b in zip((0, 2, 3, 4, 5), before))
    leaf = torch.nn.Parameter(inputs[0])
    loss = leaf.square().sum()
    adamw_(leaf, *inputs[1:5])  # a parameter that requires a gradient
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiles_as_one_graph():
    def step(*tensors):
        adamw_(*tensors[:5], low_precision_out=tensors[5], lr=tensors[6], found_inf=tensors[7], **OPTIONS)
        return tensors[0] * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = []
    for function in (step, compiled):
        inputs = drawn(50, torch.bfloat16, steps=1, scalars=True, found_inf=False)
        tensors = (*inputs[:7], inputs[9])
        results.append((function(*tensors), *tensors))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_never_waits_for_the_device():
    inputs = drawn(50, torch.bfloat16, scalars=True, found_inf=False)
    mode = FakeTensorMode()
    meta = [mode.from_tensor(a.to("meta")) if isinstance(a, torch.Tensor) else a for a in inputs]
    with mode:
        for backend in ("c++", "reference"):
            assert implementation(backend)(*meta) is None


def test_is_a_range_for_profilers():
    inputs = drawn(4)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        adamw_(*inputs[:5])
    assert [e.name for e in seen.events() if e.name.startswith("fastmp.")] == ["fastmp.adamw_"]


def test_cost_formulas():
    narrow, wide = drawn(48, torch.bfloat16), drawn(48, torch.float32)
    op = OPS["adamw_"]
    assert op.traffic(*wide) == 48 * 28 + 16  # the step is read and written, too
    assert op.traffic(*narrow) == 48 * 28 + 16  # a 16-bit gradient, and a 16-bit copy
    assert op.flops(*wide) == 48 * 15


def test_block_sizes():
    for itemsize in (4, 8):
        assert module.block_size(itemsize) * itemsize == 4 * 32 * module.NUM_WARPS * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"param": torch.zeros(4).bfloat16()}, r"param must be float32 or float64, or .* got torch.bfloat16"),
        ({"grad": torch.zeros(4).double()}, r"param is torch.float32 but grad is torch.float64"),
        ({"grad": torch.zeros(5)}, r"expected grad of .* for param of shape \(4,\), got \(5,\)"),
        ({"grad": torch.zeros(4, 2)[:, 0]}, r"grad must be contiguous, got strides \(2,\)"),
        ({"exp_avg": torch.zeros(4).double()}, r"param is torch.float32 but exp_avg is torch.float64"),
        ({"exp_avg_sq": torch.zeros(4, device="meta")}, r"exp_avg is on cpu but exp_avg_sq is on meta"),
        ({"step": torch.tensor(0.0)}, r"step must be int64, got torch.float32"),
        ({"step": torch.zeros(2, dtype=torch.int64)}, r"step must hold one number, got shape \(2,\)"),
        ({"low_precision_out": torch.zeros(4)}, r"low_precision_out is torch.float32"),
        ({"inv_scale": torch.tensor(1)}, r"inv_scale must be float32 or float64, got torch.int64"),
        ({"clip_coefficient": torch.ones((), device="meta")}, r"cpu but clip_coefficient is on meta"),
        ({"lr": -1.0}, r"lr must not be negative.*got -1.0"),
        ({"betas": (0.9, 1.0)}, r"beta2 .*got 1.0"),
        ({"eps": math.nan}, r"eps .*got nan"),
        ({"weight_decay": -0.1}, r"weight_decay must not be negative.*got -0.1"),
        ({"first": -1}, r"first must not be negative, got -1"),
        ({"groups": None}, r"groups, group_lr and group_decay must be given together"),
        ({"group_lr": None}, r"groups, group_lr and group_decay must be given together"),
        ({"weight_decay": 0.1}, r"weight_decay 0.1 is given beside group_decay"),
        ({"groups": torch.zeros(2)}, r"groups must be uint8, got torch.float32"),
        ({"first": 125}, r"4 elements from 125 on lie in 2 units of 64, but groups has shape \(1,\)"),
        ({"group_lr": torch.ones(3)}, r"at most 256 groups, got shapes \(3,\) and \(2,\)"),
        ({"group_lr": torch.ones(2).half()}, r"group_lr must be float32 or float64, got torch.float16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments(change, message):
    given = {name: torch.zeros(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    if change.keys() & {"groups", "group_lr", "first"} or change == {"weight_decay": 0.1}:
        given |= named((torch.zeros(1, dtype=torch.uint8), torch.ones(2), torch.ones(2), 0))
    with pytest.raises(ValueError, match="adamw_: .*" + message):
        adamw_(**{**given, "step": torch.tensor(0), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.tensor([0, 3], dtype=torch.uint8)}, "groups has a 3, but there are 3 groups"),
        ({0: torch.zeros(1, dtype=torch.uint8)}, "a uint8 for each of 2 units"),
        ({0: torch.zeros(2)}, "a uint8 for each of 2 units"),
        ({0: None}, "must be given together"),
        ({1: torch.ones(4)}, "there are 4 group_lr but 3 group_decay"),
        ({3: -1}, "first must not be negative, got -1"),
    ],
    ids=str,
)
def test_raw_calls_check_the_table(change, message):
    inputs = drawn(100, first=0)
    table = [change.get(i, a) for i, a in enumerate(inputs[15:19])]
    before = [a.clone() for a in inputs[:5]]
    with pytest.raises(RuntimeError, match="adamw_: .*" + message):
        OPS["adamw_"].overload(*inputs[:15], *table, *inputs[19:])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


@pytest.mark.gpu
def test_a_captured_step_counts_and_follows_its_scalars():
    inputs = adamw_arguments(
        5000, torch.bfloat16, torch.Generator("cuda").manual_seed(0), scalars=True, found_inf=False
    )
    twin = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in inputs)
    op = OPS["adamw_"].overload
    op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*inputs)
    for rate, dropped in ((1e-3, False), (2e-3, True), (3e-3, False)):
        for tensors in (inputs, twin):
            tensors[6].fill_(rate)
            tensors[9].fill_(dropped)
        graph.replay()
        op(*twin)
    assert inputs[4] == 2 and all(torch.equal(inputs[i], twin[i]) for i in (0, 2, 3, 5))
