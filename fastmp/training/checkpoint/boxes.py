"""Where in the whole model's tensors the elements lie that a rank has.

A checkpoint knows tensors of the whole model only, and boxes of them: a first index and a size in each
dimension. A rank has a shard of a tensor, cut along some dimensions, or, of sharded optimizer state, a range
of the shard's memory. Both are a few boxes, by arithmetic alone: nothing else has to know the layout that a
checkpoint was saved with, or is loaded into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Box", "Cut", "boxes_of_range", "boxes_of_shard", "halves", "whole_box", "whole_shape", "within"]

Shape = tuple[int, ...]


class Box(NamedTuple):
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


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def whole_shape(shard: Sequence[int], cuts: Sequence[Cut]) -> Shape:
    """The shape of the tensor that a shard of shape `shard` was cut from."""
    shape = list(shard)
    for cut in cuts:
        shape[cut.dim] *= cut.ranks
    return tuple(shape)


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Box, tuple[int, int]]]:
    """Divide the elements from `start` to before `end` of a tensor in row-major order into boxes.

    Yields as few as there can be, each with its part of the range, counted from `start`.
    """
    if not shape:
        yield from [(Box((), ()), (0, 1))] if start < end else []
        return
    row, at = prod(shape[1:]), start
    while at < end:
        first, skipped = divmod(at, row)
        rows = (end - at) // row
        if skipped or not rows:  # a part of one row
            stop = min(end, (first + 1) * row)
            for box, (a, b) in boxes_of_range(shape[1:], skipped, skipped + stop - at):
                yield Box((first, *box.offsets), (1, *box.sizes)), (at - start + a, at - start + b)
        else:
            stop = at + rows * row
            yield Box((first, *(0,) * (len(shape) - 1)), (rows, *shape[1:])), (at - start, stop - start)
        at = stop


def boxes_of_shard(
    shard: Sequence[int], cuts: Sequence[Cut], box: Box | None = None
) -> Iterator[tuple[Box, Box]]:
    """Divide `box` of a shard (None: all of it) into boxes that are boxes of the whole tensor, too.

    Yields both: where it lies in the shard, and where in the whole tensor.
    """
    here = [whole_box(shard) if box is None else box]
    for cut in cuts:
        here = [part for each in here for part in _at_blocks(each, cut.dim, shard[cut.dim] // cut.blocks)]
    for each in here:
        offsets = list(each.offsets)
        for cut in cuts:
            size = shard[cut.dim] // cut.blocks  # of this rank's part of a block
            block, inside = divmod(each.offsets[cut.dim], size) if size else (0, 0)
            offsets[cut.dim] = (block * cut.ranks + cut.rank) * size + inside
        yield each, Box(tuple(offsets), each.sizes)


def _at_blocks(box: Box, dim: int, size: int) -> Iterator[Box]:
    """Cut a box where one part of a block ends and the next begins."""
    start, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield Box(_with(box.offsets, dim, start), _with(box.sizes, dim, stop - start))
        start = stop


def halves(box: Box, dim: int) -> tuple[Box, Box]:
    """Cut a box in two along a dimension, the first half being the larger one."""
    first = -(-box.sizes[dim] // 2)
    rest = Box(
        _with(box.offsets, dim, box.offsets[dim] + first), _with(box.sizes, dim, box.sizes[dim] - first)
    )
    return Box(box.offsets, _with(box.sizes, dim, first)), rest


def within(box: Box, shape: Sequence[int]) -> Box | None:
    """The part of `box` that lies in a tensor of shape `shape`; None where nothing does."""
    sizes = tuple(
        min(size, max(n - at, 0)) for at, size, n in zip(box.offsets, box.sizes, shape, strict=True)
    )
    return Box(box.offsets, sizes) if prod(sizes) else None


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
