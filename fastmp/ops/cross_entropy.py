"""Cross-entropy over a vocabulary that may be sharded: three numbers a token, merged, then the gradient.

Each shard reads its logits once and keeps three numbers per token: the maximum, the sum of exponentials and
the target's logit. The statistics of all shards merge into the loss and the log-sum-exp (lse), and the
gradient needs only the logits and the lse. So nothing else of size tokens x vocabulary exists, and the
gradient may overwrite the logits.
loss = w [(1 - a) (lse - x_t) + a / V sum_j (lse - x_j) + z lse^2], where V counts the whole vocabulary
without padding, x_t is the target's logit, w the token's weight, a the label smoothing, z the z-loss.
Where a rank holds the whole vocabulary and knows the gradient of each token's loss beforehand, one launch
gives loss and gradient: a row is read from memory once and, still in a cache, turned into its gradient.
N tokens, V columns of this shard (padding included), P shards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastmp.host import HOST
from fastmp.ops.core import checks
from fastmp.ops.core.registry import can_read_values, compute_dtype, register, shared_memory
from fastmp.ops.cross_entropy_triton import (
    launch_grad,
    launch_grad_into,
    launch_loss,
    launch_loss_grad,
    launch_merge,
    launch_stats,
    loss_grad_prefers_cuda,
    real_columns,
)
from fastmp.ops.reduction import check_reduction, divided, divisor_of, grad_of_each, reduced
from fastmp.profiling import traced

_NAN = float("nan")


def _stats_reference(logits, target, vocab_start, vocab_size, with_sum):
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    x = logits[:, :real].to(compute_dtype(logits.dtype))
    if real == 0:
        empty = x.new_tensor([-torch.inf, 0, 0, 0][: 4 if with_sum else 3])
        return empty.repeat(len(x), 1)
    top = x.amax(1)
    finite = top.masked_fill(top == -torch.inf, 0)
    column = target - vocab_start
    here = (column >= 0) & (column < real)
    target_logit = x.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    columns = [top, (x - finite[:, None]).exp().sum(1), target_logit]
    return torch.stack(columns + [x.sum(1)] * with_sum, 1)


def _merge_reference(stats, target, token_weight, vocab_size, ignore_index, label_smoothing, z_loss):
    top = stats[..., 0].amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    lse = top + (stats[..., 1] * (stats[..., 0] - top).exp()).sum(0).log()
    loss = (1 - label_smoothing) * (lse - stats[..., 2].sum(0)) + z_loss * lse * lse
    if label_smoothing:
        loss = loss + label_smoothing * (lse - stats[..., 3].sum(0) / vocab_size)
    if token_weight is not None:
        loss = loss * token_weight
    loss = loss.where((target >= 0) & (target < vocab_size), _NAN)
    return loss.masked_fill(target == ignore_index, 0), lse


def _reference(
    logits, target, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    grad_in_place, divisor=None,
):  # fmt: skip
    """Loss and lse, of a whole vocabulary where no stats are given; with a divisor the sum over it."""
    if stats is None:
        stats = _stats_reference(logits, target, vocab_start, vocab_size, label_smoothing > 0)[None]
    options = vocab_size, ignore_index, label_smoothing, z_loss
    loss, lse = _merge_reference(stats, target, token_weight, *options)
    return divided(loss, divisor), lse


def _grad_reference(
    logits, target, lse, grad_loss, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing,
    z_loss, divisor=None,
):  # fmt: skip
    grad_loss = grad_of_each(grad_loss, target, divisor)
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    scale = grad_loss if token_weight is None else grad_loss * token_weight
    scale = scale.where((target >= 0) & (target < vocab_size), _NAN)[:, None]
    probability = (logits[:, :real].to(lse.dtype) - lse[:, None]).exp()
    is_target = torch.arange(vocab_start, vocab_start + real, device=target.device) == target[:, None]
    grad = probability * (1 + 2 * z_loss * lse[:, None]) - label_smoothing / vocab_size
    grad = scale * (grad - (1 - label_smoothing) * is_target.to(lse.dtype))
    out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    out[:, :real] = grad.masked_fill((target == ignore_index)[:, None], 0)
    return out


def _grad_reference_(logits, *options):
    logits.copy_(_grad_reference(logits, *options))


def _loss_grad_reference_(logits, target, loss_grad, token_weight, vocab_size, *options):
    stats = _stats_reference(logits, target, 0, vocab_size, options[1] > 0)
    loss, lse = _merge_reference(stats[None], target, token_weight, vocab_size, *options)
    _grad_reference_(logits, target, lse, loss_grad, token_weight, 0, vocab_size, *options)
    return loss


def check_upstream_grad(op: str, grad_loss: Tensor, expected: Tensor, ignored: Tensor) -> None:
    """Assert, without host-device synchronisation, that `grad_loss` equals `expected` up to rounding.

    Raises:
        RuntimeError: it does not, for a token that is not ignored.
    """
    same = (grad_loss - expected).abs() <= 8 * torch.finfo(expected.dtype).eps * expected.abs()
    torch._assert_async(
        (same | ignored).all(),
        f"{op}: the loss received an upstream gradient other than the loss_grad passed to it",
    )


def _check_upstream_grad_reference_(grad, grad_loss, loss_grad, target, ignore_index):
    checks.check_floating("cross_entropy_promise_", "grad", grad)
    check_upstream_grad("cross_entropy", grad_loss, loss_grad, target == ignore_index)


def _fake(
    logits, target, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    grad_in_place, divisor=None,
):  # fmt: skip
    lse = logits.new_empty(logits.shape[0], dtype=compute_dtype(logits.dtype))
    return torch.empty_like(lse) if divisor is None else lse.new_empty(()), lse


# Operations of each op: an exponential counts as one, and columns that are padding as none.


def _flops(logits, target, stats, token_weight, vocab_start, vocab_size, *options) -> int:
    if stats is not None:
        return _merge_flops(stats)
    width = 4 if options[1] > 0 else 3
    columns = real_columns(logits.shape[1], vocab_start, vocab_size)
    return logits.shape[0] * (columns * (width + 1) + width + 8)


def _merge_flops(stats, *options) -> int:
    return stats.shape[1] * (stats.shape[0] * (stats.shape[2] + 2) + 6)


def _traffic(logits, target, stats, token_weight, *options) -> int:
    """With stats the logits are not read."""
    read = [logits if stats is None else stats, target, *([] if token_weight is None else [token_weight])]
    moved = [*read, *_fake(logits, target, stats, token_weight, *options)]
    return sum(tensor.numel() * tensor.element_size() for tensor in moved)


def _grad_flops(logits, target, lse, grad_loss, token_weight, vocab_start, vocab_size, *options) -> int:
    return logits.shape[0] * real_columns(logits.shape[1], vocab_start, vocab_size) * 5


register(
    "cross_entropy_stats(Tensor logits, Tensor target, int vocab_start, int vocab_size, bool with_sum)"
    " -> Tensor",
    reference=_stats_reference,
    triton=launch_stats,
    fake=lambda logits, target, vocab_start, vocab_size, with_sum: logits.new_empty(
        (logits.shape[0], 4 if with_sum else 3), dtype=compute_dtype(logits.dtype)
    ),
    flops=lambda logits, target, vocab_start, vocab_size, with_sum: (
        logits.shape[0] * real_columns(logits.shape[1], vocab_start, vocab_size) * (5 if with_sum else 4)
    ),
)
register(
    "cross_entropy_merge(Tensor stats, Tensor target, Tensor? token_weight, int vocab_size, int ignore_index,"
    " float label_smoothing, float z_loss) -> (Tensor loss, Tensor lse)",
    reference=_merge_reference,
    triton=launch_merge,
    fake=lambda stats, *options: (stats.new_empty(stats.shape[1]), stats.new_empty(stats.shape[1])),
    flops=_merge_flops,
)
_GRAD_OPTIONS = (
    "Tensor target, Tensor lse, Tensor grad_loss, Tensor? token_weight, int vocab_start, int vocab_size, "
    "int ignore_index, float label_smoothing, float z_loss, float? divisor=None"
)
register(
    f"cross_entropy_grad(Tensor logits, {_GRAD_OPTIONS}) -> Tensor",
    reference=_grad_reference,
    triton=launch_grad,
    fake=lambda logits, *options: logits.new_empty(logits.shape),
    flops=_grad_flops,
)
register(
    f"cross_entropy_grad_(Tensor(a!) logits, {_GRAD_OPTIONS}) -> ()",
    reference=_grad_reference_,
    triton=lambda logits, *options: launch_grad_into(logits, logits, *options),
    fake=lambda logits, *options: None,
    flops=_grad_flops,
)
register(
    "cross_entropy_promise_(Tensor(a!) grad, Tensor grad_loss, Tensor loss_grad, Tensor target,"
    " int ignore_index) -> ()",
    reference=_check_upstream_grad_reference_,
    fake=lambda *arguments: None,
    traffic=lambda grad, grad_loss, loss_grad, target, ignore_index: (
        grad_loss.nbytes + loss_grad.nbytes + target.nbytes
    ),
)
_loss_and_grad = register(
    "cross_entropy_loss_grad_(Tensor(a!) logits, Tensor target, Tensor loss_grad, Tensor? token_weight,"
    " int vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor",
    reference=_loss_grad_reference_,
    triton=launch_loss_grad,
    fake=lambda logits, target, loss_grad, *options: loss_grad.new_empty(logits.shape[0]),
    flops=lambda logits, target, loss_grad, token_weight, vocab_size, ignore_index, smoothing, z_loss: (
        logits.shape[0] * min(vocab_size, logits.shape[1]) * (10 if smoothing else 9)
    ),
    autograd_formula="cross_entropy_promise_(logits, grad, loss_grad, target, ignore_index) -> ; "
    "logits -> logits",
    prefers_cuda=lambda logits, *others: loss_grad_prefers_cuda(
        logits.shape[1], logits.element_size(), shared_memory(logits.device.index)
    ),
)


_cross_entropy = register(
    "cross_entropy(Tensor logits, Tensor target, Tensor? stats, Tensor? token_weight, int vocab_start,"
    " int vocab_size, int ignore_index, float label_smoothing, float z_loss, bool grad_in_place,"
    " float? divisor=None) -> (Tensor loss, Tensor lse)",
    reference=_reference,
    triton=launch_loss,
    fake=_fake,
    flops=_flops,
    traffic=_traffic,
    autograd_formula={
        "grad_in_place": "cross_entropy_grad_(logits, target, lse, grad_loss, token_weight, vocab_start,"
        " vocab_size, ignore_index, label_smoothing, z_loss, divisor) -> ; logits -> logits",
        "": "cross_entropy_grad(logits, target, lse, grad_loss, token_weight, vocab_start, vocab_size,"
        " ignore_index, label_smoothing, z_loss, divisor) -> logits",
    },
)


def check_range(op: str, target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise for ids outside the vocabulary where they may be looked at: eager CPU tensors."""
    if can_read_values(target):
        check_ids(op, target, vocab_size, ignore_index)


