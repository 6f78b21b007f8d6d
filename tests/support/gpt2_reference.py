"""The bundle that tests/data/make_gpt2_reference.py makes, in fastmp's names and layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from fastmp.config import GPTConfig

BUNDLE = Path(__file__).parent.parent / "data" / "gpt2_reference.safetensors"
NAMES = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.proj",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def to_fastmp(tensors: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """GPT2LMHeadModel parameters, or their gradients, as full tensors of `fastmp.nn.GPT` at TP 1, unpadded.

    GPT-2 keeps linear weights as (in, out) and all queries before all keys before all values; fastmp (out,
    in) and query, key, value of one head after the other.
    """
    renamed = {}
    for name, tensor in tensors.items():
        path = name.removeprefix("transformer.")
        if path == "wte.weight":
            renamed["word_embedding.weight"] = tensor
        elif path == "wpe.weight":
            renamed["position_embedding.weight"] = tensor
        elif path.startswith("ln_f."):
            renamed["final_norm." + path.removeprefix("ln_f.")] = tensor
        else:
            _, layer, rest = path.split(".", 2)
            part, kind = rest.rsplit(".", 1)
            if tensor.dim() == 2:
                tensor = tensor.t()
            if part == "attn.c_attn":
                tensor = tensor.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)
            renamed[f"layers.{layer}.{NAMES[part]}.{kind}"] = tensor
    return renamed


def gpt_config(sizes: dict[str, int]) -> GPTConfig:
    return GPTConfig(
        num_layers=sizes["n_layer"],
        hidden_size=sizes["n_embd"],
        num_heads=sizes["n_head"],
        vocab_size=sizes["vocab_size"],
        max_seq_len=sizes["n_positions"],
    )


def load_bundle() -> dict:
    """config, weights and grads (full, fastmp's names), tokens, targets, logits (B, S, V), loss (B, S)."""
    with safe_open(BUNDLE, "pt") as file:
        sizes = json.loads(file.metadata()["sizes"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    parts: dict = {"config": gpt_config(sizes)}
    for kind in ("weight", "grad"):
        chosen = {k.removeprefix(kind + "."): t for k, t in tensors.items() if k.startswith(kind + ".")}
        parts[kind + "s"] = to_fastmp(chosen, sizes["n_head"])
    return parts | {name: tensors[name] for name in ("tokens", "targets", "logits", "loss")}
