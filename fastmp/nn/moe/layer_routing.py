"""What a layer of experts replays or records, on each tensor-parallel rank.

S sequence, B batch, k chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastmp.distributed.collectives import group_rank


class Part(NamedTuple):
    """The tokens of a tensor-parallel rank: `size` positions of the sequence of S, the last ranks' fewer."""

    group: ProcessGroup | None
    S: int
    size: int


class LayerRouting:
    """The experts that a layer replays, and those that it has chosen.

    Args:
        given_SBk: experts to replay; None: all tokens choose.

    Attributes:
        records: of each forward, the experts (S, B, k) of this rank's tokens, and their part; None: nothing
            is recorded.
    """

    def __init__(self, given_SBk: Tensor | None, record: bool) -> None:
        self.given_SBk = given_SBk
        self.records: list[tuple[Tensor, Part]] | None = [] if record else None

    def experts_of(self, tokens_SBH: Tensor, top_k: int, part: Part | None) -> Tensor:
        """Return the experts (S, B, k) of this rank's tokens, -1 for tokens that choose."""
        assert part is not None
        if self.given_SBk is None:
            return tokens_SBH.new_full((*tokens_SBH.shape[:2], top_k), -1, dtype=torch.int32)
        expected = part.S, tokens_SBH.shape[1], top_k
        if self.given_SBk.shape != expected:
            S, B, k = self.given_SBk.shape
            raise ValueError(
                f"routing: expected the experts of {expected[1]} sequences of {expected[0]} tokens, "
                f"{expected[2]} of each, got {B} sequences of {S} tokens, {k} of each"
            )
        first = group_rank(part.group) * part.size
        return self.given_SBk[first : first + part.size].to(torch.int32)

    def add(self, indices_SBk: Tensor, part: Part | None) -> None:
        """Record what was chosen."""
        if self.records is not None:
            assert part is not None
            self.records.append((indices_SBk.detach().clone(), part))
