"""Captures the static parts of layers and replays them, in the order of a schedule; the rest runs eagerly.

A chain of layers is cut into pieces: maximal runs of segments that can be captured, across the borders of
layers, and what lies between them. The first steps run eagerly, and show which shapes cross the borders; then
`plan` says which graph reads which buffer when. One step is captured while it trains: each graph where it is
first needed, so that graphs share memory exactly as the step itself would free and take it. After that a run
is a copy into its static inputs and a replay, forward and backward.

Values may be overwritten once the step has gone on: what leaves a chain is the caller's own copy. Between two
rounds of a step, where nothing is in flight, memory is free: the graphs of a round are captured all in one
pass, so that what one of them holds is never taken by another.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from fastmp.graphs import pieces
from fastmp.graphs.errors import GraphError
from fastmp.graphs.pieces import Piece, Shapes, cut, spec_of
from fastmp.graphs.plan import GraphPlan, RunSpec, TensorSpec, plan
from fastmp.graphs.standing import Standing
from fastmp.graphs.step import GraphedStep
from fastmp.graphs.variant import Backend, Graph, Variant, copies_of
from fastmp.graphs.verify import Verifier
from fastmp.nn.segment import LayerChain, Tensors, run_links
from fastmp.parallel.schedule import Step

__all__ = ["Backend", "Graph", "GraphError", "GraphManager"]

_MOST_DROPS = 4  # rounds that could not be captured in one pass, before their steps run eagerly
_MOST_VARIANTS = 4  # shapes of a step that have graphs; each has static buffers of its own


class GraphManager:
    """Runs the chains of a rank's chunks through graphs, once it has seen them run.

    chains: a `LayerChain` for each chunk; its forward is replaced until `remove`, or until nobody holds the
        manager. Copies of a chain run by themselves.
    order: the steps of this rank, from `Schedule.order(rank)`, for the number of microbatches that every
        training step has.
    backend: `RecordingBackend` on a CPU; one of its own, for graphs share memory in the order of a step.
    scope: what to capture, see `fastmp.graphs.plan.captured_segments`; None: all that can be.
    warmup: training steps that run eagerly first, one or more; the last of them shows shapes.
    verify_every: every so many steps each run is held against its segments, run eagerly on the same inputs
        and random numbers, bit for bit; 0: never. All ranks alike, for collectives run twice.
    group: the ranks that segments have collectives with. In a step that is verified they agree before every
        forward, and run it twice if all of them replay it: one may have other shapes than others.

    `begin_step()` before each training step. Forwards without gradients or in evaluation mode run eagerly. A
    step whose first shapes, or autocast, are new shows them, and has graphs of its own from the next time on
    (at most four kinds do); a microbatch of other shapes or autocast than those of its step runs eagerly.
    Where the mode of a module or what is trained has changed, graphs are captured anew.

    Hooks of parameters behind their gradient run by hand at every replay, but those of a `GradBuffer`, which
    are in the graph: once in a backward, at its end where layers of several runs have the parameter, and once
    more where an eager segment uses it too. So do hooks of modules before their forward that have an
    attribute `by_hand = True`, as hook(module, ()). A layer with any other hook, of its own or of a module in
    it, runs eagerly as a whole. Hooks may come and go between steps.

    A parameter of two runs, or of one and eager segments, gets two gradients, where eager autograd adds them
    up first: the last bits of the sum may differ, under autocast those of the dtype that it casts to.

    ValueError for a scope that names no segment, and for the backend of another manager. GraphError where
    forwards and backwards come in another order than planned, where a parameter has moved, and where a run is
    not what its segments are; CaptureError where a segment cannot be captured.
    """

    def __init__(
        self,
        chains: Sequence[LayerChain],
        order: Sequence[Step],
        *,
        backend: Backend,
        scope: Sequence[str] | None = None,
        warmup: int = 2,
        verify_every: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.chains, self.order, self.backend, self.group = list(chains), tuple(order), backend, group
        self.warmup, self.verify_every = max(warmup, 1), verify_every
        self.scope = scope
        self._cut()
        self._variants: dict[tuple, Variant | None] = {}  # by the first inputs of a step; None: runs eagerly
        self._standing: Standing | None = None  # since a step has shown shapes
        self._step = -1
        self._verifier: Verifier | None = None
        self._begin()
        owner = getattr(backend, "owner", None)
        if owner is not None and owner() is not None:
            raise ValueError(
                "graphs: the backend is that of another manager, whose graphs it holds; make a backend for "
                "each manager, or call remove() of the other one first"
            )
        backend.owner = weakref.ref(self)
        self._forwards = [
            functools.partial(_managed, weakref.ref(self), chunk, weakref.ref(chain))
            for chunk, chain in enumerate(self.chains)
        ]
        for chain, forward in zip(self.chains, self._forwards):
            chain.forward = forward

    def _cut(self) -> None:
        self._pieces = [cut(chain, self.scope) for chain in self.chains]
        self._runs = [[piece for piece in chain if piece.captured] for chain in self._pieces]

    def _begin(self) -> None:
        self._kind: tuple | None = None  # what the first inputs of the step are; None: not yet seen
        self._seen: dict[tuple[int, int], Shapes] | None = None  # of a step that shows shapes
        self._arrived: dict[tuple[int, int], list[TensorSpec]] = {}  # gradients as they came
        self._reached: set[tuple[int, int]] = set()  # the runs to which any came
        self._even = True
        self._variant: Variant | None = None
        self._graphed: GraphedStep | None = None

    @property
    def plan(self) -> GraphPlan | None:
        """Of the first shapes that have one."""
        return next((variant.plan for variant in self._variants.values() if variant is not None), None)

    @property
    def num_graphs(self) -> int:
        """How many are captured."""
        return sum(len(variant.done) for variant in self._variants.values() if variant is not None)

    @property
    def static_bytes(self) -> int:
        """Of all static buffers there are."""
        buffers = [b for variant in self._variants.values() if variant is not None for b in variant.buffers]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def describe(self) -> str:
        """For a log."""
        return (
            f"{self.num_graphs} graphs of {sum(map(len, self._runs))} runs of segments, "
            f"{self.static_bytes / 1e6:.2f} MB of static buffers, "
            f"{self.backend.nbytes / 1e6:.2f} MB in a pool"
        )

    def remove(self) -> None:
        """Let the chains run by themselves again, and the graphs go: before process groups are destroyed, for
        graphs hold on to communicators. Calling it twice is harmless."""
        if self._graphed is not None:
            self._graphed.end()
        for chain, forward in zip(self.chains, self._forwards):
            if vars(chain).get("forward") is forward:
                del chain.forward
        self._forget()
        self._begin()
        owner = self.backend.owner
        if owner is not None and owner() is self:
            self.backend.owner = None

    def _forget(self) -> None:
        """All graphs, and shapes that were shown; nothing is in flight."""
        self._variant = self._standing = self._seen = None
        if self._variants:
            self._variants.clear()
            self.backend.reset()

    def begin_step(self) -> None:
        """A training step begins, also where the last one stopped on the way.

        GraphError where a parameter, buffer or main gradient is not where graphs would read or write it.
        """
        if self._graphed is not None:
            self._graphed.end()
            if self._variant.drops > _MOST_DROPS:
                self._variants[self._kind] = None
        if self._standing is not None:
            self._check_standing()
        if self._seen is not None:
            self._make_variant()
        self._begin()
        self._step += 1
        if not self._variants:
            self._cut()
        due = self.verify_every > 0 and self._step % self.verify_every == 0
        self._verifier = Verifier(self.backend.rng) if due else None

    def _check_standing(self) -> None:
        moved = self._standing.moved()
        if moved and self._variants:
            raise GraphError(
                f"graphs: {moved} or its main gradient has moved since graphs were captured, which go by "
                "address; change its values in place, or make the manager afterwards"
            )
        if moved or self._standing.other_modes() or self._standing.hooks.changed():
            self._forget()

    def _make_variant(self) -> None:
        """Of the step that has shown its shapes, if it came to its end and was even."""
        seen = self._seen
        if not seen or len(seen) < sum(map(len, self._runs)):
            return
        if not self._even:
            self._variants[self._kind] = None
            return
        chunks = [[self._spec(c, i, run) for i, run in enumerate(runs)] for c, runs in enumerate(self._runs)]
        self._variants[self._kind] = Variant(plan(self.order, chunks), seen, self._device)

    def _spec(self, chunk: int, number: int, run: Piece) -> RunSpec:
        place = chunk, number
        gradients = tuple(self._arrived[place]) if place in self._reached else None
        return RunSpec(run.name, tuple(spec for spec, _ in self._seen[place].inputs), gradients)

    def _first_seen(self, tensors: Tensors) -> None:
        """The first forward of the step says which kind of step it is."""
        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise GraphError(
                "graphs: DistributedDataParallel reduces gradients by hooks that replays do not run; use "
                "fastmp's GradBuffer, or hooks behind accumulated gradients"
            )
        self._kind, self._device = (_autocast(tensors), *map(_given, tensors)), tensors[0].device
        if self._step < self.warmup - 1:
            return
        if self._kind in self._variants:
            self._variant = self._variants[self._kind]
            if self._variant is not None:
                self._graphed = GraphedStep(self._variant, self._runs, self.backend, self._verifier)
        elif len(self._variants) < _MOST_VARIANTS:
            self._seen = {}
            if self._standing is None:
                self._standing = Standing(self.chains)

    def _forward(self, chunk: int, *tensors: Tensor) -> Tensors:
        chain = self.chains[chunk]
        if self._step < 0 or not torch.is_grad_enabled() or not chain.training:
            return type(chain).forward(chain, *tensors)
        if self._kind is None:
            self._first_seen(tensors)
        graphed = self._graphed is not None and not (
            self._standing.switched()
            or _autocast(tensors) != self._kind[0]
            or torch._C._are_functorch_transforms_active()
        )
        if self._verifier is not None and self.group is not None:
            self._verifier.wanted = self._all_replay(graphed and self._replays(chunk, tensors))
        if self._variant is None and self._seen is None:
            return type(chain).forward(chain, *tensors)
        if self._graphed is not None and not graphed:
            self._graphed.skip(chunk)
            return type(chain).forward(chain, *tensors)
        others: Tensors = ()
        shared: set[int] = set()  # where graphs have left what they made
        number, keeps = 0, False
        for piece in self._pieces[chunk]:
            if not piece.captured:
                given = tensors
                tensors, more = self._between(chunk, number, piece, tensors, shared)
                if self._variant is None:
                    keeps |= pieces.keeps_gradients(piece, given, tensors)
            else:
                if self._variant is None:
                    given = tensors
                    # What comes before a chain is not known.
                    tensors, more = self._observe(chunk, number, piece, tensors, keeps or number == 0)
                    keeps |= any(t is each for t in (*tensors, *more) for each in given)
                else:
                    tensors, more = self._through_graph(chunk, number, piece, tensors, shared)
                number += 1
            others += more
        made = (*tensors, *others)
        theirs = [tensor.untyped_storage().data_ptr() in shared for tensor in made]
        late = [tensor for tensor, is_theirs in zip(made, theirs) if is_theirs]
        own = iter(_own(late))
        return tuple([next(own) if is_theirs else tensor for tensor, is_theirs in zip(made, theirs)])

    def _replays(self, chunk: int, tensors: Tensors) -> bool:
        begins = self._pieces[chunk][0].captured
        return self._graphed.replays(chunk) and (not begins or self._variant.takes(chunk, 0, tensors))

    def _all_replay(self, own: bool) -> bool:
        """Whether all ranks of the group do as this one."""
        replay = torch.tensor(own, dtype=torch.int32, device=self._device)
        dist.all_reduce(replay, dist.ReduceOp.MIN, group=self.group)
        return bool(replay)

    def _observe(
        self, chunk: int, number: int, run: Piece, tensors: Tensors, keeps: bool
    ) -> tuple[Tensors, Tensors]:
        pieces.call_pre_hooks(run.begins)
        with pieces.calls() as called, self.backend.watch() as watched:
            handed_on, others = run_links(run.links, tensors, run.call)
        made = [t for t in (*handed_on, *others) if not any(t is given for given in tensors)]
        made = [t for t in made if t.requires_grad]
        outputs = [spec_of(t) for t in made]
        inputs = [(spec_of(t), t.requires_grad) for t in tensors]
        shapes = Shapes(inputs, outputs, [*run.begins, *called], watched, keeps)
        place = chunk, number
        before = self._seen.get(place, shapes)
        self._even &= before[:3] == shapes[:3]
        self._seen[place] = before._replace(keeps=before.keeps or keeps)
        self._arrived.setdefault(place, list(outputs))
        for i, output in enumerate(made):
            output.register_hook(functools.partial(self._note_gradient, place, i))
        return handed_on, others

    def _note_gradient(self, place: tuple[int, int], i: int, grad: Tensor | None) -> None:
        if grad is not None:
            self._reached.add(place)
            self._arrived[place][i] = spec_of(grad)

    def _between(
        self, chunk: int, number: int, piece: Piece, tensors: Tensors, shared: set[int]
    ) -> tuple[Tensors, Tensors]:
        """What runs eagerly before run `number`."""
        pieces.call_pre_hooks(piece.begins)
        if self._graphed is None:
            return run_links(piece.links, tensors, piece.call)
        return self._graphed.between(chunk, number, piece, tensors, shared)

    def _through_graph(
        self, chunk: int, number: int, run: Piece, tensors: Tensors, shared: set[int]
    ) -> tuple[Tensors, Tensors]:
        return self._graphed.run(chunk, number, run, tensors, shared)


def _given(tensor: Tensor) -> tuple[TensorSpec, bool]:
    return spec_of(tensor), tensor.requires_grad


def _autocast(tensors: Tensors) -> torch.dtype | bool:
    """What it casts to now, where these are; False: it does not."""
    device = tensors[0].device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _managed(
    manager: weakref.ref[GraphManager], chunk: int, chain: weakref.ref[LayerChain], *tensors: Tensor
) -> Tensors:
    """In place of the forward of a chain, which is not to keep the manager and its graphs."""
    own = manager()
    return type(chain()).forward(chain(), *tensors) if own is None else own._forward(chunk, *tensors)


def _own(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
    return _Own.apply(*tensors)


class _Own(Function):
    """Copies of what graphs have made, in one go."""

    @staticmethod
    def forward(ctx, *tensors):
        own = copies_of(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[mine for mine, has in zip(own, ctx.needs_input_grad) if not has])
        return tuple(own)

    @staticmethod
    def backward(ctx, *grads):
        return grads
