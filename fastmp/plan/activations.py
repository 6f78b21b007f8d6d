"""Activations: the bytes that autograd keeps of one microbatch on one rank, op by op.

All functions take the sizes of a rank and return bytes; a test counts the same tensors in a run. Attention is
assumed to be fused: it keeps queries, keys, values, its output and a float32 number for each row and head, as
the flash kernels of CPUs and GPUs do. Parameters, a few numbers for each expert, and tensors that live within
one op only are not counted.
"""

from __future__ import annotations

from fastmp.config import NORMS, BertConfig, LatentConfig
from fastmp.plan.shapes import Shapes

_STATISTIC = 4  # bytes: sums over rows, log-sum-exps and probabilities are float32
_INDEX = 4
_TARGET = 8
LOSS_WORKSPACE = 1 << 30  # bytes of logits that a GPU makes at a time


def layer_parts(shapes: Shapes, recomputed: bool = False) -> dict[str, int]:
    """Return what one layer keeps: its attention and its MLP or experts, each with the norm before it.

    It has experts where the model of `shapes` describes some: see `Shapes.of_layer`. The first norm keeps
    the input of the layer. The rows that experts keep in an activation stash are not counted, see
    `fastmp.plan.stash_size`; with `recomputed`, layers are run again and do without the stash.
    """
    part = "mlp" if shapes.model.moe is None else "moe"
    return {"attention": attention(shapes), part: mlp(shapes, recomputed)}


def layer_input(shapes: Shapes, shard: bool) -> int:
    """Return what a recomputed layer keeps: its input, or a tensor-parallel rank's shard of it."""
    return shapes.hidden // shapes.grid.tp if shard else shapes.hidden


