"""Parameters and buffers of the chunks of a model, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

__all__ = ["named_buffers", "named_parameters"]


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters of all chunks, each once, with their names in the chunk.

    If a name occurs in two chunks, the second one is prefixed: "chunk1.norm.weight".
    """
    return _named(chunks, lambda chunk: chunk.named_parameters())


def named_buffers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent buffers of all chunks, named as in `named_parameters`."""

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
