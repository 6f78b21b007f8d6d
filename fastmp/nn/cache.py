"""Keys and values of the tokens that a model has seen, for text that is made one token at a time.

The first forward takes prompts, as any sequences, and leaves keys and values here. Each later one takes a
token of every row, at the row's own position, and attends to what is held. All shapes are fixed, so that such
a step can be captured in a graph.

Shapes: S sequence, B batch, T places of a row, G key/value heads of this rank, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastmp.nn.documents import Positions

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """The keys and values (B, T, G, D) of every attention that is called with `cache=`, in order of position.

    places: T. Prompts are padded on the right, so that a token's position is its column: what is held of
        padding is never looked at, and later tokens take its place.

    `positions` are those (B, 1) of the tokens of the next forward; None: prompts, from position 0 on.
    """

    def __init__(self, places: int) -> None:
        self.places, self.columns = places, places
        self.positions: Positions | None = None
        self._held: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def follow(self, lengths_B: Tensor, columns: int | None = None) -> None:
        """The next forward takes one token of each row, which has `lengths_B` (int64, below T) before it.

        columns: no row has more tokens after that, so that attention may leave out other places; None: T.
        """
        self.positions = Positions(lengths_B.unsqueeze(1))
        self.columns = self.places if columns is None else columns

    def append(self, attention: nn.Module, k_SBGD: Tensor, v_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Hold the keys and values of new tokens; returns those of all columns, (B, G, columns, D).

        ValueError for prompts longer than T.
        """
        if self.positions is None:
            S, B, *heads = k_SBGD.shape
            if S > self.places:
                raise ValueError(f"KeyValueCache: prompts of {S} tokens do not fit {self.places} places")
            held = k_SBGD.new_zeros(B, self.places, *heads), v_SBGD.new_zeros(B, self.places, *heads)
            for whole, new in zip(held, (k_SBGD, v_SBGD)):
                whole[:, :S] = new.transpose(0, 1)
            self._held[attention] = held
        held = self._held[attention]
        if self.positions is not None:
            places_B = self.positions.once("places", self._own_places)
            for whole, new in zip(held, (k_SBGD, v_SBGD)):
                whole.flatten(0, 1).index_copy_(0, places_B, new.squeeze(0))
        k_BGTD, v_BGTD = (whole[:, : self.columns].transpose(1, 2) for whole in held)
        return k_BGTD, v_BGTD

    def seen(self, window: int | None) -> Tensor:
        """The boolean mask (B, 1, 1, columns) of the places that new tokens see, at most `window` of them."""
        assert self.positions is not None
        return self.positions.once(("seen", window), lambda: self._seen(window))

    def _own_places(self) -> Tensor:
        """Where the new tokens (B,) go, of the places of all rows one after the other."""
        assert self.positions is not None
        positions_B = self.positions.position_ids_BT.squeeze(1)
        return torch.arange(len(positions_B), device=positions_B.device) * self.places + positions_B

    def _seen(self, window: int | None) -> Tensor:
        assert self.positions is not None
        places_T = torch.arange(self.columns, device=self.positions.position_ids_BT.device)
        seen_BT = places_T <= self.positions.position_ids_BT
        if window is not None:
            seen_BT = seen_BT & (places_T > self.positions.position_ids_BT - window)
        return seen_BT[:, None, None]
