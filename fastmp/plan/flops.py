"""Hardware FLOPs: the floating-point operations of a rank's GEMMs and attention in one step.

Model FLOPs (`fastmp.config.sizes`) are those that the mathematics asks for. Hardware FLOPs also have the
scores that fused attention computes again in its backward, the layers that recomputation runs again, and the
padding of the vocabulary. Attention counts the keys that a token sees. All experts get equally many tokens.
"""

from __future__ import annotations

from fastmp.config import GPTConfig, Recipe
from fastmp.config.sizes import (
    head_flops_per_token,
    layer_flops_per_token,
    projection_flops_per_token,
)
from fastmp.plan.parameters import stage_kinds, stage_map
from fastmp.plan.shapes import Shapes

_ATTENTION_BACKWARD = 2.5  # backward over forward: five GEMMs for two


def hardware_flops(recipe: Recipe, shapes: Shapes, *, causal: bool = True) -> list[float]:
    """Return the FLOPs of one step for each pipeline rank; `causal` as in `flops_per_token`."""
    model, grid = recipe.model, shapes.grid
    of_kinds = {kind: _layer(kind, recipe, causal) for kind in set(model.layers)}
    of_stages = [sum(of_kinds[kind] for kind in kinds) for kinds in stage_kinds(recipe)]
    rows = recipe.data.seq_len, shapes.vocab * grid.tp, recipe.data.predicted
    logits_of_all, before = head_flops_per_token(model, *rows)
    output = 3 * (logits_of_all + before * grid.tp)  # which every tensor-parallel rank does
    everywhere = grid.tp * shapes.rows / shapes.tokens  # ranks that project a token
    output += model.mtp_depth * 3 * (logits_of_all + projection_flops_per_token(model) * everywhere)
    tokens = (
        recipe.data.seq_len * recipe.data.micro_batch_size * shapes.num_microbatches / (grid.tp * grid.cp)
    )
    of_stages[-1] += output
    places = stage_map(recipe.parallel)
    return [tokens * sum(places.of_rank(of_stages, rank)) for rank in range(grid.pp)]


def _layer(model: GPTConfig, recipe: Recipe, causal: bool) -> float:
    """Return the FLOPs of a token in a layer of this kind, forward and backward."""
    matrices, attention = layer_flops_per_token(model, recipe.data.seq_len, causal=causal)
    again = matrices + attention - not_repeated(model) if recipe.parallel.recompute else 0.0
    if recipe.parallel.recompute_kv:
        again += 2.0 * sum(each.elements for each in model.attention.projections if each.name == "kv_up")
    return 3 * matrices + (1 + _ATTENTION_BACKWARD) * attention + again


def not_repeated(model: GPTConfig) -> float:
    """Return the FLOPs of a token in the last GEMM of an MLP, where recomputation leaves it out.

    Recomputation stops once it has every tensor that is kept, and nothing is kept behind that GEMM, unless
    there is dropout or a norm.
    """
    if model.moe is not None or model.dropout or (model.bert is not None and model.bert.post_norm):
        return 0.0
    return 2.0 * model.hidden_size * model.ffn_size
