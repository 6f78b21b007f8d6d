"""Report for each segment of a model if a graph can hold it, and otherwise the reason with its line.

The model runs three times, segment by segment, each forward followed by its backward. The first pass creates
lazily initialised state. Host-device synchronisations, data-dependent shapes and host data show in one pass
(`tracing`). Changes by Python show as differences between two passes: other ops, other numbers, other memory,
attributes that were set.

State that changes neither in these passes nor in any attribute of a module is not found, such as a branch
taken every hundredth step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.random import fork_rng
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastmp.cuda_graphs.explanation.tracing import CaptureProblem, Trace, TracedOp, key, line_of
from fastmp.cuda_graphs.op_inspection import line_in
from fastmp.cuda_graphs.partition import made_by
from fastmp.cuda_graphs.skipped_hooks import SkippedHook, merge_hooked_layers
from fastmp.nn.segment import BoundSegment, Call, LayerChain, SingleSegment, Tensors, run_segments
from fastmp.ops.wgrad import first_of

__all__ = ["CaptureProblem", "Report", "SegmentReport", "explain"]


class SegmentReport(NamedTuple):
    """The result for one segment. reason: why the layer declares it eager; problems: found by `explain`."""

    name: str
    reason: str
    problems: tuple[CaptureProblem, ...]

    @property
    def captured(self) -> bool:
        return not self.reason and not self.problems


class Report(NamedTuple):
    """The segments of all chains of a model in order; `print` shows it as text."""

    segments: tuple[SegmentReport, ...]

    @property
    def captured(self) -> bool:
        """True if all segments can be captured."""
        return all(segment.captured for segment in self.segments)

    @property
    def num_spans(self) -> int:
        """The number of captured spans that these segments form."""
        return sum(captured for captured, _ in groupby(segment.captured for segment in self.segments))

    def __str__(self) -> str:
        identical: dict[tuple, list[str]] = {}
        for segment in self.segments:
            kind = segment.name.rpartition(".")[2]
            identical.setdefault((kind, segment.reason, segment.problems), []).append(segment.name)
        count = sum(segment.captured for segment in self.segments)
        spans = "1 span" if self.num_spans == 1 else f"{self.num_spans} spans"
        lines = [f"{count} of {len(self.segments)} segments can be captured, in {spans}"]
        for (_, reason, problems), names in identical.items():
            shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} identical)"
            if not reason and not problems:
                lines.append(f"  {shown}: captured")
                continue
            lines.append(f"  {shown}: not captured" + (f", {reason}" if reason else ""))
            for problem in problems:
                lines += [f"    {problem.kind}: {problem.message}", f"      {problem.line}"]
        return "\n".join(lines)


def explain(model: nn.Module, *inputs: Any) -> Report:
    """Report which segments of `model`, called with `inputs`, can be captured, and why others cannot.

    Call it on all ranks of the model's groups. Gradients, buffers and torch's generators are restored
    afterwards; random streams of the model's own and its Python state are not. On the meta device nothing is
    computed, and the model runs up to the first value that it reads.

    Args:
        model: in training mode; a model with `LayerChain`s inside, a `LayerChain`, a `SegmentedLayer`, an
            `nn.Sequential`, whose modules are segments, or any other module, which is one segment.
        inputs: of one microbatch. Inputs of segments must be tensors: a graph would keep any other value.

    Returns:
        A `Report`; print it, or read its `segments`.

    Raises:
        ValueError: the model is in evaluation mode, or a chain does not run.

    Example:
        >>> report = explain(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
        >>> print(report)
        2 of 2 segments can be captured, in 1 span
          0.Linear: captured
          1.ReLU: captured
    """
    if not model.training:
        raise ValueError("explain: the model is in evaluation mode, where nothing is captured: model.train()")
    explainer = _Explainer(model)
    devices = [x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda][:1]
    with torch.enable_grad(), _restored(model), fork_rng(devices):
        explainer.run(inputs)
    return explainer.report()


class _Stopped(Exception):
    """A segment raised an exception after a problem that explains it."""


class _Explainer:
    """Runs a model and traces its segments."""

    def __init__(self, model: nn.Module) -> None:
        named = _chains(model)
        self.hooks: dict[nn.Module, SkippedHook] = {}
        self.chains = [(chain, self._links(chain, name)) for name, chain in named]
        self.links = {name: link for _, links in self.chains for name, link in links.items()}
        self.call: Callable[..., Any] = model
        if not named:
            layers = list(model) if isinstance(model, nn.Sequential) else [model]
            self.links = self._links(LayerChain(layers))
            self.call = lambda *inputs: self.through(self.links, inputs, {})
        self.traces: dict[str, list[Trace]] = {name: [] for name in self.links}
        self.error = ""

    def _links(self, chain: LayerChain, name: str = "") -> dict[str, BoundSegment]:
        links, hooks = merge_hooked_layers(chain.bound_segments())
        self.hooks |= hooks
        return {f"{name}.{link.full_name}".lstrip("."): link for link in links}

    def run(self, inputs: tuple[Any, ...]) -> None:
        with ExitStack() as stack:
            for chain, links in self.chains:
                stack.enter_context(self._running(chain, links))
            try:
                for _ in range(3):
                    self.call(*inputs)
            except _Stopped as stopped:
                self.error = str(stopped)

    @contextmanager
    def _running(self, chain: LayerChain, links: dict[str, BoundSegment]) -> Iterator[None]:
        """Run `chain` by `through`, even if a graph manager is its runner."""
        before = chain.runner
        chain.runner = lambda _, tensors, shared: self.through(links, tensors, shared, chain.call)
        try:
            yield
        finally:
            chain.runner = before

    def through(
        self,
        links: dict[str, BoundSegment],
        tensors: tuple[Any, ...],
        shared: Mapping[str, Any],
        call: Call | None = None,
    ) -> Tensors:
        others: Tensors = ()
        for name, link in links.items():
            if link.segment.capturable:
                tensors, more = self._traced(name, link, tensors, shared if link.first else {}, call)
            else:
                tensors, more = run_segments([link], tensors, call, shared=shared)
            others += more
        return *tensors, *others

    def _traced(
        self,
        name: str,
        link: BoundSegment,
        given: tuple[Any, ...],
        shared: Mapping[str, Any],
        call: Call | None,
    ) -> tuple[Tensors, Tensors]:
        leaves, form = tree_flatten(shared)
        num_given, given = len(given), (*given, *leaves)
        inputs = tuple(
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given
        )
        # Copies, as writing to a leaf in place is an error of autograd and writing to an activation is not.
        inputs = tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)
        layer = link.layer.module if isinstance(link.layer, SingleSegment) else link.layer
        names = {key(x): f"{what} {n}" for what, n, x in _named(layer)}
        names |= {key(x): f"input {i}" for i, x in enumerate(inputs) if isinstance(x, Tensor)}
        trace = Trace(names, [x for x in inputs if isinstance(x, Tensor)])
        for i, x in enumerate(inputs):
            if not isinstance(x, Tensor):
                message = f"input {i} is {x!r}, no tensor: a graph keeps the value that it had at capture"
                trace.problem("argument", message, line_of(type(layer).forward))
        self.traces[name].append(trace)
        state = _state(layer)
        try:
            anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
            with anomaly, trace.running():
                keywords = tree_unflatten(inputs[num_given:], form)
                tensors, others = run_segments([link], inputs[:num_given], call, shared=keywords)
                _backward(link, inputs, (*tensors, *others))
        except Exception as error:
            if not trace.problems:
                raise
            raise _Stopped(f"{type(error).__name__} in {name}: {error}") from error
        _compare_state(trace, layer, state, _state(layer))
        onwards = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)
        return onwards, tuple(t.detach().requires_grad_(t.requires_grad) for t in others)

    def report(self) -> Report:
        reports = []
        for name, link in self.links.items():
            traces, reason = self.traces[name][-2:], link.segment.reason
            if link.layer in self.hooks:
                owner, hook = self.hooks[link.layer]
                message = f"a hook of {owner}: replay would skip it, so the layer runs eagerly, as a whole"
                reports.append(SegmentReport(name, "", (CaptureProblem("hook", message, line_of(hook)),)))
            elif not link.segment.capturable:
                reports.append(SegmentReport(name, reason or "the layer says so", ()))
            elif not traces and not self.error:
                raise ValueError(f"explain: segment {name!r} did not run")
            elif not traces:
                reports.append(SegmentReport(name, f"not looked at after {self.error}", ()))
            else:
                problems = [each for trace in traces for each in trace.problems]
                if len(traces) == 2:
                    problems += _differences(*traces)
                kept: dict[tuple[str, str], CaptureProblem] = {}
                for each in problems:
                    kept.setdefault((each.kind, each.line.removeprefix("backward of ")), each)
                reports.append(SegmentReport(name, "", tuple(kept.values())))
        return Report(tuple(reports))


def _chains(model: nn.Module) -> list[tuple[str, LayerChain]]:
    """Return (name, chain) of the chains of a model, except those inside a layer of another chain."""
    found: list[tuple[str, LayerChain]] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, LayerChain) and module not in inside:
            found.append((name, module))
            inside.update(module.modules())
    return found


def _backward(link: BoundSegment, inputs: tuple[Any, ...], outputs: Tensors) -> None:
    """Compute the gradients of a segment and drop them, without accumulation or parameter hooks."""
    ends = [t for t in made_by(outputs, inputs) if t.requires_grad]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    leaves += [param for param in link.layer.parameters() if param.requires_grad]
    if ends and leaves:  # not torch.autograd.grad, which hides its calls from function modes
        grads, options = tuple(torch.ones_like(t) for t in ends), {"allow_unreachable": True}
        _engine_run_backward(
            tuple(ends), grads, False, False, tuple(leaves), accumulate_grad=False, **options
        )


def _differences(first: Trace, second: Trace) -> list[CaptureProblem]:
    """List the differences of two passes, up to the first op that only one of them has."""
    found: list[CaptureProblem] = []
    sent, again = ([e for e in trace.ops if e.op.startswith("c10d")] for trace in (first, second))
    for one, other in zip_longest(sent, again, fillvalue=_NOTHING):
        if one.op != other.op:
            found.append(_branch("collective", one, other, other.line or one.line))
            break
    for i, (one, other) in enumerate(zip_longest(first.ops, second.ops, fillvalue=_NOTHING)):
        if one.op != other.op or len(one.arguments) != len(other.arguments):
            after = first.ops[i + 1].op if i + 1 < len(first.ops) else ""
            line = one.line if after == other.op or not other.line else other.line  # of the one that is more
            return [*found, _branch("branch", one, other, line)]
        pair = next((p for p in zip(one.arguments, other.arguments) if p[0] != p[1]), None)
        if pair is None:
            continue
        outside = all("from outside" in each for each in pair)
        kind = "outside" if outside else "constant"
        said = "replay would use the memory of the first" if outside else "replay would repeat the first"
        message = f"{one.op} gets {pair[0]} in one pass, {pair[1]} in the next: {said}"
        found.append(CaptureProblem(kind, message, other.line))
    return found


_NOTHING = TracedOp("nothing", (), "")


def _branch(kind: str, one: TracedOp, other: TracedOp, line: str) -> CaptureProblem:
    ops = f"{one.op} in one pass, {other.op} in the next"
    return CaptureProblem(kind, f"{ops}: what Python decides, a graph decides once, at capture", line)


def _named(layer: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, param in layer.named_parameters():
        yield "parameter", name, param
    for name, buffer in layer.named_buffers():
        yield "buffer", name, buffer


def _state(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the state that Python could change: storages of parameters and buffers, module attributes."""
    state: dict[tuple[str, str], Any] = {(what, name): key(x) for what, name, x in _named(layer)}
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                state["attribute", f"{path}.{name}".lstrip(".")] = _identity(value)
    return state


_OF_MODULES = frozenset(vars(nn.Module()))


def _identity(value: Any) -> Any:
    if isinstance(value, list | tuple | set | dict):
        return type(value), len(value), repr(value) if len(value) < 100 else None
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return type(value), value
    return id(value)


def _compare_state(trace: Trace, layer: nn.Module, before: dict, after: dict) -> None:
    for (what, name), value in after.items():
        if value == before.get((what, name)):
            continue
        path, _, attribute = name.rpartition(".")
        line = _line_that_sets(layer.get_submodule(path), attribute)
        if what == "attribute":
            message = f"sets {name}, which replay does not do: Python runs at capture only"
            trace.problem("side effect", message, line)
        elif not any(each.kind == "moved" for each in trace.problems):
            trace.problem("moved", f"{what} {name} gets other memory; replay uses the memory it had", line)


def _line_that_sets(module: nn.Module, attribute: str) -> str:
    """Return the line outside __init__ that assigns to self.attribute or calls a method of it."""
    sets = re.compile(rf"\bself\.{re.escape(attribute)}\b(\[.*\])*(\.\w+\(|\s*(:[^=]+|[-+*/%&|^@]+)?=(?!=))")
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            break
        for name, function in vars(kind).items():
            if not inspect.isfunction(function) or name == "__init__":
                continue
            with suppress(OSError, TypeError):  # there is no source
                for number, text in enumerate(*inspect.getsourcelines(function)):
                    if sets.search(text):
                        return line_in(function.__code__.co_filename, number)
    return line_of(type(module).forward)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and main gradients at exit, and whether these have had the first one of a step."""
    mains = [p.main_grad for p in model.parameters() if hasattr(p, "main_grad")]
    before = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *mains)]
    firsts = [first for main in mains if (first := first_of(main)) is not None]
    states = [first.state for first in firsts]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        for first, state in zip(firsts, states, strict=True):
            first.state = state
