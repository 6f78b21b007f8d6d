"""The bundles that tests/data/make_transformers_reference.py makes, in fastmp's names and layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from fastmp.config import GPTConfig, MoEConfig

DATA = Path(__file__).parent.parent / "data"
FAMILIES = ("Llama", "Qwen3", "Mixtral", "Qwen3Moe")
NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.proj",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.down_proj": "mlp.down",
    "mlp.gate": "moe.router",
    "mlp.experts.gate_up_proj": "moe.experts.fc1",
    "mlp.experts.down_proj": "moe.experts.fc2",
}
ENDS = {
    "model.embed_tokens.weight": "word_embedding.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "output_layer.weight",
}


def bundle_of(family: str) -> Path:
    return DATA / f"transformers_{family.lower()}.safetensors"


def to_fastmp(tensors: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """Parameters of a ...ForCausalLM, or their gradients, as full tensors of `fastmp.nn.GPT` on one rank."""
    renamed = {ENDS[name]: tensor for name, tensor in tensors.items() if name in ENDS}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        layer = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        q, k, v = (
            layer.pop(f"self_attn.{x}_proj").unflatten(0, (config.kv_heads, -1, config.head_dim))
            for x in "qkv"
        )
        renamed[f"layers.{i}.attention.qkv.weight"] = torch.cat([q, k, v], dim=1).flatten(0, 2)
        if config.moe is None:
            gate_up = [layer.pop(f"mlp.{part}_proj") for part in ("gate", "up")]
            renamed[f"layers.{i}.mlp.up.weight"] = torch.cat(gate_up)
        for name, tensor in layer.items():
            suffix = "" if "experts" in name else ".weight"
            renamed[f"layers.{i}.{NAMES[name]}{suffix}"] = tensor
    return renamed


def gpt_config(family: str, sizes: dict) -> GPTConfig:
    return GPTConfig(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_size=sizes.get("head_dim"),
        ffn_hidden_size=sizes["intermediate_size"],
        moe=moe_config(sizes),
        vocab_size=sizes["vocab_size"],
        max_seq_len=sizes["max_position_embeddings"],
        layernorm_epsilon=sizes["rms_norm_eps"],
        rope_base=sizes["rope_theta"],
        norm="rmsnorm",
        position="rope",
        activation="swiglu",
        linear_bias=False,
        tie_embeddings=sizes["tie_word_embeddings"],
        qk_norm=family.startswith("Qwen3"),
    )


def moe_config(sizes: dict) -> MoEConfig | None:
    num_experts = sizes.get("num_local_experts", sizes.get("num_experts"))
    if num_experts is None:
        return None
    return MoEConfig(
        num_experts=num_experts,
        top_k=sizes["num_experts_per_tok"],
        expert_ffn_hidden_size=sizes.get("moe_intermediate_size", sizes["intermediate_size"]),
        normalize_topk=sizes.get("norm_topk_prob", True),
    )


def from_tensors(family: str, sizes: dict, tensors: dict[str, torch.Tensor]) -> dict:
    """config, weights and grads (full, fastmp's names), and the other tensors by their names."""
    parts: dict = {"config": gpt_config(family, sizes)}
    for kind in ("weight", "grad"):
        chosen = {k.removeprefix(kind + "."): t for k, t in tensors.items() if k.startswith(kind + ".")}
        parts[kind + "s"] = to_fastmp(chosen, parts["config"])
    return parts | {name: tensor for name, tensor in tensors.items() if "." not in name}


def load_bundle(family: str) -> dict:
    with safe_open(bundle_of(family), "pt") as file:
        sizes = json.loads(file.metadata()["sizes"])
        return from_tensors(family, sizes, {name: file.get_tensor(name) for name in file.keys()})
