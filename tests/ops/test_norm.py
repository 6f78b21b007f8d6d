"""rms_norm and layer_norm on the CPU: the residual stream, dtypes, compiled kernels and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from every_op_tools import implementation
from kernel_tools import DTYPES, KERNELS, TRITON, check_kernel, random, threads_agree
from marks import full

from fastmp.ops import OPS, layer_norm, norm_triton, quantize_rows, rms_norm
from fastmp.ops import norm as module
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.testing.ops import poisoned_memory, samples

NAMES = ("rms_norm", "layer_norm")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FORMS = pytest.mark.parametrize(
    ("name", "with_bias"), [("rms_norm", False), ("layer_norm", True), ("layer_norm", False)], ids=str
)


def _inputs(rows, columns, dtype=torch.float64, kind=None):
    """x, residual, [weight, bias], gradients of y and of the residual stream."""
    x, residual, grad, grad_total = (random(rows, columns, dtype=dtype, seed=seed) for seed in range(4))
    return x, residual, [random(columns, dtype=kind or dtype, seed=s) for s in (4, 5)], grad, grad_total


def _call(name, x, parameters, **options):
    if name == "rms_norm":
        return rms_norm(x, parameters[0], **options)
    return layer_norm(x, *parameters, **options)


def _leaves(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


def _close(values, wanted, dtype):
    for value, want in zip(values, wanted, strict=True):
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(value, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_residual_is_added_as_in_two_steps(name, dtype):
    x, residual, parameters, _, _ = _inputs(37, 129, dtype)
    y, total = _call(name, x, parameters, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, _call(name, x + residual, parameters))
    assert y.is_contiguous() and total.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_residual_stream(name):
    """The gradient of s joins the norm's; each of the two results may go unused."""
    x, residual, parameters, grad, grad_total = _inputs(7, 33)
    expected = {}
    for fused in (True, False):
        leaves = _leaves(x, residual, *parameters)
        if fused:
            y, total = _call(name, leaves[0], leaves[2:], residual=leaves[1])
        else:
            total = leaves[0] + leaves[1]
            y = _call(name, total, leaves[2:])
        for used in (("y", "total"), ("y",), ("total",)):
            outputs = [{"y": y, "total": total}[key] for key in used]
            grads = [{"y": grad, "total": grad_total}[key] for key in used]
            found = torch.autograd.grad(
                outputs, leaves, grads, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            _close(found, expected.setdefault(used, found), torch.float64)
            assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_float32_parameters_with_16_bit_data(name, dtype):
    """Nothing is rounded but the results, and the gradients of the parameters are float32."""
    x, residual, parameters, grad, grad_total = _inputs(40, 65, dtype, torch.float32)
    leaves = _leaves(x, residual, *parameters)
    y, total = _call(name, leaves[0], leaves[2:], residual=leaves[1])
    assert y.dtype == total.dtype == dtype
    used = leaves if name == "layer_norm" else leaves[:3]
    grads = torch.autograd.grad((y, total), used, (grad, grad_total))
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in used]
    wide = _leaves(total.double(), *(p.double() for p in parameters))
    truth = _call(name, wide[0], wide[1:])
    wide_grads = torch.autograd.grad(truth, wide if name == "layer_norm" else wide[:2], grad.double())
    _close((y.double(), grads[0].double()), (truth, wide_grads[0] + grad_total), dtype)
    _close([g.double() for g in grads[2:]], wide_grads[1:], torch.float32)


