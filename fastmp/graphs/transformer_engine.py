"""Graphs made and replayed by Transformer Engine, where it is installed, from the plan of a manager.

Its `make_graphed_callables` takes modules, samples of their inputs and the order of a pipeline, captures all
of it at once and gives a callable for each forward, whose backward autograd finds. What it asks for is made
here: a module for each run, steps as numbers of chunks, and inputs by chunk, then microbatch, then run.

Gradients of parameters leave a replay as copies and are accumulated by autograd, hooks and all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastmp.graphs import pieces
from fastmp.graphs.manager import GraphManager
from fastmp.graphs.pieces import Piece
from fastmp.graphs.plan import GraphPlan
from fastmp.graphs.recording import RandomStreams
from fastmp.graphs.variant import Variant
from fastmp.nn.segment import LayerChain, Tensors, run_links
from fastmp.parallel.schedule import BACKWARD, FORWARD, Step

__all__ = ["Arguments", "TransformerEngineManager", "arguments"]

_Place = tuple[int, int, int]  # chunk, microbatch, run


class Arguments(NamedTuple):
    """How Transformer Engine is told of a plan.

    order: chunk + 1 for a forward of a chunk, the negative of that for a backward.
    layers: how many runs each chunk has.
    samples: the (chunk, microbatch, run) that each sample is for, and the static buffers of its inputs.
    """

    order: list[int]
    layers: list[int]
    samples: dict[_Place, tuple[int, ...]]


def arguments(plan: GraphPlan, order: Sequence[Step]) -> Arguments:
    """ValueError for what it does not take: split backwards, and microbatches of a chunk out of order."""
    seen: Counter[tuple[str, int]] = Counter()
    codes = []
    for step in order:
        if step.kind not in (FORWARD, BACKWARD):
            raise ValueError(f"graphs: Transformer Engine takes whole backwards, and there is a {step}")
        if step.microbatch != seen[step.kind, step.chunk]:
            raise ValueError(
                f"graphs: Transformer Engine takes the microbatches of a chunk in turn, and {step} comes "
                f"where microbatch {seen[step.kind, step.chunk]} should"
            )
        seen[step.kind, step.chunk] += 1
        codes.append(step.chunk + 1 if step.kind == FORWARD else -step.chunk - 1)
    places = {
        (replay.step.chunk, replay.step.microbatch, replay.run): replay.buffers
        for replay in plan.replays
        if replay.step.kind == FORWARD
    }
    return Arguments(codes, [len(runs) for runs in plan.chunks], dict(sorted(places.items())))


class TransformerEngineManager(GraphManager):
    """A `GraphManager` whose runs are captured and replayed by Transformer Engine; arguments as there.

    rng: the streams that the layers draw from.

    ValueError for layers that are recomputed, where the package is not installed, and for an order that it
    does not take.
    """

    def __init__(
        self,
        chains: Sequence[LayerChain],
        order: Sequence[Step],
        *,
        rng: RandomStreams | None = None,
        scope: Sequence[str] | None = None,
        warmup: int = 2,
    ) -> None:
        if any(chain.call is not None for chain in chains):
            raise ValueError(
                "graphs: Transformer Engine captures nothing that is recomputed; use recompute=False, or "
                "impl 'fastmp'"
            )
        self._make = _make_graphed_callables()
        super().__init__(chains, order, backend=_Theirs(rng), scope=scope, warmup=warmup)

    def _begin(self) -> None:
        super()._begin()
        self._forwards: Counter[tuple[int, int]] = Counter()  # of (chunk, run), in this step

    def _make_variant(self) -> None:
        before = set(self._variants)
        super()._make_variant()
        for kind in set(self._variants) - before:
            if self._variants[kind] is not None:
                self.backend.made[kind] = self._made(self._variants[kind])

    def _made(self, variant: Variant) -> dict[_Place, tuple[_Run, Callable[..., Tensors]]]:
        """The callables for all forwards, each with the module that was captured."""
        wanted = arguments(variant.plan, self.order)
        modules = {
            (chunk, number): _Run(run)
            for chunk, runs in enumerate(self._runs)
            for number, run in enumerate(runs)
        }
        samples = tuple(
            tuple(
                variant.buffers[buffer].detach().requires_grad_(needs)
                for buffer, (_, needs) in zip(buffers, variant.shapes[chunk, number].inputs)
            )
            for (chunk, _, number), buffers in wanted.samples.items()
        )
        to = self._kind[0]
        cast = torch.autocast(self._device.type, to or None, enabled=bool(to), cache_enabled=False)
        with _bare([run for runs in self._runs for run in runs]), self.backend.streams(), cast:
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

    def _between(
        self, chunk: int, number: int, piece: Piece, tensors: Tensors, shared: set[int]
    ) -> tuple[Tensors, Tensors]:
        pieces.call_pre_hooks(piece.begins)
        return run_links(piece.links, tensors, piece.call)

    def _through_graph(
        self, chunk: int, number: int, run: Piece, tensors: Tensors, shared: set[int]
    ) -> tuple[Tensors, Tensors]:
        variant, microbatch = self._variant, self._forwards[chunk, number]
        self._forwards[chunk, number] += 1
        if not variant.takes(chunk, number, tensors):
            pieces.call_pre_hooks(run.begins)
            return run_links(run.links, tensors)
        self._graphed.call_pre_hooks(chunk, number)
        copies = variant.shapes[chunk, number].keeps
        inputs = [_OwnGradient.apply(t) if t.requires_grad and (copies or t.is_leaf) else t for t in tensors]
        module, call = self.backend.made[self._kind][chunk, microbatch, number]
        made = call(*inputs)
        shared |= {each.untyped_storage().data_ptr() for each in made}
        made = iter(made)
        outputs = [next(made) if given is None else tensors[given] for given in module.given]
        return tuple(outputs[: module.num_tensors]), tuple(outputs[module.num_tensors :])


class _Theirs:
    """What their graphs share, in place of a backend."""

    def __init__(self, rng: RandomStreams | None) -> None:
        self.rng = rng
        self.made: dict[tuple, dict[_Place, tuple[_Run, Callable[..., Tensors]]]] = {}
        self.pool = torch.cuda.graph_pool_handle()

    @property
    def nbytes(self) -> int:
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self.pool))

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self) -> None:
        """Theirs is made by then."""

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Inside, they know of the streams of random numbers, and leave them where they were."""
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


class _Run(nn.Module):
    """A run as they want it: tensors in, a tuple of new tensors out, and the parameters that have a part."""

    def __init__(self, run: Piece) -> None:
        super().__init__()
        self.run = run
        self.given: list[int | None] = []  # outputs in order; a number: the input that is handed on
        self.num_tensors = 0
        for i, param in enumerate(run.parameters):
            self.register_parameter(str(i), param)

    def forward(self, *inputs: Tensor) -> Tensors:
        tensors, others = run_links(self.run.links, inputs)
        outputs, self.num_tensors = (*tensors, *others), len(tensors)
        self.given = [next((i for i, own in enumerate(inputs) if own is o), None) for o in outputs]
        return tuple(output for output, given in zip(outputs, self.given) if given is None)


class _OwnGradient(Function):
    """The same tensor; what comes before it may keep its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


@contextmanager
def _bare(runs: Iterable[Piece]) -> Iterator[None]:
    """Inside, nothing hears of gradients, and no op adds them to `main_grad`: trials run on any numbers."""
    with ExitStack() as stack:
        params = dict.fromkeys(param for run in runs for param in run.parameters)
        for run in runs:
            stack.enter_context(pieces.hooks_aside(run))
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
