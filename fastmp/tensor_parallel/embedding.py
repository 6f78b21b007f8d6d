"""An embedding table whose rows are sharded over a tensor-parallel group (vocabulary parallelism)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fastmp.distributed.collectives import reduce_from_group_, reduce_scatter_sequence
from fastmp.distributed.rng import RngTracker
from fastmp.ops.core.registry import can_read_values
from fastmp.tensor_parallel.attributes import ParallelAttributes
from fastmp.tensor_parallel.layers import InitMethod, ParallelModule

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(ParallelModule):
    """An embedding table (num_embeddings, embedding_dim) whose rows are sharded over `group`.

    Rank r holds rows [r * num_embeddings/P, (r+1) * num_embeddings/P). Input: ids of any shape (int64), the
    same on every rank; output (*ids.shape, embedding_dim), the same on every rank. With `sequence_parallel`
    ids (S, B) give this rank's sequence shard (S/P, B, embedding_dim). A rank contributes zeros for ids
    outside its rows, and the contributions are all-reduced (reduce-scattered). The row of `padding_idx`,
    which `from_embedding` sets, has no gradient. Options: see `ColumnParallelLinear`; the default
    `init_method` is N(0, 1).

    Raises:
        ValueError: P does not divide num_embeddings; on a CPU, an id outside [0, num_embeddings). On a GPU
            such an id is a device-side assertion, as in nn.Embedding.

    Example:
        >>> table = VocabParallelEmbedding(16, 8, group=None)
        >>> table(torch.tensor([[0, 15]])).shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: dist.ProcessGroup | None,
        sequence_parallel: bool = False,
        init_method: InitMethod | None = None,
        init: str = "full",
        rng: RngTracker | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx: int | None = None
        self.sequence_parallel = sequence_parallel
        self.pipeline_shared = self.pipeline_replica = False
        part = self._part("num_embeddings", num_embeddings)
        self.vocab_start, self.vocab_end = self.tp_rank * part, (self.tp_rank + 1) * part
        self.weight = nn.Parameter(torch.empty(part, embedding_dim, device=device, dtype=dtype))
        self._mark()
        self._init_weight((num_embeddings, embedding_dim), init_method or nn.init.normal_, init, rng)

    def _marks(self) -> dict[str, ParallelAttributes]:
        shared, replica = self.pipeline_shared, self.pipeline_replica
        return {"weight": ParallelAttributes(True, 0, pipeline_shared=shared, pipeline_replica=replica)}

    def mark_pipeline_shared(self, *, replica: bool) -> None:
        """Mark the table as shared with another pipeline stage; `replica`: that stage counts it in sums."""
        self.pipeline_shared, self.pipeline_replica = True, replica
        self._mark()

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, group: dist.ProcessGroup | None, **options: Any
    ) -> VocabParallelEmbedding:
        """Return a table with this rank's rows of `embedding`; same dtype and device, no memory shared.

        Raises:
            ValueError: `embedding` uses max_norm, scale_grad_by_freq or sparse, which are not supported.
        """
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, name, None)
            if value is not None and value is not False:
                raise ValueError(f"{cls.__name__}.from_embedding: {name}={value!r} is not supported")
        layer = cls(
            *embedding.weight.shape, group=group, device="meta", dtype=embedding.weight.dtype, **options
        )
        layer._take(embedding, weight=embedding.weight)
        layer.padding_idx = embedding.padding_idx
        return layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if can_read_values(ids):
            self._check(ids)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - self.vocab_start if self.vocab_start <= padding < self.vocab_end else None
        if self.tp_size == 1:
            return F.embedding(ids, self.weight, padding)
        # 1. Mask ids of other ranks. The first rank keeps ids below 0 and the last those beyond the table:
        #    they fail in the lookup.
        if self.tp_rank == 0:
            outside = ids >= self.vocab_end
        elif self.tp_rank == self.tp_size - 1:
            outside = ids < self.vocab_start
        else:
            outside = (ids < self.vocab_start) | (ids >= self.vocab_end)
        # 2. Look up this rank's rows, zeros elsewhere. 3. Sum over the group.
        rows = F.embedding((ids - self.vocab_start).masked_fill(outside, 0), self.weight, padding)
        rows.masked_fill_(outside.unsqueeze(-1), 0)
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_group_)(rows, self.group)

    def _check(self, ids: torch.Tensor) -> None:
        if ids.numel():
            low, high = (int(bound) for bound in ids.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"VocabParallelEmbedding: token id {low if low < 0 else high} is outside "
                    f"the vocabulary of {self.num_embeddings}"
                )

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"sequence_parallel={self.sequence_parallel}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )
