"""Llama, Mistral, Qwen2 and Qwen3, and the entries that all Llama-like decoders share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families.family import (
    Acceleration,
    Conversion,
    Family,
    Field,
    SlidingWindow,
    TPTable,
    optional_int,
)
from fastmp.hf.heads import CausalLM, CausalLMWithRouters, MoeCausalLM
from fastmp.hf.patches import Attention, GatedMLP, GroupedRouter, ModulePatch, RMSNormPatch
from fastmp.hf.tp_modules import (
    ColumnParallel,
    CopyToTPRegion,
    Elementwise,
    ExpertParallel,
    Heads,
    PerHeadNorm,
    RowParallel,
)

LAYERS = "model.layers"
MODEL_WEIGHTS = {
    "word_embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER_WEIGHTS = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "attention.proj.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.up.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
QKV_BIAS_WEIGHTS = {"attention.qkv.bias": "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"}
QK_NORM_WEIGHTS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
EXPERT_WEIGHTS = {
    "moe.router.weight": "mlp.gate.weight",
    "moe.experts.fc1": "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
    "moe.experts.fc2": "mlp.experts.{e}.down_proj.weight",
}
# the experts of a layer stacked in one tensor: in memory since transformers 5, and in some files
FUSED_EXPERT_WEIGHTS = {
    "moe.router.weight": "mlp.gate.weight",
    "moe.experts.fc1": "mlp.experts.gate_up_proj",
    "moe.experts.fc2": "mlp.experts.down_proj",
}
SHARED_EXPERT_WEIGHTS = {
    "moe.shared_experts.mlp.up.weight": (
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight"
    ),
    "moe.shared_experts.mlp.down.weight": "mlp.shared_experts.down_proj.weight",
}
MTP_WEIGHTS = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "proj.weight": "eh_proj.weight",
    "final_norm.weight": "shared_head.norm.weight",
}
# copies that files have of the weights that MTP modules share with the model
MTP_COPIES = {
    "word_embedding.weight": "embed_tokens.weight",
    "output_layer.weight": "shared_head.head.weight",
}
MTP_FIELDS = {"num_nextn_predict_layers": Field("mtp_depth", 0)}
GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu": "geglu_erf"}
FIELDS = {
    "vocab_size": Field("vocab_size"),
    "hidden_size": Field("hidden_size"),
    "intermediate_size": Field("ffn_hidden_size"),
    "num_hidden_layers": Field("num_layers"),
    "num_attention_heads": Field("num_heads"),
    "num_key_value_heads": Field("num_kv_heads", 32),
    "max_position_embeddings": Field("max_seq_len"),
    "rms_norm_eps": Field("layernorm_epsilon", 1e-6),
    "initializer_range": Field("init_std", 0.02),
    "attention_dropout": Field("attention_dropout", 0.0),
    "tie_word_embeddings": Field("tie_embeddings", False),
    "hidden_act": Field("activation", "silu", GATED),
}
HEAD_DIM = {"head_dim": Field("head_size", None)}
EXPERT_FIELDS = {
    "num_experts_per_tok": Field("moe.top_k"),
    "moe_intermediate_size": Field("moe.expert_ffn_hidden_size"),
    "norm_topk_prob": Field("moe.normalize_topk", False),
}
GROUPED_EXPERT_FIELDS = EXPERT_FIELDS | {
    "n_routed_experts": Field("moe.num_experts"),
    "routed_scaling_factor": Field("moe.routed_scale", 1.0),
    "n_group": Field("moe.num_groups", 1),
    "topk_group": Field("moe.group_topk", 1),
}
MODEL = {"norm": "rmsnorm", "position": "rope", "linear_bias": False}
NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}

ATTENTION_PLAN: TPTable = {
    "": Heads,
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColumnParallel),
    "o_proj": RowParallel,
    "q_norm": PerHeadNorm,
    "k_norm": PerHeadNorm,
}
MLP_PLAN: TPTable = {
    "": CopyToTPRegion,
    "gate_proj": ColumnParallel,
    "up_proj": ColumnParallel,
    "act_fn": Elementwise,
    "down_proj": RowParallel,
}
EXPERTS_PLAN: TPTable = {"": ExpertParallel}


def conversion(
    architecture: str,
    *,
    layer_weights: Mapping[str, str] = {},
    fields: Mapping[str, Field] = {},
    model: Mapping[str, Any] = {},
    **options: Any,
) -> Conversion:
    """Return the `Conversion` of a family: the tables of Llama, and these entries on top."""
    return Conversion(
        architecture,
        LAYERS,
        MODEL_WEIGHTS,
        {**LAYER_WEIGHTS, **layer_weights},
        {**FIELDS, **fields},
        {**MODEL, **model},
        **options,
    )


def read_shared_experts(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    """Read the shared experts of DeepSeek's models: as wide as so many routed experts."""
    shared = optional_int(content, "n_shared_experts", None) or 0
    model["moe"]["shared_expert_ffn_hidden_size"] = shared * model["moe"]["expert_ffn_hidden_size"]


