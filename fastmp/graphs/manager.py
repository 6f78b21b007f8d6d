"""Captures the static parts of layers and replays them, in the order of a schedule; the rest runs eagerly.

A chain of layers is cut into pieces: maximal runs of segments that can be captured, across the borders of
layers, and what lies between them. The first steps run eagerly, and show which shapes cross the borders; then
`plan` says which graph reads which buffer when. One step is captured while it trains: each graph where it is
first needed, so that graphs share memory exactly as the step itself would free and take it. After that a run
is a copy into its static inputs and a replay, forward and backward.

Values may be overwritten once the step has gone on: what leaves a chain is the caller's own copy.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fastmp.graphs.errors import CaptureError, GraphError
from fastmp.graphs.plan import GraphPlan, Replay, RunSpec, TensorSpec, plan
from fastmp.nn.segment import LayerChain, Link, Tensors, run_links
from fastmp.ops.put_off import WeightQueue, putting_off, putting_off_to
from fastmp.parallel.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step
from fastmp.profiling import region

__all__ = ["Backend", "Graph", "GraphError", "GraphManager"]

Weak = Callable[[], Tensor]


class Graph(Protocol):
    def capture(self) -> AbstractContextManager[None]: ...
    def replay(self) -> None: ...


class Backend(Protocol):
    """What captures and replays. `runs_at_capture`: the work of a capture is done as well as noted."""

    runs_at_capture: bool

    def watch(self) -> AbstractContextManager[Any]:
        """Around an eager forward whose like will be captured; what it yields goes to `graph`."""

    def graph(self, forward: Graph | None = None, watched: Any = None) -> Graph:
        """A new graph; the backward of `forward` where that is given."""

    def weak(self, tensor: Tensor) -> Weak:
        """Gives the tensor where it lies, without keeping its memory from others."""

    def reset(self) -> None:
        """All graphs are let go."""


class _Run(NamedTuple):
    """A piece of a chain that is captured."""

    name: str
    links: list[Link]
    parameters: list[nn.Parameter]
    modules: list[nn.Module]  # whose hooks before a forward run by hand


class _Shapes(NamedTuple):
    """What an eager step has shown of a run."""

    inputs: list[tuple[TensorSpec, bool]]  # with whether it requires a gradient
    gradients: tuple[TensorSpec, ...]
    watched: Any  # what the backend has seen


@dataclass
class _Captured:
    """The graphs of one forward and of its backward, and where what they make lies."""

    forward: Graph
    outputs: list[Weak | int]  # a number: the input that is handed on
    num_tensors: int  # of the outputs, those for the next segment; the others are what layers return beside
    differentiable: list[bool]  # of the outputs that are made here
    live: list[Tensor]  # outputs with their autograd graph, and inputs, until the backward is captured
    static: list[Tensor]
    queue: WeightQueue | None  # what the backward puts off
    backward: _Gradients | None = None
    weight: _Gradients | None = None


@dataclass
class _Gradients:
    """The graph of a backward, or of its weights."""

    graph: Graph
    inputs: list[Weak | None]
    parameters: list[tuple[nn.Parameter, Weak]]  # without those whose gradient a graph adds to `main_grad`


class GraphManager:
    """Runs the chains of a rank's chunks through graphs, once it has seen them run.

    chains: a `LayerChain` for each chunk; its forward is replaced until `remove`.
    order: the steps of this rank (see `fastmp.parallel.schedule.order`), for the number of microbatches that
        every training step has.
    backend: `RecordingBackend` on a CPU.
    scope: the names of the segments to capture; None: all that can be.
    warmup: training steps that run eagerly first, one or more; the last of them shows shapes.

    `begin_step()` before each training step. Forwards without gradients, in evaluation mode, or of other
    shapes than the ones seen run eagerly.

    Hooks of modules before their forward, and of parameters after their gradient has been accumulated, run by
    hand at every replay; those of a `GradBuffer` are in the graph.

    ValueError for a scope that names no segment. GraphError where forwards and backwards come in another
    order than planned; CaptureError where a segment cannot be captured.
    """

    def __init__(
        self,
        chains: Sequence[LayerChain],
        order: Sequence[Step],
        *,
        backend: Backend,
        scope: Sequence[str] | None = None,
        warmup: int = 2,
    ) -> None:
        self.chains, self.order, self.backend = list(chains), tuple(order), backend
        self.warmup = max(warmup, 1)
        self._pieces = [_pieces(chain, scope) for chain in self.chains]
        self._runs = [[piece for piece in pieces if isinstance(piece, _Run)] for pieces in self._pieces]
        self._shapes: dict[tuple[int, int], _Shapes] = {}
        self.plan: GraphPlan | None = None
        self._buffers: list[Tensor] = []
        self._anchor = torch.zeros((), requires_grad=True)  # gives a run a backward, if no input does
        self._captured: dict[int, _Captured] = {}  # by the number of the graph of the forward
        self._graph_of: dict[tuple[int, int, int], int] = {}  # (microbatch, chunk, run): that number
        self._eagerly: set[tuple[int, int, int]] = set()
        self._step, self._cursor = -1, 0
        for chunk, chain in enumerate(self.chains):
            chain.forward = functools.partial(self._forward, chunk)

    def remove(self) -> None:
        """Let the chains run by themselves again, and the graphs go."""
        for chain in self.chains:
            del chain.forward
        self._captured.clear()
        self._buffers.clear()
        self.backend.reset()

    def begin_step(self) -> None:
        """A training step begins. GraphError where the last one stopped on the way."""
        left = self._next() if self._cursor else None
        self._step, self._cursor = self._step + 1, 0
        self._eagerly.clear()
        self._graph_of.clear()
        if left is not None:
            raise GraphError(f"graphs: the step before ended before the {self._name(left)}")
        if self.plan is None and self._step >= self.warmup and self._shapes:
            self._make_plan()

    def _make_plan(self) -> None:
        chunks = [
            [
                RunSpec(run.name, tuple(spec for spec, _ in shapes.inputs), shapes.gradients)
                for number, run in enumerate(runs)
                if (shapes := self._shapes[chunk, number])
            ]
            for chunk, runs in enumerate(self._runs)
        ]
        self.plan = plan(self.order, chunks)
        device = next(p.device for runs in self._runs for run in runs for p in run.parameters)
        self._buffers = [
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in self.plan.buffers
        ]

    def _forward(self, chunk: int, x: Tensor) -> Tensors:
        chain = self.chains[chunk]
        if not torch.is_grad_enabled() or not chain.training or self._step < self.warmup - 1:
            return type(chain).forward(chain, x)
        tensors, others, own = (x,), (), True
        number = 0
        for piece in self._pieces[chunk]:
            if not isinstance(piece, _Run):
                (tensors, more), own = run_links(piece, tensors), True
            elif self.plan is None:
                (tensors, more), own = self._observe(chunk, number, piece, tensors), True
                number += 1
            else:
                (tensors, more), own = self._through_graph(chunk, number, piece, tensors), False
                more = tuple(each.clone() for each in more)
                number += 1
            others += more
        return tensors[0] if own else tensors[0].clone(), *others

    def _observe(self, chunk: int, number: int, run: _Run, tensors: Tensors) -> tuple[Tensors, Tensors]:
        with self.backend.watch() as watched:
            handed_on, others = run_links(run.links, tensors)
        made = [t for t in (*handed_on, *others) if not any(t is given for given in tensors)]
        gradients = tuple(_spec(t) for t in made if t.requires_grad)
        inputs = [(_spec(t), t.requires_grad) for t in tensors]
        self._shapes[chunk, number] = _Shapes(inputs, gradients, watched)
        return handed_on, others

    def _through_graph(self, chunk: int, number: int, run: _Run, tensors: Tensors) -> tuple[Tensors, Tensors]:
        replay = self._expect(chunk, number, (FORWARD,))
        if [(_spec(t), t.requires_grad) for t in tensors] != self._shapes[chunk, number].inputs:
            self._eagerly.add(_key(replay))
            return run_links(run.links, tensors)
        for module in run.modules:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
        made = iter(_Through.apply(self, replay, self._anchor, *tensors))
        captured = self._captured[replay.graph]
        outputs = [tensors[each] if isinstance(each, int) else next(made) for each in captured.outputs]
        return tuple(outputs[: captured.num_tensors]), tuple(outputs[captured.num_tensors :])

    def forward_graph(self, replay: Replay, inputs: Tensors) -> tuple[Tensors, list[bool]]:
        """What the run of `replay` makes of `inputs`, and which of it has a gradient."""
        static = self._fill(replay, inputs)
        self._graph_of[_key(replay)] = replay.graph
        with region(f"fastmp.graph.{self._name(replay)}"):
            captured = self._captured.get(replay.graph)
            if captured is not None:
                captured.forward.replay()
                made = [each() for each in captured.outputs if not isinstance(each, int)]
                return tuple(made), captured.differentiable
            captured, made = self._capture_forward(replay, static)
        self._captured[replay.graph] = captured
        return made, captured.differentiable

    def _capture_forward(self, replay: Replay, static: list[Tensor]) -> tuple[_Captured, Tensors]:
        chunk, number = replay.step.chunk, replay.run
        run, shapes = self._runs[chunk][number], self._shapes[chunk, number]
        inputs = [buffer.detach().requires_grad_(needs) for buffer, (_, needs) in zip(static, shapes.inputs)]
        queue = None if putting_off_to() is None else WeightQueue()
        graph = self.backend.graph(watched=shapes.watched)
        _renew_accumulators(run.parameters)
        begun: list[Link] = []
        with (
            self._capturing(replay, begun),
            torch.enable_grad(),
            _hooks_by_hand(run),
            putting_off(queue),
            graph.capture(),
        ):
            links = (begun.append(link) or link for link in run.links)
            tensors, others = run_links(links, tuple(inputs))
        if not self.backend.runs_at_capture:
            graph.replay()
        outputs: list[Weak | int] = []
        made: list[Tensor] = []
        for output in (*tensors, *others):
            given = [i for i, each in enumerate(inputs) if each is output]
            outputs.append(given[0] if given else self.backend.weak(output))
            made += [] if given else [output]
        differentiable = [output.requires_grad for output in made]
        live = [output for output in made if output.requires_grad]
        captured = _Captured(graph, outputs, len(tensors), differentiable, live, inputs, queue)
        return captured, tuple(output.detach() for output in made)

    def backward_graph(self, forward: Replay, grads: Tensors) -> list[Tensor | None]:
        """The gradients of the inputs of a forward; those of its parameters are added where they belong."""
        captured = self._captured[self._graph_of.pop(_key(forward))]
        replay = self._expect(
            forward.step.chunk, forward.run, (BACKWARD, BACKWARD_INPUT), forward.step.microbatch
        )
        grads = tuple(grad for grad, needed in zip(grads, captured.differentiable) if needed)
        static = self._fill(replay, grads)
        with region(f"fastmp.graph.{self._name(replay)}"):
            if captured.backward is None:
                own = self._capture_backward(replay, captured, static)
            else:
                captured.backward.graph.replay()
                own = [each and each() for each in captured.backward.inputs]
                self._hand_over(captured.backward)
        if replay.step.kind == BACKWARD_INPUT:
            weight = self._runs[forward.step.chunk][forward.run].parameters[0]
            putting_off_to().put_off(weight, functools.partial(self._weight_graph, replay, captured))
        return own

    def _capture_backward(
        self, replay: Replay, captured: _Captured, static: list[Tensor]
    ) -> list[Tensor | None]:
        def work() -> None:
            torch.autograd.backward(captured.live, static)
            if captured.queue is not None and replay.step.kind == BACKWARD:
                WeightQueue.run(captured.queue.take())

        captured.backward = self._capture_gradients(replay, captured.forward, work)
        own = [each.grad for each in captured.static]
        captured.backward.inputs = [None if grad is None else self.backend.weak(grad) for grad in own]
        captured.live, captured.static = [], []
        return own

    def _weight_graph(self, forward: Replay, captured: _Captured) -> None:
        replay = self._expect(forward.step.chunk, forward.run, (BACKWARD_WEIGHT,), forward.step.microbatch)
        with region(f"fastmp.graph.{self._name(replay)}"):
            if captured.weight is None:
                tasks = captured.queue.take()
                captured.weight = self._capture_gradients(
                    replay, captured.forward, lambda: WeightQueue.run(tasks)
                )
            else:
                captured.weight.graph.replay()
                self._hand_over(captured.weight)

    def _capture_gradients(self, replay: Replay, forward: Graph, work: Callable[[], None]) -> _Gradients:
        """The graph of `work`, which accumulates gradients of parameters."""
        run = self._runs[replay.step.chunk][replay.run]
        before = [(param, param.grad) for param in run.parameters]
        for param in run.parameters:
            param.grad = None
        graph = self.backend.graph(forward)
        with self._capturing(replay), torch.enable_grad(), _hooks_by_hand(run), graph.capture():
            work()
        if not self.backend.runs_at_capture:
            graph.replay()
        made = [(param, param.grad) for param in run.parameters if param.grad is not None]
        for param, grad in before:
            param.grad = grad
        gradients = _Gradients(graph, [], [(param, self.backend.weak(grad)) for param, grad in made])
        self._hand_over(gradients)
        return gradients

    @contextmanager
    def _capturing(self, replay: Replay, begun: Sequence[Link] = ()) -> Iterator[None]:
        """Whatever a capture raises becomes a CaptureError that says where; `begun`: segments until then."""
        try:
            yield
        except Exception as error:
            segment = f", segment {begun[-1].full_name!r}" if begun else ""
            raise CaptureError(
                f"graphs: capture of the {self._name(replay)}{segment}: {error}; "
                "fastmp.graphs.explain(model, *inputs) lists all that cannot be captured"
            ) from error

    @staticmethod
    @torch.no_grad()
    def _hand_over(gradients: _Gradients) -> None:
        """Gradients of parameters become theirs: copies, for the next replay writes where they lie."""
        for param, grad in gradients.parameters:
            if param.grad is None:
                param.grad = grad().clone()
            else:
                param.grad.add_(grad())
            for hook in _by_hand(param).values():
                hook(param)

    @torch.no_grad()
    def _fill(self, replay: Replay, tensors: Tensors) -> list[Tensor]:
        static = [self._buffers[buffer] for buffer in replay.buffers]
        for buffer, tensor in zip(static, tensors, strict=True):
            if buffer.data_ptr() != tensor.data_ptr():
                buffer.copy_(tensor)
        return static

    def _next(self) -> Replay | None:
        """What the plan has next, but for what runs eagerly."""
        replays = () if self.plan is None else self.plan.replays
        while self._cursor < len(replays) and _key(replays[self._cursor]) in self._eagerly:
            self._cursor += 1
        return replays[self._cursor] if self._cursor < len(replays) else None

    def _expect(self, chunk: int, run: int, kinds: tuple[str, ...], microbatch: int | None = None) -> Replay:
        """The next replay of the plan; GraphError if it is not the one that is to run now."""
        replay = self._next()
        if (
            replay is None
            or (replay.step.chunk, replay.run) != (chunk, run)
            or replay.step.kind not in kinds
            or microbatch not in (None, replay.step.microbatch)
        ):
            which = "" if microbatch is None else f" of microbatch {microbatch}"
            planned = "the end of the step" if replay is None else f"the {self._name(replay)}"
            raise GraphError(
                f"graphs: the {kinds[0]}{which} of chunk {chunk}, run {self._runs[chunk][run].name!r}, "
                f"is about to run, but {planned} was planned"
            )
        self._cursor += 1
        return replay

    def _name(self, replay: Replay) -> str:
        return f"{replay.step}, run {self._runs[replay.step.chunk][replay.run].name!r}"


class _Through(Function):
    """A run between the tensors of a step. Parameters are no inputs: they would cost more than the replay."""

    @staticmethod
    def forward(ctx, manager, replay, anchor, *inputs):
        made, differentiable = manager.forward_graph(replay, inputs)
        ctx.manager, ctx.replay = manager, replay
        ctx.leaves = [each.is_leaf for each in inputs]
        ctx.mark_non_differentiable(*(each for each, has in zip(made, differentiable) if not has))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        own = ctx.manager.backward_graph(ctx.replay, grads)
        # A leaf would keep the gradient as its own.
        own = [g.clone() if leaf and g is not None else g for g, leaf in zip(own, ctx.leaves)]
        return None, None, None, *own


def _key(replay: Replay) -> tuple[int, int, int]:
    return replay.step.microbatch, replay.step.chunk, replay.run


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _pieces(chain: LayerChain, scope: Sequence[str] | None) -> list[_Run | list[Link]]:
    """Maximal runs of what can be captured and is in `scope`, and what lies between them."""
    links = chain.links()
    names = {link.segment.name for link in links}
    if scope is not None and links and not names & set(scope):
        raise ValueError(f"graphs: scope {list(scope)} names no segment; there are {sorted(names)}")
    pieces: list[_Run | list[Link]] = []
    for capturable, own in groupby(links, lambda link: _captures(link, scope)):
        piece = list(own)
        pieces.append(_run_of(piece) if capturable else piece)
    return pieces


def _captures(link: Link, scope: Sequence[str] | None) -> bool:
    return link.segment.capturable and (scope is None or link.segment.name in scope)


def _run_of(links: list[Link]) -> _Run:
    first, last = links[0].full_name, links[-1].full_name
    layers = list(dict.fromkeys(link.layer for link in links))
    modules = [module for layer in layers for module in layer.modules()]
    return _Run(
        first if first == last else f"{first} to {last}",
        links,
        list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad)),
        [module for module in modules if next(module.parameters(recurse=False), None) is not None],
    )


def _by_hand(param: nn.Parameter) -> dict[int, Callable[[nn.Parameter], None]]:
    hooks = param._post_accumulate_grad_hooks or {}
    return OrderedDict((key, hook) for key, hook in hooks.items() if not getattr(hook, "in_graph", False))


@torch.no_grad()
def _renew_accumulators(params: Sequence[nn.Parameter]) -> None:
    """Nodes that accumulate run on the stream on which they were made, and last as long as any graph of
    autograd that they are in, say of the loss before: a captured backward needs nodes made in its forward.
    Data of another dtype, for a moment, makes autograd forget the old one.
    """
    for param in params:
        data = param.data
        other = torch.float32 if data.dtype != torch.float32 else torch.float64
        param.data = torch.empty(0, dtype=other, device=data.device)
        param.data = data


@contextmanager
def _hooks_by_hand(run: _Run) -> Iterator[None]:
    """Takes away, while a graph is captured, the hooks that run by hand."""
    modules = [(module, module._forward_pre_hooks) for module in run.modules if module._forward_pre_hooks]
    params = [(p, p._post_accumulate_grad_hooks) for p in run.parameters if _by_hand(p)]
    try:
        for module, _ in modules:
            module._forward_pre_hooks = OrderedDict()
        for param, hooks in params:
            by_hand = _by_hand(param)
            kept = OrderedDict((key, hook) for key, hook in hooks.items() if key not in by_hand)
            param._post_accumulate_grad_hooks = kept
        yield
    finally:
        for module, hooks in modules:
            module._forward_pre_hooks = hooks
        for param, hooks in params:
            param._post_accumulate_grad_hooks = hooks
