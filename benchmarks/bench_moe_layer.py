"""A mixture of experts in place of an MLP: router, sort, two grouped products, weighted sum; and back.

Its rivals have the same weights: a loop over the experts as in transformers, torch's grouped product,
products on several streams whose sizes the host waits for (as Transformer Engine does by default), and the
layers of Liger and Transformer Engine. `python -m benchmarks.bench_moe_layer` prints layers over several
ranks: the table of `bench_dispatchers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import COMPILE, EAGER, LIGER, OURS, TE, TORCH, Case, Workload, compiled, title
from benchmarks.peers import peer
from fastmp.config import GPTConfig, MoEConfig
from fastmp.nn import Placement
from fastmp.nn.moe.layer import MoELayer

STREAMS = "loop on streams"
NUM_STREAMS = 4


@dataclass
class Weights:
    """Router (E, H), first products (E, 2F, H) with gates before ups, second products (E, H, F)."""

    router: Tensor
    fc1: Tensor
    fc2: Tensor

    def route(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Experts (T, k) and their probabilities, as Mixtral and Qwen3-MoE choose them."""
        probs, experts = F.linear(x.float(), self.router.float()).softmax(-1).topk(k, -1)
        return experts, probs / probs.sum(-1, keepdim=True)


def _swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate) * up


def loop_over_experts(x: Tensor, weights: Weights, k: int) -> Tensor:
    """The host waits for the places of every expert's tokens."""
    experts, probs = weights.route(x, k)
    out = torch.zeros_like(x)
    for expert, (fc1, fc2) in enumerate(zip(weights.fc1, weights.fc2, strict=True)):
        tokens, slots = torch.where(experts == expert)
        y = F.linear(_swiglu(F.linear(x[tokens], fc1)), fc2)
        out = out.index_add(0, tokens, (y * probs[tokens, slots, None]).to(x.dtype))
    return out


