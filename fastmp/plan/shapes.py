"""Shapes: the sizes of a microbatch and of a layer on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fastmp.config import ACTIVATIONS, GPTConfig, Recipe
from fastmp.config.dispatchers import DispatcherSpec, DispatchSizes, select_dispatcher
from fastmp.config.precision import row_bytes
from fastmp.config.sizes import pad_vocab
from fastmp.distributed.exchange_layout import ExchangeLayout
from fastmp.distributed.grid import RankGrid
from fastmp.plan.layout import make_grid


@dataclass(frozen=True)
class Shapes:
    """The sizes of one rank of a recipe; heads, hidden units and vocabulary are this rank's share.

    Of a microbatch, `tokens` go through this rank's products, `rows` are its hidden states between
    tensor-parallel regions (fewer under sequence parallelism), and `routed` go through its router. `length`
    is its part of a sequence. `itemsize` is the bytes of a parameter and of an activation. `documents` are
    those of a microbatch whose documents are masked, as if each sample were one; else 0. `predicted` are the
    tokens of a microbatch whose logits this rank makes. With `fp8`, linear layers of attention, MLPs and
    experts keep their inputs and a copy of their weights in FP8. With `recompute_kv`, latent attention keeps
    latents in place of keys and values.
    """

    model: GPTConfig
    grid: RankGrid
    sequence_parallel: bool
    num_microbatches: int
    itemsize: int
    length: int
    tokens: int
    rows: int
    routed: int
    documents: int = 0
    predicted: int = 0
    fp8: bool = False
    recompute_kv: bool = False

    def of_layer(self, layer: int) -> Shapes:
        """Return the same for one layer: its model describes no experts where the layer is dense.

        Layers of MTP modules have the numbers after those of the model, and the kind of its last layer.
        """
        return replace(self, model=self.model.layers[min(layer, self.model.num_layers - 1)])

    def of_kind(self, kind: GPTConfig) -> Shapes:
        """Return the same for a layer of this kind, one of `GPTConfig.layers`."""
        return replace(self, model=kind)

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states between tensor-parallel regions."""
        return self.rows * self.model.hidden_size * self.itemsize

    def operand(self, elements: int) -> int:
        """Return the bytes of a linear layer's input: FP8 with a scale for 128 elements, or their own."""
        return row_bytes(elements) if self.fp8 else elements * self.itemsize

    @property
    def heads(self) -> int:
        return self.model.num_heads // self.grid.tp

    @property
    def kv_heads(self) -> int:
        return self.model.kv_heads // self.grid.tp

    @property
    def projections(self) -> int:
        """Number of ffn-wide projections of an MLP's first GEMM: 2 with a gate."""
        return ACTIVATIONS[self.model.activation].num_projections

    @property
    def vocab(self) -> int:
        return pad_vocab(self.model.vocab_size, self.grid.tp) // self.grid.tp

    @cached_property
    def dispatcher(self) -> DispatcherSpec:
        """Facts of the token dispatcher of a layer with experts."""
        assert self.model.moe is not None
        etp, tp = (self.grid.first(axis) for axis in ("etp", "tp"))
        return select_dispatcher(
            self.model.moe.dispatcher, ep=self.grid.ep, etp=self.grid.etp, one_sequence=set(etp) <= set(tp)
        )

    @property
    def dispatch_sizes(self) -> DispatchSizes:
        """Sizes that the facts of a dispatcher depend on."""
        moe = self.model.moe
        assert moe is not None
        return DispatchSizes(
            tokens=self.routed,
            pairs=self.pairs,
            hidden_size=self.model.hidden_size,
            itemsize=self.itemsize,
            top_k=moe.top_k,
            num_experts=moe.num_experts,
            ep=self.grid.ep,
            etp=self.grid.etp,
            symmetric_capacity=moe.symmetric_capacity,
            fp8=self.fp8,
            num_groups=moe.num_groups,
            group_topk=moe.group_topk,
        )

    @property
    def exchange(self) -> ExchangeLayout | None:
        """Layout of the symmetric memory for rows at this rank's experts; None without it."""
        if self.model.moe is None or not self.dispatcher.symmetric_memory:
            return None
        sizes = self.dispatch_sizes
        return ExchangeLayout(
            sizes.ranks, sizes.num_experts, sizes.hidden_size, sizes.itemsize, self.rows_at_experts
        )

    @property
    def stashes(self) -> bool:
        """True if rows at the experts are kept in an activation stash, which all layers share."""
        moe = self.model.moe
        return moe is not None and self.dispatcher.symmetric_memory and moe.activation_stash > 0.0

    @property
    def rows_at_experts(self) -> int:
        """Rows that this rank's experts compute."""
        return self.dispatcher.rows(self.dispatch_sizes)

    @property
    def pairs(self) -> int:
        """Pairs of a routed token and an expert, where all experts get equally many tokens.

        A capacity factor below 1 drops the rest.
        """
        moe = self.model.moe
        assert moe is not None
        kept = 1.0 if moe.capacity_factor is None else min(1.0, moe.capacity_factor)
        return round(self.routed * moe.top_k * kept)


def shapes_of(recipe: Recipe, world_size: int) -> Shapes:
    """Return the sizes of a rank of `recipe`, which must fit `world_size` ranks."""
    layout, data, grid = recipe.parallel, recipe.data, make_grid(recipe, world_size)
    length = data.seq_len // grid.cp
    tokens, routed = length * data.micro_batch_size, -(-length // grid.tp) * data.micro_batch_size
    return Shapes(
        model=recipe.model,
        grid=grid,
        sequence_parallel=layout.sequence_parallel and grid.tp > 1,
        num_microbatches=recipe.train.global_batch_size // (data.micro_batch_size * grid.dp),
        itemsize=4 if recipe.train.dtype == "float32" else 2,
        length=length,
        tokens=tokens,
        rows=routed if layout.sequence_parallel else tokens,
        routed=routed,
        documents=data.micro_batch_size if data.document_masking else 0,
        predicted=data.predicted // grid.cp * data.micro_batch_size,
        fp8=recipe.train.fp8() is not None,
        recompute_kv=layout.recompute_kv,
    )
