"""Knowledge distillation from hidden states, without materialising the logits of student or teacher.

The student's logits of a chunk of tokens are compared with the teacher's, and become their own gradient in
place; chunks and sums of gradients are shared with `linear_cross_entropy`. Tokens that do not count are
removed before the first GEMM.

A teacher of hidden size H' adds 2NVH' FLOPs with a reduction, and 4NVH' where the backward pass recomputes
the logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.chunked_head import ALONE, Shards
from fastmp.ops.chunked_loss import ChunkedLoss, HeadArguments, check_head, opaque_passes, per_token
from fastmp.ops.core import checks
from fastmp.ops.core.registry import autocast, can_read_values, compute_dtype
from fastmp.ops.cross_entropy import first_outside
from fastmp.ops.linear_distillation_teachers import DistillationOptions, HiddenTeacher, TopkTeacher
from fastmp.ops.linear_log_probs import inverse_temperature
from fastmp.ops.reduction import check_reduction
from fastmp.profiling import traced

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def _fake_outputs(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    hidden, teacher = values["hidden"], values["teacher"]
    width = 6 if teacher.is_floating_point() else teacher.shape[1] + 3
    return per_token(hidden), per_token(hidden, width)


_TENSORS = "Tensor hidden, Tensor weight, Tensor teacher, Tensor teacher_values, Tensor? live, Tensor? scale"
_OPAQUE = opaque_passes(
    lambda values: HiddenTeacher if values["teacher"].is_floating_point() else TopkTeacher,
    DistillationOptions,
    _fake_outputs,
    {
        "forward": f"linear_distillation_losses({_TENSORS}, OPTIONS) -> (Tensor, Tensor)",
        "gradients": f"linear_distillation_gradients({_TENSORS}, Tensor kept, Tensor grad_loss,"
        f" Tensor(a!)? main_grad, OPTIONS, WANTED) -> (Tensor, Tensor)",
        "both": f"linear_distillation_both({_TENSORS}, Tensor grad_loss, OPTIONS, WANTED)"
        " -> (Tensor, Tensor, Tensor)",
    },
)
_hidden_loss = ChunkedLoss("linear_distillation", HiddenTeacher, _OPAQUE)
_topk_loss = ChunkedLoss("linear_topk_distillation", TopkTeacher, _OPAQUE)


def _number_of(live: Tensor | None, shape: tuple[int, ...], hidden: Tensor) -> Tensor:
    """Return the number of counted tokens, 0-dim; that of a mask stays on the device."""
    dtype = compute_dtype(hidden.dtype)
    if live is not None and live.dtype == torch.bool:
        return live.sum().to(dtype)
    number = math.prod(shape) if live is None else live.shape[0]
    return torch.full((), number, dtype=dtype, device=hidden.device)


def _beta_of(name: str, divergence: str, beta: float) -> float:
    """Return the teacher's share in the mixture: 0 for forward KL, 1 for reverse KL."""
    checks.check_choice(name, "divergence", divergence, DIVERGENCES)
    checks.check_finite(name, torch.float32, beta=beta)
    if divergence != "jsd":
        return float(divergence == "reverse_kl")
    message = '{}: beta must lie between 0 and 1, got {}; the limits are "forward_kl" and "reverse_kl"'
    checks.require(0 < beta < 1, message, name, beta)
    return float(beta)


def _live(
    name: str, mask: Tensor | None, num_tokens: int | None, shape: tuple[int, ...], hidden: Tensor
) -> Tensor | None:
    """Return the indices of the tokens that count, or while compiling without a number the mask, (N,)."""
    if mask is None:
        checks.require(num_tokens is None, "{}: num_tokens is {}, but there is no mask", name, num_tokens)
        return None
    fits = tuple(mask.shape) == tuple(shape)
    checks.require(fits, "{}: expected mask of shape {}, one for each token, got {}", name, shape, mask.shape)
    checks.require(mask.dtype == torch.bool, "{}: expected a mask of bool, got {}", name, mask.dtype)
    checks.check_same_device(name, hidden=hidden, mask=mask)
    mask = mask.reshape(-1)
    if num_tokens is not None:
        if can_read_values(mask):
            found = int(mask.sum())
            message = "{}: num_tokens is {}, but the mask has {} tokens"
            checks.require(found == num_tokens, message, name, num_tokens, found)
        return torch.nonzero_static(mask, size=num_tokens)[:, 0]
    return mask if torch.compiler.is_compiling() else mask.nonzero()[:, 0]