def _sorted(experts: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Pairs and tokens in the order of the experts."""
    pairs = experts.flatten().argsort(stable=True)
    return pairs, pairs // k


def _summed(y: Tensor, probs: Tensor, pairs: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_add(0, tokens, (y * probs.flatten()[pairs, None]).to(like.dtype))


def torch_grouped(x: Tensor, weights: Weights, k: int) -> Tensor:
    experts, probs = weights.route(x, k)
    pairs, tokens = _sorted(experts, k)
    bounds = torch.arange(len(weights.fc1), device=x.device)
    ends = torch.searchsorted(experts.flatten()[pairs], bounds, right=True, out_int32=True)
    hidden = F.grouped_mm(x[tokens], weights.fc1.transpose(1, 2), offs=ends)
    y = F.grouped_mm(_swiglu(hidden), weights.fc2.transpose(1, 2), offs=ends)
    return _summed(y, probs, pairs, tokens, x)


def _sizes(experts: Tensor, num_experts: int) -> list[int]:
    """Rows of each expert: the host waits."""
    return experts.flatten().bincount(minlength=num_experts).tolist()


def loop_on_streams(streams: Iterable[torch.cuda.Stream]) -> Callable[[Tensor, Weights, int], Tensor]:
    """Autograd runs each expert's backward on the stream of its forward."""
    streams = list(streams)

    def call(x: Tensor, weights: Weights, k: int) -> Tensor:
        experts, probs = weights.route(x, k)
        pairs, tokens = _sorted(experts, k)
        parts = x[tokens].split(_sizes(experts, len(weights.fc1)))
        current = torch.cuda.current_stream(x.device)
        for stream in streams:
            stream.wait_stream(current)
        outputs = []
        for expert, (rows, fc1, fc2) in enumerate(zip(parts, weights.fc1, weights.fc2, strict=True)):
            with torch.cuda.stream(streams[expert % len(streams)]):
                outputs.append(F.linear(_swiglu(F.linear(rows, fc1)), fc2))
        for stream in streams:
            current.wait_stream(stream)
        return _summed(torch.cat(outputs), probs, pairs, tokens, x)

    return call


def _transformer_engine(weights: Weights, x: Tensor, k: int, device: str) -> tuple[Callable, tuple] | None:
    """Its sort, grouped layers and weighted sum, and the leaves: each expert's weights are their own."""
    linear = peer(TE, "transformer_engine.pytorch:GroupedLinear", device)
    permute = peer(TE, "transformer_engine.pytorch:moe_permute", device)
    unpermute = peer(TE, "transformer_engine.pytorch:moe_unpermute", device)
    if linear is None or permute is None or unpermute is None:
        return None
    layers: list[nn.Module] = []
    leaves = [x, weights.router]
    for weight in (weights.fc1, weights.fc2):
        num_experts, width, inputs = weight.shape
        layer = linear(num_experts, inputs, width, bias=False, params_dtype=x.dtype, device=device)
        for expert in range(num_experts):
            own = getattr(layer, f"weight{expert}")
            own.data.copy_(weight[expert])
            leaves.append(own)
        layers.append(layer)

    def call() -> Tensor:
        experts, probs = weights.route(x, k)
        sizes = _sizes(experts, len(weights.fc1))
        rows, places = permute(x, experts.int(), len(x) * k, len(x), map_type="index")
        y = layers[1](_swiglu(layers[0](rows, sizes)), sizes)
        return unpermute(y, places, probs, map_type="index")

    return call, tuple(leaves)


def moe_layer_of(
    hidden: int, experts: int, k: int, ffn: int, dtype: torch.dtype, device: str, **options: Any
) -> MoELayer:
    """Return our layer; options: fields of `Placement`."""
    moe = MoEConfig(num_experts=experts, top_k=k, expert_ffn_hidden_size=ffn, normalize_topk=True)
    config = GPTConfig(
        num_layers=1, hidden_size=hidden, num_heads=1, activation="swiglu", linear_bias=False, moe=moe
    )
    return MoELayer(config, Placement(device=device, dtype=dtype, **options))


def moe_layer_case(
    tokens: int, hidden: int, experts: int, k: int, ffn: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    torch.manual_seed(seed)
    layer = moe_layer_of(hidden, experts, k, ffn, dtype, device)
    weights = Weights(layer.router.weight, layer.experts.fc1, layer.experts.fc2)
    with torch.no_grad():  # numbers of about one all the way, and a choice that is not a matter of rounding
        weights.router.normal_(std=hidden**-0.5)
        weights.fc1.normal_(std=hidden**-0.5)
        weights.fc2.normal_(std=ffn**-0.5)
    x, grad = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()
    rivals: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: layer(x.unsqueeze(1))[0].squeeze(1),
        EAGER: lambda: loop_over_experts(x, weights, k),
        TORCH: lambda: torch_grouped(x, weights, k),
    }
    own_leaves: dict[str, tuple[Tensor, ...]] = {}
    if torch.device(device).type == "cuda":
        with_compile = compiled(torch_grouped)
        on_streams = loop_on_streams(torch.cuda.Stream(device) for _ in range(NUM_STREAMS))
        rivals[COMPILE] = lambda: with_compile(x, weights, k)
        rivals[STREAMS] = lambda: on_streams(x, weights, k)
    if (liger := peer(LIGER, "liger_kernel.ops.fused_moe:LigerFusedMoEFunction", device)) is not None:

        def with_liger() -> Tensor:
            chosen, probs = weights.route(x, k)
            return liger.apply(x, weights.fc1, weights.fc2, chosen.int(), probs.to(dtype))

        rivals[LIGER] = with_liger
    if (engine := _transformer_engine(weights, x, k, device)) is not None:
        rivals[TE], own_leaves[TE] = engine
    held = sum(weight.nbytes for weight in (weights.router, weights.fc1, weights.fc2))
    flops = 2 * tokens * (hidden * experts + 3 * k * hidden * ffn)
    return Case(
        title("moe_layer", (tokens, hidden, experts, k, ffn), dtype),
        (x, weights.router, weights.fc1, weights.fc2),
        grad,
        rivals,
        held + 2 * x.nbytes,
        2 * held + 3 * x.nbytes,
        flops=(flops, 2 * flops),
        own_leaves=own_leaves,
    )


# (tokens, H, E, k, F): Qwen3-30B-A3B with short and long micro-batches, Mixtral 8x7B, and of DeepSeek-V3 the
# share of an expert-parallel rank of eight.
WORKLOADS = (
    Workload(
        "moe_layer",
        moe_layer_case,
        cpu=((512, 512, 16, 4, 256),),
        cuda=(
            (4096, 2048, 128, 8, 768),
            (32768, 2048, 128, 8, 768),
            (8192, 4096, 8, 2, 14336),
            (4096, 7168, 32, 8, 2048),
        ),
        rivals=(OURS, EAGER, TORCH, COMPILE, STREAMS, LIGER, TE),
        tiny=(24, 16, 8, 2, 24),
    ),
)


if __name__ == "__main__":
    from benchmarks.bench_dispatchers import main  # which has this layer's weights from here

    raise SystemExit(main())
