"""Sums, means and broadcasts over the sequences of a batch, padded or packed.

B sequences, S tokens of a padded sequence, N packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core.checks import check_same_device, check_shape, require
from fastmp.ops.core.registry import can_read_values, compute_dtype

# The log-probability of a token of probability zero is minus this, and has no gradient: sums of any number of
# tokens, and differences of sums, stay finite.
LOG_PROB_LIMIT = 1e30


def finite_log_probs(log_probs: Tensor) -> Tensor:
    """Return log-probabilities in float32 (float64), with a finite number in place of -inf."""
    return log_probs.to(compute_dtype(log_probs.dtype)).clamp(-LOG_PROB_LIMIT, LOG_PROB_LIMIT)


class Sequences:
    """Tokens of B sequences, of which those in `mask` count.

    Args:
        name: of the function that reports errors.
        mask: bool, (B, S), or (N,) if the sequences are packed.
        cu_seqlens: (B + 1,) integers of packed sequences: sequence i has tokens [cu[i], cu[i + 1]).
    """

    def __init__(self, name: str, mask: Tensor, cu_seqlens: Tensor | None) -> None:
        require(mask.dtype == torch.bool, "{}: expected a bool mask, got {}", name, mask.dtype)
        require(
            mask.dim() == (2 if cu_seqlens is None else 1),
            "{}: expected mask (B, S), or (N,) with cu_seqlens (B + 1,), got {} {} cu_seqlens",
            *(name, mask.shape, "without" if cu_seqlens is None else "with"),
        )
        self.name, self.mask, self.lengths = name, mask, None
        if cu_seqlens is not None:
            check_same_device(name, mask=mask, cu_seqlens=cu_seqlens)
            if can_read_values(cu_seqlens):
                ends = cu_seqlens.tolist()
                require(
                    ends[:1] == [0] and ends == sorted(ends) and ends[-1] == len(mask),
                    "{}: cu_seqlens must rise from 0 to the {} tokens of mask, got {}",
                    *(name, len(mask), ends),
                )
            self.lengths = cu_seqlens.diff().long()
        self.counts = self._sum(mask.float())  # (B,) tokens that count
        self.live = self.counts > 0  # (B,) sequences with a token that counts

    def masked(self, **tensors: Tensor) -> list[Tensor]:
        """Return tensors of tokens in float32 (float64), with zeros outside the mask, whatever was there."""
        check_shape(self.name, self.mask.shape, to=("mask", self.mask), **tensors)
        check_same_device(self.name, mask=self.mask, **tensors)
        return [x.to(compute_dtype(x.dtype)).where(self.mask, 0) for x in tensors.values()]

    def log_probs(self, **tensors: Tensor) -> list[Tensor]:
        """Return log-probabilities of tokens as `masked`, with a finite number in place of -inf."""
        return [finite_log_probs(x) for x in self.masked(**tensors)]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sums (B,) of the tokens x over the mask."""
        return self._sum(x.where(self.mask, 0))

    def mean(self, x: Tensor) -> Tensor:
        """Return the means (B,) of the tokens x over the mask, zero for a sequence without any."""
        return self.sum(x) / self.counts.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Give the value (B,) of its sequence to every token."""
        if self.lengths is None:
            return values[:, None].expand(self.mask.shape)
        return values.repeat_interleave(self.lengths, output_size=len(self.mask))

    def token_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over all tokens of the mask, zero if there are none."""
        return self._sum(x.where(self.mask, 0)).sum() / self.counts.sum().clamp(min=1)

    def sequence_mean(self, values: Tensor, live: Tensor | None = None) -> Tensor:
        """Return the mean of values (B,) over sequences that are live, zero if there are none."""
        live = self.live if live is None else live
        return values.where(live, 0).sum() / live.sum().clamp(min=1)

    def per_sequence(self, **tensors: Tensor) -> None:
        """Raise ValueError unless the tensors are (B,)."""
        for name, x in tensors.items():
            require(
                x.shape == self.counts.shape,
                "{}: expected {} of shape {}, one for each sequence, got {}",
                *(self.name, name, self.counts.shape, x.shape),
            )

    def _sum(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            return x.sum(1)
        # in the order of the tokens, unlike index_add_ on a GPU
        return torch.segment_reduce(x, "sum", lengths=self.lengths, unsafe=True, initial=0)
