"""Attention by torch's kernels: `choose` selects a backend for a call, `attend` calls it.

Queries are the last C of E tokens: query i sees keys up to E - C + i (bottom-right aligned). C = E is plain
causal attention; C < E serves sequence slices and decoding with a cache. With a sliding window of W a token
sees itself and the W - 1 tokens before it (Mistral, arXiv 2310.06825, section 2). In packed documents a token
sees its own document only.

    backend    used for
    sdpa       `scaled_dot_product_attention`, which chooses among its own kernels
    flash      torch's flash operators: FA2, or the implementation that
               `torch.nn.attention.activate_flash_attention_impl` activated; bottom-right aligned, with
               windows and documents
    merged     CPU, C < E: two calls of the flash kernel, on the earlier keys and on the causal square, merged
               by their log-sum-exp; no mask, no wasted work
    blocks     windows: blocks of queries, each with the keys in reach and a mask of one block
    documents  CPU: one call per document
    mask       sdpa with a (queries, keys) mask
    plain      attention sinks without one of the above: matrix products over all pairs

Attention sinks join the results of flash, merged, blocks and documents by their log-sum-exp, see
`attention_lse.py`.

`choose` is a pure function of an `AttentionCall`, so it answers for any machine. Kernels round their results;
merging rounded parts has up to 1.4 times the error of one call, so on a CPU merged and blocks compute in
float32 (float64).

Shapes: B batch, N query heads, G key/value heads (G divides N), C queries, E keys, D head dimension.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastmp.ops.attention_lse import FlashCall, flash_with_sinks, merged, plain
from fastmp.ops.attention_masks import Borders, ages_of, document_mask
from fastmp.ops.core import checks
from fastmp.ops.core.registry import can_read_values, compute_dtype, without_autocast

__all__ = ["AttentionCall", "Borders", "Choice", "active_flash", "attend", "choose", "describe"]

_16_BITS = ("bfloat16", "float16")
# Flash implementations: supported major compute capabilities, and the largest head dimension.
_FLASH = {"FA2": (range(8, 100), 256), "FA3": ((9,), 256), "FA4": ((9, 10), 128)}
_BLOCK = 128  # minimum queries per block of windows: smaller blocks cost more calls than they save work


@dataclass(frozen=True)
class AttentionCall:
    """Description of an attention call: everything the choice of its backend depends on.

    device, capability: "cpu" or "cuda", and the GPU's compute capability.
    dtype: of the queries, e.g. "bfloat16".
    head_dim, value_dim: head dimension of queries and keys, and of values (0: the same).
    flash: implementation of torch's flash operators, "FA2", "FA3" or "FA4"; "" if disabled.
    cudnn_first: `scaled_dot_product_attention` prefers cuDNN on this GPU.
    readable: the host may read the borders of documents.
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
    sinks: bool = False
    capability: tuple[int, int] = (0, 0)
    flash: str = "FA2"
    cudnn_first: bool = False
    readable: bool = True


class Choice(NamedTuple):
    """The backend of a call, and the reason in words."""

    backend: str
    reason: str


def choose(call: AttentionCall) -> Choice:
    """Return the backend for `call`: a pure function, so it answers for any machine.

    Example:

        call = AttentionCall("cuda", "bfloat16", head_dim=128, queries=1, keys=512, capability=(9, 0))
        assert choose(call) == ("sdpa", "one query sees all keys")
    """
    unsupported = _flash_requires(call)
    square = not call.causal or call.queries == call.keys
    if call.sinks:
        return _choose_with_sinks(call, unsupported)
    if call.mask:
        return Choice("sdpa", "torch chooses among its kernels that take a mask")
    if call.documents:
        if not unsupported:
            return Choice("flash", f"{call.flash} takes documents by their borders")
        if call.device == "cpu" and call.readable:
            return Choice("documents", "a CPU knows their lengths")
        return Choice("mask", f"flash attention takes {unsupported}")
    if call.window:
        if not unsupported:
            return Choice("flash", f"{call.flash} knows windows")
        return Choice("blocks", f"flash attention takes {unsupported}")
    if call.flash not in ("", "FA2") and not unsupported:
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
    if not unsupported:
        return Choice("flash", f"{call.flash} counts from the end, in one call")
    return Choice("mask", f"flash attention takes {unsupported}")


