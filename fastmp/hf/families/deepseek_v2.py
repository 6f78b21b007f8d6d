"""DeepSeek-V2: multi-head latent attention, experts chosen by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families import deepseek_like
from fastmp.hf.families.family import Family
from fastmp.hf.patches import ComplexLatentAttention, SoftmaxRouter

_METHODS = ("greedy", "group_limited_greedy")


def _read(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    deepseek_like.read(content, model)
    model["rope_interleaved"] = True
    method = content.get("topk_method", "greedy")
    if method not in _METHODS:
        raise ValueError(f"topk_method is {method!r}, fastmp computes {' and '.join(_METHODS)}")
    if method == "greedy":  # whatever groups there are
        model["moe"] |= {"num_groups": 1, "group_topk": 1}


def _write(config: GPTConfig) -> dict[str, Any]:
    assert config.moe is not None
    method = _METHODS[config.moe.num_groups > 1]
    return deepseek_like.write(config) | {"topk_method": method}


FAMILY = Family(
    "deepseek_v2",
    deepseek_like.conversion(
        "DeepseekV2ForCausalLM",
        read_keys=("topk_method",),
        moe={"score": "softmax"},
        supported={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
        },
        read=_read,
        write=_write,
    ),
    deepseek_like.acceleration("DeepseekV2", ComplexLatentAttention, SoftmaxRouter),
)
