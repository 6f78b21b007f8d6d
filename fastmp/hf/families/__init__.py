"""Registry of transformers model families.

To add a family, write a `Family` in one of these modules, or in a new one, and list it in FAMILIES there;
tests/hf takes its cases from this registry.
"""

from __future__ import annotations

from fastmp.hf.families import bert, deepseek_like, gpt2, llama_like, mixtures
from fastmp.hf.families.family import Acceleration, Conversion, Family

__all__ = ["ACCELERATIONS", "CONVERSIONS", "FAMILIES", "Family"]

_MODULES = (gpt2, llama_like, mixtures, deepseek_like, bert)
FAMILIES: dict[str, Family] = {family.model_type: family for module in _MODULES for family in module.FAMILIES}
# by model type, the families that can be imported and exported, and those that `accelerate` takes
CONVERSIONS: dict[str, Conversion] = {
    name: family.conversion for name, family in FAMILIES.items() if family.conversion is not None
}
ACCELERATIONS: dict[str, Acceleration] = {
    name: family.acceleration for name, family in FAMILIES.items() if family.acceleration is not None
}
