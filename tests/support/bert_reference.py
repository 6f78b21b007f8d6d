"""BERT in plain torch, from the full weights of `fastmp.nn.Bert`, and batches to compare the two on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.config import BertConfig, GPTConfig
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Bert
from tools.small_models import SEED, placed

PRE = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    vocab_size=131,
    max_seq_len=16,
    activation="gelu",
    init_std=0.2,
    bert=BertConfig(),
)
POST = replace(PRE, layernorm_epsilon=1e-12, bert=BertConfig(post_norm=True))
BATCH, SEQUENCE = 3, 16


class Sample(NamedTuple):
    """A batch: all (B, S) but `order` (B,); targets are -100 where nothing is masked."""

    tokens: Tensor
    targets: Tensor
    types: Tensor
    padding: Tensor
    order: Tensor


def sample(config: GPTConfig, seed: int = 7, batch: int = BATCH) -> Sample:
    """Rows of several lengths, the first one without padding; no target in padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, SEQUENCE), generator=generator)
    lengths = torch.tensor([SEQUENCE, 9, 14] * batch)[:batch]
    places = torch.arange(SEQUENCE)
    padding = places >= lengths[:, None]
    masked = (torch.rand(batch, SEQUENCE, generator=generator) < 0.3) & ~padding
    targets = torch.randint(config.vocab_size, (batch, SEQUENCE), generator=generator)
    types = (places >= lengths[:, None] // 2).long()
    order = torch.randint(2, (batch,), generator=generator)
    return Sample(tokens, targets.masked_fill(~masked, -100), types, padding, order)


def make_bert(config: GPTConfig, groups: ParallelGroups = ParallelGroups.alone(), **options) -> Bert:
    """The model from the seed of all tests: the same weights at every TP."""
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp))
    on, others = placed(groups, rng=rng, dtype=torch.float64, **options)
    return Bert(config, on, **others)


def full_weights(config: GPTConfig) -> dict[str, Tensor]:
    """Weights of the undivided model as leaves, without padding of the vocabulary; biases are not zero."""
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, param in make_bert(config).named_parameters():
        full = param.detach()
        if name in ("word_embedding.weight", "lm_head.bias"):
            full = full[: config.vocab_size]
        if full.dim() == 1:  # norms and biases, which start at ones and zeros
            full = full + 0.1 * torch.randn(full.shape, generator=generator, dtype=full.dtype)
        weights[name] = full.clone().requires_grad_()
    return weights


def logits_of(config: GPTConfig, w: dict[str, Tensor], given: Sample) -> tuple[Tensor, Tensor]:
    """Logits (B, S, V) of words and (B, 2) of the order of sentences."""
    post, eps = config.bert.post_norm, config.layernorm_epsilon

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def attention(name: str, x: Tensor) -> Tensor:
        qkv = linear(f"{name}.qkv", x).unflatten(-1, (config.num_heads, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(given.padding[:, None, None], -torch.inf)
        return linear(f"{name}.proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    x = F.embedding(given.tokens, w["word_embedding.weight"]) + w["position_embedding.weight"][:SEQUENCE]
    x = x + w["token_type_embedding.weight"][given.types]
    x = norm("embedding_norm", x) if post else x
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        for name, part in (
            ("attention_norm", lambda x, at=at: attention(f"{at}.attention", x)),
            ("mlp_norm", lambda x, at=at: linear(f"{at}.mlp.down", F.gelu(linear(f"{at}.mlp.up", x)))),
        ):
            x = norm(f"{at}.{name}", x + part(x)) if post else x + part(norm(f"{at}.{name}", x))
    x = x if post else norm("final_norm", x)
    head = norm("lm_head.norm", F.gelu(linear("lm_head.dense", x)))
    logits = F.linear(head, w["word_embedding.weight"], w["lm_head.bias"])
    return logits, linear("sentence_head.order", torch.tanh(linear("sentence_head.pooler", x[:, 0])))


def losses_of(config: GPTConfig, w: dict[str, Tensor], given: Sample) -> tuple[Tensor, Tensor]:
    """Sum of the losses of masked tokens, and of the order of sentences."""
    logits, order = logits_of(config, w, given)
    masked = F.cross_entropy(logits.flatten(0, 1), given.targets.flatten(), reduction="sum")
    return masked, F.cross_entropy(order, given.order, reduction="sum")
