"""The chunks of `linear_cross_entropy` and `linear_log_probs`: logits of some tokens at a time.

`make_stats` reduces the logits of every chunk to a few numbers a token, `make_gradients` turns them into
gradients of hidden states and weight; the ops say how. The shards of a vocabulary may lie on several ranks:
`Shards` says how they come together.
N tokens, H hidden size, V columns of this shard of the vocabulary (padding included), P shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.registry import LIBRARY, autocast, compute_dtype
from fastmp.ops.cross_entropy import check_range

# Bytes of logits that exist at a time. A GPU wants 4096 tokens or more a chunk, because the gradient of the
# weight is read and written once a chunk: those of 128256 ids in bf16 fit. A CPU is as fast with 400 tokens.
WORKSPACE_CPU = 64 << 20
WORKSPACE = 1 << 30


def chunk_size(tokens: int, columns: int, itemsize: int, workspace: int) -> int:
    """Tokens a chunk: the fewest chunks whose logits fit into `workspace` bytes, all but equal in size."""
    most = max(1, workspace // max(1, columns * itemsize))
    unit = 128 if most >= 1024 else 16 if most >= 128 else 1
    chunks = max(1, -(-tokens // (most - most % unit)))
    return min(tokens, -(-tokens // (chunks * unit)) * unit)


class Shards:
    """How the shards of one vocabulary come together; this class is the only shard and does nothing."""

    rank, size = 0, 1

    def tokens(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of all tokens, where this rank's hidden states have `shape`."""
        return shape[:-1]

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """The hidden states (N, H) of all tokens from those this rank has."""
        return hidden

    def gather_stats(self, stats: Tensor) -> tuple[Tensor, Any]:
        """Statistics (N, W) of this shard to those of all, (P, N, W), and the work to wait for."""
        return stats[None], None

    def reduce_grad(self, grad: Tensor) -> tuple[Tensor, Any]:
        """Sum the gradients (N, H) of the gathered hidden states over the shards.

        Returns the gradient of this rank's hidden states and the work to wait for, or None.
        """
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


class Tokens(NamedTuple):
    """Targets of N tokens, or of one chunk, with their weights, gradients and log-sum-exps where known."""

    target: Tensor
    weight: Tensor | None
    grad_loss: Tensor | None = None
    lse: Tensor | None = None

    def of(self, rows: slice) -> Tokens:
        weight, grad_loss, lse = (None if one is None else one[rows] for one in self[1:])
        return Tokens(self.target[rows], weight, grad_loss, lse)


