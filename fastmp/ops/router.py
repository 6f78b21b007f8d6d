"""MoE router: top-k experts of each token, their probabilities, and the sums for the auxiliary losses.

A token's E logits are read once and stay in registers: scores, k rounds of choosing the best expert, and the
probabilities of the chosen experts. The same launch computes the sums of the auxiliary losses: the load of
each expert (integers), the scores and the squared log-sum-exps over all tokens (in fixed order). The backward
saves logits and indices and recomputes the rest.

Balancing losses count the k best scores of each token, without bias and groups, as the sequence-wise balance
loss of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and Megatron-LM do: a bias that has evened out the loads
must not hide from the loss that the scores are uneven. These are `balance_counts`; `counts` are the experts'
real loads, which DeepSeek-V2's losses count, with groups (arXiv 2405.04434, section 2.2.3, and its code).

Choosing. A token chooses by its scores plus the expert's bias. Without a bias it compares the logits
themselves, which have the same order and no ties by rounding, so all backends choose the same indices.
Ties go to the lower expert, NaN counts as the largest (as in torch.sort), so indices are always k
different experts. With groups, only experts of the `group_topk` best groups can be chosen; a group's score
is its best expert for softmax (DeepSeek-V2, arXiv 2405.04434) and the sum of its two best for elementwise
scores (DeepSeek-V3, arXiv 2412.19437). Megatron-LM's rule, the sum of its k // group_topk best for all, is
the `group_score` "megatron"; where it differs from these two, the reference in plain torch serves.

Elementwise scores are functions of their own logit alone: sigmoid (DeepSeek-V3), and the square root of
softplus (DeepSeek-V4), which does not saturate for large logits. The balancing losses sum their shares of a
token: the softmax of their logarithms. An epsilon in the denominator, as the probabilities have it, would let
the router lower the loss by pushing all logits down.

T tokens, E experts, k chosen.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops.core import checks
from fastmp.ops.core.registry import can_read_values, compute_dtype, register
from fastmp.ops.core.rowwise import sum_rows
from fastmp.ops.router_triton import ELEMENTWISE, check_bias, launch, launch_backward
from fastmp.profiling import traced

_SCORES = ("softmax", *ELEMENTWISE)
GROUP_SCORES = ("deepseek", "megatron")
TINY = 1e-20  # in the denominator of probabilities, as in DeepSeek-V3: 0 where all scores underflow
CUDA_EXPERTS, CUDA_GROUPS = 512, 32  # at most, of the kernel in CUDA C++ (csrc/cuda/router.cu)
LOW = -40.0  # below it sigmoid(x) and softplus(x) are e^x to the last bit of float64


class RouterOutput(NamedTuple):
    """The results of `topk_router` for logits (T, E) or, with a row of sums per sequence, (S, B, E).

    indices: (..., k) int32, the experts of each token, best first.
    probs: (..., k) float32 (float64 for float64 logits), their probabilities.
    counts: (E,) or (B, E) int32, tokens that chose each expert.
    score_sums: (E,) or (B, E), sum over tokens of the scores, normalised to 1 a token.
    z_sum: 0-dim, sum over tokens of the squared log-sum-exp of the logits.
    balance_counts: like `counts`, tokens that would choose each expert without bias and groups; `counts`
        itself where there are none; None with `balance=False`.
    """

    indices: Tensor
    probs: Tensor
    counts: Tensor
    score_sums: Tensor
    z_sum: Tensor
    balance_counts: Tensor | None


# Score names of the op: "softmax", "sigmoid", "sqrtsoftplus", or "logits" for a softmax after the choice.


def _elementwise(x: Tensor, score: str) -> Tensor:
    return x.sigmoid() if score == "sigmoid" else F.softplus(x, threshold=40.0).sqrt()  # e^-40 < 2^-53


def _shares(x: Tensor, score: str) -> Tensor:
    """Return the elementwise scores over their sum, also where all of them underflow; 0 in a row of -inf."""
    if score == "sigmoid":
        log_scores = F.logsigmoid(x)
    else:
        log_scores = torch.where(x < LOW, x, F.softplus(x, threshold=40.0).log()) / 2
    return log_scores.softmax(-1).masked_fill((x == -math.inf).all(-1, keepdim=True), 0)


def _first(keys: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest in order, ties to the lower index; -0 equals 0."""
    return (keys + 0.0).sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _open_experts(
    keys: Tensor, values: Tensor, score: str, num_groups: int, group_topk: int, summed: int
) -> Tensor:
    """Mark the experts of the best groups; for `summed` see `reference`."""
    if summed or score in ELEMENTWISE:
        best = values.unflatten(-1, (num_groups, -1)).sort(dim=-1, descending=True).values
        group = best[..., : summed or 2].sum(-1)
    else:
        group = keys.unflatten(-1, (num_groups, -1)).amax(-1)
    chosen = torch.zeros(group.shape, dtype=torch.bool, device=group.device)
    chosen.scatter_(-1, _first(group, group_topk), True)
    return chosen.repeat_interleave(keys.shape[-1] // num_groups, -1, output_size=keys.shape[-1])


def _choose(
    x: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    group_topk: int,
    summed: int,
) -> Tensor:
    values = x if score == "logits" else scores
    values = values if bias is None else values + bias
    keys = x if bias is None else values
    if num_groups == group_topk:
        return _first(keys, k)
    order = _first(keys, x.shape[-1])
    closed = ~_open_experts(keys, values, score, num_groups, group_topk, summed).gather(-1, order)
    return order.gather(-1, closed.to(torch.uint8).sort(dim=-1, stable=True).indices[..., :k])


def _count(indices: Tensor, logits: Tensor) -> Tensor:
    """Count how often each expert stands in `indices` (..., k): int32, (E,) or (B, E)."""
    if logits.dim() == 3:
        indices = indices + torch.arange(logits.shape[1], device=logits.device)[:, None] * logits.shape[-1]
    counts = torch.zeros(math.prod(logits.shape[1:]), dtype=torch.int32, device=logits.device)
    indices = indices.flatten()
    counts.index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))
    return counts.view(logits.shape[1:])


