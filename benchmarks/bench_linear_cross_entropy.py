"""Linear + cross-entropy, the mean over tokens, beside plain and fused torch, Liger, CCE and quack.

fastmp knows the gradient of every token's loss beforehand; or knows it up to a factor and scales gradients
afterwards, as rivals with a mean do ("mean"); or knows nothing and recomputes the logits in the backward
("recomputed"); or adds the gradient of the weight to a float32 buffer, as in training ("into main_grad").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import (
    CCE,
    COMPILE,
    EAGER,
    LIGER,
    OURS,
    QUACK,
    TORCH,
    Case,
    CpuGoal,
    Workload,
    against_torch,
    title,
)
from benchmarks.peers import peer
from fastmp.ops import linear_cross_entropy

MEAN = "fastmp mean"
RECOMPUTED = "fastmp recomputed"
MAIN_GRAD = "fastmp into main_grad"
CCE_EXACT = f"{CCE} exact"
LIGER_SM90 = f"{LIGER} SM90"
RIVALS = (OURS, MEAN, RECOMPUTED, MAIN_GRAD, EAGER, COMPILE, TORCH, LIGER, LIGER_SM90, CCE, CCE_EXACT, QUACK)


class _Case(Case):
    """One rival leaves the gradient of its weight in `main_grad`, where autograd does not see it."""

    main_grad: Callable[[], Tensor]

    def both(self, rival: str) -> Callable[[], Any]:
        if rival != MAIN_GRAD:
            return super().both(rival)
        return lambda: torch.autograd.grad(self.rivals[rival](), self.leaves[:1], self.grad)

    def results(self, rival: str, direction: str) -> Callable[[], Any]:
        if rival != MAIN_GRAD or direction != "both":
            return super().results(rival, direction)

        def call() -> Any:
            out = self.rivals[rival]()
            return out, (*torch.autograd.grad(out, self.leaves[:1], self.grad), self.main_grad())

        return call


def linear_cross_entropy_case(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, hidden, device=device, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, device=device, generator=generator).mul_(hidden**-0.5).to(dtype)
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    trained = torch.nn.Parameter(weight)  # of the rival with a main gradient, which is made at its first call
    weight = weight.detach().requires_grad_()

    def into_main_grad() -> Tensor:
        if not hasattr(trained, "main_grad"):
            trained.main_grad = torch.zeros(vocab, hidden, dtype=wide, device=device)
        return linear_cross_entropy(x, trained, target, loss_grad=1 / tokens, reduction="none").mean()

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target)

    def per_token() -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target, reduction="none").mean()

    known = lambda: linear_cross_entropy(x, weight, target, loss_grad=1 / tokens, reduction="none").mean()  # noqa: E731
    rivals = against_torch(known, eager, x, weight) | {
        MEAN: lambda: linear_cross_entropy(x, weight, target, reduction="mean"),
        RECOMPUTED: lambda: linear_cross_entropy(x, weight, target, reduction="none").mean(),
        MAIN_GRAD: into_main_grad,
        **_fused_by_torch(x, weight, target),
        **_peers(x, weight, target, device),
    }
    inputs, result = (tokens + vocab) * hidden * x.element_size() + tokens * 8, 2 * tokens * vocab * hidden
    case = _Case(
        title("linear_cross_entropy", (tokens, hidden, vocab), dtype),
        (x, weight),
        torch.ones((), dtype=wide, device=device),
        {name: _cast(call, wide) for name, call in rivals.items()},
        inputs,
        (tokens + vocab) * hidden * x.element_size(),
        flops=(result, 2 * result),
        counterparts=dict.fromkeys((OURS, RECOMPUTED, MAIN_GRAD), per_token),
    )
    case.main_grad = lambda: trained.main_grad
    return case


def _cast(call: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Plain torch returns the loss of 16-bit logits in 16 bits; all rivals return float32."""
    return lambda: call().to(dtype)


def _fused_by_torch(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Callable[[], Tensor]]:
    if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return {}  # torch has it since 2.13
    options = torch.nn.LinearCrossEntropyOptions()
    return {TORCH: lambda: F.linear_cross_entropy(x, weight, target, options=options)}


def _peers(x: Tensor, weight: Tensor, target: Tensor, device: str) -> dict[str, Callable[[], Tensor]]:
    """Liger's default and its function for Hopper, which needs nvidia-cutlass-dsl; quack, which chooses by
    itself; CCE with and without leaving small gradients out.
    """
    rivals: dict[str, Callable[[], Tensor]] = {}
    functional = "liger_kernel.transformers.functional"
    if (liger := peer(LIGER, f"{functional}:liger_fused_linear_cross_entropy", device)) is not None:
        rivals[LIGER] = lambda: liger(x, weight, target)
    hopper = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    if (sm90 := peer(LIGER, f"{hopper}:LigerFusedLinearCrossEntropySM90Function", device)) is not None:
        rivals[LIGER_SM90] = lambda: sm90.apply(x, weight, target)
    if (cce := peer(CCE, "cut_cross_entropy:linear_cross_entropy", device)) is not None:
        rivals[CCE] = lambda: cce(x, weight, target, impl="cce")
        rivals[CCE_EXACT] = lambda: cce(x, weight, target, impl="cce_exact")
    if (quack := peer(QUACK, "quack.linear_cross_entropy:chunked_linear_cross_entropy", device)) is not None:
        rivals[QUACK] = lambda: quack(x, weight, target)
    return rivals


# tokens, hidden size, vocabulary: Llama-3 8B, and 70B's shard at a tensor-parallel size of 8; on a CPU GPT-2.
WORKLOADS = (
    Workload(
        "linear_cross_entropy",
        linear_cross_entropy_case,
        cpu=((512, 512, 32000), (2048, 768, 50304)),
        cuda=((4096, 4096, 128256), (8192, 4096, 128256), (8192, 8192, 16032)),
        rivals=RIVALS,
        tiny=(24, 16, 65),
    ),
)
GOALS = (
    CpuGoal("linear_cross_entropy", "float32", "both", OURS, 1.05, 1.05, extra_bytes=0.1, shape=1),
    CpuGoal("linear_cross_entropy", "float32", "both", MAIN_GRAD, 1.05, 1.05, extra_bytes=0.1, shape=1),
)
