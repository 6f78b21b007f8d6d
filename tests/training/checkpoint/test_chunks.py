"""Chunks: what a rank has, in the tensors of the whole model, each element once over all ranks."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.flat_layout import shard_ranges
from fastmp.tensor_parallel.attributes import ParallelAttributes, local_shard
from fastmp.training.checkpoint import state as state_module
from fastmp.training.checkpoint import tensor_files
from fastmp.training.checkpoint.chunks import (
    Cut,
    TensorChunk,
    chunks_of_range,
    chunks_of_shard,
    clip,
    full_shape,
    is_inside,
)
from fastmp.training.checkpoint.format import CheckpointError, check_tiled
from fastmp.training.checkpoint.state import optimizer_shards, param_shards


def view(tensor, chunk):
    return tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_range_of_memory_is_a_few_boxes_in_its_order(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    numbers, at = torch.arange(size).view(shape), 0
    found = list(chunks_of_range(shape, start, end))
    for chunk, (first, last) in found:
        assert first == at and last - first == chunk.numel
        assert view(numbers, chunk).flatten().tolist() == list(range(start + first, start + last))
        at = last
    assert at == end - start
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_shards_are_boxes_of_the_whole_whatever_cuts_it(data):
    """Two cuts along two dimensions, of fused blocks, and a chunk of the shard."""
    cuts = [(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))) for _ in range(2)]  # blocks, ranks
    sizes = [data.draw(st.integers(1, 2)) * blocks for blocks, _ in cuts]
    shape = [size * ranks for size, (_, ranks) in zip(sizes, cuts, strict=True)]
    numbers = torch.arange(prod(shape)).view(shape)
    own = [data.draw(st.integers(0, ranks - 1)) for _, ranks in cuts]
    shard, marks = numbers, []
    for dim, (blocks, ranks) in enumerate(cuts):
        shard = local_shard(shard, dim, blocks, ranks, own[dim])
        marks.append(Cut(dim, blocks, own[dim], ranks))
    assert full_shape(shard.shape, marks) == tuple(shape)
    offsets = [data.draw(st.integers(0, size)) for size in shard.shape]
    chunk = TensorChunk(
        tuple(offsets), tuple(data.draw(st.integers(0, n - at)) for at, n in zip(offsets, shard.shape))
    )
    seen = []
    for here, there in chunks_of_shard(shard.shape, marks, chunk):
        assert torch.equal(view(shard, here), view(numbers, there))
        seen += view(shard, here).flatten().tolist()
    assert sorted(seen) == sorted(view(shard, chunk).flatten().tolist())


def test_what_is_behind_the_end_is_left_out():
    assert clip(TensorChunk((2, 0), (3, 4)), (4, 4)) == TensorChunk((2, 0), (2, 4))
    assert clip(TensorChunk((4, 0), (3, 4)), (4, 4)) is None


@pytest.mark.parametrize("strides", ["rows", "columns", "middle first"])
@pytest.mark.parametrize(
    "marks",
    [
        ParallelAttributes(),
        ParallelAttributes(True, 0, 2),
        ParallelAttributes(True, 0, 1, num_valid_rows=7),
        ParallelAttributes(True, 0, 1, num_valid_rows=3),  # the second rank has padding only
    ],
)
def test_parts_of_all_ranks_are_the_whole_parameter_and_its_state(monkeypatch, strides, marks):
    """Two tensor-parallel ranks with three ranks each that share the state; memory in another order.

    Rows that are padding are in no shard.
    """
    whole = torch.randn(8, 3, 5)
    order = {"rows": (0, 1, 2), "columns": (2, 1, 0), "middle first": (1, 2, 0)}[strides]
    state = -whole
    tp = 2 if marks.tensor_model_parallel else 1
    real = whole[: marks.num_valid_rows or None]
    found = {name: torch.full_like(real, torch.nan) for name in ("parameter", "state")}
    count = torch.zeros_like(real)
    for rank in range(tp):
        cuts = [Cut(0, marks.partition_stride, rank, tp)] if tp > 1 else []
        monkeypatch.setattr(state_module, "cuts_of", lambda param, groups, cuts=cuts: cuts)

        def laid_out(tensor, rank=rank):
            own = local_shard(tensor, 0, marks.partition_stride, tp, rank)
            inverse = [order.index(dim) for dim in range(3)]
            return own.permute(order).contiguous().permute(inverse)

        param, memory = nn.Parameter(laid_out(whole)), laid_out(state).permute(order).flatten()
        param.num_valid_rows = marks.num_valid_rows
        ref = param_shards(param, ParallelGroups.alone())
        assert ref.shape == real.shape
        for at, shard in ref.shards:
            view(found["parameter"], TensorChunk(at, tuple(shard.shape))).copy_(shard.detach())
        for (piece,) in filter(None, shard_ranges([param.numel()], 3)):
            ref = optimizer_shards(
                param, ParallelGroups.alone(), memory[slice(*piece.param_range)], piece.param_range
            )
            assert ref.shape == real.shape
            for at, shard in ref.shards:
                view(found["state"], TensorChunk(at, tuple(shard.shape))).copy_(shard)
                view(count, TensorChunk(at, tuple(shard.shape))).add_(1)
    assert torch.equal(found["parameter"], real) and torch.equal(found["state"], -real)
    assert (count == 1).all()


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([TensorChunk((0, 0), (2, 3))], "its shards have 6 elements, .* 12"),
        ([TensorChunk((0, 0), (4, 2)), TensorChunk((0, 1), (4, 1))], "overlap"),
        ([TensorChunk((0, 0), (4, 4))], "is outside of"),
        ([TensorChunk((0, 0), (2, 3)), TensorChunk((2, 0), (2, 2)), TensorChunk((1, 2), (2, 1))], "overlap"),
    ],
)
def test_chunks_that_are_not_the_whole_are_refused(chunks, said):
    with pytest.raises(ValueError, match=f"weight: .*{said}"):
        check_tiled("weight", (4, 3), chunks, ValueError)


@given(st.integers(1, 6), st.integers(1, 6), st.randoms())
@settings(max_examples=100, deadline=None)
def test_any_cut_into_boxes_is_accepted_and_any_moved_box_is_not(rows, columns, draw):
    """Cut a matrix at random again and again; then move one of the chunks."""
    chunks = [TensorChunk((0, 0), (rows, columns))]
    for _ in range(5):
        chunk = draw.choice(chunks)
        dim = draw.randrange(2)
        if chunk.sizes[dim] < 2:
            continue
        chunks.remove(chunk)
        size = draw.randrange(1, chunk.sizes[dim])
        for at, n in ((0, size), (size, chunk.sizes[dim] - size)):
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + at, n
            chunks.append(TensorChunk(tuple(offsets), tuple(sizes)))
    check_tiled("weight", (rows, columns), chunks, ValueError)
    moved = draw.randrange(len(chunks))
    offsets = list(chunks[moved].offsets)
    offsets[draw.randrange(2)] += draw.choice([-1, 1])
    chunks[moved] = TensorChunk(tuple(offsets), chunks[moved].sizes)
    if min(offsets) >= 0:
        with pytest.raises(ValueError, match=r"overlap|outside"):
            check_tiled("weight", (rows, columns), chunks, ValueError)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
@settings(max_examples=50, deadline=None)
def test_a_box_is_read_as_it_is_through_a_buffer_of_any_size(shape, data):
    """From a file, into memory of its own order or another one."""
    numbers = torch.randn(shape)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    chunk = TensorChunk(offsets, tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, offsets)))
    out = torch.zeros(chunk.sizes[::-1]).permute(*reversed(range(len(shape))))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_BUFFER", data.draw(st.sampled_from([0, 16, 1 << 20])))
        (Path(folder) / "file").write_bytes(b"head" + numbers.numpy().tobytes())
        for each in (out, out.contiguous()):
            with tensor_files.opened(Path(folder) / "file") as file:
                tensor_files.ChunkReader(file).read(4, shape, each.dtype, chunk, each)
            assert torch.equal(each, view(numbers, chunk))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
@settings(max_examples=50, deadline=None)
def test_a_box_that_is_not_in_a_tensor_is_never_read(shape, data):
    """Nor is one of other dimensions or of another dtype, which would end in the bytes of a neighbour."""
    numbers = torch.randn(shape)
    offsets = data.draw(st.tuples(*(st.integers(-1, n) for n in shape)))
    sizes = data.draw(st.tuples(*(st.integers(0, 4) for _ in shape)))
    chunk, file = TensorChunk(offsets, sizes), tensor_files.OpenFile(Path("none"), -1)
    inside = all(at >= 0 and at + size <= n for at, size, n in zip(offsets, sizes, shape))
    assert is_inside(chunk, shape) == inside
    reader, out = tensor_files.ChunkReader(file), torch.empty(sizes)
    if inside and chunk.numel:
        with pytest.raises(OSError, match="Bad file descriptor"):
            reader.read(0, shape, numbers.dtype, chunk, out)
    for other, dtype, its_shape in (
        *([] if inside else [(out, torch.float32, shape)]),
        (out, torch.float16, shape),
        (out, torch.float32, [*shape, 1]),
        (out.new_empty(9), torch.float32, shape),
    ):
        with pytest.raises(CheckpointError, match=r"expected a target|lies outside"):
            reader.read(0, its_shape, dtype, chunk, other)
