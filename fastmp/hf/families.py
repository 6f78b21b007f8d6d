"""Configurations of `transformers` as those of fastmp, and back, by the tables of families.

What no table knows is refused, for it may change what a model computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

from fastmp.config import MAX_LAYERS, GPTConfig
from fastmp.config.model import function_of
from fastmp.config.recipe import model_from
from fastmp.hf.tables import FAMILIES, Family

__all__ = ["ALSO", "family_of", "from_transformers", "to_transformers"]

ALSO = {"num_local_experts": "num_experts"}  # in transformers 5, and before
_SPECIAL = {  # read by functions below
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    *("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "n_shared_experts"),
    "router_aux_loss_coef",
}
_UNUSED = {  # of text that is generated, of heads of other tasks, of how files were written
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("pretraining_tp", "output_router_logits", "task_specific_params", "n_ctx", "gradient_checkpointing"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "reorder_and_upcast_attn", "is_encoder_decoder", "return_dict", "id2label"),
    *("label2id", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "problem_type"),
    *("_attn_implementation_autoset", "generation_config", "classifier_dropout", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    "pooler_type",
}


def from_transformers(content: Mapping[str, Any], ignored: Sequence[str] = ()) -> tuple[str, GPTConfig]:
    """The model type and our configuration of what a config.json says; `ignored`: keys not looked at.

    ValueError, one line, for another model type, a key that is unknown and a value that fastmp does not
    compute.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type {short(kind)} is no family that fastmp reads: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    names = {key: ALSO[key] if ALSO.get(key) in family.fields else key for key in content}
    content = {names[key]: value for key, value in content.items() if key not in ignored}
    known = {*family.fields, *family.always, *_SPECIAL, *_UNUSED}
    unknown = sorted(key for key in content if key not in known)
    if unknown:
        raise ValueError(
            f"unknown {', '.join(map(short, unknown))} in a configuration of {kind}, which may change what "
            "the model computes; --ignore NAME goes on without"
        )
    for key, allowed in family.always.items():
        if key in content and content[key] not in allowed:
            raise ValueError(f"{key} is {short(content[key])}, fastmp computes {allowed[0]!r} in {kind}")
    model = _fields(family, content)
    layers, longest = model["num_layers"], model["max_seq_len"]
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS or type(longest) is not int:
        raise ValueError(f"the layers must be 1 to {MAX_LAYERS}, the positions a number")
    model |= _window(kind, content, layers, longest)
    if model.get("position") == "rope":
        model |= _rope(content, longest, 1e6 if kind == "mixtral" else 1e4)
    if family.encoder is not None:
        model["bert"]["sentence_order"] = content.get("architectures") != [family.alone]
        if model["bert"]["num_token_types"] == 0:
            raise ValueError(f"type_vocab_size is 0, {kind} has token types")
    if family.experts is None:
        return kind, model_from(model)
    model["dense_layers"] = _dense_layers(content, layers)
    if kind == "dots1":
        shared = _whole(content, "n_shared_experts", None) or 0
        model["moe"]["shared_expert_ffn_hidden_size"] = shared * model["moe"]["expert_ffn_hidden_size"]
    config = model_from(model)
    assert config.moe is not None
    coefficient = content.get("router_aux_loss_coef", 0.0 if kind == "dots1" else 0.001) or 0.0
    aux_loss = _rounded(coefficient * config.moe.top_k / (layers - len(config.dense_layers)))
    return kind, replace(config, moe=replace(config.moe, aux_loss=aux_loss))


def _fields(family: Family, content: Mapping[str, Any]) -> dict[str, Any]:
    """What the table of a family says, in the form of a recipe's [model]."""
    model: dict[str, Any] = dict(family.model)
    if family.experts is not None:
        model["moe"] = dict(family.experts)
    if family.encoder is not None:
        model["bert"] = dict(family.encoder)
    for key, (ours, default, choices) in family.fields.items():
        value = content.get(key, default)
        if value is ...:
            raise ValueError(f"{key} is missing")
        if choices is not None:
            if not isinstance(value, str) or value not in choices:
                raise ValueError(f"{key} is {short(value)}, fastmp computes {', '.join(choices)}")
            value = choices[value]
        table, _, name = ours.rpartition(".")
        (model[table] if table else model)[name] = value
    return model


