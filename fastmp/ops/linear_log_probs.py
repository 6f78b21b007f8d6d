"""Log-probabilities of chosen tokens, and entropies, from hidden states, without materialising the logits.

With x the logits, s the inverse temperature and p = softmax(s x), the log-probability of token t is log p_t
and the entropy - sum_j p_j log p_j. A shard reads its logits once and keeps three numbers per token, four
with the entropy: the maximum m, sum_j exp(s (x_j - m)), x_t, and the sum of these exponentials each times its
logarithm. The backward pass recomputes the logits of a chunk (or takes those of the only chunk) and turns
them into their gradient in place: s (g [j = t] - p_j (g + e (log p_j + entropy))), with the upstream
gradients g of log p_t and e of the entropy.

Chunks and sums of gradients are shared with `linear_cross_entropy`, whose loss is - log p_t.
N tokens, H hidden size, V columns of this shard of the vocabulary (padding included), P shards.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from fastmp.ops.chunked_head import ALONE, HeadPass, Shards
from fastmp.ops.chunked_loss import ChunkedLoss, check_head, opaque_passes, per_token
from fastmp.ops.core import checks
from fastmp.ops.core.registry import (
    can_read_values,
    compute_dtype,
    is_recorded,
    register,
)
from fastmp.ops.cross_entropy_triton import real_columns
from fastmp.ops.linear_log_probs_triton import launch_grad, launch_stats
from fastmp.profiling import traced

_NAN = float("nan")


def _real(logits: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    """Return the columns that are no padding, in the dtype of sums."""
    real = real_columns(logits.shape[1], vocab_start, vocab_size)
    return logits[:, :real].to(compute_dtype(logits.dtype))


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply x by the inverse temperature of its row, NaN unless that is positive."""
    return x if scale is None else x * scale.where(scale > 0, _NAN).view(-1, *[1] * (x.dim() - 1))


def _stats_reference(logits, target, scale, vocab_start, vocab_size, with_entropy):
    x = _real(logits, vocab_start, vocab_size)
    real = x.shape[1]
    if real == 0:
        empty = x.new_tensor([-torch.inf, 0, 0, 0][: 4 if with_entropy else 3])
        return empty.repeat(len(x), 1)
    top = x.amax(1)
    below = _scaled(x - top.masked_fill(top == -torch.inf, 0)[:, None], scale)
    exponentials = below.exp()
    column = target - vocab_start
    here = (column >= 0) & (column < real)
    target_logit = x.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    columns = [top, exponentials.sum(1), target_logit]
    if with_entropy:
        columns.append((exponentials * below).masked_fill(exponentials == 0, 0).sum(1))
    return torch.stack(columns, 1)


def _grad_reference_(
    logits, target, top, log_total, grad_log_prob, entropy, grad_entropy, scale, vocab_start, vocab_size,
    ignore_index,
):  # fmt: skip
    x = _real(logits, vocab_start, vocab_size)
    log_p = _scaled(x - top[:, None], scale) - log_total[:, None]
    p = log_p.exp()
    is_target = torch.arange(vocab_start, vocab_start + x.shape[1], device=target.device) == target[:, None]
    grad = grad_log_prob[:, None] * (is_target.to(p.dtype) - p)
    if entropy is not None:
        grad = grad - grad_entropy[:, None] * p * (log_p.masked_fill(p == 0, 0) + entropy[:, None])
    grad = _scaled(grad, scale).where(((target >= 0) & (target < vocab_size))[:, None], _NAN)
    logits[:, x.shape[1] :] = 0
    logits[:, : x.shape[1]] = grad.masked_fill((target == ignore_index)[:, None], 0)


_stats = register(
    "log_probs_stats(Tensor logits, Tensor target, Tensor? scale, int vocab_start, int vocab_size,"
    " bool with_entropy) -> Tensor",
    contract=(
        "logits (N, V) floating; target (N) int64; scale (N) wide(logits); 0 <= vocab_start; 0 < vocab_size"
    ),
    reference=_stats_reference,
    triton=launch_stats,
    fake=lambda logits, target, scale, vocab_start, vocab_size, with_entropy: logits.new_empty(
        (logits.shape[0], 4 if with_entropy else 3), dtype=compute_dtype(logits.dtype)
    ),
    flops=lambda logits, target, scale, vocab_start, vocab_size, with_entropy: (
        logits.shape[0]
        * real_columns(logits.shape[1], vocab_start, vocab_size)
        * (4 + (scale is not None) + 2 * with_entropy)
    ),
)
_grad_ = register(
    "log_probs_grad_(Tensor(a!) logits, Tensor target, Tensor top, Tensor log_total, Tensor grad_log_prob,"
    " Tensor? entropy, Tensor? grad_entropy, Tensor? scale, int vocab_start, int vocab_size,"
    " int ignore_index) -> ()",
    contract=(
        "logits (N, V) floating; target (N) int64; top (N) wide(logits); log_total (N) wide(logits); "
        "grad_log_prob (N) wide(logits); entropy (N) wide(logits); grad_entropy (N) wide(logits); "
        "scale (N) wide(logits); 0 <= vocab_start; 0 < vocab_size"
    ),
    reference=_grad_reference_,
    triton=launch_grad,
    fake=lambda logits, *options: None,
    flops=lambda logits, target, top, log_total, grad, entropy, grad_entropy, scale, start, size, ignored: (
        logits.shape[0]
        * real_columns(logits.shape[1], start, size)
        * (4 + (scale is not None) + 2 * (entropy is not None))
    ),
)


