"""Chunked output head of the losses without logits: logits of some tokens at a time.

`make_stats` reduces the logits of every chunk to a few numbers per token, and `make_gradients` turns them
into gradients of hidden states and weight, with kernels of the calling op. `Shards` is the interface through
which the shards of a vocabulary on several ranks communicate; `fastmp.tensor_parallel` implements it.

N tokens, H hidden size, V columns of this shard of the vocabulary (padding included), P shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.backends import CPU_ABSENT, LIBRARY
from fastmp.ops.core.registry import autocast, can_read_values, compute_dtype
from fastmp.ops.cross_entropy import check_range
from fastmp.ops.wgrad import always_add, check_late_hooks, main_grad_of

# Bytes of logits in memory at a time. A GPU needs 4096 tokens or more per chunk, because the gradient of the
# weight is read and written once per chunk: logits of 128256 ids in bf16 fit. A CPU needs 400 tokens.
WORKSPACE_CPU = 64 << 20
WORKSPACE = 1 << 30


def chunk_size(tokens: int, columns: int, itemsize: int, workspace: int) -> int:
    """Return the tokens per chunk: the fewest chunks that fit into `workspace` bytes, nearly equal."""
    max_tokens = max(1, workspace // max(1, columns * itemsize))
    unit = 128 if max_tokens >= 1024 else 16 if max_tokens >= 128 else 1
    chunks = max(1, -(-tokens // (max_tokens - max_tokens % unit)))
    return min(tokens, -(-tokens // (chunks * unit)) * unit)


class Shards:
    """Communication between the shards of a vocabulary; this base class is a single shard without any."""

    rank, size = 0, 1

    def tokens(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of all tokens, given the shape of this rank's hidden states."""
        return shape[:-1]

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """All-gather the hidden states (N, H) of all tokens from this rank's."""
        return hidden

    def gather_stats(self, stats: Tensor) -> tuple[Tensor, Any]:
        """All-gather the statistics (N, W) of the shards: (P, N, W), and the work to wait for, or None."""
        return stats[None], None

    def reduce_grad(self, grad: Tensor) -> tuple[Tensor, Any]:
        """Reduce the gradients (N, H) of the gathered hidden states over the shards.

        Returns:
            The gradient of this rank's hidden states, and the work to wait for, or None.
        """
        return grad, None


ALONE = Shards()


class LossOptions(NamedTuple):
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


class HeadCall(NamedTuple):
    """The arguments of a call that are not tensors.

    options: of the op. wanted: if the hidden states and the weight want gradients. reduction: other than
    "none" if the upstream gradient is known up to a factor.
    """

    options: Any
    shards: Shards
    wanted: tuple[bool, bool]
    reduction: str = "none"


class Targets(NamedTuple):
    """Targets of N tokens, or of one chunk, with weights, upstream gradients and merged statistics."""

    target: Tensor
    weight: Tensor | None
    grad_loss: Tensor | None = None
    merged: Tensor | None = None

    def of(self, rows: slice) -> Targets:
        weight, grad_loss, merged = (None if one is None else one[rows] for one in self[1:])
        return Targets(self.target[rows], weight, grad_loss, merged)


def _huge_pages(memory: Tensor) -> Tensor:
    """Advise huge pages for new memory on a CPU, because faulting in small ones takes 5 to 8 % of a loss."""
    if not CPU_ABSENT and can_read_values(memory):
        torch.ops.fastmp_memory.advise_huge_pages(memory)
    return memory


