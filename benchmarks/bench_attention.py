"""attend of fastmp, attention with a mask of all pairs, and each kernel that takes the same call.

Plain torch repeats keys and values for all query heads and masks, as transformers does. "torch fused" is what
`scaled_dot_product_attention` chooses; on a GPU its kernels, flex_attention, FA3 and FA4 are rivals as well,
each if it takes the call and its result is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from benchmarks.bench_linear_fp8 import agreeing
from benchmarks.cases import EAGER, OURS, TORCH, Case, Workload, compiled, title
from benchmarks.peers import FA3, FA4, peer
from fastmp.ops.attention import Borders, attend

CUDNN, FLASH, EFFICIENT, FLEX = "cuDNN", "FA2", "efficient", "flex_attention"
_KERNELS = {
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    FLASH: SDPBackend.FLASH_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
RIVALS = (OURS, EAGER, TORCH, *_KERNELS, FLEX, FA3, FA4)


@dataclass(frozen=True)
class Call:
    """Causal attention of the last `queries` of `tokens`, within a window or documents of equal lengths."""

    tokens: int
    queries: int
    window: int | None = None
    length: int | None = None
    sinks: bool = False

    @property
    def plain(self) -> bool:
        return self.queries == self.tokens and not (self.window or self.length or self.sinks)

    def sees(self, query: Any, key: Any) -> Any:
        """Return whether a query, by its position in all tokens, sees a key."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        return seen if self.length is None else seen & (query // self.length == key // self.length)

    def pairs(self) -> int:
        """Count what the queries see."""
        reach = self.window or self.length or self.tokens
        whole = min(reach, self.tokens)
        if self.length is not None:
            return self.tokens // self.length * whole * (whole + 1) // 2
        first = self.tokens - self.queries
        return sum(min(whole, position + 1) for position in range(first, self.tokens))


