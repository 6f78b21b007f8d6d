"""The weights of a checkpoint in the format of `transformers`: config.json and safetensors files.

Every tensor is put together from boxes of the checkpoint's tensors, one at a time. The names and shapes are
those that `from_pretrained` of the families GPT-2, Llama, Qwen3, Mixtral and Qwen3-MoE reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.config import GPTConfig, MoEConfig
from fastmp.train.checkpoint.compare import read_parts
from fastmp.train.checkpoint.files import Form, write_tensors
from fastmp.train.checkpoint.format import DTYPES
from fastmp.train.checkpoint.storage import CheckpointReader, Parts
from fastmp.train.tokenfile import sync_directory, write_synced

__all__ = ["check_family", "export_weights"]

FILE_BYTES = 5 << 30  # after which a file is full
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Source(NamedTuple):
    """A tensor of transformers: boxes (first index, size) of one of ours, one after the other by rows.

    A vector of an expert, say, loses the dimensions in `squeezed`. transposed: they are stored as columns.
    """

    name: str
    ours: str
    boxes: tuple[Box, ...]
    squeezed: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = [size for _, size in self.boxes]
        shape = (sum(size[0] for size in sizes), *sizes[0][1:])
        shape = shape[1:] if self.squeezed else shape
        return shape[::-1] if self.transposed else shape


def check_family(config: GPTConfig) -> str:
    """The family of `transformers` that computes the model; ValueError where none does."""
    if config.sliding_window is not None:
        raise ValueError(
            "checkpoint.weights_interval: weights for transformers are written of models without a sliding "
            f"window, got sliding_window {config.sliding_window}"
        )
    gpt2 = (
        config.norm == "layernorm"
        and config.position == "learned"
        and config.activation == "gelu_tanh"
        and config.linear_bias
        and not config.qk_norm
        and config.kv_heads == config.num_heads
        and config.head_dim * config.num_heads == config.hidden_size
    )
    if gpt2 and config.moe is None:
        return "gpt2"
    moe = config.moe
    llama = (
        config.norm == "rmsnorm"
        and config.position == "rope"
        and config.activation == "swiglu"
        and not config.linear_bias
    )
    if llama and moe is None:
        return "qwen3" if config.qk_norm else "llama"
    plain = MoEConfig()
    same = ("score", "routed_scale", "num_groups", "expert_bias", "shared_expert_ffn_hidden_size")
    if llama and moe is not None and all(getattr(moe, name) == getattr(plain, name) for name in same):
        if config.qk_norm:
            return "qwen3_moe"
        if _sum_is_one(moe):
            return "mixtral"
    raise ValueError(
        "checkpoint.weights_interval: no family of transformers computes this model; weights are written of "
        "GPT-2, Llama, Qwen3, Mixtral and Qwen3-MoE"
    )


def _sum_is_one(moe: MoEConfig) -> bool:
    """Whether the weights of a token's experts add up to one: both ways to it are equal."""
    return moe.normalize_topk or not moe.pre_softmax


def export_weights(checkpoint: Path, config: GPTConfig, out: Path) -> Path:
    """Write the weights of `checkpoint` to the new directory `out`, whole or not at all; returns it."""
    reader, family = CheckpointReader(checkpoint), check_family(config)
    dtype = DTYPES[reader.manifest.tensors["model/final_norm.weight"].dtype]
    sources = list(_sources(config, family))
    staging = out.with_name(f"{out.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    forms = [Form(source.name, dtype, source.shape) for source in sources]
    groups, names = _in_files(forms), dict[str, str]()
    for number, group in enumerate(groups):
        of = f"-{number + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file = f"model{of}.safetensors"

        def read(i: int, group: Sequence[int] = group) -> Tensor:
            return _read(reader, sources[group[i]], dtype)

        write_tensors(staging / file, [forms[i] for i in group], read, metadata={"format": "pt"})
        names |= {forms[i].name: file for i in group}
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(form.bytes for form in forms)}, "weight_map": names}
        write_synced(staging / "model.safetensors.index.json", _json(index))
    write_synced(staging / "config.json", _json(_config(config, family, dtype)))
    sync_directory(staging)
    if out.exists():
        shutil.rmtree(out)
    os.rename(staging, out)
    sync_directory(out.parent)
    return out


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _in_files(forms: Sequence[Form]) -> list[list[int]]:
    groups, left = [list[int]()], FILE_BYTES
    for i, form in enumerate(forms):
        if groups[-1] and form.bytes > left:
            groups.append([])
            left = FILE_BYTES
        groups[-1].append(i)
        left -= form.bytes
    return groups


def _read(reader: CheckpointReader, source: Source, dtype: torch.dtype) -> Tensor:
    out = torch.empty(source.shape, dtype=dtype)
    rows = out.t() if source.transposed else out
    rows = rows.unsqueeze(0) if source.squeezed else rows
    parts, start = [], 0
    for offsets, size in source.boxes:
        parts.append((offsets, rows[start : start + size[0]]))
        start += size[0]
    name = f"model/{source.ours}"
    read_parts(reader, name, Parts(reader.manifest.tensors[name].shape, dtype, parts))
    return out


