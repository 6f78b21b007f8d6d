"""Published weights in low precision: checked, and dequantised a chunk at a time while they are read.

- "fp8" (DeepSeek-V3, Kimi K2): a weight (..., rows, columns) in e4m3 beside `NAME_scale_inv`, a factor for
  each block of `weight_block_size`. The last blocks may be smaller.
- "mxfp4" (GPT-OSS): a weight (experts, rows, columns) as `NAME_blocks` (experts, rows, columns / 32, 16),
  bytes with two e2m1 numbers each, the first in the low four bits, beside `NAME_scales` (experts, rows,
  columns / 32), exponents of two plus 127. Rows are output features: the transpose of transformers' weight.

Products of FP8 with its factors are made in float32 and rounded to the dtype of the model. Those of MXFP4
are exact in BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastmp.hf.config_json import Quantization
from fastmp.hf.stored import LOW_PRECISION, Shape, Stored, check_shape, opened
from fastmp.training.checkpoint.chunks import TensorChunk
from fastmp.training.checkpoint.tensor_files import ChunkReader

__all__ = ["QuantizedTensor", "find_quantized"]

_GROUP = 32  # MXFP4 numbers of a scale
_SCALES = ("F32", "BF16", "F16")  # of FP8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNED = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16, device="cpu")
# both numbers of each byte as the bits of an int32, (256,), which one index_select reads
_PAIRS = torch.stack([_SIGNED.repeat(16), _SIGNED.repeat_interleave(16)], -1).view(torch.int32).flatten()


class QuantizedTensor(NamedTuple):
    """A weight in low precision.

    values, scales: its two tensors.
    shape: of the dequantised weight, in the layout of its values.
    block: rows and columns that share a scale.
    """

    values: Stored
    scales: Stored
    shape: Shape
    block: tuple[int, int]

    @property
    def mxfp4(self) -> bool:
        """True if values are bytes of two numbers, and the transpose of transformers' weight."""
        return len(self.values.shape) > len(self.shape)

    def read(self, path: Path, chunk: TensorChunk) -> Tensor:
        """Return the numbers of `chunk` in float32 (MXFP4: BF16), from the files in the directory `path`."""
        blocks = _scales_of(chunk, self.block)
        scales = _read(path, self.scales, blocks)
        if not self.mxfp4:
            return _scale_blocks(_read(path, self.values, chunk).float(), scales.float(), chunk, self.block)
        groups = TensorChunk((*blocks.offsets, 0), (*blocks.sizes, _GROUP // 2))
        packed = _read(path, self.values, groups)
        first = chunk.offsets[-1] % _GROUP
        out = torch.empty(chunk.sizes, dtype=torch.bfloat16)
        for own, codes, exponents in zip(out, packed, scales, strict=True):  # an expert at a time
            own.copy_(_from_mxfp4(codes, exponents)[:, first : first + chunk.sizes[-1]])
        return out


def _read(path: Path, stored: Stored, chunk: TensorChunk) -> Tensor:
    with opened(path / stored.file) as file:
        return stored.read(ChunkReader(file), chunk)


def _scales_of(chunk: TensorChunk, block: tuple[int, int]) -> TensorChunk:
    """Return the chunk of scales that covers `chunk`."""
    offsets, sizes = list(chunk.offsets), list(chunk.sizes)
    for dim, size in ((-2, block[0]), (-1, block[1])):
        offsets[dim] = chunk.offsets[dim] // size
        sizes[dim] = -(-(chunk.offsets[dim] + chunk.sizes[dim]) // size) - offsets[dim]
    return TensorChunk(tuple(offsets), tuple(sizes))


def _scale_blocks(values: Tensor, scales: Tensor, chunk: TensorChunk, block: tuple[int, int]) -> Tensor:
    """Multiply the values of a chunk in place by the scales of its blocks, a row of blocks at a time."""
    rows, columns = block
    skipped, first = chunk.offsets[-2] % rows, chunk.offsets[-1] % columns
    for number in range(scales.shape[-2]):
        factors = scales[..., number, :].repeat_interleave(columns, -1)[..., first : first + values.shape[-1]]
        own = values[..., max(0, number * rows - skipped) : (number + 1) * rows - skipped, :]
        own *= factors.unsqueeze(-2)
    return values


def _from_mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return BF16 numbers (rows, columns) of bytes (rows, groups, 16) and biased exponents (rows, groups)."""
    pairs = _PAIRS.index_select(0, codes.flatten().int())
    numbers = pairs.view(torch.bfloat16).view(*exponents.shape, _GROUP)
    numbers *= (exponents - 127.0).exp2().bfloat16()[..., None]
    return numbers.flatten(-2)


def find_quantized(
    path: Path,
    quantization: Quantization | None,
    find: Callable[[str], Stored | None],
    name: str,
    shape: Shape,
) -> QuantizedTensor | None:
    """Return the weight `name` of transformers if it is stored in low precision.

    Args:
        path: the directory, for messages.
        quantization: of its config.json.
        find: returns a stored tensor by its name.
        name: of the weight.
        shape: of the weight in transformers.

    Raises:
        ValueError: values or scales have another shape or dtype, or scales are missing; config.json says
            nothing of them.
    """
    method = None if quantization is None else quantization.method
    values, packed = find(name), find(f"{name}_blocks")
    if values is not None and values.dtype in LOW_PRECISION:
        if quantization is None or method != "fp8" or len(shape) < 2:
            raise ValueError(
                f"{path / values.file}: {name} is {values.dtype}, which fastmp reads of a matrix where "
                'config.json has a quantization_config of "fp8"'
            )
        check_shape(path, name, values, shape)
        rows, columns = quantization.block
        wanted = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
        what = f"a factor for each block of {rows} x {columns}"
        scales = _scales(path, find, f"{name}_scale_inv", wanted, _SCALES, what)
        return QuantizedTensor(values, scales, shape, quantization.block)
    if packed is None or method != "mxfp4" or len(shape) != 3:
        return None
    experts, columns, rows = shape
    if columns % _GROUP:
        raise ValueError(f"{path}: {name} has {columns} columns, which are no whole groups of {_GROUP}")
    groups = (experts, rows, columns // _GROUP)
    _check(path, f"{name}_blocks", packed, (*groups, _GROUP // 2), ("U8",), "16 bytes for 32 numbers")
    scales = _scales(path, find, f"{name}_scales", groups, ("U8",), "an exponent for each 32 numbers")
    return QuantizedTensor(packed, scales, (experts, rows, columns), (1, _GROUP))


def _scales(
    path: Path,
    find: Callable[[str], Stored | None],
    name: str,
    shape: Shape,
    dtypes: tuple[str, ...],
    what: str,
) -> Stored:
    scales = find(name)
    if scales is None:
        raise ValueError(f"{path}: {name} is missing, expected {list(shape)}: {what}")
    _check(path, name, scales, shape, dtypes, what)
    return scales


def _check(path: Path, name: str, stored: Stored, shape: Shape, dtypes: tuple[str, ...], what: str) -> None:
    if stored.dtype not in dtypes:
        raise ValueError(
            f"{path / stored.file}: {name} is {stored.dtype}, expected {' or '.join(dtypes)}: {what}"
        )
    check_shape(path, name, stored, shape, "expected", f": {what}")