def write_shared_experts(config: GPTConfig) -> dict[str, Any]:
    """Return the keys of shared experts, and of the dense layers before those with experts."""
    moe = config.moe
    assert moe is not None
    return {
        "first_k_dense_replace": len(config.dense_layers),
        "n_shared_experts": moe.shared_expert_ffn_hidden_size // moe.expert_ffn_hidden_size,
    }


def dense(prefix: str, head: type[ModulePatch] = CausalLM, **others: type[ModulePatch]) -> Acceleration:
    """Return the replacements of a decoder whose classes are Llama's with another prefix.

    Args:
        prefix: of the classes, such as "Llama" of `LlamaAttention`.
        head: the patch of `<prefix>ForCausalLM`.
        others: patches of further classes, without the prefix, or other patches of Llama's.
    """
    patches: dict[str, type[ModulePatch]] = {
        "RMSNorm": RMSNormPatch,
        "Attention": Attention,
        "MLP": GatedMLP,
        "ForCausalLM": head,
        **others,
    }
    return Acceleration(
        {f"{prefix}{name}": patch for name, patch in patches.items()},
        tp_plan={f"{prefix}Attention": ATTENTION_PLAN, f"{prefix}MLP": MLP_PLAN},
    )


def mixture(
    prefix: str, *, dense_layers: bool = False, norm: type[ModulePatch] = RMSNormPatch
) -> Acceleration:
    """Return the replacements of a decoder with experts.

    Args:
        prefix: of the classes, as in `dense`.
        dense_layers: some layers have an MLP of class `<prefix>MLP`.
        norm: the patch of its RMSNorm.
    """
    like = dense(prefix, MoeCausalLM, RMSNorm=norm)
    experts = f"{prefix}Experts"
    left_out = () if dense_layers else (f"{prefix}MLP",)
    patches = {name: patch for name, patch in like.patches.items() if name not in left_out}
    plan = {name: table for name, table in like.tp_plan.items() if name not in left_out}
    return Acceleration(patches, experts, {**plan, experts: EXPERTS_PLAN})


def grouped_mixture(prefix: str, attention: type[ModulePatch] = Attention) -> Acceleration:
    """Return the replacements of a decoder with DeepSeek-V3's router, shared experts and dense layers."""
    like = dense(prefix, CausalLMWithRouters, Attention=attention, TopkRouter=GroupedRouter)
    experts = f"{prefix}Experts"
    return Acceleration(like.patches, experts, {**like.tp_plan, experts: EXPERTS_PLAN})


# Llama 2 and 3.
LLAMA = Family(
    "llama",
    conversion(
        "LlamaForCausalLM",
        fields=HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", None)},
        supported=NO_BIAS,
    ),
    dense("Llama"),
)
# Mistral: Llama with a sliding window in all layers.
MISTRAL = Family(
    "mistral",
    conversion(
        "MistralForCausalLM",
        fields=HEAD_DIM | {"num_key_value_heads": Field("num_kv_heads", 8)},
        window=SlidingWindow(4096),
    ),
    dense("Mistral"),
)
# Qwen2: Llama with biases of queries, keys and values.
QWEN2 = Family(
    "qwen2",
    conversion(
        "Qwen2ForCausalLM",
        layer_weights=QKV_BIAS_WEIGHTS,
        model={"qkv_bias": True},
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    dense("Qwen2"),
)
# Qwen3: Llama with norms of queries and keys.
QWEN3 = Family(
    "qwen3",
    conversion(
        "Qwen3ForCausalLM",
        layer_weights=QK_NORM_WEIGHTS,
        fields={"head_dim": Field("head_size", 128)},
        model={"qk_norm": True},
        supported=NO_BIAS,
        window=SlidingWindow(4096, first_layer=28, opt_in=True, per_layer=True),
    ),
    dense("Qwen3"),
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)
