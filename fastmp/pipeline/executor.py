"""Executor of a pipeline rank: one cursor walks the instructions of its `fastmp.schedule.program.Program`.

    forward   takes what the span before has made, or a message; runs the span; keeps what backward needs
    backward  takes the gradients of the outputs; autograd; hands on those of the inputs (dgrad also)
    wgrad     runs the weight gradients that dgrad has deferred
    send      posts the activations or gradients that a span has made; recv posts their receipt

The code of a model around its layers is a span as well. Where layers are cut, the executor calls the chunk at
the span before them, whose chain calls back (`through`): the cursor goes on, through both microbatches where
two overlap, up to the span behind the layers, which is the rest of that call.

The loss is the span after the last stage, with an autograd graph of its own, or calls the only stage itself.
Outputs are kept only until they have been sent: backward needs their autograd edge, not their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastmp.nn.overlap import OverlappedLayers
from fastmp.nn.segment import LayerChain, StageOutput, Tensors
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.pipeline.cut import CutLayers
from fastmp.pipeline.transfers import Mail
from fastmp.profiling import phase, region
from fastmp.schedule.program import KINDS, LOSS, Instruction, Program, Span, in_words
from fastmp.schedule.steps import BACKWARD, FORWARD, Step, peak_held
from fastmp.status import process_status

__all__ = ["Executor", "PipelineError", "PipelineResult"]

Outputs = Tensor | Sequence[Tensor]
Key = tuple[int, int]  # microbatch and chunk, or span


class PipelineError(RuntimeError):
    """Failure of an instruction on this rank, both named in the message; the cause is its exception."""


class PipelineResult(NamedTuple):
    """Losses and trace of one training step or evaluation on this rank.

    Attributes:
        loss: detached sum over microbatches of the loss function; None except on the rank of the last stage.
        stage_loss: the same of losses that chunks of this rank returned; None if there are none.
        stats: {(microbatch, chunk): stats of the chunk}; the loss function is one more chunk.
        trace: the steps in the order in which they were run.
        peak: peak number of forwards whose backward was not complete; 0 in evaluation.
    """

    loss: Tensor | None
    stage_loss: Tensor | None
    stats: dict[tuple[int, int], Any]
    trace: tuple[Step, ...]
    peak: int


class _Live(NamedTuple):
    """Roots of the backward of a chunk's code or a loss: edges of the outputs, and the loss."""

    edges: tuple[GradientEdge, ...]
    loss: Tensor | None


class _Cursor:
    """The position of a rank in its program: the number of the next instruction.

    str() is the instruction that runs. `process_status` keeps a cursor, not an executor with its model.
    """

    __slots__ = ("at", "program")

    def __init__(self, program: Program) -> None:
        self.program, self.at = program, 0

    def __str__(self) -> str:
        at, every = max(0, self.at - 1), self.program.instructions
        return f"instruction {at} of {len(every)}, {in_words(self.program, every[at])}"


