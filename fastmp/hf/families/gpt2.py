"""GPT-2 (Radford et al. 2019): learnt positions, stacked queries, keys and values, weights (in, out)."""

from __future__ import annotations

from fastmp.hf.families.family import Acceleration, Conversion, Family, Field
from fastmp.hf.heads import CausalLMWithCrossAttention
from fastmp.hf.patches import GELUS, LayerNormPatch
from fastmp.hf.tp_modules import (
    ColumnParallelWithCopy,
    Elementwise,
    FusedColumnParallel,
    Heads,
    PerHeadScores,
    RowParallel,
)

_MODULES = {  # of a layer
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

GPT2 = Family(
    "gpt2",
    Conversion(
        architecture="GPT2LMHeadModel",
        layers="transformer.h",
        model_weights={
            "word_embedding.weight": "transformer.wte.weight",
            "position_embedding.weight": "transformer.wpe.weight",
            "final_norm.weight": "transformer.ln_f.weight",
            "final_norm.bias": "transformer.ln_f.bias",
            "output_layer.weight": "lm_head.weight",
        },
        layer_weights={
            f"{ours}.{kind}": f"{theirs}.{kind}"
            for kind in ("weight", "bias")
            for ours, theirs in _MODULES.items()
        },
        fields={
            "vocab_size": Field("vocab_size"),
            "n_embd": Field("hidden_size"),
            "n_inner": Field("ffn_hidden_size", None),
            "n_layer": Field("num_layers"),
            "n_head": Field("num_heads"),
            "n_positions": Field("max_seq_len"),
            "layer_norm_epsilon": Field("layernorm_epsilon", 1e-5),
            "initializer_range": Field("init_std", 0.02),
            "attn_pdrop": Field("attention_dropout", 0.1),
            "embd_pdrop": Field("dropout", 0.1),
            "resid_pdrop": Field("dropout", 0.1),
            "tie_word_embeddings": Field("tie_embeddings", True),
            "activation_function": Field("activation", "gelu_new", _GELU),
        },
        supported={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        transposed_linears=True,
    ),
    Acceleration(
        {"LayerNorm": LayerNormPatch, **GELUS, "GPT2LMHeadModel": CausalLMWithCrossAttention},
        tp_plan={
            "GPT2Attention": {
                "": Heads,
                "c_attn": FusedColumnParallel,
                "attn_dropout": PerHeadScores,
                "c_proj": RowParallel,
            },
            "GPT2MLP": {"c_fc": ColumnParallelWithCopy, "act": Elementwise, "c_proj": RowParallel},
        },
    ),
)
FAMILIES = (GPT2,)
