"""Capture the static spans of layer chains as CUDA graphs, and replay them in the order of a schedule.

1. Partition: a layer chain is partitioned into captured spans and the eager spans between them.
2. Warm up and trace: the first steps run eagerly; the last of them records the tensors that enter and leave
   each span, and `plan_buffers` assigns lanes to microbatches and static buffers to graphs.
3. Capture: one step is captured while it trains, each graph where it is first needed, so that the graphs of a
   lane share pool memory exactly as the microbatch itself would allocate and free it.
4. Replay: a captured span is one copy into its static inputs and one graph launch, forward and backward.

Static buffers are reused within a step, so a chain returns copies. Between two microbatches of a lane all of
its pool memory is free: its graphs are captured with one microbatch, so that memory held by one of them is
never taken by another.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.interface import Backend, Graph
from fastmp.cuda_graphs.cache import GraphCache
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.executor import StepExecutor
from fastmp.cuda_graphs.graph_set import GraphSet, copies_of
from fastmp.cuda_graphs.hooks import call_pre_hooks
from fastmp.cuda_graphs.partition import CapturedSpan, EagerSpan, Shared, Span, partition, spec_of
from fastmp.cuda_graphs.replay_program import ProgramExecutor, program_of
from fastmp.cuda_graphs.replay_verifier import Verifier
from fastmp.cuda_graphs.warmup_trace import WarmupTrace
from fastmp.nn.segment import LayerChain, Tensors
from fastmp.schedule.buffer_plan import BufferPlan, TensorSpec, plan_buffers, plan_errors
from fastmp.schedule.schedule import Step

__all__ = ["Backend", "Graph", "GraphError", "GraphManager", "StepRunner"]

_MAX_DROPS = 4  # captures that were given up, before their steps run eagerly

# Of the first inputs of a step: autocast dtype, structure of the shared keywords, and the spec of each
# tensor.
Signature = tuple[Any, ...]


class StepRunner(Protocol):
    """Interface of an object that runs one training step with graphs; see `GraphManager.begin_replays`.

    Methods are called in the order of the step, on the stream of compute. An implementation adds to
    `overwritten` the addresses of storages that later work overwrites: the manager copies outputs that leave
    a chain from there. `shared`: the keywords that all layers share.
    """

    def run_captured_span(
        self, chunk: int, number: int, span: CapturedSpan, tensors: Tensors, overwritten: set[int]
    ) -> tuple[Tensors, Tensors]:
        """Run captured span `number` of a chunk; return (hidden tensors, auxiliary outputs).

        If `span.reads_shared`, `tensors` end with the tensors of the shared keywords.
        """

    def run_eager_span(
        self,
        chunk: int,
        number: int,
        span: EagerSpan,
        tensors: Tensors,
        shared: Mapping[str, Any],
        overwritten: set[int],
    ) -> tuple[Tensors, Tensors]:
        """Run the eager span before captured span `number`; return (hidden tensors, auxiliary outputs)."""

    def skip(self, chunk: int) -> None:
        """Leave out the next forward of a chunk, and its backward: the manager runs them eagerly."""

    def replays(self, chunk: int) -> bool:
        """Return True if the next forward of `chunk` is a pure replay."""

    def end(self) -> None:
        """End the step, which may be incomplete."""

    @property
    def failure(self) -> Exception | None:
        """The error of a failed capture, after which the step continued eagerly; None: there was none."""


class GraphManager:
    """Runs the layer chains of a rank through CUDA graphs, after some eager warm-up steps.

    Call `begin_step()` before each training step. These run eagerly:

    - forwards without gradients or in evaluation mode;
    - a step whose first inputs have a new signature (shapes, dtypes, autocast): it is traced, and has graphs
      of its own from the next time on, for up to four signatures;
    - a microbatch whose signature differs from the first one of its step.

    Where a training mode, `requires_grad` or a number of a module (an attribute such as `dropout.p`) has
    changed at the first forward of a step, that step runs eagerly and graphs are captured again.

    Hooks after accumulated gradients are called at every replay, except those of a `GradBuffer`, which are
    in the graph: once in a backward, at its end where several spans have the parameter, and once more where
    an eager segment uses it too. Forward pre-hooks with the mark `replayed = True` are called as
    hook(module, ()). A layer with any other hook runs eagerly as a whole. Hooks may be added and removed
    between steps.

    Keywords that a chain passes to all layers must be a pytree of tensors; they are inputs of every span in
    which a layer begins. Packed documents need `max_documents`, so that all microbatches have one signature.

    A parameter of two spans, or of a span and eager segments, gets two gradients, which eager autograd adds
    first: the last bits of the sum may differ, under autocast those of the dtype that it casts to.

    Args:
        chains: a `LayerChain` for each chunk. Its forward is replaced until `remove`, or until the manager is
            garbage-collected. Copies of a chain run eagerly.
        order: the steps of this rank, from `Schedule.order(rank)`, for the number of microbatches of every
            training step.
        backend: `RecordingBackend` on a CPU, `CudaBackend` on a GPU; one for each manager, because graphs
            share memory in the order of a step.
        scope: the segments to capture (see `scope.captured_segments`); None: all that can be.
        span_size: parameters after which a span ends, so that gradients and parameters are communicated
            during other replays (see `scope.layer_groups`); None: no limit.
        warmup: training steps that run eagerly first, at least one; the last of them is traced.
        verify_every: in every so many steps, compare each replay bit by bit with its segments, run eagerly on
            the same inputs and random numbers; 0: never. Must be equal on all ranks: collectives run twice.
        group: the ranks that segments have collectives with. In a verified step they agree before every
            forward, and verify it if all of them replay it.
        fallback: after a failed capture, run the rest of the step and all later ones eagerly; `failure` holds
            the reason. Without it, a failed capture raises CaptureError.

    Raises:
        ValueError: the scope names no segment, or the backend belongs to another manager.
        GraphError: forwards and backwards come in another order than planned, a parameter has moved, or a
            verified span differs from its segments.
        CaptureError: a segment cannot be captured.

    Example:
        >>> from torch import nn
        >>> from fastmp.cuda_graphs import RecordingBackend
        >>> from fastmp.schedule import Schedule
        >>> chain = LayerChain([nn.Linear(8, 8), nn.ReLU()])
        >>> manager = GraphManager([chain], Schedule(1, 2).order(0), backend=RecordingBackend())
        >>> for _ in range(4):  # two eager steps, one that is captured, one that is replayed
        ...     manager.begin_step()
        ...     for _ in range(2):  # microbatches
        ...         chain(torch.randn(4, 8))[0].sum().backward()
        >>> manager.num_graphs
        2
    """

    def __init__(
        self,
        chains: Sequence[LayerChain],
        order: Sequence[Step],
        *,
        backend: Backend,
        scope: Sequence[str] | None = None,
        span_size: int | None = None,
        warmup: int = 2,
        verify_every: int = 0,
        group: dist.ProcessGroup | None = None,
        fallback: bool = False,
    ) -> None:
        self.chains, self.order, self.backend, self.group = list(chains), tuple(order), backend, group
        self.warmup, self.verify_every, self.fallback = max(warmup, 1), verify_every, fallback
        self.scope, self.span_size = scope, span_size
        self.failure: str | None = None
        self._partition()
        # None: steps of this signature run eagerly. The snapshot is of the first step that is traced.
        self._graph_sets = GraphCache[GraphSet | None](self.chains, backend)
        self._step = -1
        self._begin()
        owner = backend.owner
        if owner is not None and owner() is not None:
            raise ValueError(
                "graphs: the backend belongs to another manager, whose graphs it holds; make a backend for "
                "each manager, or call remove() of the other one first"
            )
        backend.owner = weakref.ref(self)
        self._routed = self._routes()
        for owner, runner in self._routed:
            owner.runner = runner

    def _routes(self) -> list[tuple[Any, Callable[..., Any]]]:
        """Return (object, its `runner`): what runs through the graphs."""
        return [
            (chain, functools.partial(_run_chain, weakref.ref(self), chunk))
            for chunk, chain in enumerate(self.chains)
        ]

    def _partition(self) -> None:
        self._set_spans([partition(chain, self.scope, self.span_size) for chain in self.chains])

    def _set_spans(self, spans: list[list[Span]]) -> None:
        self._spans = spans  # of each chunk, captured and eager
        self.captured_spans = [[span for span in own if isinstance(span, CapturedSpan)] for own in spans]

    def _begin(self) -> None:
        self._signature: Signature | None = None  # of the step's first inputs, once they are seen
        self._warmup_trace: WarmupTrace | None = None  # in a step that is traced
        self._graph_set: GraphSet | None = None
        self._runner: StepRunner | None = None
        self._verifier: Verifier | None = None  # in a step that is verified

    @property
    def plan(self) -> BufferPlan | None:
        """The plan of the first signature that has one."""
        return next((each.plan for each in self._all()), None)

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return sum(len(each.done) for each in self._all())

    @property
    def static_bytes(self) -> int:
        """The bytes of all static buffers."""
        return sum(buffer.nbytes for each in self._all() for buffer in each.buffers)

    @property
    def pending(self) -> bool:
        """True while there are captured spans, and no signature has all of its graphs yet."""
        complete = any(len(each.done) == each.plan.num_graphs for each in self._all())
        return any(self.captured_spans) and self.failure is None and not complete

    def _all(self) -> list[GraphSet]:
        return [each for each in self._graph_sets.values() if each is not None]

    def describe(self) -> str:
        """Return a line for the log."""
        if self.failure is not None:
            return f"no graphs, all runs eagerly: {self.failure}"
        return (
            f"{self.num_graphs} graphs of {sum(map(len, self.captured_spans))} spans of segments, "
            f"{self.static_bytes / 1e6:.2f} MB of static buffers, "
            f"{self.backend.nbytes / 1e6:.2f} MB in a pool"
        )

    def raise_difference(self) -> None:
        """Raise the GraphError of a verified step that is not void; call it after such a step."""
        if self._verifier is not None and self._verifier.difference is not None:
            raise self._verifier.difference

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the chains eagerly inside; use it between two steps."""
        self.end_step()
        before = [owner.runner for owner, _ in self._routed]
        for owner, _ in self._routed:
            owner.runner = None
        try:
            yield
        finally:
            for (owner, _), runner in zip(self._routed, before, strict=True):
                owner.runner = runner

    def recapture(self) -> None:
        """Release all graphs between two steps; the next steps trace and capture them again.

        Call it on all ranks after tensors that graphs read or write, and the model does not hold, have moved.
        """
        self.end_step()
        self._graph_sets.drop()
        self._begin()

    def remove(self) -> None:
        """Let the chains run by themselves and release all graphs. A second call does nothing.

        Call it before process groups are destroyed: graphs hold references to communicators.
        """
        if self._runner is not None:
            self._runner.end()
        for owner, runner in self._routed:
            if owner.runner is runner:
                owner.runner = None
        self._graph_sets.drop()
        self._begin()
        owner = self.backend.owner
        if owner is not None and owner() is self:
            self.backend.owner = None

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on, because of `reason`. Call it between steps."""
        self.failure = reason
        self.remove()

    def end_step(self) -> None:
        """End a training step, perhaps before all of it has run; `begin_step` does it too."""
        if self._runner is None or self._signature is None:
            return
        self._runner.end()
        failure = self._runner.failure
        if self._graph_set is not None and self._graph_set.drops > _MAX_DROPS:
            self._graph_sets[self._signature] = None
        self._runner = None
        if failure is not None:
            self.give_up(str(failure))

    def begin_step(self) -> None:
        """Begin a training step.

        Raises:
            GraphError: a parameter, buffer or main gradient is not where the graphs read or write it.
        """
        self.end_step()
        if self.failure is not None:
            return
        unchanged = self._graph_sets.check()
        if self._warmup_trace is not None and unchanged:
            self._make_graph_set(self._warmup_trace)
        self._begin()
        self._step += 1
        if not self._graph_sets:
            self._partition()

    def _make_graph_set(self, trace: WarmupTrace) -> None:
        """Plan the graphs of the traced step, if it is complete and its microbatches have one signature."""
        chunks = trace.specs(self.order)
        if chunks is None or self._signature is None:
            return
        if not trace.same_signatures:
            self._graph_sets[self._signature] = None
            return
        plan = plan_buffers(self.order, chunks)
        check_plan(plan)
        self._graph_sets[self._signature] = GraphSet(plan, trace.spans, self._device, *self._signature[:2])

    def _first_forward(self, tensors: Tensors, shared: TreeSpec) -> Signature:
        """Choose by the first inputs of a step if it runs eagerly, is traced, or goes through graphs."""
        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise GraphError(
                "graphs: DistributedDataParallel reduces gradients by hooks that replays do not run; use "
                "fastmp's GradBuffer, or hooks after accumulated gradients"
            )
        self._device = tensors[0].device
        signature = (_autocast(self._device.type), shared, *map(_spec_and_grad, tensors))
        self._signature = signature
        if self.verify_every > 0 and self._step % self.verify_every == 0:
            self._verifier = Verifier(self.captured_spans, shared, self.backend.rng)
        if self._step < self.warmup - 1:
            return signature
        if signature in self._graph_sets:
            graph_set = self._graph_sets[signature]
            # If a mode has changed since `begin_step`, run this step eagerly, and capture the next one again.
            if graph_set is not None and not self._graph_sets.snapshot().modes_changed():
                self._graph_set, self._runner = graph_set, self.begin_replays(graph_set)
        elif not self._graph_sets.full:
            self._warmup_trace = WarmupTrace(self._spans, self.backend)
            self._graph_sets.snapshot(
                layer for own in self.captured_spans for span in own for layer in span.layers
            )
        return signature

    def begin_replays(self, graph_set: GraphSet) -> StepRunner:
        """Return the object that runs one training step through the graphs of `graph_set`.

        Override this method alone to have another library capture and replay the spans, as
        `fastmp.cuda_graphs.transformer_engine` does.
        """
        if len(graph_set.done) < graph_set.plan.num_graphs:
            self.backend.prepare()
        if self._verifier is None and (program := program_of(graph_set, self._spans)) is not None:
            return ProgramExecutor(program, graph_set, self.captured_spans, self.backend)
        arguments = graph_set, self.captured_spans, self.backend
        return StepExecutor(*arguments, verifier=self._verifier, fallback=self.fallback)

    def _chain_of(self, chunk: int) -> LayerChain:
        return self.chains[chunk]

    def _forward(
        self, chunk: int, tensors: Tensors, shared: Mapping[str, Any]
    ) -> tuple[Tensors, Tensors] | None:
        """Run a chain; return (hidden tensors, auxiliary outputs), or None to run it eagerly."""
        if self._step < 0 or not torch.is_grad_enabled() or not self._chain_of(chunk).training:
            return None
        common = Shared.of(shared)
        signature = self._signature or self._first_forward((*tensors, *common.tensors), common.form)
        runner = self._runner
        graphed = runner is not None and not (
            _autocast(self._device.type) != signature[0]
            or (common.form is not signature[1] and common.form != signature[1])
            or torch._C._are_functorch_transforms_active()
        )
        if self._verifier is not None and self.group is not None:
            self._verifier.wanted = self._all_replay(graphed and self._replays(chunk, tensors, common))
        if runner is not None and graphed:
            return self._through_graphs(runner, chunk, tensors, common)
        if runner is not None:
            runner.skip(chunk)
        elif self._warmup_trace is not None:
            with self.running():
                return self._warmup_trace.run_chain(chunk, tensors, common)
        return None

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which layers run eagerly, see `ModelSnapshot.running`."""
        return self._graph_sets.running()

    def _through_graphs(
        self, runner: StepRunner, chunk: int, tensors: Tensors, shared: Shared
    ) -> tuple[Tensors, Tensors]:
        others: Tensors = ()
        overwritten: set[int] = set()
        number = 0
        for span in self._spans[chunk]:
            if isinstance(span, CapturedSpan):
                inputs = shared.append_to(tensors, span)
                tensors, more = runner.run_captured_span(chunk, number, span, inputs, overwritten)
                number += 1
            elif isinstance(span, EagerSpan):
                call_pre_hooks(span.begins)
                keywords = shared.keywords
                tensors, more = runner.run_eager_span(chunk, number, span, tensors, keywords, overwritten)
            others += more
        if not overwritten:
            return tensors, others
        assert self._graph_set is not None
        made, copies_out = (*tensors, *others), self._graph_set.copies_out
        in_graphs = [
            tensor.untyped_storage().data_ptr() in overwritten and copies_out(tensor) for tensor in made
        ]
        copies = iter(_copy_out([tensor for tensor, inside in zip(made, in_graphs) if inside]))
        own = tuple([next(copies) if inside else tensor for tensor, inside in zip(made, in_graphs)])
        return own[: len(tensors)], own[len(tensors) :]

    def _replays(self, chunk: int, tensors: Tensors, shared: Shared) -> bool:
        assert self._runner is not None and self._graph_set is not None
        first = self._spans[chunk][0]
        inputs = shared.append_to(tensors, first)
        return self._runner.replays(chunk) and (
            not isinstance(first, CapturedSpan) or self._graph_set.matches(chunk, 0, inputs)
        )

    def _all_replay(self, own: bool) -> bool:
        """Return True if all ranks of `group` replay the next forward (an all-reduce, and a host sync)."""
        replay = torch.tensor(own, dtype=torch.int32, device=self._device)
        dist.all_reduce(replay, dist.ReduceOp.MIN, group=self.group)
        return bool(replay)


