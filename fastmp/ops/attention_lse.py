"""Attention by kernels that return their log-sum-exp (LSE): parts merged by it, and attention sinks.

A sink is a learnt logit of a query head that takes part in the denominator of the softmax only, so that a
head may attend to nothing (Xiao et al. 2023, arXiv 2309.17453; GPT-OSS, arXiv 2508.10925). With the LSE L
over the keys and a sink s,

    output = kernel's output * exp(L - L'),  L' = log(exp(L) + exp(s))

A kernel's backward recomputes probabilities as exp(score - LSE) and subtracts the row sums of gradient times
output. Called with the final output and L', it returns the gradients of queries, keys and values as they are;
the gradient of s is - exp(s - L') times those row sums.

Shapes: B batch, N query heads, G key/value heads (G divides N), C queries, E keys, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.ops.core.registry import compute_dtype, without_autocast

__all__ = ["FlashCall", "flash_with_sinks", "merged", "plain"]


def _add_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """Return output and LSE with the sinks in the denominator.

    Args:
        output: as the kernel returned it, with the dimensions of `lse` and the head's.
        lse: (B, N, C) or, of packed documents, (N, tokens).
        sinks: (N, 1) or (N, C).
        heads: dimension of heads in the output without its last one: -2, as in `lse`, or -1, after tokens.
    """
    if sinks is None:
        return output, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    factor = (lse - total).exp().to(output.dtype)
    return output * factor.movedim(-2, heads).unsqueeze(-1), total


def _sinks_grad(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor, heads: int) -> Tensor:
    """Return the gradient of sinks, for arguments as of `_add_sinks` and the final output and LSE."""
    wide = lse.dtype
    sums = (grad.to(wide) * output.to(wide)).sum(-1).movedim(heads, -2)
    found = -((sinks.to(wide) - lse).exp() * sums)
    return found.sum_to_size(sinks.shape).to(sinks.dtype)


class _Merged(Function):
    """Attention on a CPU, of the last C of E tokens or with a mask, with or without sinks.

    Causal attention of C < E queries takes two kernel calls: the earlier keys, then a causal square. Forward:
    each call returns an output normalised over its own keys, and its LSE. The outputs are averaged with
    weights exp(LSE - LSE of all keys). Backward: a kernel called with the merged output and LSE returns its
    part of the full gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # 1. One call; or attention over the earlier keys, and over the causal square.
        results = [
            kernel(q, *keys_and_values, 0.0, square, attn_mask=mask, scale=scale)
            for *keys_and_values, square in _parts(q, k, v, causal)
        ]
        output, lse = results[-1]
        # 2. Merge by the log-sum-exp.
        if len(results) == 2:
            early, early_lse = results[0]
            lse = torch.logaddexp(early_lse, lse)
            weight = (early_lse - lse).exp().to(output.dtype)  # torch 2.10 traces a float32 LSE of float64
            output = torch.lerp(output, early, weight.unsqueeze(-1))
        # 3. Sinks, in the same way.
        output, lse = _add_sinks(output, lse, sinks, -2)
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(q, k, v, sinks, mask, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, mask, output, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [
            kernel(grad, q, *keys_and_values, output, lse, 0.0, square, attn_mask=mask, scale=ctx.scale)
            for *keys_and_values, square in _parts(q, k, v, ctx.causal)
        ]
        dsinks = None if sinks is None else _sinks_grad(grad, output, lse, sinks, -2)
        if len(parts) == 1:
            return *parts[0], dsinks, None, None, None
        early, late = parts
        keys, values = (torch.cat((early[i], late[i]), 2) for i in (1, 2))
        return early[0] + late[0], keys, values, dsinks, None, None, None


def _parts(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[tuple[Tensor, Tensor, bool]]:
    """Return (keys, values, causal) of the earlier tokens and of the queries' own tokens, or of all."""
    first = k.shape[2] - q.shape[2]
    if not causal or first == 0:
        return [(k, v, causal)]
    return [(k[:, :, :first], v[:, :, :first], False), (k[:, :, first:], v[:, :, first:], True)]


def merged(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention (B, N, C, D) of a CPU's kernel, in float32 or float64.

    Args:
        causal: query i sees keys 0 to E - C + i. mask: boolean, True where a query sees a key; not beside it.
        sinks: (N, 1) or (N, C); None: none.
    """
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=q_BNCD.dtype).masked_fill_(~mask, -math.inf)
    return _Merged.apply(q_BNCD, k_BGED, v_BGED, sinks, mask, causal, scale)


class FlashCall(NamedTuple):
    """Arguments of torch's flash operators after queries, keys and values, forward and backward."""

    borders: tuple[Any, ...]
    dropout_p: float
    causal: bool
    options: dict[str, Any]


class _FlashWithSinks(Function):
    """torch's flash operators on (B, tokens, heads, D), or (tokens, heads, D) of packed documents."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, call: FlashCall) -> Tensor:
        output, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *call.borders, call.dropout_p, call.causal, False, **call.options
        )
        output, lse = _add_sinks(output, lse, sinks, -1)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, output, lse, rng, unused)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, output, lse, rng, unused = ctx.saved_tensors
        borders, dropout_p, causal, options = ctx.call
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, output, lse, *borders, dropout_p, causal, rng, unused, **options
        )
        return *grads, _sinks_grad(grad, output, lse, sinks, -1), None


def flash_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, call: FlashCall) -> Tensor:
    """Return the output of torch's flash operators with sinks (N, 1) in the denominator, laid out as q."""
    return _FlashWithSinks.apply(q, k, v, sinks, call)


def plain(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    *,
    mask: Tensor | None,
    sinks: Tensor,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Return attention with sinks by torch's matrix products, over all pairs of queries and keys.

    mask: boolean, True where a query sees a key. sinks: (N, 1) or (N, C).
    """
    dtype, (B, N, C, D), (_, G, E, _) = q_BNCD.dtype, q_BNCD.shape, k_BGED.shape
    with without_autocast(q_BNCD.device.type):
        wide = compute_dtype(dtype)
        q, k, v = (x.to(wide) for x in (q_BNCD, k_BGED, v_BGED))
        # 1. Scores; query heads that share a key are rows of one product.
        q = q.reshape(B, G, N // G * C, D) * (D**-0.5 if scale is None else scale)
        scores = (q @ k.transpose(-1, -2)).view(B, N, C, E)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        # 2. Probabilities; the sink only counts in the denominator.
        lse = torch.logaddexp(scores.logsumexp(-1), sinks.to(wide))
        weights = F.dropout((scores - lse.unsqueeze(-1)).exp(), dropout_p)
        return (weights.view(B, G, N // G * C, E) @ v).view(B, N, C, -1).to(dtype)
