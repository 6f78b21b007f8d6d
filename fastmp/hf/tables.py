"""Families of `transformers`: a table each of names, and of the configuration.

A table maps our names of parameters to theirs. Several of theirs in one of ours are its rows, one after the
other; queries, keys and values, which we have together for each head of keys, are taken apart. `{e}` is the
number of an expert. A `Field` says where a value of config.json is in `GPTConfig`, and `always` which values
of others a model may have: those that fastmp computes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "FUSED", "Family", "Field"]


class Field(NamedTuple):
    """Our name of a value ("moe.top_k"), theirs where it is absent (...: it must be there), ours of each.

    What is absent has the default of transformers' class, which may be another value than that of a null.
    """

    ours: str
    default: Any = ...
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Family:
    """A model type. names: of a layer's parameters, ours and theirs, whose names begin with `base`.

    experts, encoder: what the tables [model.moe] and [model.bert] of a recipe begin with, where it has them.
    alone: the architecture of a BERT without a head for the order of sentences. tied: what files may hold a
    second time, and its first name.
    """

    architecture: str
    base: str
    ends: Mapping[str, str]
    names: Mapping[str, str]
    fields: Mapping[str, Field]
    model: Mapping[str, Any]
    experts: Mapping[str, Any] | None = None
    encoder: Mapping[str, Any] | None = None
    alone: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    conv1d: bool = False  # matrices of layers are stored as columns


_GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu": "geglu_erf"}
_ENDS = {
    "word_embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_DENSE = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "attention.proj.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.up.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {"attention.qkv.bias": "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"}
_QK_NORM = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_EXPERTS = {
    "moe.router.weight": "mlp.gate.weight",
    "moe.experts.fc1": "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
    "moe.experts.fc2": "mlp.experts.{e}.down_proj.weight",
}
# What transformers 5 has in memory, and some files hold: all experts of a layer in one tensor, as we do.
FUSED = {
    "moe.router.weight": "mlp.gate.weight",
    "moe.experts.fc1": "mlp.experts.gate_up_proj",
    "moe.experts.fc2": "mlp.experts.down_proj",
}
_SIZES = {
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
    "hidden_act": Field("activation", "silu", _GATED),
}
_HEAD = {"head_dim": Field("head_size", None)}
_KEYS_OF_8 = {"num_key_value_heads": Field("num_kv_heads", 8)}
_LLAMA = {"norm": "rmsnorm", "position": "rope", "linear_bias": False}
_CHOICE = {
    "num_experts_per_tok": Field("moe.top_k"),
    "moe_intermediate_size": Field("moe.expert_ffn_hidden_size"),
}
_NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
_GPT2_LAYER = {
    f"{ours}.{kind}": f"{theirs}.{kind}"
    for kind in ("weight", "bias")
    for ours, theirs in {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }.items()
}
_GPT2_SIZES = {
    "vocab_size": Field("vocab_size"),
    "n_embd": Field("hidden_size"),
    "n_inner": Field("ffn_hidden_size", None),
    "n_layer": Field("num_layers"),
    "n_head": Field("num_heads"),
    "n_positions": Field("max_seq_len"),
    "layer_norm_epsilon": Field("layernorm_epsilon", 1e-5),
    "initializer_range": Field("init_std", 0.02),
}

_BERT_ENDS = {
    "word_embedding.weight": "bert.embeddings.word_embeddings.weight",
    "position_embedding.weight": "bert.embeddings.position_embeddings.weight",
    "token_type_embedding.weight": "bert.embeddings.token_type_embeddings.weight",
    "output_layer.weight": "cls.predictions.decoder.weight",
    "lm_head.bias": "cls.predictions.bias",
} | {
    f"{ours}.{kind}": f"{theirs}.{kind}"
    for kind in ("weight", "bias")
    for ours, theirs in {
        "embedding_norm": "bert.embeddings.LayerNorm",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.norm": "cls.predictions.transform.LayerNorm",
        "sentence_head.pooler": "bert.pooler.dense",
        "sentence_head.order": "cls.seq_relationship",
    }.items()
}
_BERT_LAYER = {
    f"{ours}.{kind}": " ".join(f"{each}.{kind}" for each in theirs.split())
    for kind in ("weight", "bias")
    for ours, theirs in {
        "attention.qkv": "attention.self.query attention.self.key attention.self.value",
        "attention.proj": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    }.items()
}
_BERT_FIELDS = {
    "vocab_size": Field("vocab_size", 30522),
    "hidden_size": Field("hidden_size", 768),
    "intermediate_size": Field("ffn_hidden_size", 3072),
    "num_hidden_layers": Field("num_layers", 12),
    "num_attention_heads": Field("num_heads", 12),
    "max_position_embeddings": Field("max_seq_len", 512),
    "type_vocab_size": Field("bert.num_token_types", 2),
    "layer_norm_eps": Field("layernorm_epsilon", 1e-12),
    "initializer_range": Field("init_std", 0.02),
    "hidden_dropout_prob": Field("dropout", 0.1),
    "attention_probs_dropout_prob": Field("attention_dropout", 0.1),
    "tie_word_embeddings": Field("tie_embeddings", True),
    "hidden_act": Field("activation", "gelu", {"gelu": "gelu"}),  # that of the head for masked tokens, too
}

FAMILIES = {  # what several tables have, and the long parts of one, stand above
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        base="transformer.h",
        ends={
            "word_embedding.weight": "transformer.wte.weight",
            "position_embedding.weight": "transformer.wpe.weight",
            "final_norm.weight": "transformer.ln_f.weight",
            "final_norm.bias": "transformer.ln_f.bias",
            "output_layer.weight": "lm_head.weight",
        },
        names=_GPT2_LAYER,
        fields=_GPT2_SIZES
        | {
            "attn_pdrop": Field("attention_dropout", 0.1),
            "embd_pdrop": Field("dropout", 0.1),
            "resid_pdrop": Field("dropout", 0.1),
            "tie_word_embeddings": Field("tie_embeddings", True),
            "activation_function": Field("activation", "gelu_new", _GELU),
        },
        model={},
        always={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        conv1d=True,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "model.layers",
        _ENDS,
        _DENSE,
        _SIZES | _HEAD | {"num_key_value_heads": Field("num_kv_heads", None)},
        _LLAMA,
        always=_NO_BIAS,
    ),
    "mistral": Family(
        "MistralForCausalLM", "model.layers", _ENDS, _DENSE, _SIZES | _HEAD | _KEYS_OF_8, _LLAMA
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", "model.layers", _ENDS, _DENSE | _QKV_BIAS, _SIZES, _LLAMA | {"qkv_bias": True}
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "model.layers",
        _ENDS,
        _DENSE | _QK_NORM,
        _SIZES | {"head_dim": Field("head_size", 128)},
        _LLAMA | {"qk_norm": True},
        always=_NO_BIAS,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "model.layers",
        _ENDS,
        _DENSE
        | {
            "moe.router.weight": "block_sparse_moe.gate.weight",
            "moe.experts.fc1": "block_sparse_moe.experts.{e}.w1.weight "
            "block_sparse_moe.experts.{e}.w3.weight",
            "moe.experts.fc2": "block_sparse_moe.experts.{e}.w2.weight",
        },
        {name: each for name, each in _SIZES.items() if name != "intermediate_size"}
        | _HEAD
        | _KEYS_OF_8
        | {
            "rms_norm_eps": Field("layernorm_epsilon", 1e-5),
            "intermediate_size": Field("moe.expert_ffn_hidden_size"),
            "num_local_experts": Field("moe.num_experts", 8),
            "num_experts_per_tok": Field("moe.top_k", 2),
        },
        _LLAMA,
        experts={"normalize_topk": True},
        always={"router_jitter_noise": (0.0, 0)},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "model.layers",
        _ENDS,
        _DENSE | _QK_NORM | _EXPERTS,
        _SIZES
        | _HEAD
        | _CHOICE
        | {
            "num_key_value_heads": Field("num_kv_heads", 4),
            "num_experts": Field("moe.num_experts"),
            "norm_topk_prob": Field("moe.normalize_topk", False),
        },
        _LLAMA | {"qk_norm": True},
        experts={},
        always=_NO_BIAS,
    ),
    "dots1": Family(  # the experts of DeepSeek-V3
        "Dots1ForCausalLM",
        "model.layers",
        _ENDS,
        _DENSE
        | _QK_NORM
        | _EXPERTS
        | {
            "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
            "moe.shared_experts.mlp.up.weight": "mlp.shared_experts.gate_proj.weight "
            "mlp.shared_experts.up_proj.weight",
            "moe.shared_experts.mlp.down.weight": "mlp.shared_experts.down_proj.weight",
        },
        _SIZES
        | _HEAD
        | _CHOICE
        | {
            "n_routed_experts": Field("moe.num_experts"),
            "norm_topk_prob": Field("moe.normalize_topk", False),
            "routed_scaling_factor": Field("moe.routed_scale", 1.0),
            "n_group": Field("moe.num_groups", 1),
            "topk_group": Field("moe.group_topk", 1),
        },
        _LLAMA | {"qk_norm": True},
        experts={"score": "sigmoid", "expert_bias": True},
        always=_NO_BIAS,
    ),
    "bert": Family(  # with norms behind the parts of a layer
        "BertForPreTraining",
        "bert.encoder.layer",
        _BERT_ENDS,
        _BERT_LAYER,
        _BERT_FIELDS,
        {},
        encoder={"post_norm": True},
        alone="BertForMaskedLM",
        tied={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        always={
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
    ),
}