def _whole(content: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """A number of config.json that may be absent, or null."""
    value = content.get(key, default)
    if value is not None and type(value) is not int:
        raise ValueError(f"{key} must be a whole number, got {short(value)}")
    return value


def to_transformers(kind: str, config: GPTConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json for a model of the family `kind`, whose parameters are of `dtype`."""
    family, moe, encoder = FAMILIES[kind], config.moe, config.bert
    model = vars(config) | {
        "num_kv_heads": config.kv_heads, "head_size": config.head_dim, "ffn_hidden_size": config.ffn_size,
    }  # fmt: skip
    tables = {"": model, "bert": {} if encoder is None else vars(encoder)}
    tables["moe"] = {} if moe is None else vars(moe) | {"normalize_topk": moe.sum_is_one}
    made = family.architecture if encoder is None or encoder.sentence_order else family.alone
    found: dict[str, Any] = {"architectures": [made], "model_type": kind, "torch_dtype": dtype}
    for key, (ours, _, choices) in family.fields.items():
        table, _, name = ours.rpartition(".")
        value = tables[table].get(name)
        if choices is not None:
            value = next((theirs for theirs, own in choices.items() if own == value), None)
        found[key] = value
    found |= {key: allowed[0] for key, allowed in family.always.items()}
    found |= _window_there(kind, config)
    if config.position == "rope":
        found |= {"rope_theta": config.rope_base, "rope_parameters": _rope_parameters(config)}
    if moe is None:
        return found
    with_experts = config.num_layers - len(config.dense_layers)
    if kind == "dots1":
        found |= {
            "first_k_dense_replace": len(config.dense_layers),
            "n_shared_experts": moe.shared_expert_ffn_hidden_size // moe.expert_ffn_hidden_size,
        }
        return found
    found["router_aux_loss_coef"] = _rounded(moe.aux_loss * with_experts / moe.top_k)
    if kind == "qwen3_moe":
        found |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    return found


def family_of(config: GPTConfig) -> str:
    """The family of `transformers` that computes the model; ValueError where none does."""
    for kind, family in FAMILIES.items():
        if (config.moe is None, config.bert is None) == (family.experts is None, family.encoder is None):
            try:
                there = from_transformers(to_transformers(kind, config, "float32"))[1]
            except ValueError:
                continue
            if function_of(there) == function_of(config):
                return kind
    raise ValueError(
        f"no family of transformers computes this model; weights are written of {', '.join(FAMILIES)}"
    )


def _rounded(number: float) -> float:
    return float(f"{number:.12g}")


_ATTENTION = ("full_attention", "sliding_attention")
# the window of a family, and the first layer that has it, where config.json does not say so
_WINDOWS: dict[str, tuple[int | None, int]] = {
    **{"mistral": (4096, 0), "mixtral": (None, 0), "qwen3_moe": (4096, 0)},
    **{"qwen2": (4096, 28), "qwen3": (4096, 28), "dots1": (4096, 62)},
}
_WINDOWS_OF_LAYERS = ("qwen2", "qwen3")  # of which some layers may have it, and others not


def _window(kind: str, content: Mapping[str, Any], num_layers: int, max_seq_len: int) -> dict[str, Any]:
    """The sliding window, and the layers without it; ValueError where the family has it in all or none."""
    kinds = content.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(each in _ATTENTION for each in kinds)):
        raise ValueError(f"layer_types is {short(kinds)}, fastmp computes {' and '.join(_ATTENTION)}")
    window, first = _WINDOWS.get(kind, (None, 0))
    window = _whole(content, "sliding_window", window)
    first = _whole(content, "max_window_layers", first) or 0
    if kind.startswith("qwen") and not content.get("use_sliding_window"):
        return {}
    if window is None or window >= max_seq_len:
        return {}
    if kind not in _WINDOWS:
        raise ValueError(f"sliding_window is {window}, fastmp computes no window in {kind}")
    full = list(range(min(first, num_layers)))
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types is a list of {len(kinds)} for {num_layers} layers")
        full = [layer for layer, each in enumerate(kinds) if each == "full_attention"]
    if len(full) == num_layers:
        return {}
    if full and kind not in _WINDOWS_OF_LAYERS:
        raise ValueError(
            f"sliding_window is that of {num_layers - len(full)} of {num_layers} layers, "
            f"fastmp has it in all of {kind}"
        )
    return {"sliding_window": window, "full_attention_layers": full}


def _window_there(kind: str, config: GPTConfig) -> dict[str, Any]:
    """What says so in config.json; nothing in families whose layers see all."""
    if kind in ("mistral", "mixtral"):
        return {"sliding_window": config.sliding_window}
    if kind.startswith("qwen") and config.sliding_window is not None:
        found = {"use_sliding_window": True, "sliding_window": config.sliding_window}
        found["max_window_layers"] = len(config.full_attention_layers)
        if kind in _WINDOWS_OF_LAYERS:
            kinds = [_ATTENTION[layer.sliding_window is not None] for layer in config.layers]
            return {**found, "layer_types": kinds}
        return found
    return {"sliding_window": None} if kind == "dots1" else {}


_SCALINGS = {
    "original_max_position_embeddings": "original_max_seq_len",
    **{
        name: name
        for name in (
            *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"),
            "attention_factor",
        )
    },
}


def _rope(content: Mapping[str, Any], max_seq_len: int, usual_base: float) -> dict[str, Any]:
    """Our fields of rotary positions: transformers 5 has one table of them; the two keys of 4 still count."""
    table = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(table, Mapping):
        raise ValueError(f"rope_parameters must be a table, got {short(table)}")
    given = {key: value for key, value in table.items() if value is not None}
    base = given.pop("rope_theta", content.get("rope_theta", usual_base))
    kind = given.pop("rope_type", given.get("type", "default"))
    given.pop("type", None)
    if (part := given.pop("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError(f"partial_rotary_factor is {short(part)}, fastmp turns whole heads")
    mscale, of_all = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    unknown = sorted(set(given) - set(_SCALINGS))
    if kind not in ("default", "linear", "llama3", "yarn") or unknown:
        what = f"has {', '.join(map(short, unknown))}" if unknown else f"is {short(kind)}"
        raise ValueError(f"rope_type {what}, fastmp computes default, linear, llama3 and yarn")
    if kind == "default":
        return {"rope_base": base}
    scaling = {"kind": kind, "original_max_seq_len": max_seq_len}
    scaling |= {_SCALINGS[key]: value for key, value in given.items()}
    if kind == "yarn" and mscale and of_all and "attention_factor" not in scaling:
        high, low = (0.1 * each * math.log(scaling["factor"]) + 1.0 for each in (mscale, of_all))
        scaling["attention_factor"] = high / low
    return {"rope_base": base, "rope_scaling": scaling}


def _rope_parameters(config: GPTConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling is None:
        return found
    used = config.rope_scaling.used
    values = {theirs: used[ours] for theirs, ours in _SCALINGS.items() if used.get(ours) is not None}
    return found | {"rope_type": used["kind"]} | values


def _dense_layers(content: Mapping[str, Any], num_layers: int) -> list[int]:
    first, step = _whole(content, "first_k_dense_replace", 0) or 0, _whole(content, "decoder_sparse_step", 1)
    alone = content.get("mlp_only_layers") or []
    if not isinstance(alone, list) or step is None or step < 1:
        raise ValueError(f"mlp_only_layers {short(alone)} or decoder_sparse_step {step} says no layers")
    return [layer for layer in range(num_layers) if layer < first or layer in alone or (layer + 1) % step]
