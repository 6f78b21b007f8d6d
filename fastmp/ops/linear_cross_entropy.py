"""Linear layer fused with cross-entropy: only the logits of one chunk of tokens exist at a time.

The loss is a `ChunkedLoss`, with the kernels of `cross_entropy`. A known upstream gradient may be given for
each token (`loss_grad`); loss and gradient of a chunk then take one launch. Few logits are materialised.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from fastmp.ops.chunked_head import ALONE, HeadPass, LogitChunks, Shards, joined
from fastmp.ops.chunked_loss import ChunkedLoss, check_head, opaque_passes, per_token
from fastmp.ops.core.contracts import LARGEST
from fastmp.ops.core.registry import compute_dtype
from fastmp.ops.cross_entropy import check_options, cross_entropy
from fastmp.ops.reduction import check_reduction, number_of_targets
from fastmp.ops.wgrad import linear, main_grad_of
from fastmp.profiling import traced

_PLAIN = (Tensor, torch.nn.Parameter)
_FEW_LOGITS = 1 << 20  # up to here by two ops: 4 MiB in fp32


class _Options(NamedTuple):
    """This shard and the kind of loss, in the order of the cross-entropy ops, and the bytes for logits.

    Ops on a shard's logits take the first five, those on merged statistics all of them but the first. Callers
    slice: a property of a NamedTuple cannot be traced by torch.compile in torch 2.10.
    """

    vocab_start: int
    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    workspace: int


class _LossPass(HeadPass):
    inputs = per_token = ("target", "token_weight")
    saved = ("merged",)

    def stats(self, logits: Tensor, target: Tensor, token_weight: Tensor | None) -> Tensor:
        options = self.options
        return torch.ops.fastmp.cross_entropy_stats(
            logits, target, options.vocab_start, options.vocab_size, options.label_smoothing > 0
        )

    def merge(self, stats: Tensor, target: Tensor, token_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.ops.fastmp.cross_entropy_merge(stats, target, token_weight, *self.options[1:5])

    def grad_(
        self, logits: Tensor, target: Tensor, token_weight: Tensor | None, merged: Tensor, grad_loss: Tensor
    ) -> None:
        torch.ops.fastmp.cross_entropy_grad_(
            logits, target, merged, grad_loss, token_weight, *self.options[:5]
        )

    def loss_and_grad_(
        self, logits: Tensor, target: Tensor, token_weight: Tensor | None, grad_loss: Tensor
    ) -> Tensor:
        """Compute loss and gradient in one launch."""
        return torch.ops.fastmp.cross_entropy_loss_grad_(
            logits, target, grad_loss, token_weight, *self.options[1:5]
        )

    def both(self) -> tuple[Tensor | None, ...]:
        """Return the losses and the gradients.

        With several shards, the all-gather of a chunk's statistics overlaps with the GEMM of the next chunk's
        logits, or with the last chunks' gradients.
        """
        if self.shards.size == 1:
            return super().both()
        whole, grad_loss = self.chunks, self.values["grad_loss"]
        self.chunks = LogitChunks(whole.x, whole.weight, whole.bias, self.options.workspace, num_buffers=2)
        gradients, losses, ahead = self.gradients_of(), [], self.chunks.num_buffers - 1
        begun: deque[tuple[Tensor, dict[str, Any], Tensor, Any]] = deque()
        for turn in range(len(self.chunks.rows) + ahead):
            if turn < len(self.chunks.rows):
                logits, part = self.chunks.logits(turn), self.part(turn)
                begun.append((logits, part, *self.shards.gather_stats(self.stats(logits, **part))))
            if turn >= ahead:
                logits, part, stats, work = begun.popleft()
                if work is not None:
                    work.wait()
                loss, merged = self.merge(stats, **part)
                upstream = self.chunks.part(grad_loss, turn - ahead)
                self.grad_(logits, **part, merged=merged, grad_loss=upstream)
                gradients.add(turn - ahead, logits)
                losses.append(loss)
        return joined(losses), *gradients.results()


_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? token_weight"
_linear_cross_entropy = ChunkedLoss(
    "linear_cross_entropy",
    _LossPass,
    opaque_passes(
        lambda values: _LossPass,
        _Options,
        lambda values: (per_token(values["hidden"]), per_token(values["hidden"], 2)),
        {
            "forward": f"linear_cross_entropy_loss({_TENSORS}, OPTIONS) -> (Tensor, Tensor)",
            "gradients": f"linear_cross_entropy_gradients({_TENSORS}, Tensor grad_loss, Tensor merged,"
            f" Tensor(a!)? main_grad, OPTIONS, WANTED) -> (Tensor, Tensor, Tensor)",
            "both": f"linear_cross_entropy_both({_TENSORS}, Tensor grad_loss, Tensor(a!)? main_grad,"
            " OPTIONS, WANTED) -> (Tensor, Tensor, Tensor, Tensor)",
        },
    ),
)


def _are_few(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss_grad: Tensor | float | None
) -> bool:
    """Return True if two ops, a GEMM and a loss, take less time: there CPU launch overhead dominates."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if not hidden.dim() == weight.dim() == target.dim() + 1 == 2 or torch._C._is_any_autocast_enabled():
        return False
    if not (type(hidden) in _PLAIN and type(weight) in _PLAIN and type(target) in _PLAIN):
        return False
    if not hidden.device == weight.device == target.device:
        return False
    fits = bias is None or (type(bias) in _PLAIN and bias.shape == weight.shape[:1])  # F.linear broadcasts it
    if isinstance(loss_grad, Tensor):
        fits = fits and loss_grad.shape == target.shape and loss_grad.device == target.device
    elif loss_grad is not None:
        fits = fits and isinstance(loss_grad, (int, float)) and -LARGEST <= loss_grad <= LARGEST
    return fits and 0 < hidden.shape[0] * weight.shape[0] <= _FEW_LOGITS


