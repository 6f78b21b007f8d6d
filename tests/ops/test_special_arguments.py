"""Numbers that raw ops do not expect: every implementation raises, or agrees with the reference.

Public functions check most of these before an op runs; `torch.ops.fastmp.*` is called with what it gets.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastmp.ops import OPS
from fastmp.testing.ops import run

INF, NAN = float("inf"), float("nan")
BACKENDS = [pytest.param("c++"), pytest.param("triton", marks=pytest.mark.interpret)]
IMPLEMENTATIONS = [pytest.param("reference"), *BACKENDS]


def implementation(op: str, backend: str):
    """The implementation of an op for a raw call; the op itself is what C++ serves on a CPU."""
    if backend != "c++":
        return OPS[op].implementations[backend]
    if OPS[op].serving["cpu"] != "c++":
        pytest.skip(f"{op} has no C++ kernel here: {OPS[op].reasons['cpu']}")
    return OPS[op].overload


def assert_agrees(op: str, backend: str, *arguments: object) -> None:
    truth = run(op, OPS[op].implementations["reference"], arguments)
    found = run(op, implementation(op, backend), arguments)
    torch.testing.assert_close(found, truth, equal_nan=True, rtol=1e-5, atol=1e-5)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("limit", [NAN, 0.0, -1.0])
def test_clamped_swiglu_raises_for_a_limit_that_is_not_positive(backend, limit):
    for op, tensors in (
        ("clamped_swiglu", (numbers(5, 32),)),
        ("clamped_swiglu_backward", (numbers(5, 16), numbers(5, 32))),
    ):
        with pytest.raises(
            (ValueError, RuntimeError), match=r"limit (must be positive|to be finite)|0 < limit"
        ):
            run(op, implementation(op, backend), (*tensors, 1.702, limit))


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("start", "size"), [(-(1 << 63), 300), (-1, 300), ((1 << 63) - 1, 300), (0, 0), (0, -(1 << 63))]
)
def test_a_shard_outside_the_vocabulary_raises(backend, start, size):
    logits, target, row = numbers(6, 40), torch.arange(6), numbers(6)
    calls = {
        "cross_entropy_stats": (logits, target, start, size, True),
        "cross_entropy_grad": (logits, target, numbers(6, 2), row, None, start, size, -100, 0.0, 0.0, None),
        "log_probs_stats": (logits, target, None, start, size, True),
        "log_probs_grad_": (logits, target, row, row, row, None, None, None, start, size, -100),
    }
    for op, arguments in calls.items():
        with pytest.raises((ValueError, RuntimeError), match="expected vocab_start from 0 to"):
            run(op, implementation(op, backend), arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_are_nan_unless_the_inverse_temperature_is_positive(backend):
    scale = torch.tensor([1.0, 0.0, -1.0, NAN, 1e-30, 1e30])
    logits, target = numbers(6, 300), torch.arange(6)
    assert_agrees("log_probs_stats", backend, logits, target, scale, 0, 300, True)
    stats, *_ = run(
        "log_probs_stats", implementation("log_probs_stats", backend), (logits, target, scale, 0, 300, False)
    )
    assert stats[:, 1].isnan().tolist() == [False, True, True, True, False, False]
    row = numbers(6)
    assert_agrees("log_probs_grad_", backend, logits, target, row, row, row, None, None, scale, 0, 300, -100)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_backward_ignores_what_hidden_keys_hold(backend):
    y = numbers(2, 3, 8, 8).softmax(-1).tril()
    y[0, 0, 1, 3:] = NAN
    assert_agrees("scaled_masked_softmax_backward", backend, numbers(2, 3, 8, 8), y, 1.0, True)
    gradient = OPS["scaled_masked_softmax_backward"].implementations["reference"](y + 1, y, 1.0, True)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
def test_norm_backward_raises_for_statistics_of_another_shape(backend):
    grad, x, weight = numbers(4, 64), numbers(4, 64), numbers(64)
    calls = {
        "rms_norm_backward": (grad, None, x, weight, numbers(4)),
        "layer_norm_backward": (grad, None, x, weight, numbers(4, 2), True),
    }
    for op, arguments in calls.items():
        with pytest.raises((ValueError, RuntimeError), match=f"{op}: .*stats"):
            run(op, implementation(op, backend), arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("starts", [[5, 3, 9], [4, 5, 6], [0, 9, 3], [-3, 3, 9], [0, 0, 0]])
def test_block_rows_gives_rows_before_the_first_block_to_it(backend, starts):
    places = torch.tensor([1, 0, 30], dtype=torch.int32)
    for num_rows in (4, 20):
        assert_agrees("block_rows", backend, torch.tensor(starts, dtype=torch.int32), places, num_rows)


@pytest.mark.parametrize("backend", [pytest.param("reference"), pytest.param("c++")])
def test_a_complex_upstream_gradient(backend):
    op, row = "cross_entropy_promise_", torch.ones(4)
    with pytest.raises((ValueError, RuntimeError), match=op):
        grad = torch.zeros(4, 8, dtype=torch.complex64)
        run(op, implementation(op, backend), (grad, row, row, torch.arange(4), -100))
