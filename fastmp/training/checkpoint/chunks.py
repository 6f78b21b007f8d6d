"""Chunks of full tensors: the arithmetic of resharding.

A checkpoint stores tensors of the whole model as chunks, each with offsets and sizes, as DCP does
(torch.distributed.checkpoint). A rank holds a shard of a tensor, cut along some dimensions, or, of ZeRO-1
optimizer state, a range of the shard's memory. Both are a few chunks, so nothing else depends on the layout
that saved a checkpoint or loads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

__all__ = [
    "TensorChunk",
    "Cut",
    "chunks_of_range",
    "chunks_of_shard",
    "split_in_two",
    "full_chunk",
    "full_shape",
    "is_inside",
    "clip",
]

Shape = tuple[int, ...]


class TensorChunk(NamedTuple):
    """A block of a tensor: the first index and the size in each dimension."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)


class Cut(NamedTuple):
    """The sharding of one dimension: `blocks` equal blocks, each split into `ranks` equal parts.

    The shard is part `rank` of every block, one after another.
    """

    dim: int
    blocks: int
    rank: int
    ranks: int


def full_chunk(shape: Sequence[int]) -> TensorChunk:
    """Return the chunk that covers a tensor."""
    return TensorChunk((0,) * len(shape), tuple(shape))


def full_shape(shard: Sequence[int], cuts: Sequence[Cut]) -> Shape:
    """Return the shape of the full tensor of a shard of shape `shard`."""
    shape = list(shard)
    for cut in cuts:
        shape[cut.dim] *= cut.ranks
    return tuple(shape)


def chunks_of_range(
    shape: Sequence[int], start: int, end: int
) -> Iterator[tuple[TensorChunk, tuple[int, int]]]:
    """Split elements `start` to `end` - 1 of a tensor, in row-major order, into as few chunks as possible.

    Yields (chunk, its range of the elements, counted from `start`).
    """
    if not shape:
        yield from [(TensorChunk((), ()), (0, 1))] if start < end else []
        return
    row, at = prod(shape[1:]), start
    while at < end:
        first, skipped = divmod(at, row)
        rows = (end - at) // row
        if skipped or not rows:  # part of one row
            stop = min(end, (first + 1) * row)
            for chunk, (a, b) in chunks_of_range(shape[1:], skipped, skipped + stop - at):
                yield (
                    TensorChunk((first, *chunk.offsets), (1, *chunk.sizes)),
                    (at - start + a, at - start + b),
                )
        else:
            stop = at + rows * row
            yield (
                TensorChunk((first, *(0,) * (len(shape) - 1)), (rows, *shape[1:])),
                (at - start, stop - start),
            )
        at = stop


def chunks_of_shard(
    shard: Sequence[int], cuts: Sequence[Cut], chunk: TensorChunk | None = None
) -> Iterator[tuple[TensorChunk, TensorChunk]]:
    """Split `chunk` of a shard (None: all of it) into chunks that are contiguous in the full tensor.

    Yields (chunk of the shard, the same elements as a chunk of the full tensor).
    """
    here = [full_chunk(shard) if chunk is None else chunk]
    for cut in cuts:
        here = [part for each in here for part in _at_blocks(each, cut.dim, shard[cut.dim] // cut.blocks)]
    for each in here:
        offsets = list(each.offsets)
        for cut in cuts:
            size = shard[cut.dim] // cut.blocks  # of this rank's part of a block
            block, inside = divmod(each.offsets[cut.dim], size) if size else (0, 0)
            offsets[cut.dim] = (block * cut.ranks + cut.rank) * size + inside
        yield each, TensorChunk(tuple(offsets), each.sizes)


def _at_blocks(chunk: TensorChunk, dim: int, size: int) -> Iterator[TensorChunk]:
    """Yield a chunk split at the borders of blocks of `size` along `dim`."""
    start, end = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield TensorChunk(_with(chunk.offsets, dim, start), _with(chunk.sizes, dim, stop - start))
        start = stop


def split_in_two(chunk: TensorChunk, dim: int) -> tuple[TensorChunk, TensorChunk]:
    """Return the halves of a chunk along `dim`; the first is the larger one."""
    first = -(-chunk.sizes[dim] // 2)
    rest = TensorChunk(
        _with(chunk.offsets, dim, chunk.offsets[dim] + first),
        _with(chunk.sizes, dim, chunk.sizes[dim] - first),
    )
    return TensorChunk(chunk.offsets, _with(chunk.sizes, dim, first)), rest


def is_inside(chunk: TensorChunk, shape: Sequence[int]) -> bool:
    """Return True if no element of `chunk` is outside of a tensor of shape `shape`."""
    return all(0 <= at and 0 <= size and at + size <= n for at, size, n in zip(*chunk, shape, strict=True))


def clip(chunk: TensorChunk, shape: Sequence[int]) -> TensorChunk | None:
    """Return the intersection of `chunk` with a tensor of shape `shape`, or None if it is empty."""
    sizes = tuple(
        min(size, max(n - at, 0)) for at, size, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    return TensorChunk(chunk.offsets, sizes) if prod(sizes) else None


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
