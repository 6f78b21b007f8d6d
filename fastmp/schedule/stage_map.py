"""Stage map: the pipeline rank and the chunk of each stage. Standard library only.

A model is partitioned into pp * vpp stages. They are placed on the ranks in one of two shapes, here for pp 3
and vpp 2:

    looped (every chunk starts at rank 0)      v (every second chunk goes back up the ranks)
    rank 0   stages 0, 3                       rank 0   stages 0, 5
    rank 1   stages 1, 4                       rank 1   stages 1, 4
    rank 2   stages 2, 5                       rank 2   stages 2, 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastmp.config.specs import PLACEMENTS

__all__ = ["StageMap"]

T = TypeVar("T")


@dataclass(frozen=True)
class StageMap:
    """Placement of the stages of a model on pipeline ranks.

    Args:
        pp: pipeline ranks.
        vpp: chunks of the model on each rank.
        placement: "looped": stage chunk * pp + rank is chunk `chunk` of rank `rank`. "v": the same for even
            chunks, while odd chunks run from the last rank to the first. The first and the last stage are
            then both on rank 0, and neighbouring chunks meet on a rank, without a message.

    Raises:
        ValueError: an unknown placement.

    Example:
        >>> [StageMap(4, 2, "v").stages(rank) for rank in range(4)]
        [(0, 7), (1, 6), (2, 5), (3, 4)]
    """

    pp: int
    vpp: int = 1
    placement: str = "looped"

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"StageMap: expected placement {' or '.join(map(repr, PLACEMENTS))}, got {self.placement!r}"
            )

    def __len__(self) -> int:
        """Return the number of stages."""
        return self.pp * self.vpp

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return len(self) - 1

    def stage(self, rank: int, chunk: int) -> int:
        """Return the number of the stage that is chunk `chunk` of rank `rank`."""
        return chunk * self.pp + (self.pp - 1 - rank if self._goes_back(chunk) else rank)

    def rank(self, stage: int) -> int:
        """Return the rank of a stage."""
        place = stage % self.pp
        return self.pp - 1 - place if self._goes_back(self.chunk(stage)) else place

    def chunk(self, stage: int) -> int:
        """Return the number of a stage among those of its rank."""
        return stage // self.pp

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order of its chunks."""
        return tuple(self.stage(rank, chunk) for chunk in range(self.vpp))

    def of_rank(self, of_stages: Sequence[T], rank: int) -> list[T]:
        """Return the elements of a rank's stages, in order of its chunks, from one element for each stage."""
        return [of_stages[stage] for stage in self.stages(rank)]

    @property
    def ends_meet(self) -> bool:
        """True if one rank has both the first and the last stage."""
        return self.rank(0) == self.rank(self.last)

    def without_parameters(self, layers: Sequence[int]) -> list[int]:
        """Return the ranks without a layer, embedding or final norm; layers: how many each stage has."""
        ends = {self.rank(0), self.rank(self.last)}
        return [rank for rank in range(self.pp) if rank not in ends and not any(self.of_rank(layers, rank))]

    def _goes_back(self, chunk: int) -> bool:
        return self.placement == "v" and chunk % 2 == 1
