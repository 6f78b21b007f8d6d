"""Registration of ops, the choice of backends, costs, and mutating ops under autograd."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint
from marks import full
from torch.utils.flop_counter import FlopCounterMode

from fastmp.ops import backends, bias_gelu
from fastmp.ops.core.registry import OPS, can_read_values
from fastmp.ops.core.versions import TESTED, untested
from fastmp.testing.functions import families
from fastmp.testing.ops import check_op, poisoned_memory, relative_error, run, samples

MUTATING = [name for name, op in OPS.items() if op.overload._schema.is_mutable]


def backends_with(environment: str) -> dict:
    code = "import json, fastmp.ops; print(json.dumps(fastmp.ops.backends()))"
    variables = {**os.environ, "FASTMP_OPS": environment}
    result = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_versions_that_were_never_tested_are_named():
    assert not untested("torch", torch.__version__)
    assert not untested("torch", None)
    for package, (oldest, newest) in TESTED.items():
        for major, minor in (oldest, newest):
            assert not untested(package, f"{major}.{minor}.1+cpu")
        below, above = f"{oldest[0]}.{oldest[1] - 1}.0", f"{newest[0]}.{newest[1] + 1}.0a0+git12ab"
        for version in (below, above, f"{newest[0] + 1}.0"):
            assert f"this is {package} {version}: run" in untested(package, version)


def test_an_untested_torch_is_named_by_one_warning_at_import():
    code = """
import torch
torch.__version__ = type(torch.__version__)("99.1.0")
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fastmp.ops
print([str(w.message) for w in caught if "torch 99.1.0: run `fastmp doctor --check`" in str(w.message)])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.count("fastmp is tested with torch") == 1


def test_every_op_has_one_server_a_device_and_a_reason():
    table = backends()
    assert set(table) == set(OPS) and len(table) >= 6
    for served in table.values():
        assert served["cpu"][0] in ("c++", "reference") and served["cuda"][0] in ("triton", "reference")
        assert all(reason for _, reason in served.values())


@pytest.mark.full
def test_an_environment_variable_names_who_serves():
    table = backends_with("cross_entropy_stats=reference")
    assert table["cross_entropy_stats"]["cpu"] == ["reference", "named by FASTMP_OPS"]
    assert table["cross_entropy_merge"]["cpu"] == list(backends()["cross_entropy_merge"]["cpu"])
    table = backends_with("reference,cross_entropy_grad=triton")
    exception = table.pop("cross_entropy_grad")
    assert exception["cuda"][0] == OPS["cross_entropy_grad"].serving["cuda"]
    assert {served["cpu"][0] for served in table.values()} == {"reference"}
    assert {served["cuda"][0] for served in table.values()} == {"reference"}
    backend, reason = backends_with("bias_gelu=fast")["bias_gelu"]["cuda"]
    assert backend != "fast" and reason.endswith("; FASTMP_OPS names fast: not known here")


NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@pytest.mark.full
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    """On the samples without NaN, which opcheck takes for a difference; traced in float32 only.

    torch has no arithmetic of FP8 tensors, by which its checks of schemas and traces compare results.
    """
    reference = OPS[op].implementations["reference"]
    eager = ("test_schema", "test_autograd_registration", "test_faketensor")
    checked = 0
    for dtype, tests in ((torch.float32, (*eager, "test_aot_dispatch_dynamic")), (torch.bfloat16, eager)):
        for arguments in samples(op, device="cpu", dtype=dtype):
            results = run(op, reference, arguments)
            if any(isinstance(t, torch.Tensor) and t.dtype in NARROW for t in (*arguments, *results)):
                tests = ("test_autograd_registration", "test_faketensor")
            if all(out.float().isfinite().all() for out in results):
                torch.library.opcheck(OPS[op].overload, arguments, test_utils=tests)
                checked += 1
    assert checked >= 6


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", [None, *full(["reference"])])
def test_every_op_is_right_on_poisoned_memory(op, backend):
    results = check_op(op, "cpu", backend=backend)
    assert [r.dtype for r in results] == ["float64", "float32", "bfloat16", "float16"]
    assert all(r.ok for r in results), results


