"""Inspect ops as they run: the reason why a graph could not hold one, and the line that called it."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastmp.nn.segment import run_segments

__all__ = ["StorageInspector", "OpInspector", "line_in", "where"]

_TORCH = str(Path(torch.__file__).parent)
_GRAPHS = Path(__file__).parent
_SKIPPED_FILES = (  # between an op and the line to report
    *(
        str(_GRAPHS / name)
        for name in ("op_inspection.py", "backends/recording.py", "explanation/tracing.py")
    ),
    *(run_segments.__code__.co_filename, contextlib.__file__),
)
_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class OpInspector(TorchDispatchMode):
    """Dispatch mode that reports each op a graph could not hold to `problem`, then runs it by `run`."""

    def problem(self, kind: str, message: str) -> None:
        """Handle a problem of the next op, which `message` names and explains."""
        raise NotImplementedError

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op and return its result."""
        raise NotImplementedError

    def on_device(self, tensor: Tensor) -> bool:
        """Return True if reading `tensor` synchronises with the device, as host-made tensors do not."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind, message in self._problems(func, args, kwargs):
            self.problem(kind, f"{func._schema.name} {message}")
        return self.run(func, args, kwargs)

    def _problems(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, str]]:
        name, tensors = func._schema.name, [each for each in args if isinstance(each, Tensor)]
        if torch.Tag.data_dependent_output in func.tags:
            if any(map(self.on_device, tensors)):
                yield "host sync", "reads a value on the host: replay would not see it change"
        elif not _has_fixed_shapes(func, args, kwargs):
            yield "shape", "makes a shape that depends on data: replay cannot make another one"
        elif name == "aten::_to_copy" and tensors and tensors[0].device.type != "cpu":
            if torch.device(kwargs.get("device") or tensors[0].device).type == "cpu":
                yield "host sync", "copies to the host, which waits for it"
        elif name.startswith("c10d::") and "barrier" in name:
            yield "host sync", "makes the host wait for other ranks"
        if kwargs.get("generator") not in (None, torch.default_generator, *torch.cuda.default_generators):
            yield "generator", "draws from a generator of its own, which replay does not advance"


class StorageInspector(TorchDispatchMode):
    """Dispatch mode that collects the addresses of pre-existing storages.

    used: storages that ops read or write. written: storages that ops may write to; for a collective, all.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled code as it is; torch would otherwise run what it was compiled from."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self.written: set[int] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = _storages((args, kwargs)) - self._made
        self.used |= used
        self.written |= _storages(_written(func, args, kwargs)) & used
        outputs = func(*args, **kwargs)
        self._made |= _storages(outputs) - self.used
        return outputs


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an op may write to."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "c10d":  # whose schemas do not say it
        return [args, kwargs]
    given = {**dict(zip((each.name for each in schema.arguments), args)), **kwargs}
    return [given.get(each.name) for each in schema.arguments if each.is_write]


def _storages(tree: Any) -> set[int]:
    """Return the addresses of all storages with memory."""
    tensors = [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
    return {each.untyped_storage().data_ptr() for each in tensors} - {0}


def _has_fixed_shapes(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if the results of an op have the same shapes at every replay."""
    if func in _INDEXING:
        # Numbers of rows give as many rows; a mask does only where one value is put.
        masked = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        return not masked or (len(args) > 2 and args[2].numel() == 1)
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is not None
    return torch.Tag.dynamic_output_shape not in func.tags


def where() -> str:
    """Return the innermost line outside torch and this package, as "file:number, text".

    A backward without such a line gets that of its forward, if autograd has recorded it.
    """
    frames: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _SKIPPED_FILES:
            if file.startswith(str(_GRAPHS)):
                break  # what runs the model
            frames.append((file, frame.f_lineno))
        frame = frame.f_back
    for place in frames:
        if not place[0].startswith(_TORCH):
            return line_in(*place)
    node = torch._C._current_autograd_node()
    metadata: Any = {} if node is None else node.metadata
    for text in reversed(metadata.get("traceback_", [])):
        found = re.search(r'File "(.+)", line (\d+)', text)
        if found and not found[1].startswith((_TORCH, str(_GRAPHS), *_SKIPPED_FILES)):
            return f"backward of {line_in(found[1], int(found[2]))}"
    return line_in(*frames[0]) if frames and node is None else "a backward"


def line_in(file: str, number: int) -> str:
    return f"{file}:{number}, {linecache.getline(file, number).strip()}"
