"""Tiny random models of transformers, one for each form that a family has, written as their users' are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 24, "vocab_size": 131, "max_position_embeddings": 64},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 6}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 131, "n_positions": 64}),
    "gpt2, exact": (
        "GPT2",
        {
            **{"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 131, "n_positions": 64, "n_inner": 40},
            **{"activation_function": "gelu", "tie_word_embeddings": False},
        },
    ),
    "llama": ("Llama", SIZES),
    "llama 3.1": ("Llama", SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear": (
        "Llama",
        SIZES | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, geglu": ("Llama", SIZES | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 8}),
    "llama, exact": ("Llama", SIZES | {"hidden_act": "gelu"}),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "mistral, window": ("Mistral", SIZES | {"sliding_window": 5}),
    "qwen2, window": (
        "Qwen2",
        SIZES | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "qwen2, window above": (
        "Qwen2",
        SIZES | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3, every second window": (
        "Qwen3",
        SIZES
        | {"sliding_window": 7, "use_sliding_window": True, "head_dim": 6}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2": ("Qwen2", SIZES),
    "qwen2, yarn": ("Qwen2", SIZES | {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 6}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "router_aux_loss_coef": 0.02}),
    "qwen3_moe": ("Qwen3Moe", SIZES | EXPERTS | {"num_experts": 4, "norm_topk_prob": True}),
    "qwen3_moe, some dense": (
        "Qwen3Moe",
        SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": [2], "decoder_sparse_step": 1},
    ),
    "qwen3_moe, every second": ("Qwen3Moe", SIZES | EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2}),
    "qwen3_moe, window": (
        "Qwen3Moe",
        SIZES | EXPERTS | {"num_experts": 4, "sliding_window": 7, "use_sliding_window": True},
    ),
    "dots1": (
        "Dots1",
        {
            **(SIZES | EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}),
            **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        },
    ),
}
_BERT = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40},
    **{"vocab_size": 131, "max_position_embeddings": 64},
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForPreTraining", _BERT),
    "bert, masked alone": ("BertForMaskedLM", _BERT | {"type_vocab_size": 3}),
}


def save(name: str, path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Write the model to the directory `path`; returns it. options: of save_pretrained."""
    import transformers

    family, values = (MODELS | ENCODERS)[name]
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    if name in ENCODERS:
        family, kind = "Bert", family
    config = getattr(transformers, f"{family}Config")(**values)
    torch.manual_seed(5)
    model = getattr(transformers, kind)(config).to(dtype)
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in tensor_name:
                spread = 0.2 if tensor.ndim > 1 else 0.5
                tensor.normal_(1.0 if "norm.weight" in tensor_name or "ln" in tensor_name else 0.0, spread)
    model.save_pretrained(path, **options)
    return model
