"""The layer, the GPT and the training step as a user writes them in plain torch, to measure ours against.

Batch first, one fused projection for queries, keys and values grouped by key/value head as ours is, torch's
own attention, norms, GeLU, loss and AdamW. Parameters have the same shapes, so that they can be ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmp.config import GPTConfig, OptimizerConfig
from fastmp.nn.gpt import GPT
from fastmp.nn.transformer import TransformerLayer


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
        self.up, self.down = nn.Linear(H, F_, **place), nn.Linear(F_, H, **place)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        hidden_BSH = hidden_BSH + self._attention(self.attention_norm(hidden_BSH))
        ffn_BSF = F.gelu(self.up(self.mlp_norm(hidden_BSH)), approximate="tanh")
        return hidden_BSH + self.down(ffn_BSF)

    def _attention(self, hidden_BSH: Tensor) -> Tensor:
        B, S, H = hidden_BSH.shape
        G, R, D = self.kv_heads, self.heads // self.kv_heads, self.width
        q, k, v = self.qkv(hidden_BSH).view(B, S, G, R + 2, D).split((R, 1, 1), dim=3)
        q, k, v = q.reshape(B, S, G * R, D), k.squeeze(3), v.squeeze(3)
        context = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=R > 1
        )
        return self.proj(context.transpose(1, 2).reshape(B, S, H))

    def parts(self, ours: TransformerLayer) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield each module with parameters and its equivalent of fastmp."""
        yield self.attention_norm, ours.attention_norm
        yield self.qkv, ours.attention.qkv
        yield self.proj, ours.attention.proj
        yield self.mlp_norm, ours.mlp_norm
        yield self.up, ours.mlp.up
        yield self.down, ours.mlp.down

    def share(self, ours: TransformerLayer) -> PlainLayer:
        """Use the very parameters of `ours`."""
        for mine, other in self.parts(ours):
            mine.weight, mine.bias = other.weight, other.bias
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
        pairs = [(self.final_norm, ours.final_norm)]
        for layer, other in zip(self.layers, ours.layers, strict=True):
            pairs += layer.parts(other)
        for mine, other in pairs:
            mine.weight.copy_(other.weight)
            mine.bias.copy_(other.bias)
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