def _gemm(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Compute a b + bias, in new memory without `out`."""
    if out is None and can_read_values(a):  # torch.func.vmap supports no `out`
        out = _huge_pages(a.new_empty(len(a), b.shape[1]))
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


class LogitChunks:
    """The chunks of x (N, H), at least one, and buffers for the logits of `num_buffers` of them."""

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
        """Compute the logits of a chunk, in order; they overwrite those of the chunk `num_buffers` before."""
        x, weight = self.x[self.rows[number]], self.weight.t()
        if number < self.num_buffers:
            self.buffers.append(_gemm(x, weight, self.bias))
            return self.buffers[number]
        return _gemm(x, weight, self.bias, self.buffers[number % self.num_buffers][: len(x)])


class HeadGradients:
    """Gradients of hidden states, weight and bias, accumulated from the logits' gradients chunk by chunk.

    The weight's gradient is added to `main_grad` if there is one; `results` then returns None for it. Over
    several chunks it is summed in float32 (float64) even if its result is narrower: rounding each chunk would
    let errors grow with their number.

    Raises:
        ValueError: the weight has a gradient hook, which a gradient in `main_grad` would skip.
    """

    def __init__(
        self, chunks: LogitChunks, shards: Shards, wanted: tuple[bool, bool], main_grad: Tensor | None
    ) -> None:
        if main_grad is not None:
            check_late_hooks(chunks.weight)
            always_add(main_grad)
        self.chunks, self.shards, self.want_weight, self.main_grad = chunks, shards, wanted[1], main_grad
        self.hidden = chunks.x.new_empty(chunks.x.shape) if wanted[0] else None
        self.total, self.work = main_grad, None
        self.bias: Tensor | None = None
        weight, dtype = chunks.weight, compute_dtype(chunks.weight.dtype)
        narrow = (weight if main_grad is None else main_grad).dtype != dtype
        if self.want_weight and narrow and len(chunks.rows) > 1:
            if main_grad is None:
                total = torch.empty(weight.shape, dtype=dtype, device=weight.device)
                self.total = _huge_pages(total).zero_()
            else:
                self.total = main_grad.to(dtype)

    def add(self, number: int, grad: Tensor) -> None:
        """Accumulate from the logits' gradient of chunk `number`; chunks come in order."""
        chunks, rows = self.chunks, self.chunks.rows[number]
        if self.hidden is not None:
            torch.mm(grad, chunks.weight, out=self.hidden[rows])
            if number == len(chunks.rows) - 1:  # overlaps with the wgrad GEMM below
                self.hidden, self.work = self.shards.reduce_grad(self.hidden)
        if self.want_weight and self.total is None:
            self.total = _gemm(grad.t(), chunks.x[rows])  # the only chunk, or one that is not rounded
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


def _grad_(logits: Tensor, tokens: Targets, options: LossOptions) -> None:
    """Overwrite logits with their gradient."""
    torch.ops.fastmp.cross_entropy_grad_(
        logits, tokens.target, tokens.merged, tokens.grad_loss, tokens.weight, *options[:5]
    )


def _stats(logits: Tensor, tokens: Targets, options: LossOptions) -> Tensor:
    return torch.ops.fastmp.cross_entropy_stats(
        logits, tokens.target, options.vocab_start, options.vocab_size, options.label_smoothing > 0
    )


def _merge(stats: Tensor, tokens: Targets, options: LossOptions) -> tuple[Tensor, Tensor]:
    return torch.ops.fastmp.cross_entropy_merge(stats, tokens.target, tokens.weight, *options[1:5])


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _loss_and_gradients(
    chunks: LogitChunks, tokens: Targets, options: LossOptions, shards: Shards, gradients: HeadGradients
) -> Tensor:
    """Return the loss of all tokens, and accumulate their gradients in `gradients`.

    With one shard, one launch computes loss and gradient. With several, the all-gather of a chunk's
    statistics overlaps with the GEMM of the next chunk's logits, or with the last chunks' gradients.
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
    begun: deque[tuple[Tensor, Targets, Tensor, Any]] = deque()
    for turn in range(len(chunks.rows) + ahead):
        if turn < len(chunks.rows):
            logits, part = chunks.logits(turn), tokens.of(chunks.rows[turn])
            begun.append((logits, part, *shards.gather_stats(_stats(logits, part, options))))
        if turn >= ahead:
            logits, part, stats, work = begun.popleft()
            if work is not None:
                work.wait()
            loss, merged = _merge(stats, part, options)
            _grad_(logits, part._replace(merged=merged), options)
            gradients.add(turn - ahead, logits)
            losses.append(loss)
    return joined(losses)


def make_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, stats_of: Callable[[Tensor, slice], Tensor],
    workspace: int, shards: Shards, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the statistics (P, N, W) of all tokens, from `stats_of(logits, rows)` of every chunk.

    With `keep`, and if one chunk holds all tokens, the logits follow, and the hidden states if they were
    gathered.
    """
    x = shards.gather_hidden(hidden)
    chunks = LogitChunks(x, weight, bias, workspace)
    stats, work = shards.gather_stats(
        joined([stats_of(chunks.logits(i), rows) for i, rows in enumerate(chunks.rows)])
    )
    if work is not None:
        work.wait()
    if not keep or len(chunks.rows) > 1:
        return (stats,)
    return (stats, chunks.buffers[0]) if x is hidden else (stats, chunks.buffers[0], x)


def is_retained() -> bool:
    """Return True in a backward pass after which another may follow: it must not overwrite what is saved."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._autograd._get_current_graph_task_keep_graph()


def kept_logits(kept: Tensor | None) -> Tensor | None:
    """Return the logits for a backward pass to overwrite; None if the forward pass kept none."""
    return kept.clone() if kept is not None and is_retained() else kept


def make_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, grad_: Callable[[Tensor, slice], None],
    main_grad: Tensor | None, workspace: int, shards: Shards, wanted: tuple[bool, bool], kept: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of hidden, weight and bias, from the logits `kept` if there are any.

    `grad_(logits, rows)` overwrites the logits of a chunk with their gradient.
    """
    x = hidden if kept is not None else shards.gather_hidden(hidden)
    chunks = LogitChunks(x, weight, bias, workspace)
    gradients = HeadGradients(chunks, shards, wanted, main_grad)
    for number, rows in enumerate(chunks.rows):
        logits = chunks.logits(number) if kept is None else kept.detach()
        grad_(logits, rows)
        gradients.add(number, logits)
    return gradients.results()


def scale_once(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply grad by a 0-dim factor, rounded once; in the memory of `grad` in the last backward pass."""
    if is_retained():
        return (grad.to(factor.dtype) * factor).to(grad.dtype)
    if can_read_values(factor) and factor == 1:  # that of `loss.backward()`
        return grad
    if grad.dtype == factor.dtype:
        return grad.mul_(factor)
    # torch.amp's gradient scaling rounds once; mul_ by a wider factor has a tenth of its speed on a CPU
    torch._amp_foreach_non_finite_check_and_unscale_([grad], factor.new_empty(1), factor)
    return grad


def make_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Targets, options: LossOptions,
    shards: Shards, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (loss, merged), followed by the tensors that `make_stats` keeps."""
    stats, *kept = make_stats(
        hidden, weight, bias, lambda logits, rows: _stats(logits, tokens.of(rows), options),
        options.workspace, shards, keep,
    )  # fmt: skip
    return (*_merge(stats, tokens, options), *kept)


def make_loss_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Targets, main_grad: Tensor | None,
    options: LossOptions, shards: Shards, wanted: tuple[bool, bool], kept: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of hidden, weight and bias, given the tokens' `grad_loss` and `merged`."""
    return make_gradients(
        hidden, weight, bias, lambda logits, rows: _grad_(logits, tokens.of(rows), options), main_grad,
        options.workspace, shards, wanted, kept,
    )  # fmt: skip


def make_both(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Targets, main_grad: Tensor | None,
    options: LossOptions, shards: Shards, wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the loss, and the gradients of hidden, weight and bias, given the tokens' `grad_loss`."""
    chunks = LogitChunks(shards.gather_hidden(hidden), weight, bias, options.workspace, 1 + (shards.size > 1))
    gradients = HeadGradients(chunks, shards, wanted, main_grad)
    loss = _loss_and_gradients(chunks, tokens, options, shards, gradients)
    return (loss, *gradients.results())


# Compilers see one op in place of a loop over chunks; absent results are empty tensors.


def opaque(schema: str, function: Any, fake: Any) -> Any:
    """Define an op that runs `function` on any device, for torch.compile only."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastmp::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastmp, name).default


def is_opaque(shards: Shards) -> bool:
    """Return True if a compiler traces the call, and shall see opaque ops."""
    return shards is ALONE and torch.compiler.is_compiling()


def split_options(kind: Any, values: tuple) -> tuple[Any, tuple]:
    """Split the last arguments of an opaque op into options of a NamedTuple `kind` and the rest."""
    count = len(kind._fields)
    return kind(*values[:count]), values[count:]


def present(like: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Replace absent gradients by empty tensors, as ops return them."""
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
    """Undo `present`: None for the gradients that are absent."""
    exist = (wanted[0], wanted[1] and main_grad is None, has_bias)
    return tuple(grad if there else None for grad, there in zip(grads, exist))


def per_token(hidden: Tensor, *numbers: int) -> Tensor:
    """Return an empty tensor of a number, or `numbers`, per row of `hidden`, for a fake."""
    return hidden.new_empty((hidden.shape[0], *numbers), dtype=compute_dtype(hidden.dtype))


class Head(NamedTuple):
    """Hidden states, output weight and bias after autocast, and the weight's position in the vocabulary.

    wanted: if the hidden states and the weight want gradients. main_grad: receives the weight's gradient.
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
    name: str, shards: Shards, hidden: Tensor, weight: Tensor, target: Tensor | None, ignore_index: int,
    vocab_size: int | None, workspace: int | None, bias: Tensor | None = None,
) -> Head:  # fmt: skip
    """Check the arguments of a public function; errors begin with `name`. A loss may have no targets."""
    # Of the parameter, not of its autocast copy.
    main_grad = main_grad_of(weight, compiles=True) if torch.is_grad_enabled() else None
    hidden, weight, bias = autocast(hidden, weight, bias)
    wanted = (hidden.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    shard = weight.shape[0] if weight.dim() else 0
    vocab_size = shards.size * shard if vocab_size is None else vocab_size
    if workspace is None:
        workspace = WORKSPACE_CPU if hidden.device.type == "cpu" else WORKSPACE
    _check_head(name, shards, hidden, weight, target, main_grad, vocab_size, ignore_index, workspace)
    checks.check_same(name, weight=weight, bias=bias)
    checks.check_shape(name, weight.shape[:1], to=("weight", weight), bias=bias)
    return Head(hidden, weight, bias, main_grad, wanted, shards.rank * shard, vocab_size, workspace)


def _check_head(
    name: str, shards: Shards, hidden: Tensor, weight: Tensor, target: Tensor | None,
    main_grad: Tensor | None, vocab_size: int, ignore_index: int, workspace: int,
) -> None:  # fmt: skip
    """Raise ValueError unless hidden states, output weight and targets fit."""

    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, f"{name}: " + message, *values)

    checks.check_floating(name, "hidden", hidden)
    shape, columns = hidden.shape, weight.shape
    require(weight.dim() == 2, "weight must be (V, H), got shape {}", columns)
    fits = shape[-1:] == columns[1:]
    require(fits, "hidden {} does not fit weight {}: expected (..., H) and (V, H)", shape, columns)
    checks.check_same(name, hidden=hidden, weight=weight)
    checks.check_main_grad(name, main_grad, weight=weight)
    if target is not None:
        checks.check_same_device(name, hidden=hidden, target=target)
        tokens = shards.tokens(tuple(shape))
        fits = tuple(target.shape) == tokens
        require(
            fits,
            "expected target of shape {} for hidden {}, got {}; arguments are (hidden, weight, target)",
            tokens,
            shape,
            target.shape,
        )
    rows = shards.size * columns[0]
    checks.check_number(name, integer=True, vocab_size=vocab_size, ignore_index=ignore_index)
    within = 0 < vocab_size <= rows
    require(within, "vocab_size is {}, but weight has {} rows in {} shards", vocab_size, rows, shards.size)
    require(workspace >= 0, "workspace must not be negative, got {}", workspace)
    if target is not None:
        require(target.dtype == torch.int64, "expected int64 target, got {}", target.dtype)
        check_range(name, target, vocab_size, ignore_index)