class _Options(NamedTuple):
    """This shard, the results, and the bytes for logits."""

    vocab_start: int
    vocab_size: int
    ignore_index: int
    with_entropy: bool
    workspace: int


def merge_shards(
    maxima: Tensor, sums: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Merge the maxima and the sums of exponentials of all shards, both (P, N).

    Returns:
        The maximum (N,), 0 where it is -inf; the scaled distance of each shard's maximum from it and the
        exponential of that, both (P, N); and the sum of exponentials relative to the maximum, (N,).
    """
    top = maxima.amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    gap = maxima - top if scale is None else (maxima - top) * scale
    share = gap.exp()
    return top, gap, share, (sums * share).sum(0)


class _LogProbPass(HeadPass):
    inputs, per_token = ("target", "scale", "live"), ("target", "scale")
    saved = ("entropy", "top", "log_total")
    grads = ("grad_log_prob", "grad_entropy")

    @classmethod
    def num_results(cls, options: _Options) -> int:
        return 1 + options.with_entropy

    def stats(self, logits: Tensor, target: Tensor, scale: Tensor | None) -> Tensor:
        vocab_start, vocab_size, _, with_entropy, _ = self.options
        return torch.ops.fastmp.log_probs_stats(logits, target, scale, vocab_start, vocab_size, with_entropy)

    def merge(
        self, stats: Tensor, target: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Merge the statistics (P, N, 3 or 4) of all shards: (log_prob, entropy, top, log_total), each (N,).

        Relative to the maximum until the end: an almost certain token has a log-probability close to 0.
        Without entropy, that is an empty tensor.
        """
        options = self.options
        maxima, sums, target_logits, *weighted = stats.unbind(-1)
        top, gap, share, total = merge_shards(maxima, sums, scale)
        log_total = total.log()
        ignored, wrong = target == options.ignore_index, (target < 0) | (target >= options.vocab_size)
        of_target = target_logits.sum(0) - top
        if scale is not None:
            of_target, wrong = of_target * scale, wrong | (scale <= 0)

        def of_targets(values: Tensor) -> Tensor:
            return values.masked_fill(wrong, _NAN).masked_fill(ignored, 0)

        log_prob = of_targets(of_target - log_total)
        entropy = total.new_empty(0)
        if weighted:
            merged = share * (weighted[0] + sums * gap.masked_fill(share == 0, 0))
            entropy = of_targets(log_total - merged.sum(0) / total)
        return log_prob, entropy, top, log_total

    def grad_(
        self, logits: Tensor, target: Tensor, scale: Tensor | None, entropy: Tensor, top: Tensor,
        log_total: Tensor, grad_log_prob: Tensor, grad_entropy: Tensor | None,
    ) -> None:  # fmt: skip
        torch.ops.fastmp.log_probs_grad_(
            logits, target, top, log_total, grad_log_prob, None if grad_entropy is None else entropy,
            grad_entropy, scale, *self.options[:3],
        )  # fmt: skip


def _fake_outputs(values: dict[str, Any]) -> tuple[Tensor, ...]:
    hidden = values["hidden"]
    entropy_rows = hidden if values["with_entropy"] else hidden[:0]
    return per_token(hidden), per_token(entropy_rows), per_token(hidden), per_token(hidden)


_linear_log_probs = ChunkedLoss(
    "linear_log_probs",
    _LogProbPass,
    opaque_passes(
        lambda values: _LogProbPass,
        _Options,
        _fake_outputs,
        {
            "forward": "linear_log_probs_forward(Tensor hidden, Tensor weight, Tensor target, Tensor? scale,"
            " OPTIONS) -> (Tensor, Tensor, Tensor, Tensor)",
            "gradients": "linear_log_probs_gradients(Tensor hidden, Tensor weight, Tensor(a!)? main_grad,"
            " Tensor target, Tensor top, Tensor log_total, Tensor grad_log_prob, Tensor? entropy,"
            " Tensor? grad_entropy, Tensor? scale, OPTIONS, WANTED) -> (Tensor, Tensor)",
        },
    ),
)


def inverse_temperature(
    name: str, temperature: float | Tensor, shape: tuple[int, ...], hidden: Tensor
) -> Tensor | None:
    """Return 1 / temperature of every token of `shape`, (N,), or None for a temperature of 1."""
    dtype = compute_dtype(hidden.dtype)
    if isinstance(temperature, Tensor):
        fits = tuple(temperature.shape) == tuple(shape)
        misfit = "{}: expected temperature of shape {}, one for each token, got {}"
        checks.require(fits, misfit, name, shape, temperature.shape)
        checks.check_same_device(name, hidden=hidden, temperature=temperature)
        constant = not temperature.requires_grad
        checks.require(constant, "{}: temperature requires a gradient, but receives none; detach it", name)
        if can_read_values(temperature):
            lowest = temperature.min().item() if temperature.numel() else 1.0  # NaN where one is
            checks.require(lowest > 0, "{}: every temperature must be positive, got {}", name, lowest)
        return temperature.reshape(-1).to(dtype).reciprocal()
    usable = 0 < temperature < math.inf
    checks.require(usable, "{}: temperature must be positive and finite, got {}", name, temperature)
    checks.check_finite(name, dtype, temperature=temperature, **{"1 / temperature": 1 / temperature})
    if temperature == 1:
        return None
    return torch.full((math.prod(shape),), 1 / temperature, dtype=dtype, device=hidden.device)


def _live_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the rows (L,) whose target (N,) is not ignored; None if the host cannot know, or if all are."""
    if is_recorded() or (target.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    live = (target != ignore_index).nonzero()[:, 0]  # waits for a GPU
    return None if len(live) == len(target) else live


def linear_log_probs_of(
    shards: Shards, name: str, hidden: Tensor, weight: Tensor, target: Tensor, *,
    temperature: float | Tensor, return_entropy: bool, ignore_index: int, vocab_size: int | None,
    workspace: int | None, skip_ignored: bool,
) -> Any:  # fmt: skip
    """Compute `linear_log_probs` from one of several shards of the weight; errors begin with `name`.

    `target` has the ids of all tokens, `hidden` the rows that `shards.gather_hidden` gathers.
    """
    head = check_head(name, shards, hidden, weight, target, ignore_index, vocab_size, workspace)
    scale = inverse_temperature(name, temperature, target.shape, head.rows)
    options = _Options(head.vocab_start, head.vocab_size, ignore_index, return_entropy, head.workspace)
    ids = target.reshape(-1)
    live = _live_rows(ids, ignore_index) if skip_ignored else None
    outputs = _linear_log_probs.outputs(head, options, (ids, scale, live))
    results = outputs[: 1 + return_entropy]
    if target.dim() != 1:
        results = tuple(each.reshape(target.shape) for each in results)
    return results if return_entropy else results[0]


@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float | Tensor = ...,
    return_entropy: Literal[False] = ..., ignore_index: int = ..., vocab_size: int | None = ...,
    workspace: int | None = ..., skip_ignored: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float | Tensor = ...,
    return_entropy: Literal[True], ignore_index: int = ..., vocab_size: int | None = ...,
    workspace: int | None = ..., skip_ignored: bool = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@traced("fastmp.linear_log_probs")
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    workspace: int | None = None,
    skip_ignored: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden weight^T / temperature), and its entropy.

    Logits are computed for a chunk of tokens at a time and never materialised as a whole. The backward pass
    recomputes them, for 8NVH FLOPs in all; if all fit into `workspace` and no entropy is asked for, it reuses
    them (6NVH), or a copy while the graph is retained. Arithmetic is in float32 (float64 for float64) from
    logits in the dtype of hidden, or of autocast. The gradient of the weight is added to the parameter's
    `main_grad` if there is one, as in `linear_cross_entropy`.

    Args:
        hidden: (..., H) float64, float32, bfloat16 or float16.
        weight: (V, H) of the same dtype and device.
        target: (...) int64 ids, usually the sampled tokens.
        temperature: divisor of the logits: positive, one number or one per token (...).
        return_entropy: also return the entropy, in nats; otherwise it costs nothing.
        ignore_index: tokens with this target have log-probability, entropy and gradient zero.
        vocab_size: number of ids; columns from this one on are padding, with probability zero. Default V.
        workspace: bytes of logits at a time, as in `linear_cross_entropy`.
        skip_ignored: ignored tokens cost no rows of a GEMM. The host waits once for a GPU, to know how many
            are left; under torch.compile and in a CUDA graph it cannot, and all rows are computed.

    Returns:
        The log-probabilities (...), or these and the entropies (...), both differentiable in hidden and
        weight; float64 for float64, else float32.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; on the CPU also a target outside the vocabulary
            that is not ignore_index, or a temperature of a tensor that is not positive (elsewhere such a
            token has NaN).

    Example:
        hidden, weight = torch.randn(8, 16), torch.randn(64, 16, requires_grad=True)
        sampled = torch.randint(64, (8,))
        log_probs, entropy = linear_log_probs(hidden, weight, sampled, return_entropy=True)  # (8,), (8,)
        (-log_probs.mean() - 0.01 * entropy.mean()).backward()
    """
    return linear_log_probs_of(
        ALONE, "linear_log_probs", hidden, weight, target, temperature=temperature,
        return_entropy=return_entropy, ignore_index=ignore_index, vocab_size=vocab_size, workspace=workspace,
        skip_ignored=skip_ignored,
    )  # fmt: skip