def _check_loss(
    name: str, dtype: torch.dtype, target: Tensor, label_smoothing: float, z_loss: float,
    token_weight: Tensor | None, reduction: str, loss_grad: Tensor | float | None,
) -> None:  # fmt: skip
    check_options(
        name, dtype, target, label_smoothing, z_loss, token_weight=token_weight, loss_grad=loss_grad
    )
    check_reduction(name, reduction, loss_grad)


def linear_cross_entropy_of(
    shards: Shards, name: str, hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None,
    label_smoothing: float, z_loss: float, ignore_index: int, token_weight: Tensor | None,
    vocab_size: int | None, reduction: str, loss_grad: Tensor | float | None, workspace: int | None,
) -> Tensor:  # fmt: skip
    """Compute `linear_cross_entropy` from one of several shards of the weight; errors begin with `name`.

    `target` has the ids of all tokens, `hidden` the rows that `shards.gather_hidden` gathers.
    """
    # 1. Check the arguments.
    head = check_head(name, shards, hidden, weight, target, ignore_index, vocab_size, workspace, bias)
    _check_loss(name, head.rows.dtype, target, label_smoothing, z_loss, token_weight, reduction, loss_grad)
    dtype = compute_dtype(head.rows.dtype)
    # 2. A checkpoint runs the forward again, which would add to main_grad twice: leave it to the backward.
    if head.main_grad is not None and not torch.compiler.is_compiling():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__:
            loss_grad = None
    # 3. Compute the losses in chunks of rows.
    targets, upstream = target.reshape(-1), None
    if isinstance(loss_grad, Tensor):
        upstream = loss_grad.reshape(-1).to(dtype)
    elif loss_grad is not None and any(head.wanted):
        upstream = torch.full(targets.shape, loss_grad, dtype=dtype, device=targets.device)
    if token_weight is not None:
        token_weight = token_weight.reshape(-1).to(dtype)
    options = _Options(
        head.vocab_start, head.vocab_size, ignore_index, label_smoothing, z_loss, head.workspace
    )
    return _linear_cross_entropy.reduced(
        head, options, (targets, token_weight), tuple(target.shape), reduction,
        lambda: number_of_targets(targets, token_weight, ignore_index, dtype), upstream,
    )  # fmt: skip


