"""Shared by the tests of fastmp.nn.moe: a small layer, what it means in plain torch, its parts on ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from nn_tools import PLAIN_ACTIVATIONS

from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement
from fastmp.nn.moe.layer import MoELayer
from fastmp.tensor_parallel.attributes import parallel_attributes

SEED = 4321
SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}
MOE = MoEConfig(
    num_experts=8,
    top_k=3,
    expert_ffn_hidden_size=12,
    normalize_topk=True,
    aux_loss=0.3,
    sequence_aux_loss=0.2,
    z_loss=0.1,
    shared_expert_ffn_hidden_size=16,
    shared_expert_gate=True,
)
SMALL = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    vocab_size=131,
    max_seq_len=32,
    activation="swiglu",
    linear_bias=False,
    init_std=0.4,
    moe=MOE,
)


def with_moe(**options) -> GPTConfig:
    return replace(SMALL, moe=replace(MOE, **options))


def plain_moe(**options) -> GPTConfig:
    """Without losses and shared expert."""
    off = {"aux_loss": 0.0, "sequence_aux_loss": 0.0, "z_loss": 0.0}
    return with_moe(**(off | {"shared_expert_ffn_hidden_size": 0, "shared_expert_gate": False} | options))


def make_moe(config: GPTConfig, groups: ParallelGroups = ParallelGroups.alone(), **options) -> MoELayer:
    """The layer from the seed of all tests: the same weights on every layout."""
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp))
    return MoELayer(config, Placement(groups, rng=rng, **{"dtype": torch.float64, **options}))


def hidden_states(S: int, B: int, H: int = SMALL.hidden_size, seed: int = 5) -> torch.Tensor:
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def forced(layer: MoELayer, logits_SBE: torch.Tensor) -> torch.Tensor:
    """Hidden states that the router of `layer` gives these logits; makes its weight the identity."""
    E, H = layer.router.weight.shape
    assert H >= E
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(E, H))
    S, B, _ = logits_SBE.shape
    return torch.cat((logits_SBE, hidden_states(S, B, H - E)), -1)


def mlp_of(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: str) -> torch.Tensor:
    return PLAIN_ACTIVATIONS[activation](x @ up.t()) @ down.t()


def reference(layer: MoELayer, hidden_SBH: torch.Tensor, kept=lambda indices, probs: probs):
    """Output, losses and counts of a layer on one rank, one token and one expert at a time.

    `kept(indices (T, k), probs (T, k))` gives the probabilities with those of dropped pairs zero.
    """
    moe, weights = layer.moe, layer.experts
    (S, B, H), E, k = hidden_SBH.shape, layer.moe.num_experts, layer.moe.top_k
    x_TH = hidden_SBH.reshape(S * B, H)
    logits_TE = x_TH @ layer.router.weight.t()
    scores_TE = SCORES[moe.score](logits_TE)
    bias_E = 0.0 if layer.router.expert_bias is None else layer.router.expert_bias

    def best(values_TE: torch.Tensor) -> torch.Tensor:
        return values_TE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]

    indices_Tk = best(scores_TE + bias_E)
    probs_Tk = scores_TE.gather(1, indices_Tk)
    if moe.normalize_topk:
        probs_Tk = probs_Tk / probs_Tk.sum(-1, keepdim=True)
    probs_Tk = probs_Tk * moe.routed_scale
    chosen_TE, best_TE = (F.one_hot(indices, E).sum(1) for indices in (indices_Tk, best(scores_TE)))
    normalised_TE = scores_TE / scores_TE.sum(-1, keepdim=True)

    def balance(rows: torch.Tensor) -> torch.Tensor:
        shares_E = best_TE[rows].sum(0).double() / (k * len(rows))
        return E * (shares_E * normalised_TE[rows].sum(0)).sum()

    tokens = torch.arange(S * B)
    aux = moe.aux_loss * balance(tokens) if S * B else 0.0
    aux = aux + moe.sequence_aux_loss * sum(balance(tokens[tokens % B == b]) for b in range(B) if S)
    aux = aux + moe.z_loss * logits_TE.logsumexp(-1).square().sum()
    weight_Tk = kept(indices_Tk, probs_Tk)
    rows = [
        sum(
            weight_Tk[t, j] * mlp_of(x_TH[t], weights.fc1[e], weights.fc2[e], weights.activation)
            for j, e in enumerate(indices_Tk[t].tolist())
        )
        for t in range(S * B)
    ]
    output_SBH = torch.stack(rows).view(S, B, H) if rows else hidden_SBH * 0
    shared = layer.shared_experts
    if shared is not None:
        y_SBH = mlp_of(hidden_SBH, shared.mlp.up.weight, shared.mlp.down.weight, weights.activation)
        gate = 1.0 if shared.gate is None else (hidden_SBH @ shared.gate.t()).sigmoid()
        output_SBH = output_SBH + y_SBH * gate
    return output_SBH, aux, chosen_TE.sum(0)


def own_part(full_SBX: torch.Tensor, groups: ParallelGroups, sequence_parallel: bool) -> torch.Tensor:
    """This rank's sequences (dp), its part of them (cp), and of that under sequence parallelism (tp)."""
    x = full_SBX.chunk(group_size(groups.dp), 1)[group_rank(groups.dp)]
    x = x.chunk(group_size(groups.cp), 0)[group_rank(groups.cp)]
    return x.chunk(group_size(groups.tp), 0)[group_rank(groups.tp)] if sequence_parallel else x


def reduce_gradients(layer: MoELayer, groups: ParallelGroups) -> None:
    """Reduce gradients as the buffers do: experts over edp, everything else over dp-cp, and over tp
    parameters that saw a part of the tokens only."""
    for param in layer.parameters():
        marks = parallel_attributes(param)
        over = [groups.edp] if marks.expert_parallel else [groups.dp_cp]
        over += [groups.tp] if marks.sequence_parallel else []
        for group in over:
            if group is not None:
                dist.all_reduce(param.grad, group=group)
