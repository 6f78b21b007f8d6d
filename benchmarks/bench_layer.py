"""A whole transformer layer, forward and backward: fastmp, plain torch, torch.compile, Transformer Engine."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import COMPILE, EAGER, OURS, TE, Case, Workload, compiled, title
from benchmarks.peers import peer
from benchmarks.plain import PlainLayer
from fastmp.config import GPTConfig
from fastmp.nn import Placement
from fastmp.nn.transformer import TransformerLayer

OURS_COMPILED = "fastmp compiled"


def layer_flops(config: GPTConfig, tokens: int, seq_len: int) -> int:
    """Count the forward pass: matrix products, and the half of attention that is not masked."""
    h, f = config.hidden_size, config.ffn_size
    weights = h * (config.num_heads + 2 * config.kv_heads) * config.head_dim + h * h + 2 * h * f
    return 2 * tokens * weights + 2 * tokens * h * (seq_len + 1)


def layer_case(
    seq_len: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Case:
    """One sequence: (S, 1, H) of ours and (1, S, H) of the others are the same memory."""
    config = GPTConfig(
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        max_seq_len=seq_len,
    )
    place = {"device": device, "dtype": dtype}
    torch.manual_seed(seed)
    ours = TransformerLayer(config, Placement(**place))
    plain = PlainLayer(config, **place).share(ours)
    x, grad = (torch.randn(seq_len, 1, hidden, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()
    with_compile = compiled(plain)
    rivals = {
        OURS: lambda: ours(x),
        EAGER: lambda: plain(x.transpose(0, 1)).transpose(0, 1),
        COMPILE: lambda: with_compile(x.transpose(0, 1)).transpose(0, 1),
    }
    own_leaves: dict[str, tuple[Tensor, ...]] = {}
    if device != "cpu":
        ours_compiled = torch.compile(ours, fullgraph=True, dynamic=False)
        rivals[OURS_COMPILED] = lambda: ours_compiled(x)
    if (engine := peer(TE, "transformer_engine.pytorch:TransformerLayer", device)) is not None:
        theirs = engine(
            hidden,
            ffn,
            heads,
            num_gqa_groups=kv_heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            params_dtype=dtype,
            device=device,
        )
        rivals[TE] = lambda: theirs(x)
        own_leaves[TE] = (x, *theirs.parameters())
    leaves = (x, *ours.parameters())
    weights = sum(p.nbytes for p in ours.parameters())
    flops = layer_flops(config, seq_len, seq_len)
    shape = (seq_len, hidden, heads, kv_heads, ffn)
    return Case(
        title("transformer_layer", shape, dtype),
        leaves,
        grad,
        rivals,
        weights + 2 * x.nbytes,
        2 * weights + 3 * x.nbytes,
        flops=(flops, 2 * flops),
        own_leaves=own_leaves,
    )


# (S, H, heads, key/value heads, ffn): GPT-3 175B, the sizes of Llama-3 8B, GPT-3 6.7B; GPT-3 small on a CPU.
WORKLOADS = (
    Workload(
        "transformer_layer",
        layer_case,
        cpu=((512, 768, 12, 12, 3072),),
        cuda=((2048, 12288, 96, 96, 49152), (8192, 4096, 32, 8, 14336), (2048, 4096, 32, 32, 16384)),
        rivals=(OURS, OURS_COMPILED, EAGER, COMPILE, TE),
        tiny=(8, 16, 4, 2, 40),
    ),
)
