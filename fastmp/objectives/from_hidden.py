"""Objectives from hidden states and the output weight, on one rank or over a sharded vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.ops.core.checks import check_shape, require
from fastmp.ops.linear_log_probs import linear_log_probs_of
from fastmp.profiling import traced
from fastmp.tensor_parallel.linear_loss import shards_of

IGNORED = -100


@traced("fastmp.token_log_probs")
def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    mask: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    sequence_first: bool = False,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    vocab_size: int | None = None,
    workspace: int | None = None,
) -> Any:
    """Log-probabilities of sampled tokens; tokens outside the mask cost no GEMM.

    The host waits once for a GPU, for the number of tokens in the mask. Under torch.compile and in a CUDA
    graph it cannot, and all tokens are computed.

    Args:
        hidden: (B, S, H), or (N, H) of packed sequences; (S, B, H) with `sequence_first`. With
            `sequence_parallel` this rank's shard along dim 0.
        weight: (V, H); over a `group` this rank's rows, as in `vocab_parallel_linear_log_probs`.
        ids: (B, S) or (N,) int64, the token that each hidden state predicts.
        mask: bool like ids. Others have log-probability, entropy and gradient zero.
        group: tensor-parallel ranks, which get the same results.
        sequence_first: hidden states are (S, B, H), as in a fastmp GPT; ids, mask and results stay (B, S).

        The other arguments and the errors are those of `fastmp.ops.linear_log_probs`.

    Returns:
        The log-probabilities like ids, float32 (float64 for float64); with `return_entropy` also entropies.

    Example:
        hidden, weight = torch.randn(2, 4, 8), torch.randn(16, 8)
        ids, mask = torch.randint(16, (2, 4)), torch.tensor([[False, True, True, True]] * 2)
        log_probs = token_log_probs(hidden, weight, ids, mask)  # (2, 4), zero in the first column
    """
    name = "token_log_probs"
    require(mask.dtype == torch.bool, "{}: expected a bool mask, got {}", name, mask.dtype)
    check_shape(name, ids.shape, to=("ids", ids), mask=mask)
    target = ids.masked_fill(~mask, IGNORED)
    if sequence_first:
        message = "{}: sequence_first expects ids (B, S) for hidden (S, B, H), got shapes {} and {}"
        require(ids.dim() == 2 and hidden.dim() == 3, message, name, ids.shape, hidden.shape)
        target = target.t()
        temperature = temperature.t() if isinstance(temperature, Tensor) else temperature
    result = linear_log_probs_of(
        shards_of(group, sequence_parallel), name, hidden, weight, target, temperature=temperature,
        return_entropy=return_entropy, ignore_index=IGNORED, vocab_size=vocab_size, workspace=workspace,
        skip_ignored=True,
    )  # fmt: skip
    if not sequence_first:
        return result
    return tuple(each.t() for each in result) if return_entropy else result.t()


def linear_objective(
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    mask: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    sequence_first: bool = False,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    workspace: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute an objective of this package from hidden states and the output weight.

    Args:
        objective: a function of `fastmp.objectives` that takes log-probabilities and a mask, as `grpo_loss`.
        hidden, weight, ids, mask: as in `token_log_probs`, and its options up to `workspace`.
        arguments: of the objective; tensors of tokens are like ids, the same on every rank of `group`.

    Returns:
        The loss and the metrics of the objective, the same on every rank.

    Example:
        from fastmp.objectives import grpo_loss

        hidden, weight = torch.randn(2, 4, 8, requires_grad=True), torch.randn(16, 8)
        ids, mask = torch.randint(16, (2, 4)), torch.ones(2, 4, dtype=torch.bool)
        loss, metrics = linear_objective(
            grpo_loss, hidden, weight, ids, mask, advantages=torch.tensor([1.0, -1.0])
        )
        loss.backward()
    """
    log_probs = token_log_probs(
        hidden, weight, ids, mask, group=group, sequence_parallel=sequence_parallel,
        sequence_first=sequence_first, temperature=temperature, vocab_size=vocab_size, workspace=workspace,
    )  # fmt: skip
    return objective(log_probs, mask, **arguments)
