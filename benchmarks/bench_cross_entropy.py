"""Cross-entropy of fastmp (fresh and in-place gradient), torch eager, torch.compile and Liger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import COMPILE, EAGER, LIGER, OURS, Case, Goal, Workload, compiled, sweep, title
from benchmarks.conftest import CLOCK, DEVICE
from benchmarks.peers import peer
from fastmp.ops import OPS, cross_entropy

IN_PLACE = "fastmp in place"

pytestmark = pytest.mark.benchmark(timer=CLOCK)


def cross_entropy_case(tokens: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(tokens, vocab, device=device, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    grad = torch.full((tokens,), 1 / tokens, device=device)

    def eager(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none")

    with_compile = compiled(eager)
    # The gradient lands in the logits, so a second run works on those numbers: the time is the same.
    rivals = {
        OURS: lambda: cross_entropy(logits, target),
        IN_PLACE: lambda: cross_entropy(logits, target, grad_in_place=True),
        EAGER: lambda: eager(logits, target),
        COMPILE: lambda: with_compile(logits, target),
    }
    if (liger := peer(LIGER, "liger_kernel.ops.cross_entropy:LigerCrossEntropyFunction", device)) is not None:
        rivals[LIGER] = lambda: liger.apply(logits, target, None, -100, 0.0, 0.0, "none")[0]
    stats = (logits, target, 0, vocab, False)
    lse = torch.empty(tokens)
    gradient = (logits, target, lse, lse, None, 0, vocab, -100, 0.0, 0.0)
    return Case(
        title("cross_entropy", (tokens, vocab), dtype),
        (logits,),
        grad if dtype != torch.float64 else grad.double(),
        {name: _cast(call, grad.dtype) for name, call in rivals.items()},
        OPS["cross_entropy_stats"].traffic(*stats),
        OPS["cross_entropy_grad"].traffic(*gradient),
    )


def _cast(call: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Plain torch returns the loss of 16-bit logits in 16 bits; all rivals return float32."""
    return lambda: call().to(dtype)


WORKLOADS = (
    Workload(
        "cross_entropy",
        cross_entropy_case,
        cpu=((2048, 50304),),
        cuda=((8192, 50304), (8192, 128256), (4096, 129280), (8192, 16032)),
        rivals=(OURS, IN_PLACE, EAGER, COMPILE, LIGER),
        tiny=(7, 40),
    ),
)
GOALS = (
    Goal("cross_entropy", "float32", "both", IN_PLACE, 8.0, 8.0),
    Goal("cross_entropy", "float32", "both", OURS, 4.0, 3.0),
    Goal("cross_entropy", "bfloat16", "both", IN_PLACE, 5.5, 5.5),
    Goal("cross_entropy", "bfloat16", "both", OURS, 3.0, 2.5),
)
_LOGITS = ((8192, 50304), (8192, 128256), (4096, 129280), (8192, 16032))
SHAPES = {f"cross_entropy_{name}": _LOGITS for name in ("stats", "merge", "grad", "grad_", "loss_grad_")}


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`; a mutating op writes over its logits call after call."""
    tokens, vocab = shape
    generator = torch.Generator(device).manual_seed(seed)
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    per_token = torch.float64 if dtype == torch.float64 else torch.float32
    if op == "cross_entropy_merge":
        stats = torch.randn(8, tokens, 3, device=device, generator=generator, dtype=per_token).abs() + 1
        return stats, target, None, vocab, -100, 0.0, 0.0
    logits = torch.randn(shape, device=device, generator=generator).to(dtype)
    if op == "cross_entropy_stats":
        return logits, target, 0, vocab, False
    if op == "cross_entropy_loss_grad_":
        loss_grad = torch.full((tokens,), 1 / tokens, dtype=per_token, device=device)
        return logits, target, loss_grad, None, vocab, -100, 0.0, 0.0
    lse = torch.full((tokens,), 11.0, dtype=per_token, device=device)
    return logits, target, lse, torch.full_like(lse, 1 / tokens), None, 0, vocab, -100, 0.0, 0.0


@pytest.mark.parametrize(("case", "rival", "direction"), sweep(WORKLOADS, DEVICE))
def test_cross_entropy(compare, case, rival, direction):
    compare(case(), rival, direction)
