"""FP8 copies of sharded weights: every rank quantises its shard, and ranks gather bytes (ZeRO-1).

What comes out are, byte for byte, the copies that `quantize_weight` makes of the gathered weights, for half
the traffic of BF16. A shard may begin and end anywhere in a weight, so a tile of block x block elements may
lie on several ranks. After all ranks have updated their shards:

1. Find the largest magnitude of every tile among this rank's elements.
2. All-reduce the magnitudes over the ranks that share the buffer, as one MAX of their bits: NaN and infinity
   are larger than all numbers. All ranks have all scales then.
3. Cast this rank's elements of a bucket with these scales.
4. All-gather the bytes of the bucket, of which the copies are views.
5. Transpose the bytes; write dequantised numbers to the parts of the weights that other ranks own.

A rank's own part of a weight keeps its numbers: in float32 it is the master weight.

A weight is a matrix (R, K) of all rows, those of experts one below the other, and has (R / B, K / B) tiles of
B x B elements. Elements are counted in the flattened weight, ranges are (first, one past the last).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.distributed.collectives import all_reduce_
from fastmp.ops import dequantize_rows
from fastmp.ops.core import fp8
from fastmp.ops.core.fp8 import E4M3, BlockScales, block_scales
from fastmp.optim.grad_buffers import FlatBuffer

__all__ = ["Fp8Shards", "cast_", "dequantize_outside_", "tile_amax_"]

Range = tuple[int, int]
_AT_ONCE = 1 << 24  # elements, which bounds temporary memory


def _parts(elements: Range, span: int) -> Iterator[tuple[Range, Range]]:
    """Cut `elements` at rows of tiles, each of `span` elements: yield (elements, range of rows of tiles).

    Whole rows of tiles come several at a time.
    """
    start, end = elements
    while start < end:
        row = start // span
        if start % span or end - start < span:
            stop = min(end, (row + 1) * span)
        else:
            stop = start + span * max(1, min(end - start, _AT_ONCE) // span)
        yield (start, stop), (row, -(-stop // span))
        start = stop


def _tiled(part: Tensor, first: int, columns: int, block: int) -> Tensor:
    """Return `part`, flat elements from `first` on, as tiles (rows, B, K / B, B).

    It is whole rows of tiles, or lies in one: then the rest of that is zero.
    """
    span = block * columns
    if part.numel() % span:
        padded = part.new_zeros(span)
        padded[first % span :][: part.numel()] = part
        part = padded
    return part.view(-1, block, columns // block, block)


def tile_amax_(amax: Tensor, own: Tensor, elements: Range, columns: int, block: int) -> None:
    """Write the largest magnitude of each tile in a rank's part of a weight.

    Args:
        amax: (R / B, K / B) int32, bits of float32; tiles outside of the part are left alone.
        own: (last - first,), the part.
        elements: its range in the flattened weight.
        columns: K.
        block: B.
    """
    for (start, end), (first, last) in _parts(elements, block * columns):
        tiles = _tiled(own[start - elements[0] : end - elements[0]], start, columns, block)
        largest = torch.linalg.vector_norm(tiles, math.inf, (1, 3)).to(torch.float32)
        amax[first:last] = largest.view(torch.int32) & 0x7FFFFFFF


def cast_(q: Tensor, own: Tensor, elements: Range, columns: int, scales: BlockScales) -> None:
    """Write the FP8 bytes of a rank's part of a weight, with the scales of its tiles.

    Args:
        q: (last - first,) uint8.
        own, elements, columns: as for `tile_amax_`.
        scales: each (R / B, K / B).
    """
    block = columns // scales.bad.shape[1]
    for (start, end), (first, last) in _parts(elements, block * columns):
        part = slice(start - elements[0], end - elements[0])
        tiles = _tiled(own[part], start, columns, block)
        tiles = tiles.float() if tiles.dtype == torch.float64 else tiles
        factors = (each[first:last, None, :, None] for each in (scales.first, scales.second))
        # No number exceeds the largest, which torch's cast would not clamp.
        scaled = (tiles * next(factors)).mul_(next(factors)).to(E4M3).view(torch.uint8)
        scaled.masked_fill_(scales.bad[first:last, None, :, None], fp8.NAN)
        q[part] = scaled.view(-1)[start - first * block * columns :][: end - start]


def dequantize_outside_(weight: Tensor, q: Tensor, s: Tensor, elements: Range) -> None:
    """Write dequantised numbers to a flat `weight` (R * K,), but not to its `elements`.

    Args:
        q: (R, K), e4m3.
        s: (R / B, K / B), the scales as stored.
    """
    columns, block = q.shape[1], q.shape[1] // s.shape[1]
    span, stored = block * columns, fp8.scale_bytes(s)
    for outside in ((0, elements[0]), (elements[1], weight.numel())):
        for (start, end), (first, last) in _parts(outside, span):
            of_rows = stored[first:last].repeat_interleave(block, 0).view(s.dtype)
            rows = q[first * block : last * block]
            values = dequantize_rows(rows, of_rows, dtype=weight.dtype)
            weight[start:end] = values.view(-1)[start - first * span :][: end - start]


class _Weight(NamedTuple):
    """The place of a weight: elements and tiles of the buffer, the shape of the matrix, this rank's part."""

    elements: Range
    tiles: Range
    rows: int
    columns: int
    own: Range


