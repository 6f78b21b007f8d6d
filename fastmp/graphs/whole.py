"""A function of tensors as one graph: all of a training step, or a forward of an evaluation.

Under a `GraphManager` a step is many graphs, and between them the host does what no graph holds. Where there
is nothing for it to do, one graph can hold all: every microbatch, the messages of a pipeline, the sums over
ranks and the optimizer. Then a step costs the host a copy of its inputs and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastmp.graphs.backend import Backend, Graph
from fastmp.graphs.capture import renew_accumulators
from fastmp.graphs.errors import CaptureError, GraphError
from fastmp.graphs.hooks import skipped_by_step
from fastmp.graphs.runs import spec_of
from fastmp.graphs.snapshot import ModelSnapshot
from fastmp.nn.segment import LayerChain, SingleSegment

__all__ = ["WholeGraph"]

_MOST_GRAPHS = 4  # signatures that have one; each has static buffers of its own


class _Replayed(NamedTuple):
    """A graph, the buffers that it reads, and its results where it leaves them."""

    graph: Graph
    static: list[Tensor]
    made: Any


class WholeGraph:
    """`function`, whose calls replay one graph for each signature of their arguments.

    function: takes and returns pytrees of tensors, and does all of its work on the device. What else it reads
        must stay where it is.
    modules: those with the parameters and buffers that it uses.
    what: its name in errors and logs. instead: what an error advises where it cannot be captured.
    trains: whether it runs backwards. All random numbers of a recomputation are then those of its forward.
    warmup: calls that run eagerly first. The first one with a new signature (shapes, dtypes, autocast, form)
        always does, and so does every one beyond four signatures. The next one is captured.

    Where the mode of a module, a hook or what is trained has changed since a capture, graphs are made anew.
    Results are the caller's. Call `remove` before process groups are destroyed.

    ValueError, when it is made, where a segment of a layer must run eagerly. GraphError where a parameter,
    buffer or main gradient has moved since a capture, or a module or parameter has a hook that a replay would
    skip; one that is called behind an accumulation is seen before the first call only. CaptureError where the
    function cannot be captured: where a capture computes (a CPU), part of the work has been done then.
    """

    failure: str | None = None  # as of a `GraphManager`, which may go on without graphs

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        *,
        backend: Backend,
        what: str,
        instead: str,
        trains: bool = False,
        warmup: int = 1,
    ) -> None:
        self.function, self.backend, self.warmup = function, backend, max(warmup, 1)
        self.what, self.instead, self.trains = what, instead, trains
        self._modules = list(modules)
        eager = _eager_segments(self._modules)
        if eager:
            raise ValueError(
                f"graphs: {what} cannot be one graph, because {', '.join(eager)} must run eagerly; {instead}"
            )
        self._chains = [LayerChain([SingleSegment(module)]) for module in self._modules]
        self._calls = 0
        self._removed = False
        self._forget()

    def _forget(self) -> None:
        self._snapshot: ModelSnapshot | None = None
        self._watched: dict[Any, Any] = {}  # by signature: what an eager call has shown
        self._graphs: dict[Any, _Replayed] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def static_bytes(self) -> int:
        """The bytes of all static buffers."""
        return sum(tensor.nbytes for each in self._graphs.values() for tensor in each.static)

    def describe(self) -> str:
        """A line for a log."""
        return (
            f"{self.num_graphs} {'graph' if self.num_graphs == 1 else 'graphs'} of {self.what}, "
            f"{self.static_bytes / 1e6:.2f} MB of static buffers, "
            f"{self.backend.nbytes / 1e6:.2f} MB in a pool"
        )

    def remove(self) -> None:
        """Let go of the graphs; from now on all calls run eagerly."""
        self._removed = True
        self._reset()

    def _reset(self) -> None:
        if self._graphs:
            self._forget()
            self.backend.reset()

    def __call__(self, *arguments: Any) -> Any:
        self._calls += 1
        if self._removed:
            return self.function(*arguments)
        self._check()
        leaves, form = tree_flatten(arguments)
        signature = (form, *map(_spec, leaves), *_autocast(leaves))
        if signature not in self._graphs:
            if len(self._graphs) == _MOST_GRAPHS:
                return self.function(*arguments)
            if signature not in self._watched or self._calls <= self.warmup:
                return self._watch(signature, arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = self._graphs.get(signature)
        if found is None:
            found = self._graphs[signature] = self._capture(signature, tensors, leaves, form)
        else:
            if tensors:
                torch._foreach_copy_(found.static, tensors)
            found.graph.replay()
        made, form = tree_flatten(found.made)
        return tree_unflatten([each.clone() if isinstance(each, Tensor) else each for each in made], form)

    def _watch(self, signature: Any, arguments: tuple[Any, ...]) -> Any:
        if self._snapshot is None:
            self._snapshot = ModelSnapshot(self._chains)
        with self.backend.watch() as watched:
            made = self.function(*arguments)
        self._watched[signature] = watched
        return made

    def _capture(self, signature: Any, tensors: list[Tensor], leaves: list[Any], form: Any) -> _Replayed:
        """Capture a call, and do its work."""
        static = [tensor.detach().clone() for tensor in tensors]
        rest = iter(static)
        given = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.backend.prepare()
        if self.trains:
            renew_accumulators(
                [p for module in self._modules for p in module.parameters() if p.requires_grad]
            )
        try:
            graph = self.backend.graph(watched=self._watched[signature], whole=self.trains)
            with graph.capture():
                made = self.function(*tree_unflatten(given, form))
        except Exception as error:
            raise CaptureError(f"graphs: capture of {self.what}: {error}; {self.instead}") from error
        if not self.backend.runs_at_capture:
            graph.replay()
        return _Replayed(graph, static, made)

    def _check(self) -> None:
        """Look for what has changed since the first call."""
        if self._snapshot is not None:
            changed, moved = self._snapshot.changed()
            if moved and self._graphs:
                raise GraphError(
                    f"graphs: {moved} or its main gradient has moved since {self.what} was captured, which "
                    "goes by address; change its values in place"
                )
            if not changed:
                return
            self._reset()
            self._forget()
        skipped = skipped_by_step(self._modules, trains=self.trains)
        if skipped is not None:
            name = getattr(skipped.hook, "__qualname__", type(skipped.hook).__name__)
            raise GraphError(
                f"graphs: {skipped.owner} has a hook, {name}, that a replay of {self.what} would skip; "
                f"remove it, or mark it with in_step = True if only what it does with tensors matters; "
                f"{self.instead}"
            )


def _eager_segments(modules: Iterable[nn.Module]) -> list[str]:
    chains = [each for root in modules for each in root.modules() if isinstance(each, LayerChain)]
    links = [link for chain in chains for link in chain.links()]
    return list(dict.fromkeys(link.segment.name for link in links if not link.segment.capturable))


def _spec(leaf: Any) -> Any:
    return (spec_of(leaf), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _autocast(leaves: Iterable[Any]) -> list[torch.dtype]:
    """The dtypes that autocast casts to on the devices of tensors among `leaves`."""
    devices = dict.fromkeys(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
    return [torch.get_autocast_dtype(each) for each in devices if torch.is_autocast_enabled(each)]
