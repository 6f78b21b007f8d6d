"""Compare two checkpoints, saved with any layouts, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fastmp.training.checkpoint.storage import CheckpointReader

__all__ = ["differences"]


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
        a, b = (reader.tensor(name) for reader in readers)
        if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            count, apart = int((a != b).sum()), (a.double() - b.double()).abs().max().item()
            yield f"{name}: {count} of {a.numel()} elements differ, by at most {apart:.3g}"
