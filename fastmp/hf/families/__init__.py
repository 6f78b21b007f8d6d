"""Registry of transformers model families, one module each.

To add a family, write a module with a `FAMILY` and list it here; tests/hf takes its cases from this registry.
"""

from __future__ import annotations

from fastmp.hf.families import (
    bert,
    deepseek_v2,
    deepseek_v3,
    dots1,
    glm4_moe,
    gpt2,
    gpt_oss,
    kimi_k2,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from fastmp.hf.families.family import Acceleration, Conversion, Family

__all__ = ["ACCELERATIONS", "CONVERSIONS", "FAMILIES", "Family"]

_MODULES = (
    gpt2,
    llama,
    mistral,
    qwen2,
    qwen3,
    mixtral,
    qwen3_moe,
    dots1,
    glm4_moe,
    gpt_oss,
    deepseek_v2,
    deepseek_v3,
    kimi_k2,
    bert,
)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
# by model type, the families that can be imported and exported, and those that `accelerate` takes
CONVERSIONS: dict[str, Conversion] = {
    name: family.conversion for name, family in FAMILIES.items() if family.conversion is not None
}
ACCELERATIONS: dict[str, Acceleration] = {
    name: family.acceleration for name, family in FAMILIES.items() if family.acceleration is not None
}
