"""The router: top-k expert choice, probabilities and load balancing.

Losses are sums over tokens, as the loss of the model is, so adding up ranks and microbatches and dividing
once by the number of tokens gives the mean. The Switch loss of a token set is

    aux_loss * E * sum over experts e of f_e * S_e

(Fedus et al. 2021, arXiv 2101.03961, times the number of tokens). S_e is the sum of the tokens' normalised
scores of e. f_e, a constant for the gradient, is the share of e in the k best scores of all tokens, before a
bias or groups change the choice (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20; Megatron does the same).
A rank's S_e covers its own tokens, so each rank has its part of the sum, and value and gradient are the same
however tokens are divided. The sequence-level loss takes f_e and S_e of one sequence.

Other libraries differ in three points:

- Shares. In `aux_loss`, f_e counts the tokens of one microbatch over all ranks of tp-cp-dp, or with
  `aux_loss_group` "tp_cp" over those of tp-cp, as Megatron's "aux_loss" does: then data-parallel replicas do
  not wait for each other, and the loss depends on how batches are divided over them. Megatron's
  "global_aux_loss" counts over dp and the microbatches of a step. In `sequence_aux_loss`, f_e counts the
  tokens of one sequence (over tp-cp). Each is one all-reduce of E integers, which runs in the background
  until the layer ends and is not repeated by recomputation.
- Scale. transformers takes the shares and scores of all L layers together and does not divide the choices by
  k. Its `router_aux_loss_coef` c is `aux_loss` c * top_k / L here, exactly so where all layers have equal
  shares.
- Groups. Under softmax a group is as good as its best expert (DeepSeek-V2, arXiv 2405.04434), under sigmoid
  as the sum of its two best (DeepSeek-V3). Megatron adds up the top_k / group_topk best for both:
  `group_score` "megatron".

Balancing without a loss (Wang et al. 2024, arXiv 2408.15664): a bias per expert, added for the choice only,
goes up by a fixed rate where an expert had less than the mean, and down where it had more.

S sequence, B batch, T = S * B tokens of this rank, H hidden, E experts, k chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import Function, once_differentiable
from torch.distributed import ProcessGroup

from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.collectives import all_reduce_, group_size
from fastmp.distributed.deferred import finish_later
from fastmp.nn.dropout import random_stream
from fastmp.nn.init import normal
from fastmp.nn.placement import Placement
from fastmp.nn.recompute import once
from fastmp.ops import RouterOutput, topk_router
from fastmp.ops.core import checks
from fastmp.ops.core.registry import without_autocast
from fastmp.ops.wgrad import MainGrad, add_gradient, main_grad_of, weight_grad
from fastmp.tensor_parallel.attributes import ParallelAttributes
from fastmp.tensor_parallel.layers import ParallelModule

__all__ = ["Router", "moe_config", "update_expert_biases"]


def moe_config(owner: str, config: GPTConfig) -> MoEConfig:
    """Return `config.moe`. Raises ValueError if there is none."""
    if config.moe is None:
        raise ValueError(f"{owner}: GPTConfig.moe is None, which has no experts; pass moe=MoEConfig(...)")
    return config.moe


class Router(ParallelModule):
    """The gate that chooses `config.moe.top_k` experts for each token of this rank.

    The weight (E, H), and with `moe.router_bias` a bias (E,) of the logits, are replicated, but see only this
    rank's tokens: gradients are partial on each tensor-parallel rank, and they are marked
    `sequence_parallel`. Logits are float32 (float64 for float64 tokens).

    Args:
        config: sizes, the `moe` table, and the spread of the initial weights.
        on: losses count over `groups.tp_cp` and `groups.tp_cp_dp`; jitter draws from the stream of this TP
            and CP rank.

    Attributes:
        expert_bias: (E,), a buffer in float32 or float64; None without `moe.expert_bias`.

    Raises:
        ValueError: jitter over several TP or CP ranks without `on.rng`.
    """

    expert_bias: torch.Tensor | None

    def __init__(self, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__(on.groups.tp)
        self.moe, self.groups, self.rng = moe_config("Router", config), on.groups, on.rng
        sharing = group_size(on.groups.tp_cp)
        if self.moe.jitter > 0.0 and on.rng is None and sharing > 1:
            raise ValueError(
                f"Router: jitter {self.moe.jitter} of the tokens of {sharing} ranks needs "
                "rng=RngTracker(...), got rng=None"
            )
        size = (self.moe.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(size, **on.tensor_options))
        self.bias: nn.Parameter | None = None
        if self.moe.router_bias:
            self.bias = nn.Parameter(torch.zeros(size[0], **on.tensor_options))
        self._mark()
        bias = torch.zeros(size[0], device=on.device, dtype=_wide(self.weight.dtype))
        self.register_buffer("expert_bias", bias if self.moe.expert_bias else None)
        self._init_weight(size, normal(config), "full", None)

    def _marks(self) -> dict[str, ParallelAttributes]:
        return dict.fromkeys(("weight", "bias"), ParallelAttributes(sequence_parallel=True))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Router:
        before = self.expert_bias
        super()._apply(fn, recurse)
        now = self.expert_bias
        if before is not None and now is not None:  # kept wide: its steps would be rounded away in 16 bits
            self.expert_bias = (now if before.is_meta else before).to(now.device, _wide(now.dtype))
        return self

    def forward(
        self, tokens_SBH: torch.Tensor, *, late: bool = False, chosen_SBk: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indices (T, k) int32, probs (T, k), the loss of this rank's tokens (), and counts (E,).

        The loss is zero in evaluation mode, where ranks may have different numbers of batches. counts, int32,
        are this rank's tokens for each expert before any are dropped.

        late: all-reduce counts in the background; the value of the loss is valid after
            `fastmp.distributed.deferred.finish_all`.
        chosen_SBk: experts to replay, see `topk_router`: losses and counts are those of these experts. A
            token with -1 chooses.
        """
        moe = self.moe
        # logits (S, B, E), or (T, E) where no loss needs sequences
        logits = router_logits(self._jittered(tokens_SBH), self.weight)
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        if moe.sequence_aux_loss == 0.0:
            logits = logits.flatten(0, 1)
            chosen_SBk = None if chosen_SBk is None else chosen_SBk.flatten(0, 1)
        # scores, top-k and counts in one op: indices and probabilities (T, k)
        chosen = topk_router(
            logits,
            moe.top_k,
            score=moe.score,
            pre_softmax=moe.pre_softmax,
            num_groups=moe.num_groups,
            group_topk=moe.group_topk if moe.num_groups > 1 else None,
            group_score=moe.group_score,
            expert_bias=self.expert_bias,
            normalize=moe.normalize_topk,
            scale=moe.routed_scale,
            balance=self.training and (moe.aux_loss > 0.0 or moe.sequence_aux_loss > 0.0),
            chosen=chosen_SBk,
        )
        loss = self._loss(chosen, late) if self.training else chosen.z_sum.new_zeros(())
        counts, k = chosen.counts, moe.top_k
        if counts.dim() == 2:
            counts = counts.sum(0, dtype=counts.dtype)
        return chosen.indices.view(-1, k), chosen.probs.view(-1, k), loss, counts

    def _loss(self, chosen: RouterOutput, late: bool) -> torch.Tensor:
        moe, groups, counts = self.moe, self.groups, chosen.balance_counts
        terms: list[_Term] = []
        late = late and not torch.compiler.is_compiling()
        late = late and not torch._C._are_functorch_transforms_active()
        if counts is not None and moe.sequence_aux_loss > 0.0:
            terms.append(_term(moe.sequence_aux_loss * moe.num_experts, counts, groups.tp_cp, late))
            counts = counts.sum(0)
        if counts is not None and moe.aux_loss > 0.0:
            group = groups.tp_cp if moe.aux_loss_group == "tp_cp" else groups.tp_cp_dp
            terms.append(_term(moe.aux_loss * moe.num_experts, counts, group, late))
        if late and any(term.summed for term in terms):
            return _LateLoss.apply(chosen.score_sums, chosen.z_sum, moe.z_loss, terms)
        return _loss_of(chosen.score_sums, chosen.z_sum, moe.z_loss, terms)

    @torch.no_grad()
    def check_training(self) -> None:
        """Raise ValueError if the weight is trained, but no loss has a gradient for it."""
        if self.weight.requires_grad and self.moe.training_problem:
            raise ValueError(f"Router: {self.moe.training_problem}")

    def update_expert_bias(self, counts_E: torch.Tensor) -> None:
        """Move the bias by `bias_update_rate` towards equal loads.

        counts_E: the tokens of each expert in a training step: the counts of `forward`, added over
        microbatches and over the ranks of `tp_cp_dp`. The host reads nothing, and nothing happens without a
        bias.
        """
        if self.expert_bias is None:
            return
        counts = counts_E.to(self.expert_bias.dtype)
        self.expert_bias.add_((counts.mean() - counts).sign(), alpha=self.moe.bias_update_rate)

    def _jittered(self, tokens_SBH: torch.Tensor) -> torch.Tensor:
        jitter = self.moe.jitter if self.training else 0.0
        if jitter == 0.0:
            return tokens_SBH
        with random_stream(self.rng, tokens_SBH.device, sharded=True, cp_group=self.groups.cp):
            noise = torch.empty_like(tokens_SBH).uniform_(1.0 - jitter, 1.0 + jitter)
        return tokens_SBH * noise

    def extra_repr(self) -> str:
        return f"{self.moe.num_experts} experts, top_k={self.moe.top_k}, score={self.moe.score}"