@traced("fastmp.linear_cross_entropy")
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    loss_grad: Tensor | float | None = None,
    workspace: int | None = None,
) -> Tensor:
    """Output projection fused with cross-entropy: the logits hidden weight^T + bias are never materialised.

    Under autocast it runs in the autocast dtype. The wgrad is summed in fp32 (fp64 for fp64). If the
    parameter has a `main_grad` (its shape; fp32 or the dtype of hidden), the gradient is added to that and
    rounded once, and autograd gets none.

    Args:
        hidden: (..., H) float64, float32, bfloat16 or float16.
        weight: (V, H) of the same dtype and device.
        target: (...) int64 ids.
        bias: (V,) of the same dtype and device.
        label_smoothing, z_loss, ignore_index, token_weight, vocab_size: as in `cross_entropy`.
        reduction: as in `cross_entropy`. With "mean" or "sum" the forward pass computes the gradients, as
            with `loss_grad`, and the backward pass scales them by the upstream gradient, once. In bfloat16
            that rounds them again unless it is a power of two. With a `main_grad`, or in float16, whose range
            needs the scale first, the logits are computed twice instead. A second backward pass needs
            `retain_graph=True`, as in torch; the first then copies what it would overwrite.
        loss_grad: the upstream gradient of every token's loss, with reduction="none", (...) or one number for
            all: 1 if the losses are summed. The forward pass then computes the gradients too, for 3/4 of the
            FLOPs, and adds to `main_grad` (with few logits the backward pass does). The backward pass returns
            them, once, even if the graph is retained; another upstream gradient raises RuntimeError (on a GPU
            a device-side assertion). Without `loss_grad`, the loss can receive any gradient. Without
            recording it has no effect.
        workspace: bytes of logits at a time, from which the size of a chunk follows. Default 64 MiB on a CPU,
            1 GiB elsewhere.

    Returns:
        (...), or 0-dim if reduced; float64 for float64, else float32. Ignored tokens count zero.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, those of a `main_grad` included; on the CPU
            also a target outside the vocabulary that is not ignore_index (elsewhere such a token has loss and
            gradient NaN).

    Example:
        hidden = torch.randn(8, 16, requires_grad=True)
        weight = torch.randn(64, 16, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.randint(64, (8,)))  # the mean
        loss.backward()

    Hsu et al., "Liger Kernel", 2024 (arXiv 2410.10989); Wijmans et al., "Cut Your Losses", 2024 (2411.09009).
    """
    special = not (token_weight is None and vocab_size is None and workspace is None)
    if not special and _are_few(hidden, weight, bias, target, loss_grad):
        known: Any = loss_grad
        if isinstance(known, (float, int)):
            dtype = compute_dtype(hidden.dtype)
            known = torch.full(target.shape, known, dtype=dtype, device=target.device)
        recorded = torch.is_grad_enabled()
        product = linear if recorded and main_grad_of(weight) is not None else F.linear
        try:
            return cross_entropy(
                product(hidden, weight, bias), target, ignore_index=ignore_index, reduction=reduction,
                label_smoothing=label_smoothing, z_loss=z_loss, loss_grad=known,
            )  # fmt: skip
        except (RuntimeError, TypeError, ValueError):
            # a ValueError that says what is wrong, if an argument is
            name = "linear_cross_entropy"
            head = check_head(name, ALONE, hidden, weight, target, ignore_index, None, None, bias)
            _check_loss(name, head.rows.dtype, target, label_smoothing, z_loss, None, reduction, loss_grad)
            raise
    return linear_cross_entropy_of(
        ALONE, "linear_cross_entropy", hidden, weight, target, bias=bias, label_smoothing=label_smoothing,
        z_loss=z_loss, ignore_index=ignore_index, token_weight=token_weight, vocab_size=vocab_size,
        reduction=reduction, loss_grad=loss_grad, workspace=workspace,
    )  # fmt: skip
