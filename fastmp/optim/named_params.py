"""Parameters and buffers of the chunks of a model, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

__all__ = ["named_buffers", "named_parameters"]


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Parameter]]:
    """The parameters of all chunks, each once, by the names that their chunk gives them.

    Where two chunks give two parameters one name, the later one has the number of its chunk before it.
    """
    return _named(chunks, lambda chunk: chunk.named_parameters())


def named_buffers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The buffers of all chunks that their modules save, named as in `named_parameters`."""

    def saved(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
        persistent = chunk.state_dict(keep_vars=True)
        return ((name, buffer) for name, buffer in chunk.named_buffers() if name in persistent)

    return _named(chunks, saved)


def _named(
    chunks: Sequence[nn.Module], members: Callable[[nn.Module], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Any]]:
    names: set[str] = set()
    seen: set[int] = set()
    for number, chunk in enumerate(chunks):
        for name, tensor in members(chunk):
            if id(tensor) not in seen:
                unique = f"chunk{number}.{name}" if name in names else name
                names.add(unique)
                seen.add(id(tensor))
                yield unique, tensor