def update_expert_biases(routers: Sequence[Any], counts_LE: torch.Tensor) -> None:
    """Call `update_expert_bias` of every router with its row of `counts_LE`, all together where they can."""
    first = routers[0]
    if not all(
        getattr(router.update_expert_bias, "__func__", None) is Router.update_expert_bias
        and router.moe == first.moe
        for router in routers
    ):  # a router of another class, or of other options
        for router, own_E in zip(routers, counts_LE, strict=True):
            router.update_expert_bias(own_E)
    elif first.expert_bias is not None:
        counts = counts_LE.to(first.expert_bias.dtype)
        signs = (counts.mean(1, keepdim=True) - counts).sign()
        biases = [router.expert_bias for router in routers]
        torch._foreach_add_(biases, list(signs), alpha=first.moe.bias_update_rate)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass
class _Term:
    """A balance loss: `factor` times the sum over experts of share and score.

    counts (E,) or (B, E), int64: of all ranks of the group, once `work` is waited for.
    summed: whether the group has several ranks.
    """

    factor: float
    counts: torch.Tensor
    work: dist.Work | None
    summed: bool

    def shares(self, dtype: torch.dtype) -> torch.Tensor:
        return self.counts.to(dtype) / self.counts.sum(-1, keepdim=True).clamp(min=1)