def _choose_with_sinks(call: AttentionCall, unsupported: str) -> Choice:
    if not call.mask and not unsupported:
        return Choice("flash", f"sinks join by the log-sum-exp of {call.flash}")
    if call.device != "cpu":
        return Choice("plain", f"flash attention takes {unsupported or 'no mask'}, and sinks its log-sum-exp")
    if call.documents and call.readable:
        return Choice("documents", "a CPU knows their lengths")
    if call.dropout or not call.flash:
        return Choice("plain", "the CPU's flash kernel has no dropout, and sinks its log-sum-exp")
    if call.window and not call.documents:
        return Choice("blocks", f"flash attention takes {unsupported}")
    return Choice("merged", "sinks join by the log-sum-exp of the CPU's flash kernel")


def _flash_requires(call: AttentionCall) -> str:
    """Return the requirement of torch's flash operators that the call does not meet; "" if it meets all."""
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
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return the attention (B, N, C, D) of the last C of E tokens, by the backend of `choose`.

    Query heads n * R to n * R + R - 1 share key/value head n, where R = N / G. Differentiable once in q, k, v
    and sinks.

    Args:
        q_BNCD, k_BGED, v_BGED: queries, keys and values, of any strides: transposed views need no copy.
            Values may be narrower (B, G, E, V), and so is the result; most kernels then want them padded.
        causal: query i sees keys 0 to E - C + i; else all keys.
        window: each query sees only the last `window` of these keys, itself included; requires `causal`.
        mask: boolean, True where a query sees a key, broadcastable to (B, N, C, E). Replaces `causal`,
            `window` and `documents`. For a decoding step over a cache of fixed size E, pass C = 1 and a mask
            of the filled entries, or slice k and v and pass no mask.
        documents: tokens see their own document only. From transformers' `cu_seq_lens_q`, `cu_seq_lens_k`,
            `max_length_q` and `max_length_k`, pass `Borders(*these)` with tensors (1, heads, tokens, D). On a
            GPU the borders' values cause no host-device synchronisation.
        sinks: (N,) logits that only count in the denominators of the heads' softmax, as in GPT-OSS; with a
            mask also (N, C), where heads are grouped as queries.
        dropout_p: dropout probability of attention weights, drawn from torch's default generator.
        scale: factor of the scores. Default: D ** -0.5.

    Raises:
        ValueError: shapes do not match, `window` without `causal`, or `mask` with causal, window or
            documents.

    Example:

        q = torch.randn(2, 8, 16, 64)  # (B, N, C, D)
        k, v = torch.randn(2, 2, 16, 64), torch.randn(2, 2, 16, 64)  # (B, G, E, D)
        assert attend(q, k, v).shape == (2, 8, 16, 64)
    """
    readable = documents is None or (can_read_values(documents.queries) and not documents.static)
    plan = _plan(
        q_BNCD, k_BGED, v_BGED, causal, window, mask is not None, documents is not None, sinks is not None,
        readable, dropout_p, scale, _machine(q_BNCD.device),
    )  # fmt: skip
    if sinks is not None:
        sinks = _checked_sinks(sinks, q_BNCD, mask)
    return _attend(plan, q_BNCD, k_BGED, v_BGED, mask, documents, sinks, dropout_p, scale)


class _AttentionPlan(NamedTuple):
    """Decisions that all calls of equal shapes, dtypes and options share.

    padding: columns of zeros that values get, as most kernels want heads of one width.
    causal, window: as passed; a window of all keys is none.
    """

    backend: str
    call: AttentionCall
    padding: int
    causal: bool
    window: int | None


@checks.memoized
def _plan(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, mask: bool, documents: bool,
    sinks: bool, readable: bool, dropout_p: float, scale: float | None, machine: tuple[str, int, int, bool],
) -> _AttentionPlan:  # fmt: skip
    """Check a call of `attend` and return its plan."""
    _check(q, k, v, causal, window, mask, documents)
    checks.check_finite("attend", q.dtype, scale=scale, dropout_p=dropout_p)
    if window is not None and window >= k.shape[2]:
        window = None
    padding = q.shape[3] - v.shape[3]
    special = window is not None or documents or sinks or q.shape[2] != k.shape[2]
    if padding < 0 or not pads_values(q, special):
        padding = 0
    call = describe(
        q,
        k,
        v,
        causal=causal,
        window=window is not None,
        documents=documents,
        readable=readable,
        mask=mask,
        dropout=dropout_p > 0.0,
        sinks=sinks,
    )
    call = replace(call, value_dim=v.shape[3] + padding)
    return _AttentionPlan(choose(call).backend, call, padding, causal, window)


def pads_values(like: Tensor, special: bool) -> bool:
    """Return True if values narrower than keys are padded: only torch's own choice on a GPU knows them.

    special: windows, documents, sinks, or fewer queries than keys.
    """
    return special or not like.is_cuda


def _attend(
    plan: _AttentionPlan,
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    mask: Tensor | None,
    documents: Borders | None,
    sinks: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Call the backend of a plan; sinks are (N, 1) or (N, C)."""
    if plan.padding:
        v_BGED = F.pad(v_BGED, (0, plan.padding))
        rest = mask, documents, sinks, dropout_p, scale
        return _attend(plan._replace(padding=0), q_BNCD, k_BGED, v_BGED, *rest)[..., : -plan.padding]
    backend, call, _, causal, window = plan
    tensors = q_BNCD, k_BGED, v_BGED
    if backend == "flash":
        return _flash(*tensors, causal, window, documents, sinks, dropout_p, scale)
    if backend == "documents":
        assert documents is not None
        return _one_by_one(*tensors, documents, causal, window, sinks, dropout_p, scale)
    # 1. A mask, for backends that know no documents, windows or bottom-right alignment
    C, E = call.queries, call.keys
    if backend in ("mask", "plain", "merged") and documents is not None:
        mask, causal = document_mask(documents, q_BNCD.shape, E, causal, window), False
    elif backend == "mask" or (backend == "plain" and causal):
        ages = ages_of(C, E, q_BNCD.device)
        mask, causal = (ages >= 0) & (ages < (E if window is None else window)), False
    # 2. Kernels of a CPU; parts to be merged are in float32 or float64
    if backend in ("merged", "blocks"):
        dtype, parts = q_BNCD.dtype, backend == "blocks" or (causal and C != E)
        wide = compute_dtype(dtype) if call.device == "cpu" and parts else dtype
        q, k, v = (x.to(wide) for x in tensors)
        # autocast would cast the tensors back to 16 bits
        with nullcontext() if wide == dtype else without_autocast(call.device):
            if backend == "merged":
                return merged(q, k, v, causal=causal, mask=mask, sinks=sinks, scale=scale).to(dtype)
            assert window is not None
            return _blocks(q, k, v, window, sinks, dropout_p, scale).to(dtype)
    if backend == "plain":
        assert sinks is not None
        return plain(*tensors, mask=mask, sinks=sinks, dropout_p=dropout_p, scale=scale)
    # 3. torch's own choice
    options: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": dropout_p,
        "is_causal": causal and mask is None and C == E,
        "scale": scale,
        "enable_gqa": q_BNCD.shape[1] != k_BGED.shape[1],
    }
    if call.flash in ("FA3", "FA4") and call.dropout:  # not supported: they raise when called
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(*tensors, **options)
    return F.scaled_dot_product_attention(*tensors, **options)


