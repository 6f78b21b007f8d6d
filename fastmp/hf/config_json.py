"""Translation between config.json of transformers and `GPTConfig`, by the records in `fastmp.hf.families`.

Unknown keys raise ValueError, because they may change the model's function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from reprlib import repr as short
from typing import Any, NamedTuple

from fastmp.config import MAX_LAYERS, GPTConfig, RopeScaling
from fastmp.config.model import canonical_config
from fastmp.config.recipe import model_from
from fastmp.hf.families import CONVERSIONS
from fastmp.hf.families.family import Conversion, SlidingWindow, optional_int

__all__ = [
    "ALIASES", "Quantization", "family_of", "from_transformers", "quantization_of", "shortened",
    "to_transformers",
]  # fmt: skip

ALIASES = {  # {key of transformers 5: the key before}
    "num_local_experts": "num_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_SPECIAL = {  # keys read by the functions below and by `Conversion.read`
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    *("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "n_shared_experts"),
    *("router_aux_loss_coef", "quantization_config"),
}
_ACTIVATIONS = {  # {name in transformers: another name of the same function}
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_new"),
}
_UNUSED = {  # keys of heads of other tasks, of the code and tools that wrote the files, and of the files
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("name_or_path", "model_name", "_commit_hash", "auto_map", "_auto_class", "custom_pipelines"),
    *("tokenizer_class", "finetuning_task", "torchscript", "use_bfloat16", "tf_legacy_loss", "prefix"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled"),
    *("base_model_tp_plan", "base_model_pp_plan", "base_model_fsdp_plan", "distributed_config"),
    *("transformers.js_config", "unsloth_version", "unsloth_fixed", "unsloth_tiled_mlp"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("pretraining_tp", "output_router_logits", "task_specific_params", "n_ctx", "gradient_checkpointing"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "reorder_and_upcast_attn", "is_encoder_decoder", "return_dict", "id2label"),
    *("label2id", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "problem_type"),
    *("_attn_implementation_autoset", "generation_config", "classifier_dropout", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    "pooler_type",
}
_GENERATION = {  # keys of text generation, which files of transformers 4 have here
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"),
    *("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"),
    *("repetition_penalty", "length_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "force_words_ids", "num_return_sequences"),
    *("output_scores", "output_logits", "return_dict_in_generate", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "renormalize_logits"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("guidance_scale", "low_memory", "constraints", "cache_implementation"),
}
_NEUTRAL: dict[str, Any] = {  # values that change nothing, of keys that files of transformers 4 have
    **{"pruned_heads": {}, "cross_attention_hidden_size": None},
    **dict.fromkeys(("is_decoder", "add_cross_attention", "tie_encoder_decoder"), False),
}


class Quantization(NamedTuple):
    """How the weights of a directory are quantised.

    method: "fp8" or "mxfp4". block: rows and columns of a scale of "fp8". dtype: that of the dequantised
    weights, as in safetensors.
    """

    method: str
    block: tuple[int, int]
    dtype: str


def quantization_of(content: Mapping[str, Any]) -> Quantization | None:
    """Return the quantisation in config.json; None without one. Raises ValueError if it is not supported."""
    table = content.get("quantization_config")
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise ValueError(f"quantization_config must be a table, got {short(table)}")
    method = table.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise ValueError(
            f"quantization_config: quant_method {short(method)} is not supported, expected fp8 or mxfp4; "
            "dequantise the model in transformers, then save_pretrained"
        )
    dtype = "F32" if content.get("dtype", content.get("torch_dtype")) == "float32" else "BF16"
    if method == "mxfp4":
        return Quantization(method, (1, 1), dtype)
    for key, read in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("expert_dtype", "fp8")):
        if table.get(key, read) != read:
            raise ValueError(f"quantization_config: {key} is {short(table[key])}, fastmp reads {read}")
    block = table.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"quantization_config: weight_block_size is {short(block)}, expected two sizes, as [128, 128]"
        )
    return Quantization(method, (sizes[0], sizes[1]), dtype)


def from_transformers(content: Mapping[str, Any], ignored: Sequence[str] = ()) -> tuple[str, GPTConfig]:
    """Translate config.json into a `GPTConfig`.

    Args:
        content: the object in config.json.
        ignored: keys that are skipped.

    Returns:
        The model type and the configuration.

    Raises:
        ValueError: the model type or a key is unknown, or a value is not supported; one line.
    """
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONVERSIONS:
        raise ValueError(
            f"model_type {short(model_type)} is not supported; expected one of {', '.join(CONVERSIONS)}"
        )
    family = CONVERSIONS[model_type]
    names = {key: ALIASES[key] if ALIASES.get(key) in family.fields else key for key in content}
    content = {**family.defaults, **{names[key]: content[key] for key in content if key not in ignored}}
    known = {*family.fields, *family.supported, *family.read_keys, *_SPECIAL, *_UNUSED, *_GENERATION}
    known |= {key for key, value in _NEUTRAL.items() if content.get(key) == value}
    unknown = sorted(key for key in content if key not in known)
    if unknown:
        raise ValueError(
            f"unknown {', '.join(map(short, unknown))} in a configuration of {model_type}, which may change "
            "what the model computes; --ignore NAME goes on without"
        )
    for key, values in family.supported.items():
        if key in content and content[key] not in values:
            raise ValueError(f"{key} is {short(content[key])}, fastmp computes {values[0]!r} in {model_type}")
    quantization_of(content)
    model = _fields(family, content)
    layers, longest = model["num_layers"], model["max_seq_len"]
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS or type(longest) is not int:
        raise ValueError(f"the layers must be 1 to {MAX_LAYERS}, the positions a number")
    model |= _window(model_type, family.window, content, layers, longest)
    if model.get("position") == "rope":
        model |= _rope(content, longest, family)
    if family.moe is not None:
        model["dense_layers"] = _dense_layers(content, layers)
    family.read(content, model)
    moe, coefficient = model.get("moe"), content.get("router_aux_loss_coef", family.aux_loss) or 0.0
    if moe is None or not coefficient:
        return model_type, model_from(model)
    config = model_from({**model, "moe": {**moe, "aux_loss": coefficient}})
    assert config.moe is not None
    aux_loss = _rounded(coefficient * config.moe.top_k / (layers - len(config.dense_layers)))
    return model_type, replace(config, moe=replace(config.moe, aux_loss=aux_loss))


def _fields(family: Conversion, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's [model] with the constants and the `fields` of a family."""
    model: dict[str, Any] = dict(family.model)
    if family.moe is not None:
        model["moe"] = dict(family.moe)
    if family.bert is not None:
        model["bert"] = dict(family.bert)
    if family.latent:
        model["latent"] = {}
    for key, (ours, default, choices) in family.fields.items():
        value = content.get(key, default)
        if value is ...:
            raise ValueError(f"{key} is missing")
        if choices is not None:
            same = _ACTIVATIONS.get(value, value) if isinstance(value, str) else None
            if same is None or same not in choices:
                raise ValueError(f"{key} is {short(value)}, fastmp computes {', '.join(choices)}")
            value = choices[same]
        table, _, name = ours.rpartition(".")
        (model[table] if table else model)[name] = value
    return model


