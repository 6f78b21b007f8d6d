"""Attention: one place that chooses the kernel of torch that computes it, and calls it.

Queries are the last C of E tokens: query i sees keys up to E - C + i ("bottom-right"). For C = E that is
plain causal attention, for a slice of a sequence its prefix, and for one new token all that is cached. With a
window of W a token sees itself and the W - 1 tokens before it (Mistral, arXiv 2310.06825, section 2); of
packed documents it sees its own only.

`choose` is pure: from a description of the call it says which backend serves it, and why. `attend` describes,
chooses and calls.

- sdpa: `scaled_dot_product_attention`, which chooses among its own kernels.
- flash: torch's flash operators, FA2 or what `torch.nn.attention.activate_flash_attention_impl` has put in
  its place. They count from the end, and know windows and documents.
- merged: the keys before the queries' own, which every query sees, and their own, a causal square: two calls
  of the CPU's flash kernel, whose results are weighed by their sums of exponentials. There is no mask then,
  and no key that is looked at in vain.
- blocks: for windows, blocks of queries with the keys that they may see, and a mask of one block.
- documents: one document after the other; on a CPU, which may read their lengths.
- mask: sdpa with a mask of queries x keys.

Kernels round what they return. Results and gradients that are put together of rounded parts have up to 1.4
times the error of one call, so on a CPU merged and blocks compute in float32 (float64).

Shapes: B batch, N query heads, G key/value heads, which divide N, C queries, E keys, D width of a head.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastmp.ops.core.registry import can_read_values, compute_dtype, without_autocast

__all__ = ["AttentionCall", "Borders", "Choice", "active_flash", "attend", "choose", "describe"]

_16_BITS = ("bfloat16", "float16")
# What flash attention needs: compute capabilities by major version, and the widest head.
_FLASH = {"FA2": (range(8, 100), 256), "FA3": ((9,), 256), "FA4": ((9, 10), 128)}
_BLOCK = 128  # fewest queries of a block of windows: less makes more calls than it saves work


class Borders(NamedTuple):
    """Where packed documents begin and end, among the rows of a batch laid one after the other.

    queries, keys: (n + 1,) int32, ascending from 0 to B * C and to B * E (`cu_seqlens`). The queries of
        document i are queries[i] to queries[i + 1] - 1, and are the last of its keys. Documents may be empty:
        entries that repeat let the number of documents vary under a fixed shape.
    longest_queries, longest_keys: bounds of the length of a document.
    static: nobody reads the borders on the host, also on a CPU, as in what graphs hold.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int
    static: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """What is asked of attention, and on what: all that the choice of its backend depends on.

    device, capability: "cpu" or "cuda", and the GPU's compute capability.
    dtype: of queries, as "bfloat16".
    head_dim, value_dim: widths of a head of queries and keys, and of values.
    flash: who serves torch's flash operators, "FA2", "FA3" or "FA4"; "" where they are disabled.
    cudnn_first: `scaled_dot_product_attention` prefers cuDNN on this GPU.
    readable: the host may read where documents begin.
    """

    device: str
    dtype: str
    head_dim: int
    queries: int
    keys: int
    value_dim: int = 0
    causal: bool = True
    window: bool = False
    documents: bool = False
    mask: bool = False
    dropout: bool = False
    capability: tuple[int, int] = (0, 0)
    flash: str = "FA2"
    cudnn_first: bool = False
    readable: bool = True


class Choice(NamedTuple):
    """The backend that serves a call, and why in words."""

    backend: str
    reason: str