def describe(q_BNCD: Tensor, k_BGED: Tensor, v_BGED: Tensor, **asked: Any) -> AttentionCall:
    """Return the `AttentionCall` of these tensors on this machine; `asked` sets the other fields."""
    flash, *capability, cudnn_first = _machine(q_BNCD.device)
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
    """Return the implementation of torch's flash operators: "FA2", or the one that was activated."""
    active = getattr(attention, "current_flash_attention_impl", None)  # torch 2.11 and later
    return (active and active()) or "FA2"


@torch.compiler.assume_constant_result
def _machine(device: torch.device) -> tuple[str, int, int, bool]:
    """Return `flash`, the two numbers of `capability`, and `cudnn_first` of an `AttentionCall`.

    torch.compile treats them as constants of its first trace.
    """
    flash = active_flash() if torch.backends.cuda.flash_sdp_enabled() else ""
    if device.type != "cuda":
        return flash, 0, 0, False
    major, minor, cudnn_first = _gpu(device.index)
    return flash, major, minor, cudnn_first and torch.backends.cuda.cudnn_sdp_enabled()


@lru_cache
def _gpu(index: int | None) -> tuple[int, int, bool]:
    """Return the compute capability of a GPU, and True if torch prefers cuDNN to flash attention on it.

    torch determines its order of preference at the first choice, hence the probe.
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
    mask: bool,
    documents: bool,
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
    if causal and not (mask or documents) and q.shape[2] > k.shape[2]:
        raise ValueError(f"attend: {q.shape[2]} queries are not the last of {k.shape[2]} keys")
    if window is not None and not (causal and window > 0):
        raise ValueError(f"attend: a window must be positive and causal, got {window} and causal={causal}")
    if mask and (causal or documents):
        raise ValueError("attend: a mask says all: give causal=False, and no window or documents beside it")


def _checked_sinks(sinks: Tensor, q: Tensor, mask: Tensor | None) -> Tensor:
    """Return sinks as (N, 1) or (N, C)."""
    shapes = [(q.shape[1],), *([] if mask is None else [(q.shape[1], q.shape[2])])]
    if tuple(sinks.shape) not in shapes:
        raise ValueError(
            f"attend: sinks must be {shapes[-1]}, a logit for each head, got {tuple(sinks.shape)}"
        )
    return sinks.unsqueeze(1) if sinks.dim() == 1 else sinks


def _flash(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    causal: bool,
    window: int | None,
    documents: Borders | None,
    sinks: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Call torch's flash operator on (B, tokens, heads, D), or (tokens, heads, D) with documents."""
    B, C = q_BNCD.shape[0], q_BNCD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BNCD, k_BGED, v_BGED))
    borders: tuple[Any, ...] = (None, None, C, k_BGED.shape[2])
    if documents is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        borders = documents[:4]
    options = {
        "scale": scale,
        "window_size_left": -1 if window is None else window - 1,
        "window_size_right": 0 if causal else -1,
    }
    call = FlashCall(borders, dropout_p, causal and window is None, options)
    if sinks is None:
        arguments = (*call.borders, call.dropout_p, call.causal, False)
        output = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, **options)[0]
    else:
        output = flash_with_sinks(q, k, v, sinks, call)
    return (output if documents is None else output.unflatten(0, (B, C))).transpose(1, 2)


