"""The key/value cache for autoregressive generation.

The first forward takes prompts and stores their keys and values (prefill). Each later forward takes one token
a row, or a few consecutive ones, at the row's position, and attends to everything stored (decode). All shapes
are fixed, so that a CUDA graph can hold a decode step.

Shapes: S sequence, B batch, T places of a row, G key/value heads of this rank, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastmp.nn.documents import Positions

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """Keys and values (B, T, G, D) of every attention layer called with `cache=`, in order of position.

    Layers with latent attention keep one latent (B, T, 1, C + P) for all heads.

    Args:
        places: T, the most tokens of a row. Prompts are padded on the right, so that a token's position is
            its column; entries of padding are never attended to, and later tokens overwrite them.

    Attributes:
        positions: (B, S) of the tokens of the next forward; None: prompts, from position 0 on.

    Example:
        >>> from fastmp.config import GPTConfig
        >>> from fastmp.nn import SelfAttention
        >>> cache = KeyValueCache(16)
        >>> attention = SelfAttention(GPTConfig(hidden_size=64, num_heads=4)).eval()
        >>> with torch.no_grad():
        ...     _ = attention(torch.randn(3, 2, 64), cache=cache)  # prompts of 3 tokens
        ...     cache.follow(torch.tensor([3, 3]))
        ...     output, _ = attention(torch.randn(1, 2, 64), cache=cache)  # the next token of each row
    """

    def __init__(self, places: int) -> None:
        self.places, self.columns = places, places
        self.positions: Positions | None = None
        self._held: dict[nn.Module, tuple[Tensor, ...]] = {}

    def follow(self, lengths_B: Tensor, columns: int | None = None, tokens: int = 1) -> None:
        """Let the next forward take `tokens` of each row, after `lengths_B` (int64) tokens of the row.

        columns: the most tokens of a row after that; attention skips other places. None: T.
        """
        self.positions = Positions(lengths_B.unsqueeze(1) + torch.arange(tokens, device=lengths_B.device))
        self.columns = self.places if columns is None else columns

    def append(self, attention: nn.Module, *new_SBGD: Tensor) -> tuple[Tensor, ...]:
        """Store keys and values, or latents, of new tokens; return those of all columns (B, G, columns, D).

        Raises ValueError for prompts longer than T.
        """
        if self.positions is None:
            S, B = new_SBGD[0].shape[:2]
            if S > self.places:
                raise ValueError(f"KeyValueCache: prompts of {S} tokens do not fit {self.places} places")
            held = tuple(new.new_zeros(B, self.places, *new.shape[2:]) for new in new_SBGD)
            for whole, new in zip(held, new_SBGD, strict=True):
                whole[:, :S] = new.transpose(0, 1)
            self._held[attention] = held
        held = self._held[attention]
        if self.positions is not None:
            places_n = self.positions.once("places", self._own_places)
            for whole, new in zip(held, new_SBGD, strict=True):
                whole.flatten(0, 1).index_copy_(0, places_n, new.transpose(0, 1).flatten(0, 1))
        return tuple(whole[:, : self.columns].transpose(1, 2) for whole in held)

    def seen(self, window: int | None) -> Tensor:
        """Return the boolean mask (B, 1, S, columns) of places to attend to, at most `window` of them."""
        assert self.positions is not None
        return self.positions.once(("seen", window), lambda: self._seen(window))

    def _own_places(self) -> Tensor:
        """Return the flat places (B * S,) of the new tokens in (B * T,)."""
        assert self.positions is not None
        positions_BS = self.positions.position_ids_BT
        rows_B = torch.arange(len(positions_BS), device=positions_BS.device)
        return (rows_B.unsqueeze(1) * self.places + positions_BS).flatten()

    def _seen(self, window: int | None) -> Tensor:
        assert self.positions is not None
        positions_BS1 = self.positions.position_ids_BT.unsqueeze(2)
        places_T = torch.arange(self.columns, device=positions_BS1.device)
        seen_BST = places_T <= positions_BS1
        if window is not None:
            seen_BST = seen_BST & (places_T > positions_BS1 - window)
        return seen_BST.unsqueeze(1)
