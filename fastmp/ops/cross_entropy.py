"""Cross-entropy over a vocabulary that may be sharded: per-token statistics, merged over shards.

Each shard reads its logits once and keeps three numbers per token: the maximum, the sum of exponentials
relative to it and the target's logit; with label smoothing also the sum of logits relative to the maximum,
and their number. The statistics of all shards merge into the loss, and the maximum m and the sum s of the
whole row. The backward pass needs only the logits and these two: no other tensor of size tokens x vocabulary
exists, and the gradient may overwrite the logits.

loss = w [(1 - a) (log s + m - x_t) + a (log s + sum_j (m - x_j) / V) + z (m + log s)^2], where V counts the
whole vocabulary without padding, x_t is the target's logit, w the token's weight, a the label smoothing, z
the z-loss. Rounding m + log s, the log-sum-exp, would lose digits in proportion to what all logits have in
common; only the z-loss needs it.

If a rank holds the whole vocabulary and knows the upstream gradient of each token's loss (`loss_grad`), one
launch computes loss and gradient: a row is read from memory once and turned into its gradient in the cache.

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
from fastmp.ops.cross_entropy_reference import (
    reference,
    reference_check_upstream_grad_,
    reference_grad,
    reference_grad_,
    reference_loss_grad_,
    reference_merge,
    reference_stats,
)
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
from fastmp.ops.reduction import REDUCTIONS, check_reduction, reduced
from fastmp.profiling import traced


def _fake(
    logits, target, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    grad_in_place, divisor=None,
):  # fmt: skip
    merged = logits.new_empty((logits.shape[0], 2), dtype=compute_dtype(logits.dtype))
    return merged.new_empty(() if divisor is not None else logits.shape[:1]), merged


# FLOPs of each op: an exponential counts as one; padding columns do not count.


def _flops(logits, target, stats, token_weight, vocab_start, vocab_size, *options) -> int:
    if stats is not None:
        return _merge_flops(stats)
    with_sum = options[1] > 0
    columns = real_columns(logits.shape[1], vocab_start, vocab_size)
    return logits.shape[0] * (columns * (4 + with_sum) + 11 + 2 * with_sum)


def _merge_flops(stats, *options) -> int:
    return stats.shape[1] * (stats.shape[0] * (stats.shape[2] + 2) + 6)


def _traffic(logits, target, stats, token_weight, *options) -> int:
    """Count the bytes moved; with stats the logits are not read."""
    read = [logits if stats is None else stats, target, *([] if token_weight is None else [token_weight])]
    moved = [*read, *_fake(logits, target, stats, token_weight, *options)]
    return sum(tensor.numel() * tensor.element_size() for tensor in moved)


def _grad_flops(logits, target, merged, grad_loss, token_weight, vocab_start, vocab_size, *options) -> int:
    return logits.shape[0] * real_columns(logits.shape[1], vocab_start, vocab_size) * 5


register(
    "cross_entropy_stats(Tensor logits, Tensor target, int vocab_start, int vocab_size, bool with_sum)"
    " -> Tensor",
    contract="logits (N, V) floating; target (N) int64; 0 <= vocab_start; 0 < vocab_size",
    shard="logits target -> rows",
    reference=reference_stats,
    triton=launch_stats,
    fake=lambda logits, target, vocab_start, vocab_size, with_sum: logits.new_empty(
        (logits.shape[0], 5 if with_sum else 3), dtype=compute_dtype(logits.dtype)
    ),
    flops=lambda logits, target, vocab_start, vocab_size, with_sum: (
        logits.shape[0] * real_columns(logits.shape[1], vocab_start, vocab_size) * (5 if with_sum else 4)
    ),
)
register(
    "cross_entropy_merge(Tensor stats, Tensor target, Tensor? token_weight, int vocab_size, int ignore_index,"
    " float label_smoothing, float z_loss) -> (Tensor loss, Tensor merged)",
    contract=(
        "stats (P, N, 2W+1) float32|float64; 1 <= W <= 2; 0 <= label_smoothing <= W - 1; 0 <= z_loss; "
        "0 < vocab_size; target (N) int64; token_weight (N) stats"
    ),
    shard="+stats target token_weight -> rows rows",
    reference=reference_merge,
    triton=launch_merge,
    fake=lambda stats, *options: (stats.new_empty(stats.shape[1]), stats.new_empty((stats.shape[1], 2))),
    flops=_merge_flops,
)
_GRAD_OPTIONS = (
    "Tensor target, Tensor merged, Tensor grad_loss, Tensor? token_weight, int vocab_start, int vocab_size, "
    "int ignore_index, float label_smoothing, float z_loss, float? divisor=None"
)
_GRAD_CONTRACT = (
    "logits (N, V) floating; target (N) int64; merged (N, 2) wide(logits); "
    "divisor ? grad_loss () wide(logits); no divisor ? grad_loss (N) wide(logits); "
    "token_weight (N) wide(logits); 0 <= label_smoothing <= 1; 0 <= z_loss; 0 <= vocab_start; 0 < vocab_size"
)
register(
    f"cross_entropy_grad(Tensor logits, {_GRAD_OPTIONS}) -> Tensor",
    contract=_GRAD_CONTRACT,
    shard="logits target merged grad_loss token_weight -> rows",
    reference=reference_grad,
    triton=launch_grad,
    fake=lambda logits, *options: logits.new_empty(logits.shape),
    flops=_grad_flops,
)
register(
    f"cross_entropy_grad_(Tensor(a!) logits, {_GRAD_OPTIONS}) -> ()",
    contract=_GRAD_CONTRACT,
    reference=reference_grad_,
    triton=lambda logits, *options: launch_grad_into(logits, logits, *options),
    fake=lambda logits, *options: None,
    flops=_grad_flops,
)
register(
    "cross_entropy_promise_(Tensor(a!) grad, Tensor grad_loss, Tensor loss_grad, Tensor target,"
    " int ignore_index) -> ()",
    contract="grad (N, V) floating; grad_loss (N) float32|float64; loss_grad (N) grad_loss; target (N) int64",
    reference=reference_check_upstream_grad_,
    fake=lambda *arguments: None,
    traffic=lambda grad, grad_loss, loss_grad, target, ignore_index: (
        grad_loss.nbytes + loss_grad.nbytes + target.nbytes
    ),
)
_loss_and_grad = register(
    "cross_entropy_loss_grad_(Tensor(a!) logits, Tensor target, Tensor loss_grad, Tensor? token_weight,"
    " int vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor",
    contract=(
        "logits (N, V) floating; target (N) int64; loss_grad (N) wide(logits); "
        "token_weight (N) wide(logits); 0 <= label_smoothing <= 1; 0 <= z_loss; 0 < vocab_size"
    ),
    reference=reference_loss_grad_,
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
    " float? divisor=None) -> (Tensor loss, Tensor merged)",
    contract=(
        "logits (N, V) floating; target (N) int64; stats (P, N, 2W+1) float32|float64; 1 <= W <= 2; "
        "label_smoothing <= W - 1; token_weight (N) wide(logits); 0 <= label_smoothing <= 1; 0 <= z_loss; "
        "0 <= vocab_start; 0 < vocab_size"
    ),
    shard="logits target +stats token_weight -> rows rows",
    reference=reference,
    triton=launch_loss,
    fake=_fake,
    flops=_flops,
    traffic=_traffic,
    autograd_formula={
        "grad_in_place": "cross_entropy_grad_(logits, target, merged, grad_loss, token_weight, vocab_start,"
        " vocab_size, ignore_index, label_smoothing, z_loss, divisor) -> ; logits -> logits",
        "": "cross_entropy_grad(logits, target, merged, grad_loss, token_weight, vocab_start, vocab_size,"
        " ignore_index, label_smoothing, z_loss, divisor) -> logits",
    },
)


def check_range(op: str, target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError for ids outside the vocabulary, if they can be read: in eager CPU tensors."""
    if can_read_values(target):
        check_ids(op, target, vocab_size, ignore_index)