def reference(
    logits: Tensor,
    expert_bias: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    group_topk: int,
    normalize: bool,
    scale: float,
    balance: bool,
    summed: int = 0,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the fields of `RouterOutput`; the last one is empty unless `balance`.

    summed: number of a group's best experts that are summed for its score; 0: the rule of DeepSeek's papers.
    chosen: (..., k) experts, which are then not chosen here.
    """
    check_bias(logits, expert_bias)
    x = logits.to(compute_dtype(logits.dtype))
    scores = _elementwise(x, score) if score in ELEMENTWISE else x.softmax(-1)
    if chosen is None:
        indices = _choose(x.detach(), scores.detach(), expert_bias, k, score, num_groups, group_topk, summed)
    else:
        indices = chosen.long()
    if normalize and score not in ELEMENTWISE:
        probs = x.gather(-1, indices).softmax(-1)
    else:
        probs = scores.gather(-1, indices)
        probs = probs / (probs.sum(-1, keepdim=True) + TINY) if normalize else probs
    if score in ELEMENTWISE:
        scores = _shares(x, score)
    return (
        indices.to(torch.int32),
        (probs * scale).contiguous(),
        _count(indices, logits),
        sum_rows(scores),
        sum_rows(x.logsumexp(-1).square().flatten()),
        _count(_first(x, k), logits) if balance else logits.new_empty(0, dtype=torch.int32),
    )


def _chosen(indices: Tensor, num_experts: int, values: Tensor | None) -> Tensor:
    """Put `values` (1 if None) at the chosen experts of (..., E), and 0 elsewhere."""
    dtype = torch.bool if values is None else values.dtype
    out = torch.zeros((*indices.shape[:-1], num_experts), dtype=dtype, device=indices.device)
    return out.scatter_(-1, indices.long(), True if values is None else values)


def reference_backward(
    grad_probs: Tensor | None,
    grad_sums: Tensor | None,
    grad_z: Tensor | None,
    logits: Tensor,
    indices: Tensor,
    score: str,
    normalize: bool,
    scale: float,
) -> Tensor:
    """Compute the gradient of the logits; a gradient that is None is zero."""
    x = logits.to(compute_dtype(logits.dtype))
    elementwise = score in ELEMENTWISE
    weights = x.softmax(-1)
    scores = _elementwise(x, score) if elementwise else weights
    dscores = torch.zeros_like(x)
    dx = torch.zeros_like(x)
    if grad_sums is not None:
        if elementwise:  # through the softmax of the logarithms of the scores
            shares = _shares(x, score)
            dlogs = shares * (grad_sums - (shares * grad_sums).sum(-1, keepdim=True))
            half = x.sigmoid() / (2 * scores.square())  # of sqrtsoftplus
            dx = dx + dlogs * ((-x).sigmoid() if score == "sigmoid" else torch.where(x < LOW, 0.5, half))
        else:
            dscores = dscores + grad_sums
    if grad_probs is not None:
        grad = grad_probs * scale
        place = indices.long()
        if normalize and not elementwise:
            own = x.gather(-1, place).softmax(-1)
            grad = own * (grad - (own * grad).sum(-1, keepdim=True))
            dx = dx + _chosen(indices, x.shape[-1], grad)
        else:
            if normalize:
                chosen = scores.gather(-1, place)
                total = chosen.sum(-1, keepdim=True) + TINY
                grad = (grad - (chosen * grad).sum(-1, keepdim=True) / total) / total
            dscores = dscores + _chosen(indices, x.shape[-1], grad)
    if score == "sigmoid":
        dx = dx + dscores * scores * (1 - scores)
    elif elementwise:
        dx = dx + dscores * torch.where(scores == 0, 0, x.sigmoid() / (2 * scores))
    else:
        dx = dx + scores * (dscores - (scores * dscores).sum(-1, keepdim=True))
    if grad_z is not None:
        dx = dx + weights * (2 * grad_z * x.logsumexp(-1, keepdim=True))
    return dx.to(logits.dtype).contiguous()


def _fake_backward(grad_probs, grad_sums, grad_z, logits, *options):
    sums = math.prod(logits.shape[1:])  # for each expert, of each sequence if there is a batch
    if grad_sums is not None:
        fits, misfit = grad_sums.numel() == sums, "topk_router_backward: expected {} grad_sums, got {}"
        checks.require(fits, misfit, sums, grad_sums.shape)
    return logits.new_empty(logits.shape)


def _fake(logits, expert_bias, k, score, num_groups, group_topk, normalize, scale, balance):
    wide = compute_dtype(logits.dtype)
    sums = logits.shape[1:]
    return (
        logits.new_empty((*logits.shape[:-1], k), dtype=torch.int32),
        logits.new_empty((*logits.shape[:-1], k), dtype=wide),
        logits.new_empty(sums, dtype=torch.int32),
        logits.new_empty(sums, dtype=wide),
        logits.new_empty((), dtype=wide),
        logits.new_empty(sums if balance else (0,), dtype=torch.int32),
    )


def _flops(logits, expert_bias, k, *options) -> int:
    """Count the scores and their sums, but not the comparisons of the choice."""
    return math.prod(logits.shape) * (6 if expert_bias is None else 7)


register(
    "topk_router_backward(Tensor? grad_probs, Tensor? grad_sums, Tensor? grad_z, Tensor logits,"
    " Tensor indices, str score, bool normalize, float scale) -> Tensor",
    contract=(
        "logits (..., E) floating; 2 <= dims <= 3; indices (..., S) int32; grad_probs (#Q) wide(logits); "
        "Q == M * S; grad_sums (?) wide(logits); grad_z (#1) wide(logits); "
        "score in softmax logits sigmoid sqrtsoftplus"
    ),
    reference=reference_backward,
    fake=_fake_backward,
    triton=launch_backward,
    flops=lambda grad_probs, grad_sums, grad_z, logits, *options: math.prod(logits.shape) * 10,
)


_topk_router = register(
    "topk_router(Tensor logits, Tensor? expert_bias, int k, str score, int num_groups, int group_topk,"
    " bool normalize, float scale, bool balance)"
    " -> (Tensor indices, Tensor probs, Tensor counts, Tensor score_sums, Tensor z_sum,"
    " Tensor balance_counts)",
    contract=(
        "logits (..., E) floating; 2 <= dims <= 3; expert_bias (#E) wide(logits); "
        "score in softmax logits sigmoid sqrtsoftplus; 0 < k; 0 < num_groups; E % num_groups == 0; "
        "0 < group_topk <= num_groups; k <= E // num_groups * group_topk"
    ),
    reference=reference,
    fake=_fake,
    triton=launch,
    prefers_cuda=lambda logits, bias, k, score, num_groups, *others: (
        logits.shape[-1] <= CUDA_EXPERTS and num_groups <= CUDA_GROUPS
    ),
    flops=_flops,
    autograd_formula="topk_router_backward(grad_probs?, grad_score_sums?, grad_z_sum?, logits, indices, "
    "score, normalize, scale) -> logits",
)


@checks.memoized
def _check(
    logits: Tensor,
    expert_bias: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    group_topk: int,
    group_score: str,
) -> None:
    def require(condition: bool, message: str, *values: Any) -> None:
        checks.require(condition, "topk_router: " + message, *values)

    checks.check_choice("topk_router", "score", score, _SCORES)
    checks.check_choice("topk_router", "group_score", group_score, GROUP_SCORES)
    checks.check_floating("topk_router", "logits", logits)
    require(logits.dim() in (2, 3), "logits must be (T, E) or (S, B, E), got shape {}", logits.shape)
    experts = logits.shape[-1]
    require(1 <= k <= experts, "k must be between 1 and the {} experts, got {}", experts, k)
    divides = num_groups >= 1 and experts % num_groups == 0
    require(divides, "{} experts do not divide into num_groups={}", experts, num_groups)
    opens = 1 <= group_topk <= num_groups
    require(opens, "group_topk must be between 1 and num_groups={}, got {}", num_groups, group_topk)
    size = experts // num_groups
    require(k <= size * group_topk, "k={} experts are not in group_topk={} groups of {}", k, group_topk, size)
    if group_score == "megatron" and group_topk < num_groups:
        require(k >= group_topk, "group_score 'megatron' needs k >= group_topk={}, got {}", group_topk, k)
    if expert_bias is not None:
        checks.check_shape("topk_router", logits.shape[-1:], to=("logits", logits), expert_bias=expert_bias)
        floating = expert_bias.is_floating_point()
        require(floating, "expert_bias must be floating, got {}", expert_bias.dtype)
        checks.check_same_device("topk_router", logits=logits, expert_bias=expert_bias)


def _check_chosen(logits: Tensor, k: int, chosen: Tensor) -> None:
    expected = (*logits.shape[:-1], k)
    checks.require(
        tuple(chosen.shape) == expected and not chosen.is_floating_point(),
        "topk_router: expected integers of shape {} in chosen, got {} of shape {}",
        *(expected, chosen.dtype, chosen.shape),
    )
    checks.check_same_device("topk_router", logits=logits, chosen=chosen)
    if can_read_values(chosen) and chosen.numel():
        message = "topk_router: chosen has expert {}, but there are {}"
        checks.require(int(chosen.max()) < logits.shape[-1], message, int(chosen.max()), logits.shape[-1])


@traced("fastmp.topk_router")
def topk_router(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    pre_softmax: bool = True,
    num_groups: int = 1,
    group_topk: int | None = None,
    group_score: str = "deepseek",
    expert_bias: Tensor | None = None,
    normalize: bool = False,
    scale: float = 1.0,
    balance: bool = True,
    chosen: Tensor | None = None,
) -> RouterOutput:
    """Top-k routing: the k experts of each token, their probabilities, and sums for the balancing losses.

    Differentiable once in `probs`, `score_sums` and `z_sum`; under autocast logits keep their dtype.

    Args:
        logits: (T, E), or (S, B, E) for sums per sequence; float64, float32, bfloat16 or float16.
        k: the number of experts that a token chooses.
        score: "softmax", "sigmoid" or "sqrtsoftplus" (the square root of softplus) of the logits.
        pre_softmax: take the softmax over all experts before the choice. Otherwise tokens choose by logits,
            and the softmax is that of the k chosen ones. It has no effect on elementwise scores.
        num_groups, group_topk: experts come in `num_groups` equal groups of neighbours, and a token chooses
            from its `group_topk` (default: all) best ones.
        group_score: score of a group. "deepseek": its best expert under softmax (DeepSeek-V2), the sum of its
            two best under the others (DeepSeek-V3). "megatron": the sum of its k // group_topk best; if that
            number differs from DeepSeek's, plain torch serves the call.
        expert_bias: (E,), added to the scores (logits if `pre_softmax` is off) for the choice only; no
            gradient.
        normalize: divide the k probabilities by their sum (softmax: exactly the softmax of the k logits).
        scale: multiplies the probabilities last.
        balance: count `balance_counts`. With a bias or groups that takes another k rounds of choosing;
            without them it is `counts` and free.
        chosen: (..., k) integers, experts to replay in place of the choice: probabilities and sums are those
            of these experts under these logits. A token with a negative entry chooses. Plain torch serves the
            probabilities, so bits may differ from those of a call without `chosen`.

    Returns:
        `RouterOutput`. Arithmetic is in float32 (float64). NaN logits are chosen first, and make the token's
        probabilities NaN if softmax is taken over them, and the sums NaN.

    Raises:
        ValueError: shapes, dtypes, devices or counts do not fit.

    Example:
        logits = torch.randn(16, 8, requires_grad=True)  # 16 tokens, 8 experts
        routed = topk_router(logits, 2, normalize=True)
        routed.indices, routed.probs  # (16, 2) each
        balance_loss = 8 * (routed.balance_counts * routed.score_sums).sum() / (2 * 16 * 16)

    Shazeer et al. 2017 (arXiv 1701.06538); Switch, Fedus et al. 2021 (arXiv 2101.03961) for the sums; Wang et
    al. 2024 (arXiv 2408.15664) for the bias.
    """
    group_topk = num_groups if group_topk is None else group_topk
    _check(logits, expert_bias, k, score, num_groups, group_topk, group_score)
    if expert_bias is not None:
        expert_bias = expert_bias.detach() if expert_bias.requires_grad else expert_bias
        expert_bias = expert_bias.to(compute_dtype(logits.dtype))
    if score == "softmax" and not pre_softmax:
        score, normalize = "logits", True
    twice = balance and (expert_bias is not None or group_topk < num_groups)
    options = k, score, num_groups, group_topk, normalize, float(scale), twice
    summed = k // group_topk if group_score == "megatron" and group_topk < num_groups else 0
    best = (
        _topk_router if summed in (0, 2 if score in ELEMENTWISE else 1) else partial(reference, summed=summed)
    )
    if chosen is None:
        found = best(logits, expert_bias, *options)
    else:
        _check_chosen(logits, k, chosen)
        own = best(logits.detach(), expert_bias, *options)[0]
        replayed = (chosen >= 0).all(-1, keepdim=True)
        found = reference(logits, expert_bias, *options, chosen=chosen.to(own.dtype).where(replayed, own))
    indices, probs, counts, score_sums, z_sum, balance_counts = found
    balance_counts = balance_counts if twice else counts if balance else None
    return RouterOutput(indices, probs, counts, score_sums, z_sum, balance_counts)
