"""Kinds of attention by their facts: projections, norms and widths of heads. Standard library only.

`GPTConfig.attention` is the `AttentionSpec` of a model, from which sizes, plans and layout checks take
parameters, GEMMs and widths. Only the activations and traffic of a plan differ by kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fastmp.config.options import Checked, Problem, option

__all__ = ["AttentionSpec", "LatentConfig", "Projection", "latent_attention", "multi_head_attention"]


@dataclass(frozen=True)
class LatentConfig(Checked):
    """Multi-head latent attention: keys and values are projections of one narrow vector for each token.

    A token's latent has `kv_rank` elements, from which every head's key and value are made, and a key part of
    `rope_size` elements that all heads share and that alone carries the position. Queries may go through a
    latent as well (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).
    """

    kv_rank: int = option(512, "width of the latent of keys and values [KV LoRA rank]")
    q_rank: int | None = option(
        None, "width of the latent of queries [Q LoRA rank]; unset: queries are projected in one step"
    )
    nope_size: int = option(128, "elements of a head's query and key without position [QK head dim]")
    rope_size: int = option(
        64, "elements of a head's query and key with position [QK position embedding dim]"
    )
    value_size: int = option(128, "elements of a head's value [V head dim]")

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("kv_rank", "q_rank", "nope_size", "rope_size", "value_size")
        if self.rope_size % 2:
            yield self._wrong("rope_size", "even")


class Projection(NamedTuple):
    """A linear layer of attention.

    split: "columns" or "rows" of its weight are divided between tensor-parallel ranks; "": each has all.
    parts: rows of the weight that are fused matrices, which an optimizer of matrices takes one by one.
    """

    name: str
    inputs: int
    outputs: int
    split: str = "columns"
    bias: bool = False
    parts: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class AttentionSpec:
    """The facts of a model's attention.

    Attributes:
        projections: its linear layers, in the order of forward; the last is the output projection.
        norms: (name, size) of its RMS norms. per_head: they normalise each head, of which a tensor-parallel
            rank has its share; otherwise what all ranks have.
        query_size: elements of a head's query and key. value_size: of its value.
        rope_size: those of a query and key that rotary positions turn.
        kv_heads: heads of keys and values. cached: elements of a token in a cache for generation.
        sinks: learnt logits of its softmax, which are sharded with the heads; 0: none.
    """

    projections: tuple[Projection, ...]
    norms: tuple[tuple[str, int], ...]
    per_head: bool
    query_size: int
    value_size: int
    rope_size: int
    kv_heads: int
    cached: int
    sinks: int = 0


def multi_head_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    size: int,
    *,
    rope_size: int,
    qk_norm: bool,
    qkv_bias: bool,
    bias: bool,
    sinks: bool,
) -> AttentionSpec:
    """Return the facts of multi-head or grouped-query attention, whose first projection is fused."""
    return AttentionSpec(
        projections=(
            Projection(
                "qkv",
                hidden,
                (heads + 2 * kv_heads) * size,
                bias=qkv_bias,
                parts=(heads * size, kv_heads * size, kv_heads * size),
            ),
            Projection("proj", heads * size, hidden, "rows", bias),
        ),
        norms=(("q_norm", size), ("k_norm", size)) if qk_norm else (),
        per_head=True,
        query_size=size,
        value_size=size,
        rope_size=rope_size,
        kv_heads=kv_heads,
        cached=2 * kv_heads * size,
        sinks=heads if sinks else 0,
    )


def latent_attention(hidden: int, heads: int, latent: LatentConfig) -> AttentionSpec:
    """Return the facts of multi-head latent attention."""
    query, rank = latent.nope_size + latent.rope_size, latent.q_rank
    if rank is None:
        of_queries: tuple[Projection, ...] = (Projection("q", hidden, heads * query),)
    else:
        of_queries = (
            Projection("q_down", hidden, rank, ""),
            Projection("q_up", rank, heads * query),
        )
    return AttentionSpec(
        projections=(
            *of_queries,
            Projection("kv_down", hidden, latent.kv_rank + latent.rope_size, ""),
            Projection("kv_up", latent.kv_rank, heads * (latent.nope_size + latent.value_size)),
            Projection("proj", heads * latent.value_size, hidden, "rows"),
        ),
        norms=(*([] if rank is None else [("q_norm", rank)]), ("kv_norm", latent.kv_rank)),
        per_head=False,
        query_size=query,
        value_size=latent.value_size,
        rope_size=latent.rope_size,
        kv_heads=heads,
        cached=latent.kv_rank + latent.rope_size,
    )