def shortened(content: Mapping[str, Any], window: int, original: int, positions: int) -> dict[str, Any]:
    """Return config.json with shorter windows and original lengths; equal to `content` if it has neither.

    Args:
        content: the object in config.json.
        window: of sliding-window attention, at most.
        original: the positions of pretraining that rotary scaling extends, at most.
        positions: of the model, at most, if it has rotary scaling.
    """
    family = CONVERSIONS[content["model_type"]]
    found = {**family.defaults, **content}
    usual = None if family.window is None else family.window.size
    if (size := optional_int(found, "sliding_window", usual)) is not None:
        found["sliding_window"] = min(size, window)
    key = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
    table = dict(found.get(key) or {})
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", "linear") and "max_position_embeddings" in found:
        longest = original if kind == "dynamic" else positions
        found["max_position_embeddings"] = min(found["max_position_embeddings"], longest)
        if (size := optional_int(table, "original_max_position_embeddings", None)) is not None:
            found[key] = table | {"original_max_position_embeddings": min(size, original)}
    return dict(content) if found == {**family.defaults, **content} else found


def to_transformers(model_type: str, config: GPTConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for `config`, with parameters of `dtype` ("bfloat16")."""
    family, moe, bert = CONVERSIONS[model_type], config.moe, config.bert
    model = vars(config) | {
        "num_kv_heads": config.kv_heads, "head_size": config.head_dim, "ffn_hidden_size": config.ffn_size,
    }  # fmt: skip
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        model["max_seq_len"] = scaling.original_max_seq_len
    tables = {"": model, "bert": {} if bert is None else vars(bert)}
    tables["latent"] = {} if config.latent is None else vars(config.latent)
    tables["moe"] = {} if moe is None else vars(moe) | {"normalize_topk": moe.sum_is_one}
    found: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "torch_dtype": dtype,
    }
    for key, (ours, _, choices) in family.fields.items():
        table, _, name = ours.rpartition(".")
        value = tables[table].get(name)
        if choices is not None:
            value = next((theirs for theirs, own in choices.items() if own == value), None)
        found[key] = value
    found |= {key: values[0] for key, values in family.supported.items()}
    if family.window is not None:
        found |= _window_keys(family.window, config)
    if config.position == "rope":
        found |= {"rope_theta": config.rope_base, "rope_parameters": _rope_parameters(config)}
    if moe is not None and family.aux_loss is not None:
        with_experts = config.num_layers - len(config.dense_layers)
        found["router_aux_loss_coef"] = _rounded(moe.aux_loss * with_experts / moe.top_k)
    return found | family.write(config)


def family_of(config: GPTConfig) -> str:
    """Return the model type of the transformers family that computes the same function as `config`.

    MTP modules are not part of it: a family whose files have none is found where no other is.

    Raises:
        ValueError: there is no such family.
    """
    for model in dict.fromkeys((config, replace(config, mtp_depth=0))):
        for model_type, family in CONVERSIONS.items():
            own = model.moe is None, model.bert is None, model.latent is None
            if own == (family.moe is None, family.bert is None, not family.latent):
                try:
                    there = from_transformers(to_transformers(model_type, model, "float32"))[1]
                except ValueError:
                    continue
                if canonical_config(there) == canonical_config(model):
                    return model_type
    raise ValueError(
        f"no family of transformers computes this model; weights are written of {', '.join(CONVERSIONS)}"
    )


def _rounded(number: float) -> float:
    return float(f"{number:.12g}")


_ATTENTION = ("full_attention", "sliding_attention")


def _window(
    model_type: str,
    window: SlidingWindow | None,
    content: Mapping[str, Any],
    num_layers: int,
    max_seq_len: int,
) -> dict[str, Any]:
    """Return the sliding window and the layers without it, as entries of [model]; empty without a window.

    Raises:
        ValueError: the window is in some of the layers only, in a family that has it in all or none.
    """
    kinds = content.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(each in _ATTENTION for each in kinds)):
        raise ValueError(f"layer_types is {short(kinds)}, fastmp computes {' and '.join(_ATTENTION)}")
    usual = window or SlidingWindow(None)
    size = optional_int(content, "sliding_window", usual.size)
    first = optional_int(content, "max_window_layers", usual.first_layer) or 0
    if usual.opt_in and not content.get("use_sliding_window"):
        return {}
    if size is None or size >= max_seq_len:
        return {}
    if window is None:
        raise ValueError(f"sliding_window is {size}, fastmp computes no window in {model_type}")
    full = list(range(min(first, num_layers)))
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types is a list of {len(kinds)} for {num_layers} layers")
        full = [layer for layer, each in enumerate(kinds) if each == "full_attention"]
    if len(full) == num_layers:
        return {}
    if full and not window.per_layer:
        raise ValueError(
            f"sliding_window is that of {num_layers - len(full)} of {num_layers} layers, "
            f"fastmp has it in all of {model_type}"
        )
    return {"sliding_window": size, "full_attention_layers": full}


def _window_keys(window: SlidingWindow, config: GPTConfig) -> dict[str, Any]:
    """Return the keys of config.json that select sliding-window layers."""
    found: dict[str, Any] = {"sliding_window": config.sliding_window}
    if window.per_layer and not window.opt_in:  # transformers asks for a size also where no layer has it
        found = {"sliding_window": config.sliding_window or config.max_seq_len}
    if window.opt_in:
        if config.sliding_window is None:
            return {}
        found |= {"use_sliding_window": True, "max_window_layers": len(config.full_attention_layers)}
    if window.per_layer:
        found["layer_types"] = [_ATTENTION[layer.sliding_window is not None] for layer in config.layers]
    return found


_KINDS = next(each.metadata["choices"] for each in fields(RopeScaling) if each.name == "kind")
_SCALINGS = {  # {key of rope_parameters: our name}
    "original_max_position_embeddings": "original_max_seq_len",
    **{
        name: name
        for name in (
            *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"),
            *("attention_factor", "mscale_all_dim", "short_factor", "long_factor"),
        )
    },
}


def _rope(content: Mapping[str, Any], max_seq_len: int, family: Conversion) -> dict[str, Any]:
    """Return the rotary embedding's entries of [model].

    transformers 5 writes the table `rope_parameters`; `rope_theta` and `rope_scaling` of version 4 are read
    as well.
    """
    table = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(table, Mapping):
        raise ValueError(f"rope_parameters must be a table, got {short(table)}")
    given = {key: value for key, value in table.items() if value is not None}
    base = given.pop("rope_theta", content.get("rope_theta", family.rope_base))
    kind = given.pop("rope_type", given.get("type", "default"))
    given.pop("type", None)
    part = given.pop("partial_rotary_factor", content.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if part != 1.0 and not family.partial_rotary:
        raise ValueError(f"partial_rotary_factor is {short(part)}, this family turns whole heads")
    model: dict[str, Any] = {"rope_base": base, "rotary_fraction": part}
    mscale, of_all = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    unknown = sorted(set(given) - set(_SCALINGS))
    if kind not in ("default", *_KINDS) or unknown:
        what = f"has {', '.join(map(short, unknown))}" if unknown else f"is {short(kind)}"
        raise ValueError(f"rope_type {what}, fastmp computes default, {', '.join(_KINDS)}")
    if kind == "default":
        return model
    scaling = {"kind": kind, "original_max_seq_len": max_seq_len}
    scaling |= {_SCALINGS[key]: value for key, value in given.items()}
    original = scaling["original_max_seq_len"]
    if type(original) is not int or original < 1:
        raise ValueError(f"original_max_position_embeddings must be a positive number, got {short(original)}")
    if kind in ("yarn", "longrope") and "factor" not in scaling:
        scaling["factor"] = max(1.0, max_seq_len / original)
    needed = ("factor", *(("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()))
    if absent := [name for name in needed if name not in scaling]:
        raise ValueError(f"rope_type {kind!r} needs {' and '.join(absent)}")
    if kind == "yarn" and mscale and of_all and "attention_factor" not in scaling:
        high, low = (0.1 * each * math.log(scaling["factor"]) + 1.0 for each in (mscale, of_all))
        scaling["attention_factor"] = high / low
    if kind == "yarn" and of_all and family.latent:  # then scores are scaled as well
        scaling["mscale_all_dim"] = float(of_all)
    if kind == "dynamic":  # the positions of config.json are those of pretraining
        scaling["original_max_seq_len"] = max_seq_len
        model["max_seq_len"] = int(max_seq_len * float(scaling["factor"]))
    return model | {"rope_scaling": scaling}


def _rope_parameters(config: GPTConfig) -> dict[str, Any]:
    """Return the table `rope_parameters` of config.json."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rotary_fraction != 1.0:
        found["partial_rotary_factor"] = config.rotary_fraction
    if config.rope_scaling is None:
        return found
    used = config.rope_scaling.used
    used |= {name: list(value) for name, value in used.items() if isinstance(value, tuple)}  # as in JSON
    values = {theirs: used[ours] for theirs, ours in _SCALINGS.items() if used.get(ours) is not None}
    if used["kind"] == "dynamic":  # which has it in max_position_embeddings
        values.pop("original_max_position_embeddings")
    return found | {"rope_type": used["kind"]} | values


def _dense_layers(content: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the layers that have an MLP in place of experts."""
    first, step = (
        optional_int(content, "first_k_dense_replace", 0) or 0,
        optional_int(content, "decoder_sparse_step", 1),
    )
    alone = content.get("mlp_only_layers") or []
    if not isinstance(alone, list) or step is None or step < 1:
        raise ValueError(f"mlp_only_layers {short(alone)} or decoder_sparse_step {step} says no layers")
    return [layer for layer in range(num_layers) if layer < first or layer in alone or (layer + 1) % step]