def _eager(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def _case(
    name: str,
    batch: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    dim: int,
    option: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Case:
    """`option` is the window, the number of documents, of queries, or the width of values; 0: none."""
    kind = name.removeprefix("attention ")
    call = Call(
        tokens,
        option if kind == "last" else tokens,
        window=option if "window" in kind else None,
        length=tokens // option if kind == "packed" else None,
        sinks="sinks" in kind,
    )
    width = option if kind == "latent" else dim
    generator = torch.Generator(device).manual_seed(seed)
    random = partial(torch.randn, device=device, generator=generator)
    sizes = (call.queries, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, width)
    q, k, v = (random(batch, *size).to(dtype).transpose(1, 2).requires_grad_() for size in sizes)
    grad = random(batch, call.queries, heads, width).to(dtype).transpose(1, 2)
    sinks = random(heads).to(dtype).requires_grad_() if call.sinks else None
    positions = torch.arange(tokens, device=device)
    seen = call.sees(positions[tokens - call.queries :, None], positions)
    borders = None
    if call.length is not None:
        ends = torch.arange(0, tokens + 1, call.length, device=device, dtype=torch.int32)
        borders = Borders(ends, ends, call.length, call.length)
    rivals: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: attend(q, k, v, window=call.window, documents=borders, sinks=sinks),
        EAGER: lambda: _eager(q, k, v, seen, sinks),
    }
    if call.plain:
        rivals[TORCH] = partial(_by_torch, q, k, v)
    if torch.device(device).type == "cuda":
        for rival, made in _on_gpu(call, q, k, v, borders, sinks, device).items():
            agreeing(rivals, rival, made)
    products, moved = 2 * batch * heads * call.pairs(), q.nbytes + k.nbytes + v.nbytes + grad.nbytes
    return Case(
        title(name, (batch, heads, kv_heads, tokens, dim, option), dtype),
        (q, k, v) if sinks is None else (q, k, v, sinks),
        grad,
        rivals,
        moved,
        2 * moved,
        flops=(products * (dim + width), products * (3 * dim + 2 * width)),
    )


def _by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


def _on_gpu(
    call: Call, q: Tensor, k: Tensor, v: Tensor, borders: Borders | None, sinks: Tensor | None, device: str
) -> dict[str, Callable[[], Tensor]]:
    """Return the calls of all kernels that may take this one; of packages, FA4 alone knows sinks."""
    found: dict[str, Callable[[], Tensor]] = {}

    def by_kernel(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return _by_torch(q, k, v)

    if call.plain:
        found |= {name: partial(by_kernel, kernel) for name, kernel in _KERNELS.items()}
    if sinks is None:
        first, sizes = call.tokens - call.queries, (None, None, call.queries, call.tokens)
        visible = lambda batch, head, query, key: call.sees(query + first, key)  # noqa: E731
        blocks = flex_attention.create_block_mask(visible, *sizes, device=device)
        flex = compiled(flex_attention.flex_attention)
        found[FLEX] = lambda: flex(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
    # FA3 and FA4 take (batch, tokens, heads, elements); packed documents have no batch.
    laid_out = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    options: dict[str, Any] = {"causal": True}
    if call.window is not None:
        options["window_size"] = (call.window - 1, 0)
    if sinks is not None:
        options["learnable_sink"] = sinks
    function = "flash_attn_func" if borders is None else "flash_attn_varlen_func"
    if borders is not None:
        laid_out = [tensor.flatten(0, 1) for tensor in laid_out]
        options |= {"cu_seqlens_q": borders.queries, "cu_seqlens_k": borders.keys}
        options |= {"max_seqlen_q": call.length, "max_seqlen_k": call.length}

    def by_package(attention: Callable) -> Tensor:
        result = attention(*laid_out, **options)
        out = result[0] if isinstance(result, tuple) else result
        return (out if borders is None else out.unflatten(0, (len(q), -1))).transpose(1, 2)

    for name, module in ((FA3, "flash_attn_interface"), (FA4, "flash_attn.cute"))[sinks is not None :]:
        if (attention := peer(name, f"{module}:{function}", device)) is not None:
            found[name] = partial(by_package, attention)
    return found


def _workload(kind: str, cuda: tuple, cpu: tuple, tiny: tuple) -> Workload:
    name = f"attention {kind}"
    return Workload(name, partial(_case, name), cpu=(cpu,), cuda=cuda, rivals=RIVALS, tiny=tiny)


# Batch, heads of queries, of keys, tokens, elements of a head, option: a dense 1 B model, Llama-3 8B, long
# sequences, Mistral's window, GPT-OSS, DeepSeek-V3.
WORKLOADS = (
    _workload(
        "causal",
        ((2, 16, 16, 4096, 128, 0), (2, 32, 8, 4096, 128, 0), (1, 32, 8, 16384, 128, 0)),
        (1, 8, 2, 4096, 64, 0),
        (2, 4, 2, 32, 8, 0),
    ),
    _workload("last", ((1, 32, 8, 16384, 128, 4096),), (1, 8, 2, 4096, 64, 1024), (2, 4, 2, 32, 8, 8)),
    _workload("window", ((1, 32, 8, 16384, 128, 4096),), (1, 8, 2, 4096, 64, 256), (2, 4, 2, 32, 8, 8)),
    _workload("packed", ((1, 32, 8, 16384, 128, 8),), (1, 8, 2, 4096, 64, 8), (1, 4, 2, 32, 8, 4)),
    _workload("sinks", ((1, 64, 8, 4096, 64, 0),), (1, 8, 2, 2048, 64, 0), (2, 4, 2, 32, 8, 0)),
    _workload("window, sinks", ((1, 64, 8, 4096, 64, 128),), (1, 8, 2, 2048, 64, 128), (2, 4, 2, 32, 8, 8)),
    _workload("latent", ((1, 128, 128, 4096, 192, 128),), (1, 8, 8, 1024, 192, 128), (2, 4, 4, 32, 24, 16)),
)
