"""Linear layer and cross-entropy in one: the logits of a chunk of tokens exist at a time, never of all.

Where the gradient of every token's loss is known beforehand (`loss_grad`), a chunk's logits are made once:
they give the loss, turn into their own gradient in place, and give both products of the backward pass: 6NVH
operations in all. Where it is not, the forward pass keeps the log-sum-exp of every token, and the backward
pass makes the logits again (8NVH); but if all tokens fit into one chunk it keeps that chunk's logits, which
are no more than the workspace. The gradient of the weight is summed over the chunks in fp32 (fp64 for fp64),
in `weight.main_grad` where there is one.
N tokens, H hidden size, V columns of this shard of the vocabulary (padding included), P shards.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.ops.registry import autocast, can_read_values, compute_dtype, register, without_autocast
from fastmp.profiling import traced

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Bytes of logits that exist at a time. A GPU wants 4096 tokens or more a chunk, because the gradient of the
# weight is read and written once a chunk: those of 128256 ids in bf16 fit. A CPU is as fast with 400 tokens.
_WORKSPACE_CPU = 64 << 20
_WORKSPACE = 1 << 30
_WIDENED = 1 << 22  # elements of the logits' gradient that a CPU converts to fp32 at a time


def chunk_size(tokens: int, columns: int, itemsize: int, workspace: int) -> int:
    """Tokens a chunk: the fewest chunks whose logits fit into `workspace` bytes, all but equal in size."""
    most = max(1, workspace // max(1, columns * itemsize))
    unit = 128 if most >= 1024 else 16 if most >= 128 else 1
    chunks = max(1, -(-tokens // (most - most % unit)))
    return min(tokens, -(-tokens // (chunks * unit)) * unit)


def _accumulate_reference(total: Tensor, grad: Tensor, x: Tensor) -> None:
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)
    elif total.is_cuda:  # the product goes on from the total in fp32: nothing is rounded in between
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:
        x, step = x.to(total.dtype), max(1, _WIDENED // max(1, len(grad)))
        for rows, columns in zip(total.split(step), grad.split(step, 1), strict=True):
            rows.addmm_(columns.t().to(total.dtype), x)


register(
    "accumulate_weight_grad_(Tensor(a!) total, Tensor grad, Tensor x) -> ()",
    reference=_accumulate_reference,
    fake=lambda total, grad, x: None,
    flops=lambda total, grad, x: 2 * grad.shape[0] * grad.shape[1] * x.shape[1],
    traffic=lambda total, grad, x: (
        2 * total.numel() * total.element_size() + (grad.numel() + x.numel()) * x.element_size()
    ),
)


class Shards:
    """How the shards of one vocabulary come together. This one is alone, and has nothing to do."""

    rank, size = 0, 1

    def tokens(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of all tokens, where this rank's hidden states have `shape`."""
        return shape[:-1]

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """The hidden states (N, H) of all tokens from those this rank has."""
        return hidden

    def gather_stats(self, stats: Tensor) -> tuple[Tensor, Any]:
        """(N, 3 or 4) -> (P, N, 3 or 4), with the work to wait for (None: it is there)."""
        return stats[None], None

    def reduce_grad(self, grad: Tensor) -> tuple[Tensor, Any]:
        """The gradient of what `gather_hidden` was given, from this shard's share (N, H) of that of its
        result; with the work to wait for."""
        return grad, None


ALONE = Shards()


class LossOptions(NamedTuple):
    """This shard and the kind of loss, in the order of the cross-entropy ops; then bytes for logits."""

    vocab_start: int
    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    workspace: int


class _Tokens(NamedTuple):
    """What is known of N tokens, or of the tokens of one chunk."""

    target: Tensor
    weight: Tensor | None
    grad_loss: Tensor | None = None
    lse: Tensor | None = None

    def of(self, rows: slice) -> _Tokens:
        return _Tokens(*(None if one is None else one[rows] for one in self))