def _blocks(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    window: int,
    sinks: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Compute windowed attention by blocks of queries, each with the keys in reach of its queries."""
    C, E, outputs = q_BNCD.shape[2], k_BGED.shape[2], []
    size = max(window // 4, _BLOCK)
    for first in range(0, C, size):
        last = min(first + size, C)
        begin, end = max(0, E - C + first - window + 1), E - C + last
        ages = ages_of(last - first, end - begin, q_BNCD.device)
        seen = (ages >= 0) & (ages < window)
        q = q_BNCD[:, :, first:last]
        k, v = (x[:, :, begin:end] for x in (k_BGED, v_BGED))
        if sinks is not None:
            outputs.append(merged(q, k, v, causal=False, mask=seen, sinks=sinks, scale=scale))
            continue
        grouped = q_BNCD.shape[1] != k_BGED.shape[1]
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, dropout_p=dropout_p, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, 2) if len(outputs) != 1 else outputs[0]


def _one_by_one(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    documents: Borders,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Compute each document in a call of its own, as a batch of one."""
    B, _, C, _ = q_BNCD.shape
    q, k, v = (x.permute(1, 0, 2, 3).flatten(1, 2).unsqueeze(0) for x in (q_BNCD, k_BGED, v_BGED))
    sizes = [borders.diff().tolist() for borders in documents[:2]]
    # one split, whose backward concatenates; the backward of each slice would allocate a full gradient
    parts = (x.split(of, 2) for x, of in ((q, sizes[0]), (k, sizes[1]), (v, sizes[1])))
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        if q.shape[2]:
            options = causal, window, False, False, sinks is not None, True, dropout_p, scale
            plan = _plan(q, k, v, *options, _machine(q.device))
            outputs.append(_attend(plan, q, k, v, None, None, sinks, dropout_p, scale))
    return torch.cat(outputs, 2).squeeze(0).unflatten(1, (B, C)).transpose(0, 1)