def _sources(config: GPTConfig, family: str) -> Iterator[Source]:
    """All tensors of the model in `transformers`."""
    H, V, D = config.hidden_size, config.vocab_size, config.head_dim
    base, ends = ("transformer", _GPT2_ENDS) if family == "gpt2" else ("model", _ENDS)
    for ours, theirs in ends.items():
        if ours == "output_layer.weight" and config.tie_embeddings:
            continue
        rows = {"position_embedding.weight": config.max_seq_len}.get(ours, V)
        yield _whole(theirs, ours, (H,) if "norm" in ours else (rows, H))
    q, kinds = config.num_heads * D, ("weight", "bias")
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"{base}.{'h' if family == 'gpt2' else 'layers'}.{i}"
        for norm, name in _NORMS[family].items():
            size = D if norm.startswith("attention.") else H
            for kind in kinds if config.norm == "layernorm" else kinds[:1]:
                yield _whole(f"{theirs}.{name}.{kind}", f"{ours}.{norm}.{kind}", (size,))
        for kind in kinds if config.linear_bias else kinds[:1]:
            columns, out = ((H,), (H, q)) if kind == "weight" else ((), (H,))
            attention, name = f"{theirs}.{_ATTENTION[family]}", "c_proj" if family == "gpt2" else "o_proj"
            yield from _attention(config, family, attention, f"{ours}.attention.qkv.{kind}", columns)
            yield _whole(f"{attention}.{name}.{kind}", f"{ours}.attention.proj.{kind}", out, family)
            if config.moe is None:
                yield from _mlp(config, family, f"{theirs}.mlp", f"{ours}.mlp", kind)
        if config.moe is not None:
            yield from _experts(config, config.moe, family, theirs, f"{ours}.moe")


def _whole(name: str, ours: str, shape: tuple[int, ...], family: str = "") -> Source:
    transposed = family == "gpt2" and len(shape) == 2
    return Source(name, ours, (((0,) * len(shape), shape),), transposed=transposed)


def _attention(
    config: GPTConfig, family: str, theirs: str, ours: str, columns: tuple[int, ...]
) -> Iterator[Source]:
    """Queries, keys and values, which we have together for each head of keys."""
    D, groups = config.head_dim, config.kv_heads
    queries = config.num_heads // groups
    kind, each, zero = ours.rpartition(".")[2], (queries + 2) * D, (0,) * len(columns)
    found = {
        name: [((g * each + start * D, *zero), (n * D, *columns)) for g in range(groups)]
        for name, start, n in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1))
    }
    if family == "gpt2":
        together = tuple(box for name in "qkv" for box in found[name])
        yield Source(f"{theirs}.c_attn.{kind}", ours, together, transposed=kind == "weight")
        return
    for name, boxes in found.items():
        yield Source(f"{theirs}.{name}_proj.{kind}", ours, tuple(boxes))


def _mlp(config: GPTConfig, family: str, theirs: str, ours: str, kind: str) -> Iterator[Source]:
    H, F = config.hidden_size, config.ffn_size
    up, down = ((F, H), (H, F)) if kind == "weight" else ((F,), (H,))
    if family == "gpt2":
        yield _whole(f"{theirs}.c_fc.{kind}", f"{ours}.up.{kind}", up, family)
        yield _whole(f"{theirs}.c_proj.{kind}", f"{ours}.down.{kind}", down, family)
        return
    for name, first in (("gate_proj", 0), ("up_proj", F)):
        yield Source(f"{theirs}.{name}.{kind}", f"{ours}.up.{kind}", (((first, 0), up),))
    yield _whole(f"{theirs}.down_proj.{kind}", f"{ours}.down.{kind}", down)


def _experts(config: GPTConfig, moe: MoEConfig, family: str, theirs: str, ours: str) -> Iterator[Source]:
    H, F = config.hidden_size, moe.expert_ffn_hidden_size
    layer, (gate, up, down) = _EXPERTS[family]
    yield _whole(f"{theirs}.{layer}.gate.weight", f"{ours}.router.weight", (moe.num_experts, H))
    for e in range(moe.num_experts):
        name = f"{theirs}.{layer}.experts.{e}"
        for part, first in ((gate, 0), (up, F)):
            boxes = (((e, first, 0), (1, F, H)),)
            yield Source(f"{name}.{part}.weight", f"{ours}.experts.fc1", boxes, squeezed=True)
        boxes = (((e, 0, 0), (1, H, F)),)
        yield Source(f"{name}.{down}.weight", f"{ours}.experts.fc2", boxes, squeezed=True)


_ENDS = {
    "word_embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_GPT2_ENDS = {
    "word_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}
_LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_QWEN_NORMS = {**_LLAMA_NORMS, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
_NORMS = {
    "gpt2": {"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    "llama": _LLAMA_NORMS,
    "mixtral": _LLAMA_NORMS,
    "qwen3": _QWEN_NORMS,
    "qwen3_moe": _QWEN_NORMS,
}
_ATTENTION = {"gpt2": "attn", **dict.fromkeys(("llama", "mixtral", "qwen3", "qwen3_moe"), "self_attn")}
_EXPERTS = {  # the layer, and the parts of an expert
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def _config(config: GPTConfig, family: str, dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }
    if family == "gpt2":
        return found | {
            "n_layer": config.num_layers,
            "n_embd": config.hidden_size,
            "n_head": config.num_heads,
            "n_positions": config.max_seq_len,
            "n_inner": config.ffn_size,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.layernorm_epsilon,
            "attn_pdrop": config.attention_dropout,
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
        }
    found |= {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
    }
    moe = config.moe
    if moe is None:
        return found
    found |= {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.aux_loss}
    if family == "mixtral":
        sizes = {"num_local_experts": moe.num_experts, "intermediate_size": moe.expert_ffn_hidden_size}
        return found | sizes
    return found | {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.expert_ffn_hidden_size,
        "norm_topk_prob": _sum_is_one(moe),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
