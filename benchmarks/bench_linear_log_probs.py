"""Log-probabilities of chosen tokens from hidden states, without and with the entropy, beside full logits.

Plain torch makes all logits, and casts them to float32 as trainers of policies do. Liger gives the same
number as a cross-entropy for each token, without an entropy. `python -m benchmarks.bench_linear_log_probs`
prints processor time and memory at a large vocabulary, on a CPU: the table of docs/reinforcement-learning.md.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import COMPILE, EAGER, LIGER, OURS, Case, Workload, against_torch, title
from benchmarks.compare import print_cpu_table
from benchmarks.peers import peer
from fastmp.ops import linear_log_probs
from fastmp.ops.core.registry import compute_dtype

TEMPERATURE, BONUS = 0.8, 0.01


def linear_log_probs_case(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0,
    *, with_entropy: bool,
) -> Case:  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, hidden, device=device, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, device=device, generator=generator).mul_(hidden**-0.5).to(dtype)
    weight.requires_grad_()
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        log_p = (F.linear(x, weight).to(wide) / TEMPERATURE).log_softmax(-1)
        chosen = log_p.gather(-1, target[:, None])[:, 0]
        return chosen - BONUS * (log_p.exp() * log_p).sum(-1) if with_entropy else chosen

    def ours() -> Tensor:
        if not with_entropy:
            return linear_log_probs(x, weight, target, temperature=TEMPERATURE)
        chosen, entropy = linear_log_probs(x, weight, target, temperature=TEMPERATURE, return_entropy=True)
        return chosen + BONUS * entropy

    rivals = against_torch(ours, eager, x, weight)
    name = "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy"
    if not with_entropy and (liger := peer(LIGER, name, device)) is not None:
        rivals[LIGER] = lambda: -liger(x / TEMPERATURE, weight, target, reduction="none").to(wide)
    size, product = x.element_size(), 2 * tokens * vocab * hidden
    return Case(
        title(f"linear_log_probs{' entropy' * with_entropy}", (tokens, hidden, vocab), dtype),
        (x, weight),
        torch.randn(tokens, device=device, generator=generator, dtype=wide),
        rivals,
        (tokens + vocab) * hidden * size + tokens * 8,
        (tokens + vocab) * hidden * size,
        flops=(product, 2 * product),
    )


def _workload(name: str, with_entropy: bool) -> Workload:
    return Workload(
        name,
        partial(linear_log_probs_case, with_entropy=with_entropy),
        cpu=((512, 512, 32000), (1024, 256, 128256)),
        cuda=((4096, 4096, 128256), (16384, 4096, 128256), (16384, 8192, 16032)),
        rivals=(OURS, EAGER, COMPILE) + (LIGER,) * (not with_entropy),
        tiny=(24, 16, 65),
    )


WORKLOADS = (
    _workload("linear_log_probs", with_entropy=False),
    _workload("linear_log_probs_entropy", with_entropy=True),
)
SHAPES = dict.fromkeys(("log_probs_stats", "log_probs_grad_"), ((8192, 50304), (8192, 128256)))


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`, with the entropy; one writes over its logits."""
    tokens, vocab = shape
    generator = torch.Generator(device).manual_seed(seed)
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    logits = torch.randn(shape, device=device, generator=generator).to(dtype)
    scale = torch.full((tokens,), 1 / TEMPERATURE, dtype=compute_dtype(dtype), device=device)
    if op == "log_probs_stats":
        return logits, target, scale, 0, vocab, True
    top, log_total, entropy = (torch.full_like(scale, value) for value in (4.0, 8.0, 10.0))
    grad = torch.full_like(scale, 1 / tokens)
    return logits, target, top, log_total, grad, entropy, BONUS * grad, scale, 0, vocab, -100


if __name__ == "__main__":
    cases = (w.case((512, 256, 128256), dtype, "cpu") for w in WORKLOADS for dtype in w.dtypes)
    print_cpu_table(cases, (EAGER, OURS))
