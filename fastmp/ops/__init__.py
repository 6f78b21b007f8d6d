"""Fused tensor ops (`torch.ops.fastmp.*`) of one device; they know neither ranks nor modules.

Importing this package registers every op. `backends()` lists the kernel that serves each op on each device.
"""

from __future__ import annotations

import fastmp.ops.exchange  # ops of token dispatchers, which import the module
import fastmp.ops.stash  # ops of experts, likewise
import fastmp.ops.stashed_mlp  # noqa: F401
from fastmp.ops.activation import bias_gelu
from fastmp.ops.adamw import adamw_
from fastmp.ops.blocks import block_rows
from fastmp.ops.capacity import apply_capacity
from fastmp.ops.clamped_swiglu import clamped_swiglu
from fastmp.ops.core.registry import OPS
from fastmp.ops.cross_entropy import cross_entropy, cross_entropy_from_stats
from fastmp.ops.dropout import bias_dropout_add
from fastmp.ops.finite import first_not_finite
from fastmp.ops.gated import geglu, swiglu
from fastmp.ops.grouped_lora import grouped_lora
from fastmp.ops.grouped_mm import grouped_mlp_in, grouped_mm
from fastmp.ops.grouped_mm_fp8 import grouped_mlp_in_fp8, grouped_mm_fp8
from fastmp.ops.grouped_mm_tiles import grouped_mm_choice
from fastmp.ops.latent import latent_norm_rope
from fastmp.ops.linear_cross_entropy import linear_cross_entropy
from fastmp.ops.linear_distillation import linear_distillation, linear_topk_distillation
from fastmp.ops.linear_fp8 import linear_fp8
from fastmp.ops.linear_log_probs import linear_log_probs
from fastmp.ops.norm import layer_norm, rms_norm
from fastmp.ops.permute import permutation, permute, unpermute
from fastmp.ops.precompile import warm_up
from fastmp.ops.quantize import dequantize_rows, quantize_rows, quantize_weight
from fastmp.ops.rope import rope, rope_cos_sin, rope_qk
from fastmp.ops.router import RouterOutput, topk_router
from fastmp.ops.softmax import scaled_masked_softmax


def backends() -> dict[str, dict[str, tuple[str, str]]]:
    """Return the backend of each op on each device, and the reason for the choice.

    Returns:
        {op: {"cpu": (backend, reason), "cuda": (backend, reason)}}; backends are "c++", "triton", "cuda" and
        "reference".

    Example:

        backend, reason = backends()["bias_gelu"]["cpu"]
        print(f"bias_gelu on a CPU: {backend} ({reason})")
    """
    return {
        name: {device: (op.serving[device], op.reasons[device]) for device in op.serving}
        for name, op in OPS.items()
    }


__all__ = [
    "RouterOutput",
    "adamw_",
    "apply_capacity",
    "backends",
    "bias_dropout_add",
    "bias_gelu",
    "block_rows",
    "clamped_swiglu",
    "cross_entropy",
    "cross_entropy_from_stats",
    "dequantize_rows",
    "first_not_finite",
    "geglu",
    "grouped_lora",
    "grouped_mlp_in",
    "grouped_mlp_in_fp8",
    "grouped_mm",
    "grouped_mm_choice",
    "grouped_mm_fp8",
    "latent_norm_rope",
    "layer_norm",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_fp8",
    "linear_log_probs",
    "linear_topk_distillation",
    "permutation",
    "permute",
    "quantize_rows",
    "quantize_weight",
    "rms_norm",
    "rope",
    "rope_cos_sin",
    "rope_qk",
    "scaled_masked_softmax",
    "swiglu",
    "topk_router",
    "unpermute",
    "warm_up",
]
