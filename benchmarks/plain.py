"""The layer, the GPT and the training step as a user writes them in plain torch, to measure ours against.

Batch first, one fused projection for queries, keys and values grouped by key/value head as ours is, torch's
own attention, norms, GeLU, grouped GEMMs, loss and AdamW. Parameters have the same shapes, so that they can
be ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench_moe_layer import Weights, torch_grouped
from fastmp.config import GPTConfig, OptimizerConfig
from fastmp.nn.gpt import GPT
from fastmp.nn.transformer import TransformerLayer


class PlainExperts(nn.Module):
    """SwiGLU experts behind a softmax router; the probabilities of the chosen ones sum to one."""

    def __init__(self, config: GPTConfig, **place: object) -> None:
        super().__init__()
        assert config.moe is not None
        H, E, F_ = config.hidden_size, config.moe.num_experts, config.moe.expert_ffn_hidden_size
        self.top_k = config.moe.top_k
        self.router = nn.Parameter(torch.empty(E, H, **place))
        self.fc1 = nn.Parameter(torch.empty(E, 2 * F_, H, **place))
        self.fc2 = nn.Parameter(torch.empty(E, H, F_, **place))

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        weights = Weights(self.router, self.fc1, self.fc2)
        return torch_grouped(hidden_BSH.flatten(0, 1), weights, self.top_k).view_as(hidden_BSH)


class PlainLayer(nn.Module):
    """The pre-LN layer of `fastmp.nn.TransformerLayer` on (B, S, H), causal, without dropout."""

    def __init__(self, config: GPTConfig, **place: object) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.num_heads, config.kv_heads, config.head_dim
        H, F_ = config.hidden_size, config.ffn_size
        self.attention_norm = nn.LayerNorm(H, config.layernorm_epsilon, **place)
        self.qkv = nn.Linear(H, (self.heads + 2 * self.kv_heads) * self.width, **place)
        self.proj = nn.Linear(H, H, **place)
        self.mlp_norm = nn.LayerNorm(H, config.layernorm_epsilon, **place)
        self.experts: PlainExperts | None = None
        if config.moe is None:
            self.up, self.down = nn.Linear(H, F_, **place), nn.Linear(F_, H, **place)
        else:
            self.experts = PlainExperts(config, **place)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        hidden_BSH = hidden_BSH + self._attention(self.attention_norm(hidden_BSH))
        normed_BSH = self.mlp_norm(hidden_BSH)
        if self.experts is not None:
            return hidden_BSH + self.experts(normed_BSH)
        return hidden_BSH + self.down(F.gelu(self.up(normed_BSH), approximate="tanh"))

    def _attention(self, hidden_BSH: Tensor) -> Tensor:
        B, S, H = hidden_BSH.shape
        G, R, D = self.kv_heads, self.heads // self.kv_heads, self.width
        q, k, v = self.qkv(hidden_BSH).view(B, S, G, R + 2, D).split((R, 1, 1), dim=3)
        q, k, v = q.reshape(B, S, G * R, D), k.squeeze(3), v.squeeze(3)
        context = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=R > 1
        )
        return self.proj(context.transpose(1, 2).reshape(B, S, H))

    def parts(self, ours: TransformerLayer) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yield each module with the name of a parameter, and the parameter of fastmp that is the same."""
        modules = [
            (self.attention_norm, ours.attention_norm),
            (self.qkv, ours.attention.qkv),
            (self.proj, ours.attention.proj),
            (self.mlp_norm, ours.mlp_norm),
        ]
        if self.experts is None:
            modules += [(self.up, ours.mlp.up), (self.down, ours.mlp.down)]
        else:
            yield self.experts, "router", ours.moe.router.weight
            yield self.experts, "fc1", ours.moe.experts.fc1
            yield self.experts, "fc2", ours.moe.experts.fc2
        for mine, other in modules:
            yield mine, "weight", other.weight
            yield mine, "bias", other.bias

    def share(self, ours: TransformerLayer) -> PlainLayer:
        """Use the very parameters of `ours`."""
        for module, name, parameter in self.parts(ours):
            setattr(module, name, parameter)
        return self


class PlainGPT(nn.Module):
    """The GPT of `fastmp.nn.GPT`, returning the loss of every token."""

    def __init__(self, config: GPTConfig, **place: object) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size, **place)
        self.positions = nn.Embedding(config.max_seq_len, config.hidden_size, **place)
        self.layers = nn.ModuleList(PlainLayer(config, **place) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon, **place)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        hidden_BSH = self.words(tokens_BS) + self.positions.weight[: tokens_BS.shape[1]]
        for layer in self.layers:
            hidden_BSH = layer(hidden_BSH)
        logits_BSV = F.linear(self.final_norm(hidden_BSH), self.words.weight)
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="mean")

    @torch.no_grad()
    def copy_from(self, ours: GPT) -> PlainGPT:
        """Start from the weights of `ours`; its vocabulary has no padding."""
        self.words.weight.copy_(ours.word_embedding.weight)
        self.positions.weight.copy_(ours.position_embedding.weight)
        self.final_norm.weight.copy_(ours.final_norm.weight)
        self.final_norm.bias.copy_(ours.final_norm.bias)
        for mine, other in zip(self.layers, ours.layers, strict=True):
            for module, name, parameter in mine.parts(other):
                getattr(module, name).copy_(parameter)
        return self


def plain_step(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batch: Callable[[], dict[str, Tensor]],
    optimizer: OptimizerConfig,
    dtype: torch.dtype,
) -> Callable[[], Tensor]:
    """Make a training step of `model`: torch's fused AdamW, clipping, autocast to a narrow `dtype`.

    `loss_of` is the model, or the model compiled.
    """
    device = next(model.parameters()).device
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True)

    def step() -> Tensor:
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch().items()}
        with torch.autocast(device.type, dtype, enabled=dtype.itemsize < 4):
            loss = loss_of(inputs["tokens"], inputs["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_grad_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    return step