def _term(factor: float, counts: torch.Tensor, group: ProcessGroup | None, late: bool) -> _Term:
    """Start to add up `counts` over the group; a recomputation has the sum of the forward."""
    work = None

    def add_up() -> torch.Tensor:
        nonlocal work
        total = counts.to(torch.int64)  # a copy
        work = all_reduce_(total, group, overlap=late)
        return total

    if group is None or group_size(group) == 1:
        return _Term(factor, counts.to(torch.int64), None, False)
    total = once(add_up)
    return _Term(factor, total, work, True)


def _loss_of(sums: torch.Tensor, z_sum: torch.Tensor, z_loss: float, terms: Sequence[_Term]) -> torch.Tensor:
    loss = sums.new_zeros(())
    for term in terms:
        own = sums if sums.dim() == term.counts.dim() else sums.sum(0)
        loss = loss + term.factor * (term.shares(sums.dtype) * own).sum()
    return loss + z_loss * z_sum if z_loss > 0.0 else loss


class _LateLoss(Function):
    """`_loss_of`, whose value is there at the end of the layer: until then the counts of ranks travel."""

    @staticmethod
    def forward(
        ctx: Any, sums: torch.Tensor, z_sum: torch.Tensor, z_loss: float, terms: Sequence[_Term]
    ) -> torch.Tensor:
        ctx.terms, ctx.z_loss, ctx.shape, ctx.dtype = terms, z_loss, sums.shape, sums.dtype
        loss = sums.new_zeros(())
        sums, z_sum, value = sums.detach(), z_sum.detach(), loss.detach()

        def finish() -> None:
            for term in terms:
                if term.work is not None:
                    term.work.wait()
                    term.work = None
            with torch.no_grad():
                value.copy_(_loss_of(sums, z_sum, z_loss, terms))

        finish_later(finish)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = [(grad * term.factor) * term.shares(ctx.dtype) for term in ctx.terms]
        total = parts[0].expand(ctx.shape)
        for part in parts[1:]:
            total = total + part
        return total, grad * ctx.z_loss if ctx.z_loss > 0.0 else None, None, None


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits (..., E) of x (..., H) and weight (E, H) in float32 (float64), also under autocast.

    Products of 16-bit numbers are exact in float32: a GPU multiplies 16-bit operands on its tensor cores, and
    sums in float32. In backward it splits the gradient into two 16-bit terms, the rounded one and the
    remainder, which keep 16 bits in bfloat16 and 22 in float16. A CPU widens the operands, in backward again.

    The weight's gradient is accumulated into its `main_grad` if there is one: in float32 (float64), or in the
    dtype of the weight, rounded once.

    Raises ValueError for a `main_grad` of another shape, device or dtype.
    """
    main_grad = main_grad_of(weight)
    checks.check_main_grad("router_logits", main_grad, weight=weight)
    return _RouterLogits.apply(x, weight, MainGrad(main_grad, weight))


class _RouterLogits(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, main_grad: MainGrad) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = main_grad
        with without_autocast(x.device.type):
            if not _on_tensor_cores(x, weight):
                return F.linear(x.to(_wide(x.dtype)), weight.to(_wide(x.dtype)))
            logits_TE = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
            return logits_TE.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        grad_TE, x_TH = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if _on_tensor_cores(x, weight):
            # both parts of the gradient side by side, (T, 2E): dgrad adds them up in its sums of float32
            parts = _in_two_parts(grad_TE, x.dtype)
            if ctx.needs_input_grad[0]:
                grad_x = (parts @ weight.repeat(2, 1)).view(x.shape)
            if ctx.needs_input_grad[1]:
                of_parts = torch.mm(parts.t(), x_TH, out_dtype=torch.float32)
                grad_weight = of_parts.view(2, *weight.shape).sum(0)
                total = ctx.main_grad.total()
                if total is not None:
                    add_gradient(total, grad_weight)
                    grad_weight = None
        else:
            if ctx.needs_input_grad[0]:
                grad_x = (grad_TE @ weight.to(grad.dtype)).view(x.shape).to(x.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = weight_grad(grad_TE, x_TH.to(grad.dtype), ctx.main_grad)
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _on_tensor_cores(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True where GEMMs take 16-bit operands and return float32: torch's on a CPU do not."""
    return x.dtype.itemsize == 2 and weight.dtype == x.dtype and not x.is_cpu


def _in_two_parts(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Split a float32 gradient (T, E) into 16-bit terms (T, 2E): the rounded one and the remainder."""
    parts = grad.new_empty(len(grad), 2, grad.shape[1], dtype=dtype)
    parts[:, 0] = grad
    parts[:, 1] = grad - parts[:, 0]
    return parts.view(len(grad), -1)
