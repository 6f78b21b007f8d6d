"""A function of tensors as one graph: all of a training step, or a forward of an evaluation.

Under a `GraphManager` a step is many graphs, and between them the host does what no graph holds. Where there
is nothing for it to do, one graph can hold all: every microbatch, the messages of a pipeline, the sums over
ranks and the optimizer. Then a step costs the host a copy of its inputs and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastmp.cuda_graphs.backends.base import Backend, Graph
from fastmp.cuda_graphs.capture import renew_accumulators
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.op_inspection import StorageInspector
from fastmp.cuda_graphs.partition import spec_of
from fastmp.cuda_graphs.scope import must_run_eagerly
from fastmp.cuda_graphs.skipped_hooks import find_skipped_hook
from fastmp.cuda_graphs.snapshot import ModelSnapshot
from fastmp.nn.segment import LayerChain, SingleSegment

__all__ = ["FunctionGraph"]

_MAX_GRAPHS = 4  # signatures that have one; each has static buffers of its own
_MAX_WATCHED = 64  # signatures; those that never come again would fill memory
_CONSTANTS = bool | int | float | complex | str | None
_WRITTEN = "it writes to an argument, of which a replay has a copy; write to a copy"


class _Gradient(NamedTuple):
    """The `grad` of a parameter around a capture; dropped: it was replaced, whatever it was."""

    param: nn.Parameter
    dropped: bool
    before: Tensor | None
    after: Tensor | None


class _Replayed(NamedTuple):
    """A graph, the buffers that it reads, its results where it leaves them, and gradients that it makes.

    written: the addresses of storages from before it that it writes to.
    """

    graph: Graph
    static: list[Tensor]
    made: Any
    grads: list[_Gradient]
    written: set[int]


class FunctionGraph:
    """`function`, whose calls replay one graph for each signature of their arguments.

    function: takes and returns pytrees of tensors, which require no gradient, and does all of its work on the
        device. What else it reads must stay where it is. Numbers, texts and None among its arguments are
        part of the signature.
    modules: those with the parameters and buffers that it uses.
    what: its name in errors and logs. instead: what an error advises where it cannot be captured.
    trains: whether it runs backwards. All random numbers of a recomputation are then those of its forward.
    warmup: calls that run eagerly first. The first one with a new signature (shapes, dtypes, form, autocast,
        whether there are gradients) always does, and so does every one beyond four signatures. The next one
        is captured.

    Where the mode of a module, a hook or what is trained has changed since a capture, graphs are made anew.
    Results are the caller's. Call `remove` before process groups are destroyed.

    ValueError, when it is made, where a segment of a layer must run eagerly; when it is called, for another
    argument, and for a result that requires a gradient. GraphError where a parameter, buffer or gradient has
    moved since a capture, a module or parameter has a hook that a replay would skip, or an argument lies in
    memory that the function writes to. CaptureError where the function cannot be captured: where a capture
    computes (a CPU), part of the work has been done then.
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
            reasons = "; ".join(dict.fromkeys(filter(None, eager.values())))
            raise ValueError(
                f"graphs: {what} cannot be one graph, because {must_run_eagerly(list(eager), reasons)}; "
                f"{instead}"
            )
        self._chains = [LayerChain([SingleSegment(module)]) for module in self._modules]
        self._calls = 0
        self._removed = False
        self._forget()

    def _forget(self) -> None:
        self._snapshot: ModelSnapshot | None = None
        self._draws_of: dict[Any, Any] = {}  # by signature: what an eager call has shown
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
        signature = (form, *map(self._spec, leaves), *_modes())
        if signature not in self._graphs:
            if len(self._graphs) == _MAX_GRAPHS:
                return self.function(*arguments)
            if signature not in self._draws_of or self._calls <= self.warmup:
                return self._watch(signature, arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = self._graphs.get(signature)
        if found is None:
            found = self._graphs[signature] = self._capture(signature, tensors, leaves, form)
        else:
            self._replay(found, tensors)
        made, form = tree_flatten(found.made)
        return tree_unflatten([each.clone() if isinstance(each, Tensor) else each for each in made], form)

    def _watch(self, signature: Any, arguments: tuple[Any, ...]) -> Any:
        if self._snapshot is None:
            self._snapshot = ModelSnapshot(self._chains, every_hook=True)
        with self.backend.trace_draws() as draws:
            made = self.function(*arguments)
        if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(made)):
            raise ValueError(
                f"graphs: {self.what} returns a tensor that requires a gradient, which no replay does; "
                "return it detached, and run backwards inside"
            )
        if len(self._draws_of) == _MAX_WATCHED:
            del self._draws_of[next(iter(self._draws_of))]
        self._draws_of[signature] = draws
        return made

    def _capture(self, signature: Any, tensors: list[Tensor], leaves: list[Any], form: Any) -> _Replayed:
        """Capture a call, and do its work."""
        with torch.inference_mode(False):  # whose tensors have no versions
            static = [_copy(_unexpanded(tensor)) for tensor in tensors]
        rest, versions = iter(static), [each._version for each in static]
        given = [next(rest).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.backend.prepare()
        trained = self._trained()
        renew_accumulators(trained)
        before = [param.grad for param in trained]
        torch.clear_autocast_cache()  # a graph casts weights itself
        try:
            graph = self.backend.graph(draws=self._draws_of[signature], has_backward=self.trains)
            with graph.capture(), StorageInspector() as memory:
                made = self.function(*tree_unflatten(given, form))
            grads = list(_gradients(trained, before))
            if versions != [each._version for each in static] or _lie_in(memory.written, tensors):
                raise CaptureError(_WRITTEN)
            if _lie_in(memory.used, [each.before for each in grads if each.dropped]):
                raise CaptureError("it replaces a gradient that it has read; change it in place")
        except Exception as error:
            raise CaptureError(f"graphs: capture of {self.what}: {error}; {self.instead}") from error
        finally:
            torch.clear_autocast_cache()  # what it has cast is its own
        if not self.backend.runs_at_capture:
            graph.replay()
        del self._draws_of[signature]
        grads = [each._replace(before=None) if each.dropped else each for each in grads]
        return _Replayed(graph, static, made, grads, memory.written)

    def _replay(self, found: _Replayed, tensors: list[Tensor]) -> None:
        if _lie_in(found.written, tensors):
            raise GraphError(f"graphs: replay of {self.what}: {_WRITTEN}; {self.instead}")
        for param, dropped, before, _ in found.grads:
            if not dropped and not _same(param.grad, before):
                names = (name for m in self._modules for name, each in m.named_parameters() if each is param)
                raise GraphError(
                    f"graphs: the gradient of parameter {next(names)!r} is {_kept(param.grad)} now, and was "
                    f"{_kept(before)} when {self.what} was captured, which goes by address; treat gradients "
                    "alike before each call"
                )
        if tensors:
            torch._foreach_copy_(found.static, list(map(_unexpanded, tensors)))
        found.graph.replay()
        for param, _, before, after in found.grads:
            if after is not before:
                param.grad = after

    def _trained(self) -> list[nn.Parameter]:
        if not self.trains:
            return []
        return [param for module in self._modules for param in module.parameters() if param.requires_grad]

    def _spec(self, leaf: Any) -> Any:
        """What the signature holds of an argument."""
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ValueError(
                f"graphs: an argument of {self.what} requires a gradient, which a replay has no place for; "
                "detach it"
            )
        if isinstance(leaf, Tensor):
            spec = spec_of(leaf)
            return spec if spec.strides or leaf.is_contiguous() else (spec, leaf.stride())
        if isinstance(leaf, _CONSTANTS):
            return type(leaf), repr(leaf)  # 1 is True, and -0.0 is 0.0
        raise ValueError(
            f"graphs: an argument of {self.what} is of type {type(leaf).__name__}; it takes tensors, also in "
            "tuples, lists and dicts"
        )

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
        skipped = find_skipped_hook(self._modules, trains=self.trains)
        if skipped is not None:
            name = getattr(skipped.hook, "__qualname__", type(skipped.hook).__name__)
            raise GraphError(
                f"graphs: {skipped.owner} has a hook, {name}, that a replay of {self.what} would skip; "
                f"remove it, or mark it with in_step = True if only what it does with tensors matters; "
                f"{self.instead}"
            )


def _eager_segments(modules: Iterable[nn.Module]) -> dict[str, str]:
    """The names of segments that must run eagerly as their layers are now, and why."""
    chains = [each for root in modules for each in root.modules() if isinstance(each, LayerChain)]
    links = [link for chain in chains for link in chain.bound_segments()]
    return {link.segment.name: link.segment.reason for link in links if not link.segment.capturable}


def _unexpanded(tensor: Tensor) -> Tensor:
    """What lies in memory of an expanded tensor."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    return tensor.as_strided([size if stride else 1 for size, stride in zip(tensor.shape, strides)], strides)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides: sums along them have the same bits."""
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(tensor.shape, tensor.stride(), **options).copy_(tensor.detach())


def _gradients(params: Iterable[nn.Parameter], before: Iterable[Tensor | None]) -> Iterator[_Gradient]:
    """What has become of gradients, where there were any or are now."""
    for param, old in zip(params, before):
        new = param.grad
        if old is not None or new is not None:
            dropped = old is not None and new is not None and not _same(new, old)
            yield _Gradient(param, dropped, old, new)


def _same(grad: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are one, or the same view of one place."""
    if grad is None or other is None or grad is other:
        return grad is other
    return _view(grad) == _view(other)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _lie_in(storages: set[int], tensors: Iterable[Tensor | None]) -> bool:
    return any(each is not None and each.untyped_storage().data_ptr() in storages for each in tensors)


def _modes() -> Iterator[Any]:
    """What torch does beside the ops that are called."""
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    for device in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _kept(grad: Tensor | None) -> str:
    return "None" if grad is None else f"a tensor at {grad.data_ptr():#x} with strides {grad.stride()}"
