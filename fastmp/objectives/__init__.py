"""Objectives of preference optimisation and reinforcement learning, from log-probabilities of tokens."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "preference": "dpo_loss kto_loss kto_reference_point orpo_loss sequence_log_probs simpo_loss",
        "policy": "dapo_loss group_advantages grpo_loss gspo_loss",
        "log_ratios": "kl_estimates mismatch_weights",
        "from_hidden": "linear_objective token_log_probs",
    },
)