def choose(call: AttentionCall) -> Choice:
    """Say which backend serves `call`. Pure, so that it answers for any machine."""
    refusal = _flash_refuses(call)
    square = not call.causal or call.queries == call.keys
    if call.mask:
        return Choice("sdpa", "torch chooses among its kernels that take a mask")
    if call.documents:
        if not refusal:
            return Choice("flash", f"{call.flash} takes documents by their borders")
        if call.device == "cpu" and call.readable:
            return Choice("documents", "a CPU knows their lengths")
        return Choice("mask", f"flash attention takes {refusal}")
    if call.window:
        if not refusal:
            return Choice("flash", f"{call.flash} knows windows")
        return Choice("blocks", f"flash attention takes {refusal}")
    if call.flash not in ("", "FA2") and not refusal:
        return Choice("flash", f"{call.flash} has been activated")
    if square:
        return Choice("sdpa", "torch chooses, " + ("cuDNN first" if call.cudnn_first else "flash first"))
    if call.queries == 1:
        return Choice("sdpa", "one query sees all keys")
    if call.device == "cpu":
        wrong = call.dropout or call.value_dim not in (0, call.head_dim) or not call.flash
        if not wrong:
            return Choice("merged", "two calls of the CPU's flash kernel need no mask")
        return Choice("mask", "the CPU's flash kernel has no dropout")
    if not refusal:
        return Choice("flash", f"{call.flash} counts from the end, in one call")
    return Choice("mask", f"flash attention takes {refusal}")


def _flash_refuses(call: AttentionCall) -> str:
    """What torch's flash operators take instead of this call, in words; "" where they take it."""
    if call.device != "cuda" or not call.flash:
        return "CUDA tensors only, where it is enabled"
    majors, widest = _FLASH.get(call.flash, _FLASH["FA2"])
    if call.capability[0] not in majors:
        return f"other GPUs ({call.flash})"
    if call.dtype not in _16_BITS:
        return f"16-bit dtypes only, not {call.dtype}"
    if call.head_dim % 8 or call.head_dim > widest or call.value_dim not in (0, call.head_dim):
        return f"equal heads of a multiple of 8 up to {widest} elements, not {call.head_dim}"
    if call.dropout and call.flash != "FA2":
        return f"no dropout ({call.flash})"
    return ""