class Executor:
    """Runs a program of this rank, for training or for evaluation.

    Args:
        chunks, inputs, loss, shared: as in `fastmp.pipeline.Pipeline`.
        mail: the messages of the rank.
        overlap: the layers that the program cuts, or None.
    """

    def __init__(
        self,
        program: Program,
        chunks: Sequence[nn.Module],
        *,
        inputs: Callable[[Any], Outputs] | None,
        loss: Callable[..., Any],
        shared: Callable[[Any], dict[str, Any]] | None,
        mail: Mail,
        overlap: OverlappedLayers | None = None,
    ) -> None:
        self.program, self._chunks, self._mail, self._overlap = program, chunks, mail, overlap
        self._inputs, self._loss, self._shared = inputs, loss, shared
        self._trains = any(now.op in ("backward", "dgrad") for now in program.instructions)
        stages, spans = program.stages, program.spans
        # 1. The stage of each span, with the loss as the one after the last, and the first and the last span
        #    of each chunk's own call.
        own = stages.stages(program.rank)
        self._whole = inputs is None and len(stages) == 1
        self._stages = [len(stages) if span.name == LOSS else own[span.chunk] for span in spans]
        losses = [i for i, span in enumerate(spans) if span.name == LOSS]
        calls = [[i for i, span in enumerate(spans) if span.chunk == c] for c in range(len(own))]
        self._first = [each[0] for each in calls]
        self._last = [max(i for i in each if i not in losses) for each in calls]
        # 2. Spans whose weight gradients wait, also those of a loss.
        self._defers = {now.span for now in program.instructions if now.op == "dgrad"}
        self._defers |= {i for i in losses if self._last[spans[i].chunk] in self._defers}
        # 3. The last instruction that reads each batch.
        reading = {*self._first, *losses}
        forwards = ((i, now) for i, now in enumerate(program.instructions) if now.op == "forward")
        self._last_reads = {*{now.microbatch: i for i, now in forwards if now.span in reading}.values()}
        self._cursor = _Cursor(program)
        self._reset(None, None)

    def run(self, fetch: Callable[[int], Any], loss_grad: Tensor | None = None) -> PipelineResult:
        """Run the program; `fetch(microbatch)` returns a batch, `loss_grad` is as in `Pipeline.train`."""
        self._reset(fetch, loss_grad)
        self._cursor.at = 0
        if self._overlap is not None:
            self._overlap.check_hooks()
            self._overlap.through = self._through
        try:
            while self._cursor.at < len(self.program.instructions):
                self._advance()
        finally:
            if self._overlap is not None:
                self._overlap.through = None
        assert not self._live and not self._layers and self._mail.is_empty, (
            "a message or a backward is left over"
        )
        losses, peak = self._losses, peak_held(self._trace) if self._trains else 0
        result = PipelineResult(
            losses.get("final"), losses.get("stage"), self._stats, tuple(self._trace), peak
        )
        self._reset(None, None)  # `fetch` may hold all batches
        return result

    def _reset(self, fetch: Callable[[int], Any] | None, loss_grad: Tensor | None) -> None:
        """Clear the state of the last step, complete or failed."""
        self._source, self._loss_grad = fetch, loss_grad
        self._batches: dict[int, Any] = {}
        self._mail.drop()
        self._queue = WgradQueue()
        self._deferred: dict[Key, list[Any]] = {}  # weight gradients, by microbatch and span
        self._losses: dict[str, Tensor] = {}
        self._stats: dict[Key, Any] = {}
        self._trace: list[Step] = []
        self._live: dict[Key, _Live] = {}  # by microbatch and span
        self._leaves: dict[Key, Tensors] = {}  # inputs whose gradients are handed on, by microbatch and span
        self._layers: dict[Key, CutLayers] = {}  # by microbatch and chunk
        self._calling: Key | None = None  # microbatch and chunk that is called

    def _advance(self) -> None:
        """Run the next instruction. PipelineError names the one that failed."""
        now = self.program.instructions[self._cursor.at]
        self._cursor.at += 1
        if now.op in KINDS and now.span in self._first:
            self._trace.append(Step(KINDS[now.op], now.microbatch, self.program.spans[now.span].chunk))
        try:
            getattr(self, f"_{now.op}")(now)
            if self._cursor.at == len(self.program.instructions):
                self._mail.finish()
        except Exception as error:
            if self._whole or now.op == "fetch" or isinstance(error, PipelineError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise PipelineError(f"pipeline rank {self.program.rank}, {self._cursor}: {what}") from error

    def _range(self, now: Instruction, span: Span) -> AbstractContextManager[None]:
        """Return the profiler range of an instruction, and set it in `process_status`."""
        if self._whole and self._calling is None:  # a phase of training, or part of an evaluation
            return phase("forward" if now.op == "forward" else "backward") if self._trains else nullcontext()
        process_status.phase = self._cursor
        return region(f"fastmp.pipeline.{now.op}[microbatch {now.microbatch}, {span.name}]")

    def _deferring(self, now: Instruction) -> AbstractContextManager[None]:
        """Return a context with the queue of deferred weight gradients for spans that have any."""
        if not self._defers:
            return nullcontext()
        return defer_wgrad(self._queue if now.span in self._defers else None)

    def _fetch(self, now: Instruction) -> None:
        assert self._source is not None
        self._batches[now.microbatch] = self._source(now.microbatch)

    def _send(self, now: Instruction) -> None:
        process_status.phase = self._cursor
        self._mail.send(now, self._stages[now.span])

    def _recv(self, now: Instruction) -> None:
        process_status.phase = self._cursor
        self._mail.receive(now, self._stages[now.span] + (-1 if now.kind == FORWARD else 1))

    def _forward(self, now: Instruction) -> None:
        span = self.program.spans[now.span]
        with self._range(now, span), self._deferring(now):
            if span.segments is None:
                self._call(now, span)
                return
            assert self._overlap is not None
            run_part = self._overlap.run_part if self._overlap.runner is None else self._overlap.runner
            run = partial(run_part, span.chunk, now.span - self._first[span.chunk] - 1)
            self._layers[now.microbatch, span.chunk].forward(now.span, span.stream == "exchange", run)

    def _call(self, now: Instruction, span: Span) -> None:
        """Call a chunk or the loss, and keep what its backward needs."""
        microbatch, chunk, number, stage = now.microbatch, span.chunk, now.span, self._stages[now.span]
        last_read = self._cursor.at - 1 in self._last_reads
        batch = self._batches.pop(microbatch) if last_read else self._batches[microbatch]
        final = self._whole or span.name == LOSS
        # 1. Take the inputs. Those of the first stage are no leaves.
        inputs = Tensors()
        if stage:
            inputs = self._mail.take(FORWARD, stage - 1, microbatch)
            if self._trains:
                self._leaves[microbatch, number] = tuple(t for t in inputs if t.requires_grad)
        elif self._inputs is not None:
            inputs = _tuple(self._inputs(batch))
        # 2. Call it. Where its layers are cut, their chain goes on with the list, see `_through`.
        self._calling = None if span.name == LOSS else (microbatch, chunk)
        if final:
            made = self._loss(*inputs, batch)
            output = StageOutput((), *made) if isinstance(made, tuple) else StageOutput((), made)
            if not isinstance(output.loss, Tensor):
                got = type(output.loss).__name__
                raise ValueError(f"a loss function returns a 0-dim tensor, or (loss, stats), got loss {got}")
        else:
            made = self._chunks[chunk](*inputs, **({} if self._shared is None else self._shared(batch)))
            output = made if isinstance(made, StageOutput) else StageOutput(made)
        self._calling = None
        if number == self._first[chunk] != self._last[chunk]:
            if (microbatch, chunk) not in self._layers:
                raise ValueError(
                    f"overlap_experts: chunk {chunk} has not called its layers, or without gradients; the "
                    "step runs them in parts"
                )
            number = self._last[chunk]
        # 3. Note losses and statistics.
        loss, tensors = output.loss, _tuple(output.tensors)
        if loss is not None:
            self._add_loss("final" if final else "stage", loss)
        if output.stats is not None:
            self._stats[microbatch, len(self._chunks) if final else chunk] = output.stats
        if self._trains:
            edges = tuple(get_gradient_edge(t) for t in tensors if t.requires_grad)
            # Torch raises for the loss of a whole model without a graph.
            own = loss if loss is not None and (loss.requires_grad or self._whole) else None
            self._live[microbatch, number] = _Live(edges, own)
        # 4. Hand the outputs on: detached, and as leaves to a stage or the loss on this rank.
        if not final:
            stages = self.program.stages
            here = stage == stages.last or stages.rank(stage + 1) == self.program.rank
            if stage < stages.last:
                self._mail.check(stage, tensors, here)
            outputs = tuple(t.detach().requires_grad_(here and t.requires_grad) for t in tensors)
            self._mail.put(FORWARD, stage, microbatch, outputs)

    def _through(self, chunk: int, chain: LayerChain, tensors: Tensors, shared: Mapping[str, Any]) -> Tensors:
        """Run the list up to the span behind the layers of the chunk that is being called."""
        first, last = self._first[chunk], self._last[chunk]
        key = self._calling
        if key is None or key[1] != chunk or first == last:
            return chain.run(tensors, shared)
        if key in self._layers:
            raise ValueError(
                f"overlap_experts: the layers of chunk {chunk} were called again with microbatch {key[0]} "
                "before its backward was over"
            )
        for name, value in shared.items():
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                raise ValueError(
                    f"overlap_experts: keyword {name!r} of all layers has a graph of its own, through which "
                    "each part of a backward would go again; hand it from layer to layer, or detach it"
                )
        layers = self._layers[key] = CutLayers(first, tensors, shared)
        while self.program.instructions[self._cursor.at][:3] != ("forward", key[0], last):
            self._advance()
        self._cursor.at += 1
        return layers.outputs()

    def _backward(self, now: Instruction) -> None:
        """Run a whole backward, or its dgrad, of a span, and hand on the gradients of its inputs."""
        span = self.program.spans[now.span]
        key, first, last = (now.microbatch, span.chunk), self._first[span.chunk], self._last[span.chunk]
        with self._range(now, span), self._deferring(now), self._without_autocast():
            if span.segments is not None or now.span == first != last:
                self._layers[key].backward(now.span, span.stream == "exchange")
            else:
                self._propagate(now, span)
            leaves = self._leaves.pop((now.microbatch, now.span), None)
            if leaves is not None:
                grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
                self._mail.put(BACKWARD, self._stages[now.span], now.microbatch, grads)
            if now.op == "dgrad":
                self._deferred[now.microbatch, now.span] = self._queue.take()
            elif span.name != LOSS:  # whose weight gradients are run with those of the last stage
                if self._defers:  # of a whole backward in an order with split ones
                    WgradQueue.run(self._queue.take())
                self._end(now, key)

    _dgrad = _backward

    def _propagate(self, now: Instruction, span: Span) -> None:
        """Run the backward of code, from the gradients of its outputs and from its loss."""
        edges, loss = self._live.pop((now.microbatch, now.span))
        roots, grads = list[Any](edges), list[Tensor | None]()
        if span.name != LOSS and not self._whole:
            grads += self._mail.take(BACKWARD, self._stages[now.span] + 1, now.microbatch)
        if loss is not None:
            roots.append(loss)
            grads.append(None if self._loss_grad is None else self._loss_grad.to(loss.dtype))
        if roots:
            torch.autograd.backward(roots, grads)

    def _wgrad(self, now: Instruction) -> None:
        span = self.program.spans[now.span]
        with self._range(now, span), self._without_autocast():
            WgradQueue.run(self._deferred.pop((now.microbatch, now.span)))
        self._end(now, (now.microbatch, span.chunk))

    def _end(self, now: Instruction, key: Key) -> None:
        """Drop cut layers after the last instruction of their backward."""
        if now.span == self._first[key[1]] and key in self._layers:
            self._layers.pop(key).end()

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """Return a context without autocast: a forward may run this backward, whose dtypes are settled."""
        device = self._mail.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return nullcontext()
        return torch.autocast(device, enabled=False)

    def _add_loss(self, name: str, loss: Tensor) -> None:
        before, loss = self._losses.get(name), loss.detach()
        self._losses[name] = loss if before is None else before + loss


def _tuple(tensors: Outputs) -> Tensors:
    if isinstance(tensors, Tensor):
        return (tensors,)
    if not isinstance(tensors, Sequence) or not all(isinstance(t, Tensor) for t in tensors):
        parts = f" of {[type(t).__name__ for t in tensors]}" if isinstance(tensors, Sequence) else ""
        raise ValueError(f"a stage takes and returns tensors, got {type(tensors).__name__}{parts}")
    return tuple(tensors)
