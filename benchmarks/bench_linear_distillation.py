"""Distillation from hidden states, the mean over tokens, beside full logits and chunks of them.

Plain torch makes all logits of both models and casts them to float32. "torch in chunks" is what Liger's
chunked losses do, in plain torch: the loss and the gradients of some tokens at a time by autograd, with the
gradients summed. On a GPU Liger's own fused JSD runs, too. `python -m benchmarks.bench_linear_distillation`
prints processor time and memory at a large vocabulary, on a CPU: the table of docs/how-to/distillation.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import COMPILE, EAGER, LIGER, OURS, Case, Workload, against_torch, title
from benchmarks.compare import print_cpu_table
from benchmarks.peers import peer
from fastmp.ops import linear_distillation, linear_topk_distillation
from fastmp.ops.core.registry import compute_dtype

CHUNKED = "torch in chunks"
TEMPERATURE, TOP_K = 2.0, 64
CHUNK = {"cpu": 128, "cuda": 1024}  # tokens


def _log_probs(x: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return (logits.to(compute_dtype(logits.dtype)) / TEMPERATURE).log_softmax(-1)


def _sum(log_p: Tensor, log_q: Tensor, divergence: str) -> Tensor:
    """The divergence of all tokens, by torch's own function."""
    kl = partial(F.kl_div, log_target=True, reduction="sum")
    if divergence == "forward_kl":
        return kl(log_p, log_q)
    if divergence == "reverse_kl":
        return kl(log_q, log_p)
    log_m = torch.logsumexp(torch.stack([log_p, log_q]), 0) - torch.log(log_p.new_tensor(2.0))
    return (kl(log_m, log_p) + kl(log_m, log_q)) / 2


def _buckets(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the teacher's tokens and of all others."""
    chosen = log_p.gather(-1, ids)
    others = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], -1)


class _InChunks(torch.autograd.Function):
    """The mean of `loss(x, weight, rows)` over tokens; the forward pass computes the gradients by chunks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, loss: Callable[[Tensor, Tensor, slice], Tensor]
    ) -> Tensor:
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        total = x.new_zeros((), dtype=compute_dtype(x.dtype))
        size = CHUNK[x.device.type]
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            with torch.enable_grad():
                part, head = x[rows].detach().requires_grad_(), weight.detach().requires_grad_()
                value = loss(part, head, rows) / len(x)
            grads = torch.autograd.grad(value, (part, head))
            dx[rows] = grads[0]
            dweight += grads[1]
            total += value.detach()
        ctx.save_for_backward(dx, dweight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dx, dweight = ctx.saved_tensors
        return dx * grad.to(dx.dtype), dweight * grad.to(dweight.dtype), None


def linear_distillation_case(
    tokens: int, hidden: int, teacher_hidden: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0,
    *, divergence: str, topk: bool = False,
) -> Case:  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).mul_(scale).to(dtype)

    x, weight = (
        draw(tokens, hidden).requires_grad_(),
        draw(vocab, hidden, scale=hidden**-0.5).requires_grad_(),
    )
    y, teacher = draw(tokens, teacher_hidden), draw(vocab, teacher_hidden, scale=teacher_hidden**-0.5)
    options = {"divergence": divergence, "temperature": TEMPERATURE}
    ours = partial(linear_distillation, x, weight, y, teacher, **options)
    if topk:
        parts = [
            _log_probs(y[rows], teacher).topk(min(TOP_K, vocab // 2))
            for rows in torch.arange(tokens).split(CHUNK[x.device.type])
        ]
        log_q, ids = (torch.cat(each) for each in zip(*parts, strict=True))
        tail = (-torch.expm1(log_q.logsumexp(-1, keepdim=True))).log()
        ours = partial(linear_topk_distillation, x, weight, ids, log_q, **options)
        log_q = torch.cat([log_q, tail], -1)

    def loss(x: Tensor, weight: Tensor, rows: slice) -> Tensor:
        log_p = _log_probs(x, weight)
        if topk:
            return _sum(_buckets(log_p, ids[rows]), log_q[rows], divergence)
        with torch.no_grad():
            of_teacher = _log_probs(y[rows], teacher)
        return _sum(log_p, of_teacher, divergence)

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return loss(x, weight, slice(tokens)) / tokens

    rivals = against_torch(ours, eager, x, weight)
    rivals[CHUNKED] = lambda: _InChunks.apply(x, weight, loss)
    module = "liger_kernel.transformers.fused_linear_jsd:LigerFusedLinearJSD"
    if divergence == "jsd" and not topk and (liger := peer(LIGER, module, device)) is not None:
        fused = liger(jsd_beta=0.5, temperature=TEMPERATURE)
        rivals[LIGER] = lambda: fused(x, weight, y, teacher, None).to(compute_dtype(dtype))
    size, student = x.element_size(), 2 * tokens * vocab * hidden
    of_teacher = 0 if topk else 2 * tokens * vocab * teacher_hidden
    name = f"linear_{'topk_' * topk}distillation {divergence}"
    return Case(
        title(name, (tokens, hidden, teacher_hidden, vocab), dtype),
        (x, weight),
        torch.ones((), dtype=compute_dtype(dtype), device=device),
        rivals,
        (tokens + vocab) * (hidden + (0 if topk else teacher_hidden)) * size,
        (tokens + vocab) * hidden * size,
        flops=(student + of_teacher, 2 * student),
    )


def _workload(name: str, divergence: str, topk: bool = False) -> Workload:
    return Workload(
        name,
        partial(linear_distillation_case, divergence=divergence, topk=topk),
        cpu=((512, 256, 512, 32000),),
        cuda=((4096, 2048, 4096, 128256), (16384, 2048, 4096, 128256)),
        rivals=(OURS, EAGER, COMPILE, CHUNKED) + (LIGER,) * (divergence == "jsd"),
        tiny=(24, 16, 8, 65),
    )


WORKLOADS = (
    _workload("linear_distillation_forward_kl", "forward_kl"),
    _workload("linear_distillation_jsd", "jsd"),
    _workload("linear_topk_distillation", "reverse_kl", topk=True),
)
SHAPES = dict.fromkeys(("distillation_sums", "distillation_grad_"), ((8192, 50304), (8192, 128256)))


def arguments(op: str, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`, with forward KL; one writes over its logits."""
    tokens, vocab = shape
    generator = torch.Generator(device).manual_seed(seed)
    pair = [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2)]
    scale = torch.full((tokens,), 1 / TEMPERATURE, dtype=compute_dtype(dtype), device=device)
    normalisers = scale.new_tensor([4.0, 8.0, 4.0, 8.0]).repeat(tokens, 1)
    place = scale, 0.0, 0, vocab
    if op == "distillation_sums":
        return (*pair, normalisers, *place)
    return (*pair, normalisers, torch.full_like(scale, 0.1), torch.full_like(scale, 1 / tokens), *place)


if __name__ == "__main__":
    cases = (w.case((512, 256, 512, 128256), dtype, "cpu") for w in WORKLOADS for dtype in w.dtypes)
    print_cpu_table(cases, (EAGER, CHUNKED, OURS), rounds=2)
