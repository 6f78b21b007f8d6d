"""Capture and replay the spans of a `GraphManager` with Transformer Engine, if it is installed.

Its `make_graphed_callables` takes modules, sample inputs and the order of a pipeline, captures everything at
once, and returns a differentiable callable for each forward. This module provides its arguments: a module for
each span, steps as chunk numbers, and inputs by chunk, then microbatch, then span.

Gradients of parameters leave a replay as copies; autograd accumulates them and calls all hooks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs import hooks
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.cuda_graphs.graph_set import GraphSet
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.partition import CapturedSpan, EagerSpan
from fastmp.distributed.rng import RngTracker
from fastmp.nn.segment import LayerChain, Tensors, run_segments
from fastmp.schedule.buffer_plan import BufferPlan
from fastmp.schedule.schedule import BACKWARD, FORWARD, Step

__all__ = ["Arguments", "TransformerEngineManager", "arguments"]

_Place: TypeAlias = tuple[int, int, int]  # chunk, microbatch, span
_Callables: TypeAlias = "dict[_Place, tuple[_RunModule, Any]]"


class Arguments(NamedTuple):
    """A plan as arguments of `make_graphed_callables`.

    order: chunk + 1 for a forward of a chunk, the negative of that for a backward.
    layers: the number of spans of each chunk.
    samples: {(chunk, microbatch, span): the static buffers of its sample inputs}.
    """

    order: list[int]
    layers: list[int]
    samples: dict[_Place, tuple[int, ...]]


def arguments(plan: BufferPlan, order: Sequence[Step]) -> Arguments:
    """Translate a plan. ValueError for split backwards, and for microbatches of a chunk out of order."""
    seen: Counter[tuple[str, int]] = Counter()
    codes = []
    for step in order:
        if step.kind not in (FORWARD, BACKWARD):
            raise ValueError(f"graphs: Transformer Engine does not support split backwards, got a {step}")
        if step.microbatch != seen[step.kind, step.chunk]:
            raise ValueError(
                f"graphs: Transformer Engine takes the microbatches of a chunk in turn, and {step} comes "
                f"where microbatch {seen[step.kind, step.chunk]} should"
            )
        seen[step.kind, step.chunk] += 1
        codes.append(step.chunk + 1 if step.kind == FORWARD else -step.chunk - 1)
    places = {
        (replay.step.chunk, replay.step.microbatch, replay.span): replay.buffers
        for replay in plan.replays
        if replay.step.kind == FORWARD
    }
    return Arguments(codes, [len(spans) for spans in plan.chunks], dict(sorted(places.items())))


class TransformerEngineManager(GraphManager):
    """A `GraphManager` whose spans are captured and replayed by Transformer Engine.

    rng: the streams that the layers draw from; the other arguments are those of `GraphManager`.

    Raises:
        ValueError: layers use activation recomputation, the package is not installed, or it does not support
            the order of steps.
    """

    backend: _Backend

    def __init__(
        self,
        chains: Sequence[LayerChain],
        order: Sequence[Step],
        *,
        rng: RngTracker | None = None,
        scope: Sequence[str] | None = None,
        span_size: int | None = None,
        warmup: int = 2,
    ) -> None:
        if any(chain.call is not None for chain in chains):
            raise ValueError(
                "graphs: Transformer Engine does not support recomputed layers; use recompute=False, or "
                "impl 'fastmp'"
            )
        self._make = _make_graphed_callables()
        backend = _Backend(rng)
        super().__init__(chains, order, backend=backend, scope=scope, span_size=span_size, warmup=warmup)

    def begin_replays(self, graph_set: GraphSet) -> _Replays:
        """Begin a step of `graph_set`; the first one captures all its spans, or runs eagerly."""
        made = self.backend.made
        if graph_set not in made:
            self.backend.prepare()
            try:
                made[graph_set] = self._callables(graph_set)
            except Exception as error:
                reason = f"graphs: Transformer Engine could not capture: {type(error).__name__}: {error}"
                return _Replays(graph_set, {}, CaptureError(reason))
        return _Replays(graph_set, made[graph_set])

    def _callables(self, graph_set: GraphSet) -> _Callables:
        wanted = arguments(graph_set.plan, self.order)
        modules = {
            (chunk, number): _RunModule(span, graph_set.shared)
            for chunk, spans in enumerate(self.captured_spans)
            for number, span in enumerate(spans)
        }
        samples = tuple(
            tuple(
                graph_set.buffers[buffer].detach().requires_grad_(needs)
                for buffer, (_, needs) in zip(buffers, graph_set.traces[chunk, number].inputs)
            )
            for (chunk, _, number), buffers in wanted.samples.items()
        )
        dtype = graph_set.autocast if isinstance(graph_set.autocast, torch.dtype) else None
        cast = torch.autocast(graph_set.device.type, dtype, enabled=dtype is not None, cache_enabled=False)
        every = [span for spans in self.captured_spans for span in spans]
        with torch.enable_grad(), _without_side_effects(every), self.backend.streams(), cast:
            made = self._make(
                tuple(modules.values()),
                samples,
                num_warmup_iters=1,  # steps have run eagerly
                allow_unused_input=True,
                pool=self.backend.pool,
                _order=wanted.order,
                _num_layers_per_chunk=wanted.layers,
                _reuse_graph_input_output_buffers=True,
            )
        return {
            place: (modules[place[0], place[2]], each)
            for place, each in zip(wanted.samples, made, strict=True)
        }


class _Replays:
    """One training step through callables of Transformer Engine: a
    `fastmp.cuda_graphs.manager.StepRunner`.
    """

    def __init__(
        self, graph_set: GraphSet, callables: _Callables, failure: CaptureError | None = None
    ) -> None:
        self._graph_set, self._callables, self.failure = graph_set, callables, failure
        self._forwards: Counter[tuple[int, int]] = Counter()  # {(chunk, span): how many have begun}

    def run_captured_span(
        self, chunk: int, number: int, span: CapturedSpan, tensors: Tensors, overwritten: set[int]
    ) -> tuple[Tensors, Tensors]:
        microbatch = self._forwards[chunk, number]
        self._forwards[chunk, number] += 1
        trace = self._graph_set.traces[chunk, number]
        if self.failure is not None or not self._graph_set.matches(chunk, number, tensors):
            hooks.call_pre_hooks(span.begins)
            return span.through(tensors, self._graph_set.shared)
        hooks.call_pre_hooks(trace.calls)
        inputs = [
            _CopiedGradient.apply(t) if t.requires_grad and (trace.may_alias_grads or t.is_leaf) else t
            for t in tensors
        ]
        module, call = self._callables[chunk, microbatch, number]
        made = call(*inputs)
        overwritten |= {each.untyped_storage().data_ptr() for each in made}
        new = iter(made)
        outputs = [next(new) if source is None else tensors[source] for source in module.sources]
        return tuple(outputs[: module.num_tensors]), tuple(outputs[module.num_tensors :])

    def run_eager_span(
        self,
        chunk: int,
        number: int,
        span: EagerSpan,
        tensors: Tensors,
        shared: Mapping[str, Any],
        overwritten: set[int],
    ) -> tuple[Tensors, Tensors]:
        return run_segments(span.links, tensors, span.call, shared=shared)

    def skip(self, chunk: int) -> None:
        self._forwards.update((chunk, span) for span in range(len(self._graph_set.plan.chunks[chunk])))

    def replays(self, chunk: int) -> bool:
        return False

    def end(self) -> None:
        """Do nothing: a step leaves no state."""


class _Backend:
    """The state that callables share, in place of a `fastmp.cuda_graphs.backends.interface.Backend`."""

    runs_at_capture = False
    owner: Any = None

    def __init__(self, rng: RngTracker | None) -> None:
        self.rng = rng
        self.made: dict[GraphSet, _Callables] = {}
        self.pool = torch.cuda.graph_pool_handle()

    @property
    def nbytes(self) -> int:
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self.pool))

    def trace_draws(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self) -> None:
        """Empty the allocator's cache, which a capture cannot do."""
        torch.cuda.empty_cache()

    def graph(self, forward: Any = None, draws: Any = None, has_backward: bool = False, pool: int = 0) -> Any:
        raise NotImplementedError("graphs: Transformer Engine makes its graphs itself")

    def weak(self, tensor: Tensor) -> Any:
        raise NotImplementedError("graphs: Transformer Engine makes its graphs itself")

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Register the random streams with Transformer Engine inside, and restore its own at exit."""
        from transformer_engine.pytorch import distributed

        before = distributed.get_all_rng_states()
        if self.rng is not None and distributed.graph_safe_rng_available():
            distributed.set_all_rng_states(self.rng.generators())
        try:
            yield
        finally:
            distributed.set_all_rng_states(before)

    def reset(self) -> None:
        for own in self.made.values():
            for _, call in own.values():
                call.reset()
        self.made.clear()
        self.pool = torch.cuda.graph_pool_handle()


class _RunModule(nn.Module):
    """A span as a module: tensors in, a tuple of new tensors out, and its trained parameters."""

    def __init__(self, span: CapturedSpan, shared: TreeSpec) -> None:
        super().__init__()
        self.span, self.shared = span, shared
        self.sources: list[int | None] = []  # for each output, the number of the input passed on, or None
        self.num_tensors = 0
        for i, param in enumerate(span.parameters):
            self.register_parameter(str(i), param)

    def forward(self, *inputs: Tensor) -> Tensors:
        tensors, others = self.span.through(inputs, self.shared)
        outputs, self.num_tensors = (*tensors, *others), len(tensors)
        self.sources = [next((i for i, own in enumerate(inputs) if own is o), None) for o in outputs]
        return tuple(output for output, source in zip(outputs, self.sources) if source is None)


class _CopiedGradient(Function):
    """Returns its input; the gradient is a copy, which code before it may keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


@contextmanager
def _without_side_effects(spans: Iterable[CapturedSpan]) -> Iterator[None]:
    """Suspend hooks and `main_grad`: Transformer Engine's trial runs compute on any numbers."""
    with ExitStack() as stack:
        params = dict.fromkeys(param for span in spans for param in span.parameters)
        for span in spans:
            stack.enter_context(hooks.suspended_hooks(span))
        mains = {param: param.__dict__.pop("main_grad") for param in params if hasattr(param, "main_grad")}
        for param in params:
            param._post_accumulate_grad_hooks = OrderedDict()
        try:
            yield
        finally:
            for param, main in mains.items():
                param.main_grad = main


def _make_graphed_callables() -> Callable[..., tuple[Callable[..., Tensors], ...]]:
    try:
        from transformer_engine.pytorch.graph import make_graphed_callables
    except ImportError as error:
        raise ValueError(
            "graphs: impl 'transformer_engine' needs that package, "
            f'pip install "transformer-engine[pytorch]" ({error})'
        ) from None
    return make_graphed_callables