class Chunks:
    """The chunks of x (N, H), at least one, and memory for the logits of `num_buffers` of them."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, workspace: int, num_buffers: int = 1
    ) -> None:
        tokens, columns = len(x), len(weight)
        size = max(1, chunk_size(tokens, columns, x.element_size(), workspace // num_buffers))
        self.x, self.weight, self.bias = x, weight, bias
        self.rows = [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]
        self.num_buffers = min(num_buffers, len(self.rows))
        self.buffers: list[Tensor] = []

    def logits(self, number: int) -> Tensor:
        """Logits of a chunk; chunks come in order. They take the memory of the chunk `num_buffers` before."""
        rows = self.rows[number]
        if number < self.num_buffers:
            self.buffers.append(self._product(self.x[rows]))
            return self.buffers[number]
        return self._product(
            self.x[rows], out=self.buffers[number % self.num_buffers][: rows.stop - rows.start]
        )

    def _product(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


class Gradients:
    """Gradients of hidden and weight, where wanted, from the logits' gradients of one chunk after another.

    That of a bias is their sum over tokens, made wherever there is a bias.

    The weight's gradient is added to `main_grad` if there is one; `results` then returns None for it. Over
    several chunks it is summed in float32 (float64) also where it ends up narrower: if each chunk rounded,
    errors would grow with their number.
    """

    def __init__(
        self, chunks: Chunks, shards: Shards, wanted: tuple[bool, bool], main_grad: Tensor | None
    ) -> None:
        self.chunks, self.shards, self.want_weight, self.main_grad = chunks, shards, wanted[1], main_grad
        self.hidden = chunks.x.new_empty(chunks.x.shape) if wanted[0] else None
        self.total, self.work = main_grad, None
        self.bias: Tensor | None = None
        weight, dtype = chunks.weight, compute_dtype(chunks.weight.dtype)
        narrow = (weight if main_grad is None else main_grad).dtype != dtype
        if self.want_weight and narrow and len(chunks.rows) > 1:
            if main_grad is None:
                self.total = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
            else:
                self.total = main_grad.to(dtype)

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
        if chunks.bias is not None:
            of_chunk = grad.sum(0, dtype=compute_dtype(grad.dtype))
            self.bias = of_chunk if self.bias is None else self.bias.add_(of_chunk)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.work is not None:
            self.work.wait()
        dtype = self.chunks.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.total is None:
            return self.hidden, None, bias
        if self.main_grad is not None:
            if self.total is not self.main_grad:
                self.main_grad.copy_(self.total)
            return self.hidden, None, bias
        return self.hidden, self.total.to(dtype), bias


def _grad_(logits: Tensor, tokens: Tokens, options: LossOptions) -> None:
    """Turn logits into their gradient."""
    torch.ops.fastmp.cross_entropy_grad_(
        logits, tokens.target, tokens.lse, tokens.grad_loss, tokens.weight, *options[:5]
    )


def _stats(logits: Tensor, tokens: Tokens, options: LossOptions) -> Tensor:
    return torch.ops.fastmp.cross_entropy_stats(
        logits, tokens.target, options.vocab_start, options.vocab_size, options.label_smoothing > 0
    )


def _merge(stats: Tensor, tokens: Tokens, options: LossOptions) -> tuple[Tensor, Tensor]:
    return torch.ops.fastmp.cross_entropy_merge(stats, tokens.target, tokens.weight, *options[1:5])


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _loss_and_gradients(
    chunks: Chunks, tokens: Tokens, options: LossOptions, shards: Shards, gradients: Gradients
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
        return joined(losses)
    ahead = chunks.num_buffers - 1
    begun: deque[tuple[Tensor, Tokens, Tensor, Any]] = deque()
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
    return joined(losses)


def make_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, stats_of: Callable[[Tensor, slice], Tensor],
    workspace: int, shards: Shards, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The statistics (P, N, W) of all tokens, gathered at once, from `stats_of(logits, rows)` of every chunk.

    If `keep` and one chunk holds them all, the logits follow, and the hidden states where they are gathered.
    """
    x = shards.gather_hidden(hidden)
    chunks = Chunks(x, weight, bias, workspace)
    stats, work = shards.gather_stats(
        joined([stats_of(chunks.logits(i), rows) for i, rows in enumerate(chunks.rows)])
    )
    if work is not None:
        work.wait()
    if not keep or len(chunks.rows) > 1:
        return (stats,)
    return (stats, chunks.buffers[0]) if x is hidden else (stats, chunks.buffers[0], x)


def kept_logits(
    ctx: Any, kept: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """Return the logits that the forward pass kept, for one backward pass to overwrite; None if it kept none.

    The first backward pass through `ctx` takes them, and every later one makes them again: `ctx.spent`, which
    the forward pass sets to False, says which.
    """
    if kept is None:
        return None
    spent, ctx.spent = ctx.spent, True
    if spent:
        return F.linear(hidden, weight, bias)
    # `.data` has a version of its own: a second backward may unpack the tensor that the first has overwritten
    return kept if torch._C._are_functorch_transforms_active() else kept.data


def make_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, grad_: Callable[[Tensor, slice], None],
    main_grad: Tensor | None, workspace: int, shards: Shards, wanted: tuple[bool, bool], kept: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of hidden, weight and bias; from the logits `kept`, where there are any.

    `grad_(logits, rows)` turns the logits of a chunk into their gradient.
    """
    chunks = Chunks(hidden if kept is not None else shards.gather_hidden(hidden), weight, bias, workspace)
    gradients = Gradients(chunks, shards, wanted, main_grad)
    for number, rows in enumerate(chunks.rows):
        logits = chunks.logits(number) if kept is None else kept.detach()
        grad_(logits, rows)
        gradients.add(number, logits)
    return gradients.results()


def make_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens, options: LossOptions, shards: Shards,
    keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, lse), followed by what `make_stats` keeps."""
    stats, *kept = make_stats(
        hidden, weight, bias, lambda logits, rows: _stats(logits, tokens.of(rows), options),
        options.workspace, shards, keep,
    )  # fmt: skip
    return (*_merge(stats, tokens, options), *kept)


def make_loss_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens, main_grad: Tensor | None,
    options: LossOptions, shards: Shards, wanted: tuple[bool, bool], kept: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of hidden, weight and bias, of tokens whose `grad_loss` and `lse` are known."""
    return make_gradients(
        hidden, weight, bias, lambda logits, rows: _grad_(logits, tokens.of(rows), options), main_grad,
        options.workspace, shards, wanted, kept,
    )  # fmt: skip


def make_both(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens, main_grad: Tensor | None,
    options: LossOptions, shards: Shards, wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Loss, and gradients of hidden, weight and bias for tokens whose `grad_loss` is known."""
    chunks = Chunks(shards.gather_hidden(hidden), weight, bias, options.workspace, 1 + (shards.size > 1))
    gradients = Gradients(chunks, shards, wanted, main_grad)
    loss = _loss_and_gradients(chunks, tokens, options, shards, gradients)
    return (loss, *gradients.results())


# What compilers see in place of the loops over chunks: one op each, whose absent results are empty.


def opaque(schema: str, function: Any, fake: Any) -> Any:
    """An op that runs `function` on any device, for graphs of torch.compile only."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastmp::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastmp, name).default


def is_opaque(shards: Shards) -> bool:
    return shards is ALONE and torch.compiler.is_compiling()


def present(like: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


def fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dweight = want_weight and main_grad is None
    return (
        hidden.new_empty(hidden.shape if want_hidden else (0,)),
        weight.new_empty(weight.shape if dweight else (0,)),
        weight.new_empty((0,) if bias is None else bias.shape),
    )


def taken(
    grads: tuple[Tensor, ...], wanted: tuple[bool, bool], main_grad: Tensor | None, has_bias: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients that `present` was given, None where it made an empty tensor."""
    exist = (wanted[0], wanted[1] and main_grad is None, has_bias)
    return tuple(grad if there else None for grad, there in zip(grads, exist))


def per_token(hidden: Tensor) -> Tensor:
    """A number for each row of `hidden`, for a fake."""
    return hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden.dtype))


