"""The sizes that one rank works with: what a microbatch and a layer are to it."""

from __future__ import annotations

from dataclasses import dataclass

from fastmp.config import ACTIVATIONS, GPTConfig, Recipe
from fastmp.layout import make_grid
from fastmp.parallel.grid import RankGrid
from fastmp.sizes import pad_vocab


@dataclass(frozen=True)
class Shapes:
    """`tokens` of a microbatch go through this rank's products; `rows` of them are there as hidden states
    between tensor-parallel regions, and `own` go through its router. `length`: its part of a sequence.
    `itemsize` is that of parameters and activations. Heads, hidden units and vocabulary are this rank's.
    """

    model: GPTConfig
    grid: RankGrid
    sequence_parallel: bool
    num_microbatches: int
    itemsize: int
    length: int
    tokens: int
    rows: int
    own: int

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states of `rows`."""
        return self.rows * self.model.hidden_size * self.itemsize

    @property
    def heads(self) -> int:
        return self.model.num_heads // self.grid.tp

    @property
    def kv_heads(self) -> int:
        return self.model.kv_heads // self.grid.tp

    @property
    def blocks(self) -> int:
        """How many products the first one of an MLP is."""
        return ACTIVATIONS[self.model.activation].blocks

    @property
    def vocab(self) -> int:
        return pad_vocab(self.model.vocab_size, self.grid.tp) // self.grid.tp

    @property
    def dispatcher(self) -> str:
        """How tokens come to experts; "local" and "sharing" where every rank has all of them."""
        assert self.model.moe is not None
        if self.grid.ep == 1:
            return "local" if self.grid.etp == 1 else "sharing"
        return self.model.moe.dispatcher

    @property
    def pairs(self) -> int:
        """Pairs of `own` tokens and experts, with loads that are all equal: capacity drops what is below."""
        moe = self.model.moe
        assert moe is not None
        kept = 1.0 if moe.capacity_factor is None else min(1.0, moe.capacity_factor)
        return round(self.own * moe.top_k * kept)


def shapes_of(recipe: Recipe, world_size: int) -> Shapes:
    """Those of a rank of `recipe`, which fits `world_size` ranks."""
    layout, data, grid = recipe.parallel, recipe.data, make_grid(recipe, world_size)
    length = data.seq_len // grid.cp
    tokens, own = length * data.micro_batch_size, -(-length // grid.tp) * data.micro_batch_size
    return Shapes(
        model=recipe.model,
        grid=grid,
        sequence_parallel=layout.sequence_parallel and grid.tp > 1,
        num_microbatches=recipe.train.global_batch_size // (data.micro_batch_size * grid.dp),
        itemsize=4 if recipe.train.dtype == "float32" else 2,
        length=length,
        tokens=tokens,
        rows=own if layout.sequence_parallel else tokens,
        own=own,
    )
