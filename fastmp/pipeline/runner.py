"""Pipeline runner: a loop over the steps of one rank that posts sends and receives between them.

For each step of the rank:

1. Post the messages that the program lists before it (see `messages`): `isend` of outputs to the rank of the
   next stage over `group`, of gradients to that of the previous stage over `backward_group`, and the matching
   `irecv`s. NCCL runs them on the streams of these groups.
2. Wait for the message that the step depends on. A stage of this rank left its output in the outbox.
3. Run the forward or backward; its outputs go to the outbox until they are posted.

A message is addressed by its stage and microbatch, carries a tag, and is posted in the same order on both
sides. Activations and gradients that cross between two ranks are therefore never confused, whether the
backend matches tags (gloo) or order (NCCL). NCCL serialises all messages between two ranks of a group, in
both directions: gradients have a group of their own, so that a late gradient delays no activation that is
ready. Specs (shapes and dtypes) are sent once, ahead of the first activations.

Outputs of a stage are kept only until they have been sent: backward needs their autograd edge, not their
values. The loss has an autograd graph of its own after the last stage.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastmp.distributed.collectives import all_reduce_, group_rank, group_size
from fastmp.nn.segment import StageOutput
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.pipeline.stage_specs import HEADER, Spec, decode, encode, in_words
from fastmp.pipeline.transfers import Transfer, same_ranks
from fastmp.profiling import phase, region
from fastmp.schedule.messages import Message, RankProgram, forward_orders, rank_programs
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step, together
from fastmp.schedule.stage_map import StageMap
from fastmp.status import process_status

__all__ = ["Pipeline", "PipelineError", "PipelineResult"]

Tensors = tuple[Tensor, ...]
Outputs = Tensor | Sequence[Tensor]

_MAX_SENDING = 2  # pending sends; with more this rank waits for the oldest


class PipelineError(RuntimeError):
    """Failure of a step on this rank, both named in the message; the cause is the exception of the step."""


class Overlap(Protocol):
    """Runner of layers in ops that overlap two microbatches, see `fastmp.nn.overlap.OverlappedLayers`."""

    def begin_step(self) -> None: ...
    def forward(
        self, key: tuple[int, int], overlapped: tuple[int, int] | None = None
    ) -> AbstractContextManager[None]: ...
    def backward(self, key: tuple[int, int], *, split: bool = False) -> None: ...


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
    """A forward kept for its backward: received tensors, autograd edges of its outputs, losses."""

    inputs: Tensors
    edges: tuple[GradientEdge, ...]
    loss: Tensor | None  # of the stage itself
    final: tuple[Tensor, Tensors] | None  # of the loss function, with its inputs


class Pipeline:
    """Pipeline-parallel runner of this rank's chunks, placed by `StageMap`.

    A chunk is any `nn.Module`. Stage 0 is called as chunk(*inputs(batch)), every other one as chunk(*tensors
    of the previous stage), and loss(*tensors of the last stage, batch) returns a 0-dim loss, or (loss,
    stats). Every chunk gets the keywords shared(batch), for tensors that all layers use and no stage outputs.
    A chunk returns a tensor, a sequence of tensors or a `StageOutput`.

    All ranks create their `Pipeline` together.

    Args:
        chunks: this rank's modules, the same number on every rank.
        orders: the steps of every rank, as from `Schedule.orders()`. With split backwards, the weights of
            fastmp's linear layers and experts get their gradients in "backward_weight"; everything else,
            including modules of other kinds, in "backward_input".
        group: the pipeline's ranks; None for this rank alone.
        backward_group: the same ranks in another group, for gradients. None: `group`.
        inputs, loss: called on the ranks of the first and the last stage only. With inputs None and one stage
            in all, loss(batch) calls the chunk itself, and what it raises is no `PipelineError`.
        shared: called on all ranks. None: there are no keywords.
        pairs: for each rank, the positions of forwards that overlap with the next backward, as from
            `Schedule.all_pairs`; they need `overlap`.
        overlap: runner of layers in ops (`fastmp.nn.overlap.OverlappedLayers`). None: no overlap.
        placement: of the stages on the ranks, as `Schedule.placement`; see `StageMap`.
        device: of received tensors. None: that of the first parameter, or the CPU.

    Raises:
        ValueError: the same on all ranks, if they differ in orders, placement or number of chunks, if the
            orders deadlock or are incomplete, or if the two groups differ in their ranks.

    Example:
        >>> from fastmp.schedule import Schedule
        >>> pipeline = Pipeline(
        ...     [nn.Linear(4, 4)], Schedule(pp=1, num_microbatches=2).orders(), group=None,
        ...     inputs=lambda batch: batch, loss=lambda y, batch: y.square().mean(),
        ... )
        >>> pipeline.train([torch.ones(2, 4)] * 2).loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        orders: Sequence[Sequence[Step]],
        *,
        group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None = None,
        inputs: Callable[[Any], Outputs] | None,
        loss: Callable[..., Tensor | tuple[Tensor, Any]],
        shared: Callable[[Any], dict[str, Any]] | None = None,
        pairs: Sequence[Sequence[int]] = (),
        overlap: Overlap | None = None,
        placement: str = "looped",
        device: torch.device | str | None = None,
    ) -> None:
        self.chunks, self.group = list(chunks), group
        self.backward_group = same_ranks(group, backward_group)
        self.inputs: Any = inputs
        self.loss, self.shared = loss, shared
        self.rank, self.size = group_rank(group), group_size(group)
        self.stages = StageMap(self.size, len(self.chunks), placement)
        self._own_stages = self.stages.stages(self.rank)
        self.loss_runs_chunk = inputs is None and len(self.stages) == 1
        self.orders = tuple(tuple(Step(*step) for step in order) for order in orders)
        if any(len(own) for own in pairs) and overlap is None:
            raise ValueError("Pipeline: pairs of overlapped steps need overlap=, got None")
        self.pairs, self.overlap = pairs, overlap
        self._agree()
        self._program = rank_programs(self.orders, pairs=pairs, placement=placement)[self.rank]
        vpp = 1 + max(step.chunk for step in self.orders[0])
        if vpp != len(self.chunks):
            raise ValueError(f"Pipeline: {len(self.chunks)} chunks for orders of {vpp} chunks a rank")
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        self.device = torch.device(device or (parameters[0].device if parameters else "cpu"))
        self._evaluations: dict[int, RankProgram] = {}
        # {training: {stage: specs of its outputs}}
        self._specs: dict[bool, dict[int, tuple[Spec, ...]]] = {True: {}, False: {}}
        # The first NCCL operation of a group needs all of its ranks, which a message does not have.
        for each in dict.fromkeys((self.group, self.backward_group)):
            if each is not None:
                all_reduce_(torch.zeros(1, device=self.device), each)

    def _agree(self) -> None:
        """Raise ValueError on all ranks if they were given different orders, or the first stage no inputs."""
        without_inputs: Sequence[bool] = [self.inputs is None] * self.size
        if self.group is not None:
            own = self.orders, [list(pairs) for pairs in self.pairs], self.stages.placement
            digest = hashlib.sha256(repr(own).encode()).digest()  # the orders may be megabytes
            everyones: list[Any] = [None] * self.size
            dist.all_gather_object(everyones, (len(self.chunks), digest, without_inputs[0]), group=self.group)
            *agreed, without_inputs = zip(*everyones, strict=True)
            for name, values in zip(("numbers of chunks", "orders"), agreed, strict=True):
                different = [rank for rank, value in enumerate(values) if value != values[0]]
                if different:
                    shown = f": {list(values)}" if name != "orders" else ""
                    raise ValueError(f"Pipeline: ranks 0 and {different[0]} have different {name}{shown}")
        if len(self.orders) != self.size:
            raise ValueError(f"Pipeline: {len(self.orders)} orders for a group of {self.size} ranks")
        if without_inputs[self.stages.rank(0)] and not self.loss_runs_chunk:
            raise ValueError(f"Pipeline: inputs=None is for one stage, got {len(self.stages)}; pass inputs=")

    def train(
        self, batches: Sequence[Any] | Callable[[int], Any], loss_grad: Tensor | None = None
    ) -> PipelineResult:
        """Run the forwards and backwards of one training step; gradients accumulate in the parameters.

        Every rank of the group calls it.

        Args:
            batches: one per microbatch of the orders; without `shared` only the ranks of the first and the
                last stage read them. A function is called before each forward of a chunk, on every rank, and
                returns its batch.
            loss_grad: 0-dim upstream gradient of every loss, equal on all ranks; returned losses are not
                scaled. None: 1.

        Raises:
            PipelineError: naming the step that failed.
            ValueError: another number of batches.
        """
        self._loss_grad = loss_grad
        if callable(batches):
            return self._execute(self._program, batches, training=True)
        expected = 1 + max((step.microbatch for step in self.orders[0]), default=-1)
        if len(batches) != expected:
            raise ValueError(f"Pipeline.train: {len(batches)} batches for orders of {expected} microbatches")
        return self._execute(self._program, batches.__getitem__, training=True)

    def evaluate(self, batches: Sequence[Any]) -> PipelineResult:
        """Run forwards only, without gradients, for one batch or more; otherwise as `train`.

        Modules are called in the mode that they are in: put them in evaluation mode first.
        """
        number = len(batches)
        if number not in self._evaluations:
            orders = forward_orders(self.stages, number)
            programs = rank_programs(orders, forward_only=True, placement=self.stages.placement)
            self._evaluations[number] = programs[self.rank]
        with torch.no_grad():
            return self._execute(self._evaluations[number], batches.__getitem__, training=False)

    def forget_shapes(self) -> None:
        """Allow batches of another size from the next step or evaluation on. Every rank calls it."""
        for specs in self._specs.values():
            specs.clear()

    def _reset(self, training: bool, tags: dict[Message, int]) -> None:
        self._training, self._tags = training, tags
        self._known = self._specs[training]
        self._live: dict[tuple[int, int], _Live] = {}
        self._queue = WgradQueue()
        self._outbox: dict[tuple[str, int, int], Tensors] = {}
        self._arriving: dict[tuple[str, int, int], Transfer] = {}
        self._sending: deque[Transfer] = deque()
        self._deferred: dict[tuple[int, int], list[Any]] = {}  # weight gradients
        self._new_specs: dict[int, tuple[Spec, ...]] = {}  # not sent to the next stage yet
        self._losses: dict[str, Tensor] = {}
        self._stats: dict[tuple[int, int], Any] = {}

    def _execute(self, given: RankProgram, fetch: Callable[[int], Any], training: bool) -> PipelineResult:
        self._reset(training, given.tags)
        splits = any(step.kind == BACKWARD_INPUT for step in given.steps)
        pairs = self.pairs[self.rank] if training and self.pairs else ()
        overlap = self.overlap if training else None
        if overlap is not None:
            overlap.begin_step()
        trace: list[Step] = []
        peak = 0
        for steps in together(given.steps, pairs):
            step, *overlapped = steps
            batch = fetch(step.microbatch) if step.kind == FORWARD else None
            shown = self._range(step)
            try:
                self._post(given.posts[len(trace)])
                with shown, defer_wgrad(self._queue) if splits else nullcontext():
                    if step.kind == FORWARD:
                        with nullcontext() if overlap is None else self._overlapping(step, *overlapped):
                            self._forward(step, batch)
                            peak = max(peak, len(self._live))
                    else:
                        self._end_backward(step, *self._begin_backward(step))
            except Exception as error:
                if self.loss_runs_chunk:
                    raise
                what, names = f"{type(error).__name__}: {error}", " and ".join(map(str, steps))
                raise PipelineError(f"pipeline rank {self.rank}, {names}: {what}") from error
            trace += steps
        try:
            self._post(given.posts[-1])
            self._finish_sending(0)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise PipelineError(f"pipeline rank {self.rank}, after its last step: {what}") from error
        assert not self._live and not self._outbox and not self._arriving, (
            "a message or a backward is left over"
        )
        return PipelineResult(
            self._losses.get("final"), self._losses.get("stage"), self._stats, tuple(trace), peak
        )

    def _range(self, step: Step) -> AbstractContextManager[None]:
        """Return the profiler range of a step, and set the step in `process_status`."""
        if self.loss_runs_chunk:  # it is the only one: a phase of training, or part of an evaluation
            return phase(step.kind) if self._training else nullcontext()
        process_status.phase = step
        return region(f"fastmp.pipeline.{step.kind}[microbatch {step.microbatch}, chunk {step.chunk}]")

    def _forward(self, step: Step, batch: Any) -> None:
        stage, key = self._stage(step), (step.microbatch, step.chunk)
        if self.loss_runs_chunk:
            whole = _Live((), (), None, self._final_loss((), step, batch))
            if self._training:
                self._live[key] = whole
            return
        inputs = self._take(FORWARD, stage - 1, step.microbatch) if stage else _tuple(self.inputs(batch))
        output = self.chunks[step.chunk](*inputs, **({} if self.shared is None else self.shared(batch)))
        if not isinstance(output, StageOutput):
            output = StageOutput(output)
        tensors, final = _tuple(output.tensors), None
        if output.loss is not None:
            self._add_loss("stage", output.loss)
        if output.stats is not None:
            self._stats[key] = output.stats
        if stage == self.stages.last:
            final = self._final_loss(tensors, step, batch)
        else:
            self._outbox[FORWARD, stage, step.microbatch] = self._checked(stage, tensors)
        if self._training:
            edges = tuple(get_gradient_edge(t) for t in tensors if t.requires_grad)
            own = output.loss if output.loss is not None and output.loss.requires_grad else None
            received = tuple(t for t in inputs if t.requires_grad) if stage else ()
            self._live[key] = _Live(received, edges, own, final)

    def _final_loss(self, tensors: Tensors, step: Step, batch: Any) -> tuple[Tensor, Tensors]:
        cut = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)
        loss = self.loss(*cut, batch)
        if isinstance(loss, tuple):
            loss, self._stats[step.microbatch, len(self.chunks)] = loss
        self._add_loss("final", loss)
        return loss, tuple(t for t in cut if t.requires_grad)

    def _add_loss(self, name: str, loss: Tensor) -> None:
        before, loss = self._losses.get(name), loss.detach()
        self._losses[name] = loss if before is None else before + loss

    @contextmanager
    def _overlapping(self, step: Step, backward: Step | None = None) -> Iterator[None]:
        """Run a forward in the context of `overlap`, with the backward that it overlaps."""
        assert self.overlap is not None
        if backward is None:
            with self.overlap.forward((step.microbatch, step.chunk)):
                yield
        else:
            inputs = self._begin_backward(backward)
            with self.overlap.forward((step.microbatch, step.chunk), (backward.microbatch, backward.chunk)):
                yield
            self._end_backward(backward, *inputs)

    def _begin_backward(self, step: Step) -> Tensors:
        """Run a backward down to the input of the chunk, or with `overlap` down to its last layer.

        Returns:
            the inputs, which get their gradients.
        """
        key = (step.microbatch, step.chunk)
        if step.kind not in (BACKWARD, BACKWARD_INPUT):
            WgradQueue.run(self._deferred.pop(key))
            return ()
        stage, live = self._stage(step), self._live[key]
        if live.final is not None:
            grads = self._final_backward(*live.final)
            live = live._replace(final=None)  # frees the outputs of the last stage before its backward
        else:
            grads = [*self._take(BACKWARD, stage + 1, step.microbatch)]
        roots: list[Any] = list(live.edges)
        if live.loss is not None:
            roots.append(live.loss)
            grads.append(self._grad_of(live.loss))
        self._live[key] = _Live((), (), None, None)
        if roots:
            torch.autograd.backward(roots, grads)
        deferred = self._queue.take()
        if step.kind == BACKWARD_INPUT:
            self._deferred[key] = deferred
        elif deferred:  # an unsplit backward in an order with split ones
            WgradQueue.run(deferred)
        return live.inputs

    def _end_backward(self, step: Step, *inputs: Tensor) -> None:
        key, stage = (step.microbatch, step.chunk), self._stage(step)
        if self.overlap is not None:
            self.overlap.backward(key, split=step.kind == BACKWARD_INPUT)
        if step.kind != BACKWARD_INPUT:
            del self._live[key]
        if stage and step.kind != BACKWARD_WEIGHT:
            self._outbox[BACKWARD, stage, step.microbatch] = tuple(
                torch.zeros_like(x) if x.grad is None else x.grad for x in inputs
            )

    def _final_backward(self, loss: Tensor, inputs: Tensors) -> list[Tensor | None]:
        if loss.requires_grad or self.loss_runs_chunk:  # torch raises for a loss without a graph
            loss.backward(self._grad_of(loss))
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]

    def _grad_of(self, loss: Tensor) -> Tensor | None:
        """Return the upstream gradient of a loss; None for 1."""
        return None if self._loss_grad is None else self._loss_grad.to(loss.dtype)

    def _stage(self, step: Step) -> int:
        return self._own_stages[step.chunk]

    def _checked(self, stage: int, tensors: Tensors) -> Tensors:
        """Return the outputs of a stage, detached. Raises ValueError if their specs have changed."""
        specs = tuple(Spec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        known = self._known.get(stage, self._new_specs.get(stage))
        if known is not None and known != specs:
            raise ValueError(
                f"stage {stage} outputs {in_words(specs)}, but {in_words(known)} before; "
                "forget_shapes() on all ranks lets shapes change between steps"
            )
        if known is None:
            here = self.stages.rank(stage + 1) == self.rank
            (self._known if here else self._new_specs).setdefault(stage, specs)
        return tuple(t.detach() for t in tensors)

    def _take(self, kind: str, stage: int, microbatch: int) -> Tensors:
        """Return the output of a stage, or its gradient: of this rank, or of another one in a message."""
        if self.stages.rank(stage) == self.rank:
            tensors = self._outbox.pop((kind, stage, microbatch))
        else:
            tensors = self._arriving.pop((kind, stage, microbatch)).wait()
        if kind == FORWARD:
            for tensor, spec in zip(tensors, self._known[stage], strict=True):
                tensor.requires_grad_(spec.requires_grad)
        return tensors

    def _post(self, messages: Sequence[Message]) -> None:
        """Start sends and receives, in order."""
        for message in messages:
            key, mine = message[3:], message.source == self.rank
            if message.kind == FORWARD and message.stage not in self._known:
                self._exchange_specs(message)
            specs = self._known[message.stage - (message.kind == BACKWARD)]
            if message.kind == BACKWARD:
                specs = tuple(spec for spec in specs if spec.requires_grad)
            if mine:  # to the next stage's rank, or a gradient to the previous stage's
                tensors = tuple(t.contiguous() for t in self._outbox.pop(key))
            else:
                tensors = tuple(torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in specs)
            peer = message.target if mine else message.source
            self._start(key, mine, peer, 2 * self._tags[message], tensors)
        self._finish_sending(_MAX_SENDING)

    def _start(self, key: tuple[str, int, int], sends: bool, peer: int, tag: int, tensors: Tensors) -> None:
        works: list[Any] = []  # never None: this rank is in the group
        # NCCL runs a message between two ranks on the stream of their group, after this stream's work so far.
        group = self.backward_group if key[0] == BACKWARD else self.group
        if sends:
            works += [dist.isend(x, group=group, tag=tag, group_dst=peer) for x in tensors]
            self._sending.append(Transfer("send", group, peer, works, tensors))
        else:
            works += [dist.irecv(x, group=group, tag=tag, group_src=peer) for x in tensors]
            self._arriving[key] = Transfer("recv", group, peer, works, tensors)

    def _finish_sending(self, most: int) -> None:
        """Free sent tensors; wait for the oldest sends until at most `most` are pending."""
        queue = self._sending
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        while queue and (len(queue) > most or (not captured and queue[0].is_complete)):
            queue.popleft().wait()

    def _exchange_specs(self, message: Message) -> None:
        """Send or receive the specs of a stage, ahead of its first activations."""
        key, tag = ("specs", *message[4:]), 2 * self._tags[message] + 1
        if message.source == self.rank:
            specs = self._new_specs.pop(message.stage)
            header = torch.tensor(encode(specs), dtype=torch.int64, device=self.device)
            self._start(key, True, message.target, tag, (header,))
        else:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            self._start(key, False, message.source, tag, (header,))
            self._arriving.pop(key).wait()
            specs = decode(header.tolist())
        self._known[message.stage] = specs


def _tuple(tensors: Outputs) -> Tensors:
    if isinstance(tensors, Tensor):
        return (tensors,)
    if not isinstance(tensors, Sequence) or not all(isinstance(t, Tensor) for t in tensors):
        parts = f" of {[type(t).__name__ for t in tensors]}" if isinstance(tensors, Sequence) else ""
        raise ValueError(f"a stage takes and returns tensors, got {type(tensors).__name__}{parts}")
    return tuple(tensors)