@pytest.mark.parametrize("op", ("rms_norm_backward", "layer_norm_backward", "latent_norm_rope_backward"))
@pytest.mark.parametrize(
    ("dtype", "kind"), ((torch.float32, torch.float64), (torch.float64, torch.float32)), ids=str
)
def test_a_raw_kernel_sums_in_the_dtype_of_arithmetic(op, dtype, kind):
    """Whatever the dtype of a weight and its gradient is: one dtype's sums were read as another's."""
    place = [argument.name for argument in OPS[op].overload._schema.arguments].index("weight")
    for given in samples(op, device="cpu", dtype=dtype):
        changed = [*given[:place], given[place].to(kind), *given[place + 1 :]]
        for one, other in zip(OPS[op].overload(*changed), OPS[op].overload(*given), strict=True):
            torch.testing.assert_close(one.to(dtype), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_float32_parameters_alone(name):
    x, residual, parameters, _, _ = _inputs(5, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results = _call(name, x, parameters, residual=residual)
        other = _call(name, x, [p.half() for p in parameters])
        exact = _call(name, x.double(), [p.double() for p in parameters])
    narrow = x.bfloat16()
    expected = _call(name, narrow, parameters, residual=residual.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert torch.equal(other, _call(name, narrow, [p.half().bfloat16() for p in parameters]))
    assert exact.dtype == torch.float64


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_layer_norm_of_rows_far_from_zero(dtype):
    """The variance is that of the centred row: a mean of 1000 deviations costs its own digits, no more."""
    x = (random(16, 512) + 1000).to(dtype)
    ones, zeros = torch.ones(512, dtype=dtype), torch.zeros(512, dtype=dtype)
    truth = F.layer_norm(x.double(), (512,), eps=1e-5)
    error = (layer_norm(x, ones, zeros).double() - truth).abs().max()
    assert error < (1e-3 if dtype == torch.float32 else 4e-3)
    assert torch.equal(layer_norm(x, ones), layer_norm(x, ones, zeros))


def check(backend, name, with_bias, x, residual, parameters, grad, grad_total):
    """Both directions; without a residual, `grad_total` is not used."""
    weight, bias = parameters
    # the interpreter truncates bfloat16
    bound = 1.6e-2 if (backend, x.dtype) == ("triton", torch.bfloat16) else TOLERANCE[x.dtype]
    close = {"rtol": bound, "atol": bound}
    more = (bias if with_bias else None,) if name == "layer_norm" else ()
    _, total, stats = check_kernel(backend, name, x, residual, weight, *more, 1e-5, **close)
    total, grad_total = (x, None) if residual is None else (total, grad_total)
    more = (with_bias,) if name == "layer_norm" else ()
    check_kernel(backend, f"{name}_backward", grad, grad_total, total, weight, stats, *more, **close)


def check_shape(backend, name, with_bias, shape, dtype, kind=None, residual=(True, False)):
    """kind: dtype of the parameters."""
    rows, columns = shape[:-1], shape[-1]
    x, added, grad, grad_total = (random(*rows, columns, dtype=dtype, seed=seed) for seed in range(4))
    parameters = [random(columns, dtype=kind or dtype, seed=seed) for seed in (4, 5)]
    for is_added in residual:
        check(backend, name, with_bias, x, added if is_added else None, parameters, grad, grad_total)


@FORMS
@KERNELS
def test_equals_reference(backend, dtype, name, with_bias):
    shapes = ((7,), (37, 130), (3, 2, 24), (90, 17), (1, 31), (0, 8), (3, 0))
    for shape in (*shapes, *(((70, 1000), (3, 8195), (400, 7)) if backend == "c++" else ())):
        check_shape(backend, name, with_bias, shape, dtype)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_float32_parameters(backend, dtype, name, with_bias):
    for shape in ((70, 1000), (400, 7)) if backend == "c++" else ((9, 40),):
        check_shape(backend, name, with_bias, shape, dtype, torch.float32)


@FORMS
@pytest.mark.parametrize("backend", [TRITON])
def test_rows_too_long_for_registers(backend, monkeypatch, name, with_bias):
    """Several blocks of columns, of rows a program, and a last one of each cut short."""
    for function in ("block_shape", "backward_block_shape"):
        monkeypatch.setattr(norm_triton, function, lambda *_: None)
    monkeypatch.setattr(norm_triton, "WIDE_BLOCK", (1, 32, 4))
    monkeypatch.setattr(norm_triton, "WIDE_BACKWARD_BLOCK", (2, 32, 4))
    monkeypatch.setattr(norm_triton, "num_programs", lambda num_rows, *_: min(2, -(-num_rows // 2)))
    for shape in ((19, 75), (2, 32), (5, 3)):
        check_shape(backend, name, with_bias, shape, torch.float32)


@FORMS
@pytest.mark.parametrize("backend", [TRITON])
def test_several_blocks_a_program(backend, monkeypatch, name, with_bias):
    for function in ("block_shape", "backward_block_shape"):
        monkeypatch.setattr(norm_triton, function, lambda *_: (2, 32, 4))
    monkeypatch.setattr(norm_triton, "num_programs", lambda num_rows, block_m, num_warps: 3)
    check_shape(backend, name, with_bias, (23, 19), torch.float32, residual=(True,))


@pytest.mark.parametrize("backend", ["c++", TRITON])
def test_layouts(backend):
    x, residual, (weight, bias), grad, grad_total = _inputs(20, 40, torch.float32)
    strided = [random(80, dtype=torch.float32, seed=seed)[::2] for seed in (4, 5)]
    ones = torch.ones(()).expand(20, 40)
    for case in (
        (x[:, :35], residual[:, 5:], (weight[:35], bias[:35]), grad[:, 3:38], grad_total[:, :35]),
        (x.t(), residual.t(), (weight[:20], bias[:20]), grad.t(), grad_total.t()),
        (x, residual, (weight, bias), ones, ones),
        (x, residual, strided, grad, grad_total),
    ):
        check(backend, "layer_norm", True, *case)


@pytest.mark.parametrize("backend", ("c++", *full(["reference"])))
@pytest.mark.parametrize("rows", (1, 3, 1001))
@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_the_number_of_threads(name, backend, rows):
    x, residual, (weight, bias), grad, grad_total = _inputs(rows, 300_300 // rows, torch.float32)
    forward, backward = (implementation(f"{name}{way}", backend) for way in ("", "_backward"))
    more, further = ((bias,), (True,)) if name == "layer_norm" else ((), ())

    def both():
        y, total, stats = forward(x, residual, weight, *more, 1e-5)
        return y, stats, *backward(grad, grad_total, total, weight, stats, *further)

    assert threads_agree(both)


@pytest.mark.parametrize("name", NAMES)
def test_saves_what_is_normalised_weight_and_statistics(name):
    x, residual, parameters, _, _ = _inputs(6, 8)
    saved = []
    leaves = _leaves(x, residual, *parameters)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, total = _call(name, leaves[0], leaves[2:], residual=leaves[1])
    assert sum(t.numel() for t in saved) == total.numel() + 8 + 6 * (2 if name == "layer_norm" else 1)
    assert {t.data_ptr() for t in saved} > {total.data_ptr(), leaves[2].data_ptr()}


@pytest.mark.parametrize("name", NAMES)
def test_a_residual_stream_overwritten_before_backward_is_noticed(name):
    x, residual, parameters, _, _ = _inputs(6, 8)
    leaves = _leaves(x, residual, *parameters)
    y, total = _call(name, leaves[0], leaves[2:], residual=leaves[1])
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def _zeros(*shape, **options):
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    ("x", "parameters", "options", "message"),
    [
        (_zeros(2, 3), [_zeros(4)], {}, r"expected weight of .* for x of shape \(2, 3\), got \(4,\)"),
        (_zeros(2, 3), [_zeros(3).double()], {}, r"x is torch.float32 but weight is torch.float64"),
        (_zeros(2, 3), [_zeros(3).half()], {}, r"x is torch.float32 but weight is torch.float16"),
        (_zeros(2, 3).double(), [_zeros(3)], {}, r"x is torch.float64 but weight is torch.float32"),
        (_zeros(2, 3), [_zeros(3, device="meta")], {}, r"x is on cpu but weight is on meta"),
        (
            _zeros(2, 3), [_zeros(3)], {"residual": _zeros(3)},
            r"expected residual of .* for x of shape \(2, 3\), got \(3,\)",
        ),
        (
            _zeros(2, 3), [_zeros(3)], {"residual": _zeros(2, 3).half()},
            r"x is torch.float32 but residual is torch.float16",
        ),
        (_zeros(2, 3), [_zeros(3)], {"eps": -1.0}, r"eps must not be negative, got -1.0"),
        (_zeros(2, 3).int(), [_zeros(3)], {}, r"got torch.int32"),
        (torch.tensor(1.0), [_zeros(1)], {}, r"at least one dimension, got shape \(\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments(name, x, parameters, options, message):
    with pytest.raises(ValueError, match=f"{name}: .*" + message):
        _call(name, x, parameters, **options)


def test_wrong_bias():
    x, weight = _zeros(2, 3), _zeros(3)
    for bias, message in (
        (_zeros(2), r"expected bias of .* for x of shape \(2, 3\), got \(2,\)"),
        (_zeros(3).half(), r"weight is torch.float32 but bias is torch.float16"),
        (_zeros(3, device="meta"), r"weight is on cpu but bias is on meta"),
    ):
        with pytest.raises(ValueError, match="layer_norm: " + message):
            layer_norm(x, weight, bias)


@pytest.mark.parametrize("num_cols", (1, 100, 128, 2048, 4096, 7168, 8192, 12288, 16384, 20000))
@pytest.mark.parametrize("itemsize", (2, 4, 8))
@pytest.mark.parametrize("centred", (False, True))
@pytest.mark.parametrize("backward", (False, True))
def test_block_shapes(num_cols, itemsize, centred, backward):
    if backward:
        shape = norm_triton.backward_block_shape(num_cols, itemsize)
    else:
        shape = norm_triton.block_shape(num_cols, itemsize, centred)
    forward = 8192 if centred else 16384
    longest = {(2, True): 8192, (2, False): forward, (4, False): forward}.get((itemsize, backward), 4096)
    assert (shape is None) == (num_cols > longest)
    if shape is None:
        return
    block_m, block_n, num_warps = shape
    assert num_cols <= block_n and (block_n < 2 * num_cols or block_n == 16)
    assert block_n & (block_n - 1) == 0 and block_m & (block_m - 1) == 0
    per_thread = block_m * block_n // (32 * num_warps)
    assert per_thread <= (16 if backward else 32) and num_warps <= 16
    assert block_m == 64 or per_thread * itemsize >= 32  # at least two 16-byte accesses
    for num_rows in (1, 100, 1 << 22):
        if backward:
            programs = norm_triton.num_programs(num_rows, block_m, num_warps)
            assert 1 <= programs <= min(-(-num_rows // block_m), 264)


@pytest.mark.parametrize("backend", ["c++", pytest.param("triton", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantized_result_is_the_quantised_result(dtype, backend, monkeypatch):
    """Byte for byte, of rows in registers and of longer ones, with the residual stream and statistics."""
    plain, quantized = (implementation(f"rms_norm{end}", backend) for end in ("", "_quantized"))
    for rows, columns, block, form in ((37, 384, 128, E4M3), (70, 96, 32, E5M2), (2, 16512, 128, E4M3)):
        if backend == "triton" and columns > 16384:  # 2 s to interpret: short rows take the way of long ones
            monkeypatch.setattr(norm_triton, "block_shape", lambda *_: None)
            columns = 384
        x, residual, (weight, _), _, _ = _inputs(rows, columns, dtype)
        for added in (None, residual):
            with poisoned_memory():
                q, s, *others = quantized(x, added, weight, 1e-5, block, form)
            y, *wanted = plain(x, added, weight, 1e-5)
            want, scales = quantize_rows(y, block=block, dtype=form)
            assert torch.equal(q.view(torch.uint8), want.view(torch.uint8)) and q.is_contiguous()
            assert torch.equal(s.float(), scales.float()) and s.stride() == scales.stride()
            assert all(torch.equal(a, b) for a, b in zip(others, wanted, strict=True))


def test_quantized_function():
    x, residual, (weight, _), _, _ = _inputs(5, 256, torch.bfloat16)
    y, total = rms_norm(x, weight, residual=residual)
    q, scales, s = rms_norm(x, weight, residual=residual, quantize=True)
    want = quantize_rows(y)
    assert torch.equal(q.view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(scales, want[1])
    assert torch.equal(s, total) and len(rms_norm(x, weight, quantize=True)) == 2
    with pytest.raises(ValueError, match=r"rms_norm: H must be a multiple of block \(128\), got 200"):
        rms_norm(x[:, :200], weight[:200], quantize=True)
    with pytest.raises(RuntimeError, match="this op has no derivative"):
        rms_norm(x, weight.requires_grad_(), quantize=True, residual=residual)[2].sum().backward()


def test_references_are_what_float64_torch_computes():
    """`_reference` defines the op: here beside torch's own, with statistics."""
    x, residual, (weight, bias), _, _ = _inputs(5, 7)
    total = x + residual
    for centred in (False, True):
        optional = bias if centred else None
        y, s, stats = module.reference(centred, x, residual, weight, optional, 1e-3)
        theirs = F.layer_norm if centred else F.rms_norm
        parameters = (weight, bias) if centred else (weight,)
        torch.testing.assert_close(y, theirs(total, (7,), *parameters, 1e-3), rtol=1e-12, atol=1e-12)
        assert torch.equal(s, total)
        variance = total.var(1, correction=0) if centred else total.square().mean(1)
        torch.testing.assert_close(stats[0], (variance + 1e-3).rsqrt(), rtol=1e-12, atol=1e-12)
        if centred:
            torch.testing.assert_close(stats[1], total.mean(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("residual", (False, True))
@pytest.mark.parametrize("name", NAMES)
def test_a_value_error_says_what_the_kernel_refuses(name, residual):
    """Also where the kernel alone checks the arguments, which raises RuntimeError."""
    norm, x, weight = getattr(module, name), torch.ones(3, 8), torch.ones(8)
    options = {"residual": torch.ones(3, 8)} if residual else {}
    for eps in (float("inf"), 1e39):
        with pytest.raises(ValueError, match=f"^{name}: expected eps to be finite in float32, got "):
            norm(x, weight, eps=eps, **options)
    for eps in (None, "1"):
        with pytest.raises(ValueError, match=f"^{name}: expected eps to be a number, got {eps!r}"):
            norm(x, weight, eps=eps, **options)
    for eps in (-1.0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"^{name}: eps must not be negative, got {eps}"):
            norm(x, weight, eps=eps, **options)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: expected memory for all elements of x "):
        norm(x, weight, **options)
