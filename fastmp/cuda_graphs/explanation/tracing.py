"""Trace a segment, and record everything that a graph would not hold, with its line.

The segment runs unchanged on its own device, so the trace sees all host reads, not only the first,
collectives with other ranks, and custom ops. On the meta device nothing is computed. A dispatch mode sees
ops; a function mode sees calls that are no op on a CPU (`.cpu()`, `.tolist()`, printing, `torch.tensor`);
functions that neither sees (`torch.from_numpy`, streams) are patched during the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from fastmp.cuda_graphs.op_inspection import OpInspector, line_in, where
from fastmp.distributed.streams import beside
from fastmp.nn.segment import run_segments

__all__ = ["TracedOp", "CaptureProblem", "Trace"]

_OPS = str(Path(run_segments.__code__.co_filename).parents[1] / "ops")
_READS = {"cpu", "tolist", "numpy", "__array__", "__repr__", "__format__", "__bool__", "item", "is_nonzero"}
_READS |= {"__int__", "__float__", "__index__", "__complex__", "__contains__"}
_FROM_PYTHON = {"tensor", "as_tensor", "asarray", "new_tensor"}
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


class CaptureProblem(NamedTuple):
    """Work that a graph would not hold or not repeat. line: "file:number, text"."""

    kind: str
    message: str
    line: str


class TracedOp(NamedTuple):
    """An op: its name, a description of each argument, and the line that called it."""

    op: str
    arguments: tuple[str, ...]
    line: str


class Trace(OpInspector):
    """`with trace.running(): ...` records the `ops` and `problems` of a forward and backward inside.

    names: {key of a pre-existing storage: its name, such as "parameter weight"}.
    inputs: tensors that the segment may not write to.
    """

    def __init__(self, names: dict[int, str], inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.ops: list[TracedOp] = []
        self.problems: list[CaptureProblem] = []
        self.names = dict(names)
        inputs = list(inputs)
        self.inputs = {key(x) for x in inputs}
        self.on_cpu = all(x.device.type == "cpu" for x in inputs)
        self.held: list[Tensor] = []  # keeps storages alive, so that their keys are unique
        self.inside_op = False  # Python code inside an op is not reported
        self._made = 0
        self._streams: list[tuple[object, str]] = []

    def problem(self, kind: str, message: str, line: str | None = None) -> None:
        found = CaptureProblem(kind, message, where() if line is None else line)
        # The library's functions read values on a CPU only, to validate them.
        trusted = self.on_cpu and found.line.startswith(_OPS)
        if (
            not trusted
            and not self.inside_op
            and not any((each.kind, each.line) == (kind, found.line) for each in self.problems)
        ):
            self.problems.append(found)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for place, name, function in self._replacements():
                stack.enter_context(mock.patch.object(place, name, function))
            stack.enter_context(_TracedFunctions(self))
            stack.enter_context(self)
            yield
        for stream, line in self._streams:
            if isinstance(stream, torch.cuda.Stream) and stream in beside(stream.device):
                continue  # the capture of a span joins these streams itself
            self.problem(
                "stream", f"leaves stream {stream} without a wait_stream for it: a graph cannot end", line
            )

    def _replacements(self) -> Iterator[tuple[object, str, Callable]]:
        cuda = torch.cuda
        for place, name in ((torch, "from_numpy"), (torch, "frombuffer")):
            yield place, name, self._noting(getattr(place, name), "host data", _HOST_DATA)
        waits: tuple[tuple[Any, str], ...] = (
            *((cuda, "synchronize"), (torch.accelerator, "synchronize")),
            *((cuda.Stream, "synchronize"), (cuda.Event, "synchronize"), (cuda.Event, "query")),
        )
        for place, name in waits:
            yield place, name, self._noting(getattr(place, name), "host sync", "waits for the device")
        enter, wait_stream = cuda.StreamContext.__enter__, cuda.Stream.wait_stream

        def entered(context):
            if context.stream is not None:
                self._streams.append((context.stream, where()))
            return enter(context)

        def waited(stream, other):
            self._streams = [each for each in self._streams if each[0] is not other]
            return wait_stream(stream, other)

        yield cuda.StreamContext, "__enter__", entered
        yield cuda.Stream, "wait_stream", waited
        # Code that asks if it is being captured takes the branch of a capture.
        yield cuda, "is_current_stream_capturing", lambda: True

    def _noting(self, function: Callable, kind: str, message: str) -> Callable:
        def noted(*args, **kwargs):
            self.problem(kind, message)
            if function.__name__ in ("synchronize", "query") and not torch.cuda.is_available():
                return None
            return function(*args, **kwargs)

        return noted

    def on_device(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is on the device: reading host-made tensors does not synchronise."""
        return tensor.device.type != "cpu" or key(tensor) in self.names

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.inside_op = True
        try:
            outputs = func(*args, **kwargs)
        finally:
            self.inside_op = False
        line, schema = where(), func._schema
        self.ops.append(
            TracedOp(str(func), tuple(self._words(each) for each in tree_flatten((args, kwargs))[0]), line)
        )
        for argument, value in zip(schema.arguments, args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and key(value) in self.inputs:
                self.problem(
                    "input changed", f"{func} writes to an input: a replay changes its copy only", line
                )
        for output in tree_flatten(outputs)[0]:
            if isinstance(output, Tensor) and key(output) not in self.names:
                self.names[key(output)] = f"result {self._made}"
                self.held.append(output)
                self._made += 1
        return outputs

    def _words(self, value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
        self.held.append(value)
        name = self.names.get(key(value), f"a tensor from outside, {key(value):#x}")
        return f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


_HOST_DATA = (
    "makes a tensor of what the host has: on a GPU a copy, which replay would make of the same memory"
)
_PLAIN = bool | int | float | complex | str | None
_PLAIN |= torch.dtype | torch.device | torch.layout | torch.memory_format


class _TracedFunctions(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace, name = self.trace, getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _FROM_PYTHON and not (args and name != "new_tensor" and own is not None):
            trace.problem("host data", f"{name}() {_HOST_DATA}")
        elif own is None:
            pass
        elif name in _READS and trace.on_device(own):
            what = f"{name.strip('_')}() reads values"
            if name in ("__repr__", "__format__"):
                what = "prints a tensor"
            trace.problem(
                "host sync", f"{what} on the host, which waits for them; replay would not see them change"
            )
        elif name == "to" and "cpu" in (*args[1:], *(kwargs or {}).values()) and trace.on_device(own):
            trace.problem("host sync", 'to("cpu") copies to the host, which waits for it')
        elif name in _HOOKS:
            trace.problem("hook", f"{name}: the Python of a hook runs at capture, not at replay")
        elif func == _SET_DATA and key(own) in trace.names:
            trace.problem(
                "moved", f"{trace.names[key(own)]} gets other memory; replay uses the memory it had"
            )
        return func(*args, **(kwargs or {}))


def key(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage, unique while the storage is alive."""
    return tensor.untyped_storage()._cdata


def line_of(function: Any) -> str:
    """Return the first line of a function, as "file:number, text"."""
    code = getattr(function, "__code__", None)
    return type(function).__name__ if code is None else line_in(code.co_filename, code.co_firstlineno)