def _check_teacher(
    name: str, shape: torch.Size, head: HeadArguments, teacher: Tensor, teacher_weight: Tensor
) -> None:
    """Raise ValueError unless the teacher's hidden states and weight fit those of the student."""
    checks.check_floating(name, "teacher_hidden", teacher)
    checks.check_same(name, hidden=head.rows, teacher_hidden=teacher, teacher_weight=teacher_weight)
    checks.require(
        teacher.shape[:-1] == shape[:-1],
        "{}: expected teacher_hidden of shape {} + (H',) for hidden {}, got {}",
        *(name, tuple(shape[:-1]), shape, teacher.shape),
    )
    weight = head.weight
    checks.require(
        teacher_weight.dim() == 2 and teacher_weight.shape == (weight.shape[0], teacher.shape[-1]),
        "{}: expected teacher_weight of shape {} for weight {} and teacher_hidden {}, got {}; student and"
        " teacher need one vocabulary",
        *(name, (weight.shape[0], teacher.shape[-1]), weight.shape, teacher.shape, teacher_weight.shape),
    )


def _check_topk(
    name: str, hidden: Tensor, shape: tuple[int, ...], ids: Tensor, log_probs: Tensor, vocab_size: int,
    live: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError unless the teacher's tokens and their log-probabilities fit."""
    checks.check_floating(name, "teacher_log_probs", log_probs)
    checks.require(ids.dtype == torch.int64, "{}: expected int64 teacher_ids, got {}", name, ids.dtype)
    checks.check_same_device(name, hidden=hidden, teacher_ids=ids, teacher_log_probs=log_probs)
    fits = ids.dim() > 0 and tuple(ids.shape[:-1]) == tuple(shape) and ids.shape[-1] > 0
    message = "{}: expected teacher_ids of shape {} + (k,), the teacher's k tokens of each token, got {}"
    checks.require(fits, message, name, tuple(shape), ids.shape)
    checks.check_shape(name, ids.shape, to=("teacher_ids", ids), teacher_log_probs=log_probs)
    if not (can_read_values(ids) and can_read_values(log_probs)):
        return
    checks.check_memory(name, teacher_ids=ids, teacher_log_probs=log_probs)  # before torch reads them
    ids, log_probs = ids.reshape(-1, ids.shape[-1]), log_probs.reshape(-1, ids.shape[-1])
    if live is not None:
        ids, log_probs = ids[live], log_probs[live]
    at = first_outside(name, ids, vocab_size, 0, "teacher_ids")
    message = "{}: teacher_ids has {}, outside the vocabulary of {} ids"
    checks.require(at < 0, message, name, ids.reshape(-1)[at].item() if at >= 0 else "", vocab_size)
    if not ids.numel():
        return
    ordered = ids.sort(1).values
    distinct = not (ordered[:, 1:] == ordered[:, :-1]).any()
    checks.require(distinct, "{}: teacher_ids of a token must be distinct, got one twice", name)
    mass = log_probs.double().exp().sum(1).max().item()
    checks.require(
        mass < 1.02,
        "{}: teacher_log_probs must be natural log-probabilities, but those of one token sum to a mass of {}",
        *(name, mass),
    )


def linear_distillation_of(
    shards: Shards, name: str, hidden: Tensor, weight: Tensor, teacher: tuple[Tensor, Tensor], *, topk: bool,
    divergence: str, beta: float, temperature: float | Tensor, mask: Tensor | None, num_tokens: int | None,
    vocab_size: int | None, reduction: str, workspace: int | None,
) -> Tensor:  # fmt: skip
    """Compute a distillation loss from one of several shards of the weights; errors begin with `name`.

    `mask`, `temperature` and a teacher's `topk` are those of all tokens, hidden states the rows that `shards`
    gathers.
    """
    # 1. Check the arguments.
    beta = _beta_of(name, divergence, beta)
    check_reduction(name, reduction)
    head = check_head(name, shards, hidden, weight, None, 0, vocab_size, workspace)
    first, second = teacher[0].detach(), teacher[1].detach()
    if not topk:
        first, second = autocast(first, second)
        _check_teacher(name, hidden.shape, head, first, second)
    shape = shards.tokens(tuple(hidden.shape))
    scale = inverse_temperature(name, temperature, shape, head.rows)
    live = _live(name, mask, num_tokens, shape, head.rows)
    if topk:
        _check_topk(name, head.rows, shape, first, second, head.vocab_size, live)
        second = second.to(compute_dtype(head.rows.dtype)).reshape(-1, second.shape[-1])
    # 2. Compute the losses in chunks of rows.
    first = first.reshape(-1, first.shape[-1])
    options = DistillationOptions(head.vocab_start, head.vocab_size, beta, head.workspace)
    return (_topk_loss if topk else _hidden_loss).reduced(
        head, options, (first, second, live, scale), shape, reduction,
        lambda: _number_of(live, shape, head.rows),
    )  # fmt: skip


@traced("fastmp.linear_distillation")
def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    num_tokens: int | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    workspace: int | None = None,
) -> Tensor:
    """Divergence of a student from a teacher, both output layers fused: no logits are materialised.

    With p = softmax(hidden weight^T / temperature) and q the teacher's, in float32 (float64 for float64) from
    logits in the dtype of hidden, or of autocast. No loss is negative, and equal logits have loss zero. The
    teacher receives no gradient. The gradient of the weight is added to the parameter's `main_grad` if there
    is one, as in `linear_cross_entropy`.

    Args:
        hidden: (..., H) float64, float32, bfloat16 or float16, of the student.
        weight: (V, H) of the same dtype and device.
        teacher_hidden: (..., H') of the same dtype and device, for the same tokens.
        teacher_weight: (V, H') of the same dtype and device, over the same vocabulary.
        divergence: "forward_kl", KL(q || p), covers all that the teacher does; "reverse_kl", KL(p || q),
            avoids what it does not; "jsd", beta KL(q || m) + (1 - beta) KL(p || m) with the mixture
            m = beta q + (1 - beta) p, the generalised Jensen-Shannon divergence.
        beta: the teacher's share in the mixture, between 0 and 1; for "jsd" only.
        temperature: divisor of both logits: positive, one number or one per token (...). The loss is not
            multiplied by its square.
        mask: (...) bool, True for tokens that count. The others have loss and gradient zero, and take no part
            in any GEMM. The host reads a mask, and waits for the device that it lies on.
        num_tokens: how many tokens the mask has, if the host knows; then it does not wait.
        vocab_size: number of ids; columns from this one on are padding, with probability zero. Default V.
        reduction: "mean" (over tokens that count), "sum" or "none". With "mean" or "sum" the forward pass
            computes the gradients, for two thirds of the FLOPs; not with a `main_grad`, nor in float16. For a
            second backward pass, retain the graph.
        workspace: bytes of logits at a time, of student and teacher together, as in `linear_cross_entropy`.

    Returns:
        (...), or 0-dim if reduced; float64 for float64, else float32.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.

    Example:
        hidden, weight = torch.randn(8, 16), torch.randn(64, 16, requires_grad=True)
        teacher, teacher_weight = torch.randn(8, 32), torch.randn(64, 32)
        linear_distillation(hidden, weight, teacher, teacher_weight, divergence="jsd").backward()

    Hinton et al., 2015 (arXiv 1503.02531); Agarwal et al., "On-Policy Distillation", 2024 (2306.13649).
    """
    return linear_distillation_of(
        ALONE, "linear_distillation", hidden, weight, (teacher_hidden, teacher_weight), topk=False,
        divergence=divergence, beta=beta, temperature=temperature, mask=mask, num_tokens=num_tokens,
        vocab_size=vocab_size, reduction=reduction, workspace=workspace,
    )  # fmt: skip