def test_poison_reaches_memory_allocated_in_python_and_in_kernels():
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()

    def forgetful(x, bias, approximate):
        out = torch.empty_like(x)
        out[:-1] = torch.nn.functional.gelu(x + bias, approximate=approximate)[:-1]
        return out

    arguments = samples("bias_gelu", device="cpu", dtype=torch.float64)[0]
    with poisoned_memory():
        outputs = run("bias_gelu", forgetful, arguments)
    (truth,) = run("bias_gelu", OPS["bias_gelu"].implementations["reference"], arguments)
    assert relative_error(outputs[0], truth) == float("inf")
    assert relative_error(truth, truth) == 0


def test_samples_depend_on_the_seed_only_and_refuse_unknown_ops():
    first, second, other = (
        samples("cross_entropy_merge", device="cpu", dtype=torch.float32, seed=s) for s in (0, 0, 1)
    )
    assert torch.equal(first[0][0].nan_to_num(), second[0][0].nan_to_num())
    assert not torch.equal(first[0][0].nan_to_num(), other[0][0].nan_to_num())
    with pytest.raises(ValueError, match="no op 'entropy'"):
        samples("entropy", device="cpu", dtype=torch.float32)


def test_an_op_without_samples_says_where_to_add_them(monkeypatch):
    monkeypatch.delitem(families(), "activation")
    with pytest.raises(ValueError, match="add its family 'activation' to FAMILIES"):
        samples("bias_gelu", device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("op", MUTATING)
def test_a_mutating_op_bumps_the_version_of_what_it_writes(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmp::{op}", "ADInplaceOrView")
    arguments = samples(op, device="cpu", dtype=torch.float32)[0]
    schema = OPS[op].overload._schema.arguments
    written = [a for a, s in zip(arguments, schema) if s.alias_info is not None and a is not None]
    before = [argument._version for argument in written]
    OPS[op].overload(*arguments)
    assert written and all(argument._version > v for argument, v in zip(written, before, strict=True))


def test_the_raw_op_is_differentiable_too():
    x, bias = torch.randn(3, 4).requires_grad_(), torch.randn(4).requires_grad_()
    calls = bias_gelu, lambda x, bias: torch.ops.fastmp.bias_gelu(x, bias, "tanh")
    ours, raw = (torch.autograd.grad(call(x, bias).sum(), (x, bias)) for call in calls)
    assert all(torch.equal(a, b) for a, b in zip(ours, raw, strict=True))
    values = x.detach(), bias.detach()
    ours, raw = (torch.func.grad(lambda *v: call(*v).sum(), (0, 1))(*values) for call in calls)  # noqa: B023
    assert all(torch.equal(a, b) for a, b in zip(ours, raw, strict=True))


def test_what_has_no_derivative_says_so():
    """Neither no gradient nor one of the reference's steps, and never without a word."""
    logits = torch.randn(4, 8).requires_grad_()
    stats = torch.ops.fastmp.cross_entropy_stats(logits * 1, torch.zeros(4, dtype=torch.int64), 0, 8, False)
    with pytest.raises(RuntimeError, match="cross_entropy_stats: this op has no derivative"):
        stats.sum().backward()
    total, grad = torch.zeros(2, 3), torch.ones(5, 2).requires_grad_()
    with pytest.raises(RuntimeError, match="accumulate_weight_grad_ writes into its arguments"):
        torch.ops.fastmp.accumulate_weight_grad_(total, grad, torch.ones(5, 3))
    x = torch.randn(3).requires_grad_()
    with pytest.raises(RuntimeError, match="bias_gelu: its backward is not differentiable"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: bias_gelu(x).sum())(x).sum())(x.detach())


def test_checkpoints_and_hooks_of_saved_tensors():
    x, bias = torch.randn(3, 4).requires_grad_(), torch.randn(4).requires_grad_()
    plain = torch.autograd.grad(bias_gelu(x, bias).sum(), (x, bias))
    again = torch.utils.checkpoint.checkpoint(bias_gelu, x, bias, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
        moved = bias_gelu(x, bias)
    for y in (again, moved):
        assert all(
            torch.equal(a, b) for a, b in zip(torch.autograd.grad(y.sum(), (x, bias)), plain, strict=True)
        )


# Ops that skip part of their arguments: hidden keys, ignored tokens, rows of other ranks, what is not turned.
OTHER_TRAFFIC = {
    "adamw_", "cross_entropy", "cross_entropy_promise_", "exchange_counts", "exchange_give", "exchange_pull",
    "exchange_push", "exchange_take", "rope_", "scaled_masked_softmax", "scaled_masked_softmax_backward",
    "stash_gate_backward_", "stash_mlp_in", "stash_mm", "stash_pull", "stash_push", "stash_wgrad",
    "stash_wgrad_",
}  # fmt: skip
# Operations of the first sample: of each element of its largest tensor, or of each term of its product.
FLOPS = {
    "bias_dropout_add": 3, "bias_dropout_add_backward": 2, "bias_gelu": 9, "bias_gelu_backward": 18,
    "clamped_swiglu": 6, "gated_activation": 4, "cross_entropy_stats": 4, "cross_entropy_grad": 5,
    "layer_norm": 8, "layer_norm_backward": 14, "rms_norm": 5, "rms_norm_backward": 10, "adamw_": 15,
    "grouped_mm": 32, "grouped_mm_wgrad": 32, "grouped_mlp_in": 32, "rope": 3.75, "scaled_masked_softmax": 6,
    "topk_router": 6, "unpermute": 2, "unpermute_backward": 3, "latent_norm_rope": (4 * 512 + 3 * 64) / 576,
    "latent_norm_rope_backward": (9 * 512 + 3 * 64) / 576,
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_traffic_is_every_byte_read_and_written_once(op):
    """Arguments but those that are only written, and results; in bfloat16 each in its own dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for arguments in samples(op, device="cpu", dtype=dtype):
            traffic, flops = OPS[op].traffic(*arguments), OPS[op].flops
            results = run(op, OPS[op].overload, arguments)
            given = {a.name: b for a, b in zip(OPS[op].overload._schema.arguments, arguments, strict=True)}
            unread = ("out",) if given.get("add", True) else ("out", "total")  # only written
            read = [a for name, a in given.items() if isinstance(a, torch.Tensor) and name not in unread]
            moved = sum(t.numel() * t.element_size() for t in (*read, *results))
            if all(t.numel() for t in results):
                assert traffic > 0 and (flops is None or flops(*arguments) >= 0)
                assert op in OTHER_TRAFFIC or traffic == moved


@pytest.mark.parametrize("op", FLOPS)
def test_flops_are_counted(op):
    arguments = samples(op, device="cpu", dtype=torch.float32)[0]
    elements = max(a.numel() for a in arguments if isinstance(a, torch.Tensor))
    with FlopCounterMode(display=False) as counter:
        OPS[op].overload(*arguments)
    assert counter.get_total_flops() == OPS[op].flops(*arguments) == FLOPS[op] * elements


def test_values_are_looked_at_where_nobody_records_them():
    x = torch.zeros(2)
    assert (
        can_read_values(x)
        and not can_read_values(x.to("meta"))
        and not can_read_values(torch.nn.Parameter(x))
    )
    with FlopCounterMode(display=False):
        assert not can_read_values(x)
    assert torch.compile(lambda x: x + can_read_values(x), backend="eager")(x).tolist() == [0, 0]
