"""Read checkpoints of any layout as full tensors, and compare them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastmp.training.checkpoint.format import DTYPES
from fastmp.training.checkpoint.storage import CheckpointReader, ShardedTensorRef, ShardLoadPlanner

__all__ = ["differences", "fill_shards", "read_tensor"]


def read_tensor(reader: CheckpointReader, name: str) -> Tensor:
    """Return one full tensor of a checkpoint, on the CPU."""
    saved = reader.manifest.tensors[name]
    tensor = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
    fill_shards(reader, name, ShardedTensorRef.whole(tensor))
    return tensor


def fill_shards(reader: CheckpointReader, name: str, ref: ShardedTensorRef) -> None:
    """Read into the shards of one tensor of a checkpoint."""
    planner = ShardLoadPlanner()
    planner.set_up_planner({name: ref}, reader.read_metadata([name]))
    reader.read_data(planner.create_local_plan(), planner)


def differences(first: Path, second: Path, *, random: bool = False) -> Iterator[str]:
    """Yield a line for each tensor in which two checkpoints differ by a bit.

    random: True to compare random states, too, which belong to ranks and not to the model.
    """
    readers = CheckpointReader(first), CheckpointReader(second)
    both = [reader.manifest.tensors for reader in readers]
    if readers[0].manifest.step != readers[1].manifest.step:
        yield f"step: {readers[0].manifest.step} and {readers[1].manifest.step}"
    for name in sorted({*both[0], *both[1]}):
        if name.startswith("random/") and not random:
            continue
        forms = [
            f"{tensors[name].dtype} {tensors[name].shape}" if name in tensors else "nothing"
            for tensors in both
        ]
        if forms[0] != forms[1]:
            yield f"{name}: {forms[0]} and {forms[1]}"
            continue
        a, b = (read_tensor(reader, name) for reader in readers)
        if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            count, apart = int((a != b).sum()), (a.double() - b.double()).abs().max().item()
            yield f"{name}: {count} of {a.numel()} elements differ, by at most {apart:.3g}"
