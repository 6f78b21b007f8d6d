"""Capture a function of tensors in one graph: a whole training step, or the forward of an evaluation.

Under a `GraphManager` a step is many graphs, with host code between them. A step without host code can be one
full-iteration graph: every microbatch, the messages of a pipeline, the all-reduces and the optimizer. A step
then costs the host one copy of its inputs and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastmp.cuda_graphs.backends.interface import Backend, Graph
from fastmp.cuda_graphs.cache import GraphCache
from fastmp.cuda_graphs.capture import renew_accumulators
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.op_inspection import StorageInspector
from fastmp.cuda_graphs.optimizer_snapshot import (
    OptimizerSnapshot,
    OptimizerStep,
    same_steps,
    stepped_optimizers,
)
from fastmp.cuda_graphs.partition import spec_of
from fastmp.cuda_graphs.skipped_hooks import find_skipped_hook
from fastmp.nn.segment import LayerChain, SingleSegment
from fastmp.schedule.scope import must_run_eagerly

__all__ = ["FunctionGraph"]

_MAX_TRACED = 64  # signatures; those that never come again would fill memory
_CONSTANTS = bool | int | float | complex | str | None
_TENSOR_LR = "use a tensor lr (with capturable=True, or fused=True of SGD) and write to it in place"
_WRITTEN = "it writes to an argument, of which a replay has a copy; write to a copy"


class _GradientChange(NamedTuple):
    """The `grad` of a parameter before and after a capture; dropped: the function replaced it."""

    param: nn.Parameter
    dropped: bool
    before: Tensor | None
    after: Tensor | None


class _FunctionCapture(NamedTuple):
    """A captured call: the graph, its static inputs, its results in graph memory, and the gradients it sets.

    written: the addresses of storages from before the capture that the graph writes to.
    rates: the last learning rate that it passes to the step of each optimizer of fastmp.
    """

    graph: Graph
    static: list[Tensor]
    made: Any
    grads: list[_GradientChange]
    written: set[int]
    rates: list[OptimizerStep]


class FunctionGraph:
    """Callable that replays one graph of `function` for each signature of its arguments.

    These calls run eagerly: the first `warmup` ones, the first one with a new signature (shapes, dtypes,
    structure, autocast, grad mode), and all calls with a fifth or later signature. The second call with a
    signature is captured. Results are copies. If a training mode, `requires_grad`, a hook, a number of a
    module or an option of an optimizer (`group["lr"]`) has changed since a capture, the call runs eagerly,
    and graphs are captured again. Call `remove` before process groups are destroyed.

    Args:
        function: takes and returns pytrees of tensors that require no gradient, and does all of its work on
            the device. Other tensors that it reads must keep their addresses. Numbers, strings and None among
            the arguments are part of the signature.
        modules: the modules with the parameters and buffers that `function` uses.
        name: the function's name in errors and logs. advice: an alternative, for errors.
        trains: `function` runs backwards; each recomputation then draws the random numbers of its forward.
        warmup: calls that run eagerly first, at least one.

    Raises:
        ValueError: a segment of a layer must run eagerly, an argument is not supported, or a result requires
            a gradient.
        GraphError: a parameter, buffer or gradient has moved since a capture, a module or parameter has a
            hook that a replay would skip, or an argument lies in memory that `function` writes to.
        CaptureError: the function cannot be captured. On a CPU, where a capture computes, part of the work is
            done by then.

    Example:
        >>> from fastmp.cuda_graphs import RecordingBackend
        >>> layer = nn.Linear(8, 8)
        >>> texts = {"name": "the forward", "advice": "run it eagerly"}
        >>> forward = FunctionGraph(torch.no_grad()(layer), [layer], backend=RecordingBackend(), **texts)
        >>> outputs = [forward(torch.randn(4, 8)) for _ in range(3)]  # eager, captured, replayed
        >>> forward.num_graphs
        1
    """

    failure: str | None = None  # of the interface of `GraphManager`; a function graph has no fallback

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        *,
        backend: Backend,
        name: str,
        advice: str,
        trains: bool = False,
        warmup: int = 1,
    ) -> None:
        self.function, self.backend, self.warmup = function, backend, max(warmup, 1)
        self.name, self.advice, self.trains = name, advice, trains
        self._modules = list(modules)
        eager = _eager_segments(self._modules)
        if eager:
            reasons = "; ".join(dict.fromkeys(filter(None, eager.values())))
            raise ValueError(
                f"graphs: {name} cannot be one graph, because {must_run_eagerly(list(eager), reasons)}; "
                f"{advice}"
            )
        chains = [LayerChain([SingleSegment(module)]) for module in self._modules]
        self._graphs = GraphCache[_FunctionCapture](chains, backend, every_hook=True)
        # By signature: the random draws of an eager call, and its steps of optimizers.
        self._traced: dict[Any, tuple[Any, list[OptimizerStep]]] = {}
        self._optimizers: dict[tuple[int, bool], OptimizerSnapshot] = {}  # those that graphs step
        self._calls = 0
        self._removed = False

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
            f"{self.num_graphs} {'graph' if self.num_graphs == 1 else 'graphs'} of {self.name}, "
            f"{self.static_bytes / 1e6:.2f} MB of static buffers, "
            f"{self.backend.nbytes / 1e6:.2f} MB in a pool"
        )

    def recapture(self) -> None:
        """Release the graphs between calls; they are captured again, because memory has moved."""
        self._forget()
        self._graphs.drop()

    def _forget(self) -> None:
        self._traced.clear()
        self._optimizers.clear()

    def remove(self) -> None:
        """Let go of the graphs; from now on all calls run eagerly."""
        self._removed = True
        self.recapture()

    def __call__(self, *arguments: Any) -> Any:
        self._calls += 1
        if self._removed:
            return self.function(*arguments)
        self._check()
        leaves, form = tree_flatten(arguments)
        signature = (form, *map(self._spec, leaves), *_modes())
        if signature not in self._graphs:
            if self._graphs.full:
                with self._graphs.running():
                    return self.function(*arguments)
            if signature not in self._traced or self._calls <= self.warmup:
                return self._warm_up(signature, arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = self._graphs.get(signature)
        if found is None:
            found = self._graphs[signature] = self._capture(signature, tensors, leaves, form)
        else:
            self._replay(found, tensors)
        made, form = tree_flatten(found.made)
        return tree_unflatten([each.clone() if isinstance(each, Tensor) else each for each in made], form)

    def _warm_up(self, signature: Any, arguments: tuple[Any, ...]) -> Any:
        """Run a call eagerly, and trace its random draws for the capture."""
        running, tracing = self._graphs.snapshot().running(), self.backend.trace_draws()
        with running, tracing as draws, stepped_optimizers() as stepped:
            made = self.function(*arguments)
        if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(made)):
            raise ValueError(
                f"graphs: {self.name} returns a tensor that requires grad, but a replay records no "
                "autograd graph; return it detached, and call backward() inside"
            )
        if len(self._traced) == _MAX_TRACED:
            del self._traced[next(iter(self._traced))]
        self._traced[signature] = draws, stepped
        return made

    def _capture(
        self, signature: Any, tensors: list[Tensor], leaves: list[Any], form: Any
    ) -> _FunctionCapture:
        """Capture a call, on the capture stream, and do its work."""
        with torch.inference_mode(False):  # inference tensors have no version counters
            static = [_copy(_unexpanded(tensor)) for tensor in tensors]
        rest, versions = iter(static), [each._version for each in static]
        given = [next(rest).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.backend.prepare()
        trained = self._trained()
        renew_accumulators(trained)
        before = [param.grad for param in trained]
        draws, steps = self._traced[signature]
        self._note_optimizers(steps)
        torch.clear_autocast_cache()  # a graph casts weights itself
        try:
            graph = self.backend.graph(draws=draws, has_backward=self.trains)
            with graph.capture(), StorageInspector() as memory, stepped_optimizers() as stepped:
                made = self.function(*tree_unflatten(given, form))
            grads = list(_gradients(trained, before))
            if self._changed_optimizer() or not same_steps(stepped, steps):
                raise CaptureError(
                    "it changes an option of an optimizer, which a replay would not do; step learning-rate "
                    "schedulers outside"
                )
            if versions != [each._version for each in static] or _lie_in(memory.written, tensors):
                raise CaptureError(_WRITTEN)
            if _lie_in(memory.used, [each.before for each in grads if each.dropped]):
                raise CaptureError("it replaces a gradient that it has read; change it in place")
        except Exception as error:
            if not self._graphs:
                self._optimizers.clear()  # no graph relies on them: the next call fails in the same way
            raise CaptureError(f"graphs: capture of {self.name}: {error}; {self.advice}") from error
        finally:
            torch.clear_autocast_cache()  # weights cast inside lie in graph memory
        if not self.backend.runs_at_capture:
            graph.replay()
        del self._traced[signature]
        rates = {id(step.optimizer): step for step in stepped if step.lr is not None}
        grads = [each._replace(before=None) if each.dropped else each for each in grads]
        return _FunctionCapture(graph, static, made, grads, memory.written, list(rates.values()))

    def _replay(self, found: _FunctionCapture, tensors: list[Tensor]) -> None:
        if _lie_in(found.written, tensors):
            raise GraphError(f"graphs: replay of {self.name}: {_WRITTEN}; {self.advice}")
        for param, dropped, before, _ in found.grads:
            if not dropped and not _same(param.grad, before):
                names = (name for m in self._modules for name, each in m.named_parameters() if each is param)
                raise GraphError(
                    f"graphs: the gradient of parameter {next(names)!r} is {_kept(param.grad)} now, and was "
                    f"{_kept(before)} when {self.name} was captured, which goes by address; set gradients "
                    "to the same tensors before each call"
                )
        if tensors:
            torch._foreach_copy_(found.static, list(map(_unexpanded, tensors)))
        found.graph.replay()
        for optimizer, lr in found.rates:
            optimizer.lr = lr  # as the step does
        for param, _, before, after in found.grads:
            if after is not before:
                param.grad = after

    def _note_optimizers(self, steps: list[OptimizerStep]) -> None:
        """Note the numbers of the optimizers before a capture, each once."""
        first = {id(step.optimizer): step for step in reversed(steps)}
        for step in first.values():
            key = id(step.optimizer), step.lr is not None
            if key not in self._optimizers:
                self._optimizers[key] = OptimizerSnapshot(step.optimizer, given=step.lr is not None)

    def _changed_optimizer(self) -> OptimizerSnapshot | None:
        return next((each for each in self._optimizers.values() if each.changed()), None)

    def _trained(self) -> list[nn.Parameter]:
        if not self.trains:
            return []
        return [param for module in self._modules for param in module.parameters() if param.requires_grad]

    def _spec(self, leaf: Any) -> Any:
        """Return the part of the signature for one argument."""
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ValueError(
                f"graphs: an argument of {self.name} requires grad, but a graph replay cannot return "
                "gradients of inputs; pass x.detach()"
            )
        if isinstance(leaf, Tensor):
            spec = spec_of(leaf)
            return spec if spec.strides or leaf.is_contiguous() else (spec, leaf.stride())
        if isinstance(leaf, _CONSTANTS):
            return type(leaf), repr(leaf)  # 1 is True, and -0.0 is 0.0
        raise ValueError(
            f"graphs: an argument of {self.name} is of type {type(leaf).__name__}; it takes tensors, also in "
            "tuples, lists and dicts"
        )

    def _check(self) -> None:
        """Drop the graphs of a changed model; GraphError for hooks that a replay would skip."""
        changed = self._changed_optimizer()
        if changed is not None:
            self._graphs.count_change(changed.changed_option(), _TENSOR_LR)
            self.recapture()
        if self._graphs.check():
            return
        self._forget()
        skipped = find_skipped_hook(self._modules, trains=self.trains)
        if skipped is not None:
            name = getattr(skipped.hook, "__qualname__", type(skipped.hook).__name__)
            raise GraphError(
                f"graphs: {skipped.owner} has a hook, {name}, that a replay of {self.name} would skip; "
                f"remove it, or mark it with in_step = True if only what it does with tensors matters; "
                f"{self.advice}"
            )


def _eager_segments(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Return {name: reason} of the segments that cannot be captured."""
    chains = [each for root in modules for each in root.modules() if isinstance(each, LayerChain)]
    links = [link for chain in chains for link in chain.bound_segments()]
    return {link.segment.name: link.segment.reason for link in links if not link.segment.capturable}


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return the memory of an expanded tensor, with size 1 in expanded dimensions."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    return tensor.as_strided([size if stride else 1 for size, stride in zip(tensor.shape, strides)], strides)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, so that reductions have the same bits."""
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(tensor.shape, tensor.stride(), **options).copy_(tensor.detach())


def _gradients(params: Iterable[nn.Parameter], before: Iterable[Tensor | None]) -> Iterator[_GradientChange]:
    """Yield the change of each gradient that exists before or after the capture."""
    for param, old in zip(params, before):
        new = param.grad
        if old is not None or new is not None:
            dropped = old is not None and new is not None and not _same(new, old)
            yield _GradientChange(param, dropped, old, new)


def _same(grad: Tensor | None, other: Tensor | None) -> bool:
    """Return True if two gradients are one tensor, or equal views of one storage."""
    if grad is None or other is None or grad is other:
        return grad is other
    return _view(grad) == _view(other)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _lie_in(storages: set[int], tensors: Iterable[Tensor | None]) -> bool:
    return any(each is not None and each.untyped_storage().data_ptr() in storages for each in tensors)


def _modes() -> Iterator[Any]:
    """Yield the torch modes that are part of a signature."""
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    for device in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _kept(grad: Tensor | None) -> str:
    return "None" if grad is None else f"a tensor at {grad.data_ptr():#x} with strides {grad.stride()}"
