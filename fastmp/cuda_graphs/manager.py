"""Captures the static parts of layers as graphs, and replays them in the order of a schedule.

A chain of layers is cut into spans, which are captured, and eager spans between them. The first steps run
eagerly, and show which tensors enter and leave each span; then `plan_buffers` says which graph reads which
buffer when. One step is captured while it trains: each graph where it is first needed, so that graphs share
memory exactly as the step itself would free and take it. After that a span is a copy into its static inputs
and a replay, forward and backward.

Values in graphs may be overwritten once the step has gone on, so what leaves a chain is a copy. Between two
rounds of a step, where nothing is in flight, memory is free: the graphs of a round are captured in one pass,
so that what one of them holds is never taken by another.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.base import Backend, Graph
from fastmp.cuda_graphs.buffer_plan import BufferPlan, TensorSpec, plan_buffers
from fastmp.cuda_graphs.errors import GraphError
from fastmp.cuda_graphs.executor import StepExecutor
from fastmp.cuda_graphs.graph_set import GraphSet, copies_of
from fastmp.cuda_graphs.hooks import call_pre_hooks
from fastmp.cuda_graphs.partition import CapturedSpan, EagerSpan, Shared, Span, partition, spec_of
from fastmp.cuda_graphs.replay import Replay
from fastmp.cuda_graphs.replay_program import ProgramExecutor, program_of
from fastmp.cuda_graphs.snapshot import ModelSnapshot
from fastmp.cuda_graphs.trace import WarmupTrace
from fastmp.cuda_graphs.verify import VerifiedReplay
from fastmp.nn.segment import LayerChain, Tensors
from fastmp.pipeline.schedule import Step

__all__ = ["Backend", "Graph", "GraphError", "GraphManager", "StepRunner"]

_MAX_DROPS = 4  # rounds that could not be captured in one pass, before their steps run eagerly
_MAX_GRAPH_SETS = 4  # signatures that have graphs; each has static buffers of its own

Signature = tuple[Any, ...]  # of the first inputs of a step: autocast, what layers share, and each tensor


class StepRunner(Protocol):
    """Runs the chains of one training step in which spans are graphs; see `GraphManager.begin_replays`.

    Each method is called in the order in which the step runs. `overwritten` gets the addresses of storages
    that later work writes to: the manager copies what leaves a chain from there. `shared` are the keywords
    of all layers.
    """

    def run_captured_span(
        self, chunk: int, number: int, span: CapturedSpan, tensors: Tensors, overwritten: set[int]
    ) -> tuple[Tensors, Tensors]:
        """What span `number` of a chunk hands on, and what its layers return besides.

        Where `span.reads_shared`, the last of `tensors` are those of what layers share.
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
        """The same of the eager span before span `number`."""

    def skip(self, chunk: int) -> None:
        """The next forward of a chunk runs eagerly, without this."""

    def replays(self, chunk: int) -> bool:
        """Whether the next forward of a chunk only replays."""

    def end(self) -> None:
        """The step is over, perhaps before all of it has run."""

    @property
    def failure(self) -> Exception | None:
        """Why the step went on eagerly after a failed capture."""


