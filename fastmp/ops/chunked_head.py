"""Chunked output head of the losses without logits: logits of some tokens at a time.

A `HeadPass` is a forward or a backward pass of a loss over the chunks; a subclass per loss has the kernels
that reduce the logits of a chunk to a few numbers per token (`stats`), join these over the shards of a
vocabulary (`merge`), and overwrite logits with their gradient (`grad_`). `Shards` is the interface through
which shards on several ranks communicate; `fastmp.tensor_parallel` implements it.

N tokens, of which M count, H hidden size, V columns of this shard of the vocabulary (padding included), P
shards.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fastmp.ops.core.backends import CPU_ABSENT
from fastmp.ops.core.registry import can_read_values, compute_dtype
from fastmp.ops.wgrad import always_add, check_late_hooks

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
    sequence_parallel = False  # each rank has the hidden states of other tokens

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


class TokenRows:
    """Rows of the gathered tokens for the GEMMs: all N tokens, or the M counted ones.

    live: int64 indices (M,), or a mask (N,); None for all.
    """

    def __init__(self, shards: Shards, total: int, live: Tensor | None) -> None:
        # a host that reads a mask waits for the device that it lies on
        self.live = live.nonzero()[:, 0] if live is not None and live.dtype == torch.bool else live
        self.shards, self.total = shards, total

    def select(self, rows: Tensor | None) -> Tensor | None:
        """Select the counted rows of (N, ...); the empty tensor of an absent output stays as it is."""
        if rows is None or self.live is None or len(rows) != self.total:
            return rows
        return rows.index_select(0, self.live)

    def spread(self, rows: Tensor) -> Tensor:
        """Undo `select`, with zeros for the tokens that do not count."""
        if self.live is None or len(rows) != len(self.live):
            return rows
        return rows.new_zeros(self.total, *rows.shape[1:]).index_copy_(0, self.live, rows)

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        hidden = self.shards.gather_hidden(hidden)
        return hidden if self.live is None else hidden.index_select(0, self.live)

    def gather_stats(self, stats: Tensor) -> Tensor:
        """All-gather (M, W) numbers of all shards, and wait: (P, M, W)."""
        found, work = self.shards.gather_stats(stats)
        if work is not None:
            work.wait()
        return found


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
    """The chunks of x (M, H), at least one, and buffers for the logits of `num_buffers` of them.

    kept: the logits of the only chunk, if they are computed.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, workspace: int, num_buffers: int = 1,
        kept: Tensor | None = None,
    ) -> None:  # fmt: skip
        tokens, columns = len(x), len(weight)
        size = max(1, chunk_size(tokens, columns, x.element_size(), workspace // num_buffers))
        self.x, self.weight, self.bias = x, weight, bias
        self.rows = [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]
        self.num_buffers, self.kept = min(num_buffers, len(self.rows)), kept
        self.buffers: list[Tensor] = []

    def part(self, tensor: Tensor, number: int) -> Tensor:
        """Return the rows of chunk `number`."""
        return tensor if len(self.rows) == 1 else tensor[self.rows[number]]

    def logits(self, number: int) -> Tensor:
        """Compute the logits of a chunk, in order; they overwrite those of the chunk `num_buffers` before."""
        if self.kept is not None:
            return self.kept
        x, weight = self.part(self.x, number), self.weight.t()
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
        self, chunks: LogitChunks, rows: TokenRows, wanted: tuple[bool, bool], main_grad: Tensor | None
    ) -> None:
        if main_grad is not None:
            check_late_hooks(chunks.weight)
            always_add(main_grad)
        self.chunks, self.rows, self.want_weight, self.main_grad = chunks, rows, wanted[1], main_grad
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
        chunks, x = self.chunks, self.chunks.part(self.chunks.x, number)
        if self.hidden is not None:
            torch.mm(grad, chunks.weight, out=chunks.part(self.hidden, number))
            if number == len(chunks.rows) - 1:  # overlaps with the wgrad GEMM below
                shards, hidden = self.rows.shards, self.hidden
                hidden = self.rows.spread(hidden) if shards.sequence_parallel else hidden
                self.hidden, self.work = shards.reduce_grad(hidden)
        if self.want_weight and self.total is None:
            self.total = _gemm(grad.t(), x)  # the only chunk, or one that is not rounded
        elif self.want_weight:
            torch.ops.fastmp.accumulate_weight_grad_(self.total, grad, x)
        if chunks.bias is not None:
            of_chunk = grad.sum(0, dtype=compute_dtype(grad.dtype))
            self.bias = of_chunk if self.bias is None else self.bias.add_(of_chunk)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.work is not None:
            self.work.wait()
        if self.hidden is not None and not self.rows.shards.sequence_parallel:
            self.hidden = self.rows.spread(self.hidden)
        dtype = self.chunks.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.total is None:
            return self.hidden, None, bias
        if self.main_grad is not None:
            if self.total is not self.main_grad:
                self.main_grad.copy_(self.total)
            return self.hidden, None, bias
        return self.hidden, self.total.to(dtype), bias


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class HeadPass:
    """A forward or backward pass of a loss over the chunks of its logits.

    A subclass has the kernels `stats`, `merge` and `grad_` (or `forward` in place of the first two), which
    take the tensors of a chunk by name, and declares:

        inputs: the tensors besides hidden states, weight and bias.
        per_token: those of them that have a row for each token.
        saved: the outputs of the forward pass, from the second on, that the backward pass takes.
        grads: the upstream gradients of the results, which come first among the outputs.

    Args:
        values: tensors and numbers by name, of which a backward pass has more.
        options: a NamedTuple of numbers, with the bytes of logits at a time as `workspace`.
        shards: of the vocabulary.
    """

    inputs: ClassVar[tuple[str, ...]]
    per_token: ClassVar[tuple[str, ...]]
    saved: ClassVar[tuple[str, ...]]
    grads: ClassVar[tuple[str, ...]] = ("grad_loss",)
    models = 1  # whose logits share the workspace

    stats: Any
    merge: Any
    grad_: Any
    loss_and_grad_: Any

    def __init__(self, values: dict[str, Any], options: Any, shards: Shards) -> None:
        hidden, logits, last = values["hidden"], values.get("logits"), values.get(self.saved[-1])
        total = shards.tokens(tuple(hidden.shape))[0] if last is None else len(last)
        self.values, self.options, self.shards = values, options, shards
        self.rows = TokenRows(shards, total, values.get("live"))
        x = self.rows.gather_hidden(hidden) if logits is None else hidden
        workspace = options.workspace // self.models
        self.chunks = LogitChunks(x, values["weight"], values.get("bias"), workspace, kept=logits)
        self.tokens: dict[str, Any] = {name: self.rows.select(values[name]) for name in self.per_token}

    @classmethod
    def num_results(cls, options: Any) -> int:
        """Return how many of the outputs have a gradient."""
        return 1

    def part(self, number: int) -> dict[str, Any]:
        """Return the tensors of chunk `number` that the kernels take."""
        if len(self.chunks.rows) == 1:
            return self.tokens
        part = self.chunks.part
        return {name: None if each is None else part(each, number) for name, each in self.tokens.items()}

    def gradients_of(self) -> HeadGradients:
        wanted = self.values["want_hidden"], self.values["want_weight"]
        return HeadGradients(self.chunks, self.rows, wanted, self.values.get("main_grad"))

    def forward(self) -> tuple[Tensor, ...]:
        """Return the results and what is saved, (N, ...).

        If one chunk holds all tokens, and `values` ask to keep them, the logits follow, and the hidden states
        if they are not those of the arguments.
        """
        chunks = self.chunks
        stats = [self.stats(chunks.logits(i), **self.part(i)) for i in range(len(chunks.rows))]
        outputs = self.merge(self.rows.gather_stats(joined(stats)), **self.tokens)
        outputs = tuple(map(self.rows.spread, outputs))
        # with two results, each with its own backward pass, the second would recompute the logits
        keep = self.values.get("keep") and len(chunks.rows) == self.num_results(self.options) == 1
        if not keep:
            return outputs
        kept = chunks.buffers[0], chunks.x
        return (*outputs, *kept[: 1 if chunks.x is self.values["hidden"] else 2])

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden, weight and bias."""
        gradients = self.gradients_of()
        self.tokens |= {name: self.rows.select(self.values[name]) for name in (*self.saved, *self.grads)}
        for number in range(len(self.chunks.rows)):
            logits = self.chunks.logits(number)
            self.grad_(logits, **self.part(number))
            gradients.add(number, logits)
        return gradients.results()

    def both(self) -> tuple[Tensor | None, ...]:
        """Return the losses (N,) and the gradients, from logits computed once; `grad_loss` is known."""
        gradients, losses = self.gradients_of(), []
        self.tokens["grad_loss"] = self.rows.select(self.values["grad_loss"])
        for number in range(len(self.chunks.rows)):
            logits = self.chunks.logits(number)
            losses.append(self.loss_and_grad_(logits, **self.part(number)))
            gradients.add(number, logits)
        return self.rows.spread(joined(losses)), *gradients.results()
