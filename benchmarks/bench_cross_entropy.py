"""Cross-entropy of fastmp, of torch, and as in Megatron-LM.

fastmp writes the gradient into new memory or over the logits in the backward pass, or over the logits in the
forward pass where the gradients of the losses are known ("at once"). The last one is a workload of its own,
because its floor has one read less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import COMPILE, EAGER, LIGER, OURS, QUACK, Case, CpuGoal, Workload, against_torch, title
from benchmarks.peers import peer
from fastmp.ops import OPS, cross_entropy

IN_PLACE = "fastmp in place"
AT_ONCE = "fastmp at once"
MEGATRON = "as Megatron"
MEGATRON_COMPILED = "as Megatron, compiled"
LIGER_MEGATRON = "Liger for Megatron"
RIVALS = (OURS, IN_PLACE, EAGER, COMPILE, MEGATRON, MEGATRON_COMPILED, LIGER, LIGER_MEGATRON, QUACK)
RIVALS_AT_ONCE = (AT_ONCE, IN_PLACE, EAGER, COMPILE, LIGER, LIGER_MEGATRON, QUACK)


def as_megatron(fuse: Callable[[Callable], Callable]) -> Callable[[Tensor, Tensor], Tensor]:
    """The steps of Megatron-LM's fused vocabulary-parallel loss where one rank has the whole vocabulary.

    It computes in float32, keeps the probabilities until the backward pass and turns them into the gradient
    there. `fuse` compiles what lies between two of its collectives, which have nothing to do here.
    """

    @fuse
    def exponentials(logits: Tensor, top: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = logits.float() - top[:, None]
        exps = shifted.exp()
        return shifted.gather(1, target[:, None])[:, 0], exps, exps.sum(1)

    @fuse
    def loss_of(picked: Tensor, exps: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return total.log() - picked, exps / total[:, None]

    @fuse
    def gradient(probabilities: Tensor, target: Tensor, grad: Tensor) -> Tensor:
        hit = torch.ones_like(target, dtype=probabilities.dtype)[:, None]
        return probabilities.scatter_add(1, target[:, None], -hit) * grad[:, None]

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            loss, probabilities = loss_of(*exponentials(logits, logits.amax(1).float(), target))
            ctx.save_for_backward(probabilities, target)
            ctx.dtype = logits.dtype
            return loss

        @staticmethod
        def backward(ctx, grad):
            return gradient(*ctx.saved_tensors, grad).to(ctx.dtype), None

    return Loss.apply


def cross_entropy_case(tokens: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    return _case("cross_entropy", RIVALS, tokens, vocab, dtype, device, seed)


def at_once_case(tokens: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """Make the case with known loss gradients, in which logits are read only once."""
    case = _case("cross_entropy_at_once", RIVALS_AT_ONCE, tokens, vocab, dtype, device, seed)
    target = torch.zeros_like(case.grad, dtype=torch.int64)
    loss_and_grad = case.leaves[0], target, case.grad, None, vocab, -100, 0.0, 0.0
    both = OPS["cross_entropy_loss_grad_"].traffic(*loss_and_grad)
    return replace(case, backward_bytes=both - case.forward_bytes)


def _case(
    name: str, wanted: tuple[str, ...], tokens: int, vocab: int, dtype: torch.dtype, device: str, seed: int
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(tokens, vocab, device=device, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    per_token = torch.float64 if dtype == torch.float64 else torch.float32
    grad = torch.full((tokens,), 1 / tokens, device=device, dtype=per_token)

    def eager(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none")

    megatron, megatron_compiled = as_megatron(lambda step: step), as_megatron(_compiled_step)
    # The gradient lands in the logits, so a second run works on those numbers: the time is the same.
    ours = partial(cross_entropy, logits, target, reduction="none")
    rivals = against_torch(ours, eager, logits, target) | {
        IN_PLACE: lambda: ours(grad_in_place=True),
        AT_ONCE: lambda: ours(loss_grad=grad),
        MEGATRON: lambda: megatron(logits, target),
        MEGATRON_COMPILED: lambda: megatron_compiled(logits, target),
    }
    if (liger := peer(LIGER, "liger_kernel.ops.cross_entropy:LigerCrossEntropyFunction", device)) is not None:
        rivals[LIGER] = lambda: liger.apply(logits, target, None, -100, 0.0, 0.0, "none")[0]
    if (drop_in := peer(LIGER, "liger_kernel.megatron:LigerMegatronCrossEntropy", device)) is not None:
        rows, ids = (tokens, 1, vocab), (tokens, 1)
        rivals[LIGER_MEGATRON] = lambda: drop_in()(logits.view(rows), target.view(ids)).view(tokens)
    if (quack := peer(QUACK, "quack.cross_entropy:cross_entropy", device)) is not None:
        rivals[QUACK] = lambda: quack(logits, target, reduction="none", inplace_backward=True)
    stats = (logits, target, 0, vocab, False)
    merged = grad[:, None].expand(-1, 2)
    gradient = (logits, target, merged, grad, None, 0, vocab, -100, 0.0, 0.0)
    return Case(
        title(name, (tokens, vocab), dtype),
        (logits,),
        grad,
        {name: _cast(call, per_token) for name, call in rivals.items() if name in wanted},
        OPS["cross_entropy_stats"].traffic(*stats),
        OPS["cross_entropy_grad"].traffic(*gradient),
    )


def _compiled_step(step: Callable) -> Callable:
    return torch.compile(step, fullgraph=True, dynamic=False)


def _cast(call: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Plain torch returns the loss of 16-bit logits in 16 bits; all rivals return float32."""
    return lambda: call().to(dtype)


