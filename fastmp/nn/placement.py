"""Placement of a module: the process groups that shard it, its device and dtype, how weights are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastmp.config import ParallelConfig
from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Process groups, device, dtype and initialisation of a module: its second argument; default: one rank.

    Args:
        groups: process groups of this rank.
        sequence_parallel: between tensor-parallel regions a rank holds (S/TP, B, H), its slice of the
            sequence.
        rng: random streams, required where ranks must draw different numbers: dropout and jitter over several
            ranks, and init="sharded".
        init: "full" (initial weights are bitwise the same on any layout) or "sharded" (a rank draws its
            shard).
        device, dtype: of the parameters; None: torch's defaults.
        overlap_rows: from this many rows on, GEMMs under sequence parallelism are fused with their
            communication, see `ColumnParallelLinear`; None: never.
        fp8: linear layers of attention and MLPs, and experts, multiply in FP8 by this recipe; None: in their
            dtype.
        recompute_kv: latent attention keeps latents, and makes keys and values again in backward.

    Raises:
        ValueError: another `init`.

    Example:
        >>> from fastmp.config import GPTConfig
        >>> from fastmp.nn import GPT
        >>> on = Placement(dtype=torch.bfloat16, device="cpu")
        >>> GPT(GPTConfig(vocab_size=64), on).output_weight.dtype
        torch.bfloat16
    """

    groups: ParallelGroups = ParallelGroups.alone()
    sequence_parallel: bool = False
    rng: RngTracker | None = None
    init: str = "full"
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    overlap_rows: int | None = None
    fp8: Fp8Recipe | None = None
    recompute_kv: bool = False

    @classmethod
    def of(cls, groups: ParallelGroups, layout: ParallelConfig, **options: Any) -> Placement:
        """Return the placement for the parallel layout `layout`. options: the other fields."""
        rows = layout.tp_overlap_rows if layout.tp_overlap else None
        options = {"recompute_kv": layout.recompute_kv, **options}
        return cls(groups, layout.sequence_parallel, overlap_rows=rows, **options)

    def __post_init__(self) -> None:
        if self.init not in ("full", "sharded"):
            raise ValueError(f'Placement: init is "full" or "sharded", got {self.init!r}')

    @property
    def tensor_options(self) -> dict[str, Any]:
        """Keywords for new tensors: device and dtype."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def layer_options(self) -> dict[str, Any]:
        """Keywords for an embedding that is sharded over `groups.tp`."""
        return {
            "group": self.groups.tp,
            "sequence_parallel": self.sequence_parallel,
            "init": self.init,
            "rng": self.rng,
            **self.tensor_options,
        }

    @property
    def linear_options(self) -> dict[str, Any]:
        """Keywords for linear layers that are sharded over `groups.tp`."""
        return {"overlap_rows": self.overlap_rows, "fp8": self.fp8, **self.layer_options}