class Fp8Shards:
    """The FP8 copies of a buffer's weights, and this rank's shares of them.

    Args:
        grads: the buffer, whose `copies` get their memory here.
        params: (layout.size,), the flat weights.
    """

    def __init__(self, grads: FlatBuffer, params: Tensor) -> None:
        self._grads, self._params, self._block = grads, params, grads.plan.fp8
        self._q = torch.zeros(grads.layout.size, dtype=torch.uint8, device=params.device)
        stored = fp8.SCALE[self._block]
        self._s = torch.zeros(grads.plan.num_tiles * stored.itemsize, dtype=torch.uint8, device=params.device)
        self._s = self._s.view(stored)
        self._scales: BlockScales | None = None
        self._weights: dict[str, _Weight] = {}
        for name, param in grads.parameters.items():
            *lead, rows, columns = param.shape
            piece = grads.pieces.get(name)
            place = _Weight(
                grads.layout.ranges[name],
                grads.plan.tiles[name],
                math.prod(lead) * rows,
                columns,
                (0, 0) if piece is None else piece.param_range,
            )
            self._weights[name] = place
            q = self._q[slice(*place.elements)].view(E4M3).view(param.shape)
            s = self._s[slice(*place.tiles)].view(*lead, rows // self._block, columns // self._block)
            q_t = torch.zeros(*lead, columns, rows, dtype=torch.uint8, device=params.device).view(E4M3)
            grads.copies[name].place(q, q_t, s)

    def bucket(self, number: int) -> Tensor:
        """Return the bytes of a bucket, flat."""
        bucket = self._grads.layout.buckets[number]
        return self._q[bucket.start : bucket.end]

    def start_scales(self) -> tuple[Tensor, dist.Work | None]:
        """Find the tiles' magnitudes and start their all-reduce (1. and 2.), for `set_scales`."""
        amax = torch.zeros(self._s.shape, dtype=torch.int32, device=self._s.device)
        for weight in self._weights.values():
            tile_amax_(
                self._of_tiles(amax, weight), self._own(self._params, weight), weight.own, weight.columns,
                self._block,
            )  # fmt: skip
        assert self._grads.group is not None, "several ranks share the buffer"
        return amax, all_reduce_(amax, self._grads.group, overlap=True, op=dist.ReduceOp.MAX)

    def set_scales(self, amax: Tensor, work: dist.Work | None) -> None:
        """Wait for the magnitudes, and compute the scales of all tiles."""
        if work is not None:
            work.wait()
        self._scales = block_scales(amax, self._block, E4M3)
        fp8.scale_bytes(self._s).copy_(fp8.scale_bytes(self._scales.s))

    def cast(self, number: int) -> None:
        """Cast this rank's shard of a bucket with the scales that were set (3.)."""
        assert self._scales is not None, "set_scales comes first"
        for name in self._grads.layout.buckets[number].names:
            weight = self._weights[name]
            scales = BlockScales(*(self._of_tiles(each, weight) for each in self._scales))
            own = self._own(self._params, weight)
            cast_(self._own(self._q, weight), own, weight.own, weight.columns, scales)

    def end_cast(self) -> None:
        """Forget the scales of the cast."""
        self._scales = None

    @torch.no_grad()
    def arrived(self, number: int) -> None:
        """Make the other copies and the parameters those of a gathered bucket (5.)."""
        for name in self._grads.layout.buckets[number].names:
            weight, copies = self._weights[name], self._grads.copies[name]
            q, q_t, _ = copies.tensors
            q_t.view(torch.uint8).copy_(q.view(torch.uint8).transpose(-1, -2))
            flat = self._params[slice(*weight.elements)]
            scales = self._of_tiles(self._s, weight)
            dequantize_outside_(flat, q.view(weight.rows, weight.columns), scales, weight.own)
            copies.mark_fresh(self._grads.parameters[name])

    def _of_tiles(self, flat: Tensor, weight: _Weight) -> Tensor:
        """Return the part (R / B, K / B) of one weight of a tensor with a number for each tile."""
        return flat[slice(*weight.tiles)].view(weight.rows // self._block, weight.columns // self._block)

    def _own(self, flat: Tensor, weight: _Weight) -> Tensor:
        """Return this rank's elements of one weight of a flat buffer."""
        return flat[weight.elements[0] + weight.own[0] : weight.elements[0] + weight.own[1]]
