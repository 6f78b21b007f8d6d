"""Where in the whole model's tensors the elements lie that a rank has.

A checkpoint knows tensors of the whole model only, and chunks of them: a first index and a size in each
dimension. A rank has a shard of a tensor, cut along some dimensions, or, of sharded optimizer state, a range
of the shard's memory. Both are a few chunks, by arithmetic alone: nothing else has to know the layout that a
checkpoint was saved with, or is loaded into.
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
    "clip",
]

Shape = tuple[int, ...]


class TensorChunk(NamedTuple):
    """A block of a tensor: its first index and its size in each dimension."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)


class Cut(NamedTuple):
    """How a shard was cut along one dimension: `blocks` equal blocks, each into `ranks` equal parts.

    The shard is the part number `rank` of every block, one behind the other.
    """

    dim: int
    blocks: int
    rank: int
    ranks: int


def full_chunk(shape: Sequence[int]) -> TensorChunk:
    """The chunk that is a whole tensor."""
    return TensorChunk((0,) * len(shape), tuple(shape))


def full_shape(shard: Sequence[int], cuts: Sequence[Cut]) -> Shape:
    """The shape of the tensor that a shard of shape `shard` was cut from."""
    shape = list(shard)
    for cut in cuts:
        shape[cut.dim] *= cut.ranks
    return tuple(shape)


def chunks_of_range(
    shape: Sequence[int], start: int, end: int
) -> Iterator[tuple[TensorChunk, tuple[int, int]]]:
    """Divide the elements from `start` to before `end` of a tensor in row-major order into chunks.

    Yields as few as there can be, each with its part of the range, counted from `start`.
    """
    if not shape:
        yield from [(TensorChunk((), ()), (0, 1))] if start < end else []
        return
    row, at = prod(shape[1:]), start
    while at < end:
        first, skipped = divmod(at, row)
        rows = (end - at) // row
        if skipped or not rows:  # a part of one row
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
    """Divide `chunk` of a shard (None: all of it) into chunks that are chunks of the whole tensor, too.

    Yields both: where it lies in the shard, and where in the whole tensor.
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
    """Cut a chunk where one part of a block ends and the next begins."""
    start, end = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield TensorChunk(_with(chunk.offsets, dim, start), _with(chunk.sizes, dim, stop - start))
        start = stop


def split_in_two(chunk: TensorChunk, dim: int) -> tuple[TensorChunk, TensorChunk]:
    """Cut a chunk in two along a dimension, the first half being the larger one."""
    first = -(-chunk.sizes[dim] // 2)
    rest = TensorChunk(
        _with(chunk.offsets, dim, chunk.offsets[dim] + first),
        _with(chunk.sizes, dim, chunk.sizes[dim] - first),
    )
    return TensorChunk(chunk.offsets, _with(chunk.sizes, dim, first)), rest


def clip(chunk: TensorChunk, shape: Sequence[int]) -> TensorChunk | None:
    """The part of `chunk` that lies in a tensor of shape `shape`; None where nothing does."""
    sizes = tuple(
        min(size, max(n - at, 0)) for at, size, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    return TensorChunk(chunk.offsets, sizes) if prod(sizes) else None


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