def check_plan(plan: BufferPlan) -> None:
    """Check that no graph of `plan` overwrites inputs of a later one. GraphError names both."""
    for error in plan_errors(plan):
        raise GraphError(f"graphs: the buffer plan is wrong: {error}")


def _spec_and_grad(tensor: Tensor) -> tuple[TensorSpec, bool]:
    return spec_of(tensor), tensor.requires_grad


def _autocast(device: str) -> torch.dtype | bool:
    """Return the dtype that autocast casts to on `device`, or False if it is off."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _run_chain(
    manager: weakref.ref[GraphManager],
    chunk: int,
    chain: LayerChain,
    tensors: Tensors,
    shared: Mapping[str, Any],
) -> Tensors:
    """Run a chain, without keeping the manager and its graphs alive."""
    own = manager()
    if own is None:
        return chain.run(tensors, shared)
    made = own._forward(chunk, tensors, shared)
    if made is not None:
        return *made[0], *made[1]
    with own.running():
        return chain.run(tensors, shared)


def _copy_out(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
    return _CopyOut.apply(*tensors)


class _CopyOut(Function):
    """Copies tensors out of graph memory in one launch, with autograd."""

    @staticmethod
    def forward(ctx, *tensors):
        own = copies_of(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[mine for mine, has in zip(own, ctx.needs_input_grad) if not has])
        return tuple(own)

    @staticmethod
    def backward(ctx, *grads):
        return grads