def attention(shapes: Shapes) -> int:
    """Return what attention keeps, with the norm before it and both projections."""
    if shapes.model.latent is not None:
        return _latent_attention(shapes, shapes.model.latent)
    model, tokens, cp = shapes.model, shapes.tokens, shapes.grid.cp
    head = tokens * model.head_dim * shapes.itemsize  # one head
    q, kv = shapes.heads * head, 2 * shapes.kv_heads * head
    rope, projected = model.position == "rope", q + kv
    grouped = shapes.kv_heads != shapes.heads
    kept = norm(shapes) + _projected(shapes)  # the norm, and its output, which the projection takes
    if model.qk_norm:
        kept += (shapes.heads + shapes.kv_heads) * tokens * _STATISTIC
    if model.qk_norm or cp == 1:  # the norms' inputs, and the values, are views of what was projected
        kept += projected
    elif not (rope or grouped):  # the queries are such views too
        kept += projected
    if rope or model.qk_norm:
        kept += q + (kv // 2 if cp == 1 else 0)
    elif grouped:
        kept += q  # copied into the order that attention takes
    if cp > 1:
        kept += cp * kv + q  # keys and values of all ranks; the output, as two slices and as one tensor
    kept += _rotary_tables(shapes)
    if shapes.fp8:  # the input of the output projection, beside the output of attention
        kept += shapes.operand(shapes.heads * tokens * model.head_dim)
    return kept + q + shapes.heads * tokens * _STATISTIC


def _rotary_tables(shapes: Shapes) -> int:
    """Return the cos and sin that a layer keeps unless they are views of the model's tables."""
    scaling, cp = shapes.model.rope_scaling, shapes.grid.cp
    length = cp * shapes.length
    computed = scaling is not None and scaling.kind == "dynamic" and scaling.extends(length)
    computed = computed and length != shapes.model.max_seq_len  # of which the model has a table
    if shapes.model.position != "rope" or (cp == 1 and not computed):
        return 0
    return shapes.length * shapes.model.attention.rope_size * _STATISTIC


def _latent_attention(shapes: Shapes, latent: LatentConfig) -> int:
    """Return what latent attention keeps, with the norm before it and all projections."""
    spec, tokens, cp = shapes.model.attention, shapes.tokens, shapes.grid.cp
    # 1. The norm, and its output, which projections to latents take in its dtype.
    kept = norm(shapes) + shapes.hidden
    if shapes.fp8 and latent.q_rank is None:
        kept += _projected(shapes)
    # 2. Latents before and after their norms, of this rank's tokens; over CP ranks all tokens' latents.
    for rank in filter(None, (latent.q_rank, latent.kv_rank)):
        kept += shapes.rows * (rank * shapes.itemsize + _STATISTIC)
    kept += shapes.rows * latent.rope_size * shapes.itemsize  # shared keys, beside the latent
    kept += shapes.operand(shapes.rows * (latent.q_rank or 0))
    kept += shapes.operand((shapes.rows if cp == 1 else cp * tokens) * latent.kv_rank)
    # 3. Queries; keys of every head, joined; keys and values as projected; the output.
    each = tokens * shapes.heads * shapes.itemsize
    kept += each * spec.query_size
    if shapes.recompute_kv:  # turned shared keys, from which keys are made again with the latents
        kept += cp * tokens * latent.rope_size * shapes.itemsize
    else:
        kept += cp * each * (spec.query_size + latent.nope_size + latent.value_size)
    output = each * spec.value_size
    kept += _rotary_tables(shapes)
    if cp > 1:  # as two slices and as one tensor
        kept += output
    if shapes.fp8:  # the input of the output projection, beside the output of attention
        kept += shapes.operand(tokens * shapes.heads * spec.value_size)
    return kept + output + shapes.heads * tokens * _STATISTIC


def mlp(shapes: Shapes, recomputed: bool = False) -> int:
    """Return what the MLP or the experts keep, with the norm before them; see `layer_parts`."""
    moe = shapes.model.moe
    kept = norm(shapes)
    if moe is None:
        width = shapes.model.ffn_size // shapes.grid.tp
        return kept + _projected(shapes) + _ffn(shapes, width, shapes.tokens)
    kept += shapes.hidden
    if moe.shared_expert_ffn_hidden_size:
        kept += _projected(shapes) if shapes.fp8 else 0  # beside what the router takes
        kept += _ffn(shapes, moe.shared_expert_ffn_hidden_size // shapes.grid.tp, shapes.tokens)
        if moe.shared_expert_gate:
            kept += shapes.hidden + shapes.rows * shapes.itemsize
    return kept + experts(shapes, recomputed)


def experts(shapes: Shapes, recomputed: bool = False) -> int:
    """Return what the router and the routed experts keep, with balanced expert loads; see `layer_parts`."""
    moe, grid = shapes.model.moe, shapes.grid
    assert moe is not None
    row = shapes.model.hidden_size * shapes.itemsize
    choices = shapes.routed * moe.top_k
    kept = shapes.routed * moe.num_experts * _STATISTIC + choices * _INDEX  # logits and choices
    if shapes.model.moe is not None and moe.jitter:
        kept += 2 * shapes.routed * row  # the tokens times noise, and the noise
    arrived = 0 if shapes.stashes and not recomputed else shapes.rows_at_experts
    kept += shapes.operand(arrived * shapes.model.hidden_size)
    width = moe.expert_ffn_hidden_size // grid.etp
    if shapes.fp8:  # which compute the output of the activation again
        kept += shapes.projections * width * arrived * shapes.itemsize
    else:
        kept += _ffn(shapes, width, arrived)
    return kept + shapes.dispatcher.saved_bytes(shapes.dispatch_sizes)


def norm(shapes: Shapes) -> int:
    """Return what a norm of hidden states keeps: its input and one or two numbers for each row."""
    return shapes.hidden + NORMS[shapes.model.norm].saved_per_token * shapes.rows * _STATISTIC


def embedding(shapes: Shapes) -> int:
    """Return the bytes that the embedding keeps.

    These are the ids, the mask of this rank's ids, dropout's mask, and the input of a norm.
    """
    kept, bert = shapes.tokens * _TARGET, shapes.model.bert
    if shapes.grid.tp > 1:
        kept += shapes.tokens
    if bert is not None:
        kept += shapes.tokens * _TARGET * (bert.num_token_types > 0)
        kept += norm(shapes) if bert.post_norm else 0
    return kept + (shapes.rows * shapes.model.hidden_size if shapes.model.dropout else 0)


def loss(shapes: Shapes) -> int:
    """Return what the last stage keeps after its layers.

    The final norm; the gradient of its output, which the loss makes in the forward pass; the targets; and the
    gradient of each token's loss. A BERT's heads keep their inputs instead.
    """
    if shapes.model.bert is not None:
        return _heads(shapes, shapes.model.bert)
    return norm(shapes) + shapes.hidden + shapes.tokens * (_TARGET + _STATISTIC)


def mtp(shapes: Shapes) -> int:
    """Return what an MTP module keeps, with its loss and without its layer.

    The embedding; norms of both inputs; both joined, for the projection; and what `loss` says.
    """
    return embedding(shapes) + 2 * norm(shapes) + 2 * shapes.hidden + loss(shapes)


def _heads(shapes: Shapes, bert: BertConfig) -> int:
    """Return what a BERT keeps after its layers.

    The final norm; the places of masked tokens, and their rows before and after a GEMM and after GELU; and
    the gradients that the loss computes in forward, of its rows and of its bias.
    """
    row, few = shapes.model.hidden_size * shapes.itemsize, shapes.predicted
    kept = 0 if bert.post_norm else norm(shapes)
    if bert.sentence_order:  # the first token, before and after a GEMM
        kept += 2 * shapes.tokens // shapes.length * row
    places = 0 if few == shapes.tokens else few * _TARGET
    return kept + places + few * (4 * row + _TARGET + 3 * _STATISTIC) + shapes.vocab * shapes.itemsize


def loss_workspace(shapes: Shapes, narrow_gradient: bool) -> int:
    """Return what lives only while the loss is computed.

    These are the logits of one or two chunks of tokens. Where there are several chunks and main gradients
    have 16 bits, the weight's gradient is summed in float32 beside. Under sequence parallelism the hidden
    states of all tokens and their gradient come on top.
    """
    all_logits = shapes.predicted * shapes.vocab * shapes.itemsize
    logits = min(LOSS_WORKSPACE, all_logits)
    total = shapes.vocab * shapes.model.hidden_size * 4 if narrow_gradient and logits < all_logits else 0
    whole = shapes.tokens * shapes.model.hidden_size * shapes.itemsize
    if shapes.model.bert is not None:  # which gathers them once, for both heads
        return logits + total + (whole if shapes.sequence_parallel else 0)
    return logits + total + (2 * whole if shapes.sequence_parallel else 0)


def _ffn(shapes: Shapes, width: int, rows: int) -> int:
    """Return what an MLP keeps besides its input: the input of the activation, and its output."""
    return shapes.projections * width * rows * shapes.itemsize + shapes.operand(width * rows)


def _projected(shapes: Shapes) -> int:
    """Return what a column-parallel layer keeps of its input between tensor-parallel regions."""
    return shapes.operand(shapes.rows * shapes.model.hidden_size)