def check_ids(op: str, target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError for ids outside the vocabulary; reads the targets."""
    at = first_outside(op, target, vocab_size, ignore_index)
    if at >= 0:
        wrong = target.reshape(-1)[at].item()
        raise ValueError(
            f"{op}: target {wrong} is outside the vocabulary of {vocab_size} ids and is not ignore_index "
            f"{ignore_index}"
        )


def first_outside(op: str, ids: Tensor, size: int, ignored: int, name: str = "target") -> int:
    """Return the index of the first id of a CPU tensor that is neither in [0, size) nor `ignored`, or -1."""
    counted = _count(op, ids, size, ignored, name)
    if counted is not None:
        return max(-1, -1 - counted)
    checks.check_memory(op, **{name: ids})
    flat = ids.reshape(-1)
    wrong = (((flat < 0) | (flat >= size)) & (flat != ignored)).nonzero()
    return int(wrong[0]) if len(wrong) else -1


def _count(op: str, ids: Tensor, size: int, ignored: int, name: str = "target") -> int | None:
    """Return how many ids are not `ignored`, or -1 - i if the i-th is outside; None if `HOST` cannot tell."""
    if HOST is None or not ids.is_contiguous():
        return None
    count = ids.numel()
    if 8 * (ids.storage_offset() + count) > ids.untyped_storage().nbytes():  # of int64
        checks.check_memory(op, **{name: ids})
    return HOST.count_targets(ids.data_ptr(), count, size, ignored)


def checked_divisor(
    op: str, target: Tensor, vocab_size: int, ignore_index: int, reduction: str
) -> float | None:
    """Return what a CPU kernel divides the sum of the losses by, None if they stay apart ("none").

    Reads the targets once, and raises ValueError for those outside the vocabulary, as `check_ids` does.
    """
    counted = _count(op, target, vocab_size, ignore_index)
    if counted is None or counted < 0:
        check_ids(op, target, vocab_size, ignore_index)
    if reduction == "mean":
        return float((target != ignore_index).sum() if counted is None else counted)
    return None if reduction == "none" else 1.0


def check_options(
    op: str, dtype: torch.dtype, target: Tensor, label_smoothing: float, z_loss: float, **per_token: Any
) -> None:
    """Check the options that all losses of logits of `dtype` have."""
    if target.dtype != torch.int64:
        raise ValueError(
            f"{op}: expected int64 target, got {target.dtype}; class probabilities are not supported"
        )
    checks.check_number(op, label_smoothing=label_smoothing, z_loss=z_loss)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1], got {label_smoothing}")
    if z_loss < 0:
        raise ValueError(f"{op}: z_loss must not be negative, got {z_loss}")
    checks.check_finite(op, dtype, z_loss=z_loss)
    for name, given in per_token.items():
        if isinstance(given, Tensor):
            fits, misfit = given.shape == target.shape, "{}: expected {} of shape {}, like target, got {}"
            checks.require(fits, misfit, op, name, target.shape, given.shape)
            checks.check_same_device(op, target=target, **{name: given})
            free = not given.requires_grad
            checks.require(free, "{}: {} requires a gradient, but receives none; detach it", op, name)
        else:
            checks.check_finite(op, dtype, **{name: given})


def _check(
    logits, target, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss, token_weight=None,
    loss_grad=None,
) -> None:  # fmt: skip
    op, shape = "cross_entropy", logits.shape
    if not (logits.is_floating_point() and shape):
        raise ValueError(f"{op}: expected floating-point logits (..., V), got {logits.dtype} {tuple(shape)}")
    if target.device != logits.device:
        raise ValueError(f"{op}: logits is on {logits.device} but target is on {target.device}")
    fits = target.shape == shape[:-1] and target.dtype == torch.int64
    expected = "{}: expected int64 target of shape {} for logits {}, got {} {}; class probabilities are not "
    checks.require(fits, expected + "supported", op, shape[:-1], shape, target.dtype, target.shape)
    numbers = {"vocab_start": vocab_start, "vocab_size": vocab_size, "ignore_index": ignore_index}
    checks.check_number(op, integer=True, **numbers)
    if vocab_size <= 0:
        raise ValueError(f"{op}: vocab_size must be positive, got {vocab_size} for logits {tuple(shape)}")
    if vocab_start < 0:
        raise ValueError(f"{op}: vocab_start must not be negative, got {vocab_start}")
    per_token = {"token_weight": token_weight, "loss_grad": loss_grad}
    for name, given in per_token.items():
        if given is not None and not isinstance(given, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor of shape {tuple(target.shape)}, got {given!r}")
    check_options(op, logits.dtype, target, label_smoothing, z_loss, **per_token)


def _check_writable(name: str, rows: Tensor) -> None:
    """Raise ValueError unless every row can be overwritten without changing another."""
    local = not checks.is_dtensor(rows)
    checks.require(
        local, "cross_entropy: {} overwrites logits, which may not be DTensors: leave it out", name
    )
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(
            f"cross_entropy: {name} needs rows that do not overlap, got {tuple(rows.shape)} "
            f"with strides {rows.stride()}; pass logits.contiguous()"
        )


def _rows(logits: Tensor) -> Tensor:
    """Return (..., V) as (N, V) with unit column stride: a view if strides allow, else one copy."""
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
    """Cross-entropy per token from one vocabulary shard's logits and the statistics of all shards.

    Differentiable in `logits` only. Other arguments, result and errors as in `cross_entropy`.

    Args:
        logits: (..., V) this shard's columns.
        target: (...) int64 ids in the whole vocabulary.
        stats: (P, N, 3), or (P, N, 5) with label smoothing: the results of
            `torch.ops.fastmp.cross_entropy_stats` of the P shards, in any order, for N targets.
        vocab_start: id of this shard's first column.
        vocab_size: number of ids of all shards together; columns beyond are padding.

    Returns:
        (...) the loss over the whole vocabulary, the same on every shard.

    Example:
        logits, target = torch.randn(4, 100), torch.randint(100, (4,))
        halves = [(0, logits[:, :50]), (50, logits[:, 50:])]
        op = torch.ops.fastmp.cross_entropy_stats
        stats = torch.stack([op(half, target, start, 100, False) for start, half in halves])
        left = logits[:, :50]
        loss = cross_entropy_from_stats(left, target, stats, vocab_start=0, vocab_size=100)  # (4,)
    """
    options = ignore_index, label_smoothing, z_loss
    _check(logits, target, vocab_start, vocab_size, *options, token_weight=token_weight)
    rows = _rows(logits)
    expected = (rows.shape[0], 5 if label_smoothing else 3)
    wanted, dtype = "stats must be {} (P, {}, {}) for logits {}, got {} {}", compute_dtype(logits.dtype)
    fits = stats.dim() == 3 and stats.shape[1:] == expected and stats.dtype == dtype
    shapes = (logits.shape, stats.dtype, stats.shape)
    checks.require(fits, "cross_entropy: " + wanted, dtype, *expected, *shapes)
    if grad_in_place:
        _check_writable("grad_in_place", rows)
    check_range("cross_entropy", target, vocab_size, ignore_index)
    loss = _loss_of_rows(
        rows, _flat(target), stats.detach(), token_weight, vocab_start, vocab_size, *options, grad_in_place
    )  # fmt: skip
    return loss if target.dim() == 1 else loss.reshape(target.shape)


def _loss_of_rows(
    rows, targets, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    in_place,
) -> Tensor:  # fmt: skip
    if token_weight is not None:
        token_weight = _flat(token_weight).to(compute_dtype(rows.dtype))
    # torch.func differentiates every backward, which an in-place one does not support
    if in_place and not torch.compiler.is_compiling():
        in_place = not torch._C._are_functorch_transforms_active()
    return _cross_entropy(
        rows, targets, stats, token_weight, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
        in_place,
    )[0]  # fmt: skip


@traced("fastmp.cross_entropy")
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    grad_in_place: bool = False,
    loss_grad: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of logits and class ids, a replacement for `torch.nn.functional.cross_entropy`.

    The logits are read once forward and once backward. In between, the logits and at most four numbers per
    token are saved; the gradient is the only other tensor of their size. Arithmetic is in float32 (float64
    for float64) from logits of any dtype, so torch.autocast has no effect and no cast is needed.

    Args:
        input: logits (..., V), classes last, or (N, V, ...), classes second, as in torch: the shape of
            `target` tells which. float64, float32, bfloat16 or float16. Copied once if neighbouring columns
            are not next to each other in memory or the leading dimensions do not fold into one.
        target: (...) int64 ids, or (N, ...). Class probabilities are not supported.
        weight: (V,) factor of each class; receives no gradient. Not supported with `label_smoothing`.
        ignore_index: tokens with this target have loss and gradient zero, whatever their logits.
        reduction: "mean", the sum divided by the number of targets that are not ignore_index, or by the sum
            of their weights; "sum"; or "none". The mean of no targets is NaN, as in torch. Neither costs a
            pass over the logits: the upstream gradient enters the gradient's only kernel.
        label_smoothing: in [0, 1]: this share of the target's weight is spread evenly over the vocabulary.
        z_loss: z >= 0 adds z * logsumexp(logits)^2 per token, which keeps the logits from drifting (PaLM,
            Chowdhery et al. 2022, section 5).
        token_weight: (...) factor of each token's loss; receives no gradient.
        vocab_size: number of ids; columns from this one on are padding, with a zero gradient. Default V.
        grad_in_place: let the backward pass write the gradient over `input`, bitwise the same, which saves
            memory of their size. A second backward pass, or that of another op that saved the logits, then
            raises RuntimeError.
        loss_grad: (...) the upstream gradient of each token's loss, with reduction="none", if it is known in
            advance: ones for a sum, 1 / N for a mean. One launch then computes loss and gradient, and the
            gradient overwrites `input` during the forward pass (so differentiate with respect to what made
            the logits, not the logits). Without recording, as under torch.no_grad, or in torch.func, nothing
            is overwritten. The backward pass returns that memory, once, and only if all tokens that are not
            ignored receive `loss_grad` as upstream gradient, to eight units in the last place.

    Returns:
        (...), or 0-dim if reduced; float64 for float64 logits, else float32. Ignored tokens count zero.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; on the CPU (not under torch.compile) also a
            target outside [0, vocab_size) that is not ignore_index. Elsewhere the check would synchronise
            with the device: there such a token has loss and gradient NaN.
        RuntimeError: in the backward pass, with `loss_grad`: another upstream gradient (on a GPU
            an assertion of the device, reported when it is next waited for), a second backward pass, or
            logits that something else needs, before or (unless they are a part of it) after they were
            overwritten.

    Example:
        logits = torch.randn(8, 64, requires_grad=True)
        target = torch.randint(64, (8,))
        loss = cross_entropy(logits, target, z_loss=1e-4)  # the mean, as in torch
        loss.backward()
    """
    # 1. Plain calls, in which host time counts: the C++ kernel checks all but the ids.
    if weight is None and token_weight is None and _is_validated_by_kernel(input, target, loss_grad):
        columns = input.shape[1]
        size = columns if vocab_size is None else vocab_size
        known = loss_grad is not None
        options = size, ignore_index, label_smoothing, z_loss
        divisor = None
        try:
            if 0 < size <= columns and reduction in (("none",) if known else REDUCTIONS):
                divisor = checked_divisor("cross_entropy", target, size, ignore_index, reduction)
                if known:
                    return _loss_and_grad.run(input, target, loss_grad, None, *options)
                return _cross_entropy.run(input, target, None, None, 0, *options, grad_in_place, divisor)[0]
        except (RuntimeError, TypeError):
            # a ValueError that says what is wrong, if an argument is
            _check(input, target, 0, *options, None, loss_grad)
            if known:
                _loss_and_grad.check((input, target, loss_grad, None, *options))
            _cross_entropy.check((input, target, None, None, 0, *options, grad_in_place, divisor))
            raise
    # 2. Check the arguments of any other call.
    logits = input if input.dim() < 3 else _classes_last(input, target)
    if weight is not None:
        token_weight = _weight_of_targets(logits, target, weight, token_weight, label_smoothing)
    columns = logits.shape[-1] if logits.dim() else 0
    vocab_size = columns if vocab_size is None else vocab_size
    options = vocab_size, ignore_index, label_smoothing, z_loss
    _check(logits, target, 0, *options, token_weight, loss_grad)
    if vocab_size > columns:
        raise ValueError(
            f"cross_entropy: vocab_size {vocab_size} exceeds the {columns} columns of logits; pass the number"
            " of ids, at most logits.shape[-1]"
        )
    check_reduction("cross_entropy", reduction, loss_grad)
    # 3. Fold the leading dimensions, then reduce.
    check_range("cross_entropy", target, vocab_size, ignore_index)
    rows, targets = _rows(logits), _flat(target)
    recorded = logits.requires_grad and torch.is_grad_enabled()
    if loss_grad is not None and recorded and not torch._C._are_functorch_transforms_active():
        _check_writable("loss_grad", rows)
        dtype = compute_dtype(logits.dtype)
        weight = None if token_weight is None else _flat(token_weight).to(dtype)
        loss = _loss_and_grad(rows, targets, _flat(loss_grad).to(dtype), weight, *options)
        return loss.reshape(target.shape)
    if grad_in_place:
        _check_writable("grad_in_place", rows)
    loss = _loss_of_rows(rows, targets, None, token_weight, 0, *options, grad_in_place)
    loss = loss if target.dim() == 1 else loss.reshape(target.shape)
    return reduced(loss, target, token_weight, ignore_index, reduction)


def _classes_last(logits: Tensor, target: Tensor) -> Tensor:
    """Return logits of three or more dimensions as (..., V): torch has the classes in dimension 1."""
    shape = logits.shape
    second = target.shape == shape[:1] + shape[2:]
    if second and target.shape == shape[:-1] and shape[1] > 1:
        raise ValueError(
            f"cross_entropy: classes may be dimension 1 or {logits.dim() - 1} of logits {tuple(shape)} with "
            f"target {tuple(target.shape)}; pass logits.flatten(0, -2) and target.flatten(), classes last"
        )
    return logits.movedim(1, -1) if second else logits


def _weight_of_targets(
    logits: Tensor, target: Tensor, weight: Tensor, token_weight: Tensor | None, label_smoothing: float
) -> Tensor:
    """Return the factor of each token's loss: the weight of its target's class, times `token_weight`."""
    op, classes = "cross_entropy", logits.shape[-1] if logits.dim() else 0
    _check(logits, target, 0, classes, 0, label_smoothing, 0.0, token_weight=token_weight)
    if weight.shape != (classes,) or weight.device != logits.device:
        raise ValueError(
            f"{op}: expected weight of shape ({classes},) on {logits.device}, one factor a class, got "
            f"{tuple(weight.shape)} on {weight.device}; factors of tokens are token_weight"
        )
    if weight.requires_grad:
        raise ValueError(f"{op}: weight requires a gradient, but receives none; detach it")
    if label_smoothing:
        raise ValueError(f"{op}: class weights with label_smoothing {label_smoothing} are not supported")
    if can_read_values(target):  # as the next line does, without a look at their memory
        checks.check_memory(op, target=target, weight=weight)
    factor = weight.to(compute_dtype(logits.dtype))[target.clamp(0, classes - 1)]
    return factor if token_weight is None else factor * token_weight


def _is_validated_by_kernel(logits: Tensor, target: Tensor, loss_grad: Tensor | None) -> bool:
    """Return True if the C++ kernel takes the tensors as they are, and checks them itself, but for ids."""
    if logits.dim() != 2 or target.dtype != torch.int64 or not logits.is_contiguous():
        return False
    if loss_grad is not None:
        if not (torch.is_grad_enabled() and logits.requires_grad and isinstance(loss_grad, Tensor)):
            return False  # no kernel would see it
        if loss_grad.dim() != 1 or loss_grad.requires_grad:
            return False
        if loss_grad.dtype != compute_dtype(logits.dtype):
            return False
    return _cross_entropy.validates_args(logits, target)