class Head(NamedTuple):
    """Hidden states, output weight and bias as autocast wants them, and the weight's place in the vocabulary.

    wanted: whether the hidden states and the weight want gradients. main_grad: where the weight's goes.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    main_grad: Tensor | None
    wanted: tuple[bool, bool]
    vocab_start: int
    vocab_size: int
    workspace: int


def head_of(
    name: str, shards: Shards, hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int,
    vocab_size: int | None, workspace: int | None, bias: Tensor | None = None,
) -> Head:  # fmt: skip
    """The head of a public function's arguments; ValueError, which begins with `name`, if they do not fit."""
    main_grad = getattr(weight, "main_grad", None)  # of the parameter, not of what autocast makes of it
    hidden, weight, bias = autocast(hidden, weight, bias)
    wanted = (hidden.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    main_grad = main_grad if wanted[1] else None
    shard = weight.shape[0] if weight.dim() else 0
    vocab_size = shards.size * shard if vocab_size is None else vocab_size
    if workspace is None:
        workspace = WORKSPACE_CPU if hidden.device.type == "cpu" else WORKSPACE
    _check_head(name, shards, hidden, weight, target, main_grad, vocab_size, ignore_index, workspace)
    checks.check_same(name, weight=weight, bias=bias)
    checks.check_shape(name, weight.shape[:1], to=("weight", weight), bias=bias)
    return Head(hidden, weight, bias, main_grad, wanted, shards.rank * shard, vocab_size, workspace)


def _check_head(
    name: str, shards: Shards, hidden: Tensor, weight: Tensor, target: Tensor, main_grad: Tensor | None,
    vocab_size: int, ignore_index: int, workspace: int,
) -> None:  # fmt: skip
    """ValueError, which begins with `name`, unless hidden states, output weight and targets fit."""

    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    checks.check_floating(name, "hidden", hidden)
    shape, columns = hidden.shape, weight.shape
    require(weight.dim() == 2, "weight must be (V, H), got shape {}", columns)
    require(shape[-1:] == columns[1:], "hidden {} does not fit weight {}", shape, columns)
    checks.check_same(name, hidden=hidden, weight=weight)
    checks.check_main_grad(name, main_grad, weight=weight)
    checks.check_same_device(name, hidden=hidden, target=target)
    tokens = shards.tokens(tuple(shape))
    fits = tuple(target.shape) == tokens
    require(fits, "target {} does not fit the tokens {} of hidden {}", target.shape, tokens, shape)
    rows = shards.size * columns[0]
    within = 0 < vocab_size <= rows
    require(within, "vocab_size is {}, but weight has {} rows in {} shards", vocab_size, rows, shards.size)
    require(workspace >= 0, "workspace must not be negative, got {}", workspace)
    require(target.dtype == torch.int64, "target must be int64, got {}", target.dtype)
    check_range(name, target, vocab_size, ignore_index)