_LOGITS = ((8192, 50304), (8192, 128256), (4096, 129280), (8192, 16032))
WORKLOADS = (
    Workload(
        "cross_entropy", cross_entropy_case, cpu=((2048, 50304),), cuda=_LOGITS, rivals=RIVALS, tiny=(8, 65)
    ),
    Workload(
        "at_once",
        at_once_case,
        cpu=((2048, 50304),),
        cuda=_LOGITS,
        rivals=RIVALS_AT_ONCE,
        directions=("both",),
        tiny=(8, 65),
    ),
)
GOALS = (
    CpuGoal("cross_entropy", "float32", "both", IN_PLACE, 8.0, 8.0),
    CpuGoal("cross_entropy", "float32", "both", OURS, 4.0, 3.0),
    CpuGoal("cross_entropy", "bfloat16", "both", IN_PLACE, 5.5, 5.5),
    CpuGoal("cross_entropy", "bfloat16", "both", OURS, 3.0, 2.5),
    CpuGoal("at_once", "float32", "both", AT_ONCE, 12.0, 12.0),
    CpuGoal("at_once", "bfloat16", "both", AT_ONCE, 8.0, 8.0),
)
SHAPES = {
    f"cross_entropy{name}": _LOGITS
    for name in ("", "_stats", "_merge", "_grad", "_grad_", "_loss_grad_", "_promise_")
}


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
    if op == "cross_entropy":
        return logits, target, None, None, 0, vocab, -100, 0.0, 0.0, False
    if op == "cross_entropy_stats":
        return logits, target, 0, vocab, False
    loss_grad = torch.full((tokens,), 1 / tokens, dtype=per_token, device=device)
    if op == "cross_entropy_promise_":
        return logits, loss_grad.clone(), loss_grad, target, -100
    if op == "cross_entropy_loss_grad_":
        return logits, target, loss_grad, None, vocab, -100, 0.0, 0.0
    merged = torch.full((tokens, 2), 4.0, dtype=per_token, device=device)
    return logits, target, merged, loss_grad, None, 0, vocab, -100, 0.0, 0.0
