"""The Triton kernels of the router in Triton's interpreter, against the references."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_tools import check_kernel, random
from marks import full
from torch import Tensor

from fastmp.ops import router, router_triton
from fastmp.ops.core import rowwise as rows

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero"),
]

WIDE = {"rtol": 2e-5, "atol": 1e-6}  # of results in float32, whatever the logits
SCORES = (
    ("softmax", False), ("softmax", True), ("logits", True), ("sigmoid", False), ("sigmoid", True),
    ("sqrtsoftplus", False), ("sqrtsoftplus", True),
)  # fmt: skip


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Sixteenths, many of them equal."""
    return random(*shape, seed=seed, scale=24.0).round().div(16).to(dtype)


def _check(
    logits: Tensor, k: int, score: str, normalize: bool, groups: int = 1, opened: int = 1, bias=None,
    each: bool = False,
) -> None:  # fmt: skip
    """Forward, and backward of all three gradients; with `each` also of one at a time and of none."""
    twice = bias is not None or opened < groups
    options = (bias, k, score, groups, opened, normalize, 1.5, twice)
    tolerance = {} if logits.dtype == torch.float64 else WIDE
    indices, probs, _, sums, z_sum, _ = check_kernel("triton", "topk_router", logits, *options, **tolerance)
    grads = [_random(*t.shape, dtype=t.dtype, seed=n) for n, t in enumerate((probs, sums, z_sum))]
    for given in (grads, [grads[0], None, None], [None, *grads[1:]], [None] * 3)[: 4 if each else 1]:
        options = (logits, indices, score, normalize, 1.5)
        check_kernel("triton", "topk_router_backward", *given, *options)


@pytest.mark.parametrize(("score", "normalize"), SCORES)
@pytest.mark.parametrize(
    ("shape", "k"), [((9, 16), 3), ((17, 7), 7), ((5, 3, 33), 5), ((1, 1), 1), ((2, 0, 4), 2)], ids=str
)
def test_equals_reference(shape, k, score, normalize):
    _check(_random(*shape), k, score, normalize, each=True)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16), ids=str)
def test_other_dtypes(dtype):
    for score, normalize in SCORES[1::3]:
        _check(_random(9, 16, dtype=dtype), 3, score, normalize)


@pytest.mark.parametrize(("score", "normalize"), SCORES)
@pytest.mark.parametrize(
    ("experts", "groups", "opened", "k"), [(24, 4, 2, 3), *full([(30, 6, 6, 8), (5, 5, 3, 3)])]
)
def test_groups(experts, groups, opened, k, score, normalize):
    """Groups of six and of five, which are padded, and of one expert; levels that keep their sums apart."""
    logits = _random(19, experts)
    bias = torch.arange(groups).flip(0).repeat_interleave(experts // groups).float()
    _check(logits, k, score, normalize, groups, opened, bias)
    if score not in router_triton.ELEMENTWISE:
        _check(logits, k, score, normalize, groups, opened)
    else:  # without a bias groups are compared by the scores of their best two, experts by their logits
        levels = torch.arange(groups).repeat_interleave(experts // groups)
        _check(logits / 4 + levels, k, score, normalize, groups, opened)


@pytest.mark.parametrize("k", (36, *full([300])))
def test_many_experts(k):
    _check(_random(3, 300), k, "softmax", True)
    _check(_random(3, 300), k, "sigmoid", False)


@pytest.mark.parametrize(("score", "normalize"), SCORES[3:])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_low_logits(dtype, score, normalize):
    """Around the logit where the formula of the shares changes, and where scores of float32 are 0."""
    levels = torch.tensor([-38, -40, -42, -48, -88, -108, -300], dtype=dtype)[:, None]
    _check(_random(7, 12, dtype=dtype) + levels, 3, score, normalize, each=True)


def test_many_strips_are_added_in_order(monkeypatch):
    """More tokens than one step of a program, and more partial sums than are added at once."""
    monkeypatch.setattr(rows, "_NUM_PROGRAMS", 4 * 9)
    monkeypatch.setattr(router_triton, "_SUM_BLOCK", (4, 8))
    monkeypatch.setattr(router_triton, "plan", router_triton.plan.__wrapped__)
    _check(_random(90, 20), 2, "softmax", False)
    _check(_random(30, 3, 16), 2, "softmax", False)


def test_layouts():
    logits = _random(20, 40)
    _check(logits[:, 3:36], 4, "softmax", True)
    _check(logits.t(), 4, "softmax", True)
    _check(_random(6, 2, 40)[..., :16], 4, "sigmoid", True)
    _check(_random(6, 2, 40).transpose(0, 1), 4, "sigmoid", True)


@pytest.mark.parametrize(("score", "normalize"), SCORES)
@pytest.mark.parametrize("dtype", (torch.float32, *full([torch.float16, torch.bfloat16])), ids=str)
def test_special_values(dtype, score, normalize):
    logits = _random(10, 16, dtype=dtype)
    logits[0, 3], logits[1], logits[2, 5:9] = math.nan, math.nan, -math.nan
    logits[3, 0], logits[4, :15], logits[5], logits[6, 2] = math.inf, -math.inf, -math.inf, 3e4
    logits[9, 3:7], logits[9, 8] = 6e-8, -6e-8  # subnormal in float16
    if dtype != torch.float16:
        logits[6, 2] = 3e38
    logits[7], logits[8, 1], logits[8, 2] = -0.0, math.inf, math.nan
    logits[7, ::2] = 0.0
    for groups, opened in ((1, 1), (4, 2)):
        _check(logits, 6, score, normalize, groups, opened)
        for level in (-1.0, 1.0):
            bias = torch.full((16,), level)
            _check(logits[7:8], 6, score, normalize, groups, opened, bias)
    _check(logits, 6, score, normalize, bias=torch.zeros(16))


def test_the_scale_is_not_rounded_to_float32():
    logits = _random(4, 16, dtype=torch.float64)
    options = (None, 2, "softmax", 1, 1, False, 1 / 3, False)
    torch.testing.assert_close(
        router_triton.launch(logits, *options)[1], router.reference(logits, *options)[1], rtol=1e-14, atol=0
    )