def attend(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    documents: Borders | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """The attention (B, N, C, D) of the last C of E tokens, by the backend that `choose` names.

    Layouts are strides only: transposed views are taken as they are. Query heads n * R to n * R + R - 1 share
    key/value head n, where R = N / G. Differentiable once, in q, k and v.

    Args:
        causal: query i sees keys 0 to E - C + i; else all.
        window: it sees the last `window` of these, itself included; needs `causal`.
        mask: boolean, True where a query sees a key, broadcastable to (B, N, C, E); in place of `causal`,
            `window` and `documents`. A decode step over a cache of fixed size E is a call with C = 1 and a
            mask of the E places that are filled, or with k and v cut to these and no mask.
        documents: a token sees its own document only. With `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`
            and `max_length_k` as transformers' attention interface has them it is `Borders(*these)`, and the
            tensors are (1, heads, all tokens, width). On a GPU nothing waits for the borders' values.
        dropout_p: drops probabilities, drawn from torch's default generator.
        scale: of the products of queries and keys; None: D ** -0.5.

    Raises ValueError for shapes that do not fit, a window without `causal`, and a mask beside one of these.
    """
    _check(q_BNCD, k_BGED, v_BGED, causal, window, mask, documents)
    E = k_BGED.shape[2]
    if window is not None and window >= E:
        window = None
    call = describe(
        q_BNCD,
        k_BGED,
        v_BGED,
        causal=causal,
        window=window is not None,
        documents=documents is not None,
        readable=documents is None or (can_read_values(documents.queries) and not documents.static),
        mask=mask is not None,
        dropout=dropout_p > 0.0,
    )
    backend, tensors = choose(call).backend, (q_BNCD, k_BGED, v_BGED)
    if backend == "flash":
        return _flash(*tensors, causal, window, documents, dropout_p, scale)
    if backend in ("merged", "blocks"):
        dtype = q_BNCD.dtype
        wide = compute_dtype(dtype) if call.device == "cpu" else dtype
        q, k, v = (x.to(wide) for x in tensors)
        if window is None:
            return _Merged.apply(q, k, v, scale).to(dtype)
        with (
            nullcontext() if wide == dtype else without_autocast(call.device)
        ):  # which would narrow them again
            return _blocks(q, k, v, window, dropout_p, scale).to(dtype)
    if backend == "documents":
        assert documents is not None
        return _one_by_one(*tensors, documents, causal, window, dropout_p, scale)
    if backend == "mask" and documents is not None:
        mask = _document_mask(documents, q_BNCD.shape, E, causal, window)
    elif backend == "mask":
        mask = _last_causal_mask(q_BNCD.shape[2], E, q_BNCD.device)
    kernels: Any = nullcontext()
    if call.flash in ("FA3", "FA4") and call.dropout:  # which they refuse when they are called
        kernels = sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with kernels:
        return F.scaled_dot_product_attention(
            *tensors,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=causal and mask is None and q_BNCD.shape[2] == E,
            scale=scale,
            enable_gqa=q_BNCD.shape[1] != k_BGED.shape[1],
        )


def describe(q_BNCD: Tensor, k_BGED: Tensor, v_BGED: Tensor, **asked: Any) -> AttentionCall:
    """The `AttentionCall` of these tensors, with what torch and the device have; `asked`: other fields."""
    flash, *capability, cudnn_first = _machine(q_BNCD.device.type, q_BNCD.device.index)
    return AttentionCall(
        device=q_BNCD.device.type,
        dtype=str(q_BNCD.dtype).removeprefix("torch."),
        head_dim=q_BNCD.shape[3],
        value_dim=v_BGED.shape[3],
        queries=q_BNCD.shape[2],
        keys=k_BGED.shape[2],
        capability=(capability[0], capability[1]),
        flash=flash,
        cudnn_first=cudnn_first,
        **asked,
    )


def active_flash() -> str:
    """Who serves torch's flash operators: "FA2", or the implementation that has been activated."""
    active = getattr(attention, "current_flash_attention_impl", None)  # torch 2.11 and later
    return (active and active()) or "FA2"


@torch.compiler.assume_constant_result
def _machine(device: str, index: int | None) -> tuple[str, int, int, bool]:
    """`flash`, the two numbers of `capability` and `cudnn_first` of an `AttentionCall`.

    A compiler keeps those of its first trace.
    """
    flash = active_flash() if torch.backends.cuda.flash_sdp_enabled() else ""
    if device != "cuda":
        return flash, 0, 0, False
    major, minor, cudnn_first = _gpu(index)
    return flash, major, minor, cudnn_first and torch.backends.cuda.cudnn_sdp_enabled()


@lru_cache
def _gpu(index: int | None) -> tuple[int, int, bool]:
    """The compute capability of a GPU, and whether torch prefers cuDNN to flash attention on it.

    torch settles its order of preference when it first chooses, so it is made to.
    """
    device = torch.device("cuda" if index is None else f"cuda:{index}")
    probe = torch.empty(1, 1, 64, 64, device=device, dtype=torch.float16)
    torch._fused_sdp_choice(probe, probe, probe, is_causal=True)
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    cudnn_first = order.index(SDPBackend.CUDNN_ATTENTION) < order.index(SDPBackend.FLASH_ATTENTION)
    return *torch.cuda.get_device_capability(device), cudnn_first


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    documents: Borders | None,
) -> None:
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if not (q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        raise ValueError(
            f"attend: q must be (B, N, C, D), k and v (B, G, E, D), got {', '.join(map(str, shapes))}"
        )
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attend: batches must be equal and key/value heads divide query heads, got q {shapes[0]} and k "
            f"{shapes[1]}"
        )
    if causal and mask is None and documents is None and q.shape[2] > k.shape[2]:
        raise ValueError(f"attend: {q.shape[2]} queries are not the last of {k.shape[2]} keys")
    if window is not None and not (causal and window > 0):
        raise ValueError(f"attend: a window must be positive and causal, got {window} and causal={causal}")
    if mask is not None and (causal or documents is not None):
        raise ValueError("attend: a mask says all: give causal=False, and no window or documents beside it")


def _flash(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    causal: bool,
    window: int | None,
    documents: Borders | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """torch's flash operator, whose tokens come before heads; of documents, in one row."""
    B, C = q_BNCD.shape[0], q_BNCD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BNCD, k_BGED, v_BGED))
    borders: tuple[Any, ...] = (None, None, C, k_BGED.shape[2])
    if documents is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        borders = documents[:4]
    output = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *borders,
        dropout_p,
        causal and window is None,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if causal else -1,
    )[0]
    return (output if documents is None else output.unflatten(0, (B, C))).transpose(1, 2)