@traced("fastmp.linear_topk_distillation")
def linear_topk_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    num_tokens: int | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    workspace: int | None = None,
) -> Tensor:
    """Divergence of a student from the teacher's k likeliest tokens, and one bucket for all others.

    The student's mass of the other tokens is summed over their own logits, so it keeps its precision where
    it is small. A teacher's tail mass 1 - sum(q) of zero contributes zero to forward KL and JSD; reverse KL
    takes it as 2^-23, what rounding leaves of it, so that the student's tail is pushed down and not divided
    by zero.

    Args:
        hidden, weight: as in `linear_distillation`.
        teacher_ids: (..., k) int64, distinct ids of the teacher's tokens, in any order.
        teacher_log_probs: (..., k), their natural log-probabilities under the teacher's softmax over the
            whole vocabulary, at the temperature of the loss. -inf is a probability of zero.
        temperature: divisor of the student's logits: positive, one number or one per token (...).

        The other options are those of `linear_distillation`, of the k + 1 buckets.

    Returns:
        (...), or 0-dim if reduced; float64 for float64, else float32.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; on the CPU also ids of a token that counts
            which are outside the vocabulary or not distinct, and log-probabilities of a mass above one.

    Example:
        hidden, weight = torch.randn(8, 16), torch.randn(64, 16, requires_grad=True)
        log_probs, ids = torch.randn(8, 64).log_softmax(-1).topk(4)
        linear_topk_distillation(hidden, weight, ids, log_probs).backward()
    """
    return linear_distillation_of(
        ALONE, "linear_topk_distillation", hidden, weight, (teacher_ids, teacher_log_probs), topk=True,
        divergence=divergence, beta=beta, temperature=temperature, mask=mask, num_tokens=num_tokens,
        vocab_size=vocab_size, reduction=reduction, workspace=workspace,
    )  # fmt: skip