def check_ids(op: str, target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise for ids outside the vocabulary; reads them."""
    at = first_outside(target, vocab_size, ignore_index)
    if at >= 0:
        wrong = target.reshape(-1)[at].item()
        raise ValueError(
            f"{op}: target {wrong} is outside the vocabulary of {vocab_size} ids and is not ignore_index "
            f"{ignore_index}"
        )


def first_outside(target: Tensor, size: int, ignored: int) -> int:
    """Where the first id lies that is neither in [0, size) nor `ignored`, in a CPU tensor of int64, or -1."""
    if HOST is not None and target.is_contiguous():
        return HOST.first_outside(target.data_ptr(), target.numel(), size, ignored)
    flat = target.reshape(-1)
    wrong = (((flat < 0) | (flat >= size)) & (flat != ignored)).nonzero()
    return int(wrong[0]) if len(wrong) else -1


def check_options(op: str, target: Tensor, label_smoothing: float, z_loss: float, **per_token: Any) -> None:
    """Check what all losses of `target` take; of `per_token`, tensors alone."""
    if target.dtype != torch.int64:
        raise ValueError(f"{op}: target must be int64, got {target.dtype}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1], got {label_smoothing}")
    if z_loss < 0:
        raise ValueError(f"{op}: z_loss must not be negative, got {z_loss}")
    for name, given in per_token.items():
        if isinstance(given, Tensor):
            fits, misfit = given.shape == target.shape, "{}: {} {} does not fit target {}"
            checks.require(fits, misfit, op, name, given.shape, target.shape)
            checks.check_same_device(op, target=target, **{name: given})
            free = not given.requires_grad
            checks.require(free, "{}: {} requires a gradient, but receives none", op, name)


def _check(logits, target, vocab_start, vocab_size, label_smoothing, z_loss, **per_token) -> None:
    op, shape = "cross_entropy", logits.shape
    if not (logits.is_floating_point() and shape):
        raise ValueError(f"{op}: logits {tuple(shape)} of {logits.dtype} are not floats")
    if target.device != logits.device:
        raise ValueError(f"{op}: logits is on {logits.device} but target is on {target.device}")
    fits = target.shape == shape[:-1]
    checks.require(fits, "{}: target {} does not fit logits {}", op, target.shape, shape)
    if vocab_size <= 0:
        raise ValueError(f"{op}: vocab_size must be positive, got {vocab_size} for logits {tuple(shape)}")
    if vocab_start < 0:
        raise ValueError(f"{op}: vocab_start must not be negative, got {vocab_start}")
    check_options(op, target, label_smoothing, z_loss, **per_token)


def _check_apart(name: str, rows: Tensor) -> None:
    """Raise unless the rows can be written to one by one."""
    here = not checks.is_dtensor(rows)
    checks.require(here, "cross_entropy: {} overwrites logits, which may not be DTensors: leave it out", name)
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(
            f"cross_entropy: {name} needs rows that do not overlap, got {tuple(rows.shape)} "
            f"with strides {rows.stride()}"
        )


def _rows(logits: Tensor) -> Tensor:
    """(..., V) as (N, V), neighbouring columns next to each other: a view if strides allow, else one copy."""
    rows = logits
    if logits.dim() != 2:
        rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _flat(per_token: Tensor) -> Tensor:
    return per_token if per_token.dim() == 1 else per_token.reshape(-1)


@traced("fastmp.cross_entropy_from_stats")
def cross_entropy_from_stats(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    grad_in_place: bool = False,
) -> Tensor:
    """Loss per token of one vocabulary shard, given the statistics of all shards.

    Differentiable in `logits` only. Arguments, result and errors as in `cross_entropy`, and

    Args:
        logits: (..., V) this shard's columns.
        target: (...) int64 ids in the whole vocabulary.
        stats: (P, N, 3), or (P, N, 4) with label smoothing: what `torch.ops.fastmp.cross_entropy_stats` gave
            for each of the P shards, in any order; N is the number of targets.
        vocab_start: id of this shard's first column.
        vocab_size: number of ids of all shards together; columns beyond are padding.

    Returns:
        (...) the loss of the whole vocabulary, the same on every shard.
    """
    _check(logits, target, vocab_start, vocab_size, label_smoothing, z_loss, token_weight=token_weight)
    rows, targets = _rows(logits), _flat(target)
    expected = (rows.shape[0], 4 if label_smoothing else 3)
    wanted, dtype = "stats must be {} (P, {}, {}) for logits {}, got {} {}", compute_dtype(logits.dtype)
    fits = stats.dim() == 3 and stats.shape[1:] == expected and stats.dtype == dtype
    shapes = (logits.shape, stats.dtype, stats.shape)
    checks.require(fits, "cross_entropy: " + wanted, dtype, *expected, *shapes)
    if grad_in_place:
        _check_apart("grad_in_place", rows)
    check_range("cross_entropy", targets, vocab_size, ignore_index)
    loss = _loss_of_rows(
        rows, targets, stats.detach(), token_weight, vocab_start, vocab_size, ignore_index, label_smoothing,
        z_loss, grad_in_place,
    )  # fmt: skip
    return loss if target.dim() == 1 else loss.reshape(target.shape)


def _loss_of_rows(
    rows, targets, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    in_place,
) -> Tensor:  # fmt: skip
    if token_weight is not None:
        token_weight = _flat(token_weight).to(compute_dtype(rows.dtype))
    # torch.func records every backward as if to differentiate it, which one in place refuses
    if in_place and not torch.compiler.is_compiling():
        in_place = not torch._C._are_functorch_transforms_active()
    return _cross_entropy(
        rows, targets, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
        in_place,
    )[0]  # fmt: skip


@traced("fastmp.cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    reduction: str = "none",
    grad_in_place: bool = False,
    loss_grad: Tensor | None = None,
) -> Tensor:
    """Cross-entropy over a whole vocabulary: per token, or its mean or sum.

    The logits are read once forward and once backward. In between, the logits and at most three numbers a
    token are kept, and nothing of their size is made but the gradient. Arithmetic is in float32 (float64 for
    float64) from logits of any dtype, so torch.autocast changes nothing here and nothing need be cast.

    Args:
        logits: (..., V) float64, float32, bfloat16 or float16. Copied once if neighbouring columns are not
            next to each other in memory or the leading dimensions do not fold into one.
        target: (...) int64 ids.
        label_smoothing: in [0, 1]: this share of the target's weight is spread evenly over the vocabulary, as
            in torch.nn.functional.cross_entropy.
        z_loss: z >= 0 adds z * logsumexp(logits)^2 per token, which keeps the logits from drifting (PaLM,
            Chowdhery et al. 2022, section 5).
        ignore_index: tokens with this target have loss and gradient zero, whatever their logits.
        token_weight: (...) factor of each token's loss; receives no gradient.
        vocab_size: columns from this one on are padding: they do not count, and their gradient is zero.
            Default V.
        reduction: "none"; "sum"; or "mean", the sum divided by the number of targets that are not
            ignore_index, or by the sum of their `token_weight`. The mean of no targets is NaN, as in torch.
            Neither costs a pass over the logits: what the loss receives enters the gradient's only kernel.
        grad_in_place: let the backward pass write the gradient over `logits`, bitwise the same, which saves
            memory of their size. A second backward pass, or one of anyone else who saved the logits, is then
            a RuntimeError.
        loss_grad: (...) the gradient each token's loss will receive, where it is known beforehand: ones for a
            sum, 1 / N for a mean. Loss and gradient then come from one launch, and the gradient overwrites
            `logits` during the forward pass (so take gradients of what made them, not of the logits); where
            none is recorded, as under torch.no_grad, or by torch.func, nothing is overwritten. The backward
            pass hands that memory out: once, and only if the losses of all tokens but ignored ones receive
            `loss_grad` as upstream gradient, to eight units in the last place.

    Returns:
        (...), or 0-dim if reduced; float64 for float64 logits, else float32. Ignored tokens count zero.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; on the CPU (not under torch.compile) also a
            target outside [0, vocab_size) that is not ignore_index. Elsewhere looking would make the device
            wait: there such a token has loss and gradient NaN.
        RuntimeError: in the backward pass, with `loss_grad`: another upstream gradient (on a GPU
            an assertion of the device, reported when it is next waited for), a second backward pass, or
            logits that something else needs, before or (unless they are a part of it) after they were
            overwritten.
    """
    columns = logits.shape[-1] if logits.dim() else 0
    vocab_size = columns if vocab_size is None else vocab_size

    def check() -> None:
        per_token = {"token_weight": token_weight, "loss_grad": loss_grad}
        _check(logits, target, 0, vocab_size, label_smoothing, z_loss, **per_token)

    options = vocab_size, ignore_index, label_smoothing, z_loss
    recorded = logits.requires_grad and torch.is_grad_enabled()
    at_once = recorded and not torch._C._are_functorch_transforms_active()
    by_kernel = token_weight is None and logits.dim() == 2 and logits.is_contiguous()
    if loss_grad is not None:
        by_kernel = by_kernel and loss_grad.dim() == 1 and not loss_grad.requires_grad
        by_kernel = by_kernel and loss_grad.dtype == compute_dtype(logits.dtype)
    by_kernel = by_kernel and _cross_entropy.validates_args(logits, target)
    if not by_kernel:
        check()
    if not 0 < vocab_size <= columns:
        check()
        raise ValueError(f"cross_entropy: vocab_size {vocab_size} exceeds the {columns} columns")
    if loss_grad is not None or reduction != "none":
        check_reduction("cross_entropy", reduction, loss_grad)
    if by_kernel:
        if target.dtype == torch.int64:
            check_ids("cross_entropy", target, vocab_size, ignore_index)
        try:
            if loss_grad is not None and at_once:
                return _loss_and_grad(logits, target, loss_grad, None, *options)
            divisor = divisor_of(target, ignore_index, reduction)
            return _cross_entropy(logits, target, None, None, 0, *options, grad_in_place, divisor)[0]
        except RuntimeError:
            check()
            raise
    rows, targets = _rows(logits), _flat(target)
    check_range("cross_entropy", targets, vocab_size, ignore_index)
    if loss_grad is not None and at_once:
        _check_apart("loss_grad", rows)
        dtype = compute_dtype(logits.dtype)
        weight = None if token_weight is None else _flat(token_weight).to(dtype)
        loss = _loss_and_grad(rows, targets, _flat(loss_grad).to(dtype), weight, *options)
        return loss.reshape(target.shape)
    if grad_in_place:
        _check_apart("grad_in_place", rows)
    loss = _loss_of_rows(rows, targets, None, token_weight, 0, *options, grad_in_place)
    loss = loss if target.dim() == 1 else loss.reshape(target.shape)
    return reduced(loss, target, token_weight, ignore_index, reduction)