class GraphManager:
    """Runs the chains of a rank's chunks through graphs, once it has seen them run.

    chains: a `LayerChain` for each chunk. Its forward is replaced until `remove`, or until nobody holds the
        manager. Copies of a chain run by themselves.
    order: the steps of this rank, from `Schedule.order(rank)`, for the number of microbatches of every
        training step.
    backend: `RecordingBackend` on a CPU, `CudaBackend` on a GPU; one for each manager, because graphs share
        memory in the order of a step.
    scope: what to capture (see `fastmp.cuda_graphs.scope.captured_segments`); None: all that can be.
    span_size: parameters after which a span ends, for gradients and parameters that are communicated beside
        replays (see `fastmp.cuda_graphs.scope.layer_groups`); None: a span goes on as long as it can.
    warmup: training steps that run eagerly first, at least one; the last of them is traced.
    verify_every: every so many steps, each span is compared with its segments, run eagerly on the same inputs
        and random numbers, bit for bit; 0: never. All ranks must say the same: collectives run twice.
    group: the ranks that segments have collectives with. In a step that is verified they agree before every
        forward, and verify it if all of them replay it.
    fallback: a failed capture makes the rest of its step, and all later ones, run eagerly; `failure` says
        why. Without it, a failed capture raises CaptureError.

    Call `begin_step()` before each training step. Forwards without gradients or in evaluation mode run
    eagerly. A step whose first inputs have a new signature (shapes, dtypes, autocast) is traced, and has
    graphs of its own from the next time on, up to four signatures. A microbatch with another signature than
    the first one of its step runs eagerly. Where the mode of a module or what is trained has changed at the
    first forward of a step, graphs are captured anew.

    Hooks behind accumulated gradients are called at every replay, except those of a `GradBuffer`, which are
    in the graph: once in a backward, at its end where several spans have the parameter, and once more where
    an eager segment uses it too. Hooks of modules before their forward with the mark `replayed = True`
    are called as hook(module, ()). A layer with any other hook runs eagerly as a whole. Hooks may be added
    and removed between steps.

    What a chain gets as keywords for all layers goes by its tensors, which are inputs of every span in which
    a layer begins; it must be a pytree of tensors. Packed documents have to be made with `max_documents`, so
    that all microbatches have one signature.

    A parameter of two spans, or of one and eager segments, gets two gradients, which eager autograd adds up
    first: the last bits of the sum may differ, under autocast those of the dtype that it casts to.

    ValueError for a scope that names no segment, and for the backend of another manager. GraphError where
    forwards and backwards come in another order than planned, where a parameter has moved, and where a
    verified span differs from its segments. CaptureError where a segment cannot be captured.
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
        self._graph_sets: dict[Signature, GraphSet | None] = {}  # None: these steps run eagerly
        self._snapshot: ModelSnapshot | None = None  # from the first step that is traced
        self._step = -1
        self._begin()
        owner = getattr(backend, "owner", None)
        if owner is not None and owner() is not None:
            raise ValueError(
                "graphs: the backend belongs to another manager, whose graphs it holds; make a backend for "
                "each manager, or call remove() of the other one first"
            )
        backend.owner = weakref.ref(self)
        self._patched = self._patches()
        for owns, name, function in self._patched:
            setattr(owns, name, function)

    def _patches(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """What stands in for which method of an object: for the forward of each chain."""
        return [
            (chain, "forward", functools.partial(_managed, weakref.ref(self), chunk, weakref.ref(chain)))
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
        self._verifier: VerifiedReplay | None = None  # in a step that is verified

    @property
    def plan(self) -> BufferPlan | None:
        """The plan of the first signature that has one."""
        return next((each.plan for each in self._all()), None)

    @property
    def num_graphs(self) -> int:
        """How many graphs are captured."""
        return sum(len(each.done) for each in self._all())

    @property
    def static_bytes(self) -> int:
        """The bytes of all static buffers."""
        return sum(buffer.nbytes for each in self._all() for buffer in each.buffers)

    @property
    def pending(self) -> bool:
        """Whether there are spans, and none of their signatures has all of its graphs yet."""
        complete = any(len(each.done) == each.plan.num_graphs for each in self._all())
        return any(self.captured_spans) and self.failure is None and not complete

    def _all(self) -> list[GraphSet]:
        return [each for each in self._graph_sets.values() if each is not None]

    def describe(self) -> str:
        """A line for a log."""
        if self.failure is not None:
            return f"no graphs, all runs eagerly: {self.failure}"
        return (
            f"{self.num_graphs} graphs of {sum(map(len, self.captured_spans))} spans of segments, "
            f"{self.static_bytes / 1e6:.2f} MB of static buffers, "
            f"{self.backend.nbytes / 1e6:.2f} MB in a pool"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the chains run by themselves inside, between two steps."""
        self.end_step()
        own = [(owns, name, vars(owns).pop(name, None)) for owns, name, _ in self._patched]
        try:
            yield
        finally:
            for owns, name, function in own:
                if function is not None:
                    setattr(owns, name, function)

    def remove(self) -> None:
        """Let the chains run by themselves again, and let go of the graphs.

        Call it before process groups are destroyed, because graphs hold on to communicators. A second call
        does nothing.
        """
        if self._runner is not None:
            self._runner.end()
        for owns, name, function in self._patched:
            if vars(owns).get(name) is function:
                delattr(owns, name)
        self._forget()
        self._begin()
        owner = self.backend.owner
        if owner is not None and owner() is self:
            self.backend.owner = None

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on, because of `reason`. Call it between steps."""
        self.failure = reason
        self.remove()

    def _forget(self) -> None:
        """Let go of all graphs and of what was traced; nothing is in flight."""
        self._graph_set = self._snapshot = self._warmup_trace = None
        if self._graph_sets:
            self._graph_sets.clear()
            self.backend.reset()

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

        GraphError where a parameter, buffer or main gradient is not where graphs would read or write it.
        """
        self.end_step()
        if self.failure is not None:
            return
        if self._snapshot is not None:
            self._check_snapshot(self._snapshot)
        if self._warmup_trace is not None:
            self._make_graph_set(self._warmup_trace)
        self._begin()
        self._step += 1
        if not self._graph_sets:
            self._partition()

    def _check_snapshot(self, snapshot: ModelSnapshot) -> None:
        changed, moved = snapshot.changed()
        if moved and self._graph_sets:
            raise GraphError(
                f"graphs: {moved} or its main gradient has moved since graphs were captured, which go by "
                "address; change its values in place, or make the manager afterwards"
            )
        if changed:
            self._forget()

    def _make_graph_set(self, trace: WarmupTrace) -> None:
        """Plan the graphs of the step that was traced, if it came to its end and was even."""
        chunks = trace.specs(self.order)
        if chunks is None or self._signature is None:
            return
        if not trace.alike:
            self._graph_sets[self._signature] = None
            return
        plan = plan_buffers(self.order, chunks)
        self._graph_sets[self._signature] = GraphSet(plan, trace.spans, self._device, *self._signature[:2])

    def _first_forward(self, tensors: Tensors, shared: TreeSpec) -> Signature:
        """Decide by a step's first inputs whether it runs eagerly, is traced, or goes through graphs."""
        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise GraphError(
                "graphs: DistributedDataParallel reduces gradients by hooks that replays do not run; use "
                "fastmp's GradBuffer, or hooks behind accumulated gradients"
            )
        self._device = tensors[0].device
        signature = (_autocast(self._device.type), shared, *map(_spec_and_grad, tensors))
        self._signature = signature
        if self.verify_every > 0 and self._step % self.verify_every == 0:
            self._verifier = VerifiedReplay(self.captured_spans, shared, self.backend.rng)
        if self._step < self.warmup - 1:
            return signature
        if signature in self._graph_sets:
            graph_set = self._graph_sets[signature]
            # A mode that has changed since `begin_step`: the step runs eagerly, the next one captures anew.
            if graph_set is not None and not self._snapshot_of_chains().modes_changed():
                self._graph_set, self._runner = graph_set, self.begin_replays(graph_set)
        elif len(self._graph_sets) < _MAX_GRAPH_SETS:
            self._warmup_trace = WarmupTrace(self._spans, self.backend)
            self._snapshot_of_chains()
        return signature

    def _snapshot_of_chains(self) -> ModelSnapshot:
        if self._snapshot is None:
            self._snapshot = ModelSnapshot(self.chains)
        return self._snapshot

    def begin_replays(self, graph_set: GraphSet) -> StepRunner:
        """Make what runs one training step through the graphs of `graph_set`.

        Override it, and nothing else, to have spans captured and replayed by another library: see
        `fastmp.cuda_graphs.transformer_engine`.
        """
        if len(graph_set.done) < graph_set.plan.num_graphs:
            self.backend.prepare()
        if self._verifier is None and (program := program_of(graph_set, self._spans)) is not None:
            return ProgramExecutor(program, graph_set, self.captured_spans, self.backend, Replay())
        replay = Replay() if self._verifier is None else self._verifier
        return StepExecutor(graph_set, self.captured_spans, self.backend, replay, fallback=self.fallback)

    def _chain_of(self, chunk: int) -> LayerChain:
        return self.chains[chunk]

    def _forward(
        self, chunk: int, tensors: Tensors, shared: Mapping[str, Any]
    ) -> tuple[Tensors, Tensors] | None:
        """What a chain hands on, and what its layers return besides; None: it runs by itself."""
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
            return self._warmup_trace.run_chain(chunk, tensors, common)
        return None

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
        """Whether all ranks of the group replay the next forward."""
        replay = torch.tensor(own, dtype=torch.int32, device=self._device)
        dist.all_reduce(replay, dist.ReduceOp.MIN, group=self.group)
        return bool(replay)


def _spec_and_grad(tensor: Tensor) -> tuple[TensorSpec, bool]:
    return spec_of(tensor), tensor.requires_grad


def _autocast(device: str) -> torch.dtype | bool:
    """The dtype that autocast casts to on a device; False: it is off."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _managed(
    manager: weakref.ref[GraphManager],
    chunk: int,
    chain: weakref.ref[LayerChain],
    *tensors: Tensor,
    **shared: Any,
) -> Tensors:
    """Stand in for the forward of a chain, without keeping the manager and its graphs."""
    own, layers = manager(), chain()
    assert layers is not None
    made = None if own is None else own._forward(chunk, tensors, shared)
    if made is None:
        return type(layers).forward(layers, *tensors, **shared)
    return *made[0], *made[1]


def _copy_out(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
    return _CopyOut.apply(*tensors)


class _CopyOut(Function):
    """Copies of what graphs have made, in one launch."""

    @staticmethod
    def forward(ctx, *tensors):
        own = copies_of(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[mine for mine, has in zip(own, ctx.needs_input_grad) if not has])
        return tuple(own)

    @staticmethod
    def backward(ctx, *grads):
        return grads