class _Chunks:
    """The chunks of x (N, H), at least one, and memory for the logits of `num_buffers` of them."""

    def __init__(self, x: Tensor, weight: Tensor, workspace: int, num_buffers: int = 1) -> None:
        tokens, columns = len(x), len(weight)
        size = max(1, chunk_size(tokens, columns, x.element_size(), workspace // num_buffers))
        self.x, self.weight = x, weight
        self.rows = [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]
        self.num_buffers = min(num_buffers, len(self.rows))
        self.buffers: list[Tensor] = []

    def logits(self, number: int) -> Tensor:
        """Logits of a chunk; chunks come in order. They take the memory of the chunk `num_buffers` before."""
        rows = self.rows[number]
        if number < self.num_buffers:
            self.buffers.append(torch.mm(self.x[rows], self.weight.t()))
            return self.buffers[number]
        out = self.buffers[number % self.num_buffers][: rows.stop - rows.start]
        return torch.mm(self.x[rows], self.weight.t(), out=out)


class _Gradients:
    """Gradients of hidden and weight, where wanted, from the logits' gradients of one chunk after another.

    That of the weight is added to `main_grad`, if there is one, and is None then.
    """

    def __init__(
        self, chunks: _Chunks, shards: Shards, wanted: tuple[bool, bool], main_grad: Tensor | None
    ) -> None:
        self.chunks, self.shards, self.want_weight, self.main_grad = chunks, shards, wanted[1], main_grad
        self.hidden = chunks.x.new_empty(chunks.x.shape) if wanted[0] else None
        self.total, self.work = main_grad, None
        weight, dtype = chunks.weight, compute_dtype(chunks.weight.dtype)
        if self.want_weight and main_grad is None and len(chunks.rows) > 1 and weight.dtype != dtype:
            self.total = torch.zeros(weight.shape, dtype=dtype, device=weight.device)

    def add(self, number: int, grad: Tensor) -> None:
        """Take the gradient of chunk `number`; chunks come in order."""
        chunks, rows = self.chunks, self.chunks.rows[number]
        if self.hidden is not None:
            torch.mm(grad, chunks.weight, out=self.hidden[rows])
            if number == len(chunks.rows) - 1:  # goes on behind the product that follows
                self.hidden, self.work = self.shards.reduce_grad(self.hidden)
        if self.want_weight and self.total is None:
            self.total = torch.mm(grad.t(), chunks.x[rows])  # of the only chunk, or one that is not rounded
        elif self.want_weight:
            torch.ops.fastmp.accumulate_weight_grad_(self.total, grad, chunks.x[rows])

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        if self.work is not None:
            self.work.wait()
        if not self.want_weight or self.main_grad is not None:
            return self.hidden, None
        return self.hidden, self.total.to(self.chunks.weight.dtype)


def _grad_(logits: Tensor, tokens: _Tokens, options: LossOptions) -> None:
    """Turn logits into their gradient."""
    torch.ops.fastmp.cross_entropy_grad_(
        logits, tokens.target, tokens.lse, tokens.grad_loss, tokens.weight, *options[:5]
    )


def _stats(logits: Tensor, tokens: _Tokens, options: LossOptions) -> Tensor:
    return torch.ops.fastmp.cross_entropy_stats(
        logits, tokens.target, options.vocab_start, options.vocab_size, options.label_smoothing > 0
    )


def _merge(stats: Tensor, tokens: _Tokens, options: LossOptions) -> tuple[Tensor, Tensor]:
    return torch.ops.fastmp.cross_entropy_merge(stats, tokens.target, tokens.weight, *options[1:5])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _loss(chunks: _Chunks, tokens: _Tokens, options: LossOptions, shards: Shards) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of all tokens; the statistics of all chunks are gathered at once."""
    parts = [_stats(chunks.logits(i), tokens.of(rows), options) for i, rows in enumerate(chunks.rows)]
    stats, work = shards.gather_stats(_joined(parts))
    if work is not None:
        work.wait()
    return _merge(stats, tokens, options)


def _loss_and_gradients(
    chunks: _Chunks, tokens: _Tokens, options: LossOptions, shards: Shards, gradients: _Gradients
) -> Tensor:
    """Loss of all tokens, their gradients given to `gradients`.

    Alone, loss and gradient come from one launch. Between several shards, statistics are gathered while the
    next chunk's logits are made, and the last ones while the chunk before has its gradients.
    """
    losses = []
    if shards.size == 1:
        for number, rows in enumerate(chunks.rows):
            logits, part = chunks.logits(number), tokens.of(rows)
            losses.append(
                torch.ops.fastmp.cross_entropy_loss_grad_(
                    logits, part.target, part.grad_loss, part.weight, *options[1:5]
                )
            )
            gradients.add(number, logits)
        return _joined(losses)
    begun, ahead = deque(), chunks.num_buffers - 1
    for turn in range(len(chunks.rows) + ahead):
        if turn < len(chunks.rows):
            logits, part = chunks.logits(turn), tokens.of(chunks.rows[turn])
            begun.append((logits, part, *shards.gather_stats(_stats(logits, part, options))))
        if turn >= ahead:
            logits, part, stats, work = begun.popleft()
            if work is not None:
                work.wait()
            loss, lse = _merge(stats, part, options)
            _grad_(logits, part._replace(lse=lse), options)
            gradients.add(turn - ahead, logits)
            losses.append(loss)
    return _joined(losses)


def _refuse_create_graph() -> None:
    """Else a second derivative would silently be missing: nothing tells autograd what was saved."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("linear_cross_entropy: its backward is not differentiable (create_graph=True)")


def _require_promise(grad_loss: Tensor, promised: Tensor, ignored: Tensor) -> None:
    """RuntimeError unless the gradient is the promised one up to rounding; a device is not waited for."""
    kept = (grad_loss - promised).abs() <= 8 * torch.finfo(promised.dtype).eps * promised.abs()
    torch._assert_async(
        (kept | ignored).all(),
        "linear_cross_entropy: the loss received a gradient other than the loss_grad that was promised",
    )


class _KnownGradient(torch.autograd.Function):
    """Loss (N,) whose gradient is promised: both gradients are made at once, the backward hands them out."""

    @staticmethod
    def forward(ctx, hidden, weight, target, token_weight, loss_grad, main_grad, options, shards, wanted):
        chunks = _Chunks(shards.gather_hidden(hidden), weight, options.workspace, 1 + (shards.size > 1))
        gradients = _Gradients(chunks, shards, wanted, main_grad)
        tokens = _Tokens(target, token_weight, loss_grad)
        loss = _loss_and_gradients(chunks, tokens, options, shards, gradients)
        ctx.save_for_backward(target, loss_grad, *gradients.results())
        ctx.ignore_index, ctx.spent = options.ignore_index, False
        return loss

    @staticmethod
    @traced("fastmp.linear_cross_entropy_backward")
    def backward(ctx, grad_loss):
        _refuse_create_graph()
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy: with loss_grad the gradients exist once: there is no second backward"
            )
        target, loss_grad, hidden, weight = ctx.saved_tensors
        _require_promise(grad_loss, loss_grad, target == ctx.ignore_index)
        ctx.spent = True
        return hidden, weight, None, None, None, None, None, None, None


class _UnknownGradient(torch.autograd.Function):
    """Loss (N,) that keeps the log-sum-exp of every token, and the logits if one chunk holds them all."""

    @staticmethod
    def forward(ctx, hidden, weight, target, token_weight, main_grad, options, shards, wanted):
        x = shards.gather_hidden(hidden)
        chunks = _Chunks(x, weight, options.workspace)
        loss, lse = _loss(chunks, _Tokens(target, token_weight), options, shards)
        kept = chunks.buffers[0] if len(chunks.rows) == 1 else None
        ctx.save_for_backward(hidden if kept is None else x, weight, target, token_weight, lse, kept)
        ctx.main_grad, ctx.options, ctx.shards, ctx.wanted = main_grad, options, shards, wanted
        return loss

    @staticmethod
    @traced("fastmp.linear_cross_entropy_backward")
    def backward(ctx, grad_loss):
        _refuse_create_graph()
        hidden, weight, target, token_weight, lse, kept = ctx.saved_tensors
        tokens = _Tokens(target, token_weight, grad_loss, lse)
        x = ctx.shards.gather_hidden(hidden) if kept is None else hidden
        chunks = _Chunks(x, weight, ctx.options.workspace)
        gradients = _Gradients(chunks, ctx.shards, ctx.wanted, ctx.main_grad)
        for number, rows in enumerate(chunks.rows):
            logits = chunks.logits(number) if kept is None else kept.detach()
            _grad_(logits, tokens.of(rows), ctx.options)
            gradients.add(number, logits)
        return *gradients.results(), None, None, None, None, None, None


def _check(
    name: str, shards: Shards, hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor | None,
    loss_grad: Tensor | float | None, options: LossOptions,
) -> None:  # fmt: skip
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{name}: {message}")

    def require_like_target(value: Any, called: str) -> None:
        if isinstance(value, Tensor):
            shape = tuple(value.shape)
            require(shape == tokens, f"{called} {shape} does not fit target {tokens}")
            require(not value.requires_grad, f"{called} requires a gradient, but receives none")
            require(
                value.device == hidden.device, f"{called} is on {value.device}, hidden on {hidden.device}"
            )

    shape, tokens = tuple(hidden.shape), tuple(target.shape)
    require(hidden.dtype in _DTYPES, f"hidden must have one of the dtypes {_DTYPES}, got {hidden.dtype}")
    require(weight.dim() == 2, f"weight must be (V, H), got shape {tuple(weight.shape)}")
    require(shape[-1:] == weight.shape[1:], f"hidden {shape} does not fit weight {tuple(weight.shape)}")
    require(weight.dtype == hidden.dtype, f"hidden is {hidden.dtype}, but weight is {weight.dtype}")
    require(weight.device == hidden.device, f"hidden is on {hidden.device}, but weight is on {weight.device}")
    expected = shards.tokens(shape)
    require(tokens == expected, f"target {tokens} does not fit the tokens {expected} of hidden {shape}")
    require(target.dtype == torch.int64, f"target must be int64, got {target.dtype}")
    require(target.device == hidden.device, f"target is on {target.device}, hidden on {hidden.device}")
    size, smoothing, z_loss = options.vocab_size, options.label_smoothing, options.z_loss
    rows = shards.size * weight.shape[0]
    require(0 < size <= rows, f"vocab_size is {size}, but weight has {rows} rows in {shards.size} shards")
    require(0 <= smoothing <= 1, f"label_smoothing must lie in [0, 1], got {smoothing}")
    require(z_loss >= 0, f"z_loss must not be negative, got {z_loss}")
    require(options.workspace >= 0, f"workspace must not be negative, got {options.workspace}")
    require_like_target(token_weight, "token_weight")
    require_like_target(loss_grad, "loss_grad")
    if not can_read_values(target):
        return
    wrong = target[((target < 0) | (target >= size)) & (target != options.ignore_index)]
    require(
        not len(wrong),
        f"target {wrong[0].item() if len(wrong) else 0} is outside the vocabulary of {size} ids and is not "
        f"ignore_index {options.ignore_index}",
    )


def linear_cross_entropy_of(
    shards: Shards,
    name: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    token_weight: Tensor | None,
    vocab_size: int | None,
    loss_grad: Tensor | float | None,
    workspace: int | None,
) -> Tensor:
    """`linear_cross_entropy` where weight is one of several shards, whose errors say `name`.

    `target` names the ids of all tokens, `hidden` has those that `shards.gather_hidden` gathers, rows first.
    """
    main_grad = getattr(weight, "main_grad", None)  # of the parameter, not of what autocast makes of it
    hidden, weight = autocast(hidden, weight)
    shard = weight.shape[0] if weight.dim() else 0
    vocab_size = shards.size * shard if vocab_size is None else vocab_size
    if workspace is None:
        workspace = _WORKSPACE_CPU if hidden.device.type == "cpu" else _WORKSPACE
    options = LossOptions(shards.rank * shard, vocab_size, ignore_index, label_smoothing, z_loss, workspace)
    _check(name, shards, hidden, weight, target, token_weight, loss_grad, options)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    dtype = compute_dtype(rows.dtype)
    if token_weight is not None:
        token_weight = token_weight.reshape(-1).to(dtype)
    wanted = (hidden.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    shared = (main_grad if wanted[1] else None, options, shards, wanted)
    with without_autocast(rows.device.type):
        if not any(wanted):
            chunks = _Chunks(shards.gather_hidden(rows), weight, options.workspace)
            loss, _ = _loss(chunks, _Tokens(targets, token_weight), options, shards)
        elif loss_grad is None:
            loss = _UnknownGradient.apply(rows, weight, targets, token_weight, *shared)
        else:
            if not isinstance(loss_grad, Tensor):
                loss_grad = torch.full(targets.shape, loss_grad, dtype=dtype, device=rows.device)
            loss_grad = loss_grad.reshape(-1).to(dtype)
            loss = _KnownGradient.apply(rows, weight, targets, token_weight, loss_grad, *shared)
    return loss.reshape(target.shape)


@traced("fastmp.linear_cross_entropy")
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    loss_grad: Tensor | float | None = None,
    workspace: int | None = None,
) -> Tensor:
    """Cross-entropy per token of the logits hidden weight^T, which never exist as a whole.

    Under autocast, in its dtype. The gradient of the weight is summed in fp32 (fp64 for fp64); where the
    parameter has a `main_grad`, a tensor of its shape, it is added to that, and autograd gets none.

    Args:
        hidden: (..., H) float64, float32, bfloat16 or float16.
        weight: (V, H) of the same dtype and device.
        target: (...) int64 ids.
        label_smoothing, z_loss, ignore_index, token_weight, vocab_size: as in `cross_entropy`.
        loss_grad: the gradient that the loss of every token will receive, (...) or one number for all: 1
            where the losses are summed. Then the forward pass makes the gradients too, for 3/4 of the
            operations and no logits made twice, and adds to `main_grad` already; the backward pass hands them
            out, once, and a gradient other than the promised one is a RuntimeError (on a GPU a device-side
            assertion). Without it, the loss can receive any gradient. Without gradients it has no effect.
        workspace: bytes of logits at a time, from which the size of a chunk follows. Default 64 MiB on a CPU,
            1 GiB elsewhere.

    Returns:
        (...) float64 for float64, else float32. Ignored tokens count zero.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; on the CPU also a target outside the vocabulary
            that is not ignore_index (elsewhere such a token has loss and gradient NaN).

    Hsu et al., "Liger Kernel", 2024 (arXiv 2410.10989); Wijmans et al., "Cut Your Losses", 2024 (2411.09009).
    """
    return linear_cross_entropy_of(
        ALONE, "linear_cross_entropy", hidden, weight, target, label_smoothing=label_smoothing, z_loss=z_loss,
        ignore_index=ignore_index, token_weight=token_weight, vocab_size=vocab_size, loss_grad=loss_grad,
        workspace=workspace,
    )  # fmt: skip