class _Merged(torch.autograd.Function):
    """Attention of the last C of E > C tokens: all keys before them, then a causal square, merged.

    A part's output is the mean of values under weights that sum to one; with the logarithms of the sums of
    exponentials that they were divided by, two parts make the whole. Asked for its derivative with the output
    and the sum of the whole, a kernel returns its part's share of the whole's derivative.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        (early, early_lse), (own, own_lse) = (
            kernel(q, *keys_and_values, 0.0, causal, scale=scale)
            for *keys_and_values, causal in _parts(q, k, v)
        )
        lse = torch.logaddexp(early_lse, own_lse)
        output = torch.lerp(own, early, (early_lse - lse).exp().unsqueeze(-1))
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        early, own = (
            kernel(grad, q, *keys_and_values, output, lse, 0.0, causal, scale=ctx.scale)
            for *keys_and_values, causal in _parts(q, k, v)
        )
        keys, values = (torch.cat((early[i], own[i]), 2) for i in (1, 2))
        return early[0] + own[0], keys, values, None


def _parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor, bool], ...]:
    """Keys, values, and whether they are a causal square with the queries: the early ones, then these."""
    first = k.shape[2] - q.shape[2]
    return (k[:, :, :first], v[:, :, :first], False), (k[:, :, first:], v[:, :, first:], True)


def _blocks(
    q_BNCD: Tensor, k_BGED: Tensor, v_BGED: Tensor, window: int, dropout_p: float, scale: float | None
) -> Tensor:
    """Windows: blocks of queries one after the other, each with the keys that one of its queries may see."""
    C, E, outputs = q_BNCD.shape[2], k_BGED.shape[2], []
    size = max(window // 4, _BLOCK)
    for first in range(0, C, size):
        last = min(first + size, C)
        begin, end = max(0, E - C + first - window + 1), E - C + last
        ages = _ages(last - first, end - begin, q_BNCD.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q_BNCD[:, :, first:last],
                k_BGED[:, :, begin:end],
                v_BGED[:, :, begin:end],
                attn_mask=(ages >= 0) & (ages < window),
                dropout_p=dropout_p,
                scale=scale,
                enable_gqa=q_BNCD.shape[1] != k_BGED.shape[1],
            )
        )
    return torch.cat(outputs, 2) if len(outputs) != 1 else outputs[0]


def _ages(queries: int, keys: int, device: torch.device) -> Tensor:
    """How many tokens each key lies before each query (queries, keys), if both end at the same token."""
    return (
        torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    )


def _last_causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _one_by_one(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    documents: Borders,
    causal: bool,
    window: int | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Each document by a call of its own, as a batch of one."""
    B, _, C, _ = q_BNCD.shape
    q, k, v = (x.permute(1, 0, 2, 3).flatten(1, 2).unsqueeze(0) for x in (q_BNCD, k_BGED, v_BGED))
    sizes = [borders.diff().tolist() for borders in documents[:2]]
    # one split, whose backward joins the gradients of parts; each slice would fill a gradient of the whole
    parts = (x.split(of, 2) for x, of in ((q, sizes[0]), (k, sizes[1]), (v, sizes[1])))
    outputs = [
        attend(*one, causal=causal, window=window, dropout_p=dropout_p, scale=scale)
        for one in zip(*parts, strict=True)
        if one[0].shape[2]
    ]
    return torch.cat(outputs, 2).squeeze(0).unflatten(1, (B, C)).transpose(0, 1)


def _document_mask(
    documents: Borders, q_shape: torch.Size, keys: int, causal: bool, window: int | None
) -> Tensor:
    """The mask (B, 1, C, E): True for a key of the query's document that is not later than the query."""
    B, C = q_shape[0], q_shape[2]

    def places(borders: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The document of each token (B, length), and how many tokens it lies before the document's end."""
        index = torch.arange(B * length, device=borders.device, dtype=borders.dtype)
        number = torch.searchsorted(borders[1:], index, right=True)
        return number.view(B, length), (borders[number + 1] - index).view(B, length)

    (q_number, q_left), (k_number, k_left) = places(documents.queries, C), places(documents.keys, keys)
    ages = k_left[:, None, :] - q_left[:, :, None]
    seen = q_number[:, :, None] == k_number[:, None, :]
    if causal:
        seen = seen & (ages >= 0) & (ages < (math.inf if window is None else window))
    return seen.unsqueeze(1)
